"""The exceptions of mmpos: one tree for every room.

    MmposError
    ├── InvalidInputError (ValueError)      the caller's argument is wrong
    ├── UnsupportedError (ValueError)       right, but not supported (a NotImplementedError)
    ├── LimitExceededError (ValueError)     right, but beyond a stated limit
    └── ServiceError                        a service could not answer, whatever it was asked
        ├── ServiceUnavailableError         no server answered, after all retries
        ├── ServiceOverloadedError          the server has too much to do; retry_after says when to come back
        ├── ServiceTimeoutError             the answer did not come in time
        └── ServiceUnauthenticatedError     the server does not know who asks, or does not let them

The first three are about one request, whether made here or by a service: serving engines refuse a request that raises
ValueError, and go on with the others. A ServiceError says nothing of the request, which may be made again.

A message says what, got and want: ``documents[3][1].height: got 0, want >= 1``.
"""

__all__ = [
    "InvalidInputError",
    "LimitExceededError",
    "MmposError",
    "ServiceError",
    "ServiceOverloadedError",
    "ServiceTimeoutError",
    "ServiceUnauthenticatedError",
    "ServiceUnavailableError",
    "UnsupportedError",
]


class MmposError(Exception):
    """Any error raised on purpose by mmpos."""


class InvalidInputError(MmposError, ValueError):
    """An argument has the wrong type, shape or value."""


class UnsupportedError(MmposError, NotImplementedError, ValueError):
    """The input is legal, but the chosen scheme, layout or builder does not define the result."""


class LimitExceededError(MmposError, ValueError):
    """The input is legal, but larger than a limit that mmpos states."""


class ServiceError(MmposError):
    """A service could not answer."""


class ServiceUnavailableError(ServiceError):
    """No server answered."""


class ServiceOverloadedError(ServiceError):
    """The server has too much to do and refused the call before any work.

    Args:
        message: what the server said.
        retry_after: seconds after which to try again, as the server proposes.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServiceTimeoutError(ServiceError):
    """The answer did not come before the deadline."""


class ServiceUnauthenticatedError(ServiceError):
    """The call had no credential that the server knows, or the server does not let its owner call."""
