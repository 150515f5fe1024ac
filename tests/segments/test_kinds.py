"""Audio, clips, thumbnails and tiles have their own segments; schemes place audio as text."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
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

CLIP_OF_3 = Clip(2, 2, frames=3, audio=5, seconds_per_frame=0.5)
TILED = (Thumbnail(2, 3), Tile(1, 4, tokens_after=1), Tile(1, 4))


def test_a_table_can_contain_every_kind_of_segment() -> None:
    segments = SegmentTable.from_documents([[Text(3), Audio(4), CLIP_OF_3], [*TILED, Grid(1, 1)]])
    assert fields(segments) == {
        "kind": [TEXT, AUDIO, CLIP, THUMBNAIL, TILE, TILE, GRID],
        "extents": [[1, 1, 3, 1, 1, 1, 1], [1, 1, 2, 2, 1, 1, 1], [3, 4, 2, 3, 4, 4, 1]],
        "segment_offsets": [0, 3, 7],
        "seconds_per_frame": [[0, 0, 1, 0, 0, 0, 0], [1, 1, 2, 1, 1, 1, 1]],
        "row_separator": None,
        "extra_tokens": [0, 0, 5, 0, 1, 0, 0],
    }
    # A clip: 12 patches, 5 audio tokens, 4 markers. The thumbnail and tiles: patches, 2 markers each, and a token after
    # one tile.
    assert segments.lengths.tolist() == [3, 4, 21, 8, 7, 6, 1]
    assert repr(segments) == (
        "SegmentTable(2 documents, 7 segments (1 grid, 1 audio run, 1 clip, 1 thumbnail, 2 tiles), 50 tokens)"
    )


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
