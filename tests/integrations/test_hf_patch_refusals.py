"""Errors raised by patch and by patched models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import WAYS, model_of, patched, rotary_of, text, tokens, two_rows
from refusals import assert_refused
from transformers import AutoModelForCausalLM, GPT2Config

from mmpos import InvalidInputError, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.hf import patch
from mmpos.rotary import DevicePositions, Rotary, YaRN


def refused(message: str, model: Any, rotary: Any, **arguments: Any) -> None:
    """Check that patch raises an error whose message begins with this text."""
    assert_refused(message, lambda: patch(model, rotary, **arguments), (InvalidInputError, UnsupportedError))


def test_unsupported_models_and_rotaries_are_refused() -> None:
    model = model_of("llama")
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=8))
    refused("model: got GPT2LMHeadModel, which has no rotary_emb next to its layers", gpt2, Rotary(16))
    adjacent = "model: got 'cohere', which has pairing 'adjacent', want pairing 'half'"
    refused(adjacent, model_of("cohere"), Rotary(16))
    for rotary, message in (
        (Rotary(32), "rotary.head_dim: got 32, want 16 as in the model"),
        (Rotary(16, rotary_dim=8), "rotary.rotary_dim: got 8, want 16"),
        (Rotary(16, pairing="adjacent"), "rotary.pairing: got 'adjacent', want 'half'"),
        (Rotary(16, scaling=YaRN(4.0, 128)), "rotary.attention_factor: got 1.138629"),
        ({"full_attention": Rotary(16)}, "rotary: got dict, want one Rotary"),
        ("rope", "rotary: got str, want one Rotary"),
    ):
        refused(message, model, rotary)
    refused("implementation: got 'cuda'", model, Rotary(16), implementation="cuda")
    patch(model, Rotary(16))
    for again in (model, model.model):
        refused("model: got a patched model", again, Rotary(16))


@pytest.mark.parametrize("way", WAYS)
def test_cos_and_sin_of_an_unexpected_shape_are_refused(way: str) -> None:
    model = patched(model_of("gpt_oss", num_local_experts=2), way)
    with pytest.raises(UnsupportedError, match=r"got cos of shape \(1, 24, 8\) in GptOssAttention, want \(batch"):
        model(tokens(2, 24), mm_position_ids=two_rows())


PARTLY: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
NO_KERNEL: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("phi3", {"rope_parameters": PARTLY}, "implementation: got 'triton' for 8 of 16 channels, want 'reference'"),
    (
        "gemma3n_text",
        {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "intermediate_size": [96] * 2},
        "implementation: got 'triton' for Gemma3nTextAttention, which does not rotate q and k in one call",
    ),
    (  # the indexer receives cos and sin as well
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse"] * 2, "rotary_dim": 16},
        "implementation: got 'triton' for MiniMaxM3VLAttention, which does not rotate q and k in one call",
    ),
)


@pytest.mark.parametrize(("name", "changes", "message"), NO_KERNEL)
def test_the_kernel_is_refused_for_models_that_do_not_rotate_all_of_q_and_k_in_one_call(
    name: str, changes: Any, message: str
) -> None:
    model = model_of(name, **changes)
    refused(message, model, rotary_of(model), implementation="triton")
    if name == "phi3":
        by_heads = rotary_of(model, allocation="heads", head_axes=[0, 1])
        refused("rotary: got head_axes, want the same axes for all heads", model, by_heads)
    patch(model, rotary_of(model), implementation="auto")
    assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)


MINICPM3 = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "granite_swa": ({"layer_rope_theta": [1e4, 5e5]}, "has 3 modules of type GraniteSWARotaryEmbedding"),
    "minicpm3": (MINICPM3, "has no head_dim in the self_attn of layer 0"),
    "beam": ({}, "does not rotate its layers of type 'full_attention'"),
}


@pytest.mark.parametrize("name", sorted(UNLIKE))
def test_models_built_differently_from_llama_are_refused(name: str) -> None:
    changes, message = UNLIKE[name]
    model = model_of(name, **changes)
    refused(f"model: got {type(model).__name__}, which {message}", model, Rotary(16))


def test_every_layer_type_requires_a_rotary() -> None:
    model = model_of("gemma3")
    kinds = "want a mapping from each layer type of ['full_attention', 'sliding_attention'] to a Rotary"
    refused(f"rotary: got Rotary, {kinds}", model, Rotary(16))
    refused(f"rotary: got ['full_attention'], {kinds}", model, {"full_attention": Rotary(16)})
    mixed = {"full_attention": Rotary(16), "sliding_attention": Rotary(16, axes=1)}
    refused("rotary: got [1, 2] axes, want the same", model, mixed)
    mixed["sliding_attention"] = Rotary(8)
    refused("rotary['sliding_attention'].head_dim: got 8, want 16", model, mixed)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 24, dtype=torch.int64), r"got shape \(2, 24\), want \(2, 2, 24\): \(axes, batch, seq\)"),
        (torch.zeros(3, 2, 24, dtype=torch.int64), r"got shape \(3, 2, 24\), want \(2, 2, 24\)"),
        (torch.zeros(2, 2, 24), "got dtype torch.float32, want int32, int64 or float64"),
        (torch.zeros(2, 2, 24, dtype=torch.int64, device="meta"), "got a tensor on meta, want cpu"),
        ([[0] * 24] * 2, "got list, want a PositionTable, DevicePositions or a tensor of ids"),
        (text(24), "got 24 tokens, want 48 in 2 rows of 24"),
        (text(20, 28), "got documents of unequal numbers of tokens, want 24, the length of a row; pad the table"),
        (text(16, 16, 16), "got documents of 16 tokens, want 24"),
        (place(SegmentTable.from_documents([[Text(24)]] * 2), "flatten"), "got 1 axis, want 2"),
    ],
    ids=range(9),
)
def test_invalid_positions_in_a_call_are_refused(ids: object, message: str) -> None:
    model = patched(model_of("llama"))
    with pytest.raises(InvalidInputError, match=f"mm_position_ids: {message}"):
        model(tokens(2, 24), mm_position_ids=ids)


def test_a_table_passed_as_position_ids_is_refused() -> None:
    model = patched(model_of("llama"))
    for table, name in ((two_rows(), "PositionTable"), (DevicePositions.from_table(two_rows()), "DevicePositions")):
        with pytest.raises(InvalidInputError, match=f"position_ids: got {name}, want it in mm_position_ids"):
            model(tokens(2, 24), position_ids=table)


def test_positions_require_tokens() -> None:
    model = patched(model_of("llama"))
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match="mm_position_ids requires input_ids or inputs_embeds, got neither"):
            call(mm_position_ids=two_rows())


def test_a_model_that_drops_extra_arguments_is_refused() -> None:
    model = patched(model_of("llama"))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "mm_rotations"}),
            with_kwargs=True,
        )
    with pytest.raises(UnsupportedError, match="got LlamaModel, which does not forward extra keyword arguments"):
        model(tokens(2, 24), mm_position_ids=two_rows())
