"""rope_index installed in a tiny Qwen3-VL: the same positions, logits and tokens, copies, graphs and refusals."""

from __future__ import annotations

import copy
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from mmpos import UnsupportedError
from mmpos.integrations.hf import install, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import RopeIndex

START, IMAGE, VIDEO, END = 60, 61, 62, 63
FUNCTION = RopeIndex(2, frames_apart=True)


@cache
def config() -> Any:
    text: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    kind: Any = Qwen3VLConfig
    return kind(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )


def model_of() -> Any:
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config()).eval()


def batch() -> dict[str, Tensor]:
    """An image of 2×3 tokens in one row, two frames of 2×2 in the other, which is padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, START, (2, 20), generator=generator)
    ids[0, 2], ids[0, 3:9], ids[0, 9] = START, IMAGE, END
    ids[1, 5:9] = ids[1, 11:15] = VIDEO
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "pixel_values": torch.randn(24, 96, generator=generator),
        "pixel_values_videos": torch.randn(32, 96, generator=generator),
    }


def seen(model: Any, **more: Any) -> dict[str, Any]:
    """The ids that the language model is given, the logits, and the deltas that the model keeps."""
    found: dict[str, Any] = {}

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found["position_ids"] = kwargs["position_ids"]

    with model.model.language_model.register_forward_pre_hook(watch, with_kwargs=True):
        found["logits"] = model(**batch(), **more).logits
    return {**found, "deltas": model.model.rope_deltas}


@torch.no_grad()
def test_a_forward_has_the_same_positions_and_the_same_logits() -> None:
    want, got = seen(model_of()), seen(install(model_of()))
    assert got["position_ids"][:, 1, :3].tolist() == [[0] * 3] * 3
    assert got["deltas"].tolist() == [[-3], [-4]]
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_training_goes_through_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, calls, call = [], [], RopeIndex.__call__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return call(*args, **kwargs)

    monkeypatch.setattr(RopeIndex, "__call__", counted)
    for model in (model_of(), install(model_of())):
        asked = batch()
        loss = model.train()(**asked, labels=asked["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
        assert all(weight.grad is not None for weight in model.model.language_model.parameters())
    assert losses[0] == losses[1]
    assert len(calls) == 1


@torch.no_grad()
def test_generate_gives_the_same_tokens() -> None:
    told: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want, got = (model.generate(**batch(), **told) for model in (model_of(), install(model_of())))
    assert got.shape == (2, 26)
    assert torch.equal(got, want)


def test_installing_twice_is_installing_once_and_uninstall_brings_the_method_back() -> None:
    model = model_of()
    method = model.model.get_rope_index
    assert install(install(model)) is model
    assert model.model.get_rope_index == FUNCTION == rope_index(config())
    assert uninstall(uninstall(model)) is model
    assert model.model.get_rope_index == method
    assert "get_rope_index" not in vars(model.model)


def test_it_reaches_the_model_in_whatever_is_around_it() -> None:
    model = model_of()
    install(model.model)
    assert model.model.get_rope_index == FUNCTION
    uninstall(model)
    install(nn.Sequential(nn.Identity(), model))
    assert model.model.get_rope_index == FUNCTION


def test_copies_and_pickles_keep_it_and_weights_do_not_show_it() -> None:
    model = model_of()
    names = list(model.state_dict())
    install(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.get_rope_index == FUNCTION
        uninstall(other)
        assert other.model.get_rope_index != FUNCTION
    assert model.model.get_rope_index == FUNCTION
    assert list(model.state_dict()) == names


def test_a_graph_without_breaks_holds_it() -> None:
    asked = {name: value for name, value in batch().items() if not name.startswith("pixel")}
    compiled: Any = torch.compile(FUNCTION, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(**asked), FUNCTION(**asked), strict=True):
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert torch.equal(got, want)


def test_another_function_on_a_model_is_not_covered() -> None:
    inner, other = model_of(), model_of()
    other.model.get_rope_index = theirs = lambda *_: None
    with pytest.raises(UnsupportedError) as raised:
        install(nn.ModuleList([inner, other]))
    assert str(raised.value) == "model: got Qwen3VLModel.get_rope_index set on the instance, want that of the class"
    assert "get_rope_index" not in vars(inner.model)
    assert uninstall(other).model.get_rope_index is theirs


def test_models_without_the_method_or_of_another_type_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^model: got Linear, want a model with get_rope_index$"):
        install(nn.Linear(2, 2))
    model = model_of()
    model.model.config = {"model_type": "minicpmv4_6"}
    with pytest.raises(UnsupportedError, match=r"^config\.model_type: got 'minicpmv4_6', want one of cohere_compass, "):
        install(model)
