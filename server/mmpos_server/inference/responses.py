"""A response: the outputs that are wanted, in the message or in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos_server.inference.memory import Place
from mmpos_server.inference.tensors import to_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.inference.requests import Request

__all__ = ["Output", "put_response"]

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
    wanted: Mapping[str, Place | None] = dict.fromkeys(outputs) if request.outputs is None else request.outputs
    _check_names(list(wanted), outputs)
    held: list[tuple[str, Place, bytes]] = []
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
