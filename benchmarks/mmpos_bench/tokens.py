"""From the token ids of a batch, as a tokenizer and a processor leave them, to dense ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.segments.kinds import Grid
from mmpos.segments.table import SegmentTable
from mmpos_bench.cases import Case, Contestant, Options, Point, Role
from mmpos_bench.proofs import equal
from mmpos_bench.reference import loop_ids
from mmpos_bench.workloads import Document, counts

__all__ = ["Tokens", "from_ids"]

_TEXT, _IMAGE, _MERGE = 1, 7, 2


class Tokens:
    """Documents of equal length as (batch, seq) token ids and the grids of their images before merging.

    Args:
        documents: text and still images.
    """

    def __init__(self, documents: list[Document]) -> None:
        parts = [part for document in documents for part in document]
        grids = [part for part in parts if isinstance(part, Grid)]
        lengths = [part.height * part.width if isinstance(part, Grid) else part.length for part in parts]
        ids = np.repeat([_IMAGE if isinstance(part, Grid) else _TEXT for part in parts], lengths)
        self.input_ids: npt.NDArray[np.int64] = ids.astype(np.int64).reshape(len(documents), -1)
        sides = [(1, grid.height * _MERGE, grid.width * _MERGE) for grid in grids]
        self.image_grid_thw = np.array(sides, np.int64).reshape(-1, 3)

    def ids(self, scheme: str) -> npt.NDArray[Any]:
        """(axes, tokens) the way through the library."""
        segments = SegmentTable.from_input_ids(
            self.input_ids, self.image_grid_thw, image_token_id=_IMAGE, spatial_merge_size=_MERGE
        )
        return place(segments, scheme).dense()


def from_ids(group: str, name: str, documents: list[Document], options: Options, point: Point | None = None) -> Case:
    """Against reading the token ids and writing as many bytes as the result has, and against Transformers."""
    tokens, mrope, tie = Tokens(documents), loop_ids(documents, "mrope"), loop_ids(documents, "rope-tie")
    read, written = np.empty_like(tokens.input_ids), np.empty(mrope.shape, np.int32)

    def limit() -> None:
        np.copyto(read, tokens.input_ids)
        written.fill(1)

    contestants = [
        Contestant("copy of token ids, and fill", limit, Role.LIMIT),
        Contestant("mmpos, mrope", partial(tokens.ids, "mrope"), proof=lambda: equal(tokens.ids("mrope"), mrope)),
        Contestant(
            "mmpos, rope-tie", partial(tokens.ids, "rope-tie"), proof=lambda: equal(tokens.ids("rope-tie"), tie)
        ),
    ]
    if rope_index := options.peers.get("Transformers", "rope_index"):
        theirs = rope_index.RopeIndex(tokens.input_ids, _IMAGE, tokens.image_grid_thw)
        contestants.append(Contestant("Transformers", theirs, Role.PEER, lambda: equal(theirs(), mrope)))
    work = counts(documents) | {"bytes": read.nbytes + written.nbytes}
    return Case(group, name, tuple(contestants), work, point=point)


def _proved(tokens: Tokens, scheme: str, want: npt.NDArray[Any]) -> None:
    equal(tokens.ids(scheme), want)
