"""Shared memory for the tensors of calls between a client and a server on the same machine."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rpc.beside import Beside, WithOutput
from mmpos.rpc.errors import RETRIED, OutputError
from mmpos.rpc.tensors import process_space
from mmpos.rpc.v1 import tensor_pb2 as pb

if TYPE_CHECKING:
    from typing import Self

    from mmpos.client.info import ServerInfo


LEAST = 65_536
"""Minimum size of an object; smaller tensors are just as fast in their messages."""


class SharedObject:
    """A mapped shared memory object with a name in /dev/shm (Linux); only its user may open it.

    The process that created the object removes it when this object is garbage-collected, or at exit. A server that
    has opened the object keeps its mapping.

    Args:
        prefix: prefix of the object's name.
        size: size in bytes.
        sealed: whether the object is a memfd that cannot shrink, with a link to it as its name, so that a server in the
            same pid namespace may map it; otherwise the object is a file.

    Raises:
        LimitExceededError: the machine cannot create the object.
    """

    def __init__(self, prefix: str, size: int, *, sealed: bool = False) -> None:
        self.key, self.size = f"/{prefix}{os.getpid()}-{secrets.token_hex(8)}", size
        path = f"/dev/shm{self.key}"
        try:
            if sealed:
                descriptor = os.memfd_create(self.key[1:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            else:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # Register this first, so that the object is removed even if the next steps fail.
            self.remove = finalize(self, _remove, path, descriptor, os.getpid())
            # Allocate all pages now, so that a lack of memory raises an error here and not a SIGBUS at a later write.
            os.posix_fallocate(descriptor, 0, size)
            pages = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            if sealed:
                import fcntl  # other systems do not have this module

                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", path)
        except OSError as error:
            raise LimitExceededError(
                f"shared_memory: cannot create an object of {size} bytes ({error.strerror})"
            ) from None
        self.data = np.frombuffer(pages, np.uint8)


def _remove(path: str, descriptor: int, process: int) -> None:
    os.close(descriptor)
    if os.getpid() == process:  # a forked child has only a copy and must not remove it
        with suppress(FileNotFoundError):
            os.unlink(path)


class SharedObjects:
    """A thread-safe pool of the shared memory objects of one process, in use or kept for the next call.

    Args:
        prefix: prefix of the objects' names.
        budget: maximum total bytes.
        sealed: see SharedObject.
    """

    def __init__(self, prefix: str, budget: int, *, sealed: bool = False) -> None:
        self._prefix, self._budget, self._sealed = prefix, budget, sealed
        self._lock = threading.Lock()
        self._idle: list[SharedObject] = []
        self._used = 0
        self._closed = False

    @property
    def free(self) -> int:
        """Number of bytes that no call uses."""
        return max(self._budget - self._used, 0)

    def take(self, size: int) -> SharedObject:
        """Take a region of at least ``size`` bytes.

        Raises:
            LimitExceededError: the budget is exceeded, or the machine cannot create the object.
        """
        with self._lock:
            fitting = [region for region in self._idle if size <= region.size <= max(2 * size, 4 * LEAST)]
            if fitting:
                region = min(fitting, key=lambda region: region.size)
                self._idle.remove(region)
            else:
                region = self._new(size)
            self._used += region.size
        return region

    def give(self, region: SharedObject, *, keep: bool) -> None:
        """Return a region to the pool.

        Args:
            region: region from ``take``.
            keep: whether later calls may reuse it; otherwise it is removed, since a server may still write to it.
        """
        with self._lock:
            self._used -= region.size
            if keep and not self._closed:
                self._idle.append(region)
                return
        region.remove()

    def close(self) -> None:
        """Remove idle regions immediately, and regions in use when they are returned."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for region in idle:
            region.remove()

    def _new(self, size: int) -> SharedObject:
        if self._used + size > self._budget:
            raise LimitExceededError(
                f"shared_memory: got {size} bytes besides {self._used} in use, want at most {self._budget} in total"
            )
        # Round up by about an eighth, so that calls of similar size reuse the same regions.
        step = max(LEAST, 1 << max(size.bit_length() - 3, 0))
        size = min(-(-size // step) * step, self._budget - self._used)
        while self._idle and self._used + sum(region.size for region in self._idle) + size > self._budget:
            self._idle.pop(0).remove()
        return SharedObject(self._prefix, size, sealed=self._sealed)


GUESS = 4 * 2**20
"""Bytes to reserve for the first answer of a kind."""

TRIES = 3
"""Maximum number of attempts if an answer does not fit: its size is first estimated, then known exactly."""


class Lease(Beside):
    """Shared memory for one call; it implements ``mmpos.rpc.tensors.Memory``, and is a context manager around the call.

    If the call succeeds, its objects are reused. If it fails, they are abandoned, since the server may still use
    them.

    Args:
        pool: pool that provides the regions.
        needed: bytes of the answer, if known from an earlier attempt, else 0.
        last: whether an answer that does not fit raises an error; otherwise the error is recorded and suppressed.
    """

    def __init__(self, pool: Pool, needed: int = 0, *, last: bool) -> None:
        super().__init__()
        self._pool, self.needed, self._last = pool, needed, last
        self._taken: list[SharedObject] = []
        self._output: SharedObject | None = None
        self._kind: type[WithOutput] | None = None
        self._keep = True

    def put(self, message: pb.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Copy the bytes of a tensor into a region; small tensors stay in their message.

        Raises:
            LimitExceededError: the region does not fit the budget.
        """
        if data.size < LEAST:
            return False
        region = self._take(data.size)
        region.data[: data.size] = data
        message.shared.key, message.shared.byte_size = region.key, data.size
        return True

    def answer(self, request: WithOutput, size: int | None = None) -> None:
        """Reserve a region for the tensors of the answer.

        Args:
            request: message that will name the region; its own tensors must have their regions already.
            size: size in bytes; None uses the size of earlier answers to similar requests, or the rest of the budget.

        Raises:
            LimitExceededError: the region does not fit the budget.
        """
        self._kind = type(request)
        if size is None:
            size = self.needed or min(self._pool.expected.get(self._kind, GUESS), self._pool.regions.free)
        if size >= LEAST:
            self._output = self._take(size)
            request.output.key, request.output.byte_size = self._output.key, size

    def get(self, name: str, shared: pb.SharedMemory) -> npt.NDArray[np.uint8]:
        """Copy the bytes of a tensor in the answer.

        Raises:
            InvalidInputError: the bytes are not in the reserved region.
        """
        begin, end = shared.offset, shared.offset + shared.byte_size
        if self._output is None or shared.key != self._output.key or not 0 <= begin <= end <= self._output.size:
            raise InvalidInputError(
                f"{name}: got bytes {begin} to {end} of {shared.key!r}, want the region of the request"
            )
        return self._output.data[begin:end].copy()

    def arrived(self, trailing: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Read from the answer's metadata whether an earlier attempt may still be running and using the regions."""
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
        # Add a margin, since the size of the patches is known at the first refusal, but the number of ids is not.
        self.needed = self._pool.expected[self._kind] = error.needed + error.needed // 8 + LEAST
        return not self._last

    def _take(self, size: int) -> SharedObject:
        region = self._pool.regions.take(size)
        self._taken.append(region)
        return region


class Pool:
    """A client's shared memory in one process.

    Args:
        budget: maximum total bytes.
        info: the server's info.

    Raises:
        UnsupportedError: the server does not accept shared memory, or this system is not Linux.
    """

    def __init__(self, budget: int, info: ServerInfo) -> None:
        if sys.platform != "linux":
            raise UnsupportedError(f"shared_memory requires Linux, got {sys.platform}")
        if not info.shared_memory_prefix:
            raise UnsupportedError("shared_memory requires a server on this machine, started with --shared-memory")
        sealed = info.shared_memory_processes == process_space() != ""
        self.regions = SharedObjects(info.shared_memory_prefix, budget, sealed=sealed)
        self.expected: dict[type[WithOutput] | None, int] = {}

    def leases(self) -> Iterator[Lease]:
        """Yield leases for the attempts of a call until one succeeds or fails."""
        needed = 0
        for attempt in range(1, TRIES + 1):
            lease = Lease(self, needed, last=attempt == TRIES)
            yield lease
            needed = lease.needed


class ProcessPools:
    """A client's pools, by process, so that a forked child does not use its parent's pool.

    Args:
        budget: maximum bytes of each pool; 0 disables them.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pools: dict[int, Pool] = {}

    def get(self) -> Pool | None:
        """Return the pool of this process, or None if it is not open yet."""
        return self._pools.get(os.getpid())

    def open(self, info: ServerInfo) -> Pool:
        """Open the pool of this process, using the info of the server.

        Raises:
            UnsupportedError: the server does not accept shared memory.
        """
        return self._pools.setdefault(os.getpid(), Pool(self.budget, info))

    def close(self) -> None:
        """Remove the regions of this process."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.regions.close()
