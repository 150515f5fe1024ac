"""Test the spans of calls, the traces they continue, and the export of spans."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from clients import open_client
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import eventually

from mmpos import SegmentTable, Text
from mmpos.client import Client, PositionsQuery
from mmpos.errors import LimitExceededError, ServiceOverloadedError
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos_server import tracing as tracing_module
from mmpos_server.__main__ import main
from mmpos_server.call import Call
from mmpos_server.config import load
from mmpos_server.services import place_method
from mmpos_server.telemetry import Logs
from mmpos_server.testing import running
from mmpos_server.tracing import Tracing, configured

NAME = "mmpos.rpc.v1.PositionService/Place"
STREAM = "mmpos.rpc.v1.PositionService/StreamPlace"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SEGMENTS = SegmentTable.from_documents([[Text(3)]])
waiting = threading.Event()


def run(query: pb.PositionsQuery, answer: pb.Positions, call: Call) -> None:
    """Run the action named by a query's profile."""
    with call.stage("read"):
        time.sleep(0.001)
    if query.profile == "wait":
        waiting.set()
        while True:
            call.checkpoint()
            time.sleep(0.01)
    if query.profile in ERRORS:
        raise ERRORS[query.profile]
    call.run("place", time.sleep, 0.001)
    call.count(documents=1, tokens=2)


ERRORS = {
    "limit": LimitExceededError("documents: got 2, want <= 1"),
    "busy": ServiceOverloadedError("max_in_flight: got 1 of 1 in use", 1.0),
    "bug": KeyError("why"),
}
METHOD = place_method(run)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    result = TracerProvider(shutdown_on_exit=False)
    result.add_span_processor(SimpleSpanProcessor(exporter))
    return result


Start = Callable[..., str]


@pytest.fixture
def start(provider: TracerProvider) -> Iterator[Start]:
    with ExitStack() as stack:

        def address(methods: Any = lambda *_: [METHOD], logs: Logs | None = None) -> str:
            return stack.enter_context(running(load(), tracing=Tracing(provider), methods=methods, logs=logs))

        yield address


@pytest.fixture
def channel(start: Start) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(start()) as opened:
        yield opened


def place(channel: Any, profile: str, *metadata: tuple[str, str]) -> Any:
    request = pb.PlaceRequest(query=pb.PositionsQuery(profile=profile)).SerializeToString()
    return channel.unary_unary(f"/{NAME}").future(request, metadata=[("x-request-id", "me"), *metadata])


def spans(exporter: InMemorySpanExporter, count: int) -> list[Any]:
    """Wait until this many spans have finished (after their answers), and return them in order of their start."""
    eventually(lambda: len(exporter.get_finished_spans()) >= count)
    result = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    assert len(result) == count, [span.name for span in result]
    return result


def tree(finished: list[Any], span: Any) -> tuple[object, ...]:
    """Return the name, attributes and children of a span."""
    children = [child for child in finished if child.parent and child.parent.span_id == span.context.span_id]
    assert all(span.start_time <= child.start_time <= child.end_time <= span.end_time for child in children)
    attributes = {key: value for key, value in span.attributes.items() if not key.startswith("network.")}
    return (span.name, attributes, *(tree(finished, child) for child in children))


def leaves(*names: str) -> list[tuple[str, dict[str, object]]]:
    return [(name, {}) for name in names]


CALL: dict[str, object] = {
    "rpc.system.name": "grpc",
    "rpc.method": NAME,
    "mmpos.request_id": "me",
    "mmpos.client": "127.0.0.1",
}


def test_a_call_is_a_span_with_its_stages_as_children(channel: grpc.Channel, exporter: InMemorySpanExporter) -> None:
    place(channel, "echo").result()
    finished = spans(exporter, 5)
    attributes: dict[str, object] = {
        "rpc.response.status_code": "OK",
        "mmpos.documents": 1,
        "mmpos.tokens": 2,
        "mmpos.request_bytes": 8,
        "mmpos.response_bytes": 2,
    }
    assert tree(finished, finished[0]) == (NAME, CALL | attributes, *leaves("decode", "read", "queue", "encode"))
    root = finished[0]
    assert (root.kind, root.parent, root.status.status_code) == (trace.SpanKind.SERVER, None, trace.StatusCode.UNSET)
    assert root.attributes["network.peer.address"] == "127.0.0.1"
    assert 0 < root.attributes["network.peer.port"] < 65536
    read = next(span for span in finished if span.name == "read")
    assert read.end_time - read.start_time >= 1_000_000


@pytest.mark.parametrize(
    ("profile", "status", "fault"),
    [("limit", "RESOURCE_EXHAUSTED", False), ("busy", "RESOURCE_EXHAUSTED", False), ("bug", "INTERNAL", True)],
)
def test_the_span_of_a_refused_call_has_its_status_and_only_server_faults_are_errors(
    profile: str, status: str, fault: bool, channel: grpc.Channel, exporter: InMemorySpanExporter
) -> None:
    assert place(channel, profile).exception().code().name == status
    finished = spans(exporter, 3)
    sizes = {"mmpos.request_bytes": 4 + len(profile), "mmpos.response_bytes": 0}
    attributes: dict[str, object] = {
        "rpc.response.status_code": status,
        **sizes,
        **({"error.type": status} if fault else {}),
    }
    assert tree(finished, finished[0]) == (NAME, CALL | attributes, *leaves("decode", "read"))
    assert finished[0].status.status_code == (trace.StatusCode.ERROR if fault else trace.StatusCode.UNSET)


def test_a_cancelled_call_is_a_cancelled_span(channel: grpc.Channel, exporter: InMemorySpanExporter) -> None:
    waiting.clear()
    call = place(channel, "wait")
    assert waiting.wait(60)
    call.cancel()
    finished = spans(exporter, 3)
    attributes: dict[str, object] = {
        "rpc.response.status_code": "CANCELLED",
        "mmpos.request_bytes": 8,
        "mmpos.response_bytes": 0,
    }
    assert tree(finished, finished[0]) == (NAME, CALL | attributes, *leaves("decode", "read"))


def test_a_stream_is_a_span_with_a_child_for_each_item(channel: grpc.Channel, exporter: InMemorySpanExporter) -> None:
    requests = [pb.StreamPlaceRequest(query=pb.PositionsQuery(profile=name)) for name in ("echo", "limit")]
    method: Any = channel.stream_stream(f"/{STREAM}")
    answers = list(method((request.SerializeToString() for request in requests), metadata=[("x-request-id", "me")]))
    finished = spans(exporter, 9)
    root = next(span for span in finished if span.name == STREAM)
    first = {
        "mmpos.request_id": "me.1",
        "rpc.response.status_code": "OK",
        "mmpos.documents": 1,
        "mmpos.tokens": 2,
        "mmpos.request_bytes": 8,
        "mmpos.response_bytes": 2,
    }
    second = {
        "mmpos.request_id": "me.2",
        "rpc.response.status_code": "RESOURCE_EXHAUSTED",
        "mmpos.request_bytes": 9,
        "mmpos.response_bytes": len(answers[1]),
    }
    assert tree(finished, root) == (
        STREAM,
        CALL | {"rpc.method": STREAM, "rpc.response.status_code": "OK", "mmpos.items": 2},
        (f"{STREAM} item", first, *leaves("decode", "read", "queue", "encode")),
        (f"{STREAM} item", second, *leaves("decode", "read")),
    )


def test_a_call_continues_the_trace_of_its_caller(channel: grpc.Channel, exporter: InMemorySpanExporter) -> None:
    place(channel, "echo", ("traceparent", f"00-{TRACE}-{PARENT}-01")).result()
    root = spans(exporter, 5)[0]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)


def test_a_trace_that_is_not_sampled_is_not_exported(channel: grpc.Channel, exporter: InMemorySpanExporter) -> None:
    place(channel, "echo", ("traceparent", f"00-{TRACE}-{PARENT}-00")).result()
    place(channel, "echo").result()
    assert all(f"{span.context.trace_id:032x}" != TRACE for span in spans(exporter, 5))


def test_both_clients_propagate_the_current_span(start: Start, exporter: InMemorySpanExporter) -> None:
    address, query = start(methods=None), PositionsQuery(SEGMENTS)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")

    with tracer.start_as_current_span("caller") as caller:
        for kind in ("sync", "async"):
            with open_client(kind, address, timeout=60) as client:
                client.query(query)
                list(client.stream([query], errors="return"))
    with Client(address, timeout=60) as client:
        client.query(query)
    # A plain call produces a span and one stage; a stream produces a span, the span of its item, and five stages.
    finished = [span for span in spans(exporter, 3 * 2 + 2 * 7) if span.kind is trace.SpanKind.SERVER]
    context = caller.get_span_context()
    assert [span.name for span in finished] == [NAME, STREAM, NAME, STREAM, NAME]
    assert {(s.context.trace_id, s.parent.span_id) for s in finished[:4]} == {(context.trace_id, context.span_id)}
    assert finished[4].parent is None


def written(capsys: pytest.CaptureFixture[str], count: int) -> list[dict[str, Any]]:
    """Wait for this number of log lines, and return them."""
    results: list[dict[str, Any]] = []

    def enough() -> bool:
        results.extend(map(json.loads, capsys.readouterr().err.splitlines()))
        return len(results) >= count

    assert eventually(enough)
    return results


def test_log_lines_name_the_span(
    start: Start, exporter: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    with grpc.insecure_channel(start(logs=Logs("info"))) as channel:
        place(channel, "bug").exception()
        (root, *_) = spans(exporter, 3)
        lines = written(capsys, 2)
    assert [line["event"] for line in lines] == ["internal error", "request"]
    ids = (f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}")
    assert {(line["trace_id"], line["span_id"]) for line in lines} == {ids}


def test_log_lines_name_no_span_if_the_environment_disables_spans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    off = Tracing(TracerProvider(shutdown_on_exit=False))
    with (
        running(load(), tracing=off, logs=Logs("info"), methods=lambda *_: [METHOD]) as address,
        grpc.insecure_channel(address) as channel,
    ):
        place(channel, "echo").result()
        (line,) = written(capsys, 1)
    assert line.keys().isdisjoint({"trace_id", "span_id"})


@pytest.mark.parametrize(
    ("peer", "attributes"),
    [
        ("ipv4:10.0.0.1:50051", {"network.peer.address": "10.0.0.1", "network.peer.port": 50051}),
        ("ipv6:%5B::1%5D:50051", {"network.peer.address": "::1", "network.peer.port": 50051}),
        ("unix:/run/mmpos", {"network.peer.address": "/run/mmpos"}),
        ("unix:", {}),
        ("unknown", {}),
    ],
)
def test_a_peer_is_split_into_an_address_and_a_port(peer: str, attributes: dict[str, object]) -> None:
    assert tracing_module._peer(peer) == attributes


def test_a_tracer_provider_set_by_the_process_is_used(
    provider: TracerProvider, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with (
        running(load(), tracing=configured(), methods=lambda *_: [METHOD]) as address,
        grpc.insecure_channel(address) as channel,
    ):
        place(channel, "echo").result()
        assert spans(exporter, 5)[0].name == NAME


def test_opentelemetry_is_not_imported_unless_spans_are_requested() -> None:
    code = (
        "import sys, mmpos_server.options, mmpos.client\n"
        "from mmpos.client.channel import traced\n"
        "metadata = (('a', 'b'),)\n"
        "assert traced(metadata) is metadata\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_missing_package_is_reported_with_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    want = 'install it with: pip install "multimodal-positions[otel]" (in a clone: pip install ".[otel]")'
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ImportError) as raised:
        configured()
    assert str(raised.value) == f"--otel: opentelemetry.sdk.trace is not installed; {want}"
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "mmpos_server.tracing")
    with pytest.raises(ImportError) as raised:
        importlib.import_module("mmpos_server.tracing")
    message = f"mmpos_server.tracing: opentelemetry is not installed; {want}"
    assert str(raised.value) == message
    assert main(["--otel", "--workers", "2"]) == 1
    assert capsys.readouterr().err == f"mmpos_server: error: {message}\n"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of an OTLP collector, and a list of the spans that the collector receives."""
    spans: list[Any] = []

    def export(request: Any, context: Any) -> Any:
        spans.extend(request.resource_spans)
        return collector_pb.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
        export, collector_pb.ExportTraceServiceRequest.FromString, lambda answer: answer.SerializeToString()
    )
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"Export": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", spans
    server.stop(None).wait()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "named"), [(1, {}), (2, {"OTEL_SERVICE_NAME": "mine"})])
def test_the_program_exports_its_last_spans_to_the_configured_collector_at_exit(
    workers: int, named: dict[str, str], collector: tuple[str, list[Any]], tmp_path: Path
) -> None:
    endpoint, sent = collector
    environment = {**os.environ, **named, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "600000"}
    command = [sys.executable, "-m", "mmpos_server", "--port", "0", "--otel", "--workers", str(workers)]
    log = tmp_path / "log"
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        with Client(process.stdout.readline().split()[-1], timeout=60) as client:
            client.place(SEGMENTS)
        assert sent == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    (resource,) = sent
    attributes = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert attributes["service.name"] == named.get("OTEL_SERVICE_NAME", "mmpos")
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([NAME, "place"])
