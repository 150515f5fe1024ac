"""The calls that rotate: cos and sin, angles, and q and k as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmpos.client.calls import Call, serialised, trusting
from mmpos.client.options import Options
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rpc.v1 import rotary_pb2 as pb
from mmpos.support.checks import boolean, one_of
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import torch

    from mmpos.positions.table import PositionTable
    from mmpos.rotary import Rotary
    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos.rpc.tensors import Memory

_TABLES = {
    "pairs": pb.COS_SIN_LAYOUT_PAIRS,
    "transformers": pb.COS_SIN_LAYOUT_TRANSFORMERS,
    "torchtitan": pb.COS_SIN_LAYOUT_TORCHTITAN,
}
_LAYOUTS = {
    None: pb.ROTATE_LAYOUT_UNSPECIFIED,
    "thd": pb.ROTATE_LAYOUT_THD,
    "bshd": pb.ROTATE_LAYOUT_BSHD,
    "bhsd": pb.ROTATE_LAYOUT_BHSD,
}
_COS_SIN = "/mmpos.rpc.v1.RotaryService/CosSin"


def cos_sin(
    options: Options, rotary: Rotary | None, positions: PositionTable | torch.Tensor, layout: TableLayout = "pairs"
) -> Call[tuple[torch.Tensor, torch.Tensor] | torch.Tensor]:
    """cos and sin of all tokens, as ``mmpos.rotary.cos_sin`` gives them.

    Args:
        rotary: the rotation; None: that of the profile.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        layout: "pairs", "transformers" or "torchtitan", as for ``mmpos.rotary.cos_sin``.

    Returns:
        New tensors, float32 or complex64, where the positions are.

    Raises:
        MmposError: what ``mmpos.rotary.cos_sin`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    one_of("layout", layout, tuple(_TABLES))
    request = pb.CosSinRequest(layout=_TABLES[layout])
    _fill(request, options, rotary, positions)

    def decode(answer: pb.CosSinResponse) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        if layout == "torchtitan":
            return _tensor("cache", answer.cache, positions)
        return _tensor("cos", answer.cos, positions), _tensor("sin", answer.sin, positions)

    return Call(_COS_SIN, serialised(request), pb.CosSinResponse, decode)


def angles(options: Options, rotary: Rotary | None, positions: PositionTable | torch.Tensor) -> Call[torch.Tensor]:
    """Exact angles wrapped to [−π, π], as ``mmpos.rotary.angles`` gives them.

    Args:
        rotary: the rotation; None: that of the profile.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).

    Returns:
        A new float32 tensor where the positions are.

    Raises:
        MmposError: what ``mmpos.rotary.angles`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    request = pb.CosSinRequest(layout=pb.COS_SIN_LAYOUT_ANGLES)
    _fill(request, options, rotary, positions)
    response = pb.CosSinResponse
    return Call(_COS_SIN, serialised(request), response, lambda answer: _tensor("cache", answer.cache, positions))


def apply_rotary(
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor | None,
    positions: PositionTable | torch.Tensor,
    rotary: Rotary | None,
    *,
    layout: Layout | None = None,
    conjugate: bool = False,
) -> Call[tuple[torch.Tensor, torch.Tensor | None]]:
    """q and k rotated, as ``mmpos.rotary.apply_rotary`` does; both travel, there and back.

    Args:
        q: queries, as for ``apply_rotary``; without gradients.
        k: keys, or None.
        positions: a PositionTable, or ids of shape (axes, tokens) or (axes, batch, seq).
        rotary: the rotation; None: that of the profile.
        layout: "thd", "bshd" or "bhsd"; None is thd for three dimensions and bshd for four.
        conjugate: rotate by the negative angles.

    Returns:
        New tensors on the device of q.

    Raises:
        MmposError: what ``apply_rotary`` raises; LimitExceededError also for a limit of the server.
        UnsupportedError: q or k requires gradients.
        ServiceError: no answer.
    """
    from mmpos.rpc.tensors import aligned, put_tensor

    if layout is not None:
        one_of("layout", layout, ("thd", "bshd", "bhsd"))
    _check_tensors(q, k)
    request = pb.RotateRequest(layout=_LAYOUTS[layout], conjugate=boolean("conjugate", conjugate))
    _fill(request, options, rotary, positions)
    memory = options.memory
    put_tensor(request.q, q, memory)
    if k is not None:
        put_tensor(request.k, k, memory)
    if memory is not None:
        memory.answer(request, sum(aligned(x.nbytes) for x in (q, k) if x is not None))

    def decode(answer: pb.RotateResponse) -> tuple[torch.Tensor, torch.Tensor | None]:
        turned = _tensor("q", answer.q, q, memory)
        return turned, _tensor("k", answer.k, q, memory) if answer.HasField("k") else None

    return Call("/mmpos.rpc.v1.RotaryService/Rotate", serialised(request), pb.RotateResponse, decode)


def _fill(request: Any, options: Options, rotary: Any, positions: Any) -> None:
    from mmpos.rotary import Rotary
    from mmpos.rpc.rotary import put_rotary, put_rotary_positions

    if not isinstance(rotary, Rotary | None):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary or None")
    if rotary is not None:
        put_rotary(request.rotary.rotary, rotary)
    elif options.profile is not None:
        request.rotary.profile = options.profile
    put_rotary_positions(request.positions, positions)


def _check_tensors(q: Any, k: Any) -> None:
    """What a server cannot see."""
    with needed_for("rotations", extra="all"):
        import torch

    from mmpos.rotary.reference import FLOATS

    for name, x in (("q", q), ("k", k)):
        if x is None and name == "k":
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in FLOATS:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidInputError(f"{name}: got {got}, want a tensor of float32, bfloat16 or float16")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(f"{name}: got a tensor that requires gradients, want it detached: none come back")
    if k is not None and k.device != q.device:
        raise InvalidInputError(f"k: got a tensor on {k.device}, want {q.device} as q")


def _tensor(name: str, message: Any, like: Any, memory: Memory | None = None) -> torch.Tensor:
    """The tensor of an answer, where the caller's are."""
    import torch

    from mmpos.rpc.tensors import get_torch

    with trusting():
        found = get_torch(name, message, memory)
    return found.to(like.device) if isinstance(like, torch.Tensor) else found
