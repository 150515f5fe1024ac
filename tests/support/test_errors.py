"""Bad input: every refusal is an mmpos error that names the argument, the value and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from oracle import placed
from refusals import is_sentence

from mmpos import SCHEMES, Grid, SegmentTable, Text, place, schemes
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, ServiceError, UnsupportedError
from mmpos.support import checks

from_documents: Callable[[Any], SegmentTable] = SegmentTable.from_documents
SEGMENTS = from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
READ_ONLY = np.zeros((2, 15), np.int32)
READ_ONLY.flags.writeable = False
NAMES: dict[str, Any] = {name: getattr(schemes, name) for name in schemes.__all__} | {
    "Fraction": Fraction,
    "placed": placed,
    "from_arrays": SegmentTable.from_arrays,
    "POSITIONS": place(SEGMENTS),
    "HALVES": place(SEGMENTS, "rope-tie-v2"),
    "ROWS": place(SEGMENTS, "rows"),
    "NOTHING": place(from_documents([])),
    "ONE": np.ones((3, 1), np.int64),
    "KIND": np.array([1], np.uint8),
    "OFFSETS": np.array([0, 1], np.int64),
    "LAST": 2**31 - 1,
}


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


# Every row is an expression and the message of its error, which may continue on further lines.

INVALID = """
# The check of each kind of argument; the rows below show that every argument is checked.
checks.integer("n", np.True_)                               | n: got np.True_, want an integer
checks.integer("n", "3")                                    | n: got '3', want an integer
checks.integer("n", 2**70, maximum=9)                       | n: got 1180591620717411303424, want <= 9
checks.integer("n", 10**5000, maximum=9)                    | n: got a number of more than 4300 digits, want <= 9
checks.int_array("a", [0.0], (None,))                       | a: got dtype float64, want integers
checks.int_array("a", [True], (None,))                      | a: got dtype bool, want integers
checks.int_array("a", 0, (None, 3))                         | a: got shape (), want (n, 3)
checks.int_array("a", np.array([2**63], np.uint64), (None,)) | a: got 9223372036854775808, want integers within int64
checks.int_array("a", np.ma.masked_array([0, 3], [False, True]), (None,))
    | a: got a masked array, want an array without a mask, which would be lost
checks.per_document("d", 0.0, 2, minimum=0)                 | d: got 0.0, want an integer
# Parts of documents.
Text(0)                                                     | Text.length: got 0, want >= 1
Text(2**31)                                                 | Text.length: got 2147483648, want <= 2147483647
Grid(0, 3)                                                  | Grid.height: got 0, want >= 1
Grid(2, 3, frames=0)                                        | Grid.frames: got 0, want >= 1
Grid(2, 3, row_separator=1)                                 | Grid.row_separator: got 1, want True or False
Grid(1, 24, 24) | Grid: got 3 positional values (1, 24, 24), want (height, width);
    | for (frames, height, width) use Grid.from_thw
Grid.from_thw((24, 24))                                     | thw: got (24, 24), want (frames, height, width)
Grid.from_thw(24)                                           | thw: got 24, want (frames, height, width)
Grid(1, 1, seconds_per_frame=Fraction(-(10**5000)))
    | Grid.seconds_per_frame: got a number of more than 4300 digits, want > 0 (a float: >= 1e-06)
Grid(1, 1, seconds_per_frame=0)      | Grid.seconds_per_frame: got 0, want > 0 (a float: >= 1e-06)
Grid(1, 1, seconds_per_frame=1e-9)   | Grid.seconds_per_frame: got 1e-09, want > 0 (a float: >= 1e-06)
Grid(1, 1, seconds_per_frame=np.nan) | Grid.seconds_per_frame: got nan, want a number of seconds
Grid(1, 1, seconds_per_frame=True)   | Grid.seconds_per_frame: got True, want a number of seconds
# Documents.
from_documents([[Text(1)], []])          | documents[1]: got an empty document, want at least one segment
from_documents([[Text(1), [Grid(1, 1)]]])
    | documents[0][1]: got list, want one of Text, Audio, Grid, Clip, Thumbnail, Tile
from_documents([Text(1)])         | documents[0]: got Text, want a list of Text, Audio, Grid, Clip, Thumbnail, Tile
from_documents(Text(1))                  | documents: got Text, want a list of documents
from_arrays([256], ONE, [0, 1])          | kind[0]: got 256, want <= 6
from_arrays([-1], ONE, [0, 1])           | kind[0]: got -1, want >= 0
from_arrays([0], ONE[:2], [0, 1])        | extents: got shape (2, 1), want (3, n)
from_arrays([0, 0], ONE, [0, 1])         | extents: got shape (3, 1), want (3, 2) for 2 segments
from_arrays([1], 0 * ONE, [0, 1])        | extents[0, 0]: got 0, want >= 1
from_arrays([0], ONE * [[1], [2], [3]], [0, 1]) | extents[:, 0]: got [1, 2, 3], want [1, 1, length] outside grids
from_arrays([1, 0], np.array([[1, 2], [2, 1], [3, 4]]), [0, 2])
    | extents[:, 1]: got [2, 1, 4], want [1, 1, length] outside grids
from_arrays([0], ONE, [0, 2])            | segment_offsets: got [0, 2], want 0 first and 1 last
from_arrays([0, 0], np.ones((3, 2), int), [0, 3, 2])
    | documents[1]: got an empty document, want at least one segment
from_arrays([0], ONE, [0, 1], row_separator=[True]) | row_separator[0]: got True, want False outside grids
from_arrays([1], ONE, [0, 1], row_separator=[1])    | row_separator: got dtype int64, want bool
from_arrays([1], ONE, [0, 1], seconds_per_frame=[[1], [0]])  | seconds_per_frame[1][0]: got 0, want >= 1
from_arrays([1], ONE, [0, 1], seconds_per_frame=[[-1], [1]]) | seconds_per_frame[0, 0]: got -1, want >= 0
from_arrays([1], ONE, [0, 1], seconds_per_frame=[[1, 1], [1, 1]])
    | seconds_per_frame: got shape (2, 2), want (2, 1)
SegmentTable([1], ONE, OFFSETS)          | kind: got list, want an array of uint8; from_arrays converts other arrays
SegmentTable(KIND, ONE.astype(np.int8), OFFSETS)
    | extents: got int8, want an array of int64; from_arrays converts other arrays
SegmentTable(KIND, ONE, OFFSETS, None, KIND)
    | row_separator: got uint8, want an array of bool; from_arrays converts other arrays
# Schemes.
place([[Text(1)]])                       | segments: got list, want a SegmentTable
place(SEGMENTS, start=True)              | start: got True, want an integer
place(SEGMENTS, start=2**31)             | start: got 2147483648, want <= 2147483647
place(SEGMENTS, start=-(2**31) - 1)      | start: got -2147483649, want >= -2147483648
place(SEGMENTS, start=[0, 1, 2])         | start: got shape (3,), want (2,)
place(SEGMENTS, start=[0, 2**31])        | start[1]: got 2147483648, want <= 2147483647
place(SEGMENTS, strict=1)                | strict: got 1, want True or False
RopeTie(axes=4)                          | RopeTie.axes: got 4, want 2 or 3
RopeTieFractional(axes=1)                | RopeTieFractional.axes: got 1, want 2 or 3
RopeTieV2(rounding="ceil")               | RopeTieV2.rounding: got 'ceil', want one of None, 'floor'
V2PE(stride=0)                           | V2PE.stride: got 0, want >= 1
V2PE(stride=257)                         | V2PE.stride: got 257, want <= 256
VideoRope(delta=0)                       | VideoRope.delta: got 0, want >= 1
XDRope(axes=2)                           | XDRope.axes: got 2, want >= 3
XDRope(counting="pack")                  | XDRope.counting: got 'pack', want one of 'document', 'batch'
XDRope(first_image=-1)                   | XDRope.first_image: got -1, want >= 0
Grid2D(order="z")                        | Grid2D.order: got 'z', want one of 'raster', 'merged'
Grid2D(spatial_merge_size=0)             | Grid2D.spatial_merge_size: got 0, want >= 1
Grid2D(axes=4)                           | Grid2D.axes: got 4, want <= 3
Grid2D(first=2)                          | Grid2D.first: got 2, want <= 1
MRopeTransformers(tokens_per_second=0)   | MRopeTransformers.tokens_per_second: got 0, want >= 1
MRopeQwen25(tokens_per_second=2.5)       | MRopeQwen25.tokens_per_second: got 2.5, want an integer or Fraction > 0
# Dense ids.
POSITIONS.dense(dtype=np.int16) | dtype: got dtype int16, want int32, int64, float64 for ids of scheme 'rope-tie'
HALVES.dense(dtype=np.int32)    | dtype: got dtype int32, want float64 for ids of scheme 'rope-tie-v2'
HALVES.dense(out=np.zeros((2, 15), np.int32)) | out: got dtype int32, want float64 for ids of scheme 'rope-tie-v2'
POSITIONS.dense(out=np.zeros((2, 14), np.int32)) | out: got shape (2, 14), want an array of shape (2, 15)
POSITIONS.dense(out=np.zeros((2, 15), np.int32), axes=(0,)) | out: got shape (2, 15), want an array of shape (1, 15)
POSITIONS.dense(out=[[0] * 15] * 2)      | out: got list, want an array of shape (2, 15)
POSITIONS.dense(out=READ_ONLY)           | out: got a read-only array, want a writeable one
POSITIONS.dense(out=np.zeros((2, 15), np.int64), dtype=np.int32)
    | dtype: got int32 with out of int64, want equal dtypes, or only one of the two
POSITIONS.dense(axes=(2,))               | axes: got (2,), want integers from 0 to 1
POSITIONS.dense(axes=(0.0,))             | axes: got (0.0,), want integers from 0 to 1
POSITIONS.dense(axes=1)                  | axes: got 1, want integers from 0 to 1
# Views.
POSITIONS.take([3], [1])                 | stops[0]: got 1, want >= starts[0] = 3
POSITIONS.take([0, 3], [1, 16])          | stops[1]: got 16, want <= 15
POSITIONS.take([16], [16])               | starts[0]: got 16, want <= 15
POSITIONS.take([-1], [2])                | starts[0]: got -1, want >= 0
POSITIONS.take([11, 0], [12, 1])         | starts[1]: got 0, in an earlier document than the previous range
POSITIONS.slice(3, 1)                    | stop: got 1, want >= 3
POSITIONS.slice(0, 16)                   | stop: got 16, want <= 15
POSITIONS.slice(16, 16)                  | start: got 16, want <= 15
POSITIONS.window([2], [0], [1])          | documents[0]: got 2, want <= 1
POSITIONS.window([0], [-1], [1])         | starts[0]: got -1, want >= 0
POSITIONS.window([0], [0], [-1])         | lengths[0]: got -1, want >= 0
NOTHING.window([0], [0], [1])            | documents[0]: got 0, want <= -1
POSITIONS.decode([1, -1])                | steps[1]: got -1, want >= 0
POSITIONS.decode(2**31)                  | steps: got 2147483648, want <= 2147483647
POSITIONS.shard(0, 2) | documents[0]: got 11 tokens, want a multiple of 4 for world_size=2 and layout='zigzag';
    | pad first: positions.pad(12).shard(…)
POSITIONS.shard_indices(1, 3, "contiguous")
    | documents[0]: got 11 tokens, want a multiple of 3 for world_size=3 and layout='contiguous';
    | pad first: positions.pad(12).shard(…)
POSITIONS.shard(0, 2, "zigzag-sequence")
    | positions: got 15 tokens in all, want a multiple of 4 for world_size=2 and layout='zigzag-sequence';
    | pad the last document first: positions.pad([*positions.lengths[:-1], 5]).shard(…)
POSITIONS.shard_indices(0, 2, "contiguous-sequence")
    | positions: got 15 tokens in all, want a multiple of 2 for world_size=2 and layout='contiguous-sequence';
    | pad the last document first: positions.pad([*positions.lengths[:-1], 5]).shard(…)
POSITIONS.shard(2, 2)                    | rank: got 2, want <= 1
POSITIONS.shard(-1, 2)                   | rank: got -1, want >= 0
POSITIONS.shard(0, 0)                    | world_size: got 0, want >= 1
POSITIONS.shard(0, 1, "ring")
    | layout: got 'ring', want one of 'zigzag', 'contiguous', 'zigzag-sequence', 'contiguous-sequence'
POSITIONS.pad(5)                         | length: got 5, want >= 11, the length of document 0
POSITIONS.pad([11, 3])                   | length: got 3, want >= 4, the length of document 1
POSITIONS.pad(-1)                        | length: got -1, want >= 0
POSITIONS.pad(20, "up")                  | side: got 'up', want one of 'left', 'right'
POSITIONS.padded([11, 12])               | length: got [11, 12], want an integer
POSITIONS.keep([1] * 15)                 | mask: got int64 (15,), want bool (15,), one per token
POSITIONS.keep([True] * 14)              | mask: got bool (14,), want bool (15,), one per token
POSITIONS.keep(True)                     | mask: got bool (), want bool (15,), one per token
POSITIONS.explain(15)                    | token: got 15, want <= 14
NOTHING.explain(0)                       | token: got 0, want <= -1
POSITIONS.explain(0, from_documents([[Text(3)]])) | segments: got 3 tokens, want 15
POSITIONS.describe(0, [[Text(15)]])
    | segments: got list, want a SegmentTable, as returned by SegmentTable.from_documents
"""

LIMITS = """
from_documents([[Text(1), Grid(2**16, 2**15)]])
    | segment 1: got 2147483648 tokens, want at most 2**31 - 1 in one segment
from_documents([[Grid(2**16, 2**15 - 1, row_separator=True)]])
    | segment 0: got 2147483648 tokens, want at most 2**31 - 1 in one segment
from_arrays([1], ONE * (2**63 - 1), [0, 1], row_separator=[True]) | segment 0: got
    | 784637716923335095479473677900958302012794430558004314112 tokens, want at most 2**31 - 1 in one segment
from_arrays([1], [[1], [1], [2**63 - 1]], [0, 1], row_separator=[True])
    | segment 0: got 9223372036854775808 tokens, want at most 2**31 - 1 in one segment
placed([Text(2)], "flatten", LAST)
    | documents[0], tokens 0 to 1: got ids up to 2147483648, want ids within int32
placed([Text(LAST), Text(1), Text(3)], "flatten")
    | documents[0], tokens 2147483648 to 2147483650: got ids up to 2147483650, want ids within int32
placed([Grid(3, 3)], "videorope", -(2**31))
    | documents[0], tokens 0 to 8: got ids down to -2147483649, want ids within int32
placed([Text(1), Grid(30000, 30000)], "rope-tie", 2**31 - 9)
    | documents[0], tokens 1 to 900000000: got ids up to 3047513639, want ids within int32
placed([Text(2), Grid(1, 1, frames=4, seconds_per_frame=2**29)], "mrope-qwen2.5")
    | documents[0], tokens 4 to 4: got ids up to 2147483650, want ids within int32
placed([Grid(1, 1, frames=LAST, seconds_per_frame=1)], MRopeQwen25(tokens_per_second=3))
    | mrope-qwen2.5: got a last frame 6442450938 ids after the first, want ids within int32
placed([Grid(1, 1, frames=LAST, seconds_per_frame=LAST)], MRopeQwen25(tokens_per_second=LAST))
    | mrope-qwen2.5: got frame · seconds · tokens_per_second beyond 2**62, want ids within int32
placed([Grid(46340, 46341)], "rope-tie-fractional")
    | documents[0], tokens 0 to 2147441939: got denominator 2147534622, want below 2**31
placed([Text(1)], "flatten", LAST).decode() | documents[0]: got id 2147483648, want at most 2**31 - 1
place(from_documents([[Text(1)]] * 2), start=[0, 2**31 - 9]).decode(20)
    | documents[1]: got id 2147483659, want at most 2**31 - 1
Grid(1, 1, seconds_per_frame=2**40)
    | Grid.seconds_per_frame: got 1099511627776, want a numerator and a denominator below 2**31
Grid(1, 1, seconds_per_frame=1e300)
    | Grid.seconds_per_frame: got 1e+300, want a numerator and a denominator below 2**31
Grid(1, 1, seconds_per_frame=Fraction(1, 2**31))
    | Grid.seconds_per_frame: got 1/2147483648, want a numerator and a denominator below 2**31
MRopeQwen25(tokens_per_second=2**31)
    | MRopeQwen25.tokens_per_second: got 2147483648, want terms below 2**31
"""

UNSUPPORTED = """
placed([Grid(1, 1), Text(1)], "grid-2d") | documents[0][1]: got text, want grids only in scheme 'grid-2d'
placed([Text(2), Grid(3, 2)], Grid2D(first=1))
    | grid-2d: got text of 2 tokens, want class tokens, each a Text(1)
placed([Grid(3, 2)], Grid2D(order="merged", spatial_merge_size=2))
    | grid-2d: got a grid whose sides are not divisible by spatial_merge_size=2, want whole blocks
place(SEGMENTS, "rows", [0, 1]) | start: got one per document, want one integer: rows cannot be resumed
place(from_documents([[Grid(1, 1)]]), "grid-2d", [3])
    | start: got one per document, want one integer: grid-2d cannot be resumed
ROWS.next_positions | next_positions: got document 0 of rows, whose end is not one whole id,
    | want a whole id; place it together with the tokens to come
ROWS.deltas | deltas: got document 0 of rows, whose end is not one whole id,
    | want a whole id; place it together with the tokens to come
"""


def rows(table: str) -> list[tuple[str, str]]:
    """Split a table into expressions and messages."""
    joined = re.sub(r"\n {4}(?=\|)", " ", re.sub(r"^#.*\n", "", table, flags=re.MULTILINE)).strip()
    parts = (line.split(" | ") for line in joined.splitlines())
    return [(call.strip(), " ".join(message)) for call, *message in parts]


REFUSALS = {InvalidInputError: INVALID, LimitExceededError: LIMITS, UnsupportedError: UNSUPPORTED}


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [(error, *row) for error, table in REFUSALS.items() for row in rows(table)],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_bad_input_is_refused(error: type[Exception], call: str, message: str) -> None:
    assert refused(error, lambda: eval(call, globals(), NAMES)) == message


def test_an_unknown_scheme_names_the_most_similar_and_all_others() -> None:
    want = f"scheme: got 'mropee' (did you mean 'mrope'?), want a Scheme or one of {', '.join(SCHEMES)}"
    assert refused(InvalidInputError, lambda: place(SEGMENTS, "mropee")) == want
    ragged = refused(InvalidInputError, lambda: checks.int_array("a", [[1], [1, 2]], (None,)))
    assert ragged.startswith("a: got list, want an array of numbers on the host")


TIES = ["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm"]


def test_schemes_declare_whether_they_support_frames_and_separators() -> None:
    flat = {*TIES, "rows", "naive-2d", "mrope-qwen3", "mrope-canvas", "xd-rope", "flux", "flux2", "flux3"}
    flat |= {"qwen-image-2.1", "longcat-image", "ovis-image", "ideogram4", "hunyuan-image", "bagel"}
    assert {name for name, scheme in SCHEMES.items() if not scheme().frames} == flat
    separated = {*TIES, "flatten", "naive-2d", "mrope-qwen3", "xd-rope"}
    assert {name for name, scheme in SCHEMES.items() if scheme().row_separators} == separated


@pytest.mark.parametrize("name", SCHEMES)
def test_grids_that_a_scheme_does_not_support_are_refused(name: str) -> None:
    scheme, timed = SCHEMES[name](), Grid(1, 1, seconds_per_frame=1)
    if not scheme.row_separators:
        separated = from_documents([[Grid(1, 1), Grid(1, 2, row_separator=True)]])
        message = f"documents[0][1]: got a grid with row separators, want none in scheme '{name}'"
        assert refused(UnsupportedError, lambda: place(separated, name)) == message
    if scheme.text and not scheme.frames:
        frames = from_documents([[Grid(1, 1)], [Grid(1, 1), Text(1), Grid(1, 2, frames=2)]])
        want = "one grid per frame" + ", or axes=3" * name.startswith(("rope-tie", "hunyuan"))
        message = f"documents[1][2]: got a grid with frames, want {want} in scheme '{name}'"
        assert refused(UnsupportedError, lambda: place(frames, name)) == message
    adjacent = from_documents([[timed], [timed, Text(1), timed, Grid(2, 2, seconds_per_frame=1)]])
    if name in TIES:
        message = (
            f"documents[1][3]: got a grid right after a grid, want text between them in {name} "
            "(such as the markers [IMG] and [/IMG]), or strict=False"
        )
        assert refused(InvalidInputError, lambda: place(adjacent, name)) == message
        assert place(adjacent, name, strict=False).num_tokens == 8
    elif scheme.text and scheme.references:
        assert place(adjacent, name).num_tokens == 8
        message = refused(InvalidInputError, lambda: place(adjacent, name, strict=True))
        assert "documents[1][3]: got a grid right after" in message


PYTHON_ERRORS = """
'NoneType' object has no attribute 'x'
invalid literal for int() with base 10: 'a'
unsupported operand type(s) for +: 'int' and 'str'
f() missing 1 required positional argument: 'x'
buffer size must be a multiple of element size
'utf-8' codec can't decode byte 0xff in position 0: invalid start byte
[Errno 2] No such file or directory: 'x'
Protocol message Foo has no field x
"""


def test_plain_python_errors_are_not_accepted_as_refusals() -> None:
    assert [message for message in PYTHON_ERRORS.strip().splitlines() if is_sentence(message)] == []
