"""What a method of a service is to the server: its messages, and the function between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmpos.rpc.errors import put_error
from mmpos.rpc.tensors import required

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos.errors import MmposError
    from mmpos_server.admission import Pool
    from mmpos_server.call import Call

__all__ = ["Method", "Run", "Twin", "answering", "queried", "streamed"]

Run = Callable[[Any, Any, "Call"], Awaitable[None]]
"""Reads the request, fills the response; what it raises becomes the status."""


@dataclass(frozen=True)
class Twin:
    """The stream form of a method.

    Args:
        name: its name.
        request: type of an item.
        response: type of its answer.
        run: reads an item, fills its answer.
        refuse: fills the answer of an item that failed, from the item and the error.
    """

    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    refuse: Callable[[Any, Any, MmposError], None]


@dataclass(frozen=True)
class Method:
    """One method, and its stream twin if it has one.

    Args:
        service: full name of its service, such as "mmpos.rpc.v1.PositionService".
        name: its name.
        request: type of the request.
        response: type of the response.
        run: from one to the other.
        twin: its stream form.
        admitted: whether it takes a place; what asks whether the server lives is answered however much there is to do.
        pool: the threads that do most of its work.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    twin: Twin | None = None
    admitted: bool = True
    pool: Pool = "place"


def queried(run: Run, field: str) -> Run:
    """What answers requests with a query, and responses with that field, by a function from the one to the other."""

    async def whole(request: Any, response: Any, call: Call) -> None:
        await run(required("", request, "query"), answering(response, field), call)

    return whole


def streamed(name: str, request: type[Message], response: type[Message], run: Run) -> Twin:
    """The stream form of a method of ours: items have an id besides, and an error of their own."""

    async def item(request: Any, response: Any, call: Call) -> None:
        response.id = request.id
        await run(request, response, call)

    def refuse(request: Any, response: Any, error: MmposError) -> None:
        response.id = request.id
        put_error(response.error, error)

    return Twin(name, request, response, item, refuse)


def answering(response: Any, field: str) -> Any:
    """The field of a response that is to be filled; it is set, even if nothing will be in it."""
    target = getattr(response, field)
    target.SetInParent()
    return target
