"""A bare servicer that answers every request with so many bytes: what a call costs before anything is done in it.

python benchmarks/echo_server.py --malloc tuned 760 55296    methods /echo/Bytes760 and /echo/Bytes55296
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from mmpos_server.listening import Listen, address, transport_options
from mmpos_server.malloc import keep_large_blocks


def answering(size: int) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """The method that answers so many bytes, new ones each time, as a service's are."""

    async def handle(request: bytes, context: Any) -> bytes:
        return bytes(size)

    return handle


async def serve(sizes: list[int]) -> None:
    """Serve with the transport options of mmpos_server, and say where, as it does."""
    server = grpc.aio.server(options=transport_options(64 * 2**20, reuse_port=False))
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        f"Bytes{size}": grpc.unary_unary_rpc_method_handler(answering(size)) for size in sizes
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("echo", handlers)])
    listen = Listen()
    port = server.add_insecure_port(address(listen.host, listen.port))
    await server.start()
    print(f"echo_server listening on {address(listen.host, port)}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--malloc", choices=["default", "tuned"], default="tuned", help="as mmpos_server tunes it")
    parser.add_argument("sizes", type=int, nargs="+", help="bytes of the answers of each method")
    options = parser.parse_args()
    if options.malloc == "tuned":
        keep_large_blocks()
    asyncio.run(serve(options.sizes))
