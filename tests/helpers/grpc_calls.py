"""The type of streams that use raw bytes, and the status of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
import pytest

Stream: TypeAlias = "grpc.StreamStreamMultiCallable[bytes, bytes]"


def ending(call: Callable[..., object], *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return the status and details of a call; the details are empty if the status is OK."""
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def refusal(call: Callable[[], object]) -> tuple[str, str, dict[str, str]]:
    """Return the status, details and trailing metadata of a failing call."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    return error.code().name, error.details(), dict(error.trailing_metadata())
