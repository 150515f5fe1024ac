"""Mistakes of placing: another scheme, other times, another advance after grids, grids as before merging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess
from mmpos.analysis.diagnosis.mistakes import (
    AdvancesByOne,
    AdvancesBySide,
    AdvancesByTokens,
    AdvancesToMaximum,
    Unmerged,
)
from mmpos.schemes import (
    SCHEMES,
    Grid2D,
    MRopeQwen25,
    MRopeTransformers,
    RopeTie,
    RopeTieFractional,
    RopeTieLcm,
    RopeTieV2,
    Scheme,
)
from mmpos.support.checks import INT32_MAX, IntArray

_MERGES = (2, 3, 4)

_VARIANTS: tuple[Scheme, ...] = (
    *(scheme() for scheme in SCHEMES.values()),
    *(scheme(axes=3) for scheme in (RopeTie, RopeTieFractional, RopeTieV2, RopeTieLcm)),
    RopeTieV2(rounding="floor"),
    *(Grid2D(order="merged", spatial_merge_size=side) for side in _MERGES),
    *(MRopeTransformers(tokens_per_second=rate) for rate in (1, 2, 4, 25)),
    *(MRopeQwen25(tokens_per_second=rate) for rate in (1, 4, 25)),
)

_ADVANCES = {
    "text after a grid goes on at the token's index, one id per patch: the delta is forgotten": AdvancesByTokens,
    "text after a grid goes on at the maximum of all ids plus one": AdvancesToMaximum,
    "text after a grid goes on after its longest side, as in M-RoPE": AdvancesBySide,
    "text after a grid goes on as if the grid took one id": AdvancesByOne,
}


def other_scheme(case: Case) -> Iterator[Guess]:
    """The ids of another scheme, or of the same with other parameters."""
    for scheme in sorted(_VARIANTS, key=lambda scheme: type(scheme) is not type(case.scheme)):
        ids = None if scheme == case.scheme else case.placed(scheme)
        if ids is not None:
            yield Guess(f"these are the ids of {scheme.label}", ids)


def other_times(case: Case) -> Iterator[Guess]:
    """Frames of videos at other times than theirs."""
    seconds = None if case.segments is None else case.segments.seconds_per_frame
    if case.segments is None or seconds is None:
        return
    for words, times in _times(seconds):
        ids = case.placed(segments=replace(case.segments, seconds_per_frame=times))
        if ids is not None:
            yield Guess(words, ids)


def wrong_advance(case: Case) -> Iterator[Guess]:
    """Grids in their place, and what comes after them not."""
    for words, mistake in _ADVANCES.items():
        ids = None if case.scheme is None else case.placed(mistake(case.scheme))
        if ids is not None:
            yield Guess(words, ids)


def unmerged(case: Case) -> Iterator[Guess]:
    """Grids of patches before merging, while tokens are those after it."""
    for side, whole in product(_MERGES, (False, True)):
        ids = None if case.scheme is None else case.placed(Unmerged(case.scheme, side, whole))
        what = "strides and ids after a grid" if whole else "ids after a grid"
        if ids is not None:
            yield Guess(f"spatial merging is forgotten: {what} are those of {side}x{side} times the patches", ids)


def _times(seconds: IntArray) -> Iterator[tuple[str, IntArray | None]]:
    """Mistakes about (2, segments) seconds per frame, and what they make of them; where none is given, none is made."""
    given = seconds[0] > 0
    yield "seconds_per_frame is forgotten: frames are one second apart", None
    yield "frames per second are taken for seconds per frame", np.where(given, seconds[::-1], seconds)
    halves = seconds * np.where(given, [[1], [2]], 1)
    if (halves <= INT32_MAX).all():
        yield "times are half of what they should be: temporal_patch_size is forgotten", halves
