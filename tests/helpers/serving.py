"""A server in this process whose only method, Place with its stream, does what the query's profile name says."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from http2 import Connection

from mmpos.errors import LimitExceededError, UnsupportedError
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server.app import Server
from mmpos_server.arrivals import Places
from mmpos_server.call import Call
from mmpos_server.config import load
from mmpos_server.logs import Logs
from mmpos_server.services import place_method
from mmpos_server.testing import started

PLACE, STREAM = (f"/mmpos.rpc.v1.PositionService/{name}" for name in ("Place", "StreamPlace"))
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LARGE = 2 * 2**20
"""Size of a large answer in bytes, or slightly more."""


class Fake:
    """The server's method, whose events report its progress."""

    def __init__(self) -> None:
        self.begun, self.stopped, self.go = threading.Event(), threading.Event(), threading.Event()
        self.names: list[str] = []
        self.over = 0

    async def run(self, query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
        """Run the action named by the first word of the profile."""
        name, _, rest = query.profile.partition(" ")
        self.names.append(query.profile)
        try:
            await getattr(self, name or "nothing")(rest, answer, call)
        finally:
            self.over += 1

    async def echo(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer with a number."""
        answer.cu_seqlens.append(int(rest or 0))
        call.counts = {"documents": 1, "tokens": 2, "images": 3}

    async def nothing(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer without setting any field."""

    async def large(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer with two megabytes."""
        answer.cu_seqlens.extend([2**30] * (LARGE // 5 + 1))

    async def last(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer after ``rest`` other calls have ended."""
        while self.over < int(rest):
            await asyncio.sleep(0.01)
        answer.cu_seqlens.append(int(rest))

    async def fail(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Raise an error."""
        raise {"limit": LimitExceededError, "unsupported": UnsupportedError, "bug": KeyError}[rest]("why " + "é" * 3000)

    async def wait(self, rest: str, answer: pb.Positions, call: Call) -> None:
        """Answer once the test sets ``go``, waiting on the event loop or in a thread of a pool."""
        pool: Any = rest
        if pool:
            await call.run(pool, self._wait, call)
        else:
            self.begun.set()
            try:
                while not self.go.is_set():
                    await asyncio.sleep(0.01)
            finally:
                self.stopped.set()
        answer.cu_seqlens.append(1)

    def _wait(self, call: Call) -> None:
        self.begun.set()
        try:
            while not self.go.wait(0.01):
                call.checkpoint()
        finally:
            self.stopped.set()


@dataclass(frozen=True)
class Serving:
    """The server, its method, and calls to it."""

    server: Server
    address: str
    channel: grpc.Channel
    fake: Fake = field(default_factory=Fake)

    @property
    def place(self) -> Any:
        """Place over gRPC, called with bytes."""
        return self.channel.unary_unary(PLACE, response_deserializer=pb.PlaceResponse.FromString)

    @property
    def stream(self) -> Any:
        """StreamPlace over gRPC."""
        kinds = pb.StreamPlaceRequest.SerializeToString, pb.StreamPlaceResponse.FromString
        return self.channel.stream_stream(STREAM, *kinds)

    def taken(self) -> dict[str, int]:
        """Return the places that calls hold, by their name."""
        kinds = vars(self.server.arrivals).values()
        return {kind.name: kind.taken for kind in kinds if isinstance(kind, Places) and kind.taken}

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a server metric."""
        return self.server.metrics.registry.get_sample_value(f"mmpos_{name}", labels)


class KeptLogs(Logs):
    """A log in memory that can be read once."""

    def __init__(self, sample: int = 1) -> None:
        self._kept = io.BytesIO()
        super().__init__(io.TextIOWrapper(self._kept, write_through=True), sample=sample)

    def lines(self) -> list[dict[str, Any]]:
        """Close the log and return all of its records."""
        self.close(60.0)
        return [json.loads(line) for line in self._kept.getvalue().decode().splitlines()]


Serve = Callable[..., Serving]


@contextmanager
def serving(
    *, side_by_side: bool = False, grace: float = 5.0, options: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Serving]:
    """Serve while the context is open.

    Args:
        side_by_side: whether the items of a stream run concurrently.
        grace: seconds that calls in progress may still take when the server stops.
        options: further arguments for the server.
        settings: settings that replace the server's default ones.
    """
    fake = Fake()
    method = place_method(fake.run)
    method = replace(method, side_by_side=side_by_side)
    config = replace(load(), **{"overload_ms": 60_000, **settings})
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0)]
    with started(config, grace=grace, **{"methods": [method], **(options or {})}) as (server, address):
        try:
            with grpc.insecure_channel(address, options=unlimited) as channel:
                yield Serving(server, address, channel, fake)
        finally:
            fake.go.set()


def query(name: str) -> bytes:
    """Encode a Place request that runs an action."""
    return pb.PlaceRequest(query=pb.PositionsQuery(profile=name)).SerializeToString()


def items(*names: str) -> Iterator[pb.StreamPlaceRequest]:
    """Yield stream items that run these actions."""
    return (pb.StreamPlaceRequest(id=i, query=pb.PositionsQuery(profile=name)) for i, name in enumerate(names))


def status_of(connection: Connection, path: bytes | str, raw: bytes, *metadata: tuple[bytes, bytes]) -> str:
    """Make a call with HTTP/2 frames and return its status name."""
    stream = connection.call(path, *metadata)
    connection.send(stream, raw)
    return connection.ended(stream)[0]


def ending(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return the status and details of a call; the details are empty if the status is OK."""
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def refusal(call: Callable[[], object]) -> tuple[str, str, dict[str, str]]:
    """Return the status, details and trailing metadata of a failing call."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())
