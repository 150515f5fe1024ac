"""Metrics of one server in a registry of its own, with labels resolved once and not per call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from platform import python_version
from time import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mmpos.errors import InvalidInputError
from mmpos.support.info import version
from mmpos_server.certificates import Tls, not_after

__all__ = ["About", "MethodMetrics", "Metrics", "aggregate"]

_SECONDS = (50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """What a server counts.

    In a worker of several, prometheus_client keeps the numbers in files that the supervisor reads; it decides so by
    the environment that the supervisor gives to its workers.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry, method = self.registry, ["method"]
        self.requests = Counter(
            "mmpos_requests", "Calls, and items of streams, by status.", ["method", "status"], registry=registry
        )
        self.refused = Counter("mmpos_refused", "Calls and streams refused for overload.", method, registry=registry)
        self.unauthenticated = Counter(
            "mmpos_unauthenticated", "Calls and streams refused for want of a credential.", registry=registry
        )
        self.documents = Counter("mmpos_documents", "Documents answered.", method, registry=registry)
        self.tokens = Counter("mmpos_tokens", "Tokens answered.", method, registry=registry)
        self.images = Counter("mmpos_images", "Images answered.", method, registry=registry)
        self.bytes_in = Counter("mmpos_request_bytes", "Bytes of requests.", method, registry=registry)
        self.bytes_out = Counter("mmpos_response_bytes", "Bytes of answers.", method, registry=registry)
        self.in_flight = Gauge(
            "mmpos_in_flight", "Calls, and items of streams, at work.", registry=registry, multiprocess_mode="livesum"
        )
        self.streams = Gauge("mmpos_streams", "Open streams.", registry=registry, multiprocess_mode="livesum")
        self.stages = Histogram(
            "mmpos_stage_seconds",
            "Time of each stage of a call, and of the whole (total).",
            ["method", "stage"],
            buckets=_SECONDS,
            registry=registry,
        )


class MethodMetrics:
    """The metrics of one method, without a search for labels; used from the event loop only.

    Args:
        metrics: those of the server.
        method: name of the method.
    """

    def __init__(self, metrics: Metrics, method: str) -> None:
        self._metrics, self._method = metrics, method
        self._stages: dict[str, Histogram] = {}
        self._requests: dict[str, Counter] = {}
        self._counts = {name: getattr(metrics, name).labels(method) for name in ("documents", "tokens", "images")}
        self._bytes_in = metrics.bytes_in.labels(method)
        self._bytes_out = metrics.bytes_out.labels(method)
        self.refused = metrics.refused.labels(method)

    def begin(self, size: int) -> None:
        """A request of so many bytes came."""
        self._metrics.in_flight.inc()
        self._bytes_in.inc(size)

    def end(self, status: str, stages: Iterable[tuple[str, float]], counts: dict[str, int], size: int) -> None:
        """It was answered.

        Args:
            status: name of the gRPC status.
            stages: name and seconds of each stage.
            counts: documents, tokens and images of the answer, where there are any.
            size: bytes of the answer.
        """
        self._metrics.in_flight.dec()
        requests = self._requests.get(status)
        if requests is None:
            requests = self._requests[status] = self._metrics.requests.labels(self._method, status)
        requests.inc()
        for stage, seconds in stages:
            child = self._stages.get(stage)
            if child is None:
                child = self._stages[stage] = self._metrics.stages.labels(self._method, stage)
            child.observe(seconds)
        if status == "OK":
            self._bytes_out.inc(size)
            for name, count in counts.items():
                self._counts[name].inc(count)


def aggregate(folder: str) -> CollectorRegistry:
    """A registry of the sums over all workers that keep their numbers in this folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    return registry


class About(Collector):
    """What the process is: its build, when it started, and when its certificate expires.

    Args:
        tls: the files that it serves with; None is no TLS.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls, self._started = tls, time()

    def collect(self) -> Iterator[Metric]:
        """The metrics; that of a certificate which cannot be read at the moment is left out."""
        build = {"version": version(), "python": python_version()}
        yield InfoMetricFamily("mmpos_build", "Version of the server, and of its Python.", build)
        yield GaugeMetricFamily("mmpos_start_time_seconds", "When the server started, in unix time.", self._started)
        if self._tls is None:
            return
        try:
            seconds = not_after(self._tls.cert.read_bytes()).timestamp()
        except (OSError, InvalidInputError):
            return
        yield GaugeMetricFamily(
            "mmpos_certificate_not_after_seconds", "When the certificate expires, in unix time.", seconds
        )
