"""A server whose answers the test defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mmpos.rpc.positions import get_query, put_result
from mmpos.rpc.v1 import positions_pb2 as pb

Place = Callable[[pb.PlaceRequest, grpc.ServicerContext], pb.PlaceResponse]
Stream = Callable[[Iterator[pb.StreamPlaceRequest], grpc.ServicerContext], Iterator[pb.StreamPlaceResponse]]

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "gone", ())


def echo(request: pb.PlaceRequest, context: grpc.ServicerContext) -> pb.PlaceResponse:
    """Answer like the service."""
    response = pb.PlaceResponse()
    put_result(response.positions, get_query("query", request.query).run())
    return response


def echo_stream(
    requests: Iterator[pb.StreamPlaceRequest], context: grpc.ServicerContext
) -> Iterator[pb.StreamPlaceResponse]:
    """Answer a stream like the service."""
    for request in requests:
        place = pb.PlaceRequest(query=request.query)
        yield pb.StreamPlaceResponse(id=request.id, positions=echo(place, context).positions)


@dataclass
class Fake(grpc.GenericRpcHandler):
    """Handlers for Place and StreamPlace that count the calls."""

    place: Place = echo
    stream: Stream = echo_stream
    calls: int = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:  # type: ignore[type-arg]
        self.calls += 1
        if details.method == "/mmpos.rpc.v1.PositionService/Place":
            return grpc.unary_unary_rpc_method_handler(
                self.place, pb.PlaceRequest.FromString, pb.PlaceResponse.SerializeToString
            )
        return grpc.stream_stream_rpc_method_handler(
            self.stream, pb.StreamPlaceRequest.FromString, pb.StreamPlaceResponse.SerializeToString
        )


@contextmanager
def serving(fake: grpc.GenericRpcHandler, serving: bool = True) -> Iterator[str]:
    """Serve while the context is open; the health service reports SERVING if ``serving``, and NOT_SERVING otherwise."""
    server = grpc.server(ThreadPoolExecutor(16), handlers=[fake], options=[("grpc.so_reuseport", 0)])
    # The non-blocking servicer sends while it holds a lock that the sending thread needs when a watcher leaves.
    servicer = health.HealthServicer(experimental_non_blocking=False)
    states = health_pb2.HealthCheckResponse
    servicer.set("", states.SERVING if serving else states.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
