"""Fixtures: servers with a scripted method, and a server in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from serving import Serve, Serving, serving
from victim import Victim, victim


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function that starts servers as ``serving`` does, and stop these servers after the test."""
    with ExitStack() as stack:

        def start(**options: Any) -> Serving:
            return stack.enter_context(serving(**options))

        yield start


@pytest.fixture(scope="session")
def hardy() -> Iterator[Victim]:
    """Yield a server that receives broken, strange and oversized requests."""
    with victim() as result:
        yield result
