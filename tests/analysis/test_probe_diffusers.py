"""Keys of small transformers of diffusers, as their own pos_embed turns them: right ones, and what is broken in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("diffusers")
import diffusers
import torch
from torch import Tensor, nn

from mmpos import UnsupportedError, from_diffusers
from mmpos.analysis.probe import LayerKeys, Meant, Verdict, identify, judge
from mmpos.analysis.probe import diffusers as keys_of
from mmpos.errors import InvalidInputError
from mmpos.integrations.diffusers import patch
from mmpos.rotary import Rotary
from mmpos.segments import Grid, SegmentTable, Text

Documents = list[list[Text | Grid]]
Fault = Callable[[Tensor], Tensor]

ONE: Documents = [[Text(6), Grid(5, 8)]]
TWO: Documents = [[Text(6), Grid(5, 8)], [Text(6), Grid(8, 5)]]
LONG: Documents = [[Text(6), Grid(1, 300)]]
REFERENCES: Documents = [[Text(6), Grid(5, 8), Grid(4, 4)]]

FLUX: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 64,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "axes_dims_rope": (8, 28, 28),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {**FLUX, "pooled_projection_dim": 8},
    "LongCatImageTransformer2DModel": FLUX,
    "WanTransformer3DModel": {
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 8,
        "freq_dim": 8,
        "ffn_dim": 8,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    },
    "CosmosTransformer3DModel": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "num_layers": 1,
        "text_embed_dim": 8,
        "adaln_lora_dim": 8,
        "extra_pos_embed_type": None,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_layers": 1,
        "ffn_hidden_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "text_in_dim": 8,
        "rope_axes_dim": (16, 24, 24),
    },
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**CONFIGS[name]).eval()


def called(transformer: Any, documents: Documents, **more: Any) -> tuple[LayerKeys, ...]:
    """Run a transformer of texts and images on a batch; it takes the ids of the first document for all."""
    first = from_diffusers(transformer).place(documents[:1]).dense().T
    ids, text, rows = torch.from_numpy(first).float(), documents[0][0].extents[2], len(documents)
    call: dict[str, Any] = {
        "hidden_states": torch.zeros(rows, len(ids) - text, 4),
        "encoder_hidden_states": torch.zeros(rows, text, 8),
        "timestep": torch.ones(rows),
    }
    if type(transformer).__name__.startswith("Flux"):
        call["pooled_projections"] = torch.zeros(rows, 8)
    return keys_of(transformer, call | (more or {"img_ids": ids[text:], "txt_ids": ids[:text]}))


def verdict(transformer: Any, layer: LayerKeys, documents: Documents) -> Verdict:
    settings, segments = from_diffusers(transformer), SegmentTable.from_documents(documents)
    return judge(layer.keys, settings.rotary, Meant(segments, settings.scheme), reference=layer.reference)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "LongCatImageTransformer2DModel"])
def test_keys_of_a_right_transformer_are_as_meant_in_blocks_of_two_streams_and_of_one(name: str) -> None:
    layers = called(transformer := made(name), REFERENCES)
    assert [(one.layer, one.keys.shape) for one in layers] == [(0, (1, 62, 2, 64)), (1, (1, 62, 2, 64))]
    assert all(verdict(transformer, one, REFERENCES).equal for one in layers)


def test_cross_attention_has_no_keys_to_judge_and_one_norm_over_all_heads_is_served() -> None:
    transformer = made("WanTransformer3DModel")
    latents, texts = torch.zeros(1, 4, 3, 8, 10), torch.zeros(1, 6, 8)
    layers = keys_of(transformer, {"hidden_states": latents, "encoder_hidden_states": texts, "timestep": torch.ones(1)})
    assert [(one.layer, one.keys.shape) for one in layers] == [(0, (1, 60, 2, 64)), (1, (1, 60, 2, 64))]
    assert all(verdict(transformer, one, [[Grid(4, 5, frames=3)]]).equal for one in layers)


@pytest.mark.parametrize("width", [1, 5])
def test_a_norm_after_heads_and_tokens_are_exchanged_is_served(width: int) -> None:
    """Cosmos norms keys of (batch, heads, tokens, head_dim), which may have as many tokens as heads."""
    transformer = made("CosmosTransformer3DModel")
    latents, mask = torch.zeros(1, 4, 1, 4, 2 * width), torch.zeros(1, 1, 4, 2 * width)
    call = {"hidden_states": latents, "padding_mask": mask, "encoder_hidden_states": torch.zeros(1, 6, 8)}
    (layer,) = keys_of(transformer, {**call, "timestep": torch.ones(1)})
    assert layer.keys.shape == (1, 2 * width, 2, 64)
    assert verdict(transformer, layer, [[Grid(2, width)]]).equal


def test_the_rotation_of_the_first_image_for_all_is_named_and_patch_mends_it() -> None:
    layer, _ = called(transformer := made("FluxTransformer2DModel"), TWO)
    found = verdict(transformer, layer, TWO)
    assert found.cause == "all documents have the ids of the first one, which has other sizes"
    assert found.first_wrong == 46 + 11  # the sixth patch of the second image begins its second row
    layers = called(patch(transformer), TWO, positions=from_diffusers(transformer).place(TWO))
    assert all(verdict(transformer, one, TWO).equal for one in layers)


def before(change: Fault) -> Callable[[nn.Module], object]:
    return lambda rope: rope.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def laid_out_in_halves(rope: nn.Module) -> None:
    rope.register_forward_hook(lambda _, args, tables: [torch.cat([table[:, ::2]] * 2, dim=-1) for table in tables])


@pytest.mark.parametrize(
    ("name", "documents", "breaks", "first", "cause"),
    [
        ("Flux", LONG, before(lambda ids: ids.bfloat16()), 6 + 257,
         "ids are cast to bfloat16 before they meet frequencies"),
        ("LongCatImage", ONE, before(lambda ids: ids + torch.tensor([0, 1, 1]) * (ids[:, :1] > 0)), 6,
         "ids are computed for one text token more"),
        ("Flux", REFERENCES, before(lambda ids: ids + torch.tensor([1, 0, 0]) * (ids[:, :1] > 0)), 46,
         "references are shifted by (1, 0, 0)"),
        ("Flux", ONE, before(lambda ids: ids[:, [0, 2, 1]]), 7,
         "axes are swapped: pairs of (frame, row, col) turn by (frame, col, row)"),
        ("Flux", ONE, before(lambda ids: torch.cat([ids[:6], torch.cartesian_prod(*map(torch.arange, (1, 8, 5)))])), 11,
         "height and width of grids are swapped"),
        ("Flux", ONE, laid_out_in_halves, 7,
         "the two channels of a pair turn apart: both angles of a pair lie in two halves, and pairs are 'adjacent'"),
    ],
)  # fmt: skip
def test_what_is_broken_in_pos_embed_is_named(
    name: str, documents: Documents, breaks: Callable[[nn.Module], object], first: int, cause: str
) -> None:
    transformer = made(f"{name}Transformer2DModel")
    breaks(transformer.pos_embed)
    for layer in called(transformer, documents):
        found = verdict(transformer, layer, documents)
        assert (found.equal, found.first_wrong) == (False, first)
        assert f"Cause: {cause}" in " ".join(found.sentences)


@pytest.mark.parametrize("known", [True, False])
def test_ernie_image_turns_the_channels_of_a_pair_apart(known: bool) -> None:
    """Its angles lie twice side by side, and its pairs are halves: from a rotation of whole pairs it is named so."""
    transformer = made("ErnieImageTransformer2DModel")
    call = {"hidden_states": torch.zeros(1, 4, 5, 8), "timestep": torch.ones(1)}
    (layer,) = keys_of(transformer, {**call, "text_bth": torch.zeros(1, 6, 8), "text_lens": torch.tensor([6])})
    plain = Rotary(64, 256.0, axes=3, allocation="axial", axes_dim=(16, 24, 24))
    positions = from_diffusers(transformer).place([[Grid(5, 8), Text(6)]])
    found = identify(layer.keys, plain, positions, reference=layer.reference if known else None)
    lies = "both angles of a pair lie side by side, and pairs are 'half'"
    assert found.cause == f"the two channels of a pair turn apart: {lies}"
    assert found.residual < 1e-6 < 0.5 < found.meant
    assert (found.rotary, found.first_wrong) == (None, 0 if known else 1)


def test_a_module_without_attention_and_a_call_that_is_none_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"transformer: got no keys from Linear, want attentions that end in"):
        keys_of(nn.Linear(1, 1), {"input": torch.zeros(1)})
    with pytest.raises(InvalidInputError, match="call: got list"):
        keys_of(nn.Linear(1, 1), [])  # type: ignore[arg-type]
