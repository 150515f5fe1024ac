"""Tensors in shared memory: where their parameters say that they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.parameters import Kind, get_parameters
from mmpos_server.shared_memory import Region, Regions

if TYPE_CHECKING:
    from google.protobuf.internal.containers import MessageMap

__all__ = ["Place", "get_place"]

_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_KNOWN: Mapping[str, Kind] = {_REGION: "string", _SIZE: "int64", _OFFSET: "int64"}


@dataclass(frozen=True)
class Place:
    """Bytes of a registered region.

    Args:
        region: which.
        name: under which it is registered.
        offset: the first of them, counted from that of the region.
        byte_size: how many.
    """

    region: Region
    name: str
    offset: int
    byte_size: int

    def read(self, what: str) -> memoryview:
        """A copy of the bytes, which may be written to, for a tensor of this name."""
        return self.region.read(what, self.offset, self.byte_size).data

    def write(self, what: str, data: bytes) -> None:
        """Put the bytes of a tensor of this name there."""
        self.region.write(what, self.offset, data)

    def put(self, parameters: MessageMap[str, pb.InferParameter], byte_size: int) -> None:
        """Tell where so many bytes are."""
        parameters[_REGION].string_param = self.name
        parameters[_SIZE].int64_param = byte_size
        parameters[_OFFSET].int64_param = self.offset


def get_place(where: str, parameters: Mapping[str, pb.InferParameter], regions: Regions) -> Place | None:
    """The place that the parameters of a tensor tell; None if it is not in shared memory.

    Raises:
        InvalidInputError: no such region, bytes outside it, or half of what is needed.
        UnsupportedError: a parameter of another name.
    """
    values = get_parameters(f"{where}.parameters", parameters, _KNOWN)
    if not values:
        return None
    for name in (_REGION, _SIZE):
        if name not in values:
            raise InvalidInputError(f"{where}.parameters: got {', '.join(values)}, want {name}, too")
    region = regions.get(f"{where}.parameters[{_REGION!r}]", values[_REGION])
    offset, byte_size = values.get(_OFFSET, 0), values[_SIZE]
    region.within(where, offset, byte_size)
    return Place(region, values[_REGION], offset, byte_size)
