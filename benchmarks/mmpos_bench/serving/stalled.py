"""Streams whose client sends as fast as it can and never reads: what the server holds for them.

python -m mmpos_bench.serving.stalled ADDRESS COUNT    opens them, and keeps them until its input ends
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import grpc

from mmpos.rpc.positions import put_query
from mmpos.rpc.queries import Dense, PositionsQuery
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.segments.table import SegmentTable
from mmpos_bench.serving.orders import OPTIONS
from mmpos_bench.serving.overload import memory
from mmpos_bench.serving.processes import service, started
from mmpos_bench.workloads import workload

__all__ = ["Stalled", "stalled"]

_PATH = "/mmpos.rpc.v1.PositionService/StreamPlace"


@dataclass(frozen=True)
class Stalled:
    """The memory that so many stalled streams cost.

    Args:
        streams: how many.
        answer: MiB of the answer to one item; each stream has as many items as it can send.
        before: MiB that the server held.
        peak: MiB that it held at most.
        per_stream: MiB more than before, for each.
    """

    streams: int
    answer: float
    before: float
    peak: float
    per_stream: float


def stalled(counts: tuple[int, ...], seconds: float, malloc: str, documents: int = 64) -> Iterator[Stalled]:
    """Open so many streams, for so long, each time on a new server."""
    item = _item(documents)
    for count in counts:
        with started(service(malloc, "--log-level", "warning")) as (server,):
            with grpc.insecure_channel(server.address, options=OPTIONS) as channel:
                ask: Any = channel.stream_stream(_PATH)
                (answer,) = ask(iter([item]), timeout=60)
            before = memory(server.pid)
            words = [sys.executable, "-m", "mmpos_bench.serving.stalled", server.address, str(count)]
            with subprocess.Popen([*words, str(documents)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
                assert client.stdout is not None
                client.stdout.readline()
                end, peak = monotonic() + seconds, before
                while monotonic() < end:
                    peak = max(peak, memory(server.pid))
                    sleep(0.1)
                client.kill()
        rounded = round(before, 1), round(peak, 1), round((peak - before) / count, 2)
        yield Stalled(count, round(len(answer) / 2**20, 2), *rounded)


def _item(documents: int) -> bytes:
    request = pb.StreamPlaceRequest(id=1)
    put_query(
        request.query, PositionsQuery(SegmentTable.from_documents(workload(documents, 4096, 4, 24)), dense=Dense())
    )
    return request.SerializeToString()


def _stall(address: str, count: int, documents: int) -> None:
    item = _item(documents)
    calls: list[Any] = []
    for _ in range(count):
        # A connection each: they would share the flow control of one.
        channel = grpc.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
        ask: Any = channel.stream_stream(_PATH)
        calls.append(ask(iter(lambda: item, None)))
    print("open", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    threading.Thread(target=_stall, args=(arguments[0], int(arguments[1]), int(arguments[2]))).start()
