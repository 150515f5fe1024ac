"""Pruned tokens: kept tokens keep their ids, and generated tokens continue from the position after the whole prompt."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Id, exact, settled
from test_engine_identities import tables

from mmpos import (
    Grid,
    InvalidInputError,
    PositionTable,
    SegmentTable,
    SequenceBuilder,
    Text,
    UnsupportedError,
    Video,
    place,
)
from mmpos.positions.table_rows import NO_POSITION
from mmpos.rotary import Rotary, apply_rotary

BATCH = SegmentTable.from_documents([[Text(2), Grid(2, 2), Text(1)], [Text(3)]])


@settled
@given(tables(), st.data())
def test_kept_tokens_keep_their_ids_and_documents(positions: PositionTable, data: st.DataObject) -> None:
    side: Literal["left", "right"] = data.draw(st.sampled_from(["left", "right"]))
    padded = positions.pad(side=side) if data.draw(st.booleans()) else positions
    tokens = padded.num_tokens
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), bool)
    kept = padded.keep(mask)
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
    np.testing.assert_array_equal(whole.documents, positions.documents)
    assert (none.num_tokens, none.num_documents, none.next_positions.tolist()) == (0, 2, [5, 3])
    assert none.deltas.tolist() == none.next_positions.tolist()
    nothing = place(SegmentTable.from_documents([]))
    assert (nothing.keep(np.empty(0, bool)).num_tokens, nothing.keep([]).num_tokens) == (0, 0)


def test_a_scheme_without_next_positions_still_has_none_after_pruning() -> None:
    kept = place(BATCH, "rows").keep(np.arange(10) > 2)
    assert kept.documents[2:].tolist() == [[NO_POSITION] * 2] * 2
    with pytest.raises(UnsupportedError, match="deltas: got document 0 of rows, whose end is not one whole id"):
        _ = kept.deltas


def test_a_strided_mask_is_read_correctly() -> None:
    positions = place(BATCH)
    mask = np.zeros((10, 2), bool)
    mask[3:5, 0] = True
    assert exact(positions.keep(mask[:, 0])) == exact(positions)[3:5]


def test_rotations_of_pruned_tokens_are_rows_of_the_full_rotation() -> None:
    video = Video([Grid(3, 4)] * 2, seconds_per_frame=1)
    sequence = SequenceBuilder(scheme="rope-tie-v2").build(["what moves?", video, "answer"])
    random = np.random.default_rng(0)
    mask = sequence.token_type_ids == 0
    mask[random.choice(np.flatnonzero(~mask), 7, replace=False)] = True
    q, k = torch.randn(mask.size, 4, 32), torch.randn(mask.size, 2, 32)
    rotary = Rotary(head_dim=32)
    whole = apply_rotary(q, k, sequence.positions, rotary)
    pruned = apply_rotary(q[mask], k[mask], sequence.positions.keep(mask), rotary)
    for one, other in zip(pruned, whole, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other[mask])


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        ([1] * 10, r"int64 \(10,\)"),
        ([True] * 9, r"bool \(9,\)"),
        (np.ones((2, 5), bool), r"bool \(2, 5\)"),
        (True, r"bool \(\)"),
        (None, r"object \(\)"),
    ],
)
def test_invalid_masks_are_refused(mask: Any, got: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^mask: got {got}, want bool \(10,\), one per token$"):
        place(BATCH).keep(mask)
