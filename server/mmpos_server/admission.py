"""Admission control: slots, waiting lines and thread pools of the server, and the limits of each client."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from mmpos.errors import ServiceOverloadedError, ServiceUnavailableError
from mmpos.support.info import cores
from mmpos_server.access import token_name
from mmpos_server.decoding import Decoders

if TYPE_CHECKING:
    from mmpos_server.config import ClientLimits, Concurrency, Pools

__all__ = ["Admission", "ClientLease", "Clients", "Gate", "Line", "Pool", "Rate", "Window", "client_name"]


Pool = Literal["place", "image", "heavy", "rotary"]

# Hints beyond these serve nobody: a client would hammer, or give up.
_LEAST_WAIT, _LONGEST_WAIT = 0.05, 30.0

_CALM = 1.0
"""Seconds without a refusal after which a pool is no longer overloaded."""

_FIRST_ITEMS = 4
"""Items of a stream that are begun before it is known how large an answer is."""


class Gate:
    """A number of places; who finds none free is refused at once. Used from the event loop only.

    Args:
        name: the setting that says how many.
        limit: how many.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.taken = 0
        self._mean: float | None = None

    @property
    def full(self) -> bool:
        """Whether no place is left."""
        return self.taken >= self.limit

    def enter(self, count: int = 1, held: int = 0) -> None:
        """Take places.

        Args:
            count: how many.
            held: those that whoever comes has taken before.

        Raises:
            ServiceOverloadedError: there are not so many; with the time after which to come back.
        """
        # One that is larger than all places together may come alone.
        if self.taken > held and self.taken + count > self.limit:
            raise ServiceOverloadedError(f"{self.name}: got {self.taken} taken of {self.limit}", self.retry_after)
        self.taken += count

    def leave(self, seconds: float, count: int = 1) -> None:
        """Give them back after so many seconds."""
        self.taken -= count
        self._mean = seconds if self._mean is None else self._mean + 0.05 * (seconds - self._mean)

    @property
    def retry_after(self) -> float:
        """Seconds: after about the mean stay (waiting included), those inside now have left (Little's law)."""
        return 1.0 if self._mean is None else min(max(self._mean, _LEAST_WAIT), _LONGEST_WAIT)


class Line:
    """The tasks of one pool that wait for a thread. Used from the event loop only.

    A call waits as long as the tasks before it take. Measured in calls that is their number over that of the tasks of
    one call, or over that of the threads if there are more of them: what a task takes cancels out. Many may wait, as
    long as all get their turn. As soon as one is refused, only few may: some must go away in any case, so those who
    stay are served quickly.

    Args:
        gate: how many calls may be inside at most.
        threads: of the pool.
        wait: calls that a call may wait for.
        short_wait: calls that it may wait for while others are refused.
    """

    def __init__(self, gate: Gate, threads: int, wait: int, short_wait: int) -> None:
        self.gate = gate
        self.tasks = 0
        """That wait or run."""
        self._threads, self._wait, self._short_wait = threads, wait, short_wait
        self._per_call = 1.0
        self._overloaded_until = -math.inf

    def join(self, *, inside: bool) -> None:
        """Take a place for a call that is about to give its first task to the pool.

        Args:
            inside: whether it has gone through the gate before.

        Raises:
            ServiceOverloadedError: it would wait too long, or there is no place; with the time to come back.
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
        """A call has left that gave so many tasks to the pool."""
        self._per_call += 0.05 * (tasks - self._per_call)


class Admission:
    """The gates and pools of one server.

    Args:
        concurrency: places.
        pools: threads.
    """

    arrivals: int = 0
    """Calls and streams that have come so far."""
    last_arrival: float = -math.inf
    """When the last of them came, by the monotonic clock."""
    announced: bool = False
    """Whether the server says that it is about to stop."""
    ending: bool = False
    """Whether what comes now is refused, as the server is about to stop."""

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
        self.decoders = Decoders(pools.heavy_seconds)

    def arrive(self) -> None:
        """A call or a stream came.

        Raises:
            ServiceUnavailableError: the server is about to stop.
        """
        self.arrivals += 1
        self.last_arrival = monotonic()
        if self.ending:
            raise ServiceUnavailableError("the server is about to stop")

    def close(self) -> None:
        """Let the threads end; what they have begun they finish or stop at a checkpoint."""
        for executor in self.executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        self.decoders.close()


class Window:
    """How far a stream may read ahead of its answers. Used by one reader on the event loop.

    What an item becomes may be far larger than the item, and waits here while the client does not read. So answers
    count, and for those at work the largest one so far; few are begun until one is known.

    Args:
        items: most items that are read and not answered.
        size: bytes of these items and of their answers from which on no further is read.
    """

    def __init__(self, items: int, size: int) -> None:
        self._most, self._items, self._size, self._bytes = items, 0, size, 0
        self._at_work, self._largest = 0, -1
        self._waiter: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether no further item may be read; one alone may always."""
        if self._items and self._largest < 0 and self._items >= _FIRST_ITEMS:
            return True
        expected = self._at_work * max(self._largest, 0)
        return self._items >= self._most or (self._items > 0 and self._bytes + expected >= self._size)

    async def room(self) -> None:
        """Wait until one more may be read."""
        while self.full:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def enter(self, size: int) -> None:
        """An item of so many bytes was read, and is at work."""
        self._items += 1
        self._at_work += 1
        self._bytes += size

    def answered(self, size: int) -> None:
        """An item has become an answer of so many bytes."""
        self._at_work -= 1
        self._bytes += size
        self._largest = max(self._largest, size)
        self._wake()

    def leave(self, size: int) -> None:
        """An answer was sent; so many bytes of it and of its item are gone."""
        self._items -= 1
        self._bytes -= size
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_MOST_IDLE = 10_000  # whose rate is remembered: an attacker with many addresses makes the server no larger


def client_name(context: Any) -> str:
    """Who calls: the name of the token, else that of the certificate, else the address without its port."""
    return token_name() or _certificate_name(context.auth_context()) or _host(context.peer())


def _certificate_name(found: Any) -> str:
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in found.get(key, ()):
            if value:
                return str(value.decode(errors="replace"))
    return ""


def _host(peer: str) -> str:
    kind, _, place = peer.partition(":")
    return unquote(place.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else kind


class Rate:
    """So many turns a second on average, and so many at once after a pause.

    Args:
        per_second: turns; 0 is no limit.
        burst: most at once; 0 is those of one second.
        clock: seconds.
    """

    def __init__(self, per_second: float, burst: int = 0, clock: Callable[[], float] = monotonic) -> None:
        self.per_second, self._clock = per_second, clock
        self._most = float(burst or max(per_second, 1.0))
        self._left, self._then = self._most, clock()

    @property
    def wait(self) -> float:
        """Seconds until the next turn; 0 is now."""
        if not self.per_second:
            return 0.0
        now = self._clock()
        self._left = min(self._most, self._left + self.per_second * (now - self._then))
        self._then = now
        return max(0.0, 1.0 - self._left) / self.per_second

    @property
    def rested(self) -> bool:
        """Whether it is as new."""
        return self.wait == 0.0 and self._left >= self._most

    def take(self) -> None:
        """Take a turn, for which there was nothing to wait."""
        if self.per_second:
            self._left -= 1.0


class _Client:
    """What one client has and may have."""

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
        """The places of the client among those of a gate."""
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
    """One call or stream of a client. Used from the event loop only.

    Args:
        name: whose.
        clients: what is known of clients; None where there is no limit.
    """

    __slots__ = ("_client", "_clients", "_taken", "name")

    def __init__(self, name: str, clients: Clients | None) -> None:
        self.name, self._clients = name, clients
        self._client: _Client | None = None
        self._taken: list[tuple[Gate, int]] = []

    def begin_call(self, size: int) -> None:
        """Take what a call with a request of so many bytes takes.

        Raises:
            ServiceOverloadedError: the client has or asked for too much.
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
        """Take so many bytes besides those of the request.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        if self._client is not None:
            gate = self._client.bytes
            self._take(gate, size, sum(count for taken, count in self._taken if taken is gate))

    def answer(self, size: int) -> None:
        """Take so many bytes of an answer.

        Raises:
            ServiceOverloadedError: the client has not taken too many.
        """
        if self._client is not None:
            self._take(self._client.unsent, size)

    def share(self, gate: Gate) -> Gate | None:
        """The places of the client among those of a gate, for whoever enters both; None is no limit."""
        return None if self._client is None else self._client.share(gate)

    def begin_watch(self) -> None:
        """Take what an open stream of health or of reflection takes.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        client = self._enter()
        if client is not None:
            self._take(client.watches)

    def begin_stream(self) -> None:
        """Take what an open stream takes.

        Raises:
            ServiceOverloadedError: the client has too many.
        """
        client = self._enter()
        if client is not None:
            self._take(client.streams)

    async def turn(self) -> None:
        """Wait until an item of the stream may be worked on, and take that turn."""
        if self._client is not None:
            rate = self._client.rate
            while seconds := rate.wait:
                await asyncio.sleep(seconds)
            rate.take()

    def end(self, seconds: float) -> None:
        """Give back what was taken, after so many seconds."""
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
    """The clients of a server: those that are there, and those whose rate has not rested since.

    Args:
        limits: of each.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._limited = any(limits.model_dump(exclude={"burst"}).values())
        self._here: dict[str, _Client] = {}
        self._idle: OrderedDict[str, _Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._here) + len(self._idle)

    def lease(self, name: str) -> ClientLease:
        """A call or stream of the client of this name."""
        return ClientLease(name, self if self._limited else None)

    def enter(self, name: str) -> _Client:
        """The client, one visit of which begins."""
        client = self._here.get(name) or self._idle.pop(name, None) or _Client(name, self._limits)
        self._here[name] = client
        client.leases += 1
        return client

    def leave(self, client: _Client) -> None:
        """A visit of the client ends; after the last one it is forgotten as soon as that makes no difference."""
        client.leases -= 1
        if client.leases:
            return
        self._idle[client.name] = self._here.pop(client.name)
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if len(self._idle) <= _MOST_IDLE and not oldest.rate.rested:
                break
            del self._idle[oldest.name]
