"""Write a server's log: one JSON object per line, without ever waiting for the file."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, TextIO

__all__ = ["Logs", "logging_all"]

_encode = json.JSONEncoder(default=repr).encode


class Logs(QueueHandler):
    """Log of one server, and a handler for ``logging``; a thread writes the lines, so no caller waits for the file.

    Lines are dropped if the file accepts none, such as a pipe that nobody reads; the next line is their number.

    Args:
        file: file to write to; None means stderr.
        sample: number of answered calls for each one that is logged; 0 logs none.
    """

    def __init__(self, file: TextIO | None = None, *, sample: int = 100) -> None:
        # This must be a SimpleQueue because a finalizer may log while a method of the queue is running.
        self._lines: SimpleQueue[Any] = SimpleQueue()
        super().__init__(self._lines)
        self._sample, self._answered, self._closing = sample, 0, False
        self.dropped = self.lost = 0  # lines that did not fit into the queue, and lines that the file refused
        self._seldom: dict[str, tuple[float, int]] = {}
        self._listener = QueueListener(self._lines, _File(file or sys.stderr, self))
        self._listener.start()

    def info(self, event: str, **values: object) -> None:
        """Write a line at level info."""
        self.handle(_record(logging.INFO, event, values))

    def warning(self, event: str, **values: object) -> None:
        """Write a line at level warning."""
        self.handle(_record(logging.WARNING, event, values))

    def error(self, event: str, error: BaseException | None = None, **values: object) -> None:
        """Write a line at level error, with the traceback of an exception if there is one."""
        self.handle(_record(logging.ERROR, event, values, error))

    def sampled(self) -> bool:
        """Count an answered call, and return whether it is the one in ``sample`` that is logged."""
        self._answered += 1
        return self._sample > 0 and self._answered % self._sample == 1 % self._sample

    def call(self, failed: bool, **values: object) -> None:
        """Write the line of a call that was refused or failed, or that ``sampled`` has selected."""
        if failed:
            self.warning("call", **values)
        else:
            self.info("call", **values, sampled=self._sample)

    def seldom(self, event: str, **values: object) -> None:
        """Write a line at level warning with a count, at most once a second per event."""
        now = monotonic()
        due, times = self._seldom.get(event, (now, 0))
        self._seldom[event] = (now + 1.0, 0) if now >= due else (due, times + 1)
        if now >= due:
            self.warning(event, times=times + 1, **values)

    def close(self, timeout: float = 1.0) -> None:
        """Write the waiting lines and no later ones; give up after ``timeout`` seconds."""
        if not self._closing:  # logging closes every handler again when the process exits
            self._closing = True
            self._listener.enqueue_sentinel()
            end = monotonic() + timeout
            while monotonic() < end and not self._lines.empty():  # the sentinel is read when all lines are written
                sleep(0.001)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record and put it into the queue."""
        # grpc quotes paths and metadata that are not UTF-8, which may contain a token.
        undecoded = record.exc_info is not None and record.exc_info[0] is UnicodeDecodeError
        if undecoded or str(record.msg).startswith("Invalid encoding on"):
            self.seldom("a path or metadata is not UTF-8")
        elif str(record.msg).startswith("ExecuteBatchError raised in core"):
            self.seldom("an answer could not be sent to a client that has gone")
        else:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        line = {"timestamp": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= record.__dict__.get("values", {"logger": record.name})
        if record.exc_info:
            line["exception"] = logging.Formatter().formatException(record.exc_info)
        return f"{_encode(line)}\n"

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a formatted record into the queue, or drop it if too many wait; ``handle`` calls this under a lock."""
        if self._lines.qsize() < 10_000:
            self._lines.put(record)
        else:
            self.dropped += 1


def _record(level: int, event: str, values: dict[str, Any], error: BaseException | None = None) -> logging.LogRecord:
    raised = error and (type(error), error, error.__traceback__)
    name = logging.getLevelName(level)
    return logging.makeLogRecord({"levelname": name, "msg": event, "exc_info": raised, "values": values})


class _File(logging.Handler):
    """Handler that writes formatted lines to a file, and the number of lines that are missing."""

    def __init__(self, file: TextIO, logs: Logs) -> None:
        super().__init__()
        # Bypass the file's buffer, which would keep the text that a full disk rejected.
        self._file, self._raw = file, getattr(file.buffer, "raw", file.buffer)
        self._logs, self._reported, self._torn = logs, 0, False

    def emit(self, record: logging.LogRecord) -> None:
        text, missing = record.getMessage(), self._logs.dropped + self._logs.lost - self._reported
        if missing:
            text = self._logs.format(_record(logging.WARNING, "log lines dropped", {"lines": missing})) + text
        data = whole = b"\n" * self._torn + text.encode()
        try:
            while data:
                data = data[self._raw.write(data) :]
            self._reported += missing
        except (OSError, ValueError):  # a full disk or a closed file
            self._logs.lost += 1
        self._torn = bool(data) and (self._torn or len(data) < len(whole))


@contextmanager
def logging_all(sample: int = 100) -> Iterator[Logs]:
    """Write records of ``logging`` and ``warnings``, and uncaught errors, to a log on stderr; for entry points only."""
    with closing(Logs(sample=sample)) as logs:
        logging.basicConfig(handlers=[logs], level=logging.WARNING, force=True)
        logging.captureWarnings(True)
        hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook = lambda at: logs.error(
            at.err_msg or "exception ignored", at.exc_value, object=repr(at.object)
        )
        threading.excepthook = lambda at: logs.error("exception in a thread", at.exc_value, thread=str(at.thread))
        try:
            yield logs
        finally:
            sys.unraisablehook, threading.excepthook = hooks
            logging.captureWarnings(False)
            logging.getLogger().removeHandler(logs)
