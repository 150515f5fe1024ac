"""Attack a server of this tree for a while, and judge it: ``make fuzz SECONDS=60 FUZZ=--help``.

Attackers in processes of their own send bytes, broken messages, frames of HTTP/2, image files and metadata, in
rounds: what a round does follows from the seed, its attack and its number, so that ``--only ATTACK:NUMBER``
does it again. Meanwhile a prober asks for health, and a polite client for positions whose answer is known. No status
may be INTERNAL or UNKNOWN, no traceback in the log, no polite answer wrong, no answer to health late, and memory,
descriptors, threads and processes of the server must be in the end what they were after a first while of attacks.
Attacks of an hour work like those of a minute; each minute a line on stderr says how it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import subprocess
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

from mmpos import Grid, SegmentTable, Text, place
from mmpos.client import AsyncClient
from mmpos.errors import MmposError

WARM, REST, SLICE = 60.0, 15.0, 60.0
"""Seconds: most of the attacks that come before those that count; most of the rest after them; between two lines."""

LAZY = 8
"""Threads that may come later: those of pools, which begin when they are first needed."""

LIMITS = {"tokens": 2**20, "response_bytes": 2**25, "pixels": 2**22}
"""Of the server, or most of the time would go to large answers; ``--defaults`` leaves it the embedded settings."""


# Attackers.


async def rounds(address: str, seed: str, names: Sequence[str], end: float, first: int) -> Tally:
    """Round after round of these attacks beside each other, until it is time; one round of each at least."""
    tally = Tally()

    async def keep(name: str) -> None:
        number = first
        while time.time() < end or number == first:
            await once(address, seed, name, number, tally)
            number += 1

    await asyncio.gather(*map(keep, names))
    return tally


async def once(address: str, seed: str, name: str, number: int, tally: Tally) -> None:
    """One round of an attack; what it opened is given up after a minute."""
    found = Tally()
    try:
        async with asyncio.timeout(60):
            await ATTACKS[name](address, random.Random(f"{seed}/{name}/{number}"), found)
    except (TimeoutError, OSError) as error:
        found.add(type(error).__name__)
    found.samples = {bad: f"{name}:{number} {sample}" for bad, sample in found.samples.items()}
    tally.merge(found)


def attacker(address: str, seed: str, names: Sequence[str], end: float, first: int) -> Tally:
    """Attack from a process of its own."""
    return asyncio.run(rounds(address, seed, names, end, first))


# Witnesses.


@dataclass
class Witness:
    """Observations of others during the attacks.

    Args:
        health: milliseconds of each answer to health; one that failed counts as infinite.
        polite: how calls with a known answer ended.
    """

    health: list[float] = field(default_factory=list)
    polite: Counter[str] = field(default_factory=Counter)

    async def probe(self, address: str) -> None:
        """Ask for health, until cancelled."""
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
        """Ask for positions whose answer is known, until cancelled."""
        segments = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
        wanted = place(segments).dense()
        async with AsyncClient(address, timeout=10) as client:
            while True:
                try:
                    found = (await client.place(segments)).dense()
                    self.polite["right" if np.array_equal(found, wanted) else "wrong"] += 1
                except MmposError as error:
                    self.polite[type(error).__name__] += 1
                await asyncio.sleep(0.05)


# The server.


@dataclass
class Server:
    """A server of this tree.

    Args:
        process: it.
        address: where it listens.
        log: what it writes.
    """

    process: subprocess.Popen[str]
    address: str
    log: Path

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process.poll() is None

    def resources(self) -> dict[str, float]:
        """MiB of memory, descriptors, threads and processes, those of its children among them."""
        found = {"MiB": 0.0, "descriptors": 0, "threads": 0, "processes": 0}
        processes = [self.process.pid]
        for process in processes:
            folder = Path(f"/proc/{process}")
            with suppress(OSError, KeyError):  # it has ended meanwhile
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                found["MiB"] += int(status["VmRSS"].split()[0]) / 1024
                found["descriptors"] += len(os.listdir(folder / "fd"))
                found["threads"] += int(status["Threads"])
                found["processes"] += 1
                for file in (folder / "task").glob("*/children"):
                    processes.extend(map(int, file.read_text().split()))
        return {**found, "MiB": round(found["MiB"], 1)}

    async def settled(self, seconds: float, most: Callable[[dict[str, float]], object] = bool) -> dict[str, float]:
        """The least of each that it holds within this time, which ends early once nothing is too much."""
        least, end = self.resources(), time.monotonic() + seconds
        while time.monotonic() < end and most(least):
            await asyncio.sleep(0.5)
            least = {name: min(least[name], value) for name, value in self.resources().items()}
        return least

    def tracebacks(self) -> list[str]:
        """Lines of its log that have one."""
        with self.log.open(errors="replace") as lines:
            return [line.strip() for line in lines if "Traceback" in line]


@contextmanager
def serving(*, defaults: bool = False, environment: dict[str, str] | None = None) -> Iterator[Server]:
    """A server in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="mmpos-fuzz-") as folder:
        path = Path(folder) / "settings.toml"
        path.write_text(
            "" if defaults else "[limits]\n" + "\n".join(f"{name} = {most}" for name, most in LIMITS.items())
        )
        command = [sys.executable, "-m", "mmpos_server", "--port", "0", "--config", str(path)]
        log = Path(folder) / "log"
        with log.open("w") as err:
            command += ["--log-level", "warning"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment)
        try:
            assert process.stdout is not None
            yield Server(process, process.stdout.readline().split()[-1], log)
        finally:
            process.kill()
            process.communicate()


def exceeding(after: dict[str, float], before: dict[str, float], memory_percent: float = 0.0) -> list[str]:
    """List what has grown, memory by more than this percentage."""
    most = {**before, "MiB": round(before["MiB"] * (1 + memory_percent / 100), 1), "threads": before["threads"] + LAZY}
    return [f"{count} {name} in the end, want <= {most[name]}" for name, count in after.items() if count > most[name]]


@dataclass
class Verdict:
    """The outcome of a whole run; ``faults`` lists what must not be.

    Args:
        tally: of the attackers.
        witness: beside them.
        before: what the server held after a first while of attacks.
        after: what it held when it was left alone.
        tracebacks: lines of its log that have one.
        alive: whether it still answers.
    """

    tally: Tally
    witness: Witness
    before: dict[str, float]
    after: dict[str, float]
    tracebacks: list[str]
    alive: bool

    def faults(self, health_ms: float, memory_percent: float) -> list[str]:
        """List what must not be, in words."""
        found = [f"{count} {bad}, first {self.tally.samples[bad]}" for bad, count in self.tally.bad.most_common()]
        if self.tracebacks:
            found.append(f"{len(self.tracebacks)} tracebacks in the log, first {self.tracebacks[0][-2000:]}")
        if not self.alive:
            found.append("the server has died")
        if wrong := self.witness.polite["wrong"]:
            found.append(f"{wrong} wrong answers")
        late = sum(milliseconds > health_ms for milliseconds in self.witness.health)
        if late:
            found.append(f"{late} of {len(self.witness.health)} answers to health after {health_ms:g} ms or never")
        return found + exceeding(self.after, self.before, memory_percent)

    def told(self) -> str:
        """The figures, a line each."""
        health = sorted(self.witness.health) or [float("nan")]
        statuses = ", ".join(f"{name} {count:,}" for name, count in self.tally.statuses.most_common())
        polite = ", ".join(f"{name} {count:,}" for name, count in self.witness.polite.most_common())
        return "\n".join(
            [
                f"requests  {self.tally.requests:,}: {statuses}",
                f"health    {len(health)} asked, median {health[len(health) // 2]:.1f} ms, worst {health[-1]:.1f} ms",
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
    defaults: bool = False,
    environment: dict[str, str] | None = None,
    number: int = 0,
    say: Callable[[str], object] = str,
) -> Verdict:
    """Attack a server for so long, and look at it afterwards.

    Args:
        seconds: how long.
        seed: what the attacks follow from.
        names: of the attacks.
        processes: of attackers; 0 is this one, in which starting up costs nothing, but which delays the witnesses.
        settle: seconds that the server has afterwards to come to rest.
        defaults: whether the server has the embedded settings.
        environment: of the server; None is that of this process.
        number: of the first round.
        say: is told each minute how it goes.
    """
    loop, witness, tally = asyncio.get_running_loop(), Witness(), Tally()
    with (
        serving(defaults=defaults, environment=environment) as server,
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
            for found in await asyncio.gather(*jobs):
                tally.merge(found)

        await attack(time.time() + min(seconds / 4, WARM), number)  # what is imported and kept once
        before = await server.settled(min(settle, REST))
        say(f"before    {before}")
        witnesses = [asyncio.create_task(one(address)) for one in (witness.probe, witness.ask)]
        began = time.time()
        while (past := time.time() - began) < seconds and server.alive:
            number, seen, asked = number + 10_000, tally.requests, len(witness.health)
            await attack(began + min(past + SLICE, seconds), number)
            took, worst = time.time() - began - past, max(witness.health[asked:], default=float("nan"))
            rate, bad = (tally.requests - seen) / took, tally.bad.total()
            say(
                f"{past + took:7.0f} s {tally.requests:10,} requests, {rate:,.0f} a second, {bad} bad; "
                f"health at worst {worst:.0f} ms; load {os.getloadavg()[0]:.1f}; {server.resources()}"
            )
        for one in witnesses:
            one.cancel()
        await asyncio.gather(*witnesses, return_exceptions=True)
        after = await server.settled(settle, lambda now: exceeding(now, before))
        async with grpc.aio.insecure_channel(address) as channel:
            last = Tally()
            await unary(channel, HEALTH, b"", last)
        alive = server.alive and set(last.statuses) == {"OK"}
        return Verdict(tally, witness, before, after, server.tracebacks(), alive)


def main() -> int:
    """Read the command line, attack, and say what came of it; 1 if something must not be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d"), help="the day, unless told")
    parser.add_argument("--only", default="", help="attacks, such as frames,idle; or one round, such as frames:17")
    parser.add_argument("--processes", type=int, default=2, help="of attackers")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds to come to rest")
    parser.add_argument("--health-ms", type=float, default=100.0, help="most of an answer to health")
    parser.add_argument("--memory-percent", type=float, default=2.0, help="most that memory grows")
    parser.add_argument("--defaults", action="store_true", help="embedded settings, and not smaller limits")
    asked = parser.parse_args()
    only, _, number = asked.only.partition(":")
    verdict = asyncio.run(
        fuzz(
            0.0 if number else asked.seconds,
            asked.seed,
            only.split(",") if only else list(ATTACKS),
            processes=1 if number else asked.processes,
            settle=asked.settle,
            defaults=asked.defaults,
            number=int(number or 0),
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    )
    faults = verdict.faults(asked.health_ms, asked.memory_percent)
    print(f"seed      {asked.seed}\n{verdict.told()}")
    for fault in faults:
        print(f"FAULT     {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
