"""Streams of both clients: the items that have been sent and not answered, and when an answer is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmpos.client import calls
from mmpos.client.calls import STREAM_BUILD, STREAM_PLACE, Built, Errors, Rpc, ServiceCall
from mmpos.errors import InvalidInputError, MmposError, ServiceError, ServiceTimeoutError, ServiceUnavailableError
from mmpos.support.checks import one_of

if TYPE_CHECKING:
    from mmpos.client.options import Options
    from mmpos.rpc.queries import PositionsQuery
    from mmpos.schemes import Scheme

Q = TypeVar("Q")
T = TypeVar("T")


@dataclass
class Stream(Generic[Q, T]):
    """The items of a stream in order, from their requests to their results.

    Args:
        method: method of the stream.
        name: name of the argument that holds the items.
        call: function that returns the call for an item with this number.
        refused: function that turns the error of an item into its result, unless ``errors`` is "raise".
        errors: "raise" or "return".
        timeout: seconds that an answer may take while the caller waits for it.
    """

    method: Rpc
    name: str
    call: Callable[[Q, int], ServiceCall[T]]
    refused: Callable[[Q, MmposError], T]
    errors: Errors
    timeout: float
    sent: int = field(default=0, init=False)
    answered: int = field(default=0, init=False)
    exhausted: bool = field(default=False, init=False)
    failed: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        one_of("errors", self.errors, ("raise", "return"))
        self._unanswered: deque[tuple[Q, Callable[[bytes], T]]] = deque()
        self._since, self._waiting, self._late = 0.0, False, False

    def check(self, items: object, *kinds: type) -> None:
        """Check that the items are of one of these kinds."""
        if not isinstance(items, kinds):
            raise InvalidInputError(f"{self.name}: got {type(items).__name__}, want an iterable")

    def request(self, item: Q) -> bytes:
        """Return the request for the next item; for one that cannot be sent, a request that the server refuses."""
        try:
            call = self.call(item, self.sent)
        except MmposError as error:
            call = calls.refused(self.method, self.sent, error)
        if not self._unanswered:
            self._since = monotonic()
        self._unanswered.append((item, call.read))
        self.sent += 1
        return call.data

    def wait(self) -> None:
        """Start to wait for an answer."""
        self._since, self._waiting = monotonic(), True

    def result(self, raw: bytes) -> T:
        """Return the result of the first unanswered item, from its answer."""
        self._waiting = False
        if not self._unanswered:
            raise ServiceError("answer: got more answers than requests")
        item, read = self._unanswered.popleft()
        self.answered += 1
        try:
            return read(raw)
        except MmposError as error:
            if self.errors == "raise":
                raise
            return self.refused(item, error)

    def left(self) -> float:
        """Return the seconds that are left for the answer that the caller waits for."""
        waited = monotonic() - self._since if self._waiting and self._unanswered else 0.0
        self._late = waited >= self.timeout
        return self.timeout - waited

    def broken(self, error: MmposError) -> MmposError:
        """Return the error of the broken stream, which names the first unanswered item."""
        if self._late:
            error = ServiceTimeoutError(f"timeout: got no answer within {self.timeout:g} s")
        named = copy(error)  # an overloaded server's retry time is kept
        named.args = (f"{self.name}[{self.answered}]: {error}",)
        return named

    def end(self) -> None:
        """Raise the error of the source, or check that all items have been sent and answered."""
        if self.failed is not None:
            raise self.failed
        if self._unanswered or not self.exhausted:
            raise self.broken(ServiceUnavailableError("the server ended the stream"))


def place_stream(options: Options, errors: Errors) -> Stream[PositionsQuery, Any]:
    """Return a stream of queries; see ``Client.stream`` for the arguments."""
    call = partial(calls.query, options.profile)
    return Stream(STREAM_PLACE, "queries", call, lambda query, error: error, errors, options.timeout)


def build_stream(
    options: Options, errors: Errors, scheme: str | Scheme | None, start: int, patches: bool
) -> Stream[Sequence[Sequence[object]], Built]:
    """Return a stream of batches of documents; see ``Client.stream_build`` for the arguments."""
    query = calls.settings(options.profile, scheme, start, patches)

    def refused(documents: Sequence[Sequence[object]], error: MmposError) -> Built:
        if not isinstance(documents, list | tuple):
            raise error
        return [error] * len(documents)

    def call(documents: Sequence[Sequence[object]], number: int) -> ServiceCall[Built]:
        return calls.build_batch(query, documents, errors, number)

    return Stream(STREAM_BUILD, "batches", call, refused, errors, options.timeout)
