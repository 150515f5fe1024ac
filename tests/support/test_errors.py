"""Bad input: every refusal is an mmpos error that names the argument, the value and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from oracle import placed
from refusals import is_sentence

from mmpos import (
    SCHEMES,
    Grid,
    InvalidInputError,
    LimitExceededError,
    MmposError,
    SegmentTable,
    Text,
    UnsupportedError,
    place,
)
from mmpos.errors import ServiceError
from mmpos.schemes import (
    V2PE,
    Grid2D,
    MRopeQwen25,
    MRopeTransformers,
    RopeTie,
    RopeTieFractional,
    RopeTieV2,
    VideoRope,
    XDRope,
)
from mmpos.support import checks

Refusal = tuple[Callable[[], object], str]

from_documents: Callable[[Any], SegmentTable] = SegmentTable.from_documents
from_arrays: Callable[..., SegmentTable] = SegmentTable.from_arrays
grid: Callable[..., Grid] = Grid
SEGMENTS = from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
POSITIONS: Any = place(SEGMENTS)
HALVES, ROWS = place(SEGMENTS, "rope-tie-v2"), place(SEGMENTS, "rows")
NOTHING = place(from_documents([]))
READ_ONLY = np.zeros((2, 15), np.int32)
READ_ONLY.flags.writeable = False


def label(value: object) -> str:
    """Return the start of the message as the id of a test."""
    return value[:60] if isinstance(value, str) else "call"


def refused(error: type[Exception], call: Callable[[], object]) -> str:
    """Check that a call raises an error of exactly this type, and return the message."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def test_the_exceptions_have_documented_base_classes() -> None:
    assert InvalidInputError.__mro__[1:3] == (MmposError, ValueError)
    assert UnsupportedError.__mro__[1:5] == (MmposError, NotImplementedError, RuntimeError, ValueError)
    assert LimitExceededError.__mro__[1:3] == (MmposError, ValueError)
    assert ServiceError.__mro__[1:3] == (MmposError, Exception)  # not the request's fault


CHECKS: list[Refusal] = [
    (lambda: checks.integer("n", True), "n: got True, want an integer"),
    (lambda: checks.integer("n", np.True_), "n: got np.True_, want an integer"),
    (lambda: checks.integer("n", "3"), "n: got '3', want an integer"),
    (lambda: checks.integer("n", -1, minimum=0), "n: got -1, want >= 0"),
    (lambda: checks.integer("n", 2**70, maximum=9), f"n: got {2**70}, want <= 9"),
    (lambda: checks.integer("n", 10**5000, maximum=9), "n: got a number of more than 4300 digits, want <= 9"),
    (lambda: checks.int_array("a", [0.0], (None,)), "a: got dtype float64, want integers"),
    (lambda: checks.int_array("a", [True], (None,)), "a: got dtype bool, want integers"),
    (lambda: checks.int_array("a", [0, 1], (3,)), "a: got shape (2,), want (3,)"),
    (lambda: checks.int_array("a", 0, (None, 3)), "a: got shape (), want (n, 3)"),
    (
        lambda: checks.int_array("a", np.array([2**63], np.uint64), (None,)),
        f"a: got {2**63}, want integers within int64",
    ),
    (
        lambda: checks.int_array("a", np.ma.masked_array([0, 3], [False, True]), (None,)),
        "a: got a masked array, want an array without a mask, which would be lost",
    ),
    (lambda: checks.per_document("d", 0.0, 2, minimum=0), "d: got 0.0, want an integer"),
    (lambda: checks.per_document("d", [0], 2, minimum=0), "d: got shape (1,), want (2,)"),
    (lambda: checks.per_document("d", [0, -1], 2, minimum=0), "d[1]: got -1, want >= 0"),
]
"""Checks of each kind of argument; the lists below test that every argument is checked."""


def test_ragged_lists_are_refused_as_arrays() -> None:
    message = refused(InvalidInputError, lambda: checks.int_array("a", [[1], [1, 2]], (None,)))
    assert message.startswith("a: got list, want an array of numbers on the host")


PARTS: list[Refusal] = [
    (lambda: Text(0), "Text.length: got 0, want >= 1"),
    (lambda: Text(2**31), "Text.length: got 2147483648, want <= 2147483647"),
    (lambda: grid(0, 3), "Grid.height: got 0, want >= 1"),
    (lambda: grid(2, 3, frames=0), "Grid.frames: got 0, want >= 1"),
    (lambda: grid(2, 3, row_separator=1), "Grid.row_separator: got 1, want True or False"),
    (
        lambda: grid(1, 24, 24),
        "Grid: got 3 positional values (1, 24, 24), want (height, width); "
        "for (frames, height, width) use Grid.from_thw",
    ),
    (lambda: Grid.from_thw((24, 24)), "thw: got (24, 24), want (frames, height, width)"),
    (lambda: Grid.from_thw(24), "thw: got 24, want (frames, height, width)"),  # type: ignore[arg-type]
    (
        lambda: grid(1, 1, seconds_per_frame=Fraction(-(10**5000))),
        "Grid.seconds_per_frame: got a number of more than 4300 digits, want > 0 (a float: >= 1e-06)",
    ),
    (lambda: grid(1, 1, seconds_per_frame=0), "Grid.seconds_per_frame: got 0, want > 0 (a float: >= 1e-06)"),
    (lambda: grid(1, 1, seconds_per_frame=1e-9), "Grid.seconds_per_frame: got 1e-09, want > 0 (a float: >= 1e-06)"),
    (lambda: grid(1, 1, seconds_per_frame=float("nan")), "Grid.seconds_per_frame: got nan, want a number of seconds"),
    (lambda: grid(1, 1, seconds_per_frame=True), "Grid.seconds_per_frame: got True, want a number of seconds"),
    (lambda: grid(1, 1, seconds_per_frame="2"), "Grid.seconds_per_frame: got '2', want a number of seconds"),
]

DOCUMENTS: list[Refusal] = [
    (lambda: from_documents([[Text(1)], []]), "documents[1]: got an empty document, want at least one segment"),
    (
        lambda: from_documents([[Text(1), [Grid(1, 1)]]]),
        "documents[0][1]: got list, want one of Text, Audio, Grid, Clip, Thumbnail, Tile",
    ),
    (
        lambda: from_documents([Text(1)]),
        "documents[0]: got Text, want a list of Text, Audio, Grid, Clip, Thumbnail, Tile",
    ),
    (lambda: from_documents(Text(1)), "documents: got Text, want a list of documents"),
]

ONE = np.ones((3, 1), np.int64)
KIND, OFFSETS = np.array([1], np.uint8), np.array([0, 1], np.int64)

ARRAYS: list[Refusal] = [
    (lambda: from_arrays([256], ONE, [0, 1]), "kind[0]: got 256, want <= 6"),
    (lambda: from_arrays([-1], ONE, [0, 1]), "kind[0]: got -1, want >= 0"),
    (lambda: from_arrays([0], ONE[:2], [0, 1]), "extents: got shape (2, 1), want (3, n)"),
    (lambda: from_arrays([0, 0], ONE, [0, 1]), "extents: got shape (3, 1), want (3, 2) for 2 segments"),
    (lambda: from_arrays([1], 0 * ONE, [0, 1]), "extents[0, 0]: got 0, want >= 1"),
    (
        lambda: from_arrays([0], ONE * [[1], [2], [3]], [0, 1]),
        "extents[:, 0]: got [1, 2, 3], want [1, 1, length] outside grids",
    ),
    (
        lambda: from_arrays([1, 0], np.array([[1, 2], [2, 1], [3, 4]]), [0, 2]),
        "extents[:, 1]: got [2, 1, 4], want [1, 1, length] outside grids",
    ),
    (lambda: from_arrays([0], ONE, [0, 2]), "segment_offsets: got [0, 2], want 0 first and 1 last"),
    (
        lambda: from_arrays([0, 0], np.ones((3, 2), int), [0, 3, 2]),
        "documents[1]: got an empty document, want at least one segment",
    ),
    (
        lambda: from_arrays([0], ONE, [0, 1], row_separator=[True]),
        "row_separator[0]: got True, want False outside grids",
    ),
    (lambda: from_arrays([1], ONE, [0, 1], row_separator=[1]), "row_separator: got dtype int64, want bool"),
    (lambda: from_arrays([1], ONE, [0, 1], seconds_per_frame=[[1], [0]]), "seconds_per_frame[1][0]: got 0, want >= 1"),
    (
        lambda: from_arrays([1], ONE, [0, 1], seconds_per_frame=[[-1], [1]]),
        "seconds_per_frame[0, 0]: got -1, want >= 0",
    ),
    (
        lambda: from_arrays([1], ONE, [0, 1], seconds_per_frame=[[1, 1], [1, 1]]),
        "seconds_per_frame: got shape (2, 2), want (2, 1)",
    ),
]

direct: Callable[..., SegmentTable] = SegmentTable
DIRECT: list[Refusal] = [
    (lambda: direct([1], ONE, OFFSETS), "kind: got list, want an array of uint8; from_arrays converts other arrays"),
    (
        lambda: direct(KIND, ONE.astype(np.int8), OFFSETS),
        "extents: got int8, want an array of int64; from_arrays converts other arrays",
    ),
    (
        lambda: direct(KIND, ONE, OFFSETS, None, KIND),
        "row_separator: got uint8, want an array of bool; from_arrays converts other arrays",
    ),
]

PLACING: list[Refusal] = [
    (
        lambda: place(SEGMENTS, "mropee"),
        f"scheme: got 'mropee' (did you mean 'mrope'?), want a Scheme or one of {', '.join(SCHEMES)}",
    ),
    (lambda: place([[Text(1)]]), "segments: got list, want a SegmentTable"),  # type: ignore[arg-type]
    (lambda: place(SEGMENTS, start=True), "start: got True, want an integer"),
    (lambda: place(SEGMENTS, start=2**31), "start: got 2147483648, want <= 2147483647"),
    (lambda: place(SEGMENTS, start=-(2**31) - 1), "start: got -2147483649, want >= -2147483648"),
    (lambda: place(SEGMENTS, start=[0, 1, 2]), "start: got shape (3,), want (2,)"),
    (lambda: place(SEGMENTS, start=[0, 2**31]), "start[1]: got 2147483648, want <= 2147483647"),
    (lambda: place(SEGMENTS, strict=1), "strict: got 1, want True or False"),  # type: ignore[arg-type]
    (lambda: RopeTie(axes=4), "RopeTie.axes: got 4, want 2 or 3"),
    (lambda: RopeTieFractional(axes=1), "RopeTieFractional.axes: got 1, want 2 or 3"),
    (lambda: RopeTieV2(rounding="ceil"), "RopeTieV2.rounding: got 'ceil', want one of None, 'floor'"),  # type: ignore[arg-type]
    (lambda: V2PE(stride=0), "V2PE.stride: got 0, want >= 1"),
    (lambda: V2PE(stride=257), "V2PE.stride: got 257, want <= 256"),
    (lambda: VideoRope(delta=0), "VideoRope.delta: got 0, want >= 1"),
    (lambda: XDRope(axes=2), "XDRope.axes: got 2, want >= 3"),
    (lambda: XDRope(counting="pack"), "XDRope.counting: got 'pack', want one of 'document', 'batch'"),  # type: ignore[arg-type]
    (lambda: XDRope(first_image=-1), "XDRope.first_image: got -1, want >= 0"),
    (lambda: Grid2D(order="z"), "Grid2D.order: got 'z', want one of 'raster', 'merged'"),  # type: ignore[arg-type]
    (lambda: Grid2D(spatial_merge_size=0), "Grid2D.spatial_merge_size: got 0, want >= 1"),
    (lambda: Grid2D(axes=4), "Grid2D.axes: got 4, want <= 3"),
    (lambda: Grid2D(first=2), "Grid2D.first: got 2, want <= 1"),
    (lambda: MRopeTransformers(tokens_per_second=0), "MRopeTransformers.tokens_per_second: got 0, want >= 1"),
    (
        lambda: MRopeQwen25(tokens_per_second=2.5),  # type: ignore[arg-type]
        "MRopeQwen25.tokens_per_second: got 2.5, want an integer or Fraction > 0",
    ),
]

DENSE: list[Refusal] = [
    (
        lambda: POSITIONS.dense(dtype=np.int16),
        "dtype: got dtype int16, want int32, int64, float64 for ids of scheme 'rope-tie'",
    ),
    (lambda: HALVES.dense(dtype=np.int32), "dtype: got dtype int32, want float64 for ids of scheme 'rope-tie-v2'"),
    (
        lambda: HALVES.dense(out=np.zeros((2, 15), np.int32)),
        "out: got dtype int32, want float64 for ids of scheme 'rope-tie-v2'",
    ),
    (
        lambda: POSITIONS.dense(out=np.zeros((2, 14), np.int32)),
        "out: got shape (2, 14), want an array of shape (2, 15)",
    ),
    (
        lambda: POSITIONS.dense(out=np.zeros((2, 15), np.int32), axes=(0,)),
        "out: got shape (2, 15), want an array of shape (1, 15)",
    ),
    (lambda: POSITIONS.dense(out=[[0] * 15] * 2), "out: got list, want an array of shape (2, 15)"),
    (lambda: POSITIONS.dense(out=READ_ONLY), "out: got a read-only array, want a writeable one"),
    (
        lambda: POSITIONS.dense(out=np.zeros((2, 15), np.int64), dtype=np.int32),
        "dtype: got int32 with out of int64, want equal dtypes, or only one of the two",
    ),
    (lambda: POSITIONS.dense(axes=(2,)), "axes: got (2,), want integers from 0 to 1"),
    (lambda: POSITIONS.dense(axes=(0.0,)), "axes: got (0.0,), want integers from 0 to 1"),
    (lambda: POSITIONS.dense(axes=1), "axes: got 1, want integers from 0 to 1"),
]

VIEWS: list[Refusal] = [
    (lambda: POSITIONS.take([3], [1]), "stops[0]: got 1, want >= starts[0] = 3"),
    (lambda: POSITIONS.take([0, 3], [1, 16]), "stops[1]: got 16, want <= 15"),
    (lambda: POSITIONS.take([16], [16]), "starts[0]: got 16, want <= 15"),
    (lambda: POSITIONS.take([-1], [2]), "starts[0]: got -1, want >= 0"),
    (lambda: POSITIONS.take([11, 0], [12, 1]), "starts[1]: got 0, in an earlier document than the previous range"),
    (lambda: POSITIONS.slice(3, 1), "stop: got 1, want >= 3"),
    (lambda: POSITIONS.slice(0, 16), "stop: got 16, want <= 15"),
    (lambda: POSITIONS.slice(16, 16), "start: got 16, want <= 15"),
    (lambda: POSITIONS.window([2], [0], [1]), "documents[0]: got 2, want <= 1"),
    (lambda: POSITIONS.window([0], [-1], [1]), "starts[0]: got -1, want >= 0"),
    (lambda: POSITIONS.window([0], [0], [-1]), "lengths[0]: got -1, want >= 0"),
    (lambda: POSITIONS.decode([1, -1]), "steps[1]: got -1, want >= 0"),
    (lambda: POSITIONS.decode(2**31), "steps: got 2147483648, want <= 2147483647"),
    (
        lambda: POSITIONS.shard(0, 2),
        "documents[0]: got 11 tokens, want a multiple of 4 for world_size=2 and layout='zigzag'; "
        "pad first: positions.pad(12).shard(…)",
    ),
    (
        lambda: POSITIONS.shard_indices(1, 3, "contiguous"),
        "documents[0]: got 11 tokens, want a multiple of 3 for world_size=3 and layout='contiguous'; "
        "pad first: positions.pad(12).shard(…)",
    ),
    (
        lambda: POSITIONS.shard(0, 2, "zigzag-sequence"),
        "positions: got 15 tokens in all, want a multiple of 4 for world_size=2 and layout='zigzag-sequence'; "
        "pad the last document first: positions.pad([*positions.lengths[:-1], 5]).shard(…)",
    ),
    (
        lambda: POSITIONS.shard_indices(0, 2, "contiguous-sequence"),
        "positions: got 15 tokens in all, want a multiple of 2 for world_size=2 and layout='contiguous-sequence'; "
        "pad the last document first: positions.pad([*positions.lengths[:-1], 5]).shard(…)",
    ),
    (lambda: POSITIONS.shard(2, 2), "rank: got 2, want <= 1"),
    (lambda: POSITIONS.shard(-1, 2), "rank: got -1, want >= 0"),
    (lambda: POSITIONS.shard(0, 0), "world_size: got 0, want >= 1"),
    (
        lambda: POSITIONS.shard(0, 1, "ring"),
        "layout: got 'ring', want one of 'zigzag', 'contiguous', 'zigzag-sequence', 'contiguous-sequence'",
    ),
    (lambda: POSITIONS.pad(5), "length: got 5, want >= 11, the length of document 0"),
    (lambda: POSITIONS.pad([11, 3]), "length: got 3, want >= 4, the length of document 1"),
    (lambda: POSITIONS.pad(-1), "length: got -1, want >= 0"),
    (lambda: POSITIONS.pad(20, "up"), "side: got 'up', want one of 'left', 'right'"),
    (lambda: POSITIONS.padded([11, 12]), "length: got [11, 12], want an integer"),
    (lambda: POSITIONS.explain(15), "token: got 15, want <= 14"),
    (lambda: POSITIONS.explain(0, from_documents([[Text(3)]])), "segments: got 3 tokens, want 15"),
    (
        lambda: POSITIONS.describe(0, [[Text(15)]]),
        "segments: got list, want a SegmentTable, as returned by SegmentTable.from_documents",
    ),
]

INT32, TERMS = "want ids within int32", "want a numerator and a denominator below 2**31"
LONG, LATE = "tokens, want at most 2**31 - 1 in one segment", "want at most 2**31 - 1"
LAST = 2**31 - 1
HUGE_FRAMES = [Grid(1, 1, frames=LAST, seconds_per_frame=LAST)]
LIMITS: list[Refusal] = [
    (lambda: from_documents([[Text(1), Grid(2**16, 2**15)]]), f"segment 1: got {2**31} {LONG}"),
    (lambda: from_documents([[Grid(2**16, 2**15 - 1, row_separator=True)]]), f"segment 0: got {2**31} {LONG}"),
    (
        lambda: from_arrays([1], ONE * (2**63 - 1), [0, 1], row_separator=[True]),
        f"segment 0: got {2.0**63 * 2.0**63 * 2.0**63:.0f} {LONG}",
    ),
    (
        lambda: from_arrays([1], [[1], [1], [2**63 - 1]], [0, 1], row_separator=[True]),
        f"segment 0: got {2**63} {LONG}",
    ),
    (lambda: placed([Text(2)], "flatten", LAST), f"documents[0], tokens 0 to 1: got ids up to {2**31}, {INT32}"),
    (
        lambda: placed([Text(LAST), Text(1), Text(3)], "flatten"),
        f"documents[0], tokens 2147483648 to 2147483650: got ids up to 2147483650, {INT32}",
    ),
    (
        lambda: placed([Grid(3, 3)], "videorope", -(2**31)),
        f"documents[0], tokens 0 to 8: got ids down to -2147483649, {INT32}",
    ),
    (
        lambda: placed([Text(1), Grid(30000, 30000)], "rope-tie", 2**31 - 9),
        f"documents[0], tokens 1 to 900000000: got ids up to 3047513639, {INT32}",
    ),
    (
        lambda: placed([Text(2), Grid(1, 1, frames=4, seconds_per_frame=2**29)], "mrope-qwen2.5"),
        f"documents[0], tokens 4 to 4: got ids up to 2147483650, {INT32}",
    ),
    (
        lambda: placed([Grid(1, 1, frames=LAST, seconds_per_frame=1)], MRopeQwen25(tokens_per_second=3)),
        f"mrope-qwen2.5: got a last frame 6442450938 ids after the first, {INT32}",
    ),
    (
        lambda: placed(HUGE_FRAMES, MRopeQwen25(tokens_per_second=LAST)),
        f"mrope-qwen2.5: got frame · seconds · tokens_per_second beyond 2**62, {INT32}",
    ),
    (
        lambda: placed([Grid(46340, 46341)], "rope-tie-fractional"),
        "documents[0], tokens 0 to 2147441939: got denominator 2147534622, want below 2**31",
    ),
    (lambda: placed([Text(1)], "flatten", LAST).decode(), f"documents[0]: got id {2**31}, {LATE}"),
    (
        lambda: place(from_documents([[Text(1)]] * 2), start=[0, 2**31 - 9]).decode(20),
        f"documents[1]: got id 2147483659, {LATE}",
    ),
    (lambda: grid(1, 1, seconds_per_frame=10**400), f"Grid.seconds_per_frame: got {10**400}, {TERMS}"),
    (lambda: grid(1, 1, seconds_per_frame=1e300), f"Grid.seconds_per_frame: got 1e+300, {TERMS}"),
    (lambda: grid(1, 1, seconds_per_frame=Fraction(1, 2**31)), f"Grid.seconds_per_frame: got 1/{2**31}, {TERMS}"),
    (
        lambda: MRopeQwen25(tokens_per_second=2**31),
        f"MRopeQwen25.tokens_per_second: got {2**31}, want terms below 2**31",
    ),
]

NO_END = (
    "{}: got document {} of {}, whose end is not one whole id, "
    "want a whole id; place it together with the tokens to come"
)
UNSUPPORTED: list[Refusal] = [
    (
        lambda: placed([Grid(1, 1), Text(1)], "grid-2d"),
        "documents[0][1]: got text, want grids only in scheme 'grid-2d'",
    ),
    (
        lambda: placed([Text(2), Grid(3, 2)], Grid2D(first=1)),
        "grid-2d: got text of 2 tokens, want class tokens, each a Text(1)",
    ),
    (
        lambda: placed([Grid(3, 2)], Grid2D(order="merged", spatial_merge_size=2)),
        "grid-2d: got a grid whose sides are not divisible by spatial_merge_size=2, want whole blocks",
    ),
    (lambda: place(SEGMENTS, "rows", [0, 1]), "start: got one per document, want one integer: rows cannot be resumed"),
    (
        lambda: place(from_documents([[Grid(1, 1)]]), "grid-2d", [3]),
        "start: got one per document, want one integer: grid-2d cannot be resumed",
    ),
    (lambda: ROWS.next_positions, NO_END.format("next_positions", 0, "rows")),
    (lambda: ROWS.deltas, NO_END.format("deltas", 0, "rows")),
    (lambda: ROWS.window([0], [10], [2]), NO_END.format("next_positions", 0, "rows")),
    (lambda: placed([Grid(1, 1)], "grid-2d").decode(2), NO_END.format("next_positions", 0, "grid-2d")),
]


REFUSALS = {
    InvalidInputError: [*CHECKS, *PARTS, *DOCUMENTS, *ARRAYS, *DIRECT, *PLACING, *DENSE, *VIEWS],
    LimitExceededError: LIMITS,
    UnsupportedError: UNSUPPORTED,
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *row) for error, rows in REFUSALS.items() for row in rows], ids=label
)
def test_bad_input_is_refused(error: type[Exception], call: Callable[[], object], message: str) -> None:
    assert refused(error, call) == message


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme().frames])
def test_frames_are_refused_by_schemes_without_a_frame_axis(name: str) -> None:
    segments = from_documents([[Grid(1, 1)], [Grid(1, 1), Text(1), Grid(1, 2, frames=2)]])
    if not SCHEMES[name].text:
        return
    want = "one grid per frame, or axes=3" if name.startswith(("rope-tie", "hunyuan")) else "one grid per frame"
    message = f"documents[1][2]: got a grid with frames, want {want} in scheme '{name}'"
    assert refused(UnsupportedError, lambda: place(segments, name)) == message


def test_schemes_declare_whether_they_support_frames_and_separators() -> None:
    flat = {*TIES, "rows", "naive-2d", "mrope-qwen3", "mrope-canvas", "xd-rope", "flux", "flux2", "flux3"}
    flat |= {"qwen-image-2.1", "longcat-image", "ovis-image", "ideogram4", "hunyuan-image", "bagel"}
    assert {name for name, scheme in SCHEMES.items() if not scheme().frames} == flat
    separated = {*TIES, "flatten", "naive-2d", "mrope-qwen3", "xd-rope"}
    assert {name for name, scheme in SCHEMES.items() if scheme().row_separators} == separated


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if not scheme().row_separators])
def test_row_separators_are_refused_by_schemes_that_do_not_support_them(name: str) -> None:
    segments = from_documents([[Grid(1, 1), Grid(1, 2, row_separator=True)]])
    message = f"documents[0][1]: got a grid with row separators, want none in scheme '{name}'"
    assert refused(UnsupportedError, lambda: place(segments, name)) == message


ADJACENT = from_documents([[Grid(1, 1)], [Grid(1, 1), Text(1), Grid(1, 1), Grid(2, 2)]])
TIES = ["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm"]


@pytest.mark.parametrize("name", TIES)
def test_adjacent_grids_are_refused_in_the_tie_family(name: str) -> None:
    message = (
        f"documents[1][3]: got a grid right after a grid, want text between them in {name} "
        "(such as the markers [IMG] and [/IMG]), or strict=False"
    )
    assert refused(InvalidInputError, lambda: place(ADJACENT, name)) == message
    assert place(ADJACENT, name, strict=False).num_tokens == 8


@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in TIES and SCHEMES[name]().references])
def test_adjacent_grids_are_accepted_by_every_other_scheme(name: str) -> None:
    segments = from_documents([[Grid(1, 1, seconds_per_frame=1), Grid(2, 2, seconds_per_frame=1)]])
    assert place(segments, name).num_tokens == 5
    assert "documents[0][1]: got a grid right after" in refused(
        InvalidInputError, lambda: place(segments, name, strict=True)
    )


def test_without_documents_there_is_no_token_to_explain_and_no_window() -> None:
    assert refused(InvalidInputError, lambda: NOTHING.explain(0)) == "token: got 0, want <= -1"
    assert refused(InvalidInputError, lambda: NOTHING.window([0], [0], [1])) == "documents[0]: got 0, want <= -1"


@pytest.mark.parametrize(
    "message",
    [
        "'NoneType' object has no attribute 'x'",
        "invalid literal for int() with base 10: 'a'",
        "unsupported operand type(s) for +: 'int' and 'str'",
        "f() missing 1 required positional argument: 'x'",
        "missing 1 required positional argument: 'x'",
        "buffer size must be a multiple of element size",
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "[Errno 2] No such file or directory: 'x'",
        "Protocol message Foo has no field x",
    ],
)
def test_plain_python_errors_are_not_accepted_as_refusals(message: str) -> None:
    assert not is_sentence(message)
