"""Rotary: allocations, refused arguments and serialization."""

from __future__ import annotations

import json
import pickle
import re
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from rotary_oracle import BY_HEAD, ROTARIES
from tolerance import printed

from mmpos.errors import InvalidInputError
from mmpos.rotary.config import Rotary
from mmpos.rotary.scaling import (
    NTK,
    SCALINGS,
    DynamicNTK,
    Linear,
    Linspace,
    Llama3,
    LongRoPE,
    PRoPE,
    YaRN,
)


def test_the_number_of_axes_follows_from_the_allocation() -> None:
    assert Rotary(128, allocation="mrope-interleaved").mrope_section == (24, 20, 20)
    assert [Rotary(8, allocation="sections", mrope_section=x).axes for x in ([4, 0], [4])] == [2, 1]
    assert Rotary(8, allocation=[2, 0, 0, 1]).axes == 3


@pytest.mark.parametrize("options", [{}, {"scaling": YaRN(4, 2048)}, {"inv_freq": [-0.5, 3.0, 0.1, 0.2]}], ids=str)
def test_a_pair_with_axis_minus_1_has_frequency_0_and_the_others_keep_theirs(options: dict[str, Any]) -> None:
    rotary, full = (Rotary(8, axes=3, allocation=axes, **options) for axes in ([1, 2, -1, -1], [1, 2, 1, 2]))
    assert rotary.pair_axis.tolist() == [1, 2, -1, -1]
    for name in ("inv_freq_array", "turns"):
        assert getattr(rotary, name).tolist() == [*getattr(full, name)[:2].tolist(), 0, 0]
    ids = np.arange(6).reshape(3, 2)
    assert rotary.pair_ids(ids).tolist() == [[2, 3], [4, 5], [0, 0], [0, 0]]


def test_with_head_axes_each_head_has_one_axis_and_the_whole_ladder() -> None:
    rotary = Rotary(8, allocation="heads", head_axes=np.array([0, 2, -1]))  # type: ignore[arg-type]
    assert (rotary.axes, rotary.head_axes) == (3, (0, 2, -1))
    assert rotary.pair_axis.tolist() == [[0] * 4, [2] * 4, [-1] * 4]
    assert not rotary.pair_axis.flags.writeable
    assert rotary.turns.tolist() == Rotary(8).turns.tolist()
    ids = np.arange(6).reshape(3, 2)
    assert rotary.pair_ids(ids).tolist() == [[[0, 1]] * 4, [[4, 5]] * 4, [[0, 0]] * 4]


def test_arrays_are_read_only_and_have_the_documented_dtypes() -> None:
    rotary = Rotary(16, rotary_dim=12)
    arrays = {"pair_axis": np.int64, "inv_freq_array": np.float64, "turns": np.uint64}
    for name, dtype in arrays.items():
        array = getattr(rotary, name)
        assert (array.shape, array.dtype, array.flags.writeable) == ((6,), np.dtype(dtype), False)
        assert getattr(rotary, name) is array
    assert rotary.num_pairs == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 7}, "head_dim: got 7, want an even number"),
        ({"head_dim": 0}, "head_dim: got 0, want >= 2"),
        ({"rotary_dim": 18}, "rotary_dim: got 18, want <= head_dim 16"),
        ({"rotary_dim": 5}, "rotary_dim: got 5, want an even number"),
        ({"theta": 0}, "theta: got 0, want a finite number >= 1"),
        ({"theta": inf}, "theta: got inf, want a finite number >= 1"),
        ({"theta": [1e4, 0.5]}, "theta[1]: got 0.5, want a finite number >= 1"),
        ({"theta": [1e4]}, "theta: got 1 bases, want one, or 2, one per axis"),
        ({"axes": 0}, "axes: got 0, want >= 1"),
        ({"axes": 257}, "axes: got 257, want <= 256"),
        ({"axes": 9}, "axes: got 9, want at most 8, one per pair"),
        ({"allocation": "interleave"},
         "allocation: got 'interleave', want one of 'interleaved', 'split', 'axial', 'pixtral', 'sections', "
         "'mrope-interleaved', 'heads'"),
        ({"allocation": 3}, "allocation: got 3, want a sequence of numbers"),
        ({"allocation": [0, 1]}, "allocation: got 2 axes, want one for each of 8 pairs"),
        ({"axes": 2, "allocation": [0, 1, 2, 0, 1, 0, 1, 0]}, "allocation[2]: got 2, want <= 1"),
        ({"allocation": [0, 1, -2, 0, 1, 0, 1, 0]}, "allocation[2]: got -2, want >= -1"),
        ({"allocation": [-1] * 8}, "axes: got 0, want >= 1"),
        ({"allocation": "heads"}, "head_axes: got 0 axes, want 1 to 256, one per kv head"),
        ({"allocation": "heads", "head_axes": [0] * 257}, "head_axes: got 257 axes, want 1 to 256"),
        ({"allocation": "heads", "head_axes": [0, 3], "axes": 3}, "head_axes[1]: got 3, want <= 2"),
        ({"allocation": "heads", "head_axes": [0, -2]}, "head_axes[1]: got -2, want >= -1"),
        ({"head_axes": [0, 1]}, "head_axes: got [0, 1], want None for allocation 'interleaved'"),
        ({"allocation": "heads", "head_axes": [0, 1], "theta": [1e4, 1e5]},
         "theta: got (10000.0, 100000.0), want a single base for allocation 'heads'"),
        ({"allocation": "heads", "head_axes": [0, 1], "mrope_section": [4, 4]},
         "mrope_section: got [4, 4], want None for allocation 'heads'"),
        ({"allocation": "heads", "head_axes": [0, 1], "axes_dim": [4, 12]},
         "axes_dim: got [4, 12], want None for allocation 'heads'"),
        ({"allocation": "axial", "axes": 3}, "allocation 'axial': got 8 pairs, want a multiple of axes=3, or axes_dim"),
        ({"axes_dim": [8, 8]}, "axes_dim: got [8, 8], want None for allocation 'interleaved'"),
        ({"axes_dim": [10, 6], "allocation": [0, 1] * 4},
         "allocation: got [0, 1, 0, 1, 0, 1, 0, 1], want axes_dim[axis] / 2 pairs of each axis, with axes_dim [10, 6]"),
        ({"axes_dim": [8, 8], "allocation": [2, 0] * 4},
         "allocation: got [2, 0, 2, 0, 2, 0, 2, 0], want axes_dim[axis] / 2 pairs"),
        ({"axes_dim": [4, 8], "allocation": "axial"}, "axes_dim: got [4, 8], want channels that sum to the 16 "),
        ({"axes_dim": [3, 13], "allocation": "axial"}, "axes_dim[0]: got 3, want an even number"),
        ({"axes_dim": [4, 12], "allocation": "axial", "axes": 3},
         "axes_dim: got [4, 12], want 3 channel counts, one per axis"),
        ({"axes_dim": [2, 14], "allocation": "axial", "scaling": NTK(2)},
         "scaling: got NTK for 1 pairs, want at least 2"),
        ({"allocation": "pixtral", "axes": 3}, "axes: got 3, want 2 for allocation 'pixtral'"),
        ({"allocation": "pixtral", "rotary_dim": 10}, "allocation 'pixtral': got 5 pairs, want an even number"),
        ({"allocation": "sections"}, "mrope_section: got None, want pairs per axis for allocation 'sections'"),
        ({"allocation": "sections", "mrope_section": [3, 4]},
         "mrope_section: got [3, 4], want sizes that sum to 8 pairs"),
        ({"allocation": "sections", "mrope_section": [9, -1]}, "mrope_section[1]: got -1, want >= 0"),
        ({"allocation": "sections", "axes": 3, "mrope_section": [4, 4]},
         "axes: got 3, want 2 for allocation 'sections'"),
        ({"allocation": "mrope-interleaved", "mrope_section": [4, 4]},
         "axes: got 2, want 3 for allocation 'mrope-interleaved'"),
        ({"allocation": "mrope-interleaved", "mrope_section": [1, 4, 3]},
         "mrope_section: got [1, 4, 3], want sizes that interleave over 8 pairs, such as [3, 3, 2]"),
        ({"mrope_section": [4, 4]}, "mrope_section: got [4, 4], want None for allocation 'interleaved'"),
        ({"pairing": "interleaved"}, "pairing: got 'interleaved', want one of 'half', 'adjacent'"),
        ({"precision": "fp32"}, "precision: got 'fp32', want one of 'exact', 'hf'"),
        ({"scaling": "yarn"}, "scaling: got 'yarn', want a Scaling such as Linear(2.0), or None"),
        ({"scaling": DynamicNTK(2, 8), "axes": 8, "allocation": "axial"}, "scaling: got DynamicNTK for 1 pairs"),
        ({"scaling": NTK(1e-5)}, "NTK.factor: got 1e-05, want >= 0.000316 for base 10000.0 of 16 channels"),
        ({"kv_heads": 0}, "kv_heads: got 0, want >= 1"),
        ({"kv_heads": 257}, "kv_heads: got 257, want <= 256"),
        ({"kv_heads": 256, "head_dim": 512}, "kv_heads: got 256 of 512 channels, want <= 65536 channels in total"),
        ({"kv_heads": 2, "allocation": "heads", "head_axes": [0, 1]},
         "kv_heads: got 2, want None for allocation 'heads'"),
        ({"kv_heads": 2, "inv_freq": [1.0] * 8}, "inv_freq: got 8 numbers, want 16, one per pair"),
        ({"scaling": Linspace(1.5), "rotary_dim": 2, "axes": 1}, "scaling: got Linspace for 1 pairs, want at least 2"),
        ({"scaling": Linspace(1e6)}, "Linspace.factor: got 1000000.0, want <= 4.29e+05 for base 10000.0"),
        ({"allocation": [-1, 0, 1, 0, 1, 0, 1, 0], "axes_dim": [8, 8]},
         "axes_dim: got [8, 8], want channels that sum to the 14 rotated channels"),
        ({"scaling": [NTK(2)] * 3}, "scaling: got 3 scalings, want one, or 2, one per axis"),
        ({"scaling": [None, 2]}, "scaling[1]: got 2, want a Scaling such as Linear(2.0), or None"),
        ({"scaling": [None, YaRN(2, 8)]},
         "scaling[1]: got attention factor 1.0693147180559945, want 1.0 as in scaling[0]"),
        ({"scaling": [None, NTK(2)], "allocation": "heads", "head_axes": [0, 1]},
         "scaling: got (None, NTK(factor=2.0)), want one for allocation 'heads', the same for all axes, or None"),
        ({"scaling": YaRN(2, 8), "theta": 1}, "theta: got 1.0, want > 1 for YaRN"),
        ({"scaling": LongRoPE([1] * 8, [1] * 7, 8)}, "LongRoPE.long_factor: got 7 numbers, want 8, one per frequency"),
        ({"inv_freq": [1.0] * 7}, "inv_freq: got 7 numbers, want 8, one per pair"),
        ({"inv_freq": [1.0] * 7 + [2.0**33]}, "inv_freq: got 8589934592.0, want <= 4.29497e+09"),
        ({"inv_freq": [1.0] * 7 + [nan]}, "inv_freq[7]: got nan, want a finite number"),
        ({"inv_freq": [1.0] * 8, "scaling": Linear(2)}, "inv_freq cannot be combined with theta or scaling"),
        ({"inv_freq": [1.0] * 8, "theta": 5e5}, "inv_freq cannot be combined with theta or scaling"),
        ({"length": 0}, "length: got 0, want >= 1"),
        ({"head_dim": 2**17}, "head_dim: got 131072, want <= 65536"),
    ],
)  # fmt: skip
def test_invalid_arguments_of_rotary_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match="^" + re.escape(message)):
        Rotary(**{"head_dim": 16, **arguments})


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Linear, [0.5], "Linear.factor: got 0.5, want a finite number >= 1"),
        (Linspace, [0], "Linspace.factor: got 0, want a finite number > 0"),
        (NTK, [nan], "NTK.factor: got nan, want a finite number > 0"),
        (DynamicNTK, [2, 0], "DynamicNTK.original_max_position: got 0, want >= 1"),
        (YaRN, [0.9, 8], "YaRN.factor: got 0.9, want a finite number >= 1"),
        (YaRN, [2, 8, 1, 2], "YaRN.beta_fast: got 1, want a finite number >= 2"),
        (YaRN, [2, 8, 2, 0], "YaRN.beta_slow: got 0, want a finite number > 0"),
        (YaRN, [2, 8, 32, 1, -1], "YaRN.attention_factor: got -1, want a finite number >= 0"),
        (YaRN, [2, 8, 32, 1, None, None, None, 1], "YaRN.truncate: got 1, want True or False"),
        (Llama3, [8, 0, 4, 8], "Llama3.low_freq_factor: got 0, want a finite number > 0"),
        (Llama3, [8, 4, 3, 8], "Llama3.high_freq_factor: got 3, want a finite number >= 4"),
        (LongRoPE, [[1, 0], [1, 1], 8], "LongRoPE.short_factor[1]: got 0, want a finite number >= 1e-06"),
        (LongRoPE, [[1], 2, 8], "LongRoPE.long_factor: got 2, want a list of numbers"),
        (LongRoPE, [[1], [1], 1], "LongRoPE.original_max_position: got 1, want >= 2"),
        (LongRoPE, [[1], [1], 8, 0], "LongRoPE.factor: got 0, want a finite number > 0"),
        (PRoPE, [-0.1], "PRoPE.p: got -0.1, want a finite number >= 0"),
        (PRoPE, [1.5], "PRoPE.p: got 1.5, want <= 1"),
        (PRoPE, [0.5, 0.5], "PRoPE.factor: got 0.5, want a finite number >= 1"),
    ],
)
def test_invalid_arguments_of_scalings_are_refused(kind: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match="^" + re.escape(message)):
        kind(*arguments)


EVERY_SCALING = [
    Linear(2),
    NTK(2),
    DynamicNTK(2, 4096),
    YaRN(4, 2048, truncate=False),
    Llama3(8, 1, 4, 8192),
    LongRoPE([1.25] * 8, [2.5] * 8, 4096),
    PRoPE(0.5),
    Linspace(1.5),
]
EVERY_ROTARY = [
    *ROTARIES.values(),
    *BY_HEAD.values(),
    Rotary(16, theta=[1e4, 0.1 + 1e6], rotary_dim=12, pairing="adjacent", precision="hf"),
    Rotary(128, allocation="mrope-interleaved"),
    Rotary(16, scaling=[None, NTK(20 / 24)]),
    Rotary(16, axes=3, scaling=[LongRoPE([1] * 8, [2] * 8, 4096), DynamicNTK(2, 100), None]).for_length(5000),
    *(Rotary(16, scaling=scaling) for scaling in EVERY_SCALING),
    *(Rotary(16, scaling=scaling).for_length(10_000) for scaling in EVERY_SCALING),
]


@pytest.mark.parametrize("rotary", EVERY_ROTARY, ids=str)
def test_a_rotary_survives_a_round_trip_through_json_and_pickle(rotary: Rotary) -> None:
    for again in (Rotary.from_dict(json.loads(json.dumps(rotary.to_dict()))), pickle.loads(pickle.dumps(rotary))):
        assert again == rotary
        assert hash(again) == hash(rotary)
        assert again.turns.tolist() == rotary.turns.tolist()


def test_every_scaling_is_tested() -> None:
    assert {type(scaling) for scaling in EVERY_SCALING} == set(SCALINGS.values())


EQUAL: list[tuple[Rotary, Rotary]] = [
    (Rotary(np.int64(8), 10000, rotary_dim=8, axes=2, allocation="interleaved"), Rotary(8)),  # type: ignore[arg-type]
    (Rotary(8, axes=5, allocation=np.array([2, 0, 0, 1])), Rotary(8, axes=5, allocation=(2, 0, 0, 1))),  # type: ignore[arg-type]
    (Rotary(8, theta=[1e5, 1e5]), Rotary(8, theta=1e5)),
    (Rotary(8, theta=[1e5], axes=1), Rotary(8, theta=1e5, axes=1)),
    (Rotary(64, allocation="axial", axes_dim=[32, 32]), Rotary(64, allocation="axial")),
    (Rotary(96, allocation="axial", axes_dim=(32, 32, 32)), Rotary(96, axes=3, allocation="axial")),
    (Rotary(8, scaling=[NTK(2), NTK(2)]), Rotary(8, scaling=NTK(2))),
    (Rotary(8, scaling=[None, None]), Rotary(8)),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equivalent_arguments_make_equal_rotaries_with_equal_hashes(one: Rotary, other: Rotary) -> None:
    assert one == other
    assert hash(one) == hash(other)


def test_different_arguments_make_different_rotaries() -> None:
    changes: list[dict[str, Any]] = [{}, {"theta": 1e5}, {"pairing": "adjacent"}, {"axes": 1}, {"precision": "hf"}]
    assert len({Rotary(8, **change) for change in changes}) == 5


def test_unrotated_pairs_use_up_no_frequency_of_a_ladder() -> None:
    rotary = Rotary(14, theta=100.0, allocation=[-1, 0, 1, -1, 0, 0, 1], axes_dim=[6, 4])
    assert rotary.inv_freq_array.tolist() == [0, 1, 1, 0, printed("0.21544"), printed("0.046416"), printed("0.1")]


def test_each_axis_applies_its_own_scaling_to_the_length() -> None:
    longer, dynamic = LongRoPE([1.25] * 8, [2.5] * 8, 4096), DynamicNTK(2, 100)
    single = [Rotary(16, scaling=scaling) for scaling in (longer, dynamic, None)]
    axis = [0, 1, 2, 2, 1, 0, 1, 2]
    together = Rotary(16, allocation=axis, scaling=[longer, dynamic, None])
    for length in (50, 101, 4096, 5000):
        want = [single[a].for_length(length).turns[j] for j, a in enumerate(axis)]
        assert together.for_length(length).turns.tolist() == want
    assert together.for_length(100) == together


UNKNOWN: dict[str, Any] = {
    "Rotary.from_dict: got 'base', want one of 'head_dim', 'theta'": {"head_dim": 8, "base": 1e4},
    "Rotary.from_dict: got ['axes'], want head_dim among them": {"axes": 2},
    "scaling.type: got 'abf', want one of 'linear', 'ntk'": {"head_dim": 8, "scaling": {"type": "abf"}},
    "scaling: got {'type': 'linear', 'factors': 2}, want the parameters of Linear": {
        "head_dim": 8, "scaling": {"type": "linear", "factors": 2},
    },
    "scaling.type: got 3, want one of": {"head_dim": 8, "scaling": 3},
}  # fmt: skip


@pytest.mark.parametrize("message", UNKNOWN)
def test_from_dict_refuses_unknown_keys_and_values(message: str) -> None:
    with pytest.raises(InvalidInputError, match="^" + re.escape(message)):
        Rotary.from_dict(UNKNOWN[message])


def test_for_length_changes_only_length_dependent_scalings() -> None:
    for scaling in EVERY_SCALING:
        rotary = Rotary(16, scaling=scaling)
        assert rotary.for_length(1) == rotary
        assert (rotary.for_length(4096) == rotary) is True
        assert (rotary.for_length(4097) == rotary) is not isinstance(scaling, DynamicNTK | LongRoPE)
    assert Rotary(16).for_length(10**6) == Rotary(16)
    longer = Rotary(16, scaling=EVERY_SCALING[5]).for_length(5000)
    assert longer == longer.for_length(10**6)
    assert longer.for_length(4096) == Rotary(16, scaling=EVERY_SCALING[5])
    with pytest.raises(InvalidInputError, match="length: got 0, want >= 1"):
        longer.for_length(0)
