"""Tiny models with random weights for every Transformers model type, from reduced defaults of its config class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from model_configs import ARGUMENTS, CONFIGS
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("d_model", "embed_dim", "hidden_size", "n_embd", "out_hidden_size", "output_dim", "width"), 64),
    **dict.fromkeys(("encoder_hidden_size", "hidden_dim", "hidden_size_per_layer_input", "text_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_dim", "intermediate_size", "mlp_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("attention_heads", "encoder_attention_heads", "num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_topk", "num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "share_expert_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    "dim_head": 16,
    "head_dim": 16,
    "num_sliding_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
}
"""Upper limit of each size of a tiny model, by field name."""

LAYERS = {"depth", "encoder_layers", "layers", "n_layers", "num_hidden_layers", "num_layers"}
"""Fields that hold a number of layers."""

VQ = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
SPEECH = {"depths": [1, 1], "downsampling_ratios": [2], "num_filters": 4}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SMALL_VIT = {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": 64, "num_heads": 4, "depth": 1}}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5": {
        "audio_config": {"codebook_dim": 64, "codebook_size": 64},
        "audio_token_offset": 264,
        "image_token_offset": 200,
        "vision_config": {"codebook_size": 64},
    },
    "blip-2": {"image_token_index": 7},
    "chameleon": {"vocabulary_map": {"<image>": 7}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "diffusion_gemma": {"text_config": {"moe_intermediate_size": 32, "num_experts": 4, "top_k_experts": 2}},
    "emu3": {"vq_config": VQ, "vocabulary_map": {"<image>": 7}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}, "vision_config": SMALL_VIT},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
    "instructblip": {"image_token_index": 7},
    "instructblipvideo": {"video_token_index": 7},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 4}},
    "mistral4": {"head_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "perception_lm": {"vision_config": SMALL_VIT},
    **{model: {"text_config": {"rope_parameters": SECTIONS}} for model in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "pi0": {"chunk_size": 5, "vlm_config": {"projection_dim": 64, "vision_config": {"image_size": 28}}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "vibevoice": {
        "audio_config": {"hidden_size": 64, **SPEECH},
        "semantic_model_config": SPEECH,
        "diffusion_head_config": {"hidden_size": 64, "latent_size": 64, "num_head_layers": 1},
    },
    "vibevoice_asr": {f"{kind}_tokenizer_encoder_config": SPEECH for kind in ("acoustic", "semantic")},
}
"""Fields to change in the reduced defaults of a class so that its model runs."""

AUTOS: Any = (AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel)
"""Classes that build a model, the most specific first."""

PIXELS = torch.ones(1, 3, 28, 28)
INPUTS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "blip-2": lambda ids: {"input_ids": ids, "pixel_values": PIXELS},
    "diffusion_gemma": lambda ids: {"input_ids": ids, "decoder_input_ids": ids[:, :4]},
    "idefics": lambda ids: {
        "input_ids": ids,
        "image_encoder_embeddings": torch.ones(1, 1, 3, 64),
        "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.int64),
    },
    "instructblip": lambda ids: {"input_ids": ids, "pixel_values": PIXELS, "qformer_input_ids": ids},
    "instructblipvideo": lambda ids: {
        "input_ids": ids,
        "pixel_values": PIXELS[:, None].expand(-1, 4, -1, -1, -1),
        "qformer_input_ids": ids,
    },
    "kyutai_speech_to_text": lambda ids: {"input_ids": ids[..., None].expand(-1, -1, 33)},
    "pi0": lambda ids: {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": PIXELS[None],
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        "state": torch.ones(1, 32),
        "noise": torch.ones(1, 5, 32),
        "timestep": torch.ones(1),
    },
    "voxtral_realtime": lambda ids: {"input_ids": ids, "encoder_inputs_embeds": torch.ones(1, 4 * ids.shape[1], 64)},
}
"""Inputs of models that need more than input_ids."""


def tiny_config(model: str) -> Any:
    """Build a config with two layers, or with one layer of each type, and token ids below 512."""
    full = CONFIGS[model](**ARGUMENTS.get(model, {})).to_dict()
    small = _merged(_small(full), SPECIAL.get(model, {}))
    return CONFIGS[model](**{name: value for name, value in small.items() if name != "model_type"})


def tiny_model(model: str) -> Any:
    """Build a model with random weights that depend only on the name."""
    config = tiny_config(model)
    auto = next(cls for cls in AUTOS if type(config) in cls._model_mapping)
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def logits(network: Any, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Run a model on one text, with its own position ids unless ``position_ids`` is set."""
    model = network.config.model_type
    inputs = INPUTS[model](input_ids) if model in INPUTS else {"input_ids": input_ids}
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    # In Transformers 5.24, the outer model of Llama 4 raises an error if there are no images.
    module = network.language_model if model == "llama4" else network
    with torch.no_grad():
        output = module(**inputs)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def _small(full: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce every size in a config and in its nested configs."""
    layers, types = full.get("num_hidden_layers"), full.get("layer_types")
    kept = sorted({kind: types.index(kind) for kind in types}.values()) if types else []
    kept += [kept[-1] + 1 if kept else at for at in range(2)][: max(0, 2 - len(kept))]
    small: dict[str, Any] = {}
    for name, value in full.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _small(value)
        elif name == "initializer_range":
            small[name] = 0.2  # large, so that the logits depend on every token
        elif name == "per_layer_config":
            own = {int(at): fields for at, fields in (value or {}).items()}
            small[name] = {new: _doubled(own[old]) for new, old in enumerate(kept) if old in own}
        elif isinstance(value, list | tuple) and layers and len(value) == layers and layers > 2:
            small[name] = [_number(name, value[at], kept) for at in kept]
        else:
            small[name] = _number(name, value, kept)
    if full.get("qk_rope_head_dim") is not None:  # latent attention has as many key heads as query heads
        small |= {"num_key_value_heads": small["num_attention_heads"]}
    return small


def _number(name: str, value: Any, kept: list[int]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in LAYERS:
        return min(value, len(kept))
    if re.search("token_(id|index)$|_patch_id$", name) and value >= 500:
        return 100 + value % 397
    return min(value, SIZES.get(name, value))


def _doubled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the heads of some layers twice as large as the heads of the others."""
    return {name: 2 * SIZES[name] if name == "head_dim" else _number(name, fields[name], []) for name in fields}


def _merged(small: dict[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in special.items():
        inside: Any = small.get(name)
        joins = isinstance(inside, dict) and isinstance(value, Mapping) and "model_type" not in value
        small[name] = _merged(inside, value) if joins else value
    return small
