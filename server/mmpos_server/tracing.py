"""Create OpenTelemetry spans: one for each call, stream and item, with child spans for its stages."""

from __future__ import annotations

from time import time_ns
from typing import TYPE_CHECKING
from urllib.parse import unquote

from mmpos.support.extras import needed_for
from mmpos.support.info import version

with needed_for("mmpos_server.tracing", extra="otel"):
    from opentelemetry import propagate, trace
    from opentelemetry.context import Context

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from mmpos_server.call import Call
    from mmpos_server.endpoints import Context as CallContext

__all__ = ["Tracing", "configured"]

# These are server errors in the semantic conventions for gRPC; other statuses are client errors.
_FAULTS = ("DATA_LOSS", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN")


class Tracing:
    """Source of one server's OpenTelemetry spans.

    Args:
        provider: the provider of the tracer.
    """

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mmpos_server", version())

    def begin(self, call: Call, method: str, context: CallContext) -> None:
        """Begin the span of a call or stream in the trace that its metadata names.

        Args:
            call: the call to which the span belongs.
            method: full name of the method.
            context: gRPC context of the call.
        """
        carrier = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        attributes = {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "mmpos.request_id": call.request_id,
            "mmpos.client": call.client,
            **_peer(context.peer()),
        }
        parent = propagate.extract(carrier, Context())
        self._enter(call, self._tracer.start_span(method, parent, trace.SpanKind.SERVER, attributes))

    def begin_item(self, call: Call, method: str, stream: Call) -> None:
        """Begin an item's span as a child of its stream's span.

        Args:
            call: the item's call, to which the span belongs.
            method: full name of the method.
            stream: the stream's call.
        """
        attributes = {"mmpos.request_id": call.request_id}
        assert stream.span is not None
        self._enter(call, self._tracer.start_span(f"{method} item", _context_of(stream.span), attributes=attributes))

    def end(self, call: Call, status: str, **sizes: int) -> None:
        """End the span of a call, a stream or an item.

        Args:
            call: the call to which the span belongs.
            status: name of the gRPC status.
            sizes: further numbers, which become attributes.
        """
        span = call.span
        assert span is not None
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", status)
            for name, value in {**call.counts, **sizes}.items():
                span.set_attribute(f"mmpos.{name}", value)
            if status in _FAULTS:
                span.set_attribute("error.type", status)
                span.set_status(trace.StatusCode.ERROR)
            if isinstance(call.stages, _Stages):
                self._stages(call.stages, span)
        span.end()

    def close(self) -> None:
        """Send the waiting spans and shut down the provider if it belongs to the SDK."""
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()

    def _enter(self, call: Call, span: Span) -> None:
        call.span = span
        if span.is_recording():
            call.stages = _Stages()

    def _stages(self, stages: _Stages, span: Span) -> None:
        context = _context_of(span)
        for name, begin, end in stages.times:
            self._tracer.start_span(name, context, start_time=begin).end(end)


class _Stages(list[tuple[str, float]]):
    """Stages of a call with the wall-clock times at which each began and ended; ``append`` is thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[str, int, int]] = []

    def append(self, stage: tuple[str, float]) -> None:
        super().append(stage)
        name, seconds = stage
        end = time_ns()
        self.times.append((name, end - round(1e9 * seconds), end))


def configured() -> Tracing:
    """Return tracing with this process's provider, or with an OTLP provider from the environment (OTEL_...).

    The name of the service is mmpos unless the environment names another.

    A thread of the SDK sends the spans in batches; it sends the last batch when tracing is closed.

    Raises:
        ImportError: the SDK or the exporter is missing; the message names the pip command.
    """
    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider):
        return Tracing(provider)
    with needed_for("--otel", extra="otel"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "mmpos"}))
    exporting = TracerProvider(resource=resource)
    exporting.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(exporting)


def _context_of(span: Span) -> Context:
    return trace.set_span_in_context(span, Context())


def _peer(peer: str) -> dict[str, str | int]:
    """Return the span attributes for a peer as gRPC names it, such as ipv6:%5B::1%5D:50051 or unix:PATH."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return {"network.peer.address": address} if address else {}
    host, _, port = unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return {}
    return {"network.peer.address": host.strip("[]"), "network.peer.port": int(port)}
