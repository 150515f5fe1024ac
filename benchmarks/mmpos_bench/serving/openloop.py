"""An open-loop client process: calls are sent at times fixed beforehand, however long the answers to others take.

python -m mmpos_bench.serving.openloop
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import grpc

from mmpos.errors import ServiceError
from mmpos_bench.serving.orders import OPTIONS

__all__ = ["Arrivals", "Sent", "send"]


@dataclass(frozen=True)
class Arrivals:
    """Calls to send, and when.

    Args:
        address: HOST:PORT.
        path: of the method.
        request: what to send.
        rate: calls per second, at random times of a Poisson process.
        seconds: how long.
        warm_up: seconds at the beginning whose calls do not count.
        core: that this process keeps to; None is any.
        connections: over which calls take turns.
    """

    address: str
    path: str
    request: bytes
    rate: float
    seconds: float
    warm_up: float
    core: int | None
    connections: int = 4


@dataclass(frozen=True)
class Sent:
    """One call: name of its status, and seconds from the time at which it was due to its end."""

    status: str
    seconds: float


def send(arrivals: Arrivals) -> list[Sent]:
    """Send the calls from a process of its own.

    Raises:
        ServiceError: it failed, and has said why on stderr.
    """
    words = [sys.executable, "-m", "mmpos_bench.serving.openloop"]
    done = subprocess.run(words, input=pickle.dumps(arrivals), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ServiceError(f"client process: got exit code {done.returncode}, want what it sent")
    sent: list[Sent] = pickle.loads(done.stdout)
    return sent


async def _send(arrivals: Arrivals) -> list[Sent]:
    # Connections of its own each: a process that finds one open to the same address would share it.
    options = [*OPTIONS, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    channels = [grpc.aio.insecure_channel(arrivals.address, options=options) for _ in range(arrivals.connections)]
    calls: list[Any] = [channel.unary_unary(arrivals.path) for channel in channels]
    sent: list[Sent] = []

    async def one(number: int, due: float, counts: bool) -> None:
        status = "OK"
        try:
            await calls[number % len(calls)](arrivals.request, timeout=30, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        if counts:
            sent.append(Sent(status, perf_counter() - due))

    for number in range(len(calls)):
        await one(number, perf_counter(), counts=False)
    tasks: set[asyncio.Task[None]] = set()
    chance = random.Random(0)
    begin = due = perf_counter()
    while (due := due + chance.expovariate(arrivals.rate)) < begin + arrivals.seconds:
        if (wait := due - perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(len(tasks), due, due - begin >= arrivals.warm_up))
        tasks.add(task)
    await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return sent


def _main() -> None:
    arrivals: Arrivals = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    if arrivals.core is not None:
        os.sched_setaffinity(0, {arrivals.core})
    pickle.dump(asyncio.run(_send(arrivals)), answers)
    answers.flush()


if __name__ == "__main__":
    # Its classes are those of the module that is imported, which the other process knows.
    from mmpos_bench.serving import openloop

    openloop._main()
