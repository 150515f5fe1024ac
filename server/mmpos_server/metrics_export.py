"""Export metrics by OTLP: send the metrics page's registry regularly to the collector that receives the spans."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from threading import Event, Thread
from time import time_ns
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos.support.extras import needed_for
from mmpos.support.info import version

with needed_for("--otel", extra="otel"):
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from mmpos_server.tracing import resource

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Sample

__all__ = ["converted", "exported"]

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_UNITS = {"seconds": "s", "bytes": "By"}

_LAST_SECONDS = 2.0
"""Maximum seconds for the last export, so that a collector that does not respond cannot delay the exit any longer."""


@contextmanager
def exported(registry: CollectorRegistry) -> Iterator[None]:
    """Export the metrics by OTLP over gRPC while the context is open, at regular intervals and once more at the end.

    The environment (OTEL_...) configures the export and may disable it. The interval is OTEL_METRIC_EXPORT_INTERVAL
    in milliseconds, 60,000 by default.

    Args:
        registry: the metrics to export.

    Raises:
        InvalidInputError: the interval is not a positive number.
    """
    if _is("OTEL_SDK_DISABLED", "true") or _is("OTEL_METRICS_EXPORTER", "none"):
        yield
        return
    seconds = _seconds()
    sender, described = OTLPMetricExporter(), resource()
    ended, begun = Event(), time_ns()

    def send() -> None:
        try:
            scope = converted(registry.collect(), begun)
            sender.export(MetricsData([ResourceMetrics(described, [scope], schema_url="")]))
        except Exception:  # raised by a Prometheus collector, for example; the thread continues
            logging.getLogger(__name__).exception("metrics not exported")

    def keep_sending() -> None:
        while not ended.wait(seconds):
            send()
        send()

    thread = Thread(target=keep_sending, name="mmpos-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_LAST_SECONDS)
        sender.shutdown()


def converted(families: Iterable[Family], begun: int) -> ScopeMetrics:
    """Convert Prometheus metrics to OpenTelemetry: counters to monotonic sums, histograms unchanged, others to gauges.

    Args:
        families: metric families that a registry has collected.
        begun: unix time in nanoseconds at which counters and histograms began to count.
    """
    metrics = [_metric(family, begun, time_ns()) for family in families]
    return ScopeMetrics(InstrumentationScope("mmpos_server", version()), metrics, schema_url="")


def _metric(family: Family, begun: int, now: int) -> Metric:
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(_histogram_points(family.samples, begun, now), _CUMULATIVE)
    elif family.type == "counter":
        totals = (sample for sample in family.samples if sample.name.endswith("_total"))
        data = Sum(
            [NumberDataPoint(total.labels, begun, now, total.value) for total in totals], _CUMULATIVE, is_monotonic=True
        )
    else:
        data = Gauge([NumberDataPoint(sample.labels, 0, now, sample.value) for sample in family.samples])
    name = f"{family.name}_info" if family.type == "info" else family.name  # as on the metrics page
    return Metric(name, family.documentation, _UNITS.get(family.name.rpartition("_")[2], ""), data)


def _histogram_points(samples: Iterable[Sample], begun: int, now: int) -> list[HistogramDataPoint]:
    """Return one point per set of labels; Prometheus counts values up to each bound, and OTLP values between bounds."""
    below: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if sample.name.endswith("_bucket"):
            below[labels].append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, buckets in below.items():
        bounds, counts = zip(*sorted(buckets), strict=True)
        between = [int(count - before) for before, count in pairwise((0.0, *counts))]
        points.append(
            HistogramDataPoint(
                dict(labels),
                start_time_unix_nano=begun,
                time_unix_nano=now,
                count=int(counts[-1]),
                sum=sums[labels],
                bucket_counts=between,
                explicit_bounds=bounds[:-1],
                min=float("inf"),
                max=float("-inf"),
            )
        )
    return points


def _is(variable: str, value: str) -> bool:
    return os.environ.get(variable, "").strip().lower() == value


def _seconds() -> float:
    text = os.environ.get(_INTERVAL, "60000")
    with suppress(ValueError):
        if (milliseconds := float(text)) > 0:
            return milliseconds / 1000
    raise InvalidInputError(f"{_INTERVAL}: got {text!r}, want milliseconds > 0")
