"""Positions and rotations for Megatron and TransformerEngine: angles in their layout, one table for all ranks.

Shapes used throughout:

    angles   (seq, batch, 1, rotary_dim) float32 "sbhd", or (tokens, 1, 1, rotary_dim) "thd"
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import Literal, Protocol

import numpy as np

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.support.checks import IntArray, finite, integer, one_of
from mmpos.support.extras import needed_for

with needed_for("mmpos.integrations.megatron", extra="all"):
    import torch
    from torch import Tensor, nn
    from torch import distributed as dist

    from mmpos.rotary.apply import angles
    from mmpos.rotary.config import Rotary
    from mmpos.rotary.device import DevicePositions, Positions

__all__ = ["MultimodalRotaryEmbedding", "broadcast_table", "rotary_pos_emb"]

Layout = Literal["sbhd", "thd"]


def rotary_pos_emb(
    positions: Positions,
    rotary: Rotary,
    layout: Layout,
    *,
    mscale: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Compute the angles of the tokens of a table, wrapped to [−π, π]: of a whole batch, or of a shard.

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
        mscale: factor by which the engine multiplies cos and sin (of its YaRN config); not part of the angles.
        device: device of the angles; None is that of the positions.

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


class Group(Protocol):
    """Part of torch.distributed.ProcessGroup that is used here."""

    def rank(self) -> int:
        """Return the number of this process in the group."""

    def size(self) -> int:
        """Return the number of processes in the group."""


class MultimodalRotaryEmbedding(nn.Module):
    """Module in the place of a GPTModel's rotary_pos_emb of type "mrope", for any scheme and any rotary.

    It has no weights and no buffers, so checkpoints stay as they are.

    Args:
        rotary: frequencies, and how they are allotted to axes and channels.
        layout: "sbhd" for rows of one length, "thd" for packed sequences.
        cp_group: context-parallel ranks; None for one alone.
        mscale: as for ``rotary_pos_emb``.
        device: device of the angles; None is that of the positions.
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
        """Compute angles for Megatron's attention.

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
        section = self.rotary.mrope_section
        if mrope_section is not None and section is not None and tuple(mrope_section) != section:
            raise InvalidInputError(f"mrope_section: got {list(mrope_section)}, want {list(section)} as in rotary")
        group = self.cp_group if cp_group is None else cp_group
        rank, size = (0, 1) if group is None or self.layout == "thd" else (group.rank(), group.size())
        if isinstance(position_ids, PositionTable):  # cut before there are angles
            position_ids, rank, size = position_ids.shard(rank, size), 0, 1
        angles = rotary_pos_emb(position_ids, self.rotary, self.layout, mscale=self.mscale, device=self.device)
        return angles if size == 1 else _blocks(angles, rank, size)

    def extra_repr(self) -> str:
        """Describe the rotary and the layout."""
        return f"{self.rotary!r}, layout={self.layout!r}"


def _blocks(angles: Tensor, rank: int, size: int) -> Tensor:
    """Cut out the blocks rank and 2·size − 1 − rank of 2·size along the first dimension."""
    block, rest = divmod(len(angles), 2 * size)
    if rest:
        raise InvalidInputError(f"position_ids: got rows of {len(angles)} tokens, want a multiple of {2 * size}")
    return torch.cat([angles.narrow(0, index * block, block) for index in (rank, 2 * size - 1 - rank)])


_HEADER = 6
"""Rows, segments, documents, tokens, fractional, bytes of the scheme's name; no rows where there is no table."""


def broadcast_table(
    positions: PositionTable | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> PositionTable:
    """Broadcast the table of one rank to every rank of a group; its size may differ from call to call.

    Two broadcasts of int64: the sizes, then the table itself. Nothing is pickled, and ids are not expanded.

    Args:
        positions: the table on rank src; None elsewhere.
        src: global rank of the sender, as for torch.distributed.broadcast.
        group: ranks that receive it, all of which make this call; None is all ranks.
        device: device on which the group communicates; None is the current CUDA device under nccl, else the host.

    Returns:
        on rank src the table that came, elsewhere an equal one on the host. Under nccl this waits for the device.

    Raises:
        InvalidInputError: on all ranks if src has no table; on this one if it or src is not in the group.
    """
    _check_ranks(src, group)
    if device is None:
        nccl = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    here = dist.get_rank() == src
    sizes, body = _packed(positions) if here else (np.zeros(_HEADER, np.int64), None)
    rows, segments, documents, tokens, fractional, name = _sent(sizes, src, group, device).tolist()
    if not rows:
        got = f"got {type(positions).__name__}, " if here else ""
        raise InvalidInputError(f"positions: {got}want a PositionTable on rank {src}")
    table, header = rows * segments, 4 * documents
    if body is None:
        body = np.empty(table + header + -(-name // 8), np.int64)
    received = _sent(body, src, group, device)
    if here:
        assert positions is not None
        return positions
    return PositionTable.from_arrays(
        received[:table].reshape(rows, segments),
        received[table : table + header].reshape(4, documents),
        tokens,
        fractional=bool(fractional),
        scheme=received[table + header :].tobytes()[:name].decode(errors="surrogatepass"),
    )


def _check_ranks(src: int, group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) < 0:
        raise InvalidInputError(f"group: got one without rank {dist.get_rank()}, want a group of this rank")
    ranks = dist.get_process_group_ranks(group)
    if integer("src", src) not in ranks:
        raise InvalidInputError(f"src: got {src}, want one of the group's ranks, {ranks}")


def _packed(positions: object) -> tuple[IntArray, IntArray]:
    """Return header and body of a table; a header of zeros of anything else, which all ranks then refuse."""
    if not isinstance(positions, PositionTable):
        return np.zeros(_HEADER, np.int64), np.zeros(0, np.int64)
    name = positions.scheme.encode(errors="surrogatepass")
    words = np.frombuffer(name + bytes(-len(name) % 8), np.int64)
    sizes = [
        positions.table.shape[0],
        positions.num_segments,
        positions.num_documents,
        positions.num_tokens,
        positions.fractional,
        len(name),
    ]
    return np.array(sizes, np.int64), np.concatenate([positions.table.ravel(), positions.documents.ravel(), words])


def _sent(buffer: IntArray, src: int, group: dist.ProcessGroup | None, device: torch.device | str) -> IntArray:
    """Broadcast the buffer of rank src."""
    tensor: Tensor = torch.from_numpy(buffer).to(device)
    dist.broadcast(tensor, src, group)
    return tensor.cpu().numpy()
