"""Settings from configs: whole values for every model type, what a user does with them, refusals by their words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_tables
import numpy as np
import pytest
from model_configs import (
    ARGUMENTS,
    CONFIGS,
    GOLDEN,
    HUNYUAN,
    LAYER_TYPES,
    TEXT,
    XDROPE,
    config_of,
    golden,
    settings_of,
)
from tolerance import EXACT, assert_within

import mmpos
import mmpos.rotary
from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES
from mmpos.rotary.hf_models import ENCODERS, OTHER_ROTATIONS, UNSUPPORTED_ENCODERS
from mmpos.schemes import Flatten, MRope, MRopeQwen3, MRopeQwen25, RopeTieV2


def test_configs_of_every_model_type_and_encoder_give_these_settings() -> None:
    assert json.loads(json.dumps(golden())) == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", MODEL_TYPES)
def test_the_mapping_of_a_config_gives_the_settings_of_its_object(model: str) -> None:
    config = config_of(model)
    told = config if isinstance(config, dict) else json.loads(config.to_json_string(use_diff=False))
    assert mmpos.from_hf_config(told, layer_type=LAYER_TYPES.get(model)) == settings_of(model)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("qwen2_vl", MRope()),
        ("qwen2_5_vl", MRopeQwen25(4)),
        ("qwen3_vl", MRopeQwen3()),
        ("ernie4_5_vl_moe", MRope()),
        ("paddleocr_vl", MRope()),
        ("hunyuan_image_3_moe", RopeTieV2(rounding="floor")),
        ("llava", Flatten()),
    ],
)
def test_serving_engines_have_schemes_of_their_own_for_videos_alone(model: str, scheme: Any) -> None:
    assert settings_of(model, engine="serving") == replace(settings_of(model), scheme=scheme)


@pytest.mark.parametrize("model", MODEL_TYPES)
def test_the_page_says_how_a_model_turns(model: str) -> None:
    rotary = settings_of(model).rotary
    allocation = "its own" if isinstance(rotary.allocation, tuple) else rotary.allocation
    told = "one axis" if rotary.axes == 1 else f"{rotary.axes} axes, {allocation}, {rotary.pairing}"
    assert model_tables.rotation(model) == told


def test_the_page_lists_every_model_type_once() -> None:
    written = {name: re.findall("`([^`]+)`", write()) for name, write in model_tables.QUOTES.items()}
    rows = model_tables.supported().splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row.split(" | ")[0])) == sorted(MODEL_TYPES)
    rows = model_tables.encoders().splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row)) == sorted(ENCODERS)
    assert sorted(written["refused encoders"]) == sorted(UNSUPPORTED_ENCODERS)
    assert sorted(written["refused"]) == sorted(UNSUPPORTED_TYPES)
    assert sorted(written["rotations"]) == sorted(OTHER_ROTATIONS)


def test_seconds_reach_the_scheme() -> None:
    ids = [TEXT, *[151656] * 3, TEXT]
    by_engine = {}
    for engine in ("transformers", "serving"):
        settings = settings_of("qwen2_5_vl", engine=engine)
        segments = settings.segments(ids, video_grid_thw=[[3, 2, 2]], seconds_per_frame=[2])
        by_engine[engine] = settings.place(segments, start=10).dense()[0].tolist()
    assert by_engine == {"transformers": [10, 11, 19, 27, 12], "serving": [10, 11, 19, 27, 28]}


def test_packed_documents_with_images_and_videos_of_glm() -> None:
    settings = settings_of("glm4v")
    (image, begin, end), text = (151343, 151341, 151342), TEXT
    first = [begin, image, text, image, end, image, image, begin]  # ends inside a video
    second = [image, text, begin, image, end]
    segments = settings.segments(
        first + second,
        [[1, 2, 4], [1, 2, 2]],
        [[2, 2, 2], [1, 2, 2]],
        cu_seqlens=[0, 8, 13],
    )
    grids = segments.extents.T[segments.kind == 1].tolist()
    assert grids == [[1, 1, 1], [1, 1, 1], [1, 1, 2], [1, 1, 1], [1, 1, 1]]
    assert segments.lengths.tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1]


def test_glm_leaves_the_ids_of_the_caller_as_they_are() -> None:
    ids = np.array([151341, 151343, 151342])
    settings_of("glm4v").segments(ids, video_grid_thw=[[1, 2, 2]])
    assert ids.tolist() == [151341, 151343, 151342]


def test_markers_build_sequences_with_the_ids_of_the_model() -> None:
    settings = settings_of("qwen3_vl")
    told: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "min_pixels": 3136, "max_pixels": 2**24}
    builder = mmpos.SequenceBuilder(
        images=settings.image_processor(max_tokens=16, backend="pillow", **told),
        scheme=settings.scheme,
        markers=settings.markers,
    )
    sequence = builder.build(["a", np.zeros((64, 96, 3), np.uint8)])
    assert sequence.input_ids.tolist() == [97, 151652, *[151655] * 6, 151653]
    again = settings.segments(sequence.input_ids, sequence.grid_thw * [1, 2, 2])
    np.testing.assert_array_equal(settings.place(again).dense(), sequence.positions.dense())
    assert builder.images == mmpos.ImageProcessor(
        "pillow", patch_size=16, spatial_merge_size=2, order="merged", max_tokens=16, **told
    )


def test_what_a_config_does_not_say_is_unsupported() -> None:
    with pytest.raises(mmpos.UnsupportedError, match="markers: got a config of 'llava' that does not name"):
        _ = settings_of("llava").markers
    with pytest.raises(mmpos.UnsupportedError, match="image_processor: got 'llava', want a model whose config says"):
        settings_of("llava").image_processor()


def test_hunyuan_image_floors_the_second_tie_and_alternates_axes() -> None:
    settings = mmpos.from_hf_config(HUNYUAN)
    ids = [TEXT] * 3 + [128006] * 6 + [TEXT] * 2
    positions = settings.place(settings.segments(ids, [[1, 2, 3]]))
    # By hand: the image begins at 3, so rows at ⌊3 + (6−2)/2⌋ and columns at ⌊3 + (6−3)/2⌋; text goes on at 3 + 6.
    expected = [[0, 1, 2, 5, 5, 5, 6, 6, 6, 9, 10], [0, 1, 2, 4, 5, 6, 4, 5, 6, 9, 10]]
    assert positions.dense().tolist() == expected
    theta = [10000.0 ** (-2 * j / 128) for j in range(64)]
    angles = [[expected[j % 2][token] * theta[j] for j in range(64)] for token in range(11)]
    cos, sin = mmpos.rotary.cos_sin(settings.rotary, positions)
    assert_within((cos[0], sin[0]), (np.cos(angles), np.sin(angles)), EXACT)


# Refusals.


@pytest.mark.parametrize("model", UNSUPPORTED_TYPES)
def test_model_types_without_a_scheme_are_refused_with_the_reason(model: str) -> None:
    with pytest.raises(mmpos.UnsupportedError) as caught:
        mmpos.from_hf_config({"model_type": model})
    assert str(caught.value) == f"config.model_type: got {model!r}, want another: {UNSUPPORTED_TYPES[model]}"


def test_unknown_model_types_are_refused_with_all_that_are_known() -> None:
    with pytest.raises(mmpos.UnsupportedError) as caught:
        mmpos.from_hf_config({"model_type": "qwen2_vl_text"})
    known = ", ".join(sorted(MODEL_TYPES))
    assert str(caught.value) == f"config.model_type: got 'qwen2_vl_text', want one of {known}"


def without(model: str, *path: str, **instead: Any) -> dict[str, Any]:
    """The mapping of a config without one field, or with others."""
    told: dict[str, Any] = json.loads(CONFIGS[model]().to_json_string(use_diff=False))
    inner = told
    for name in path[:-1]:
        inner = inner[name]
    if path:
        del inner[path[-1]]
    return {**told, **instead}


def ernie_with(section: object) -> dict[str, Any]:
    """The mapping of a config of ERNIE-4.5-VL with another mrope_section."""
    told = without("ernie4_5_vl_moe")
    told["text_config"]["rope_parameters"]["mrope_section"] = section
    return told


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.model_type: got none, want the name of a model type"),
        ({**HUNYUAN, "image_token_id": None}, "config.image_token_id: got none, want an integer"),
        (
            {**HUNYUAN, "attention_head_dim": None},
            "config.attention_head_dim: got none, want an integer",
        ),
        (without("llava", "vision_config"), "config.vision_config: got none, want the config of the encoder"),
        (without("llava", "text_config"), "config.text_config: got none, want the config of the language model"),
        (without("qwen2_vl", "vision_config"), "config.vision_config: got none, want the config of the encoder"),
        (
            without("qwen2_vl", text_config={"model_type": "llama"}),
            "config.text_config.model_type: got 'llama' inside 'qwen2_vl', want one of qwen2_vl_text",
        ),
        (without("qwen2_vl", video_token_id=151655), "Placeholders.video: got 151655, want another than image"),
        (
            without("qwen2_vl", vision_end_token_id=151652),
            "config.vision_end_token_id: got 151652, want another than vision_start_token_id",
        ),
        (without("qwen2_vl", image_token_id="<image>"), "config.image_token_id: got '<image>', want an integer"),
        (without("llava", image_token_index=-200), "config.image_token_id: got -200, want >= 0"),
        (
            without("mistral", rope_parameters={"rope_theta": 1e4, "mrope_section": [16, 24, 24]}),
            "rotary: got 3 axes, want 1 for scheme 'flatten'",
        ),
        (without("gemma3"), "layer_type: got None, want one of 'full_attention', 'sliding_attention'"),
        (
            {**without("qwen2_vl"), "vision_config": {**without("qwen2_vl")["vision_config"], "patch_size": [14, 16]}},
            "config.vision_config.patch_size: got [14, 16], want an integer",
        ),
        (without("llava", image_token_index=[[1]]), "config.image_token_id: got [1], want an integer"),
        (without("mistral", rope_parameters=[1]), "rope_parameters: got [1], want a mapping"),
        (without("mistral", head_dim="128"), "head_dim: got '128', want an integer"),
        (without("mistral", head_dim=2**31), "head_dim: got 2147483648, want <= 65536"),
        (without("mistral", head_dim=None, hidden_size=2**40), "head_dim: got 34359738368, want <= 65536"),
        (without("mistral", head_dim=None, num_attention_heads=0), "num_attention_heads: got 0, want >= 1"),
        (
            without("mistral", rope_parameters={"rope_type": "yarn", "factor": 2.0}, max_position_embeddings="long"),
            "max_position_embeddings: got 'long', want a finite number",
        ),
        (
            without("mistral", rope_parameters={"rope_theta": 10**400}),
            "rope_theta: got 1000",
        ),
        (
            ernie_with([24, 16, 24]),
            "mrope_section: got [24, 16, 24], want as many rows as columns, then frames",
        ),
        (ernie_with([2**40, 2**40, 0]), "mrope_section[0]: got 1099511627776, want <= 65536"),
        (ernie_with(7), "mrope_section: got 7, want a sequence of numbers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_the_field(config: dict[str, object], message: str) -> None:
    with pytest.raises(mmpos.MmposError) as caught:
        mmpos.from_hf_config(config)
    assert str(caught.value).startswith(message)


def test_a_field_that_cannot_be_read_is_named() -> None:
    class Config:
        model_type = "llama"

        @property
        def head_dim(self) -> int:
            raise KeyError("hidden_size")

    with pytest.raises(mmpos.InvalidInputError) as caught:
        mmpos.from_hf_config(Config())
    assert str(caught.value) == "head_dim: got KeyError ('hidden_size') from the config, want a field that can be read"


def test_an_engine_that_is_not_known_is_refused() -> None:
    with pytest.raises(mmpos.InvalidInputError, match="engine: got 'vllm', want one of 'transformers', 'serving'"):
        mmpos.from_hf_config(HUNYUAN, engine="vllm")  # type: ignore[arg-type]


def test_frames_that_do_not_merge_are_refused() -> None:
    with pytest.raises(mmpos.InvalidInputError) as caught:
        settings_of("ernie4_5_vl_moe").segments([103367], video_grid_thw=[[2, 2, 2], [3, 2, 2]])
    assert str(caught.value) == "video_grid_thw[1, 0]: got 3 frames, want a multiple of temporal_merge_size=2"


def test_an_old_config_json_has_the_language_model_at_its_top() -> None:
    told = without("qwen2_vl", "text_config")
    del told["vision_config"]["model_type"]
    told |= {"hidden_size": 1536, "num_attention_heads": 12, "rope_theta": 1e6}
    told["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    assert mmpos.from_hf_config(told) == settings_of("qwen2_vl")


def test_the_config_json_of_paddleocr_vl_has_the_language_model_at_its_top() -> None:
    told = without("paddleocr_vl", "text_config")
    del told["vision_config"]["model_type"]
    rope = {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}
    told |= {"head_dim": 128, "hidden_size": 1024, "num_attention_heads": 16, "rope_theta": 1e6, "rope_scaling": rope}
    settings = settings_of("paddleocr_vl")
    assert mmpos.from_hf_config(told) == replace(settings, rotary=replace(settings.rotary, theta=1e6))


def test_the_config_json_of_llama_4_scout_blends_no_frequencies() -> None:
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    told = without("llama4")
    told["text_config"] |= {"rope_scaling": {**rope, "original_max_position_embeddings": 8192}, "rope_theta": 5e5}
    del told["text_config"]["rope_parameters"]
    inv_freq = mmpos.from_hf_config(told).rotary.inv_freq_float32
    # By hand: 2π · 500000^(j/64) passes 8192 between j = 34 and j = 35.
    slower = [16.0 if j >= 35 else 1.0 for j in range(64)]
    np.testing.assert_allclose(inv_freq, [5e5 ** (-j / 64) / slower[j] for j in range(64)], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "path", "same"),
    [
        ("qwen2_vl", ("image_token_id",), {}),
        ("qwen2_vl", ("text_config", "model_type"), {}),
        ("qwen2_vl", ("vision_config", "spatial_merge_size"), {}),
        ("qwen2_5_vl", ("vision_config", "tokens_per_second"), {}),
        ("mistral3", ("spatial_merge_size",), {"spatial_merge_size": 2}),
        ("lighton_ocr", ("vision_config", "patch_size"), {"patch_size": 16}),
    ],
)
def test_what_a_file_leaves_out_is_the_default_of_its_class(model: str, path: Any, same: dict[str, Any]) -> None:
    assert mmpos.from_hf_config(without(model, *path)) == replace(settings_of(model), **same)


@pytest.mark.parametrize(
    "model", ["cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm_image", "hunyuan_vl", "minicpmv4_7", "qwen4_exp"]
)
def test_a_bare_config_json_is_the_default_of_its_class(model: str) -> None:
    bare = {"model_type": model, "text_config": {}, "vision_config": {}, **ARGUMENTS.get(model, {})}
    assert mmpos.from_hf_config(bare, layer_type=LAYER_TYPES.get(model)) == settings_of(model)


def test_the_encoder_of_cosmos3_omni_is_that_of_qwen3_vl_whatever_its_file_says() -> None:
    told = without("cosmos3_omni", vision_config={"model_type": "cosmos3_omni"})
    assert mmpos.from_hf_config(told) == settings_of("cosmos3_omni")


def test_layers_that_do_not_turn_have_no_settings() -> None:
    with pytest.raises(mmpos.InvalidInputError) as caught:
        mmpos.from_hf_config(config_of("cohere_compass"), layer_type="full_attention")
    assert str(caught.value) == "layer_type: got 'full_attention', want one of 'sliding_attention'"


def test_the_config_json_of_hunyuan_ocr_has_the_language_model_at_its_top() -> None:
    rope = {"rope_theta": 1e4, "rope_scaling": XDROPE["rope_parameters"]}
    told = {"hidden_size": 1024, "num_attention_heads": 16, "attention_head_dim": 128, "vision_config": {}, **rope}
    assert mmpos.from_hf_config({"model_type": "hunyuan_vl", **told}) == settings_of("hunyuan_vl")


def test_serving_engines_count_images_of_hunyuan_vl_in_each_request() -> None:
    """By hand: two documents of begin, an image of 1×2 with three tokens more of its own, and end."""
    begin, patch, end = 120118, 120120, 120119
    row = [begin, *[patch] * 5, end]
    expected = {"transformers": 1, "serving": 0}
    for engine, second in expected.items():
        settings = settings_of("hunyuan_vl", engine=engine)
        segments = settings.segments([row, row], [[1, 2, 4]] * 2)
        assert segments.lengths.tolist() == [2, 3, 2] * 2
        ids = settings.place(segments).dense()
        columns, rows = [0, 1, 0, 1, 2, 5, 6], [0, 1, 0, 0, 0, 5, 6]
        images = [[0, 1, n, n, n, 5, 6] for n in (0, second)]
        assert ids.tolist() == [[*range(7)] * 2, columns * 2, rows * 2, images[0] + images[1]]


def hunyuan_with(**rope: Any) -> dict[str, Any]:
    return {"model_type": "hunyuan_vl", "text_config": {"head_dim": 128, "rope_parameters": rope}, "vision_config": {}}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({}, "config.text_config.rope_parameters.mrope_section: got none, want pairs of each of three axes or more"),
        (
            {"mrope_section": [32, 32]},
            "config.text_config.rope_parameters.mrope_section: got [32, 32], want pairs of each of three axes or more",
        ),
        ({"mrope_section": [16, 16, 16, 8]}, "mrope_section: got [16, 16, 16, 8], want sizes that sum to 64 pairs"),
        (
            {"mrope_section": [16] * 4, "xdrope_section": [24, 24, 8, 8]},
            "mrope_section: got [16, 16, 16, 16] and xdrope_section [24, 24, 8, 8], want the same",
        ),
    ],
)
def test_sections_of_hunyuan_vl_that_make_no_rotation_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(mmpos.InvalidInputError) as caught:
        mmpos.from_hf_config(hunyuan_with(**rope))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("hunyuan_vl", "placeholders without a patch before, between and after their rows"),
        ("minicpmv4_7", "a thumbnail and tiles, each with markers of its own"),
    ],
)
def test_markers_that_a_builder_cannot_write_are_refused(model: str, what: str) -> None:
    with pytest.raises(mmpos.UnsupportedError) as caught:
        _ = settings_of(model).markers
    assert str(caught.value) == (
        f"markers: got {model!r}, whose images have {what}, which SequenceBuilder does not make, "
        "want the input_ids of its processor, which segments reads"
    )


@pytest.mark.parametrize(
    ("model", "grids", "counts", "message"),
    [
        ("qwen3_vl", [], [0], "generated: got 'qwen3_vl', want a model that generates images"),
        ("glm_image", [[1, 1, 1]], [0], "images_per_sample: got a sum of 0, want 1, one per grid"),
        ("glm_image", [], [-1], "images_per_sample[0]: got -1, want >= 0"),
        ("glm_image", [], [0, 0], "images_per_sample: got shape (2,), want (1,)"),
        ("glm_image", [], [0], "images_per_sample[0]: got 0, want at least 1, the images of the prompt"),
    ],
)
def test_counts_of_images_that_do_not_fit_are_refused(model: str, grids: Any, counts: Any, message: str) -> None:
    settings = settings_of(model)
    prompt = mmpos.SegmentTable.from_documents([[mmpos.Grid(1, 1)]])
    with pytest.raises(mmpos.MmposError) as caught:
        settings.generated(prompt, grids, counts)
    assert str(caught.value) == message


def test_grids_to_generate_without_their_counts_and_counts_of_other_models_are_refused() -> None:
    with pytest.raises(mmpos.UnsupportedError, match=r"^images_per_sample: got one of 'qwen3_vl', want None"):
        settings_of("qwen3_vl").segments([TEXT], images_per_sample=[0])
    with pytest.raises(mmpos.InvalidInputError, match=r"image_grid_thw\[0\]: got no placeholders left"):
        settings_of("glm_image").segments([TEXT, 16384], [[1, 1, 1]])


@pytest.mark.parametrize(("model", "alias"), [("kimi_k25", "kimi_k2"), ("exaone4_5", "exaone4_5_text")])
def test_first_configs_of_a_model_name_the_type_of_its_language_model_otherwise(model: str, alias: str) -> None:
    told = without(model)
    told["text_config"]["model_type"] = alias
    assert mmpos.from_hf_config(told) == settings_of(model)


def test_ids_of_paligemma_count_from_one_unless_they_go_on() -> None:
    settings = settings_of("paligemma")
    prompt = settings.place(settings.segments([[256000, 256000, TEXT]]))
    assert prompt.dense().tolist() == [[1, 2, 3]]
    more = settings.place(settings.segments([[TEXT, TEXT]]), start=prompt.next_positions)
    assert more.dense().tolist() == [[4, 5]]


def test_actions_of_pi0_that_turn_otherwise_than_its_prompt_are_refused() -> None:
    with pytest.raises(mmpos.UnsupportedError, match=r"^config\.dit_config: got a rotation of its own, want that of"):
        mmpos.from_hf_config(without("pi0", dit_config={"rope_parameters": {"rope_theta": 1e6}, "head_dim": 256}))


@pytest.mark.parametrize("model", ["colmodernvbert", "colpali", "colqwen2"])
def test_the_model_inside_one_that_embeds_is_known(model: str) -> None:
    told = json.loads(CONFIGS[model]().to_json_string(use_diff=False))
    with pytest.raises(mmpos.UnsupportedError, match=r"in its vlm_config: pass that"):
        mmpos.from_hf_config(told)
    inside = told["vlm_config"]
    layer_type = LAYER_TYPES.get(inside["model_type"])
    assert mmpos.from_hf_config(inside, layer_type=layer_type) == settings_of(inside["model_type"])


@pytest.mark.parametrize("model", ["chameleon", "emu3"])
def test_the_placeholder_of_an_image_stands_in_a_map_of_the_vocabulary(model: str) -> None:
    told = without(model, vocabulary_map={"<image>": 8711})
    assert mmpos.from_hf_config(told) == replace(settings_of(model), placeholders=mmpos.Placeholders(8711))
    assert mmpos.from_hf_config(CONFIGS[model](vocabulary_map={"<image>": 8711})) == mmpos.from_hf_config(told)


def test_a_class_that_has_no_encoder_by_default_needs_none() -> None:
    told = {"model_type": "gemma4", "text_config": {}}
    assert mmpos.from_hf_config(told, layer_type="full_attention") == settings_of("gemma4")
    told |= {"vision_config": {}}
    beside = settings_of("diffusion_gemma")  # of the same encoder
    own = {name: getattr(beside, name) for name in ("patch_size", "vision_scheme", "vision_rotary")}
    assert mmpos.from_hf_config(told, layer_type="full_attention") == replace(settings_of("gemma4"), **own)
    told["vision_config"] = {"num_attention_heads": 24}  # halves of heads that share keys turn as no Rotary says
    assert mmpos.from_hf_config(told, layer_type="full_attention").vision_rotary is None


def test_a_language_model_with_axes_has_one_where_ids_are_those_of_text() -> None:
    told = without("minicpmv4_6")
    told["text_config"]["rope_parameters"]["mrope_section"] = [11, 11, 10]
    assert mmpos.from_hf_config(told) == settings_of("minicpmv4_6")


@pytest.mark.parametrize(
    ("model", "video"),
    [
        ("exaone4_5", [[5, *[68] * 4, 5, 5]]),  # frames in a row
        ("lfm3_vl", [[5, *[125029] * 2, 5, *[125029] * 2, 5]]),  # a timestamp between them
        ("kimi_k25", [[5, *[163840] * 2, 5, *[163840] * 2, 5]]),  # chunks are grids
    ],
)
def test_videos_of_models_with_one_axis(model: str, video: list[list[int]]) -> None:
    settings = settings_of(model)
    grids = [[1, 2, 4], [1, 2, 4]] if model == "kimi_k25" else [[2, 2, 4]]
    segments = settings.segments(video, video_grid_thw=grids)
    frames = 2 if model == "exaone4_5" else 1
    assert segments.extents.T[segments.kind == 1].tolist() == [[frames, 1, 2]] * (2 // frames)
    assert settings.place(segments).dense().tolist() == [list(range(7))]


def test_a_mapping_needs_neither_transformers_nor_torch() -> None:
    told = without("qwen3_vl")
    code = f"""
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import mmpos
settings = mmpos.from_hf_config({told!r})
segments = settings.segments([5, 151655, 151655, 5], [[1, 2, 4]])
print(settings.place(segments).dense().tolist(), settings.markers.patch, settings.rotary.axes)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert (done.stdout, done.stderr) == ("[[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]] 151655 3\n", "")
