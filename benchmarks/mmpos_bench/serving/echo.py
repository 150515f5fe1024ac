"""A bare servicer that answers every request with so many bytes: what a call costs before anything is done in it.

python -m mmpos_bench.serving.echo --malloc tuned    methods /echo/Bytes760 and /echo/Stream760, for any number
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import AsyncIterator

import grpc

from mmpos_bench.machine import MALLOCS, set_malloc
from mmpos_server.config import Limits, load
from mmpos_server.listening import Listen, address, transport_options

_METHOD = re.compile(r"/echo/(Bytes|Stream)(\d+)")


def echo_path(size: int, *, stream: bool = False) -> str:
    """The method that answers so many bytes, once or to every item of a stream."""
    return f"/echo/{'Stream' if stream else 'Bytes'}{size}"


class _Echo(grpc.GenericRpcHandler):
    """New bytes for each answer, as a service's are."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        method = _METHOD.fullmatch(handler_call_details.method)
        if method is None:
            return None
        size = int(method[2])

        async def once(request: bytes, context: object) -> bytes:
            return bytes(size)

        async def each(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield bytes(size)

        if method[1] == "Stream":
            return grpc.stream_stream_rpc_method_handler(each)
        return grpc.unary_unary_rpc_method_handler(once)


async def _serve() -> None:
    """Serve with the transport options of mmpos_server, and say where, as it does."""
    settings = {"limits": Limits(request_bytes=64 * 2**20)}
    options = dict(transport_options(load().model_copy(update=settings), reuse_port=False))
    # Where grpc.aio itself asks for calls, they wait in the transport.
    options |= {"grpc.server.max_pending_requests": 1024, "grpc.server.max_pending_requests_hard_limit": 1024}
    server = grpc.aio.server(options=list(options.items()))
    server.add_generic_rpc_handlers([_Echo()])
    listen = Listen()
    port = server.add_insecure_port(address(listen.host, listen.port))
    await server.start()
    print(f"echo listening on {address(listen.host, port)}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--malloc", choices=MALLOCS, default="tuned", help="as mmpos_server tunes it")
    set_malloc(parser.parse_args().malloc)
    asyncio.run(_serve())
