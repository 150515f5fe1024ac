"""Positions and rotations for Megatron and TransformerEngine: angles in the layout they expect, and table broadcasts.

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
    positions: Positions, rotary: Rotary, layout: Layout, *, device: torch.device | str | None = None
) -> Tensor:
    """Compute the rotation angles for the tokens in a batch or a shard, wrapped to [−π, π].

    The angles do not include the attention factor of rotary, which Megatron reads from its config as mscale. Megatron
    splits packed angles itself but does not split other angles; docs/megatron.md explains which ones to pass.

    >>> from mmpos import Grid, SegmentTable, Text, place
    >>> from mmpos.rotary import Rotary
    >>> positions = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
    >>> rotary_pos_emb(positions, Rotary(head_dim=16), "sbhd").shape
    torch.Size([8, 2, 1, 16])
    >>> rotary_pos_emb(positions, Rotary(head_dim=16), "thd").shape
    torch.Size([16, 1, 1, 16])

    Args:
        positions: DevicePositions, a PositionTable, or dense ids.
        rotary: frequencies and their allocation; the pairing "adjacent" corresponds to Megatron's rotary_interleaved.
        layout: "sbhd" if the documents are the rows of a batch, "thd" if they are packed.
        device: device of the angles; None uses the positions' device.

    Returns:
        A new contiguous float32 tensor of shape (seq, batch, 1, rotary_dim) or (tokens, 1, 1, rotary_dim).

    Raises:
        InvalidInputError: rows have different lengths in layout "sbhd".
        UnsupportedError: rotary has precision "hf".
    """
    one_of("layout", layout, ("sbhd", "thd"))
    if layout == "sbhd":
        _check_rows(positions)
    wrapped = angles(rotary, positions, device)
    if layout == "thd":
        wrapped = wrapped.transpose(0, 1).reshape(-1, 1, 1, rotary.rotary_dim)
    return wrapped.contiguous()


def _check_rows(positions: Positions) -> None:
    """Raise InvalidInputError if rows have different lengths."""
    if isinstance(positions, PositionTable):
        equal = bool((positions.lengths == positions.max_seqlen).all())
    elif isinstance(positions, DevicePositions):
        equal = positions.row_length > 0 or not positions.num_tokens
    else:
        equal = True
    if not equal:
        raise InvalidInputError(
            "positions: got documents of unequal length, want equal lengths; pad or use layout 'thd'"
        )


class Group(Protocol):
    """The methods of torch.distributed.ProcessGroup that are used here."""

    def rank(self) -> int:
        """Return the rank of this process in the group."""

    def size(self) -> int:
        """Return the number of processes in the group."""


class MultimodalRotaryEmbedding(nn.Module):
    """Replacement for the "mrope" rotary_pos_emb of a GPTModel, for any scheme and any rotary.

    The module has no weights and no buffers, so checkpoints do not change.

    Args:
        rotary: frequencies and their allocation to axes and channels.
        layout: "sbhd" for rows of equal length, "thd" for packed sequences.
        cp_group: group of context-parallel ranks; None for a single rank.
        mscale: factor in Megatron's YaRN config by which Megatron multiplies cos and sin.
        device: device of the angles; None uses the positions' device.

    Raises:
        InvalidInputError: mscale differs from the attention factor of rotary.
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
        if not isclose(finite("mscale", mscale), rotary.attention_factor, rel_tol=1e-6):
            want = f"{rotary.attention_factor}, the attention factor of rotary"
            raise InvalidInputError(f"mscale: got {mscale}, want {want}")
        self.rotary, self.layout = rotary, one_of("layout", layout, ("sbhd", "thd"))
        self.cp_group, self.device = cp_group, device

    def forward(
        self, position_ids: Positions, mrope_section: Sequence[int] | None = None, cp_group: Group | None = None
    ) -> Tensor:
        """Compute the angles for Megatron's attention.

        Args:
            position_ids: positions of the whole batch on every context-parallel rank: a PositionTable, DevicePositions,
                or dense ids of shape (axes, batch, seq).
            mrope_section: pairs per axis; it must equal the sections of rotary, if rotary has sections.
            cp_group: group of context-parallel ranks; None uses the module's cp_group.

        Returns:
            In layout "sbhd", the angles of the zig-zag blocks of every row that belong to this rank, one of C ranks:
            shape (seq / C, batch, 1, rotary_dim). In layout "thd", the angles of all tokens: shape (tokens, 1, 1,
            rotary_dim); Megatron splits these.

        Raises:
            InvalidInputError: mrope_section differs from the sections of rotary, or the row length is not a multiple of
                2C tokens.
        """
        section = self.rotary.mrope_section
        if mrope_section is not None and section is not None and tuple(mrope_section) != section:
            raise InvalidInputError(f"mrope_section: got {list(mrope_section)}, want {list(section)} as in rotary")
        group = self.cp_group if cp_group is None else cp_group
        rank, size = (0, 1) if group is None or self.layout == "thd" else (group.rank(), group.size())
        if isinstance(position_ids, PositionTable):  # split before the angles are computed
            position_ids, rank, size = position_ids.shard(rank, size), 0, 1
        angles = rotary_pos_emb(position_ids, self.rotary, self.layout, device=self.device)
        return angles if size == 1 else _blocks(angles, rank, size)

    def extra_repr(self) -> str:
        """Return the rotary and the layout for ``repr``."""
        return f"{self.rotary!r}, layout={self.layout!r}"


def _blocks(angles: Tensor, rank: int, size: int) -> Tensor:
    """Return blocks ``rank`` and ``2 * size - 1 - rank`` of ``2 * size`` along the first dimension."""
    block, rest = divmod(len(angles), 2 * size)
    if rest:
        raise InvalidInputError(f"position_ids: got rows of {len(angles)} tokens, want a multiple of {2 * size}")
    return torch.cat([angles.narrow(0, index * block, block) for index in (rank, 2 * size - 1 - rank)])


_HEADER = 6
"""Header fields: rows, segments, documents, tokens, fractional, bytes of the scheme's name; 0 rows mean that there is
no table.
"""


def broadcast_table(
    positions: PositionTable | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> PositionTable:
    """Broadcast a table from one rank to all ranks of a group; its size may differ between calls.

    Each call makes two int64 broadcasts, first of the sizes, then of the table. Nothing is pickled, and ids are not
    expanded.

    Args:
        positions: the table on rank src; None on other ranks.
        src: global rank of the sender, as in torch.distributed.broadcast.
        group: group whose ranks all make this call; None uses all ranks.
        device: device on which the group communicates; None uses the current CUDA device under nccl, else the host.

    Returns:
        ``positions`` on rank src, and an equal table in host memory on all other ranks. Under nccl, the call waits for
        the device.

    Raises:
        InvalidInputError: src has no table (raised on all ranks), or this rank or src is not in the group.
    """
    _check_ranks(src, group)
    if device is None:
        nccl = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    is_sender = dist.get_rank() == src
    sizes, body = _packed(positions) if is_sender else (np.zeros(_HEADER, np.int64), None)
    rows, segments, documents, tokens, fractional, name = _broadcast(sizes, src, group, device).tolist()
    if not rows:
        got = f"got {type(positions).__name__}, " if is_sender else ""
        raise InvalidInputError(f"positions: {got}want a PositionTable on rank {src}")
    table, header = rows * segments, 4 * documents
    if body is None:
        body = np.empty(table + header + -(-name // 8), np.int64)
    received = _broadcast(body, src, group, device)
    if is_sender:
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
        raise InvalidInputError(f"group: got a group without rank {dist.get_rank()}, want a group with this rank")
    ranks = dist.get_process_group_ranks(group)
    if integer("src", src) not in ranks:
        raise InvalidInputError(f"src: got {src}, want one of the group's ranks, {ranks}")


def _packed(positions: object) -> tuple[IntArray, IntArray]:
    """Return the header and body of a table; for any other object, return a header of zeros, which all ranks refuse."""
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


def _broadcast(buffer: IntArray, src: int, group: dist.ProcessGroup | None, device: torch.device | str) -> IntArray:
    """Broadcast the buffer from rank src and return it on all ranks."""
    tensor: Tensor = torch.from_numpy(buffer).to(device)
    dist.broadcast(tensor, src, group)
    return tensor.cpu().numpy()
