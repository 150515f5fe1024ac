"""Pruned tokens: kept tokens keep their ids, and generated tokens continue from the position after the whole prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Id, exact, settled
from test_engine_identities import tables

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.positions.table_rows import NO_POSITION

BATCH = SegmentTable.from_documents([[Text(2), Grid(2, 2), Text(1)], [Text(3)]])


@settled
@given(tables(), st.data())
def test_kept_tokens_keep_their_ids_and_documents(positions: PositionTable, data: st.DataObject) -> None:
    side: Literal["left", "right"] = data.draw(st.sampled_from(["left", "right"]))
    padded = positions.pad(side=side) if data.draw(st.booleans()) else positions
    tokens = padded.num_tokens
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), bool)
    kept = padded.keep(mask.repeat(2)[::2])  # any stride
    ids, document = exact(padded), np.repeat(np.arange(padded.num_documents), padded.lengths)
    want: list[Id] = [position for position, keep in zip(ids, mask, strict=True) if keep]
    assert exact(kept) == want
    assert np.diff(kept.cu_seqlens).tolist() == [int(mask[document == d].sum()) for d in range(padded.num_documents)]
    np.testing.assert_array_equal(kept.documents[2], padded.documents[2])
    padding = np.repeat(padded.is_padding, padded.segment_lengths)
    for d, (delta, before) in enumerate(zip(kept.documents[3], padded.documents[3], strict=True)):
        lost = int((~mask & ~padding & (document == d)).sum())
        assert delta == (NO_POSITION if before == NO_POSITION else before + lost)


def test_all_tokens_or_none_can_be_kept() -> None:
    positions = place(BATCH, "mrope")
    whole, none = positions.keep([True] * 10), positions.keep(torch.zeros(10, dtype=torch.bool))
    np.testing.assert_array_equal(whole.table, positions.table)
    assert (none.num_tokens, none.num_documents, none.next_positions.tolist()) == (0, 2, [5, 3])
    assert none.deltas.tolist() == none.next_positions.tolist()
    unresumable = place(BATCH, "rows").keep(np.arange(10) > 2)
    assert unresumable.documents[2:].tolist() == [[NO_POSITION] * 2] * 2
    nothing = place(SegmentTable.from_documents([]))
    assert (nothing.keep(np.empty(0, bool)).num_tokens, nothing.keep([]).num_tokens) == (0, 0)
