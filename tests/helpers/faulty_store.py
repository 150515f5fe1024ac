"""A proxy before a server of S3 that answers some requests as a bad network or a bad store would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar, Literal

Fault = Literal["slow", "busy", "cut", "denied", "lost", "unanswered"]
"""A second late; 503; half of the body; 403; accepted without its body; done, and answered with 503."""


class FaultyStore:
    """Faults that wait for requests.

    Args:
        address: host:port of the proxy.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._faults: list[list[object]] = []

    def fail(self, fault: Fault, method: str, part: str = "", times: int = 1000) -> None:
        """Answer the next requests of a method, whose targets have this part, with a fault."""
        self._faults.append([fault, method, part, times, times])

    @property
    def unused(self) -> list[object]:
        """Faults that no request has met."""
        return [fault for fault, _, _, times, left in self._faults if left == times]

    def next(self, method: str, target: str) -> object:
        """Return the fault of a request, or None."""
        for each in self._faults:
            fault, of, part, _, left = each
            if method == of and str(part) in target and isinstance(left, int) and left:
                each[4] = left - 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ClassVar[FaultyStore]
    behind: ClassVar[str]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:  # the name that http.server looks for
        body = self._body()
        fault = self.store.next(self.command, self.path)
        if fault == "slow":
            time.sleep(1)
        if fault in ("busy", "denied"):
            self._answer(503 if fault == "busy" else 403, {}, _ERRORS[fault])
            return
        connection = HTTPConnection(self.behind, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION}
        if fault == "lost":
            body, headers = b"", {}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data, got = answer.read(), dict(answer.getheaders())
        connection.close()
        if fault == "unanswered":
            self._answer(503, {}, _ERRORS["busy"])
        else:
            self._answer(answer.status, got, data, cut=fault == "cut")

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


_OF_A_CONNECTION = ("connection", "content-length", "expect", "transfer-encoding")

_ERRORS = {
    "busy": b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    "denied": b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
}


@contextmanager
def faulty_store(behind: str) -> Iterator[FaultyStore]:
    """Run a proxy before the server at this address for the time of the block."""
    handler = type("Handler", (_Handler,), {"behind": behind})
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
