"""Image rows in the format of Transformers' PixtralProcessor, written by it and by the builder, and parsed."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from chat_tokenizer import chat_tokenizer

import mmpos
from mmpos import ImageProcessor, ImageSize, Markers, Placeholders, SegmentTable, SequenceBuilder
from mmpos.integrations.hf import MMPosProcessor

transformers = pytest.importorskip("transformers")

NAMES = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
MARKERS = Markers(None, None, *NAMES)
IMG, BREAK, END = 5, 6, 7
SIZES = [(16, 16), (16, 64), (48, 16), (32, 48), (64, 64)]
TEXTS = ["What is [IMG] this?", "[IMG][IMG]", "A cat", "[IMG] a cup [IMG]"]


@pytest.mark.parametrize("merge", [1, 2])
def test_input_ids_equal_those_of_pixtral_and_are_parsed(merge: int) -> None:
    tokenizer = chat_tokenizer(NAMES)
    sizes = [(merge * height, merge * width) for height, width in SIZES]
    photos = [np.zeros((*size, 3), np.uint8) for size in sizes]
    images = transformers.PixtralImageProcessor(patch_size=16 * merge, size={"longest_edge": 1024})
    theirs = transformers.PixtralProcessor(images, tokenizer, patch_size=16, spatial_merge_size=merge)
    want = theirs([photos[:1], photos[1:3], [], photos[3:]], TEXTS, padding=True, return_tensors="np")

    ours = ImageProcessor("pillow", patch_size=16, spatial_merge_size=merge, min_pixels=0)
    processor = MMPosProcessor(tokenizer, ours, "flatten", MARKERS)
    got = processor([ImageSize(*size) for size in sizes], TEXTS, padding=True, return_tensors="np")
    for key in ("input_ids", "attention_mask"):
        np.testing.assert_array_equal(got[key], want[key])
    np.testing.assert_array_equal(got["image_grid_thw"][:, 1:], want["image_sizes"] // 16)
    positions = processor.positions(want["input_ids"], got["image_grid_thw"], want["attention_mask"])
    np.testing.assert_array_equal(positions.dense().reshape(1, *want["input_ids"].shape), got["mm_position_ids"])

    builder = SequenceBuilder(tokenizer, ours, "flatten", MARKERS)
    (expected,) = theirs(photos[:1], TEXTS[:1], add_special_tokens=False)["input_ids"].tolist()
    sequence = builder.build(["What is ", ImageSize(*sizes[0]), " this?"])
    assert sequence.input_ids.tolist() == expected
    segments = SegmentTable.from_input_ids(expected, Placeholders(image=IMG, rows=(BREAK, END)), sequence.grid_thw)
    np.testing.assert_array_equal(segments.extents, sequence.segments.extents)


@pytest.mark.parametrize("model", ["Mistral3Config", "LlavaConfig"])
def test_settings_read_from_a_config_include_pixtrals_row_markers(model: str) -> None:
    text, vision = transformers.MistralConfig(), transformers.PixtralVisionConfig()
    config = getattr(transformers, model)(text_config=text, vision_config=vision, image_token_index=IMG)
    settings = mmpos.from_hf_config(config)
    assert settings.markers == Markers(None, None, IMG, "[IMG_BREAK]", "[IMG_END]")
    sides, rows = np.array([1, 2, 3]) * [1, *[settings.spatial_merge_size] * 2], [*[IMG] * 3, BREAK, *[IMG] * 3, END]
    assert settings.segments(rows, [sides], rows=(BREAK, END)).extents.T.tolist() == [[1, 2, 3]]
