"""Launch conditions in inference engines: graphs, streams, compiled code, several devices, huge tensors, no waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from launches import DEVICE, F16, FEW, GPU, MANY, SOME, TRITON, Launch, Scene, difference, normal, placed, sized
from torch import Tensor
from torch._ops import OpOverload
from waiting import eventually

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, apply_rotary, operators, rerotate, rotate_and_store
from mmpos_bench.cuda import capture

pytestmark = pytest.mark.gpu

PAGE = 16


class Bench:
    """A scene with caches, and copies of q and k for in-place calls."""

    def __init__(self, tokens: int, capacity: int | None = None, start: int = 0) -> None:
        self.scene = Scene(Launch(tokens=tokens, norm="qk", start=start), seed=3)
        self.tokens, self.rotary, self.norm = tokens, self.scene.rotary, self.scene.norm
        self.q, self.k, self.v = self.scene.q, self.scene.k, self.scene.v
        self.positions = DevicePositions.from_table(self.scene.table, DEVICE, capacity)
        self.q_here, self.k_here = self.q.clone(), self.k.clone()
        heads, dim = self.k.shape[1:]
        caches = torch.zeros(2, tokens // PAGE + 1, PAGE, heads, dim, dtype=self.k.dtype, device=DEVICE)
        self.keys, self.values = caches.unbind(0)
        self.ids = self.positions.dense()
        self.slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        self.grads = tuple(normal(*x.shape, seed=9, dtype=x.dtype) for x in (self.q, self.k))

    def rotated(self, **options: Any) -> Any:
        """Rotate with apply_rotary."""
        return apply_rotary(self.q, self.k, self.positions, self.rotary, implementation=TRITON, **options)

    def rotated_here(self, **options: Any) -> Any:
        """Rotate copies of q and k in place with apply_rotary."""
        self.q_here.copy_(self.q)
        self.k_here.copy_(self.k)
        q, k = self.q_here, self.k_here
        return apply_rotary(q, k, self.positions, self.rotary, inplace=True, implementation=TRITON, **options)

    def stored(self, q: Tensor, k: Tensor, **options: Any) -> Any:
        """Rotate with rotate_and_store, and return q, k and the caches."""
        cache = Cache(self.keys, self.values, self.slots)
        q_out, k_out = rotate_and_store(
            q, k, self.v, self.positions, self.rotary, cache, implementation=TRITON, **options
        )
        return q_out, k_out, self.keys, self.values

    def stored_here(self) -> Any:
        """Rotate in place with rotate_and_store and a norm."""
        self.q_here.copy_(self.q)
        self.k_here.copy_(self.k)
        return self.stored(self.q_here, self.k_here, inplace=True, return_k=True, norm=self.norm)

    def moved(self) -> Any:
        """Rerotate stored keys to the same positions in reverse order."""
        self.keys.flatten(0, 1)[self.slots] = self.k
        reverse = self.ids.flip(1)
        rerotate(self.keys, self.slots, self.positions, reverse, self.rotary, implementation=TRITON)
        return (self.keys,)

    def gradients(self, norm: Norm | None) -> Any:
        """Return the gradients of q, k and the weights of a norm."""
        q, k = leaves = [x.detach().requires_grad_() for x in (self.q, self.k)]
        if norm is not None:
            weights = [x.detach().requires_grad_() for x in norm[:2] if x is not None]
            norm = norm._replace(q_weight=weights[0], k_weight=weights[1])
            leaves += weights
        outs = apply_rotary(q, k, self.positions, self.rotary, implementation=TRITON, norm=norm)
        return torch.autograd.grad([x for x in outs if x is not None], leaves, self.grads)


CALLS: Mapping[str, tuple[set[str], Callable[[Bench], Any]]] = {
    "rotate": ({"rotate"}, lambda bench: bench.rotated()),
    "rotate in place": ({"rotate_"}, lambda bench: bench.rotated_here()),
    "rotate backward": ({"rotate"}, lambda bench: bench.gradients(None)),
    "norm": ({"rotate"}, lambda bench: bench.rotated(norm=bench.norm)),
    "norm in place": ({"rotate_"}, lambda bench: bench.rotated_here(norm=bench.norm)),
    "norm backward": ({"rotate", "rotate_backward"}, lambda bench: bench.gradients(bench.norm)),
    "store": ({"rotate_and_store"}, lambda bench: bench.stored(bench.q, bench.k)),
    "norm and store in place": ({"rotate_and_store_"}, lambda bench: bench.stored_here()),
    "rerotate": ({"rerotate_"}, lambda bench: bench.moved()),
    "dense ids": (set(), lambda bench: (bench.positions.dense(),)),
}
"""Calls that together use every operator, with the names of their operators; each returns tensors to compare."""


later = pytest.mark.gpu if GPU else pytest.mark.slow
"""The mark for tests that the interpreter runs only in `make slow`, since `make test` runs similar tests."""

FIRST = [n if n in ("rotate", "norm and store in place") else pytest.param(n, marks=later) for n in CALLS]


def bits_of(results: Any) -> list[Tensor]:
    return [x.clone() for x in results if x is not None]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)] == []


def test_every_operator_is_called() -> None:
    called = set().union(*(names for names, _ in CALLS.values()))
    assert {name for name in operators.__all__ if isinstance(getattr(operators, name), OpOverload)} <= called


@pytest.mark.parametrize("tokens", [FEW, pytest.param(sized(5000, 21), marks=later)])
@pytest.mark.parametrize("name", FIRST)
def test_results_are_reproducible_bit_for_bit(name: str, tokens: int) -> None:
    """Check that results depend neither on the order of programs nor on the previous contents of memory."""
    bench, (_, call) = Bench(tokens), CALLS[name]
    want = bits_of(call(bench))
    for _ in range(sized(30, 2)):
        bench.scene.poison()
        assert_same(bits_of(call(bench)), want)


@contextmanager
def no_waits() -> Iterator[None]:
    """Make torch raise RuntimeError if the host waits for the device within the context."""
    if not GPU:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def tables(tokens: int) -> list[PositionTable]:
    """Return tables of equal length: with different start ids, with only text, and with one small image."""
    parts: list[list[Text | Grid]] = [[Text(tokens)], [Text(3), Grid(2, 2), Text(tokens - 7)]]
    others = [place(SegmentTable.from_documents([part]), "rope-tie") for part in parts]
    return [*(placed(tokens, start=start) for start in (0, 77, 100_000)), *others][:: sized(1, 4)]


@pytest.mark.parametrize("tokens", [256, MANY] if GPU else [9])
@pytest.mark.parametrize("name", FIRST)
def test_a_graph_follows_refreshed_positions(name: str, tokens: int) -> None:
    """Check that replaying one graph equals calling with each table, and that neither refresh nor replay waits."""
    chosen = tables(tokens)
    capacity = max(table.num_segments for table in chosen)
    bench, fresh, (_, call) = Bench(tokens, capacity), Bench(tokens, capacity), CALLS[name]
    held: list[Any] = []

    def keep() -> None:
        held[:] = [call(bench)]

    replay = capture(keep)
    for table in chosen:
        fresh.positions.refresh(table)
        want = bits_of(call(fresh))
        for x in (bench.q_here, bench.k_here, bench.keys, bench.values):
            x.zero_()
        with no_waits():
            bench.positions.refresh(table)
            replay()
        assert_same(bits_of(held[0]), want)


@pytest.mark.parametrize("name", FIRST)
def test_calls_do_not_wait_for_the_device(name: str) -> None:
    bench, (_, call) = Bench(FEW), CALLS[name]
    want = bits_of(call(bench))
    with no_waits():
        got = call(bench)
    assert_same(bits_of(got), want)


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the body in a side stream after a long wait; the current stream continues after the body."""
    if not GPU:
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        yield
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("name", FIRST)
def test_kernels_are_launched_in_the_current_stream(name: str) -> None:
    """Check that a call reads inputs that the same stream writes after a long wait."""
    bench, (_, call) = Bench(SOME), CALLS[name]
    want = bits_of(call(bench))
    for _ in range(sized(4, 1)):
        q, k, v = (x.clone() for x in (bench.q, bench.k, bench.v))
        for x in (bench.q, bench.k, bench.v, bench.keys, bench.values):
            x.zero_()
        with side_stream():
            for x, held in ((bench.q, q), (bench.k, k), (bench.v, v)):
                x.copy_(held)
            bench.positions = DevicePositions.from_table(bench.scene.table, DEVICE)
            got = call(bench)
        assert_same(bits_of(got), want)


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_graphs")
@later
def test_replays_of_a_compiled_graph_are_bit_equal_to_eager_calls() -> None:
    bench = Bench(sized(1000, 9))

    def step(q: Tensor, k: Tensor) -> Tensor:
        return apply_rotary(q * 1, k, bench.positions, bench.rotary, implementation=TRITON)[0] + 0

    options: Any = {"mode": "reduce-overhead"} if GPU else {"backend": "aot_eager"}
    fast = torch.compile(step, fullgraph=True, **options)
    with torch.no_grad():
        want = step(bench.q, bench.k)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(fast(bench.q, bench.k), want)


# Sizes beyond 32 bits.


def room(gigabytes: int) -> None:
    """Wait until other tests have freed enough GPU memory; skip the test if they do not."""
    if not GPU:
        return
    torch.cuda.empty_cache()
    if not eventually(lambda: torch.cuda.mem_get_info()[0] >= gigabytes << 30):
        pytest.skip(f"less than {gigabytes} GB of memory are free")


def uniform(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=F16, device=DEVICE).uniform_(-1, 1)


def assert_rotated(got: Tensor | None, x: Tensor, ids: Tensor, rotary: Rotary) -> None:
    """Assert that heads of float32 or float16 have the bits of the reference."""
    assert got is not None
    assert difference(got, apply_rotary(x, None, ids, rotary, implementation="reference")[0]) == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_with_more_than_two_to_the_31_elements_are_rotated(inplace: bool) -> None:
    room(24)
    heads, dim = sized(64, 3), sized(128, 12)
    tokens = sized(300_000, 30)  # 2.46e9 elements
    positions, rotary = DevicePositions.from_table(placed(tokens), DEVICE), Rotary(dim)
    q, k, ids = uniform(tokens, heads, dim), uniform(tokens, 1, dim), positions.dense()
    edge = sized(262_144, 15)  # first token past 2³¹ elements with 64 heads of 128 channels
    width = sized(300, 4)
    parts = [slice(at, at + width) for at in (0, edge // 2, edge - width // 2, tokens - width)]
    before = [(q[part].clone(), k[part].clone()) for part in parts]
    outs = apply_rotary(q, k, positions, rotary, inplace=inplace, implementation=TRITON)
    for part, pair in zip(parts, before, strict=True):
        for out, x in zip(outs, pair, strict=True):
            assert out is not None
            assert_rotated(out[part].clone(), x, ids[:, part], rotary)


def test_rows_more_than_two_to_the_31_elements_apart_are_rotated() -> None:
    room(24)
    heads, dim, seq = sized(8, 2), sized(128, 12), sized(40_000, 10)
    positions, rotary = DevicePositions.from_table(placed(2 * seq, count=2), DEVICE), Rotary(dim)
    step = sized(17 * 2**27, 2 * seq * heads * dim)  # elements per row: 2.28e9
    rows = torch.empty(2, step, dtype=F16, device=DEVICE)
    q = rows[:, : seq * heads * dim].view(2, seq, heads, dim).uniform_(-1, 1)
    k = uniform(2, seq, 1, dim)
    assert q.stride(0) == step
    got = apply_rotary(q, k, positions, rotary, implementation=TRITON)[0]
    assert_rotated(got.flatten(0, 1), q.flatten(0, 1), positions.dense(), rotary)
    apply_rotary(q, k, positions, rotary, inplace=True, implementation=TRITON)
    assert torch.equal(q, got)


# Tables and devices.


@pytest.mark.parametrize("images", [sized(200, 3), sized(10_000, 5), sized(60_000, 7)])
def test_tables_with_many_segments_are_rotated(images: int) -> None:
    parts: list[Text | Grid] = []
    for i in range(images):
        parts += [Text(1 + i % 3), Grid(1 + i % 2, 1 + i % 5)]
    table = place(SegmentTable.from_documents([parts]), "rope-tie")
    rotary = Rotary(sized(80, 12))
    q = normal(table.num_tokens, 2, rotary.head_dim, seed=1)
    got, _ = apply_rotary(q, None, DevicePositions.from_table(table, DEVICE), rotary, implementation=TRITON)
    assert_rotated(got, q, torch.from_numpy(table.dense()).to(DEVICE), rotary)


def test_tensors_on_a_device_other_than_the_current_one_are_rotated() -> None:
    """The last device is used; it is the current one if there is only one."""
    device = torch.device(f"cuda:{torch.cuda.device_count() - 1}") if GPU else DEVICE
    scene = Scene(Launch(tokens=SOME, dtype=F16))
    positions = DevicePositions.from_table(scene.table, device)
    got, _ = apply_rotary(scene.q.to(device), scene.k.to(device), positions, scene.rotary, implementation=TRITON)
    assert got.device == device
    assert_rotated(got.to(DEVICE), scene.q, torch.from_numpy(scene.table.dense()).to(DEVICE), scene.rotary)
