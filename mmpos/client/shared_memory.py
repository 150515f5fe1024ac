"""Shared memory of calls: tensors beside the messages, where client and server are on one machine."""

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
"""Smallest object; below, a message is as good."""


class SharedObject:
    """Shared memory object with a name in /dev/shm, as Linux has it, mapped; only its user may open it.

    It is removed when nobody holds it any more, or at exit, and by nobody but the process that made it. A server
    that has opened it meanwhile keeps its mapping.

    Args:
        prefix: how its name begins.
        size: its bytes.
        sealed: whether it is a memfd that cannot shrink, which a server that sees this process may map, and its name a
            link to it; otherwise it is a file.

    Raises:
        LimitExceededError: the machine does not give as many.
    """

    def __init__(self, prefix: str, size: int, *, sealed: bool = False) -> None:
        self.key, self.size = f"/{prefix}{os.getpid()}-{secrets.token_hex(8)}", size
        path = f"/dev/shm{self.key}"
        try:
            if sealed:
                descriptor = os.memfd_create(self.key[1:], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            else:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # What is there goes away also if what follows fails.
            self.remove = finalize(self, _remove, path, descriptor, os.getpid())
            # All pages now: a machine without room says so, instead of ending who writes to the map (SIGBUS).
            os.posix_fallocate(descriptor, 0, size)
            pages = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            if sealed:
                import fcntl  # which other systems lack

                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", path)
        except OSError as error:
            raise LimitExceededError(
                f"shared_memory: got no object of {size} bytes ({error.strerror}), want a machine with room for it"
            ) from None
        self.data = np.frombuffer(pages, np.uint8)


def _remove(path: str, descriptor: int, process: int) -> None:
    os.close(descriptor)
    if os.getpid() == process:  # a forked child has a copy of all this, and no say in it
        with suppress(FileNotFoundError):
            os.unlink(path)


class SharedObjects:
    """Shared memory objects of one process: those in use, and those kept for the next call; threads may share them.

    Args:
        prefix: how their names begin.
        budget: most bytes of all of them.
        sealed: as for SharedObject.
    """

    def __init__(self, prefix: str, budget: int, *, sealed: bool = False) -> None:
        self._prefix, self._budget, self._sealed = prefix, budget, sealed
        self._lock = threading.Lock()
        self._idle: list[SharedObject] = []
        self._used = 0
        self._closed = False

    @property
    def free(self) -> int:
        """Bytes that no call uses."""
        return max(self._budget - self._used, 0)

    def take(self, size: int) -> SharedObject:
        """Take a region of at least so many bytes.

        Raises:
            LimitExceededError: beyond the budget, or the machine does not give as many.
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
        """Give a region back.

        Args:
            region: one that was taken.
            keep: whether the next call may have it; otherwise it is removed, as somebody may still write to it.
        """
        with self._lock:
            self._used -= region.size
            if keep and not self._closed:
                self._idle.append(region)
                return
        region.remove()

    def close(self) -> None:
        """Remove all regions, those in use when they are given back."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for region in idle:
            region.remove()

    def _new(self, size: int) -> SharedObject:
        if self._used + size > self._budget:
            raise LimitExceededError(
                f"shared_memory: got {size} bytes besides {self._used} in use, want at most {self._budget} in all"
            )
        # Sizes in steps of an eighth or so: calls that are nearly alike use the same regions.
        step = max(LEAST, 1 << max(size.bit_length() - 3, 0))
        size = min(-(-size // step) * step, self._budget - self._used)
        while self._idle and self._used + sum(region.size for region in self._idle) + size > self._budget:
            self._idle.pop(0).remove()
        return SharedObject(self._prefix, size, sealed=self._sealed)


GUESS = 4 * 2**20
"""Bytes to allow for an answer before the first of its kind."""

TRIES = 3
"""Most times that a call is made because its answer did not fit: weighed before work is done, then exactly."""


class Lease(Beside):
    """Shared memory of one call; a Memory of the wire, and a context manager around the call.

    Objects go back to be used again if the call succeeds. After any failure they are given up: nobody knows whether
    the server still uses them.

    Args:
        pool: whose regions it takes.
        needed: bytes of the answer, if an earlier try learned them; 0 if not.
        last: whether an answer that does not fit is an error to be raised; otherwise it is noted, and suppressed.
    """

    def __init__(self, pool: Pool, needed: int = 0, *, last: bool) -> None:
        super().__init__()
        self._pool, self.needed, self._last = pool, needed, last
        self._taken: list[SharedObject] = []
        self._output: SharedObject | None = None
        self._kind: type[WithOutput] | None = None
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

    def answer(self, request: WithOutput, size: int | None = None) -> None:
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
        """Copy the bytes of a tensor of the answer.

        Raises:
            InvalidInputError: they are not where they were to go.
        """
        begin, end = shared.offset, shared.offset + shared.byte_size
        if self._output is None or shared.key != self._output.key or not 0 <= begin <= end <= self._output.size:
            raise InvalidInputError(f"{name}: got bytes {begin} to {end} of {shared.key!r}, want those of the request")
        return self._output.data[begin:end].copy()

    def arrived(self, trailing: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Note that the answer is there; if an earlier attempt was made, that server may still be at work."""
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

    def _take(self, size: int) -> SharedObject:
        region = self._pool.regions.take(size)
        self._taken.append(region)
        return region


class Pool:
    """Shared memory of a client in one process.

    Args:
        budget: most bytes.
        info: the info of the server.

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
        sealed = info.shared_memory_processes == process_space() != ""
        self.regions = SharedObjects(info.shared_memory_prefix, budget, sealed=sealed)
        self.expected: dict[type[WithOutput] | None, int] = {}

    def leases(self) -> Iterator[Lease]:
        """Yield leases for a call, until one of them succeeds or fails."""
        needed = 0
        for tried in range(1, TRIES + 1):
            lease = Lease(self, needed, last=tried == TRIES)
            yield lease
            needed = lease.needed


class ProcessPools:
    """Pools of a client by process: a forked child leaves that of its parent alone.

    Args:
        budget: most bytes of each; 0 is none.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._pools: dict[int, Pool] = {}

    def get(self) -> Pool | None:
        """Get the pool of this process, if there is one yet."""
        return self._pools.get(os.getpid())

    def open(self, info: ServerInfo) -> Pool:
        """Open the pool of this process from the info of the server.

        Raises:
            UnsupportedError: it takes no shared memory.
        """
        return self._pools.setdefault(os.getpid(), Pool(self.budget, info))

    def close(self) -> None:
        """Remove the regions of this process."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.regions.close()
