"""Admission: how much may be queued or running at once, and the thread pools in which it runs."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Literal

from mmpos.errors import ServiceOverloadedError, ServiceUnavailableError
from mmpos.support.info import cores
from mmpos_server.decoding import Decoders

if TYPE_CHECKING:
    from mmpos_server.config import Concurrency, Pools

__all__ = ["Admission", "Gate", "Line", "Pool", "Window"]

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
