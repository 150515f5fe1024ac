"""Compare ids with those of a scheme: equality, the first difference, and its cause."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import settled

import mmpos
from mmpos.analysis.diagnosis import Diagnosis
from mmpos.analysis.diagnosis.deviation import Deviation
from mmpos.analysis.diagnosis.mistakes import MISTAKES
from mmpos.analysis.diagnosis.shapes import table_of_ids
from mmpos.cli.options import read_specs
from mmpos.errors import InvalidInputError
from mmpos.schemes import Grid2D, Grids, MRope, MRopeTransformers, Placement, RopeTie, get_scheme
from mmpos.segments import Clip, Placeholders, Thumbnail, Tile
from mmpos.segments.table import SegmentTable

Ids = npt.NDArray[Any]


SPECS = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3).map(
        lambda parts: ",".join(f"{n},{h}x{w}" for n, h, w in parts) + ",2"
    ),
    min_size=1,
    max_size=3,
)
SCHEMES = st.sampled_from([name for name, scheme in mmpos.SCHEMES.items() if scheme.text and scheme().references])


def table(*documents: Any) -> SegmentTable:
    """Return the table of specs such as "3,2x3,2", or of lists of parts."""
    read = (read_specs([document]).documents[0] if isinstance(document, str) else document for document in documents)
    return SegmentTable.from_documents([*read])


def ids_of(*documents: Any, **options: Any) -> Ids:
    return mmpos.place(table(*documents), **options).dense()


def diagnose(ids: npt.ArrayLike, *documents: Any, **options: Any) -> Diagnosis:
    return mmpos.diagnose(ids, table(*documents), **options)


def cause_of(ids: npt.ArrayLike, *documents: Any, **options: Any) -> str | None:
    """Return the cause, and check that it explains every difference."""
    diagnosis = diagnose(ids, *documents, **options)
    assert not diagnosis.equal
    assert diagnosis.cause is None or diagnosis.explained == diagnosis.different_tokens, str(diagnosis)
    return diagnosis.cause


def test_equal_ids_are_equal_in_every_shape_and_dtype() -> None:
    specs = ("3,2x3,2", "4")
    ids = ids_of(*specs)
    sentence = "All 15 tokens of 2 documents have the ids of rope-tie."
    equal = diagnose(ids, *specs)
    assert equal == Diagnosis(True, "rope-tie", 15, 2, different_tokens=0, different_documents=0)
    assert str(equal) == sentence
    assert str(diagnose(ids.astype(np.float32), *specs)) == sentence
    assert str(diagnose(ids.astype(np.uint8), *specs)) == sentence
    assert str(diagnose(ids[:, None], *specs)) == sentence
    for none in (np.zeros((2, 0)), np.zeros((2, 0, 3))):
        assert str(diagnose(none)) == "All 0 tokens of 0 documents have the ids of rope-tie."


def test_padding_next_to_a_clip_is_ignored() -> None:
    # The first row is text, two markers, video and audio, and two markers; the second is seven padding tokens and text.
    rows = [[0, *[0] * 2, *[7, 8, 8], *[0] * 2], [*[0] * 7, 0]]
    clip = SegmentTable.from_input_ids(
        rows,
        Placeholders(image=9, video=7, audio=8),
        video_grid_thw=[[1, 1, 1]],
        attention_mask=[[1] * 8, [0] * 7 + [1]],
    )
    sentence = "All 9 tokens of 2 documents have the ids of tmrope."
    assert str(mmpos.diagnose(mmpos.place(clip, "tmrope").dense(), clip, "tmrope")) == sentence


def test_padding_in_the_table_is_ignored() -> None:
    segments = SegmentTable.from_input_ids(
        [[1, 2, 9, 9], [0, 0, 0, 1]], Placeholders(image=9), [[1, 1, 2]], attention_mask=[[1, 1, 1, 1], [0, 0, 0, 1]]
    )
    placed = mmpos.place(segments)
    sentence = "All 5 tokens of 2 documents have the ids of rope-tie."
    for ids in (
        placed.dense(),
        placed.dense().reshape(2, 2, 4),
        placed.dense().reshape(2, 2, 4) + np.array([[0] * 4, [5, 5, 5, 0]]),
    ):
        assert str(mmpos.diagnose(ids, segments)) == sentence
        assert str(mmpos.diagnose(ids, placed)) == sentence


def test_a_single_row_is_used_for_all_axes() -> None:
    assert diagnose(range(4), "4", scheme="mrope").equal
    assert diagnose([range(4)], "4", scheme="mrope").equal
    assert diagnose([[0, 1, 2, 3], [0, 1, 7, 7]], "4", "2", scheme="mrope").equal


def test_a_difference_sets_all_fields_of_the_diagnosis() -> None:
    ids = ids_of("2", "3,2x3,2", scheme="rope-tie-v2")
    ids[1, 6] = 9.5
    diagnosis = diagnose(ids, "2", "3,2x3,2", scheme="rope-tie-v2")
    assert diagnosis == Diagnosis(
        equal=False,
        scheme="rope-tie-v2",
        num_tokens=13,
        num_documents=2,
        different_tokens=1,
        different_documents=1,
        document=1,
        token=4,
        what="row 0, column 1 of a grid of width 3 (segment 2)",
        axis=1,
        got=(5.0, 9.5),
        want=(Fraction(5), Fraction(11, 2)),
    )
    assert str(diagnosis) == (
        "documents[1], token 4, is row 0, column 1 of a grid of width 3 (segment 2): got (5, 9.5), want (5, 11/2) in "
        "rope-tie-v2. 1 of 13 tokens differ, in 1 of 2 documents. "
        "Cause unknown: a single wrong token does not identify a mistake."
    )


def test_a_tolerance_accepts_small_errors() -> None:
    ids = ids_of("3,2x3,2", scheme="rope-tie-fractional").astype(np.float32)
    assert not diagnose(ids, "3,2x3,2", scheme="rope-tie-fractional").equal
    assert diagnose(ids, "3,2x3,2", scheme="rope-tie-fractional", tolerance=1e-6).equal


INDEX = "ids are the token's index in {}, as if there were no images"
DOCUMENT, BATCH = INDEX.format("its document"), INDEX.format("the whole batch, not reset at each document")
ROW = INDEX.format("its padded row")
CUT, FLOOR = "fractions are truncated, as by .long() or .astype(int)", "fractions are rounded down, as by floor or //"
EVEN = "fractions are rounded to integers, halves to even, as by round"
SWAPPED = "axes are swapped: got the order ({}), want ({})"
EXCHANGED = "height and width of grids are swapped"
COLUMNS = "patches are in column-major order: column after column, not row after row"
AHEAD = "text after a grid continues at the token's index, one id per patch: the delta is forgotten"
MAXIMUM = "text after a grid continues at the maximum of all ids plus one"
UNMERGED = "spatial merging is forgotten: {} are for {}x{} times the patches"
GOES_ON = "ids are not reset: each document continues {} of the previous one"
RESET = "ids are reset inside a document: they restart at this token"
BEGINNING = "from token 7 on, ids repeat those of the document's beginning"
SLOTS = (
    "some tokens between right ones have their index as id: their delta is forgotten, "
    "or keys are in the cache slots of their ids"
)
OTHER_SIDE = "position ids and token ids are padded on opposite sides"
NEIGHBOUR = "every token has the ids of the token {} it"
TIE = "3,2x3,2"  # rows 0 1 2, 6 and 10, 14 15; columns 0 1 2, 5 8 11, 14 15
TWO = ("2,1x2", "1,1x1,1")
TIE_V2: dict[str, Any] = {"scheme": "rope-tie-v2"}
MROPE: dict[str, Any] = {"scheme": "mrope"}
FLATTEN: dict[str, Any] = {"scheme": "flatten"}
FLUX: dict[str, Any] = {"scheme": "flux"}


def cols_of_v2(*cols: int) -> list[list[int]]:
    """Return the ids of TIE in rope-tie-v2, but with these integers instead of columns 4.5, 5.5 and 6.5."""
    return [[0, 1, 2, 5, 5, 5, 6, 6, 6, 9, 10], [0, 1, 2, *cols, *cols, 9, 10]]


def after_grid(*after: int) -> list[list[int]]:
    return [[0, 4, 4, 4, 8, 8, 8, *after], [0, 3, 6, 9, 3, 6, 9, *after]]


def frames(times: list[int], after: list[int]) -> list[list[int]]:
    """Return the ids of three text tokens, three one-patch frames at these times, and the text after them."""
    return [[0, 1, 2, *times, *after], *[[0, 1, 2, 3, 3, 3, *after]] * 2]


class Late(MRope):
    """M-RoPE in which each grid begins later, by the number of ids that it consumes."""

    def place(self, grids: Grids, cursor: npt.NDArray[np.int64]) -> Placement:
        return super().place(grids, cursor + self.advance(grids))


SLICED = [mmpos.Text(1), Thumbnail(1, 2), Tile(1, 2), Tile(1, 2), mmpos.Text(1)]
SOUND = [mmpos.Text(1), Clip(1, 2, frames=1, audio=1), mmpos.Text(1), mmpos.Grid(1, 2), mmpos.Text(1)]
VIDEO = [mmpos.Text(1), mmpos.Grid(1, 3, frames=3, seconds_per_frame=Fraction(1, 26)), mmpos.Text(2)]
STILL = [mmpos.Text(1), mmpos.Grid(1, 2)]
CAUSES: list[tuple[Any, str | tuple[Any, ...], dict[str, Any], str]] = [
    ([0, 1, 2, 3, 0, 1, 2], TWO, {}, DOCUMENT),
    ([0, 1, 2, 3, 4, 5, 6], TWO, {}, BATCH),
    ([[0, 1, 2, 3, 4]] * 2, TWO, {"side": "left"}, ROW),
    ([[0, 1, 2, 3]] * 2, ("4", "2"), {**FLATTEN, "side": "left"}, ROW),
    (cols_of_v2(4, 5, 6), TIE, TIE_V2, CUT),
    (cols_of_v2(4, 6, 6), TIE, TIE_V2, EVEN),
    (cols_of_v2(5, 6, 7), TIE, TIE_V2, "fractions are rounded to integers, halves up"),
    # With start -5, the grid has row -3.5 and columns -4 and -3.
    ([[-5, -4, -4, -2], [-5, -4, -3, -2]], "1,1x2,1", {**TIE_V2, "start": -5}, FLOOR),
    ([[-5, -3, -3, -2], [-5, -4, -3, -2]], "1,1x2,1", {**TIE_V2, "start": -5}, CUT),
    ([[-10, -7, -7, -4], [-10, -8, -6, -4]], "1,1x2,1", {**TIE_V2, "start": -5},
     "ids are doubled, as if to avoid halves"),
    (  # rows 13/3, 20/3; columns 15/4, 11/2, 29/4
        [[0, 1, 2, 5, 5, 5, 7, 7, 7, 9], [0, 1, 2, 4, 6, 8, 4, 6, 8, 9]],
        "3,2x3,1",
        {"scheme": "rope-tie-fractional"},
        "fractions are rounded up",
    ),
    ([*range(128), *range(-128, -56)], "200", {}, "ids wrap around in int8"),
    ([32767, -32768, -32767], "3", {"start": 32767}, "ids wrap around in int16"),
    (  # 2**31 + 2 halves are 2 - 2**31 in int32
        [2**30, 1 - 2**30, 2**30 + 2, 3 - 2**30, 2**30 + 4],
        "1,1x1,1,1x1,1",
        {"scheme": "rope-tie-fractional", "start": 2**30},
        "numerators wrap around in int32",
    ),
    (ids_of(TIE)[[1, 0]], TIE, {}, SWAPPED.format("col, row", "row, col")),
    ([[0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3], [0, 1, 1, 1, 1, 3]], "1,2x2,1", MROPE,
     SWAPPED.format("row, col, frame", "frame, row, col")),
    (ids_of(TIE)[[1, 1]], TIE, {}, "axis 1 (col) is used in place of axis 0"),
    (ids_of("2,2x3,4", **MROPE)[[0, 0, 0]], "2,2x3,4", MROPE, "axis 0 (frame) is used in place of every other axis"),
    ([[0, 1, 2, 5, 5, 8, 8, 11, 11, 14], [0, 1, 2, *[6, 10] * 3, 14]], "3,2x3,1", {}, EXCHANGED),
    ([[0, 1, 2, *[6, 10] * 3, 14], [0, 1, 2, 5, 5, 8, 8, 11, 11, 14]], "3,2x3,1", {}, COLUMNS),
    (ids_of(TIE, "2") + 1, (TIE, "2"), {}, "documents start at 1, not at 0"),
    (range(5, 16), TIE, FLATTEN, "documents start at 5, not at 0"),  # flatten counts tokens, so only the start differs
    (ids_of(TIE, scheme="naive-2d"), TIE, {}, "these are the ids of naive-2d"),
    ([[0] * 4 + [1] * 4, [0, 1, 2, 3] * 2], "2x4", {"scheme": Grid2D("merged", 2)}, "these are the ids of grid-2d"),
    ([[0, 1, 2, 5, 5, 5, 6, 6, 6, 9, 10], [0, 1, 2, 4, 5, 6, 4, 5, 6, 9, 10]], TIE, {},
     "these are the ids of rope-tie-v2(rounding=floor)"),
    ([[0, 2, 2, 3, 3, 5], [0, 2.5, 2.5, 2.5, 2.5, 5], [0, 2, 3, 2, 3, 5]], "1,2x1x2,1", MROPE,
     "these are the ids of rope-tie-v2(axes=3)"),
    (frames([3, 4, 5], [4, 5]), "3,3x1x1,2", MROPE, "these are the ids of mrope-transformers"),
    (frames([3, 4, 5], [6, 7]), "3,3x1x1,2", {"scheme": MRopeTransformers()}, "these are the ids of mrope"),
    (frames([3, 28, 53], [54]), "3,3x1x1@1,1", {"scheme": "mrope-qwen2.5"},
     "these are the ids of mrope-qwen2.5(tokens_per_second=25)"),
    (  # other parameters of the same scheme are tried before other schemes
        frames([3, 4, 5], [4]),
        "3,3x1x1@1,1",
        {"scheme": MRopeTransformers(tokens_per_second=4)},
        "these are the ids of mrope-transformers",
    ),
    *[([[[outside] * 3 + [0, 1, 2], [*range(6)]]] * 2, ("3", "6"), {}, OTHER_SIDE) for outside in (0, 1)],
    ([[[0, 1, 2, 0, 0, 0], [*range(6)]]] * 2, ("3", "6"), {"side": "left"}, OTHER_SIDE),
    ([[[0, 0, 0, 3, 5, 7], [*range(6)]]] * 2, ("1,1x1,1", "6"), {"side": "left"},
     "left padding is counted: ids begin at the padding, not at the first real token"),
    ([[0, 2, 4, 6]] * 2, ("1,1x1", "1,1x1"), {}, GOES_ON.format("at the next position")),
    ([[0, 2, 3, 5]] * 2, ("1,1x1", "1,1x1"), {}, GOES_ON.format("at the maximum plus one")),
    ([[0, 0, 2, 2], [0, 1, 2, 3]], ("2", "2"), {"scheme": "rows"}, GOES_ON.format("at the number of tokens")),
    ([0, 1, 2, 0, 1, 2, 0], "7", {}, RESET),
    ([[*row[:9], 0, 2, 4] for row in ids_of("3,2x3,3").tolist()], "3,2x3,1,1x1,1", {}, RESET),
    (ids_of("3,3x3,6", **MROPE)[:, np.arange(18) % 7], "3,3x3,6", MROPE, BEGINNING),
    # Models that generate: ids are frames, rows and columns of each image, from 0; references have other frames.
    ([[0] * 8, [0] * 8, [0, 0, 1, 2] * 2], ("1,1x3", "1,3x1"), FLUX,
     "all documents have the ids of the first one, which has other sizes"),
    ([[*[0] * 5, 1, 1, *[0] * 4, 1, 1], [0] * 13, [0, 0, 0, 1, 2, 0, 1, 0, 0, 1, 2, 0, 1]],
     ("2,1x3,1x2", "1,3x1,2x1"), FLUX,
     "all documents have the ids of the first one, which has other sizes"),
    ([[0, 0, 2, 2], [0] * 4, [0, 0, 0, 1]], "1,1x1,1x2", FLUX, "references are shifted by (1, 0, 0)"),
    ([[0, 0, 2, 4, 4], [0] * 5, [0, 0, 0, 0, 1]], "1,1x1,1x1,1x2", FLUX,
     "references are shifted by their number times (1, 0, 0)"),
    *[
        (
            [[0, 1, *[frame] * 3], [0] * 5, [0, 0, 0, 1, 2]],
            "2,1x3",
            {"scheme": "lumina2"},
            f"ids are computed for one text token {words}",
        )
        for frame, words in ((3, "more"), (1, "fewer"))
    ],
    (after_grid(7, 8), "1,2x3,2", {}, AHEAD),
    (after_grid(10, 11), "1,2x3,2", {}, MAXIMUM),
    (after_grid(4, 5), "1,2x3,2", {}, "a grid consumes the ids of its longest side, as in M-RoPE"),
    (after_grid(2, 3), "1,2x3,2", {}, "text after a grid continues as if the grid consumed one id"),
    ([[0, 3, 3, 3, 4, 4, 4, 5, 6], [0, 2.5, 3.5, 4.5, 2.5, 3.5, 4.5, 5, 6]], "1,2x3,2", TIE_V2, MAXIMUM),
    ([[0, 4, 8, 9, 10], *[[0, 6, 6, 9, 10]] * 2], "1,2x1x1,2", {"scheme": RopeTie(axes=3)}, MAXIMUM),
    *[
        (
            [[0, 1, *axis, 2 + 5 * side, 3 + 5 * side] for axis in ids_of("5x5", start=2, **MROPE).tolist()],
            "2,5x5,2",
            MROPE,
            UNMERGED.format("ids after a grid", side, side),
        )
        for side in (2, 3, 4)
    ],
    ([[0, 4, 16]] * 2, "1,1x1,1", {}, UNMERGED.format("strides and ids after a grid", 3, 3)),
    ([[*row[:11], 11, 12] for row in ids_of("3,2x3,4").tolist()], "3,2x3,4", {},
     "from the first difference on, ids are the token's index: the delta 5 is forgotten"),
    ([[*axis, 0, 1, 2, 4, 6, 7, 11, 12] for axis in ids_of("3,2x3,1").tolist()], ("3,2x3,1", "3,1x1,4"), {},
     "the delta 5 of documents[0] is used for documents[1], from the first difference on"),
    ([2, 0, 1, 0, 1], ("2", "3"), FLATTEN, NEIGHBOUR.format("before")),
    *[
        (
            [[*first, *axis[len(last) : 6 - len(first)], *last] for axis in ids_of("2,1x2,2", start=5).tolist()],
            "2,1x2,2",
            {"start": 5},
            NEIGHBOUR.format(neighbour),
        )
        for first, last, neighbour in (
            *(([], [last], "after") for last in (14, 5)),  # the next position, or the first id
            *(([first], [], "before") for first in (0, 5)),
        )
    ],
    # Documents have different starts.
    ([[0, 1, 5, 5, 5, 9, 9, 9, 8, 9, 10, 7, 8, 12, 12, 12, 16, 16, 16, 15, 16, 17],
      [0, 1, 4, 7, 10, 4, 7, 10, 8, 9, 10, 7, 8, 11, 14, 17, 11, 14, 17, 15, 16, 17]],
     ("2,2x3,3", "2,2x3,3"), {"start": [0, 7]}, AHEAD),
    # A mistake replaces one method, even if methods of the scheme call each other.
    ([[0, *[4] * 6, 7, 8, 9], [0, *[4] * 3, *[5] * 3, 7, 8, 9], [0, *[4, 5, 6] * 2, 7, 8, 9]], "1,2x3,3",
     {"scheme": Late()}, AHEAD),
    *[
        ([[*row, 0, 1, column] for row, column in zip(frames(times[:3], times[3:]), (1, 1, 2), strict=True)],
         ("3,3x1x1@1/2,1", STILL), {"scheme": "mrope-qwen2.5"}, cause)
        for times, cause in (
            ([3, 5, 7, 8], "seconds_per_frame is forgotten: frames are one second apart"),
            ([3, 7, 11, 12], "frames per second are mistaken for seconds per frame"),
            ([3, 3, 4, 5], "times are half as large as they should be: temporal_patch_size is forgotten"),
        )
    ],
    # The canvas has two rows and two columns instead of one row and four columns.
    ([[0, *[1] * 12, 4], [0, 0, 1, 2, 3, 1, 1, 2, 2, 1, 1, 2, 2, 4], [0, 0, 1, 1, 3, 1, 1, 1, 1, 2, 2, 2, 2, 4]],
     (SLICED,), {"scheme": "mrope-canvas"}, EXCHANGED),
    # Frames are half an id apart, and text follows after 6 ids instead of 3.
    ([[0, *[1] * 3, *[1.5] * 3, *[2] * 3, 7, 8], [0, *[1] * 9, 7, 8], [0, *[1, 2, 3] * 3, 7, 8]],
     (VIDEO,), {"scheme": "tmrope-qwen3"}, UNMERGED.format("ids after a grid", 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "specs", "options", "cause"), CAUSES, ids=lambda value: None)
def test_a_known_mistake_is_identified(ids: Any, specs: Any, options: dict[str, Any], cause: str) -> None:
    assert cause_of(ids, *([specs] if isinstance(specs, str) else specs), **options) == cause


@pytest.mark.parametrize(("name", "amount"), [("float32", "0.0026"), ("bfloat16", "170"), ("float16", "inf")])
def test_ids_cast_to_low_precision_are_recognized(name: str, amount: str) -> None:
    import torch

    exact: dict[str, Any] = {"scheme": "rope-tie-fractional", "start": 100_000}
    low = torch.tensor(ids_of(TIE, **exact)).to(getattr(torch, name)).double()
    assert cause_of(low, TIE, **exact) == f"ids are rounded to {name}, by up to {amount}"


@pytest.mark.parametrize(
    ("document", "scheme", "token", "what"),
    [
        (SLICED, "mrope-canvas", 8, "marker 0 after a tile (segment 2)"),
        (SOUND, "tmrope", 5, "token 0 of the audio of a clip (segment 1)"),
    ],
)
def test_a_wrong_token_is_described_by_its_segment(document: list[Any], scheme: str, token: int, what: str) -> None:
    segments = SegmentTable.from_documents([document])
    ids = mmpos.place(segments, scheme).dense()
    assert mmpos.diagnose(ids, segments, scheme).equal
    wrong = ids.copy()
    wrong[0, token] += 50
    assert mmpos.diagnose(wrong, segments, scheme).what == what
    text_row = np.arange(len(ids[0]))
    text_row[token] += 50
    assert mmpos.diagnose(np.stack([text_row, *ids])[:, None], segments, scheme).what == what


def test_the_smallest_seconds_per_frame_cannot_be_halved() -> None:
    clip = mmpos.Grid(1, 1, frames=2, seconds_per_frame=Fraction(1, 2**31 - 1))
    diagnosis = mmpos.diagnose([0, 9], SegmentTable.from_documents([[clip]]), "mrope-qwen2.5")
    assert (diagnosis.token, diagnosis.want, diagnosis.cause) == (1, (Fraction(0),) * 3, None)


ONE = "the ids of one image (segment {}) are {}; all other tokens are right"
BOTH = "the ids of 2 images (segments 1, 3) are {}; all other tokens are right"


@pytest.mark.parametrize(
    ("specs", "shifts", "cause"),
    [
        (["3,2x3,4,4x4,5"], [0, 0, 0, 1, 0], ONE.format(3, "1 too large")),
        (["3,2x3,4,4x4,5"], [0, -2, 0, 0, 0], ONE.format(1, "2 too small")),
        (["3,2x3,4,4x4,5"], [0, 1, 0, 2, 0], BOTH.format("shifted by 1 to 2")),
        (["2,2x3", "1,4x4,5"], [0, 1, 0, 1, 0], BOTH.format("1 too large")),
        (["1,2x2,2x2,2x2,2x2,1"], [0, 1, 1, 1, 1, 0],
         "the ids of 4 images (segments 1, 2, 3 and 1 more) are 1 too large; all other tokens are right"),
        (["3,2x2x3,4"], [0, 1, 0], "the ids of one grid (segment 1) are 1 too large; all other tokens are right"),
    ],
)  # fmt: skip
def test_shifted_images_between_right_tokens_are_recognized(specs: list[str], shifts: list[int], cause: str) -> None:
    segments = table(*specs)
    ids = mmpos.place(segments, "mrope").dense() + np.repeat(shifts, segments.lengths)
    assert cause_of(ids, *specs, scheme="mrope") == cause
    of_positions = mmpos.diagnose(ids, mmpos.place(segments, "mrope"))
    assert of_positions.cause == cause.replace("image", "grid")
    ids[:, -1] += 7
    assert "all other tokens are right" not in str(diagnose(ids, *specs, scheme="mrope"))


REST = "from the first difference to the end of the document, ids are {} too {}"
RUN = "a run of {} tokens has ids that are {} too large; all other tokens are right"
RUNS = "2 runs of tokens have ids that are 1 too large; the tokens between them are right"


@pytest.mark.parametrize(
    ("spec", "shifts", "cause"),
    [
        ("3,2x3,4", [(11, 13, 5)], REST.format(5, "large")),
        ("3,2x3,4", [(11, 13, -7)], REST.format(7, "small")),
        ("3,2x3,4,4x4,5", [(14, 29, 1)], RUN.format(15, 1)),  # not the whole document
        ("30", [(5, 25, 3)], RUN.format(20, 3)),
        ("30", [(5, 24, 3), (24, 25, 4)], None),
        ("30", [(21, 24, 1), (25, 28, 1)], RUNS),
        ("1,1x1,1,1x1,1", [(1, 2, 1), (3, 4, 2)], None),  # two shifts explain only the two ids that they come from
        ("30", [(21, 24, 1), (25, 28, 2)], None),
    ],
)
def test_constant_offsets_are_recognized(spec: str, shifts: list[tuple[int, int, int]], cause: str | None) -> None:
    ids = ids_of(spec, scheme="mrope")
    for start, stop, shift in shifts:
        ids[:, start:stop] += shift
    assert cause_of(ids, spec, scheme="mrope") == cause


@pytest.mark.parametrize("far", [np.uint64(2**63), np.float64(1e300)])
def test_ids_far_beyond_any_start_are_reported_as_a_constant_too_large(far: Any) -> None:
    ids = np.arange(3).astype(far.dtype) + far
    cause = diagnose(ids, "3").cause
    assert cause is not None
    assert cause.startswith("from the first difference to the end of the document, ids are ")


@settings(settled, max_examples=60)
@given(SPECS, SCHEMES, st.data())
def test_one_wrong_token_is_located_and_no_evidence_of_a_mistake(
    specs: list[str], scheme: str, data: st.DataObject
) -> None:
    segments = table(*specs)
    placed = mmpos.place(segments, scheme)
    right = placed.dense().astype(np.float64)
    ids, tokens = right.copy(), st.integers(0, placed.num_tokens - 1)
    axis, token = data.draw(st.integers(-1, placed.axes - 1)), data.draw(tokens)  # axis -1: every axis
    others = st.integers(0, 50) | st.sampled_from([-1, 2**31, 0.25, *right[axis]])
    ids[slice(None) if axis < 0 else axis, token] = data.draw(others | tokens.map(lambda t: right[axis, t]))
    (wrong,) = (ids != right)[:, token].nonzero()
    for documents, placed_by in ((segments, scheme), (placed, None)):
        diagnosis = mmpos.diagnose(ids, documents, placed_by)
        assert diagnosis.equal == (not wrong.size)
        if wrong.size:
            document = int(placed.cu_seqlens.searchsorted(token, side="right")) - 1
            at = (document, token - placed.cu_seqlens[document], wrong[0])
            assert (diagnosis.document, diagnosis.token, diagnosis.axis) == at
            assert (diagnosis.different_tokens, diagnosis.different_documents, diagnosis.cause) == (1, 1, None)
            assert diagnosis.got == tuple(ids[:, token].tolist())


SCRAMBLED = [1, 9, 4, 8, 2, 7, 3, 6, 5, 0, 12]


@pytest.mark.parametrize(
    ("ids", "different"),
    [
        ([0, 1, 2, 3, 9], 1),
        ([0, 1, 2, 0, 0], 2),
        (SCRAMBLED, 11),  # a start at 1 explains only the first id …
        ([*SCRAMBLED[:9], 10, 12], 11),  # … or also the tenth
    ],
)
def test_a_mistake_that_explains_few_wrong_ids_is_not_reported(ids: list[int], different: int) -> None:
    diagnosis = diagnose(ids, str(len(ids)), scheme="flatten")
    assert (diagnosis.different_tokens, diagnosis.cause, diagnosis.explained) == (different, None, 0)


def test_a_partial_cause_is_reported_with_the_number_of_differences_it_explains() -> None:
    ids = np.array(after_grid(7, 8, 9))
    ids[1, 9] = 99
    diagnosis = diagnose(ids, "1,2x3,3")
    assert diagnosis.sentences[2:] == (
        f"Cause of 2 of the 3 differences: {AHEAD}.",
        "To do: continue after a grid where the scheme continues, as positions.explain(TOKEN) shows.",
    )


@settings(settled, max_examples=25)
@given(SPECS, SCHEMES, st.integers(-3, 10**6), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_placed_ids_are_found_equal_whether_packed_or_padded(
    specs: list[str], scheme: str, start: int, more: int, side: Any
) -> None:
    segments = table(*specs)
    placed = mmpos.place(segments, scheme, start)
    padded, mask = placed.padded(placed.max_seqlen + more, side)
    ones = padded + (mask == 0)
    for ids in (placed.dense(), padded, ones):
        assert mmpos.diagnose(ids, segments, scheme, start, side=side).equal
    assert mmpos.diagnose(ones, segments, scheme, start, attention_mask=mask).equal


def a_case(ids: Ids, segments: SegmentTable, scheme: str) -> Deviation:
    placed = mmpos.place(segments, scheme)
    return Deviation(ids, placed, np.zeros(placed.num_documents, np.int64), 0.0, segments, get_scheme(scheme))


@settings(settled, max_examples=4)
@given(SPECS, SCHEMES, st.data())
def test_ids_with_a_mistake_are_explained_by_that_mistake_or_an_earlier_one(
    specs: list[str], scheme: str, data: st.DataObject
) -> None:
    segments = table(*specs)
    want = mmpos.place(segments, scheme).dense().astype(np.float64)
    wrong = want + 0
    wrong[:, data.draw(st.integers(0, want.shape[1] - 1)) :] += data.draw(st.integers(-9, 9))
    case = a_case(wrong, segments, scheme)
    if not case.wrong.any():
        return
    for mistake in MISTAKES:
        for guess in mistake.guesses(case):
            if guess.ids is None:
                continue
            ids = np.broadcast_to(guess.ids, want.shape).astype(np.float64)
            diagnosis = mmpos.diagnose(ids, segments, scheme)
            assert diagnosis.equal == bool((ids == want).all())
            if diagnosis.different_tokens > 1:  # a single wrong token identifies no mistake
                assert diagnosis.explained == diagnosis.different_tokens, (guess.cause, str(diagnosis))


SHAPE = "ids: got shape {}, want (2, 11) packed or (2, 1, 11) padded, or either without axes for 1-D ids"
DEFAULT = "; these shapes are for scheme rope-tie, the default; choose another with --scheme or scheme="


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([["a"]], {}, "ids: got dtype <U1, want integers or floats (bfloat16: save ids.float())"),
        ([[0.0] * 11, [0.0, np.nan] + [0.0] * 9], {}, "ids[1, 1]: got nan, want a number"),
        (
            np.zeros((3, 11)),
            {},
            SHAPE.format((3, 11)) + f"{DEFAULT}; with Transformers' text row before the axes, want (3, 1, 11): "
            "ids[:, None]",
        ),
        (
            np.zeros((1, 3, 11)),
            {},
            SHAPE.format((1, 3, 11)) + "; these are batch first, as in verl: want the 3 rows, with Transformers' text "
            "row before the axes, first: ids.swapaxes(0, 1)",
        ),
        (np.zeros((3, 1, 10)), {}, SHAPE.format((3, 1, 10)) + DEFAULT),
        (np.zeros((2, 29)), {},
         SHAPE.format((2, 29)) + "; the ids have one token per patch before 2x2 merging, want one per merged patch"),
        (np.zeros(()), {}, SHAPE.format(())),
        (np.zeros((2, 11)), {"side": "top"}, "side: got 'top', want one of 'left', 'right'"),
        *((np.zeros((2, 11)), {"tolerance": far}, f"tolerance: got {far}, want a finite number >= 0")
          for far in (-1, np.nan)),
        (np.zeros((2, 11)), {"scheme": "tie"}, None),
        (np.zeros((2, 11)), {"start": 0.5}, "start: got 0.5, want an integer"),
        (np.zeros((2, 11)), {"attention_mask": [[1] * 11]},
         "attention_mask requires padded ids, got packed ids of shape (2, 11)"),
        (np.zeros((2, 1, 12)), {"attention_mask": [[1] * 11]}, "attention_mask: got shape (1, 11), want (1, 12)"),
        (np.zeros((2, 1, 12)), {"attention_mask": [[1] * 12]}, "attention_mask[0]: got 12 tokens, want 11"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(ids: Ids, options: dict[str, Any], message: str | None) -> None:
    with pytest.raises(InvalidInputError) as error:
        diagnose(ids, "3,2x3,2", **options)
    assert message is None or str(error.value) == message


@pytest.mark.parametrize("option", [{"scheme": "mrope"}, {"start": 1}, {"start": [0]}])
def test_documents_must_be_a_table_and_a_position_table_takes_no_scheme(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(option))} cannot be combined with a PositionTable"):
        mmpos.diagnose([0], mmpos.place(table("1")), **option)
    with pytest.raises(InvalidInputError, match="documents: got list, want a SegmentTable or a PositionTable"):
        mmpos.diagnose([0], [[mmpos.Text(1)]], **option)  # type: ignore[arg-type]


def test_a_table_built_from_ids_has_a_run_of_text_wherever_ids_increase_by_one() -> None:
    positions = table_of_ids(np.array([[0, 1, 2, 3, 5]]), None, np.array([2, 0, 3]), "ids")
    assert positions.dense().tolist() == [[0, 1, 2, 3, 5]]
    assert positions.lengths.tolist() == [2, 0, 3]
    assert [positions.describe(token) for token in (1, 2, 4)] == [
        "token 1 of a run of text (segment 0)",
        "token 0 of a run of text (segment 1)",
        "token 0 of a run of text (segment 2)",
    ]


def test_token_indices_between_right_ids_are_recognized() -> None:
    ids = ids_of("2,6x9,12", scheme="mrope")
    ids[:, [23, 24, 25]] = [[23, 24, 25]] * 3  # ids of tokens 68 to 70: text continues at 2 + 9 after 54 patches
    assert cause_of(ids, "2,6x9,12", scheme="mrope") == SLOTS
    ids[:, 24] += 5
    assert cause_of(ids, "2,6x9,12", scheme="mrope") is None
    decoded = ids_of("3,2x4,4", scheme="mrope")
    decoded[:, 11:14] = [[11, 12, 13]] * 3  # only the last of the four tokens has the delta
    assert cause_of(decoded, "3,2x4,4", scheme="mrope") == SLOTS
