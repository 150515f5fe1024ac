"""Compare every kind of launch, in the tilings chosen for its size, with the float64 formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launches import LAUNCHES, TRITON, Launch, checks
from tolerance import INTERPRETED

pytestmark = pytest.mark.gpu

# The interpreter, which is slow, runs every sixth launch; tests/machine draws from all.
CASES = [launch for i, launch in enumerate(LAUNCHES) if not INTERPRETED or launch.way != TRITON or i % 6 == 0]


@pytest.mark.parametrize("launch", CASES, ids=str)
def test_a_launch_agrees_with_float64(launch: Launch, record_property: Callable[[str, object], None]) -> None:
    shares = list(checks(launch, LAUNCHES.index(launch)))
    record_property("share_of_bound", max(share for _, share in shares))
    assert {name: share for name, share in shares if not share <= 1} == {}
