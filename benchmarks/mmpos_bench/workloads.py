"""Documents of the position benchmarks, and their ids by a loop that shares nothing with the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mmpos.segments.kinds import Grid, Text

Document = list[Text | Grid]
Ids = npt.NDArray[np.float64]


def workload(documents: int, tokens: int, images: int, side: int) -> list[Document]:
    """Make documents of equal length with square images spread evenly between texts."""
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

WORKLOADS: dict[str, list[Document]] = {
    "a: 1 × 4k tokens, 4 images of 24×24": workload(1, 4096, 4, 24),
    "b: 32 × 8k tokens, 16 images of 16×16 each": workload(32, 8192, 16, 16),
    "c: 1 × 128k tokens, 200 images of 16×16": workload(1, 131072, 200, 16),
    "d: 1 × 8k tokens of text": workload(1, 8192, 0, 1),
}


def tokens_of(part: Text | Grid) -> int:
    """Count the tokens of a text or a still image."""
    return part.height * part.width if isinstance(part, Grid) else part.length


def counts(documents: list[Document]) -> dict[str, int]:
    """Count tokens, images and documents."""
    parts = [part for document in documents for part in document]
    images = sum(isinstance(part, Grid) for part in parts)
    return {"tokens": sum(map(tokens_of, parts)), "images": images, "documents": len(documents)}


def loop_ids(documents: list[Document], scheme: str) -> Ids:
    """Number packed documents of text and still images.

    Args:
        documents: the parts of each.
        scheme: "rope-tie", "rope-tie-v2" or "mrope".

    Returns:
        (axes, tokens).
    """
    axes, image = _LOOPS[scheme]
    known: dict[Grid, tuple[Ids, int]] = {}
    blocks: list[Ids] = []
    for document in documents:
        last = -1
        for part in document:
            if isinstance(part, Grid):
                if part not in known:
                    known[part] = image(part.height, part.width)
                block, advance = known[part]
                blocks.append(block + last)
                last += advance
            else:
                blocks.append(np.broadcast_to(np.arange(last + 1.0, last + 1 + part.length), (axes, part.length)))
                last += part.length
    return np.concatenate(blocks, axis=1)


def _plane(height: int, width: int) -> Ids:
    """(2, tokens) row and column of every patch, from zero."""
    return np.indices((height, width), dtype=np.float64).reshape(2, -1)


def _tie(height: int, width: int) -> tuple[Ids, int]:
    """Rows w + 1 apart and columns h + 1 apart, so that both fill the square up to the next text."""
    return (_plane(height, width) + 1) * [[width + 1.0], [height + 1.0]], (height + 1) * (width + 1) - 1


def _tie_v2(height: int, width: int) -> tuple[Ids, int]:
    """One id apart around the middle of the ids that its tokens would have as text."""
    middle = (height * width + 1) / 2
    return _plane(height, width) - [[(height - 1) / 2], [(width - 1) / 2]] + middle, height * width


def _mrope(height: int, width: int) -> tuple[Ids, int]:
    return np.insert(_plane(height, width), 0, 0, axis=0) + 1, max(height, width)


# The axes of a scheme, and an image's ids counted from the last text id, with the ids that it takes from text.
_LOOPS: Mapping[str, tuple[int, Callable[[int, int], tuple[Ids, int]]]] = {
    "rope-tie": (2, _tie),
    "rope-tie-v2": (2, _tie_v2),
    "mrope": (3, _mrope),
}
