"""Arguments for Transformers models, checked value by value, and inputs that are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mmpos
from mmpos import Grid, SequenceBuilder
from mmpos.data import ModelCollator, PackedCollator, PaddedCollator, ProcessedInputs
from mmpos.data.examples import Example, Location, RecordError
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.schemes import MRopeTransformers
from mmpos.segments import Audio

TEXT = {"num_attention_heads": 2, "hidden_size": 32, "rope_theta": 1e4}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TWO = dict.fromkeys(("num_heads", "spatial_merge_size", "temporal_patch_size"), 2)
QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
    "text_config": {**TEXT, "model_type": "qwen2_vl_text", "rope_parameters": ROPE},
    "vision_config": {"model_type": "qwen2_vl_vision", **TWO, "embed_dim": 32, "patch_size": 4},
}
SETTINGS = mmpos.from_hf_config(QWEN2_VL)
LLAMA = mmpos.from_hf_config({"model_type": "llama", **TEXT})
IMAGES = SETTINGS.image_processor(mean=(0.5,) * 3, std=(0.5,) * 3, min_pixels=64, max_pixels=4096, backend="pillow")
BUILDER = SequenceBuilder(images=IMAGES, scheme=SETTINGS.scheme, markers=SETTINGS.markers)
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)
HERE = Location("processed", 3)


def example(*parts: Any, builder: SequenceBuilder = BUILDER) -> Example:
    sequence = builder.build(list(parts))
    return Example("one", sequence, np.where(sequence.token_type_ids, -100, sequence.input_ids))


def listed(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


FIRST, SECOND = example([50], PIXELS, [60]), example([70, 80])


@pytest.mark.parametrize("batch", [[FIRST, SECOND], PackedCollator()([FIRST, SECOND])], ids=type)
def test_a_pack_has_all_arguments(batch: Any) -> None:
    arguments = ModelCollator(SETTINGS, IMAGES)(batch)
    pixels = arguments.pop("pixel_values")
    torch.testing.assert_close(pixels, torch.from_numpy(IMAGES.process(PIXELS, temporal_patch_size=2).patches))
    assert (pixels.shape, pixels.dtype) == ((8, 96), torch.float32)
    assert {arguments[name].dtype for name in ("cu_seq_lens_q", "cu_seq_lens_k")} == {torch.int32}
    assert {arguments[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    assert listed(arguments) == {
        "use_cache": False,
        "input_ids": [[50, 9, 7, 7, 10, 60, 70, 80]],
        "labels": [[-100, 9, -100, -100, 10, 60, -100, 80]],
        "position_ids": [
            [[0, 1, 2, 3, 4, 5, 0, 1]],
            [[0, 1, 2, 2, 4, 5, 0, 1]],
            [[0, 1, 2, 2, 4, 5, 0, 1]],
            [[0, 1, 2, 3, 4, 5, 0, 1]],
        ],
        "mm_token_type_ids": [[0, 0, 1, 1, 0, 0, 0, 0]],
        "max_length_q": 6,
        "max_length_k": 6,
        "cu_seq_lens_q": [0, 6, 8],
        "cu_seq_lens_k": [0, 6, 8],
        "image_grid_thw": [[1, 2, 4]],
    }


def test_padded_rows_have_all_arguments() -> None:
    arguments = ModelCollator(SETTINGS, IMAGES, PaddedCollator(pad_token_id=1))([FIRST, SECOND])
    assert arguments.pop("pixel_values").shape == (8, 96)
    assert listed(arguments) == {
        "use_cache": False,
        "input_ids": [[50, 9, 7, 7, 10, 60], [70, 80, 1, 1, 1, 1]],
        "labels": [[-100, 9, -100, -100, 10, 60], [-100, 80, *[-100] * 4]],
        "position_ids": [
            [[0, 1, 2, 2, 4, 5], [0, 1, 0, 0, 0, 0]],
            [[0, 1, 2, 2, 4, 5], [0, 1, 0, 0, 0, 0]],
            [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0]],
        ],
        "mm_token_type_ids": [[0, 0, 1, 1, 0, 0], [0] * 6],
        "attention_mask": [[1] * 6, [1, 1, 0, 0, 0, 0]],
        "image_grid_thw": [[1, 2, 4]],
    }


def test_text_has_no_image_arguments_and_shifted_labels_stay_shifted() -> None:
    collator = ModelCollator(SETTINGS)
    arguments = collator(PackedCollator()([SECOND]).shift_labels())
    assert not any("pixel" in name or "grid" in name for name in arguments)
    assert arguments["shift_labels"].tolist() == arguments["labels"].tolist() == [[80, -100]]
    assert listed(pickle.loads(pickle.dumps(collator))([SECOND])) == listed(collator([SECOND]))


def test_position_ids_with_one_axis_restart_in_each_part_of_a_document() -> None:
    document = example("abcdef", builder=SequenceBuilder(scheme="flatten"))
    arguments = ModelCollator(LLAMA)([document.slice(0, 3), document.slice(3, 6)])
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert arguments.keys() == {
        *("use_cache", "input_ids", "labels", "position_ids"),
        *("max_length_q", "max_length_k", "cu_seq_lens_q", "cu_seq_lens_k"),
    }


WRONG: Any = "x"
OTHER, OWN = replace(IMAGES, order="raster"), replace(SETTINGS, vision_scheme=None)
MARKED = SequenceBuilder(images=IMAGES, scheme=SETTINGS.scheme)
WITH_AUDIO = SequenceBuilder(scheme=SETTINGS.scheme, markers=replace(SETTINGS.markers, audio=11))
GEMMA = mmpos.from_hf_config(
    {"model_type": "gemma3", "text_config": TEXT, "vision_config": {}}, layer_type="full_attention"
)
PACK = PackedCollator()([FIRST])
PATCHES: Any = PACK.patches


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        *((lambda kind=kind: kind(WRONG), InvalidInputError, "settings: got str, want the result of mmpos.from_hf_con")
          for kind in (ModelCollator, ProcessedInputs)),
        (lambda: ModelCollator(SETTINGS, WRONG), InvalidInputError, "images: got str, want an ImageProcessor"),
        (lambda: ModelCollator(SETTINGS, collate=WRONG), InvalidInputError,
         "collate: got str, want a PackedCollator or a PaddedCollator"),
        (lambda: ModelCollator(SETTINGS, OTHER), InvalidInputError,
         r"images.order: got 'raster', want 'merged' of 'qwen2_vl'"),
        (lambda: ModelCollator(LLAMA)([FIRST]), UnsupportedError,
         "batch: got 1 image for 'llama', want text only, or padded rows from its own processor, or one of c"),
        (lambda: ModelCollator(SETTINGS)([example("a", builder=SequenceBuilder())]), InvalidInputError,
         "batch.positions: got scheme rope-tie, want mrope-transformers of 'qwen2_vl': SequenceBuilder"),
        (lambda: ModelCollator(SETTINGS, IMAGES)([example(PIXELS, builder=MARKED)]), InvalidInputError,
         r"image_spans\[0\]: got the placeholder 258, want 7 of 'qwen2_vl': SequenceBuilder\(markers"),
        (lambda: ModelCollator(SETTINGS)([FIRST]), InvalidInputError, "image_processor: got no mean, std"),
        (lambda: ModelCollator(SETTINGS, IMAGES)([example(Grid(1, 2))]), UnsupportedError,
         "batch: got images without pixels, want pixels from an ImageProcessor"),
        (lambda: ModelCollator(SETTINGS, IMAGES)([example(Audio(2), builder=WITH_AUDIO)]), UnsupportedError,
         "batch: got 1 run of audio for 'qwen2_vl', want none; audio features are not passed on"),
        (lambda: ModelCollator(SETTINGS)(PackedCollator(multiple_of=4)([SECOND]).shard(0, 2)), UnsupportedError,
         "batch: got a context-parallel shard, want the whole batch"),
        (lambda: ModelCollator(OWN, IMAGES), UnsupportedError,
         "images: got an ImageProcessor, want None: ProcessedInputs with the output of the processor of 'qwen2_vl'"),
        (lambda: ModelCollator(OWN)([FIRST]), UnsupportedError,
         "patches: got uint8, want ProcessedInputs with the output of the processor of 'qwen2_vl'"),
        (lambda: ModelCollator(SETTINGS, IMAGES)(replace(PACK, patches=PATCHES.float())), InvalidInputError,
         "patches: got torch.float32, want uint8"),
        (lambda: ModelCollator(SETTINGS, IMAGES)(replace(PACK, patches=PATCHES[1:])), InvalidInputError,
         "patches: got 7, want 8 as in grid_thw"),
        (lambda: ModelCollator(GEMMA)([ProcessedInputs(GEMMA)({"input_ids": [50, 262144, 60]}, HERE)]),
         UnsupportedError, "batch: got image placeholders for 'gemma3', want text"),
    ],
)  # fmt: skip
def test_batches_that_a_model_would_misread_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call()


# Outputs of a processor

RECORD: dict[str, Any] = {
    "id": "r1",
    "input_ids": [[50, 9, 7, 7, 10, 60, 9, 8, 8, 10, 9, 7, 10]],
    "attention_mask": [[1] * 13],
    "image_grid_thw": [[1, 2, 4], [1, 2, 2]],
    "pixel_values": torch.arange(12.0)[:, None].expand(-1, 96),
    "video_grid_thw": [[2, 2, 2]],
    "pixel_values_videos": torch.arange(100.0, 108)[:, None].expand(-1, 96),
}
PHOTOS = {name: RECORD[name] for name in ("image_grid_thw", "pixel_values")}


def test_an_example_from_processor_outputs_has_its_patches_in_token_order() -> None:
    processed = ProcessedInputs(SETTINGS)(RECORD, HERE)
    sequence: Any = processed.sequence
    assert processed.key == "r1"
    assert sequence.patches[:, 0].tolist() == [*range(8), *range(100, 108), *range(8, 12)]
    assert sequence.image_spans.tolist() == [[2, 4], [7, 9], [11, 12]]
    assert sequence.grid_thw.tolist() == [[1, 1, 2], [2, 1, 1], [1, 1, 1]]
    assert (sequence.image_margins, sequence.part_offsets.tolist()) == ((1, 1), [0, 13])
    assert processed.labels.tolist() == [50, 9, -100, -100, 10, 60, 9, -100, -100, 10, 9, -100, 10]
    assert sequence.positions.dense().tolist()[0] == [0, 1, 2, 2, 4, 5, 6, 7, 8, 8, 9, 10, 11]
    kept: Any = processed.slice(5, 13).sequence
    assert kept.patches[:, 0].tolist() == [*range(100, 108), *range(8, 12)]
    for ids in ([7, 7, 50, 7], [9, 7, 7, 50, 9, 7, 50]):  # without all markers
        bare = ProcessedInputs(SETTINGS)({"input_ids": ids, **PHOTOS}, HERE)
        assert (bare.key, bare.sequence.image_margins) == ("processed[3]", (0, 0))


ERNIE = mmpos.from_hf_config({
    "model_type": "ernie4_5_vl_moe",
    "image_token_id": 7, "video_token_id": 8, "image_start_token_id": 9, "image_end_token_id": 10,
    "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "vision_config": {"hidden_size": 32, "num_heads": 2, "patch_size": 4},
})  # fmt: skip


def test_a_pack_for_ernie_has_expert_types() -> None:
    make = ProcessedInputs(ERNIE)
    records = {"input_ids": [70, 80]}, {"input_ids": [50, 9, 7, 7, 10, 60, 9, 7, 10], **PHOTOS}
    arguments = ModelCollator(ERNIE)([make(record, HERE) for record in records])
    assert arguments["pixel_values"][:, 0].tolist() == [*range(12)]
    assert arguments["input_ids"].tolist() == [[70, 80, 50, 9, 7, 7, 10, 60, 9, 7, 10]]
    assert arguments["mm_token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0]]
    assert arguments["moe_mm_token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1]]
    assert arguments["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]]
    own = ERNIE.image_processor(mean=(0.5,) * 3, std=(0.5,) * 3, min_pixels=64, max_pixels=4096, backend="pillow")
    photo = example(PIXELS, builder=SequenceBuilder(images=own, scheme=ERNIE.scheme, markers=ERNIE.markers))
    pixels = ModelCollator(ERNIE, own)([photo])["pixel_values"]  # patches of one frame
    torch.testing.assert_close(pixels, torch.from_numpy(own.process(PIXELS, temporal_patch_size=1).patches))


def test_frames_between_video_markers_are_videos_in_their_document_alone() -> None:
    collator = ModelCollator(replace(SETTINGS, video_markers=(11, 12)), IMAGES)
    cut = example([11, 60], PIXELS), example([60], PIXELS), example([12], PIXELS)  # in a video, between, at its end
    arguments = collator([example([50, 11], PIXELS, [12], PIXELS), *cut])
    types = [0, 0, 0, 2, 2, 0, 0, 0, 1, 1, 0], [0, 0, 0, 2, 2, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]
    assert arguments["mm_token_type_ids"].tolist() == [[kind for document in types for kind in document]]
    assert arguments["image_grid_thw"].tolist() == [[1, 2, 4]] * 5  # one call has either images or videos


def test_images_and_videos_in_a_pack_are_separate_arguments() -> None:
    make = ProcessedInputs(SETTINGS)
    arguments = ModelCollator(SETTINGS)([make(RECORD, HERE), SECOND, make({**RECORD, "labels": [1] * 13}, HERE)])
    assert arguments["pixel_values"][:, 0].tolist() == [*range(12)] * 2
    assert arguments["pixel_values_videos"][:, 0].tolist() == [*range(100, 108)] * 2
    assert arguments["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2]] * 2
    assert arguments["video_grid_thw"].tolist() == [[2, 2, 2]] * 2
    types = [0, 0, 1, 1, 0, 0, 0, 2, 2, 0, 0, 1, 0]
    assert arguments["mm_token_type_ids"].tolist() == [[*types, 0, 0, *types]]
    assert arguments["labels"][0, -12:].tolist() == [1] * 12
    film = {"input_ids": [9, 8, 8, 10], **{name: RECORD[name] for name in ("video_grid_thw", "pixel_values_videos")}}
    videos = ModelCollator(SETTINGS)([make(film, HERE)])
    assert videos["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert "pixel_values" not in videos
    planes = torch.randn(8, 3, 4, 4)  # pixels of an encoder that takes one plane per colour
    photo = {"input_ids": [9, 7, 7, 10], "image_grid_thw": [[1, 2, 4]], "pixel_values": planes}
    assert torch.equal(ModelCollator(SETTINGS)([make(photo, HERE)])["pixel_values"], planes)


TIMED = replace(SETTINGS, scheme=MRopeTransformers(tokens_per_second=2))


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        *((SETTINGS, change, message) for change, message in (
            ({"pixel_values": RECORD["pixel_values"][1:]}, "pixel_values: got 11 patches, want 12 as in the grids"),
            ({"pixel_values_videos": None}, "pixel_values_videos: got 0 patches, want 8 as in the grids"),
            ({"attention_mask": [[0] + [1] * 12]}, "attention_mask: got padding, want one document without padding"),
            ({"input_ids": [RECORD["input_ids"][0]] * 2}, r"input_ids: got shape \(2, 13\), want \(n,\)"),
            ({"second_per_grid_ts": [-1.0]}, r"second_per_grid_ts\[0\]: got -1.0, want > 0"),
            ({"labels": [1]}, r"r1: labels: got shape \(1,\), want \(13,\), the shape of input_ids"),
            ({"image_grid_thw": [[1, 2, 4], [1, 2, 4]]}, "image_grid_thw|input_ids"),
        )),
        (TIMED, {}, ".* got 2 frames without a time, want second_per_grid_ts"),
        (GEMMA, {"input_ids": [262144] * 2}, "pixel_values: got pixels for 'gemma3', want text only, or padded rows f"),
        (ERNIE, {}, "video_grid_thw: got a video for 'ernie4_5_vl_moe', which merges frames, want only images"),
    ],
)  # fmt: skip
def test_errors_name_an_inconsistent_or_unsupported_record(settings: Any, change: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"^r1: {message}"):
        ProcessedInputs(settings)({**RECORD, **change}, HERE)
