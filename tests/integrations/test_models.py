"""Settings read from configs: golden values for every model type, their use and refusals; logits of tiny models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import fill_tables
import numpy as np
import pytest
import torch
import transformers
from model_configs import (
    ARGUMENTS,
    CONFIGS,
    GOLDEN,
    HUNYUAN,
    LAYER_TYPES,
    TEXT,
    complete,
    config_of,
    golden,
    settings_of,
    skip_if_changed,
)
from refusals import assert_refused
from tiny_models import logits, tiny_model
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

import mmpos
import mmpos.rotary
from mmpos import InvalidInputError
from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES
from mmpos.rotary.hf_models import ENCODERS, MODELS
from mmpos.schemes import Flatten, MRope, MRopeQwen3, MRopeQwen25, RopeTieV2, TMRope, TMRopeQwen3


def test_no_model_type_has_two_rows_in_the_table() -> None:
    table = (Path(__file__).parents[2] / "mmpos/rotary/hf_models.toml").read_text(encoding="utf-8")
    assert sum(len(row["types"].split()) for row in tomllib.loads(table)["rows"]) == len(MODELS)


@complete
def test_settings_of_every_model_type_and_encoder_equal_the_golden_file() -> None:
    assert json.loads(json.dumps(golden())) == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("model", sorted({*MODEL_TYPES} - {"hunyuan_image_3_moe"}))
def test_the_mapping_of_a_config_gives_the_same_settings_as_the_object(model: str) -> None:
    skip_if_changed(model)
    mappings = [json.loads(config_of(model).to_json_string(use_diff=diff)) for diff in (False, True)]
    for mapping in mappings + [{"model_type": model}] * (model not in ARGUMENTS):
        assert mmpos.from_hf_config(mapping, layer_type=LAYER_TYPES.get(model)) == settings_of(model)


def test_an_absent_encoder_and_an_empty_one_of_llava_have_different_patch_sizes() -> None:
    empty = {"model_type": "llava", "text_config": {}, "vision_config": {}}
    assert (settings_of("llava").patch_size, mmpos.from_hf_config(empty).patch_size) == (14, 32)


def test_the_page_lists_the_fields_that_each_model_type_needs_without_a_config() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
    section = page.partition("## Without a config.json")[2].partition("\n## ")[0]
    needed: dict[str, tuple[str, str]] = {}
    for models, fields, layer in re.findall(r"^\| (`.*) \| (.*) \| (.*)\|$", section, re.MULTILINE):
        needed |= {model: (fields.strip("`"), layer.strip("` ")) for model in re.findall("`(.*?)`", models)}
    assert set(needed) <= set(MODEL_TYPES)
    for model in MODEL_TYPES:
        fields, layer = needed.get(model, ("{}", ""))
        if fields.startswith("{"):
            config = {"model_type": model, **json.loads(fields)}
            assert mmpos.from_hf_config(config, layer_type=layer or None).model_type == model
        if model in needed:
            with pytest.raises(InvalidInputError):
                mmpos.from_hf_config({"model_type": model})


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
        ("qwen2_5_omni", TMRope(engine="serving")),
        ("qwen3_omni_moe", TMRopeQwen3(25, "serving")),
        ("hunyuan_vl", settings_of("hunyuan_vl").scheme),
    ],
)
def test_serving_engines_differ_only_in_the_scheme(model: str, scheme: Any) -> None:
    assert settings_of(model, engine="serving") == replace(settings_of(model), scheme=scheme)


@complete
def test_model_names_are_the_classes_and_checkpoints_of_transformers() -> None:
    names = json.loads(fill_tables.NAMES.read_text(encoding="utf-8"))
    assert {*names} == {*MODEL_TYPES, *UNSUPPORTED_TYPES} & {*CONFIG_MAPPING_NAMES}
    for model, (name, *checkpoint) in names.items():
        assert name == CONFIG_MAPPING_NAMES[model].removesuffix("Config").rstrip("_")
        folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model)
        code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
        assert all(f"/{each}" in code for each in checkpoint), model
    line = "- **`mrope-transformers`; serving: `mrope-qwen2.5`**: `qwen2_5_vl` (Qwen2.5-VL-7B-Instruct)."
    assert line in fill_tables.names().splitlines()


@complete
def test_the_page_describes_every_rotation_and_lists_every_model_type_once() -> None:
    for model in (name for name in MODEL_TYPES if settings_of(name).rotary.axes > 1):
        rotary = settings_of(model).rotary
        allocation = "its own" if isinstance(rotary.allocation, tuple) else rotary.allocation
        assert fill_tables.rotation(model) == f"{rotary.axes} axes, {allocation}, {rotary.pairing}"
    listed = sorted(re.findall(r"`([^`]+)` \(", fill_tables.names()))
    assert listed == sorted({*MODEL_TYPES} - {"hunyuan_image_3_moe"})
    written = {name: re.findall("`([^`]+)`", fill_tables.models(name)) for name in fill_tables.GROUPED}
    rows = fill_tables.models("supported").splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row.split(" | ")[0])) == sorted(MODEL_TYPES)
    rows = fill_tables.models("encoders").splitlines()[2:]
    assert sorted(name for row in rows for name in re.findall("`([^`]+)`", row)) == sorted(ENCODERS)
    assert sorted(written["refused encoders"]) == sorted(fill_tables.UNSUPPORTED_ENCODERS)
    assert sorted(written["refused"]) == sorted(UNSUPPORTED_TYPES)


def test_seconds_per_frame_are_passed_to_the_scheme() -> None:
    ids = [TEXT, *[151656] * 3, TEXT]
    by_engine = {}
    for engine in ("transformers", "serving"):
        settings = settings_of("qwen2_5_vl", engine=engine)
        segments = settings.segments(ids, video_grid_thw=[[3, 2, 2]], seconds_per_frame=[2])
        by_engine[engine] = settings.place(segments, start=10).dense()[0].tolist()
    assert by_engine == {"transformers": [10, 11, 19, 27, 12], "serving": [10, 11, 19, 27, 28]}


def test_glm_images_and_videos_in_packed_documents_are_distinguished() -> None:
    settings = settings_of("glm4v")
    (image, begin, end), text = (151343, 151341, 151342), TEXT
    first = [begin, image, text, image, end, image, image, begin]  # ends inside a video
    second = [image, text, begin, image, end]
    ids = np.array(first + second)
    segments = settings.segments(ids, [[1, 2, 4], [1, 2, 2]], [[2, 2, 2], [1, 2, 2]], cu_seqlens=[0, 8, 13])
    grids = segments.extents.T[segments.kind == 1].tolist()
    assert grids == [[1, 1, 1], [1, 1, 1], [1, 1, 2], [1, 1, 1], [1, 1, 1]]
    assert segments.lengths.tolist() == [1, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert ids.tolist() == first + second, "the caller's ids must not change"


def test_sequences_built_with_the_markers_have_the_ids_of_the_model() -> None:
    settings = settings_of("qwen3_vl")
    options: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "min_pixels": 3136, "max_pixels": 2**24}
    builder = mmpos.SequenceBuilder(
        images=settings.image_processor(max_tokens=16, backend="pillow", **options),
        scheme=settings.scheme,
        markers=settings.markers,
    )
    sequence = builder.build(["a", np.zeros((64, 96, 3), np.uint8)])
    assert sequence.input_ids.tolist() == [97, 151652, *[151655] * 6, 151653]
    again = settings.segments(sequence.input_ids, sequence.grid_thw * [1, 2, 2])
    np.testing.assert_array_equal(settings.place(again).dense(), sequence.positions.dense())
    assert builder.images == mmpos.ImageProcessor(
        "pillow", patch_size=16, spatial_merge_size=2, order="merged", max_tokens=16, **options
    )


def test_videos_built_with_the_markers_have_the_video_token_of_the_model() -> None:
    settings = settings_of("qwen2_vl")
    builder = mmpos.SequenceBuilder(scheme=settings.scheme, markers=settings.markers)
    assert builder.build(["a", mmpos.Grid(1, 2, frames=2)]).input_ids.tolist() == [97, 151652, *[151656] * 4, 151653]
    glm = settings_of("glm4v")  # its videos use the placeholders of images
    assert (glm.video_markers is not None, glm.markers.video) == (True, None)


def test_hunyuan_image_floors_rope_tie_v2() -> None:
    """By hand: the image begins at 3, so rows begin at ⌊3 + (6−2)/2⌋, columns at ⌊3 + (6−3)/2⌋ and text at 3 + 6."""
    settings = mmpos.from_hf_config(HUNYUAN)
    positions = settings.place(settings.segments([TEXT] * 3 + [128006] * 6 + [TEXT] * 2, [[1, 2, 3]]))
    rows, columns = [0, 1, 2, 5, 5, 5, 6, 6, 6, 9, 10], [0, 1, 2, 4, 5, 6, 4, 5, 6, 9, 10]
    assert positions.dense().tolist() == [rows, columns]


def without(model: str, *path: str, **instead: Any) -> dict[str, Any]:
    """Return the mapping of a config without one field, or with other values."""
    mapping: dict[str, Any] = json.loads(CONFIGS[model]().to_json_string(use_diff=False))
    inner = mapping
    for name in path[:-1]:
        inner = inner[name]
    if path:
        del inner[path[-1]]
    return {**mapping, **instead}


def with_text(model: str, rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the mapping of a config with other values in its language model, or in the RoPE parameters of that."""
    mapping = without(model)
    mapping["text_config"] |= changes
    mapping["text_config"].get("rope_parameters", {}).update(rope or {})
    return mapping


@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        # The encoder of Cosmos 3 Omni is always that of Qwen3-VL.
        ("cosmos3_omni", without("cosmos3_omni", vision_config={"model_type": "cosmos3_omni"})),
        # Early configs use an alias for the type of the language model.
        ("kimi_k25", with_text("kimi_k25", model_type="kimi_k2")),
        ("exaone4_5", with_text("exaone4_5", model_type="exaone4_5_text")),
        # Sections are ignored if images have the ids of text.
        ("minicpmv4_6", with_text("minicpmv4_6", {"mrope_section": [11, 11, 10]})),
    ],
)
def test_other_forms_of_a_config_give_the_same_settings(model: str, mapping: dict[str, Any]) -> None:
    assert mmpos.from_hf_config(mapping) == settings_of(model)


@pytest.mark.parametrize("model", ["hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"])
def test_an_old_config_json_may_have_the_language_model_at_the_top_level(model: str) -> None:
    mapping = json.loads(config_of(model).to_json_string(use_diff=False))
    text = mapping.pop("text_config")
    if model == "hunyuan_vl":
        text["attention_head_dim"] = text.pop("head_dim")
    rope = text.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    del mapping["vision_config"]["model_type"]
    assert mmpos.from_hf_config({**text, **old, **mapping}) == settings_of(model)


def test_images_of_hunyuan_vl_are_counted_across_the_batch() -> None:
    """By hand: each document is a begin marker, a 1×2 image with three extra tokens, and an end marker."""
    begin, patch, end = 120118, 120120, 120119
    row = [begin, *[patch] * 5, end]
    settings = settings_of("hunyuan_vl")
    segments = settings.segments([row, row], [[1, 2, 4]] * 2)
    assert segments.lengths.tolist() == [2, 3, 2] * 2
    columns, rows, images = [0, 1, 0, 1, 2, 5, 6], [0, 1, 0, 0, 0, 5, 6], [0, 1, 0, 0, 0, 5, 6, 0, 1, 1, 1, 1, 5, 6]
    assert settings.place(segments).dense().tolist() == [[*range(7)] * 2, columns * 2, rows * 2, images]


def test_a_start_replaces_the_first_id_of_the_model() -> None:
    settings = settings_of("paligemma")
    assert settings.place(settings.segments([[TEXT, TEXT]]), start=4).dense().tolist() == [[4, 5]]


def hunyuan_with(**rope: Any) -> dict[str, Any]:
    return {"model_type": "hunyuan_vl", "text_config": {"head_dim": 128, "rope_parameters": rope}, "vision_config": {}}


@pytest.mark.parametrize("model", ["colmodernvbert", "colpali", "colqwen2"])
def test_the_model_inside_an_embedding_model_is_supported(model: str) -> None:
    mapping = json.loads(CONFIGS[model]().to_json_string(use_diff=False))
    with pytest.raises(mmpos.UnsupportedError, match=r"in its vlm_config: pass that"):
        mmpos.from_hf_config(mapping)
    inside = mapping["vlm_config"]
    layer_type = LAYER_TYPES.get(inside["model_type"])
    assert mmpos.from_hf_config(inside, layer_type=layer_type) == settings_of(inside["model_type"])


@pytest.mark.parametrize("model", ["chameleon", "emu3"])
def test_the_image_placeholder_is_read_from_the_vocabulary_map(model: str) -> None:
    mapping = without(model, vocabulary_map={"<image>": 8711})
    assert mmpos.from_hf_config(mapping) == replace(settings_of(model), placeholders=mmpos.Placeholders(8711))
    assert mmpos.from_hf_config(CONFIGS[model](vocabulary_map={"<image>": 8711})) == mmpos.from_hf_config(mapping)


@complete
def test_a_class_without_a_default_encoder_needs_no_vision_config() -> None:
    mapping = {"model_type": "gemma4", "text_config": {}}
    assert mmpos.from_hf_config(mapping, layer_type="full_attention") == settings_of("gemma4")
    mapping |= {"vision_config": {}}
    other = settings_of("diffusion_gemma")  # has the same encoder
    encoder = {name: getattr(other, name) for name in ("patch_size", "vision_scheme", "vision_rotary")}
    assert mmpos.from_hf_config(mapping, layer_type="full_attention") == replace(settings_of("gemma4"), **encoder)
    mapping["vision_config"] = {"num_attention_heads": 24}  # no Rotary describes half-heads that share keys
    assert mmpos.from_hf_config(mapping, layer_type="full_attention").vision_rotary is None


@pytest.mark.parametrize(
    ("model", "video"),
    [
        ("exaone4_5", [[5, *[68] * 4, 5, 5]]),  # adjacent frames
        ("lfm3_vl", [[5, *[125029] * 2, 5, *[125029] * 2, 5]]),  # a timestamp between frames
        ("kimi_k25", [[5, *[163840] * 2, 5, *[163840] * 2, 5]]),  # chunks are grids
    ],
)
def test_videos_of_models_with_one_axis_have_the_ids_of_text(model: str, video: list[list[int]]) -> None:
    settings = settings_of(model)
    grids = [[1, 2, 4], [1, 2, 4]] if model == "kimi_k25" else [[2, 2, 4]]
    segments = settings.segments(video, video_grid_thw=grids)
    frames = 2 if model == "exaone4_5" else 1
    assert segments.extents.T[segments.kind == 1].tolist() == [[frames, 1, 2]] * (2 // frames)
    assert settings.place(segments).dense().tolist() == [list(range(7))]


def test_a_mapping_needs_neither_transformers_nor_torch() -> None:
    mapping = without("qwen3_vl")
    code = f"""
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import mmpos
settings = mmpos.from_hf_config({mapping!r})
segments = settings.segments([5, 151655, 151655, 5], [[1, 2, 4]])
print(settings.place(segments).dense().tolist(), settings.markers.patch, settings.rotary.axes)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert (done.stdout, done.stderr) == ("[[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]] 151655 3\n", "")


# Refusals.


class Unreadable:
    model_type = "llama"

    @property
    def head_dim(self) -> int:
        raise KeyError("hidden_size")


KNOWN = "want a model type of Transformers 5.24 that docs/models-names.md lists; for any other model, write its rule as"
DEFAULTS = "or {} for the defaults of its class"
ENCODER = f"config.vision_config: got none, want the config of the encoder, {DEFAULTS}"
ROPE, SECTION = "config.text_config.rope_parameters.", "mrope_section: got"
SQUARE = {**without("qwen2_vl")["vision_config"], "patch_size": [14, 16]}
KIND, FAR = "config.text_config.model_type: got", 2**40
CONFIGS_REFUSED: dict[str, Any] = {
    **{f"config.model_type: got {model!r}, which is not supported: {reason}": {"model_type": model}
       for model, reason in UNSUPPORTED_TYPES.items()},
    f"config.model_type: got 'no', {KNOWN}": {"model_type": "no"},
    f"config.model_type: got 'qwen25_vl' (did you mean 'qwen2_5_vl'?), {KNOWN}": {"model_type": "qwen25_vl"},
    "config.model_type: got none, want the name of a model type": {},
    "config.image_token_id: got none, want an integer": {**HUNYUAN, "image_token_id": None},
    "config.attention_head_dim: got none, want an integer": {**HUNYUAN, "attention_head_dim": None},
    ENCODER: without("llava", "vision_config"),
    f"{ENCODER[:-1]}": without("qwen2_vl", "vision_config"),
    f"config.text_config: got none, want the config of the language model, {DEFAULTS}": without("llava", "text_config"),
    f"{KIND} 'llama' in 'qwen2_vl', want one of qwen2_vl_text":
        without("qwen2_vl", text_config={"model_type": "llama"}),
    f"{KIND} ['llama'] in 'llava', want one of": without("llava", text_config={"model_type": ["llama"]}),
    "Placeholders.video must differ from image, got 151655": without("qwen2_vl", video_token_id=151655),
    "config.vision_end_token_id must differ from vision_start_token_id, got 151652":
        without("qwen2_vl", vision_end_token_id=151652),
    "config.image_token_id: got '<image>', want an integer": without("qwen2_vl", image_token_id="<image>"),
    "config.image_token_id: got -200, want >= 0": without("llava", image_token_index=-200),
    "config.image_token_id: got [1], want an integer": without("llava", image_token_index=[[1]]),
    "rotary: got 3 axes, want 1 for scheme 'flatten'":
        without("mistral", rope_parameters={"rope_theta": 1e4, "mrope_section": [16, 24, 24]}),
    "layer_type: got None, want one of 'full_attention', 'sliding_attention'": without("gemma3"),
    "config.vision_config.patch_size: got [14, 16], want an integer": without("qwen2_vl", vision_config=SQUARE),
    "head_dim: got '128', want an integer": without("mistral", head_dim="128"),
    "head_dim: got 2147483648, want <= 65536": without("mistral", head_dim=2**31),
    "head_dim: got 34359738368, want <= 65536": without("mistral", head_dim=None, hidden_size=FAR),
    "num_attention_heads: got 0, want >= 1": without("mistral", head_dim=None, num_attention_heads=0),
    "max_position_embeddings: got 'long', want a finite number":
        without("mistral", rope_parameters={"rope_type": "yarn", "factor": 2.0}, max_position_embeddings="long"),
    "head_dim: got KeyError ('hidden_size') from the config, want a readable field": Unreadable(),
    f"{SECTION} [24, 16, 24], want pairs of rows, the same number for columns, then frames":
        with_text("ernie4_5_vl_moe", {"mrope_section": [24, 16, 24]}),
    f"mrope_section[0]: got {FAR}, want <= 65536": with_text("ernie4_5_vl_moe", {"mrope_section": [FAR, FAR, 0]}),
    f"{SECTION} 7, want a sequence of numbers": with_text("ernie4_5_vl_moe", {"mrope_section": 7}),
    f"{ROPE}{SECTION} none, want the pairs of at least three axes": hunyuan_with(),
    f"{ROPE}{SECTION} [32, 32], want the pairs of at least three axes": hunyuan_with(mrope_section=[32, 32]),
    f"{SECTION} [16, 16, 16, 8], want sizes that sum to 64 pairs": hunyuan_with(mrope_section=[16, 16, 16, 8]),
    "mrope_section must equal xdrope_section, got [16, 16, 16, 16] and [24, 24, 8, 8]":
        hunyuan_with(mrope_section=[16] * 4, xdrope_section=[24, 24, 8, 8]),
    "config.dit_config must have the same rotation as config.vlm_config, because it attends to":
        without("pi0", dit_config={"rope_parameters": {"rope_theta": 1e6}, "head_dim": 256}),
}  # fmt: skip


@pytest.mark.parametrize("message", CONFIGS_REFUSED, ids=range(len(CONFIGS_REFUSED)))
def test_the_error_for_an_invalid_config_names_the_field(message: str) -> None:
    assert_refused(message, lambda: mmpos.from_hf_config(CONFIGS_REFUSED[message]), mmpos.MmposError)


def generated(counts: list[int], *grids: list[int], model: str = "glm_image") -> mmpos.SegmentTable:
    """Return the table of images to be generated after a prompt with one image."""
    prompt = mmpos.SegmentTable.from_documents([[mmpos.Grid(1, 1)]])
    return settings_of(model).generated(prompt, list(grids), counts)


def test_images_to_generate_are_placed_last_grid_first_before_an_end_marker() -> None:
    segments = generated([3], [1, 1, 1], [1, 2, 3], [1, 4, 5])
    assert segments.extents.T.tolist() == [[1, 4, 5], [1, 2, 3], [1, 1, 1]]
    assert segments.kind.tolist() == [1, 1, 0]


def test_an_end_marker_in_the_padding_is_not_an_image_of_the_prompt() -> None:
    settings = settings_of("glm_image")
    begin, end = settings.image_markers or (0, 0)
    ids, mask = [[5, begin, 167855, end], [5, 5, end, end]], [[1, 1, 1, 1], [1, 1, 0, 0]]
    grids = [[1, 1, 1], [1, 2, 2], [1, 2, 3]]
    segments = settings.segments(ids, grids, attention_mask=mask, images_per_sample=[2, 1])
    assert segments.kind.tolist() == [0, 1, 0, 0, 2]


NOT_BUILT = ", which SequenceBuilder cannot build; pass the input_ids of the model's processor to segments"
USES: dict[str, Any] = {
    "engine: got 'vllm', want one of 'transformers', 'serving'": lambda: settings_of("qwen2_vl", engine="vllm"),
    "layer_type: got 'full_attention', want one of 'sliding_attention'":
        lambda: mmpos.from_hf_config(config_of("cohere_compass"), layer_type="full_attention"),
    "markers: the config of 'llava' does not define the tokens around images": lambda: settings_of("llava").markers,
    **{f"markers: got {model!r}, whose images have {tokens}{NOT_BUILT}": lambda model=model: settings_of(model).markers
       for model, tokens in (
           ("hunyuan_vl", "rows that end in a placeholder without a patch"),
           ("minicpmv4_7", "a thumbnail and tiles, each with separate markers"),
           ("neomme", "a placeholder without a patch before their rows"),
       )},
    "image_processor: got 'llava', want a model whose config defines": lambda: settings_of("llava").image_processor(),
    "video_grid_thw[1, 0]: got 3 frames, want a multiple of temporal_merge_size=2":
        lambda: settings_of("ernie4_5_vl_moe").segments([103367], None, [[2, 2, 2], [3, 2, 2]]),
    "images_per_sample must be None for 'qwen3_vl'":
        lambda: settings_of("qwen3_vl").segments([5], images_per_sample=[0]),
    "image_grid_thw[0]: got no placeholders left":
        lambda: settings_of("glm_image").segments([TEXT, 16384], [[1, 1, 1]]),
    "generated: got 'qwen3_vl', want a model that generates images": lambda: generated([0], model="qwen3_vl"),
    "images_per_sample: got a sum of 0, want 1, one per grid": lambda: generated([0], [1, 1, 1]),
    "images_per_sample[0]: got -1, want >= 0": lambda: generated([-1]),
    "images_per_sample: got shape (2,), want (1,)": lambda: generated([0, 0]),
    "images_per_sample[0]: got 0, want at least 1, the images of the prompt": lambda: generated([0]),
}  # fmt: skip


@pytest.mark.parametrize("message", USES)
def test_invalid_uses_of_settings_are_refused(message: str) -> None:
    assert_refused(message, USES[message], mmpos.MmposError)


SAMPLE = ("gemma4", "kimi_k25", "llama4", "minicpmv4_6", "mllama")
"""Model types of the fast suite: two rotations, latent attention, layers without rotation, three axes and
cross-attention."""

ONE_AXIS = sorted(model for model, row in MODEL_TYPES.items() if row.scheme == "flatten")
IMAGE = 7
IDS = torch.tensor([[5, *[IMAGE] * 6, 5, 4, *[IMAGE] * 2, 5]])
"""Text, an image of 2×3 tokens, text, an image of 1×2 tokens, text."""


@complete
def test_every_multimodal_model_type_of_transformers_is_supported_or_refused() -> None:
    """The test fails if a new release of Transformers adds a model that generates or retrieves from more than text."""
    names = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "RETRIEVAL")
    maps = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in names]
    known = {*MODEL_TYPES, *UNSUPPORTED_TYPES}
    assert {model for models in maps for model in models} - known == set()
    wider_names = ("CAUSAL_LM", "DECISION", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
    wider = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in wider_names]
    more = {model for models in wider for model in models if reads_more_than_text(CONFIGS[model])}
    assert more >= {"jev", "neomme", "ultravbert", "vibevoice"}
    assert more - known == set()
    assert {*MODEL_TYPES} & {*UNSUPPORTED_TYPES} == set()


def reads_more_than_text(config: Any) -> bool:
    """Return whether a config class contains a language model, or a placeholder for images or audio."""
    return "text_config" in config.sub_configs or any(
        hasattr(config, f"{kind}_token_id") for kind in ("image", "audio")
    )


def positions(model: str, network: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Return token ids and position ids, and check that grids do not change the position ids."""
    settings = mmpos.from_hf_config(network.config, layer_type=LAYER_TYPES.get(model))
    image = settings.placeholders.image
    input_ids = torch.where(IDS == IMAGE, IMAGE if image is None else image, IDS)
    ids = settings.place(settings.segments(input_ids)).dense(dtype="int64")
    if image is not None:
        side = settings.spatial_merge_size
        segments = settings.segments(input_ids, [[1, 2 * side, 3 * side], [1, side, 2 * side]])
        assert segments.extents.T.tolist() == [[1, 1, 1], [1, 2, 3], [1, 1, 2], [1, 1, 2], [1, 1, 1]]
        assert (settings.place(segments).dense() == ids).all()
    return input_ids, torch.from_numpy(ids)


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in SAMPLE else pytest.mark.slow) for model in ONE_AXIS]
)
def test_logits_are_the_same_with_mmpos_ids(model: str) -> None:
    network = tiny_model(model)
    input_ids, position_ids = positions(model, network)
    alone = logits(network, input_ids)
    assert torch.equal(logits(network, input_ids, position_ids), alone)
    assert not torch.equal(logits(network, input_ids, 3 * position_ids), alone)
