"""Logits and gradients of patched models equal those of the unpatched model, or those with manual cos and sin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import (
    CONFIGS,
    OTHERS,
    WAYS,
    as_ids,
    gradients,
    model_of,
    patched,
    rotary_of,
    rotated_by_hand,
    text,
    tokens,
    two_rows,
)
from tolerance import assert_within, rounding
from torch import Tensor

from mmpos import Grid, InvalidInputError, SegmentTable, Text, place
from mmpos.integrations.hf import patch, unpatch
from mmpos.rotary import DevicePositions

NAMES = sorted(CONFIGS)
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in NAMES),
        ("gemma3", torch.float32),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in OTHERS),
    ],
    ids=str,
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, input_ids = model_of(name, dtype), tokens(2, 120)
    with torch.no_grad():
        want = model(input_ids).logits
        patch(model, rotary_of(model, precision="hf"))
        assert torch.equal(model(input_ids, mm_position_ids=text(120, 120)).logits, want)
        assert torch.equal(model(input_ids).logits, want)
        assert torch.equal(model(input_ids, mm_position_ids=None).logits, want)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_images_have_the_same_logits_as_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids = model_of(name), tokens(2, 24)
    table, rotary = two_rows("rope-tie-v2"), rotary_of(model)  # half-integers
    with torch.no_grad():
        untouched = model(input_ids).logits
        with rotated_by_hand(model, table, rotary, 2):
            want, bound = model(input_ids).logits, rounding(lambda: model(input_ids).logits, model.parameters())
        assert (want - untouched).abs().max() > 0.01 * untouched.abs().max()
        for way in ("reference",) if name == "phi" else WAYS:  # Phi rotates only half of its channels
            got = patched(model, way)(input_ids, mm_position_ids=table).logits
            assert_within(got, want, bound)
            unpatch(model)


@pytest.mark.parametrize(("embedding", "states"), [DTYPES, DTYPES[::-1]], ids=str)
def test_cos_and_sin_have_the_dtype_of_the_hidden_states_rather_than_the_weights(
    embedding: torch.dtype, states: torch.dtype
) -> None:
    model, input_ids = model_of("llama", states), tokens(1, 24)
    model.model.embed_tokens.to(embedding)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.to(states))
    with torch.no_grad():
        want = model(input_ids).logits
        patch(model, rotary_of(model, precision="hf"))
        assert torch.equal(model(input_ids, mm_position_ids=text(24)).logits, want)


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2"])
def test_tables_device_positions_and_dense_ids_give_the_same_logits(scheme: str) -> None:
    model, input_ids, table = patched(model_of("llama")), tokens(2, 24), two_rows(scheme)
    forms = [table, DevicePositions.from_table(table), as_ids(table)]
    with torch.no_grad():
        want, *others = [model(input_ids, mm_position_ids=ids).logits for ids in forms]
        embeds = model.get_input_embeddings()(input_ids)
        others.append(model(inputs_embeds=embeds, mm_position_ids=table).logits)
        others.append(model.lm_head(model.model(input_ids, None, None, mm_position_ids=table).last_hidden_state))
    assert all(torch.equal(other, want) for other in others)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_heads_with_separate_axes_rotate_by_positions(implementation: Any) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    heads = model.config.num_key_value_heads

    def logits(**allocation: Any) -> Tensor:
        patch(model, rotary_of(model, axes=2, **allocation), implementation=implementation)
        with torch.no_grad():
            out: Tensor = model(input_ids, mm_position_ids=table).logits
        unpatch(model)
        return out

    with torch.no_grad():
        bound = rounding(lambda: model(input_ids).logits, model.parameters())
    columns = logits(allocation="heads", head_axes=[1] * heads)
    assert_within(columns, logits(allocation=[1] * (rotary_of(model).num_pairs)), bound)
    assert (logits(allocation="heads", head_axes=[0, 1] * (heads // 2)) - columns).abs().max() > 0.01


def test_axes_and_allocations_give_the_same_logits_as_manual_cos_and_sin() -> None:
    model, input_ids = model_of("qwen3"), tokens(2, 24)
    for scheme, changes in (
        ("flatten", {"axes": 1}),
        ("mrope", {"allocation": "sections", "mrope_section": [2, 3, 3]}),
        ("vrope", {"axes": 4}),
        ("rope-tie", {"allocation": "axial"}),
    ):
        table, rotary = two_rows(scheme), rotary_of(model, **changes)
        with torch.no_grad(), rotated_by_hand(model, table, rotary, 2):
            want, bound = model(input_ids).logits, rounding(lambda: model(input_ids).logits, model.parameters())
        patch(model, rotary)
        assert_within(model(input_ids, mm_position_ids=table).logits, want, bound)
        unpatch(model)


LENGTHS = {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn", "factor": 4.0, **LENGTHS}, {"rope_type": "dynamic", "factor": 2}]
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_with_rope_scaling(rope: dict[str, object]) -> None:
    model = model_of("llama", rope_parameters={"rope_theta": 5e5, **rope})
    input_ids, rotary = tokens(1, 300), rotary_of(model, precision="hf")
    assert rotary.scaling is not None
    with torch.no_grad():
        want = model(input_ids).logits
        assert torch.equal(patch(model, rotary)(input_ids, mm_position_ids=text(300)).logits, want)


def test_a_next_position_beyond_the_length_of_a_scaled_rotary_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, input_ids = model_of("llama", rope_parameters=rope, max_position_embeddings=64), tokens(1, 60)
    table = place(SegmentTable.from_documents([[Text(3), Grid(6, 9), Text(3)]]))  # 60 tokens; the next position is 75
    rotary = rotary_of(model)
    patch(model, rotary)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=r"got next position 75, .* a patch with rotary.for_length\(75\)"):
            call(input_ids, mm_position_ids=table)
    unpatch(model)
    with torch.no_grad(), rotated_by_hand(model, table, rotary.for_length(80), 1):
        want, bound = model(input_ids).logits, rounding(lambda: model(input_ids).logits, model.parameters())
    got = patch(model, rotary.for_length(80))(input_ids, mm_position_ids=table).logits
    assert_within(got, want, bound)


# Training.


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_loss_and_gradients_equal_those_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids, table = model_of(name), tokens(2, 24), two_rows()
    rotary = rotary_of(model)
    with rotated_by_hand(model, table, rotary, 2):
        want, bounds = gradients(model, input_ids), rounding(lambda: gradients(model, input_ids), model.parameters())
    assert_within(gradients(patch(model, rotary), input_ids, mm_position_ids=table), want, bounds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_use_the_positions_of_their_own_call(reentrant: bool, way: str) -> None:
    model, input_ids, table = patched(model_of("qwen3"), way), tokens(2, 24), two_rows()
    loss, *want = gradients(model, input_ids, mm_position_ids=table)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()
    model.zero_grad()
    checkpointed = model(input_ids, labels=input_ids, mm_position_ids=table, use_cache=False).loss
    model.eval()
    with torch.no_grad():  # call with other positions before the backward pass
        model(input_ids, mm_position_ids=text(24, 24), use_cache=False)
    model.train()
    checkpointed.backward()
    assert torch.equal(checkpointed, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
