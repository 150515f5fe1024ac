"""Tensors of the protocol as arrays: what they may be, and their numbers from bytes, from contents, and to bytes."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos_server.inference import open_inference_pb2 as pb

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DATATYPES", "Datatype", "Spec", "elements", "from_bytes", "from_contents", "to_bytes"]


@dataclass(frozen=True)
class Datatype:
    """A type of tensors.

    Args:
        dtype: of the array; None for BYTES, whose elements have no size, and the uint16 of its bits for BF16.
        contents: the field of InferTensorContents; None for types that come raw only.
        config: what ModelConfig calls it.
    """

    dtype: np.dtype[Any] | None
    contents: str | None
    config: pb.DataType.ValueType


DATATYPES = {
    "UINT8": Datatype(np.dtype("u1"), "uint_contents", pb.TYPE_UINT8),
    "INT32": Datatype(np.dtype("<i4"), "int_contents", pb.TYPE_INT32),
    "INT64": Datatype(np.dtype("<i8"), "int64_contents", pb.TYPE_INT64),
    "FP16": Datatype(np.dtype("<f2"), None, pb.TYPE_FP16),
    "BF16": Datatype(np.dtype("<u2"), None, pb.TYPE_BF16),
    "FP32": Datatype(np.dtype("<f4"), "fp32_contents", pb.TYPE_FP32),
    "FP64": Datatype(np.dtype("<f8"), "fp64_contents", pb.TYPE_FP64),
    "BYTES": Datatype(None, "bytes_contents", pb.TYPE_STRING),
}
"""The types that models of this server take or give, by the protocol's names."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Spec:
    """A tensor that a model takes or gives.

    Args:
        name: its name.
        datatypes: names of the types that it may have, first the one that metadata tells.
        shape: its extents as metadata tells them; -1 is any.
        optional: whether an input may be left out.
        ndim: numbers of axes that are taken besides, with any extents.
        told: whether metadata tells it; not an output that a version has only where a request names another scheme.
    """

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    ndim: tuple[int, ...] = ()
    told: bool = True

    def check(self, datatype: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor of another type or shape.

        Raises:
            InvalidInputError: naming which.
        """
        if datatype not in self.datatypes:
            raise InvalidInputError(f"{self.name}.datatype: got {datatype[:100]!r}, want {' or '.join(self.datatypes)}")
        fits = len(shape) in self.ndim or (
            len(shape) == len(self.shape)
            and all(want in (-1, size) for want, size in zip(self.shape, shape, strict=True))
        )
        if not fits:
            others = "".join(f" or {ndim} axes" for ndim in self.ndim)
            raise InvalidInputError(f"{self.name}.shape: got {shape}, want {self.shape}{others}")
        # An array has less than 2**63 bytes along its axes, even if one of them is empty.
        if min(shape) < 0 or math.prod(size or 1 for size in shape) >= 2**60:
            raise InvalidInputError(f"{self.name}.shape: got {shape}, want sizes that an array can have")


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: bytes | memoryview) -> npt.NDArray[Any]:
    """The array of raw bytes: a view of them, which may be written to if they may.

    Args:
        name: of the tensor, for errors.
        datatype: one with a size.
        shape: a checked one.
        data: the bytes.

    Raises:
        InvalidInputError: more or fewer bytes than the shape says.
    """
    dtype = DATATYPES[datatype].dtype
    assert dtype is not None
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise InvalidInputError(f"{name}: got {len(data)} bytes, want {wanted} for {datatype} of shape {shape}")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def elements(name: str, shape: tuple[int, ...], data: bytes | memoryview) -> list[bytes]:
    """The elements of raw BYTES: each a length of four bytes, and then as many.

    Raises:
        InvalidInputError: more or fewer elements than the shape says, or one that is cut off.
    """
    found: list[bytes] = []
    wanted, at = math.prod(shape), 0
    while at < len(data) and len(found) < wanted:
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, at)[0] if begin <= len(data) else begin
        if end > len(data):
            raise InvalidInputError(f"{name}: got {len(data)} bytes, want {end} or more for element {len(found)}")
        found.append(bytes(data[begin:end]))
        at = end
    if len(found) != wanted or at != len(data):
        raise InvalidInputError(
            f"{name}: got {len(found)} elements in {at} of {len(data)} bytes, want {wanted} for shape {shape}"
        )
    return found


def from_contents(
    name: str, datatype: str, shape: tuple[int, ...], contents: pb.InferTensorContents
) -> npt.NDArray[Any] | list[bytes]:
    """The array, or the elements, of numbers that came one by one.

    Raises:
        InvalidInputError: numbers in the field of another type, more or fewer than the shape says, or too large ones.
    """
    kind = DATATYPES[datatype]
    for field, _ in contents.ListFields():
        if field.name != kind.contents:
            raise InvalidInputError(f"{name}.contents: got {field.name}, want {kind.contents or 'raw bytes'}")
    values = list(getattr(contents, kind.contents)) if kind.contents else []
    if len(values) != math.prod(shape):
        raise InvalidInputError(f"{name}.contents: got {len(values)} elements, want {math.prod(shape)} for {shape}")
    if kind.dtype is None:
        return values
    try:
        return np.array(values, kind.dtype.newbyteorder("=")).reshape(shape)
    except OverflowError:
        raise InvalidInputError(f"{name}.contents: got {max(values)}, want what {datatype} holds") from None


def to_bytes(datatype: str, array: npt.NDArray[Any]) -> bytes:
    """The raw bytes of an array."""
    return array.astype(DATATYPES[datatype].dtype, copy=False).tobytes()
