"""Attack a server run from this tree for a while, and judge it: ``make fuzz SECONDS=60 FUZZ=--help``.

Attackers in separate processes send bytes, malformed messages, HTTP/2 frames, image files and metadata, in rounds. A
round depends only on the seed, the attack's name and the round's number, so that ``--only ATTACK:NUMBER`` repeats it.
Meanwhile, one client polls the health service, and another requests positions whose values are known. The run fails if
a status is INTERNAL or UNKNOWN, the log contains a traceback, a known answer is wrong, or a health check is answered
late. The server's memory, descriptors, threads and processes must return to the values that they had after a first
period of attacks. Attacks can last a minute or an hour; a line on stderr reports the progress every minute.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from attacks import ATTACKS, HEALTH, Tally, unary
from server_program import Program

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import AsyncClient
from mmpos.errors import MmposError

WARM, REST, SLICE = 60.0, 15.0, 60.0
"""Limits in seconds on the attacks before the measured ones, on the pause after these, and on the attacks between two
progress lines.
"""

LAZY = 8
"""Threads that may start later: pools create theirs on demand."""

LIMITS = {"tokens": 2**20, "response_bytes": 2**25, "pixels": 2**22}
"""Limits of the server, without which large answers would take most of the time."""

HEALTH_MS, MEMORY_PERCENT = 100.0, 2.0
"""Limits on the latency of a health check and on memory growth."""


# Attackers.


async def rounds(address: str, seed: str, names: Sequence[str], end: float, first: int) -> Tally:
    """Run rounds of these attacks concurrently until the deadline, with at least one round of each attack."""
    tally = Tally()

    async def repeat(name: str) -> None:
        number = first
        while time.time() < end or number == first:
            await run_round(address, seed, name, number, tally)
            number += 1

    await asyncio.gather(*map(repeat, names))
    return tally


async def run_round(address: str, seed: str, name: str, number: int, tally: Tally) -> None:
    """Run one round of an attack for at most a minute."""
    own = Tally()
    try:
        async with asyncio.timeout(60):
            await ATTACKS[name](address, random.Random(f"{seed}/{name}/{number}"), own)
    except (TimeoutError, OSError) as error:
        own.add(type(error).__name__)
    own.samples = {bad: f"{name}:{number} {sample}" for bad, sample in own.samples.items()}
    tally.merge(own)


def attacker(address: str, seed: str, names: Sequence[str], end: float, first: int) -> Tally:
    """Attack from a separate process."""
    return asyncio.run(rounds(address, seed, names, end, first))


# Witnesses.


@dataclass
class Witness:
    """Observations of well-behaved clients during the attacks.

    Args:
        health: latency of each health check in milliseconds; infinite for a failed check.
        polite: outcomes of calls whose answer is known.
    """

    health: list[float] = field(default_factory=list)
    polite: Counter[str] = field(default_factory=Counter)

    async def probe(self, address: str) -> None:
        """Poll the health service until cancelled."""
        async with grpc.aio.insecure_channel(address) as channel:
            check: Any = channel.unary_unary(HEALTH)
            while True:
                began = time.perf_counter()
                try:
                    await check(b"", timeout=10, wait_for_ready=True)
                    self.health.append(1000 * (time.perf_counter() - began))
                except grpc.aio.AioRpcError:
                    self.health.append(float("inf"))
                await asyncio.sleep(0.05)

    async def ask(self, address: str) -> None:
        """Request positions whose values are known, until cancelled."""
        segments = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
        wanted = place(segments).dense()
        async with AsyncClient(address, timeout=10) as client:
            while True:
                try:
                    answer = (await client.place(segments)).dense()
                    self.polite["right" if np.array_equal(answer, wanted) else "wrong"] += 1
                except MmposError as error:
                    self.polite[type(error).__name__] += 1
                await asyncio.sleep(0.05)


# The server.


class Server(Program):
    """A server run from this tree in a separate process."""

    @property
    def alive(self) -> bool:
        """Whether the server's process is running."""
        return self.process.poll() is None

    def resources(self) -> dict[str, float]:
        """Return the memory in MiB, and the number of descriptors, threads and processes, including children."""
        totals = {"MiB": 0.0, "descriptors": 0, "threads": 0, "processes": 0}
        processes = [self.process.pid]
        for process in processes:
            folder = Path(f"/proc/{process}")
            with suppress(OSError, KeyError):  # the process has exited in the meantime
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                totals["MiB"] += int(status["VmRSS"].split()[0]) / 1024
                totals["descriptors"] += len(os.listdir(folder / "fd"))
                totals["threads"] += int(status["Threads"])
                totals["processes"] += 1
                for file in (folder / "task").glob("*/children"):
                    processes.extend(map(int, file.read_text().split()))
        return {**totals, "MiB": round(totals["MiB"], 1)}

    async def settled(self, seconds: float, exceeds: Callable[[dict[str, float]], object] = bool) -> dict[str, float]:
        """Return each resource's lowest value within this time; return early once ``exceeds`` finds nothing."""
        least, end = self.resources(), time.monotonic() + seconds
        while time.monotonic() < end and exceeds(least):
            await asyncio.sleep(0.5)
            least = {name: min(least[name], value) for name, value in self.resources().items()}
        return least

    def tracebacks(self) -> list[str]:
        """Return the lines of the server's log that contain a traceback."""
        with self.log.open(errors="replace") as lines:
            return [line.strip() for line in lines if "Traceback" in line]


@contextmanager
def serving(environment: dict[str, str] | None) -> Iterator[Server]:
    """Run a server in a separate process."""
    with tempfile.TemporaryDirectory(prefix="mmpos-fuzz-") as folder:
        limits = f"from mmpos_server.config import Limits, ServerConfig\nServerConfig.limits = Limits(**{LIMITS})"
        server = Server.launch(Path(folder) / "log", environment=environment, before=limits)
        try:
            yield server
        finally:
            server.kill()


def exceeding(after: dict[str, float], before: dict[str, float], memory_percent: float = 0.0) -> list[str]:
    """List the resources that have grown, including memory only if it grew by more than this percentage."""
    limits = {
        **before,
        "MiB": round(before["MiB"] * (1 + memory_percent / 100), 1),
        "threads": before["threads"] + LAZY,
    }
    return [
        f"{count} {name} at the end, want <= {limits[name]}" for name, count in after.items() if count > limits[name]
    ]


@dataclass
class Verdict:
    """The outcome of a whole run.

    Args:
        tally: the attackers' requests.
        witness: observations of the well-behaved clients.
        before: the server's resources after a first period of attacks.
        after: the server's resources after it has come to rest.
        tracebacks: lines of the server's log that contain a traceback.
        alive: whether the server still answers.
    """

    tally: Tally
    witness: Witness
    before: dict[str, float]
    after: dict[str, float]
    tracebacks: list[str]
    alive: bool

    def faults(self, health_ms: float, memory_percent: float) -> list[str]:
        """Describe everything that makes the run fail."""
        faults = [f"{count} {bad}, first {self.tally.samples[bad]}" for bad, count in self.tally.bad.most_common()]
        if self.tracebacks:
            faults.append(f"{len(self.tracebacks)} tracebacks in the log, first {self.tracebacks[0][-2000:]}")
        if not self.alive:
            faults.append("the server has died")
        if wrong := self.witness.polite["wrong"]:
            faults.append(f"{wrong} wrong answers")
        late = sum(milliseconds > health_ms for milliseconds in self.witness.health)
        if late:
            faults.append(f"{late} of {len(self.witness.health)} answers to health after {health_ms:g} ms or never")
        return faults + exceeding(self.after, self.before, memory_percent)

    def report(self) -> str:
        """Return the run's figures, one per line."""
        health = sorted(self.witness.health) or [float("nan")]
        statuses = ", ".join(f"{name} {count:,}" for name, count in self.tally.statuses.most_common())
        polite = ", ".join(f"{name} {count:,}" for name, count in self.witness.polite.most_common())
        return "\n".join(
            [
                f"requests  {self.tally.requests:,}: {statuses}",
                f"health    {len(health)} answers, median {health[len(health) // 2]:.1f} ms, worst {health[-1]:.1f} ms",
                f"polite    {polite}",
                f"before    {self.before}",
                f"after     {self.after}",
                f"log       {len(self.tracebacks)} tracebacks",
            ]
        )


async def fuzz(
    seconds: float,
    seed: str,
    names: Sequence[str],
    *,
    processes: int,
    settle: float,
    environment: dict[str, str] | None = None,
    number: int = 0,
    log: Callable[[str], object] = str,
) -> Verdict:
    """Attack a server for ``seconds``, and measure it afterwards.

    Args:
        seconds: duration of the attacks.
        seed: seed for the attacks.
        names: names of the attacks to run.
        processes: number of attacker processes; 0 attacks from this process, which starts faster but delays the
            witnesses.
        settle: seconds that the server is given to come to rest afterwards.
        environment: the server's environment; None for this process's environment.
        number: number of the first round.
        log: callback that receives a progress line every minute.
    """
    loop, witness, tally = asyncio.get_running_loop(), Witness(), Tally()
    with (
        serving(environment) as server,
        ProcessPoolExecutor(processes or 1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        address = server.address

        async def attack(end: float, first: int) -> None:
            if not processes:
                tally.merge(await rounds(address, seed, names, end, first))
            jobs = (
                loop.run_in_executor(pool, attacker, address, seed, names, end, first + 1_000_000 * i)
                for i in range(processes)
            )
            for result in await asyncio.gather(*jobs):
                tally.merge(result)

        await attack(time.time() + min(seconds / 4, WARM), number)  # imports and caches
        before = await server.settled(min(settle, REST))
        log(f"before    {before}")
        witnesses = [asyncio.create_task(watch(address)) for watch in (witness.probe, witness.ask)]
        began = time.time()
        while (past := time.time() - began) < seconds and server.alive:
            number, requests, answers = number + 10_000, tally.requests, len(witness.health)
            await attack(began + min(past + SLICE, seconds), number)
            took, worst = time.time() - began - past, max(witness.health[answers:], default=float("nan"))
            rate, bad = (tally.requests - requests) / took, tally.bad.total()
            log(
                f"{past + took:7.0f} s {tally.requests:10,} requests, {rate:,.0f} a second, {bad} bad; "
                f"worst health {worst:.0f} ms; load {os.getloadavg()[0]:.1f}; {server.resources()}"
            )
        for task in witnesses:
            task.cancel()
        await asyncio.gather(*witnesses, return_exceptions=True)
        after = await server.settled(settle, lambda now: exceeding(now, before))
        async with grpc.aio.insecure_channel(address) as channel:
            last = Tally()
            await unary(channel, HEALTH, b"", last)
        alive = server.alive and set(last.statuses) == {"OK"}
        return Verdict(tally, witness, before, after, server.tracebacks(), alive)


def main() -> int:
    """Parse the command line, attack and print the verdict; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d"), help="seed of the attacks; default: today's date")
    parser.add_argument(
        "--only", default="", help="names of attacks, such as frames,idle, or one round, such as frames:17"
    )
    options = parser.parse_args()
    only, _, number = options.only.partition(":")
    verdict = asyncio.run(
        fuzz(
            0.0 if number else options.seconds,
            options.seed,
            only.split(",") if only else list(ATTACKS),
            processes=1 if number else 2,
            settle=60.0,
            number=int(number or 0),
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    faults = verdict.faults(HEALTH_MS, MEMORY_PERCENT)
    print(f"seed      {options.seed}\n{verdict.report()}")
    for fault in faults:
        print(f"FAULT     {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
