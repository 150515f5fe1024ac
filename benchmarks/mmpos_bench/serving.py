"""Run servers, including an echo server, and clients with their loads in separate processes.

``python -m mmpos_bench.serving`` serves /echo/Bytes760 and /echo/Stream760, or any other size; each request returns new
bytes, so that timing it measures the cost of a call without work.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import active_children, get_context
from time import perf_counter
from typing import Any

import grpc

from mmpos.errors import ServiceError
from mmpos_bench.images import PHOTOS
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.timing import Budget, Call, Timing, in_turns
from mmpos_server.config import load
from mmpos_server.listening import Listen, address, transport_options

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]
"""Options of every channel."""

PHOTOGRAPHS = tuple(path.read_bytes() for path in PHOTOS)
"""JPEG files of a cat and of a cup, as bytes."""

_ECHO = re.compile(r"/echo/(Bytes|Stream)(\d+)")


# Processes.


@dataclass(frozen=True)
class ServerProcess:
    """Server process that listens on HOST:PORT."""

    pid: int
    address: str

    @property
    def cpu(self) -> float:
        """Seconds of user and system time that all threads have used so far, more precise than /proc/PID/stat."""
        return time.clock_gettime((~self.pid << 3) | 2)  # clock_getcpuclockid(3)


def service(*options: str) -> list[str]:
    """Return the command line of our server; it has this process's malloc settings."""
    return [sys.executable, "-m", "mmpos_server", "--listen", "127.0.0.1:0", *options]


def echo() -> list[str]:
    """Return the command line of the echo server; it has this process's malloc settings."""
    return [sys.executable, "-m", "mmpos_bench.serving"]


@contextmanager
def started(*commands: list[str]) -> Iterator[list[ServerProcess]]:
    """Run servers within the context; the first line that each prints ends with HOST:PORT.

    Raises:
        ServiceError: a server did not start.
    """
    with ExitStack() as stack:
        running = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            running.append(stack.enter_context(process))
            stack.callback(process.send_signal, signal.SIGTERM)
        servers = []
        for process, command in zip(running, commands, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if "listening on" not in line:
                raise ServiceError(f"server: got no listening server; to see the error, run {shlex.join(command)}")
            servers.append(ServerProcess(process.pid, line.split()[-1]))
        yield servers


@contextmanager
def clients(count: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Run client processes within the context; they are killed at the end, even with work unfinished."""
    pool = ProcessPoolExecutor(count, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        yield pool
    finally:
        for process in active_children():
            process.kill()
        pool.shutdown(cancel_futures=True)


# The echo server.


def echo_path(size: int, *, stream: bool = False) -> str:
    """Return the path of the method that answers with ``size`` bytes, either once or for every item of a stream."""
    return f"/echo/{'Stream' if stream else 'Bytes'}{size}"


class _Echo(grpc.GenericRpcHandler):
    """Handler that answers with newly allocated bytes, as a service would."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = _ECHO.fullmatch(handler_call_details.method)
        if method is None:
            return None
        size = int(method[2])

        async def once(_: object, context: Any) -> bytes:
            await context.read()
            return bytes(size)

        async def stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield bytes(size)

        if method[1] == "Stream":
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(once)  # as mmpos_server does, with the same bytes on the wire


async def _serve() -> None:
    """Run the echo server with the transport options of mmpos_server and print its address."""
    config = replace(load(), request_bytes=64 * 2**20)
    server = grpc.aio.server(options=transport_options(config, reuse_port=False))
    server.add_generic_rpc_handlers([_Echo()])
    listen = Listen()
    port = server.add_insecure_port(address(listen.host, listen.port))
    await server.start()
    print(f"echo listening on {address(listen.host, port)}", flush=True)
    await server.wait_for_termination()


# Loads as contestants. Each turn measures calls per second and processor time.


@dataclass(frozen=True)
class Order:
    """Call, or stream item, that clients send repeatedly with grpc.aio."""

    path: str
    request: bytes
    answer: bytes  # expected answer
    seconds: float
    in_flight: int = 1  # number of concurrent calls or stream items


@dataclass(frozen=True)
class LoadTurn:
    """Result of one turn of a load."""

    per_second: float  # calls or stream items per second
    cpu: float  # processor seconds of the server per call


@dataclass(frozen=True, eq=False)
class Load:
    """Callable that has clients carry out an order."""

    server: ServerProcess  # server whose processor time is measured
    order: Order
    pool: ProcessPoolExecutor
    count: int = 1  # number of concurrent clients
    turns: list[LoadTurn] = field(default_factory=list)

    def __call__(self) -> LoadTurn:
        """Run one turn and append it to ``turns``.

        Raises:
            NotEqualError: an answer is missing or differs from the expected one.
        """
        began = self.server.cpu
        futures = [self.pool.submit(carry_out, self.server.address, self.order) for _ in range(self.count)]
        results = [future.result() for future in futures]
        calls, per_second = sum(count for count, _ in results), sum(count / seconds for count, seconds in results)
        self.turns.append(LoadTurn(per_second, (self.server.cpu - began) / calls))
        return self.turns[-1]


def ask(channel: grpc.Channel, path: str, request: bytes) -> bytes:
    """Call a method, or send it a stream of one item, and return the answer."""
    call: Any = channel.stream_stream(path) if "/Stream" in path else channel.unary_unary(path)
    answer: bytes
    if "/Stream" in path:
        (answer,) = call(iter([request]), timeout=300)
    else:
        answer = call(request, timeout=300)
    return answer


def carry_out(address: str, order: Order) -> tuple[int, float]:
    """Carry out an order and return the number of calls or items, and the total seconds.

    Raises:
        NotEqualError: an answer is missing or differs from the expected one.
    """
    work, began = _streamed if "/Stream" in order.path else _called, perf_counter()
    try:
        count = _loop().run_until_complete(work(address, order, began + order.seconds))
    except Exception as error:
        raise NotEqualError(f"{order.path}: {error}") from None
    return count, perf_counter() - began


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _channel(address: str) -> grpc.aio.Channel:
    """Return this process's channel to a server, which all orders share."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


async def _called(address: str, order: Order, end: float) -> int:
    call: Any = _channel(address).unary_unary(order.path)

    async def repeat() -> int:
        count = 0
        while perf_counter() < end or not count:
            _check(await call(order.request), order)
            count += 1
        return count

    return sum(await asyncio.gather(*(repeat() for _ in range(order.in_flight))))


async def _streamed(address: str, order: Order, end: float) -> int:
    call: Any = _channel(address).stream_stream(order.path)()
    room, count = asyncio.Semaphore(order.in_flight), 0

    async def write() -> None:
        while perf_counter() < end or not count:
            await room.acquire()
            await call.write(order.request)
        await call.done_writing()

    writer = asyncio.create_task(write())
    while (answer := await call.read()) is not grpc.aio.EOF:
        _check(answer, order)
        count += 1
        room.release()
    await writer
    return count


def _check(answer: bytes, order: Order) -> None:
    if answer != order.answer:
        raise NotEqualError(f"got {len(answer)} bytes, want the expected {len(order.answer)} bytes")


def by_rate(calls: Mapping[str, Call], budget: Budget) -> dict[str, Timing]:
    """Measure the seconds per call of loads, which time themselves; the first turn of each load is a warm-up."""

    def turn(call: Call) -> float:
        result = call()
        assert isinstance(result, LoadTurn)
        return 1 / result.per_second

    return in_turns(calls, budget.rounds, 1, turn)


if __name__ == "__main__":
    asyncio.run(_serve())
