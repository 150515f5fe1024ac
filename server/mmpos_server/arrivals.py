"""Own what happens before and after a call's work: arriving and large messages, streams, unread answers, overload.

All functions run on the event loop, except where they say otherwise.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from grpc import aio

from mmpos.errors import (
    InvalidInputError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)

__all__ = ["LARGE_BYTES", "Arrivals", "Places", "StreamEndedError"]

LARGE_BYTES = 2**18
"""Size in bytes above which a request needs a place, and an answer counts until the client has read it."""

MESSAGES, WORK, STREAMS, WATCHES = 16, 64, 40, 64
"""Places for large messages, for calls that wait for a thread, for streams, and for those of health and reflection."""

UNREAD_BYTES = 128 * 2**20
"""Bytes of unread answers above which further large answers are refused; gRPC holds a copy of each."""

SHARE = 0.5
"""Largest share of each kind of places, and of the bytes of unread answers, that one client may hold."""

_MOST_WAITING = 8
"""Number of calls that may wait for each place."""

TICK_SECONDS = 0.1
"""Seconds between checks of arriving messages and unread answers."""

LATE_SECONDS, TURN_SECONDS, RECEIVE_SECONDS, IDLE_SECONDS, SEND_SECONDS = 0.3, 5.0, 30.0, 600.0, 120.0
"""Seconds until a message that has not arrived needs a place, until it must make room for one that waits, and until it
is given up; seconds until an idle stream ends, and until an answer must be read.
"""


class StreamEndedError(Exception):
    """A stream has no further item."""


class Places:
    """Places of one kind; a client may hold a share of them.

    Args:
        name: name of the places in messages and metrics.
        limit: number of places, or of bytes.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit, self.taken = name, limit, 0
        self._share = max(1, int(limit * SHARE))
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # oldest first

    @property
    def wanted(self) -> bool:
        """Whether a client waits for a place."""
        return bool(self._waiting)

    def free(self, client: str, count: int = 1) -> bool:
        """Return whether a client may take places; a client that holds none may take more than its share."""
        if self.taken and self.taken + count > self.limit:
            return False
        held = self._held[client] if self._held else 0
        return not held or held + count <= self._share

    def take(self, client: str, count: int = 1) -> None:
        """Take places.

        Raises:
            ServiceOverloadedError: too few are free, or the client holds its share.
        """
        if not self.free(client, count):
            raise ServiceOverloadedError(
                f"{self.name}: got {self._held[client]} in use by this client and {self.taken} by all, "
                f"want at most {self._share} and {self.limit}",
                1.0,
            )
        self.add(client, count)

    def add(self, client: str, count: int = 1) -> None:
        """Take places even if none are free."""
        self.taken += count
        self._held[client] += count

    async def wait(self, client: str) -> None:
        """Take a place as soon as one is free; of the clients that wait, the one that holds the fewest is next.

        Raises:
            ServiceOverloadedError: too many wait already, or too many of this client.
        """
        if self.free(client):  # those that wait hold their share
            return self.add(client)
        mine, most = sum(name == client for name, _ in self._waiting), _MOST_WAITING * self.limit
        if len(self._waiting) >= most or mine >= most // 2:
            raise ServiceOverloadedError(
                f"{self.name}: got {len(self._waiting)} waiting, {mine} of this client; want fewer than {most} and "
                f"{most // 2}",
                1.0,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(client)
            elif (client, turn) in self._waiting:
                self._waiting.remove((client, turn))
            raise

    def leave(self, client: str, count: int = 1) -> None:
        """Give places back, to a client that waits if there is one."""
        self.taken -= count
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]
        while self._waiting and self.taken < self.limit:
            following = min(self._waiting, key=lambda waiting: self._held[waiting[0]])
            if not self.free(following[0]):
                return
            self._waiting.remove(following)
            if not following[1].cancelled():  # its task has been cancelled, but has not run since
                self.add(following[0])
                following[1].set_result(None)


@dataclass(eq=False, slots=True)
class _Message:
    """A message that arrives.

    Args:
        client: the other side.
        seconds: seconds after which the message is given up.
        placed: whether it holds a place of the large messages, or needs none.
        item: whether the message is an item of a stream, which may be idle.
        ticks: number of checks that it has seen.
        error: reason for which it was given up.
    """

    client: str
    seconds: float
    placed: bool = False
    item: bool = False
    ticks: int = 0
    error: ServiceError | None = None


@dataclass(eq=False, slots=True)
class _Answer:
    """An answer that the client at ``peer`` has not read yet, and the number of checks that it has seen."""

    peer: str
    ticks: int = 0


def hang_up(peers: set[str]) -> None:
    """Close the connections to these peers, named as gRPC does: it has no call that ends the sending of an answer."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor has been closed, or its connection
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        host, port, *_ = connection.getpeername()
                        host = host.removeprefix("::ffff:")  # an IPv4 address on an IPv6 socket
                        if peers & {f"ipv4:{host}:{port}", f"ipv6:%5B{host}%5D:{port}"}:
                            connection.shutdown(socket.SHUT_RDWR)


class Arrivals:
    """Bounds for messages, streams and answers of all clients together and of each client.

    Time is counted in ticks of the loop, so that a busy loop does not make messages late that have arrived.

    Args:
        overload_seconds: the time of a call to oneself above which calls are refused.
    """

    def __init__(self, overload_seconds: float) -> None:
        self._bound = overload_seconds
        self.messages, self.work = Places("large_messages", MESSAGES), Places("waiting_calls", WORK)
        self.streams, self.watches = Places("streams", STREAMS), Places("watches", WATCHES)
        self.unread = Places("unread_bytes", UNREAD_BYTES)
        self._arriving: dict[asyncio.Task[Any], _Message] = {}  # oldest first
        self._sending: dict[asyncio.Task[Any], _Answer] = {}
        self.lag = 0.0
        """Seconds that each of the server's last two calls to itself took at least."""
        self.draining = False
        """Whether the server is about to stop."""
        self.running = 0
        """Number of calls and streams that have begun and not ended."""

    @property
    def quiet(self) -> bool:
        """Whether no call is running and no large answer is being read."""
        return not (self.running or self._arriving or self._sending)

    def check_open(self) -> None:
        """Refuse a call while the server is overloaded or about to stop.

        Raises:
            ServiceOverloadedError: the server's last call to itself took too long.
            ServiceUnavailableError: the server is about to stop.
        """
        if self.draining:
            raise ServiceUnavailableError("the server is about to stop")
        if self.lag > self._bound:
            raise ServiceOverloadedError(
                f"overload: a call takes {1000 * self.lag:.0f} ms, want at most {1000 * self._bound:.0f}",
                max(1.0, 2 * self.lag),
            )

    async def message(
        self, context: Any, client: str, *, placed: bool = False, item: bool = False, first: bool = True
    ) -> bytes:
        """Wait for the only message of a call, or for the next item of a stream.

        Args:
            context: context of the call.
            client: name of the client.
            placed: whether the call already holds a place for a message that is late.
            item: whether the message is an item of a stream, whose place is the stream's.
            first: whether it is the first message; between later ones, a stream may be idle.

        Raises:
            InvalidInputError: the call has no message.
            StreamEndedError: the stream has no further item.
            ServiceOverloadedError: the message is late, and no place is free for it.
            ServiceTimeoutError: the message did not arrive in time.
            ServiceUnavailableError: the stream was idle for too long, or the server is about to stop.
        """
        task = asyncio.current_task()
        assert task is not None
        seconds = RECEIVE_SECONDS if first else IDLE_SECONDS
        message = self._arriving[task] = _Message(client, seconds, placed or item, item)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if message.error is None:
                raise
            task.uncancel()
            raise message.error from None
        finally:
            del self._arriving[task]
            if message.placed and not placed and not item:
                self.messages.leave(client)
        if raw is not aio.EOF:
            return raw
        raise StreamEndedError if item else InvalidInputError("request: got no message, want one")

    def send(self, context: Any, client: str, size: int) -> None:
        """Count the answer of the current task, in which grpc sends it, until the client has read it.

        Raises:
            ServiceOverloadedError: unread answers have too many bytes.
        """
        task = _current()
        self.unread.take(client, size)
        self._sending[task] = _Answer(context.peer())

        def sent(_: object) -> None:
            del self._sending[task]
            self.unread.leave(client, size)

        task.add_done_callback(sent)

    @contextmanager
    def sending(self, context: Any, client: str, size: int) -> Iterator[None]:
        """Count an answer on a stream while it is sent, until the client has read it."""
        task = _current()
        self.unread.add(client, size)
        self._sending[task] = _Answer(context.peer())
        try:
            yield
        finally:
            del self._sending[task]
            self.unread.leave(client, size)

    async def room(self, client: str, size: int = 1) -> None:
        """Wait until unread answers leave room for another one of a client, of ``size`` bytes."""
        while not self.unread.free(client, size):
            await asyncio.sleep(TICK_SECONDS)

    def check(self) -> None:
        """Check arriving messages and unread answers; call this each TICK_SECONDS."""
        wanted = self.messages.wanted
        for task, message in list(self._arriving.items()):
            message.ticks += 1
            message.error = self._given_up(message, wanted)
            if message.error is not None:
                task.cancel()
        slow = set()
        for answer in self._sending.values():
            answer.ticks += 1
            if answer.ticks * TICK_SECONDS > SEND_SECONDS:
                slow.add(answer.peer)
        if slow:
            hang_up(slow)

    def _given_up(self, message: _Message, wanted: bool) -> ServiceError | None:
        """Return the reason to give a message up, or None; a late message takes a place."""
        seconds = message.ticks * TICK_SECONDS
        if message.item and self.draining:
            return ServiceUnavailableError("the server is about to stop: send unanswered items in a new stream")
        if message.item and message.seconds == IDLE_SECONDS < seconds:
            return ServiceUnavailableError(f"stream: no item arrived for {IDLE_SECONDS:g} s; open a new stream")
        if seconds > (1.0 if self.draining else message.seconds):
            return ServiceTimeoutError(f"request: no whole message arrived in {seconds:.0f} s")
        if not message.placed and seconds > LATE_SECONDS:
            if not self.messages.free(message.client):
                return ServiceOverloadedError("late_messages: too many messages arrive slowly", 1.0)
            self.messages.add(message.client)
            message.placed = True
        if wanted and not message.item and seconds > TURN_SECONDS:
            return ServiceOverloadedError("late_messages: others wait for the place of this slow message", 1.0)
        return None


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "called in a task"
    return task
