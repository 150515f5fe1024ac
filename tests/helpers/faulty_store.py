"""A proxy in front of an S3 server that answers some requests as a bad network or a faulty store would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar, Literal

Fault = Literal["slow", "busy", "cut", "denied", "lost"]
"""Answer after a second; answer 503; send half of the body; answer 403; store an empty body."""


class FaultyStore:
    """Faults to inject into requests.

    Args:
        address: host:port of the proxy.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._faults: list[list[object]] = []

    def fail(self, fault: Fault, method: str, part: str = "", times: int = 1000) -> None:
        """Inject a fault into the next requests with this method whose target contains ``part``."""
        self._faults.append([fault, method, part, times, times])

    @property
    def unused(self) -> list[object]:
        """Faults that no request has triggered."""
        return [fault for fault, _, _, times, left in self._faults if left == times]

    def next(self, method: str, target: str) -> object:
        """Return the fault to inject into a request, or None."""
        for entry in self._faults:
            fault, wanted_method, part, _, left = entry
            if method == wanted_method and str(part) in target and isinstance(left, int) and left:
                entry[4] = left - 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ClassVar[FaultyStore]
    upstream: ClassVar[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:  # http.server calls a method of this name
        body = self._body()
        fault = self.store.next(self.command, self.path)
        if fault == "slow":
            time.sleep(1)
        if fault in ("busy", "denied"):
            self._answer(503 if fault == "busy" else 403, {}, _ERRORS[fault])
            return
        connection = HTTPConnection(self.upstream, timeout=300)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        if fault == "lost":
            body, headers = b"", {}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data, answer_headers = answer.read(), dict(answer.getheaders())
        connection.close()
        self._answer(answer.status, answer_headers, data, cut=fault == "cut")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = headers.get("Content-Length", headers.get("content-length")) if self.command == "HEAD" else None
        self.send_header("Content-Length", str(len(data)) if length is None else length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True


_HOP_BY_HOP = ("connection", "content-length", "expect", "transfer-encoding")

_ERRORS = {
    "busy": b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    "denied": b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
}


@contextmanager
def faulty_store(upstream: str) -> Iterator[FaultyStore]:
    """Run a proxy in front of the server at ``upstream`` while the context is open."""
    handler = type("Handler", (_Handler,), {"upstream": upstream})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.store = store = FaultyStore(f"127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
