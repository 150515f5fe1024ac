"""Test traces through OpenTelemetry's own instrumentation of grpc: of the server, of both clients and the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from typing import Any

import pytest
from clients import open_client
from opentelemetry import trace
from opentelemetry.instrumentation import grpc as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import CHECK, PLACE, STREAM
from waiting import eventually

import mmpos
from mmpos.client import Client, PositionsQuery
from mmpos.errors import InvalidInputError
from mmpos_server.testing import running

SEGMENTS = mmpos.SegmentTable.from_documents([[mmpos.Text(3)]])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_each_call_and_stream_is_a_server_span_within_a_client_span(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    kinds: list[Any] = [otel.GrpcInstrumentorClient, otel.GrpcAioInstrumentorClient, otel.GrpcAioInstrumentorServer]
    for kind_ in kinds:
        kind_().instrument()

    def spans(of: str) -> list[Any]:  # without the server's calls to itself
        return [one for one in exporter.get_finished_spans() if one.kind.name == of and one.name != CHECK]

    with running() as address, open_client(kind, address) as client:
        client.place(SEGMENTS)
        with pytest.raises(InvalidInputError):
            client.place(SEGMENTS, "none")
        assert len(list(client.stream([PositionsQuery(SEGMENTS)] * 20))) == 20
    assert eventually(lambda: len(spans("SERVER")) == len(spans("CLIENT")) == 3)
    for kind_ in kinds:
        kind_().uninstrument()
    seen = [(one.name, one.attributes["rpc.grpc.status_code"]) for one in spans("SERVER")]
    assert seen == [(PLACE, 0), (PLACE, 3), (STREAM, 0)]
    assert [one.parent.span_id for one in spans("SERVER")] == [one.context.span_id for one in spans("CLIENT")]


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
            client.place(SEGMENTS)
        process.terminate()
        assert json.loads(process.stdout.read())["name"] == PLACE
        assert process.wait(300) == 0
