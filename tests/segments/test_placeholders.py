"""Compare from_input_ids with handwritten documents."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Document, fields, settled

from mmpos import Grid, InvalidInputError, LimitExceededError, Placeholders, SegmentTable, Text, place
from mmpos.segments import Audio, Clip, CropMarkers, Thumbnail, Tile
from mmpos.segments.kinds import Segment
from mmpos.segments.table import PAD

IMAGE, VIDEO, AUDIO = 8, 9, 10
BEGIN, END, SLICE, LAST, NEWLINE = 3, 4, 5, 6, 7
MARKERS = CropMarkers(BEGIN, END, SLICE, LAST, NEWLINE)
PATCHES = Placeholders(IMAGE, VIDEO)

CONVERSIONS: list[Callable[..., Any]] = [list, np.asarray, torch.tensor, np.atleast_2d]


class Tokens(NamedTuple):
    """A tokenised document: its ids, its grids before merging, and its segments."""

    ids: list[int]
    images: list[list[int]]
    videos: list[list[int]]
    seconds: list[Fraction]
    document: Document


@st.composite
def tokens(draw: st.DrawFn, merge: int, apart: bool) -> Tokens:
    """Draw a document of words, images and videos; grids may be adjacent, and separate frames follow timestamps."""
    tokenized = Tokens([], [], [], [], [])
    for kind in draw(st.lists(st.sampled_from(["text", "image", "video"]), min_size=1, max_size=5)):
        if kind == "text":
            write(tokenized, Text(draw(st.integers(1, 4))), draw(st.integers(0, 7)))
            continue
        frames, height, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        raw = [frames, height * merge, width * merge]
        if kind == "image":
            tokenized.images.append(raw)
            write(tokenized, Grid(height, width, frames=frames), IMAGE)
            continue
        seconds = draw(st.fractions(Fraction(1, 4), 3, max_denominator=4))
        tokenized.videos.append(raw)
        tokenized.seconds.append(seconds)
        for _ in range(frames if apart else 1):
            if apart:
                write(tokenized, Text(2), 1)
            write(tokenized, Grid(height, width, frames=1 if apart else frames, seconds_per_frame=seconds), VIDEO)
    return tokenized


def write(tokenized: Tokens, part: Text | Grid, token_id: int) -> None:
    """Append a part and its tokens; adjacent texts are merged."""
    if isinstance(part, Text):
        tokenized.ids.extend([token_id] * part.length)
        if tokenized.document and isinstance(tokenized.document[-1], Text):
            part = Text(tokenized.document.pop().extents[2] + part.length)
    else:
        tokenized.ids.extend([token_id] * (part.frames * part.height * part.width))
    tokenized.document.append(part)


def arguments(batch: list[Tokens], merge: int, apart: bool) -> dict[str, Any]:
    """Return the arguments of from_input_ids, without the ids."""
    return {
        "image_grid_thw": [grid for tokenized in batch for grid in tokenized.images] or None,
        "video_grid_thw": [grid for tokenized in batch for grid in tokenized.videos] or None,
        "placeholders": PATCHES,
        "spatial_merge_size": merge,
        "seconds_per_frame": [time for tokenized in batch for time in tokenized.seconds],
        "frames_apart": apart,
    }


@settled
@given(st.data(), st.sampled_from([1, 2]), st.booleans())
def test_packed_documents_become_segments(data: st.DataObject, merge: int, apart: bool) -> None:
    batch = data.draw(st.lists(tokens(merge, apart), min_size=1, max_size=3))
    ids = [token for tokenized in batch for token in tokenized.ids]
    cu_seqlens = np.cumsum([0, *(len(tokenized.ids) for tokenized in batch)])
    convert = data.draw(st.sampled_from(CONVERSIONS))
    segments = SegmentTable.from_input_ids(convert(ids), cu_seqlens=cu_seqlens, **arguments(batch, merge, apart))
    assert fields(segments) == fields(SegmentTable.from_documents([tokenized.document for tokenized in batch]))


@settled
@given(st.data(), st.sampled_from([1, 2]), st.booleans())
def test_padded_batches_become_segments(data: st.DataObject, merge: int, apart: bool) -> None:
    batch = data.draw(st.lists(tokens(merge, apart), min_size=1, max_size=3))
    width = max(len(tokenized.ids) for tokenized in batch) + data.draw(st.integers(0, 2))
    filler = data.draw(st.sampled_from([0, IMAGE, VIDEO]))
    ids = np.full((len(batch), width), filler)
    mask = np.zeros_like(ids)
    kind: list[int] = []
    extents: list[tuple[int, ...]] = []
    seconds: list[Fraction | None] = []
    offsets = [0]
    for row, tokenized in enumerate(batch):
        gap = width - len(tokenized.ids)
        left = data.draw(st.sampled_from([0, gap, gap // 2]))
        ids[row, left : left + len(tokenized.ids)] = tokenized.ids
        mask[row, left : left + len(tokenized.ids)] = 1
        for pad, part in [(left, None), *((0, part) for part in tokenized.document), (gap - left, None)]:
            if part is not None or pad:
                kind.append(PAD if part is None else int(isinstance(part, Grid)))
                extents.append((1, 1, pad) if part is None else part.extents)
                seconds.append(part.seconds_per_frame if isinstance(part, Grid) else None)
        offsets.append(len(kind))
    got = SegmentTable.from_input_ids(
        torch.tensor(ids) if data.draw(st.booleans()) else ids.tolist(),
        attention_mask=torch.tensor(mask) if data.draw(st.booleans()) else mask.tolist(),
        **arguments(batch, merge, apart),
    )
    times = [(0, 1) if time is None else (time.numerator, time.denominator) for time in seconds]
    want = SegmentTable.from_arrays(
        kind,
        np.transpose(extents),
        offsets,
        seconds_per_frame=np.transpose(times) if any(seconds) else None,
    )
    assert fields(got) == fields(want)
    ours = place(got, "mrope", 3)
    alone = place(SegmentTable.from_documents([tokenized.document for tokenized in batch]), "mrope", 3)
    dense = ours.dense().reshape(3, *mask.shape)
    np.testing.assert_array_equal(dense[:, mask == 1], alone.dense())
    np.testing.assert_array_equal(dense[:, mask == 0], 0)
    assert ours.next_positions.tolist() == alone.next_positions.tolist()
    assert ours.deltas.tolist() == alone.deltas.tolist()


def test_rows_without_a_mask_are_documents() -> None:
    segments = SegmentTable.from_input_ids([[1, IMAGE], [IMAGE, 2]], Placeholders(image=IMAGE), [[1, 1, 1]] * 2)
    assert fields(segments) == fields(SegmentTable.from_documents([[Text(1), Grid(1, 1)], [Grid(1, 1), Text(1)]]))


def test_without_a_video_token_every_other_id_is_text() -> None:
    segments = SegmentTable.from_input_ids([VIDEO, IMAGE, 3], Placeholders(image=IMAGE), [[1, 1, 1]])
    assert fields(segments) == fields(SegmentTable.from_documents([[Text(1), Grid(1, 1), Text(1)]]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("image", "video"), [(IMAGE, -1), (-1, VIDEO), (-200, -1), (-1, -200)])
def test_placeholders_may_be_negative(image: int, video: int) -> None:
    ids = [3, image, image, -7, video, video, 3]
    tokens = Placeholders(image, video)
    segments = SegmentTable.from_input_ids(ids, tokens, [[1, 1, 2]], [[2, 1, 1]])
    want = SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1), Grid(1, 1, frames=2), Text(1)]])
    assert fields(segments) == fields(want)
    assert refused(ids, [[1, 1, 2]], placeholders=tokens) == (
        "video_grid_thw: got 0 grids, want more for 2 placeholders from document 0, token 4 on"
    )


@pytest.mark.parametrize(
    ("input_ids", "options"),
    [
        ([], {"cu_seqlens": [0]}),
        (np.zeros((0, 4), int), {}),
        (np.zeros((0, 0), int), {}),
        (np.zeros((0, 4), int), None),
    ],
)
def test_zero_documents_are_accepted(input_ids: npt.ArrayLike, options: dict[str, Any] | None) -> None:
    options = {"attention_mask": input_ids} if options is None else options
    segments = SegmentTable.from_input_ids(input_ids, Placeholders(image=IMAGE), **options)
    assert fields(segments) == fields(SegmentTable.from_documents([]))


def test_the_callers_arrays_are_not_modified() -> None:
    ids, mask, thw = np.array([[0, 1, IMAGE]]), np.array([[0, 1, 1]]), np.array([[1, 1, 1]])
    copies = ids.copy(), mask.copy(), thw.copy()
    SegmentTable.from_input_ids(ids, Placeholders(image=IMAGE), thw, attention_mask=mask)
    for array, copy in zip((ids, mask, thw), copies, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert array.flags.writeable


def refused(input_ids: Any, *grids: Any, placeholders: Any = PATCHES, **options: Any) -> str:
    """Return the error message of a refused call."""
    with pytest.raises(InvalidInputError) as error:
        SegmentTable.from_input_ids(input_ids, placeholders, *grids, **options)
    return str(error.value)


def test_the_first_grid_without_matching_placeholders_is_reported() -> None:
    ids = [1, IMAGE, IMAGE, 2, 3, IMAGE, IMAGE, IMAGE]
    grids = [[1, 1, 2], [1, 2, 2]]
    assert refused([*ids, 4], grids, cu_seqlens=[0, 4, 9]) == (
        "image_grid_thw[1]: got a run of 3 placeholders at document 1, token 1, want 4 for 1x2x2 after merging"
    )
    assert refused([1, *[VIDEO] * 3], None, [[2, 2, 4]], spatial_merge_size=2) == (
        "video_grid_thw[0]: got a run of 3 placeholders at document 0, token 1, want 4 for 2x1x2 after merging"
    )


def test_a_run_ends_with_its_document() -> None:
    assert refused([1, IMAGE, IMAGE, 1], [[1, 1, 2]], cu_seqlens=[0, 2, 4]) == (
        "image_grid_thw[0]: got a run of 1 placeholder at document 0, token 1, want 2 for 1x1x2 after merging"
    )
    assert refused([[1, IMAGE], [IMAGE, 1]], [[1, 1, 2]]) == (
        "image_grid_thw[0]: got a run of 1 placeholder at document 0, token 1, want 2 for 1x1x2 after merging"
    )


def test_the_error_suggests_a_merge_size_that_fits() -> None:
    assert refused([1, *[IMAGE] * 4], [[1, 4, 4]]) == (
        "image_grid_thw[0]: got a run of 4 placeholders at document 0, token 1, want 16 for 1x4x4 after merging"
        " (fits with spatial_merge_size=2)"
    )
    assert refused([*[IMAGE] * 16, 1], [[1, 4, 4]], spatial_merge_size=2) == (
        "image_grid_thw: got 1 grid, want more for 12 placeholders from document 0, token 4 on"
        " (fits with spatial_merge_size=1)"
    )


def test_a_hint_never_hides_the_error() -> None:
    """Without merging, this grid exceeds the limit of a segment, but that error must not replace the message."""
    side = 2**16
    assert refused([IMAGE], [[1, side, side]], spatial_merge_size=2**15) == (
        "image_grid_thw[0]: got a run of 1 placeholder at document 0, token 0, want 4 for 1x2x2 after merging"
    )


def test_missing_and_surplus_grids_are_refused() -> None:
    assert refused([1, IMAGE, 2, IMAGE], [[1, 1, 1]]) == (
        "image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 3 on"
    )
    assert refused([1, IMAGE]) == (
        "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on"
    )
    assert refused([1, IMAGE], [[1, 1, 1]] * 2) == (
        "image_grid_thw[1]: got no placeholders left, want 1 for 1x1x1 after merging; a surplus grid?"
    )
    assert refused([1, 2], [[1, 1, 1]]) == (
        "image_grid_thw[0]: got no placeholders left, want 1 for 1x1x1 after merging; a surplus grid?"
    )


def test_frames_without_text_between_them_are_accepted() -> None:
    segments = SegmentTable.from_input_ids(
        [VIDEO] * 4, Placeholders(image=IMAGE, video=VIDEO), None, [[2, 1, 2]], frames_apart=True
    )
    assert fields(segments) == fields(SegmentTable.from_documents([[Grid(1, 2), Grid(1, 2)]]))


def test_a_video_of_absurd_length_allocates_no_memory() -> None:
    assert refused([1, VIDEO, 2], None, [[2**31 - 1, 1, 1]], frames_apart=True) == (
        "video_grid_thw: got 2147483647 frames, want at most 1, the number of placeholders"
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [1, 0, 1]], "attention_mask[1]: got a hole, want ones in one run, padded left or right"),
        ([[1, 1, 1], [0, 0, 0]], "attention_mask[1]: got no tokens, want ones in one run, padded left or right"),
        ([[1, 2, 1], [0, 0, 1]], "attention_mask: got values 0 to 2, want 0 and 1"),
        ([[1, 1, 1]], "attention_mask: got int64 of shape (1, 3), want zeros and ones of shape (2, 3)"),
        ([[1.0] * 3] * 2, "attention_mask: got float64 of shape (2, 3), want zeros and ones of shape (2, 3)"),
    ],
)
def test_invalid_masks_are_refused(mask: Any, message: str) -> None:
    assert refused([[1, 1, 1], [1, 1, 1]], attention_mask=mask) == message


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 2], "cu_seqlens: got [0, 2], want 0 first and 3 tokens last"),
        ([1, 3], "cu_seqlens: got [1, 3], want 0 first and 3 tokens last"),
        ([], "cu_seqlens: got [], want 0 first and 3 tokens last"),
        ([0, 2, 2, 3], "cu_seqlens[2]: got 2 after 2, want at least one token"),
        ([0.0, 3.0], "cu_seqlens: got dtype float64, want integers"),
    ],
)
def test_invalid_cu_seqlens_are_refused(cu_seqlens: Any, message: str) -> None:
    assert refused([1, 2, 3], cu_seqlens=cu_seqlens) == message


@pytest.mark.parametrize(
    ("input_ids", "options", "message"),
    [
        (
            [IMAGE],
            {"image_grid_thw": [[1, 3, 2]], "spatial_merge_size": 2},
            "image_grid_thw[0]: got (1, 3, 2), want height and width divisible by spatial_merge_size=2",
        ),
        ([IMAGE], {"image_grid_thw": [[1, 0, 2]]}, "image_grid_thw[0, 1]: got 0, want >= 1"),
        ([IMAGE], {"image_grid_thw": [1, 1, 2]}, "image_grid_thw: got shape (3,), want (n, 3)"),
        ([IMAGE], {"image_grid_thw": [[1.0, 1.0, 1.0]]}, "image_grid_thw: got dtype float64, want integers"),
        ([IMAGE], {"spatial_merge_size": 0}, "spatial_merge_size: got 0, want >= 1"),
        ([IMAGE], {"spatial_merge_size": 2**70}, f"spatial_merge_size: got {2**70}, want <= 2147483647"),
        (
            [1],
            {"placeholders": Placeholders(IMAGE), "video_grid_thw": [[1, 1, 1]]},
            "placeholders.video: got None, want the placeholder id of video_grid_thw",
        ),
        ([1], {"placeholders": None}, "placeholders: got NoneType, want Placeholders"),
        ([1], {"seconds_per_frame": [1.0]}, "seconds_per_frame: got 1 values, want 0, one per video"),
        ([1], {"frames_apart": "yes", "video_grid_thw": []}, "frames_apart: got 'yes', want True or False"),
        (
            [1],
            {"cu_seqlens": [0, 1], "attention_mask": [1]},
            "cu_seqlens cannot be combined with attention_mask",
        ),
        ([1.0], {}, "input_ids: got float64 of shape (1,), want integers (tokens,) or (batch, seq)"),
        ([[[1]]], {}, "input_ids: got int64 of shape (1, 1, 1), want integers (tokens,) or (batch, seq)"),
        ([], {}, "input_ids: got shape (0,), want at least one token in each document"),
        (np.zeros((2, 0), int), {}, "input_ids: got shape (2, 0), want at least one token in each document"),
    ],
)
def test_other_invalid_input_is_refused(input_ids: Any, options: dict[str, Any], message: str) -> None:
    assert refused(input_ids, **options) == message


def test_the_error_for_a_grid_beyond_the_limit_names_its_argument() -> None:
    with pytest.raises(LimitExceededError) as error:
        SegmentTable.from_input_ids([IMAGE], Placeholders(image=IMAGE), [[2**10, 2**11, 2**10]])
    assert str(error.value) == "image_grid_thw[0]: got (1024, 2048, 1024), want fewer than 2**31 tokens"


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
        (
            {"image": 8, "rows": (5, 8)},
            "rows must differ from the other ids, or both be the id of patches, got (5, 8)",
        ),
        (
            {"audio": 8, "rows": (8, 8)},
            "rows must differ from the other ids, or both be the id of patches, got (8, 8)",
        ),
        (
            {"image": 8, "audio": 5, "rows": (8, 8)},
            "rows must differ from the other ids, or both be the id of patches, got (8, 8)",
        ),
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


# Rows that end with an extra placeholder.

FRAMED = Placeholders(IMAGE, rows=(IMAGE, IMAGE))


@pytest.mark.usefixtures("way")
def test_rows_may_end_with_an_extra_placeholder_and_images_may_be_framed_by_two() -> None:
    """One image has two framed rows of two patches, the other a single unframed patch: 2·3 + 2 and 1·2 placeholders."""
    ids = [1, *[IMAGE] * 8, 2, 0, 0], [0, 0, *[IMAGE] * 2, 3, *[IMAGE] * 7]
    segments = SegmentTable.from_input_ids(
        ids,
        FRAMED,
        [[1, 4, 4], [1, 2, 2]],
        spatial_merge_size=2,
        attention_mask=[[1] * 10 + [0] * 2, [0] * 2 + [1] * 3 + [0] * 7],
    )
    first, second = Grid(2, 2, row_separator=True), Grid(1, 1, row_separator=True)
    want = SegmentTable.from_documents([[Text(2), first, Text(2)], [second, Text(1)]])
    assert fields(segments) == fields(want._with_padding(np.array([0, 2]), np.array([2, 7])))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("grids", "message"),
    [
        (
            [[1, 1, 3], [1, 1, 1]],
            "image_grid_thw[1]: got a run of 3 placeholders at document 0, token 6, want 2 or 4 for 1x1x1 after "
            "merging, whose rows end in an extra placeholder",
        ),
        ([[1, 1, 3]], "image_grid_thw: got 1 grid, want 2, one for each run of placeholders"),
        (
            [[1, 1, 3], [1, 1, 2], [1, 1, 1]],
            "image_grid_thw: got 3 grids, want 2, one for each run of placeholders",
        ),
    ],
)
def test_runs_of_the_wrong_length_are_refused_if_rows_end_with_a_placeholder(grids: Any, message: str) -> None:
    assert refused([1, *[IMAGE] * 4, 2, *[IMAGE] * 3], grids, placeholders=FRAMED) == message


# Audio on its own and in clips.

ALL = Placeholders(IMAGE, VIDEO, AUDIO)


def test_audio_clips_and_silent_videos_become_segments() -> None:
    sound, clip = [1, *[AUDIO] * 3, 2], [1, 1, VIDEO, AUDIO, VIDEO, AUDIO, AUDIO, 2, 2]
    ids = [5, *sound, 1, IMAGE, IMAGE, 2, *clip, 5, 1, VIDEO, VIDEO, 2]
    segments = SegmentTable.from_input_ids(
        ids, ALL, [[1, 1, 2]], [[2, 1, 1], [1, 2, 1]], seconds_per_frame=[2, 1], audio_lengths=[3, 3]
    )
    merged, video = Clip(1, 1, frames=2, audio=3, seconds_per_frame=2), Grid(2, 1, seconds_per_frame=1)
    want: list[Segment] = [Text(2), Audio(3), Text(2), Grid(1, 2), Text(1), merged, Text(2), video, Text(1)]
    assert fields(segments) == fields(SegmentTable.from_documents([want]))


def test_audio_is_text_without_its_placeholder_id() -> None:
    ids = [5, AUDIO, AUDIO, 5]
    assert fields(SegmentTable.from_input_ids(ids, Placeholders())) == fields(SegmentTable.from_documents([[Text(4)]]))
    want = SegmentTable.from_documents([[Text(1), Audio(2), Text(1)]])
    assert fields(SegmentTable.from_input_ids(ids, ALL, audio_lengths=np.array([2]))) == fields(want)


def test_audio_runs_end_with_the_document_and_skip_padding() -> None:
    packed = SegmentTable.from_input_ids([AUDIO, AUDIO, AUDIO, 5, AUDIO], ALL, cu_seqlens=[0, 2, 5])
    assert fields(packed) == fields(SegmentTable.from_documents([[Audio(2)], [Audio(1), Text(1), Audio(1)]]))
    ids, mask = [[5, AUDIO, 5, 5], [AUDIO, AUDIO, 5, 5]], [[1] * 4, [0, 1, 1, 1]]
    padded = SegmentTable.from_input_ids(ids, ALL, attention_mask=mask)
    assert padded.lengths.tolist() == [1, 1, 2, 1, 1, 2]
    assert padded.kind.tolist() == [0, 3, 0, 2, 3, 0]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (
            [AUDIO] * 2,
            {"audio_lengths": [3]},
            "audio_lengths[0]: got 3, want 2, the number of audio tokens in input_ids",
        ),
        ([AUDIO, 1, AUDIO], {"audio_lengths": [1]}, "audio_lengths: got 1 length, want 2, one per run of audio tokens"),
        (
            [1],
            {"audio_lengths": [], "placeholders": Placeholders()},
            "placeholders.audio: got None, want the placeholder id of audio",
        ),
        (
            [1, VIDEO, AUDIO, 2, 2],
            {"video_grid_thw": [[1, 1, 1]]},
            "video_grid_thw[0]: got a clip at document 0, token 1, want two markers before it and two after it",
        ),
        (
            [1, 1, VIDEO, AUDIO, VIDEO, 2, 2],
            {"video_grid_thw": [[1, 1, 1], [1, 1, 1]]},
            "video_grid_thw[0]: got a run of 2 placeholders and of audio at document 0, token 2, "
            "want 1 placeholders for one video",
        ),
    ],
)
def test_invalid_audio_is_refused(ids: list[int], options: dict[str, Any], message: str) -> None:
    assert refused(ids, **{"placeholders": ALL, **options}) == message


# Thumbnails and tiles, recognised by the tokens around them.

CROPS = Placeholders(IMAGE, VIDEO, crops=MARKERS)


def test_crops_include_their_markers_and_the_newlines_after_them() -> None:
    tile, frame = [SLICE, IMAGE, LAST], [BEGIN, VIDEO, END, NEWLINE]
    ids = [0, BEGIN, IMAGE, IMAGE, END, *tile, *tile, NEWLINE, *tile, *tile, NEWLINE, 0, *frame, *frame, END]
    row: list[Segment] = [Tile(1, 1), Tile(1, 1, tokens_after=1)]
    frames: list[Segment] = [Thumbnail(1, 1, tokens_after=1), Thumbnail(1, 1, tokens_after=2)]
    want: list[Segment] = [Text(1), Thumbnail(1, 2), *row, *row, Text(1), *frames]
    got = SegmentTable.from_input_ids(ids, CROPS, [[1, 1, 2], *[[1, 1, 1]] * 4], [[1, 1, 1]] * 2)
    assert fields(got) == fields(SegmentTable.from_documents([want]))


def test_crops_exclude_newlines_in_the_next_document_and_in_padding() -> None:
    ids = [BEGIN, IMAGE, END, NEWLINE]
    packed = SegmentTable.from_input_ids([*ids, 0], CROPS, [[1, 1, 1]], cu_seqlens=[0, 3, 5])
    assert fields(packed) == fields(SegmentTable.from_documents([[Thumbnail(1, 1)], [Text(2)]]))
    padded = SegmentTable.from_input_ids([ids], CROPS, [[1, 1, 1]], attention_mask=[[1, 1, 1, 0]])
    assert padded.lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [0, IMAGE, END],
            "got token 0 before the placeholders at document 0, token 1, want thumbnail_start or tile_start",
        ),
        (
            [BEGIN, IMAGE, LAST],
            "got token 6 after the placeholders at document 0, token 1, want thumbnail_end or tile_end",
        ),
        (
            [IMAGE, END],
            "got no room for markers around the placeholders at document 0, token 0, "
            "want thumbnail_start or tile_start",
        ),
    ],
)
def test_crops_without_their_markers_are_refused(ids: list[int], message: str) -> None:
    assert refused(ids, [[1, 1, 1]], placeholders=CROPS) == f"placeholders.crops: {message}"


def test_a_single_marker_between_two_crops_is_refused() -> None:
    alike = Placeholders(IMAGE, crops=CropMarkers(BEGIN, END, END, END, NEWLINE))
    ids = [BEGIN, IMAGE, END, END, IMAGE, END]
    assert SegmentTable.from_input_ids(ids, alike, [[1, 1, 1]] * 2).lengths.tolist() == [3, 3]
    message = "placeholders.crops: got one marker at document 1, token 3, want an end and a start between two crops"
    ids = [0, 0, BEGIN, IMAGE, END, IMAGE, END]
    assert refused(ids, [[1, 1, 1]] * 2, placeholders=alike, cu_seqlens=[0, 1, 7]) == message
