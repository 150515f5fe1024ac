"""What makes arrays a segment table, and parts documents; each check says what came instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.segments.parts import GRID, PAD, TEXT, Grid, Text
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, shown

Flags = npt.NDArray[np.bool_]


def foreign_part(documents: Sequence[Sequence[Text | Grid]]) -> InvalidInputError:
    """The error for the first thing that is not a list of Text and Grid."""
    for d, document in enumerate(documents if isinstance(documents, Sequence) else ()):
        if isinstance(document, Text | Grid | str) or not isinstance(document, Sequence):
            return InvalidInputError(f"documents[{d}]: got {type(document).__name__}, want a list of Text and Grid")
        for i, part in enumerate(document):
            if type(part) is not Text and type(part) is not Grid:
                return InvalidInputError(f"documents[{d}][{i}]: got {type(part).__name__}, want Text or Grid")
    return InvalidInputError(f"documents: got {type(documents).__name__}, want a list of documents")


def check_segments(
    kind: npt.NDArray[np.uint8], extents: IntArray, offsets: IntArray, seconds: IntArray | None, separator: Flags | None
) -> None:
    """Raise for the first thing that makes these arrays no segment table; see SegmentTable for what they are."""
    if seconds is None and native.core is not None and native.core.sound(kind, extents, offsets, separator):
        return
    if kind.ndim != 1 or extents.shape != (3, kind.size):
        raise InvalidInputError(f"extents: got shape {extents.shape}, want (3, {kind.size}) for {kind.size} segments")
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != kind.size:
        raise InvalidInputError(f"segment_offsets: got {shown(offsets)}, want 0 first and {kind.size} last")
    empty = offsets[1:] <= offsets[:-1]
    if empty.any():
        raise InvalidInputError(f"documents[{int(empty.argmax())}]: got an empty document, want at least one segment")
    if kind.max(initial=0) > PAD:
        raise InvalidInputError(f"kind[{int(kind.argmax())}]: got {kind.max()}, want {TEXT}, {GRID} or {PAD}")
    for name, array, shape in (
        ("row_separator", separator, kind.shape),
        ("seconds_per_frame", seconds, (2, kind.size)),
    ):
        if array is not None and array.shape != shape:
            raise InvalidInputError(f"{name}: got shape {array.shape}, want {shape}")
    if seconds is not None:
        first_bad("seconds_per_frame", seconds, minimum=0, maximum=INT32_MAX)
        first_bad("seconds_per_frame[1]", seconds[1], minimum=1)
    if separator is not None and (separator & (kind != GRID)).any():
        segment = int((separator & (kind != GRID)).argmax())
        raise InvalidInputError(f"row_separator[{segment}]: got True, want False outside grids")
    if kind.size:
        _check_extents(kind, extents, separator)


def _check_extents(kind: npt.NDArray[np.uint8], extents: IntArray, row_separator: Flags | None) -> None:
    lowest = extents.min()
    if lowest < 1:
        axis, segment = divmod(int(extents.argmin()), kind.size)
        raise InvalidInputError(f"extents[{axis}, {segment}]: got {lowest}, want >= 1")
    tall = extents[0].astype(np.float64) * extents[1]
    if (tall[kind != GRID] != 1).any():
        segment = int(((tall != 1) & (kind != GRID)).argmax())
        got = extents[:, segment].tolist()
        raise InvalidInputError(f"extents[:, {segment}]: got {got}, want [1, 1, length] outside grids")
    tokens = tall * extents[2] if row_separator is None else tall * extents[2] + tall * row_separator
    if tokens.max() > INT32_MAX:
        segment = int(tokens.argmax())
        raise LimitExceededError(
            f"segment {segment}: got {tokens[segment]:.0f} tokens, want at most 2**31 - 1 in one segment"
        )
