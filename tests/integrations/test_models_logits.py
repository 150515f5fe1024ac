"""Tiny random Transformers models return the same logits with mmpos ids as with their own ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_configs import CONFIGS, LAYER_TYPES, complete
from tiny_models import logits, tiny_model
from torch import Tensor
from transformers.models.auto import modeling_auto

import mmpos
from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES

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
