"""The GPU clock excludes the effects of slow hosts and warm caches; a simulated device replaces the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mmpos_bench import cuda
from mmpos_bench.timing import Budget

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
