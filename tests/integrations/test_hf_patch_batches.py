"""Packed, padded and cached batches of patched models: every document has the same logits as in a separate run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cache_name import CACHE
from hf_models import CONFIGS, WAYS, model_of, patched, rotary_of, text, tokens, two_rows
from tolerance import assert_within, rounding
from transformers import DynamicCache

from mmpos import Grid, InvalidInputError, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.hf import patch
from mmpos.rotary import DevicePositions

NAMES = sorted(CONFIGS)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_have_the_same_logits_as_in_separate_runs(attention: str, way: str) -> None:
    model = model_of("llama", attn_implementation=attention)
    documents: list[list[Text | Grid]] = [[Text(4), Grid(2, 3), Text(3)], [Text(1)], [Grid(2, 2), Text(6)]]
    table = place(SegmentTable.from_documents(documents))
    input_ids = tokens(1, table.num_tokens)
    patched(model, way)
    restart = torch.cat([torch.arange(n) for n in table.lengths.tolist()])[None]
    with torch.no_grad():
        packed = model(input_ids, mm_position_ids=table)
        dense = torch.from_numpy(table.dense())[:, None]
        from_ids = model(input_ids, mm_position_ids=dense, position_ids=restart, use_cache=False)
        assert packed.get(CACHE) is None
        assert torch.equal(model(input_ids, mm_position_ids=table, position_ids=restart).logits, packed.logits)
        assert torch.equal(from_ids.logits, packed.logits)
        bound = rounding(lambda: model(input_ids, mm_position_ids=table).logits, model.parameters())
        for d, (start, stop) in enumerate(zip(table.cu_seqlens[:-1], table.cu_seqlens[1:], strict=True)):
            alone = model(input_ids[:, start:stop], mm_position_ids=place(SegmentTable.from_documents([documents[d]])))
            assert_within(packed.logits[:, start:stop], alone.logits, bound)


def test_arguments_that_cannot_separate_packed_documents_are_refused() -> None:
    model, table = model_of("llama"), text(4, 5)
    input_ids = tokens(1, 9)
    patched(model)
    with pytest.raises(UnsupportedError, match="use_cache: got True for packed documents"):
        model(input_ids, mm_position_ids=table, use_cache=True)
    with pytest.raises(InvalidInputError, match=r"attention_mask: got shape \(1, 9\) for packed documents"):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(1, 9))
    for name in ("cache", CACHE):
        with pytest.raises(UnsupportedError, match=f"^{name} cannot be combined with packed documents"):
            model(input_ids, mm_position_ids=table, **{name: DynamicCache()})
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    document = torch.tensor([0] * 4 + [1] * 5)
    mask = (causal & (document[:, None] == document))[None, None]
    with torch.no_grad():
        got = model(input_ids, mm_position_ids=table, attention_mask=mask, use_cache=False).logits
        want = model(input_ids, mm_position_ids=table).logits
    assert_within(got, want, rounding(lambda: model(input_ids, mm_position_ids=table).logits, model.parameters()))


def test_a_slice_with_one_nonempty_document_is_not_packed() -> None:
    model, table, input_ids = patched(model_of("llama")), text(4, 5), tokens(1, 9)
    with torch.no_grad():
        want = model(input_ids[:, 4:], mm_position_ids=text(5)).logits
        part = table.slice(4, 9)  # the first document is empty
        mask = torch.ones(1, 5, dtype=torch.int64)
        first = model(input_ids[:, 4:7], mm_position_ids=table.slice(4, 7), use_cache=True)
        rest = model(input_ids[:, 7:], mm_position_ids=table.slice(7, 9), **{CACHE: first[CACHE]})
        assert torch.equal(model(input_ids[:, 4:], mm_position_ids=part, attention_mask=mask).logits, want)
        bound = rounding(lambda: model(input_ids[:, 4:], mm_position_ids=text(5)).logits, model.parameters())
    assert_within(torch.cat((first.logits, rest.logits), dim=1), want, bound)


@pytest.mark.parametrize("lengths", [(4, 5), (4, 4)])
def test_device_positions_of_packed_documents_require_position_ids(lengths: tuple[int, int]) -> None:
    model, table, input_ids = patched(model_of("llama")), text(*lengths), tokens(1, sum(lengths))
    packed = DevicePositions.from_table(table)
    restart = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=table).logits
        got = model(input_ids, mm_position_ids=packed, position_ids=restart, use_cache=False).logits
    assert torch.equal(got, want)
    for mask in (None, torch.ones(1, sum(lengths))):
        with pytest.raises(InvalidInputError, match=r"DevicePositions of several documents, .* want position_ids"):
            model(input_ids, mm_position_ids=packed, attention_mask=mask)


MIXERS: dict[str, dict[str, Any]] = {
    "afmoe": {},  # its masks ignore position_ids
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},  # so do its masks
    "falcon_h1": {  # a convolution and a state-space layer run in parallel with each attention layer
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
}


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_models_that_mix_documents_refuse_packed_rows(name: str) -> None:
    model, input_ids, table = model_of(name, **MIXERS[name]), tokens(1, 9), text(4, 5)
    with torch.no_grad():
        want = model(input_ids[:, 4:]).logits
        patch(model, rotary_of(model, precision="hf"))
        for ids in (table, DevicePositions.from_table(table)):
            with pytest.raises(
                UnsupportedError, match="several documents in one row, which this model cannot separate"
            ):
                model(input_ids, mm_position_ids=ids)
        assert torch.equal(model(input_ids[:, 4:], mm_position_ids=text(5)).logits, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_same_logits_as_in_separate_runs(side: Any) -> None:
    model = model_of("mistral")
    documents: list[list[Text | Grid]] = [[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 3), Text(1)]]
    padded = place(SegmentTable.from_documents(documents)).pad(side=side)
    ids, mask = place(SegmentTable.from_documents(documents)).padded(side=side)
    attention_mask, input_ids = torch.from_numpy(mask), tokens(2, 24)
    patched(model)
    with torch.no_grad():
        run = partial(model, input_ids, attention_mask=attention_mask)
        got, bound = (
            run(mm_position_ids=padded).logits,
            rounding(lambda: run(mm_position_ids=padded).logits, model.parameters()),
        )
        assert torch.equal(got, run(mm_position_ids=torch.from_numpy(ids)).logits)
        for row, document in enumerate(documents):
            real = attention_mask[row].bool()
            table = place(SegmentTable.from_documents([document]))
            alone = model(input_ids[row, real][None], mm_position_ids=table).logits[0]
            assert_within(got[row, real], alone, bound)


@pytest.mark.parametrize(("name", "way"), [*((name, "reference") for name in NAMES), ("llama", "fused")])
def test_decoding_with_a_cache_gives_the_same_logits_as_a_full_forward_pass(name: str, way: str) -> None:
    model, table = model_of(name), two_rows()
    patched(model, way)
    longer = table.window([0, 1], [0, 0], [27, 27])  # each prompt and three tokens after it
    input_ids = tokens(2, 27)
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=longer).logits
        first = model(input_ids[:, :10], mm_position_ids=table.window([0, 1], [0, 0], [10, 10]))  # cuts both images
        cached, steps = {CACHE: first[CACHE]}, [first.logits]
        steps.append(
            model(input_ids[:, 10:24], **cached, mm_position_ids=table.window([0, 1], [10] * 2, [14] * 2)).logits
        )
        for step in range(3):
            ids = table.decode(step + 1).take([step, 2 * step + 1], [step + 1, 2 * step + 2])
            steps.append(model(input_ids[:, [24 + step]], **cached, mm_position_ids=ids).logits)
        bound = rounding(lambda: model(input_ids, mm_position_ids=longer).logits, model.parameters())
    assert_within(torch.cat(steps, dim=1), want, bound)
