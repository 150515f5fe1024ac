"""Documents for the position benchmarks, with ids computed by a loop that is independent of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmpos.segments.kinds import Grid, Text

Document = list[Text | Grid]
Ids = npt.NDArray[np.float64]


def workload(documents: int, tokens: int, images: int, side: int) -> list[Document]:
    """Build documents of equal length with evenly spaced square images."""
    text = tokens - images * side * side
    cuts = [text * i // (images + 1) for i in range(images + 2)]
    first, *lengths = [stop - start for start, stop in pairwise(cuts)]
    document: Document = [Text(first)]
    for length in lengths:
        document += [Grid(side, side), Text(length)]
    return [document] * documents


SMALL: dict[str, list[Document]] = {
    "64 tokens of text": workload(1, 64, 0, 1),
    "1,024 tokens, 2 images of 16×16": workload(1, 1024, 2, 16),
    "4,096 tokens, 4 images of 24×24": workload(1, 4096, 4, 24),
}


def tokens_of(part: Text | Grid) -> int:
    """Return the number of tokens in a text, image or video."""
    return part.frames * part.height * part.width if isinstance(part, Grid) else part.length


def counts(documents: list[Document]) -> dict[str, int]:
    """Count tokens, images and documents."""
    parts = [part for document in documents for part in document]
    images = sum(isinstance(part, Grid) for part in parts)
    return {"tokens": sum(map(tokens_of, parts)), "images": images, "documents": len(documents)}


def loop_ids(documents: list[Document], scheme: str) -> Ids:
    """Compute the ids of packed documents with text and still images.

    Args:
        documents: the parts of each document.
        scheme: "rope-tie", "mrope" or "flux" (images without reference images).

    Returns:
        (axes, tokens) ids.
    """
    axes, image, text_advances = _LOOPS[scheme]
    cached: dict[Grid, tuple[Ids, int]] = {}
    blocks: list[Ids] = []
    for document in documents:
        last = -1
        for part in document:
            if isinstance(part, Grid):
                if part not in cached:
                    cached[part] = image(part)
                block, advance = cached[part]
                blocks.append(block + last)
                last += advance
            elif text_advances:
                blocks.append(np.broadcast_to(np.arange(last + 1.0, last + 1 + part.length), (axes, part.length)))
                last += part.length
            else:
                blocks.append(np.zeros((axes, part.length)))
    return np.concatenate(blocks, axis=1)


def _plane(grid: Grid) -> Ids:
    """Return (2, tokens) rows and columns of all patches, starting at 0."""
    return np.indices((grid.height, grid.width), dtype=np.float64).reshape(2, -1)


def _tie(grid: Grid) -> tuple[Ids, int]:
    """Return ids with rows w + 1 apart and columns h + 1 apart, so that both axes span all ids up to the next text."""
    down, right = grid.width + 1.0, grid.height + 1.0
    return (_plane(grid) + 1) * [[down], [right]], int(down * right) - 1


def _mrope(grid: Grid) -> tuple[Ids, int]:
    return np.insert(_plane(grid), 0, 0, axis=0) + 1, max(grid.height, grid.width)


def _latent(grid: Grid) -> tuple[Ids, int]:
    """Return frames, rows and columns starting at 0, regardless of preceding parts."""
    return np.indices((grid.frames, grid.height, grid.width), dtype=np.float64).reshape(3, -1) + 1, 0


# By scheme: the number of axes, a function that returns an image's ids relative to the last text id and its advance,
# and whether text ids advance rather than stay at 0.
_LOOPS: Mapping[str, tuple[int, Callable[[Grid], tuple[Ids, int]], bool]] = {
    "rope-tie": (2, _tie, True),
    "mrope": (3, _mrope, True),
    "flux": (3, _latent, False),
}
