"""The exceptions of mmpos: one tree for every room.

    MmposError
    ├── InvalidInputError (ValueError)          the caller's argument is wrong
    ├── UnsupportedError (NotImplementedError)  right, but this scheme or layout has no such thing
    └── LimitExceededError                      right, but beyond a stated limit

A message says what, got and want: ``documents[3][1].height: got 0, want >= 1``.
"""

__all__ = [
    "InvalidInputError",
    "LimitExceededError",
    "MmposError",
    "UnsupportedError",
]


class MmposError(Exception):
    """Any error raised on purpose by mmpos."""


class InvalidInputError(MmposError, ValueError):
    """An argument has the wrong type, shape or value."""


class UnsupportedError(MmposError, NotImplementedError):
    """The input is legal, but the chosen scheme or layout does not define the result."""


class LimitExceededError(MmposError):
    """The input is legal, but larger than a limit that mmpos states."""
