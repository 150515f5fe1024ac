"""rope_index installed in tiny models: the positions, logits, losses and tokens of their own method."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from mmpos.integrations.hf import install

MODELS = ("minicpmv4_7", "qwen3_vl")


@cache
def made(name: str) -> Any:
    return tiny_model(name)


def pair(name: str) -> tuple[Any, Any]:
    """A model with its own method, and one with ours."""
    return copy.deepcopy(made(name)), install(copy.deepcopy(made(name)))


def batch(name: str) -> dict[str, Any]:
    """An image in one row, two frames of a video or one more image in the other, which is padded on the left."""
    generator = torch.Generator().manual_seed(0)
    config = made(name).config
    ids = torch.randint(1, 20, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    image, video = config.image_token_id, config.video_token_id
    told: dict[str, Any] = {"attention_mask": mask}
    pixels: dict[str, tuple[int, ...]]
    if name == "qwen3_vl":
        ids[0, 3:9], ids[1, 5:9], ids[1, 11:15] = image, video, video
        told |= {"image_grid_thw": torch.tensor([[1, 4, 6]]), "video_grid_thw": torch.tensor([[2, 4, 4]])}
        width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
        pixels = {"pixel_values": (24, width), "pixel_values_videos": (32, width)}
    else:
        side = config.vision_config.patch_size
        for row, patch in enumerate((image, video)):
            ids[row, 5:9] = torch.tensor([config.image_start_id, patch, patch, config.image_end_id])
        told |= dict.fromkeys(("target_sizes", "target_sizes_videos"), torch.tensor([[4, 8]]))
        pixels = dict.fromkeys(("pixel_values", "pixel_values_videos"), (1, 3, side, side * 32))
    told |= {key: torch.randn(*shape, generator=generator) for key, shape in pixels.items()}
    return {"input_ids": ids, "mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int(), **told}


def seen(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The ids that the language model is given, the logits, and the deltas that the model keeps."""
    found: dict[str, Any] = {}

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found["position_ids"] = kwargs["position_ids"]

    with model.model.language_model.register_forward_pre_hook(watch, with_kwargs=True):
        found["logits"] = model(**asked).logits
    return {**found, "deltas": model.model.rope_deltas}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_has_the_same_positions_and_logits(name: str) -> None:
    want, got = (seen(model, batch(name)) for model in pair(name))
    assert got["position_ids"][-3:, 1, :3].tolist() == [[0] * 3] * 3
    assert (got["deltas"] != 0).all()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_through_the_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []
    calls: list[Any] = []
    own, ours = pair(name)
    kind = type(ours.model.get_rope_index)
    call = kind.__call__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return call(*args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    for model in (own, ours):
        asked = batch(name)
        loss: Tensor = model.train()(**asked, labels=asked["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
        assert any(weight.grad is not None for weight in model.model.language_model.parameters())
    assert losses[0] == losses[1]
    assert len(calls) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_the_same_tokens(name: str) -> None:
    length: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want, got = (model.generate(**batch(name), **length) for model in pair(name))
    assert got.shape == (2, 26)
    assert torch.equal(got, want)
