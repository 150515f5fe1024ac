"""Fixtures: a server with the default configuration, and the kinds of clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mmpos_server.testing import running


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of the server."""
    with running(rotations=True) as address:
        yield address


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of client to pass to ``open_client``."""
    return str(request.param)
