"""Fixtures for the training data tests."""

from __future__ import annotations

import pytest

from mmpos.data import packing


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow small pieces, so that packs of a few tokens are filled like packs of thousands of tokens."""
    monkeypatch.setattr(packing, "MIN_PIECE", 2)
