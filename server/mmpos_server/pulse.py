"""Call the own server once a second: the time is the lag that every client sees, and failures end the process."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

__all__ = ["Pulse"]

_PERIOD_SECONDS, _SOON_SECONDS, _TIMEOUT_SECONDS, _MOST_FAILURES = 1.0, 0.05, 10.0, 3
"""Seconds between calls, and after a slow one; seconds until a call has failed, and failures in a row after which the
server has failed.
"""

_CHECK = "/grpc.health.v1.Health/Check"


class Pulse:
    """Thread that calls the server's health through a unix socket of its own.

    A call to the port may reach another worker, and would need a client's certificate where the port requires one.

    Args:
        failed: function that receives the reason when several calls in a row have failed; called in the thread.
    """

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._began = math.inf
        self._last = self._before = 0.0
        self._folder = ""
        self._ended = Event()
        self._thread = Thread(target=self._run, name="mmpos-pulse", daemon=True)

    @property
    def lag(self) -> float:
        """Seconds that each of the last two calls took at least. This is thread-safe.

        One call alone may be slow because one request holds the interpreter. A running call counts as the last one as
        soon as it is slower than that.
        """
        return max(min(self._before, self._last), min(self._last, monotonic() - self._began))

    def start(self, add: Callable[[str], object]) -> None:
        """Begin to call the server; ``add`` makes it listen on an address."""
        self._folder = tempfile.mkdtemp(prefix="mmpos-pulse-")
        add(f"unix:{self._folder}/pulse")
        self._thread.start()

    def stop(self) -> None:
        """End the calls."""
        self._ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        failures = 0
        request = health_pb2.HealthCheckRequest().SerializeToString()
        with grpc.insecure_channel(f"unix:{self._folder}/pulse") as channel:
            check: Any = channel.unary_unary(_CHECK)
            while not self._ended.wait(_PERIOD_SECONDS if self._last < _SOON_SECONDS else _SOON_SECONDS):
                self._began = monotonic()
                try:
                    check(request, timeout=_TIMEOUT_SECONDS)
                except grpc.RpcError as error:
                    failures += 1
                    if failures == _MOST_FAILURES and not self._ended.is_set():
                        self._failed(f"{failures} calls to itself failed, the last with {error.code().name}")
                else:
                    failures = 0
                self._before, self._last, self._began = self._last, monotonic() - self._began, math.inf
