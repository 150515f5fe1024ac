"""From the token ids of a batch, as a tokenizer and a processor leave them, to dense ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.bench.cases import Case, Contestant, Options, Point, Role
from mmpos.bench.proofs import equal
from mmpos.bench.reference import loop_ids
from mmpos.bench.workloads import Document, counts
from mmpos.parts import Grid
from mmpos.placing import place
from mmpos.segments import SegmentTable

__all__ = ["Tokens"]

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
        self.documents = documents
        self.input_ids: npt.NDArray[np.int64] = ids.astype(np.int64).reshape(len(documents), -1)
        sides = [(1, grid.height * _MERGE, grid.width * _MERGE) for grid in grids]
        self.image_grid_thw = np.array(sides, np.int64).reshape(-1, 3)

    def ids(self, scheme: str) -> npt.NDArray[Any]:
        """(axes, tokens) the way through the library."""
        segments = SegmentTable.from_input_ids(
            self.input_ids, self.image_grid_thw, image_token_id=_IMAGE, spatial_merge_size=_MERGE
        )
        return place(segments, scheme).dense()

    def case(self, group: str, title: str, options: Options, point: Point | None = None) -> Case:
        """Against reading the token ids and writing as many bytes as the result has, and against Transformers."""
        read, want = np.empty_like(self.input_ids), loop_ids(self.documents, "mrope")
        written = np.empty(want.shape, np.int32)

        def limit() -> None:
            np.copyto(read, self.input_ids)
            written.fill(1)

        contestants = [
            Contestant("copy of token ids, and fill", limit, Role.LIMIT),
            Contestant("mmpos, mrope", partial(self.ids, "mrope"), proof=lambda: equal(self.ids("mrope"), want)),
            Contestant(
                "mmpos, rope-tie",
                partial(self.ids, "rope-tie"),
                proof=lambda: equal(self.ids("rope-tie"), loop_ids(self.documents, "rope-tie")),
            ),
        ]
        if rope_index := options.peers.get("Transformers", "rope_index"):
            theirs = rope_index.RopeIndex(self.input_ids, _IMAGE, self.image_grid_thw)
            contestants.append(Contestant("Transformers", theirs, Role.PEER, lambda: equal(theirs(), want)))
        work = counts(self.documents) | {"bytes": read.nbytes + written.nbytes}
        return Case(group, title, tuple(contestants), work, point=point)
