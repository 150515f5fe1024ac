"""Exchange tensors outside the parsed messages: in shared memory, or in the raw bytes of the request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import Descriptor

from mmpos.errors import LimitExceededError
from mmpos.rpc.beside import LEAST_BYTES, Beside
from mmpos.rpc.errors import OutputError
from mmpos.rpc.tensors import aligned
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos_server.shared_memory import Data, Region, SharedMemory

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.config import Limits

__all__ = ["NO_MEMORY", "Exchange", "Views", "claimed", "mentions"]

_NONE = SharedMemory()


class Exchange(Beside):
    """A request's shared memory and large tensors; implements ``mmpos.rpc.tensors.Memory``.

    Args:
        memory: the server's access to shared memory.
        request: message that may name a shared memory object for the tensors of the answer, or None.
        raw: the serialized request if ``mmpos.rpc.beside.parsed`` has parsed it.

    Raises:
        UnsupportedError: the request names an object, but shared memory is disabled.
        InvalidInputError: the object does not exist or is too small.
    """

    def __init__(self, memory: SharedMemory | None = None, request: Message | None = None, raw: bytes = b"") -> None:
        super().__init__(raw)
        self._memory = memory or _NONE
        self._output: Region | None = None
        self._name, self._end = "", 0
        self._mapped: Data | None = None  # first bytes of the output, if they are mapped
        if request is not None and (output := _output(request)) is not None:
            self._name, shared = output
            self._output = self._memory.open(self._name, shared.key, shared.offset, shared.byte_size)

    @property
    def answers(self) -> bool:
        """Whether the tensors of the answer go to shared memory."""
        return self._output is not None

    def get(self, name: str, shared: pb.SharedMemory) -> Data:
        """Copy the bytes of a tensor in the request.

        Raises:
            UnsupportedError: shared memory is disabled.
            InvalidInputError: the object does not exist or is too small.
        """
        region = self._memory.open(name, shared.key, shared.offset, shared.byte_size)
        try:
            return region.read(name, 0, shared.byte_size)
        finally:
            region.close()

    def view(self, name: str, shared: pb.SharedMemory) -> Data:
        """Map or copy the bytes of a tensor in the request. Read them only once: the client may change mapped bytes.

        Raises:
            UnsupportedError, InvalidInputError: see ``get``.
        """
        region = self._memory.open(name, shared.key, shared.offset, shared.byte_size)
        try:
            data = region.map(name, shared.byte_size) if shared.byte_size >= LEAST_BYTES else None
            return region.read(name, 0, shared.byte_size) if data is None else data
        finally:
            region.close()

    def room(self, sizes: Sequence[int]) -> list[Data] | None:
        """Map the memory that the client provides for the answer's first tensors; return None if that is impossible.

        Args:
            sizes: bytes of each tensor, as passed to ``expect`` before.
        """
        if self._output is None or sum(sizes) < LEAST_BYTES or min(sizes) < 0:
            return None
        begins = list(accumulate(sizes[:-1], lambda begin, size: aligned(begin + size), initial=0))
        mapped = self._mapped = self._output.map(self._name, begins[-1] + sizes[-1])
        if mapped is None:
            return None
        return [mapped[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Append an answer's tensor to the shared memory; return False if the message must contain it instead.

        A tensor that does not fit is only counted, and ``serialize`` then refuses the answer. A large tensor that is
        not put into shared memory is kept for ``serialize``; its bytes must not change afterwards.
        """
        if self._output is None:
            return self is not NO_MEMORY and super().put(message, data)
        begin = aligned(self._end)
        self._end = begin + data.size
        if self._end <= self._output.byte_size:
            if self._mapped is None or not np.may_share_memory(self._mapped, data):
                self._output.write(self._name, begin, data.data)
            shared = message.shared
            shared.key, shared.offset, shared.byte_size = self._output.key, self._output.offset + begin, data.size
        return True

    def expect(self, sizes: Iterable[float]) -> None:
        """Check that tensors of these sizes will fit into the shared memory, before they are computed.

        Raises:
            OutputError: the tensors do not fit.
        """
        end = 0
        for size in sizes:
            end = aligned(end) + int(size)
        self._fit(end)

    def serialize(self, answer: Message) -> bytes:
        """Serialize the answer with its large tensors, releasing the GIL meanwhile.

        Raises:
            OutputError: the tensors do not fit into the shared memory; the error contains the number of bytes that they
                need.
        """
        self._fit(self._end)
        return super().serialize(answer)

    def _fit(self, end: int) -> None:
        if self._output is not None and end > self._output.byte_size:
            got = self._output.byte_size
            raise OutputError(f"{self._name}.byte_size: got {got}, want >= {end} for the answer", end)


@dataclass(frozen=True)
class Views:
    """An exchange's memory that returns views of tensors; implements ``mmpos.rpc.tensors.Memory``."""

    exchange: Exchange

    def get(self, name: str, shared: pb.SharedMemory) -> Data:
        """View the bytes of a tensor in the request."""
        return self.exchange.view(name, shared)

    def data(self, message: pb.Tensor) -> bytes | memoryview:
        """Return the bytes of a tensor that the request itself contains."""
        return self.exchange.data(message)

    def put(self, message: pb.Tensor, data: Data) -> bool:
        """Accept a tensor for the answer."""
        return self.exchange.put(message, data)


NO_MEMORY = Exchange()
"""Empty exchange for a call whose request has not been read, or which has ended while its work may still be running."""


@lru_cache(maxsize=256)
def _holder(kind: Descriptor) -> str | None:
    """Return the field whose message contains ``output``: "query", "" for the request itself, or None for no field."""
    if "output" in kind.fields_by_name:
        return ""
    query = kind.fields_by_name.get("query")
    inner = None if query is None else query.message_type
    return "query" if inner is not None and "output" in inner.fields_by_name else None


def _output(request: Any) -> tuple[str, pb.SharedMemory] | None:
    """Return the answer's shared memory and its name in errors, or None if the request names none."""
    holder = _holder(request.DESCRIPTOR)
    if holder is None:
        return None
    message = getattr(request, holder) if holder else request
    return (f"{holder}.output".lstrip("."), message.output) if message.HasField("output") else None


def mentions(raw: bytes, memory: SharedMemory) -> bool:
    """Return whether a serialized request may name shared memory: every valid key contains the prefix."""
    return memory.prefix is not None and b"/" + memory.prefix.encode() in raw


def claimed(message: Message, limits: Limits) -> int:
    """Sum the bytes of shared memory that a message names.

    Raises:
        LimitExceededError: the message has more documents and parts than the limits allow.
    """
    size, entries, most = 0, 0, limits.documents + limits.segments
    waiting: list[Message] = [message]
    while waiting:
        current = waiting.pop()
        if isinstance(current, pb.SharedMemory):
            size += max(current.byte_size, 0)
            continue
        for name, repeated in _leading(current.DESCRIPTOR):
            if repeated:
                several = getattr(current, name)
                entries += len(several)
                if entries > most:
                    raise LimitExceededError(f"segments: got {entries} documents and parts, want at most {most}")
                waiting.extend(several)
            elif current.HasField(name):
                waiting.append(getattr(current, name))
    return size


@lru_cache(maxsize=256)
def _leading(kind: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a message that may name shared memory, each with whether it is repeated."""
    target = pb.SharedMemory.DESCRIPTOR
    return tuple(
        (field.name, field.is_repeated)
        for field in kind.fields
        if field.message_type is not None and (field.message_type is target or _leading(field.message_type))
    )
