"""Rotary.from_hf_config: configs read as Transformers reads them, and refused configs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from functions_called import functions_called

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.models import from_hf_config
from mmpos.rotary.config import Rotary
from mmpos.rotary.hf_config import ROPE_TYPES
from mmpos.rotary.scaling import NTK, DynamicNTK, Linear, LongRoPE, PRoPE, YaRN

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8}


def text_of(model: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model, **fields}


UNKNOWN: dict[str, Any] = {"head_dim": 64, "rope_theta": 1e6, "rotary_dim": 64, "rope_interleave": False}
"""The fields that a config of an unknown model type requires."""

LINEAR = {"type": "linear", "factor": 2.0}
LONG = {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 4096}
BOTH_ROPES = {"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}}
FULL, SLIDING = {"layer_type": "full_attention"}, {"layer_type": "sliding_attention"}
GEMMA_3 = text_of(
    "gemma3_text", rope_scaling={"factor": 8.0, "rope_type": "linear"}, rope_theta=5e5, rope_local_base_freq=5e3
)
GEMMA_3_ROPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
GEMMA_4 = text_of("gemma4_text", layer_types=["sliding_attention", "full_attention"], head_dim=64)
QWEN_2 = text_of("qwen2", layer_types=["sliding_attention", "full_attention"])
DEEPSEEK = text_of("deepseek_v3", qk_rope_head_dim=32, head_dim=96, partial_rotary_factor=0.5)
SECTIONS = {**LLAMA, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
GRANITE = text_of("granite_swa", rope_theta=1e6, layer_rope_theta=[1e6, 0, 1e4])
MOLMO = text_of("molmo2_text", rope_scaling=LINEAR, num_hidden_layers=3, rope_scaling_layers=[0, 2])
ONES = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
PHIMOE = text_of("phimoe", original_max_position_embeddings=4096, rope_theta=1e4)
GLM = {"head_dim": 128, "partial_rotary_factor": 1.0}
INTERNLM: dict[str, Any] = {"model_type": "internlm9", "hidden_size": 512, "num_attention_heads": 8}
WHOLE_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
GEMMA_4_VISION = text_of("gemma4_vision", head_dim=72, num_attention_heads=2, num_key_value_heads=2)

READ: dict[str, list[tuple[dict[str, Any], dict[str, Any], Rotary]]] = {
    # tests/integrations/test_hf_classes.py compares all fields, rope and layer types of every class with its code.
    "fields that only some classes read": [
        (GEMMA_3, FULL, Rotary(256, theta=5e5, scaling=Linear(8))),
        (GEMMA_3, SLIDING, Rotary(256, theta=5e3)),
        (text_of("mimo_v2_flash", rope_parameters={"full_attention": {"rope_theta": 1e6}}), FULL,
         Rotary(192, theta=1e6, rotary_dim=64)),
        (text_of("zamba2", hidden_size=512, num_attention_heads=8), {}, Rotary(128)),
        (text_of("deepseek_ocr2_text", hidden_size=512, num_attention_heads=8, head_dim=32), {}, Rotary(64)),
        ({**LLAMA, "rope_scaling": LINEAR, "partial_rotary_factor": 0.25}, {},
         Rotary(64, rotary_dim=16, scaling=Linear(2))),
    ],
    "a length of one token": [
        ({**LLAMA, "rope_scaling": {**LINEAR, "type": "dynamic"}, "max_position_embeddings": 1}, {},
         Rotary(64, scaling=DynamicNTK(2, 1))),
    ],
    "rope_scaling before rope_parameters, as in Transformers": [
        ({**LLAMA, **BOTH_ROPES}, {}, Rotary(64, scaling=Linear(2))),
        ({**LLAMA, **BOTH_ROPES, "rope_scaling": None}, {}, Rotary(64, theta=5e5)),
    ],
    "an unknown model type whose config or arguments are complete": [
        ({**INTERNLM, "rope_theta": 1e6}, {"head_dim": 64, "rotary_dim": 64, "pairing": "half"},
         Rotary(64, theta=1e6)),
        ({**INTERNLM, "head_dim": 64, "rope_parameters": WHOLE_ROPE, "rope_interleave": True}, {},
         Rotary(64, theta=1e6, rotary_dim=32, scaling=Linear(2), pairing="adjacent")),
        ({**INTERNLM, "head_dim": 64, "rope_parameters": {"full_attention": WHOLE_ROPE}, "rope_interleave": False},
         FULL, Rotary(64, theta=1e6, rotary_dim=32, scaling=Linear(2))),
    ],
    "rope types whose fields are null, ignored or named as before": [
        ({**LLAMA, "max_position_embeddings": 8192, "rope_scaling": rope}, {}, Rotary(64, scaling=scaling))
        for rope, scaling in (
            ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, DynamicNTK(2, 8192)),
            ({"type": "yarn", "factor": None, "original_max_position_embeddings": 2048}, YaRN(4, 2048)),
            ({"rope_type": "yarn", "factor": 4.0, "beta_fast": None, "beta_slow": 2.0, "mscale": 0.7},
             YaRN(4, 8192, 32, 2, mscale=0.7)),
            (LONG, LongRoPE([1] * 32, [2] * 32, 4096, 2)),
            ({"type": "mrope"}, None),
        )
    ],
    "alpha if the model code reads it": [
        (text_of("hunyuan_v1_dense", head_dim=64, rope_theta=1e4,
                 rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0}), {},
         Rotary(64, scaling=NTK(1000))),
    ],
    "the rope type yarn of Phi 3 as longrope": [
        (text_of("phi3", max_position_embeddings=8192,
                 rope_scaling={"type": "yarn", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}), {},
         Rotary(96, scaling=LongRoPE([1] * 48, [2] * 48, 4096, 2))),
    ],
    "the attention factor of Phi MoE": [
        ({**PHIMOE, "rope_scaling": {"type": "longrope", **ONES, "short_mscale": 1.25, "long_mscale": 1.25}}, {},
         Rotary(128, scaling=LongRoPE([1] * 64, [2] * 64, 4096, None, 1.25))),
    ],
    "the pairing of latent attention, which rotates a separate head": [
        ({**DEEPSEEK, "rope_interleave": False}, {}, Rotary(32)),
        ({**LLAMA, "rope_interleave": True, "qk_rope_head_dim": 32, "rotary_dim": 16}, {}, Rotary(64)),
    ],
    "sections and interleaving of the text config": [
        *(
            (config, {}, Rotary(64, allocation="sections", mrope_section=[8, 12, 12]))
            for config in (
                SECTIONS, {"hidden_size": 7, "text_config": SECTIONS}, {"thinker_config": {"text_config": SECTIONS}}
            )
        ),
        ({**LLAMA, "rope_parameters": {"mrope_section": [12, 10, 10], "mrope_interleaved": True}}, {},
         Rotary(64, allocation="mrope-interleaved", mrope_section=[12, 10, 10])),
        # Interleaved frames get the pairs that rows and columns leave.
        ({"model_type": "qwen3_vl_text", "head_dim": 64, "rope_parameters": {"mrope_section": [12, 6, 5]}}, {},
         Rotary(64, theta=5e5, allocation="mrope-interleaved", mrope_section=[21, 6, 5])),
    ],
    "arguments, which replace values of the config": [
        ({**SECTIONS, "rope_theta": 5e5}, {"allocation": "interleaved", "axes": 2}, Rotary(64, theta=5e5)),
        (LLAMA, {"pairing": "adjacent", "precision": "hf"}, Rotary(64, pairing="adjacent", precision="hf")),
        ({**LLAMA, "rope_theta": 5e5}, {"inv_freq": [1.0] * 32}, Rotary(64, inv_freq=[1.0] * 32)),
        (text_of("phi", partial_rotary_factor=0.5), {"head_dim": 32}, Rotary(32, rotary_dim=16)),
        ({**LLAMA, "rope_scaling": {"type": "abf"}}, {"scaling": NTK(2)}, Rotary(64, scaling=NTK(2))),
        ({"model_type": "glm4v"}, {"mrope_section": [16, 24, 24]},
         Rotary(128, pairing="adjacent", allocation="sections", mrope_section=[16, 24, 24])),
    ],
    "equal rotations of all layers": [
        (GRANITE, {"theta": 1e4}, Rotary(128)),
        ({**GRANITE, "layer_rope_theta": [1e6, 0]}, {}, Rotary(128, theta=1e6)),
        (MOLMO, {"scaling": None}, Rotary(128)),
        ({**MOLMO, "rope_scaling_layers": [0, 1, 2]}, {}, Rotary(128, scaling=Linear(2))),
    ],
    "layers with their own head_dim": [
        (GEMMA_4, SLIDING, Rotary(64)),
        (GEMMA_4, FULL, Rotary(512, theta=1e6, scaling=PRoPE(0.25))),
        ({**GEMMA_4, "global_head_dim": 128}, FULL, Rotary(128, theta=1e6, scaling=PRoPE(0.25))),
        ({**GEMMA_4, "per_layer_config": {"01": {"head_dim": 32}}}, FULL,
         Rotary(32, theta=1e6, scaling=PRoPE(0.25))),
    ],
    "half heads of Gemma 4 as heads rotated by columns and by rows": [
        (GEMMA_4_VISION, {}, Rotary(36, theta=100.0, allocation="heads", head_axes=[1, 0, 1, 0])),
    ],
    "an unknown vision encoder": [
        (text_of("my_vision", hidden_size=64),
         {"head_dim": 64, "rotary_dim": 64, "theta": 100.0, "allocation": "axial", "pairing": "half"},
         Rotary(64, theta=100.0, allocation="axial")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("behaviour", READ)
def test_a_config_is_read_as_its_class_reads_it(behaviour: str) -> None:
    for config, options, want in READ[behaviour]:
        assert Rotary.from_hf_config(config, **options) == want


QWEN_2_5_VL = text_of("qwen2_5_vl", text_config={}, vision_config={})
SIZES = {"hidden_size": 2048, "num_attention_heads": 28}
ODD = "head_dim: got none, and 73 derived from hidden_size 2048 and num_attention_heads 28, want an even number"
SUMS, PAIRS = "want the values of a checkpoint: the default mrope_section", "does not sum to the 64 rotated pairs"
TYPES = "want one of 'full_attention', 'sliding_attention'"
ABF = "rope_type: got 'abf', want one of 'default', 'linear', 'dynamic'"
FOR_EACH = "want rope_parameters with an entry for each of 'hybrid', 'hybrid_sliding'"

# Error messages, which may continue after "...", and the configs that cause them.
REFUSED: dict[str, dict[str, Any]] = {
    # Sizes.
    "head_dim: got none in the config, want head_dim, or hidden_size and num_attention_heads":
        {**LLAMA, "num_attention_heads": None},
    "config.head_dim: got null, want a number; the default is 128": {**LLAMA, "model_type": "qwen3", "head_dim": None},
    f"config.{ODD}": {**LLAMA, **SIZES},
    f"config.thinker_config.text_config.{ODD}": text_of("qwen3_omni_moe", thinker_config={"text_config": SIZES}),
    f"config.text_config: got no head_dim, partial_rotary_factor, mrope_section, {SUMS} [8, 12, 12] {PAIRS}":
        text_of("glm4v"),
    f"config.text_config: got no mrope_section, {SUMS} [8, 12, 12] {PAIRS}": text_of("glm4v", text_config=GLM),
    f"config: got no head_dim, mrope_section, {SUMS} [16, 24, 24] does not sum to the 32 rotated pairs":
        text_of("qwen2_5_vl", hidden_size=4096),
    "mrope_section: got [12, 20, 20], want sizes that sum to 32 pairs":
        text_of("qwen3_vl_text", head_dim=64, rope_parameters={"mrope_section": [12, 20, 20]}),
    "config.hidden_size: got hidden_size 512 and n_embd 1024, two names of one field, want equal values":
        text_of("gptj", n_embd=1024, hidden_size=512),
    "num_key_value_heads: got 12, want 24 as for num_attention_heads": text_of("gemma4_vision", num_attention_heads=24),
    # Model types.
    "model_type: got the unknown type 'internlm9' and a config without head_dim, theta, rotary_dim, pairing, want them "
    "as arguments: Rotary.from_hf_config(config, head_dim=…, theta=…, rotary_dim=…, pairing=…)": INTERNLM,
    "model_type: got the unknown type 'internlm9' and a config without rotary_dim, pairing, want...":
        {**INTERNLM, "head_dim": 64, "rope_theta": 1e6},
    "model_type: got the unknown type ''...": {"head_dim": 64},
    "model_type: got the unknown type 'my_vision' and a config without allocation, want them as arguments...":
        text_of("my_vision", **UNKNOWN, rope_parameters={"rope_type": "axial"}),
    "model_type: got 'nanochat', want another: it rotates in the opposite direction": text_of("nanochat"),
    "config: got the config of a whole 'blt', want one of its decoder_config, encoder_config, global_config, "
    "patcher_config": text_of("blt"),
    "config.text_config: got none, want the config of the language model, or {} for the defaults of its class...":
        text_of("gemma3", vision_config={}),
    # Rope types and their fields.
    f"{ABF}...": {**LLAMA, "rope_scaling": {"type": "abf"}},
    **{
        f"rope_parameters.{name}: got none, want a value for rope_type {rope['type']!r}":
            {**LLAMA, "max_position_embeddings": 8192, "rope_scaling": rope}
        for rope, name in (
            ({"type": "linear"}, "factor"),
            ({"type": "dynamic"}, "factor"),
            ({"type": "yarn", "original_max_position_embeddings": 2048}, "factor"),
            ({"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
            ({"type": "longrope", "long_factor": [1.0] * 32}, "short_factor"),
        )
    },
    "max_position_embeddings: got none in the config, want a number for rope_type 'dynamic'...":
        text_of("internlm9", **UNKNOWN, rope_scaling={"type": "dynamic", "factor": 2.0}),
    "rope_parameters: got 'longrope' with short_mscale 1.0 and long_mscale 1.25 for 'phimoe', want 'longrope' with "
    "equal values": {**PHIMOE, "rope_scaling": {"type": "longrope", **ONES, "short_mscale": 1.0, "long_mscale": 1.25}},
    "rope_parameters: got [1], want a mapping...": text_of("llama", rope_parameters=[1]),
    "rope_theta: got [10000.0, 1000000.0], want a finite number >= 1...": text_of("llama", rope_theta=[1e4, 1e6]),
    "partial_rotary_factor: got 'x', want a finite number >= 0...": text_of("phi", partial_rotary_factor="x"),
    "rotary_dim: got [64], want an integer...": text_of("gptj", rotary_dim=[64]),
    "config.text_config.partial_rotary_factor: got 0.5, which rotates 21 channels of head_dim 42 (the config has "
    "none), want an even number of channels": text_of("glm4v_moe", text_config={}, vision_config={}),
    "rope_interleave: got 'no', want True or False": {**DEEPSEEK, "rope_interleave": "no"},
    # Layers.
    f"layer_type: got None, {TYPES}": text_of("gemma3_text", rope_parameters=GEMMA_3_ROPES),
    "layer_types: got 'full_attention', want a list of names...": text_of("llama", layer_types="full_attention"),
    "rope_scaling: got a value for 'cohere2_moe'...": text_of("cohere2_moe", rope_scaling={"type": "default"}),
    "per_layer_config: got [1], want a mapping from layer index to fields...": text_of("llama", per_layer_config=[1]),
    "layer_rope_theta[0]: got 'x', want a finite number >= 0...": text_of("granite_swa", layer_rope_theta=["x"]),
    "layer_rope_theta must equal rope_theta 1000000.0 in rotated layers unless theta is passed, got 10000.0": GRANITE,
    "rope_scaling_layers: got [0, 2], want all 3 layers, or pass scaling...": MOLMO,
    **{
        f"head_dim: got {got} in per_layer_config, want one value...":
            text_of("llama", per_layer_config={index: {"head_dim": own}}, head_dim=64)
        for index, own, got in (("0", 32, "32, 64"), ("1", 32, "64, 32"), ("0", [8], "[8], 64"))
    },
}  # fmt: skip

# The same for configs of a layer type.
OF_LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    f"layer_type: got 'sliding', {TYPES}": (text_of("gemma3_text", rope_parameters=GEMMA_3_ROPES), "sliding"),
    f"layer_type: got 'chunked_attention', {TYPES}": (QWEN_2, "chunked_attention"),
    "layer_type: got 'full_attention', want None: all layers rotate alike": (LLAMA, "full_attention"),
    "layer_type: got 'full_attention', want one of 'sliding_attention'": (text_of("beam"), "full_attention"),
    f"rope_theta: got 1000000.0 for all layers of 'zaya', {FOR_EACH}...": (text_of("zaya", rope_theta=1e6), "hybrid"),
    "rope_scaling: got {'type': 'linear', 'factor': 2.0} for all layers of 'zaya', want rope_parameters...":
        (text_of("zaya", rope_scaling=LINEAR), "hybrid"),
    "partial_rotary_factor: got 0.5 for all layers of 'mellum', want rope_parameters with an entry...":
        (text_of("mellum", partial_rotary_factor=0.5), "full_attention"),
    "rope_scaling.rope_type: got none for 'gemma3_text', want a rope type; 'type' is ignored...":
        (text_of("gemma3_text", rope_scaling=LINEAR), "full_attention"),
    "truncate: got False for a layer type, where Transformers ignores it, want none...":
        (text_of("gemma3_text", rope_scaling={"rope_type": "yarn", "factor": 2, "truncate": False}), "full_attention"),
    "rope_theta: got none in the config...":
        (text_of("lfm3", rope_parameters={"hybrid": {"rope_type": "default"}}), "hybrid"),
    "config.layer_types: got none, want the type of each layer...":
        (text_of("gemma4_text", head_dim=64, per_layer_config={"01": {"head_dim": 32}}), "full_attention"),
}  # fmt: skip


@pytest.mark.parametrize("message", [*REFUSED, *OF_LAYERS])
def test_the_error_for_an_invalid_config_names_the_field(message: str) -> None:
    config, layer_type = OF_LAYERS.get(message) or (REFUSED[message], None)
    with pytest.raises((InvalidInputError, UnsupportedError)) as caught:
        Rotary.from_hf_config(config, layer_type=layer_type)
    error, start = str(caught.value), message.removesuffix("...")
    assert error.startswith(start)
    assert error == start or start != message


def test_a_config_is_read_by_few_functions() -> None:
    assert functions_called(lambda: Rotary.from_hf_config(QWEN_2_5_VL)) <= 29
    assert functions_called(lambda: from_hf_config(QWEN_2_5_VL)) <= 44


MISSING = "'no/such', where there is neither a file nor a folder"


@pytest.mark.parametrize(
    ("config", "got"),
    [("no/such", MISSING), (Path("no/such"), MISSING), ("", "str"), (b"llama", "bytes"), ([], "list")],
)
def test_anything_but_a_config_or_a_model_folder_is_refused(config: object, got: str) -> None:
    for read in (Rotary.from_hf_config, from_hf_config):
        with pytest.raises(InvalidInputError) as caught:
            read(config)
        assert str(caught.value) == (
            f"config: got {got}, want a config object, the path of a config.json or of its folder, or the file's "
            "contents as a mapping. Nothing is downloaded: for a model on the Hub, download its config.json, or look "
            "its model_type up in docs/models-names.md"
        )


# Rope types in Transformers.


def test_every_rope_type_in_transformers_is_known() -> None:
    pytest.importorskip("transformers")
    rope_utils = importlib.import_module("transformers.modeling_rope_utils")
    assert {*rope_utils.ROPE_INIT_FUNCTIONS} <= {*ROPE_TYPES}
