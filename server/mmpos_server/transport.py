"""The gRPC transport: a server whose calls come through lanes, which limit how many of a method are taken at once."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from threading import Lock
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

if TYPE_CHECKING:
    from mmpos_server.telemetry import Logs

__all__ = [
    "LOOK_SECONDS",
    "CallContext",
    "Caller",
    "Handler",
    "Lane",
    "Metadata",
    "MetadataLogFilter",
    "Overload",
    "RpcContext",
    "Slot",
    "TransportServer",
    "Width",
    "abort",
    "current_slot",
]


Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
"""Handler of a method of gRPC over raw bytes."""

Metadata: TypeAlias = Iterable[tuple[str, str]]


class Caller(Protocol):
    """Client of one call."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the metadata of the client."""

    def peer(self) -> str:
        """Return the address of the client, as gRPC writes it."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the names in the certificate of the client."""


class CallContext(Caller, Protocol):
    """Context of one call, of gRPC or of a host that stands in for it."""

    def time_remaining(self) -> float | None:
        """Return the seconds to the deadline; None is no deadline."""

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        """Set the metadata that end the call."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata, /) -> object:
        """End the call with a status, and raise an exception."""


class RpcContext(CallContext, Protocol):
    """Context of a call whose messages are read and written one by one."""

    async def read(self) -> object:
        """Receive the next message, or EOF."""

    async def write(self, message: bytes, /) -> None:
        """Send a message."""


LOOK_SECONDS = 0.1
"""Seconds between two checks for calls that the transport has dropped."""

_BURST = 0.5
"""Seconds of drops that are no overload yet: a burst, and its callers who retry."""

_CALM = 1.0
"""Seconds without a drop after which an overload is over."""


_ON_THEIR_WAY = 8
"""Calls that may be between the transport and their lane while few are asked for."""


class Overload:
    """Detector of overload: the transport drops calls for longer than a burst lasts.

    Args:
        ahead: most calls of a method that are on their way to its lane when there is no overload.
        clock: returns seconds.
    """

    def __init__(self, ahead: int, clock: Callable[[], float] = monotonic) -> None:
        self._ahead, self._clock = ahead, clock
        self._first = self._last = -math.inf
        self._missing = 0
        self.here = False

    def look(self, missing: int) -> None:
        """Note how many calls so far have begun and not been handed over: they were dropped or are on their way.

        A slow event loop has many calls on their way and drops none. So drops are what cannot be on its way: two
        methods have as many of these calls as were asked for.
        """
        now = self._clock()
        if now - self._last >= _CALM:
            self._first, self.here = now, False
        if missing > self._missing + (_ON_THEIR_WAY if self.here else 2 * self._ahead):
            self._missing, self._last = missing, now
            self.here = now - self._first >= _BURST
        self._missing = min(self._missing, missing)


class Slot:
    """Slot of one call in its lane, from the arrival of the call until its work is done.

    Args:
        lane: lane of the slot.
    """

    __slots__ = ("_lane", "here", "seen")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.here = False
        """Whether the request has arrived."""
        self.seen = False
        """Whether the lane was checked since the call arrived."""

    def begin(self) -> None:
        """Keep the slot until the work is done: the request is here."""
        self.here = True
        self._lane.held[self] = None  # again, if it was lost

    def leave(self) -> None:
        """Return the slot to the lane, if it was not lost."""
        if self._lane.held.pop(self, self) is None:
            self._lane.fill()


current_slot: ContextVar[Slot | None] = ContextVar("current_slot", default=None)
"""Slot of the running call; None for a call that came without a lane."""


class Width(NamedTuple):
    """Number of slots of a lane: in general, and under overload."""

    most: int
    few: int


class Lane:
    """Calls of one method: those requested from the transport, and those at work. Used from the event loop only.

    The transport hands over as many calls as are requested and drops the others at almost no cost, while a refusal in
    Python costs half as much as an answer. So calls are refused by not requesting them. A lane has many slots, for
    bursts and for callers who wait for their answers. Under overload some calls must be dropped in any case; the lane
    then has few slots, so that the others are served quickly.

    A call whose request does not arrive loses its slot at the second check.

    Args:
        ask: requests one more call from the transport.
        ahead: most calls that are requested and have not arrived.
        width: number of slots.
        overload: detector of the server.
    """

    def __init__(self, ask: Callable[[], object], ahead: int, width: Width, overload: Overload) -> None:
        self._ask, self._ahead, self._width, self._overload = ask, ahead, width, overload
        self._asked = 0
        self.held: dict[Slot, None] = {}  # an ordered set

    def fill(self) -> None:
        """Request as many calls as there are free slots."""
        slots = self._width.few if self._overload.here else self._width.most
        while self._asked < self._ahead and len(self.held) + self._asked < slots:
            self._asked += 1
            self._ask()

    def come(self) -> Slot:
        """Note that a requested call has arrived; returns its slot."""
        self._asked -= 1
        slot = Slot(self)
        self.held[slot] = None
        self.fill()
        return slot

    def look(self) -> None:
        """Free the slots of calls whose requests have not arrived since the last check, and request calls for them."""
        for slot in [slot for slot in self.held if slot.seen and not slot.here]:
            del self.held[slot]
        for slot in self.held:
            slot.seen = True
        self.fill()


_creating = Lock()  # so that the newest server of the library is the one that was just made

_ALL = Width(2**31, 2**31)
"""Width of a method that is answered under any load."""


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Core server whose calls come through lanes, and which survives calls whose path is not UTF-8.

    grpc.aio requests one call of each method at a time, and visits all methods whenever a call arrives. Here the lane
    decides how many calls are requested, each by a task that goes on to serve the call.

    grpc.aio decodes the path of a call that no registered method takes, and an invalid byte raises an exception that
    ends the server. So all methods are registered, and one more, which no client can name, takes all other paths.
    """

    others = f"/{secrets.token_hex(16)}"

    def open(self, ahead: int, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        """Set, before the start, how many calls are requested in advance, and the interceptors."""
        self._ahead, self._before = ahead, tuple(interceptors)
        self._handlers: dict[str, Handler] = {}
        self._widths: dict[str, Width] = {}
        self.lanes: list[Lane] = []
        self.overload = Overload(ahead)
        self.came = 0
        """Calls that have arrived so far."""
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, handlers: Mapping[str, Handler], widths: Mapping[str, Width]) -> None:
        """Add methods, and the widths of their lanes; methods without a width take all calls."""
        self.add_registered_method_handlers(dict(handlers))
        self._handlers.update(handlers)
        self._widths.update(widths)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[object]:
        loop = asyncio.get_running_loop()
        if method == self.others.encode():
            return loop.create_task(self._take_other())
        if method is not None:
            self._open_lane(method)
        return loop.create_future()  # never done: lanes request the calls of registered methods

    async def _take_other(self) -> object:
        state: object = await self._request_call()
        self.came += 1
        return state

    def _open_lane(self, method: bytes) -> None:
        name, resolver = method.decode(), cygrpc._MethodResolver([], self._handlers)
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            try:
                state = await self._request_registered_call(method)
            except cygrpc._RequestCallError:  # the server ends
                return
            self.came += 1
            slot = lane.come()
            current_slot.set(slot)
            try:
                call = cygrpc._handle_rpc(name, resolver, self._before, state, loop, False)
                await cygrpc._schedule_rpc_coro(call, state, loop, name)
            finally:
                slot.leave()

        def ask() -> None:
            task = loop.create_task(serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        lane = Lane(ask, self._ahead, self._widths.get(name, _ALL), self.overload)
        self.lanes.append(lane)
        lane.fill()


class TransportServer(Server):
    """Server of grpc.aio whose methods are all registered, each with a lane of its own.

    Args:
        interceptors: interceptors of all methods.
        options: channel arguments.
        ahead: calls of each method that are requested in advance.
    """

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]], ahead: int
    ) -> None:
        # Instead of the constructor of the base class, which makes a core of its own class.
        self._loop = cygrpc.get_working_loop()
        with _creating:
            counted = (*options, ("grpc.enable_channelz", 1))
            self._server = _Core(self._loop, None, (), tuple(interceptors), counted, None)
            self._channelz = _newest_server()
        self._came = self._last_missing = 0
        self._server.open(ahead, interceptors)
        self._server.add_registered_method_handlers({_Core.others: grpc.stream_stream_rpc_method_handler(_unknown)})

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Raise NotImplementedError: the server takes calls of registered methods only."""
        raise NotImplementedError("methods of this server are registered")

    def add(
        self,
        service: str,
        handlers: Mapping[str, Handler],
        widths: Mapping[str, Width] = MappingProxyType({}),
    ) -> None:
        """Add the methods of a service, before the server starts.

        Args:
            service: full name of the service.
            handlers: handlers by name of the method.
            widths: widths by name of the method; a method without one takes all calls.
        """
        self._server.add(
            {f"/{service}/{name}": handler for name, handler in handlers.items()},
            {f"/{service}/{name}": width for name, width in widths.items()},
        )

    async def start(self) -> None:
        """Start to serve. Whoever learns that the server has started may call at once: no call is dropped."""
        await super().start()
        await asyncio.sleep(0)  # the lanes request their first calls, in tasks
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace: float | None) -> None:
        """Stop; calls at work have so many seconds."""
        self._watching.cancel()
        await super().stop(grace)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._server.overload.look(self._missing())
            for lane in self._server.lanes:
                lane.look()

    def _missing(self) -> int:
        """Count the calls that have begun so far and not been handed over."""
        if self._server.came != self._came:  # else nothing was dropped: that happens only while calls arrive
            self._came = self._server.came
            data = json.loads(cygrpc.channelz_get_server(self._channelz))["server"]["data"]
            self._last_missing = int(data.get("callsStarted", 0)) - self._came
        return self._last_missing


def _newest_server() -> int:
    """Return the channelz id of the server that was created last."""
    newest, end = 0, False
    while not end:
        page = json.loads(cygrpc.channelz_get_servers(newest + 1))
        newest, end = (
            max([newest, *(int(server["ref"]["serverId"]) for server in page.get("server", ()))]),
            "end" in page,
        )
    return newest


async def _unknown(_requests: object, context: CallContext) -> None:
    await abort(context, grpc.StatusCode.UNIMPLEMENTED, "method: got a path that this server does not have")


async def abort(context: CallContext, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
    """End a call with a status, unless its client has gone; the handler returns any value after this."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError as error:
        # The context keeps it: with its traceback, what the handler holds would stay until garbage is collected.
        error.__traceback__ = None
    except grpc.aio.InternalError:
        pass


class MetadataLogFilter(logging.Filter):
    """Log filter that drops records of grpc.aio with invalid metadata of callers, which may hold tokens.

    Args:
        logs: gets a line instead, once a second at most.
    """

    _logger = logging.getLogger("grpc._cython.cygrpc")

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def filter(self, record: logging.LogRecord) -> bool:
        """Check whether a record is written."""
        if not str(record.msg).startswith("Invalid encoding on"):
            return True
        self._logs.seldom("metadata is not UTF-8")
        return False

    def open(self) -> None:
        """Install the filter."""
        self._logger.addFilter(self)

    def close(self) -> None:
        """Remove the filter."""
        self._logger.removeFilter(self)
