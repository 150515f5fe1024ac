"""Client processes that load a server together: the orders that they take, and how they carry them out.

python -m mmpos_bench.serving.orders    takes orders through its standard input, and answers through its output
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Self

import grpc

from mmpos.errors import ServiceError
from mmpos.segments.table import SegmentTable
from mmpos_bench.proofs import NotEqualError

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
"""Of every channel."""

Kind = Literal["unary", "stream", "stub", "client"]


@dataclass(frozen=True)
class Order:
    """An order to a client process: the same call again and again.

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

    kind: Kind
    address: str
    path: str
    request: bytes
    answer: bytes
    seconds: float = 1.0
    in_flight: int = 1
    segments: SegmentTable | None = None


@dataclass(frozen=True)
class Done:
    """The work of a client process: seconds in all, and of each call."""

    seconds: float
    latencies: list[float]

    @property
    def per_second(self) -> float:
        """Calls, or items of a stream."""
        return len(self.latencies) / self.seconds


class Clients:
    """Client processes that take orders; a context manager.

    Not those of multiprocessing, which would run the caller's program again in each.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._stack = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        words = [sys.executable, "-m", "mmpos_bench.serving.orders"]
        for _ in range(self.count):
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            # On leaving it first closes the pipes, at whose end the process ends, and then waits for it.
            self._processes.append(self._stack.enter_context(process))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, order: Order, count: int | None = None) -> list[Done]:
        """Have so many of them do this at once; None is all.

        Raises:
            NotEqualError: an answer is not the one that was ordered, or none came.
            ServiceError: a client ended.
        """
        chosen = self._processes[:count]
        for process in chosen:
            _send(process, order)
        answers = [_receive(process) for process in chosen]
        for done in answers:
            if isinstance(done, Exception):
                raise done
        return answers


def _send(process: subprocess.Popen[bytes], order: Order) -> None:
    assert process.stdin is not None
    try:
        pickle.dump(order, process.stdin)
        process.stdin.flush()
    except BrokenPipeError:
        raise ServiceError("got a client process that ended, want one that takes orders") from None


def _receive(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    try:
        return pickle.load(process.stdout)
    except EOFError:
        raise ServiceError("got a client process that ended, want what it did") from None


def work() -> None:
    """Take orders until there are no more: calls of grpc.aio at once, or one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    loop = asyncio.new_event_loop()
    channels: dict[tuple[str, str], Any] = {}
    while True:
        try:
            order: Order = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        done: Done | Exception
        try:
            if order.kind in ("unary", "stream"):
                done = loop.run_until_complete(_at_once(order, channels))
            else:
                done = _one_by_one(order, channels)
        except Exception as error:
            done = NotEqualError(f"{order.path}: {error}")
        pickle.dump(done, answers)
        answers.flush()


async def _at_once(order: Order, channels: dict[tuple[str, str], Any]) -> Done:
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
    return Done(perf_counter() - began, latencies)


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


def _one_by_one(order: Order, channels: dict[tuple[str, str], Any]) -> Done:
    call = _caller(order, channels)
    latencies: list[float] = []
    start = perf_counter()
    while (began := perf_counter()) < start + order.seconds or not latencies:
        call()
        latencies.append(perf_counter() - began)
    return Done(perf_counter() - start, latencies)


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
    if answer != order.answer:
        raise NotEqualError(f"got {len(answer)} bytes, want other {len(order.answer)}")


if __name__ == "__main__":
    # Its classes are those of the module that is imported, which the other process knows.
    from mmpos_bench.serving import orders

    orders.work()
