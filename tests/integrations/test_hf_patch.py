"""Patched models, compiled models and the kernel give the logits and gradients of manual cos and sin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hf_models import (
    CONFIGS,
    OTHERS,
    WAYS,
    as_ids,
    by_hand,
    gradients,
    model_of,
    patched,
    rotary_of,
    text,
    tokens,
    two_rows,
)
from tolerance import assert_within, rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.integrations.hf import patch, unpatch
from mmpos.rotary import DevicePositions, kernel

NAMES = sorted(CONFIGS)
DTYPES = (torch.bfloat16, torch.float32)


@torch.no_grad()
def text_logits(model: Any, input_ids: Tensor) -> Tensor:
    """Assert that patching does not change the logits of text, bit for bit, and return them."""
    want: Tensor = model(input_ids).logits
    patch(model, rotary_of(model, precision="hf"))
    assert torch.equal(model(input_ids, mm_position_ids=text(*[input_ids.shape[1]] * len(input_ids))).logits, want)
    return want


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in NAMES),
        ("gemma3", torch.float32),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in OTHERS),
    ],
    ids=str,
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, input_ids = model_of(name, dtype), tokens(2, 120)
    want = text_logits(model, input_ids)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, want)
        assert torch.equal(model(input_ids, mm_position_ids=None).logits, want)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_images_have_the_same_logits_as_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids = model_of(name), tokens(2, 24)
    table, rotary = two_rows("rope-tie-v2"), rotary_of(model)  # half-integers
    with torch.no_grad():
        untouched = model(input_ids).logits
        want, bound = by_hand(model, table, rotary, lambda: model(input_ids).logits)
        assert (want - untouched).abs().max() > 0.01 * untouched.abs().max()
        for way in ("reference",) if name == "phi" else WAYS:  # Phi rotates only half of its channels
            got = patched(model, way)(input_ids, mm_position_ids=table).logits
            assert_within(got, want, bound)
            unpatch(model)


@pytest.mark.parametrize(("embedding", "states"), [DTYPES, DTYPES[::-1]], ids=str)
def test_cos_and_sin_have_the_dtype_of_the_hidden_states_rather_than_the_weights(
    embedding: torch.dtype, states: torch.dtype
) -> None:
    model, input_ids = model_of("llama", states), tokens(1, 24)
    model.model.embed_tokens.to(embedding)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.to(states))
    text_logits(model, input_ids)


def test_positions_follow_the_dtype_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert text_logits(model_of("llama"), tokens(2, 24)).dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_heads_with_separate_axes_rotate_by_positions(implementation: Any) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    heads = model.config.num_key_value_heads

    def logits(**allocation: Any) -> Tensor:
        patch(model, rotary_of(model, axes=2, **allocation), implementation=implementation)
        with torch.no_grad():
            out: Tensor = model(input_ids, mm_position_ids=table).logits
        unpatch(model)
        return out

    with torch.no_grad():
        bound = rounding(lambda: model(input_ids).logits, model.parameters())
    columns = logits(allocation="heads", head_axes=[1] * heads)
    assert_within(columns, logits(allocation=[1] * (rotary_of(model).num_pairs)), bound)
    assert (logits(allocation="heads", head_axes=[0, 1] * (heads // 2)) - columns).abs().max() > 0.01


def test_axes_and_allocations_give_the_same_logits_as_manual_cos_and_sin() -> None:
    model, input_ids = model_of("qwen3"), tokens(2, 24)
    for scheme, changes in (
        ("flatten", {"axes": 1}),
        ("mrope", {"allocation": "sections", "mrope_section": [2, 3, 3]}),
        ("vrope", {"axes": 4}),
        ("rope-tie", {"allocation": "axial"}),
    ):
        table, rotary = two_rows(scheme), rotary_of(model, **changes)
        with torch.no_grad():
            want, bound = by_hand(model, table, rotary, lambda: model(input_ids).logits)
            assert_within(patch(model, rotary)(input_ids, mm_position_ids=table).logits, want, bound)
        unpatch(model)


LENGTHS = {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn", "factor": 4.0, **LENGTHS}, {"rope_type": "dynamic", "factor": 2}]
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_with_rope_scaling(rope: dict[str, object]) -> None:
    model = model_of("llama", rope_parameters={"rope_theta": 5e5, **rope})
    assert rotary_of(model).scaling is not None
    text_logits(model, tokens(1, 300))


def test_a_next_position_beyond_the_length_of_a_scaled_rotary_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, input_ids = model_of("llama", rope_parameters=rope, max_position_embeddings=64), tokens(1, 60)
    table = place(SegmentTable.from_documents([[Text(3), Grid(6, 9), Text(3)]]))  # 60 tokens; the next position is 75
    rotary = rotary_of(model)
    patch(model, rotary)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=r"got next position 75, .* a patch with rotary.for_length\(75\)"):
            call(input_ids, mm_position_ids=table)
    unpatch(model)
    want, bound = by_hand(model, table, rotary.for_length(80), lambda: model(input_ids).logits)
    got = patch(model, rotary.for_length(80))(input_ids, mm_position_ids=table).logits
    assert_within(got, want, bound)


# Training.


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_loss_and_gradients_equal_those_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids, table = model_of(name), tokens(2, 24), two_rows()
    rotary = rotary_of(model)
    want, bounds = by_hand(model, table, rotary, lambda: gradients(model, input_ids))
    assert_within(gradients(patch(model, rotary), input_ids, mm_position_ids=table), want, bounds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_use_the_positions_of_their_own_call(reentrant: bool, way: str) -> None:
    model, input_ids, table = patched("qwen3", way), tokens(2, 24), two_rows()
    loss, *want = gradients(model, input_ids, mm_position_ids=table)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()
    model.zero_grad()
    checkpointed = model(input_ids, labels=input_ids, mm_position_ids=table, use_cache=False).loss
    model.eval()
    with torch.no_grad():  # call with other positions before the backward pass
        model(input_ids, mm_position_ids=text(24, 24), use_cache=False)
    model.train()
    checkpointed.backward()
    assert torch.equal(checkpointed, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))


# Compilation.


@pytest.fixture
def reset_dynamo() -> None:
    torch._dynamo.reset()


def rows_of(height: int) -> PositionTable:
    return place(SegmentTable.from_documents([[Text(3), Grid(height, 4), Text(2)]] * 2), "rope-tie-v2")


FORMS: dict[str, Callable[[PositionTable], Any]] = {"dense": as_ids, "device": DevicePositions.from_table}


@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize("form", ["dense", pytest.param("device", marks=pytest.mark.slow)])
def test_a_forward_pass_compiles_to_one_graph_with_the_logits_of_eager_mode(form: str) -> None:
    model, input_ids, table = patched("llama"), tokens(2, 24), two_rows()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=table, use_cache=False).logits
        got = compiled(input_ids, mm_position_ids=FORMS[form](table), use_cache=False).logits
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize(("form", "implementation"), [("dense", "reference"), ("device", "triton")])
def test_different_lengths_share_graphs(form: str, implementation: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel, "launch_rotate", reference_rotate)
    model, counter = model_of("llama", num_hidden_layers=1), CompileCounterWithBackend("aot_eager")
    patch(model, rotary_of(model), implementation=implementation)
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)

    @torch.no_grad()
    def logits(call: Any, height: int) -> Tensor:
        input_ids, ids = tokens(2, 5 + 4 * height), FORMS[form](rows_of(height))
        out: Tensor = call(input_ids, mm_position_ids=ids, use_cache=False).logits
        return out

    for height in (3, 5, 8, 150):  # the last height requires several blocks of cos and sin
        bound = rounding(partial(logits, model, height), model.parameters(), 5 + 4 * height)
        assert_within(logits(compiled, height), logits(model, height), bound)
    assert counter.frame_count <= 3


def reference_rotate(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: Any, *_: Any) -> None:
    """Compute the kernel's result without Triton's interpreter."""
    from mmpos.rotary import reference

    turn = reference.head_rotation_of(rotation, q.shape[0], q.shape[1])
    for x, out in ((q, q_out), (k, k_out)):
        reference.rotate(x, out, turn, rotation.num_pairs)


# The kernel runs in Triton's interpreter if there is no GPU.


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each launch of the kernel appends the shape of q."""
    shapes: list[tuple[int, ...]] = []
    original = kernel.launch_rotate

    def launch(q: Tensor, *args: Any, **kwargs: Any) -> None:
        shapes.append(tuple(q.shape))
        original(q, *args, **kwargs)

    monkeypatch.setattr(kernel, "launch_rotate", launch)
    return shapes


def test_the_kernel_replaces_the_rotation_of_the_model_and_auto_uses_it_only_on_a_gpu(
    launches: list[tuple[int, ...]],
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, input_ids = model_of("llama", num_hidden_layers=1).to(device), tokens(1, 5).to(device)
    other = model_of("llama", num_hidden_layers=1).to(device)
    automatic = patch(copy.deepcopy(other), rotary_of(other), implementation="auto")
    table = place(SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(2)]]), "rope-tie-v2")
    rotary = rotary_of(model)
    want, bounds = by_hand(model, table, rotary, lambda: gradients(model, input_ids))
    patch(model, rotary, implementation="triton")
    untouched = other(input_ids).logits
    automatic(input_ids, mm_position_ids=table)
    assert launches == [(1, 5, 4, 16)] * (device == "cuda")
    launches.clear()
    got = gradients(model, input_ids, mm_position_ids=table)
    assert launches == [(1, 5, 4, 16)] * 2  # forward and backward use the same kernel
    assert_within(got, want, bounds)
    assert torch.equal(model(input_ids).logits, untouched)
    assert torch.equal(other(input_ids).logits, untouched)
    assert len(launches) == 2
