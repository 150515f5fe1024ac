"""Every kind of launch against the reference, and in the conditions of inference engines.

Conditions are graphs, streams, compiled code, several devices, huge tensors, and no waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from launches import (
    BASES,
    DEVICE,
    F16,
    FEW,
    GPU,
    KINDS,
    LAUNCHES,
    MANY,
    SOME,
    TRITON,
    Launch,
    Scene,
    checks,
    difference,
    normal,
    placed,
    sized,
)
from store_oracle import poisoned
from torch import Tensor
from waiting import eventually

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos_bench.cuda import capture

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_launch_agrees_with_the_reference(launch: Launch, record_property: Callable[[str, object], None]) -> None:
    shares = dict(checks(launch, LAUNCHES.index(launch)))
    record_property("share_of_bound", max(shares.values()))
    assert {name: share for name, share in shares.items() if not share <= 1} == {}


class Bench:
    """A scene whose inputs and caches are restored before each call."""

    def __init__(self, launch: Launch, tokens: int, capacity: int | None = None) -> None:
        self.scene = Scene(replace(launch, tokens=tokens), seed=3)
        self.scene.positions = DevicePositions.from_table(self.scene.table, DEVICE, capacity)
        self.inputs = [self.scene.q, self.scene.k, self.scene.v]
        if launch.kind in ("store", "rerotate"):
            self.inputs += self.scene.held.whole
        self.kept = [x.clone() for x in self.inputs]
        self.call()  # makes what a graph must not make

    def restore(self) -> None:
        for x, kept in zip(self.inputs, self.kept, strict=True):
            x.copy_(kept)

    def call(self) -> list[Tensor]:
        return [x for x in KINDS[self.scene.launch.kind](self.scene).values() if x is not None]

    def results(self) -> list[Tensor]:
        self.restore()
        return [x.clone() for x in self.call()]


CALLS = (
    "rotate", "store", "rotate in place", "norm", "norm in place", "backward", "backward with norm", "store in place",
    "rerotate", "dense",
)  # fmt: skip
"""Launches of each kind and direction, with and without a norm."""

later = pytest.mark.gpu if GPU else pytest.mark.slow
"""The mark for tests that the interpreter runs only in `make slow`, since `make test` runs similar tests."""

EACH = pytest.mark.parametrize(
    "launch", [pytest.param(BASES[name], id=name, marks=[later] * (i > 1)) for i, name in enumerate(CALLS)]
)


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert [i for i, pair in enumerate(zip(got, want, strict=True)) if difference(*pair)] == []


@pytest.mark.parametrize("tokens", [FEW, pytest.param(sized(5000, 21), marks=later)])
@EACH
def test_results_are_reproducible_bit_for_bit(launch: Launch, tokens: int) -> None:
    """Check that results depend neither on the order of programs nor on the previous contents of memory."""
    bench = Bench(launch, tokens)
    want = bench.results()
    for _ in range(sized(30, 2)):
        with poisoned():
            got = bench.results()
        assert_same(got, want)


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
@EACH
def test_a_graph_follows_refreshed_positions(launch: Launch, tokens: int) -> None:
    """Check that replaying one graph equals calling with each table, and that neither refresh nor replay waits."""
    chosen, held = tables(tokens), list[Tensor]()
    capacity = max(table.num_segments for table in chosen)
    bench, fresh = (Bench(launch, tokens, capacity) for _ in range(2))

    def keep() -> None:
        held[:] = bench.call()

    replay = capture(keep)
    for table in chosen:
        fresh.scene.positions.refresh(table)
        want = fresh.results()
        bench.restore()
        with no_waits():
            bench.scene.positions.refresh(table)
            replay()
        assert_same(held, want)


@EACH
def test_calls_do_not_wait_for_the_device(launch: Launch) -> None:
    bench = Bench(launch, FEW)
    want = bench.results()
    bench.restore()
    with no_waits():
        got = bench.call()
    assert_same(got, want)


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


@EACH
def test_kernels_are_launched_in_the_current_stream(launch: Launch) -> None:
    """Check that a call reads inputs that the same stream writes after a long wait."""
    bench = Bench(launch, SOME)
    want = bench.results()
    for _ in range(sized(4, 1)):
        for x in bench.inputs:
            x.zero_()
        with side_stream():
            bench.restore()
            bench.scene.positions = DevicePositions.from_table(bench.scene.table, DEVICE)
            got = bench.call()
        assert_same(got, want)


@later
def test_replays_of_a_compiled_graph_are_bit_equal_to_eager_calls() -> None:
    scene = Scene(Launch(tokens=sized(1000, 9)))

    def step(q: Tensor, k: Tensor) -> Tensor:
        return apply_rotary(q * 1, k, scene.positions, scene.rotary, implementation=TRITON)[0] + 0

    torch._dynamo.reset()
    options: Any = {"mode": "reduce-overhead"} if GPU else {"backend": "aot_eager"}
    fast = torch.compile(step, fullgraph=True, **options)
    with torch.no_grad():
        want = step(scene.q, scene.k)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(fast(scene.q, scene.k), want)


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


def assert_rotated(got: Any, x: Tensor, ids: Tensor, rotary: Rotary) -> None:
    """Assert that heads of float32 or float16 have the bits of the reference."""
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
            assert_rotated(out[part].clone(), x, ids[:, part], rotary)  # type: ignore[index]


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
    parts = [part for i in range(images) for part in (Text(1 + i % 3), Grid(1 + i % 2, 1 + i % 5))]
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
