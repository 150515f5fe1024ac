"""Admission: how much may be queued or running at once, and the thread pools in which it runs."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Literal

from mmpos.about import cores
from mmpos.errors import ServiceOverloadedError, ServiceUnavailableError

if TYPE_CHECKING:
    from mmpos_server.config import Concurrency, Pools

__all__ = ["Admission", "Gate", "Pool", "Window"]

Pool = Literal["place", "image", "rotary"]

# Hints beyond these serve nobody: a client would hammer, or give up.
_LEAST_WAIT, _LONGEST_WAIT = 0.05, 30.0


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

    def enter(self, count: int = 1) -> None:
        """Take places.

        Raises:
            ServiceOverloadedError: there are not so many; with the time after which to come back.
        """
        # One that is larger than all places together may come alone.
        if self.taken and self.taken + count > self.limit:
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
            "rotary": Gate("max_in_flight_rotary", concurrency.max_in_flight_rotary),
        }
        self.bytes = Gate("max_in_flight_bytes", concurrency.max_in_flight_bytes)
        self.streams = Gate("max_streams", concurrency.max_streams)
        threads: dict[Pool, int] = {
            "place": pools.place,
            "image": pools.image or cores(),
            "rotary": pools.rotary,
        }
        self.executors: dict[Pool, ThreadPoolExecutor] = {
            pool: ThreadPoolExecutor(count, thread_name_prefix=f"mmpos-{pool}") for pool, count in threads.items()
        }

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


class Window:
    """How far a stream may read ahead of its answers. Used by one reader on the event loop.

    Args:
        items: most items that are read and not answered.
        size: bytes of these items from which on no further is read.
    """

    def __init__(self, items: int, size: int) -> None:
        self._most, self._items, self._size, self._bytes = items, 0, size, 0
        self._waiter: asyncio.Future[None] | None = None

    async def room(self) -> None:
        """Wait until one more may be read."""
        while self._items >= self._most or (self._items and self._bytes >= self._size):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def enter(self, size: int) -> None:
        """An item of so many bytes was read."""
        self._items += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        """It was answered."""
        self._items -= 1
        self._bytes -= size
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
