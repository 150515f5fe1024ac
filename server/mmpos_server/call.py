"""One request in the server: its id, deadline, slots, stage times and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from mmpos.errors import ServiceOverloadedError, ServiceTimeoutError
from mmpos_server.shared_memory import Exchange

if TYPE_CHECKING:
    from mmpos_server.admission import Admission, ClientLease, Gate, Pool
    from mmpos_server.decoding import Decoders

__all__ = ["Call"]

T = TypeVar("T")


class _Stage:
    """Timed stage of a call; a generator would cost three times as much."""

    __slots__ = ("_began", "_name", "_stages")

    def __init__(self, name: str, stages: list[tuple[str, float]]) -> None:
        self._name, self._stages = name, stages

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._stages.append((self._name, perf_counter() - self._began))  # append is atomic


class Call:
    """One request, or one item of a stream.

    Args:
        request_id: id of the request in logs and metadata.
        admission: gates and thread pools of the server.
        lease: slots of the client.
        deadline: time by the monotonic clock; None is no deadline.
    """

    __slots__ = (
        "_admission",
        "_began",
        "_bytes",
        "_cancelled",
        "_deadline",
        "_gate",
        "_share",
        "_tasks",
        "answer_bytes",
        "counts",
        "lease",
        "memory",
        "request_bytes",
        "request_id",
        "sending",
        "span",
        "stages",
        "weighed",
    )

    def __init__(
        self, request_id: str, admission: Admission, lease: ClientLease, deadline: float | None = None
    ) -> None:
        self.request_id = request_id
        self.lease = lease
        self.stages: list[tuple[str, float]] = []
        self.counts: dict[str, int] = {}
        self.span: Any = None  # set by tracing
        self.memory = Exchange()
        self.sending = False  # whether the answer is being sent, and the lease ends once it is
        self.request_bytes = 0  # size of its message
        self.answer_bytes = 0.0  # tensors of the answer, as far as their size is known before they exist
        self.weighed = 0  # bytes besides those of the request: in shared memory, of inputs and outputs
        self._admission = admission
        self._deadline = deadline
        self._cancelled = False
        self._gate: Gate | None = None
        self._share: Gate | None = None  # the client's own limit within this gate
        self._tasks: dict[Pool, int] = {}
        self._bytes = 0
        self._began = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the call arrived."""
        return perf_counter() - self._began

    @property
    def trace(self) -> dict[str, str]:
        """Ids of the span, for lines of the log."""
        context = None if self.span is None else self.span.get_span_context()
        if context is None or not context.is_valid:  # not valid where the environment turns spans off
            return {}
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and monotonic() >= self._deadline

    @property
    def stopping(self) -> bool:
        """Whether the server has announced that it stops."""
        return self._admission.announced

    @property
    def decoders(self) -> Decoders:
        """Processes of the server that decode images."""
        return self._admission.decoders

    def checkpoint(self) -> None:
        """Raise if nobody waits for the answer any more; cheap, and callable from any thread.

        Raises:
            ServiceTimeoutError: the deadline has passed.
            asyncio.CancelledError: the client has gone; it is no Exception, so that no error handler catches it.
        """
        if self.late:
            raise ServiceTimeoutError("the deadline has passed before the answer was ready")
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """Stop the threads of the call at their next checkpoint, since the client has gone."""
        self._cancelled = True

    def stage(self, name: str) -> _Stage:
        """Return a context manager that times a stage of the call; from any thread."""
        return _Stage(name, self.stages)

    def count(self, *, documents: int = 0, tokens: int = 0, images: int = 0) -> None:
        """Add to the counts of the answer; from the event loop."""
        for name, number in (("documents", documents), ("tokens", tokens), ("images", images)):
            if number:
                self.counts[name] = self.counts.get(name, 0) + number

    async def run(self, pool: Pool, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in a thread pool, unless nobody waits for the answer any more.

        Args:
            pool: name of the pool.
            function: function to call; a long one calls ``checkpoint`` now and then.
            arguments: arguments of the function.

        Raises:
            ServiceOverloadedError: the call is new to the pool, and too many calls wait there.
        """
        self.checkpoint()
        self.join(pool)
        if pool in self._tasks:
            self._tasks[pool] += 1
        line = self._admission.lines[pool]
        queued = perf_counter()
        todo = [partial(function, *arguments)]

        def work() -> T:
            self.stages.append(("queue", perf_counter() - queued))
            self.checkpoint()
            return todo.pop()()

        line.tasks += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._admission.executors[pool], work)
        except asyncio.CancelledError:
            self.cancel()
            todo.clear()  # so that the queue holds no request whose room is given back
            raise
        finally:
            line.tasks -= 1

    def item(self, number: int) -> Call:
        """Return the call of one item of this stream; the window admits it, and the lease ends with the stream."""
        item = Call(f"{self.request_id}.{number}", self._admission, self.lease, self._deadline)
        item.sending = True
        return item

    def admit(self, size: int) -> None:
        """Take the slot of a cheap call with a request of so many bytes.

        Raises:
            ServiceOverloadedError: no slot is free, or the client has reached a limit.
            ServiceUnavailableError: the server is about to stop.
        """
        self._admission.arrive()
        self.lease.begin_call(size)
        gate = self._admission.gates["place"]
        gate.enter()
        self._gate = gate
        self._admission.bytes.enter(size)
        self._bytes = size

    async def weigh(self, size: int) -> None:
        """Take room for so many bytes besides those of the request; an item of a stream waits for room.

        Raises:
            ServiceOverloadedError: there is no room, or the client has reached a limit.
        """
        if size and self._gate is not None:
            self.lease.weigh(size)
        while size:
            try:
                self._admission.bytes.enter(size, self._bytes + self.weighed)
                self.weighed += size
                return
            except ServiceOverloadedError as error:
                if self._gate is not None:
                    raise
                await asyncio.sleep(error.retry_after)
                self.checkpoint()

    def forget_memory(self) -> None:
        """Close open shared memory, and return its room."""
        self.memory = Exchange()
        if self.weighed:
            self._admission.bytes.leave(self.seconds, self.weighed)
        self.weighed = 0

    def release(self) -> None:
        """Return all slots and room of the call."""
        seconds = self.seconds
        self.forget_memory()
        if self._gate is not None:
            self._gate.leave(seconds)
        self._leave_share()
        if self._bytes:
            self._admission.bytes.leave(seconds, self._bytes)
        for pool, tasks in self._tasks.items():
            self._admission.lines[pool].left(tasks)
        self._gate, self._bytes = None, 0
        if not self.sending:
            self.lease.end(seconds)

    def join(self, pool: Pool) -> None:
        """Enter the line of a pool once per call; items of a stream have their window instead.

        Raises:
            ServiceOverloadedError: the line is too long.
        """
        cheap, line = self._admission.gates["place"], self._admission.lines[pool]
        # A call that began in another pool and ends in that of cheap calls is never refused here.
        if self._gate is cheap and pool not in self._tasks:
            if line.gate is not cheap:
                self.move(pool)
            else:
                line.join(inside=True)
                self._tasks[pool] = 0

    def move(self, pool: Pool) -> None:
        """Exchange the slot of the call for one of a pool of longer work; items of a stream have their window.

        Raises:
            ServiceOverloadedError: no slot is free, or the client has its share.
        """
        if self._gate is not None:
            line = self._admission.lines[pool]
            line.join(inside=False)
            self._gate.leave(self.seconds)
            self._gate = line.gate
            self._tasks[pool] = 0
            self._leave_share()
            if share := self.lease.share(line.gate):
                share.enter()
                self._share = share

    async def turn(self, pool: Pool) -> None:
        """Wait, as an item of a stream, for a slot of a pool of longer work; other calls have theirs already.

        Raises:
            ServiceTimeoutError: the deadline has passed.
        """
        if self._gate is not None:
            return
        gate = self._admission.lines[pool].gate
        share = self.lease.share(gate)
        gates = [gate] if share is None else [gate, share]
        while waits := [each.retry_after for each in gates if each.full]:
            await asyncio.sleep(max(waits))
            self.checkpoint()
        for each in gates:
            each.enter()
        self._gate, self._share = gate, share

    def _leave_share(self) -> None:
        if self._share is not None:
            self._share.leave(self.seconds)
        self._share = None
