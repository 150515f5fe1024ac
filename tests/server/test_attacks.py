"""Attack a server and watch it: ``make fuzz SECONDS=60``.

Attackers in separate processes send malformed messages, streams and metadata. Meanwhile, one client polls the health
service, and asks for positions whose values are known. No status is INTERNAL or UNKNOWN, no traceback is logged, no
known answer is wrong, and the server's descriptors, threads and processes return almost to the numbers that they had
after a first period of attacks. If ``--attack-seconds`` is a minute or more, no answer to a health check may be late
and memory may hardly grow, which a short run cannot tell.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from attacks import ATTACKS, attacked
from server_program import Program
from serving import serving
from waiting import descendants, eventually

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import Client

pytestmark = pytest.mark.slow

PROCESSES, LAZY, HEALTH_MS = 2, 8, 100.0
"""Attacking processes, the threads and descriptors of which gRPC may open more on demand, and the limit of a check."""

LIMITED = """
from mmpos_server.config import Limits, ServerConfig
ServerConfig.limits = Limits(tokens=2**20, response_bytes=2**25, pixels=2**22)
"""
"""Limits of the server, without which large answers would take most of the time."""


def watch(address: str, over: threading.Event) -> list[float]:
    """Check the server's health and ask for known positions, and return the milliseconds of each check."""
    segments = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
    wanted, health = place(segments).dense().tolist(), []
    with Client(address, timeout=300) as client:
        while not over.wait(0.05):
            began = time.perf_counter()
            assert client.healthy()
            health.append(1000 * (time.perf_counter() - began))
            assert client.place(segments).dense().tolist() == wanted
    return health


def resources(pid: int) -> Counter[str]:
    """Return the memory in MiB, and the number of descriptors, threads and processes, including children."""
    totals = Counter[str]()
    for process in (pid, *descendants(pid)):
        folder = Path(f"/proc/{process}")
        with suppress(OSError, KeyError):  # the process has exited in the meantime
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            totals["MiB"] += int(status["VmRSS"].split()[0]) // 1024
            totals["descriptors"] += len(os.listdir(folder / "fd"))
            totals["threads"] += int(status["Threads"])
            totals["processes"] += 1
    return totals


def rested(pid: int, seconds: float, most: Counter[str] | None = None) -> Counter[str]:
    """Return each resource's lowest value within this time, or as soon as none exceeds ``most``."""
    least, end = resources(pid), time.monotonic() + seconds
    while time.monotonic() < end and (most is None or least - most):
        time.sleep(0.5)
        least &= resources(pid)
    return least


def test_a_server_withstands_attacks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds, seed, only = (request.config.getoption(f"--attack-{name}") for name in ("seconds", "seed", "only"))
    names, _, number = only.partition(":")
    chosen, first = names.split(",") if names else list(ATTACKS), int(number or 0)
    statuses, bad, over = Counter[str](), list[str](), threading.Event()
    server = Program.launch(tmp_path / "log", before=LIMITED)
    pid = server.process.pid
    spawning = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(PROCESSES, mp_context=spawning) as pool, ThreadPoolExecutor(1) as threads:

            def attack(seconds: float, first: int) -> None:
                arguments = server.address, seed, chosen, time.time() + seconds
                jobs = [pool.submit(attacked, *arguments, first + 1_000_000 * process) for process in range(PROCESSES)]
                for job in jobs:
                    statuses.update(job.result()[0])
                    bad.extend(job.result()[1])

            attack(min(seconds / 4, 60.0), first)  # imports and caches
            before = rested(pid, min(seconds / 2, 15.0))
            watching = threads.submit(watch, server.address, over)
            attack(seconds, first + 10_000)
            over.set()
            health = watching.result()
        # Caches and arenas still fill during the first seconds.
        most = before + Counter(threads=LAZY, descriptors=LAZY, MiB=10 if seconds >= 60 else 400)
        grown = rested(pid, 60.0, most) - most
        assert server.process.poll() is None, "the server has died"
    finally:
        over.set()
        server.kill()
    print(f"seed {seed}: {statuses.total():,} requests, {dict(statuses)}")
    assert statuses.total() > 0
    assert bad == []
    assert "Traceback" not in server.log.read_text(errors="replace")
    assert grown == {}
    assert health
    assert seconds < 60 or [milliseconds for milliseconds in health if milliseconds > HEALTH_MS] == []


def test_attacks_leave_no_slot_taken() -> None:
    with serving(options={"methods": None}) as server:
        statuses, bad = attacked(server.address, "slots", list(ATTACKS), time.time() + 3, 0)
        assert statuses.keys() >= {"OK", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
        assert bad == []
        assert eventually(lambda: not server.taken()), server.taken()
        assert eventually(lambda: server.metric("in_flight") == server.metric("streams") == 0)
