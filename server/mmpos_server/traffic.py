"""Messages in transit: requests that have not arrived, answers that clients have not taken, and the sockets of both."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from mmpos.errors import (
    InvalidInputError,
    MmposError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from mmpos_server.admission import Admission, Call
    from mmpos_server.config import ServerConfig
    from mmpos_server.telemetry import Logs
    from mmpos_server.transport import CallContext, RpcContext

__all__ = ["GoneError", "Peer", "Traffic", "close_connections", "open_connections", "peer_of"]


_TICK = 0.25
"""Seconds between two checks of messages in transit."""
_SHARE = 20
"""Pause between two checks of the sockets, in times that one takes: a twentieth of the time at most goes to them."""
_DRAIN_SECONDS = 1.0
"""Seconds that a request may be in transit when the server stops."""
_PER_MESSAGE, _PER_BYTE = 4096, 1.02
"""Overhead of a message on the wire: headers; frames and records of TLS."""


class GoneError(Exception):
    """The client has gone, and the call has not been cancelled yet."""


@dataclass(eq=False)
class _Passage:
    """Message in transit, and the future of the coroutine that waits for it."""

    context: CallContext
    operation: Coroutine[asyncio.Future[object], None, object]
    waiter: asyncio.Future[object]
    began: float

    def step(self, future: asyncio.Future[object] | None = None) -> None:
        """Begin the operation, or resume it after the future of the transport that it waited for.

        A task would do the same, at the cost of more rounds of the event loop for every message.
        """
        try:
            failed = future.exception() if future is not None else None
            waits_for = self.operation.send(None) if failed is None else self.operation.throw(failed)
        except StopIteration as end:
            if not self.waiter.done():
                self.waiter.set_result(end.value)
        except Exception as error:  # of the transport, in a class of its inside
            self.fail(GoneError(str(error)))
        else:
            waits_for._asyncio_future_blocking = False
            waits_for.add_done_callback(self.step)

    def fail(self, error: Exception) -> None:
        """Raise an error in the coroutine that waits for the message."""
        if not self.waiter.done():
            self.waiter.set_exception(error)


_Passages = dict[_Passage, None]
"""Ordered set, oldest first."""


class Traffic:
    """Messages in transit to and from one server. Used from the event loop only.

    A client decides how long it takes to send a request and to read an answer. So both have a time limit, and the
    bytes received of incomplete requests count as bytes of requests; the kernel knows them for each connection. A call
    whose answer is not read cannot be ended with a status, since the transport sends that after the answer: its
    connection is closed.

    Before ``open``, and in hosts other than a gRPC server, messages pass through and nothing is counted.

    Args:
        config: time limits, and limits of each client.
        admission: gates of the server.
        logs: log of the server.
    """

    def __init__(self, config: ServerConfig, admission: Admission, logs: Logs) -> None:
        self.renew(config)
        self._admission, self._logs = admission, logs
        self._requests: _Passages = {}
        self._idle: _Passages = {}
        self._written: _Passages = {}
        self._leaving: dict[CallContext, float] = {}  # contexts of answers and statuses being sent, oldest first
        self._accounted: dict[Peer, float] = {}  # received bytes of complete requests; oldest peer first
        self._came: defaultdict[str, float] = defaultdict(float)  # bytes of messages since the last check, by peer
        self._ports: Collection[int] = ()
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    def renew(self, config: ServerConfig) -> None:
        """Apply these time limits and client limits from now on."""
        self._times, self._clients = config.connections, config.clients
        self._request_bytes, self._most_bytes = config.limits.request_bytes, config.concurrency.max_in_flight_bytes

    def open(self, ports: Collection[int]) -> None:
        """Start checking messages in transit; ports are the TCP ports whose connections are checked."""
        self._ports = ports
        self._task = asyncio.create_task(self._watch())

    def drain(self) -> None:
        """Shorten the time limit of incomplete requests to a second."""
        self._draining = True

    async def close(self) -> None:
        """Stop checking messages in transit."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def hang_up(self, ending: asyncio.Task[None]) -> None:
        """Close connections that stay open after their last call, until the transport has ended.

        The transport itself waits 20 seconds for a client that does not acknowledge the end.
        """
        quiet_since = math.inf
        while not ending.done():
            await asyncio.wait({ending}, timeout=_TICK)
            quiet_since = min(quiet_since, monotonic()) if self._quiet else math.inf
            if self._ports and monotonic() - quiet_since > _DRAIN_SECONDS:
                peers = await asyncio.to_thread(open_connections, self._ports)
                await asyncio.to_thread(close_connections, peers, self._ports)

    @property
    def _quiet(self) -> bool:
        """Whether no call and no message is left."""
        gates = (*self._admission.gates.values(), self._admission.streams, self._admission.watches)
        passages = self._requests or self._idle or self._written or self._leaving
        return not passages and not any(gate.taken for gate in gates)

    async def receive(self, context: RpcContext, *, idle: bool = False) -> bytes | None:
        """Receive the next message of a call; None after the last one.

        Args:
            context: gRPC context of the call.
            idle: whether the message may begin late, as in a stream after its first item.

        Raises:
            ServiceTimeoutError: the message did not arrive in time.
            ServiceOverloadedError: incomplete requests hold too many bytes.
            ServiceUnavailableError: the server is about to stop, or nothing came through a stream for long.
            GoneError: the client has gone.
        """
        raw = await self._pass(context, context.read(), self._idle if idle else self._requests)
        if not isinstance(raw, bytes):  # EOF
            return None
        if self._ports:
            self._came[context.peer()] += _PER_BYTE * len(raw) + _PER_MESSAGE
        return raw

    async def request(self, context: RpcContext) -> bytes:
        """Receive the one message of a call.

        Raises:
            InvalidInputError: the call has no message.
            MmposError: as ``receive`` does.
            asyncio.CancelledError: the client has gone.
        """
        try:
            raw = await self.receive(context)
        except GoneError:
            raise asyncio.CancelledError from None
        if raw is None:
            for _ in range(3):  # a call that was cancelled is told so in the next rounds of the loop
                await asyncio.sleep(0)
            raise InvalidInputError("request: got none, want one message")
        return raw

    async def write(self, context: RpcContext, answer: bytes) -> None:
        """Send an answer of a stream.

        Raises:
            GoneError: the client has gone.
        """
        await self._pass(context, context.write(answer), self._written)

    def send(self, context: CallContext, call: Call, size: int) -> None:
        """Count an answer of so many bytes, and its call, until the client has read the answer.

        Raises:
            ServiceOverloadedError: this client, or all clients together, have too many unread bytes of answers.
        """
        if self._task is None:
            return
        gate = self._admission.unsent
        call.lease.answer(size)
        gate.enter(size)
        call.sending = True

        def sent(_: object) -> None:
            seconds = call.seconds
            gate.leave(seconds, size)
            call.lease.end(seconds)
            self._leaving.pop(context, None)

        self._leaving[context] = monotonic()
        _at_end(sent)

    def leave(self, context: CallContext) -> None:
        """Close the connection of a call unless its client reads the answer or the status in time."""
        if self._task is not None:
            self._leaving[context] = monotonic()
            _at_end(lambda _: self._leaving.pop(context, None))

    async def _pass(
        self, context: CallContext, operation: Coroutine[asyncio.Future[object], None, object], passages: _Passages
    ) -> object:
        """Return the result of a transport operation, which goes on if nobody waits for it any more.

        The operation frees its memory when it ends, at the latest with the call.
        """
        if self._task is None:
            try:
                return await operation
            except Exception as error:  # of the transport, in a class of its inside
                raise GoneError from error
        passage = _Passage(context, operation, asyncio.get_running_loop().create_future(), monotonic())
        passages[passage] = None
        passage.step()
        try:
            return await passage.waiter
        finally:
            del passages[passage]

    async def _watch(self) -> None:
        rested = -math.inf
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._end_late()
                if self._ports and (began := monotonic()) >= rested:
                    await self._look_at_sockets()
                    rested = monotonic() + _SHARE * (monotonic() - began)
            except Exception as error:  # whatever it is: limits must not end for good
                self._logs.error("connections could not be checked", error)

    async def _look_at_sockets(self) -> None:
        # Before the sockets are read: what arrives meanwhile counts as in transit until the next check.
        came, self._came = self._came, defaultdict(float)
        # In a thread: with a thousand connections it takes some milliseconds.
        received = await asyncio.to_thread(open_connections, self._ports)
        self._account(received, {peer_of(name): size for name, size in came.items()})
        if peers := self._crowd() | self._stuck():
            await asyncio.to_thread(close_connections, peers, self._ports)

    def _end_late(self) -> None:
        """Fail the requests and stream items that are late."""
        now, times = monotonic(), self._times
        seconds = min(times.receive_seconds, _DRAIN_SECONDS) if self._draining else times.receive_seconds
        late: MmposError = ServiceTimeoutError(f"request: got only part of it within {seconds:g} s")
        if self._draining:
            late = ServiceUnavailableError("the server is about to stop")
        for passage in _older(self._requests, now - seconds):
            passage.fail(late)
        for passage in _older(self._idle, now - times.stream_idle_seconds):
            passage.fail(
                ServiceUnavailableError(f"stream: got nothing for {times.stream_idle_seconds:g} s, want a new one")
            )

    def _account(self, received: dict[Peer, int], came: Mapping[Peer | None, float]) -> None:
        """Check the bytes of incomplete requests against the limits, and refuse the largest ones.

        Args:
            received: bytes of each connection since it began.
            came: bytes of complete messages of each connection since the last check.
        """
        waiting: dict[Peer, list[_Passage]] = defaultdict(list)
        for passage in (*self._requests, *self._idle):
            if peer := peer_of(passage.context.peer()):
                waiting[peer].append(passage)
        held: dict[Peer, float] = {}
        accounted = {peer: size for peer, size in self._accounted.items() if peer in received}
        for peer, size in received.items():
            counted = accounted.get(peer, 0.0) + came.get(peer, 0.0)
            held[peer] = min(max(0.0, size - counted), len(waiting[peer]) * self._request_bytes)
            accounted[peer] = size - held[peer]
        self._accounted = accounted
        hosts: Counter[str] = Counter()
        for peer, waits in held.items():
            hosts[peer.host] += int(waits)
        total, limit = sum(hosts.values()) + self._admission.bytes.taken, self._clients.max_in_flight_bytes
        for peer in sorted(held, key=held.__getitem__, reverse=True):
            over_client = limit and hosts[peer.host] > limit
            if not held[peer] or not (over_client or total > self._most_bytes):
                continue
            name = f"clients.max_in_flight_bytes of {peer.host!r}" if over_client else "max_in_flight_bytes"
            error = ServiceOverloadedError(f"{name}: got {hosts[peer.host]} in requests that are on their way", 1.0)
            for passage in waiting[peer]:
                passage.fail(error)
            accounted[peer] = received[peer]
            hosts[peer.host] -= int(held[peer])
            total -= int(held[peer])

    def _crowd(self) -> set[Peer]:
        """Return the newest connections of clients that have too many."""
        crowd, limit = set[Peer](), self._clients.max_connections
        hosts: Counter[str] = Counter()
        for peer in self._accounted if limit else ():
            hosts[peer.host] += 1
            if hosts[peer.host] > limit:
                crowd.add(peer)
                self._logs.seldom("connection closed: client has too many connections", client=peer.host, limit=limit)
        return crowd

    def _stuck(self) -> set[Peer]:
        """Return the connections of clients that do not read what is sent."""
        now, times = monotonic(), self._times
        contexts = [passage.context for passage in _older(self._written, now - times.stream_idle_seconds)]
        for context, began in self._leaving.items():
            if began > now - times.send_seconds:
                break
            contexts.append(context)
        peers = {peer for context in contexts if (peer := peer_of(context.peer()))}
        for peer in peers:
            self._logs.seldom("connection closed: client does not read answers", client=peer.host)
        return peers


def _at_end(function: Callable[[object], object]) -> None:
    """Call a function when the running call has ended, its answer sent or its connection gone.

    A callback of the task, since one of the context would be a reference cycle.
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(function)


def _older(passages: _Passages, began: float) -> list[_Passage]:
    """Return the messages that began before a time."""
    return list(takewhile(lambda passage: passage.began <= began, passages))


_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_RECEIVED = 128  # where tcpi_bytes_received stands in struct tcp_info of Linux


class Peer(NamedTuple):
    """Address of the other end of a connection."""

    host: str
    port: int


def peer_of(name: str) -> Peer | None:
    """Parse gRPC's name of a peer, as ipv4:127.0.0.1:50051 or ipv6:%5B::1%5D:50051; None for one without a port."""
    kind, _, address = name.partition(":")
    host, _, port = unquote(address).rpartition(":")
    return Peer(host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def open_connections(ports: Collection[int]) -> dict[Peer, int]:
    """List the peers connected to these ports of this process, and the bytes that each has sent (0 if unknown).

    gRPC neither lists connections nor counts their bytes, so that they are read from the open files.
    """
    return {peer: _received(connection) for peer, connection in _accepted(ports)}


def close_connections(peers: Collection[Peer], ports: Collection[int]) -> None:
    """Close connections of these peers to these ports; their calls are cancelled."""
    for peer, connection in _accepted(ports):
        if peer in peers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _accepted(ports: Collection[int]) -> Iterator[tuple[Peer, socket.socket]]:
    for name in os.listdir(_FOLDER):
        with suppress(OSError):
            # A duplicate stays what it is if the other is closed meanwhile, and its number taken by something else.
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] in ports:
                    host, port = connection.getpeername()[:2]
                    yield Peer(host.removeprefix("::ffff:"), port), connection


def _received(connection: socket.socket) -> int:
    if _TCP_INFO is None:
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RECEIVED + 8)
    return int(struct.unpack_from("=Q", info, _RECEIVED)[0]) if len(info) >= _RECEIVED + 8 else 0
