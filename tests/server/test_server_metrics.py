"""Test the metrics of one process and of several workers, and their page in the documentation."""

from __future__ import annotations

import gc
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import mark_process_dead

from mmpos_server.access import TlsFiles
from mmpos_server.arrivals import Arrivals, Places
from mmpos_server.config import load
from mmpos_server.metrics import MethodMetrics, Metrics, aggregate

ROOT = Path(__file__).parents[2]
PLACED = {"method": "Place", "stage": "place"}


def use(metrics: Metrics, calls: int) -> None:
    """Answer some calls, fail one, and leave one running."""
    method = MethodMetrics(metrics, "Place")
    for _ in range(calls):
        method.begin()
        counts = {"documents": 2, "tokens": 30}
        method.end("OK", [("place", 0.01), ("total", 0.02)], counts, request_bytes=10, response_bytes=100)
    method.begin()
    method.end("INTERNAL", [("total", 40.0)], {"documents": 1}, request_bytes=5, response_bytes=0)
    method.begin()
    metrics.refused.labels("Place", "overload").inc()
    metrics.lag.set(calls)


def seen(registry: CollectorRegistry) -> dict[str, float]:
    """Return the values that are not 0, by name and labels, without buckets and times."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {
        " ".join([sample.name.removeprefix("mmpos_"), *sample.labels.values()]): sample.value
        for sample in samples
        if sample.value and re.fullmatch(r"mmpos_(?!start|build)\w+(?<!_bucket)(?<!_created)", sample.name)
    }


def expected(calls: int, servers: int = 1, *, running: int, lag: int) -> dict[str, Any]:
    return {
        "requests_total Place OK": calls,
        "requests_total Place INTERNAL": servers,
        "refused_total Place overload": servers,
        "documents_total Place": 2 * calls,
        "tokens_total Place": 30 * calls,
        "request_bytes_total Place": 10 * calls + 5 * servers,
        "response_bytes_total Place": 100 * calls,
        "stage_seconds_count Place place": calls,
        "stage_seconds_sum Place place": pytest.approx(0.01 * calls),
        "stage_seconds_count Place total": calls + servers,
        "stage_seconds_sum Place total": pytest.approx(0.02 * calls + 40 * servers),
        "in_flight": running,
        "lag_seconds": lag,
    }


def test_calls_are_counted_by_method_status_and_stage() -> None:
    registry = (metrics := Metrics()).registry
    use(metrics, 3)
    assert seen(registry) == expected(3, running=1, lag=3)
    buckets = [
        registry.get_sample_value("mmpos_stage_seconds_bucket", {**PLACED, "le": le}) for le in ("0.005", "0.01")
    ]
    assert buckets == [0, 3]
    assert registry.get_sample_value("process_resident_memory_bytes")


def test_the_page_of_several_workers_has_their_sums_the_longest_lag_and_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for worker, calls in enumerate((3, 2)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda number=worker: number))  # type: ignore[no-untyped-call]
        use(Metrics(), calls)
    pids = [os.getpid(), os.getppid(), 2**30]
    registry = aggregate(str(tmp_path), lambda: pids)
    assert seen(registry) == expected(5, servers=2, running=2, lag=3)
    cpu = [registry.get_sample_value("process_cpu_seconds_total", {"pid": str(pid)}) for pid in pids]
    assert [value is None for value in cpu] == [False, False, True]  # the last process does not exist
    assert registry.get_sample_value("mmpos_start_time_seconds")
    mark_process_dead(0, str(tmp_path))  # type: ignore[no-untyped-call]
    assert seen(registry) == expected(5, servers=2, running=1, lag=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # prometheus_client never closes the files of a worker
        monkeypatch.undo()
        gc.collect()


def test_documented_metrics_match_the_server_metrics(tmp_path: Path) -> None:
    metrics = Metrics(TlsFiles(*make_certificate(tmp_path, "server")))
    use(metrics, 1)
    rows = []
    for family in metrics.registry.collect():
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {f"`{label}`" for sample in family.samples for label in sample.labels if label != "le"}
        if not name.startswith("process_"):  # prometheus_client documents these
            rows.append(f"| `{name}` | {family.type} | {', '.join(sorted(labels))} | {family.documentation} |")
    page = (ROOT / "docs/service-metrics.md").read_text()
    assert re.findall(r"^\| `.*$", page, re.MULTILINE) == rows
    places = [place.name for place in vars(Arrivals(1.0)).values() if isinstance(place, Places)]
    assert len(places) == 5
    assert all(f"`{reason}`" in page for reason in (*places, "late_messages", "overload", "stopping"))


def test_the_alert_of_lag_fires_when_the_server_refuses_calls() -> None:
    alerts = (ROOT / "deploy/alerts.yaml").read_text()
    assert f"expr: max_over_time(mmpos_lag_seconds[1m]) > {load().overload_ms / 1000}\n" in alerts
