"""Compare every kind of launch, in the tilings chosen for its size, with the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launches import LAUNCHES, Launch, checks
from tolerance import INTERPRETED

pytestmark = pytest.mark.gpu


# The interpreter, which is slow, runs every sixth launch; tests/machine draws from all.
@pytest.mark.parametrize("launch", LAUNCHES[:: 6 if INTERPRETED else 1], ids=str)
def test_a_launch_agrees_with_the_reference(launch: Launch, record_property: Callable[[str, object], None]) -> None:
    shares = dict(checks(launch, LAUNCHES.index(launch)))
    record_property("share_of_bound", max(shares.values()))
    assert {name: share for name, share in shares.items() if not share <= 1} == {}
