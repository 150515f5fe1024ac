"""Watch messages in transit: limit the time for requests to arrive and for answers to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import grpc

from mmpos.errors import InvalidInputError
from mmpos_server.call import GoneError, Recipient
from mmpos_server.listening import RECEIVE_SECONDS

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.telemetry import Logs

__all__ = ["SEND_SECONDS", "Transit", "Transport"]

SEND_SECONDS = 120.0
"""Maximum seconds until a client has read an answer."""

_DRAIN_SECONDS = 1.0
"""Seconds that a request may take to arrive while the server drains."""


class Transport(Recipient, Protocol):
    """Context of a call that can report the end of the call and cancel it."""

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        """Register a function to call when the call ends; return False if it has already ended."""

    def cancel(self) -> None:
        """End the call immediately."""


class Transit:
    """Messages in transit, which a thread of the server checks.

    gRPC does not limit the time for sending a request or reading an answer. The server cancels a call that is too slow,
    and its client receives the status CANCELLED.

    Args:
        logs: the server's log.
    """

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        # For each message, its start and the function that ends its call.
        self._requests: dict[object, tuple[float, Callable[[], None]]] = {}  # oldest first
        self._answers: dict[object, tuple[float, Callable[[], None]]] = {}
        self._draining = False

    def drain(self) -> None:
        """Shorten the time limit for incomplete requests to one second."""
        self._draining = True

    def receive(self, requests: Iterator[bytes], late: Callable[[], None] | None) -> bytes | None:
        """Wait for the next message of a call; return None after the last one.

        Args:
            requests: messages of the call.
            late: function that ends the call if the message takes too long; None means no time limit.

        Raises:
            GoneError: the client has disconnected or was too late.
        """
        if late is not None:
            self._requests[requests] = monotonic(), late
        try:
            raw = next(requests, None)
        except grpc.RpcError:
            raise GoneError from None
        finally:
            in_time = self._requests.pop(requests, None)
        if raw is None and late is not None and in_time is None:
            raise GoneError  # a cancelled call can look like a call without a message
        return raw

    def request(self, requests: Iterator[bytes], transport: Transport) -> bytes:
        """Wait for the only message of a call.

        Raises:
            InvalidInputError: the call has no message.
            GoneError: the client has disconnected or was too late.
        """
        raw = self.receive(requests, transport.cancel)
        if raw is None:
            raise InvalidInputError("request: got no message, want one")
        return raw

    def send(self, call: Call, transport: Transport, size: int) -> None:
        """Reserve ``size`` bytes for an answer until the call ends, then free all bytes that the call holds.

        Raises:
            ServiceOverloadedError: unread answers occupy too many bytes.
        """
        call.hold(size)
        self._answers[call] = monotonic(), transport.cancel

        def ended() -> None:
            self._answers.pop(call, None)
            call.free()

        if not transport.add_callback(ended):
            ended()

    def sending(self, message: object, transport: Transport) -> None:
        """Record that a message is being sent to the client."""
        self._answers[message] = monotonic(), transport.cancel

    def sent(self, message: object) -> None:
        """Record that a message has been sent."""
        self._answers.pop(message, None)

    @property
    def quiet(self) -> bool:
        """Whether no message is in transit."""
        return not self._requests and not self._answers

    def check(self) -> None:
        """End all calls whose messages take too long."""
        now = monotonic()
        seconds = _DRAIN_SECONDS if self._draining else RECEIVE_SECONDS
        for event, messages, limit in (
            ("request did not arrive in time", self._requests, seconds),
            ("client does not read answers", self._answers, SEND_SECONDS),
        ):
            for message, (began, end) in list(messages.items()):
                if began > now - limit:
                    break
                messages.pop(message, None)
                self._logs.seldom(event, seconds=limit)
                end()
