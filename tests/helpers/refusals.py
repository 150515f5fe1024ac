"""The form of error messages, and the errors that refused calls raise."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mmpos import InvalidInputError

_NAME = r"(?:--)?[A-Za-z_][\w-]*(?:\.[\w-]+|\[[^\]]*\])*"
_SENTENCE = re.compile(
    rf"missing input tensor '|{_NAME} (?:must|requires|cannot be combined with) |{_NAME}.*?: "
    r"(?:(?:got|want|the|this|no|only|cannot) |scheme '|memory of |token types of |"
    r".+? (?:is already registered|is in use|is not a socket|requires |cannot be combined with ))",
    re.DOTALL,
)


def is_sentence(message: str) -> bool:
    """Return whether an error message begins with the name of the argument, field or file at fault."""
    return _SENTENCE.match(message) is not None


def assert_refused(
    message: str, call: Callable[[], object], error: type[Exception] | tuple[type[Exception], ...] = InvalidInputError
) -> None:
    """Assert that a call raises an error whose message begins with ``message``."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith(message), caught.value
