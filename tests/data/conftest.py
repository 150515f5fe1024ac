"""Fixtures of the tests of training data."""

from __future__ import annotations

import pytest

from mmpos.data import packing


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of a few tokens, whose gaps are filled as those of thousands are."""
    monkeypatch.setattr(packing, "MIN_PIECE", 2)
