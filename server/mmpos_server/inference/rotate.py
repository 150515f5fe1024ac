"""Implement the model "rotate" of the Open Inference Protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import DENOMINATOR
from mmpos.rotary import Rotary
from mmpos.rpc.tensors import owned
from mmpos.support.checks import Array, one_of
from mmpos_server.inference.messages import Request, Spec, put_response
from mmpos_server.inference.models import always, scheme_of_profile
from mmpos_server.inference.parameters import Kind, loaded
from mmpos_server.limits import check, check_answer
from mmpos_server.position_service import is_small
from mmpos_server.rotary_service import RotaryService, check_head_dim, has_torch, require_torch

if TYPE_CHECKING:
    from torch import Tensor

    from mmpos_server.call import Call
    from mmpos_server.config import Limits, Profile
    from mmpos_server.inference import open_inference_pb2 as pb

__all__ = ["Rotate"]


class Rotate:
    """Model "rotate", which rotates q and k.

    Args:
        service: implementation of RotaryService.
        limits: limits for one request.
    """

    name = "rotate"
    parameters: Mapping[str, Kind] = {"layout": "string", "conjugate": "bool", "rotary": "string"}

    def __init__(self, service: RotaryService, limits: Limits) -> None:
        self._service, self._limits = service, limits

    @property
    def ready(self) -> bool:
        """Whether torch is installed."""
        return has_torch()

    def inputs(self, profile: Profile) -> Sequence[Spec]:
        """Return q, k, and the positions as ids or as a table."""
        ids = ("INT32", "INT64", "FP64")
        return [
            *self.outputs(profile),
            Spec(
                "position_ids",
                ids[::-1] if scheme_of_profile(profile).fractional else ids,
                (-1, -1),
                optional=True,
                ndim=(3,),
            ),
            Spec("table", ("INT64",), (-1, -1), optional=True),
            Spec("table_documents", ("INT64",), (4, -1), optional=True),
        ]

    def outputs(self, profile: Profile) -> Sequence[Spec]:
        """Return q, and k if the request contains it, each in its own type."""
        kinds = ("FP32", "FP16", "BF16")
        head_dim = -1 if profile.rotary is None else profile.rotary.head_dim
        return [Spec(name, kinds, (-1, -1, head_dim), optional=name == "k", ndim=(3, 4)) for name in ("q", "k")]

    def infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        """Rotate q and k; this thread rotates small tensors itself."""
        if is_small(call):
            self._infer(request, answer, call)
        else:
            call.run("rotary", self._infer, request, answer, call)

    def _infer(self, request: Request, answer: pb.ModelInferResponse, call: Call) -> None:
        require_torch()
        with call.stage("read"):
            values = request.parameters
            layout = values.get("layout")
            if layout is not None:
                one_of("layout", layout, ("thd", "bshd", "bhsd"))
            rotary = _rotary(values["rotary"]) if "rotary" in values else self._service.rotary(request.profile.name)
            q, k = (_tensor(request, name) for name in ("q", "k"))
            assert q is not None
            check_answer(sum(t.numel() * t.element_size() for t in (q, k) if t is not None), self._limits, call)
            positions = self._positions(request, q, layout)
        conjugate = values.get("conjugate", False)
        q, k = self._service.rotate_tensors(q, k, positions, rotary, call, layout=layout, conjugate=conjugate)
        with call.stage("write"):
            tensors = {"q": q} if k is None else {"q": q, "k": k}
            put_response(answer, request, {name: always(_array(tensor)) for name, tensor in tensors.items()})

    def _positions(self, request: Request, q: Tensor, layout: str | None) -> PositionTable | Tensor:
        ids, table, documents = (request.array(name) for name in ("position_ids", "table", "table_documents"))
        if (ids is None) == (table is None) or (table is None) != (documents is None):
            raise InvalidInputError(
                f"inputs: got {list(request.inputs)}, want position_ids, or table and table_documents"
            )
        if ids is not None:
            import torch

            check("tokens", ids.size, self._limits)
            return torch.from_numpy(owned(ids))
        assert table is not None
        assert documents is not None
        tokens = q.shape[0] if q.ndim == 3 else q.shape[0] * q.shape[2 if layout == "bhsd" else 1]
        check("tokens", tokens, self._limits)
        fractional = len(table) > DENOMINATOR and bool((table[DENOMINATOR] != 1).any())
        return PositionTable.from_arrays(table, documents, tokens, fractional=fractional, scheme="")


def _rotary(text: str) -> Rotary:
    """Parse the parameter ``rotary``."""
    values = loaded("rotary", text)
    if not isinstance(values, dict):
        raise InvalidInputError(f"parameters['rotary']: got {text[:100]!r}, want a JSON object from Rotary.to_dict")
    head_dim = values.get("head_dim")
    if isinstance(head_dim, int):
        check_head_dim(head_dim)
    try:
        return _rotary_of(json.dumps(values))
    except InvalidInputError as error:
        raise InvalidInputError(f"parameters['rotary']: {error}") from None


@lru_cache(maxsize=64)
def _rotary_of(text: str) -> Rotary:
    """Parse and cache a rotation: its frequencies take milliseconds to compute, and clients repeat their settings."""
    return Rotary.from_dict(json.loads(text))


def _tensor(request: Request, name: str) -> Tensor | None:
    """Return an input as a writable torch tensor."""
    array = request.array(name)
    if array is None:
        return None
    import torch

    tensor = torch.from_numpy(owned(array))
    return tensor.view(torch.bfloat16) if request.inputs[name].datatype == "BF16" else tensor


def _array(tensor: Tensor) -> Array:
    import torch

    host = tensor.cpu().contiguous()
    array: Array = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
    return array
