"""Test several servers behind one client: if one of them is killed or stopped under load, no call is lost."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from server_program import Program, Start, metrics_of
from waiting import eventually, free_port

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.client import AsyncClient, Client, PositionsQuery

pytestmark = pytest.mark.slow

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
CALLS, ITEMS = 1500, 1500


def numbers(positions: list[PositionTable], first: int) -> list[int]:
    """Return the number of the query behind each answer: the ids of query ``n`` start at ``first + n``."""
    return [int(table.dense()[0, 0]) - first for table in positions]


KILLED = threading.Event()
"""Set after a server is killed; a third of the work is done before that."""


def called(client: Client, thread: int) -> list[PositionTable]:
    """Make one thread's calls in sequence."""
    results = []
    for number in range(CALLS):
        results.append(client.place(SEGMENTS, start=thread * CALLS + number))
        assert number < CALLS // 3 or KILLED.wait(60)
    return results


def queries() -> Iterator[PositionsQuery]:
    for number in range(ITEMS):
        assert number < ITEMS // 3 or KILLED.wait(60)
        yield PositionsQuery(SEGMENTS, start=number)


def streamed(client: Client) -> list[PositionTable]:
    answers: Any = client.stream(queries())
    return [answer.table for answer in answers]


async def awaited(addresses: list[str]) -> tuple[list[list[PositionTable]], list[PositionTable]]:
    """Make two sequences of calls and a stream concurrently."""

    async def calls(client: AsyncClient, worker: int) -> list[PositionTable]:
        results = []
        for number in range(CALLS // 4):
            results.append(await client.place(SEGMENTS, start=worker * CALLS + number))
            assert number < CALLS // 12 or await asyncio.to_thread(KILLED.wait, 60)
        return results

    async def awaited_queries() -> AsyncIterator[PositionsQuery]:
        for number in range(ITEMS):
            assert number < ITEMS // 3 or await asyncio.to_thread(KILLED.wait, 60)
            yield PositionsQuery(SEGMENTS, start=number)

    async def items(client: AsyncClient) -> list[PositionTable]:
        answers: Any = client.stream(awaited_queries())
        return [answer.table async for answer in answers]

    async with AsyncClient(addresses, timeout=60) as client:
        first, second, stream = await asyncio.gather(calls(client, 0), calls(client, 1), items(client))
    return [first, second], stream


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
    with ThreadPoolExecutor(8) as threads:
        with Client(addresses, timeout=60) as client:
            calls = [threads.submit(called, client, thread) for thread in range(3)]
            stream = threads.submit(streamed, client)
            other = threads.submit(lambda: asyncio.run(awaited(addresses)))
            assert busy(servers, 100)
            servers[1].program.process.kill()
            before = [server.answered for server in (servers[0], servers[2])]
            KILLED.set()
            for thread, call in enumerate(calls):
                assert numbers(call.result(), thread * CALLS) == list(range(CALLS))
            assert numbers(stream.result(), 0) == list(range(ITEMS))
            several, awaited_stream = other.result()
        for worker, tables in enumerate(several):
            assert numbers(tables, worker * CALLS) == list(range(CALLS // 4))
        assert numbers(awaited_stream, 0) == list(range(ITEMS))
        after = [server.answered for server in (servers[0], servers[2])]
        assert all(b < a for b, a in zip(before, after, strict=True))  # both remaining servers continued
        assert np.array_equal(stream.result()[7].dense(), place(SEGMENTS, start=7).dense())


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
