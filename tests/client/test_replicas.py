"""Test several servers behind one client: if one of them is killed under load, no call is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from clients import open_client
from server_program import Start, metrics_of
from waiting import eventually, free_port

from mmpos import Grid, PositionTable, SegmentTable, Text, place

pytestmark = pytest.mark.slow

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]])
CALLS = 1000


def numbers(positions: list[PositionTable], first: int) -> list[int]:
    """Return the number of the query behind each answer: the ids of query ``n`` start at ``first + n``."""
    return [int(table.dense()[0, 0]) - first for table in positions]


KILLED = threading.Event()
"""Set after a server is killed; a third of the work is done before that."""


def called(kind: str, address: str, thread: int) -> list[PositionTable]:
    """Make one thread's calls in sequence."""
    results = []
    with open_client(kind, address, timeout=60) as client:
        for number in range(CALLS):
            results.append(client.place(SEGMENTS, start=thread * CALLS + number))
            assert number < CALLS // 3 or KILLED.wait(60)
    return results


def answered(metrics_port: int) -> float:
    """Return the number of answers of a server so far."""
    return sum(n for name, n in metrics_of(metrics_port).items() if name.startswith("mmpos_requests_total"))


def test_killing_a_replica_loses_no_call(start: Start) -> None:
    KILLED.clear()
    ports = [free_port() for _ in range(3)]
    servers = [start("--metrics", f"127.0.0.1:{port}") for port in ports]
    address = f"ipv4:{','.join(server.address for server in servers)}"
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(called, kind, address, n) for n, kind in enumerate(("sync", "async") * 2)]
        assert eventually(lambda: all(answered(port) >= 100 for port in ports))
        servers[1].process.kill()
        before = [answered(port) for port in (ports[0], ports[2])]
        KILLED.set()
        for thread, call in enumerate(calls):
            assert numbers(call.result(), thread * CALLS) == list(range(CALLS))
        after = [answered(port) for port in (ports[0], ports[2])]
    assert all(b < a for b, a in zip(before, after, strict=True))  # both remaining servers continued
    assert np.array_equal(calls[0].result()[7].dense(), place(SEGMENTS, start=7).dense())
