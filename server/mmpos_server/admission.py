"""Calls and their admission: slots, waiting lines and thread pools of the server, and the limits of each client."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

from mmpos.errors import ServiceOverloadedError, ServiceTimeoutError, ServiceUnavailableError
from mmpos.support.info import cores
from mmpos_server.access import token_name
from mmpos_server.shared_memory import Exchange
from mmpos_server.traffic import peer_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from mmpos_server.config import ClientLimits, Concurrency, Pools
    from mmpos_server.transport import Caller

__all__ = ["Admission", "Call", "ClientLease", "Clients", "Gate", "ItemWindow", "Line", "Pool", "Rate", "client_name"]


Pool = Literal["place", "image", "heavy", "rotary"]

# Bounds of retry hints: below, a client would send requests without pause; above, it would give up.
_LEAST_WAIT, _LONGEST_WAIT = 0.05, 30.0

_CALM = 1.0
"""Seconds without a refusal after which a pool is no longer overloaded."""

_FIRST_ITEMS = 4
"""Items of a stream that are begun before it is known how large an answer is."""


class Gate:
    """Counter of slots that refuses entry at once when no slot is free. Used from the event loop only.

    Args:
        name: setting of the limit, as errors call it.
        limit: number of slots.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.taken = 0
        self._mean: float | None = None

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self.taken >= self.limit

    def enter(self, count: int = 1, held: int = 0) -> None:
        """Take slots.

        Args:
            count: number of slots.
            held: slots that the same caller has taken before.

        Raises:
            ServiceOverloadedError: fewer are free; with the seconds after which to retry.
        """
        # A request larger than the limit may enter alone.
        if self.taken > held and self.taken + count > self.limit:
            raise ServiceOverloadedError(f"{self.name}: got {self.taken} taken of {self.limit}", self.retry_after)
        self.taken += count

    def leave(self, seconds: float, count: int = 1) -> None:
        """Return slots that were held for so many seconds."""
        self.taken -= count
        self._mean = seconds if self._mean is None else self._mean + 0.05 * (seconds - self._mean)

    @property
    def retry_after(self) -> float:
        """Seconds after which to retry: the mean stay, in which the callers inside now leave (Little's law)."""
        return 1.0 if self._mean is None else min(max(self._mean, _LEAST_WAIT), _LONGEST_WAIT)


class Line:
    """Queue of one thread pool. Used from the event loop only.

    A call waits as long as the tasks before it take. Measured in calls, the wait is the number of these tasks over
    the tasks per call, or over the number of threads if there are more threads; the time of a task cancels out. Many
    calls may wait as long as all of them are served. Once a call is refused, only few may wait: some calls must be
    refused in any case, and short waits serve the others quickly.

    Args:
        gate: slots of calls that wait or run.
        threads: threads of the pool.
        wait: most calls that a call may wait for.
        short_wait: most calls that a call may wait for while others are refused.
    """

    def __init__(self, gate: Gate, threads: int, wait: int, short_wait: int) -> None:
        self.gate = gate
        self.tasks = 0
        """Tasks that wait or run."""
        self._threads, self._wait, self._short_wait = threads, wait, short_wait
        self._per_call = 1.0
        self._overloaded_until = -math.inf

    def join(self, *, inside: bool) -> None:
        """Take a slot for a call that is about to submit its first task to the pool.

        Args:
            inside: whether the call has entered the gate before.

        Raises:
            ServiceOverloadedError: the wait is too long, or no slot is free; with the seconds after which to retry.
        """
        now = monotonic()
        most = self._short_wait if now < self._overloaded_until else self._wait
        wait = max(0, self.tasks - self._threads) / max(self._threads, self._per_call)
        try:
            if wait >= most:
                name = "max_wait" if most == self._wait else "max_wait_overloaded"
                raise ServiceOverloadedError(
                    f"{name}: got calls for {wait:.1f} turns waiting, want less than {most}", self.gate.retry_after
                )
            if not inside:
                self.gate.enter()
        except ServiceOverloadedError:
            self._overloaded_until = now + _CALM
            raise

    def left(self, tasks: int) -> None:
        """Note that a call has ended that submitted so many tasks."""
        self._per_call += 0.05 * (tasks - self._per_call)


class Admission:
    """Gates and thread pools of one server.

    Args:
        concurrency: limits of the gates.
        pools: number of threads of each pool.
    """

    arrivals: int = 0
    """Calls and streams that have arrived so far."""
    last_arrival: float = -math.inf
    """Time of the last arrival, by the monotonic clock."""
    announced: bool = False
    """Whether health reports NOT_SERVING because the server is about to stop."""
    ending: bool = False
    """Whether new calls are refused because the server is about to stop."""

    def __init__(self, concurrency: Concurrency, pools: Pools) -> None:
        self.gates: dict[Pool, Gate] = {
            "place": Gate("max_in_flight", concurrency.max_in_flight),
            "image": Gate("max_in_flight_images", concurrency.max_in_flight_images),
            "heavy": Gate("max_in_flight_heavy", concurrency.max_in_flight_heavy),
            "rotary": Gate("max_in_flight_rotary", concurrency.max_in_flight_rotary),
        }
        self.bytes = Gate("max_in_flight_bytes", concurrency.max_in_flight_bytes)
        self.streams = Gate("max_streams", concurrency.max_streams)
        self.unsent = Gate("max_unsent_bytes", concurrency.max_unsent_bytes)
        self.watches = Gate("max_watches", concurrency.max_watches)
        self.threads: dict[Pool, int] = {
            "place": pools.place,
            "image": pools.image or cores(),
            "heavy": pools.heavy,
            "rotary": pools.rotary,
        }
        waits = concurrency.max_wait, concurrency.max_wait_overloaded
        self.lines: dict[Pool, Line] = {
            pool: Line(self.gates[pool], count, *waits) for pool, count in self.threads.items()
        }
        self.executors: dict[Pool, ThreadPoolExecutor] = {
            pool: ThreadPoolExecutor(count, thread_name_prefix=f"mmpos-{pool}") for pool, count in self.threads.items()
        }

    def arrive(self) -> None:
        """Note that a call or a stream has arrived.

        Raises:
            ServiceUnavailableError: the server is about to stop.
        """
        self.arrivals += 1
        self.last_arrival = monotonic()
        if self.ending:
            raise ServiceUnavailableError("the server is about to stop")

    def close(self) -> None:
        """Shut the pools down; tasks at work run to their end or to their next checkpoint."""
        for executor in self.executors.values():
            executor.shutdown(wait=False, cancel_futures=True)


class ItemWindow:
    """Flow control of one stream: limits reading ahead of the answers. Used by one reader on the event loop.

    The answer to an item may be far larger than the item, and is held while the client does not read. Answers count
    therefore, and each item at work counts as the largest answer so far. Few items begin before one answer is known.

    Args:
        items: most items that are read and not answered.
        size: bytes of these items and their answers at which reading pauses.
    """

    def __init__(self, items: int, size: int) -> None:
        self._most, self._items, self._size, self._bytes = items, 0, size, 0
        self._at_work, self._largest = 0, -1
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether reading pauses; one item alone may always be read."""
        if self._items and self._largest < 0 and self._items >= _FIRST_ITEMS:
            return True
        expected = self._at_work * max(self._largest, 0)
        return self._items >= self._most or (self._items > 0 and self._bytes + expected >= self._size)

    async def room(self) -> None:
        """Wait until one more item may be read."""
        while self.full:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def enter(self, size: int) -> None:
        """Note that an item of so many bytes was read and is at work."""
        self._items += 1
        self._at_work += 1
        self._bytes += size

    def answered(self, size: int) -> None:
        """Note that an item was answered with so many bytes."""
        self._at_work -= 1
        self._bytes += size
        self._largest = max(self._largest, size)
        self._wake()

    def leave(self, size: int) -> None:
        """Note that an answer was sent; size is the bytes of the answer and of its item."""
        self._items -= 1
        self._bytes -= size
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_MOST_IDLE = 10_000  # idle clients whose rate is kept; bounds memory when a caller has many addresses


def client_name(caller: Caller) -> str:
    """Return the name of the caller: that of its token, else of its certificate, else its address without port."""
    if name := token_name.get():
        return name
    identity = caller.auth_context()
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in identity.get(key, ()):
            if value:
                return value.decode(errors="replace")
    peer = caller.peer()
    address = peer_of(peer)
    return peer.partition(":")[0] if address is None else address.host


class Rate:
    """Token bucket: so many requests per second on average, with a burst after a pause.

    Args:
        per_second: requests per second; 0 is no limit.
        burst: most requests at once; 0 is those of one second.
        clock: returns seconds.
    """

    def __init__(self, per_second: float, burst: int = 0, clock: Callable[[], float] = monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._most = float(burst or max(per_second, 1.0))
        self._left, self._then = self._most, clock()

    @property
    def wait(self) -> float:
        """Seconds until the next request may come; 0 is now."""
        if not self.per_second:
            return 0.0
        now = self._clock()
        self._left = min(self._most, self._left + self.per_second * (now - self._then))
        self._then = now
        return max(0.0, 1.0 - self._left) / self.per_second

    @property
    def rested(self) -> bool:
        """Whether the whole burst is available again."""
        return self.wait == 0.0 and self._left >= self._most

    def take(self) -> None:
        """Count one request, after ``wait`` was 0."""
        if self.per_second:
            self._left -= 1.0


class _Client:
    """Slots of one client: those it has taken, and its limits."""

    def __init__(self, name: str, limits: ClientLimits) -> None:
        self.name, self.leases = name, 0
        self.rate = Rate(limits.requests_per_second, limits.burst)
        self.calls = self._gate("max_in_flight", limits)
        self.bytes = self._gate("max_in_flight_bytes", limits)
        self.unsent = self._gate("max_unsent_bytes", limits)
        self.streams = self._gate("max_streams", limits)
        self.watches = self._gate("max_watches", limits)
        self._max_share = limits.max_share
        self._shares: dict[str, Gate] = {}

    def share(self, gate: Gate) -> Gate | None:
        """Return the client's own limit within a gate; None without one."""
        if not self._max_share:
            return None
        if gate.name not in self._shares:
            most = max(1, int(gate.limit * self._max_share))
            self._shares[gate.name] = Gate(f"clients.max_share of {gate.name} of {self.name!r}", most)
        return self._shares[gate.name]

    def _gate(self, field: str, limits: ClientLimits) -> Gate | None:
        limit = getattr(limits, field)
        return Gate(f"clients.{field} of {self.name!r}", limit) if limit else None


class ClientLease:
    """Slots that one call or stream of a client holds. Used from the event loop only.

    Args:
        name: name of the client.
        clients: the clients of the server; None where there is no limit.
    """

    __slots__ = ("_client", "_clients", "_taken", "name")

    def __init__(self, name: str, clients: Clients | None) -> None:
        self.name, self._clients = name, clients
        self._client: _Client | None = None
        self._taken: list[tuple[Gate, int]] = []

    def begin_call(self, size: int) -> None:
        """Take the slots of a call with a request of so many bytes.

        Raises:
            ServiceOverloadedError: the client has reached a limit of its own.
        """
        client = self._enter()
        if client is None:
            return
        rate = client.rate
        if wait := rate.wait:
            want = f"want <= {rate.per_second:g} on average"
            raise ServiceOverloadedError(f"clients.requests_per_second of {self.name!r}: got more, {want}", wait)
        self._take(client.calls)
        self._take(client.bytes, size)
        rate.take()

    def weigh(self, size: int) -> None:
        """Take room for so many bytes besides those of the request.

        Raises:
            ServiceOverloadedError: the client holds too many bytes.
        """
        if self._client is not None:
            gate = self._client.bytes
            self._take(gate, size, sum(count for taken, count in self._taken if taken is gate))

    def answer(self, size: int) -> None:
        """Take room for an answer of so many bytes.

        Raises:
            ServiceOverloadedError: the client has left too many bytes of answers unread.
        """
        if self._client is not None:
            self._take(self._client.unsent, size)

    def share(self, gate: Gate) -> Gate | None:
        """Return the client's own limit within a gate, to be entered together with the gate; None is no limit."""
        return None if self._client is None else self._client.share(gate)

    def begin_watch(self) -> None:
        """Take the slot of an open health or reflection stream.

        Raises:
            ServiceOverloadedError: the client has too many of these streams.
        """
        client = self._enter()
        if client is not None:
            self._take(client.watches)

    def begin_stream(self) -> None:
        """Take the slot of an open stream.

        Raises:
            ServiceOverloadedError: the client has too many streams.
        """
        client = self._enter()
        if client is not None:
            self._take(client.streams)

    async def turn(self) -> None:
        """Wait until the rate of the client admits an item of the stream."""
        if self._client is not None:
            rate = self._client.rate
            while seconds := rate.wait:
                await asyncio.sleep(seconds)
            rate.take()

    def end(self, seconds: float) -> None:
        """Return all slots, which were held for so many seconds."""
        for gate, count in self._taken:
            gate.leave(seconds, count)
        self._taken.clear()
        if self._clients is not None and self._client is not None:
            self._clients.leave(self._client)
        self._client = None

    def _enter(self) -> _Client | None:
        if self._clients is not None:
            self._client = self._clients.enter(self.name)
        return self._client

    def _take(self, gate: Gate | None, count: int = 1, held: int = 0) -> None:
        if gate is not None:
            gate.enter(count, held)
            self._taken.append((gate, count))


class Clients:
    """Clients of a server: those with open calls, and those whose rate has not recovered since.

    Args:
        limits: limits of each client.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._limited = any(limits.model_dump(exclude={"burst"}).values())
        self._here: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._here) + len(self._idle)

    def lease(self, name: str) -> ClientLease:
        """Return a lease for one call or stream of the client of this name."""
        return ClientLease(name, self if self._limited else None)

    def enter(self, name: str) -> _Client:
        """Return the client of this name, and count one more lease of it."""
        client = self._here.get(name) or self._idle.pop(name, None) or _Client(name, self._limits)
        self._here[name] = client
        client.leases += 1
        return client

    def leave(self, client: _Client) -> None:
        """End a lease; after its last one, a client is forgotten as soon as its rate has recovered."""
        client.leases -= 1
        if client.leases:
            return
        self._idle[client.name] = self._here.pop(client.name)
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if len(self._idle) <= _MOST_IDLE and not oldest.rate.rested:
                break
            del self._idle[oldest.name]


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
        self.span: Span | None = None  # set by tracing
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

    def release(self) -> None:
        """Return all slots and room of the call, and close its shared memory."""
        seconds = self.seconds
        self.memory = Exchange()
        for size in (self.weighed, self._bytes):
            if size:
                self._admission.bytes.leave(seconds, size)
        if self._gate is not None:
            self._gate.leave(seconds)
        self._leave_share()
        for pool, tasks in self._tasks.items():
            self._admission.lines[pool].left(tasks)
        self._gate, self._bytes, self.weighed = None, 0, 0
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
