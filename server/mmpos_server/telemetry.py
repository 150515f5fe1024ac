"""Write a server's logs and metrics."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from platform import python_version
from queue import Empty, SimpleQueue
from time import monotonic, sleep, time
from typing import Any, NamedTuple, TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server.access import TlsFiles, not_after

__all__ = ["LEVELS", "Logs", "MethodMetrics", "Metrics", "ProcessMetrics", "aggregate", "logging_all"]


_SECONDS = (50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Metrics of one server, in a registry of their own.

    In workers, prometheus_client keeps the values in files for the supervisor, in the folder that the environment
    variable PROMETHEUS_MULTIPROC_DIR names.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Settling(self))  # register this first, so that it is collected first
        self.recorded: deque[_End | None] = deque()
        """Ended calls that have not been counted yet; None stands for the beginning of a call."""
        registry, method = self.registry, ["method"]
        self.requests = Counter(
            "mmpos_requests", "Calls and items of streams, by status.", ["method", "status"], registry=registry
        )
        self.refused = Counter(
            "mmpos_refused", "Refused calls and streams, by limit.", ["method", "reason"], registry=registry
        )
        self.unauthenticated = Counter(
            "mmpos_unauthenticated",
            "Calls and streams refused for lack of a known token.",
            registry=registry,
        )
        self.documents = Counter("mmpos_documents", "Documents in answers.", method, registry=registry)
        self.tokens = Counter("mmpos_tokens", "Tokens in answers.", method, registry=registry)
        self.images = Counter("mmpos_images", "Images in answers.", method, registry=registry)
        self.bytes_in = Counter("mmpos_request_bytes", "Bytes of requests.", method, registry=registry)
        self.bytes_out = Counter("mmpos_response_bytes", "Bytes of answers.", method, registry=registry)
        self.in_flight = Gauge(
            "mmpos_in_flight", "Running calls and items of streams.", registry=registry, multiprocess_mode="livesum"
        )
        self.streams = Gauge("mmpos_streams", "Open streams.", registry=registry, multiprocess_mode="livesum")
        self.stages = Histogram(
            "mmpos_stage_seconds",
            "Duration of each stage of a call, and of the whole call (total).",
            ["method", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )

    def settle(self) -> None:
        """Count the recorded calls. This is thread-safe. Counting calls later keeps small calls fast."""
        begun = 0
        ended: dict[tuple[MethodMetrics, str], list[_End]] = defaultdict(list)
        with suppress(IndexError):
            while True:
                end = self.recorded.popleft()
                if end is None:
                    begun += 1
                else:
                    begun -= 1
                    ended[end.method, end.status].append(end)
        self.in_flight.inc(begun)
        for (method, status), ends in ended.items():
            method.count(status, ends)


class _Settling(Collector):
    """Collector that has no metrics but counts the recorded calls before other collectors run."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Count the recorded calls."""
        self._metrics.settle()
        return ()


class _End(NamedTuple):
    """The end of a call or of an item of a stream; see ``MethodMetrics.end`` for the fields."""

    method: MethodMetrics
    status: str
    stages: Iterable[tuple[str, float]]
    counts: dict[str, int]
    request_bytes: int
    response_bytes: int


_MOST_RECORDED = 10_000
"""Maximum number of recorded beginnings and ends before they are counted."""


class MethodMetrics:
    """Metrics of one method, with labels resolved once.

    Args:
        metrics: the server's metrics.
        method: name of the method.
    """

    def __init__(self, metrics: Metrics, method: str) -> None:
        self._metrics, self._method = metrics, method
        self._stages: dict[str, Histogram] = {}
        self._requests: dict[str, Counter] = {}
        self._counts = {name: getattr(metrics, name).labels(method) for name in ("documents", "tokens", "images")}
        self._bytes_in = metrics.bytes_in.labels(method)
        self._bytes_out = metrics.bytes_out.labels(method)

    def begin(self) -> None:
        """Record the beginning of a call or an item of a stream."""
        self._metrics.recorded.append(None)

    def end(
        self,
        status: str,
        stages: Iterable[tuple[str, float]],
        counts: dict[str, int],
        *,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Record the end of a call or an item of a stream.

        Args:
            status: name of the gRPC status.
            stages: name and duration in seconds of each stage.
            counts: numbers of documents, tokens and images in the answer.
            request_bytes: size of the request in bytes.
            response_bytes: size of the answer in bytes.
        """
        recorded = self._metrics.recorded
        recorded.append(_End(self, status, stages, counts, request_bytes, response_bytes))
        if len(recorded) > _MOST_RECORDED:
            self._metrics.settle()

    def count(self, status: str, ends: Sequence[_End]) -> None:
        """Count recorded ends of calls to this method with this status."""
        requests = self._requests.get(status)
        if requests is None:
            requests = self._requests[status] = self._metrics.requests.labels(self._method, status)
        requests.inc(len(ends))
        for end in ends:
            for stage, seconds in end.stages:
                child = self._stages.get(stage)
                if child is None:
                    child = self._stages[stage] = self._metrics.stages.labels(self._method, stage)
                child.observe(seconds)
        self._bytes_in.inc(sum(end.request_bytes for end in ends))
        if status == "OK":
            self._bytes_out.inc(sum(end.response_bytes for end in ends))
            for name, counter in self._counts.items():
                counter.inc(sum(end.counts.get(name, 0) for end in ends))


def aggregate(folder: str) -> CollectorRegistry:
    """Return a registry that sums the values of all workers in a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    return registry


class ProcessMetrics(Collector):
    """Metrics of the process: build, start time, and expiry time of the certificate.

    Args:
        tls: the server's TLS files; None without TLS.
    """

    def __init__(self, tls: TlsFiles | None) -> None:
        self._tls, self._started = tls, time()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, except the certificate's expiry time if the certificate cannot be read."""
        build = {"version": version(), "python": python_version()}
        yield InfoMetricFamily("mmpos_build", "Versions of the server and of Python.", build)
        yield GaugeMetricFamily("mmpos_start_time_seconds", "Start time of the server in unix time.", self._started)
        if self._tls is None:
            return
        try:
            seconds = not_after(self._tls.cert.read_bytes()).timestamp()
        except (OSError, InvalidInputError):
            return
        yield GaugeMetricFamily(
            "mmpos_certificate_not_after_seconds", "Expiry time of the certificate in unix time.", seconds
        )


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# A log line of gRPC's C++ core: level, time, thread and source location.
_CORE = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ (?P<source>\S+)\] (?P<event>.*)")
_CORE_LEVELS = {"I": "info", "W": "warning"}

# grpc's log records that begin with these words quote callers' metadata, which may contain a token.
_QUOTES_METADATA = "Invalid encoding on"

_MOST_LINES = 10_000
"""Maximum number of lines that wait for a slow file; further lines are dropped and counted."""

_GATHERING_SECONDS = 0.02
"""Seconds for which a line waits to be written together with others: waking a thread costs more than writing a line."""


class Logs:
    """Logger for one server, with one JSON object per line. Its methods never wait for the file: a thread writes.

    If the file accepts no lines, for example a pipe that nobody reads or a file on a full disk, lines are dropped and
    counted; the first line after that reports their number.

    Args:
        level: minimum level at which lines are written, a key of LEVELS.
        file: file to write to; None means stderr.
    """

    def __init__(self, level: str = "info", file: TextIO | None = None) -> None:
        self._level = LEVELS[level]
        self._file = file or sys.stderr
        self.requests = self._level <= LEVELS["info"]
        """Whether the log has a line per request; otherwise the values of such lines need not be computed."""
        # This must be a SimpleQueue because a finalizer may log while a method of the queue is running.
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._counting = threading.RLock()
        self.dropped = 0
        """Number of dropped lines that have not been reported yet."""
        self._torn = b""
        self._seldom: dict[str, tuple[float, int]] = {}
        self._thread = threading.Thread(target=self._keep_writing, name="mmpos-log", daemon=True)
        self._thread.start()

    def info(self, event: str, **values: object) -> None:
        """Write a line at level info."""
        self._put("info", event, values)

    def warning(self, event: str, **values: object) -> None:
        """Write a line at level warning."""
        self._put("warning", event, values)

    def seldom(self, event: str, **values: object) -> None:
        """Write a line at level warning with a count, at most once a second per event."""
        if times := self.times(event):
            self.warning(event, times=times, **values)

    def times(self, event: str) -> int:
        """Count an event; return its count since it was last logged, or 0 if that was less than a second ago."""
        now = monotonic()
        with self._counting:
            then, times = self._seldom.get(event, (-math.inf, 0))
            self._seldom[event] = (then, times + 1) if now - then < 1.0 else (now, 0)
        return 0 if now - then < 1.0 else times + 1

    def error(self, event: str, error: BaseException | None = None, **values: object) -> None:
        """Write a line at level error, with the traceback of an exception if there is one."""
        if error is not None:
            values["exception"] = _traceback(error)
        self._put("error", event, values)

    def close(self, timeout: float = 1.0) -> None:
        """Write the waiting lines and accept no more lines; give up after ``timeout`` seconds."""
        self._lines.put(None)
        self._thread.join(timeout)

    def _put(self, level: str, event: str, values: dict[str, Any]) -> None:
        if LEVELS[level] < self._level:
            return
        if self._lines.qsize() >= _MOST_LINES:
            self._drop(1)
            return
        self._lines.put({**values, "event": event, "level": level, "timestamp": time()})

    def _drop(self, lines: int) -> None:
        with self._counting:
            self.dropped += lines

    def _keep_writing(self) -> None:
        more = True
        while more:
            lines = self._gather()
            more = None not in lines
            written = [line for line in lines if line is not None]
            with self._counting:
                dropped = self.dropped
            if dropped:
                event = {"event": "log lines dropped", "lines": dropped, "level": "warning"}
                written.insert(0, {**event, "timestamp": time()})
            try:
                self._write("".join(map(self._format, written)))
            except (OSError, ValueError):  # a full disk or a closed file
                self._drop(len(written) - bool(dropped))
            else:
                self._drop(-dropped)

    def _gather(self) -> list[dict[str, Any] | None]:
        """Wait for lines; if lines were dropped, stop waiting after a while so that their number is reported."""
        try:
            lines = [self._lines.get(timeout=1.0 if self.dropped else None)]
        except Empty:
            return []
        if not self._lines.qsize():
            sleep(_GATHERING_SECONDS)
        return lines + [self._lines.get() for _ in range(min(self._lines.qsize(), 1000))]

    def _format(self, line: dict[str, Any]) -> str:
        line["timestamp"] = datetime.fromtimestamp(line["timestamp"], UTC).isoformat().replace("+00:00", "Z")
        return f"{json.dumps(line, default=repr)}\n"

    def _write(self, text: str) -> None:
        try:
            number = self._file.fileno()
        except (AttributeError, OSError):  # an in-memory file
            self._file.write(text)
            self._file.flush()
            return
        # Bypass the file's buffer, which would keep the text that a full disk rejected.
        data = self._torn + text.encode(errors="backslashreplace")
        size = len(data)
        try:
            while data:
                data = data[os.write(number, data) :]
        finally:
            self._torn = b"\n" if 0 < len(data) < size else b""


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


class _Handler(logging.Handler):
    def __init__(self, logs: Logs) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(_QUOTES_METADATA):
            self._logs.seldom("metadata is not UTF-8")
            return
        values: dict[str, Any] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            values["exception"] = _traceback(record.exc_info[1])
        write = self._logs.error if record.levelno >= logging.ERROR else self._logs.warning
        write(record.getMessage(), **values)


@contextmanager
def logging_all(level: str, *, core: bool = True) -> Iterator[Logs]:
    """Create a process's logger and write all messages of the process with it; for entry points only.

    These include records from ``logging`` and ``warnings``, uncaught errors, and lines that C++ code writes directly to
    stderr. If the process crashes, its last lines may be lost.

    Args:
        level: minimum level at which lines are written, a key of LEVELS.
        core: whether the process uses gRPC's C++ core.
    """
    with _relayed_stderr(level) if core else closing(Logs(level)) as logs, _adopted(logs):
        yield logs


@contextmanager
def _adopted(logs: Logs) -> Iterator[None]:
    """Write the records from ``logging`` and ``warnings``, and uncaught errors, to a logger."""

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
        logging.getLogger().removeHandler(handler)  # its file may be closed after this


@contextmanager
def _relayed_stderr(level: str) -> Iterator[Logs]:
    """Create a logger on stderr that also writes a line for each line written to descriptor 2."""
    real = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    with open(real, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as file:
        logs = Logs(level, file)
        thread = threading.Thread(target=_relay, args=(reading, logs), name="mmpos-stderr", daemon=True)
        thread.start()
        try:
            yield logs
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)  # closes the last writer of the pipe, which ends the thread
            thread.join(1.0)  # unless a child process also holds the pipe
            logs.close()  # ``real`` stays open, since the thread may still wait for it


def _relay(reading: int, logs: Logs) -> None:
    with open(reading, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            match = _CORE.match(line)
            if match:
                # Limit the rate: callers can cause a line for every header of every call.
                if times := logs.times(match["source"]):
                    write = getattr(logs, _CORE_LEVELS.get(match["level"], "error"))
                    write(match["event"], logger="grpc", source=match["source"], times=times)
            elif line.strip():
                logs.warning(line.rstrip(), logger="stderr")
