"""The server of gRPC as this one needs it: one that no path ends, and whose own log says nothing of callers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import monotonic, thread_time
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

from mmpos_server.logs import Logs

__all__ = ["DiscreetLog", "TransportServer", "abort"]


_LOOK_SECONDS = 0.1
"""How often it is asked whether there is overload: bursts are shorter."""
_FULL = 0.75
"""Share of the places: if more than these were taken all the time, there is overload."""
_LEAST_IDLE = 0.1
"""Share of the time in which the event loop had nothing to do: from then on there is none any more."""


class Arrivals:
    """The calls of one method that have come and are not looked at yet, oldest first. Used from the event loop only.

    The core has a queue of its own behind this one, and drops what does not fit. Under overload both are always full,
    and every call waits for all places of both; yet short queues drop calls of a burst, or of a few threads that wait
    for their answers. So this one has many places until they are full for a while, and then one until there is rest.

    Args:
        ask: waits in the core for the next call; raises when the server ends.
        places: most calls here.
        clock: seconds, and those of them in which the event loop worked.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Any]], places: int, clock: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        self._ask, self._most, self._clock = ask, places, clock or _clock
        self._places = places
        self._here: deque[Any] = deque()
        self._next: asyncio.Future[Any] | None = None
        self._asking = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked, _ = self._waits = self._clock()
        self._idle, self._fewest, self._overloaded = 0.0, places, False

    def next(self) -> asyncio.Future[Any]:
        """The next call, one at a time; a failure of the transport takes the place of one."""
        future = asyncio.get_running_loop().create_future()
        self._look()
        if self._here:
            _hand_over(future, self._here.popleft())
        else:
            self._next, self._waits = future, self._clock()
        while len(self._here) + self._asking < self._places:
            self._asking += 1
            task = asyncio.get_running_loop().create_task(self._receive())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return future

    async def drain(self) -> None:
        """Ask for no further calls, and wait until those that are here are looked at."""
        self._places = self._most = 0
        while self._here:
            await asyncio.sleep(0)

    def _look(self) -> None:
        """Have few places under overload, and else many."""
        now, _ = self._clock()
        self._fewest = min(self._fewest, len(self._here))
        if (seconds := now - self._looked) >= _LOOK_SECONDS:
            if self._overloaded:
                self._overloaded = self._idle < _LEAST_IDLE * seconds
            else:
                self._overloaded = self._fewest > _FULL * self._most
            self._places = min(self._most, 1) if self._overloaded else self._most
            self._looked, self._idle, self._fewest = now, 0.0, self._most

    async def _receive(self) -> None:
        """Receive calls as long as there are places for them."""
        call: Any = None
        while not isinstance(call, Exception) and len(self._here) + self._asking <= self._places:
            try:
                call = await self._ask()
            except Exception as error:  # of the transport, in a class of its inside: who serves knows what it means
                call = error
            if self._next is None or self._next.done():
                self._here.append(call)
                continue
            future, self._next = self._next, None
            seconds, worked = (now - then for now, then in zip(self._clock(), self._waits, strict=True))
            self._idle += max(0.0, seconds - worked)
            _hand_over(future, call)
        self._asking -= 1


def _clock() -> tuple[float, float]:
    return monotonic(), thread_time()


def _hand_over(future: asyncio.Future[Any], call: Any) -> None:
    if isinstance(call, Exception):
        future.set_exception(call)
    else:
        future.set_result(call)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """A server that goes on when the path of a call is no UTF-8, and whose calls wait in queues of ours.

    grpc.aio decodes the path of a call that no registered method takes, and a wrong byte there is an exception that
    ends the server. For a registered method it takes the name that was registered. So all methods are registered, and
    one more, which no client can name, takes the calls of all paths that are left.
    """

    others = f"/{secrets.token_hex(16)}"

    def wait_in_queues(self, places: int) -> None:
        """Have a queue of so many places for each method."""
        self._places = places
        self._arrivals: dict[bytes, Arrivals] = {}

    async def drain(self) -> None:
        """Ask for no further calls, and wait until those that came are looked at."""
        for arrivals in self._arrivals.values():
            await arrivals.drain()

    def _make_request_call_future(self, method: bytes | None) -> Any:
        if method is None:
            # Never done: nothing asks for calls that are known by their path.
            return asyncio.get_running_loop().create_future()
        if method not in self._arrivals:
            ask = (
                self._request_call if method == self.others.encode() else partial(self._request_registered_call, method)
            )
            self._arrivals[method] = Arrivals(ask, self._places)
        return self._arrivals[method].next()


class TransportServer(Server):
    """A server of grpc.aio whose methods are all registered, each with a queue of its own.

    Args:
        interceptors: what stands before the methods.
        options: channel arguments.
        places: of each queue, besides those in the core.
    """

    def __init__(
        self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]], places: int
    ) -> None:
        # In the place of that of the base class, which makes a core of its own class.
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), tuple(interceptors), tuple(options), None)
        self._server.wait_in_queues(places)
        self._server.add_registered_method_handlers({_Core.others: grpc.stream_stream_rpc_method_handler(_unknown)})

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Refuse: nothing would ever ask for their calls."""
        raise NotImplementedError("methods of this server are registered")

    async def stop(self, grace: float | None) -> None:
        """End; calls that wait in the core are cancelled."""
        await self._server.drain()
        await super().stop(grace)

    def add(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Add the methods of a service, before the server starts."""
        self.add_registered_method_handlers(service, dict(handlers))


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
