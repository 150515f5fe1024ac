"""Serve metrics, liveness and readiness over HTTP."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mmpos.errors import InvalidInputError
from mmpos_server.listening import bind

__all__ = ["exposed"]


MOST_CONNECTIONS = 64
"""Maximum number of connections; a new one closes the oldest, so that idle clients cannot block a probe."""

SECONDS = 5.0
"""Seconds after which a connection to the page is closed."""


@contextmanager
def exposed(
    registry: CollectorRegistry, live: Callable[[], bool], ready: Callable[[], bool], host: str, port: int
) -> Iterator[int]:
    """Serve the page in a thread while the context is open, and yield the port.

    Args:
        registry: the metrics to show.
        live: thread-safe function that returns whether the server is working.
        ready: thread-safe function that returns whether the server accepts calls.
        host: address to listen on.
        port: port to listen on; 0 picks a free one.

    Raises:
        InvalidInputError: the port is in use, or the address is not on this machine.
    """
    try:
        listening = bind(host, port)
        listening.listen(MOST_CONNECTIONS)
    except InvalidInputError as error:
        raise InvalidInputError(f"metrics-{error}".removesuffix(" (0 picks one)")) from None
    page = _Page(listening, registry, live, ready)
    thread = threading.Thread(target=page.serve_forever, args=(0.1,), name="mmpos-page", daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        page.shutdown()
        page.server_close()


class _Page(ThreadingHTTPServer):
    """HTTP server that closes old and excess connections, even if they are busy."""

    daemon_threads, block_on_close = True, False

    def __init__(
        self, listening: socket.socket, registry: CollectorRegistry, live: Callable[[], bool], ready: Callable[[], bool]
    ) -> None:
        super().__init__(listening.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.registry, self.live, self.ready = registry, live, ready
        self._began: dict[socket.socket, float] = {}  # oldest first
        self._lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; pause if the process has no free descriptors, an error that the caller ignores."""
        try:
            return super().get_request()
        except OSError:
            sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, and close the oldest connection if there are too many."""
        with self._lock:
            self._began[request] = monotonic()
            for oldest in list(self._began)[:-MOST_CONNECTIONS]:
                _end(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._began.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are too old; the base class calls this several times a second."""
        with self._lock:
            for request, began in self._began.items():
                if monotonic() - began > SECONDS:
                    _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the client has disconnected."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logging.getLogger(__name__).error("the page could not answer", exc_info=error)


def _end(connection: socket.socket) -> None:
    """Wake the thread of a connection, so that it closes the connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    server: _Page
    server_version, sys_version = "mmpos", ""

    def do_GET(self) -> None:
        """Answer /metrics, /livez and /readyz."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(self.server.registry), kind)
        elif path == "/livez":
            live = self.server.live()
            self._answer(200 if live else 503, b"live\n" if live else b"the server has stopped working\n")
        elif path == "/readyz":
            ready = self.server.ready()
            self._answer(200 if ready else 503, b"ready\n" if ready else b"not serving\n")
        else:
            self._answer(404, b"not found\n")

    def do_HEAD(self) -> None:
        """Answer like GET, but without the body."""
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
