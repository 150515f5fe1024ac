"""One training of the model under one scheme, and what it answers rightly inside and outside the trained sizes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from neighbours_model import Model, Shape
from neighbours_task import DIRECTIONS, Batch, Sizes, Task, draw_batch
from torch import Tensor, nn

import mmpos
from mmpos.errors import InvalidInputError
from mmpos.rotary import DevicePositions, Rotary

NONE = "none"
"""In the place of a scheme: no rotation at all."""


@dataclass(frozen=True)
class Setup:
    """Everything that an outcome depends on, but scheme and seed.

    Args:
        task: its words.
        shape: of the model.
        trained: sizes of the images that are trained on.
        outside: sizes of images that are not, by the name of the set.
        theta: base of the rotations; ids are small here.
        steps: of training.
        batch: images of a step.
        learning_rate: at its peak, a tenth of the way; it then falls to zero as a cosine.
        weight_decay: of AdamW.
        images: of each set that is judged by.
    """

    task: Task = field(default_factory=Task)
    shape: Shape = field(default_factory=Shape)
    trained: Sizes = field(default_factory=lambda: Sizes((2, 5), (2, 5)))
    outside: Mapping[str, Sizes] = field(
        default_factory=lambda: {"larger": Sizes((6, 8), (6, 8)), "longer": Sizes((2, 3), (9, 14), turned=True)}
    )
    theta: float = 100.0
    steps: int = 1500
    batch: int = 32
    learning_rate: float = 8e-3
    weight_decay: float = 0.01
    images: int = 300

    def __post_init__(self) -> None:
        most = max(sizes.height[1] * sizes.width[1] for sizes in self.sets.values())
        if most > self.task.colours:
            raise InvalidInputError(
                f"task.colours: got {self.task.colours}, want >= {most}, the largest image's patches"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @property
    def sets(self) -> dict[str, Sizes]:
        """The sizes of every set, that of the trained ones first."""
        return {"inside": self.trained, **self.outside}

    def held_out(self) -> dict[str, Batch]:
        """The images and questions to judge by: the same for all schemes and seeds, and drawn apart from training."""
        randoms = (np.random.default_rng((1, index)) for index in range(len(self.sets)))
        return {
            name: draw_batch(self.task, sizes, self.images, random)
            for (name, sizes), random in zip(self.sets.items(), randoms, strict=True)
        }


@dataclass(frozen=True)
class Outcome:
    """What one training came to.

    Args:
        scheme: its name, or NONE.
        seed: of parameters and training data.
        loss: of the last batch of training.
        accuracy: percent of right answers, by set and direction.
        seconds: of CPU.
    """

    scheme: str
    seed: int
    loss: float
    accuracy: Mapping[str, Mapping[str, float]]
    seconds: float = field(compare=False)


def model_for(setup: Setup, scheme: str, seed: int) -> Model:
    """An untrained model: the rotation is all in which those of two schemes differ."""
    axes = None if scheme == NONE else mmpos.schemes.get_scheme(scheme).axes
    rotary = None if axes is None else Rotary(setup.shape.head_dim, theta=setup.theta, axes=axes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(setup.shape, setup.task.vocabulary, setup.task.colours, rotary)


def answers(model: Model, batch: Batch, scheme: str) -> Tensor:
    """(batch, questions, colours) logits, with the positions that a scheme gives."""
    positions = None
    if scheme != NONE:
        positions = DevicePositions.from_table(mmpos.place(batch.segments, scheme).pad())
    logits: Tensor = model(torch.from_numpy(batch.input_ids), torch.from_numpy(batch.asked), positions)
    return logits


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: as many trainings as cores go on at a time, and sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
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
    """Percent of right answers to each kind of question."""
    right = answers(model, batch, scheme).argmax(-1).numpy() == batch.answers
    return {name: round(100 * float(right[batch.directions == i].mean()), 2) for i, name in enumerate(DIRECTIONS)}
