"""What a model of this protocol is to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mmpos.schemes import Scheme, get_scheme
from mmpos_server.inference.tensors import Spec

if TYPE_CHECKING:
    from mmpos_server.call import Call
    from mmpos_server.inference import open_inference_pb2 as pb
    from mmpos_server.inference.parameters import Kind
    from mmpos_server.inference.requests import Request
    from mmpos_server.profiles import Profile

__all__ = ["Model", "position_outputs", "scheme_of_profile"]


class Model(Protocol):
    """A model; its versions are the profiles of the server."""

    name: str
    """What requests call it."""
    parameters: Mapping[str, Kind]
    """Values that requests may have beside the tensors."""

    @property
    def ready(self) -> bool:
        """Whether what it needs is installed."""

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """Tensors that a version takes."""

    def outputs(self, profile: Profile) -> Sequence[Spec]:
        """Tensors that a version gives."""

    async def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Fill the outputs of an answer; what it raises becomes the status."""


def scheme_of_profile(profile: Profile) -> Scheme:
    """The scheme that a version places by."""
    scheme = profile.builder.scheme
    return get_scheme(scheme) if isinstance(scheme, str) else scheme


def position_outputs(profile: Profile) -> list[Spec]:
    """The outputs that tell positions, as they are where a request names no other scheme."""
    scheme = scheme_of_profile(profile)
    return [
        Spec("position_ids", ("FP64" if scheme.fractional else "INT32",), (scheme.axes, -1)),
        Spec("next_positions", ("INT64",), (-1,), told=scheme.resumable),
        Spec("deltas", ("INT64",), (-1,), told=scheme.resumable),
        Spec("cu_seqlens", ("INT32",), (-1,)),
        Spec("table", ("INT64",), (5 + 4 * scheme.axes, -1)),
        Spec("table_documents", ("INT64",), (4, -1)),
    ]
