"""Audio in input ids: runs alone, and runs merged with those of a video, which are a clip."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from oracle import fields

from mmpos import Grid, InvalidInputError, SegmentTable, Text
from mmpos.segments import Audio, Clip
from mmpos.segments.kinds import Segment

T, P, V, A, B, E = 5, 1, 2, 3, 8, 9  # text, patches of images and of videos, audio, markers


def read(ids: list[Any], **options: Any) -> SegmentTable:
    options = {"image_token_id": P, "video_token_id": V, "audio_token_id": A, **options}
    return SegmentTable.from_input_ids(ids, **options)


def test_audio_and_clips_and_silent_videos() -> None:
    ids = [T, B, A, A, A, E, B, P, P, E, B, B, V, A, V, A, A, E, E, T, B, V, V, E]
    segments = read(ids, image_grid_thw=[[1, 1, 2]], video_grid_thw=[[2, 1, 1], [1, 2, 1]], seconds_per_frame=[2, 1])
    clip, video = Clip(1, 1, frames=2, audio=3, seconds_per_frame=2), Grid(2, 1, seconds_per_frame=1)
    want: list[Segment] = [Text(2), Audio(3), Text(2), Grid(1, 2), Text(1), clip, Text(2), video, Text(1)]
    assert fields(segments) == fields(SegmentTable.from_documents([want]))
    assert (
        fields(read(ids, image_grid_thw=[[1, 1, 2]], video_grid_thw=[[2, 1, 1], [1, 2, 1]], audio_lengths=[3, 3]))[
            "extra_tokens"
        ]
        == fields(segments)["extra_tokens"]
    )


def test_audio_is_text_where_its_id_is_not_given() -> None:
    assert fields(read([T, A, A, T], audio_token_id=None)) == fields(SegmentTable.from_documents([[Text(4)]]))
    assert fields(read([T, A, A, T])) == fields(SegmentTable.from_documents([[Text(1), Audio(2), Text(1)]]))


def test_packed_and_padded_documents() -> None:
    packed = read([A, A, A, T, A], cu_seqlens=[0, 2, 5])
    assert fields(packed) == fields(SegmentTable.from_documents([[Audio(2)], [Audio(1), Text(1), Audio(1)]]))
    padded = read([[T, A, T, T], [A, A, T, T]], attention_mask=[[1] * 4, [0, 1, 1, 1]])
    assert padded.lengths.tolist() == [1, 1, 2, 1, 1, 2]
    assert padded.kind.tolist() == [0, 3, 0, 2, 3, 0]


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([A], {"audio_token_id": P}, "audio_token_id: got 1, want another than that of patches"),
        (
            [T],
            {"audio_token_id": None, "audio_lengths": []},
            "audio_token_id: got None, want the placeholder id of audio",
        ),
        ([A, A], {"audio_lengths": [3]}, "audio_lengths[0]: got 3, want 2, the audio tokens in input_ids"),
        ([A, T, A], {"audio_lengths": [1]}, "audio_lengths: got 1 length, want 2, one per run of audio tokens"),
        (
            [B, V, A, E, E],
            {"video_grid_thw": [[1, 1, 1]]},
            "video_grid_thw[0]: got a clip at document 0, token 1, want two markers before it and two after it",
        ),
        (
            [B, B, V, A, V, E, E],
            {"video_grid_thw": [[1, 1, 1], [1, 1, 1]]},
            "video_grid_thw[0]: got a run of 2 placeholders and of audio at document 0, token 2, want 1 placeholders",
        ),
    ],
)
def test_what_does_not_fit_is_named(ids: list[int], options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        read(ids, **options)


def test_lengths_of_arrays_are_taken() -> None:
    assert read([A, A], audio_lengths=np.array([2])).num_tokens == 2
