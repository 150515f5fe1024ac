"""A module with the call of Megatron's rotary embedding, whose answer are exact angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from mmpos.errors import InvalidInputError
from mmpos.integrations.megatron.angles import Layout, rotary_pos_emb
from mmpos.positions.table import PositionTable
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import Positions
from mmpos.support.checks import one_of


class Group(Protocol):
    """What is asked of a torch.distributed.ProcessGroup."""

    def rank(self) -> int:
        """This process in the group."""

    def size(self) -> int:
        """Processes of the group."""


class MultimodalRotaryEmbedding(nn.Module):
    """Takes the place of a GPTModel's rotary_pos_emb of type "mrope", for any scheme and any rotary.

    It has no weights and no buffers, so checkpoints stay as they are.

    Args:
        rotary: frequencies, and how they are allotted to axes and channels.
        layout: "sbhd" for rows of one length, "thd" for packed sequences.
        cp_group: context-parallel ranks; None for one alone.
        mscale: as for ``rotary_pos_emb``.
        device: where to make angles; None is where the positions are.
    """

    def __init__(
        self,
        rotary: Rotary,
        layout: Layout = "sbhd",
        cp_group: Group | None = None,
        *,
        mscale: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.rotary, self.layout = rotary, one_of("layout", layout, ("sbhd", "thd"))
        self.cp_group, self.mscale, self.device = cp_group, mscale, device

    def forward(
        self, position_ids: Positions, mrope_section: Sequence[int] | None = None, cp_group: Group | None = None
    ) -> Tensor:
        """Angles for Megatron's attention.

        Args:
            position_ids: positions of the whole batch on every context-parallel rank: a table, its device form, or
                dense ids, (axes, batch, seq).
            mrope_section: pairs per axis, which rotary knows.
            cp_group: instead of the module's.

        Returns:
            "sbhd": (seq / C, batch, 1, rotary_dim), the rank's zig-zag blocks of every row; "thd": (tokens, 1, 1,
            rotary_dim) of all tokens, from which Megatron takes the rank's.

        Raises:
            InvalidInputError: other sections than those of rotary, or rows that are no multiple of 2C tokens.
        """
        mine = self.rotary.mrope_section
        if mrope_section is not None and mine is not None and tuple(mrope_section) != mine:
            raise InvalidInputError(f"mrope_section: got {list(mrope_section)}, want {list(mine)} as in rotary")
        group = self.cp_group if cp_group is None else cp_group
        rank, size = (0, 1) if group is None or self.layout == "thd" else (group.rank(), group.size())
        if isinstance(position_ids, PositionTable):  # cut before there are angles
            position_ids, rank, size = position_ids.shard(rank, size), 0, 1
        angles = rotary_pos_emb(position_ids, self.rotary, self.layout, mscale=self.mscale, device=self.device)
        return angles if size == 1 else _blocks(angles, rank, size)

    def extra_repr(self) -> str:
        """The rotary and the layout."""
        return f"{self.rotary!r}, layout={self.layout!r}"


def _blocks(angles: Tensor, rank: int, size: int) -> Tensor:
    """The blocks rank and 2·size − 1 − rank of 2·size along the first dimension."""
    block, rest = divmod(len(angles), 2 * size)
    if rest:
        raise InvalidInputError(f"position_ids: got rows of {len(angles)} tokens, want a multiple of {2 * size}")
    return torch.cat([angles.narrow(0, place * block, block) for place in (rank, 2 * size - 1 - rank)])
