"""Run servers, including an echo server, and clients in separate processes: loads, floods and random mixes of calls.

python -m mmpos_bench.serving --malloc tuned    serves /echo/Bytes760 and /echo/Stream760, or any other size; each
                                                request returns new bytes, so that timing it measures the cost of a
                                                call without work
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import grpc

from mmpos.client import AsyncClient, Client, Decode, Dense, PositionsQuery
from mmpos.errors import MmposError, ServiceError
from mmpos.rotary import Rotary
from mmpos.segments.table import SegmentTable
from mmpos_bench.images import PHOTOS
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.timing import Call, Timer, in_turns
from mmpos_bench.workloads import workload
from mmpos_server.config import Limits, load
from mmpos_server.listening import Listen, address, transport_options

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)]
"""Options of every channel."""

PHOTOGRAPHS = tuple(path.read_bytes() for path in PHOTOS)
"""JPEG files of a cat and of a cup, as bytes."""

_ALONE = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # options of channels that share no connection
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

    def memory(self, which: str = "VmRSS") -> float:
        """Return the process's current memory in MiB, or its peak if ``which`` is "VmHWM"."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{which}:"))


def service(*options: str) -> list[str]:
    """Return the command line of our server; it has this process's malloc settings."""
    return [sys.executable, "-m", "mmpos_server", "--port", "0", *options]


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
            # Discard the log, which has one line per call.
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


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Restrict processes started within the context to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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

        async def once(request: bytes, context: object) -> bytes:
            return bytes(size)

        async def stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield bytes(size)

        if method[1] == "Stream":
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(once)


async def _serve() -> None:
    """Run the echo server with the transport options of mmpos_server and print its address."""
    settings = {"limits": Limits(request_bytes=64 * 2**20)}
    options = dict(transport_options(load().model_copy(update=settings), reuse_port=False))
    # grpc.aio fetches calls by itself, so calls wait in the transport.
    options |= {"grpc.server.max_pending_requests": 1024, "grpc.server.max_pending_requests_hard_limit": 1024}
    server = grpc.aio.server(options=list(options.items()))
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

    def to(self, server: ServerProcess, path: str, answer: bytes) -> Load:
        """Return the same load on another server's method."""
        return Load(server, replace(self.order, path=path, answer=answer), self.pool, self.count)


def ask(channel: grpc.Channel, path: str, request: bytes) -> bytes:
    """Call a method, or send it a stream of one item, and return the answer."""
    call: Any = channel.stream_stream(path) if "/Stream" in path else channel.unary_unary(path)
    answer: bytes
    if "/Stream" in path:
        (answer,) = call(iter([request]), timeout=60)
    else:
        answer = call(request, timeout=60)
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


def _by(seconds: Callable[[LoadTurn], float]) -> Timer:
    """Return a timer for loads, which time themselves; the first turn of each load is a warm-up."""

    def turn(call: Call) -> float:
        result = call()
        assert isinstance(result, LoadTurn)
        return seconds(result)

    return lambda calls, budget, tick: in_turns(calls, budget.rounds, 1, turn, tick)


by_cpu = _by(lambda turn: turn.cpu)
"""Timer of the server's processor seconds per call."""

by_rate = _by(lambda turn: 1 / turn.per_second)
"""Timer of wall-clock seconds per call for concurrent calls."""


# Floods.


@dataclass(frozen=True)
class FloodCall:
    """One call in a flood."""

    due: float  # scheduled time in seconds after the start of the flood
    status: str
    seconds: float  # from the scheduled time to the end


def flood(address: str, path: str, request: bytes, rate: float, seconds: float) -> list[FloodCall]:
    """Send calls at the random times of a Poisson process, without waiting for answers.

    Calls that this process cannot send in time are omitted.
    """
    return asyncio.run(_flood(address, path, request, rate, seconds))


async def _flood(address: str, path: str, request: bytes, rate: float, seconds: float) -> list[FloodCall]:
    channels = [grpc.aio.insecure_channel(address, options=_ALONE) for _ in range(4)]
    calls: list[Any] = [channel.unary_unary(path) for channel in channels]
    sent: list[FloodCall] = []

    async def one(due: float) -> None:
        status = "OK"
        try:
            await calls[len(tasks) % len(calls)](request, timeout=30, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        sent.append(FloodCall(due, status, perf_counter() - begin - due))

    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    tasks: list[asyncio.Task[None]] = []
    chance, begin, due = random.Random(0), perf_counter(), 0.0
    while (due := due + chance.expovariate(rate)) < seconds and perf_counter() < begin + seconds:
        await asyncio.sleep(max(0.0, begin + due - perf_counter()))
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return sent


# Random mixes of calls.

_SEGMENTS = SegmentTable.from_documents(workload(1, 4096, 4, 24))
_QUERY = PositionsQuery(_SEGMENTS, views=[Decode(3)], dense=Dense())
_ROTARY = Rotary(head_dim=64, theta=10000.0, axes=2)
_ONE_IMAGE = [["x", photo] for photo in PHOTOGRAPHS]

Actions = dict[str, Callable[[], object]]


def everything(address: str, seconds: float, seed: int) -> Counter[str]:
    """Run all kinds of valid and invalid calls in random order, and count the outcomes of each kind."""
    import torch

    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    with Client(address, timeout=20) as client, Client(address, timeout=20, shared_memory=2**26) as sharing:
        chance = random.Random(seed)
        actions = _calls(address, chance, client, sharing) | _mistakes(address, chance, client)
        end = monotonic() + seconds
        while monotonic() < end:
            name, action = chance.choice(sorted(actions.items()))
            outcome = "OK"
            try:
                action()
            except MmposError as error:
                outcome = type(error).__name__
            except grpc.RpcError as error:
                failed: Any = error
                outcome = failed.code().name
            outcomes[f"{name}: {outcome}"] += 1
    return outcomes


def _ids(caller: Client, documents: int) -> object:
    segments = SegmentTable.from_documents(workload(documents, 4096, 4, 24))
    return caller.query(PositionsQuery(segments, dense=Dense()))


def _calls(address: str, chance: random.Random, client: Client, sharing: Client) -> Actions:
    """Return valid calls by name, including large tensors in messages and in shared memory, and abandoned streams."""
    import torch

    def rotate(caller: Client, heads: int, dtype: torch.dtype) -> None:
        positions = client.place(_SEGMENTS)
        caller.apply_rotary(torch.ones(positions.num_tokens, heads, 64, dtype=dtype), None, positions, _ROTARY)

    def stream_dropped() -> None:
        with Client(address, timeout=20) as leaving:
            for _ in islice(leaving.stream(_QUERY for _ in range(1000)), chance.randrange(1, 10)):
                pass

    return {
        "apply": lambda: rotate(client, 2, torch.bfloat16),
        "build_images": lambda: client.build_batch([["A photograph: ", photo, " at dusk"] for photo in PHOTOGRAPHS]),
        "build_text": lambda: client.build(["a bird " * chance.randrange(1, 2000)]),
        "info": lambda: (client.info(), client.healthy()),
        "place": lambda: client.place(_SEGMENTS, start=chance.randrange(1000)),
        "place_batch": lambda: _ids(client, chance.randrange(1, 64)),
        "query_dense": lambda: client.query(_QUERY),
        "rotate": lambda: client.cos_sin(_ROTARY, client.place(_SEGMENTS)),
        "share": lambda: rotate(sharing, 8, torch.float32),
        "share_build": lambda: sharing.build_batch(_ONE_IMAGE),
        "share_ids": lambda: _ids(sharing, 16),
        "stream": lambda: deque(client.stream(_QUERY for _ in range(20)), maxlen=0),
        "stream_build": lambda: deque(client.stream_build([document] for document in _ONE_IMAGE * 2), maxlen=0),
        "stream_dropped": stream_dropped,
    }


def _mistakes(address: str, chance: random.Random, client: Client) -> Actions:
    """Return invalid, cancelled and timed-out calls by name."""

    def raw(path: str, request: bytes) -> None:
        with grpc.insecure_channel(address, options=_ALONE) as channel:
            ask(channel, path, request)

    def build_broken() -> None:
        photo = chance.choice(PHOTOGRAPHS)
        cut = photo[: chance.randrange(len(photo))]
        client.build_batch([["a", cut], ["b", b"no image"], ["c", photo]], errors="return")

    async def cancel() -> None:
        async with AsyncClient(address, timeout=20) as patient:
            calls = [asyncio.ensure_future(patient.build(["a", *PHOTOGRAPHS])) for _ in range(4)]
            await asyncio.sleep(chance.uniform(0, 0.01))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    return {
        "broken_bytes": lambda: raw("/mmpos.rpc.v1.PositionService/Place", b"\xff" * chance.randrange(1, 5000)),
        "build_broken": build_broken,
        "cancel": lambda: asyncio.run(cancel()),
        "deadline": lambda: client.with_options(timeout=chance.uniform(0.0005, 0.01)).build(["a", *PHOTOGRAPHS]),
        "mistake": lambda: client.place(_SEGMENTS, "no such scheme"),
    }


if __name__ == "__main__":
    asyncio.run(_serve())
