"""Tables: cos, sin and angles in the layouts of models and engines, whose own formulas must give our rotation."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tolerance import EXACT, assert_within, cos_sin, rotations, unit
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary

OF_ANGLES = cos_sin(np.pi, 1)  # of our angles, which are wrapped and rounded to float32

PACKED = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
SINGLE = place(SegmentTable.from_documents([[Text(1), Grid(2, 2)]]))
EMPTY = place(SegmentTable.from_documents([]))
LONG = place(SegmentTable.from_documents([[Text(9_000_000), Grid(3, 2), Text(1)]]), "rope-tie-v2")
HALVES = LONG.slice(8_999_998, 9_000_007)
FARTHEST = torch.tensor([[2**31 - 1, -(2**31), 2**31 - 2, 0], [12345, 2**31 - 1, -1, 2**30]], dtype=torch.int32)

# The formulas of the peers, as they print them.


def rotate_half(x: Tensor) -> Tensor:
    """Transformers, TorchTitan and Megatron, for pairs (j, j + dim/2)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    """Transformers' GPT-J and Megatron's rotary_interleaved, for pairs (2j, 2j + 1)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


TURNED: dict[str, Callable[[Tensor], Tensor]] = {"half": rotate_half, "adjacent": rotate_every_two}


def rotated_by(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """x·cos + rotate(x)·sin on the first channels; the rest passes through."""
    width = cos.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    return torch.cat((first * cos + TURNED[pairing](first) * sin, rest), dim=-1)


def exact_angles(positions: PositionTable, rotary: Rotary) -> list[list[Any]]:
    """(tokens, pairs) angles of 50 digits."""
    numerators, denominators = positions.rationals()
    rows = []
    with mpmath.workdps(50):
        theta = mpmath.mpf(rotary.theta)
        for t in range(positions.num_tokens):
            ids = [mpmath.mpf(int(axis[t])) / int(denominators[t]) for axis in numerators]
            rows.append([ids[axis] * theta ** (-mpmath.mpf(j) / 6) for j, axis in enumerate(rotary.pair_axis)])
    return rows


def of_each(function: Callable[[Any], Any], angles: list[list[Any]]) -> npt.NDArray[np.float64]:
    with mpmath.workdps(50):
        return np.array([[float(function(angle)) for angle in row] for row in angles])


def wrapped(angle: Any) -> Any:
    return angle - 2 * mpmath.pi * mpmath.nint(angle / (2 * mpmath.pi))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def bshd(positions: PositionTable, head_dim: int = 16) -> Tensor:
    """q of a table whose documents have one length."""
    return normal(positions.num_documents, positions.max_seqlen, 3, head_dim)


@pytest.mark.parametrize("positions", [PACKED, EQUAL, HALVES], ids=["packed", "equal", "halves"])
def test_pairs_are_cos_and_sin_of_every_token_and_pair(positions: PositionTable) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12)
    cos, sin = mmpos.rotary.cos_sin(rotary, positions)
    angles = exact_angles(positions, rotary)
    assert_within(cos.reshape(-1, 6), of_each(mpmath.cos, angles), EXACT)
    assert_within(sin.reshape(-1, 6), of_each(mpmath.sin, angles), EXACT)


@pytest.mark.parametrize("positions", [PACKED, EQUAL, HALVES], ids=["packed", "equal", "halves"])
def test_angles_are_wrapped_once_per_channel(positions: PositionTable) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12)
    angles = mmpos.rotary.angles(rotary, positions)
    by_token = angles.transpose(0, 1).reshape(-1, 12)
    expected = of_each(wrapped, exact_angles(positions, rotary))
    # 5e-9 of the turn, and the rounding of numbers between 2 and π.
    assert_within(by_token, np.concatenate([expected, expected], axis=1), 5e-9 + 2 * unit(torch.float32))


@pytest.mark.parametrize(
    ("positions", "leading"),
    [(PACKED, (15,)), (EQUAL, (2, 8)), (SINGLE, (1, 5)), (EMPTY, (0,))],
    ids=["packed", "equal", "single", "empty"],
)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_shapes_and_dtypes(positions: PositionTable, leading: tuple[int, ...], pairing: Any) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing)
    batch_seq = leading if len(leading) == 2 else (1, *leading)
    found = {layout: mmpos.rotary.cos_sin(rotary, positions, layout=layout) for layout in ("pairs", "transformers")}
    for cos_or_sin in found["pairs"]:
        assert (cos_or_sin.shape, cos_or_sin.dtype) == ((*leading, 6), torch.float32)
    for cos_or_sin in found["transformers"]:
        assert (cos_or_sin.shape, cos_or_sin.dtype) == ((*batch_seq, 12), torch.float32)
    cache = mmpos.rotary.cos_sin(rotary, positions, layout="torchtitan")
    assert isinstance(cache, Tensor)
    half = pairing == "half"
    assert (cache.shape, cache.dtype) == ((*leading, 24 if half else 6), torch.float32 if half else torch.complex64)
    angles = mmpos.rotary.angles(rotary, positions)
    assert (angles.shape, angles.dtype) == ((batch_seq[1], batch_seq[0], 1, 12), torch.float32)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 0), (0,)])
def test_ids_of_no_tokens_keep_their_batch(shape: tuple[int, ...]) -> None:
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
def test_a_table_its_device_form_and_its_dense_ids_give_the_same_bits(positions: PositionTable, layout: Any) -> None:
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
def test_transformers_formula_with_our_cos_and_sin_is_our_rotation(pairing: Any, scaling: Any) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12, pairing=pairing, scaling=scaling)
    q = bshd(EQUAL)
    cos, sin = mmpos.rotary.cos_sin(rotary, EQUAL, layout="transformers")
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(rotated_by(q, cos[:, :, None], sin[:, :, None], pairing), expected, rotations(expected))
    bhsd = q.transpose(1, 2)
    found = rotated_by(bhsd, cos[:, None], sin[:, None], pairing)
    expected, _ = apply_rotary(bhsd, None, EQUAL, rotary, layout="bhsd")
    assert_within(found, expected, rotations(expected))


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
def test_transformers_own_functions_take_our_cos_and_sin(model: str, pairing: Any, channels: str) -> None:
    turn = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    rotary, q = Rotary(head_dim=16, pairing=pairing), bshd(EQUAL)
    cos, sin = mmpos.rotary.cos_sin(rotary, EQUAL, layout="transformers")
    if channels == "pairs twice":
        cos, sin = (torch.cat((x, x), dim=-1) for x in mmpos.rotary.cos_sin(rotary, EQUAL))
    found, _ = turn(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(found.transpose(1, 2), expected, rotations(expected))


@pytest.mark.parametrize("positions", [PACKED, HALVES], ids=["packed", "halves"])
def test_transformers_formula_takes_a_packed_batch_as_one_row(positions: PositionTable) -> None:
    rotary = Rotary(head_dim=16)
    q = normal(1, positions.num_tokens, 3, 16)
    cos, sin = mmpos.rotary.cos_sin(rotary, positions, layout="transformers")
    found = rotated_by(q, cos[:, :, None], sin[:, :, None], "half")
    expected, _ = apply_rotary(q[0], None, positions, rotary)
    assert_within(found[0], expected, rotations(expected))


def test_torchtitan_cache_of_halves_is_cos_then_sin() -> None:
    rotary = Rotary(head_dim=16)
    q = bshd(EQUAL)
    cache = mmpos.rotary.cos_sin(rotary, EQUAL, layout="torchtitan")
    assert isinstance(cache, Tensor)
    cos, sin = cache[..., None, :16], cache[..., None, 16:]
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(q * cos + rotate_half(q) * sin, expected, rotations(expected))


def test_torchtitan_cache_of_adjacent_pairs_is_complex() -> None:
    rotary = Rotary(head_dim=16, pairing="adjacent")
    q = bshd(EQUAL)
    freqs_cis = mmpos.rotary.cos_sin(rotary, EQUAL, layout="torchtitan")
    assert isinstance(freqs_cis, Tensor)
    found = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * freqs_cis.unsqueeze(2)).flatten(3)
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(found, expected, rotations(expected))


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 64)], ids=["plain", "yarn"])
def test_megatrons_formula_with_our_angles_is_our_rotation(pairing: Any, scaling: Any) -> None:
    rotary = Rotary(head_dim=16, pairing=pairing, scaling=scaling)
    q = bshd(EQUAL)
    freqs, mscale = mmpos.rotary.angles(rotary, EQUAL), rotary.attention_factor
    t = q.transpose(0, 1)
    found = rotated_by(t, freqs.cos() * mscale, freqs.sin() * mscale, pairing)
    expected, _ = apply_rotary(q, None, EQUAL, rotary)
    assert_within(found.transpose(0, 1), expected, rotations(expected, OF_ANGLES))


def test_megatrons_formula_takes_packed_tokens() -> None:
    rotary = Rotary(head_dim=16, rotary_dim=12)
    q = normal(15, 3, 16)
    freqs = mmpos.rotary.angles(rotary, PACKED)
    found = rotated_by(q.unsqueeze(1), freqs.cos(), freqs.sin(), "half").squeeze(1)
    expected, _ = apply_rotary(q, None, PACKED, rotary)
    assert_within(found, expected, rotations(expected, OF_ANGLES))


def test_angles_of_the_farthest_ids_stay_within_half_a_turn_and_rotate_alike() -> None:
    rotary = Rotary(head_dim=16)
    q = normal(4, 3, 16)
    freqs = mmpos.rotary.angles(rotary, FARTHEST)
    assert (freqs.abs() <= float(np.float32(np.pi))).all()
    found = rotated_by(q.unsqueeze(1), freqs.cos(), freqs.sin(), "half").squeeze(1)
    expected, _ = apply_rotary(q, None, FARTHEST, rotary)
    assert_within(found, expected, rotations(expected, OF_ANGLES))


def test_the_attention_factor_is_in_cos_and_sin_and_not_in_angles() -> None:
    scaling = YaRN(4.0, 64)
    plain, scaled = Rotary(16, scaling=YaRN(4.0, 64, attention_factor=1.0)), Rotary(16, scaling=scaling)
    factor = scaled.attention_factor
    assert factor > 1.1
    for one, many in zip(mmpos.rotary.cos_sin(plain, PACKED), mmpos.rotary.cos_sin(scaled, PACKED), strict=True):
        assert torch.equal(many, one * factor)
    assert torch.equal(mmpos.rotary.angles(scaled, PACKED), mmpos.rotary.angles(plain, PACKED))


def test_hf_precision_gives_the_float32_product_of_id_and_frequency() -> None:
    rotary = Rotary(head_dim=16, axes=1, precision="hf")
    ids = torch.tensor([[0, 1, 131_071, -5]])
    cos, sin = mmpos.rotary.cos_sin(rotary, ids)
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    angle = ids[0, :, None].to(torch.float32) * inv_freq
    assert torch.equal(cos, angle.cos())
    assert torch.equal(sin, angle.sin())


def test_hf_precision_has_no_exact_angles() -> None:
    with pytest.raises(UnsupportedError) as caught:
        mmpos.rotary.angles(Rotary(head_dim=16, precision="hf"), PACKED)
    assert str(caught.value) == (
        "angles: got precision 'hf', want 'exact': wrapped angles would not be those of the peer"
    )


def test_tables_refuse_unknown_layouts_and_other_axes() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^layout: got 'llama', want one of 'pairs', 'transformers', 'torchtitan'$"
    ):
        mmpos.rotary.cos_sin(Rotary(head_dim=16), PACKED, layout="llama")  # type: ignore[arg-type]
    for call in (mmpos.rotary.cos_sin, mmpos.rotary.angles):
        with pytest.raises(InvalidInputError, match=r"^positions: got 2 axes, want 3 as in rotary$"):
            call(Rotary(head_dim=16, axes=3), PACKED)
