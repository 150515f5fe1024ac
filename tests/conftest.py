"""What several rooms of tests share."""

from __future__ import annotations

import pytest

from mmpos import native


@pytest.fixture(params=["C", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing the same."""
    if request.param == "C" and native.core is None:
        pytest.skip("the extension was not built")
    if request.param == "numpy":
        monkeypatch.setattr(native, "core", None)
    return str(request.param)
