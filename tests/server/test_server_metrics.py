"""Test the metrics of one process and of several workers, and their page in the documentation."""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from certificates import make_certificate
from prometheus_client import CollectorRegistry, values
from prometheus_client.multiprocess import mark_process_dead
from waiting import eventually

from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server.access import TlsFiles
from mmpos_server.arrivals import Arrivals, Places
from mmpos_server.call import Call
from mmpos_server.config import load
from mmpos_server.metrics import MethodMetrics, Metrics, aggregate
from mmpos_server.services import place_method
from mmpos_server.testing import started

ROOT = Path(__file__).parents[2]
RULES = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}


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


def seen(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"mmpos_{name}", labels)


def counted(registry: CollectorRegistry) -> dict[str, float | None]:
    """Return the sums over a registry."""
    names = ("documents_total", "tokens_total", "images_total", "request_bytes_total", "response_bytes_total")
    return {
        "OK": seen(registry, "requests_total", method="Place", status="OK"),
        "INTERNAL": seen(registry, "requests_total", method="Place", status="INTERNAL"),
        "overload": seen(registry, "refused_total", method="Place", reason="overload"),
        "place": seen(registry, "stage_seconds_bucket", method="Place", stage="place", le="0.01"),
        "in 30 s": seen(registry, "stage_seconds_bucket", method="Place", stage="total", le="30.0"),
        "seconds": seen(registry, "stage_seconds_sum", method="Place", stage="total"),
        **{name: seen(registry, name, method="Place") for name in names},
        "in_flight": seen(registry, "in_flight"),
        "lag_seconds": seen(registry, "lag_seconds"),
    }


ONE = {
    "OK": 3,
    "INTERNAL": 1,
    "overload": 1,
    "place": 3,
    "in 30 s": 3,
    "seconds": 40.06,
    "documents_total": 6,
    "tokens_total": 90,
    "images_total": 0,
    "request_bytes_total": 35,
    "response_bytes_total": 300,
    "in_flight": 1,
    "lag_seconds": 3,
}


def test_calls_are_counted_by_method_status_and_stage() -> None:
    metrics = Metrics()
    use(metrics, 3)
    assert counted(metrics.registry) == pytest.approx(ONE)
    resident = metrics.registry.get_sample_value("process_resident_memory_bytes")
    assert resident is not None
    assert resident > 10_000_000


def test_the_page_of_several_workers_has_their_sums_the_longest_lag_and_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for worker, calls in enumerate((3, 2)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda number=worker: number))  # type: ignore[no-untyped-call]
        use(Metrics(), calls)
    pids = [os.getpid(), os.getppid(), 2**30]
    registry = aggregate(str(tmp_path), lambda: pids)
    two = {
        **{name: value * 5 / 3 for name, value in ONE.items()},
        "INTERNAL": 2,
        "overload": 2,
        "seconds": 80.1,
        "request_bytes_total": 60,
        "in_flight": 2,
        "lag_seconds": 3,
    }
    assert counted(registry) == pytest.approx(two)
    cpu = [registry.get_sample_value("process_cpu_seconds_total", {"pid": str(pid)}) for pid in pids]
    assert [value is None for value in cpu] == [False, False, True]  # the last process does not exist
    assert registry.get_sample_value("mmpos_start_time_seconds") is not None
    mark_process_dead(0, str(tmp_path))  # type: ignore[no-untyped-call]
    assert counted(registry) == pytest.approx({**two, "in_flight": 1, "lag_seconds": 2})


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


def test_overload_fires_the_alerts_of_lag_and_refusals() -> None:
    lag = re.fullmatch(r"max_over_time\((\w+)\[1m\]\) > ([\d.]+)", RULES["MmposLag"])
    refusals = re.fullmatch(
        r'sum by \(reason\) \(rate\((\w+)\{reason!="unauthenticated",reason!="stopping"\}\[5m\]\)\)'
        r" > ([\d.]+) \* scalar\(sum\(rate\((\w+)\[5m\]\)\)\)",
        RULES["MmposRefusals"],
    )
    assert lag
    assert refusals
    config, ended = load(), threading.Event()
    assert float(lag[2]) == config.overload_ms / 1000
    raw = pb.PlaceRequest(query=pb.PositionsQuery(profile="x")).SerializeToString()

    async def hold(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
        time.sleep(0.2)

    with started(config, methods=[place_method(hold)]) as (server, address), grpc.insecure_channel(address) as channel:

        def value(name: str, **labels: str) -> float:
            return server.metrics.registry.get_sample_value(name, labels) or 0.0

        def call() -> None:
            place: Any = channel.unary_unary("/mmpos.rpc.v1.PositionService/Place")
            while not ended.is_set():
                with suppress(grpc.RpcError):
                    place(raw)

        def fires() -> bool:
            refused = value(refusals[1], method="Place", reason="overload")
            requests = [value(refusals[3], method="Place", status=status) for status in ("OK", "RESOURCE_EXHAUSTED")]
            return value(lag[1]) > float(lag[2]) and refused > float(refusals[2]) * sum(requests)

        assert not fires()
        with ThreadPoolExecutor(8) as callers:
            calls = [callers.submit(call) for _ in range(8)]
            fired = eventually(fires)
            ended.set()
        assert fired
        for done in calls:
            done.result()
