"""Shared memory of calls: what a call sends and gets beside its messages, where the server is on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.client.regions import LEAST, Region, Regions
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rpc.errors import RETRIED, OutputError
from mmpos.rpc.v1 import tensor_pb2 as pb

if TYPE_CHECKING:
    from typing import Self

    from mmpos.client.info import ServerInfo

GUESS = 4 * 2**20
"""Bytes of an answer about which nothing is known."""

TRIES = 3
"""Most times that a call is made because its answer did not fit: weighed before work is done, then exactly."""


class Lease:
    """Shared memory of one call; a Memory of the wire, and a context manager around the call.

    Regions go back to be used again if the call succeeds. After any failure they are given up: nobody knows whether
    the server still uses them.

    Args:
        pool: whose regions it takes.
        needed: bytes of the answer, if an earlier try was told; 0 if not.
        last: whether an answer that does not fit is an error to be raised; otherwise it is noted, and suppressed.
    """

    def __init__(self, pool: Pool, needed: int = 0, *, last: bool) -> None:
        self._pool, self.needed, self._last = pool, needed, last
        self._taken: list[Region] = []
        self._output: Region | None = None
        self._kind: Any = None
        self._keep = True

    def put(self, message: pb.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Copy the bytes of a tensor into a region; few bytes travel in their message.

        Raises:
            LimitExceededError: there is no room for them.
        """
        if data.size < LEAST:
            return False
        region = self._take(data.size)
        region.data[: data.size] = data
        message.shared.key, message.shared.byte_size = region.key, data.size
        return True

    def answer(self, request: Any, size: int | None = None) -> None:
        """Have the tensors of the answer put into a region.

        Args:
            request: the message that says so; its own tensors have their regions already.
            size: their bytes; None is what earlier answers to such requests needed, or what is left.

        Raises:
            LimitExceededError: there is no room for them.
        """
        self._kind = type(request)
        if size is None:
            size = self.needed or min(self._pool.expected.get(self._kind, GUESS), self._pool.regions.free)
        if size >= LEAST:
            self._output = self._take(size)
            request.output.key, request.output.byte_size = self._output.key, size

    def get(self, name: str, shared: pb.SharedMemory) -> npt.NDArray[np.uint8]:
        """A copy of the bytes of a tensor of the answer.

        Raises:
            InvalidInputError: they are not where they were to go.
        """
        begin, end = shared.offset, shared.offset + shared.byte_size
        if self._output is None or shared.key != self._output.key or not 0 <= begin <= end <= self._output.size:
            raise InvalidInputError(f"{name}: got bytes {begin} to {end} of {shared.key!r}, want those of the request")
        return self._output.data[begin:end].copy()

    def arrived(self, trailing: Any) -> None:
        """The answer is there; if an earlier attempt was made, that server may still be at work."""
        if any(key == RETRIED for key, _ in trailing or ()):
            self._keep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        for region in self._taken:
            self._pool.regions.give(region, keep=self._keep and error is None)
        self._taken, self._output = [], None
        if not isinstance(error, OutputError):
            return False
        # A little more: a first refusal knows the patches, and not yet how many ids there will be.
        self.needed = self._pool.expected[self._kind] = error.needed + error.needed // 8 + LEAST
        return not self._last

    def _take(self, size: int) -> Region:
        region = self._pool.regions.take(size)
        self._taken.append(region)
        return region


class Pool:
    """Shared memory of a client in one process.

    Args:
        budget: most bytes.
        info: what the server says of itself.

    Raises:
        UnsupportedError: it takes no shared memory, or this system has none of the kind.
    """

    def __init__(self, budget: int, info: ServerInfo) -> None:
        if sys.platform != "linux":
            raise UnsupportedError(f"shared_memory: got {sys.platform}, want Linux")
        if not info.shared_memory_prefix:
            raise UnsupportedError(
                "shared_memory: got a server that takes none, want one on this machine, started with --shared-memory"
            )
        self.regions = Regions(info.shared_memory_prefix, budget)
        self.expected: dict[Any, int] = {}

    def leases(self) -> Iterator[Lease]:
        """Leases for a call, until one of them succeeds or fails."""
        needed = 0
        for tried in range(1, TRIES + 1):
            lease = Lease(self, needed, last=tried == TRIES)
            yield lease
            needed = lease.needed


class Pools:
    """The pool of each process; that of a parent stays as it is, and the parent's.

    Args:
        budget: most bytes of each; 0 is none.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pools: dict[int, Pool] = {}

    def get(self) -> Pool | None:
        """That of this process, if there is one yet."""
        return self._pools.get(os.getpid())

    def open(self, info: ServerInfo) -> Pool:
        """That of this process, from what the server says of itself.

        Raises:
            UnsupportedError: it takes no shared memory.
        """
        return self._pools.setdefault(os.getpid(), Pool(self.budget, info))

    def close(self) -> None:
        """Remove what that of this process holds."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.regions.close()
