"""generate with images: every way of it follows the next positions of the table, row by row."""

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
    """Two prompts of 24 and 9 tokens, padded left: ids, mask, and the table."""
    table = place(SEGMENTS, scheme)
    mask = torch.from_numpy(table.padded(side="left")[1])
    return tokens(2, 24) * mask, mask, table.pad(side="left")


@cache
def one_by_one(scheme: str = "rope-tie", name: str = "llama") -> list[list[int]]:
    """Tokens after each prompt alone, every one from a full forward without a cache or padding."""
    (input_ids, mask, _), table = prompts(scheme), place(SEGMENTS, scheme)
    return [gone_on(patched(name), input_ids[row, mask[row].bool()], table, row) for row in range(2)]


@torch.no_grad()
def gone_on(model: Any, prompt: Tensor, table: PositionTable, row: int) -> list[int]:
    """The tokens that follow a prompt by far: no rounding puts another one before them."""
    sequence = prompt[None]

    def logits() -> Tensor:
        found: Tensor = model(sequence, mm_position_ids=table.window([row], [0], [sequence.shape[1]])).logits
        return found

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


WAYS: Mapping[str, Mapping[str, Any]] = {
    "a cache that grows": {},
    "chunks that cut an image": {"prefill_chunk_size": 7},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_every_way_goes_on_as_one_by_one(name: str, way: str) -> None:
    input_ids, mask, table = prompts()
    found = generated(patched(name), input_ids, attention_mask=mask, mm_position_ids=table, **WAYS[way])
    assert found[:, 24:].tolist() == one_by_one("rope-tie", name)


def test_images_come_as_embeddings() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    embeds = model.get_input_embeddings()(input_ids).detach()
    alone = generated(model, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert alone.tolist() == one_by_one()
    beside = generated(model, input_ids=input_ids, inputs_embeds=embeds, attention_mask=mask, mm_position_ids=table)
    assert beside[:, 24:].tolist() == one_by_one()


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2"])
def test_dense_ids_and_device_positions_with_next_positions(scheme: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts(scheme)
    dense = as_ids(table)
    following = torch.from_numpy(table.next_positions.copy())
    for ids in (dense, DevicePositions.from_table(table)):
        found = generated(model, input_ids, attention_mask=mask, mm_position_ids=ids, mm_next_positions=following)
        assert found[:, 24:].tolist() == one_by_one(scheme)


def test_beams_keep_the_positions_of_their_row() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    found = generated(
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
    for beam, score in enumerate(found.sequences_scores):  # each is the sum of log-probabilities of a full forward
        row = beam // 3
        sequence = torch.cat((input_ids[row, mask[row].bool()], found.sequences[beam, 24:]))[None]
        ids = real.window([row], [0], [sequence.shape[1]])

        @torch.no_grad()
        def summed(sequence: Tensor = sequence, ids: PositionTable = ids) -> Tensor:
            logits = model(sequence, mm_position_ids=ids).logits[0]
            steps: Tensor = logits.log_softmax(-1)[-NEW - 1 : -1].gather(1, sequence[0, -NEW:, None])
            return steps.sum()

        assert_within(score, summed(), rounding(summed, model.parameters()))


@pytest.mark.parametrize("assistant", ["a copy", "tokens of the prompt"])
def test_drafts_are_judged_at_their_own_positions(assistant: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    first = table.window([0], [0], [24])
    told = {"assistant_model": patched()} if assistant == "a copy" else {"prompt_lookup_num_tokens": 3}
    found = generated(model, input_ids[:1], attention_mask=mask[:1], mm_position_ids=first, **told)
    assert found[:, 24:].tolist() == one_by_one()[:1]


@pytest.mark.parametrize("given", ["all tokens", "new tokens"])
def test_a_conversation_goes_on_from_its_cache(given: str) -> None:
    model, input_ids, table = patched(), tokens(1, 24), two_rows().window([0], [0], [24])
    with torch.no_grad():
        cache = model(input_ids[:, :9], mm_position_ids=table.slice(0, 9))[CACHE]
    assert isinstance(cache, DynamicCache)
    want = gone_on(model, input_ids[0], table, 0)
    mask = torch.ones(1, 24, dtype=torch.int64)
    sent = input_ids if given == "all tokens" else input_ids[:, 9:]
    found = generated(model, sent, attention_mask=mask, mm_position_ids=table, **{CACHE: cache})
    assert found[:, -NEW:].tolist() == [want]


def test_without_positions_generate_is_the_models_own() -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    found = generated(model, input_ids, attention_mask=mask)
    turned = generated(model, input_ids, attention_mask=mask, mm_position_ids=table)
    unpatch(model)
    assert torch.equal(generated(model, input_ids, attention_mask=mask), found)
    assert not torch.equal(found, turned)


def test_columns_are_those_of_the_table_and_its_decoding() -> None:
    table = place(SEGMENTS, "rope-tie-v2").pad(side="left")
    prompt = Prompt(as_ids(table), torch.from_numpy(table.next_positions.copy()))
    longer = table.window([0, 1], [0, 0], [30, 30]).dense().reshape(2, 2, 30)
    for start, length in ((0, 24), (3, 9), (20, 10), (24, 1), (27, 3)):
        for at in (start, torch.tensor(start)):  # static caches keep their length in a tensor
            got = prompt.columns(at, length, 4)
            assert got.dtype == torch.float64
            assert got.tolist() == longer[:, [0, 0, 1, 1], start : start + length].tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_ids_of_a_step_begin_where_its_cache_ends(name: str) -> None:
    class Model:
        def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
            return {"input_ids": input_ids[:, -1:]}

    prompt, cache = Prompt(as_ids(two_rows()), torch.tensor([50, 60])), DynamicCache()
    cache.update(torch.zeros(2, 1, 26, 4), torch.zeros(2, 1, 26, 4), 0)
    told: dict[str, Any] = {"mm_position_ids": prompt, "inputs_embeds": None, name: cache}
    made: dict[str, Any] = prepare_inputs_for_generation(Model(), torch.zeros(2, 27, dtype=torch.int64), **told)
    assert made["mm_position_ids"].tolist() == [[[52], [62]]] * 2


def test_a_slice_of_packed_prompts_is_the_prompt_that_it_holds() -> None:
    model, (input_ids, _, _), packed = patched(), prompts(), place(SEGMENTS)
    found = generated(model, input_ids[1:, 15:], mm_position_ids=packed.slice(24, 33))
    assert found[:, 9:].tolist() == one_by_one()[1:]


@pytest.mark.parametrize("given", ["alone", "in a config", "in a config by place", "in that of the model"])
def test_guidance_whose_second_branch_has_no_positions_is_refused(given: str) -> None:
    model, (input_ids, mask, table) = patched(), prompts()
    config = GenerationConfig(guidance_scale=1.5)
    if given == "in that of the model":
        model.generation_config = config
    args = (config,) if given == "in a config by place" else ()
    named: dict[str, Any] = {"alone": {"guidance_scale": 1.5}, "in a config": {"generation_config": config}}
    told = {"attention_mask": mask, "mm_position_ids": table, **named.get(given, {})}
    message = "guidance_scale: got 1.5, want 1"
    assert_refused(message, lambda: model.generate(input_ids, *args, **told), UnsupportedError)


def test_generation_ends_where_ids_would_leave_int32() -> None:
    table = place(SegmentTable.from_documents([[Text(4)]]), start=2**31 - 5)
    message = "positions: got ids from 2147483648 to 2147483648, want finite ids within int32"
    assert_refused(message, lambda: generated(patched(), tokens(1, 4), mm_position_ids=table))


ZEROS, BOTH = torch.zeros(2, 2, 24), torch.tensor([1, 1])
_, _, TABLE = prompts()
SHAPE = "want (2, 2, 24): (axes, batch, seq)"
REFUSED: list[tuple[str, object, object]] = [
    ("mm_position_ids: got 1 document of [24] tokens, want 2 of one length", TABLE.window([0], [0], [24]), None),
    ("mm_position_ids: got padding behind prompt 1, want it before", place(SEGMENTS).pad(), None),
    ("mm_position_ids: got 2 documents of [24, 9] tokens, want 2 of one length", place(SEGMENTS), None),
    (f"mm_position_ids: got (2, 2, 25), {SHAPE}", TABLE.pad(25, "left"), None),
    ("mm_next_positions: got it beside a table", TABLE, 1),
    ("mm_next_positions: got it without mm_position_ids", None, BOTH),
    ("mm_next_positions: got None beside Tensor, want (batch,) ids of the tokens to come", ZEROS, None),
    ("mm_next_positions: got torch.float32 (2,), want a tensor of 2 integers", ZEROS, torch.ones(2)),
    (f"mm_position_ids: got (3, 2, 24), {SHAPE}", torch.zeros(3, 2, 24), BOTH),
    (f"mm_position_ids: got list, {SHAPE}", [0] * 24, BOTH),
]


@pytest.mark.parametrize(("why", "ids", "following"), REFUSED, ids=range(len(REFUSED)))
def test_prompts_that_do_not_fit_are_refused(why: str, ids: object, following: object) -> None:
    model, (input_ids, mask, _) = patched(), prompts()
    told = {"attention_mask": mask, "mm_position_ids": ids, "mm_next_positions": following}
    assert_refused(why, lambda: generated(model, input_ids, **told))
