"""Tables of cos, sin and angles, with which formulas of models and engines reproduce our rotation; peers' rotations."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import BY_HEAD, ids_of, normal, packed, phases_by_head
from tolerance import FREQUENCY, assert_within, cos_sin, rotations
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, angles, apply_rotary

PACKED = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
LONG = place(SegmentTable.from_documents([[Text(9_000_000), Grid(3, 2), Text(1)]]), "rope-tie-v2")
HALVES = LONG.slice(8_999_998, 9_000_007)
PAIRING = pytest.mark.parametrize("pairing", ["half", "adjacent"])


def tables(rotary: Rotary, positions: Any, layout: Any = "pairs") -> tuple[Tensor, ...]:
    """Return the tables of a layout as a tuple."""
    made = mmpos.rotary.cos_sin(rotary, positions, layout)
    return (made,) if isinstance(made, Tensor) else made


SHAPES: list[tuple[Any, tuple[int, ...]]] = [
    (PACKED, (15,)),
    (EQUAL, (2, 8)),
    (place(SegmentTable.from_documents([[Text(1), Grid(2, 2)]])), (1, 5)),
    (place(SegmentTable.from_documents([])), (0,)),
    *((torch.zeros(2, *shape, dtype=torch.int32), shape) for shape in ((3, 0), (0, 5), (0, 0), (0,))),
]


@PAIRING
@pytest.mark.parametrize(("positions", "leading"), SHAPES, ids=[str(shape) for _, shape in SHAPES])
def test_tables_have_the_documented_shapes_and_dtypes(positions: Any, leading: tuple[int, ...], pairing: Any) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing)
    batch, seq = leading if len(leading) == 2 else (1, *leading)
    width, dtype = (24, torch.float32) if pairing == "half" else (6, torch.complex64)
    for layout, count, want in (
        ("pairs", 2, ((*leading, 6), torch.float32)),
        ("transformers", 2, ((batch, seq, 12), torch.float32)),
        ("torchtitan", 1, ((*leading, width), dtype)),
    ):
        assert [(x.shape, x.dtype) for x in tables(rotary, positions, layout)] == [want] * count
    freqs = angles(rotary, positions)
    assert (freqs.shape, freqs.dtype) == ((seq, batch, 1, 12), torch.float32)
    q = torch.zeros(batch, seq, 4, 16)
    assert apply_rotary(q, q, positions, rotary)[0].shape == q.shape


@pytest.mark.parametrize("positions", [PACKED, EQUAL, HALVES], ids=["packed", "equal", "halves"])
def test_a_table_device_positions_and_dense_ids_give_the_same_bits(positions: PositionTable) -> None:
    rotary, dense = Rotary(head_dim=16), torch.from_numpy(positions.dense())
    if positions is not PACKED:
        dense = dense.reshape(2, positions.num_documents, -1)
    for same in (DevicePositions.from_table(positions, capacity=9), dense):
        for layout in ("pairs", "transformers", "torchtitan"):
            assert_within(tables(rotary, same, layout), tables(rotary, positions, layout), 0)
        assert_within(angles(rotary, same), angles(rotary, positions), 0)


# The formulas, as in their code: each turns (batch, seq, heads, head_dim) x by the tables that its project expects.


def quarter_turn(x: Tensor, pairing: str) -> Tensor:
    """Rotate pairs by 90°: rotate_half of Transformers, TorchTitan and Megatron, or for adjacent pairs."""
    if pairing == "half":
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def by_transformers(x: Tensor, rotary: Rotary, positions: PositionTable) -> Tensor:
    cos, sin = (table.unsqueeze(2) for table in tables(rotary, positions, "transformers"))
    return x * cos + quarter_turn(x, rotary.pairing) * sin


def by_megatron(x: Tensor, rotary: Rotary, positions: PositionTable) -> Tensor:
    freqs, mscale = angles(rotary, positions), rotary.attention_factor
    x = x.transpose(0, 1)
    turned = x * (freqs.cos() * mscale) + quarter_turn(x, rotary.pairing) * (freqs.sin() * mscale)
    return turned.transpose(0, 1)


def by_torchtitan(x: Tensor, rotary: Rotary, positions: PositionTable) -> Tensor:
    (cache,) = tables(rotary, positions, "torchtitan")
    cache = cache.view(*x.shape[:2], 1, -1)
    if rotary.pairing == "half":
        cos, sin = cache.chunk(2, -1)
        return x * cos + quarter_turn(x, "half") * sin
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * cache).flatten(3)


@PAIRING
@pytest.mark.parametrize("positions", [EQUAL, PACKED, HALVES], ids=["equal", "packed", "halves"])
@pytest.mark.parametrize("formula", [by_transformers, by_megatron, by_torchtitan])
def test_formulas_of_models_with_our_tables_reproduce_our_rotation(formula: Any, positions: Any, pairing: Any) -> None:
    off = cos_sin(np.pi, 1) if formula is by_megatron else 0.0  # our angles are wrapped and rounded to float32
    for scaling in (None, YaRN(4.0, 64)):
        rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing, scaling=scaling)
        rows = positions.num_documents if positions is EQUAL else 1
        q = normal(rows, positions.num_tokens // rows, 3, 16)
        want, _ = apply_rotary(q, None, positions, rotary)
        got = torch.cat((formula(q[..., :12], rotary, positions), q[..., 12:]), dim=-1)
        assert_within(got, want, rotations(want, off))


@pytest.mark.parametrize("name", ["two heads per axis", "an unrotated head", "scaled", "own frequencies"])
def test_tables_of_cos_and_sin_have_a_kv_head_dimension(name: str) -> None:
    rotary, video = BY_HEAD[name], packed("videorope", 70_000).slice(5, 14)
    want = phases_by_head(ids_of(video), rotary)
    pairs, factor = tables(rotary, video), rotary.attention_factor
    assert_within(pairs, tuple(factor * torch.from_numpy(f(want)).float() for f in (np.cos, np.sin)), cos_sin())
    for table, narrow in zip(tables(rotary, video, "transformers"), pairs, strict=True):
        assert torch.equal(table, torch.cat((narrow, narrow), -1).transpose(0, 1)[None])
    batch = torch.arange(3 * 8).view(1, 2, 12).expand(3, 2, 12)
    assert tables(rotary, batch, "transformers")[0].shape == (2, want.shape[1], 12, rotary.rotary_dim)
    assert tables(rotary, batch)[0].shape == (2, 12, *want.shape[1:])


# Transformers and timm.


def transformers(model: str, name: str, part: str = "modeling") -> Any:
    pytest.importorskip("transformers")
    return getattr(import_module(f"transformers.models.{model}.{part}_{model}"), name)


MODELS = {
    "llama": ("LlamaConfig", "LlamaRotaryEmbedding", {}),
    "cohere": ("CohereConfig", "CohereRotaryEmbedding", {}),
    "qwen2_vl": ("Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", {}),
    "qwen3_vl": ("Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", {}),
    "glm4v": ("Glm4vTextConfig", "Glm4vTextRotaryEmbedding", {"head_dim": 128, "partial_rotary_factor": 0.5}),
}


# test_hf_classes.py compares the scores of all classes, which do not depend on the order of channels.
@pytest.mark.parametrize("model", MODELS)
def test_rotated_channels_agree_with_transformers(model: str) -> None:
    config, module, arguments = MODELS[model]
    hf_config = transformers(model, config, "configuration")(**arguments)
    axes = 1 if model in ("llama", "cohere") else 3
    rotary = Rotary.from_hf_config(hf_config, precision="hf", axes=axes)
    documents: list[list[Text | Grid]] = [
        [Text(3), Grid(2, 3, frames=2), Text(2), Grid(3, 2), Text(4)],
        [Text(5), Grid(4, 4), Text(1), Text(5)],
    ]
    positions = place(SegmentTable.from_documents(documents), "flatten" if axes == 1 else "mrope").pad()
    ids = torch.from_numpy(positions.dense(dtype="int64")).reshape(axes, 2, -1)
    q, k = (normal(2, heads, ids.shape[2], rotary.head_dim) for heads in (4, 2))
    cos, sin = transformers(model, module)(hf_config)(q, ids[0] if axes == 1 else ids)
    theirs = transformers(model, "apply_rotary_pos_emb")(q, k, cos, sin)
    for form in (positions, ids):
        ours: Any = apply_rotary(q, k, form, rotary, layout="bhsd")
        assert_within(ours, theirs, [rotations(x, cos_sin()) for x in theirs])


@pytest.mark.parametrize(("pairing", "half"), [("adjacent", False), ("half", True)])
def test_axial_rotations_agree_with_timm(pairing: Any, half: bool) -> None:
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    rotary = Rotary(head_dim=64, allocation="axial", pairing=pairing, precision="hf")
    positions = place(SegmentTable.from_documents([[Grid(5, 7)]]), "grid-2d")
    q = normal(1, 35, 4, 64)
    embedding = timm.RotaryEmbeddingCat(64, in_pixels=False, rotate_half=half).get_embed([5, 7])
    theirs = timm.apply_rot_embed_cat(q.transpose(1, 2), embedding, half=half).transpose(1, 2)
    got, _ = apply_rotary(q, None, positions, rotary)
    assert_within(got, theirs, rotations(theirs, cos_sin(6.0, FREQUENCY + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["blt", "cohere", "ernie4_5", "glm", "helium", "llama", "moonshine"])
def test_functions_in_transformers_accept_our_cos_and_sin(model: str) -> None:
    rotate = transformers(model, "apply_rotary_pos_emb")
    rotary, q = Rotary(head_dim=16, pairing="half" if model == "llama" else "adjacent"), normal(2, 8, 3, 16)
    cos, sin = tables(rotary, EQUAL, "transformers")
    if model in ("ernie4_5", "glm", "helium", "moonshine"):  # they repeat each pair themselves
        cos, sin = (torch.cat((x, x), dim=-1) for x in tables(rotary, EQUAL))
    got, _ = rotate(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    want, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(got.transpose(1, 2), want, rotations(want))
