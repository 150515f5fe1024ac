"""Serve metrics, liveness and readiness over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier, Thread
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from mmpos_server.listening import bind

__all__ = ["exposed"]


THREADS, MOST_CONNECTIONS = 8, 64
"""Threads that answer, and connections beyond which the oldest is closed."""

SECONDS, BUSY_SECONDS = 5.0, 0.5
"""Seconds after which a connection is closed, also while all threads are busy: idle clients cannot block a probe."""


@contextmanager
def exposed(
    registry: CollectorRegistry, live: Callable[[], bool], ready: Callable[[], bool], host: str, port: int
) -> Iterator[int]:
    """Serve the page in threads while the context is open, and yield the port.

    Args:
        registry: the metrics to show.
        live: thread-safe function that returns whether the server is working.
        ready: thread-safe function that returns whether the server accepts calls.
        host: address to listen on.
        port: port to listen on; 0 picks a free one.
    """
    checks, metrics = {"/livez": live, "/readyz": ready}, make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start)
        status = "404 Not Found" if path not in checks else "200 OK" if checks[path]() else "503 Service Unavailable"
        start(status, [("Content-Type", "text/plain")])
        return [f"{status}\n".encode()]

    page = _Page(bind(host, port, flag="--metrics"))
    page.set_app(app)
    Thread(target=page.serve_forever, args=(0.1,), name="page", daemon=True).start()
    try:
        yield page.server_port
    finally:
        page.shutdown()
        page.server_close()


class _Request(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


class _Page(WSGIServer):
    """HTTP server with a fixed number of threads, which closes slow connections."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.server_activate()
        self._began: dict[socket.socket, float] = {}  # oldest first
        self._pool, together = ThreadPoolExecutor(THREADS, "page"), Barrier(THREADS + 1)
        for _ in range(THREADS):
            self._pool.submit(together.wait)
        together.wait()  # all threads have started

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        self._began[request] = monotonic()
        self._pool.submit(self._answer, request, client_address)

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            with suppress(OSError):  # the client has disconnected
                self.finish_request(request, client_address)
        finally:
            self._began.pop(request, None)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """End old and excess connections; the base class calls this after each connection and ten times a second."""
        now = monotonic()
        for i, (request, began) in enumerate(reversed(list(self._began.items()))):
            if i >= MOST_CONNECTIONS or now - began > (SECONDS if i < THREADS else BUSY_SECONDS):
                with suppress(OSError):  # its thread has closed it; otherwise, this wakes its thread
                    request.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        """Close the page; its threads end with their connections."""
        super().server_close()
        self._pool.shutdown(wait=False, cancel_futures=True)
