"""Fixtures: servers with a scripted method, and the threads of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from serving import Serve, serving

from mmpos_server.call import Threads


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function that starts servers as ``serving`` does, and stop these servers after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(**options))


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Yield the threads of calls."""
    threads = Threads()
    yield threads
    threads.close()
