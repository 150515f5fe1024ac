"""HTTP page of metrics, liveness and readiness; loaded only where a port for it is open."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mmpos.errors import InvalidInputError
from mmpos_server.listening import bind, inherited

__all__ = ["Page", "exposed"]


MOST_CONNECTIONS = 256
"""Most connections of the page; further ones close the oldest, so that idle clients never keep a probe out."""

SECONDS = 5.0
"""Seconds of a connection of the page: each is closed after at most twice this time."""


class Page:
    """HTTP page of metrics, liveness and readiness.

    Args:
        registry: metrics to show.
        loop: event loop of the server; the server is live as long as the loop runs callbacks.
        ready: returns whether the server takes calls; called from the thread of the page.
    """

    def __init__(self, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, ready: Callable[[], bool]) -> None:
        self._registry, self._loop, self._ready = registry, loop, ready

    def application(self) -> web.Application:
        """Return the application with the paths /metrics, /livez and /readyz."""
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
        """Wait for a round of the event loop; the timeout of the probe decides how long that may take."""
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
    """Serve the page in a thread while the context is open; yields the port.

    Args:
        page: page to serve.
        host: address to listen on, unless systemd passes a socket.
        port: port to listen on, likewise; 0 picks a free one.

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
        listening = bind(host, port)
        listening.listen(MOST_CONNECTIONS)
    except InvalidInputError as error:
        raise InvalidInputError(f"metrics-{error}".removesuffix(" (0 picks one)")) from None
    return listening


async def _last(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after one request."""
    response.force_close()


async def _serve(page: Page, listening: socket.socket, ended: asyncio.Event) -> None:
    runner = web.AppRunner(page.application(), access_log=None, lingering_time=0)
    await runner.setup()
    server = runner.server
    assert server is not None

    loop = asyncio.get_running_loop()

    def connection() -> asyncio.Protocol:
        # Two rounds later, when this connection is among those of the server.
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
    """Close connections that were open at the previous check: idle and slow ones, and those that do not read."""
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
