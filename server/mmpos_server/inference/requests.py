"""A request: its head checked at once, its tensors read where they are needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError
from mmpos_server.inference import open_inference_pb2 as pb
from mmpos_server.inference.memory import Place, get_place
from mmpos_server.inference.parameters import Kind, get_parameters
from mmpos_server.inference.tensors import Spec, elements, from_bytes, from_contents
from mmpos_server.refusals import check

if TYPE_CHECKING:
    import numpy.typing as npt

    from mmpos_server.config import Limits
    from mmpos_server.profiles import Profile
    from mmpos_server.shared_memory import Regions

__all__ = ["Input", "Request", "get_request"]

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
    source: bytes | pb.InferTensorContents | Place

    def read(self) -> Any:
        """Its array, or the list of its elements if its type is BYTES."""
        name, source = self.spec.name, self.source
        if isinstance(source, pb.InferTensorContents):
            return from_contents(name, self.datatype, self.shape, source)
        data = source.read(name) if isinstance(source, Place) else source
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
    outputs: Mapping[str, Place | None] | None
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
    shared_bytes = sum(tensor.source.byte_size for tensor in given.values() if isinstance(tensor.source, Place))
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
    places = [get_place(f"inputs[{i}]", tensor.parameters, regions) for i, tensor in enumerate(message.inputs)]
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
        source: bytes | pb.InferTensorContents | Place = tensor.contents
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


def _outputs(message: pb.ModelInferRequest, names: Sequence[str], regions: Regions) -> dict[str, Place | None] | None:
    _check_count("outputs", len(message.outputs), names)
    found: dict[str, Place | None] = {}
    for i, output in enumerate(message.outputs):
        name = _spec(f"outputs[{i}]", output.name, {name: name for name in names}, found)
        found[name] = get_place(f"outputs[{i}]", output.parameters, regions)
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
