"""Attack a server and watch it: ``make fuzz SECONDS=60``.

Attackers in separate processes send malformed messages, streams and metadata. Meanwhile, one
client polls the health service, and another asks for positions whose values are known. No status is INTERNAL or
UNKNOWN, no traceback is logged, no known answer is wrong, and the server's descriptors, threads and processes return
almost to the numbers that they had after a first period of attacks. If ``--attack-seconds`` is a
minute or more, no answer to a health check may be late and memory may hardly grow, which a short run cannot tell.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attacks import ATTACKS, HEALTH, Tally, attacker, rounds
from server_program import Program
from serving import serving
from waiting import descendants, eventually, without_torch

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import AsyncClient

pytestmark = pytest.mark.slow

PROCESSES, LAZY = 2, 8
"""Attacking processes, and the threads and descriptors of which gRPC may open more on demand."""

LIMITED = """
from mmpos_server.config import Limits, ServerConfig
ServerConfig.limits = Limits(tokens=2**20, response_bytes=2**25, pixels=2**22)
"""
"""Limits of the server, without which large answers would take most of the time."""

HEALTH_MS = 100.0


@dataclass
class Witness:
    """What well-behaved clients see: the milliseconds of each health check, and the outcomes of calls."""

    health: list[float] = field(default_factory=list)
    polite: Counter[str] = field(default_factory=Counter)

    async def watch(self, address: str) -> None:
        """Check the server's health and ask for known positions until cancelled."""
        segments = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
        wanted = place(segments).dense()
        async with grpc.aio.insecure_channel(address) as channel, AsyncClient(address, timeout=300) as client:
            check: Any = channel.unary_unary(HEALTH)
            while True:
                began = time.perf_counter()
                await check(b"", timeout=300, wait_for_ready=True)
                self.health.append(1000 * (time.perf_counter() - began))
                right = np.array_equal((await client.place(segments)).dense(), wanted)
                self.polite["right" if right else "wrong"] += 1
                await asyncio.sleep(0.05)


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


async def rested(pid: int, seconds: float, most: Counter[str] | None = None) -> Counter[str]:
    """Return each resource's lowest value within this time, or as soon as none exceeds ``most``."""
    least, end = resources(pid), time.monotonic() + seconds
    while time.monotonic() < end and (most is None or least - most):
        await asyncio.sleep(0.5)
        least &= resources(pid)
    return least


async def attack(
    address: str, pid: int, seconds: float, seed: str, only: str, more_mib: int
) -> tuple[Tally, Witness, Counter[str]]:
    """Attack a server, and return the statuses, what others saw, and by how much its resources exceed their limits."""
    names, _, number = only.partition(":")
    chosen, first = names.split(",") if names else list(ATTACKS), int(number or 0)
    tally, witness, loop = Tally(), Witness(), asyncio.get_running_loop()
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:

        async def attacked(seconds: float, first: int) -> None:
            arguments = address, seed, chosen, time.time() + seconds
            numbers = (first + 1_000_000 * process for process in range(PROCESSES))
            jobs = (loop.run_in_executor(pool, attacker, *arguments, number) for number in numbers)
            for result in await asyncio.gather(*jobs):
                tally.merge(result)

        await attacked(min(seconds / 4, 60.0), first)  # imports and caches
        before = await rested(pid, min(seconds / 2, 15.0))
        watching = asyncio.create_task(witness.watch(address))
        await attacked(seconds, first + 10_000)
        while not (witness.polite or watching.done()):  # on a busy machine, it begins late
            await asyncio.sleep(0.05)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    most = before + Counter(threads=LAZY, descriptors=LAZY, MiB=more_mib)
    return tally, witness, await rested(pid, 60.0, most) - most


def test_a_server_withstands_attacks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds, seed, only = (request.config.getoption(f"--attack-{name}") for name in ("seconds", "seed", "only"))
    long = seconds >= 60
    server = Program.launch(tmp_path / "log", environment=without_torch(tmp_path), before=LIMITED)
    try:
        more_mib = 10 if long else 400  # caches and arenas still fill during the first seconds
        attacking = attack(server.address, server.process.pid, seconds, seed, only, more_mib)
        tally, witness, grown = asyncio.run(attacking)
        assert server.process.poll() is None, "the server has died"
    finally:
        server.kill()
    late = [milliseconds for milliseconds in witness.health if milliseconds > HEALTH_MS]
    print(f"seed {seed}: {tally.statuses.total():,} requests, {dict(tally.statuses)}")
    assert tally.bad == {}
    assert "Traceback" not in server.log.read_text(errors="replace")
    assert grown == {}
    assert (witness.polite["wrong"], witness.polite["right"] > 0) == (0, True)
    assert not long or late == []


def test_attacks_leave_no_slot_taken() -> None:
    with serving(options={"methods": None}) as server:
        tally = asyncio.run(rounds(server.address, "slots", list(ATTACKS), time.time() + 3, 0))
        assert tally.statuses.keys() >= {"OK", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
        assert tally.bad == {}
        assert eventually(lambda: not server.taken()), server.taken()
        assert eventually(lambda: server.metric("in_flight") == server.metric("streams") == 0)
