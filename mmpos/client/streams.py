"""The bounded window of a stream, for both clients: what is asked and not yet answered, and when it is sent again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmpos.client.calls import PLACE, Ask, Errors, Method, ask_positions, serialised
from mmpos.client.channel import BACKOFF_FACTOR, FIRST_BACKOFF, MAX_BACKOFF
from mmpos.client.failures import UntrustedError
from mmpos.client.options import Options
from mmpos.client.sequences import BUILD, BuildSettings, Built
from mmpos.errors import (
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from mmpos.rpc.errors import get_error
from mmpos.support.checks import one_of

if TYPE_CHECKING:
    from mmpos.client.reach import Reach
    from mmpos.rpc.queries import PositionsQuery, PositionsResult
    from mmpos.schemes import Scheme

Q = TypeVar("Q")
T = TypeVar("T")


@dataclass(frozen=True)
class Stream(Generic[Q, T]):
    """A stream, as data.

    Args:
        method: whose twin it is.
        ask: what asks for one item.
        refused: makes a result of the error of one item, or raises it.
    """

    method: Method
    ask: Callable[[Q], Ask[T]]
    refused: Callable[[Q, MmposError], T]


def stream(options: Options, errors: Errors = "raise") -> Stream[PositionsQuery, PositionsResult | MmposError]:
    """The stream of queries."""
    one_of("errors", errors, ("raise", "return"))

    def refused(query: PositionsQuery, error: MmposError) -> MmposError:
        if errors == "raise":
            raise error
        return error

    return Stream(PLACE, lambda query: ask_positions(options, query), refused)


def stream_build(
    options: Options, errors: Errors, scheme: str | Scheme | None, start: int, patches: bool
) -> Stream[Sequence[Sequence[Any]], Built]:
    """The stream of batches of documents."""
    settings = BuildSettings.checked(options, errors, scheme, start, patches)

    def refused(documents: Sequence[Sequence[Any]], error: MmposError) -> Built:
        if errors == "raise" or not isinstance(documents, list | tuple):
            raise error
        return [error] * len(documents)

    return Stream(BUILD, settings.ask, refused)


@dataclass(frozen=True)
class _Entry(Generic[Q, T]):
    """An item on its way; without a request it was refused here."""

    id: int
    item: Q
    request: bytes | None = None
    decode: Callable[[Any], T] | None = None
    error: MmposError | None = None


class Window(Generic[Q, T]):
    """Items in order, those that wait for an answer at most ``size``.

    Args:
        stream: how items are asked and answered.
        options: of the client: most items in it, and seconds that an answer may take.
        attempts: most streams that may break one after the other without an answer.
        reach: what the client knows of its servers: one that is gone may take longer.
    """

    def __init__(self, stream: Stream[Q, T], options: Options, attempts: int, reach: Reach) -> None:
        self._stream, self._size, self._attempts = stream, options.window, attempts
        self._timeout, self._reach, self._patience = options.timeout, reach, reach.patience(options.timeout)
        self._entries: deque[_Entry[Q, T]] = deque()
        self._next = self._broken = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether no item may be added."""
        return len(self._entries) >= self._size

    @property
    def refused(self) -> bool:
        """Whether the oldest item was refused here, so that its result needs no answer."""
        return bool(self._entries) and self._entries[0].request is None

    def add(self, item: Q) -> bytes | None:
        """Take an item in; gives the request to send, if it could be made."""
        request = self._stream.method.stream_request(id=self._next)
        request.query.SetInParent()
        try:
            decode = self._stream.ask(item)(request.query)
            entry = _Entry(self._next, item, serialised(request), decode)
        except MmposError as error:
            entry = _Entry(self._next, item, error=error)
        self._entries.append(entry)
        self._next += 1
        return entry.request

    def requests(self) -> list[bytes]:
        """The requests without an answer, oldest first."""
        return [entry.request for entry in self._entries if entry.request is not None]

    def result(self, answer: Any = None) -> T:
        """The result of the oldest item, which leaves: of this answer, or of the refusal here."""
        if not self._entries:
            raise ServiceError("answer: got one more than was asked for")
        entry = self._entries.popleft()
        if entry.error is not None or entry.decode is None:
            assert entry.error is not None
            return self._stream.refused(entry.item, entry.error)
        if answer.id != entry.id:
            raise ServiceError(f"answer: got id {answer.id}, want {entry.id}")
        self._broken = 0
        self._reach.answered()
        field = answer.WhichOneof("outcome")
        if field == "error":
            return self._stream.refused(entry.item, get_error(answer.error))
        if field is None:
            raise ServiceError("answer: got no outcome, want one")
        return entry.decode(getattr(answer, field))

    def broken(self, error: MmposError | None) -> float:
        """Seconds to wait before what has no answer is sent again on a new stream.

        Args:
            error: how the stream ended; None: as if all had been answered.

        Raises:
            MmposError: the error, if waiting does not help, or did not so often.
        """
        error = error or ServiceUnavailableError("stream: got an end before all answers, want one for each request")
        if isinstance(error, UntrustedError) or not isinstance(error, ServiceUnavailableError | ServiceOverloadedError):
            raise error
        if not self.requests():
            return 0.0  # nothing is lost
        if not self._broken:
            self._patience = self._reach.patience(self._timeout)
        self._broken += 1
        if self._broken >= self._attempts and self._patience.pause(error) is None:
            raise self._reach.explained(error)
        wait = min(FIRST_BACKOFF * BACKOFF_FACTOR ** min(self._broken - 1, 8), MAX_BACKOFF)
        return wait * random.uniform(0.8, 1.2)


def no_answer(timeout: float) -> ServiceTimeoutError:
    """What to say of a stream that gives no answer."""
    return ServiceTimeoutError(f"stream: got no answer in {timeout:g} seconds, want one")
