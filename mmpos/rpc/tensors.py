"""Arrays and torch tensors as little-endian bytes with a type and a shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rpc.fields import enum, path
from mmpos.rpc.v1 import tensor_pb2 as pb
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import torch

    from mmpos.rpc.memory import Memory

_MAX_NDIM = 8
"""Most axes of a tensor."""

_NAMES = {
    pb.DATA_TYPE_UINT8: "uint8",
    pb.DATA_TYPE_INT32: "int32",
    pb.DATA_TYPE_INT64: "int64",
    pb.DATA_TYPE_FLOAT16: "float16",
    pb.DATA_TYPE_BFLOAT16: "bfloat16",
    pb.DATA_TYPE_FLOAT32: "float32",
    pb.DATA_TYPE_FLOAT64: "float64",
    pb.DATA_TYPE_COMPLEX64: "complex64",
    pb.DATA_TYPE_UINT16: "uint16",
}
DATA_TYPES = {name: number for number, name in _NAMES.items()}
"""Numbers of data types by the names that numpy and torch give them."""

# numpy has no bfloat16: its bits travel through numpy as uint16.
_LITTLE_ENDIAN = {name: np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<") for name in DATA_TYPES}


def put_tensor(message: pb.Tensor, array: npt.NDArray[Any] | torch.Tensor, memory: Memory | None = None) -> None:
    """Fill a message with an array or a torch tensor on any device.

    Args:
        message: the tensor.
        array: what it is to hold.
        memory: what may take its bytes instead; None: nothing.

    Raises:
        InvalidInputError: a type that does not travel.
    """
    if not isinstance(array, np.ndarray):
        name, array = _host(array)
    else:
        name = array.dtype.name
    if name not in DATA_TYPES:
        raise InvalidInputError(f"tensor: got dtype {name}, want one of {', '.join(DATA_TYPES)}")
    message.dtype = DATA_TYPES[name]
    message.shape.extend(array.shape)
    array = array.astype(_LITTLE_ENDIAN[name], copy=False)
    if memory is None or not array.size or not memory.put(message, array.reshape(-1).view(np.uint8)):
        message.data = array.tobytes()


def get_tensor(
    name: str,
    message: pb.Tensor,
    dtypes: Collection[str] | None = None,
    ndim: Collection[int] | None = None,
    memory: Memory | None = None,
) -> npt.NDArray[Any]:
    """The array of a message: a read-only view of its bytes; bfloat16 comes as the uint16 of its bits.

    What lies in shared memory comes as an array of its own, which may be written to.

    Args:
        name: of the field, for errors.
        message: the tensor.
        dtypes: names of the types to accept; None: all.
        ndim: numbers of axes to accept; None: up to 8.
        memory: what holds tensors instead of messages; None: nothing.

    Raises:
        InvalidInputError: another type or number of axes, or bytes that are not what the shape says.
        UnsupportedError: a tensor in shared memory, where nothing holds it.
    """
    known = _NAMES if dtypes is None else {DATA_TYPES[dtype]: dtype for dtype in dtypes}
    dtype = _LITTLE_ENDIAN[enum(name, message, "dtype", known)]
    shape = tuple(message.shape)
    if len(shape) not in (range(_MAX_NDIM + 1) if ndim is None else ndim):
        want = f"at most {_MAX_NDIM}" if ndim is None else " or ".join(map(str, sorted(ndim)))
        raise InvalidInputError(f"{path(name, 'shape')}: got {len(shape)} axes, want {want}")
    if min(shape, default=0) < 0:
        raise InvalidInputError(f"{path(name, 'shape')}: got {shape}, want sizes >= 0")
    wanted = math.prod(shape) * dtype.itemsize  # in Python's integers, which do not wrap around
    data = message.data  # once: every look at it is a copy
    field, got = ("shared.byte_size", message.shared.byte_size) if message.HasField("shared") else ("data", len(data))
    if got != wanted:
        raise InvalidInputError(
            f"{path(name, field)}: got {got} bytes, want {wanted} for shape {shape} of {dtype.itemsize}"
        )
    # No array has such axes, not even an empty one.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise InvalidInputError(f"{path(name, 'shape')}: got {shape}, want sizes that an array can have")
    if message.HasField("shared"):
        array = _shared(name, message, memory).view(dtype).reshape(shape)
    else:
        array = np.frombuffer(data, dtype).reshape(shape)
    return array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))


def get_torch(name: str, message: pb.Tensor, memory: Memory | None = None) -> torch.Tensor:
    """The torch tensor of a message, which may be written to; memory: as for ``get_tensor``."""
    with needed_for("rotations", extra="all"):
        import torch

    array = owned(get_tensor(name, message, memory=memory))
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if message.dtype == pb.DATA_TYPE_BFLOAT16 else tensor


def owned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array of a tensor as one that may be written to: a copy of what is a view of a message."""
    return array if array.flags.writeable else array.copy()


def _shared(name: str, message: pb.Tensor, memory: Memory | None) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor that lies elsewhere."""
    if memory is None:
        raise UnsupportedError(f"{path(name, 'shared')}: got shared memory, want data")
    if message.data:
        raise InvalidInputError(f"{path(name, 'shared')}: got it and data, want one of them")
    return memory.get(path(name, "shared"), message.shared)


def _host(tensor: Any) -> tuple[str, npt.NDArray[Any]]:
    """The name of a torch tensor's type, and its numbers as an array, bits of bfloat16 as uint16."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise InvalidInputError(f"tensor: got {type(tensor).__name__}, want a numpy array or a torch tensor")
    host = tensor.detach().cpu().contiguous()
    name = str(host.dtype).removeprefix("torch.")
    return name, (host.view(torch.uint16) if name == "bfloat16" else host).numpy()
