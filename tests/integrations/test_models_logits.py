"""Tiny random models of Transformers with our ids in place of their own: the logits are the same."""

from __future__ import annotations

import pytest
import torch
from model_configs import EXPECTED, LAYER_TYPES
from tiny_models import logits, tiny_model
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_RETRIEVAL_MAPPING_NAMES,
)

import mmpos
from mmpos.integrations.models import MODEL_TYPES, UNSUPPORTED_TYPES

SAMPLE = ("gemma4", "kimi_k25", "llama4", "minicpmv4_6", "mllama")
"""Model types of the normal suite: two rotations, latent attention, layers without, three axes, images beside."""

ONE_AXIS = sorted(model for model, (scheme, _, _) in EXPECTED.items() if scheme.axes == 1)
IMAGE = 7
IDS = torch.tensor([[5, *[IMAGE] * 6, 5, 4, *[IMAGE] * 2, 5]])
"""Text, an image of 2×3 tokens, text, an image of 1×2 tokens, text."""


def test_every_model_type_of_the_auto_maps_is_known_or_refused_by_name() -> None:
    """All that make text from more than text, and all that search in it: a new release shows its own here."""
    maps = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        MODEL_FOR_RETRIEVAL_MAPPING_NAMES,
    )
    assert {model for names in maps for model in names} - {*MODEL_TYPES, *UNSUPPORTED_TYPES} == set()
    assert {*MODEL_TYPES} & {*UNSUPPORTED_TYPES} == set()


def positions(model: str, network: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Ids of tokens, and of their positions by our settings, which are the same with grids and without."""
    settings = mmpos.from_hf_config(network.config, layer_type=LAYER_TYPES.get(model))
    image = settings.image_token_id
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
def test_logits_with_our_ids_are_those_of_the_model_alone(model: str) -> None:
    network = tiny_model(model)
    input_ids, position_ids = positions(model, network)
    alone = logits(network, input_ids)
    assert torch.equal(logits(network, input_ids, position_ids), alone)
    assert not torch.equal(logits(network, input_ids, 3 * position_ids), alone)


# Models that are refused, for the reasons that are told.


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm5_next", "nemotron_h_omni"])
def test_ids_change_nothing_in_models_without_positions(model: str) -> None:
    network, ids = tiny_model(model), torch.arange(IDS.shape[1])[None]
    alone = logits(network, IDS)
    assert torch.equal(logits(network, IDS, ids), alone)
    assert torch.equal(logits(network, IDS, 3 * ids), alone)


@pytest.mark.slow
def test_ids_of_paligemma_count_from_one() -> None:
    network, ids = tiny_model("paligemma"), torch.arange(IDS.shape[1])[None]
    alone = logits(network, IDS)
    assert torch.equal(logits(network, IDS, ids + 1), alone)
    assert not torch.equal(logits(network, IDS, ids), alone)
