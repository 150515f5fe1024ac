"""Fixtures: servers with a scripted method or the Open Inference Protocol, and a server in its own process."""

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
    """Yield a function that starts servers as ``serving`` does, and stop these servers after the test."""
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
    """Yield Triton's client, connected to the server."""
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture(scope="module")
def infer(address: str) -> Iterator[Infer]:
    """Yield a call that sends raw messages, including messages that no client would write."""
    with grpc.insecure_channel(address) as channel:
        yield stub(channel)


@pytest.fixture(scope="session")
def hardy() -> Iterator[Victim]:
    """Yield a server with shared memory that receives broken, strange and oversized requests."""
    with victim(shared_memory=PREFIX) as result:
        yield result
