"""What holds tensors instead of messages: the server and the client each have one, the wire only asks it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mmpos.rpc.v1 import tensor_pb2 as pb

__all__ = ["ALIGNMENT", "Memory", "aligned", "holds"]

ALIGNMENT = 64
"""Tensors of an answer begin at multiples of so many bytes."""


class Memory(Protocol):
    """Shared memory of one call."""

    def get(self, name: str, shared: pb.SharedMemory) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor of the other side, in memory of its own that may be written to.

        Args:
            name: what errors call the field.
            shared: where they lie; as many as are wanted.
        """

    def put(self, message: pb.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Take the bytes of a tensor for the other side, at least one, and say where; False: they travel in it."""


def aligned(size: int) -> int:
    """The next place where a tensor may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def holds(message: Any) -> int:
    """Bytes that a tensor says it has, wherever they lie."""
    return int(message.shared.byte_size) if message.HasField("shared") else len(message.data)
