"""Convert ModelInfer requests and responses: arrays from and to tensors in messages and in shared memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import Array
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.parameters import Kind, get_values
from mmpos_server.limits import check
from mmpos_server.shared_memory import Region, Regions

if TYPE_CHECKING:
    from mmpos_server.config import Limits, Profile

__all__ = ["DATATYPES", "Datatype", "Input", "Outputs", "Request", "Spec", "get_request", "put_response"]


class Datatype(NamedTuple):
    """Data type of a tensor.

    Args:
        dtype: numpy dtype; None for BYTES, whose elements vary in size; uint16 for the bits of BF16.
        contents: field of InferTensorContents; None for types that are only sent as raw bytes.
        config: value in ModelConfig.
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
"""Tensor types of all models, by their names in the protocol."""

_NAMES = {kind.dtype.name: name for name, kind in DATATYPES.items() if kind.dtype is not None}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Spec:
    """Input or output tensor of a model.

    Args:
        name: name of the tensor.
        datatypes: names of the accepted types; metadata lists the first one.
        shape: shape in metadata; -1 means any size.
        optional: whether an input may be omitted.
        ndim: further numbers of axes that are accepted, with any sizes.
        reported: whether metadata lists the tensor; False for an output that exists only for other schemes.
    """

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False
    ndim: tuple[int, ...] = ()
    reported: bool = True

    def check(self, datatype: str, shape: tuple[int, ...]) -> None:
        """Check the type and shape of a tensor.

        Raises:
            InvalidInputError: the type or the shape is not accepted.
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
        # numpy limits the product of the nonempty axes to less than 2**63 bytes.
        if min(shape) < 0 or math.prod(size or 1 for size in shape) >= 2**60:
            raise InvalidInputError(f"{self.name}.shape: got {shape}, want a shape that an array can have")


_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_RANGE: Mapping[str, Kind] = {_REGION: "string", _SIZE: "int64", _OFFSET: "int64"}


class _Range(NamedTuple):
    """Range of bytes in a registered region; the offset is counted from the start of the region."""

    region: Region
    name: str
    offset: int
    byte_size: int


def _range(where: str, parameters: Mapping[str, pb.InferParameter], regions: Regions) -> _Range | None:
    """Return the range of shared memory that a tensor's parameters name, or None for a tensor in the message."""
    values = get_values(f"{where}.parameters", parameters, _RANGE)
    if not values:
        return None
    for name in (_REGION, _SIZE):
        if name not in values:
            raise InvalidInputError(f"{where}.parameters: {', '.join(values)} requires {name}")
    region = regions.get(f"{where}.parameters[{_REGION!r}]", values[_REGION])
    offset, byte_size = values.get(_OFFSET, 0), values[_SIZE]
    region.within(where, offset, byte_size)
    return _Range(region, values[_REGION], offset, byte_size)


_MAX_AXES = 64
"""Maximum number of axes in a shape that an error quotes; every tensor has fewer axes."""


@dataclass(frozen=True)
class Input:
    """Input tensor of a request.

    Args:
        name: name of the tensor.
        datatype: name of the type.
        shape: shape of the tensor, which has been checked.
        source: raw bytes, numbers in the message, or a range of shared memory.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    source: bytes | pb.InferTensorContents | _Range

    def array(self) -> Array:
        """Return the array for a tensor of numbers: a view of raw bytes, or a writable copy of shared memory.

        Raises:
            InvalidInputError: the bytes or numbers do not fit the type and shape, or the region has shrunk.
        """
        dtype = DATATYPES[self.datatype].dtype
        assert dtype is not None
        native = dtype.newbyteorder("=")
        if isinstance(self.source, pb.InferTensorContents):
            values = self._contents(self.source)
            try:
                return np.array(values, native).reshape(self.shape)
            except OverflowError:
                raise InvalidInputError(
                    f"{self.name}.contents: got {max(values)}, want a value that fits {self.datatype}"
                ) from None
        data, size = self._raw(self.source), math.prod(self.shape) * dtype.itemsize
        if len(data) != size:
            raise InvalidInputError(
                f"{self.name}: got {len(data)} bytes, want {size} for {self.datatype} of shape {self.shape}"
            )
        return np.frombuffer(data, dtype).reshape(self.shape).astype(native, copy=False)

    def elements(self) -> list[bytes]:
        """Return the elements of a BYTES tensor; in raw bytes, a four-byte length precedes each element.

        Raises:
            InvalidInputError: the number of elements does not match the shape, or an element is cut off.
        """
        if isinstance(self.source, pb.InferTensorContents):
            return self._contents(self.source)
        data = self._raw(self.source)
        values: list[bytes] = []
        count, at = math.prod(self.shape), 0
        while at < len(data) and len(values) < count:
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(data, at)[0] if begin <= len(data) else begin
            if end > len(data):
                raise InvalidInputError(
                    f"{self.name}: got {len(data)} bytes, want at least {end} for element {len(values)}"
                )
            values.append(bytes(data[begin:end]))
            at = end
        if len(values) != count or at != len(data):
            raise InvalidInputError(
                f"{self.name}: got {len(values)} elements in {at} of {len(data)} bytes, "
                f"want {count} for shape {self.shape}"
            )
        return values

    def _raw(self, source: bytes | _Range) -> bytes | memoryview:
        if isinstance(source, bytes):
            return source
        return source.region.read(self.name, source.offset, source.byte_size).data

    def _contents(self, contents: pb.InferTensorContents) -> list[Any]:
        """Return the numbers of a message, or its elements of BYTES."""
        known = DATATYPES[self.datatype].contents
        for field, _ in contents.ListFields():
            if field.name != known:
                raise InvalidInputError(f"{self.name}.contents: got {field.name}, want {known or 'raw bytes'}")
        values = list(getattr(contents, known)) if known else []
        count = math.prod(self.shape)
        if len(values) != count:
            raise InvalidInputError(f"{self.name}.contents: got {len(values)} elements, want {count} for {self.shape}")
        return values


@dataclass(frozen=True)
class Request:
    """Inference request that has been checked; its tensors are read on demand.

    Args:
        profile: version of the model.
        named: whether the client named the version.
        parameters: parameter values by name.
        inputs: input tensors by name.
        outputs: requested outputs by name, each with its range of shared memory or None; None means all outputs.
        shared_bytes: number of bytes of the inputs in shared memory.
    """

    profile: Profile
    named: bool
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Input]
    outputs: Mapping[str, _Range | None] | None
    shared_bytes: int

    def wants(self, output: str) -> bool:
        """Return whether the client requests an output."""
        return self.outputs is None or output in self.outputs

    def array(self, name: str) -> Array | None:
        """Return the array of an input, or None if the input is omitted."""
        return self.inputs[name].array() if name in self.inputs else None


def get_request(
    message: pb.ModelInferRequest,
    profile: Profile,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    parameters: Mapping[str, Kind],
    regions: Regions,
    limits: Limits,
) -> Request:
    """Check a message and return the request in it.

    Args:
        message: the client's message.
        profile: version of the model.
        inputs: input tensors of the model.
        outputs: output tensors of the model.
        parameters: parameters of the model, with their kinds.
        regions: registered regions.
        limits: limits for one request.

    Raises:
        InvalidInputError: a name is unknown, missing or repeated; a tensor has no data, has data twice, or has a wrong
            type or shape.
        UnsupportedError: a parameter is unknown.
        LimitExceededError: the inputs in shared memory have too many bytes.
    """
    tensors = _inputs(message, inputs, regions)
    shared_bytes = sum(tensor.source.byte_size for tensor in tensors.values() if isinstance(tensor.source, _Range))
    check("shared_bytes", shared_bytes, limits)
    values = get_values("parameters", message.parameters, parameters)
    wanted = {
        spec.name: _range(f"outputs[{i}]", message.outputs[i].parameters, regions)
        for i, spec in enumerate(_specs("outputs", message.outputs, outputs))
    }
    return Request(profile, bool(message.model_version), values, tensors, wanted or None, shared_bytes)


def _inputs(message: pb.ModelInferRequest, specs: Sequence[Spec], regions: Regions) -> dict[str, Input]:
    named = _specs("inputs", message.inputs, specs)
    ranges = [_range(f"inputs[{i}]", tensor.parameters, regions) for i, tensor in enumerate(message.inputs)]
    raw, slots = message.raw_input_contents, ranges.count(None)
    if raw and len(raw) != slots:
        raise InvalidInputError(
            f"raw_input_contents: got {len(raw)}, want {slots}, one for each input outside shared memory"
        )
    contents = iter(raw)
    tensors: dict[str, Input] = {}
    for tensor, spec, shared in zip(message.inputs, named, ranges, strict=True):
        if len(tensor.shape) > _MAX_AXES:
            raise InvalidInputError(f"{spec.name}.shape: got {len(tensor.shape)} axes, want {spec.shape}")
        shape = tuple(tensor.shape)
        spec.check(tensor.datatype, shape)
        source: bytes | pb.InferTensorContents | _Range = tensor.contents
        if shared is not None or raw:
            if tensor.HasField("contents"):
                other = "raw_input_contents" if shared is None else "shared memory"
                raise InvalidInputError(f"{spec.name}: contents cannot be combined with {other}")
            source = next(contents) if shared is None else shared
        tensors[spec.name] = Input(spec.name, tensor.datatype, shape, source)
    for spec in specs:
        if not spec.optional and spec.name not in tensors:
            raise InvalidInputError(f"missing input tensor {spec.name!r}")
    return tensors


class _Named(Protocol):
    name: str


def _specs(where: str, tensors: Sequence[_Named], specs: Sequence[Spec]) -> list[Spec]:
    """Return the specification of each tensor in a message; refuse unknown and repeated names."""
    if len(tensors) > len(specs):
        raise InvalidInputError(f"{where}: got {len(tensors)} tensors, want at most {len(specs)}")
    unused = {spec.name: spec for spec in specs}
    known, matched = list(unused), list[Spec]()
    for i, tensor in enumerate(tensors):
        if tensor.name not in known:
            raise InvalidInputError(f"{where}[{i}].name: got {tensor.name[:100]!r}, want one of {', '.join(known)}")
        if tensor.name not in unused:
            raise InvalidInputError(f"{where}[{i}].name: got {tensor.name!r} again, want it once")
        matched.append(unused.pop(tensor.name))
    return matched


Outputs = Mapping[str, Callable[[], Array]]
"""Functions that compute the outputs of a model; uint16 arrays contain the bits of BF16."""


def put_response(message: pb.ModelInferResponse, request: Request, outputs: Outputs) -> None:
    """Compute the requested outputs and put them into a message.

    Outputs in shared memory come last. Some clients locate raw bytes by counting all outputs, others by counting only
    the outputs outside shared memory; in this order, both get the same result.

    Args:
        message: message to fill.
        request: names the requested outputs and their ranges of shared memory.
        outputs: functions that compute the outputs.

    Raises:
        UnsupportedError: a requested output does not exist.
        InvalidInputError: an output is larger than its range of shared memory.
    """
    wanted: Mapping[str, _Range | None] = dict.fromkeys(outputs) if request.outputs is None else request.outputs
    for i, name in enumerate(wanted):
        if name not in outputs:
            raise UnsupportedError(
                f"outputs[{i}].name: got {name!r}, want one of {', '.join(outputs)} for this request"
            )
    in_regions: list[tuple[str, _Range, Array]] = []
    for name, shared in sorted(wanted.items(), key=lambda item: item[1] is not None):
        array = outputs[name]()
        datatype = _NAMES[array.dtype.name]
        array = np.ascontiguousarray(array, DATATYPES[datatype].dtype)
        tensor = message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if shared is None:
            message.raw_output_contents.append(array.tobytes())
            continue
        if array.nbytes > shared.byte_size:
            raise InvalidInputError(f"{name}: got shared_memory_byte_size {shared.byte_size}, want >= {array.nbytes}")
        tensor.parameters[_REGION].string_param = shared.name
        tensor.parameters[_SIZE].int64_param = array.nbytes
        tensor.parameters[_OFFSET].int64_param = shared.offset
        in_regions.append((name, shared, array))
    for name, shared, array in in_regions:  # only after all outputs are known to fit
        shared.region.write(name, shared.offset, array.reshape(-1).view(np.uint8).data)
