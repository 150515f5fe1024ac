"""Test several servers behind one client: if one of them is killed or stopped under load, no call is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from clients import open_client
from server_program import Program, Start, metrics_of
from waiting import eventually, free_port

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.client import Client, PositionsQuery

pytestmark = pytest.mark.slow

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
CALLS, ITEMS = 1000, 1500


def numbers(positions: list[PositionTable], first: int) -> list[int]:
    """Return the number of the query behind each answer: the ids of query ``n`` start at ``first + n``."""
    return [int(table.dense()[0, 0]) - first for table in positions]


KILLED = threading.Event()
"""Set after a server is killed; a third of the work is done before that."""


def called(kind: str, addresses: list[str], thread: int) -> list[PositionTable]:
    """Make one thread's calls in sequence."""
    results = []
    with open_client(kind, addresses, timeout=60) as client:
        for number in range(CALLS):
            results.append(client.place(SEGMENTS, start=thread * CALLS + number))
            assert number < CALLS // 3 or KILLED.wait(60)
    return results


def streamed(kind: str, addresses: list[str]) -> list[PositionTable]:
    """Read one stream of items."""

    def queries() -> Iterator[PositionsQuery]:
        for number in range(ITEMS):
            assert number < ITEMS // 3 or KILLED.wait(60)
            yield PositionsQuery(SEGMENTS, start=number)

    with open_client(kind, addresses, timeout=60) as client:
        return [answer.table for answer in client.stream(queries())]


@dataclass(frozen=True)
class Replica:
    """A server that counts its answers."""

    program: Program
    metrics_port: int

    @property
    def answered(self) -> float:
        """The number of answers so far."""
        return sum(n for name, n in metrics_of(self.metrics_port).items() if name.startswith("mmpos_requests_total"))


def replicas(start: Start, *arguments: str) -> list[Replica]:
    """Start three servers."""
    ports = [free_port() for _ in range(3)]
    return [Replica(start("--metrics-port", str(port), "--log-level", "warning", *arguments), port) for port in ports]


def busy(servers: list[Replica], calls: int) -> bool:
    """Wait until each server has answered this number of calls, and return whether all have."""
    return eventually(lambda: all(server.answered >= calls for server in servers))


def test_killing_a_replica_neither_loses_nor_repeats_a_call_or_an_item(start: Start) -> None:
    KILLED.clear()
    servers = replicas(start)
    addresses = [server.program.address for server in servers]
    kinds = ("sync", "async")
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(called, kind, addresses, thread) for thread, kind in enumerate(kinds * 2)]
        streams = [threads.submit(streamed, kind, addresses) for kind in kinds]
        assert busy(servers, 100)
        servers[1].program.process.kill()
        before = [server.answered for server in (servers[0], servers[2])]
        KILLED.set()
        for thread, call in enumerate(calls):
            assert numbers(call.result(), thread * CALLS) == list(range(CALLS))
        for stream in streams:
            assert numbers(stream.result(), 0) == list(range(ITEMS))
        after = [server.answered for server in (servers[0], servers[2])]
    assert all(b < a for b, a in zip(before, after, strict=True))  # both remaining servers continued
    assert np.array_equal(streams[0].result()[7].dense(), place(SEGMENTS, start=7).dense())


def test_a_replica_that_is_not_serving_receives_no_new_calls_and_loses_none(start: Start) -> None:
    servers = replicas(start, "--notice-seconds", "600")
    addresses = [server.program.address for server in servers]
    with Client(addresses, timeout=30) as client:
        while not busy(servers, 0) or any(server.answered == 0 for server in servers):
            client.place(SEGMENTS)  # until all are connected
        leaving = servers[0]
        leaving.program.process.send_signal(signal.SIGTERM)

        def spared() -> bool:
            """Make ten calls, and return whether all of them went to the other servers."""
            count = leaving.answered
            for _ in range(10):
                client.place(SEGMENTS)
            return leaving.answered == count

        assert eventually(spared)
        before = [server.answered for server in servers]
        results = [client.place(SEGMENTS, start=number) for number in range(40)]
        after = [server.answered for server in servers]
    assert numbers(results, 0) == list(range(40))
    gone, *others = (a - b for a, b in zip(after, before, strict=True))
    # The rotation restarts whenever a connection changes, so the two shares may differ.
    assert (gone, sum(others), min(others) > 0) == (0, 40, True)
    leaving.program.process.send_signal(signal.SIGTERM)  # ends it at once
    assert leaving.program.process.wait(60) == 0
