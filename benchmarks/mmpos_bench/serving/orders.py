"""What client processes are told to do, and what they tell that they did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmpos.segments.table import SegmentTable

__all__ = ["OPTIONS", "Done", "Kind", "Order"]

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
"""Of every channel."""

Kind = Literal["unary", "stream", "stub", "client"]


@dataclass(frozen=True)
class Order:
    """What a client process is to do: the same call again and again.

    Args:
        kind: unary and stream calls of grpc.aio, or one after the other of the plain stub and of mmpos.client.
        address: HOST:PORT.
        path: of the method.
        request: what to send.
        answer: what must come back.
        seconds: how long.
        in_flight: calls, or items of a stream, at once.
        segments: what mmpos.client is asked to place; it makes the request, and reads the answer.
    """

    kind: Kind
    address: str
    path: str
    request: bytes
    answer: bytes
    seconds: float = 1.0
    in_flight: int = 1
    segments: SegmentTable | None = None


@dataclass(frozen=True)
class Done:
    """What a client process did: seconds in all, and of each call."""

    seconds: float
    latencies: list[float]

    @property
    def per_second(self) -> float:
        """Calls, or items of a stream."""
        return len(self.latencies) / self.seconds
