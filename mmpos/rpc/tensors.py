"""Fields of messages: numbers, and tensors as little-endian bytes."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from mmpos.errors import InvalidInputError
from mmpos.rpc import beside as large
from mmpos.rpc.beside import Beside
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.rpc.v1.table_pb2 import Rational
from mmpos.support import native
from mmpos.support.checks import IntArray
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import torch

E = TypeVar("E", bound=int)
S = TypeVar("S", bound=np.generic)
T = TypeVar("T")


def path(name: str, field: str) -> str:
    """Join the name of a message and a field; the message of a call itself has no name."""
    return f"{name}.{field}" if name else field


def required(name: str, message: Message, field: str) -> Any:
    """Read a submessage, or refuse a message without it."""
    if not message.HasField(field):
        raise InvalidInputError(f"{path(name, field)}: got none, want a {type(getattr(message, field)).__name__}")
    return getattr(message, field)


def chosen(name: str, message: Message, oneof: str) -> str:
    """Read which field of a oneof is set, or refuse a message in which none is set."""
    field = message.WhichOneof(oneof)
    if field is None:
        options = [option.name for option in message.DESCRIPTOR.oneofs_by_name[oneof].fields]
        raise InvalidInputError(f"{name or oneof}: got none, want one of {', '.join(options)}")
    return str(field)


def enum(name: str, message: Message, field: str, meanings: Mapping[E, T]) -> T:
    """Read the meaning of an enum field, or refuse a value without one."""
    value = getattr(message, field)
    if value not in meanings:
        kind = message.DESCRIPTOR.fields_by_name[field].enum_type
        values = kind.values_by_number if kind is not None else {}
        got = values[value].name if value in values else value
        want = ", ".join(values[number].name for number in meanings)
        raise InvalidInputError(f"{path(name, field)}: got {got}, want one of {want}")
    return meanings[value]


def integers(values: Iterable[int], *, columns: int | None = None, name: str = "") -> IntArray:
    """Read a repeated field as (n,) int64, or as (n, columns) if its numbers form groups."""
    array = np.array(list(values), np.int64)  # a list is faster to read than a field
    return array if columns is None else in_columns(name, array, columns)


def in_columns(name: str, array: IntArray, columns: int) -> IntArray:
    """Reshape grouped numbers to (n, columns)."""
    if array.size % columns:
        raise InvalidInputError(f"{name}: got {array.size} numbers, want groups of {columns}")
    return array.reshape(-1, columns)


def integer_lists(message: Message, *fields: str) -> list[IntArray]:
    """Read repeated fields, (n,) int64 each, from the bytes of a message, without creating an object per number.

    The whole message is serialized again, so it should hold little else.
    """
    if native.core is not None:
        lists = native.core.integers(message.SerializeToString(), _numbers(message.DESCRIPTOR, fields))
        if lists is not None:
            return [native.int64(data) for data in lists]
    return [integers(getattr(message, field)) for field in fields]


@lru_cache(maxsize=64)
def _numbers(kind: Descriptor, fields: tuple[str, ...]) -> bytes:
    """Look up the numbers of fields."""
    return bytes(kind.fields_by_name[field].number for field in fields)


def put_integers(field: MutableSequence[E], values: npt.ArrayLike) -> None:
    """Fill a repeated field with the numbers of an array, in order."""
    field.extend(np.asarray(values).ravel().tolist())


def get_seconds(name: str, values: Sequence[Rational]) -> list[Fraction | None]:
    """Read times, with None for each time whose numerator is 0."""
    return [None if value.numerator == 0 else get_rational(f"{name}[{i}]", value) for i, value in enumerate(values)]


def get_rational(name: str, value: Rational) -> Fraction:
    """Read a fraction."""
    if value.denominator < 1:
        raise InvalidInputError(f"{path(name, 'denominator')}: got {value.denominator}, want >= 1")
    return Fraction(value.numerator, value.denominator)


def put_rational(message: Rational, value: Fraction | int | None) -> None:
    """Fill a message with a fraction, or with 0 for None."""
    exact = Fraction(0 if value is None else value)
    message.numerator, message.denominator = exact.numerator, exact.denominator


_MAX_NDIM = 8
"""Maximum number of axes of a tensor."""

_NAMES = {number: name.removeprefix("DATA_TYPE_").lower() for name, number in pb.DataType.items() if number}
DATA_TYPES = {name: number for number, name in _NAMES.items()}
"""Enum numbers of data types by their names in numpy and torch."""

# numpy has no bfloat16, so its bits pass through numpy as uint16. Written as "<i8", a type is the native one on
# little-endian machines; newbyteorder("<") makes one that the extension declines.
_LITTLE_ENDIAN = {
    name: np.dtype("<" + np.dtype("uint16" if name == "bfloat16" else name).str[1:]) for name in DATA_TYPES
}
_NAME_OF = {dtype: name for name, dtype in _LITTLE_ENDIAN.items() if name != "bfloat16"}  # numpy takes a microsecond


def put_tensor(message: pb.Tensor, array: npt.NDArray[np.generic] | torch.Tensor, beside: Beside | None = None) -> None:
    """Fill a message with an array or a torch tensor on any device; if it is large, only with its mark in ``beside``.

    Raises:
        InvalidInputError: the type cannot be sent.
    """
    if isinstance(array, np.ndarray):
        name = _NAME_OF.get(array.dtype) or array.dtype.name
    else:
        name, array = _host(array)
    if name not in DATA_TYPES:
        raise InvalidInputError(f"tensor: got dtype {name}, want one of {', '.join(DATA_TYPES)}")
    message.dtype = DATA_TYPES[name]
    message.shape.extend(array.shape)
    array = array.astype(_LITTLE_ENDIAN[name], copy=False)
    if beside is None or array.nbytes < max(large.LEAST_BYTES, 1):
        message.data = array.tobytes()
    else:
        beside.put(message, np.ascontiguousarray(array.reshape(-1)).view(np.uint8))


def get_tensor(
    name: str,
    message: pb.Tensor,
    dtypes: Collection[str] | None = None,
    ndim: Collection[int] | None = None,
    beside: Beside | None = None,
) -> npt.NDArray[Any]:
    """Read the array from a message as a read-only view of its bytes; bfloat16 becomes uint16 bits.

    Args:
        name: name of the field, for errors.
        message: message to read; if the tensor is large, only its mark.
        dtypes: names of the accepted types; None accepts all.
        ndim: accepted numbers of axes; None accepts up to 8.
        beside: keeper of the large tensors.

    Raises:
        InvalidInputError: the type or the number of axes is not accepted, or the bytes do not fit the shape.
    """
    known = _NAMES if dtypes is None else {DATA_TYPES[dtype]: dtype for dtype in dtypes}
    dtype = _LITTLE_ENDIAN[known[message.dtype] if message.dtype in known else enum(name, message, "dtype", known)]
    shape = tuple(message.shape)
    if len(shape) not in (range(_MAX_NDIM + 1) if ndim is None else ndim):
        want = f"at most {_MAX_NDIM}" if ndim is None else " or ".join(map(str, sorted(ndim)))
        raise InvalidInputError(f"{path(name, 'shape')}: got {len(shape)} axes, want {want}")
    if min(shape, default=0) < 0:
        raise InvalidInputError(f"{path(name, 'shape')}: got {shape}, want sizes >= 0")
    size = math.prod(shape) * dtype.itemsize  # Python's integers do not overflow
    data = message.data if beside is None else beside.data(message)  # read it only once, since every access copies it
    if len(data) != size:
        want = f"{size} for shape {shape} with {dtype.itemsize}-byte numbers"
        raise InvalidInputError(f"{path(name, 'data')}: got {len(data)} bytes, want {want}")
    # numpy refuses such axes even for an empty array.
    if math.prod(side or 1 for side in shape) * dtype.itemsize >= 2**63:
        raise InvalidInputError(f"{path(name, 'shape')}: got {shape}, want a shape that an array can have")
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))


def get_torch(name: str, message: pb.Tensor, beside: Beside | None = None) -> torch.Tensor:
    """Read a writable torch tensor from a message; see ``get_tensor`` for beside."""
    with needed_for("rotations", extra="all"):
        import torch

    array = owned(get_tensor(name, message, beside=beside))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if message.dtype == pb.DATA_TYPE_BFLOAT16 else tensor


def owned(array: npt.NDArray[S]) -> npt.NDArray[S]:
    """Return the array itself if it is writable, else a copy."""
    return array if array.flags.writeable else array.copy()


def _host(tensor: object) -> tuple[str, npt.NDArray[Any]]:
    """Convert a torch tensor to the name of its type and an array; bfloat16 becomes uint16 bits."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"tensor: got {type(tensor).__name__}, want a numpy array or a torch tensor")
    host = tensor.detach().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    return name, (host.view(torch.uint16) if name == "bfloat16" else host).numpy()
