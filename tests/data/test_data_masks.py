"""Masks: each matches a dense mask made by loops, and FlexAttention with the mask matches dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_packing import documents, example, examples_of
from torch.nn.attention.flex_attention import create_mask

from mmpos import InvalidInputError, UnsupportedError
from mmpos.data.batch import Batch, MaskMod
from mmpos.data.collate import PackedCollator, PaddedCollator


def dense(mod: MaskMod, batch: Batch) -> torch.Tensor:
    """Evaluate the mask for all pairs of tokens as (batch, seq, seq)."""
    rows, seq = (1, batch.input_ids.numel()) if batch.packed else tuple(batch.input_ids.shape)
    return create_mask(mod, rows, 1, seq, seq, device="cpu")[:, 0]


def by_loops(lengths: list[int], sizes: list[int], side: str, spans: Any) -> torch.Tensor:
    """Return a mask (tokens, tokens) of whether each query attends to each key, both numbered across the batch."""
    document: list[int | None] = []
    for d, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        padding: list[int | None] = [None] * (size - length)
        document += padding + [d] * length if side == "left" else [d] * length + padding
    mask = torch.zeros(len(document), len(document), dtype=torch.bool)
    for q, q_document in enumerate(document):
        for kv, kv_document in enumerate(document):
            same_image = any(start <= q < stop and start <= kv < stop for start, stop in spans)
            mask[q, kv] = q_document is not None and q_document == kv_document and (q >= kv or same_image)
    return mask


few_documents = documents.filter(lambda drawn: 0 < len(drawn) <= 4)


@settings(max_examples=20)
@given(few_documents, st.booleans(), st.sampled_from(["packed", "left", "right"]), st.sampled_from([1, 4, 8]))
def test_masks_match_plain_loops(documents: Any, bidirectional: bool, kind: Any, multiple_of: int) -> None:
    examples = examples_of(documents)
    if kind == "packed":
        batch, side = PackedCollator(multiple_of=multiple_of)(examples), "right"
    else:
        batch, side = PaddedCollator(side=kind, multiple_of=multiple_of)(examples), kind
    spans = batch.image_spans.tolist() if bidirectional else []
    want = by_loops([one.num_tokens for one in examples], batch.cu_seqlens.diff().tolist(), side, spans)
    mask = dense(batch.mask_mod(bidirectional_images=bidirectional), batch)
    rows, seq, _ = mask.shape
    for row in range(rows):
        assert torch.equal(mask[row], want.reshape(rows, seq, rows, seq)[row, :, row])


def test_a_shard_uses_the_mask_of_the_whole_batch_through_its_indices() -> None:
    whole = PackedCollator(multiple_of=4)([example("a", 9, (2, 3), 3), example("b", 6)])
    mod = whole.mask_mod(bidirectional_images=True)
    mask = dense(mod, whole)[0]
    index = torch.from_numpy(whole.positions.shard_indices(1, 2))

    def of_rank(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mod(b, h, index[q_idx], kv_idx)

    assert torch.equal(create_mask(of_rank, 1, 1, len(index), len(mask), device="cpu")[0, 0], mask[index])
    with pytest.raises(UnsupportedError, match=r"^mask_mod: got a context-parallel shard, want the mask of the whole"):
        whole.shard(1, 2).mask_mod()


def test_bidirectional_images_must_be_a_bool() -> None:
    with pytest.raises(InvalidInputError, match=r"^bidirectional_images: got 1, want True or False$"):
        PackedCollator()([example("a", 3)]).mask_mod(bidirectional_images=1)  # type: ignore[arg-type]
