"""The proofs in the rotation, data and service suites, and the GPU clock with a simulated device; suites run."""

from __future__ import annotations

import importlib
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fill_tables import RESULTS
from server_program import PATIENT

from mmpos import UnsupportedError
from mmpos.data.packing import Pack, Packer
from mmpos.errors import ServiceError
from mmpos.rotary import apply_rotary
from mmpos_bench import cuda, data, layers
from mmpos_bench.data import mix
from mmpos_bench.layers import SHAPES, Layer, LayerShape, interleaved
from mmpos_bench.peers.rotations import DIFFUSERS, by_formula
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.results import SuiteReport, from_json
from mmpos_bench.rotary import ALL_GROUPS, FUSED, Bench, Size, contestant
from mmpos_bench.serving import Load, LoadTurn, Order, by_rate, clients, echo, service, started
from mmpos_bench.suites import SUITES, Role, SuiteOptions, run
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import workload

SMALL = {"interleaved": LayerShape(2, 1, 8), "axial": LayerShape(2, 2, 8, (4, 4))}


@pytest.fixture(params=SMALL)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.setattr(layers, "_BLOCK", 5)  # several blocks, the last one shorter
    return Layer(SMALL[request.param], [interleaved(8)] * 2, torch.float32, "cpu")


def test_rotations_are_checked_at_every_token_and_channel(layer: Layer) -> None:
    before = layer.q, layer.k
    q, k = apply_rotary(*before, layer.table, layer.rotary)
    assert k is not None
    layer.judge((q, k), before)
    layer.judge(by_formula(layer)(*before), before, rounded=True)
    for x in (q, k):
        for index in ((0, 0, 0, 0), (0, -1, -1, -1)):
            right = x[index].item()
            for wrong in (right + 0.1, float("nan")):
                x[index] = wrong
                with pytest.raises(NotEqualError, match=r"got an error of .*, want at most 1\.0e-06"):
                    layer.judge((q, k), before)
            x[index] = right


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        *((group, shape) for group in sorted(ALL_GROUPS.keys() - {FUSED}) for shape in SMALL.values()),
        (FUSED, SHAPES["FLUX.1 layer"].toy),
    ],
)
def test_every_way_passes_its_proof_and_is_refused_with_wrong_positions(group: str, shape: LayerShape) -> None:
    pair = ([interleaved(16)], workload(1, 16, 1, 3))
    if group == FUSED:
        pair = [shape.document(42)], [shape.document(21)] * 2
    right, other = (Layer(shape, documents, torch.float32, "cpu", sets=2) for documents in pair)
    assert right.values
    assert right.slots
    wrong = copy(right)  # shares the caches
    wrong.table, wrong.dense, wrong.positions = other.table, other.dense, other.positions
    before = right.q.clone(), right.k.clone()
    for way in ALL_GROUPS[group].ways:
        contestant(way, right).proof()
        assert torch.equal(right.q, before[0])  # restored
        if way.role is not Role.LIMIT:
            with pytest.raises(NotEqualError):
                way.prove(right, way.make(wrong)(0), before)
        right.q.copy_(before[0])
        right.k.copy_(before[1])


def test_a_measurement_records_its_tokens_documents_and_bytes() -> None:
    case = Bench("cpu").compare("norm, rotation and store", Size("7B layer", 8), SuiteOptions(quick=True))
    measured = case.measure(Budget(0.0, 2))
    assert measured.work == {"tokens": 8, "documents": 1, "bytes": 2 * 8 * (32 + 3 * 8 - 8) * 128 * 2}
    assert measured.name == "7B layer, 8 tokens"


class Forgets(Packer):
    """Packer that loses its last pack."""

    def flush(self) -> list[Pack]:
        return super().flush()[:-1]


def overfills(max_tokens: int, **options: bool) -> Packer:
    return Packer(2 * max_tokens, split_text=options["split_text"], overlong="truncate")


@pytest.mark.parametrize("split_text", [False, True])
def test_packs_that_lose_tokens_or_are_too_long_fail(split_text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = list(mix(30))
    data._prove_packs(examples, 4096, split_text)
    for wrong, match in ((Forgets, "tokens lost, want"), (overfills, "want at most 4096")):
        monkeypatch.setattr(data, "Packer", wrong)
        with pytest.raises(NotEqualError, match=match):
            data._prove_packs(examples, 4096, split_text)


def test_the_fill_in_arrival_order_excludes_truncated_tokens() -> None:
    assert data._fill_in_order([6, 5, 4, 20], 10) == (6 + 9 + 10) / 30


def test_load_turns_report_their_own_seconds_and_the_first_is_a_warm_up() -> None:
    echo = iter([LoadTurn(1, 9.0), LoadTurn(4, 1.0), LoadTurn(4, 3.0)])
    ours = iter([LoadTurn(1, 9.0), LoadTurn(2, 5.0), LoadTurn(2, 5.0)])
    calls = {"echo": lambda: next(echo), "mmpos": lambda: next(ours)}
    times = by_rate(calls, Budget(0.0, 2))
    assert [timing.median for timing in times.values()] == [0.25, 0.5]


@pytest.mark.parametrize(
    ("suite", "needs", "extra"), [("rotary", "torch", "all"), ("data", "torch", "data"), ("service", "grpc", "server")]
)
def test_a_suite_names_the_pip_command(suite: str, needs: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"mmpos_bench.{suite}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"mmpos_bench.{suite}")
    want = f'install it with: pip install "multimodal-positions[{extra}]" (in a clone: pip install ".[{extra}]")'
    assert str(raised.value) == f"the {suite} suite: {needs} is not installed; {want}"


def test_the_service_suite_requires_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmpos_bench import service

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="service: got darwin, want Linux"):
        next(service.cases(SuiteOptions(quick=True)))


# The GPU clock excludes the effects of slow hosts and warm caches

L2_CACHE_SIZE = 50 << 20


class Device:
    """Simulated device and host, timed in cycles; the host queues work that the device executes in order."""

    def __init__(self) -> None:
        self.host = self.free = 0  # the host's current time, and when the device finishes all queued work
        self.slept, self.read = list[int](), list[int]()  # cycles, and the elements of the buffers that were read

    def queue(self, host: int, work: int) -> None:
        """Spend ``host`` cycles on the host, then queue ``work`` cycles on the device."""
        self.host += host
        self.free = max(self.free, self.host) + work

    def sleep(self, cycles: int) -> None:
        self.slept.append(cycles)
        self.queue(10, cycles)

    def read_all(self, size: int) -> None:
        self.read.append(size)
        self.queue(10, 1000)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0

    def record(self) -> None:
        self.device.queue(10, 0)
        self.at = self.device.free

    def query(self) -> bool:
        return self.at <= self.device.host

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    simulated = Device()
    api = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        get_device_properties=lambda index: SimpleNamespace(L2_cache_size=L2_CACHE_SIZE),
        Event=lambda **_: Event(simulated),
        _sleep=simulated.sleep,
    )

    def ones(size: int, **_: object) -> SimpleNamespace:
        return SimpleNamespace(sum=lambda: simulated.read_all(size))

    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=api, ones=ones, float32=None))
    return simulated


@pytest.mark.parametrize("host", [0, 500, 5_000_000])
def test_host_time_is_excluded(device: Device, host: int) -> None:
    took = cuda.Clock().seconds(lambda: device.queue(host, 777))
    assert took == pytest.approx(777e-6)


def test_the_sleep_grows_until_the_host_is_ahead_and_then_stays_the_same(device: Device) -> None:
    clock = cuda.Clock()
    for _ in range(2):
        clock.seconds(lambda: device.queue(3 << 20, 777))
    assert device.slept == [1 << 20, 2 << 20, 4 << 20, 4 << 20]


def test_the_time_of_a_call_includes_its_wait_for_the_device(device: Device) -> None:
    def waits() -> None:
        device.host = device.free
        device.queue(500, 777)

    assert cuda.Clock().seconds(waits) == pytest.approx(1277e-6, abs=20e-6)


def test_several_times_the_cache_size_is_read_before_every_call(device: Device) -> None:
    times = cuda.by_events({"a": lambda: device.queue(5, 100), "b": lambda: device.queue(5, 300)}, Budget(0.0, 4))
    assert list(times) == ["a", "b"]
    assert [timing.median for timing in times.values()] == pytest.approx([100e-6, 300e-6])
    assert [timing.turns for timing in times.values()] == [4, 4]
    assert len(device.read) == len(device.slept)
    assert min(device.read) * 4 >= 4 * L2_CACHE_SIZE


def test_calls_in_a_replay_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that without CUDA a replay runs each call once and is timed by the host's clock."""
    called: list[str] = []
    moments = iter(range(100))
    monkeypatch.setattr(cuda, "time", SimpleNamespace(perf_counter=lambda: float(next(moments))))
    replays = cuda.Replays([lambda: called.append("a"), lambda: called.append("b")])
    timing = cuda.by_events({"both": replays}, Budget(0.0, 5))["both"]
    assert (timing.median, timing.p20, timing.p80, timing.turns) == (0.5, 0.5, 0.5, 5)
    assert called == ["a", "b"] * 8


# Suites run with the recorded contestants

PLAIN = ["eager formula", "torch.compile", "Transformers"]
PEERS = {"into new tensors": PLAIN, "forward and backward": PLAIN, FUSED: [*DIFFUSERS]}
"""Peers by group of rotations on a CPU."""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports processor times of servers")
ONLY = {
    "rotary": pytest.mark.skipif(torch.cuda.is_available(), reason="the suite differs with a GPU"),
    "service": LINUX,
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", [pytest.param(suite, marks=ONLY.get(suite, ())) for suite in SUITES])
def test_quick_suites_run_the_recorded_contestants(suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (settings := tmp_path / "mmpos.toml").write_text(PATIENT)
    monkeypatch.setattr("mmpos_bench.service.service", partial(service, "--config", str(settings)))
    report = run(suite, peers=True, quick=True)
    assert sorted(report.missing) == (["Liger", "flash-attention", "flashinfer"] if suite == "rotary" else [])
    ways = {
        f"{name}, bfloat16": [way.name for way in ALL_GROUPS[name].ways] + PEERS.get(name, []) for name in ALL_GROUPS
    }
    if suite == "rotary":
        assert contestants(report) == ways
    elif (recorded := from_json((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))).code == report.code:
        assert contestants(report) == contestants(recorded)
    assert {m.entries[0].role for m in report.measurements} == {"limit"}
    if suite == "data":
        whole, split = report.group("packs of a stream")[:2]
        assert whole.facts["fill in order of arrival"] < whole.facts["fill"] < split.facts["fill"] <= 1
        assert whole.facts["cuts"] == split.facts["truncated"] == 0
    for rates in report.group("calls at once"):
        assert rates.facts["documents per second"] > 0


def contestants(report: SuiteReport) -> dict[str, list[str]]:
    """Return the names of the contestants in each group, with the limit first."""
    return {name: [e.name for e in report.group(name)[0].entries] for name in report.groups}


@pytest.mark.slow
@LINUX
def test_clients_refuse_unexpected_answers() -> None:
    with started(echo()) as (server,), clients() as pool:
        order = Order("/echo/Bytes3", b"anything", bytes(3), 0.01)
        right = Load(server, order, pool)
        turn = right()
        assert turn.cpu > 0
        assert right.turns == [turn]
        assert Load(server, replace(order, path="/echo/Stream3"), pool)().per_second > 0
        with pytest.raises(NotEqualError, match="/echo/Bytes4: got 4 bytes, want the expected 3 bytes"):
            Load(server, replace(order, path="/echo/Bytes4"), pool)()


def test_a_server_that_does_not_start_causes_an_error() -> None:
    with pytest.raises(ServiceError, match="got no listening server"), started([sys.executable, "-c", "pass"]):
        pass
