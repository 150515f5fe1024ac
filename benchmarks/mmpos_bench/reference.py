"""Ids by a loop over texts and images that shares nothing with the library: what every contestant must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.segments.kinds import Grid
from mmpos_bench.workloads import Document

__all__ = ["loop_ids"]

Ids = npt.NDArray[Any]


class _Loop(NamedTuple):
    """A scheme: its axes, and an image's ids counted from the last text id, and the ids it takes from text."""

    axes: int
    image: Callable[[Grid], tuple[Ids, int]]


def loop_ids(documents: list[Document], scheme: str) -> Ids:
    """(axes, tokens) float64 ids of packed documents of text and still images.

    Args:
        documents: the parts of each.
        scheme: "flatten", "rope-tie", "rope-tie-v2" or "mrope".
    """
    loop = _LOOPS[scheme]
    known: dict[Grid, tuple[Ids, int]] = {}
    blocks: list[Ids] = []
    for document in documents:
        last = -1
        for part in document:
            if isinstance(part, Grid):
                if part not in known:
                    known[part] = loop.image(part)
                block, advance = known[part]
                blocks.append(block + last)
                last += advance
            else:
                blocks.append(np.broadcast_to(np.arange(last + 1.0, last + 1 + part.length), (loop.axes, part.length)))
                last += part.length
    return np.concatenate(blocks, axis=1)


def _plane(grid: Grid) -> Ids:
    """(2, tokens) row and column of every patch, from zero."""
    return np.indices((grid.height, grid.width), dtype=np.float64).reshape(2, -1)


def _flatten(grid: Grid) -> tuple[Ids, int]:
    tokens = grid.height * grid.width
    return np.arange(1.0, tokens + 1)[None], tokens


def _tie(grid: Grid) -> tuple[Ids, int]:
    """Rows w + 1 apart and columns h + 1 apart, so that both fill the square up to the next text."""
    height, width = grid.height, grid.width
    return (_plane(grid) + 1) * [[width + 1.0], [height + 1.0]], (height + 1) * (width + 1) - 1


def _tie_v2(grid: Grid) -> tuple[Ids, int]:
    """One id apart around the middle of the ids that its tokens would have as text."""
    height, width = grid.height, grid.width
    middle = (height * width + 1) / 2
    return _plane(grid) - [[(height - 1) / 2], [(width - 1) / 2]] + middle, height * width


def _mrope(grid: Grid) -> tuple[Ids, int]:
    rows, columns = _plane(grid)
    return np.stack([np.zeros_like(rows), rows, columns]) + 1, max(grid.height, grid.width)


_LOOPS: Mapping[str, _Loop] = {
    "flatten": _Loop(1, _flatten),
    "rope-tie": _Loop(2, _tie),
    "rope-tie-v2": _Loop(2, _tie_v2),
    "mrope": _Loop(3, _mrope),
}
