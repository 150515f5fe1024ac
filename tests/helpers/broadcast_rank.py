"""One of two ranks that broadcast tables; tests/integrations/test_megatron.py runs it as a program."""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.integrations.megatron import broadcast_table

dist: Any = distributed  # torch does not export its stores by name

DOCUMENTS: list[list[Text | Grid]] = [[Text(3), Grid(2, 3), Text(2)], [Grid(3, 3)], [Text(7)]]


def tables() -> list[tuple[int, PositionTable]]:
    """List tables of every size in broadcast order, each with its source rank."""
    whole = SegmentTable.from_documents(DOCUMENTS)
    return [
        (0, place(whole, "rope-tie", [5, 0, 2**30])),
        (1, place(whole, "rope-tie-v2").pad(20, "left")),
        (0, place(SegmentTable.from_documents([]), "mrope")),
        (0, place(SegmentTable.from_documents([[Text(1)] * 300]), "vrope")),
        (1, place(whole, "rows")),
        (0, place(whole, "rope-tie-fractional").slice(7, 13)),
        (0, PositionTable.from_arrays(np.zeros((9, 0)), np.zeros((4, 0)), 0, fractional=False, scheme="\ud800")),
    ]


def main(rank: int, folder: Path) -> None:
    """Take part in every broadcast; save the received tables and the error messages."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    alone: Any = dist.new_group([1])
    received: list[PositionTable] = []
    for i, (src, table) in enumerate(tables()):
        got = broadcast_table(table if rank == src else None, src, device="cpu" if i % 2 else None)
        assert (got is table) == (rank == src)
        received.append(got)
    if rank == 1:
        received.append(broadcast_table(tables()[0][1], 1, alone))
    refused: list[tuple[Any, Any]] = (
        [(1, None), (1, alone), (2, None), (0.0, None)] if rank == 0 else [(1, None), (0, alone)]
    )
    messages = []
    for src, group in refused:
        try:
            broadcast_table(None, src, group)
        except InvalidInputError as error:
            messages.append(str(error))
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps((received, messages)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
