"""The page of a server over plain HTTP, from a thread of its own: its metrics, and whether it lives and is ready."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from mmpos.errors import InvalidInputError
from mmpos_server.listening import bind
from mmpos_server.systemd import inherited

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Page", "exposed"]

MOST_CONNECTIONS = 256
"""Beyond them the oldest ones are closed: those that are silent never keep a probe out."""

SECONDS = 5.0
"""Connections end after at most twice this time, whatever they do."""


class Page:
    """What the page says.

    Args:
        registry: the metrics.
        loop: the event loop of the server: as long as it turns, the server lives.
        ready: whether the server takes calls; asked from the thread of the page.
    """

    def __init__(self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, ready: Callable[[], bool]) -> None:
        self._registry, self._loop, self._ready = registry, loop, ready

    def application(self) -> web.Application:
        """The three paths; any other is not found."""
        application = web.Application()
        application.on_response_prepare.append(_last)
        application.add_routes(
            [web.get("/metrics", self._metrics), web.get("/livez", self._livez), web.get("/readyz", self._readyz)]
        )
        return application

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})

    async def _livez(self, request: web.Request) -> web.Response:
        """Wait for a turn of the event loop; how long that may take is for the probe's timeout to say."""
        turn = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(turn), SECONDS)
        except TimeoutError:
            return web.Response(status=503, text=f"the event loop has not turned for {SECONDS:g} s\n")
        return web.Response(text="live\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not serving\n")


@contextmanager
def exposed(page: Page, host: str, port: int) -> Iterator[int]:
    """Serve the page while inside; gives the port.

    Args:
        page: what it says.
        host: where to listen, unless a service manager hands over a socket.
        port: likewise; 0 picks one.

    Raises:
        InvalidInputError: the port is taken or the address is not of this machine.
    """
    listening = inherited() or _listening(host, port)
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(_serve(page, listening, ended),), name="mmpos-page", daemon=True
    )
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def _listening(host: str, port: int) -> socket.socket:
    try:
        found = bind(host, port)
        found.listen(MOST_CONNECTIONS)
    except InvalidInputError as error:
        raise InvalidInputError(f"metrics-{error}".removesuffix(" (0 picks one)")) from None
    return found


async def _last(request: web.Request, response: web.StreamResponse) -> None:
    """Keep no connection for a second request."""
    response.force_close()


async def _serve(page: Page, listening: socket.socket, ended: asyncio.Event) -> None:
    runner = web.AppRunner(page.application(), access_log=None, lingering_time=0)
    await runner.setup()
    server = runner.server
    assert server is not None

    loop = asyncio.get_running_loop()

    def connection() -> asyncio.Protocol:
        # In the second next round, when this connection counts.
        loop.call_soon(loop.call_soon, limit)
        return server()

    def limit() -> None:
        connections = server.connections  # oldest first
        for handler in connections[: max(0, len(connections) - MOST_CONNECTIONS)]:
            _abort(handler)

    accepting = await loop.create_server(connection, sock=listening)
    sweeping = asyncio.create_task(_sweep(server))
    await ended.wait()
    accepting.close()
    sweeping.cancel()
    with suppress(asyncio.CancelledError):
        await sweeping
    await runner.cleanup()


async def _sweep(server: web.Server) -> None:
    """End what was there at the last look already: the silent, the slow, and those that do not read."""
    before: set[web.RequestHandler] = set()
    while True:
        await asyncio.sleep(SECONDS)
        now = set(server.connections)
        for handler in before & now:
            _abort(handler)
        before = now


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
