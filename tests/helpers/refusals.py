"""What a call is refused with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mmpos import InvalidInputError


def assert_refused(
    message: str, call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...] = InvalidInputError
) -> None:
    """Check that a call raises an error whose words begin so."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message), caught.value
