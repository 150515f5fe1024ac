"""ModelInfer requests and responses: tensors, parameters and shared memory, as arrays and values."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from google.protobuf import json_format

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rpc.positions import get_view
from mmpos.rpc.schemes import get_scheme
from mmpos.rpc.v1 import positions_pb2, scheme_pb2
from mmpos.rpc.views import View
from mmpos.schemes import Scheme
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.limits import check
from mmpos_server.shared_memory import Region, Regions

if TYPE_CHECKING:
    import numpy.typing as npt
    from google.protobuf.internal.containers import MessageMap

    from mmpos_server.config import Limits, Profile
    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.shared_memory import Regions

__all__ = [
    "DATATYPES",
    "Datatype",
    "Input",
    "Kind",
    "Output",
    "RegionRange",
    "Request",
    "Spec",
    "elements",
    "from_bytes",
    "from_contents",
    "get_parameters",
    "get_region_range",
    "get_request",
    "loaded",
    "put_response",
    "scheme_of",
    "to_bytes",
    "views_of",
]


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


MAX_TEXT = 2**20
"""Most characters of a JSON text: while it is parsed, nothing else happens in the process."""

MAX_DEPTH = 16
"""Most lists and objects inside each other: what reads and what quotes them works its way down by recursion."""
MAX_SCHEME = 2**12
"""Most characters of a scheme, which is read between two other calls."""

Kind = Literal["bool", "int64", "string"]

IGNORED = ("triton_enable_empty_final_response",)
"""A client's wish to be told of the last answer to a request, which it always is."""


def get_parameters(
    where: str, parameters: Mapping[str, pb.InferParameter], known: Mapping[str, Kind]
) -> dict[str, Any]:
    """The values of parameters, by name.

    Args:
        where: what errors call their map.
        parameters: as they came.
        known: kind of each that may come.

    Raises:
        UnsupportedError: one that is not known, since what it asks for would not be done.
        InvalidInputError: a value of another kind.
    """
    if len(parameters) > len(known) + len(IGNORED):  # counted first: looking at a million takes seconds
        raise UnsupportedError(f"{where}: got {len(parameters)} of them, want {' or '.join(known)}")
    unknown = set(parameters) - set(known) - set(IGNORED)
    if unknown:
        raise UnsupportedError(f"{where}: got {min(unknown)[:100]!r}, want {' or '.join(known)}")
    found = {}
    for name in known:
        if name in parameters:
            choice = parameters[name].WhichOneof("parameter_choice")
            if choice != f"{known[name]}_param":
                raise InvalidInputError(f"{where}[{name!r}]: got {choice or 'no value'}, want {known[name]}_param")
            found[name] = getattr(parameters[name], choice)
    return found


def loaded(name: str, text: str, most: int = MAX_TEXT) -> Any:
    """What a JSON text of so many characters says.

    Raises:
        InvalidInputError: it is none.
        LimitExceededError: it is too long.
    """
    if len(text) > most:
        raise LimitExceededError(f"parameters[{name!r}]: got {len(text)} characters, want at most {most}")
    try:
        value = json.loads(text)
        # What Python reads and JSON has not: infinities, of which no integer can be made, and half characters, which
        # no message and no status can hold.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want JSON ({error})") from None
    if _deeper(value, MAX_DEPTH):
        raise InvalidInputError(f"parameters[{name!r}]: got {text[:100]!r}, want at most {MAX_DEPTH} lists in lists")
    return value


def scheme_of(text: str) -> Scheme:
    """The scheme of a parameter: its name, or message Scheme as JSON."""
    if not text.lstrip().startswith("{"):
        return get_scheme("scheme", scheme_pb2.Scheme(name=text))
    message = _message("scheme", loaded("scheme", text, MAX_SCHEME), scheme_pb2.Scheme())
    return get_scheme("scheme", message)


def views_of(text: str, limits: Limits) -> list[View]:
    """The views of a parameter: a JSON list of messages View."""
    values = loaded("views", text)
    if not isinstance(values, list):
        raise InvalidInputError(f"parameters['views']: got {text[:100]!r}, want a JSON list of views")
    check("views", len(values), limits)
    return [
        get_view(f"views[{i}]", _message(f"views[{i}]", value, positions_pb2.View())) for i, value in enumerate(values)
    ]


def _deeper(value: Any, levels: int) -> bool:
    """Whether there are more than so many lists and objects inside each other."""
    found = [value] if isinstance(value, list | dict) else []
    for _ in range(levels):
        inner = chain.from_iterable(outer.values() if isinstance(outer, dict) else outer for outer in found)
        found = [value for value in inner if isinstance(value, list | dict)]
    return bool(found)


def _message(name: str, value: Any, message: Any) -> Any:
    try:
        return json_format.ParseDict(value, message)
    except (json_format.ParseError, AttributeError, TypeError, RecursionError) as error:
        kind = type(message).__name__
        raise InvalidInputError(f"{name}: got {str(value)[:100]}, want message {kind} as JSON ({error})") from None


_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_KNOWN: Mapping[str, Kind] = {_REGION: "string", _SIZE: "int64", _OFFSET: "int64"}


@dataclass(frozen=True)
class RegionRange:
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


def get_region_range(where: str, parameters: Mapping[str, pb.InferParameter], regions: Regions) -> RegionRange | None:
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
    return RegionRange(region, values[_REGION], offset, byte_size)


_MAX_AXES = 64
"""Of a shape that an error quotes; no tensor has as many."""


@dataclass(frozen=True)
class Input:
    """A tensor that came.

    Args:
        spec: what the model says of it.
        datatype: its type.
        shape: its extents.
        source: its bytes, its numbers one by one, or where it lies.
    """

    spec: Spec
    datatype: str
    shape: tuple[int, ...]
    source: bytes | pb.InferTensorContents | RegionRange

    def read(self) -> Any:
        """Its array, or the list of its elements if its type is BYTES."""
        name, source = self.spec.name, self.source
        if isinstance(source, pb.InferTensorContents):
            return from_contents(name, self.datatype, self.shape, source)
        data = source.read(name) if isinstance(source, RegionRange) else source
        if self.datatype == "BYTES":
            return elements(name, self.shape, data)
        return from_bytes(name, self.datatype, self.shape, data)


@dataclass(frozen=True)
class Request:
    """What a client asks of a model.

    Args:
        profile: its version.
        named: whether the client named it.
        parameters: values by name.
        inputs: tensors by name.
        outputs: names of those that are wanted, each with its place if it is to go to shared memory; None: all.
        shared_bytes: of what came in shared memory.
    """

    profile: Profile
    named: bool
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Input]
    outputs: Mapping[str, RegionRange | None] | None
    shared_bytes: int

    def wants(self, output: str) -> bool:
        """Whether this output is wanted."""
        return self.outputs is None or output in self.outputs

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """The array of an input; None if it did not come. It may read much: call it in a thread."""
        return self.inputs[name].read() if name in self.inputs else None

    def elements(self, name: str) -> list[bytes] | None:
        """The elements of an input of BYTES, likewise."""
        return self.inputs[name].read() if name in self.inputs else None


def get_request(
    message: pb.ModelInferRequest,
    profile: Profile,
    inputs: Sequence[Spec],
    outputs: Sequence[Spec],
    parameters: Mapping[str, Kind],
    regions: Regions,
    limits: Limits,
) -> Request:
    """The request of a message.

    Args:
        message: what came.
        profile: the version that it asks.
        inputs: what the model takes.
        outputs: what it gives.
        parameters: which ones it knows.
        regions: those that are registered.
        limits: most bytes in shared memory.

    Raises:
        InvalidInputError: a name that is not known, not there or there twice; a tensor without its numbers, with
            numbers twice, or of another type or shape.
        UnsupportedError: a parameter that is not known.
        LimitExceededError: too many bytes in shared memory.
    """
    given = _inputs(message, {spec.name: spec for spec in inputs}, regions)
    shared_bytes = sum(tensor.source.byte_size for tensor in given.values() if isinstance(tensor.source, RegionRange))
    check("shared_bytes", shared_bytes, limits)
    return Request(
        profile,
        bool(message.model_version),
        get_parameters("parameters", message.parameters, parameters),
        given,
        _outputs(message, [spec.name for spec in outputs], regions),
        shared_bytes,
    )


def _inputs(message: pb.ModelInferRequest, specs: Mapping[str, Spec], regions: Regions) -> dict[str, Input]:
    _check_count("inputs", len(message.inputs), specs)
    places = [get_region_range(f"inputs[{i}]", tensor.parameters, regions) for i, tensor in enumerate(message.inputs)]
    raw = iter(message.raw_input_contents)
    slots = sum(place is None for place in places)
    if message.raw_input_contents and len(message.raw_input_contents) != slots:
        got = len(message.raw_input_contents)
        raise InvalidInputError(
            f"raw_input_contents: got {got}, want {slots}, one for each input outside shared memory"
        )
    found: dict[str, Input] = {}
    for i, (tensor, place) in enumerate(zip(message.inputs, places, strict=True)):
        spec = _spec(f"inputs[{i}]", tensor.name, specs, found)
        if len(tensor.shape) > _MAX_AXES:
            raise InvalidInputError(f"{spec.name}.shape: got {len(tensor.shape)} axes, want {spec.shape}")
        shape = tuple(tensor.shape)
        spec.check(tensor.datatype, shape)
        source: bytes | pb.InferTensorContents | RegionRange = tensor.contents
        if place is not None or message.raw_input_contents:
            if tensor.HasField("contents"):
                other = "raw_input_contents" if place is None else "shared memory"
                raise InvalidInputError(f"{spec.name}: got contents and {other}, want one of them")
            source = next(raw) if place is None else place
        found[spec.name] = Input(spec, tensor.datatype, shape, source)
    for spec in specs.values():
        if not spec.optional and spec.name not in found:
            raise InvalidInputError(f"inputs: got none of name {spec.name!r}, want it")
    return found


def _outputs(
    message: pb.ModelInferRequest, names: Sequence[str], regions: Regions
) -> dict[str, RegionRange | None] | None:
    _check_count("outputs", len(message.outputs), names)
    found: dict[str, RegionRange | None] = {}
    for i, output in enumerate(message.outputs):
        name = _spec(f"outputs[{i}]", output.name, {name: name for name in names}, found)
        found[name] = get_region_range(f"outputs[{i}]", output.parameters, regions)
    return found or None


def _check_count(name: str, got: int, known: Collection[str]) -> None:
    """Refuse more tensors than there are names, before they are looked at."""
    if got > len(known):
        raise InvalidInputError(f"{name}: got {got} tensors, want at most {len(known)}")


def _spec(where: str, name: str, known: Mapping[str, Any], found: Mapping[str, object]) -> Any:
    """What is known under a name that comes once."""
    if name not in known:
        raise InvalidInputError(f"{where}.name: got {name[:100]!r}, want one of {', '.join(known)}")
    if name in found:
        raise InvalidInputError(f"{where}.name: got {name!r} again, want it once")
    return known[name]


Output = Callable[[], "tuple[str, npt.NDArray[Any]]"]
"""Makes an output: its type and its array."""


def put_response(message: pb.ModelInferResponse, request: Request, outputs: Mapping[str, Output]) -> None:
    """Make the wanted outputs and fill a message with them; call it in a thread if they are large.

    Those in shared memory come last: clients of one kind count all outputs to find the raw bytes of one, clients of
    the other kind only those outside shared memory, and so both find the same.

    Args:
        message: to be filled.
        request: says which are wanted, and where.
        outputs: those that there are.

    Raises:
        UnsupportedError: one was asked for that there is not.
        InvalidInputError: one is larger than its place in shared memory.
    """
    wanted: Mapping[str, RegionRange | None] = dict.fromkeys(outputs) if request.outputs is None else request.outputs
    _check_names(list(wanted), outputs)
    held: list[tuple[str, RegionRange, bytes]] = []
    for name, place in sorted(wanted.items(), key=lambda item: item[1] is not None):
        datatype, array = outputs[name]()
        data = to_bytes(datatype, array)
        tensor = message.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if place is None:
            message.raw_output_contents.append(data)
            continue
        if len(data) > place.byte_size:
            raise InvalidInputError(f"{name}: got shared_memory_byte_size {place.byte_size}, want >= {len(data)}")
        place.put(tensor.parameters, len(data))
        held.append((name, place, data))
    # Once nothing can be wrong any more with the others.
    for name, place, data in held:
        place.write(name, data)


def _check_names(wanted: Sequence[str], outputs: Mapping[str, Output]) -> None:
    for i, name in enumerate(wanted):
        if name not in outputs:
            raise UnsupportedError(
                f"outputs[{i}].name: got {name!r}, want one of {', '.join(outputs)} for this request"
            )
