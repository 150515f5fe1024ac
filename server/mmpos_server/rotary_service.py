"""Implement RotaryService: compute cos and sin and rotate a request's tensors, on an accelerator if available."""

from __future__ import annotations

import math
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.rpc.rotary import get_rotary, get_rotary_positions
from mmpos.rpc.tensors import enum, get_torch, put_tensor, required
from mmpos.rpc.v1 import rotary_pb2 as pb
from mmpos.support.extras import needed_for
from mmpos_server.config import Limits, Profiles
from mmpos_server.limits import check, check_answer
from mmpos_server.plain import SMALL_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from mmpos.rotary.apply import Layout, TableLayout
    from mmpos_server.call import Call

__all__ = ["RotaryService", "device", "unserved"]

MAX_HEAD_DIM = 1024
"""Largest head_dim, which is limited because frequencies are computed pair by pair in exact arithmetic."""

_TABLES: dict[int, TableLayout | None] = {
    pb.COS_SIN_LAYOUT_UNSPECIFIED: "pairs",
    pb.COS_SIN_LAYOUT_PAIRS: "pairs",
    pb.COS_SIN_LAYOUT_TRANSFORMERS: "transformers",
    pb.COS_SIN_LAYOUT_TORCHTITAN: "torchtitan",
    pb.COS_SIN_LAYOUT_ANGLES: None,
}
_LAYOUTS: dict[int, Layout | None] = {
    pb.ROTATE_LAYOUT_UNSPECIFIED: None,
    pb.ROTATE_LAYOUT_THD: "thd",
    pb.ROTATE_LAYOUT_BSHD: "bshd",
    pb.ROTATE_LAYOUT_BHSD: "bhsd",
}


class RotaryService:
    """Implementation of RotaryService; its module ``device`` imports torch before the first call.

    Args:
        profiles: settings for the models.
        limits: limits for one request.
    """

    def __init__(self, profiles: Profiles, limits: Limits) -> None:
        self._profiles, self._limits = profiles, limits

    async def cos_sin(self, message: pb.CosSinRequest, answer: pb.CosSinResponse, call: Call) -> None:
        """Answer CosSin with cos and sin of every token."""
        await call.run("work", self._cos_sin, message, answer, call)

    async def rotate(self, message: pb.RotateRequest, answer: pb.RotateResponse, call: Call) -> None:
        """Answer Rotate with the rotated q and k; large ones are rotated in a thread."""
        if call.request_bytes <= SMALL_BYTES:
            self._rotate(message, answer, call)
        else:
            await call.run("work", self._rotate, message, answer, call)

    def _cos_sin(self, message: pb.CosSinRequest, answer: pb.CosSinResponse, call: Call) -> None:
        began = perf_counter()
        rotary = self._rotary(message.rotary)
        positions, tokens = self._positions(required("", message, "positions"), call)
        layout = enum("", message, "layout", _TABLES)
        check_answer(8.0 * tokens * rotary.rotary_dim * (rotary.own_heads or 1), self._limits, call)
        call.staged("read", began)
        call.checkpoint()
        began = perf_counter()
        from mmpos.rotary import angles, cos_sin

        result = angles(rotary, positions) if layout is None else cos_sin(rotary, positions, layout)
        call.staged("rotate", began)
        call.checkpoint()
        began = perf_counter()
        if isinstance(result, tuple):
            put_tensor(answer.cos, result[0], call.beside)
            put_tensor(answer.sin, result[1], call.beside)
        else:
            put_tensor(answer.cache, result, call.beside)
        call.staged("write", began)

    def _rotate(self, message: pb.RotateRequest, answer: pb.RotateResponse, call: Call) -> None:
        began = perf_counter()
        rotary = self._rotary(message.rotary)
        positions, _ = self._positions(required("", message, "positions"), call)
        layout = enum("", message, "layout", _LAYOUTS)
        check_answer(sum(len(call.beside.data(x)) for x in (message.q, message.k)), self._limits, call)
        q = get_torch("q", required("", message, "q"), call.beside)
        k = get_torch("k", message.k, call.beside) if message.HasField("k") else None
        call.staged("read", began)
        call.checkpoint()
        began = perf_counter()
        from mmpos.rotary import apply_rotary

        target = device()
        q, k = q.to(target), None if k is None else k.to(target)
        apply_rotary(q, k, positions, rotary, layout=layout, inplace=True, conjugate=message.conjugate, validate=True)
        call.staged("rotate", began)
        call.checkpoint()
        began = perf_counter()
        put_tensor(answer.q, q, call.beside)
        if k is not None:
            put_tensor(answer.k, k, call.beside)
        call.staged("write", began)

    def _rotary(self, message: pb.RotarySettings) -> Rotary:
        if message.WhichOneof("settings") == "rotary":
            if message.rotary.head_dim > MAX_HEAD_DIM:
                raise LimitExceededError(f"rotary.head_dim: got {message.rotary.head_dim}, want at most {MAX_HEAD_DIM}")
            message.rotary.DiscardUnknownFields()  # unknown fields may have any size, and the cache would keep them
            return _parsed(message.rotary.SerializeToString(deterministic=True))
        profile = self._profiles.get(message.profile if message.HasField("profile") else None)
        if profile.rotary is None:
            raise InvalidInputError(f"rotary: the request and its profile {profile.name!r} have no rotation")
        return profile.rotary

    def _positions(self, message: pb.RotaryPositions, call: Call) -> tuple[PositionTable | Tensor, int]:
        positions = get_rotary_positions("positions", message, call.beside)
        if isinstance(positions, PositionTable):
            check("tokens", positions.num_tokens, self._limits)
            return positions, positions.num_tokens
        check("tokens", positions.numel(), self._limits)
        return positions, math.prod(positions.shape[1:])


@lru_cache(maxsize=64)
def _parsed(message: bytes) -> Rotary:
    """Parse and cache a rotation: its frequencies take milliseconds to compute, and clients repeat their settings."""
    return get_rotary("rotary", pb.Rotary.FromString(message))


@lru_cache(maxsize=1)
def device() -> str:
    """Import torch and return the device for rotations, "cuda" or "cpu".

    Raises:
        ImportError: torch is not installed; the message names the pip command.
    """
    with needed_for("--rotations", extra="all"):
        import torch

    import mmpos.rotary.apply  # noqa: F401  (with the kernels)

    return "cuda" if torch.cuda.is_available() else "cpu"


async def unserved(_: object, __: object, ___: object) -> None:
    """Refuse a rotation on a server without rotations.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError("rotary: this server serves no rotations; start it with --rotations")
