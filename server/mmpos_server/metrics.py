"""Count a server's calls for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from platform import python_version
from time import time
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server.access import TlsFiles, not_after

__all__ = ["MethodMetrics", "Metrics", "aggregate"]


_SECONDS = (50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """Metrics of one server, in a registry of their own.

    In workers, prometheus_client keeps the values in files for the supervisor, in the folder that the environment
    variable PROMETHEUS_MULTIPROC_DIR names.

    Args:
        tls: the server's TLS files; None without TLS.
    """

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Program(tls))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mmpos_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, mode: Literal["livesum", "livemax"]) -> Gauge:
            return Gauge(f"mmpos_{name}", text, registry=registry, multiprocess_mode=mode)

        self.requests = counter("requests", "Calls and items of streams, by status.", "method", "status")
        self.refused = counter("refused", "Refused calls and streams, by reason.", "method", "reason")
        self.unauthenticated = counter("unauthenticated", "Calls and streams refused for lack of a known token.")
        self.documents = counter("documents", "Documents in answers.", "method")
        self.tokens = counter("tokens", "Tokens in answers.", "method")
        self.images = counter("images", "Images in answers.", "method")
        self.bytes_in = counter("request_bytes", "Bytes of requests.", "method")
        self.bytes_out = counter("response_bytes", "Bytes of answers.", "method")
        self.in_flight = gauge("in_flight", "Running calls and items of streams.", "livesum")
        self.streams = gauge("streams", "Open streams.", "livesum")
        self.lag = gauge("lag_seconds", "The server's last call to itself; with workers, the longest.", "livemax")
        self.stages = Histogram(
            "mmpos_stage_seconds",
            "Duration of each stage of a call, and of the whole call (total).",
            ["method", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )


class MethodMetrics:
    """Metrics of one method, with labels resolved once; for the thread of the event loop.

    A call costs 5 µs, and 9 µs in workers, where each value is a write into shared memory.

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
        """Count the beginning of a call or an item of a stream."""
        self._metrics.in_flight.inc()

    def end(
        self,
        status: str,
        stages: Iterable[tuple[str, float]],
        counts: dict[str, int],
        *,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """Count the end of a call or an item of a stream.

        Args:
            status: name of the gRPC status.
            stages: name and duration in seconds of each stage.
            counts: numbers of documents, tokens and images in the answer.
            request_bytes: size of the request in bytes.
            response_bytes: size of the answer in bytes.
        """
        self._metrics.in_flight.dec()
        if status not in self._requests:
            self._requests[status] = self._metrics.requests.labels(self._method, status)
        self._requests[status].inc()
        for stage, seconds in stages:
            if stage not in self._stages:
                self._stages[stage] = self._metrics.stages.labels(self._method, stage)
            self._stages[stage].observe(seconds)
        self._bytes_in.inc(request_bytes)
        if status == "OK":
            self._bytes_out.inc(response_bytes)
            for name, number in counts.items():
                if number:
                    self._counts[name].inc(number)


def aggregate(folder: str, pids: Callable[[], Iterable[int]] = tuple, tls: TlsFiles | None = None) -> CollectorRegistry:
    """Return a registry with the sums of all workers, and with the metrics of each process, labelled by pid.

    Args:
        folder: folder in which the workers' metrics are.
        pids: thread-safe function that returns the pids of the workers.
        tls: the server's TLS files; None without TLS.
    """
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    registry.register(_Workers(pids))
    registry.register(_Program(tls))
    return registry


class _Workers(Collector):
    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of each process, with its pid as a label."""
        families: dict[str, Metric] = {}
        for pid in self._pids():
            for family in ProcessCollector(pid=partial(str, pid), registry=None).collect():
                metric = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += [sample._replace(labels={"pid": str(pid)}) for sample in family.samples]
        return families.values()


class _Program(Collector):
    def __init__(self, tls: TlsFiles | None) -> None:
        self._tls, self._started = tls, time()

    def collect(self) -> Iterator[Metric]:
        """Yield versions, start time, and the certificate's expiry time if the certificate can be read."""
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
