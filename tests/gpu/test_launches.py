"""Every kind of launch against the formula in float64, in the tilings that are chosen for its size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launches import GPU, KINDS, LAUNCHES, Launch, Scene

pytestmark = pytest.mark.gpu

IN_SHORT = 6  # of so many toys, one is run by `make test`


def chosen() -> list[object]:
    """All on a GPU; of toys one in so many, the others for `make slow`."""
    return [
        pytest.param(launch, id=str(launch), marks=[] if GPU or not number % IN_SHORT else [pytest.mark.slow])
        for number, launch in enumerate(LAUNCHES)
    ]


@pytest.mark.parametrize("launch", chosen())
def test_launch_agrees_with_float64(launch: Launch, record_property: Callable[[str, object], None]) -> None:
    checks = list(KINDS[launch.kind](Scene(launch, LAUNCHES.index(launch))))
    record_property("share_of_bound", max(share for _, share in checks))
    assert checks
    assert {name: share for name, share in checks if not share <= 1} == {}
