"""Angles as Megatron calls rotary_pos_emb and TransformerEngine freqs: once per channel, sequence first."""

from __future__ import annotations

from math import isclose
from typing import Literal

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.rotary.apply import angles
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import DevicePositions, Positions
from mmpos.support.checks import finite, one_of

Layout = Literal["sbhd", "thd"]


def rotary_pos_emb(
    positions: Positions,
    rotary: Rotary,
    layout: Layout,
    *,
    mscale: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Angles of the tokens of a table, wrapped to [−π, π]: of the whole batch, or of the shard that comes.

    Megatron cuts packed angles itself and others not; docs/megatron.md says which of the two to give.

    >>> from mmpos import Grid, SegmentTable, Text, place
    >>> from mmpos.rotary import Rotary
    >>> positions = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
    >>> rotary_pos_emb(positions, Rotary(head_dim=16), "sbhd").shape
    torch.Size([8, 2, 1, 16])
    >>> rotary_pos_emb(positions, Rotary(head_dim=16), "thd").shape
    torch.Size([16, 1, 1, 16])

    Args:
        positions: DevicePositions, a PositionTable, or dense ids.
        rotary: frequencies, and how they are allotted; pairing "adjacent" is their rotary_interleaved.
        layout: "sbhd" where the documents are the rows of a batch, "thd" where they are packed into one.
        mscale: what the engine multiplies cos and sin by, its YaRN config's; the angles do not hold it.
        device: where to make them; None is where the positions are.

    Returns:
        a new tensor, (seq, batch, 1, rotary_dim) or (tokens, 1, 1, rotary_dim) float32, contiguous.

    Raises:
        InvalidInputError: rows of different lengths for "sbhd", or an mscale that is not that of rotary.
        UnsupportedError: a rotary with precision "hf".
    """
    one_of("layout", layout, ("sbhd", "thd"))
    if not isclose(finite("mscale", mscale), rotary.attention_factor, rel_tol=1e-6):
        raise InvalidInputError(f"mscale: got {mscale}, want {rotary.attention_factor}, the attention factor of rotary")
    if layout == "sbhd":
        _check_rows(positions)
    wrapped = angles(rotary, positions, device)
    if layout == "thd":
        wrapped = wrapped.transpose(0, 1).reshape(-1, 1, 1, rotary.rotary_dim)
    return wrapped.contiguous()


def _check_rows(positions: Positions) -> None:
    """Refuse rows of different lengths, for which there is no (seq, batch)."""
    if isinstance(positions, PositionTable):
        equal = bool((positions.lengths == positions.max_seqlen).all())
    elif isinstance(positions, DevicePositions):
        equal = positions.row_length > 0 or not positions.num_tokens
    else:
        equal = True
    if not equal:
        raise InvalidInputError("positions: got documents of unequal tokens, want one length; pad, or use layout 'thd'")
