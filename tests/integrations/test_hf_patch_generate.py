"""Batches and generation of patched models: documents are independent, and continue at their next positions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache, partial
from inspect import signature
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, WAYS, as_ids, assert_logits, model_of, patched, rotary_of, text, tokens, two_rows
from refusals import assert_refused
from tolerance import assert_within, rounding
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.hf import patch, unpatch
from mmpos.rotary import DevicePositions

SEGMENTS = SegmentTable.from_documents([[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 3), Text(1)]])
NEW = 6
CACHE = next(name for name in ("cache", "past_key_values") if name in signature(LlamaForCausalLM.forward).parameters)
"""The cache's parameter name in the installed Transformers, which 5.24 renamed."""


def prompts(scheme: str = "rope-tie") -> tuple[Tensor, Tensor, PositionTable]:
    """Return the ids, mask and table of two left-padded prompts with 24 and 9 tokens."""
    table = place(SEGMENTS, scheme)
    mask = torch.from_numpy(table.padded(side="left")[1])
    return tokens(2, 24) * mask, mask, table.pad(side="left")


@cache
def reference_tokens(scheme: str = "rope-tie", name: str = "llama") -> list[list[int]]:
    """Continue each prompt separately with a full forward pass per token, without a cache or padding."""
    (input_ids, mask, _), table = prompts(scheme), place(SEGMENTS, scheme)
    return [greedy_tokens(patched(name), input_ids[row, mask[row].bool()], table, row) for row in range(2)]


@torch.no_grad()
def greedy_tokens(model: Any, prompt: Tensor, table: PositionTable, row: int) -> list[int]:
    """Return the most likely tokens after a prompt, and check that rounding cannot change the choice."""
    sequence = prompt[None]

    def logits() -> Tensor:
        out: Tensor = model(sequence, mm_position_ids=table.window([row], [0], [sequence.shape[1]])).logits
        return out

    for _ in range(NEW):
        sequence = torch.cat((sequence, logits()[:, -1:].argmax(-1)), dim=1)
    first, second = logits()[0, -NEW - 1 : -1].topk(2).values.unbind(-1)
    (bound,) = rounding(logits, model.parameters())
    assert (first - second > 2 * bound).all()
    return sequence[0, -NEW:].tolist()


def generated(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


# Packed, padded and cached batches: every document has the same logits as in a separate run.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_have_the_same_logits_as_in_separate_runs(attention: str, way: str) -> None:
    model = model_of("llama", attn_implementation=attention)
    table = place(SegmentTable.from_documents([[Text(4), Grid(2, 3), Text(3)], [Text(1)], [Grid(2, 2), Text(6)]]))
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
    for start, stop in itertools.pairwise(table.cu_seqlens.tolist()):
        part = packed.logits[:, start:stop]
        assert_logits(model, part, input_ids[:, start:stop], mm_position_ids=table.slice(start, stop))


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
    assert_logits(model, got, input_ids, mm_position_ids=table)


def test_a_slice_with_one_nonempty_document_is_not_packed() -> None:
    model, table, input_ids = patched("llama"), text(4, 5), tokens(1, 9)
    with torch.no_grad():
        want = model(input_ids[:, 4:], mm_position_ids=text(5)).logits
        part = table.slice(4, 9)  # the first document is empty
        mask = torch.ones(1, 5, dtype=torch.int64)
        first = model(input_ids[:, 4:7], mm_position_ids=table.slice(4, 7), use_cache=True)
        rest = model(input_ids[:, 7:], mm_position_ids=table.slice(7, 9), **{CACHE: first[CACHE]})
        assert torch.equal(model(input_ids[:, 4:], mm_position_ids=part, attention_mask=mask).logits, want)
    assert_logits(model, torch.cat((first.logits, rest.logits), dim=1), input_ids[:, 4:], mm_position_ids=text(5))


@pytest.mark.parametrize("lengths", [(4, 5), (4, 4)])
def test_device_positions_of_packed_documents_require_position_ids(lengths: tuple[int, int]) -> None:
    model, table, input_ids = patched("llama"), text(*lengths), tokens(1, sum(lengths))
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
    # a convolution and a state-space layer run in parallel with each attention layer
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}
MIXED = "mm_position_ids: got several documents in one row, which this model cannot separate"


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_models_that_mix_documents_refuse_packed_rows(name: str) -> None:
    model, input_ids, table = model_of(name, **MIXERS[name]), tokens(1, 9), text(4, 5)
    with torch.no_grad():
        want = model(input_ids[:, 4:]).logits
        patch(model, rotary_of(model, precision="hf"))
        for ids in (table, DevicePositions.from_table(table)):
            assert_refused(MIXED, partial(model, input_ids, mm_position_ids=ids), UnsupportedError)
        assert torch.equal(model(input_ids[:, 4:], mm_position_ids=text(5)).logits, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_same_logits_as_in_separate_runs(side: Any) -> None:
    model, table, input_ids = patched("mistral"), place(SEGMENTS), tokens(2, 24)
    padded, (ids, mask) = table.pad(side=side), table.padded(side=side)
    with torch.no_grad():
        run = partial(model, input_ids, attention_mask=torch.from_numpy(mask))
        got = run(mm_position_ids=padded).logits
        assert torch.equal(got, run(mm_position_ids=torch.from_numpy(ids)).logits)
    for row, (start, stop) in enumerate(itertools.pairwise(table.cu_seqlens.tolist())):
        real = torch.from_numpy(mask[row] == 1)
        assert_logits(model, got[None, row, real], input_ids[row, real][None], mm_position_ids=table.slice(start, stop))


@pytest.mark.parametrize(("name", "way"), [*((name, "reference") for name in CONFIGS), ("llama", "fused")])
def test_decoding_with_a_cache_gives_the_same_logits_as_a_full_forward_pass(name: str, way: str) -> None:
    model, table = patched(name, way), two_rows()
    longer = table.window([0, 1], [0, 0], [27, 27])  # each prompt and three tokens after it
    input_ids = tokens(2, 27)
    with torch.no_grad():
        first = model(input_ids[:, :10], mm_position_ids=table.window([0, 1], [0, 0], [10, 10]))  # cuts both images
        cached, steps = {CACHE: first[CACHE]}, [first.logits]
        rest = table.window([0, 1], [10] * 2, [14] * 2)
        steps.append(model(input_ids[:, 10:24], **cached, mm_position_ids=rest).logits)
        for step in range(3):
            ids = table.decode(step + 1).take([step, 2 * step + 1], [step + 1, 2 * step + 2])
            steps.append(model(input_ids[:, [24 + step]], **cached, mm_position_ids=ids).logits)
    assert_logits(model, torch.cat(steps, dim=1), input_ids, mm_position_ids=longer)


# Generation.

METHODS: Mapping[str, Mapping[str, Any]] = {
    "dynamic cache": {},
    "chunked prefill within an image": {"prefill_chunk_size": 7},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_every_decoding_method_generates_the_same_tokens_as_full_forward_passes(name: str, method: str) -> None:
    input_ids, mask, table = prompts()
    output = generated(patched(name), input_ids, attention_mask=mask, mm_position_ids=table, **METHODS[method])
    assert output[:, 24:].tolist() == reference_tokens("rope-tie", name)


def test_prompts_may_be_embeddings_and_positions_dense_ids_or_device_positions() -> None:
    model, (input_ids, mask, table) = patched("llama"), prompts()
    embeds = model.get_input_embeddings()(input_ids).detach()
    alone = generated(model, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert alone.tolist() == reference_tokens()
    both = generated(model, input_ids=input_ids, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert both[:, 24:].tolist() == reference_tokens()
    for scheme in ("rope-tie", "rope-tie-v2"):
        _, _, table = prompts(scheme)
        following = {"attention_mask": mask, "mm_next_positions": torch.from_numpy(table.next_positions.copy())}
        for ids in (as_ids(table), DevicePositions.from_table(table)):
            output = generated(model, input_ids, mm_position_ids=ids, **following)
            assert output[:, 24:].tolist() == reference_tokens(scheme)


def test_beams_keep_the_positions_of_their_row() -> None:
    model, (input_ids, mask, table) = patched("llama"), prompts()
    beams = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0}
    scored = {"return_dict_in_generate": True, "output_scores": True}
    output = generated(model, input_ids, attention_mask=mask, mm_position_ids=table, **beams, **scored)
    real = place(SEGMENTS)
    for beam, score in enumerate(output.sequences_scores):  # equals the summed log-probabilities of a full forward pass
        row = beam // 3
        sequence = torch.cat((input_ids[row, mask[row].bool()], output.sequences[beam, 24:]))[None]
        ids = real.window([row], [0], [sequence.shape[1]])

        @torch.no_grad()
        def summed(sequence: Tensor = sequence, ids: PositionTable = ids) -> Tensor:
            logits = model(sequence, mm_position_ids=ids).logits[0]
            steps: Tensor = logits.log_softmax(-1)[-NEW - 1 : -1].gather(1, sequence[0, -NEW:, None])
            return steps.sum()

        assert_within(score, summed(), rounding(summed, model.parameters()))


def test_draft_tokens_are_verified_at_their_own_positions() -> None:
    model, (input_ids, mask, table) = patched("llama"), prompts()
    first = {"attention_mask": mask[:1], "mm_position_ids": table.window([0], [0], [24])}
    for drafts in ({"assistant_model": patched("llama")}, {"prompt_lookup_num_tokens": 3}):
        assert generated(model, input_ids[:1], **first, **drafts)[:, 24:].tolist() == reference_tokens()[:1]


def test_generation_continues_from_a_cache() -> None:
    model, input_ids, table = patched("llama"), tokens(1, 24), two_rows().window([0], [0], [24])
    want, mask = greedy_tokens(model, input_ids[0], table, 0), torch.ones(1, 24, dtype=torch.int64)
    for inputs in (input_ids, input_ids[:, 9:]):  # all tokens, or the new ones
        with torch.no_grad():
            cache = model(input_ids[:, :9], mm_position_ids=table.slice(0, 9))[CACHE]
        output = generated(model, inputs, attention_mask=mask, mm_position_ids=table, **{CACHE: cache})
        assert output[:, -NEW:].tolist() == [want]


def test_generate_without_positions_gives_the_same_tokens_as_the_unpatched_model() -> None:
    model, (input_ids, mask, table) = patched("llama"), prompts()
    without = generated(model, input_ids, attention_mask=mask)
    with_positions = generated(model, input_ids, attention_mask=mask, mm_position_ids=table)
    unpatch(model)
    assert torch.equal(generated(model, input_ids, attention_mask=mask), without)
    assert not torch.equal(without, with_positions)


def test_generation_continues_a_slice_that_contains_one_of_several_packed_prompts() -> None:
    model, (input_ids, _, _), packed = patched("llama"), prompts(), place(SEGMENTS)
    output = generated(model, input_ids[1:, 15:], mm_position_ids=packed.slice(24, 33))
    assert output[:, 9:].tolist() == reference_tokens()[1:]


def test_classifier_free_guidance_and_ids_beyond_int32_are_refused() -> None:
    model, (input_ids, mask, table) = patched("llama"), prompts()
    config = GenerationConfig(guidance_scale=1.5)
    prompt, message = {"attention_mask": mask, "mm_position_ids": table}, "guidance_scale: got 1.5, want 1"
    for args, more in (((), {"guidance_scale": 1.5}), ((), {"generation_config": config}), ((config,), {})):
        assert_refused(message, partial(model.generate, input_ids, *args, **prompt, **more), UnsupportedError)
    last = place(SegmentTable.from_documents([[Text(4)]]), start=2**31 - 5)
    over = "positions: got ids from 2147483648 to 2147483648, want finite ids within int32"
    assert_refused(over, lambda: generated(model, tokens(1, 4), mm_position_ids=last))
    model.generation_config = config
    assert_refused(message, partial(model.generate, input_ids, **prompt), UnsupportedError)


ZEROS, BOTH = torch.zeros(2, 2, 24), torch.tensor([1, 1])
_, _, TABLE = prompts()
SHAPE = "want (2, 2, 24): (axes, batch, seq)"
REFUSED: list[tuple[str, object, object]] = [
    ("mm_position_ids: got 1 document of [24] tokens, want 2 of one length", TABLE.window([0], [0], [24]), None),
    ("mm_position_ids: got padding after prompt 1, want it before", place(SEGMENTS).pad(), None),
    ("mm_position_ids: got 2 documents of [24, 9] tokens, want 2 of one length", place(SEGMENTS), None),
    (f"mm_position_ids: got (2, 2, 25), {SHAPE}", TABLE.pad(25, "left"), None),
    ("mm_next_positions cannot be combined with a PositionTable", TABLE, 1),
    ("mm_next_positions requires mm_position_ids", None, BOTH),
    ("mm_next_positions: got None with Tensor, want the (batch,) ids of the next tokens", ZEROS, None),
    ("mm_next_positions: got torch.float32 (2,), want a tensor of 2 integers", ZEROS, torch.ones(2)),
    (f"mm_position_ids: got (3, 2, 24), {SHAPE}", torch.zeros(3, 2, 24), BOTH),
    (f"mm_position_ids: got list, {SHAPE}", [0] * 24, BOTH),
]


@pytest.mark.parametrize(("message", "ids", "next_positions"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_prompts_are_refused(message: str, ids: object, next_positions: object) -> None:
    model, (input_ids, mask, _) = patched("llama"), prompts()
    arguments = {"attention_mask": mask, "mm_position_ids": ids, "mm_next_positions": next_positions}
    assert_refused(message, lambda: generated(model, input_ids, **arguments))
