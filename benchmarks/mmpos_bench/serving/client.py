"""A client process: orders come through its standard input, and what it did goes through its standard output.

python -m mmpos_bench.serving.client
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import grpc

from mmpos_bench.proofs import NotEqualError
from mmpos_bench.serving.orders import OPTIONS, Done, Order

__all__ = ["work"]


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
    work()
