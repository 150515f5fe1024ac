"""Keep track of a running request: its deadline, slots and stages, and the long work that it passes to thread pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Protocol, TypeVar

from mmpos.errors import ServiceOverloadedError, ServiceTimeoutError
from mmpos.rpc.beside import Beside

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from mmpos_server.admission import Admission, Gate, PoolName
    from mmpos_server.methods import Answering

__all__ = ["Call", "GoneError", "Recipient"]

T = TypeVar("T")

_LOOK_SECONDS = 0.1
"""Seconds between checks of whether the client is still waiting for work in a pool."""


class GoneError(BaseException):
    """The client of a call has disconnected, so no answer is needed; ``except Exception`` does not catch this error."""


class Recipient(Protocol):
    """The part of a transport that knows whether its client is still connected."""

    def is_active(self) -> bool:
        """Return whether the client is still waiting for the answer; thread-safe."""


class _Stage:
    """Context manager that times a stage of a call; written as a generator, it would take three times as long."""

    __slots__ = ("_began", "_name", "_stages")

    def __init__(self, name: str, stages: list[tuple[str, float]]) -> None:
        self._name, self._stages = name, stages

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._stages.append((self._name, perf_counter() - self._began))  # append is atomic


class Call:
    """One request, or one item of a stream. All methods are thread-safe.

    Args:
        request_id: id of the request in logs and metadata.
        client: name of the client.
        admission: the server's gates and thread pools.
        context: the transport's context.
        deadline: time on the monotonic clock; None means no deadline.
        item: whether the call is an item of a stream, which waits where other calls are refused.
    """

    __slots__ = (
        "_admission",
        "_began",
        "_context",
        "_deadline",
        "_slots",
        "answer_bytes",
        "beside",
        "client",
        "counts",
        "held",
        "item",
        "request_bytes",
        "request_id",
        "span",
        "stages",
    )

    def __init__(
        self,
        request_id: str,
        client: str,
        admission: Admission,
        context: Recipient,
        deadline: float | None = None,
        *,
        item: bool = False,
    ) -> None:
        self.request_id, self.client, self.item = request_id, client, item
        self.stages: list[tuple[str, float]] = []
        self.counts: dict[str, int] = {}
        self.span: Span | None = None  # set by tracing
        self.beside = Beside()  # the large tensors of the request and the answer
        self.request_bytes = 0  # size of its message
        self.answer_bytes = 0.0  # size of the answer's tensors, as far as known before they exist
        self.held = 0  # bytes of the request and of its unread answer
        self._admission, self._context, self._deadline = admission, context, deadline
        self._slots: list[Gate] = []
        self._began = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the call arrived."""
        return perf_counter() - self._began

    @property
    def trace(self) -> dict[str, str]:
        """Ids of the call's span, for log lines."""
        context = None if self.span is None else self.span.get_span_context()
        if context is None or not context.is_valid:  # invalid when the environment turns spans off
            return {}
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and monotonic() >= self._deadline

    @property
    def awaited(self) -> bool:
        """Whether the client is still waiting for the answer."""
        return (self._deadline is None or not self.late) and self._context.is_active()

    def checkpoint(self) -> None:
        """Raise an error if the client is no longer waiting for the answer.

        Raises:
            ServiceTimeoutError: the deadline has passed.
            GoneError: the client has disconnected.
        """
        if self._deadline is not None and self.late:
            raise ServiceTimeoutError("the deadline passed before the answer was ready")
        if not self._context.is_active():
            raise GoneError

    def stage(self, name: str) -> _Stage:
        """Return a context manager that times a stage of the call."""
        return _Stage(name, self.stages)

    def count(self, *, documents: int = 0, tokens: int = 0, images: int = 0) -> None:
        """Add to the counts of the answer."""
        for name, number in (("documents", documents), ("tokens", tokens), ("images", images)):
            if number:
                self.counts[name] = self.counts.get(name, 0) + number

    def plain(self, answering: Answering, raw: bytes) -> bytes | None:
        """Return the answer to a plain request from ``answering``, or None if the request must be parsed.

        Raises:
            ServiceTimeoutError, GoneError: see ``checkpoint``.
        """
        began = perf_counter()
        plain = answering(raw)
        if plain is None:
            return None
        answer, documents, tokens, images = plain
        self.stages.append(("place", perf_counter() - began))
        self.count(documents=documents, tokens=tokens, images=images)
        self.checkpoint()
        return answer

    def run(self, pool: PoolName, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in a thread pool.

        Args:
            pool: name of the pool.
            function: function to call; a long-running one should call ``checkpoint`` now and then.
            arguments: arguments of the function.

        Raises:
            ServiceOverloadedError: the pool's queue is full; items of a stream wait instead.
            ServiceTimeoutError, GoneError: see ``checkpoint``.
        """
        return self.map(pool, partial(function, *arguments), [()])[0]

    def map(self, pool: PoolName, function: Callable[..., T], items: Iterable[tuple[object, ...]]) -> list[T]:
        """Call a function with each tuple of arguments, in parallel in a thread pool; the first error ends all calls.

        Raises:
            MmposError, GoneError: see ``run``.
        """
        self.checkpoint()
        self.join(pool)
        queued = perf_counter()

        def work(arguments: tuple[object, ...]) -> T:
            self.stages.append(("queue", perf_counter() - queued))
            self.checkpoint()
            return function(*arguments)

        executor = self._admission.pools[pool].executor
        tasks: list[Future[T]] = []
        waiting: set[Future[T]] = set()
        try:
            tasks += (executor.submit(work, arguments) for arguments in items)
            waiting = set(tasks)
            while waiting:
                waiting = wait(waiting, _LOOK_SECONDS, FIRST_EXCEPTION).not_done
                # An error references the frames that it propagated through. These frames must not reference the tasks:
                # otherwise objects of the work, such as open files, would live until the next garbage collection.
                list(map(Future.result, filter(_failed, tasks)))
                if waiting:
                    self.checkpoint()
            return list(map(Future.result, tasks))
        finally:
            waiting.clear()
            while tasks:
                tasks.pop().cancel()

    def join(self, pool: PoolName) -> None:
        """Take a slot of a pool once per call. If none is free, a unary call is refused and an item of a stream waits.

        Raises:
            ServiceOverloadedError: the pool's queue is full.
            ServiceTimeoutError, GoneError: see ``checkpoint``.
        """
        work = self._admission.pools[pool]
        if work.gate not in self._slots:
            if self.item:
                self.wait_for(lambda: work.enter(self.client))
            else:
                work.enter(self.client)
            self._slots.append(work.gate)

    def hold(self, size: int) -> None:
        """Reserve ``size`` more bytes for the call; an item of a stream waits until they are free.

        Raises:
            ServiceOverloadedError: too few bytes are free, or the client holds its full share.
            ServiceTimeoutError, GoneError: see ``checkpoint``.
        """
        if self.item:
            self.wait_for(lambda: self._admission.bytes.enter(self.client, size, self.held))
        else:
            self._admission.bytes.enter(self.client, size, self.held)
        self.held += size

    def of_item(self, number: int) -> Call:
        """Return the call for one item of this stream."""
        request_id = f"{self.request_id}.{number}"
        return Call(request_id, self.client, self._admission, self._context, self._deadline, item=True)

    def admit(self, gate: Gate) -> None:
        """Take the slot for a unary call.

        Raises:
            ServiceOverloadedError: no slot is free, or the client holds its full share.
        """
        gate.enter(self.client)
        self._slots.append(gate)

    def release(self) -> None:
        """Free the slots of the call and drop its tensors; ``free`` frees the bytes that the call holds."""
        self.beside = Beside()
        seconds = self.seconds
        for gate in self._slots:
            gate.leave(self.client, 1, seconds)
        self._slots.clear()

    def free(self) -> None:
        """Free the bytes that the call holds."""
        held, self.held = self.held, 0
        if held:
            self._admission.bytes.leave(self.client, held, self.seconds)

    def wait_for(self, enter: Callable[[], None]) -> None:
        """Enter a gate as soon as it has a free slot.

        Raises:
            ServiceTimeoutError, GoneError: see ``checkpoint``.
        """
        while True:
            try:
                return enter()
            except ServiceOverloadedError as error:
                sleep(min(error.retry_after, _LOOK_SECONDS))
                self.checkpoint()


def _failed(task: Future[T]) -> bool:
    """Return whether a task has ended with an error."""
    return task.done() and not task.cancelled() and task.exception() is not None
