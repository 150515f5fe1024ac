"""Streams whose client sends as fast as it can and never reads: what the server holds for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep

import grpc

from mmpos_bench.serving.loads import OPTIONS
from mmpos_bench.serving.processes import Tell, service, started, working
from mmpos_bench.serving.questions import Asking


@dataclass(frozen=True)
class Stalled:
    """The memory that so many stalled streams cost."""

    streams: int
    answer: float  # MiB of the answer to one item; each stream has as many items as it can send
    before: float  # MiB that the server held
    peak: float  # MiB that it held at most
    per_stream: float  # MiB more than before, for each


def stalled(counts: tuple[int, ...], seconds: float, malloc: str, documents: int = 64) -> Iterator[Stalled]:
    """Open so many streams, for so long, each time on a new server."""
    for count in counts:
        with started(service(malloc, "--log-level", "warning")) as (server,):
            with grpc.insecure_channel(server.address, options=OPTIONS) as channel:
                question = Asking(channel, 4096, 4, 24).place(documents, dense=True, stream=True)
            before = peak = server.memory()
            with working() as (client,):
                client.start(stall, server.address, question.path, question.request, count)
                client.receive()
                end = monotonic() + seconds
                while monotonic() < end:
                    peak = max(peak, server.memory())
                    sleep(0.1)
        rounded = round(before, 1), round(peak, 1), round((peak - before) / count, 2)
        yield Stalled(count, round(len(question.answer) / 2**20, 2), *rounded)


def stall(tell: Tell, address: str, path: str, item: bytes, count: int) -> None:
    """Open so many streams of the same item, tell so, and never read."""
    calls: list[object] = []
    for _ in range(count):
        # A connection each: they would share the flow control of one.
        channel = grpc.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
        ask: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        calls.append(ask(iter(lambda: item, None)))
    tell("open")
    threading.Event().wait()
