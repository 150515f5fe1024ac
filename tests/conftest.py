"""What several rooms of tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from mmpos import native

# How long an example takes is decided by whatever else the machine does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing the same."""
    if request.param == "C" and native.core is None:
        pytest.skip("the extension was not built")
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)
