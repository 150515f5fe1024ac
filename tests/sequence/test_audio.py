"""Audio and clips as parts of a sequence: markers, placeholders, token types, positions."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from omni import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_END,
    BEGIN,
    BUILDER,
    CLIP,
    CLIP_IDS,
    CLIP_TYPES,
    END,
    IMAGE,
    MARKERS,
    NAMES,
    VIDEO,
)

from mmpos import (
    ByteTokenizer,
    Grid,
    InvalidInputError,
    Markers,
    SegmentTable,
    SequenceBuilder,
    Text,
    UnsupportedError,
    Video,
    block_keys,
    place,
)
from mmpos.segments import Audio, Clip, Thumbnail, Tile
from mmpos.segments.kinds import Segment


def test_a_clip_is_one_part_and_has_the_token_order_of_the_scheme() -> None:
    sequence = BUILDER.build(["a", CLIP, "b"])
    assert sequence.input_ids.tolist() == [97, *CLIP_IDS, 98]
    assert sequence.token_type_ids.tolist() == [0, *CLIP_TYPES, 0]
    # The two markers before the clip share an id, as do the two markers after it; frame 1 is at 2 + 2.
    assert sequence.positions.dense().tolist() == [
        [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5, 5, 6],
        [0, 1, 1, 2, 2, 2, 3, 2, 2, 4, 5, 5, 6],
        [0, 1, 1, 2, 3, 2, 3, 2, 3, 4, 5, 5, 6],
    ]
    assert sequence.part_offsets.tolist() == [0, 1, 12, 13]
    assert sequence.grid_thw.tolist() == [[2, 1, 2]]
    assert sequence.image_spans.tolist() == [[2, 11]]
    assert sequence.marked_spans.tolist() == [[1, 12]]
    assert (sequence.audio_spans.tolist(), sequence.image_hashes, sequence.patches) == ([], (None,), None)


def test_audio_is_enclosed_by_its_markers() -> None:
    sequence = BUILDER.build([Audio(2), "a", Grid(1, 1), Audio(1)])
    want = [AUDIO_BEGIN, AUDIO, AUDIO, AUDIO_END, 97, BEGIN, IMAGE, END, AUDIO_BEGIN, AUDIO, AUDIO_END]
    assert sequence.input_ids.tolist() == want
    assert sequence.token_type_ids.tolist() == [0, 3, 3, 0, 0, 0, 1, 0, 0, 3, 0]
    assert sequence.audio_spans.tolist() == [[1, 3], [9, 10]]
    assert sequence.marked_spans.tolist() == [[0, 4], [5, 8], [8, 11]]
    assert [sequence.span_name(i) for i in range(3)] == ["audio 0", "image 0", "audio 1"]
    assert sequence.audio_margins == (1, 1)
    assert sequence.positions.dense().tolist() == [list(range(11))] * 3
    assert repr(sequence) == "InterleavedSequence(11 tokens, 1 image, 2 audio runs, patches=None)"


@pytest.mark.parametrize(("begin", "end"), [(None, None), ("<a", None), (None, "a>")])
def test_audio_markers_are_optional(begin: str | None, end: str | None) -> None:
    builder = replace(BUILDER, scheme="rope-tie", markers=replace(MARKERS, audio_begin=begin, audio_end=end))
    sequence = builder.build(["a", Audio(2), "b"])
    before, after = [AUDIO_BEGIN] * (begin is not None), [AUDIO_END] * (end is not None)
    assert sequence.input_ids.tolist() == [97, *before, AUDIO, AUDIO, *after, 98]
    assert sequence.audio_margins == (len(before), len(after))
    assert sequence.marked_spans.tolist() == [[1, sequence.input_ids.size - 1]]


def test_videos_that_form_one_grid_use_the_video_placeholder() -> None:
    video = Grid(1, 1, frames=2, seconds_per_frame=1)
    parts = [video, Grid(1, 1), Video([Grid(1, 1)], times=[0], timestamp="")]
    sequence = BUILDER.build(parts)
    assert sequence.input_ids.tolist() == [BEGIN, VIDEO, VIDEO, END, *(BEGIN, IMAGE, END) * 2]
    assert sequence.token_type_ids.tolist() == [0, 1, 1, 0, *(0, 1, 0) * 2]
    plain = replace(BUILDER, markers=replace(MARKERS, video=None))
    assert plain.build([video]).input_ids.tolist() == [BEGIN, IMAGE, IMAGE, END]


CROP = "want input_ids and sizes from its model's processor, which mmpos.from_hf_config(config).segments reads"


@pytest.mark.parametrize(
    ("markers", "part", "kind", "error"),
    [
        (Markers(), Audio(1), UnsupportedError, "got Audio, want a builder with Markers(audio=…)"),
        (Markers(None, audio=300), CLIP, UnsupportedError,
         "got Clip, want a builder with Markers(begin=…, audio_begin=…, audio_end=…)"),
        (MARKERS, [AUDIO], InvalidInputError, f"got the audio marker's id {AUDIO}, want Audio or a Clip as parts"),
        (MARKERS, [VIDEO], InvalidInputError, f"got the video marker's id {VIDEO}, want images as parts"),
        (MARKERS, Thumbnail(1, 2), UnsupportedError, f"got a thumbnail, {CROP}"),
        (MARKERS, Tile(1, 2), UnsupportedError, f"got a tile, {CROP}"),
    ],
)  # fmt: skip
def test_parts_without_markers_are_refused(markers: Markers, part: object, kind: type[Exception], error: str) -> None:
    builder = SequenceBuilder(ByteTokenizer((*NAMES, "[IMG]", "[/IMG]", "[PATCH]")), markers=markers)
    with pytest.raises(kind, match=f"^{re.escape(f'parts[1]: {error}')}$"):
        builder.build(["a", part])


def test_text_that_spells_an_audio_marker_remains_text() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = {"[UNK]": 0, "[IMG]": 1, "[/IMG]": 2, "[PATCH]": 3, "[A]": 4, "[": 5, "A]": 6}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]"))
    model.add_special_tokens(["[IMG]", "[/IMG]", "[PATCH]", "[A]"])
    sequence = SequenceBuilder(model, markers=Markers(audio="[A]")).build(["[A]", Audio(1)])
    assert sequence.input_ids.tolist() == [5, 6, 4]


def test_block_keys_include_audio_hashes() -> None:
    sequence = replace(BUILDER.build(["ab", Audio(2), CLIP]), image_hashes=("clip",))
    keys = sequence.block_keys(4, audio_hashes=["bark"])
    (want,) = block_keys(
        sequence.segments, sequence.positions, 4, input_ids=sequence.input_ids, image_hashes=["bark", "clip"]
    )
    assert keys == want
    assert keys[0] != sequence.block_keys(4, audio_hashes=["meow"])[0]
    for hashes in ([], ["a", "b"]):
        with pytest.raises(
            InvalidInputError, match=rf"^audio_hashes: got {len(hashes)}, want 1, one per run of audio$"
        ):
            sequence.block_keys(4, audio_hashes=hashes)


def test_token_types_lists_the_tokens_of_several_documents() -> None:
    segments = SegmentTable.from_documents([[CLIP, Text(1)], [Grid(1, 2), CLIP]])
    types = place(segments, BUILDER.scheme, start=np.array([0, 7])).token_types(segments)
    assert types.tolist() == [*CLIP_TYPES, 0, 1, 1, *CLIP_TYPES]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([Text(3)], "segments: got 3 tokens, want 12"),
        ([Text(1), Clip(1, 1, frames=2, audio=5)], "patches: got 4 in the clip of segment 1, want 2"),
    ],
)
def test_token_types_refuses_segments_of_other_documents(other: list[Segment], message: str) -> None:
    positions = place(SegmentTable.from_documents([[Text(1), CLIP]]), "tmrope")
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        positions.token_types(SegmentTable.from_documents([other]))
