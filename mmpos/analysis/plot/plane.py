"""What there is to draw of one document: points of text and images in the plane of two ids, before any picture."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.positions.rows import FIRST_TOKEN, NEXT_POSITION
from mmpos.positions.table import PositionTable

Points = npt.NDArray[np.float64]  # (2, tokens): x right, y down

_COLUMN_ROW = ("column id", "row id (downwards, as in an image)")
_NAMES = {1: ("token", "position id"), 2: _COLUMN_ROW, 3: _COLUMN_ROW}


@dataclass(frozen=True, eq=False)
class Image:
    """The patches of one grid.

    Args:
        points: x and y of each token.
        sides: height and width in tokens, and the frames that are there.
        column: (dx, dy) from one column to the next.
        row: (dx, dy) from one row to the next.
        square: the id of the text right before and of the text right after, if both lie on the diagonal.
        gaps: the distance from the one to the first patch and from the last patch to the other, (row, column).
    """

    points: Points
    sides: tuple[int, int, int]
    column: Points
    row: Points
    square: tuple[float, float] | None
    gaps: tuple[tuple[Fraction, ...], ...]

    @property
    def gaps_in_words(self) -> str:
        """The gaps, once if they are equal; nothing if there are none."""
        if not self.gaps:
            return ""
        before, after = (f"({', '.join(map(str, gap))})" for gap in self.gaps)
        return f"gap {before} on both sides" if before == after else f"gaps {before} and {after}"

    @property
    def label(self) -> str:
        """Its sides and its gaps, for a legend."""
        height, width, frames = self.sides
        sides = f"{frames}×{height}×{width}" if frames > 1 else f"{height}×{width}"
        gaps = self.gaps_in_words
        # The legend is a narrow column.
        gaps = gaps if len(gaps) <= 28 else gaps.replace(") ", ")\n")
        return f"{sides}\n{gaps}" if gaps else sides

    @property
    def spacing(self) -> float:
        """Least distance between two neighbours, in ids."""
        height, width, _ = self.sides
        steps = [np.hypot(*step) for step, side in ((self.row, height), (self.column, width)) if side > 1]
        return float(min([step for step in steps if step > 0], default=1.0))

    @property
    def upright(self) -> bool:
        """Whether columns go right and rows go down, so that a picture can lie under the points."""
        return bool(self.column[0] > 0 and self.row[1] > 0 and self.column[1] == 0 and self.row[0] == 0)

    def thinned(self, every: int) -> Points:
        """Every n-th row and column, for grids too fine to draw; all points of an image cut in pieces."""
        height, width, frames = self.sides
        if self.points.shape[1] != frames * height * width:
            return self.points
        return self.points.reshape(2, frames, height, width)[:, :, ::every, ::every].reshape(2, -1)


@dataclass(frozen=True, eq=False)
class Plane:
    """One document.

    Args:
        names: of x and y.
        text: its points.
        images: in order; a grid that a scheme cuts into pieces gives several.
        end: (2, 1) where generation goes on, or (2, 0) if the scheme has no next position.
        diagonal: whether x and y are ids of one kind, so that text lies on the diagonal.
    """

    names: tuple[str, str]
    text: Points
    images: tuple[Image, ...]
    end: Points
    diagonal: bool

    @property
    def bounds(self) -> Points:
        """(2, 2) least and greatest x, least and greatest y; the same for both on a diagonal plane."""
        points = np.concatenate([self.text, *(image.points for image in self.images), self.end], axis=1)
        if not points.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])
        low, high = points.min(axis=1), points.max(axis=1)
        if self.diagonal:
            low[:], high[:] = low.min(), high.max()
        return np.stack([low, high], axis=1)


def read_plane(positions: PositionTable, document: int) -> Plane:
    """The plane of one document of a table."""
    first, length = int(positions.documents[FIRST_TOKEN, document]), int(positions.lengths[document])
    points = _points(positions.slice(first, first + length))
    next_position = int(positions.documents[NEXT_POSITION, document])
    resumable = positions.resumable[document]
    end = [length if positions.axes == 1 else next_position, next_position] if resumable else []
    end_point = np.array(end, np.float64).reshape(-1, 2).T
    ours = (positions.offset >= first) & (positions.offset < first + length)
    segments = [int(s) for s in np.flatnonzero(ours & ~positions.is_padding)]
    grid, lengths = positions.is_grid, positions.segment_lengths
    text, images = [np.zeros((2, 0))], []
    for k, s in enumerate(segments):
        a = int(positions.offset[s]) - first
        b = a + int(lengths[s])
        if not grid[s]:
            text.append(points[:, a:b])
            continue
        before = points[:, a - 1] if k and not grid[segments[k - 1]] else None
        after = points[:, b] if k + 1 < len(segments) and not grid[segments[k + 1]] else None
        if k + 1 == len(segments) and end:
            after = end_point[:, 0]
        images.append(_image(positions, s, points[:, a:b], before, after))
    names = _NAMES.get(positions.axes, ("id on axis 1", "id on axis 0 (downwards)"))
    return Plane(names, np.concatenate(text, axis=1), tuple(images), end_point, positions.axes > 1)


def _points(view: PositionTable) -> Points:
    if view.axes == 1:
        return np.concatenate([np.arange(view.num_tokens, dtype=np.float64)[None], view.dense(dtype=np.float64)])
    points: Points = view.dense(dtype=np.float64, axes=_drawn(view.axes))
    return points


def _drawn(axes: int) -> tuple[int, int]:
    """The axes that x and y are: column and row, or the first two of those that have no names."""
    return (2, 1) if axes == 3 else (1, 0)


def _image(positions: PositionTable, s: int, points: Points, before: Points | None, after: Points | None) -> Image:
    denominator = int(positions.denominator[s])
    height, width = int(positions.height[s]), int(positions.width[s])

    def step(part: npt.NDArray[Any], tokens: int) -> Points:
        values = part[:, s] / denominator
        return np.array([tokens, values[0]] if positions.axes == 1 else values[list(_drawn(positions.axes))])

    square: tuple[float, float] | None = None
    gaps: tuple[tuple[Fraction, ...], ...] = ()
    # A square has its corners on the diagonal; schemes that put text elsewhere have none.
    if positions.axes > 1 and before is not None and after is not None and _equal(before) and _equal(after):
        square = float(before[0]), float(after[0])
        gaps = tuple(
            tuple(Fraction(float(gap)).limit_denominator(denominator) for gap in sides[::-1])
            for sides in (points.min(axis=1) - before, after - points.max(axis=1))
        )
    frames = -(-points.shape[1] // (height * width))
    column, row = step(positions.step_col, 1), step(positions.step_row, width)
    return Image(points, (height, width, frames), column, row, square, gaps)


def _equal(point: Points) -> bool:
    return bool(point[0] == point[1])
