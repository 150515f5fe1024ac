"""Fixtures for the tests of training data."""

from __future__ import annotations

import pytest

from mmpos.data import packing


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small pieces, so that packs of a few tokens are filled like those of thousands."""
    monkeypatch.setattr(packing, "MIN_PIECE", 2)
