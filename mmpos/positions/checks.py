"""What makes arrays from outside a placed table: every check that expansion relies on, in O(segments)."""

from __future__ import annotations

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.columns import (
    AXES,
    DELTA,
    DENOMINATOR,
    FIRST_SEGMENT,
    FIRST_TOKEN,
    HEIGHT,
    NEXT_POSITION,
    NO_POSITION,
    OFFSET,
    SKIP,
    WIDTH,
)
from mmpos.support.checks import INT32_MAX, INT32_MIN, IntArray, first_bad

MAX_AXES = 16
"""Most axes of a table from outside."""

MAX_NUMERATOR = 2.0**62
"""What a numerator may not exceed on its way to an id."""


def check_table(table: IntArray, documents: IntArray, num_tokens: int, fractional: bool) -> None:
    """Raise for the first thing that makes these arrays no placed table; see Columns for what they are."""
    rows, segments = table.shape
    if (rows - AXES) % 4 or not 1 <= (rows - AXES) // 4 <= MAX_AXES:
        raise InvalidInputError(f"table: got {rows} rows, want 5 + 4·axes for 1 to {MAX_AXES} axes")
    lengths = _lengths(table, num_tokens)
    first_bad("table.segment_lengths", lengths, maximum=INT32_MAX + 1)  # so that no sum with them wraps around
    first_bad("table.skip", table[SKIP], minimum=0, maximum=INT32_MAX)
    for name, row in (("height", HEIGHT), ("width", WIDTH), ("denominator", DENOMINATOR)):
        first_bad(f"table.{name}", table[row], minimum=1, maximum=INT32_MAX)
    if not fractional:
        first_bad("table.denominator", table[DENOMINATOR], maximum=1)
    last = table[SKIP] + lengths - 1
    first_bad("table.skip + tokens - 1", last, maximum=INT32_MAX)
    _check_ids(table, last, fractional)
    _check_documents(table, documents, num_tokens, segments)


def _lengths(table: IntArray, num_tokens: int) -> IntArray:
    ends = np.append(table[OFFSET], num_tokens)
    # Offsets within bounds, so that differences cannot wrap around.
    first_bad("table.offset", table[OFFSET], minimum=0, maximum=num_tokens)
    if ends[0] != 0:
        raise InvalidInputError(f"table.offset[0]: got {ends[0]}, want 0, the first token")
    lengths = np.diff(ends)
    if (lengths < 1).any():
        s = int((lengths < 1).argmax())
        raise InvalidInputError(f"table.offset[{s}]: got {ends[s]} before {ends[s + 1]}, want at least one token")
    return lengths


def _check_ids(table: IntArray, last: IntArray, fractional: bool) -> None:
    """Ids within int32, and numerators within 62 bits, in floats since integers could wrap."""
    if not table.shape[1]:
        return
    tall = table[HEIGHT].astype(np.float64) * table[WIDTH]
    most = np.stack([last // tall, np.minimum(table[HEIGHT] - 1, last // table[WIDTH]), table[WIDTH] - 1])
    parts = table[AXES:].reshape(-1, 4, table.shape[1]).astype(np.float64)
    origin, moves = parts[:, 0], parts[:, 1:] * most
    size = np.abs(origin) + np.abs(moves).sum(axis=1)
    if size.max() > MAX_NUMERATOR:
        s = int(size.max(axis=0).argmax())
        raise LimitExceededError(f"table[:, {s}]: got numerators up to {size.max():.3g}, want at most 2**62")
    lowest = (origin + np.minimum(moves, 0).sum(axis=1)) / table[DENOMINATOR]
    highest = (origin + np.maximum(moves, 0).sum(axis=1)) / table[DENOMINATOR]
    bad = ((lowest < INT32_MIN) | (highest > INT32_MAX)).any(axis=0)
    if bad.any():
        s = int(bad.argmax())
        got = f"{lowest[:, s].min():.0f} to {highest[:, s].max():.0f}"
        raise LimitExceededError(f"table[:, {s}]: got ids from {got}, want ids within int32")


def _check_documents(table: IntArray, documents: IntArray, num_tokens: int, segments: int) -> None:
    if documents.shape[0] != 4:
        raise InvalidInputError(f"documents: got shape {documents.shape}, want (4, n)")
    first = documents[FIRST_SEGMENT]
    first_bad("documents.first_segment", first, minimum=0, maximum=segments)
    if not first.size:
        if segments:
            raise InvalidInputError(f"documents: got none, want the documents of {segments} segments")
        return
    if first[0] != 0 or (np.diff(first) < 0).any():
        raise InvalidInputError("documents.first_segment: got other than ascending from 0, want ascending from 0")
    tokens = np.append(table[OFFSET], num_tokens)[first]
    wrong = documents[FIRST_TOKEN] != tokens
    if wrong.any():
        d = int(wrong.argmax())
        got = documents[FIRST_TOKEN, d]
        raise InvalidInputError(f"documents.first_token[{d}]: got {got}, want {tokens[d]}, the offset of its segment")
    _check_deltas(documents)
    check_next(documents[NEXT_POSITION])


def _check_deltas(documents: IntArray) -> None:
    delta, none = documents[DELTA], documents[NEXT_POSITION:] == NO_POSITION
    apart = none[0] != none[1]
    if apart.any():
        d = int(apart.argmax())
        got = f"{documents[NEXT_POSITION, d]} with delta {delta[d]}"
        raise InvalidInputError(f"documents.next_position[{d}]: got {got}, want {NO_POSITION} for both or neither")
    beyond = ~none[1] & (np.abs(delta.astype(np.float64)) > MAX_NUMERATOR)
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(f"documents.delta[{d}]: got {delta[d]}, want within 2**62")


def check_next(next_positions: IntArray) -> None:
    """Raise for the first next position, other than NO_POSITION, that is not an id or right after the last one."""
    beyond = (next_positions < INT32_MIN) & (next_positions != NO_POSITION) | (next_positions > INT32_MAX + 1)
    if beyond.any():
        d = int(beyond.argmax())
        raise LimitExceededError(f"documents[{d}]: got next position {next_positions[d]}, want from -2**31 to 2**31")
