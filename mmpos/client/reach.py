"""What a client knows of its server: whether it was ever there, and so whether to wait for it."""

from __future__ import annotations

import random
from time import monotonic
from typing import TYPE_CHECKING

from mmpos.client.failures import UntrustedError
from mmpos.errors import MmposError, ServiceUnavailableError

if TYPE_CHECKING:
    from mmpos.client.options import Endpoint

_PAUSE = 0.3

_CLOSED = ("Socket closed", "Connection reset")


class Reach:
    """Whether the servers of a client have ever answered it.

    A server that did and is gone is being started again: it is worth waiting for. One that never did is not there, or
    elsewhere: to wait would only hide a wrong address. What is wrong with TLS does not pass, and is never waited for.

    Args:
        endpoint: where they are.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._answered = endpoint, False

    def answered(self) -> None:
        """A server has answered."""
        self._answered = True

    def patience(self, timeout: float) -> Patience:
        """How long a call that begins now waits."""
        return Patience(timeout, self)

    def waits(self, error: MmposError) -> bool:
        """Whether a call that failed so is to be sent again as long as there is time."""
        absent = isinstance(error, ServiceUnavailableError) and not isinstance(error, UntrustedError)
        return absent and self._answered and self._endpoint.attempts > 1

    def explained(self, error: MmposError) -> MmposError:
        """The error, with what a connection that the server closes at once may mean."""
        said = str(error)
        if self._answered or type(error) is not ServiceUnavailableError or not any(word in said for word in _CLOSED):
            return error
        tls = self._endpoint.tls
        if tls is None:
            hint = "a server that wants TLS does so: tls=Tls(...)"
        elif tls.certificate is None:
            hint = "a server that wants a certificate of its clients does so: Tls(..., certificate, key)"
        else:
            hint = "a server that does not trust tls.certificate does so"
        return ServiceUnavailableError(f"{said} ({hint})")


class Patience:
    """The time of one call, or of one answer of a stream.

    Args:
        timeout: seconds from now.
        reach: what the client knows.
    """

    def __init__(self, timeout: float, reach: Reach) -> None:
        self._end, self._reach = monotonic() + timeout, reach

    @property
    def left(self) -> float:
        """Seconds, more than none."""
        return max(self._end - monotonic(), 0.001)

    def pause(self, error: MmposError) -> float | None:
        """Seconds to wait before the call that failed so is sent again; None: no longer."""
        pause = _PAUSE * random.uniform(0.8, 1.2)
        return pause if self._reach.waits(error) and self.left > pause else None
