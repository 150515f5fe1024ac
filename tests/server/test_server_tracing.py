"""Test traces through OpenTelemetry's own instrumentation of grpc: of the server, of both clients and the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from clients import open_client
from fake_server import Fake
from fake_server import serving as serving_fake
from opentelemetry import trace
from opentelemetry.instrumentation.grpc import (
    GrpcAioInstrumentorClient,
    GrpcAioInstrumentorServer,
    GrpcInstrumentorClient,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import CHECK, PLACE, REFLECTION, STREAM, WATCH, Serve, query
from waiting import eventually

import mmpos
from mmpos.client import Client, PositionsQuery
from mmpos.rpc.v1 import positions_pb2 as pb

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, *kinds: Any) -> Iterator[InMemorySpanExporter]:
    """Instrument servers or clients, and yield their spans."""
    result, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(result))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    for kind in kinds:
        kind().instrument()
    yield result
    for kind in kinds:
        kind().uninstrument()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Instrument the servers of a test, and yield their spans."""
    with traced(monkeypatch, GrpcAioInstrumentorServer) as spans:
        yield spans


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_and_streams_are_spans_whose_context_the_server_receives(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, segments = Fake(), mmpos.SegmentTable.from_documents([[mmpos.Text(3)]])
    with (
        traced(monkeypatch, GrpcInstrumentorClient, GrpcAioInstrumentorClient) as exporter,
        serving_fake(fake) as address,
        open_client(kind, address) as client,
    ):
        client.place(segments)
        assert len(list(client.stream([PositionsQuery(segments)] * 20))) == 20
    received = [str(dict(metadata)["traceparent"]).split("-")[1:3] for metadata in fake.metadata]
    spans = exporter.get_finished_spans()
    assert [span.name.rpartition("/")[2] for span in spans] == ["Place", "StreamPlace"]
    assert received == [[f"{s.context.trace_id:032x}", f"{s.context.span_id:016x}"] for s in spans if s.context]


def test_each_call_and_stream_is_a_span_in_its_callers_trace(serve: Serve, exporter: InMemorySpanExporter) -> None:
    serving = serve()
    assert list(serving.place(query("echo 7"), metadata=METADATA).positions.cu_seqlens) == [7]
    with pytest.raises(grpc.RpcError) as failed:
        serving.place(query("fail limit"), metadata=METADATA)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    items = [pb.StreamPlaceRequest(query=pb.PositionsQuery(profile=f"echo {number}")) for number in range(3)]
    answers = serving.stream(iter(items), metadata=METADATA)
    assert [list(answer.positions.cu_seqlens) for answer in answers] == [[0], [1], [2]]
    channel: Any = serving.channel
    listed = channel.stream_stream(REFLECTION)(iter([b"\x3a\x00"]), metadata=METADATA)
    assert b"grpc.health.v1.Health" in next(listed)
    listed.cancel()
    watched = channel.unary_stream(WATCH)(b"", metadata=METADATA)
    assert next(watched) == b"\x08\x01"
    watched.cancel()

    def own() -> list[Any]:  # without the server's calls to itself
        return [span for span in exporter.get_finished_spans() if span.name != CHECK]

    assert eventually(lambda: len(own()) == 5)
    seen = [(span.name, span.attributes["rpc.grpc.status_code"], span.status.is_ok) for span in own()]
    assert seen[:3] == [(PLACE, 0, True), (PLACE, 8, True), (STREAM, 0, True)]
    assert {name for name, *_ in seen[3:]} == {REFLECTION, WATCH}
    assert {(f"{s.context.trace_id:032x}", f"{s.parent.span_id:016x}") for s in own()} == {(TRACE, PARENT)}


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_instrumented_program_sends_its_last_spans_when_it_ends(workers: str) -> None:
    settings = {
        "OTEL_TRACES_EXPORTER": "console",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        "OTEL_PYTHON_GRPC_EXCLUDED_SERVICES": "grpc.health.v1.Health",
    }
    instrument = f"{sysconfig.get_path('scripts')}/opentelemetry-instrument"
    command = [instrument, sys.executable, "-m", "mmpos_server", "--listen", "127.0.0.1:0", "--workers", workers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}) as process:
        assert process.stdout is not None
        with Client(process.stdout.readline().split()[-1], timeout=300) as client:
            client.place(mmpos.SegmentTable.from_documents([[mmpos.Text(3)]]))
        process.terminate()
        assert json.loads(process.stdout.read())["name"] == PLACE
        assert process.wait(300) == 0
