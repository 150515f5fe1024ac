"""Types of gRPC calls with raw bytes, and their status."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import grpc

Unary: TypeAlias = "grpc.UnaryUnaryMultiCallable[bytes, bytes]"
Stream: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, bytes]"


def ending(call: Callable[[], object]) -> tuple[str, str]:
    """Return the status and the details of a call; the details of OK are empty."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""
