"""Compare rotations with those of Transformers and timm on the same q, k and ids."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from rotary_oracle import normal
from tolerance import FREQUENCY, assert_within, cos_sin, rotations
from torch import Tensor

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Rotary, apply_rotary

SEGMENTS = SegmentTable.from_documents(
    [[Text(3), Grid(2, 3, frames=2), Text(2), Grid(3, 2), Text(4)], [Text(5), Grid(4, 4), Text(1), Text(5)]]
)


def assert_close(got: Any, expected: Any, error: float = cos_sin()) -> None:
    """Compare rotated heads, given the error of cos and sin; the default is for equal float32 angles."""
    for ours, theirs in zip(got, expected, strict=True):
        assert_within(ours, theirs, rotations(theirs, error))


def transformers(model: str, name: str, part: str = "modeling") -> Any:
    pytest.importorskip("transformers")
    return getattr(importlib.import_module(f"transformers.models.{model}.{part}_{model}"), name)


def batch_of(rotary: Rotary, scheme: str) -> tuple[PositionTable, Tensor, Tensor, Tensor]:
    """Return a padded batch: the table, (axes, batch, seq) ids, and q and k in layout bhsd."""
    positions = place(SEGMENTS, scheme).pad()
    batch, seq = positions.num_documents, positions.max_seqlen
    ids = torch.from_numpy(positions.dense(dtype="int64")).reshape(-1, batch, seq)
    return positions, ids, normal(batch, 4, seq, rotary.head_dim), normal(batch, 2, seq, rotary.head_dim)


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
    positions, ids, q, k = batch_of(rotary, "flatten" if axes == 1 else "mrope")
    cos, sin = transformers(model, module)(hf_config)(q, ids[0] if axes == 1 else ids)
    theirs = transformers(model, "apply_rotary_pos_emb")(q, k, cos, sin)
    assert_close(apply_rotary(q, k, positions, rotary, layout="bhsd"), theirs)
    assert_close(apply_rotary(q, k, ids, rotary, layout="bhsd"), theirs)


@pytest.mark.parametrize(("pairing", "half"), [("adjacent", False), ("half", True)])
def test_axial_rotations_agree_with_timm(pairing: Any, half: bool) -> None:
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    rotary = Rotary(head_dim=64, allocation="axial", pairing=pairing, precision="hf")
    positions = place(SegmentTable.from_documents([[Grid(5, 7)]]), "grid-2d")
    q = normal(1, 35, 4, 64)
    embedding = timm.RotaryEmbeddingCat(64, in_pixels=False, rotate_half=half).get_embed([5, 7])
    theirs = timm.apply_rot_embed_cat(q.transpose(1, 2), embedding, half=half).transpose(1, 2)
    assert_close(apply_rotary(q, None, positions, rotary)[:1], [theirs], error=cos_sin(6.0, FREQUENCY + 1))
