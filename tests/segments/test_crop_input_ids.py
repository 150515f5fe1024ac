"""Thumbnails and tiles in token ids: found by the tokens around them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from oracle import fields

from mmpos import InvalidInputError, SegmentTable, Text
from mmpos.segments import CropMarkers, Thumbnail, Tile
from mmpos.segments.kinds import Segment

T, P, V = 0, 1, 2  # text, patches of images and of videos
IMAGE, END, SLICE, LAST, NEWLINE = 3, 4, 5, 6, 7
MARKERS = CropMarkers(IMAGE, END, SLICE, LAST, NEWLINE)


def read(ids: Any, grids: Any, **options: Any) -> SegmentTable:
    options = {"image_token_id": P, "video_token_id": V, "crop_markers": MARKERS, **options}
    return SegmentTable.from_input_ids(ids, grids, **options)


def test_pictures_hold_their_markers_and_those_behind_them() -> None:
    ids = [
        *[T, IMAGE, P, P, END, SLICE, P, LAST, SLICE, P, LAST, NEWLINE, SLICE, P, LAST, SLICE, P, LAST, NEWLINE, T],
        *[IMAGE, V, END, NEWLINE, IMAGE, V, END, NEWLINE, END],
    ]
    row: list[Segment] = [Tile(1, 1), Tile(1, 1, tokens_after=1)]
    frames: list[Segment] = [Thumbnail(1, 1, tokens_after=1), Thumbnail(1, 1, tokens_after=2)]
    want: list[Segment] = [Text(1), Thumbnail(1, 2), *row, *row, Text(1), *frames]
    got = read(ids, [[1, 1, 2], *[[1, 1, 1]] * 4], video_grid_thw=[[1, 1, 1]] * 2)
    assert fields(got) == fields(SegmentTable.from_documents([want]))


def test_markers_of_the_next_document_and_of_padding_are_not_behind_a_picture() -> None:
    picture = [IMAGE, P, END]
    packed = read([*picture, NEWLINE, T], [[1, 1, 1]], cu_seqlens=[0, 3, 5])
    assert fields(packed) == fields(SegmentTable.from_documents([[Thumbnail(1, 1)], [Text(2)]]))
    padded = read([[*picture, NEWLINE]], [[1, 1, 1]], attention_mask=[[1, 1, 1, 0]])
    assert padded.lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (
            [T, P, END],
            {},
            "crop_markers: got token 0 before the placeholders at document 0, token 1, "
            "want thumbnail_start or tile_start",
        ),
        (
            [IMAGE, P, LAST],
            {},
            "crop_markers: got token 6 after the placeholders at document 0, token 1, want thumbnail_end or tile_end",
        ),
        ([P, END], {}, "crop_markers: got no room for markers around the placeholders at document 0, token 0"),
        ([SLICE, P, LAST], {}, "segment 0: got a tile, want a thumbnail or another tile right before it"),
        ([IMAGE, P, END], {"crop_markers": (3, 4, 5, 6, 7)}, "crop_markers: got tuple, want CropMarkers or None"),
        (
            [IMAGE, P, END],
            {"crop_markers": CropMarkers(IMAGE, END, SLICE, LAST, P)},
            "crop_markers.newline: got 1, want another than the placeholders of patches",
        ),
        ([IMAGE, P, END], {"row_token_id": END}, "crop_markers: got them beside ends of rows or audio, want None"),
    ],
)
def test_pictures_that_are_not_whole_are_refused(ids: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        read(ids, [[1, 1, 1]], **options)


def test_crops_with_one_marker_between_them_are_refused_by_its_token() -> None:
    alike = CropMarkers(IMAGE, END, END, END, NEWLINE)
    assert read([IMAGE, P, END, END, P, END], [[1, 1, 1]] * 2, crop_markers=alike).lengths.tolist() == [3, 3]
    words = "crop_markers: got one marker at document 1, token 3, want an end and a start between two crops"
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        read([T, T, IMAGE, P, END, P, END], [[1, 1, 1]] * 2, crop_markers=alike, cu_seqlens=[0, 1, 7])
