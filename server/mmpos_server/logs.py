"""Structured logs: one line on stderr for each request and each message of the process, as JSON or as text."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Literal, TextIO

import structlog

__all__ = ["LEVELS", "Form", "Logs", "logging_all"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

Form = Literal["json", "console"]

# A line of gRPC's core, in C++: its level, time, thread and source location.
_CORE = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ (?P<source>\S+)\] (?P<event>.*)")
_CORE_LEVELS = {"I": "info", "W": "warning"}

# Logged by grpc.aio, with an internal traceback, when it notices a closed connection while it answers.
_GONE = "ExecuteBatchError raised in core"


class Logs:
    """Logger of one server.

    Args:
        level: lowest level that is written, a key of LEVELS.
        form: "json", one object per line; or "console", text for people.
        file: file to write to; None is stderr.
    """

    def __init__(self, level: str = "info", form: Form = "json", file: TextIO | None = None) -> None:
        file = file or sys.stderr
        renderer: Any = structlog.processors.JSONRenderer()
        exceptions: list[Any] = [structlog.processors.format_exc_info]
        if form == "console":
            plain = structlog.dev.plain_traceback
            renderer = structlog.dev.ConsoleRenderer(colors=file.isatty(), exception_formatter=plain)
            exceptions = []
        self._logger: Any = structlog.wrap_logger(
            structlog.WriteLogger(file),
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                *exceptions,
                renderer,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
            cache_logger_on_first_use=True,
        ).bind()
        self.requests = LEVELS[level] <= LEVELS["info"]
        """Whether lines of requests are written; otherwise their values need not be computed."""
        self._seldom: dict[str, tuple[float, int]] = {}

    def info(self, event: str, **values: Any) -> None:
        """Write a line of level info."""
        self._logger.info(event, **values)

    def warning(self, event: str, **values: Any) -> None:
        """Write a line of level warning."""
        self._logger.warning(event, **values)

    def seldom(self, event: str, **values: Any) -> None:
        """Write a line of level warning with a count, for each event once a second at most."""
        if times := self.times(event):
            self.warning(event, times=times, **values)

    def times(self, event: str) -> int:
        """Count an event; returns the count since its last line, or 0 within a second of that line."""
        now = monotonic()
        then, times = self._seldom.get(event, (-math.inf, 0))
        self._seldom[event] = (then, times + 1) if now - then < 1.0 else (now, 0)
        return 0 if now - then < 1.0 else times + 1

    def error(self, event: str, error: BaseException | None = None, **values: Any) -> None:
        """Write a line of level error, with the traceback of an exception."""
        if error is not None:
            values["exc_info"] = error
        self._logger.error(event, **values)


class _Handler(logging.Handler):
    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(_GONE):
            self._logs.seldom("answer could not be sent")
            return
        error = record.exc_info[1] if record.exc_info else None
        write = self._logs.error if record.levelno >= logging.ERROR else self._logs.warning
        write(record.getMessage(), **({"exc_info": error} if error else {}), logger=record.name)


@contextmanager
def logging_all(level: str, form: Form, *, core: bool = True) -> Iterator[Logs]:
    """Create the logger of a process, and write all messages of the process with it; for its entry point only.

    These are the records of ``logging`` and ``warnings``, uncaught errors, and as JSON also lines that C++ code writes
    to stderr directly. The last lines of a process that crashes may be lost then.

    Args:
        level: lowest level that is written, a key of LEVELS.
        form: as for Logs.
        core: whether the process uses the C++ core of gRPC.
    """
    if form == "json" and core:
        with _stderr_as_lines(level) as logs, _adopted(logs):
            yield logs
    else:
        logs = Logs(level, form)
        with _adopted(logs):
            yield logs


@contextmanager
def _adopted(logs: Logs) -> Iterator[None]:
    """Write the records of logging and warnings, and uncaught errors, to a logger."""

    def unraisable(hook: sys.UnraisableHookArgs) -> None:
        logs.error(hook.err_msg or "exception ignored", hook.exc_value, object=repr(hook.object))

    def uncaught(hook: threading.ExceptHookArgs) -> None:
        logs.error("exception in a thread", hook.exc_value, thread=hook.thread and hook.thread.name)

    handler = _Handler(logs)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, uncaught
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)  # its file may be closed from now on


@contextmanager
def _stderr_as_lines(level: str) -> Iterator[Logs]:
    """Create a logger on stderr that also writes a line for each line written to descriptor 2."""
    real = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    with open(real, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as file:
        logs = Logs(level, "json", file)
        thread = threading.Thread(target=_relay, args=(reading, logs), name="mmpos-stderr", daemon=True)
        thread.start()
        try:
            yield logs
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)  # the pipe has no writer any more, which ends the thread
            thread.join()
    os.close(real)


def _relay(reading: int, logs: Logs) -> None:
    with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            match = _CORE.match(line)
            if match:
                # Limited: callers can cause a line for each header of each call.
                if times := logs.times(match["source"]):
                    write = getattr(logs, _CORE_LEVELS.get(match["level"], "error"))
                    write(match["event"], logger="grpc", source=match["source"], times=times)
            elif line.strip():
                logs.warning(line.rstrip(), logger="stderr")
