"""torch.compile and the operators: few full graphs that give the results of eager calls, and torch's own checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from rotary_oracle import heads, normal, packed
from store_oracle import CACHES, DEVICE, Held, assert_holds
from tolerance import assert_within, rotations, rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import (
    Cache,
    DevicePositions,
    Norm,
    Rotary,
    apply_rotary,
    memory,
    operators,
    rerotate,
    rotate_and_store,
    split_qkv,
)
from mmpos.rotary.device import _constants_of

ROTARY = Rotary(head_dim=16, rotary_dim=12)
AS_HF, ADJACENT = Rotary(16, precision="hf"), Rotary(16, pairing="adjacent")
WIDE = Rotary(20, rotary_dim=12)
BY_HEAD = Rotary(16, axes=2, allocation="heads", head_axes=[1])

# (documents, text tokens before each image, images): batch sizes, lengths and segment counts all vary.
MIX = [
    (1, 3, 0), (1, 5, 1), (2, 3, 1), (2, 7, 2), (1, 1, 0), (4, 2, 3), (3, 9, 0), (1, 12, 4), (6, 1, 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def table(documents: int, text: int, images: int) -> PositionTable:
    parts: list[Text | Grid] = [Text(text), Grid(2, 3)]
    return place(SegmentTable.from_documents([[Text(2), *parts * images]] * documents))


def rotated(q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = apply_rotary(q * 2, k, positions, ROTARY)
    return q_out + 1, k_out


def outputs_and_gradients(call: Callable[..., Any], inputs: Sequence[Tensor], *others: Any) -> list[Tensor]:
    """Return the outputs, and the gradients of all inputs if they require gradients."""
    outputs = call(*inputs, *others)
    if not inputs[0].requires_grad:
        return [*outputs]
    return [*outputs, *torch.autograd.grad(sum(x.pow(2 + i).sum() for i, x in enumerate(outputs)), inputs)]


PACKED = [[3], [4, 1], [2, 2], [5, 1, 7], [1], [9, 9, 9], [1, 2, 3, 4], [30], [6, 7], [8], [2, 1, 1], [5, 5]]
TWELVE: list[list[Text | Grid]] = [[Text(12)], [Grid(2, 5), Text(2)], [Text(1), Grid(3, 1), Text(1), Grid(1, 7)]]


@pytest.mark.parametrize(
    "form", ["ids", "unequal documents", "refreshed", pytest.param("rows", marks=pytest.mark.slow)]
)
def test_a_mix_of_batches_compiles_to_few_full_graphs(form: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rotated, fullgraph=True, backend=counter)
    mix, device = [table(*shape) for shape in MIX], DevicePositions.from_table(table(1, 4, 1), capacity=9)
    if form == "refreshed":
        mix = [place(SegmentTable.from_documents([document])) for document in TWELVE]
    if unequal := form == "unequal documents":
        mix = [place(SegmentTable.from_documents([[Text(n), Grid(2, 2)] for n in lengths])) for lengths in PACKED]
    for positions in mix:
        rows = (positions.num_tokens,) if unequal else (positions.num_documents, positions.max_seqlen)
        inputs = [normal(*rows, heads, 16).requires_grad_(not unequal) for heads in (3, 1)]
        ids: Any = DevicePositions.from_table(positions)
        if form == "ids":
            ids = torch.from_numpy(positions.dense()).reshape(2, *rows)
        if form == "refreshed":
            device.refresh(positions)
            ids = device
        results = [outputs_and_gradients(call, inputs, ids) for call in (compiled, rotated)]
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected), positions
    assert counter.frame_count <= (1 if form == "refreshed" else 5)


# All calls, and everything they write.


class Work:
    """The inputs and outputs of a call: views of one packed tensor with 13 tokens, caches and weights."""

    def __init__(self, cache: str = "NHD") -> None:
        self.positions = DevicePositions.from_table(packed("rope-tie").slice(4, 17), DEVICE)
        self.fused = heads(13, 5, 16).to(DEVICE).requires_grad_(not torch.is_inference_mode_enabled())
        self.weight = torch.linspace(0.5, 2, 16, device=DEVICE).requires_grad_(self.fused.requires_grad)
        self.cos_sin = normal(40, 12).to(DEVICE)
        self.held = CACHES[cache](4, 16, 1, 16, torch.float32)
        self.slots, self.ids = torch.arange(13, device=DEVICE).flip(0), self.positions.dense()

    def apply(self, fused: Tensor, rotary: Rotary = ROTARY, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Rotate, with arithmetic before and after the rotation unless it is in place."""
        q, k = fused[:, :3], fused[:, 3:4]
        if options.get("inplace"):
            apply_rotary(q, k, self.positions, rotary, **options)
            return fused + 1, None
        q_out, k_out = apply_rotary(q * 2, k, self.positions, rotary, **options)
        return q_out + 1, k_out

    def store(self, fused: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Rotate and store k and v."""
        cache = self.held.with_slots(self.slots)
        q, k, v = fused[:, :3], fused[:, 3:4], fused[:, 4:]
        out, k_out = rotate_and_store(
            q if options.get("inplace") else q * 2, k, v, self.positions, ROTARY, cache, **options
        )
        return out + 1, k_out

    def written(self) -> list[Tensor]:
        """Return the bits of all tensors that a call may write."""
        tensors = (self.fused.detach(), *self.held.whole)
        return [x.contiguous().view(torch.uint8) for x in tensors]


def gated(work: Work, x: Tensor, inplace: bool) -> tuple[Tensor, ...]:
    q, k, v, gate = split_qkv(x.flatten(1), num_heads=1, num_kv_heads=1, head_dim=20, gate=True)
    assert gate is not None
    q_out, k_out = apply_rotary(q, k, work.positions, WIDE, inplace=inplace)
    assert k_out is not None
    return q_out + 1, k_out + 1, v + 1, gate.sigmoid()


def moved(work: Work, fused: Tensor) -> tuple[Tensor]:
    new = torch.arange(26, device=DEVICE).view(2, 13)
    rerotate(work.held.key, work.slots + 1, work.positions, new, ROTARY)
    return (fused * 2,)


TRAINING: Mapping[str, Callable[[Work, Tensor], Any]] = {
    "plain": lambda work, x: work.apply(x),
    "without k": lambda work, x: apply_rotary(x, None, work.ids, ROTARY),
    "as Transformers": lambda work, x: work.apply(x, AS_HF),
    "adjacent": lambda work, x: work.apply(x, ADJACENT),
    "heads first": lambda work, x: apply_rotary(
        x[None, :, :3].transpose(1, 2), None, work.positions, ROTARY, layout="bhsd"
    ),
    "an axis for each head": lambda work, x: work.apply(x, BY_HEAD),
    "norm": lambda work, x: work.apply(x, norm=Norm(work.weight, work.weight + 1, offset=1.0)),
    "norm after": lambda work, x: work.apply(x, norm=Norm(work.weight, after=True)),
    "cos and sin": lambda work, x: work.apply(x, cos_sin=work.cos_sin),
    "packed": lambda work, x: gated(work, x, False),
}
SERVING: Mapping[str, tuple[dict[str, Any], Callable[[Work, Tensor], Any]]] = {
    "in place": ({}, lambda work, x: work.apply(x, inplace=True)),
    "norm in place": ({}, lambda work, x: work.apply(x, inplace=True, norm=Norm(work.weight))),
    "in place without k": ({}, lambda work, x: apply_rotary(x, None, work.positions, ROTARY, inplace=True)),
    "packed in place": ({}, lambda work, x: gated(work, x, True)),
    "rerotate": ({}, moved),
    **{f"store, {name}": ({"cache": name}, lambda work, x: work.store(x)) for name in CACHES},
    "store and return k": ({"cache": "HND"}, lambda work, x: work.store(x, return_k=True)),
    "store in place": ({"cache": "k and v by page"}, lambda work, x: work.store(x, inplace=True, return_k=True)),
}
QUICK = ("in place", "packed in place", "rerotate", "store and return k", "store in place")


def compiled_if(compiled: bool, function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


@pytest.mark.parametrize("name", TRAINING)
def test_full_graphs_give_the_outputs_and_gradients_of_eager_calls(name: str) -> None:
    def call(x: Tensor, w: Tensor, work: Work) -> list[Tensor]:
        return [out for out in TRAINING[name](work, x) if out is not None] + [w * 2]

    results = []
    for compiled in (False, True):
        work = Work()
        results.append(outputs_and_gradients(compiled_if(compiled, call), (work.fused, work.weight), work))
    assert_within(results[1], results[0], 0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SERVING]
)
def test_full_graphs_write_the_same_tensors_as_eager_calls(name: str) -> None:
    (arguments, call), results = SERVING[name], []
    with torch.inference_mode():
        for compiled in (False, True):
            work = Work(**arguments)
            outs = compiled_if(compiled, call)(work, work.fused)
            results.append([*(x for x in outs if x is not None), *work.written()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("sizes", [(13, 2, 40), pytest.param((13, 1, 2, 40, 7), marks=pytest.mark.slow)])
def test_stores_of_many_sizes_with_a_norm_compile_to_few_graphs(sizes: tuple[int, ...]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Held, slots: Tensor) -> Tensor:
        norm = Norm(torch.linspace(0.5, 2, 16, device=DEVICE))
        return rotate_and_store(q * 2, k, v, positions, ROTARY, cache.with_slots(slots), norm=norm)[0] + 1

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    cache, want = (CACHES["k and v side by side"](8, 16, 2, 16, torch.float32) for _ in range(2))
    with torch.no_grad():
        for tokens in sizes:
            positions = DevicePositions.from_table(place(SegmentTable.from_documents([[Text(tokens)]])), DEVICE)
            q, k, v = heads(tokens, 7, 16, seed=tokens).to(DEVICE).split([3, 2, 2], dim=1)
            slots = torch.arange(tokens, device=DEVICE) * 3 % 128
            got = compiled(q, k, v, positions, cache, slots)
            assert torch.equal(got, step(q, k, v, positions, want, slots)), tokens
    assert_holds(cache, want)
    assert counter.frame_count <= (3 if 1 in sizes else 2)


@pytest.mark.slow
def test_inductor_agrees_with_eager_calls() -> None:
    compiled = torch.compile(rotated, fullgraph=True, dynamic=True)
    device = DevicePositions.from_table(table(2, 3, 1))
    inputs = normal(2, 11, 3, 16).requires_grad_(), normal(2, 11, 1, 16).requires_grad_()
    bounds = rounding(lambda: outputs_and_gradients(rotated, inputs, device), inputs)
    want = outputs_and_gradients(rotated, inputs, device)
    assert_within(outputs_and_gradients(compiled, inputs, device), want, bounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k and v side by side", "NHD"])
def test_inductor_writes_the_same_caches_as_eager_calls_without_copying_them(name: str) -> None:
    from torch._inductor.utils import run_and_get_code  # the import takes seconds

    with torch.inference_mode():
        work, want = Work(name), Work(name)
        compiled: Any = torch.compile(Work.store, fullgraph=True, dynamic=False)
        got, (code,) = run_and_get_code(compiled, work, work.fused)
        expected, _ = want.store(want.fused)
    assert_within(got[0], expected, rotations(expected.abs() + 1))  # bounds for the values before 1 was added
    assert_holds(work.held, want.held)
    assert f"empty_strided_{DEVICE.type}((1, 13, 3, 16)" in code  # q * 2
    assert f"empty_strided_{DEVICE.type}((4, " not in code


EAGER = """
import os, sys
import numpy as np
import torch
import mmpos.rotary.apply
from mmpos.rotary import Rotary, apply_rotary

rotary, ids = Rotary(64), torch.arange(6000).view(2, 3000)
q = torch.randn(3000, 8, 64, requires_grad=True)
apply_rotary(q, None, ids, rotary)[0].sin().sum().backward()
with torch.no_grad():
    apply_rotary(q, None, ids, rotary, inplace=True)
assert "torch._dynamo" not in sys.modules
torch.set_num_threads(2)
x = q.detach()
want = apply_rotary(x, None, ids, rotary)[0].numpy()
child = os.fork()
if not child:
    again = apply_rotary(x, None, ids, rotary)[0]  # compare by numpy: torch's own threads are lost
    os._exit(not np.array_equal(again.numpy(), want))
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_eager_rotations_import_no_compiler_and_survive_a_fork() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# The operators.


class Operations(TorchDispatchMode):
    """A mode that records the operations that a block of code runs, except for views, and their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Any] = {}
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        if func.namespace == "mmpos":
            self.calls[func] = [x.clone() if isinstance(x, Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))


def operations_of(name: str) -> dict[Any, Any]:
    """Return the operators that a call and its gradient run, with their arguments."""
    with Operations() as seen:
        if name in TRAINING:
            work = Work()
            outs = [x for x in TRAINING[name](work, work.fused) if x is not None]
            wanted = [x for x in (work.fused, work.weight) if x is work.fused or "norm" in name]
            torch.autograd.grad(sum(x.square().sum() for x in outs), wanted)
        else:
            arguments, call = SERVING[name]
            with torch.no_grad():
                work = Work(**arguments)
                call(work, work.fused.detach())
    return seen.calls


OFTEN = ("plain", "norm", "cos and sin", "in place", "store and return k", "store in place", "rerotate")


# opcheck itself causes the warning, since it reads the gradients of views of its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x not in OFTEN)) for x in (*TRAINING, *SERVING)]
)
def test_operators_pass_torchs_own_checks(name: str) -> None:
    for operator, (q, *rest) in operations_of(name).items():
        torch.library.opcheck(operator, (q, *rest))
        if operator == operators.rotate:
            k, weight, *others = rest
            leaves = (x if x is None else x.detach().requires_grad_() for x in (q, k, weight))
            torch.library.opcheck(operator, (*leaves, *others))


def test_every_operator_has_a_check() -> None:
    ours = {x for x in vars(operators).values() if isinstance(x, type(operators.rotate))}
    assert set().union(*map(operations_of, (*TRAINING, *SERVING))) == ours


@pytest.mark.parametrize("inplace", [False, True])
def test_calls_under_a_fake_mode_do_not_affect_later_calls(inplace: bool) -> None:
    ids, rotary = torch.arange(20, dtype=torch.int32).view(2, 10), Rotary(16, theta=77.0)
    for first in (True, False):
        with FakeTensorMode() as mode:
            q, k = (mode.from_tensor(torch.empty(10, heads, 16)) for heads in (4, 2))
            fake, _ = apply_rotary(q, k, mode.from_tensor(ids), rotary, inplace=inplace)
            assert fake.shape == (10, 4, 16), first
        real = normal(10, 4, 16)
        want, _ = apply_rotary(real, None, ids, rotary, implementation="triton")
        assert torch.equal(apply_rotary(real, None, ids, rotary)[0], want)


def test_outputs_keep_the_strides_of_dense_inputs_and_are_contiguous_otherwise() -> None:
    positions, bhsd = table(2, 3, 1), normal(2, 3, 11, 16)
    for x in (bhsd, normal(2, 11, 3, 16).transpose(1, 2)):
        assert apply_rotary(x, None, positions, ROTARY, layout="bhsd")[0].stride() == x.stride()
    assert apply_rotary(normal(2, 11, 5, 16)[:, :, :3], None, positions, ROTARY)[0].is_contiguous()


def test_constants_have_the_attribute_set_by_torch() -> None:
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(marked) == vars(_constants_of)


def test_a_graph_is_not_reused_for_another_rotary() -> None:
    ids, q = torch.arange(20).view(2, 10), torch.randn(10, 4, 16)
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="eager")
    for theta in (1e4, 5e5):
        rotary = Rotary(16, theta=theta)
        assert torch.equal(compiled(q, None, ids, rotary)[0], apply_rotary(q, None, ids, rotary)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda work, x: apply_rotary(x, x, work.ids, ROTARY, inplace=True), "k: got the memory of q, want inplace=F"),
        (
            lambda work, x: rotate_and_store(
                x, x, x, work.positions, ROTARY, work.held.with_slots(work.slots), inplace=True
            ),
            "q: got the memory of k, want separ",
        ),
    ],
)
def test_the_same_tensor_twice_in_place_is_refused_under_compile(call: Any, message: str, monkeypatch: Any) -> None:
    same, work = heads(13, 1, 16).to(DEVICE), Work()
    compiled = torch.compile(lambda x: call(work, x)[0], backend="eager")
    refused = pytest.raises(InvalidInputError, match=message)
    with refused:
        compiled(same)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # addresses are unknown
    with refused:
        call(work, same)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_tracers_and_dispatch_modes_see_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rotary, q = torch.arange(20, dtype=torch.int32).view(2, 10), Rotary(16), heads(10, 2, 16)
    want = apply_rotary(q, None, ids, rotary, validate=True)[0]  # the operator computes its constants once

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary(x, None, ids, rotary)[0]

    graph = make_fx(rotate)(q)
    assert torch.ops.mmpos.rotate.default in {node.target for node in graph.graph.nodes}
    assert "mmpos::rotate" in str(torch.jit.trace(rotate, q).graph)
    assert torch.equal(torch.vmap(rotate)(q[None])[0], want)
    monkeypatch.setattr(operators, "_FUNCTIONS", {})  # functions of operators must not be called directly
    monkeypatch.setattr(memory, "_modes", lambda: 1)
    assert torch.equal(rotate(q), want)


def test_a_rotation_runs_one_operator_besides_views_and_copies_nothing() -> None:
    qkv, work = heads(13, 1, 120).squeeze(-2).to(DEVICE), Work()
    options: Any = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 12, "gate": True}
    (q, k, v, _), rotary = split_qkv(qkv, **options), Rotary(12, rotary_dim=8)
    keys, values = torch.zeros(2, 16, 2, 12, device=DEVICE)
    cache = Cache(keys, values, work.slots)
    calls: dict[str, Callable[[], Any]] = {
        "rotate": lambda: apply_rotary(q, k, work.positions, rotary),
        "rotate_": lambda: apply_rotary(q, k, work.positions, rotary, inplace=True),
        "rotate_and_store_": lambda: rotate_and_store(q, k, v, work.positions, rotary, cache, inplace=True),
    }
    for name, call in calls.items():
        with Operations() as seen:
            split_qkv(qkv, **options)
            call()
        assert seen.names == [f"mmpos::{name}"]
