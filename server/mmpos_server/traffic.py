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
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import grpc

from mmpos.errors import (
    InvalidInputError,
    MmposError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from mmpos_server.admission import Admission
    from mmpos_server.call import Call
    from mmpos_server.config import ServerConfig
    from mmpos_server.logs import Logs

__all__ = ["GoneError", "Peer", "Traffic", "close_connections", "open_connections", "peer_of"]


_TICK = 0.25
"""Seconds between two looks at what is on its way."""
_SHARE = 20
"""Between two looks at the sockets passes so many times what one takes: a twentieth of the time at most."""
_DRAIN_SECONDS = 1.0
"""How long a request may be on its way when the server stops."""
_PER_MESSAGE, _PER_BYTE = 4096, 1.02
"""Bytes that a message takes besides its own: headers; frames and records of TLS."""


class GoneError(Exception):
    """The client is no longer there, and nobody has cancelled the call yet."""


@dataclass(eq=False)
class _Passage:
    """A message on its way, and who waits for it."""

    context: Any
    operation: Coroutine[Any, Any, Any]
    waiter: asyncio.Future[Any]
    began: float

    def step(self, future: asyncio.Future[Any] | None = None) -> None:
        """Begin the operation, or go on with it after a future of the transport that it waits for.

        As a task would, which for every message would cost more rounds of the loop.
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
        """Let who waits for it go on with an error."""
        if not self.waiter.done():
            self.waiter.set_exception(error)


_Passages = dict[_Passage, None]
"""An ordered set: the oldest first."""


class Traffic:
    """The messages on their way to and from one server. Used from the event loop only.

    What a call holds before its request is here, and until its answer is taken, ends when the client wants. So there is
    a limit to the time of each, and what clients have sent of requests that have not come counts as bytes of requests:
    the kernel knows how much a connection has received. A call whose answer is not taken cannot be ended, since the
    transport sends a status after the answer only: its connection is closed.

    Before it is opened, and in other hosts than a server of gRPC, it hands messages through and counts nothing.

    Args:
        config: times, places, and what each client may have.
        admission: gates.
        logs: what is written.
    """

    def __init__(self, config: ServerConfig, admission: Admission, logs: Logs) -> None:
        self.renew(config)
        self._admission, self._logs = admission, logs
        self._requests: _Passages = {}
        self._idle: _Passages = {}
        self._written: _Passages = {}
        self._leaving: dict[Any, float] = {}  # contexts of answers and of statuses, the oldest first
        self._accounted: dict[Peer, float] = {}  # bytes received that are of no request on its way; oldest peer first
        self._came: defaultdict[str, float] = defaultdict(float)  # bytes of messages since the last look, by peer
        self._ports: Collection[int] = ()
        self._draining = False
        self._task: asyncio.Task[None] | None = None

    def renew(self, config: ServerConfig) -> None:
        """Hold what is on its way to these times and limits from now on."""
        self._times, self._clients = config.connections, config.clients
        self._request_bytes, self._most_bytes = config.limits.request_bytes, config.concurrency.max_in_flight_bytes

    def open(self, ports: Collection[int]) -> None:
        """Begin to look at what is on its way; ports are those whose connections are known by their sockets."""
        self._ports = ports
        self._task = asyncio.create_task(self._watch())

    def drain(self) -> None:
        """Wait no longer for requests than a moment."""
        self._draining = True

    async def close(self) -> None:
        """End that."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def hang_up(self, ending: asyncio.Task[None]) -> None:
        """Close the connections that stay after their last call, until the transport has ended.

        It waits 20 seconds for a client that does not say that it has heard of the end.
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
        """Whether no call is left."""
        gates = (*self._admission.gates.values(), self._admission.streams, self._admission.watches)
        passages = self._requests or self._idle or self._written or self._leaving
        return not passages and not any(gate.taken for gate in gates)

    async def receive(self, context: Any, *, idle: bool = False) -> Any:
        """The next message of a call, or EOF.

        Args:
            context: of the call.
            idle: whether it may be long until one begins, as in a stream that has had some.

        Raises:
            ServiceTimeoutError: it did not come in time.
            ServiceOverloadedError: too much of requests is on its way.
            ServiceUnavailableError: the server is about to stop, or nothing came through a stream for long.
            GoneError: the client is not there any more.
        """
        raw = await self._pass(context, context.read(), self._idle if idle else self._requests)
        if self._ports and raw is not grpc.aio.EOF:
            self._came[context.peer()] += _PER_BYTE * len(raw) + _PER_MESSAGE
        return raw

    async def request(self, context: Any) -> bytes:
        """The one message of a call.

        Raises:
            InvalidInputError: there is none.
            MmposError: as receive does.
            asyncio.CancelledError: the client is not there any more.
        """
        try:
            raw = await self.receive(context)
        except GoneError:
            raise asyncio.CancelledError from None
        if raw is grpc.aio.EOF:
            for _ in range(3):  # a call that was cancelled is told so in the next rounds of the loop
                await asyncio.sleep(0)
            raise InvalidInputError("request: got none, want one message")
        return bytes(raw)

    async def write(self, context: Any, answer: bytes) -> None:
        """Send an answer of a stream.

        Raises:
            GoneError: the client is not there any more.
        """
        await self._pass(context, context.write(answer), self._written)

    def send(self, context: Any, call: Call, size: int) -> None:
        """Count an answer of so many bytes, and its call as one of the client, until the client has taken it.

        Raises:
            ServiceOverloadedError: too many bytes of answers, of the client or of all, are not taken.
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

        _at_end(sent)
        self.leave(context)

    def leave(self, context: Any) -> None:
        """Close the connection of a call if its client does not take the answer or the status in time."""
        if self._task is not None:
            self._leaving[context] = monotonic()
            _at_end(lambda _: self._leaving.pop(context, None))

    async def _pass(self, context: Any, operation: Coroutine[Any, Any, Any], passages: _Passages) -> Any:
        """The result of an operation of the transport, which goes on if nobody waits for it any more.

        What it holds is given back at its own end only, and that comes with the end of the call.
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
                self._logs.error("connections were not looked at", error)

    async def _look_at_sockets(self) -> None:
        # Before the sockets are asked: what comes meanwhile is taken for being on its way until the next look.
        came, self._came = self._came, defaultdict(float)
        # In a thread: with a thousand connections it takes some milliseconds.
        received = await asyncio.to_thread(open_connections, self._ports)
        self._account(received, {peer_of(name): size for name, size in came.items()})
        if peers := self._crowd() | self._stuck():
            await asyncio.to_thread(close_connections, peers, self._ports)

    def _end_late(self) -> None:
        """End what should have come."""
        now, times = monotonic(), self._times
        seconds = min(times.receive_seconds, _DRAIN_SECONDS) if self._draining else times.receive_seconds
        late: MmposError = ServiceTimeoutError(f"request: got not all of it within {seconds:g} s")
        if self._draining:
            late = ServiceUnavailableError("the server is about to stop")
        for passage in _older(self._requests, now - seconds):
            passage.fail(late)
        for passage in _older(self._idle, now - times.stream_idle_seconds):
            passage.fail(
                ServiceUnavailableError(f"stream: got nothing for {times.stream_idle_seconds:g} s, want a new one")
            )

    def _account(self, received: dict[Peer, int], came: Mapping[Peer | None, float]) -> None:
        """Compare what connections have received of requests that are not here with what these may have.

        Args:
            received: bytes of each connection since it began.
            came: bytes of the messages that have come through it since the last look.
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
        """Connections of clients that have too many; the newest go."""
        found, limit = set[Peer](), self._clients.max_connections
        hosts: Counter[str] = Counter()
        for peer in self._accounted if limit else ():
            hosts[peer.host] += 1
            if hosts[peer.host] > limit:
                found.add(peer)
                self._logs.seldom("connection closed: its client has too many", client=peer.host, limit=limit)
        return found

    def _stuck(self) -> set[Peer]:
        """Connections of those who do not take what is sent to them."""
        now, times = monotonic(), self._times
        contexts = [passage.context for passage in _older(self._written, now - times.stream_idle_seconds)]
        for context, began in self._leaving.items():
            if began > now - times.send_seconds:
                break
            contexts.append(context)
        found = {peer for context in contexts if (peer := peer_of(context.peer()))}
        for peer in found:
            self._logs.seldom("connection closed: its client does not take answers", client=peer.host)
        return found


def _at_end(function: Callable[[object], object]) -> None:
    """Call a function when the running call has ended, its answer sent or its connection gone.

    Of its task and not of its context, which keeps callbacks that hold it: a circle that only the collector breaks.
    """
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(function)


def _older(passages: _Passages, began: float) -> list[_Passage]:
    """Those that began before."""
    return list(takewhile(lambda passage: passage.began <= began, passages))


_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_RECEIVED = 128  # where tcpi_bytes_received stands in struct tcp_info of Linux


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


def peer_of(name: str) -> Peer | None:
    """The peer that gRPC calls by such a name; None for one without a port, as on a unix socket."""
    kind, _, place = name.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = unquote(place).rpartition(":")
    return Peer(host.strip("[]"), int(port))


def open_connections(ports: Collection[int]) -> dict[Peer, int]:
    """The peers that are connected to these ports of this process, and the bytes that each has sent (0 if unknown)."""
    return {peer: _received(found) for peer, found in _accepted(ports)}


def close_connections(peers: Collection[Peer], ports: Collection[int]) -> None:
    """Close connections of these peers to these ports; what they were doing is cancelled."""
    for peer, found in _accepted(ports):
        if peer in peers:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _accepted(ports: Collection[int]) -> Iterator[tuple[Peer, socket.socket]]:
    for name in os.listdir(_FOLDER):
        with suppress(OSError):
            # A duplicate stays what it is if the other is closed meanwhile, and its number taken by something else.
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in ports:
                    host, port = found.getpeername()[:2]
                    yield Peer(host.removeprefix("::ffff:"), port), found


def _received(found: socket.socket) -> int:
    if _TCP_INFO is None:
        return 0
    info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RECEIVED + 8)
    return int(struct.unpack_from("=Q", info, _RECEIVED)[0]) if len(info) >= _RECEIVED + 8 else 0
