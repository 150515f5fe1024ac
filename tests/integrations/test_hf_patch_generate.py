"""generate with images: every decoding method continues each row at its next position in the table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from cache_name import CACHE
from hf_models import as_ids, model_of, rotary_of, tokens, two_rows
from refusals import assert_refused
from tolerance import assert_within, rounding
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from mmpos import Grid, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.hf import patch, unpatch
from mmpos.integrations.hf.positions import Prompt, prepare_inputs_for_generation
from mmpos.rotary import DevicePositions

SEGMENTS = SegmentTable.from_documents([[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 3), Text(1)]])
NEW = 6


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


def patched(name: str = "llama") -> Any:
    model = model_of(name)
    return patch(model, rotary_of(model), implementation="reference")


def generated(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


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


def test_prompts_can_be_passed_as_embeddings() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    embeds = model.get_input_embeddings()(input_ids).detach()
    alone = generated(model, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert alone.tolist() == reference_tokens()
    both = generated(model, input_ids=input_ids, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert both[:, 24:].tolist() == reference_tokens()


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2"])
def test_dense_ids_and_device_positions_generate_the_same_tokens_as_the_table(scheme: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts(scheme)
    dense = as_ids(table)
    next_positions = torch.from_numpy(table.next_positions.copy())
    for ids in (dense, DevicePositions.from_table(table)):
        output = generated(model, input_ids, attention_mask=mask, mm_position_ids=ids, mm_next_positions=next_positions)
        assert output[:, 24:].tolist() == reference_tokens(scheme)


def test_beams_keep_the_positions_of_their_row() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    output = generated(
        model,
        input_ids,
        attention_mask=mask,
        mm_position_ids=table,
        num_beams=3,
        num_return_sequences=3,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
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


@pytest.mark.parametrize("assistant", ["a copy", "tokens of the prompt"])
def test_draft_tokens_are_verified_at_their_own_positions(assistant: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    first = table.window([0], [0], [24])
    options = {"assistant_model": patched()} if assistant == "a copy" else {"prompt_lookup_num_tokens": 3}
    output = generated(model, input_ids[:1], attention_mask=mask[:1], mm_position_ids=first, **options)
    assert output[:, 24:].tolist() == reference_tokens()[:1]


@pytest.mark.parametrize("prompt", ["all tokens", "new tokens"])
def test_generation_continues_from_a_cache(prompt: str) -> None:
    model, input_ids, table = patched(), tokens(1, 24), two_rows().window([0], [0], [24])
    with torch.no_grad():
        cache = model(input_ids[:, :9], mm_position_ids=table.slice(0, 9))[CACHE]
    assert isinstance(cache, DynamicCache)
    want = greedy_tokens(model, input_ids[0], table, 0)
    mask = torch.ones(1, 24, dtype=torch.int64)
    inputs = input_ids if prompt == "all tokens" else input_ids[:, 9:]
    output = generated(model, inputs, attention_mask=mask, mm_position_ids=table, **{CACHE: cache})
    assert output[:, -NEW:].tolist() == [want]


def test_generate_without_positions_gives_the_same_tokens_as_the_unpatched_model() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    without = generated(model, input_ids, attention_mask=mask)
    with_positions = generated(model, input_ids, attention_mask=mask, mm_position_ids=table)
    unpatch(model)
    assert torch.equal(generated(model, input_ids, attention_mask=mask), without)
    assert not torch.equal(without, with_positions)


def test_columns_equal_the_dense_ids_of_a_longer_window() -> None:
    table = place(SEGMENTS, "rope-tie-v2").pad(side="left")
    prompt = Prompt(as_ids(table), torch.from_numpy(table.next_positions.copy()))
    longer = table.window([0, 1], [0, 0], [30, 30]).dense().reshape(2, 2, 30)
    for start, length in ((0, 24), (3, 9), (20, 10), (24, 1), (27, 3)):
        for at in (start, torch.tensor(start)):  # static caches store their length in a tensor
            got = prompt.columns(at, length, 4)
            assert got.dtype == torch.float64
            assert got.tolist() == longer[:, [0, 0, 1, 1], start : start + length].tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_ids_of_a_step_start_at_the_end_of_its_cache(name: str) -> None:
    class Model:
        def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
            return {"input_ids": input_ids[:, -1:]}

    prompt, cache = Prompt(as_ids(two_rows()), torch.tensor([50, 60])), DynamicCache()
    cache.update(torch.zeros(2, 1, 26, 4), torch.zeros(2, 1, 26, 4), 0)
    arguments: dict[str, Any] = {"mm_position_ids": prompt, "inputs_embeds": None, name: cache}
    prepared: dict[str, Any] = prepare_inputs_for_generation(Model(), torch.zeros(2, 27).long(), **arguments)
    assert prepared["mm_position_ids"].tolist() == [[[52], [62]]] * 2


def test_generation_continues_a_slice_that_contains_one_of_several_packed_prompts() -> None:
    model, (input_ids, _, _), packed = patched(), prompts(), place(SEGMENTS)
    output = generated(model, input_ids[1:, 15:], mm_position_ids=packed.slice(24, 33))
    assert output[:, 9:].tolist() == reference_tokens()[1:]


@pytest.mark.parametrize("source", ["argument", "config", "positional config", "config of the model"])
def test_classifier_free_guidance_is_refused(source: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    config = GenerationConfig(guidance_scale=1.5)
    if source == "config of the model":
        model.generation_config = config
    args = (config,) if source == "positional config" else ()
    sources: dict[str, Any] = {"argument": {"guidance_scale": 1.5}, "config": {"generation_config": config}}
    arguments = {"attention_mask": mask, "mm_position_ids": table, **sources.get(source, {})}
    message = "guidance_scale: got 1.5, want 1"
    assert_refused(message, lambda: model.generate(input_ids, *args, **arguments), UnsupportedError)


def test_generation_beyond_int32_ids_is_refused() -> None:
    table = place(SegmentTable.from_documents([[Text(4)]]), start=2**31 - 5)
    message = "positions: got ids from 2147483648 to 2147483648, want finite ids within int32"
    assert_refused(message, lambda: generated(patched(), tokens(1, 4), mm_position_ids=table))


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
    model, (input_ids, mask, _) = patched(), prompts()
    arguments = {"attention_mask": mask, "mm_position_ids": ids, "mm_next_positions": next_positions}
    assert_refused(message, lambda: generated(model, input_ids, **arguments))
