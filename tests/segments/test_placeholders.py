"""Compare from_input_ids with handwritten documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import fields

from mmpos import Grid, InvalidInputError, LimitExceededError, Placeholders, SegmentTable, Text
from mmpos.segments import CropMarkers, Thumbnail, Tile
from mmpos.segments.kinds import Segment

IMAGE, VIDEO, AUDIO = 8, 9, 10
BEGIN, END, SLICE, LAST, NEWLINE = 3, 4, 5, 6, 7
MARKERS = CropMarkers(BEGIN, END, SLICE, LAST, NEWLINE)
PATCHES = Placeholders(IMAGE, VIDEO)
NO_ROWS = np.zeros((0, 4), int)


AFTER = "after merging"
SAMPLED = "; if a model sampled it, pass mm_token_type_ids instead of input_ids, and Placeholders(image=1, video=2)"
ROWS, INCLUDED = Placeholders(IMAGE, rows=(5, 6)), f"{AFTER}, ends of rows included"
FRAMED = Placeholders(IMAGE, rows=(IMAGE, IMAGE))
IN_FRAMES = [1, *[IMAGE] * 4, 2, *[IMAGE] * 3]
EXTRA: dict[str, Any] = {
    "placeholders": Placeholders(IMAGE, VIDEO, rows=(IMAGE, IMAGE)),
    "video_grid_thw": [[2, 1, 2], [3, 1, 1]],
    "frames_apart": True,
}
AUDIO_TOO = Placeholders(IMAGE, VIDEO, AUDIO)
CROPS = Placeholders(IMAGE, VIDEO, crops=MARKERS)
ALIKE = Placeholders(IMAGE, crops=CropMarkers(BEGIN, END, END, END, NEWLINE))
SIDE = 2**16
WANT_IDS, WANT_MASK = "want integers (tokens,) or (batch, seq)", "want ones in one run, padded left or right"

# Error messages, and the ids, the grids of images and the other arguments that cause them.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Runs of placeholders.
    f"image_grid_thw[1]: got a run of 3 placeholders at document 1, token 1, want 4 for 1x2x2 {AFTER}":
        ([1, IMAGE, IMAGE, 2, 3, *[IMAGE] * 3, 4], [[1, 1, 2], [1, 2, 2]], {"cu_seqlens": [0, 4, 9]}),
    f"video_grid_thw[0]: got a run of 3 placeholders at document 0, token 1, want 4 for 2x1x2 {AFTER}":
        ([1, *[VIDEO] * 3], None, {"video_grid_thw": [[2, 2, 4]], "spatial_merge_size": 2}),
    f"image_grid_thw[0]: got a run of 1 placeholder at document 0, token 1, want 2 for 1x1x2 {AFTER}":
        ([1, IMAGE, IMAGE, 1], [[1, 1, 2]], {"cu_seqlens": [0, 2, 4]}),
    f"image_grid_thw[0]: got a run of 1 placeholder at document 0, token 0, want 3 for 1x1x3 {AFTER}":
        ([[IMAGE, 1], [IMAGE, IMAGE]], [[1, 1, 3]], {}),
    f"image_grid_thw[0]: got a run of 4 placeholders at document 0, token 1, want 16 for 1x4x4 {AFTER}"
    " (fits with spatial_merge_size=2)": ([1, *[IMAGE] * 4], [[1, 4, 4]], {}),
    "image_grid_thw: got 1 grid, want more for 12 placeholders from document 0, token 4 on"
    " (fits with spatial_merge_size=1)": ([*[IMAGE] * 16, 1], [[1, 4, 4]], {"spatial_merge_size": 2}),
    # Without merging, this grid exceeds the limit of a segment, but that error must not replace the message.
    f"image_grid_thw[0]: got a run of 1 placeholder at document 0, token 0, want 4 for 1x2x2 {AFTER}":
        ([IMAGE], [[1, SIDE, SIDE]], {"spatial_merge_size": 2**15}),
    f"image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 3 on{SAMPLED}":
        ([1, IMAGE, 2, IMAGE], [[1, 1, 1]], {}),
    f"image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on{SAMPLED}":
        ([1, IMAGE], None, {}),
    "video_grid_thw: got 0 grids, want more for 2 placeholders from document 0, token 4 on":
        ([3, -200, -200, -7, -1, -1, 3], [[1, 1, 2]], {"placeholders": Placeholders(-200, -1)}),
    f"image_grid_thw[1]: got no placeholders left, want 1 for 1x1x1 {AFTER}; a surplus grid?":
        ([1, IMAGE], [[1, 1, 1]] * 2, {}),
    "video_grid_thw: got 2147483647 frames, want at most 1, the number of placeholders": (  # allocates no memory
        [1, VIDEO, 2], None, {"video_grid_thw": [[2**31 - 1, 1, 1]], "frames_apart": True},
    ),
    f"image_grid_thw[1]: got a run of 1 placeholder at document 0, token 4, want 2 for 1x1x2 {AFTER}{SAMPLED}":
        ([1, IMAGE, IMAGE, 2, IMAGE, 3, 1, IMAGE, IMAGE], [[1, 1, 2]] * 2, {"cu_seqlens": [0, 6, 9]}),
    "image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 4 on": (  # token types
        [0, 1, 1, 0, 1, 0], [[1, 1, 2]], {"placeholders": Placeholders(image=1, video=2)},
    ),
    # Rows with their own ends.
    f"image_grid_thw[0]: got a run of 2 placeholders at document 0, token 0, want 4 for 1x2x2 {AFTER}; where a token "
    "of its own ends each row, name it in placeholders.rows": ([8, 8, 5, 8, 8, 6], [[1, 2, 2]], {}),
    f"image_grid_thw[0]: got a run of 5 placeholders at document 0, token 1, want 6 for 1x2x2 {INCLUDED}":
        ([1, 8, 8, 8, 8, 6, 2], [[1, 2, 2]], {"placeholders": ROWS}),
    f"image_grid_thw[0]: got a run of 5 placeholders at document 0, token 0, want 6 for 1x2x2 {INCLUDED}":
        ([8, 8, 8, 8, 5, 6], [[1, 2, 2]], {"placeholders": ROWS}),
    f"image_grid_thw[0]: got token 8 at document 0, token 3, want 5, the end of row 0 of 1x2x2 {AFTER}":
        ([1, 8, 8, 8, 5, 8, 6], [[1, 2, 2]], {"placeholders": ROWS}),
    f"image_grid_thw[0]: got token 5 at document 0, token 6, want 6, the end of row 1 of 1x2x2 {AFTER}":
        ([1, 8, 8, 5, 8, 8, 5], [[1, 2, 2]], {"placeholders": ROWS}),
    f"image_grid_thw[0]: got token 6 at document 0, token 2, want a placeholder of row 0 of 1x1x3 {AFTER}":
        ([1, 8, 6, 8, 6], [[1, 1, 3]], {"placeholders": ROWS}),
    f"image_grid_thw[1]: got a run of 2 placeholders at document 0, token 4, want 3 for 1x1x2 {INCLUDED}":
        ([8, 8, 6, 1, 8, 6], [[1, 1, 2], [1, 1, 2]], {"placeholders": ROWS}),
    "image_grid_thw: got 1 grid, want more for 2 placeholders from document 0, token 3 on":
        ([8, 8, 6, 8, 6], [[1, 1, 2]], {"placeholders": ROWS}),
    f"image_grid_thw[1]: got no placeholders left, want 2 for 1x1x1 {AFTER}; a surplus grid?":
        ([8, 8, 6], [[1, 1, 2], [1, 1, 1]], {"placeholders": ROWS}),
    f"image_grid_thw[0]: got a run of 2 placeholders at document 0, token 0, want 4 for 1x2x1 {INCLUDED}":
        ([8, 5, 8, 5], [[1, 2, 1]], {"placeholders": Placeholders(IMAGE, rows=(5, 5)), "cu_seqlens": [0, 2, 4]}),
    # Rows that end with an extra placeholder.
    f"image_grid_thw[1]: got a run of 3 placeholders at document 0, token 6, want 2 or 4 for 1x1x1 {AFTER}, whose rows "
    "end in an extra placeholder": (IN_FRAMES, [[1, 1, 3], [1, 1, 1]], {"placeholders": FRAMED}),
    "image_grid_thw: got 1 grid, want 2, one for each run of placeholders":
        (IN_FRAMES, [[1, 1, 3]], {"placeholders": FRAMED}),
    "image_grid_thw: got 3 grids, want 2, one for each run of placeholders":
        (IN_FRAMES, [[1, 1, 3], [1, 1, 2], [1, 1, 1]], {"placeholders": FRAMED}),
    f"video_grid_thw[1]: got a run of 7 placeholders at document 0, token 10, want 6 or 8 for 3x1x1 {AFTER}, whose "
    "rows end in an extra placeholder": ([1, *[VIDEO] * 8, 2, *[VIDEO] * 7], None, EXTRA),
    # Audio and clips.
    "audio_lengths[0]: got 3, want 2, the number of audio tokens in input_ids":
        ([AUDIO] * 2, None, {"audio_lengths": [3], "placeholders": AUDIO_TOO}),
    "audio_lengths: got 1 length, want 2, one per run of audio tokens":
        ([AUDIO, 1, AUDIO], None, {"audio_lengths": [1], "placeholders": AUDIO_TOO}),
    "placeholders.audio: got None, want the placeholder id of audio":
        ([1], None, {"audio_lengths": [], "placeholders": Placeholders()}),
    "video_grid_thw[0]: got a clip at document 0, token 1, want two markers before it and two after it":
        ([1, VIDEO, AUDIO, 2, 2], None, {"video_grid_thw": [[1, 1, 1]], "placeholders": AUDIO_TOO}),
    "video_grid_thw[0]: got a clip at document 0, token 2, want two markers before it and two after it":
        ([1, 1, VIDEO, AUDIO, 2], None, {"video_grid_thw": [[1, 1, 1]], "placeholders": AUDIO_TOO}),
    "video_grid_thw[0]: got a run of 2 placeholders and of audio at document 0, token 2, want 1 placeholders for one "
    "video": ([1, 1, VIDEO, AUDIO, VIDEO, 2, 2], None, {"video_grid_thw": [[1, 1, 1]] * 2, "placeholders": AUDIO_TOO}),
    # Thumbnails and tiles.
    "placeholders.crops: got token 0 before the placeholders at document 0, token 1, want thumbnail_start or "
    "tile_start": ([0, IMAGE, END], [[1, 1, 1]], {"placeholders": CROPS}),
    "placeholders.crops: got token 6 after the placeholders at document 0, token 1, want thumbnail_end or tile_end":
        ([BEGIN, IMAGE, LAST], [[1, 1, 1]], {"placeholders": CROPS}),
    "placeholders.crops: got no room for markers around the placeholders at document 0, token 0, want thumbnail_start "
    "or tile_start": ([IMAGE, END], [[1, 1, 1]], {"placeholders": CROPS}),
    "placeholders.crops: got one marker at document 1, token 3, want an end and a start between two crops":
        ([0, 0, BEGIN, IMAGE, END, IMAGE, END], [[1, 1, 1]] * 2, {"placeholders": ALIKE, "cu_seqlens": [0, 1, 7]}),
    # Masks and cu_seqlens.
    f"attention_mask[1]: got a hole, {WANT_MASK}": ([[1] * 3] * 2, None, {"attention_mask": [[1, 1, 1], [1, 0, 1]]}),
    f"attention_mask[1]: got no tokens, {WANT_MASK}": ([[1] * 3] * 2, None, {"attention_mask": [[1] * 3, [0] * 3]}),
    "attention_mask: got values 0 to 2, want 0 and 1":
        ([[1] * 3] * 2, None, {"attention_mask": [[1, 2, 1], [0, 0, 1]]}),
    "attention_mask: got int64 of shape (1, 3), want zeros and ones of shape (2, 3)":
        ([[1] * 3] * 2, None, {"attention_mask": [[1, 1, 1]]}),
    "attention_mask: got float64 of shape (2, 3), want zeros and ones of shape (2, 3)":
        ([[1] * 3] * 2, None, {"attention_mask": [[1.0] * 3] * 2}),
    **{
        f"cu_seqlens: got {cu_seqlens}, want 0 first and 3 tokens last": ([1, 2, 3], None, {"cu_seqlens": cu_seqlens})
        for cu_seqlens in ([0, 2], [1, 3], [])
    },
    "cu_seqlens[2]: got 1 after 1, want at least one token": ([1, 2, 3], None, {"cu_seqlens": [0, 1, 1, 3]}),
    "cu_seqlens: got dtype float64, want integers": ([1, 2, 3], None, {"cu_seqlens": [0.0, 3.0]}),
    "cu_seqlens cannot be combined with attention_mask": ([1], None, {"cu_seqlens": [0, 1], "attention_mask": [1]}),
    # Other arguments.
    "image_grid_thw[0]: got (1, 3, 2), want height and width divisible by spatial_merge_size=2":
        ([IMAGE], [[1, 3, 2]], {"spatial_merge_size": 2}),
    "image_grid_thw[0, 1]: got 0, want >= 1": ([IMAGE], [[1, 0, 2]], {}),
    "image_grid_thw: got shape (3,), want (n, 3)": ([IMAGE], [1, 1, 2], {}),
    "image_grid_thw: got dtype float64, want integers": ([IMAGE], [[1.0, 1.0, 1.0]], {}),
    "spatial_merge_size: got 0, want >= 1": ([IMAGE], None, {"spatial_merge_size": 0}),
    f"spatial_merge_size: got {2**70}, want <= 2147483647": ([IMAGE], None, {"spatial_merge_size": 2**70}),
    "placeholders.video: got None, want the placeholder id of video_grid_thw":
        ([1], None, {"placeholders": Placeholders(IMAGE), "video_grid_thw": [[1, 1, 1]]}),
    "placeholders: got NoneType, want Placeholders": ([1], None, {"placeholders": None}),
    "seconds_per_frame: got 1 values, want 0, one per video": ([1], None, {"seconds_per_frame": [1.0]}),
    "frames_apart: got 'yes', want True or False": ([1], None, {"frames_apart": "yes", "video_grid_thw": []}),
    f"input_ids: got float64 of shape (1,), {WANT_IDS}": ([1.0], None, {}),
    f"input_ids: got int64 of shape (1, 1, 1), {WANT_IDS}": ([[[1]]], None, {}),
    "input_ids: got shape (0,), want at least one token in each document": ([], None, {}),
    "input_ids: got shape (2, 0), want at least one token in each document": (np.zeros((2, 0), int), None, {}),
}  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("message", REFUSED)
def test_ids_and_grids_that_do_not_match_are_refused(message: str) -> None:
    input_ids, grids, options = REFUSED[message]
    with pytest.raises(InvalidInputError) as error:
        SegmentTable.from_input_ids(input_ids, **{"placeholders": PATCHES, "image_grid_thw": grids, **options})
    assert str(error.value) == message


def test_the_error_for_a_grid_beyond_the_limit_names_its_argument() -> None:
    with pytest.raises(LimitExceededError) as error:
        SegmentTable.from_input_ids([IMAGE], Placeholders(image=IMAGE), [[2**10, 2**11, 2**10]])
    assert str(error.value) == "image_grid_thw[0]: got (1024, 2048, 1024), want fewer than 2**31 tokens"


DIFFERENT = "must differ from the other ids, or both be the id of patches"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": 8.0}, "image: got 8.0, want an integer"),
        ({"image": 2**31}, "image: got 2147483648, want <= 2147483647"),
        ({"image": 8, "video": 8}, "video must differ from image, got 8"),
        ({"video": 8, "audio": 8}, "audio must differ from video, got 8"),
        ({"rows": 5}, "rows: got 5, want a sequence of numbers"),
        ({"rows": (5,)}, "rows: got (5,), want the ids after a row and after the last row"),
        ({"rows": ("5", 6)}, "rows[0]: got '5', want an integer"),
        ({"image": 8, "rows": (5, 8)}, f"rows {DIFFERENT}, got (5, 8)"),
        ({"image": 8, "audio": 5, "rows": (8, 8)}, f"rows {DIFFERENT}, got (8, 8)"),
        ({"crops": (3, 4, 5, 6, 7)}, "crops: got tuple, want CropMarkers or None"),
        ({"crops": MARKERS, "image": NEWLINE}, f"crops must differ from the ids of patches, got {MARKERS}"),
        ({"crops": MARKERS, "rows": (1, 1)}, "crops cannot be combined with rows or audio"),
        ({"crops": MARKERS, "audio": 1}, "crops cannot be combined with rows or audio"),
    ],
)
def test_conflicting_placeholder_ids_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Placeholders(**fields)
    assert str(caught.value) == f"Placeholders.{message}"


# Ids, the grids of images, other arguments, and the documents that they become.
BECOME: dict[str, tuple[Any, Any, dict[str, Any], list[list[Segment]]]] = {
    "no documents": ([], None, {"cu_seqlens": [0]}, []),
    "no rows": (NO_ROWS, None, {}, []),
    "no rows and no columns": (NO_ROWS[:, :0], None, {}, []),
    "no rows of a mask": (NO_ROWS, None, {"attention_mask": NO_ROWS}, []),
    "rows without a mask":
        ([[1, IMAGE], [IMAGE, 2]], [[1, 1, 1]] * 2, {}, [[Text(1), Grid(1, 1)], [Grid(1, 1), Text(1)]]),
    "no video token":
        ([VIDEO, IMAGE, 3], [[1, 1, 1]], {"placeholders": Placeholders(IMAGE)}, [[Text(1), Grid(1, 1), Text(1)]]),
    "no audio token": ([5, AUDIO, AUDIO, 5], None, {}, [[Text(4)]]),
    "token types instead of ids, of which a model sampled the last three": (
        [0, 1, 1, 0, 0, 0], [[1, 1, 2]], {"placeholders": Placeholders(image=1, video=2)},
        [[Text(1), Grid(1, 2), Text(3)]],
    ),
    "frames whose rows end in an extra placeholder, between placeholders that count as text": (
        [1, *[VIDEO] * 8, 2, *[VIDEO] * 8], None, EXTRA,
        [[Text(2), *[Grid(1, 2, row_separator=True)] * 2, Text(3), *[Grid(1, 1, row_separator=True)] * 3, Text(1)]],
    ),
    "crops with the newlines after them": (
        [0, BEGIN, IMAGE, IMAGE, END, SLICE, IMAGE, LAST, NEWLINE, 0, BEGIN, VIDEO, END, NEWLINE, END],
        [[1, 1, 2], [1, 1, 1]], {"placeholders": CROPS, "video_grid_thw": [[1, 1, 1]]},
        [[Text(1), Thumbnail(1, 2), Tile(1, 1, tokens_after=1), Text(1), Thumbnail(1, 1, tokens_after=2)]],
    ),
    "a newline in the next document": (
        [BEGIN, IMAGE, END, NEWLINE, 0], [[1, 1, 1]], {"placeholders": CROPS, "cu_seqlens": [0, 3, 5]},
        [[Thumbnail(1, 1)], [Text(2)]],
    ),
}  # fmt: skip


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", BECOME)
def test_ids_become_the_segments_that_they_stand_for(name: str) -> None:
    input_ids, grids, options, documents = BECOME[name]
    ids = np.array(input_ids)  # floats if there are none
    segments = SegmentTable.from_input_ids(ids, **{"placeholders": PATCHES, "image_grid_thw": grids, **options})
    assert fields(segments) == fields(SegmentTable.from_documents(documents))
    assert (ids.tolist(), ids.flags.writeable) == ([*input_ids], True)


@pytest.mark.usefixtures("way")
def test_crops_exclude_newlines_in_padding() -> None:
    mask = [[1, 1, 1, 0]]
    padded = SegmentTable.from_input_ids([[BEGIN, IMAGE, END, NEWLINE]], CROPS, [[1, 1, 1]], attention_mask=mask)
    assert padded.lengths.tolist() == [3, 1]
