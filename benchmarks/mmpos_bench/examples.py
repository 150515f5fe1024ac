"""Examples to train on whose images are known by size alone: evenly mixed documents, and a realistic mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.segments.kinds import Grid
from mmpos.sequence.builder import SequenceBuilder

__all__ = ["evenly", "labelled", "mix"]

_BUILDER = SequenceBuilder()


def labelled(key: str, parts: Sequence[object]) -> Example:
    """An example whose text is all trained on."""
    sequence = _BUILDER.build(list(parts))
    return Example(key, sequence, np.where(sequence.token_type_ids == 1, IGNORE_INDEX, sequence.input_ids))


def evenly(documents: int, tokens: int, images: int, side: int) -> list[Example]:
    """Documents of equal length with square images spread evenly between texts."""
    text = np.arange(tokens - images * (side * side + 2)) % 250
    parts = [part for piece in np.array_split(text, images + 1) for part in (piece, Grid(side, side))][:-1]
    return [labelled(f"d{i}", parts) for i in range(documents)]


def mix(documents: int, seed: int = 0) -> Iterator[Example]:
    """The realistic mix; every document is its own, and the same for the same seed.

    Text of log-normal length (median 500 tokens, sigma 1), cut at random places by 0 to 8 images (uniform) of 64 to
    1024 tokens (log-uniform, with two markers each).
    """
    rng = np.random.default_rng(seed)
    for i in range(documents):
        text = rng.integers(0, 250, max(1, int(rng.lognormal(np.log(500), 1.0))))
        tokens = np.exp(rng.uniform(np.log(64), np.log(1024), rng.integers(0, 9)))
        sides = [(int(n**0.5), int(n / int(n**0.5))) for n in tokens]
        cuts = np.sort(rng.integers(0, text.size + 1, len(sides)))
        parts: list[object] = [text[: cuts[0]] if sides else text]
        for (height, width), piece in zip(sides, np.split(text, cuts)[1:], strict=True):
            parts += [Grid(height, width), piece]
        yield labelled(f"m{i}", parts)
