"""The other processes of the service benchmark: servers whose processor time is read, and clients that load them."""

import asyncio
import multiprocessing
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Literal

import grpc

from mmpos import SegmentTable

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True)
class ServerProcess:
    """A server in a process of its own."""

    pid: int
    address: str

    @property
    def cpu(self) -> float:
        """Seconds of processor time, user and system, of all its threads so far: /proc/PID/stat, but not in ticks."""
        return time.clock_gettime((~self.pid << 3) | 2)  # clock_getcpuclockid(3)


@contextmanager
def started(*words: str) -> Iterator[ServerProcess]:
    """A server while inside, from its command line; its first line ends in HOST:PORT."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert "listening on" in line, f"{' '.join(words)} does not start"
            yield ServerProcess(process.pid, line.split()[-1])
        finally:
            process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Order:
    """What a client process is to do: the same call again and again.

    Args:
        kind: unary and stream calls of grpc.aio, or one after the other of the plain stub and of mmpos.client.
        address: HOST:PORT.
        path: of the method.
        request: what to send.
        answer: what must come back.
        seconds: how long.
        in_flight: calls, or items of a stream, at once.
        segments: what mmpos.client is asked to place; it makes the request, and reads the answer.
    """

    kind: Literal["unary", "stream", "stub", "client"]
    address: str
    path: str
    request: bytes
    answer: bytes
    seconds: float = 1.0
    in_flight: int = 1
    segments: SegmentTable | None = None


@dataclass(frozen=True)
class Report:
    """What a client process did: seconds in all, and of each call."""

    seconds: float
    latencies: list[float]

    @property
    def per_second(self) -> float:
        """Calls, or items of a stream."""
        return len(self.latencies) / self.seconds


class Clients:
    """Client processes that take orders; a context manager.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._stack = ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Clients":
        spawn = multiprocessing.get_context("spawn")
        for _ in range(self.count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            self._stack.callback(process.join)
            self._stack.callback(here.close)
            self._pipes.append(here)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, order: Order) -> list[Report]:
        """Have all of them do this at once.

        Raises:
            AssertionError: an answer is not the one that was ordered.
        """
        for pipe in self._pipes:
            pipe.send(order)
        found = [pipe.recv() for pipe in self._pipes]
        for report in found:
            if isinstance(report, Exception):
                raise report
        return found


@dataclass(frozen=True)
class Turn:
    """One turn of an order: calls per second, seconds of the server's processor per call, and of each call."""

    per_second: float
    cpu: float
    latencies: list[float]


def measure(
    clients: Clients, orders: dict[str, tuple[ServerProcess, Order]], seconds: float, rounds: int
) -> dict[str, list[Turn]]:
    """Every order in turn, round after round, so that a machine that changes its speed does so for all of them."""
    found: dict[str, list[Turn]] = {name: [] for name in orders}
    for turn in range(rounds + 1):  # the first warms up
        for name, (server, order) in orders.items():
            began = server.cpu
            reports = clients.run(replace(order, seconds=seconds))
            latencies = [latency for report in reports for latency in report.latencies]
            if turn:
                calls = sum(report.per_second for report in reports)
                found[name].append(Turn(calls, (server.cpu - began) / len(latencies), latencies))
    return found


def _work(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = asyncio.new_event_loop()
    channels: dict[tuple[str, str], Any] = {}
    while True:
        try:
            order: Order = pipe.recv()
        except EOFError:
            return
        try:
            if order.kind in ("unary", "stream"):
                pipe.send(loop.run_until_complete(_at_once(order, channels)))
            else:
                pipe.send(_one_by_one(order, channels))
        except Exception as error:
            pipe.send(AssertionError(f"{order.path}: {error}"))


async def _at_once(order: Order, channels: dict[tuple[str, str], Any]) -> Report:
    key = ("aio", order.address)
    if key not in channels:
        channels[key] = grpc.aio.insecure_channel(order.address, options=OPTIONS)
    latencies: list[float] = []
    began = perf_counter()
    if order.kind == "stream":
        await _stream(channels[key], order, began + order.seconds, latencies)
    else:
        turns = (_unary(channels[key], order, began + order.seconds, latencies) for _ in range(order.in_flight))
        await asyncio.gather(*turns)
    return Report(perf_counter() - began, latencies)


async def _unary(channel: grpc.aio.Channel, order: Order, end: float, latencies: list[float]) -> None:
    call: Any = channel.unary_unary(order.path)
    while (began := perf_counter()) < end or not latencies:
        _check(await call(order.request), order)
        latencies.append(perf_counter() - began)


async def _stream(channel: grpc.aio.Channel, order: Order, end: float, latencies: list[float]) -> None:
    stream: Any = channel.stream_stream(order.path)
    call = stream()
    room, sent = asyncio.Semaphore(order.in_flight), deque[float]()

    async def write() -> None:
        while perf_counter() < end or not latencies:
            await room.acquire()
            sent.append(perf_counter())
            await call.write(order.request)
        await call.done_writing()

    writer = asyncio.create_task(write())
    while (answer := await call.read()) is not grpc.aio.EOF:
        _check(answer, order)
        latencies.append(perf_counter() - sent.popleft())
        room.release()
    await writer


def _one_by_one(order: Order, channels: dict[tuple[str, str], Any]) -> Report:
    call = _caller(order, channels)
    latencies: list[float] = []
    start = perf_counter()
    while (began := perf_counter()) < start + order.seconds or not latencies:
        call()
        latencies.append(perf_counter() - began)
    return Report(perf_counter() - start, latencies)


def _caller(order: Order, channels: dict[tuple[str, str], Any]) -> Callable[[], object]:
    key = (order.kind, order.address)
    if order.kind == "client":
        from mmpos.client import Client

        if key not in channels:
            channels[key] = Client(order.address)
        return lambda: channels[key].place(order.segments)
    if key not in channels:
        channels[key] = grpc.insecure_channel(order.address, options=OPTIONS)
    stub: Any = channels[key].unary_unary(order.path)
    return lambda: _check(stub(order.request), order)


def _check(answer: bytes, order: Order) -> None:
    assert answer == order.answer, f"got {len(answer)} bytes, want other {len(order.answer)}"
