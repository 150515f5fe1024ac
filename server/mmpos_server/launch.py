"""Run a server process from start to drain: handle signals, and exit in time."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from threading import enumerate as all_threads
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

from mmpos_server.app import Server
from mmpos_server.config import ServerConfig
from mmpos_server.flags import Flags
from mmpos_server.listening import Listen, notify, warn
from mmpos_server.telemetry import Logs, logging_all

if TYPE_CHECKING:
    from mmpos_server.tracing import Tracing

__all__ = ["CUT_OFF", "Running", "leave", "prepare", "serve"]


CUT_OFF = 3
"""Exit status of a process that ended while its threads were still running."""

LAST_SECONDS = 3.0
"""Seconds within which the process must exit after the drain; fewer than the supervisor waits."""

_LOOK_SECONDS = 0.5
"""Maximum seconds between the main thread's checks for signals."""

_SWITCH_SECONDS = 0.001
"""Maximum seconds for which a computing thread keeps other threads waiting."""


def serve(options: Flags) -> None:
    """Serve until SIGTERM or SIGINT, and then until no calls are left; a second signal ends the process immediately.

    If threads are still running after the drain, the process exits with status CUT_OFF. The process prints one line per
    address to stdout as soon as it answers calls.

    Raises:
        InvalidInputError: a setting is wrong, or an address is in use.
    """
    prepare()
    with logging_all(options.log_level) as logs:
        running = Running(options, options.listen, options.settings(), logs)

        def started(addresses: list[str]) -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: running.stop())
            for listening_on in addresses:
                print(f"mmpos_server listening on {listening_on}", flush=True)
            warn(options.listen, logs)
            notify("READY=1")

        server = running.server
        with options.page(server.metrics.registry, lambda: running.live, lambda: server.ready):
            running.run(started)


def prepare() -> None:
    """Set up a process; call this only from its entry point."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Every connection needs an open file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the limit is higher than this system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave() -> NoReturn:
    """Exit with status 0 at once, without waiting for threads or Python's last garbage collection.

    That collection takes seconds if torch is loaded.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


class Running:
    """A server from start to drain. The constructor builds the server and raises an error if its settings are wrong.

    Args:
        options: the command-line flags.
        listen: addresses to listen on.
        config: settings of the server.
        logs: log of the server.
    """

    def __init__(self, options: Flags, listen: Listen, config: ServerConfig, logs: Logs) -> None:
        self._options, self._logs = options, logs
        self._tracing = _tracing() if options.otel else None
        self.server = Server(config, listen, logs=logs, tracing=self._tracing)
        self._events: SimpleQueue[str] = SimpleQueue()  # its put is safe to call in a signal handler
        self._started = False

    @property
    def live(self) -> bool:
        """Whether the server is starting or is still running its checks. This is thread-safe."""
        return self.server.live or not self._started

    def stop(self) -> None:
        """Begin the drain; a second call ends it. Any thread or signal handler may call this."""
        self._events.put("stop")

    def run(self, started: Callable[[list[str]], None]) -> None:
        """Serve until ``stop`` is called, then drain.

        Args:
            started: function called with the addresses as soon as the server answers calls.

        Raises:
            InvalidInputError: an address is in use.
        """
        addresses = self.server.start()
        self._started = True
        started(addresses)
        self._next(math.inf)
        notify("STOPPING=1")
        notice, drain = self._options.notice_seconds, self._options.drain_seconds
        self._logs.info("draining", notice_seconds=notice, drain_seconds=drain)
        self.server.announce_stop()
        seconds = 0.0 if self._next(notice) else drain
        self._end(seconds)
        event = self._next(seconds + LAST_SECONDS)
        if event == "stop":
            self._end(0.0)
            event = self._next(LAST_SECONDS)
        if event != "ended":
            _cut_off(self._logs)
        if self._tracing is not None:
            flushing = Thread(target=self._tracing.close, daemon=True)
            flushing.start()
            flushing.join(LAST_SECONDS)
        self._logs.info("stopped")

    def _next(self, seconds: float) -> str | None:
        end = monotonic() + seconds
        while True:
            # Wait for short periods, since a signal that arrives just before a wait does not end it.
            try:
                return self._events.get(timeout=min(max(0.0, end - monotonic()), _LOOK_SECONDS))
            except Empty:
                if monotonic() >= end:
                    return None

    def _end(self, grace: float) -> None:
        """Stop the server in a thread, so that stopping cannot delay the end of the process."""

        def end() -> None:
            try:
                self.server.stop(grace)
                for thread in _running_threads():
                    thread.join()
            except Exception as error:  # after an error, the exit must not wait for the drain to end
                self._logs.error("stop failed", error)
                self._events.put("failed")
            else:
                self._events.put("ended")

        Thread(target=end, name="mmpos-end", daemon=True).start()


def _tracing() -> Tracing:
    from mmpos_server.tracing import configured

    return configured()


def _running_threads() -> list[Thread]:
    """Return the pool threads that have not ended; their names end with numbers."""
    return [thread for thread in all_threads() if re.fullmatch(r"mmpos-\w+_\d+", thread.name)]


def _cut_off(logs: Logs) -> NoReturn:
    """Log the tracebacks of the running threads and exit, since Python cannot stop a thread."""
    try:
        with tempfile.TemporaryFile("w+") as file:  # a file, since stderr may be a pipe that nobody reads
            faulthandler.dump_traceback(file)
            file.seek(0)
            logs.error("cut off", threads=[thread.name for thread in _running_threads()], traceback=file.read())
        logs.close()
    finally:
        os._exit(CUT_OFF)
