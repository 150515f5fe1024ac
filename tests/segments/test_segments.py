"""SegmentTable: documents, arrays and spans build the same table of text, grids, audio, clips, thumbnails and tiles."""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, Document, batches, fields, settled
from refusals import assert_refused

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    SegmentTable,
    Text,
    UnsupportedError,
    block_keys,
    place,
)
from mmpos.segments import (
    AUDIO,
    CLIP,
    GRID,
    TEXT,
    THUMBNAIL,
    TILE,
    Audio,
    Clip,
    CropMarkers,
    Thumbnail,
    Tile,
)
from mmpos.segments.kinds import NO_FRAME, Segment
from mmpos.segments.table import token_types

ANYTHING = next(case for case in CASES if case.name == "flatten")
CLIP_OF_3 = Clip(2, 2, frames=3, audio=5, seconds_per_frame=0.5)
TILED = (Thumbnail(2, 3), Tile(1, 4, tokens_after=1), Tile(1, 4))

BUILT: list[tuple[list[list[Segment]], dict[str, Any], list[int], str]] = [
    (
        [[Text(3), Grid(1, 4), Grid(2, 2, frames=3, seconds_per_frame=0.5)], [Grid(2, 3, row_separator=True)]],
        {
            "kind": [TEXT, GRID, GRID, GRID],
            "extents": [[1, 1, 3, 1], [1, 1, 2, 2], [3, 4, 2, 3]],
            "segment_offsets": [0, 3, 4],
            "seconds_per_frame": [[0, 0, 1, 0], [1, 1, 2, 1]],
            "row_separator": [False, False, False, True],
            "extra_tokens": None,
        },
        [3, 4, 12, 8],
        "SegmentTable(2 documents, 4 segments (3 grids), 27 tokens)",
    ),
    (
        [[Text(3), Audio(4), CLIP_OF_3], [*TILED, Grid(1, 1)]],
        {
            "kind": [TEXT, AUDIO, CLIP, THUMBNAIL, TILE, TILE, GRID],
            "extents": [[1, 1, 3, 1, 1, 1, 1], [1, 1, 2, 2, 1, 1, 1], [3, 4, 2, 3, 4, 4, 1]],
            "segment_offsets": [0, 3, 7],
            "seconds_per_frame": [[0, 0, 1, 0, 0, 0, 0], [1, 1, 2, 1, 1, 1, 1]],
            "row_separator": None,
            "extra_tokens": [0, 0, 5, 0, 1, 0, 0],
        },
        # A clip: 12 patches, 5 audio tokens, 4 markers. The thumbnail and tiles: patches, 2 markers each, and a token
        # after one tile.
        [3, 4, 21, 8, 7, 6, 1],
        "SegmentTable(2 documents, 7 segments (1 grid, 1 audio run, 1 clip, 1 thumbnail, 2 tiles), 50 tokens)",
    ),
]


@pytest.mark.parametrize(("documents", "want", "lengths", "words"), BUILT, ids=["grids", "every kind"])
def test_from_documents_builds_a_table(
    documents: list[list[Segment]], want: dict[str, Any], lengths: list[int], words: str
) -> None:
    segments = SegmentTable.from_documents(documents)
    assert fields(segments) == want
    assert segments.lengths.tolist() == lengths
    assert (segments.num_documents, segments.num_tokens, repr(segments)) == (len(documents), sum(lengths), words)


def test_zero_documents_are_accepted() -> None:
    nothing = {"kind": [], "extents": [[], [], []], "segment_offsets": [0]}
    nothing |= {"seconds_per_frame": None, "row_separator": None, "extra_tokens": None}
    assert fields(SegmentTable.from_documents([])) == nothing
    assert fields(SegmentTable.from_spans([], [], [])) == nothing
    assert fields(SegmentTable.from_arrays([], [], [0])) == nothing


def test_grid_from_thw_expects_frames_height_and_width() -> None:
    grid = Grid.from_thw(np.array([3, 1, 2]), row_separator=True)
    assert grid == Grid(1, 2, frames=3, row_separator=True)
    assert grid.extents == (3, 1, 2)
    assert Grid.from_thw(torch.tensor([3, 1, 2])) == Grid(1, 2, frames=3)


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (0.1, Fraction(1, 10)),
        (1 / 3, Fraction(1, 3)),
        (2, 2),
        (np.float32(1.5), Fraction(3, 2)),
        (Fraction(7, 9), None),
    ],
)
def test_floats_become_the_nearest_simple_fraction(seconds: float | Fraction, want: Fraction | None) -> None:
    assert Grid(1, 1, seconds_per_frame=seconds).seconds_per_frame == (seconds if want is None else want)


@settled
@given(batches(ANYTHING), st.booleans(), st.sampled_from([list, np.asarray, torch.tensor]))
def test_spans_and_arrays_give_the_same_table_as_documents(
    batch: list[Document], separator: bool, kind: Callable[..., Any]
) -> None:
    documents: list[Document] = []
    spans: list[tuple[int, tuple[int, int, int], int, Any]] = []
    lengths = []
    for d, document in enumerate(batch):
        documents.append([])
        length = 0
        for part in document:
            before = documents[-1][-1] if documents[-1] else None
            if isinstance(part, Grid):
                spans.append((length, part.extents, d, part.seconds_per_frame))
                documents[-1].append(replace(part, row_separator=separator))
                length += part.frames * part.height * (part.width + separator)
                continue
            length += part.length
            if isinstance(before, Text):  # spans cannot distinguish adjacent runs of text
                documents[-1][-1] = Text(before.length + part.length)
            else:
                documents[-1].append(part)
        lengths.append(length)
    want = SegmentTable.from_documents(documents)
    offsets, grid_thw, owner, seconds = map(list, zip(*spans, strict=True)) if spans else ([],) * 4
    got = SegmentTable.from_spans(
        lengths,
        kind(offsets) if spans else [],
        grid_thw,
        kind(owner) if spans else [],
        seconds_per_frame=seconds if spans else None,
        row_separator=separator and bool(spans),
    )
    assert fields(got) == fields(want)
    arrays = {name: array for name, array in vars(want).items() if array is not None}
    arrays["kind"] = kind(want.kind.tolist()) if want.kind.size else []
    assert fields(SegmentTable.from_arrays(**arrays)) == fields(want)


ONE, SQUARE = [[1, 1, 1]], [[1, 2, 2]]

# Error messages, and the lengths, offsets, grids and other arguments that cause them.
SPANS_REFUSED: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "grid_thw: got shape (0,), want (2, 3)": ([5], [0, 2], [], {}),
    "grid_thw: got shape (1, 2), want (1, 3)": ([5], [0], [[1, 2]], {}),
    "grid_thw: got dtype float64, want integers": ([5], [0], [[1.0, 1.0, 1.0]], {}),
    "grid_thw[0, 1]: got 0, want >= 1": ([5], [0], [[1, 0, 1]], {}),
    "offsets[0]: got -1, want >= 0": ([5], [-1], ONE, {}),
    "lengths[1]: got 0, want >= 1": ([5, 0], [0], ONE, {"documents": [0]}),
    "lengths: got shape (), want (n,)": (5, [], [], {}),
    "documents: got None, want the document of each span, since there are 2 lengths": ([5, 5], [0], ONE, {}),
    "documents[0]: got 2, want <= 1": ([5, 5], [0], ONE, {"documents": [2]}),
    "documents[1]: got 0 after 1, want ascending indices": ([5, 5], [0, 0], ONE * 2, {"documents": [1, 0]}),
    "offsets[1]: got 3 in document 0, want >= 4, the end of the span before it": ([9], [0, 3], SQUARE * 2, {}),
    "offsets[0]: the span of 4 tokens ends at 10, want <= 9, the length of document 0": ([9], [6], SQUARE, {}),
    "seconds_per_frame: got 0 values, want 1, one per span": ([5], [0], ONE, {"seconds_per_frame": []}),
    "seconds_per_frame: got 2 values, want 1, one per span": ([5], [0], ONE, {"seconds_per_frame": [1, 2]}),
    "seconds_per_frame[0]: got 0, want > 0 (a float: >= 1e-06)": ([5], [0], ONE, {"seconds_per_frame": [0]}),
    "seconds_per_frame: got 1.5, want a list of seconds": ([5], [0], ONE, {"seconds_per_frame": 1.5}),
}


@pytest.mark.parametrize("message", SPANS_REFUSED)
def test_invalid_spans_are_refused(message: str) -> None:
    lengths, offsets, grid_thw, options = SPANS_REFUSED[message]
    with pytest.raises(InvalidInputError) as error:
        SegmentTable.from_spans(lengths, offsets, grid_thw, **options)
    assert str(error.value) == message


def test_the_callers_arrays_stay_unchanged_and_writable() -> None:
    kind, extents, offsets = np.array([0, 1], np.uint8), np.array([[1, 1], [1, 2], [3, 2]]), np.array([0, 2])
    before = kind.copy(), extents.copy(), offsets.copy()
    segments = SegmentTable(kind, extents, offsets)
    place(segments).pad(20)
    for array, old in zip((kind, extents, offsets), before, strict=True):
        assert array.flags.writeable
        np.testing.assert_array_equal(array, old)


def test_tables_of_equal_documents_are_equal() -> None:
    documents: list[Document] = [[Text(3), Grid(2, 3), Text(2)], [Text(1)]]
    table = SegmentTable.from_documents(documents)
    plain = SegmentTable.from_arrays(
        table.kind,
        table.extents,
        table.segment_offsets,
        seconds_per_frame=[[0] * 4, [1] * 4],
        row_separator=[False] * 4,
        extra_tokens=[0] * 4,
    )
    timed = SegmentTable.from_documents([[Grid(2, 3, frames=2, seconds_per_frame=Fraction(1, 2))]])
    equal = [SegmentTable.from_spans([11, 1], [3], [[1, 2, 3]], [0]), pickle.loads(pickle.dumps(table)), plain]
    assert equal == [table] * 3
    assert {table, *equal} == {table}
    assert timed == SegmentTable.from_spans([12], [0], [[2, 2, 3]], seconds_per_frame=[0.5])
    others: list[list[Document]] = [
        [[Text(3), Grid(2, 3), Text(3)]],
        [[Text(3), Grid(3, 2), Text(2)], [Text(1)]],
        [[Text(3), Grid(2, 3, row_separator=True), Text(2)], [Text(1)]],
        [[Text(3), Grid(2, 3, seconds_per_frame=1), Text(2)], [Text(1)]],
    ]
    assert [other for other in [*map(SegmentTable.from_documents, others), 3] if other == table] == []


@pytest.mark.parametrize(
    "name", ["kind", "extents", "segment_offsets", "seconds_per_frame", "row_separator", "lengths"]
)
def test_the_arrays_of_a_table_are_read_only(name: str) -> None:
    grid = Grid(1, 1, row_separator=True, seconds_per_frame=1)
    array = getattr(SegmentTable.from_documents([[grid]]), name)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0


# Audio, clips, thumbnails and tiles.


def test_arrays_and_spans_give_the_same_table() -> None:
    documents: list[list[Segment]] = [[Text(2), Audio(3), Text(1), CLIP_OF_3], [*TILED, Text(4)]]
    want = SegmentTable.from_documents(documents)
    arrays = {name: values for name, values in fields(want).items() if values is not None}
    assert fields(SegmentTable.from_arrays(**arrays)) == fields(want)
    spans = SegmentTable.from_spans(
        [27, 25],
        [2, 6, 0, 8, 15],
        [[1, 1, 3], [3, 2, 2], [1, 2, 3], [1, 1, 4], [1, 1, 4]],
        [0, 0, 1, 1, 1],
        seconds_per_frame=[None, 0.5, None, None, None],
        kind=[AUDIO, CLIP, THUMBNAIL, TILE, TILE],
        extra_tokens=[0, 5, 0, 1, 0],
    )
    assert fields(spans) == fields(want)


def table(kind: int, extra: Any = None, extents: tuple[int, int, int] = (1, 1, 2), **more: Any) -> SegmentTable:
    column = extra if isinstance(extra, list) or extra is None else [extra]
    return SegmentTable.from_arrays([kind], np.array(extents)[:, None], [0, 1], extra_tokens=column, **more)


def spans(length: int, **more: Any) -> SegmentTable:
    return SegmentTable.from_spans([length], [0], [[1, 1, 2]], **more)


def in_scheme(scheme: str, *documents: Sequence[Any]) -> object:
    return place(SegmentTable.from_documents(documents), scheme)


WHOLE = "want its video and its audio apart in scheme"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Audio(0), "Audio.length: got 0, want >= 1"),
    (lambda: Clip(2, 2, frames=3, audio=0), "Clip.audio: got 0, want >= 1"),
    (lambda: Clip(2, 0, frames=3, audio=1), "Clip.width: got 0, want >= 1"),
    (lambda: Clip(2, 2, frames=3, audio=1, seconds_per_frame=0), "Clip.seconds_per_frame: got 0, want > 0 (a"),
    (lambda: Thumbnail(0, 2), "Thumbnail.height: got 0, want >= 1"),
    (lambda: Tile(1, 2, tokens_after=-1), "Tile.tokens_after: got -1, want >= 0"),
    (lambda: Tile(1, 2.5), "Tile.width: got 2.5, want an integer"),  # type: ignore[arg-type]
    (lambda: Grid(1, 1, first_frame=0.5), "Grid.first_frame: got 0.5, want an integer"),  # type: ignore[arg-type]
    (lambda: CropMarkers(1, 2, -3, 4, 5), "CropMarkers.tile_start: got -3, want >= 0"),
    (lambda: CropMarkers(1, 2, 1, 4, 5), "CropMarkers.tile_start must differ from thumbnail_start, got 1"),
    (lambda: table(7), "kind[0]: got 7, want <= 6"),
    (lambda: table(CLIP), "extra_tokens[0]: got 0, want >= 1, the audio of a clip"),
    (lambda: table(TEXT, 1), "extra_tokens[0]: got 1, want 0 outside clips, thumbnails and tiles"),
    (lambda: table(THUMBNAIL, -1), "extra_tokens[0]: got -1, want >= 0"),
    (lambda: table(TEXT, [0, 0]), "extra_tokens: got shape (2,), want (1,)"),
    (lambda: table(TEXT, first_frame=[0]), "first_frame[0]: got one, want none outside grids"),
    (lambda: table(GRID, first_frame=[-(2**31) - 1]), "first_frame[0]: got -2147483649, want >= -2147483648"),
    (lambda: table(TEXT, first_frame=[0, 0]), "first_frame: got shape (2,), want (1,)"),
    (lambda: table(THUMBNAIL, None, (2, 1, 2)), "extents[0, 0]: got 2, want 1 in a thumbnail or a tile"),
    (lambda: table(AUDIO, None, (1, 2, 2)), "extents[:, 0]: got [1, 2, 2], want [1, 1, length]"),
    (lambda: table(THUMBNAIL, 2**31 - 1), "segment 0: got 2147483651 tokens"),
    (lambda: table(CLIP, 2**31 - 1), "segment 0: got 2147483653 tokens"),
    (lambda: spans(4, kind=[TEXT]), "kind[0]: got 0, want a grid, audio, clip, thumbnail or tile"),
    (lambda: spans(4, extra_tokens=[0]), "extra_tokens requires kind"),
    (lambda: spans(6, kind=[CLIP], extra_tokens=[1]), "offsets[0]: the span of 7 tokens ends at 7, want <= 6, the "),
    (lambda: in_scheme("rows", [Text(1), "audio"]), "documents[0][1]: got str, want one of Text, Audio, Grid, Clip, T"),
    (
        lambda: in_scheme("rows", [Thumbnail(1, 1)], [Tile(1, 1)]),
        "segment 1: got a tile, want a thumbnail or another tile right before it",
    ),
    (lambda: in_scheme("rows", [Thumbnail(1, 1), Tile(1, 1), Text(1), Tile(1, 1)]), "segment 3: got a tile, want"),
    (
        lambda: in_scheme("grid-2d", [Grid(1, 1), Audio(2)]),
        "documents[0][1]: got audio, want grids only in scheme 'gri",
    ),
    (lambda: in_scheme("rows", [Grid(1, 1), CLIP_OF_3]), f"documents[0][1]: got a clip, {WHOLE} 'rows'"),
    (lambda: in_scheme("mrope", [Grid(1, 1), CLIP_OF_3]), f"documents[0][1]: got a clip, {WHOLE} 'mrope'"),
    (
        lambda: in_scheme("mrope", TILED),
        "documents[0][0]: got a thumbnail, want a grid between texts in scheme 'mrope'",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_segments_of_every_kind_are_checked(make: Callable[[], object], message: str) -> None:
    limit, unsupported = message.startswith("segment 0"), "in scheme" in message
    error = LimitExceededError if limit else UnsupportedError if unsupported else InvalidInputError
    assert_refused(message, make, error)


@pytest.mark.parametrize("case", [case for case in CASES if case.text], ids=lambda case: case.label)
def test_audio_has_the_same_ids_as_text_in_every_scheme(case: Case) -> None:
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


def test_token_types_distinguish_audio_patches_and_markers() -> None:
    #         < 1 1 >     < 1 > / /        < 1 >
    want = [0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 3, 3, 1, 1]
    picture: list[Segment] = [Thumbnail(1, 2), Tile(1, 1, tokens_after=2), Tile(1, 1)]
    segments = SegmentTable.from_documents([[Text(1), *picture, Audio(2), Grid(1, 2)]])
    assert token_types(segments).tolist() == want


def test_grids_name_the_frame_at_which_they_begin() -> None:
    documents: list[list[Segment]] = [[Text(2), Grid(1, 1)], [Grid(1, 2, first_frame=0), Grid(1, 1, first_frame=-8)]]
    segments = SegmentTable.from_documents(documents)
    assert fields(segments)["first_frame"] == [NO_FRAME, NO_FRAME, 0, -8]
    assert fields(SegmentTable.from_arrays(**vars(segments))) == fields(segments)
    plain = SegmentTable.from_documents([[Text(2)]])
    assert plain.first_frame is None
    assert plain == replace(plain, first_frame=np.array([NO_FRAME]))
    assert SegmentTable.from_documents([[Grid(1, 1, first_frame=0)]]) != SegmentTable.from_documents([[Grid(1, 1)]])


def test_block_keys_depend_on_the_tokens_after_tiles() -> None:
    # The first seven tokens have the same ids, but in the second table one more token of the picture follows them.
    one, other = (SegmentTable.from_documents([[Thumbnail(1, 1), Tile(1, 1, tokens_after=after)]]) for after in (1, 2))
    (first,), (second,) = (
        block_keys(table, place(table, "mrope-canvas"), 7, image_hashes=["a", "b"]) for table in (one, other)
    )
    assert first != second


@pytest.mark.parametrize("hashes", [None, ["a", "b", "c"]])
def test_a_key_hashes_the_audio_length_only_for_clips(hashes: list[str] | None) -> None:
    segments = SegmentTable.from_documents([[Audio(2), Clip(1, 1, frames=1, audio=1, seconds_per_frame=1), Grid(2, 3)]])
    positions = place(segments, "tmrope")
    shapes: list[tuple[int, ...]] = [(0, 1, 1, 2, AUDIO), (2, 1, 1, 1, CLIP, 1), (8, 1, 2, 3, 0)]
    digests = [hashlib.sha256(name.encode()).digest() for name in hashes or ()] or [b""] * 3
    grids = b"".join(struct.pack(f"<{len(s)}q", *s) + digest for s, digest in zip(shapes, digests, strict=True))
    block = positions.dense().astype("<i4").tobytes() + struct.pack("<2q", 0, 3) + grids
    root = hashlib.sha256(b"mmpos.block_keys 1" + struct.pack("<4q", 14, 3, False, hashes is not None)).digest()
    assert block_keys(segments, positions, 14, image_hashes=hashes) == [[hashlib.sha256(root + block).digest()]]


def test_block_keys_require_one_hash_per_segment_with_content() -> None:
    segments = SegmentTable.from_documents([[Audio(4), CLIP_OF_3, Grid(1, 1), Text(2)]])
    positions = place(segments, "tmrope")
    with pytest.raises(InvalidInputError, match=r"^image_hashes: got 2, want 3, one per grid and audio run and clip$"):
        block_keys(segments, positions, 4, image_hashes=["a", "b"])
    one, other = (block_keys(segments, positions, 4, image_hashes=[first, "b", "c"])[0] for first in "ad")
    assert one[0] != other[0]
