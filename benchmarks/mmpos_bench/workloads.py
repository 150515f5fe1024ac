"""Documents of the position benchmarks, and their ids by a loop that shares nothing with the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.segments.kinds import Grid, Text

Document = list[Text | Grid]


def workload(documents: int, tokens: int, images: int, side: int) -> list[Document]:
    """Make documents of equal length with square images spread evenly between texts."""
    text = tokens - images * side * side
    cuts = [text * i // (images + 1) for i in range(images + 2)]
    lengths = [stop - start for start, stop in pairwise(cuts)]
    document: Document = [Text(lengths[0])]
    for length in lengths[1:]:
        document += [Grid(side, side), Text(length)]
    return [document] * documents


WORKLOADS: dict[str, tuple[str, list[Document]]] = {
    "a": ("1 × 4k tokens, 4 images of 24×24", workload(1, 4096, 4, 24)),
    "b": ("32 × 8k tokens, 16 images of 16×16 each", workload(32, 8192, 16, 16)),
    "c": ("1 × 128k tokens, 200 images of 16×16", workload(1, 131072, 200, 16)),
    "d": ("1 × 8k tokens of text", workload(1, 8192, 0, 1)),
}


def counts(documents: list[Document]) -> dict[str, int]:
    """Count tokens, images and documents."""
    parts = [part for document in documents for part in document]
    grids = [part for part in parts if isinstance(part, Grid)]
    tokens = sum(part.height * part.width if isinstance(part, Grid) else part.length for part in parts)
    return {"tokens": tokens, "images": len(grids), "documents": len(documents)}


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
