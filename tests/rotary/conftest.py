"""Kernels in the interpreter: few programs, and fresh memory that shows what nobody writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Tile = Callable[[int, int], None]


@pytest.fixture
def tile(monkeypatch: pytest.MonkeyPatch) -> Tile:
    """Set the tokens of a program and the number of programs that share their heads."""

    def chosen(block: int, shares: int) -> None:
        from mmpos.rotary.kernel import tiling

        monkeypatch.setattr(tiling, "tiles", lambda tokens, heads, pairs: (block, shares, 4))

    return chosen


@pytest.fixture
def few_programs(tile: Tile) -> None:
    """Let a program take sixteen tokens and all heads: the interpreter runs program after program."""
    tile(16, 1)


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill fresh memory with NaN, so that an element that nobody writes shows."""
    for name in ("empty_like", "empty"):
        make = getattr(torch, name)

        def poisoned(*args: Any, make: Any = make, **options: Any) -> Tensor:
            out: Tensor = make(*args, **options)
            return out.fill_(torch.nan) if out.is_floating_point() else out

        monkeypatch.setattr(torch, name, poisoned)
