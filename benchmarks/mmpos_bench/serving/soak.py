"""A server under everything at once for a long time: does the memory that it holds grow?

python -m mmpos_bench.serving.soak ADDRESS SECONDS SEED    a client that does everything that clients do, also what
they should not, for so long, and prints how often each call had which outcome, as JSON
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc
import numpy as np
import torch

import mmpos
from mmpos.client import AsyncClient, Client
from mmpos.errors import MmposError, ServiceError
from mmpos.rotary import Rotary
from mmpos.rpc.queries import Decode, Dense, PositionsQuery
from mmpos.segments.table import SegmentTable
from mmpos_bench.serving.overload import memory
from mmpos_bench.serving.processes import service, started
from mmpos_bench.workloads import workload
from mmpos_server.inference import open_inference_pb2 as pb

MOST_GROWTH = 0.02
"""Of the memory held, in the time that counts: what is less is flat."""


@dataclass(frozen=True)
class Soak:
    """The memory of a server under load, and what its clients did.

    Args:
        seconds: under load.
        counted: of them, at the end, from which the slope comes; what is before warms up.
        calls: actions of the clients, a stream being one.
        outcomes: how often each action had which outcome.
        first: MiB in the median of the first tenth of what counts.
        last: likewise of the last tenth.
        peak: MiB at most.
        slope: MiB per hour, by least squares.
        error: its standard error, from the means of tenths: memory of one second resembles that of the next.
    """

    seconds: float
    counted: float
    calls: int
    outcomes: dict[str, int]
    first: float
    last: float
    peak: float
    slope: float
    error: float

    @property
    def flat(self) -> bool:
        """True where it grew by less than MOST_GROWTH in the time that counts, or by less than twice the error."""
        growth = self.slope * self.counted / 3600
        return growth <= MOST_GROWTH * self.first or self.slope <= 2 * self.error


def soak(seconds: float, malloc: str, clients: int = 2) -> Soak:
    """Load a new server for so long, and read its memory every second; the first half warms up.

    Raises:
        ServiceError: the server or a client ended.
    """
    with started(service(malloc, "--shared-memory", "mmpos-soak-")) as (server,):
        words = [sys.executable, "-m", "mmpos_bench.serving.soak", server.address, str(seconds)]
        running = [subprocess.Popen([*words, str(i)], stdout=subprocess.PIPE, text=True) for i in range(clients)]
        began, samples = monotonic(), []
        step = min(1.0, seconds / 40)
        while any(client.poll() is None for client in running):
            samples.append((monotonic() - began, memory(server.pid)))
            sleep(step)
        outcomes: Counter[str] = Counter()
        for client in running:
            said, _ = client.communicate()
            if client.returncode:
                raise ServiceError(f"client: got exit code {client.returncode}, want 0")
            outcomes.update(json.loads(said))
        peak = memory(server.pid, "VmHWM")
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


_PHOTOS = [path.read_bytes() for path in sorted((Path(mmpos.__file__).parent / "photos").glob("*.jpg"))]
_SEGMENTS = SegmentTable.from_documents(workload(1, 4096, 4, 24))
_QUERY = PositionsQuery(_SEGMENTS, views=[Decode(3)], dense=Dense())
_ROTARY = Rotary(head_dim=64, theta=10000.0, axes=2)


class MixedClient:
    """A client that calls everything, in a random order.

    Args:
        address: of the server.
        seed: of the chances.
    """

    def __init__(self, address: str, seed: int) -> None:
        self._address, self._chance = address, random.Random(seed)
        self._client = Client(address, timeout=20)
        self._sharing = Client(address, timeout=20, shared_memory=2**26)
        self.outcomes: Counter[str] = Counter()

    def run(self, seconds: float) -> None:
        """Do one after the other, by chance."""
        actions = [getattr(self, name) for name in sorted(vars(MixedClient)) if name.startswith("do_")]
        end = monotonic() + seconds
        while monotonic() < end:
            self._do(self._chance.choice(actions))
        self._client.close()
        self._sharing.close()

    def _do(self, action: Callable[[], object]) -> None:
        name = action.__name__.removeprefix("do_")
        try:
            action()
        except MmposError as error:
            self.outcomes[f"{name}: {type(error).__name__}"] += 1
        except grpc.RpcError as error:
            failed: Any = error
            self.outcomes[f"{name}: {failed.code().name}"] += 1
        else:
            self.outcomes[f"{name}: OK"] += 1

    def do_place(self) -> None:
        """A small call."""
        self._client.place(_SEGMENTS, start=self._chance.randrange(1000))

    def do_query_dense(self) -> None:
        """Ids instead of a table."""
        self._client.query(_QUERY)

    def do_place_batch(self) -> None:
        """A call that needs a thread."""
        documents = self._chance.randrange(1, 64)
        self._client.query(PositionsQuery(SegmentTable.from_documents(workload(documents, 4096, 4, 24)), dense=Dense()))

    def do_build_text(self) -> None:
        """Text alone."""
        self._client.build(["a bird " * self._chance.randrange(1, 2000)])

    def do_build_images(self) -> None:
        """Photographs and pixels."""
        self._client.build_batch([["A photograph: ", photo, " at dusk"] for photo in _PHOTOS])

    def do_build_broken(self) -> None:
        """Images that are cut or none."""
        photo = self._chance.choice(_PHOTOS)
        cut = photo[: self._chance.randrange(len(photo))]
        self._client.build_batch([["a", cut], ["b", b"no image"], ["c", photo]], errors="return")

    def do_mistake(self) -> None:
        """A request that is refused."""
        self._client.place(_SEGMENTS, "no such scheme")

    def do_broken_bytes(self) -> None:
        """Bytes that are no message, on a connection of their own."""
        with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            ask: Any = channel.unary_unary("/mmpos.rpc.v1.PositionService/Place")
            ask(b"\xff" * self._chance.randrange(1, 5000), timeout=20)

    def do_rotate(self) -> None:
        """cos and sin, and a rotation."""
        self._client.cos_sin(_ROTARY, self._positions())

    def do_apply(self) -> None:
        """q and k there and back."""
        positions = self._positions()
        q = torch.ones(positions.num_tokens, 2, 64, dtype=torch.bfloat16)
        self._client.apply_rotary(q, None, positions, _ROTARY)

    def do_share(self) -> None:
        """The same in shared memory, and pixels and ids."""
        positions = self._positions()
        self._sharing.apply_rotary(torch.ones(positions.num_tokens, 8, 64), None, positions, _ROTARY)
        self._sharing.build_batch([["A photograph: ", photo] for photo in _PHOTOS])
        self._sharing.query(PositionsQuery(SegmentTable.from_documents(workload(16, 4096, 4, 24)), dense=Dense()))

    def do_infer(self) -> None:
        """The Open Inference Protocol: an answer, or a mistake."""
        request = pb.ModelInferRequest(model_name="positions")
        request.inputs.add(name="lengths", datatype="INT64", shape=[self._chance.randrange(1, 4)])
        request.raw_input_contents.append((4096).to_bytes(8, "little") * 2)
        with grpc.insecure_channel(self._address) as channel:
            ask: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            ask(request.SerializeToString(), timeout=20)

    def do_info(self) -> None:
        """The description of the server, and its health."""
        self._client.info()
        self._client.healthy()

    def do_deadline(self) -> None:
        """A call that has no time."""
        self._client.with_options(timeout=self._chance.uniform(0.0005, 0.01)).build(["a", *_PHOTOS])

    def do_cancel(self) -> None:
        """Calls that are given up under way."""
        asyncio.run(self._cancelled())

    def do_stream(self) -> None:
        """A stream to its end."""
        for _ in self._client.stream(_QUERY for _ in range(20)):
            pass

    def do_stream_build(self) -> None:
        """A stream of batches with photographs."""
        for _ in self._client.stream_build([["x", photo]] for photo in _PHOTOS * 2):
            pass

    def do_stream_dropped(self) -> None:
        """A stream that is left, and the connection with it."""
        with Client(self._address, timeout=20) as client:
            for _ in islice(client.stream(_QUERY for _ in range(1000)), self._chance.randrange(1, 10)):
                pass

    def _positions(self) -> Any:
        return self._client.place(_SEGMENTS)

    async def _cancelled(self) -> None:
        async with AsyncClient(self._address, timeout=20) as client:
            calls = [asyncio.ensure_future(client.build(["a", *_PHOTOS])) for _ in range(4)]
            await asyncio.sleep(self._chance.uniform(0, 0.01))
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    client = MixedClient(sys.argv[1], int(sys.argv[3]))
    client.run(float(sys.argv[2]))
    print(json.dumps(dict(sorted(client.outcomes.items()))))
