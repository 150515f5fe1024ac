"""Memory whose accesses are checked: bounds, alignment, what was written before, and the order of other accesses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Fault(Exception):
    """What a GPU would refuse, what is undefined, or what this machine does not know."""


WARP_BITS, EPOCH_BITS = 6, 20
SEVERAL_WARPS = (1 << WARP_BITS) - 1
SEVERAL_BLOCKS = 1 << 62
NEVER = -1


def stamp(block: int, epoch: int, warp: Numbers) -> Numbers:
    """Return who accesses memory and when, in one number per thread: block, barriers passed so far, and warp."""
    return (((block << EPOCH_BITS) + epoch) << WARP_BITS) + warp


class Log:
    """The last accesses to each byte of a memory, to find two that no barrier orders.

    Two accesses to a byte, one of them a write, are ordered if threads of the same warp made both, or if a barrier of
    their block lies between them. Nothing orders two blocks. Writes of equal values need no order: warps that hold
    copies of a value all write it.
    """

    def __init__(self, size: int) -> None:
        self.writers = np.full(size, NEVER, np.int64)
        self.readers = np.full(size, NEVER, np.int64)

    def read(self, where: Numbers, who: Numbers) -> None:
        """Note a read of bytes; raise Fault if another warp wrote one of them unordered."""
        self._check(self.writers[where], who, where, "read", "written")
        last = self.readers[where]
        other_block = (last != NEVER) & (last >> EPOCH_BITS + WARP_BITS != who >> EPOCH_BITS + WARP_BITS)
        same_epoch = last >> WARP_BITS == who >> WARP_BITS
        new = np.where(same_epoch & (last != who), who | SEVERAL_WARPS, who)
        new = np.where(other_block, SEVERAL_BLOCKS, new)
        self.readers[where] = new
        lost = self.readers[where] != new  # several warps read a byte at once, and only one was noted
        self.readers[where[lost]] |= SEVERAL_WARPS

    def write(self, where: Numbers, who: Numbers, equal: NDArray[np.bool_]) -> None:
        """Note a write of bytes, some equal to the old ones; raise Fault if another warp read or wrote them unordered."""
        self._check(np.where(equal, NEVER, self.writers[where]), who, where, "written", "written")
        self._check(self.readers[where], who, where, "written", "read")
        self.writers[where] = who

    @staticmethod
    def _check(last: Numbers, who: Numbers, where: Numbers, what: str, before: str) -> None:
        shift = EPOCH_BITS + WARP_BITS
        same_epoch = last >> WARP_BITS == who >> WARP_BITS
        race = (last != NEVER) & ((last >> shift != who >> shift) | (same_epoch & (last != who)))
        if race.any():
            i = tuple(np.argwhere(race)[0])
            blocks = "another block" if last[i] >> shift != who[i] >> shift else "another warp since the last barrier"
            raise Fault(f"race: byte {int(where[i])} is {what}, and was {before} by {blocks}")


class Span:
    """A piece of memory with consecutive addresses.

    Args:
        base: its first address.
        data: its bytes.
        inside: whether each byte may be accessed.
        readable: whether each byte has a value; writing gives it one.
    """

    def __init__(self, base: int, data: Bytes, inside: NDArray[np.bool_], readable: NDArray[np.bool_]) -> None:
        self.base, self.data, self.inside, self.readable = base, data, inside, readable
        self.log = Log(len(data))

    def access(self, address: Numbers, width: int, who: Numbers, values: Bytes | None = None) -> Bytes:
        """Load or store ``width`` bytes at each address.

        Args:
            address: (threads,) addresses.
            width: bytes per thread; addresses must be multiples of it.
            who: (threads,) stamps.
            values: (threads, width) bytes to store, or None to load.

        Returns:
            (threads, width) bytes that were loaded or stored.
        """
        at = address - self.base
        if (wrong := address % width != 0).any():
            raise Fault(f"misaligned: {width} bytes at {int(address[wrong][0]):#x}")
        if (wrong := (at < 0) | (at + width > len(self.data))).any():
            raise Fault(f"outside: {width} bytes at byte {int(at[wrong][0])} of {len(self.data)}")
        where = at[:, None] + np.arange(width)
        if not self.inside[where].all():
            raise Fault(f"outside: byte {int(where[~self.inside[where]][0])}, which belongs to no tensor")
        stamps = np.broadcast_to(who[:, None], where.shape)
        if values is None:
            if not self.readable[where].all():
                raise Fault(f"read before it was written: byte {int(where[~self.readable[where]][0])}")
            self.log.read(where, stamps)
            return self.data[where]
        self.log.write(where, stamps, self.readable[where] & (self.data[where] == values))
        self.readable[where] = True
        self.data[where] = values
        if (self.data[where] != values).any():
            raise Fault("race: threads of an instruction write different values to one address")
        return values


class Shared(Span):
    """The shared memory of a block; it begins at address 0, without values."""

    def __init__(self, size: int) -> None:
        super().__init__(0, np.zeros(size, np.uint8), np.ones(size, np.bool_), np.zeros(size, np.bool_))


class Memory:
    """Global memory: the elements of tensors, at their real addresses, and nothing between and around them.

    Args:
        tensors: tensors on the host; views of one storage share its bytes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: dict[int, Span] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            base, size = storage.data_ptr(), storage.nbytes()
            if tensor.numel() and base not in spans:
                data: Any = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
                spans[base] = Span(base, data, np.zeros(size, np.bool_), np.ones(size, np.bool_))
            if tensor.numel():
                item = tensor.element_size()
                strides = [step * item for step in tensor.stride()] + [1]
                first = spans[base].inside[tensor.data_ptr() - base :]
                np.lib.stride_tricks.as_strided(first, (*tensor.shape, item), strides)[...] = True
        self.spans = [spans[base] for base in sorted(spans)]
        self.bases = np.array([span.base for span in self.spans], np.int64)

    def access(self, address: Numbers, width: int, who: Numbers, values: Bytes | None = None) -> Bytes:
        """Load or store like ``Span.access``, in the tensor that each address belongs to."""
        number = np.searchsorted(self.bases, address, "right") - 1
        if (number < 0).any():
            raise Fault(f"outside: {width} bytes at {int(address.min()):#x}, before all tensors")
        result = np.zeros((len(address), width), np.uint8)
        for i in np.unique(number):
            mine = number == i
            part = None if values is None else values[mine]
            result[mine] = self.spans[i].access(address[mine], width, who[mine], part)
        return result
