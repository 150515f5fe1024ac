"""One table for all ranks of a group: pipeline stages, tensor-parallel and context-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.support.checks import IntArray, integer

_HEADER = 6
"""Rows, segments, documents, tokens, fractional, bytes of the scheme's name; no rows where there is no table."""


def broadcast_table(
    positions: PositionTable | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> PositionTable:
    """The table of one rank, on every rank of a group; its size may differ from call to call.

    Two broadcasts of int64: the sizes, then the table itself. Nothing is pickled, and ids are not expanded.

    Args:
        positions: the table on rank src; None elsewhere.
        src: who has it: its global rank, as torch.distributed.broadcast has it.
        group: who gets it; None is everybody. All its ranks make this call.
        device: where the group communicates; None is the current CUDA device under nccl, else the host.

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
    found = _sent(body, src, group, device)
    if here:
        assert positions is not None
        return positions
    return PositionTable.from_arrays(
        found[:table].reshape(rows, segments),
        found[table : table + header].reshape(4, documents),
        tokens,
        fractional=bool(fractional),
        scheme=found[table + header :].tobytes()[:name].decode(errors="surrogatepass"),
    )


def _check_ranks(src: int, group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) < 0:
        raise InvalidInputError(f"group: got one without rank {dist.get_rank()}, want a group of this rank")
    ranks = dist.get_process_group_ranks(group)
    if integer("src", src) not in ranks:
        raise InvalidInputError(f"src: got {src}, want one of the group's ranks, {ranks}")


def _packed(positions: Any) -> tuple[IntArray, IntArray]:
    """The header and the body of a table; a header of zeros of anything else, which all ranks then refuse."""
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
    """The buffer of rank src."""
    tensor: Tensor = torch.from_numpy(buffer).to(device)
    dist.broadcast(tensor, src, group)
    return tensor.cpu().numpy()
