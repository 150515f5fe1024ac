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


@cache
def original() -> Any:
    return tiny_model("qwen3_vl")


def batch() -> dict[str, Any]:
    """Return two rows: one with an image, and a left-padded one with two frames of a video."""
    generator = torch.Generator().manual_seed(0)
    config = original().config
    ids = torch.randint(1, 20, (2, 20), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    image, video = config.image_token_id, config.video_token_id
    ids[0, 3:9], ids[1, 5:9], ids[1, 11:15] = image, video, video
    width = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int(),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "pixel_values": torch.randn(24, width, generator=generator),
        "pixel_values_videos": torch.randn(32, width, generator=generator),
    }


def results(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the ids passed to the language model, the logits, the loss, and the deltas stored in the model."""
    passed: dict[str, Any] = {}

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        passed["position_ids"] = kwargs["position_ids"]

    with model.model.language_model.register_forward_pre_hook(record, with_kwargs=True):
        output = model(**arguments, labels=arguments["input_ids"])
    return {**passed, "logits": output.logits, "loss": output.loss, "deltas": model.model.rope_deltas}


@torch.no_grad()
def test_forward_and_generate_give_the_same_results_as_with_the_models_own_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, ours = copy.deepcopy(original()), install(copy.deepcopy(original()))
    monkeypatch.setattr(type(own.model), "get_rope_index", None, raising=False)
    got = results(ours, batch())
    monkeypatch.undo()
    want = results(own, batch())
    assert got["position_ids"][-3:, 1, :3].tolist() == [[0] * 3] * 3
    assert (got["deltas"] != 0).all()
    for key, value in want.items():
        assert torch.equal(got[key], value), key
    length: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert torch.equal(*(model.generate(**batch(), **length) for model in (own, ours)))
