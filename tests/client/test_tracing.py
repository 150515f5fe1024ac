"""OpenTelemetry's own instrumentation of grpc traces both clients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from clients import open_client
from fake_server import Fake, serving
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import GrpcAioInstrumentorClient, GrpcInstrumentorClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mmpos import SegmentTable, Text
from mmpos.client import PositionsQuery

SEGMENTS = SegmentTable.from_documents([[Text(3)]])


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    kinds: list[Any] = [GrpcInstrumentorClient, GrpcAioInstrumentorClient]
    instrumentors = [kind() for kind in kinds]
    for instrumentor in instrumentors:
        instrumentor.instrument()
    yield exporter
    for instrumentor in instrumentors:
        instrumentor.uninstrument()


def test_calls_and_streams_are_spans_whose_context_the_server_receives(
    kind: str, exporter: InMemorySpanExporter
) -> None:
    fake = Fake()
    with serving(fake) as address, open_client(kind, address) as client:
        client.place(SEGMENTS)
        assert len(list(client.stream([PositionsQuery(SEGMENTS)] * 20))) == 20
    received = [str(dict(metadata)["traceparent"]).split("-")[1:3] for metadata in fake.metadata]
    spans = exporter.get_finished_spans()
    assert [span.name.rpartition("/")[2] for span in spans] == ["Place", "StreamPlace"]
    assert received == [[f"{s.context.trace_id:032x}", f"{s.context.span_id:016x}"] for s in spans if s.context]


def test_the_client_does_not_import_opentelemetry() -> None:
    code = "import sys, mmpos.client; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
