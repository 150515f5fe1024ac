"""State of a patched model: nothing remains after unpatch or between calls, and copies are independent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hf_models import WAYS, config_of, model_of, patched, rotary_of, text, tokens, two_rows
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForSequenceClassification

from mmpos import InvalidInputError, PositionTable, UnsupportedError
from mmpos.integrations.hf import patch, unpatch
from mmpos.integrations.hf.patches import Attribute, Patch


def state(model: torch.nn.Module) -> list[Any]:
    """Return the name, the attributes and the hook counts of every module."""
    return [
        (
            name,
            sorted(vars(module)),
            [len(v) for k, v in sorted(vars(module).items()) if "hooks" in k and v is not None],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("implementation", ["auto", "reference", "triton"])
def test_unpatch_restores_the_model(implementation: Any) -> None:
    model, input_ids = model_of("qwen2"), tokens(2, 24)
    before, want = state(model), model(input_ids).logits
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert patch(model, rotary_of(model), implementation=implementation) is model
    assert sorted(model.state_dict()) == sorted(weights)
    assert state(model) != before
    has_triton = find_spec("triton") is not None
    replaced = "forward" in vars(model.model.layers[0].self_attn)
    assert replaced == (implementation == "triton" or (implementation == "auto" and has_triton))
    model(input_ids[:1, :4], mm_position_ids=text(4))
    assert unpatch(model) is model
    assert state(model) == before
    assert torch.equal(model(input_ids).logits, want)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="mm_position_ids"):
        model.generate(input_ids, mm_position_ids=two_rows())


def test_a_forward_set_by_other_code_is_not_replaced() -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    want = patched(model)(input_ids, mm_position_ids=table).logits
    unpatch(model)
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward  # as hooks that offload weights do
    before = state(model)
    with pytest.raises(UnsupportedError, match=r"got LlamaAttention\.forward set on the instance"):
        patch(model, rotary_of(model), implementation="triton")
    assert state(model) == before
    patch(model, rotary_of(model), implementation="auto")
    assert torch.equal(model(input_ids, mm_position_ids=table).logits, want)
    unpatch(model)
    assert "forward" in vars(attention)


def test_a_failed_patch_leaves_nothing_behind() -> None:
    module = nn.Linear(1, 1)
    before = sorted(vars(module))

    def hooks() -> Iterator[RemovableHandle]:
        yield module.register_forward_hook(lambda *_: None)
        raise RuntimeError("no more hooks")

    with pytest.raises(RuntimeError, match="no more hooks"):
        Patch.install(module, hooks, [Attribute(module, "forward", module.forward)])
    assert (sorted(vars(module)), len(module._forward_hooks)) == (before, 0)


def test_unpatch_refuses_to_remove_a_forward_set_by_other_code() -> None:
    model = model_of("llama")
    patch(model, rotary_of(model), implementation="triton")
    attention = model.model.layers[1].self_attn
    ours, attention.forward = attention.forward, lambda *args, **kwargs: None
    before = state(model)
    with pytest.raises(InvalidInputError, match=r"got LlamaAttention.forward that was replaced after patch"):
        unpatch(model)
    assert state(model) == before
    attention.forward = ours
    unpatch(model)


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_call_does_not_affect_the_next(way: str) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    want = model(input_ids).logits
    patched(model, way)
    with pytest.raises(RuntimeError):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(2, 1, 3, 3))
    assert torch.equal(model(input_ids).logits, want)
    with_positions = model(input_ids, mm_position_ids=table).logits
    assert torch.equal(model(input_ids).logits, want)
    assert not torch.equal(with_positions, want)


def test_threads_that_share_a_model_use_their_own_positions() -> None:
    model, input_ids = patched(model_of("llama")), tokens(2, 24)
    tables = [two_rows(scheme) for scheme in ("rope-tie", "rope-tie-v2", "naive-2d", "rope-tie-fractional")] * 3

    @torch.no_grad()
    def run(table: PositionTable) -> Tensor:
        return model(input_ids, mm_position_ids=table).logits

    want = [run(table) for table in tables]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(run, tables), want, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_patched_and_independent(copied: Callable[[Any], Any], way: str) -> None:
    model, input_ids, table = patched(model_of("llama"), way), tokens(2, 24), two_rows()
    want = model(input_ids, mm_position_ids=table).logits
    other = copied(model)
    assert torch.equal(other(input_ids, mm_position_ids=table).logits, want)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
        other.lm_head.weight.zero_()
    assert not torch.equal(other(input_ids, mm_position_ids=table).logits, want)
    assert other.generate(input_ids, mm_position_ids=table, max_new_tokens=2)[:, -2:].eq(0).all()
    unpatch(other)
    assert torch.equal(model(input_ids, mm_position_ids=table).logits, want)


def test_models_without_a_head_or_with_a_different_head_can_be_patched() -> None:
    model, input_ids, table = patched(model_of("llama")), tokens(2, 24), two_rows()
    want = model.model(input_ids, mm_position_ids=table).last_hidden_state
    unpatch(model)
    patch(model.model, rotary_of(model))
    assert torch.equal(model.model(input_ids, mm_position_ids=table).last_hidden_state, want)
    with pytest.raises(InvalidInputError, match="want the patched module"):
        unpatch(model)
    unpatch(model.model)
    classifier = AutoModelForSequenceClassification.from_config(config_of("llama"))
    patch(classifier, rotary_of(model))
    assert not torch.equal(classifier(input_ids, mm_position_ids=table).logits, classifier(input_ids).logits)


def test_positions_follow_the_dtype_of_autocast() -> None:
    model, input_ids = model_of("llama"), tokens(2, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(input_ids).logits
        got = patch(model, rotary_of(model, precision="hf"))(input_ids, mm_position_ids=text(24, 24)).logits
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
