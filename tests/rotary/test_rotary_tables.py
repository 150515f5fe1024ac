"""Tables of cos, sin and angles: with them, the formulas of models and engines reproduce our rotation."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from rotary_oracle import BY_HEAD, by_kv_head, ids_of, packed, phases
from tolerance import assert_within, cos_sin, rotations
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary

OF_ANGLES = cos_sin(np.pi, 1)  # error bound for our angles, which are wrapped and rounded to float32

PACKED = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
SINGLE = place(SegmentTable.from_documents([[Text(1), Grid(2, 2)]]))
EMPTY = place(SegmentTable.from_documents([]))
LONG = place(SegmentTable.from_documents([[Text(9_000_000), Grid(3, 2), Text(1)]]), "rope-tie-v2")
HALVES = LONG.slice(8_999_998, 9_000_007)

# The peers' formulas, as in their code.


def rotate_half(x: Tensor) -> Tensor:
    """Rotate pairs (j, j + dim/2) by 90° like Transformers, TorchTitan and Megatron."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    """Rotate pairs (2j, 2j + 1) by 90° like Transformers' GPT-J and Megatron's rotary_interleaved."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


QUARTER_TURN: dict[str, Callable[[Tensor], Tensor]] = {"half": rotate_half, "adjacent": rotate_every_two}


def rotated_by(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Compute x·cos + rotate(x)·sin on the first channels, and keep the rest."""
    width = cos.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    return torch.cat((first * cos + QUARTER_TURN[pairing](first) * sin, rest), dim=-1)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def bshd(positions: PositionTable, head_dim: int = 16) -> Tensor:
    """Return q: a row for each document if all have the same length, else one row."""
    rows = positions.num_documents if positions is EQUAL else 1
    return normal(rows, positions.num_tokens // rows, 3, head_dim)


@pytest.mark.parametrize(
    ("positions", "leading"),
    [(PACKED, (15,)), (EQUAL, (2, 8)), (SINGLE, (1, 5)), (EMPTY, (0,))],
    ids=["packed", "equal", "single", "empty"],
)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_tables_have_the_documented_shapes_and_dtypes(
    positions: PositionTable, leading: tuple[int, ...], pairing: Any
) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing)
    batch_seq = leading if len(leading) == 2 else (1, *leading)
    for cos_or_sin in mmpos.rotary.cos_sin(rotary, positions, layout="pairs"):
        assert (cos_or_sin.shape, cos_or_sin.dtype) == ((*leading, 6), torch.float32)
    for cos_or_sin in mmpos.rotary.cos_sin(rotary, positions, layout="transformers"):
        assert (cos_or_sin.shape, cos_or_sin.dtype) == ((*batch_seq, 12), torch.float32)
    cache = mmpos.rotary.cos_sin(rotary, positions, layout="torchtitan")
    assert isinstance(cache, Tensor)
    half = pairing == "half"
    assert (cache.shape, cache.dtype) == ((*leading, 24 if half else 6), torch.float32 if half else torch.complex64)
    angles = mmpos.rotary.angles(rotary, positions)
    assert (angles.shape, angles.dtype) == ((batch_seq[1], batch_seq[0], 1, 12), torch.float32)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 0), (0,)])
def test_empty_ids_keep_their_batch_dimension(shape: tuple[int, ...]) -> None:
    rotary, ids = Rotary(head_dim=16), torch.zeros(2, *shape, dtype=torch.int32)
    batch_seq = shape if len(shape) == 2 else (1, *shape)
    for layout, want in (("pairs", (*shape, 8)), ("transformers", (*batch_seq, 16))):
        assert [x.shape for x in mmpos.rotary.cos_sin(rotary, ids, layout)] == [want, want]  # type: ignore[arg-type]
    cache = mmpos.rotary.cos_sin(rotary, ids, "torchtitan")
    assert isinstance(cache, Tensor)
    assert cache.shape == (*shape, 32)
    assert mmpos.rotary.angles(rotary, ids).shape == (batch_seq[1], batch_seq[0], 1, 16)
    q = torch.zeros(*batch_seq, 4, 16)
    assert apply_rotary(q, q, ids, rotary)[0].shape == q.shape


@pytest.mark.parametrize("layout", ["pairs", "transformers", "torchtitan"])
@pytest.mark.parametrize("positions", [PACKED, EQUAL, HALVES], ids=["packed", "equal", "halves"])
def test_a_table_device_positions_and_dense_ids_give_the_same_bits(positions: PositionTable, layout: Any) -> None:
    rotary = Rotary(head_dim=16)
    dense = torch.from_numpy(positions.dense())
    if positions is not PACKED:
        dense = dense.reshape(2, positions.num_documents, -1)
    expected = mmpos.rotary.cos_sin(rotary, positions, layout=layout)
    for same in (DevicePositions.from_table(positions, capacity=9), dense):
        assert_within(mmpos.rotary.cos_sin(rotary, same, layout=layout), expected, 0)
        assert_within(mmpos.rotary.angles(rotary, same), mmpos.rotary.angles(rotary, positions), 0)


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64)], ids=["plain", "yarn"])
@pytest.mark.parametrize("positions", [EQUAL, PACKED, HALVES], ids=["equal", "packed", "halves"])
def test_transformers_formula_with_our_cos_and_sin_reproduces_our_rotation(
    positions: PositionTable, pairing: Any, scaling: Any
) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing, scaling=scaling)
    q = bshd(positions)
    cos, sin = mmpos.rotary.cos_sin(rotary, positions, layout="transformers")
    expected, _ = apply_rotary(q, None, positions, rotary)
    assert_within(rotated_by(q, cos[:, :, None], sin[:, :, None], pairing), expected, rotations(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pairing", "channels"),
    [
        ("blt", "adjacent", "each"),
        ("cohere", "adjacent", "each"),
        ("ernie4_5", "adjacent", "pairs twice"),
        ("glm", "adjacent", "pairs twice"),
        ("helium", "adjacent", "pairs twice"),
        ("llama", "half", "each"),
        ("moonshine", "adjacent", "pairs twice"),
    ],
)
def test_functions_in_transformers_accept_our_cos_and_sin(model: str, pairing: Any, channels: str) -> None:
    rotate = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    rotary, q = Rotary(head_dim=16, pairing=pairing), bshd(EQUAL)
    cos, sin = mmpos.rotary.cos_sin(rotary, EQUAL, layout="transformers")
    if channels == "pairs twice":
        cos, sin = (torch.cat((x, x), dim=-1) for x in mmpos.rotary.cos_sin(rotary, EQUAL))
    got, _ = rotate(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(got.transpose(1, 2), expected, rotations(expected))


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_torchtitans_rope_cache_is_cos_then_sin_or_complex(pairing: Any) -> None:
    rotary, q = Rotary(head_dim=16, pairing=pairing), bshd(EQUAL)
    cache = mmpos.rotary.cos_sin(rotary, EQUAL, layout="torchtitan")
    assert isinstance(cache, Tensor)
    cache, (expected, _) = cache.unsqueeze(2), apply_rotary(q, None, EQUAL, rotary)
    if pairing == "half":
        got = q * cache[..., :16] + rotate_half(q) * cache[..., 16:]
    else:
        got = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * cache).flatten(3)
    assert_within(got, expected, rotations(expected))


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64)], ids=["plain", "yarn"])
@pytest.mark.parametrize("positions", [EQUAL, PACKED, HALVES], ids=["equal", "packed", "halves"])
def test_megatrons_formula_with_our_angles_reproduces_our_rotation(
    positions: PositionTable, pairing: Any, scaling: Any
) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing, scaling=scaling)
    q = bshd(positions)
    freqs, mscale = mmpos.rotary.angles(rotary, positions), rotary.attention_factor
    got = rotated_by(q.transpose(0, 1), freqs.cos() * mscale, freqs.sin() * mscale, pairing)
    expected, _ = apply_rotary(q, None, positions, rotary)
    assert_within(got.transpose(0, 1), expected, rotations(expected, OF_ANGLES))


def test_the_attention_factor_is_applied_to_cos_and_sin_but_not_to_angles() -> None:
    scaling = YaRN(4.0, 64)
    plain, scaled = Rotary(16, scaling=YaRN(4.0, 64, attention_factor=1.0)), Rotary(16, scaling=scaling)
    factor = scaled.attention_factor
    assert factor > 1.1
    for one, other in zip(mmpos.rotary.cos_sin(plain, PACKED), mmpos.rotary.cos_sin(scaled, PACKED), strict=True):
        assert torch.equal(other, one * factor)
    assert torch.equal(mmpos.rotary.angles(scaled, PACKED), mmpos.rotary.angles(plain, PACKED))


VIDEO = packed("videorope", 70_000).slice(5, 14)


@pytest.mark.parametrize("name", ["two heads per axis", "an unrotated head", "scaled"])
def test_tables_of_cos_and_sin_have_a_kv_head_dimension(name: str) -> None:
    rotary = BY_HEAD[name]
    want = np.stack([phases(ids_of(VIDEO), one) for one in by_kv_head(rotary)], 1)  # (tokens, kv_heads, pairs)
    cos, sin = mmpos.rotary.cos_sin(rotary, VIDEO)
    factor = rotary.attention_factor
    assert_within((cos, sin), tuple(factor * torch.from_numpy(f(want)).float() for f in (np.cos, np.sin)), cos_sin())
    wide = mmpos.rotary.cos_sin(rotary, VIDEO, "transformers")
    for table, narrow in zip(wide, (cos, sin), strict=True):
        assert torch.equal(table, torch.cat((narrow, narrow), -1).transpose(0, 1)[None])
    batch = torch.arange(3 * 8).view(1, 2, 12).expand(3, 2, 12)
    assert [x.shape for x in mmpos.rotary.cos_sin(rotary, batch, "transformers")] == [
        (2, len(rotary.head_axes or ()), 12, rotary.rotary_dim)
    ] * 2
    assert mmpos.rotary.cos_sin(rotary, batch)[0].shape == (2, 12, *cos.shape[1:])
