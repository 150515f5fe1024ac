"""JSON form of the protocol: requests and answers from and to messages, tensors as numbers or as bytes behind it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from reprlib import repr as shown
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.messages import DATATYPES, contents_values, from_contents

if TYPE_CHECKING:
    from google.protobuf.internal.containers import MessageMap
    from google.protobuf.message import Message

__all__ = ["BinaryOutputs", "infer_request", "infer_response", "plain", "register_request"]

MAX_JSON = 2**21
"""Most bytes of JSON: parsing it blocks the process. The bytes of tensors behind it may be far more."""

MAX_LISTS = 2**16
"""Most lists and objects in JSON: an empty one takes thirty times the memory of its brackets."""

MAX_NUMBERS = 2**18
"""Most numbers of an answer as JSON, for the same reason as MAX_JSON."""

_INT64 = Field(ge=-(2**63), le=2**63 - 1)
_UINT64 = Field(ge=0, le=2**64 - 1)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


M = TypeVar("M", bound=_Model)


class _Input(_Model):
    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, _INT64]], FailFast()]
    parameters: dict[str, object] | None = None
    data: list[Any] | None = None


class _Output(_Model):
    name: str
    parameters: dict[str, object] | None = None


class _Infer(_Model):
    id: str | None = None
    # Clients repeat these from the path.
    model_name: str | None = None
    model_version: str | None = None
    parameters: dict[str, object] | None = None
    inputs: Annotated[list[_Input], FailFast()]
    outputs: Annotated[list[_Output], FailFast()] = []


class _Register(_Model):
    key: str
    offset: Annotated[int, _UINT64] = 0
    byte_size: Annotated[int, _UINT64]


class BinaryOutputs:
    """Choice of outputs that are wanted as bytes behind the JSON.

    Args:
        otherwise: choice for outputs without one of their own.
        named: choice for each output with one.
    """

    def __init__(self, otherwise: bool, named: Mapping[str, bool]) -> None:
        self._otherwise, self._named = otherwise, named

    def as_bytes(self, name: str) -> bool:
        """Check whether an output is wanted as bytes."""
        return self._named.get(name, self._otherwise)


def infer_request(
    raw: bytes, json_size: int | None, name: str, version: str
) -> tuple[pb.ModelInferRequest, BinaryOutputs]:
    """Parse a request; returns its message, and the choice of outputs as bytes.

    Args:
        raw: JSON, followed by bytes of tensors.
        json_size: bytes of the JSON; None is all of them.
        name: name of the model.
        version: version of the model.

    Raises:
        InvalidInputError: the JSON is invalid, or is followed by more or fewer bytes than it says.
        LimitExceededError: there is too much JSON.
    """
    size = len(raw) if json_size is None else json_size
    if size > len(raw):
        raise InvalidInputError(f"Inference-Header-Content-Length: got {size}, want <= {len(raw)}, as came")
    asked = _read(_Infer, raw[:size])
    message = pb.ModelInferRequest(model_name=name, model_version=version, id=asked.id or "")
    parameters = dict(asked.parameters or {})
    otherwise = _flag("parameters['binary_data_output']", parameters.pop("binary_data_output", False))
    _put_parameters("parameters", message.parameters, parameters)
    _put_inputs(message, asked.inputs, memoryview(raw)[size:], framed=json_size is not None)
    named: dict[str, bool] = {}
    for i, output in enumerate(asked.outputs):
        where = f"outputs[{i}].parameters"
        values = dict(output.parameters or {})
        if "binary_data" in values:
            named[output.name] = _flag(f"{where}['binary_data']", values.pop("binary_data"))
        _put_parameters(where, message.outputs.add(name=output.name).parameters, values)
    return message, BinaryOutputs(otherwise, named)


def infer_response(message: pb.ModelInferResponse, binary: BinaryOutputs) -> tuple[bytes, bytes]:
    """Format an answer; returns its JSON, and the bytes of tensors that follow it.

    Args:
        message: the answer.
        binary: choice of outputs as bytes.

    Raises:
        LimitExceededError: too many numbers are wanted as JSON.
        UnsupportedError: a tensor is wanted as JSON whose type has no JSON form.
        InvalidInputError: a number has no JSON form: nan or inf.
    """
    numbers = 0
    raw = iter(message.raw_output_contents)
    outputs, behind = [], []
    for tensor in message.outputs:
        output: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        outputs.append(output)
        if tensor.parameters:  # it lies in shared memory
            output["parameters"] = _parameters(tensor.parameters)
            continue
        data = next(raw)
        if binary.as_bytes(tensor.name):
            output["parameters"] = {"binary_data_size": len(data)}
            behind.append(data)
            continue
        dtype = DATATYPES[tensor.datatype].dtype
        if dtype is None or DATATYPES[tensor.datatype].contents is None:
            raise UnsupportedError(f"{tensor.name}: got {tensor.datatype} as JSON, want binary_data")
        numbers += len(data) // dtype.itemsize
        if numbers > MAX_NUMBERS:
            raise LimitExceededError(
                f"{tensor.name}: got {numbers} numbers as JSON, want at most {MAX_NUMBERS}, or binary_data"
            )
        output["data"] = np.frombuffer(data, dtype).tolist()
    head: dict[str, object] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        head["id"] = message.id
    try:
        return json.dumps({**head, "outputs": outputs}, allow_nan=False).encode(), b"".join(behind)
    except ValueError:
        raise InvalidInputError("outputs: got nan or inf, which JSON does not have, want binary_data") from None


def register_request(raw: bytes, name: str) -> pb.SystemSharedMemoryRegisterRequest:
    """Parse the request that registers a region.

    Raises:
        InvalidInputError: the JSON is invalid.
    """
    asked = _read(_Register, raw)
    return pb.SystemSharedMemoryRegisterRequest(
        name=name, key=asked.key, offset=asked.offset, byte_size=asked.byte_size
    )


def plain(message: Message) -> dict[str, Any]:
    """Convert a message to a JSON value: all fields, integers as numbers, enumeration values by name."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            nested = kind.fields_by_name["value"].message_type is not None
            fields[field.name] = {key: plain(inner) if nested else inner for key, inner in value.items()}
            continue
        values = value if field.is_repeated else [value]
        if kind is not None:
            values = [plain(inner) for inner in values]
        elif field.enum_type is not None:
            values = [field.enum_type.values_by_number[inner].name for inner in values]
        fields[field.name] = list(values) if field.is_repeated else values[0]
    return fields


def _read(kind: type[M], raw: bytes) -> M:
    if len(raw) > MAX_JSON:
        raise LimitExceededError(
            f"request: got {len(raw)} bytes of JSON, want at most {MAX_JSON}, and binary_data_size"
        )
    lists = raw.count(b"[") + raw.count(b"{")
    if lists > MAX_LISTS:
        raise LimitExceededError(f"request: got {lists} lists in JSON, want at most {MAX_LISTS}, or binary_data_size")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "json_invalid":
        raise InvalidInputError(f"request: got {raw[:100]!r}, want JSON ({first['msg']})")
    got = "none" if first["type"] == "missing" else shown(first["input"])
    want = {
        "missing": "a value",
        "extra_forbidden": "no field of this name",
        "model_type": "an object",
        "dict_type": "an object",
        "list_type": "a list",
    }.get(first["type"], first["msg"].removeprefix("Input should be ").removeprefix("a valid "))
    raise InvalidInputError(f"{where or 'request'}: got {got}, want {want}")


def _put_inputs(message: pb.ModelInferRequest, inputs: Sequence[_Input], behind: memoryview, *, framed: bool) -> None:
    """Fill the inputs of a message; numbers in JSON become raw bytes if any input is, since a message has one kind."""
    sizes = [
        _binary_size(f"inputs[{i}].parameters", tensor_json.parameters, framed) for i, tensor_json in enumerate(inputs)
    ]
    total = sum(size or 0 for size in sizes)
    if total != len(behind):
        raise InvalidInputError(f"binary_data_size: got {total} in all, want {len(behind)}, as come after the JSON")
    raw, at = any(size is not None for size in sizes), 0
    for i, (tensor_json, size) in enumerate(zip(inputs, sizes, strict=True)):
        tensor = message.inputs.add(name=tensor_json.name, datatype=tensor_json.datatype, shape=tensor_json.shape)
        values = {name: value for name, value in (tensor_json.parameters or {}).items() if name != "binary_data_size"}
        _put_parameters(f"inputs[{i}].parameters", tensor.parameters, values)
        if size is not None:
            if tensor_json.data is not None:
                raise InvalidInputError(f"inputs[{i}]: got data and binary_data_size, want one of them")
            message.raw_input_contents.append(bytes(behind[at : at + size]))
            at += size
        elif tensor_json.data is not None:
            contents = _contents(f"inputs[{i}].data", tensor_json)
            if raw:
                message.raw_input_contents.append(_raw(tensor_json, contents))
            else:
                tensor.contents.CopyFrom(contents)


def _binary_size(where: str, parameters: Mapping[str, object] | None, framed: bool) -> int | None:
    """Return the bytes that an input has behind the JSON; None for an input within it."""
    if parameters is None or "binary_data_size" not in parameters:
        return None
    size = parameters["binary_data_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidInputError(f"{where}['binary_data_size']: got {shown(size)}, want an integer >= 0")
    if not framed:
        raise InvalidInputError(
            f"{where}['binary_data_size']: got {size}, want header Inference-Header-Content-Length, too"
        )
    return size


def _contents(where: str, tensor: _Input) -> pb.InferTensorContents:
    """Return the numbers of a tensor in JSON; none for an unknown type, which is refused later."""
    contents = pb.InferTensorContents()
    kind = DATATYPES.get(tensor.datatype)
    if kind is None:
        return contents
    if kind.contents is None:
        raise InvalidInputError(f"{where}: got {tensor.datatype} as JSON, want bytes and binary_data_size")
    values = _flat(where, tensor.data or [])
    try:
        if tensor.datatype == "BYTES":
            contents.bytes_contents.extend(value.encode() for value in values)
        else:
            getattr(contents, kind.contents).extend(values)
    except (AttributeError, TypeError, ValueError):  # of text; of numbers, by their kind or their size
        raise InvalidInputError(f"{where}: got {shown(values)}, want what {tensor.datatype} holds") from None
    return contents


def _flat(where: str, values: list[Any]) -> list[Any]:
    """Flatten nested lists in row-major order."""
    while values and any(isinstance(value, list) for value in values):
        if not all(isinstance(value, list) for value in values):
            raise InvalidInputError(f"{where}: got {shown(values)}, want lists of one depth")
        values = list(chain.from_iterable(values))
    return values


def _raw(tensor: _Input, contents: pb.InferTensorContents) -> bytes:
    if tensor.datatype not in DATATYPES:
        return b""
    arguments = tensor.name, tensor.datatype, tuple(tensor.shape), contents
    if tensor.datatype == "BYTES":
        return b"".join(struct.pack("<I", len(element)) + element for element in contents_values(*arguments))
    values = from_contents(*arguments)
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _put_parameters(where: str, target: MessageMap[str, pb.InferParameter], values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            target[name].int64_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            raise InvalidInputError(
                f"{where}[{name[:100]!r}]: got {shown(value)}, want a text, a number of 64 bits, true or false"
            )


def _parameters(parameters: Mapping[str, pb.InferParameter]) -> dict[str, object]:
    return {name: getattr(value, str(value.WhichOneof("parameter_choice"))) for name, value in parameters.items()}


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInputError(f"{where}: got {shown(value)}, want true or false")
    return value
