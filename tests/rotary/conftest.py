"""Fixtures for kernels in the interpreter: few programs, and new memory filled with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from store_oracle import poisoned

Tile = Callable[[int, int], None]


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> Tile:
    """Return a function that sets the tokens per program and the number of programs that share the heads."""

    def set_tiles(block: int, shares: int) -> None:
        from mmpos.rotary.kernel import tiling

        # As own tilings do, give a thread eight pairs at least: warps that repeat each other would race in place.
        monkeypatch.setattr(
            tiling, "tiles", lambda tokens, heads, pairs: (block, shares, 4 if block * pairs >= 1024 else 1)
        )

    return set_tiles


@pytest.fixture
def few_programs(tile: Tile) -> None:
    """Give each program sixteen tokens and all heads, since the interpreter runs programs one after another."""
    tile(16, 1)


@pytest.fixture
def poison() -> Iterator[None]:
    """Run a test with poisoned memory."""
    with poisoned():
        yield
