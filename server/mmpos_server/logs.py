"""Structured logs: one line on stderr for each request, as JSON or for people."""

from __future__ import annotations

import logging
import math
import sys
from time import monotonic
from typing import Any, Literal

import structlog

__all__ = ["LEVELS", "Logs", "adopt_standard_logging"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Logs:
    """The logger of one server.

    Args:
        level: lowest level that is written: a key of LEVELS.
        form: "json", one object per line; or "console", for people.
    """

    def __init__(self, level: str = "info", form: Literal["json", "console"] = "json") -> None:
        renderer: Any = structlog.processors.JSONRenderer()
        exceptions: list[Any] = [structlog.processors.format_exc_info]
        if form == "console":
            plain = structlog.dev.plain_traceback
            renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
            exceptions = []
        self._logger: Any = structlog.wrap_logger(
            structlog.WriteLogger(sys.stderr),
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
        """Whether lines of requests are written: what costs time to find out is left alone if not."""
        self._seldom: dict[str, tuple[float, int]] = {}

    def info(self, event: str, **values: Any) -> None:
        """Write a line of level info."""
        self._logger.info(event, **values)

    def warning(self, event: str, **values: Any) -> None:
        """Write a line of level warning."""
        self._logger.warning(event, **values)

    def seldom(self, event: str, **values: Any) -> None:
        """Write a line of level warning, of each event one in a second at most; it says how often that happened."""
        now = monotonic()
        then, times = self._seldom.get(event, (-math.inf, 0))
        if now - then < 1.0:
            self._seldom[event] = then, times + 1
        else:
            self._seldom[event] = now, 0
            self.warning(event, times=times + 1, **values)

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
        error = record.exc_info[1] if record.exc_info else None
        write = self._logs.error if record.levelno >= logging.ERROR else self._logs.warning
        write(record.getMessage(), **({"exc_info": error} if error else {}), logger=record.name)


def adopt_standard_logging(logs: Logs) -> None:
    """Write warnings and errors of libraries in the same form; for a process's entry point only."""
    logging.basicConfig(handlers=[_Handler(logs)], level=logging.WARNING, force=True)
