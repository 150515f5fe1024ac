"""What a method of a service is to the server: its messages, and the function between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.call import Call

__all__ = ["Method", "Run"]

Run = Callable[[Any, Any, "Call"], Awaitable[None]]


@dataclass(frozen=True)
class Method:
    """One method, and its stream twin if it has one.

    Args:
        service: full name of its service, such as "mmpos.rpc.v1.PositionService".
        name: its name.
        request: type of the request.
        response: type of the response.
        run: reads the query, fills the answer in place; what it raises becomes the status.
        query: field of the request that run reads; None is the request itself.
        answer: field of the response that run fills; None is the response itself.
        stream: name, request and response type of the stream twin, whose request has id and the query's field, and
            whose response has id and one of the answer's field and error.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    query: str | None = None
    answer: str | None = None
    stream: tuple[str, type[Message], type[Message]] | None = None
