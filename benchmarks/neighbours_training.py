"""The experiment of `neighbours`: images of coloured patches and questions, a small transformer, and its training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import mmpos
from mmpos.errors import InvalidInputError
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos_bench.timing import one_thread

IntArray = npt.NDArray[np.int64]

DIRECTIONS = ("right", "below")
"""Kinds of questions, in the order of their words."""


@dataclass(frozen=True)
class Task:
    """The sizes of the task, and the numbers of its words.

    A document is filler words, an image, and questions of two words each, a direction and a colour. Every patch of an
    image has another colour, and only patches with a neighbour in that direction are asked for.
    """

    colours: int = 64  # that there are; an image has at most as many patches
    questions: int = 8  # after an image
    filler: int = 4  # most words before an image; at least one

    @property
    def vocabulary(self) -> int:
        """The colours, which patches and questions share, the directions, and filler, which is padding too."""
        return self.colours + len(DIRECTIONS) + 1

    @property
    def filler_id(self) -> int:
        """The last one."""
        return self.vocabulary - 1


@dataclass(frozen=True)
class Sizes:
    """A range of image sizes, both ends included; at least 2, so that there are neighbours."""

    height: tuple[int, int]
    width: tuple[int, int]
    turned: bool = False  # whether half of the images have the two exchanged

    def __post_init__(self) -> None:
        for name, (least, most) in (("height", self.height), ("width", self.width)):
            if not 2 <= least <= most:
                raise InvalidInputError(f"{name}: got {least} to {most}, want at least 2, and the least first")

    def draw(self, count: int, random: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw (count,) heights and widths."""
        height = random.integers(*self.height, count, endpoint=True)
        width = random.integers(*self.width, count, endpoint=True)
        turn = random.random(count) < 0.5 * self.turned
        return np.where(turn, width, height), np.where(turn, height, width)


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents padded on the right to the longest."""

    segments: mmpos.SegmentTable  # without padding
    patches: IntArray  # (batch,) of each image
    input_ids: IntArray  # (batch, length)
    asked: IntArray  # (batch, questions) column of the last word of each question, where its answer is due
    directions: IntArray  # (batch, questions) indexes of DIRECTIONS
    answers: IntArray  # (batch, questions) colours


def draw_batch(task: Task, sizes: Sizes, count: int, random: np.random.Generator) -> Batch:
    """Draw images of random sizes and colours, and random questions about each."""
    height, width = sizes.draw(count, random)
    patches = height * width
    colours = np.argsort(random.random((count, task.colours)), axis=1)
    directions = random.integers(len(DIRECTIONS), size=(count, task.questions))
    row, col = (
        (random.random(directions.shape) * (side[:, None] - (directions == axis))).astype(np.int64)
        for side, axis in ((height, DIRECTIONS.index("below")), (width, DIRECTIONS.index("right")))
    )
    cell = row * width[:, None] + col
    answer = cell + np.where(directions == DIRECTIONS.index("right"), 1, width[:, None])

    before = random.integers(1, task.filler, count, endpoint=True)
    lengths = before + patches + 2 * task.questions
    column = np.arange(lengths.max())
    input_ids = np.full((count, column.size), task.filler_id, np.int64)
    in_image = (column >= before[:, None]) & (column < (before + patches)[:, None])
    input_ids[in_image] = colours[np.arange(task.colours) < patches[:, None]]
    asked = (before + patches)[:, None] + 2 * np.arange(task.questions) + 1
    np.put_along_axis(input_ids, asked - 1, task.colours + directions, axis=1)
    np.put_along_axis(input_ids, asked, np.take_along_axis(colours, cell, axis=1), axis=1)

    grid_thw = np.stack([np.ones_like(height), height, width], axis=1)
    segments = mmpos.SegmentTable.from_spans(lengths, before, grid_thw, documents=np.arange(count))
    return Batch(segments, patches, input_ids, asked, directions, np.take_along_axis(colours, answer, axis=1))


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    layers: int = 2  # of attention and a feed-forward net
    heads: int = 2
    head_dim: int = 32
    hidden: int = 128  # channels inside the feed-forward nets

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention over what came before, then a feed-forward net, each added to its normalised input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.net = nn.Sequential(nn.Linear(width, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, width))

    def forward(self, x: Tensor, positions: DevicePositions | None, rotary: Rotary | None) -> Tensor:
        """Map (batch, seq, width) to the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if positions is not None and rotary is not None:
            q, k = apply_rotary(q, k, positions, rotary, layout="bshd")
        # Padding stands on the right, so causal attention keeps it from every token.
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.net(self.norm2(x))


class Model(nn.Module):
    """A transformer that answers with colours; the numbers drawn for its parameters are the same for every rotation."""

    def __init__(self, shape: Shape, vocabulary: int, colours: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, colours, bias=False)

    def forward(self, input_ids: Tensor, asked: Tensor, positions: DevicePositions | None) -> Tensor:
        """Compute (batch, questions, colours) logits in the asked columns; without a rotation no positions are read."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, positions, self.rotary)
        due = asked[..., None].expand(-1, -1, x.shape[-1])
        logits: Tensor = self.head(self.norm(x.gather(1, due)))
        return logits


NONE = "none"
"""In the place of a scheme: no rotation at all."""


@dataclass(frozen=True)
class Setup:
    """Everything that an outcome depends on, but scheme and seed."""

    task: Task = field(default_factory=Task)
    shape: Shape = field(default_factory=Shape)
    trained: Sizes = field(default_factory=lambda: Sizes((2, 5), (2, 5)))
    outside: Mapping[str, Sizes] = field(  # sizes that are not trained on, by the name of the set
        default_factory=lambda: {"larger": Sizes((6, 8), (6, 8)), "longer": Sizes((2, 3), (9, 14), turned=True)}
    )
    theta: float = 100.0  # ids are small here
    steps: int = 1500
    batch: int = 32  # images of a step
    learning_rate: float = 8e-3  # at its peak, a tenth of the way; it then falls to zero as a cosine
    weight_decay: float = 0.01  # of AdamW
    images: int = 300  # of each set that is judged by

    def __post_init__(self) -> None:
        most = max(sizes.height[1] * sizes.width[1] for sizes in self.sets.values())
        if most > self.task.colours:
            raise InvalidInputError(
                f"task.colours: got {self.task.colours}, want >= {most}, the largest image's patches"
            )

    def to_dict(self) -> dict[str, Any]:
        """Make the dictionary that JSON gives back."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @property
    def sets(self) -> dict[str, Sizes]:
        """The sizes of every set, that of the trained ones first."""
        return {"inside": self.trained, **self.outside}

    def held_out(self) -> dict[str, Batch]:
        """Draw the images and questions to judge by, the same for all schemes and seeds, and apart from training."""
        return {
            name: draw_batch(self.task, sizes, self.images, np.random.default_rng((1, index)))
            for index, (name, sizes) in enumerate(self.sets.items())
        }


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    scheme: str  # or NONE
    seed: int  # of parameters and training data
    loss: float  # of the last batch of training
    accuracy: Mapping[str, Mapping[str, float]]  # percent of correct answers, by set and direction
    seconds: float = field(compare=False)  # of CPU


def model_for(setup: Setup, scheme: str, seed: int) -> Model:
    """Make an untrained model: the rotation is all in which those of two schemes differ."""
    axes = None if scheme == NONE else mmpos.schemes.get_scheme(scheme).axes
    rotary = None if axes is None else Rotary(setup.shape.head_dim, theta=setup.theta, axes=axes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(setup.shape, setup.task.vocabulary, setup.task.colours, rotary)


def answers(model: Model, batch: Batch, scheme: str) -> Tensor:
    """Compute (batch, questions, colours) logits, with the positions that a scheme gives."""
    positions = None
    if scheme != NONE:
        positions = DevicePositions.from_table(mmpos.place(batch.segments, scheme).pad())
    logits: Tensor = model(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.asked), positions)
    return logits


@one_thread()  # as many trainings as cores go on at a time, and sums have one order
def train(setup: Setup, scheme: str, seed: int) -> Outcome:
    """Train from scratch, and judge; the same arguments give the same outcome on the same machine."""
    began = time.process_time()
    model, random = model_for(setup, scheme, seed), np.random.default_rng((0, seed))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=setup.weight_decay, fused=True)
    for step in range(setup.steps):
        batch = draw_batch(setup.task, setup.trained, setup.batch, random)
        loss = nn.functional.cross_entropy(
            answers(model, batch, scheme).flatten(0, 1), torch.from_numpy(batch.answers).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = setup.learning_rate * _share(step, setup.steps)
        optimizer.step()
    accuracy = {name: judge(model, batch, scheme) for name, batch in setup.held_out().items()}
    return Outcome(scheme, seed, round(loss.item(), 6), accuracy, round(time.process_time() - began, 1))


def _share(step: int, steps: int) -> float:
    warm = steps / 10
    return min((step + 1) / warm, 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


@torch.no_grad()
def judge(model: Model, batch: Batch, scheme: str) -> dict[str, float]:
    """Count percent of correct answers to each kind of question."""
    right = answers(model, batch, scheme).argmax(-1).numpy() == batch.answers
    return {name: round(100 * float(right[batch.directions == i].mean()), 2) for i, name in enumerate(DIRECTIONS)}
