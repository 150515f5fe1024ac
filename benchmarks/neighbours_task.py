"""Images of coloured patches, and questions after them: which colour is right of, or below, the patch of colour c?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import mmpos
from mmpos.errors import InvalidInputError

IntArray = npt.NDArray[np.int64]

DIRECTIONS = ("right", "below")
"""Kinds of questions, in the order of their words."""


@dataclass(frozen=True)
class Task:
    """The sizes of the task, and the numbers of its words.

    A document is filler words, an image, and questions of two words each, a direction and a colour. Every patch of an
    image has another colour, and only patches with a neighbour in that direction are asked for.

    Args:
        colours: that there are; an image has at most as many patches.
        questions: after an image.
        filler: most words before an image; at least one.
    """

    colours: int = 64
    questions: int = 8
    filler: int = 4

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
    """A range of image sizes, both ends included; at least 2, so that there are neighbours.

    Args:
        height: least and most rows.
        width: least and most columns.
        turned: whether half of the images have the two exchanged.
    """

    height: tuple[int, int]
    width: tuple[int, int]
    turned: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in (("height", self.height), ("width", self.width)):
            if not 2 <= least <= most:
                raise InvalidInputError(f"{name}: got {least} to {most}, want at least 2, and the least first")

    def draw(self, count: int, random: np.random.Generator) -> tuple[IntArray, IntArray]:
        """(count,) heights and widths."""
        height = random.integers(*self.height, count, endpoint=True)
        width = random.integers(*self.width, count, endpoint=True)
        turn = random.random(count) < 0.5 * self.turned
        return np.where(turn, width, height), np.where(turn, height, width)


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents padded on the right to the longest.

    Args:
        segments: what stands where, without padding.
        patches: (batch,) of each image.
        input_ids: (batch, length).
        asked: (batch, questions) column of the last word of each question, where its answer is due.
        directions: (batch, questions) indexes of DIRECTIONS.
        answers: (batch, questions) colours.
    """

    segments: mmpos.SegmentTable
    patches: IntArray
    input_ids: IntArray
    asked: IntArray
    directions: IntArray
    answers: IntArray


def draw_batch(task: Task, sizes: Sizes, count: int, random: np.random.Generator) -> Batch:
    """Images of random sizes and colours, and random questions about each."""
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
