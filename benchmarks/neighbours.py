"""Train a small transformer with each scheme to name the colour to the right of, or below, the patch of colour c.

python benchmarks/neighbours.py                                       every scheme, five seeds, two at a time
python benchmarks/neighbours.py --json                                also write results/ and the plot of the page
python benchmarks/neighbours.py --schemes rope-tie mrope --seeds 3    selected schemes and three seeds

With --json, training runs whose results are already in the file are skipped, so an interrupted run can be resumed.
After changing the code, delete the file first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import cos, fsum, pi
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pages import RESULTS, kept_figures
from torch import Tensor, nn

import mmpos
from mmpos.analysis.plot.canvas import FAINT, canvas, line_style, quiet_axes
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos.support.checks import IntArray
from mmpos.support.files import write_text
from mmpos_bench.machine import stamp
from mmpos_bench.results import Rows, json_with_rows, markdown
from mmpos_bench.timing import one_thread

PICTURE = Path(__file__).parents[1] / "docs" / "experiment.png"
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


@one_thread()  # one thread per training run, so that sums have a fixed order and several runs fit side by side
def train(scheme: str, seed: int, steps: int = 1500, images: int = 300) -> dict[str, Any]:
    """Train from scratch and test; equal arguments produce equal results, except for the CPU seconds."""
    began = time.process_time()
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
    seconds = round(time.process_time() - began, 1)
    return {"scheme": scheme, "seed": seed, "loss": round(loss.item(), 6), "accuracy": accuracy, "seconds": seconds}


def guess() -> dict[str, float]:
    """Compute the accuracy, in percent and by set, of random guesses among the image's other patches."""
    return {name: round(100 * float(np.mean(1 / (quiz.patches - 1))), 2) for name, quiz in held_out().items()}


def percents(kept: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float64]]:
    """Return accuracies in percent by scheme as (seeds, sets · directions) arrays."""
    cells: dict[str, list[list[float]]] = {}
    for one in kept["outcomes"]:
        cells.setdefault(one["scheme"], []).append(list(one["accuracy"].values()))
    return {scheme: np.array(rows) for scheme, rows in cells.items()}


def table(kept: Mapping[str, Any]) -> Rows:
    """Return a table of accuracies in percent, with the mean and the range over seeds."""
    rows = [["scheme", "seeds", *kept["outcomes"][0]["accuracy"]]]
    for name, percent in percents(kept).items():
        spread = (f"{fsum(at) / len(at):.0f} ({at.min():.0f}–{at.max():.0f})" for at in percent.T)
        rows.append([name, f"{len(percent)}", *spread])
    return [*rows, [GUESS, "", *(f"{percent:.0f}" for percent in kept["guess"].values() for _ in DIRECTIONS)]]


def picture(kept: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per set, with means as points, ranges as lines, and the accuracy of guessing as a dashed line."""
    schemes = percents(kept)
    with canvas(path, 8.0, 0.26 * len(schemes) + 1.3) as figure:
        panels = figure.subplots(1, len(kept["guess"]), sharey=True)
        for n, (panel, (name, guessed)) in enumerate(zip(panels, kept["guess"].items(), strict=True)):
            for i, direction in enumerate(DIRECTIONS):
                cells = np.array([percent[:, 2 * n + i] for percent in schemes.values()])
                mean, rows = cells.mean(1), np.arange(len(cells)) + (i - 0.5) * 0.36
                ends = mean - cells.min(1), cells.max(1) - mean
                panel.errorbar(mean, rows, xerr=ends, fmt="os"[i], color=line_style(i)["color"], label=direction)
            panel.axvline(guessed, color=FAINT, linestyle="--", linewidth=1, label="a guess")
            panel.set_title(f"{name} the trained sizes" if name == "inside" else f"{name} images", loc="left")
            panel.set(xlim=(-4, 104), xlabel="correct answers, %", ylim=(len(schemes) - 0.4, -0.6))
            panel.set(yticks=range(len(schemes)), yticklabels=list(schemes))
            quiet_axes(panel)
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False, fontsize=9
        )


def main(arguments: Sequence[str] | None = None, *toy: int) -> None:
    """Run the missing training runs, two at a time; ``toy`` overrides the steps and test images of ``train``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [NONE, *PLACED]
    parser.add_argument("--schemes", nargs="+", choices=names, default=names, metavar="NAME", help="schemes to train")
    parser.add_argument("--seeds", type=int, default=5, help="number of training runs per scheme")
    parser.add_argument("--json", action="store_true", help="write the figures to results/ and draw the plot")
    options = parser.parse_args(arguments)

    machine, command = stamp("default"), " ".join(["benchmarks/neighbours.py", *sys.argv[1:]])
    path = RESULTS / f"neighbours-{machine.name}.json"
    outcomes = [one for kept in kept_figures(path.name) if options.json for one in kept["outcomes"]]
    kept = {"command": command, "machine": asdict(machine), "guess": guess(), "outcomes": outcomes}
    done = {(one["scheme"], one["seed"]) for one in outcomes}
    runs = [(scheme, seed) for seed in range(options.seeds) for scheme in options.schemes]
    missing = [run for run in runs if run not in done]
    # Spawn processes, because this process's threads do not survive a fork.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for outcome in pool.map(train, *zip(*((*run, *toy) for run in missing), strict=True)) if missing else ():
            print(f"{outcome['scheme']}, seed {outcome['seed']}: {outcome['seconds']} s", file=sys.stderr, flush=True)
            outcomes.append(outcome)
            if options.json:
                write_text(path, json_with_rows(kept) + "\n")
    print(markdown(table(kept)))
    if options.json:
        picture(kept, PICTURE)


if __name__ == "__main__":
    main()
