"""Servers: one of the Open Inference Protocol with a profile for each kind of scheme, and one in its own process."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
import tritonclient.grpc as triton
from open_inference import Infer, TritonClient, config, stub
from shared_objects import PREFIX
from victim import Victim, victim

from mmpos_server.testing import running


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the server."""
    with running(config()) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[TritonClient]:
    """Triton's client of the server."""
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture(scope="module")
def infer(address: str) -> Iterator[Infer]:
    """A call with messages as no client writes them."""
    with grpc.insecure_channel(address) as channel:
        yield stub(channel)


@pytest.fixture(scope="session")
def hardy() -> Iterator[Victim]:
    """A server that is asked for all that is broken, strange and too large, and takes shared memory."""
    with victim(shared_memory=PREFIX) as found:
        yield found
