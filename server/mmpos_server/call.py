"""Keep track of a running request: its client, stages and counts, and the long work that it passes to threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mmpos.rpc.beside import Beside
from mmpos.support.info import cores
from mmpos_server.arrivals import Arrivals

if TYPE_CHECKING:
    from mmpos_server.methods import Answering

__all__ = ["Call", "GoneError", "PoolName", "Threads"]

T = TypeVar("T")

PoolName = Literal["work", "image"]


class GoneError(BaseException):
    """The client of a call has disconnected, so no answer is needed; ``except Exception`` does not catch this error."""


class Threads:
    """Threads for long work, which all start at once.

    Two are for placements and rotations, and at most two for images.
    """

    def __init__(self) -> None:
        # An image of 16 megapixels takes 300 MiB, so more threads would need more memory; use more processes instead.
        sizes: dict[PoolName, int] = {"work": 2, "image": min(2, cores())}
        self.pools = {name: _started(size, f"mmpos-{name}") for name, size in sizes.items()}

    def close(self) -> None:
        """Drop the waiting work; running work continues until it ends or reaches its next checkpoint."""
        for pool in self.pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _started(size: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads have started: the executor starts one for each task while none is idle."""
    pool = ThreadPoolExecutor(size, thread_name_prefix=name)
    together = Barrier(size + 1)
    for _ in range(size):
        pool.submit(together.wait)
    together.wait()
    return pool


class Call:
    """One request, or one item of a stream. Threads may use its stages, counts and checkpoints.

    Args:
        client: name of the client.
        arrivals: bounds for all calls.
        threads: threads for long work.
        item: whether the call is an item of a stream.
    """

    __slots__ = (
        "_arrivals",
        "_threads",
        "answer_bytes",
        "began",
        "beside",
        "client",
        "context",
        "counts",
        "gone",
        "item",
        "request",
        "request_bytes",
        "reserved",
        "stages",
    )

    def __init__(self, client: str, arrivals: Arrivals, threads: Threads, *, item: bool = False) -> None:
        self.client, self.item = client, item
        self.stages: list[tuple[str, float]] = []
        self.counts: dict[str, int] = {}  # documents, tokens and images of the answer
        self.request: object = None  # the parsed request, for the log of a failure
        self.beside = Beside()  # the large tensors of the request and the answer
        self.request_bytes = 0  # size of its message
        self.answer_bytes = 0.0  # size of the answer's tensors, as far as known before they exist
        self.context: Any = None  # grpc's context of a unary call, whose answer may be large
        self.reserved = 0  # bytes of the answer that already count as unread
        self.gone = False  # whether the client no longer waits for the answer
        self._arrivals, self._threads = arrivals, threads
        self.began = perf_counter()

    def checkpoint(self) -> None:
        """Raise an error if the client is no longer waiting for the answer.

        Raises:
            GoneError: the client has disconnected, or its deadline has passed.
        """
        if self.gone:
            raise GoneError

    async def reserve(self, size: int) -> None:
        """Count the bytes of a large answer as unread before it exists; an item of a stream waits for room.

        Raises:
            ServiceOverloadedError: unread answers have too many bytes.
        """
        if self.item:
            await self._arrivals.room(self.client, size)
            self._arrivals.unread.add(self.client, size)
        elif self.context is not None:
            self._arrivals.send(self.context, self.client, size)
        self.reserved = size

    def staged(self, name: str, began: float) -> None:
        """Record a stage of the call that began at this time of ``perf_counter`` and ends now."""
        self.stages.append((name, perf_counter() - began))  # append is atomic

    def plain(self, answering: Answering | None, raw: bytes) -> bytes | None:
        """Return the answer to a plain request or item from ``answering``, or None if it must be parsed."""
        began = perf_counter()
        plain = None if answering is None else answering(raw, self.item)
        if plain is None:
            return None
        answer, documents, tokens, images = plain
        self.stages.append(("place", perf_counter() - began))
        self.counts = {"documents": documents, "tokens": tokens, "images": images}
        return answer

    async def run(self, pool: PoolName, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in a thread; a long-running one should call ``checkpoint`` now and then.

        Raises:
            ServiceOverloadedError: too many calls wait for threads; an item of a stream waits.
        """
        return (await self.map(pool, function, [arguments]))[0]

    async def map(self, pool: PoolName, function: Callable[..., T], items: Iterable[tuple[object, ...]]) -> list[T]:
        """Call a function with each tuple of arguments, in parallel in threads; the first error ends all calls.

        Raises:
            ServiceOverloadedError: see ``run``.
        """
        queued, failed = perf_counter(), False

        def work(arguments: tuple[object, ...]) -> T:
            nonlocal failed
            self.stages.append(("queue", perf_counter() - queued))
            self.checkpoint()
            if failed:
                raise GoneError
            try:
                return function(*arguments)
            except BaseException:
                failed = True
                raise

        places = None if self.item else self._arrivals.work
        if places is not None:
            places.take(self.client)
        loop, executor = asyncio.get_running_loop(), self._threads.pools[pool]
        tasks: list[asyncio.Future[T]] = []
        try:
            tasks += (loop.run_in_executor(executor, work, arguments) for arguments in items)
            return list(await asyncio.gather(*tasks))
        finally:
            if places is not None:
                places.leave(self.client)
            while tasks:
                tasks.pop().cancel()
