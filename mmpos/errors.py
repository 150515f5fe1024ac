"""Exceptions that mmpos raises.

    MmposError
    ├── InvalidInputError (ValueError)      an argument is invalid
    ├── UnsupportedError (ValueError)       valid input that is not supported (a NotImplementedError)
    ├── LimitExceededError (ValueError)     valid input above a stated limit
    └── ServiceError                        a service could not answer, whatever the request
        ├── ServiceUnavailableError         no server answered, after all retries
        ├── ServiceOverloadedError          the server is overloaded; retry_after says when to retry
        ├── ServiceTimeoutError             the answer did not come in time
        └── ServiceUnauthenticatedError     the server does not know the caller, or refuses it

The first three concern a single request, handled in the process or by a service: serving engines refuse a request that
raises ValueError and continue with the others. A ServiceError says nothing about the request, which may be retried.

Each message contains the argument's name, its value and the expected value: ``documents[3][1].height: got 0, want >=
1``.
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
    """Base class of all errors that mmpos raises on purpose."""


class InvalidInputError(MmposError, ValueError):
    """An argument has the wrong type, shape or value."""


class UnsupportedError(MmposError, NotImplementedError, ValueError):
    """The input is valid, but the chosen scheme, layout or builder does not define a result for it."""


class LimitExceededError(MmposError, ValueError):
    """The input is valid, but exceeds a documented limit of mmpos."""


class ServiceError(MmposError):
    """A service could not answer a request."""


class ServiceUnavailableError(ServiceError):
    """No server answered."""


class ServiceOverloadedError(ServiceError):
    """The server is overloaded and refused the call before doing any work.

    Args:
        message: message from the server.
        retry_after: number of seconds to wait before a retry, as proposed by the server.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServiceTimeoutError(ServiceError):
    """The answer did not arrive before the deadline."""


class ServiceUnauthenticatedError(ServiceError):
    """The call has no credential that the server knows, or the owner of the credential is not allowed to call it."""
