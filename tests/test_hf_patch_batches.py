"""Packed, padded and cached batches of patched models: every document as in its own run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import (
    CONFIGS,
    WAYS,
    model_of,
    patched,
    text,
    tokens,
    two_rows,
)
from torch import Tensor

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, UnsupportedError, place

NAMES = sorted(CONFIGS)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_have_the_logits_of_their_own_runs(attention: str, way: str) -> None:
    model = model_of("llama", attn_implementation=attention)
    documents: list[list[Text | Grid]] = [[Text(4), Grid(2, 3), Text(3)], [Text(1)], [Grid(2, 2), Text(6)]]
    table = place(SegmentTable.from_documents(documents))
    input_ids = tokens(1, table.num_tokens)
    patched(model, way)
    restart = torch.cat([torch.arange(n) for n in table.lengths.tolist()])[None]
    with torch.no_grad():
        packed = model(input_ids, mm_position_ids=table)
        told = model(input_ids, mm_position_ids=as_ids_of_one_row(table), position_ids=restart, use_cache=False)
        assert packed.past_key_values is None
        assert torch.equal(model(input_ids, mm_position_ids=table, position_ids=restart).logits, packed.logits)
        assert torch.equal(told.logits, packed.logits)
        for d, (start, stop) in enumerate(zip(table.cu_seqlens[:-1], table.cu_seqlens[1:], strict=True)):
            alone = model(input_ids[:, start:stop], mm_position_ids=place(SegmentTable.from_documents([documents[d]])))
            torch.testing.assert_close(packed.logits[:, start:stop], alone.logits, rtol=0, atol=1e-5)


def as_ids_of_one_row(table: PositionTable) -> Tensor:
    return torch.from_numpy(table.dense())[:, None]


def test_packed_documents_are_refused_what_would_let_them_see_each_other() -> None:
    model, table = model_of("llama"), text(4, 5)
    input_ids = tokens(1, 9)
    patched(model)
    with pytest.raises(UnsupportedError, match="use_cache: got True for packed documents"):
        model(input_ids, mm_position_ids=table, use_cache=True)
    with pytest.raises(InvalidInputError, match=r"attention_mask: got shape \(1, 9\) beside packed documents"):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(1, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    document = torch.tensor([0] * 4 + [1] * 5)
    own = (causal & (document[:, None] == document))[None, None]
    with torch.no_grad():
        got = model(input_ids, mm_position_ids=table, attention_mask=own, use_cache=False).logits
        torch.testing.assert_close(got, model(input_ids, mm_position_ids=table).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_logits_of_their_own_runs(side: Any) -> None:
    model = model_of("mistral")
    documents: list[list[Text | Grid]] = [[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 3), Text(1)]]
    padded = place(SegmentTable.from_documents(documents)).pad(side=side)
    ids, mask = place(SegmentTable.from_documents(documents)).padded(side=side)
    attention_mask, input_ids = torch.from_numpy(mask), tokens(2, 24)
    patched(model)
    with torch.no_grad():
        got = model(input_ids, attention_mask=attention_mask, mm_position_ids=padded).logits
        dense = model(input_ids, attention_mask=attention_mask, mm_position_ids=torch.from_numpy(ids)).logits
        assert torch.equal(got, dense)
        for row, document in enumerate(documents):
            real = attention_mask[row].bool()
            table = place(SegmentTable.from_documents([document]))
            alone = model(input_ids[row, real][None], mm_position_ids=table).logits[0]
            torch.testing.assert_close(got[row, real], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_decoding_with_a_cache_is_the_full_forward(name: str, way: str) -> None:
    model, table = model_of(name), two_rows()
    patched(model, way)
    longer = table.window([0, 1], [0, 0], [27, 27])  # the prompts and three tokens after each
    input_ids = tokens(2, 27)
    with torch.no_grad():
        whole = model(input_ids, mm_position_ids=longer).logits
        first = model(input_ids[:, :10], mm_position_ids=table.window([0, 1], [0, 0], [10, 10]))  # cuts both images
        cache, found = first.past_key_values, [first.logits]
        found.append(
            model(
                input_ids[:, 10:24], past_key_values=cache, mm_position_ids=table.window([0, 1], [10] * 2, [14] * 2)
            ).logits
        )
        for step in range(3):
            ids = table.decode(step + 1).take([step, 2 * step + 1], [step + 1, 2 * step + 2])
            found.append(model(input_ids[:, [24 + step]], past_key_values=cache, mm_position_ids=ids).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=2e-5)
