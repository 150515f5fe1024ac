"""The gRPC transport: a server whose calls come through lanes, which limit how many of a method are taken at once."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from threading import Lock
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

from mmpos_server.logs import Logs

__all__ = [
    "LOOK_SECONDS",
    "DiscreetLog",
    "Lane",
    "Overload",
    "Slot",
    "TransportServer",
    "Width",
    "abort",
    "current_slot",
]


LOOK_SECONDS = 0.1
"""How often the transport is asked whether it has dropped calls."""

_BURST = 0.5
"""Seconds of drops that are no overload yet: of a burst, and of its callers who try again."""

_CALM = 1.0
"""Seconds without a drop after which there is no overload any more."""


class Overload:
    """Whether the transport drops calls for longer than a burst takes.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first = self._last = -math.inf
        self.here = False

    def look(self, *, dropped: bool) -> None:
        """Take note of whether calls were dropped since the last look."""
        now = self._clock()
        if now - self._last >= _CALM:
            self._first, self.here = now, False
        if dropped:
            self._last = now
            self.here = now - self._first >= _BURST


class Slot:
    """The place of one call in its lane, from when it comes until its work is done.

    Args:
        lane: that it is in.
    """

    __slots__ = ("_lane", "here", "seen")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.here = False
        """Whether its request has come."""
        self.seen = False
        """Whether the lane was looked at since the call came."""

    def begin(self) -> None:
        """Hold the place from now on as long as the work takes: the request is here."""
        self.here = True
        self._lane.hold(self)

    def leave(self) -> None:
        """Give the place to another call; once more is no harm."""
        self._lane.leave(self)


current_slot: ContextVar[Slot | None] = ContextVar("current_slot", default=None)
"""The place of the running call; None where it came another way than through a lane."""


class Width(NamedTuple):
    """Places of a lane, and how many there are of them under overload."""

    most: int
    few: int


class Lane:
    """The calls of one method: those that are asked for, and those that came. Used from the event loop only.

    The transport hands over as many calls as were asked for and drops the others for next to nothing, while a refusal
    in Python costs half of what an answer does. So calls are refused by not asking for them. There are many places, for
    bursts and for callers who wait for their answers. Under overload some must go away in any case: then there are few,
    so those who stay are served quickly.

    A call whose request does not come loses its place at the second look after it.

    Args:
        ask: asks the transport for one more call.
        ahead: most calls that are asked for and have not come.
        width: places.
        overload: of the server.
    """

    def __init__(self, ask: Callable[[], object], ahead: int, width: Width, overload: Overload) -> None:
        self._ask, self._ahead, self._width, self._overload = ask, ahead, width, overload
        self._asked = 0
        self._held: dict[Slot, None] = {}  # an ordered set

    def fill(self) -> None:
        """Ask for as many calls as there is room for."""
        places = self._width.few if self._overload.here else self._width.most
        while self._asked < self._ahead and len(self._held) + self._asked < places:
            self._asked += 1
            self._ask()

    def come(self) -> Slot:
        """A call came that was asked for; gives its place."""
        self._asked -= 1
        place = Slot(self)
        self._held[place] = None
        self.fill()
        return place

    def hold(self, place: Slot) -> None:
        """Keep a place, or take it again."""
        self._held[place] = None

    def leave(self, place: Slot) -> None:
        """Give a place back, if it was not lost."""
        if place in self._held:
            del self._held[place]
            self.fill()

    def look(self) -> None:
        """Take the places of those whose requests did not come between two looks; ask for the calls that fit now."""
        for place in [place for place in self._held if place.seen and not place.here]:
            del self._held[place]
        for place in self._held:
            place.seen = True
        self.fill()


_creating = Lock()  # so that the newest server of the library is the one that was just made

_ON_THEIR_WAY = 8
"""Calls that may have begun and not come yet, though none was dropped."""

_ALL = Width(2**31, 2**31)
"""Places of a method that is answered however much there is to do."""


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """A server whose calls come through lanes, and that goes on when the path of a call is no UTF-8.

    grpc.aio asks for one call of each method at a time, and looks at all methods whenever a call comes. Here as many
    are asked for as their lane says, each by a task that goes on to serve it.

    It decodes the path of a call that no registered method takes, and a wrong byte there is an exception that ends the
    server. For a registered method it takes the name that was registered. So all methods are registered, and one more,
    which no client can name, takes the calls of all paths that are left.
    """

    others = f"/{secrets.token_hex(16)}"

    def open(self, ahead: int, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        """Say before the start how many calls are asked for in advance, and what stands before the methods."""
        self._ahead, self._before = ahead, tuple(interceptors)
        self._handlers: dict[str, Any] = {}
        self._widths: dict[str, Width] = {}
        self.lanes: list[Lane] = []
        self.overload = Overload()
        self.came = 0
        """Calls so far."""
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, handlers: Mapping[str, Any], widths: Mapping[str, Width]) -> None:
        """Add methods, and how many calls of each are taken; all that come of those that are not named."""
        self.add_registered_method_handlers(dict(handlers))
        self._handlers.update(handlers)
        self._widths.update(widths)

    def _make_request_call_future(self, method: bytes | None) -> Any:
        loop = asyncio.get_running_loop()
        if method == self.others.encode():
            self.came += 1  # but for the first time: the last one has come
            return loop.create_task(self._request_call())
        if method is not None:
            self._open_lane(method)
        return loop.create_future()  # never done: lanes ask, and nothing asks for calls that are known by their path

    def _open_lane(self, method: bytes) -> None:
        name, resolver = method.decode(), cygrpc._MethodResolver([], self._handlers)
        loop = asyncio.get_running_loop()

        async def serve() -> None:
            try:
                state = await self._request_registered_call(method)
            except cygrpc._RequestCallError:  # the server ends
                return
            self.came += 1
            place = lane.come()
            current_slot.set(place)
            try:
                call = cygrpc._handle_rpc(name, resolver, self._before, state, loop, False)
                await cygrpc._schedule_rpc_coro(call, state, loop, name)
            finally:
                place.leave()

        def ask() -> None:
            task = loop.create_task(serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        lane = Lane(ask, self._ahead, self._widths.get(name, _ALL), self.overload)
        self.lanes.append(lane)
        lane.fill()


class TransportServer(Server):
    """A server of grpc.aio whose methods are all registered, each with a lane of its own.

    Args:
        interceptors: what stands before the methods.
        options: channel arguments.
        ahead: calls of each method that are asked for in advance.
    """

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]], ahead: int
    ) -> None:
        # In the place of that of the base class, which makes a core of its own class.
        self._loop = cygrpc.get_working_loop()
        with _creating:
            counted = (*options, ("grpc.enable_channelz", 1))
            self._server = _Core(self._loop, None, (), tuple(interceptors), counted, None)
            self._channelz = _newest_server()
        self._lost = self._came = 0
        self._server.open(ahead, interceptors)
        self._server.add_registered_method_handlers({_Core.others: grpc.stream_stream_rpc_method_handler(_unknown)})

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Refuse: nothing would ever ask for their calls."""
        raise NotImplementedError("methods of this server are registered")

    def add(
        self,
        service: str,
        handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]],
        widths: Mapping[str, Width] = MappingProxyType({}),
    ) -> None:
        """Add the methods of a service, before the server starts.

        Args:
            service: its full name.
            handlers: by name of the method.
            widths: places of those methods whose calls wait for each other; all calls of others are taken.
        """
        self._server.add(
            {f"/{service}/{name}": handler for name, handler in handlers.items()},
            {f"/{service}/{name}": width for name, width in widths.items()},
        )

    async def start(self) -> None:
        """Serve."""
        await super().start()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, grace: float | None) -> None:
        """End; calls at work have so many seconds."""
        self._watching.cancel()
        await super().stop(grace)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._server.overload.look(dropped=self._drops())
            for lane in self._server.lanes:
                lane.look()

    def _drops(self) -> bool:
        """Whether the transport has dropped calls since it was last asked: some that began have not come."""
        if self._server.came == self._came:
            return False  # so nothing was dropped: a call is when others hold the places
        self._came = self._server.came
        data = json.loads(cygrpc.channelz_get_server(self._channelz))["server"]["data"]
        lost, before = int(data.get("callsStarted", 0)) - self._server.came, self._lost
        if before < lost <= before + _ON_THEIR_WAY:
            return False
        self._lost = lost
        return lost > before


def _newest_server() -> int:
    """The number by which the library knows the server that was made last."""
    newest, end = 0, False
    while not end:
        page = json.loads(cygrpc.channelz_get_servers(newest + 1))
        newest, end = max([newest, *(int(found["ref"]["serverId"]) for found in page.get("server", ()))]), "end" in page
    return newest


async def _unknown(_requests: object, context: Any) -> None:
    await abort(context, grpc.StatusCode.UNIMPLEMENTED, "method: got a path that this server does not have")


async def abort(context: Any, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    """End a call with a status; one whose client has gone meanwhile needs none. The handler then returns anything."""
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.AbortError as error:
        # The context keeps it: with its traceback, what the handler holds would stay until garbage is collected.
        error.__traceback__ = None
    except grpc.aio.InternalError:
        pass


class DiscreetLog(logging.Filter):
    """Keeps what callers send out of the log of grpc.aio, which prints metadata that is no UTF-8, tokens included.

    Args:
        logs: gets a line instead, once a second at most.
    """

    _logger = logging.getLogger("grpc._cython.cygrpc")

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if not str(record.msg).startswith("Invalid encoding on"):
            return True
        self._logs.seldom("metadata that is no UTF-8")
        return False

    def open(self) -> None:
        """Begin."""
        self._logger.addFilter(self)

    def close(self) -> None:
        """End."""
        self._logger.removeFilter(self)
