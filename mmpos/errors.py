"""Exceptions of mmpos.

    MmposError
    ├── InvalidInputError (ValueError)      an argument is wrong
    ├── UnsupportedError (ValueError)       valid input that is not supported (a NotImplementedError)
    ├── LimitExceededError (ValueError)     valid input above a stated limit
    └── ServiceError                        a service could not answer, whatever the request
        ├── ServiceUnavailableError         no server answered, after all retries
        ├── ServiceOverloadedError          the server is overloaded; retry_after says when to retry
        ├── ServiceTimeoutError             the answer did not come in time
        └── ServiceUnauthenticatedError     the server does not know the caller, or refuses it

The first three concern one request, in process or to a service: serving engines refuse a request that raises ValueError
and continue with the others. A ServiceError says nothing about the request, which may be retried.

A message names the argument, its value and the expected value: ``documents[3][1].height: got 0, want >= 1``.
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
    """The server is overloaded and refused the call before any work.

    Args:
        message: message of the server.
        retry_after: seconds after which to retry, proposed by the server.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServiceTimeoutError(ServiceError):
    """The answer did not arrive before the deadline."""


class ServiceUnauthenticatedError(ServiceError):
    """The call has no credential known to the server, or the server does not permit its owner to call."""
