"""A server under everything at once for a long time: does the memory that it holds grow?"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic, sleep
from typing import Any

import grpc
import numpy as np
import torch

from mmpos.client import AsyncClient, Client, Decode, Dense, PositionsQuery
from mmpos.errors import MmposError
from mmpos.rotary import Rotary
from mmpos.segments.table import SegmentTable
from mmpos_bench.serving.loads import ask
from mmpos_bench.serving.processes import Tell, service, started, working
from mmpos_bench.serving.questions import PHOTOGRAPHS
from mmpos_bench.workloads import workload
from mmpos_server.inference import open_inference_pb2 as pb

MOST_GROWTH = 0.02
"""Of the memory held, in the time that counts: what is less is flat."""


@dataclass(frozen=True)
class Soak:
    """The memory of a server under load, and the outcomes of its calls; memory is MiB."""

    seconds: float  # under load
    counted: float  # of them, at the end, from which the slope comes; what is before warms up
    calls: int  # actions of the clients, a stream being one
    outcomes: dict[str, int]  # how often each action had which outcome
    first: float  # in the median of the first tenth of what counts
    last: float  # likewise of the last tenth
    peak: float  # at most
    slope: float  # per hour, by least squares
    error: float  # its standard error, from the means of tenths: memory of one second resembles that of the next

    @property
    def flat(self) -> bool:
        """True where it grew by less than MOST_GROWTH in the time that counts, or by less than twice the error."""
        growth = self.slope * self.counted / 3600
        return growth <= MOST_GROWTH * self.first or self.slope <= 2 * self.error


def soak(seconds: float, malloc: str, clients: int = 2) -> Soak:
    """Load a new server for so long, and read its memory every second; the first half warms up.

    Raises:
        ServiceError: a client ended.
    """
    with started(service(malloc, "--shared-memory", "mmpos-soak-")) as (server,), working(clients) as workers:
        for seed, worker in enumerate(workers):
            worker.start(tell_outcomes, server.address, seconds, seed)
        for worker in workers:
            worker.receive()  # it has begun
        began, samples = monotonic(), []
        while (now := monotonic() - began) < seconds:
            samples.append((now, server.memory()))
            sleep(min(1.0, seconds / 40))
        outcomes: Counter[str] = Counter()
        for worker in workers:
            outcomes.update(worker.receive())
        peak = server.memory("VmHWM")
    counts = [sample for sample in samples if sample[0] >= samples[-1][0] / 2]
    grown, error = slope(counts)
    tenth = max(1, len(counts) // 10)
    return Soak(
        round(samples[-1][0], 1),
        round(counts[-1][0] - counts[0][0], 1),
        sum(outcomes.values()),
        dict(sorted(outcomes.items())),
        round(statistics.median(held for _, held in counts[:tenth]), 1),
        round(statistics.median(held for _, held in counts[-tenth:]), 1),
        round(peak, 1),
        round(3600 * grown, 1),
        round(3600 * error, 1),
    )


def slope(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit the memory that is held more after each second, and its standard error, to ten means of neighbours.

    >>> slope([(float(t), 100.0 + 2 * t) for t in range(40)])
    (2.0, 0.0)
    """
    size = max(1, len(samples) // 10)
    blocks = [np.mean(samples[i : i + size], axis=0) for i in range(0, len(samples) - size + 1, size)]
    times, held = np.array(blocks).T
    (line, _), covariance = np.polyfit(times, held, 1, cov=True)
    return round(float(line), 9), round(float(np.sqrt(covariance[0, 0])), 9)


_SEGMENTS = SegmentTable.from_documents(workload(1, 4096, 4, 24))
_QUERY = PositionsQuery(_SEGMENTS, views=[Decode(3)], dense=Dense())
_ROTARY = Rotary(head_dim=64, theta=10000.0, axes=2)


def tell_outcomes(tell: Tell, address: str, seconds: float, seed: int) -> None:
    """Do everything that clients do, also what they should not, in a random order; tell when that begins, and in the
    end how often each action had which outcome.
    """
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    with Client(address, timeout=20) as client, Client(address, timeout=20, shared_memory=2**26) as sharing:
        chance = random.Random(seed)
        actions = _actions(address, chance, client, sharing)
        tell("begun")
        end = monotonic() + seconds
        while monotonic() < end:
            name, action = chance.choice(list(actions.items()))
            outcome = "OK"
            try:
                action()
            except MmposError as error:
                outcome = type(error).__name__
            except grpc.RpcError as error:
                failed: Any = error
                outcome = failed.code().name
            outcomes[f"{name}: {outcome}"] += 1
    tell(dict(sorted(outcomes.items())))


def _actions(address: str, chance: random.Random, client: Client, sharing: Client) -> dict[str, Callable[[], object]]:
    """Name everything that clients do."""
    one_image = [["x", photo] for photo in PHOTOGRAPHS]

    def ids(caller: Client, documents: int) -> object:
        segments = SegmentTable.from_documents(workload(documents, 4096, 4, 24))
        return caller.query(PositionsQuery(segments, dense=Dense()))

    def build_broken() -> None:
        photo = chance.choice(PHOTOGRAPHS)
        cut = photo[: chance.randrange(len(photo))]
        client.build_batch([["a", cut], ["b", b"no image"], ["c", photo]], errors="return")

    def rotate(caller: Client, heads: int, dtype: torch.dtype) -> None:
        positions = client.place(_SEGMENTS)
        caller.apply_rotary(torch.ones(positions.num_tokens, heads, 64, dtype=dtype), None, positions, _ROTARY)

    def share() -> None:
        rotate(sharing, 8, torch.float32)
        sharing.build_batch(one_image)
        ids(sharing, 16)

    def raw(path: str, request: bytes) -> None:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ask(channel, path, request)

    def infer() -> None:
        request = pb.ModelInferRequest(model_name="positions")
        request.inputs.add(name="lengths", datatype="INT64", shape=[chance.randrange(1, 4)])
        request.raw_input_contents.append((4096).to_bytes(8, "little") * 2)
        raw("/inference.GRPCInferenceService/ModelInfer", request.SerializeToString())

    async def cancel() -> None:
        async with AsyncClient(address, timeout=20) as patient:
            calls = [asyncio.ensure_future(patient.build(["a", *PHOTOGRAPHS])) for _ in range(4)]
            await asyncio.sleep(chance.uniform(0, 0.01))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def stream_dropped() -> None:
        with Client(address, timeout=20) as leaving:
            for _ in islice(leaving.stream(_QUERY for _ in range(1000)), chance.randrange(1, 10)):
                pass

    return {
        "apply": lambda: rotate(client, 2, torch.bfloat16),
        "broken_bytes": lambda: raw("/mmpos.rpc.v1.PositionService/Place", b"\xff" * chance.randrange(1, 5000)),
        "build_broken": build_broken,
        "build_images": lambda: client.build_batch([["A photograph: ", photo, " at dusk"] for photo in PHOTOGRAPHS]),
        "build_text": lambda: client.build(["a bird " * chance.randrange(1, 2000)]),
        "cancel": lambda: asyncio.run(cancel()),
        "deadline": lambda: client.with_options(timeout=chance.uniform(0.0005, 0.01)).build(["a", *PHOTOGRAPHS]),
        "infer": infer,
        "info": lambda: (client.info(), client.healthy()),
        "mistake": lambda: client.place(_SEGMENTS, "no such scheme"),
        "place": lambda: client.place(_SEGMENTS, start=chance.randrange(1000)),
        "place_batch": lambda: ids(client, chance.randrange(1, 64)),
        "query_dense": lambda: client.query(_QUERY),
        "rotate": lambda: client.cos_sin(_ROTARY, client.place(_SEGMENTS)),
        "share": share,
        "stream": lambda: deque(client.stream(_QUERY for _ in range(20)), maxlen=0),
        "stream_build": lambda: deque(client.stream_build([each] for each in one_image * 2), maxlen=0),
        "stream_dropped": stream_dropped,
    }
