"""Patched models with torch.compile and with the kernel: full graphs, logits as in eager mode, one launch per layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hf_models import as_ids, gradients, model_of, rotary_of, rotated_by_hand, tokens, two_rows
from tolerance import assert_within, rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.integrations.hf import patch
from mmpos.rotary import DevicePositions, kernel


@pytest.fixture(autouse=True)
def reset_dynamo() -> None:
    torch._dynamo.reset()


def patched(implementation: Any, **sizes: Any) -> Any:
    model = model_of("llama", **sizes)
    return patch(model, rotary_of(model), implementation=implementation)


def rows_of(height: int) -> PositionTable:
    return place(SegmentTable.from_documents([[Text(3), Grid(height, 4), Text(2)]] * 2), "rope-tie-v2")


FORMS: dict[str, Callable[[PositionTable], Any]] = {"dense": as_ids, "device": DevicePositions.from_table}


@pytest.mark.parametrize("form", ["dense", pytest.param("device", marks=pytest.mark.slow)])
def test_a_forward_pass_compiles_to_one_graph_with_the_logits_of_eager_mode(form: str) -> None:
    model, input_ids, table = patched("reference"), tokens(2, 24), two_rows()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=table, use_cache=False).logits
        got = compiled(input_ids, mm_position_ids=FORMS[form](table), use_cache=False).logits
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "implementation"), [("dense", "reference"), ("device", "triton")])
def test_different_lengths_share_graphs(form: str, implementation: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel, "launch_rotate", reference_rotate)
    model, counter = patched(implementation, num_hidden_layers=1), CompileCounterWithBackend("aot_eager")
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


@pytest.mark.slow
def test_separately_compiled_layers_give_the_logits_of_eager_mode() -> None:
    model, input_ids, table = patched("reference"), tokens(2, 24), two_rows()
    with torch.no_grad():
        runs = [partial(model, input_ids, mm_position_ids=ids, use_cache=False) for ids in (table, None)]
        want = [run().logits for run in runs]
        bounds = rounding(lambda: [run().logits for run in runs], model.parameters())
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        assert_within([run().logits for run in runs], want, bounds)


@pytest.mark.slow
def test_compiled_training_gives_the_gradients_of_eager_mode(monkeypatch: Any) -> None:
    monkeypatch.setattr(kernel, "launch_rotate", reference_rotate)
    model, input_ids = model_of("qwen3", num_hidden_layers=1), tokens(2, 24)
    patch(model, rotary_of(model), implementation="triton")
    device = DevicePositions.from_table(two_rows())
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments: dict[str, Any] = {"mm_position_ids": device, "use_cache": False}
    want = gradients(model, input_ids, **arguments)
    bounds = rounding(lambda: gradients(model, input_ids, **arguments), model.parameters())
    assert_within(gradients(compiled, input_ids, **arguments), want, bounds)


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


def test_the_kernel_replaces_the_rotation_of_the_model(launches: list[tuple[int, ...]]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, input_ids = model_of("llama", num_hidden_layers=1).to(device), tokens(1, 5).to(device)
    other = model_of("llama", num_hidden_layers=1).to(device)
    table = place(SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(2)]]), "rope-tie-v2")
    rotary = rotary_of(model)
    with rotated_by_hand(model, table, rotary, 1):
        want, bounds = gradients(model, input_ids), rounding(lambda: gradients(model, input_ids), model.parameters())
    patch(model, rotary, implementation="triton")
    untouched = other(input_ids).logits
    assert launches == []
    got = gradients(model, input_ids, mm_position_ids=table)
    assert launches == [(1, 5, 4, 16)] * 2  # forward and backward use the same kernel
    assert_within(got, want, bounds)
    assert torch.equal(model(input_ids).logits, untouched)
    assert torch.equal(other(input_ids).logits, untouched)
    assert len(launches) == 2


def test_auto_uses_the_kernel_on_a_gpu_and_the_reference_elsewhere(launches: list[tuple[int, ...]]) -> None:
    model, input_ids, table = patched("auto"), tokens(2, 24), two_rows()
    model(input_ids, mm_position_ids=table)
    assert not launches
    if not torch.cuda.is_available():
        pytest.skip("the second half requires a GPU")
    model.cuda()(input_ids.cuda(), mm_position_ids=table)
    assert len(launches) == 2
