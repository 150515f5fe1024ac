"""The one place where an error of gRPC becomes one of ours."""

from __future__ import annotations

from typing import Any

import grpc

from mmpos.errors import MmposError, ServiceError
from mmpos.wire.errors import RETRY_AFTER, from_status


def error_of(error: grpc.RpcError) -> MmposError:
    """The error of a call that failed, of either kind of channel."""
    failed: Any = error
    code = failed.code()
    if code is None:
        return ServiceError(f"UNKNOWN: {failed.details()}")
    return from_status(code.name, failed.details() or "", _retry_after(failed.trailing_metadata()))


def _retry_after(metadata: Any) -> float | None:
    """Seconds after which to come back, if the server said so."""
    for key, value in metadata or ():
        if key == RETRY_AFTER:
            try:
                return max(int(value), 0) / 1000
            except ValueError:
                return None
    return None
