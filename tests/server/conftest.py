"""A server of the Open Inference Protocol with a profile for each kind of scheme, and ways to ask it."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
import tritonclient.grpc as triton
from open_inference import Infer, TritonClient, config, stub

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
