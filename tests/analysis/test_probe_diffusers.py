"""Keys of small diffusers transformers, rotated by their own pos_embed, with and without a bug."""

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


def transformer_of(name: str) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, name)(**CONFIGS[name]).eval()


def layers_of(transformer: Any, documents: Documents, **more: Any) -> tuple[LayerKeys, ...]:
    """Run a text-to-image transformer on a batch; it uses the ids of the first document for all documents."""
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
def test_keys_of_a_correct_transformer_are_as_intended_in_single_and_dual_stream_blocks(name: str) -> None:
    layers = layers_of(transformer := transformer_of(name), REFERENCES)
    assert [(layer.layer, layer.keys.shape) for layer in layers] == [(0, (1, 62, 2, 64)), (1, (1, 62, 2, 64))]
    assert all(verdict(transformer, layer, REFERENCES).equal for layer in layers)


def test_cross_attention_is_ignored_and_a_norm_across_heads_is_supported() -> None:
    transformer = transformer_of("WanTransformer3DModel")
    latents, texts = torch.zeros(1, 4, 3, 8, 10), torch.zeros(1, 6, 8)
    layers = keys_of(transformer, {"hidden_states": latents, "encoder_hidden_states": texts, "timestep": torch.ones(1)})
    assert [(layer.layer, layer.keys.shape) for layer in layers] == [(0, (1, 60, 2, 64)), (1, (1, 60, 2, 64))]
    assert all(verdict(transformer, layer, [[Grid(4, 5, frames=3)]]).equal for layer in layers)


@pytest.mark.parametrize("width", [1, 5])
def test_a_norm_after_transposing_heads_and_tokens_is_supported(width: int) -> None:
    """Cosmos normalizes (batch, heads, tokens, head_dim) keys, which may have as many tokens as heads."""
    transformer = transformer_of("CosmosTransformer3DModel")
    latents, mask = torch.zeros(1, 4, 1, 4, 2 * width), torch.zeros(1, 1, 4, 2 * width)
    call = {"hidden_states": latents, "padding_mask": mask, "encoder_hidden_states": torch.zeros(1, 6, 8)}
    (layer,) = keys_of(transformer, {**call, "timestep": torch.ones(1)})
    assert layer.keys.shape == (1, 2 * width, 2, 64)
    assert verdict(transformer, layer, [[Grid(2, width)]]).equal


def test_rotating_all_images_like_the_first_is_identified_and_patch_corrects_it() -> None:
    layer, _ = layers_of(transformer := transformer_of("FluxTransformer2DModel"), TWO)
    result = verdict(transformer, layer, TWO)
    assert result.cause == "all documents have the ids of the first one, which has other sizes"
    assert result.first_wrong == 46 + 11  # the sixth patch of the second image begins its second row
    layers = layers_of(patch(transformer), TWO, positions=from_diffusers(transformer).place(TWO))
    assert all(verdict(transformer, layer, TWO).equal for layer in layers)


def before(change: Fault) -> Callable[[nn.Module], object]:
    return lambda rope: rope.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def repeat_angles_in_halves(rope: nn.Module) -> None:
    rope.register_forward_hook(lambda _, args, tables: [torch.cat([table[:, ::2]] * 2, dim=-1) for table in tables])


@pytest.mark.parametrize(
    ("name", "documents", "breaks", "first", "cause"),
    [
        ("Flux", LONG, before(lambda ids: ids.bfloat16()), 6 + 257,
         "ids are cast to bfloat16 before the multiplication"),
        ("LongCatImage", ONE, before(lambda ids: ids + torch.tensor([0, 1, 1]) * (ids[:, :1] > 0)), 6,
         "ids are computed for one text token more"),
        ("Flux", REFERENCES, before(lambda ids: ids + torch.tensor([1, 0, 0]) * (ids[:, :1] > 0)), 46,
         "references are shifted by (1, 0, 0)"),
        ("Flux", ONE, before(lambda ids: ids[:, [0, 2, 1]]), 7,
         "axes are swapped: pairs of (frame, row, col) rotate by (frame, col, row)"),
        ("Flux", ONE, before(lambda ids: torch.cat([ids[:6], torch.cartesian_prod(*map(torch.arange, (1, 8, 5)))])), 11,
         "height and width of grids are swapped"),
        ("Flux", ONE, repeat_angles_in_halves, 7,
         "the two channels of a pair rotate differently: angles are repeated in two halves, but pairs are 'adjacent'"),
    ],
)  # fmt: skip
def test_a_bug_in_pos_embed_is_identified(
    name: str, documents: Documents, breaks: Callable[[nn.Module], object], first: int, cause: str
) -> None:
    transformer = transformer_of(f"{name}Transformer2DModel")
    breaks(transformer.pos_embed)
    for layer in layers_of(transformer, documents):
        result = verdict(transformer, layer, documents)
        assert (result.equal, result.first_wrong) == (False, first)
        assert f"Cause: {cause}" in " ".join(result.sentences)


@pytest.mark.parametrize("known", [True, False])
def test_ernie_image_rotates_the_two_channels_of_a_pair_differently(known: bool) -> None:
    """Its angles are repeated side by side, but its pairs are halves; comparing with a plain Rotary reveals it."""
    transformer = transformer_of("ErnieImageTransformer2DModel")
    call = {"hidden_states": torch.zeros(1, 4, 5, 8), "timestep": torch.ones(1)}
    (layer,) = keys_of(transformer, {**call, "text_bth": torch.zeros(1, 6, 8), "text_lens": torch.tensor([6])})
    plain = Rotary(64, 256.0, axes=3, allocation="axial", axes_dim=(16, 24, 24))
    positions = from_diffusers(transformer).place([[Grid(5, 8), Text(6)]])
    identification = identify(layer.keys, plain, positions, reference=layer.reference if known else None)
    cause = "angles are repeated side by side, but pairs are 'half'"
    assert identification.cause == f"the two channels of a pair rotate differently: {cause}"
    assert identification.residual < 1e-6 < 0.5 < identification.meant
    assert (identification.rotary, identification.first_wrong) == (None, 0 if known else 1)


def test_a_module_without_attention_or_a_call_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"transformer: got no keys from Linear, want attention that calls"):
        keys_of(nn.Linear(1, 1), {"input": torch.zeros(1)})
    with pytest.raises(InvalidInputError, match="call: got list"):
        keys_of(nn.Linear(1, 1), [])  # type: ignore[arg-type]
