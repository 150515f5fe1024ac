"""Train a small transformer with each scheme to name the colour to the right of, or below, the patch of colour c."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import cos, pi
from multiprocessing import get_context
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import mmpos
from mmpos.rotary import DevicePositions, Rotary, apply_rotary

IntArray = npt.NDArray[np.int64]
NONE, GUESS = "none", "(guessing among the other patches)"  # the row without rotations, and the last row of the table
PLACED = (  # schemes that differ on text and single images, in the order of the table
    *("flatten", "rows", "naive-2d", "rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope"),
    *("mrope-interleave-reset", "v2pe", "videorope", "vrope"),
)
# A document consists of filler words, an image, and questions of two words each: a direction and a colour. All patches
# of an image have different colours, and questions refer only to patches with a neighbour in that direction.
COLOURS, DIRECTIONS = 64, ("right", "below")  # the words; an image has at most COLOURS patches
FILLER_ID = COLOURS + len(DIRECTIONS)  # the last word, also used as padding
QUESTIONS, MOST_FILLER, BATCH = 8, 4, 32  # questions after an image, maximum filler before it, and images per step
LAYERS, HEADS, HEAD_DIM, HIDDEN = 2, 2, 32, 128
WIDTH, THETA = HEADS * HEAD_DIM, 100.0  # a small theta, since ids are small

# Ranges of height and width, starting at 2 so that patches have neighbours. If the two ranges differ, half of the
# images are transposed.
Sizes = tuple[tuple[int, int], tuple[int, int]]
SETS: Mapping[str, Sizes] = {"inside": ((2, 5), (2, 5)), "larger": ((6, 8), (6, 8)), "longer": ((2, 3), (9, 14))}
"""Test sets of images: of the trained sizes and of other sizes."""


@dataclass(frozen=True, eq=False)
class Quiz:
    """Batch of documents with questions, padded on the right to the longest document."""

    segments: mmpos.SegmentTable  # without padding
    patches: IntArray  # (batch,) number of patches of each image
    input_ids: IntArray  # (batch, length)
    asked: IntArray  # (batch, questions) column of the last word of each question, where the model answers
    directions: IntArray  # (batch, questions) indices into DIRECTIONS
    answers: IntArray  # (batch, questions) colours


def draw(sizes: Sizes, count: int, random: np.random.Generator) -> Quiz:
    """Draw images with random sizes and colours, and random questions about each image."""
    height, width = (random.integers(*ends, count, endpoint=True) for ends in sizes)
    transposed = random.random(count) < 0.5 * (sizes[0] != sizes[1])
    height, width = np.where(transposed, width, height), np.where(transposed, height, width)
    patches = height * width
    colours = np.argsort(random.random((count, COLOURS)), axis=1)
    directions = random.integers(len(DIRECTIONS), size=(count, QUESTIONS))
    row, col = (  # of patches with a neighbour: not in the last row for "below", not in the last column for "right"
        (random.random(directions.shape) * (side[:, None] - (directions == DIRECTIONS.index(name)))).astype(np.int64)
        for side, name in ((height, "below"), (width, "right"))
    )
    cell = row * width[:, None] + col
    answer = cell + np.where(directions == DIRECTIONS.index("right"), 1, width[:, None])

    before = random.integers(1, MOST_FILLER, count, endpoint=True)
    lengths = before + patches + 2 * QUESTIONS
    column = np.arange(lengths.max())
    input_ids = np.full((count, column.size), FILLER_ID, np.int64)
    in_image = (column >= before[:, None]) & (column < (before + patches)[:, None])
    input_ids[in_image] = colours[np.arange(COLOURS) < patches[:, None]]
    asked = (before + patches)[:, None] + 2 * np.arange(QUESTIONS) + 1
    np.put_along_axis(input_ids, asked - 1, COLOURS + directions, axis=1)
    np.put_along_axis(input_ids, asked, np.take_along_axis(colours, cell, axis=1), axis=1)

    grid_thw = np.stack([np.ones_like(height), height, width], axis=1)
    segments = mmpos.SegmentTable.from_spans(lengths, before, grid_thw, documents=np.arange(count))
    return Quiz(segments, patches, input_ids, asked, directions, np.take_along_axis(colours, answer, axis=1))


def held_out(images: int = 300) -> dict[str, Quiz]:
    """Draw the test images and questions, which do not depend on the scheme, the seed or the training data."""
    return {name: draw(SETS[name], images, np.random.default_rng((1, i))) for i, name in enumerate(SETS)}


class Block(nn.Module):
    """Pre-norm transformer block: causal attention and a feed-forward network, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor, positions: DevicePositions | Tensor | None, rotary: Rotary | None) -> Tensor:
        """Compute the (batch, seq, width) outputs of the block."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if positions is not None and rotary is not None:
            q, k = apply_rotary(q, k, positions, rotary, layout="bshd")
        # Padding is on the right, so causal attention excludes it.
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.net(self.norm2(x))


class Transformer(nn.Module):
    """Transformer that predicts colours; its initial parameters depend only on the seed, not on the scheme."""

    def __init__(self, scheme: str, seed: int) -> None:
        super().__init__()
        self.scheme, axes = scheme, 0 if scheme == NONE else mmpos.schemes.get_scheme(scheme).axes
        self.rotary = Rotary(HEAD_DIM, theta=THETA, axes=axes) if axes else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(FILLER_ID + 1, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COLOURS, bias=False)

    def forward(self, quiz: Quiz, positions: DevicePositions | Tensor | None = None) -> Tensor:
        """Compute (batch, questions, colours) logits in the columns ``asked``; None uses the scheme's positions."""
        if positions is None and self.rotary is not None:
            positions = DevicePositions.from_table(mmpos.place(quiz.segments, self.scheme).pad())
        x = self.embedding(torch.from_numpy(quiz.input_ids))
        for block in self.blocks:
            x = block(x, positions, self.rotary)
        due = torch.from_numpy(quiz.asked)[..., None].expand(-1, -1, x.shape[-1])
        logits: Tensor = self.head(self.norm(x.gather(1, due)))
        return logits


def train(scheme: str, seed: int, steps: int = 1500, images: int = 300) -> dict[str, Any]:
    """Train from scratch and test; equal arguments produce equal results, except for the CPU seconds."""
    began, threads = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(1)  # so that sums have a fixed order and several runs fit side by side
    model, random = Transformer(scheme, seed), np.random.default_rng((0, seed))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        quiz = draw(SETS["inside"], BATCH, random)
        logits = model(quiz)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(quiz.answers).flatten())
        optimizer.zero_grad()
        loss.backward()
        # The learning rate warms up linearly for a tenth of the steps and decays to zero along a cosine.
        share = min(10 * (step + 1) / steps, 1.0) * (0.5 + 0.5 * cos(pi * step / steps))
        optimizer.param_groups[0]["lr"] = 8e-3 * share
        optimizer.step()
    accuracy: dict[str, float] = {}
    for name, quiz in held_out(images).items():
        with torch.no_grad():
            correct = model(quiz).argmax(-1).numpy() == quiz.answers
        for i, direction in enumerate(DIRECTIONS):
            accuracy[f"{name}, {direction}"] = round(100 * float(correct[quiz.directions == i].mean()), 2)
    torch.set_num_threads(threads)
    seconds = round(time.process_time() - began, 1)
    return {"scheme": scheme, "seed": seed, "loss": round(loss.item(), 6), "accuracy": accuracy, "seconds": seconds}


def guess() -> dict[str, float]:
    """Compute the accuracy, in percent and by set, of random guesses among the image's other patches."""
    return {name: round(100 * float(np.mean(1 / (quiz.patches - 1))), 2) for name, quiz in held_out().items()}


def table(outcomes: Sequence[Mapping[str, Any]], guessed: Mapping[str, float]) -> str:
    """Write a Markdown table of accuracies in percent, with the mean and the range over seeds."""
    accuracies: dict[str, list[list[float]]] = {}
    for one in outcomes:
        accuracies.setdefault(one["scheme"], []).append(list(one["accuracy"].values()))
    rows = [["scheme", "seeds", *outcomes[0]["accuracy"]]]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    for name, percents in accuracies.items():
        spread = (f"{fmean(at):.0f} ({min(at):.0f}–{max(at):.0f})" for at in zip(*percents, strict=True))
        rows.append([name, f"{len(percents)}", *spread])
    rows.append([GUESS, "", *(f"{percent:.0f}" for percent in guessed.values() for _ in DIRECTIONS)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main(arguments: Sequence[str] | None = None, *toy: int) -> None:
    """Run all training runs, two at a time; ``toy`` overrides the steps and test images of ``train``."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_neighbours", description=__doc__)
    names = [NONE, *PLACED]
    parser.add_argument("--schemes", nargs="+", choices=names, default=names, metavar="NAME", help="schemes to train")
    parser.add_argument("--seeds", type=int, default=5, help="number of training runs per scheme")
    options = parser.parse_args(arguments)
    runs = [(scheme, seed) for seed in range(options.seeds) for scheme in options.schemes]
    outcomes: list[dict[str, Any]] = []
    # Spawn processes, because this process's threads do not survive a fork.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for outcome in pool.map(train, *zip(*((*run, *toy) for run in runs), strict=True)):
            print(f"{outcome['scheme']}, seed {outcome['seed']}: {outcome['seconds']} s", file=sys.stderr, flush=True)
            outcomes.append(outcome)
    print(table(outcomes, guess()))
