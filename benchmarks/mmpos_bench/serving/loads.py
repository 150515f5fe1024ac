"""Loads on a server as something to time: a turn of one tells calls per second, processor time and latency."""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any, Literal

import grpc

from mmpos.client import Client
from mmpos.segments.table import SegmentTable
from mmpos_bench.proofs import NotEqualError, holds
from mmpos_bench.serving.processes import ServerProcess, Tell, Worker
from mmpos_bench.timing import Call, Timer, in_turns

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
"""Of every channel."""

_RATE = re.compile(r"finished in .*?, ([\d.]+) req/s")
_DATA = re.compile(r"\((\d+)\) data$", re.MULTILINE)
_FRAME = 5  # bytes before a message of gRPC: whether it is compressed, and how long it is


def ask(channel: grpc.Channel, path: str, request: bytes) -> bytes:
    """Call a method, or send one item of a stream; gives the answer."""
    call: Any = channel.stream_stream(path) if "/Stream" in path else channel.unary_unary(path)
    answer: bytes
    if "/Stream" in path:
        (answer,) = call(iter([request]), timeout=60)
    else:
        answer = call(request, timeout=60)
    return answer


@dataclass(frozen=True)
class Order:
    """The same call again and again, for a worker.

    Kinds are calls of grpc.aio at once, items of its stream, and one after the other of the plain stub or of
    mmpos.client.
    """

    kind: Literal["unary", "stream", "stub", "client"]
    path: str
    request: bytes
    answer: bytes  # what must come back
    seconds: float
    in_flight: int = 1  # calls, or items of a stream, at once
    segments: SegmentTable | None = None  # what mmpos.client places; it makes the request, and reads the answer


@dataclass(frozen=True)
class Turn:
    """One turn of a load."""

    per_second: float  # calls, or items of a stream
    cpu: float  # seconds of the server's processor per call
    latencies: tuple[float, ...] = ()  # seconds of each call


@dataclass(frozen=True, eq=False)
class Load:
    """An order to workers, who carry it out each time it is called."""

    server: ServerProcess  # whose processor time counts
    order: Order
    workers: Sequence[Worker]
    turns: list[Turn] = field(default_factory=list)

    def __call__(self) -> Turn:
        """Take one turn, which is also remembered.

        Raises:
            NotEqualError: an answer is not the one that was ordered, or none came.
            ServiceError: a worker ended.
        """
        began = self.server.cpu
        for worker in self.workers:
            worker.start(carry_out, self.server.address, self.order)
        done = [worker.receive() for worker in self.workers]
        latencies = tuple(latency for _, times in done for latency in times)
        per_second = sum(len(times) / seconds for seconds, times in done)
        self.turns.append(Turn(per_second, (self.server.cpu - began) / len(latencies), latencies))
        return self.turns[-1]

    def to(self, server: ServerProcess, path: str, answer: bytes) -> Load:
        """Make the same load on another method."""
        return Load(server, replace(self.order, path=path, answer=answer), self.workers)


def carry_out(tell: Tell, address: str, order: Order) -> None:
    """Carry out an order, and tell the seconds in all and of each call.

    Raises:
        NotEqualError: another answer, or none.
    """
    try:
        if order.kind in ("unary", "stream"):
            tell(_loop().run_until_complete(_at_once(address, order)))
        else:
            tell(_one_by_one(address, order))
    except Exception as error:
        raise NotEqualError(f"{order.path}: {error}") from None


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _channel(make: Callable[..., Any], address: str) -> Any:
    """Open one channel for all orders of this process."""
    return make(address, options=OPTIONS)


@cache
def _client(address: str) -> Client:
    return Client(address)


async def _at_once(address: str, order: Order) -> tuple[float, list[float]]:
    channel = _channel(grpc.aio.insecure_channel, address)
    latencies: list[float] = []
    began = perf_counter()
    if order.kind == "stream":
        await _stream(channel, order, began + order.seconds, latencies)
    else:
        turns = (_unary(channel, order, began + order.seconds, latencies) for _ in range(order.in_flight))
        await asyncio.gather(*turns)
    return perf_counter() - began, latencies


async def _unary(channel: Any, order: Order, end: float, latencies: list[float]) -> None:
    call = channel.unary_unary(order.path)
    while (began := perf_counter()) < end or not latencies:
        _check(await call(order.request), order)
        latencies.append(perf_counter() - began)


async def _stream(channel: Any, order: Order, end: float, latencies: list[float]) -> None:
    call = channel.stream_stream(order.path)()
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


def _one_by_one(address: str, order: Order) -> tuple[float, list[float]]:
    stub = _channel(grpc.insecure_channel, address).unary_unary(order.path)
    client = _client(address)
    latencies: list[float] = []
    start = perf_counter()
    while (began := perf_counter()) < start + order.seconds or not latencies:
        if order.segments is None:
            _check(stub(order.request), order)
        else:
            client.place(order.segments)
        latencies.append(perf_counter() - began)
    return perf_counter() - start, latencies


def _check(answer: bytes, order: Order) -> None:
    if answer != order.answer:
        raise NotEqualError(f"got {len(answer)} bytes, want other {len(order.answer)}")


@dataclass(frozen=True, eq=False)
class H2Load:
    """The same call so many times by h2load, a client in C that costs next to nothing, each time it is called."""

    server: ServerProcess
    path: str
    request: bytes
    size: int  # bytes of every answer, which are counted
    calls: int
    connections: int
    in_flight: int  # calls at once on each connection

    @staticmethod
    def installed() -> bool:
        """True where h2load is on the path."""
        return shutil.which("h2load") is not None

    def __call__(self) -> Turn:
        """Take one turn.

        Raises:
            NotEqualError: not every call was answered in full.
        """
        began = self.server.cpu
        with NamedTemporaryFile() as body:
            body.write(b"\0" + len(self.request).to_bytes(4, "big") + self.request)
            body.flush()
            words = ["h2load", "-d", body.name, f"-n{self.calls}", f"-c{self.connections}", f"-m{self.in_flight}"]
            words += ["-Hcontent-type: application/grpc", "-Hte: trailers", f"http://{self.server.address}{self.path}"]
            said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        cpu = (self.server.cpu - began) / self.calls
        rate, data = _RATE.search(said), _DATA.search(said)
        if rate is None or data is None:
            raise NotEqualError(f"h2load: got {said[-200:]!r}, want a rate and the bytes that came")
        wanted = self.calls * (_FRAME + self.size)
        holds(int(data[1]) == wanted, f"h2load: {data[1]} bytes", f"{wanted}")
        return Turn(float(rate[1]), cpu)


def _by(seconds: Callable[[Turn], float]) -> Timer:
    """Make a timer of loads, whose turns tell their seconds themselves; the first turn of each warms up."""

    def turn(call: Call) -> float:
        made = call()
        assert isinstance(made, Turn)
        return seconds(made)

    return lambda calls, budget, tick: in_turns(calls, budget.rounds, 1, turn, tick)


by_cpu = _by(lambda turn: turn.cpu)
"""Seconds of the server's processor per call."""

by_rate = _by(lambda turn: 1 / turn.per_second)
"""Seconds of the clock per call, of many at once."""

by_latency = _by(lambda turn: statistics.median(turn.latencies))
"""Seconds that a call takes, in the median of a turn."""
