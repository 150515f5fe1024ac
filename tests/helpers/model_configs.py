"""Configs for every known model type, and the settings that must be read from them.

``python tests/helpers/model_configs.py`` rewrites the settings in tests/golden/model_settings.json for review.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

import mmpos
from mmpos.integrations.models import MODEL_TYPES, ModelSettings
from mmpos.integrations.models.from_config import vision_scheme
from mmpos.rotary import Rotary
from mmpos.rotary.hf_config import Fields
from mmpos.rotary.hf_models import ENCODERS, TRANSFORMERS

CONFIGS: Any = CONFIG_MAPPING
"""Config classes by model type."""
OLDER = [int(part) for part in transformers.__version__.split(".")[:2]] < [
    int(part) for part in TRANSFORMERS.split(".")
]
complete = pytest.mark.skipif(OLDER, reason=f"Transformers {TRANSFORMERS} has other model types and defaults")
"""Mark for tests of all model types together, which are known for one version."""
CHANGED = ("cohere_compass", "diffusion_gemma", "granite4_vision")
"""Model types that rotate differently or have other defaults in Transformers 5.19."""
TEXT = 5
"""Id of a text token."""
GLM_TEXT = {"head_dim": 128, "partial_rotary_factor": 0.5}
"""Settings of the released checkpoints that the defaults of the class lack."""
COHERE_TEXT = {
    "layer_types": ["sliding_attention", "full_attention"] * 20,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [24, 20, 20]},
        "full_attention": None,
    },
}
"""The class has no base model: one layer type has a rotation, the other has none."""
OMNI_TEXT = {"num_attention_heads": 32, "head_dim": 128}
"""As released: the 28 heads of the class default do not divide its hidden size."""
XDROPE = {"rope_parameters": {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [16] * 4}}
"""As in the released checkpoint, with its field names."""
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_omni_moe": {"thinker_config": {"text_config": OMNI_TEXT}},
    "qwen3_omni_moe_thinker": {"text_config": OMNI_TEXT},
    "cohere_compass": {"text_config": COHERE_TEXT},
    "glm4v": {"text_config": GLM_TEXT},
    "glm_image": {"text_config": GLM_TEXT},
    "hunyuan_vl": {"text_config": {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, **XDROPE}},
    "glm46v": {"text_config": {"model_type": "glm4v_text", **GLM_TEXT}},
    "glm4v_moe": {"text_config": GLM_TEXT},
    "glmga": {"text_config": {"model_type": "glm4v_text", **GLM_TEXT}},
    "minicpmv4_7": {
        "image_token_id": 20,
        "video_token_id": 21,
        "image_start_id": 22,
        "image_end_id": 23,
        "slice_start_id": 24,
        "slice_end_id": 25,
        "newline_id": 26,
    },
    **{name: {"text_config": {"model_type": "llama"}} for name in ("blip-2", "instructblip", "instructblipvideo")},
}
LAYER_TYPES = {
    **dict.fromkeys(("cohere_compass", "gemma3_text"), "sliding_attention"),
    **dict.fromkeys(("diffusion_gemma", "gemma3", "gemma3n", "gemma4", "gemma4_unified"), "full_attention"),
    **dict.fromkeys(("lfm3", "lfm3_vl", "shieldgemma2", "step3p7"), "full_attention"),
    **dict.fromkeys(("embedding_gemma2", "modernvbert", "neomme", "ultravbert"), "full_attention"),
}
"""The layer type whose rotation is expected, if a model has several."""
HUNYUAN = {
    "model_type": "hunyuan_image_3_moe",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "custom"},
    "max_position_embeddings": 22800,
    "patch_size": 1,
    "image_token_id": 128006,
    "im_start_id": 128000,
    "im_end_id": 128001,
}


def config_of(model: str) -> Any:
    return HUNYUAN if model == "hunyuan_image_3_moe" else CONFIGS[model](**deepcopy(dict(ARGUMENTS.get(model, {}))))


def skip_if_changed(model: str) -> None:
    if OLDER and model in CHANGED:
        pytest.skip("Transformers has changed this model type since")


@cache
def settings_of(model: str, **options: Any) -> ModelSettings:
    return mmpos.from_hf_config(config_of(model), layer_type=LAYER_TYPES.get(model), **options)


def describe(value: Any) -> Any:
    """Return the non-default fields of a frozen object as JSON, with its class name."""
    if is_dataclass(value):
        own = [field for field in fields(value) if field.init and getattr(value, field.name) != field.default]
        return {"class": type(value).__name__, **{field.name: describe(getattr(value, field.name)) for field in own}}
    return [describe(item) for item in value] if isinstance(value, list | tuple) else value


def encoder_settings(encoder: str, config: object) -> Any:
    """Return an encoder's position scheme and rotation."""
    return [vision_scheme(Fields.of(config)), Rotary.from_hf_config(config)]


def golden() -> dict[str, dict[str, Any]]:
    """Return the settings that are read from each class's defaults."""
    return {
        "encoders": {encoder: describe(encoder_settings(encoder, CONFIGS[encoder]())) for encoder in ENCODERS},
        "models": {model: describe(settings_of(model)) for model in MODEL_TYPES},
    }


GOLDEN = Path(__file__).parents[1] / "golden" / "model_settings.json"

if __name__ == "__main__":
    lines = [
        f"{json.dumps(kind)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items()) + "\n}"
        for kind, rows in golden().items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
