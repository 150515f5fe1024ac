"""Transformers models of any type with random weights, small enough to train on a CPU, and documents for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hf_models import EXPERTS, SIZES
from tiny_models import VQ
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import mmpos
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.integrations.models import MODEL_TYPES

CONFIGS: Any = CONFIG_MAPPING

# Every token is routed to every expert, since rounding could change which expert scores best.
TEXT = {
    **SIZES,
    **EXPERTS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}

ENCODER = {
    **dict.fromkeys(("embed_dim", "hidden_size", "out_hidden_size"), SIZES["hidden_size"]),
    **dict.fromkeys(("depth", "num_hidden_layers", "spatial_merge_size", "temporal_patch_size"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "patch_size"), 4),
    **dict.fromkeys(("image_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_position_embeddings", "window_size"), 16),
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}

TOKENS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "image_start_token_id": 302,
    "image_end_token_id": 303,
    "video_start_token_id": 304,
    "video_end_token_id": 305,
}


def tiny_config(model_type: str, **text: Any) -> Any:
    """Build a config of this type, for text tokenized as bytes and images written as token 300 between 302 and 303."""
    default = CONFIGS[model_type]()
    if not hasattr(default, "text_config"):
        return CONFIGS[model_type](**{**TEXT, **text})
    kind = default.text_config.model_type
    arguments: dict[str, Any] = {"text_config": {**TEXT, "model_type": kind, **text}}
    if MODEL_TYPES[model_type].scheme.startswith("mrope"):
        section = [3, 3, 2] if kind.startswith(("cohere", "cosmos3", "ernie", "qwen3", "qwen4")) else [2, 3, 3]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, "partial_rotary_factor": 1.0}
        by_type = {"sliding_attention": rope, "full_attention": None}
        arguments["text_config"]["rope_parameters"] = by_type if model_type == "cohere_compass" else rope
        arguments |= TOKENS
    if model_type == "cohere_compass":  # one layer has a rotation, the other does not
        arguments["text_config"]["layer_types"] = list(by_type)
    if model_type == "ernie4_5_vl_moe":  # text and images have separate experts of two sizes
        arguments["text_config"] |= {"moe_intermediate_size": [32, 16], "mlp_layer_types": ["dense", "sparse"]}
    vision = getattr(default, "vision_config", None)
    if vision is not None:
        arguments["vision_config"] = {**ENCODER, "model_type": vision.model_type}
    if model_type == "emu3":
        return CONFIGS[model_type](**arguments, vq_config=VQ, vocabulary_map={"<image>": 300})
    return CONFIGS[model_type](**arguments, **({"vq_config": VQ} if model_type == "janus" else {}))


def tiny_model(config: Any) -> Any:
    """Build a model in training mode with random weights that are the same for the same config."""
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    return kind.from_config(config).train()


def tiny_images(settings: mmpos.ModelSettings) -> mmpos.ImageProcessor:
    """Build a tiny model's image processor."""
    options: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.6, 0.7), "min_pixels": 64, "max_pixels": 4096}
    return settings.image_processor(backend="pillow", **options)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw an image of noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def examples_of(builder: mmpos.SequenceBuilder, *documents: list[Any]) -> list[Example]:
    """Build an example from each document, with labels on all of its text."""
    sequences = [builder.build(parts) for parts in documents]
    labels = [np.where(sequence.token_type_ids, IGNORE_INDEX, sequence.input_ids) for sequence in sequences]
    return [Example(str(i), *pair) for i, pair in enumerate(zip(sequences, labels, strict=True))]
