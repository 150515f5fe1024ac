"""Memory whose accesses are checked: bounds, alignment, what was written before, and the order of accesses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class Fault(Exception):  # noqa: N818  (the word of debuggers)
    """What a GPU would refuse, what is undefined, or what this machine does not know."""


WARP_BITS, BLOCK_SHIFT = 6, 26
SEVERAL_WARPS, SEVERAL_BLOCKS, NEVER = (1 << WARP_BITS) - 1, 1 << 62, -1


def stamp(block: Numbers, epoch: Numbers, warp: Numbers) -> Numbers:
    """Return who accesses memory and when, as one number per thread: block, barriers that it has passed, and warp."""
    return (block << BLOCK_SHIFT) + (epoch << WARP_BITS) + warp


class Span:
    """Consecutive bytes, with the last read and write of each, to find two accesses that nothing orders.

    Two accesses to a byte, one of them a write, are ordered if threads of the same warp made both, or if a barrier of
    their block lies between them. Nothing orders two blocks.

    Args:
        base: the first address.
        data: the bytes.
        inside: whether each byte may be accessed.
        shared: whether the bytes have no value before the first write, and different warps may write equal values, as
            warps that hold copies of a value do in shared memory.
    """

    def __init__(self, base: int, data: Bytes, inside: NDArray[np.bool_], shared: bool) -> None:
        self.base, self.data, self.inside, self.shared = base, data, inside, shared
        self.known = np.full(len(data), not shared)
        self.writers, self.readers = np.full((2, len(data)), NEVER, np.int64)

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
            raise Fault(f"outside: byte {int(where[~self.inside[where]][0])} belongs to no tensor")
        stamps = np.broadcast_to(who[:, None], where.shape)
        if values is None:
            if not self.known[where].all():
                raise Fault(f"read before it was written: byte {int(where[~self.known[where]][0])}")
            self._check(self.writers[where], stamps, "reads what {} wrote")
            self._note_read(where, stamps)
            return self.data[where]
        equal = self.known[where] & (self.data[where] == values) & self.shared
        self._check(np.where(equal, NEVER, self.writers[where]), stamps, "writes what {} wrote")
        self._check(self.readers[where], stamps, "writes what {} read")
        self.data[where] = values
        self.writers[where] = stamps
        self.known[where] = True
        if not self.shared:  # several threads wrote a byte at once, and one of them was noted
            self._check(self.writers[where], stamps, "writes what {} wrote")
        if (self.data[where] != values).any():
            raise Fault("race: threads write to one address at once")
        return values

    def _note_read(self, where: Numbers, who: Numbers) -> None:
        last = self.readers[where]
        again = (last >> WARP_BITS == who >> WARP_BITS) & (last != who)
        new = np.where(again, who | SEVERAL_WARPS, who)
        new = np.where((last != NEVER) & (last >> BLOCK_SHIFT != who >> BLOCK_SHIFT), SEVERAL_BLOCKS, new)
        self.readers[where] = new
        lost = self.readers[where] != new  # several warps read a byte at once, and one of them was noted
        self.readers[where[lost]] |= SEVERAL_WARPS
        self.readers[where[self.readers[where] >> BLOCK_SHIFT != new >> BLOCK_SHIFT]] = SEVERAL_BLOCKS

    @staticmethod
    def _check(last: Numbers, who: Numbers, what: str) -> None:
        other_block = (last >> BLOCK_SHIFT != who >> BLOCK_SHIFT) & (last != NEVER)
        if other_block.any():
            raise Fault(f"race: a block {what.format('another block')}")
        if ((last >> WARP_BITS == who >> WARP_BITS) & (last != who)).any():
            raise Fault(f"race: a warp {what.format('another warp')} since the last barrier")


def scratch(size: int) -> Span:
    """Return memory of a block, which begins at address 0 and has no values yet."""
    return Span(0, np.zeros(size, np.uint8), np.ones(size, np.bool_), True)


class Memory:
    """Global memory: the elements of tensors, at their real addresses, and nothing between and around them.

    Args:
        tensors: tensors on the host; views of one storage share its bytes.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spans: dict[int, Span] = {}
        for x in (x for x in tensors if x.numel()):
            base, size, item = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes(), x.element_size()
            if base not in spans:
                data: Any = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
                spans[base] = Span(base, data, np.zeros(size, np.bool_), False)
            first, strides = spans[base].inside[x.data_ptr() - base :], [step * item for step in x.stride()]
            np.lib.stride_tricks.as_strided(first, (*x.shape, item), (*strides, 1))[...] = True
        self.spans = [spans[base] for base in sorted(spans)]

    def access(self, address: Numbers, width: int, who: Numbers, values: Bytes | None = None) -> Bytes:
        """Load or store like ``Span.access``, in the tensor that each address belongs to."""
        number = np.searchsorted([span.base for span in self.spans], address, "right") - 1
        result = np.zeros((len(address), width), np.uint8)
        for i in np.unique(number):
            mine = number == i
            part = None if values is None else values[mine]
            result[mine] = self.spans[max(i, 0)].access(address[mine], width, who[mine], part)
        return result
