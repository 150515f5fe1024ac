"""The four workloads of the position benchmarks, as lists of text lengths and image grids."""

from __future__ import annotations

from itertools import pairwise

from mmpos.segments.kinds import Grid, Text

Document = list[Text | Grid]


def workload(documents: int, tokens: int, images: int, side: int) -> list[Document]:
    """Documents of equal length with square images spread evenly between texts."""
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
    """How much documents are: tokens, images and documents."""
    parts = [part for document in documents for part in document]
    grids = [part for part in parts if isinstance(part, Grid)]
    tokens = sum(part.height * part.width if isinstance(part, Grid) else part.length for part in parts)
    return {"tokens": tokens, "images": len(grids), "documents": len(documents)}
