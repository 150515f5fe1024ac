"""What a call is refused with."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mmpos import InvalidInputError

_SENTENCE = re.compile(r"missing |.+?(: | must | requires | cannot | has no )", re.DOTALL)


def is_sentence(message: str) -> bool:
    """Tell whether the words of a refusal name what they are about before they say what is wrong with it."""
    return _SENTENCE.match(message) is not None


def assert_refused(
    message: str, call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...] = InvalidInputError
) -> None:
    """Check that a call raises an error whose words begin so."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message), caught.value
