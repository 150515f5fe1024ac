"""Servers: of a method that does what a test says, of the Open Inference Protocol, and one in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from open_inference import Infer, TritonClient, config, stub
from serving import Serve, Serving, serving
from shared_objects import PREFIX
from victim import Victim, victim

from mmpos_server.testing import running


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers as ``serving`` does; they stop in the end."""
    with ExitStack() as stack:

        def start(**options: Any) -> Serving:
            return stack.enter_context(serving(**options))

        yield start


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address of the server."""
    with running(config()) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[TritonClient]:
    """Triton's client of the server."""
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture(scope="module")
def infer(address: str) -> Iterator[Infer]:
    """Yield a call with messages as no client writes them."""
    with grpc.insecure_channel(address) as channel:
        yield stub(channel)


@pytest.fixture(scope="session")
def hardy() -> Iterator[Victim]:
    """Yield a server that is asked for all that is broken, strange and too large, and takes shared memory."""
    with victim(shared_memory=PREFIX) as result:
        yield result
