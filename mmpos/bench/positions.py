"""Positions: from lists, spans and token ids to dense ids, and the questions that a table answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.bench.cases import Case, Contestant, Options, Role
from mmpos.bench.proofs import equal
from mmpos.bench.workloads import WORKLOADS
from mmpos.placing import place
from mmpos.positions import PositionTable
from mmpos.segments import SegmentTable

__all__ = ["cases"]


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite."""
    for name, (title, documents) in WORKLOADS.items():
        table = place(SegmentTable.from_documents(documents), "rope-tie")
        yield filled(f"{name}: {title}", table, np.zeros((table.axes, table.num_tokens), np.int32))


def filled(title: str, table: PositionTable, out: npt.NDArray[Any]) -> Case:
    """Ids into memory that is there, against filling it with one number."""
    want = table.dense()
    return Case(
        "dense ids into an array that is there",
        title,
        (
            Contestant("fill", partial(out.fill, 1), Role.LIMIT),
            Contestant("dense(out=)", partial(table.dense, out), proof=lambda: equal(table.dense(out), want)),
        ),
        {"tokens": table.num_tokens, "bytes": out.nbytes},
    )
