"""Compare every kind of launch, in the tilings chosen for its size, with the float64 formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launches import GPU, LAUNCHES, TRITON, Launch, checks

pytestmark = pytest.mark.gpu

EVERY = 6  # `make test` interprets every sixth launch without a GPU, and `make slow` the others


def cases() -> list[object]:
    """Return all launches; without a GPU, most of those that are interpreted are marked slow."""
    return [
        pytest.param(
            launch, id=str(launch), marks=[pytest.mark.slow] * (not GPU and launch.way == TRITON and number % EVERY > 0)
        )
        for number, launch in enumerate(LAUNCHES)
    ]


@pytest.mark.parametrize("launch", cases())
def test_a_launch_agrees_with_float64(launch: Launch, record_property: Callable[[str, object], None]) -> None:
    shares = list(checks(launch, LAUNCHES.index(launch)))
    record_property("share_of_bound", max(share for _, share in shares))
    assert {name: share for name, share in shares if not share <= 1} == {}
