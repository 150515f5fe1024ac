"""Audio, clips and canvases: segments of their own in the table, and text where a scheme places audio."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, Document, batches, fields, settled

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    MmposError,
    SegmentTable,
    Text,
    UnsupportedError,
    block_keys,
    place,
)
from mmpos.segments import AUDIO, CANVAS, CLIP, GRID, PAD, TEXT, Audio, Canvas, Clip
from mmpos.segments.kinds import Segment
from mmpos.segments.table import canvas_spans, token_types

CLIP_OF_3 = Clip(2, 2, frames=3, audio=5, seconds_per_frame=0.5)
SLICED = Canvas(2, 3, rows=2, columns=1, slice_height=1, slice_width=4)


def test_a_table_of_every_kind() -> None:
    segments = SegmentTable.from_documents([[Text(3), Audio(4), CLIP_OF_3], [Canvas(1, 2), SLICED, Grid(1, 1)]])
    assert fields(segments) == {
        "kind": [TEXT, AUDIO, CLIP, CANVAS, CANVAS, GRID],
        "extents": [[1, 1, 3, 1, 1, 1], [1, 1, 2, 1, 2, 1], [3, 4, 2, 2, 3, 1]],
        "segment_offsets": [0, 3, 6],
        "seconds_per_frame": [[0, 0, 1, 0, 0, 0], [1, 1, 2, 1, 1, 1]],
        "row_separator": None,
        "details": [[0, 0, 5, 0, 2, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 4, 0]],
    }
    # A clip: 12 patches, 5 tokens of audio, 4 markers. Canvases: 2 patches and 2 markers; 6 + 2, two slices of
    # 4 + 2, and the token between their rows.
    assert segments.lengths.tolist() == [3, 4, 21, 4, 21, 1]
    assert repr(segments) == (
        "SegmentTable(2 documents, 6 segments (1 grid, 1 audio run, 1 clip, 2 canvases), 54 tokens)"
    )


def test_arrays_and_spans_say_the_same_table() -> None:
    documents: list[list[Segment]] = [[Text(2), Audio(3), Text(1), CLIP_OF_3], [SLICED, Text(4)]]
    want = SegmentTable.from_documents(documents)
    arrays = {name: values for name, values in fields(want).items() if values is not None}
    assert fields(SegmentTable.from_arrays(**arrays)) == fields(want)
    spans = SegmentTable.from_spans(
        [27, 25],
        [2, 6, 0],
        [[1, 1, 3], [3, 2, 2], [1, 2, 3]],
        [0, 0, 1],
        seconds_per_frame=[None, 0.5, None],
        kind=[AUDIO, CLIP, CANVAS],
        details=[[0, 5, 2], [0, 0, 1], [0, 0, 1], [0, 0, 4]],
    )
    assert fields(spans) == fields(want)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Audio(0), "Audio.length: got 0, want >= 1"),
        (lambda: Clip(2, 2, frames=3, audio=0), "Clip.audio: got 0, want >= 1"),
        (lambda: Clip(2, 0, frames=3, audio=1), "Clip.width: got 0, want >= 1"),
        (lambda: Clip(2, 2, frames=3, audio=1, seconds_per_frame=0), "Clip.seconds_per_frame: got 0, want > 0 (a"),
        (lambda: Canvas(0, 2), "Canvas.height: got 0, want >= 1"),
        (lambda: Canvas(1, 2, rows=-1), "Canvas.rows: got -1, want >= 0"),
        (lambda: Canvas(1, 2, rows=2, columns=1, slice_height=3), "Canvas.slice_width: got 0, want >= 1"),
        (lambda: Canvas(1, 2, slice_width=2.5), "Canvas.slice_width: got 2.5, want an integer"),  # type: ignore[arg-type]
    ],
)
def test_parts_check_themselves(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        make()


def table(kind: int, details: list[int] | None, extents: tuple[int, int, int] = (1, 1, 2)) -> SegmentTable:
    columns = None if details is None else np.array(details)[:, None]
    return SegmentTable.from_arrays([kind], np.array(extents)[:, None], [0, 1], details=columns)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: table(6, None), InvalidInputError, "kind[0]: got 6, want <= 5"),
        (lambda: table(CLIP, None), InvalidInputError, "details[0, 0]: got 0, want >= 1"),
        (lambda: table(CLIP, [3, 0, 1, 0]), InvalidInputError, "details[2, 0]: got 1, want 0 outside"),
        (
            lambda: table(TEXT, [1, 0, 0, 0]),
            InvalidInputError,
            "details[0, 0]: got 1, want 0 outside clips and canvases",
        ),
        (lambda: table(CANVAS, [1, 1, 0, 1]), InvalidInputError, "details[2, 0]: got 0, want >= 1"),
        (lambda: table(CANVAS, [-1, 0, 0, 0]), InvalidInputError, "details[0, 0]: got -1, want >= 0"),
        (lambda: table(CANVAS, None, (2, 1, 2)), InvalidInputError, "extents[0, 0]: got 2, want 1 in a canvas"),
        (lambda: table(AUDIO, None, (1, 2, 2)), InvalidInputError, "extents[:, 0]: got [1, 2, 2], want [1, 1, length]"),
        (lambda: table(CANVAS, [2**20] * 4), LimitExceededError, "segment 0: got 1208925819"),
        (lambda: table(CLIP, [2**31 - 1, 0, 0, 0]), LimitExceededError, "segment 0: got 2147483653 tokens"),
        (
            lambda: SegmentTable.from_arrays([TEXT], [[1]] * 3, [0, 1], details=[[0]] * 3),
            InvalidInputError,
            "details: got shape (3, 1), want (4, n)",
        ),
        (
            lambda: SegmentTable.from_spans([4], [0], [[1, 1, 2]], kind=[TEXT]),
            InvalidInputError,
            "kind[0]: got 0, want a grid, audio, clip or canvas",
        ),
        (
            lambda: SegmentTable.from_spans([4], [0], [[1, 1, 2]], details=[[0]] * 4),
            InvalidInputError,
            "kind: got None, want the kind of each span, which has details",
        ),
        (
            lambda: SegmentTable.from_spans([6], [0], [[1, 1, 2]], kind=[CLIP], details=[[1], [0], [0], [0]]),
            InvalidInputError,
            "offsets[0]: the span of 7 tokens ends at 7, want <= 6, the length of document 0",
        ),
        (
            lambda: SegmentTable.from_documents([[Text(1), "audio"]]),  # type: ignore[list-item]
            InvalidInputError,
            "documents[0][1]: got str, want one of Text, Audio, Grid, Clip, Canvas",
        ),
    ],
)
def test_tables_of_kinds_are_checked(make: Callable[[], object], error: type[MmposError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()


@pytest.mark.parametrize("case", [case for case in CASES if case.text], ids=lambda case: case.label)
def test_audio_has_the_ids_of_text_in_every_scheme(case: Case) -> None:
    @settled
    @given(batches(case), st.data())
    def check(documents: list[Document], data: st.DataObject) -> None:
        spoken: list[list[Segment]] = [
            [Audio(part.length) if isinstance(part, Text) and data.draw(st.booleans()) else part for part in document]
            for document in documents
        ]
        got = place(SegmentTable.from_documents(spoken), case.scheme)
        want = place(SegmentTable.from_documents(documents), case.scheme)
        np.testing.assert_array_equal(got.table, want.table)
        np.testing.assert_array_equal(got.documents, want.documents)

    check()


@pytest.mark.parametrize(
    ("part", "scheme", "words"),
    [
        (Audio(2), "grid-2d", "documents[0][1]: got audio, want grids only in scheme 'grid-2d'"),
        (CLIP_OF_3, "mrope", "documents[0][1]: got a clip, want its video and its audio apart in scheme 'mrope'"),
        (
            SLICED,
            "flatten",
            "documents[0][1]: got a canvas, want its thumbnail and its slices as grids in scheme 'flatten'",
        ),
    ],
)
def test_schemes_refuse_kinds_that_they_do_not_know(part: Segment, scheme: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(words)):
        place(SegmentTable.from_documents([[Grid(1, 1), part]]), scheme)


def test_audio_between_grids_keeps_them_apart() -> None:
    assert place(SegmentTable.from_documents([[Grid(1, 1), Audio(1), Grid(1, 1)]]), "rope-tie").num_tokens == 3


def test_token_types_of_audio_and_canvases() -> None:
    #                                      < 1 1 > < 1 > < 1 > / < 1 > < 1 >   a a
    canvas = Canvas(1, 2, rows=2, columns=2, slice_height=1, slice_width=1)
    want = [0, 0, 1, 1, 0, *[0, 1, 0] * 2, 0, *[0, 1, 0] * 2, 3, 3, 1, 1]
    segments = SegmentTable.from_documents([[Text(1), canvas, Audio(2), Grid(1, 2)]])
    assert token_types(segments).tolist() == want
    assert canvas_spans(segments).tolist() == [[2, 6, 9, 13, 16], [4, 7, 10, 14, 17]]
    assert canvas_spans(SegmentTable.from_documents([[Text(1)]])).tolist() == [[], []]


def test_padding_keeps_every_column() -> None:
    ids = np.full((2, 6), 1)
    ids[0, 2:5] = 9
    mask = [[1] * 6, [0, 0, 1, 1, 1, 1]]
    segments = SegmentTable.from_input_ids(ids, [[1, 1, 3]], image_token_id=9, attention_mask=mask)
    assert fields(segments)["kind"] == [TEXT, GRID, TEXT, PAD, TEXT]
    kinds: list[Any] = [[Audio(1), CLIP_OF_3], [SLICED]]
    whole = SegmentTable.from_documents(kinds)
    padded = whole._with_padding(np.array([2, 0]), np.array([0, 3]))
    assert fields(padded) == {
        "kind": [PAD, AUDIO, CLIP, CANVAS, PAD],
        "extents": [[1, 1, 3, 1, 1], [1, 1, 2, 2, 1], [2, 1, 2, 3, 3]],
        "segment_offsets": [0, 3, 5],
        "seconds_per_frame": [[0, 0, 1, 0, 0], [1, 1, 2, 1, 1]],
        "row_separator": None,
        "details": [[0, 0, 5, 2, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 4, 0]],
    }


@pytest.mark.parametrize(
    "changed",
    [
        Audio(5),
        Text(4),
        Clip(2, 2, frames=3, audio=6, seconds_per_frame=0.5),
        Clip(2, 2, frames=3, audio=5, seconds_per_frame=1),
    ],
)
def test_block_keys_tell_what_is_audio_and_how_long_it_is(changed: Segment) -> None:
    def keys(first: Segment) -> list[bytes]:
        segments = SegmentTable.from_documents([[first, Text(30)]])
        (chain,) = block_keys(segments, place(segments, "tmrope"), 4)
        return chain

    same = CLIP_OF_3 if isinstance(changed, Clip) else Audio(4)
    assert keys(same) == keys(same)
    assert keys(same)[4] != keys(changed)[4]


def test_block_keys_take_a_hash_for_all_that_has_content() -> None:
    segments = SegmentTable.from_documents([[Audio(4), CLIP_OF_3, Grid(1, 1), Text(2)]])
    positions = place(segments, "tmrope")
    with pytest.raises(InvalidInputError, match="image_hashes: got 2, want 3, one per grid"):
        block_keys(segments, positions, 4, image_hashes=["a", "b"])
    one, other = (block_keys(segments, positions, 4, image_hashes=[first, "b", "c"])[0] for first in "ad")
    assert one[0] != other[0]
