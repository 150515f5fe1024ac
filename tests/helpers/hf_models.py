"""Tiny Transformers models with random weights, prompts for them, and the expected rotation, computed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from rotary_oracle import ids_of, phases
from tolerance import assert_within, rounding
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.integrations.hf import patch
from mmpos.rotary import Rotary

WAYS = ("fused", "reference")

CONFIGS = ("gemma", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3")
"""Model types that are built like Llama."""

OTHERS = (
    "apertus", "arcee", "diffllama", "exaone4", "granite", "lfm2", "ministral", "mixtral", "olmo2", "olmo3", "phi",
    "phi3", "qwen2_moe", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""Further model types, which have experts or another structure."""

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # large, so that the logits depend on every token
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_of(name: str, **changes: Any) -> Any:
    """Build a config with two layers; Gemma 3 gets one layer of each type."""
    changes = {**({"sliding_window_pattern": 2} if name == "gemma3" else {}), **changes}
    kind: Any = CONFIG_MAPPING["gemma3_text" if name == "gemma3" else name]
    return kind(**{**SIZES, **({} if name in CONFIGS else EXPERTS), **changes})


def model_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Build a model with random weights that depend only on the name."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=dtype).eval()


def rotary_of(model: Any, **changes: Any) -> Any:
    """Build the model's rotation over two interleaved axes: a Rotary, or one per layer type."""
    kinds = getattr(model.model.rotary_emb, "layer_types", None)
    if kinds is None:
        return Rotary.from_hf_config(model.config, **changes)
    return {kind: Rotary.from_hf_config(model.config, layer_type=kind, **changes) for kind in kinds}


def patched(model: Any, way: str = "reference") -> Any:
    """Patch a model, or build one of the named type and patch it, with its own rotation.

    "fused" follows the kernel's code path but runs the extension, which returns the same bits and is much faster than
    Triton's interpreter.
    """
    model = model_of(model) if isinstance(model, str) else model
    patch(model, rotary_of(model), implementation="triton" if way == "fused" else "reference")
    if way == "fused":
        for layer in model.model.layers:
            layer.self_attn.forward.__init__(layer.self_attn, "auto")
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Draw random token ids other than the padding token."""
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def two_rows(scheme: str = "rope-tie") -> PositionTable:
    """Place two rows of 24 tokens, each with an image."""
    return place(SegmentTable.from_documents([[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 5), Text(12)]]), scheme)


def as_ids(table: PositionTable) -> Tensor:
    """Return the dense ids, (axes, batch, seq), of documents of equal length."""
    return torch.from_numpy(table.dense().reshape(table.axes, table.num_documents, -1))


def text(*lengths: int) -> PositionTable:
    """Place text-only documents of these lengths."""
    return place(SegmentTable.from_documents([[Text(n)] for n in lengths]))


def gradients(model: Any, input_ids: Tensor, **arguments: Any) -> list[Tensor]:
    """Return the loss and the gradient of each parameter."""
    model.train()
    model.zero_grad()
    loss = model(input_ids, labels=input_ids, **arguments).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_logits(model: Any, got: Tensor, *args: Any, **kwargs: Any) -> None:
    """Assert that logits are, up to rounding, those of the call with these arguments."""

    @torch.no_grad()
    def run() -> Tensor:
        out: Tensor = model(*args, **kwargs).logits
        return out

    assert_within(got, run(), rounding(run, model.parameters()))


def by_hand(model: Any, table: PositionTable, rotary: Any, run: Callable[[], Any]) -> tuple[Any, list[float]]:
    """Run the original model with cos and sin of exact angles, computed one token at a time; return a bound as well."""
    rotary_emb, exact = model.model.rotary_emb, ids_of(table)

    @cache
    def exact_cos_sin(layer_type: str | None) -> tuple[Tensor, Tensor]:
        one = rotary if layer_type is None else rotary[layer_type]
        angle = torch.from_numpy(phases(exact, one)).reshape(table.num_documents, -1, one.num_pairs)
        angle = torch.cat((angle, angle), dim=-1)
        return torch.cos(angle) * one.attention_factor, torch.sin(angle) * one.attention_factor

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = exact_cos_sin(layer_type)
        return cos.to(x), sin.to(x)

    rotary_emb.forward = forward
    try:
        return run(), rounding(run, model.parameters())
    finally:
        del rotary_emb.forward
