"""The server of gRPC as this one needs it: one that no path ends, and whose own log says nothing of callers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

from mmpos_server.logs import Logs

__all__ = ["DiscreetLog", "TransportServer", "abort"]


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """A server that goes on when the path of a call is no UTF-8.

    grpc.aio decodes the path of a call that no registered method takes, and a wrong byte there is an exception that
    ends the server. For a registered method it takes the name that was registered. So all methods are registered, and
    one more, which no client can name, takes the calls of all paths that are left.
    """

    others = f"/{secrets.token_hex(16)}"

    def _make_request_call_future(self, method: bytes | None) -> Any:
        loop = asyncio.get_running_loop()
        if method is None:
            return loop.create_future()  # never done: nothing asks for calls that are known by their path
        if method == self.others.encode():
            return loop.create_task(self._request_call())
        return super()._make_request_call_future(method)


class TransportServer(Server):
    """A server of grpc.aio whose methods are all registered, each with a queue of its own.

    Args:
        interceptors: what stands before the methods.
        options: channel arguments.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> None:
        # In the place of that of the base class, which makes a core of its own class.
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), tuple(interceptors), tuple(options), None)
        self._server.add_registered_method_handlers({_Core.others: grpc.stream_stream_rpc_method_handler(_unknown)})

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Refuse: nothing would ever ask for their calls."""
        raise NotImplementedError("methods of this server are registered")

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
