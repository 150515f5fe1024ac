"""Admit calls: counters that refuse calls immediately, thread pools for long work, and a fair share for each client."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Literal

from mmpos.errors import ServiceOverloadedError, ServiceUnavailableError
from mmpos.support.info import cores

if TYPE_CHECKING:
    from mmpos_server.config import ClientLimits, Concurrency

__all__ = ["CHECKS", "WATCHES", "Admission", "Gate", "PoolName", "WorkPool"]


PoolName = Literal["place", "image", "heavy", "rotary"]

WATCHES, CHECKS = 64, 64
"""Maximum number of open health streams and open reflection streams, and of simultaneous health checks."""

_PLACE_THREADS, _HEAVY_THREADS, _ROTARY_THREADS = 2, 2, 1
"""Threads for large placements, for images of more than 16 megapixels, and for rotations."""

_LONG_CALLS = 16
"""Maximum number of waiting and running calls that rotate, and of calls that decode images above 16 megapixels."""

# Bounds of the retry delay in seconds: after a shorter delay, clients would retry too often; with a longer one, they
# would give up.
_LEAST_WAIT, _LONGEST_WAIT = 0.05, 30.0

_CALM = 1.0
"""Seconds without a refusal after which a pool is no longer overloaded."""

_TURNS = 2
"""Number of calls that may wait per thread of a pool while the pool is overloaded."""


class Gate:
    """Thread-safe counter of slots that refuses entry when no slot is free or a client has its full share.

    Args:
        name: name of the setting that limits the slots, for error messages.
        limit: number of slots.
        share: largest fraction of the slots that one client may hold, but at least one slot; 0 sets no limit per
            client.
    """

    def __init__(self, name: str, limit: int, share: float = 0.0) -> None:
        self.name, self.limit = name, limit
        self.taken = 0
        self._most = max(1, int(limit * share)) if share else math.inf
        self._held: dict[str, int] = {}  # slots by client
        self._lock = Lock()
        self._mean: float | None = None

    @property
    def retry_after(self) -> float:
        """Seconds to wait before retrying: the mean time for which callers hold a slot (Little's law)."""
        return 1.0 if self._mean is None else min(max(self._mean, _LEAST_WAIT), _LONGEST_WAIT)

    def enter(self, client: str, count: int = 1, held: int = 0) -> None:
        """Take slots for a client.

        Args:
            client: name of the client.
            count: number of slots.
            held: slots that the call already holds; a call larger than the limit may enter when no other call holds
                slots.

        Raises:
            ServiceOverloadedError: too few slots are free; the error contains the seconds after which to retry.
        """
        with self._lock:
            held_by_client = self._held.get(client, 0)
            if self.taken > held and self.taken + count > self.limit:
                raise self._refusal(self.name, self.taken, self.limit)
            if held_by_client > held and held_by_client + count > self._most:
                raise self._refusal(f"clients.max_share of {self.name} for {client!r}", held_by_client, self._most)
            self.taken += count
            self._held[client] = held_by_client + count

    def leave(self, client: str, count: int = 1, seconds: float | None = None) -> None:
        """Free slots of a client and record for how many seconds it held them; None records no time."""
        with self._lock:
            self.taken -= count
            held_by_client = self._held[client] - count
            if held_by_client:
                self._held[client] = held_by_client
            else:
                del self._held[client]
            if seconds is not None:
                self._mean = seconds if self._mean is None else self._mean + 0.05 * (seconds - self._mean)

    def _refusal(self, name: str, got: int, limit: float) -> ServiceOverloadedError:
        return ServiceOverloadedError(f"{name}: got {got} of {limit:.0f} in use", self.retry_after)


class WorkPool:
    """Threads for one kind of work, and the queue of calls that wait for them.

    For a second after a refusal, only a few calls may wait: some calls must be refused anyway, and with a short queue
    the others are served quickly.

    Args:
        name: name of the threads.
        threads: number of threads.
        gate: slots for waiting and running calls.
    """

    def __init__(self, name: str, threads: int, gate: Gate) -> None:
        self.gate = gate
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix=f"mmpos-{name}")
        self._short = min(gate.limit, (1 + _TURNS) * threads)
        self._overloaded_until = -math.inf

    def enter(self, client: str) -> None:
        """Take a slot for a client's call.

        Raises:
            ServiceOverloadedError: no slot is free; the error contains the seconds after which to retry.
        """
        most = self._short if monotonic() < self._overloaded_until else self.gate.limit
        try:
            if self.gate.taken >= most < self.gate.limit:
                raise ServiceOverloadedError(
                    f"{self.gate.name}: got {self.gate.taken} of {most} in use under overload", self.gate.retry_after
                )
            self.gate.enter(client)
        except ServiceOverloadedError:
            if self.gate.taken >= most:  # the pool is full, not just the client's share
                self._overloaded_until = monotonic() + _CALM
            raise


class Admission:
    """Gates and thread pools of a server.

    Args:
        concurrency: limits for all clients together.
        clients: limits for each client.
    """

    arrivals: int = 0
    """Calls and streams that have arrived so far."""
    last_arrival: float = -math.inf
    """Time of the last arrival on the monotonic clock."""
    announced: bool = False
    """Whether health checks report NOT_SERVING because the server is about to stop."""
    ending: bool = False
    """Whether new calls are refused because the server is about to stop."""

    def __init__(self, concurrency: Concurrency, clients: ClientLimits) -> None:
        share = clients.max_share
        self.calls = Gate("max_in_flight", concurrency.max_in_flight, share)
        self.streams = Gate("max_streams", concurrency.max_streams, share)
        self.bytes = Gate("max_in_flight_bytes", concurrency.max_in_flight_bytes, share)
        self.watches = Gate("max_watches", WATCHES, 0.5)
        # Even health checks need slots: a client may send half a check, and a thread then waits for the rest.
        self.checks = Gate("max_checks", CHECKS, 0.5)
        images = Gate("max_in_flight_images", concurrency.max_in_flight_images, share)
        self.pools: dict[PoolName, WorkPool] = {
            "place": WorkPool("place", _PLACE_THREADS, Gate("max_in_flight_large", concurrency.max_in_flight, share)),
            "image": WorkPool("image", concurrency.image_threads or cores(), images),
            "heavy": WorkPool("heavy", _HEAVY_THREADS, Gate("max_in_flight_heavy", _LONG_CALLS, share)),
            "rotary": WorkPool("rotary", _ROTARY_THREADS, Gate("max_in_flight_rotary", _LONG_CALLS, share)),
        }

    def arrive(self) -> None:
        """Record the arrival of a call or a stream.

        Raises:
            ServiceUnavailableError: the server is about to stop.
        """
        self.arrivals += 1
        self.last_arrival = monotonic()
        if self.ending:
            raise ServiceUnavailableError("the server is about to stop")

    def close(self) -> None:
        """Shut down the pools; running tasks continue until they end or reach their next checkpoint."""
        for pool in self.pools.values():
            pool.executor.shutdown(wait=False, cancel_futures=True)
