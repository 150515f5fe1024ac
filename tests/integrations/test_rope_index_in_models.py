"""rope_index installed in tiny models: positions, logits, losses and tokens equal those with the models' own method."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from mmpos.integrations.hf import install

MODELS = ("minicpmv4_7", "qwen3_vl")


@cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def pair(name: str) -> tuple[Any, Any]:
    """Return a model with its own method, and a copy with rope_index installed."""
    return copy.deepcopy(model_of(name)), install(copy.deepcopy(model_of(name)))


def batch(name: str) -> dict[str, Any]:
    """Return two rows: one with an image, and a left-padded one with two frames of a video or a video crop."""
    generator = torch.Generator().manual_seed(0)
    config = model_of(name).config
    ids = torch.randint(1, 20, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    image, video = config.image_token_id, config.video_token_id
    arguments: dict[str, Any] = {"attention_mask": mask}
    pixels: dict[str, tuple[int, ...]]
    if name == "qwen3_vl":
        ids[0, 3:9], ids[1, 5:9], ids[1, 11:15] = image, video, video
        arguments |= {"image_grid_thw": torch.tensor([[1, 4, 6]]), "video_grid_thw": torch.tensor([[2, 4, 4]])}
        width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
        pixels = {"pixel_values": (24, width), "pixel_values_videos": (32, width)}
    else:
        side = config.vision_config.patch_size
        for row, patch in enumerate((image, video)):
            ids[row, 5:9] = torch.tensor([config.image_start_id, patch, patch, config.image_end_id])
        arguments |= dict.fromkeys(("target_sizes", "target_sizes_videos"), torch.tensor([[4, 8]]))
        pixels = dict.fromkeys(("pixel_values", "pixel_values_videos"), (1, 3, side, side * 32))
    arguments |= {key: torch.randn(*shape, generator=generator) for key, shape in pixels.items()}
    return {"input_ids": ids, "mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int(), **arguments}


def results(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the ids passed to the language model, the logits, the loss, and the deltas stored in the model."""
    passed: dict[str, Any] = {}

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        passed["position_ids"] = kwargs["position_ids"]

    with model.model.language_model.register_forward_pre_hook(record, with_kwargs=True):
        output = model(**arguments, labels=arguments["input_ids"])
    return {**passed, "logits": output.logits, "loss": output.loss, "deltas": model.model.rope_deltas}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_generate_give_the_same_results_as_with_the_models_own_method(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ours = pair(name)
    monkeypatch.setattr(type(own.model), "get_rope_index", None, raising=False)
    got = results(ours, batch(name))
    monkeypatch.undo()
    want = results(own, batch(name))
    assert got["position_ids"][-3:, 1, :3].tolist() == [[0] * 3] * 3
    assert (got["deltas"] != 0).all()
    for key, value in want.items():
        assert torch.equal(got[key], value), key
    length: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(*(model.generate(**batch(name), **length) for model in (own, ours)))
