"""Tensors of one request that are not in its messages: in shared memory, weighed first, or too large to be copied."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor

from mmpos.errors import LimitExceededError
from mmpos.rpc.errors import OutputError
from mmpos.rpc.tensors import aligned
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos_server.large_tensors import LargeTensors
from mmpos_server.shared_memory import Region, SharedMemory

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.config import Limits

__all__ = ["Exchange", "claimed", "mentions"]


_NONE = SharedMemory()


class Exchange:
    """Shared memory of one request; a Memory of the wire. Nothing of it is kept when the request is answered.

    Args:
        memory: what the server takes.
        request: the message, which may say where the tensors of the answer go; None: it says nothing.

    Raises:
        UnsupportedError: it says so, and the server takes no shared memory.
        InvalidInputError: likewise, and there is no such object, or it is smaller.
    """

    def __init__(self, memory: SharedMemory | None = None, request: Message | None = None) -> None:
        self._memory = memory or _NONE
        self._output: Region | None = None
        self._name, self._end = "", 0
        self._large = LargeTensors()
        if request is not None and (found := _output(request)) is not None:
            self._name, shared = found
            self._output = self._memory.open(self._name, shared.key, shared.offset, shared.byte_size)

    @property
    def answers(self) -> bool:
        """Whether the tensors of the answer go to shared memory."""
        return self._output is not None

    def get(self, name: str, shared: pb.SharedMemory) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor of the request, in memory of its own.

        Raises:
            UnsupportedError: the server takes no shared memory.
            InvalidInputError: no such object, or a smaller one.
        """
        region = self._memory.open(name, shared.key, shared.offset, shared.byte_size)
        return region.read(name, 0, shared.byte_size)

    def put(self, message: pb.Tensor, data: npt.NDArray[np.uint8]) -> bool:
        """Put the bytes of a tensor of the answer after those before it, if the request says where they go.

        What does not fit is counted only, and ``finish`` refuses the answer. Large ones that go nowhere else are kept
        for ``serialize``.
        """
        if self._output is None:
            return self._large.put(message, data)
        begin = aligned(self._end)
        self._end = begin + data.size
        if self._end <= self._output.byte_size:
            self._output.write(self._name, begin, data.data)
            shared = message.shared
            shared.key, shared.offset, shared.byte_size = self._output.key, self._output.offset + begin, data.size
        return True

    def expect(self, sizes: Iterable[float]) -> None:
        """Refuse an answer before it is made: tensors of so many bytes, which must all fit.

        Raises:
            OutputError: they do not.
        """
        end = 0
        for size in sizes:
            end = aligned(end) + int(size)
        self._fit(end)

    def finish(self) -> None:
        """Refuse an answer whose tensors did not all fit.

        Raises:
            OutputError: with the bytes they need.
        """
        self._fit(self._end)

    def serialize(self, answer: Message) -> bytes:
        """The bytes of the answer."""
        return self._large.serialize(answer)

    def _fit(self, end: int) -> None:
        if self._output is not None and end > self._output.byte_size:
            got = self._output.byte_size
            raise OutputError(f"{self._name}.byte_size: got {got}, want >= {end} for the answer", end)


def mentions(raw: bytes, memory: SharedMemory) -> bool:
    """Whether a request may have tensors in shared memory, by its bytes: without the prefix every key is refused."""
    return memory.prefix is not None and b"/" + memory.prefix.encode() in raw


def claimed(message: Message, limits: Limits) -> int:
    """Bytes of shared memory that a message names, in all; they may be any number.

    Raises:
        LimitExceededError: more documents and parts than may be looked at.
    """
    size, entries, most = 0, 0, limits.documents + limits.segments
    waiting: list[Any] = [message]
    while waiting:
        found = waiting.pop()
        if isinstance(found, pb.SharedMemory):
            size += max(found.byte_size, 0)
            continue
        for name, repeated in _leading(found.DESCRIPTOR):
            if repeated:
                several = getattr(found, name)
                entries += len(several)
                if entries > most:
                    raise LimitExceededError(f"segments: got {entries} documents and parts, want at most {most}")
                waiting.extend(several)
            elif found.HasField(name):
                waiting.append(getattr(found, name))
    return size


@lru_cache(maxsize=256)
def _leading(kind: Descriptor) -> tuple[tuple[str, bool], ...]:
    """The fields of a message in which shared memory may be named, and whether each is a list."""
    target = pb.SharedMemory.DESCRIPTOR
    return tuple(
        (field.name, field.is_repeated)
        for field in kind.fields
        if field.message_type is not None and (field.message_type is target or _leading(field.message_type))
    )


@lru_cache(maxsize=256)
def _holder(kind: Any) -> str | None:
    """Which message of a request says where its answer goes: "query", itself (""), or None of them."""
    if "output" in kind.fields_by_name:
        return ""
    query = kind.fields_by_name.get("query")
    return "query" if query is not None and "output" in query.message_type.fields_by_name else None


def _output(request: Any) -> tuple[str, pb.SharedMemory] | None:
    """Where the answer of a request goes, and what errors call that."""
    holder = _holder(request.DESCRIPTOR)
    if holder is None:
        return None
    message = getattr(request, holder) if holder else request
    return (f"{holder}.output".lstrip("."), message.output) if message.HasField("output") else None
