"""Positions read back from rotated keys: ids that are not reported as unknown are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from mmpos_probe import UNKNOWN, Reading, check, identify, read
from mmpos_probe.ladder import Ladder

from mmpos import place
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import NTK, Linear, Llama3, Rotary, Scaling, YaRN
from mmpos.segments import Grid, SegmentTable, Text

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A rotation with its axes and frequencies, (pairs,); axis −1 is not rotated."""

    rotary: Rotary
    axis: npt.NDArray[np.int64]
    freq: Floats

    def rotate(self, ids: npt.ArrayLike, heads: int = 2, seed: int = 0, noise: float = 0.0) -> Floats:
        """Rotate a random key to (axes, tokens) ids; return (tokens, heads, head_dim) keys."""
        ids = np.asarray(ids, np.float64)
        rng = np.random.default_rng(seed)
        key = rng.normal(size=(heads, self.rotary.head_dim))
        pairs = self.freq.size
        where = (slice(pairs), slice(pairs, 2 * pairs))
        if self.rotary.pairing == "adjacent":
            where = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        axis = np.broadcast_to(self.axis, (heads, pairs))
        angle = np.concatenate([ids, np.zeros((1, ids.shape[1]))])[axis].transpose(2, 0, 1) * self.freq
        x, y = key[:, where[0]], key[:, where[1]]
        rotated = np.tile(key, (ids.shape[1], 1, 1))
        rotated[..., where[0]] = x * np.cos(angle) - y * np.sin(angle)
        rotated[..., where[1]] = y * np.cos(angle) + x * np.sin(angle)
        return rotated * (1 + noise * rng.normal(size=rotated.shape))


def ladder(pairs: int, theta: float) -> Floats:
    return theta ** -(np.arange(pairs) / pairs)


def blocks(*counts: int) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(counts)), counts)


QWEN3 = np.zeros(64, np.int64)
QWEN3[1:60:3], QWEN3[2:60:3] = 1, 2
QWEN3_VL = Case(Rotary(128, 5e6, allocation="mrope-interleaved"), QWEN3, ladder(64, 5e6))
CASES = {
    "1-D": Case(Rotary(64, axes=1), np.zeros(32, np.int64), ladder(32, 1e4)),
    "interleaved": Case(Rotary(128), np.arange(64) % 2, ladder(64, 1e4)),
    "split": Case(Rotary(128, allocation="split"), blocks(32, 32), ladder(64, 1e4)),
    "axial": Case(Rotary(128, allocation="axial", pairing="adjacent"), blocks(32, 32), np.tile(ladder(32, 1e4), 2)),
    "pixtral": Case(
        Rotary(128, allocation="pixtral"), blocks(32, 32), np.concatenate([ladder(64, 1e4)[::2], ladder(64, 1e4)[1::2]])
    ),
    "sections": Case(
        Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24]), blocks(16, 24, 24), ladder(64, 1e6)
    ),
    "mrope-interleaved": QWEN3_VL,
    "partial": Case(Rotary(256, 1e7, rotary_dim=64, axes=1), np.zeros(32, np.int64), ladder(32, 1e7)),
    "vector": Case(Rotary(128, allocation=[1, 2] * 24 + [-1] * 16), np.array([1, 2] * 24 + [-1] * 16), ladder(64, 1e4)),
    "linear": Case(Rotary(128, scaling=Linear(4.0)), np.arange(64) % 2, ladder(64, 1e4) / 4),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TOO_SLOW = {("sections", "bfloat16"), ("sections", "e4m3"), ("split", "e4m3")}
"""Cases whose slowest axis rotates by at most 1.8e-4 and 0.01 rad per id, less than the noise of the dtype."""


def known_and_wrong(reading: Reading, ids: npt.ArrayLike, reference: int | None = 0) -> tuple[int, int]:
    """Count the known ids, and how many of them are wrong."""
    want = np.asarray(ids)
    if reference is not None:
        want = want - want[:, [reference]]
    wrong = reading.known & (reading.position_ids != want * reading.denominators)
    return int(reading.known.sum()), int(wrong.sum())


def random_ids(case: Case, tokens: int, seed: int) -> npt.NDArray[np.int64]:
    ids = np.random.default_rng(seed).integers(-131072, 131073, (case.rotary.axes, tokens))
    ids[:, 0] = 0
    return ids


@pytest.mark.parametrize("tokens", [12, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_random_ids_are_recovered_exactly(name: str, dtype: str, tokens: int) -> None:
    case = CASES[name]
    ids = random_ids(case, tokens, seed=1)
    reading = read(torch.tensor(case.rotate(ids, heads=4)).to(DTYPES[dtype]), case.rotary)
    driven = np.isin(np.arange(case.rotary.axes), case.axis)
    known, wrong = known_and_wrong(reading, ids)
    assert wrong == 0
    if (name, dtype) not in TOO_SLOW:
        assert reading.known[driven].all()
    assert not reading.known[~driven].any()
    assert known + (reading.position_ids == UNKNOWN).sum() == ids.size


@pytest.mark.parametrize("name", ["1-D", "interleaved", "sections", "mrope-interleaved"])
def test_ids_become_unknown_before_they_are_wrong(name: str) -> None:
    case = CASES[name]
    ids = random_ids(case, 10, seed=3)
    for noise in (0.05, 0.2, 0.8):
        reading = read(case.rotate(ids, heads=4, seed=int(100 * noise), noise=noise), case.rotary)
        assert known_and_wrong(reading, ids)[1] == 0
    assert not reading.known[:, 1:].any()  # except the reference, which is 0 relative to itself


SHORT = Case(Rotary(32, axes=1), np.zeros(16, np.int64), ladder(16, 1e4))
NOISES = (0.04, 0.09, 0.12, 0.17, 0.3)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("case", [QWEN3_VL, SHORT, CASES["1-D"]], ids=["mrope-interleaved", "16 pairs", "1-D"])
def test_no_id_of_2000_tokens_is_wrong_as_noise_grows(case: Case, added: bool) -> None:
    """Noise is proportional to each number, as from rounding, or equal for all numbers, as from per-head scales."""
    ids = np.tile(np.arange(2000), (case.rotary.axes, 1))
    counts = []
    for noise in NOISES:
        keys = case.rotate(ids, noise=0 if added else noise)
        if added:
            keys += noise * np.random.default_rng(1).normal(size=keys.shape)
        keys[0] = case.rotate(ids[:, :1])[0]
        known, wrong = known_and_wrong(read(keys.astype(np.float32), case.rotary), ids)
        assert wrong == 0, noise
        counts.append(known)
    assert counts[0] > 0.9 * ids.size > counts[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [30, 300])
def test_no_id_read_with_another_theta_is_wrong(tokens: int, dtype: str) -> None:
    ids = np.arange(tokens)[None]
    for theta in (1.01, 1.5, 2.0):
        case = Case(Rotary(128, theta * 5e5, axes=1), np.zeros(64, np.int64), ladder(64, theta * 5e5))
        reading = read(torch.tensor(case.rotate(ids)).to(DTYPES[dtype]), Rotary(128, 5e5, axes=1))
        assert known_and_wrong(reading, ids)[1] == 0


def test_no_id_read_from_keys_changed_after_their_rotation_is_wrong() -> None:
    case, ids = CASES["1-D"], np.arange(1000)[None]
    weights = np.random.default_rng(1).uniform(0.7, 1.3, 64)
    for keys in (case.rotate(ids).clip(-1, 1), case.rotate(ids) * weights):
        for dtype in DTYPES.values():
            assert known_and_wrong(read(torch.tensor(keys).to(dtype), case.rotary), ids)[1] == 0


def test_ids_beyond_the_searched_range_are_unknown() -> None:
    inv_freq = np.array([0.022031, 0.000549])
    case = Case(Rotary(4, allocation=[0, 0], axes=1, inv_freq=inv_freq.tolist()), np.zeros(2, np.int64), inv_freq)
    for seed in (12, 48):
        ids = np.random.default_rng(seed).integers(-131072, 131073, (1, 200))
        reading = read(torch.tensor(case.rotate(ids, heads=1, seed=seed)).half(), case.rotary)
        assert known_and_wrong(reading, ids)[1] == 0
        assert np.abs(reading.position_ids[reading.known]).max() <= 2**18


def test_two_pairs_with_exact_lengths_do_not_prove_an_id() -> None:
    """However exact two phases are, some of half a million ids fit them by chance."""
    case = Case(Rotary(4, 1e4, allocation=[0, 0], axes=1), np.zeros(2, np.int64), ladder(2, 1e4))
    rng = np.random.default_rng(1)
    for off in (1e-5, 1e-4, 1e-3):
        ids = rng.integers(-131072, 131073, (1, 60))
        angle = ids.T * case.freq + off * rng.normal(size=(60, 2))
        keys = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)[:, None].astype(np.float32)
        assert known_and_wrong(read(keys, case.rotary), ids)[1] == 0


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_keys_that_rounding_makes_equal_are_not_read_as_equal_ids(dtype: torch.dtype, scale: float) -> None:
    case = CASES["sections"]  # one id rotates the last axis by 1.8e-4 rad, less than a step of these dtypes
    ids = np.tile(np.arange(60), (3, 1))
    steps = 40 if dtype == torch.int8 else 1
    keys = (torch.tensor(case.rotate(ids)) * steps).to(dtype).float() * scale
    reading = read(keys, case.rotary)
    assert known_and_wrong(reading, ids)[1] == 0
    assert not reading.known[2].any()
    assert reading.known[0].all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_known_id_is_wrong_for_random_rotations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = 0
    for _ in range(40):
        pairs, axes = int(rng.choice([4, 8, 16, 32, 64])), int(rng.integers(1, 5))
        axis = rng.permutation(np.concatenate([np.arange(axes), rng.integers(-1, axes, pairs - axes)]))
        axis = np.sort(axis) if rng.random() < 0.3 else axis
        theta = float(10 ** rng.uniform(1, 9))
        pairing: Literal["half", "adjacent"] = "half" if rng.random() < 0.5 else "adjacent"
        case = Case(Rotary(2 * pairs, theta, allocation=axis.tolist(), pairing=pairing), axis, ladder(pairs, theta))
        tokens = int(rng.integers(2, 150))
        count, few = np.arange(tokens), int(rng.integers(2, 40))
        wild = rng.integers(-131072 // int(rng.integers(1, 9999)), 131073, tokens)
        want = np.stack([count, 0 * count, count // few, count % few, wild])[rng.integers(0, 5, axes)]
        noise = float(rng.choice([0, 0, 1e-4, 1e-2, 0.1]))
        rotated = torch.tensor(
            case.rotate(want, heads=int(rng.integers(1, 5)), seed=int(rng.integers(10**6)), noise=noise)
        )
        scale = float(rng.choice([1.0, 0.013]))
        kind = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)[rng.integers(5)]
        reading = read(rotated.to(kind).float() * scale, case.rotary)
        known, wrong = known_and_wrong(reading, want)
        assert wrong == 0, (case.rotary, kind, noise)
        total += known
    assert total > 1000


def test_all_ids_of_a_long_prompt_with_images_are_read() -> None:
    table = place(SegmentTable.from_documents([[Text(700), Grid(40, 130), Text(90), Grid(9, 300), Text(800)]]))
    case = CASES["interleaved"]
    reading = read(case.rotate(table.dense()).astype(np.float32), case.rotary)
    assert known_and_wrong(reading, table.dense()) == (2 * table.num_tokens, 0)
    assert check(reading, table).equal
    assert reading.residual.max() < 1e-5
    assert reading.notes == ()


def test_fractions_are_recovered_with_their_denominators() -> None:
    table = place(SegmentTable.from_documents([[Text(3), Grid(7, 11), Text(5)]]), "rope-tie-fractional")
    reading = read(CASES["interleaved"].rotate(table.dense(dtype=np.float64)), CASES["interleaved"].rotary)
    numerators, denominators = table.rationals()
    for axis in range(2):
        for token in range(table.num_tokens):
            want = Fraction(int(numerators[axis, token]), int(denominators[token]))
            assert Fraction(int(reading.position_ids[axis, token]), int(reading.denominators[token])) == want
    assert check(reading, table).equal


def test_fractions_are_never_read_as_integers() -> None:
    table = place(SegmentTable.from_documents([[Text(3), Grid(12, 32), Text(5)]]), "rope-tie-fractional")
    ids = table.dense(dtype=np.float64)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        reading = read(torch.tensor(CASES["interleaved"].rotate(ids)).to(dtype), CASES["interleaved"].rotary)
        assert not any("most tokens fit none" in note for note in reading.notes)
        recovered = reading.position_ids / reading.denominators
        assert np.abs(recovered - ids)[reading.known].max(initial=0) < 1e-9


def test_ids_are_absolute_if_the_reference_is_an_unrotated_key() -> None:
    case = CASES["interleaved"]
    ids = np.array([[5, 6, 7], [5, 9, 7]])
    key = case.rotate([[0], [0]])[0]
    reading = read(case.rotate(ids), case.rotary, reference=key)
    assert reading.position_ids.tolist() == ids.tolist()
    assert reading.reference is None
    assert read(case.rotate(ids), case.rotary, reference=2).position_ids.tolist() == [[-2, -1, 0], [-2, 2, 0]]


@pytest.mark.parametrize("start", [0, 4000, 120_000])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_angles_computed_in_float32_are_read_as_integers(theta: float, start: int) -> None:
    ids = np.concatenate([[0], start + np.arange(400)])
    angle = ids.astype(np.float32)[:, None] * ladder(64, theta).astype(np.float32)
    key = np.random.default_rng(int(theta)).normal(size=(64, 2)).astype(np.float32).view(np.complex64)[:, 0]
    rotated = key * (np.cos(angle) + 1j * np.sin(angle)).astype(np.complex64)
    reading = read(np.concatenate([rotated.real, rotated.imag], axis=1)[:, None], Rotary(128, theta, axes=1))
    assert reading.position_ids.tolist() == [ids.tolist()]
    assert reading.notes == ()


def test_tokens_that_differ_from_the_reference_are_noted() -> None:
    case = CASES["1-D"]
    keys = case.rotate([np.arange(6)])
    keys[2], keys[4] = np.random.default_rng(9).normal(size=keys[2].shape), np.nan
    reading = read(keys, case.rotary)
    assert reading.position_ids.tolist() == [[0, 1, UNKNOWN, 3, UNKNOWN, 5]]
    assert reading.alike.tolist() == [True, True, False, True, False, True]
    assert np.isnan(reading.residual[[2, 4]]).all()
    assert reading.notes[0].startswith("2 tokens (first: 2) have pairs of other lengths than the reference, or NaN")


def test_tokens_that_all_have_the_same_key_are_noted() -> None:
    case = CASES["1-D"]
    swapped = np.repeat(case.rotate([np.arange(9)], heads=1), 4, axis=1).swapaxes(0, 1)
    values = np.tile(case.rotate([[0]]), (7, 1, 1))
    note = "All tokens have one key: values, keys before their rotation, copies of heads, or one id for all."
    assert note in read(swapped, case.rotary).notes
    assert note in read(values, case.rotary).notes
    assert note not in read(values[:1], case.rotary).notes
    assert note not in read(case.rotate([[5, 5, 6]]), case.rotary).notes


def test_ids_read_with_another_rotation_are_unknown() -> None:
    ids = np.stack([np.arange(300), np.arange(300)])
    reading = read(CASES["interleaved"].rotate(ids), Rotary(128, pairing="adjacent"))
    assert not reading.known.any()
    assert reading.notes[-1].startswith("No id is returned, since most tokens fit none")


def test_rotated_pairs_that_should_not_be_rotated_are_noted() -> None:
    meant = CASES["vector"].rotary
    moving = Case(meant, np.array([1, 2] * 24 + [0] * 16), ladder(64, 1e4))
    reading = read(moving.rotate(np.tile(np.arange(200), (3, 1))), meant)
    assert "Pairs that should not be rotated are rotated." in reading.notes


PROMPT = SegmentTable.from_documents([[Text(30), Grid(17, 23), Text(50), Grid(12, 30), Text(80)]])
MEANT = place(PROMPT, "mrope-qwen3")
IDS = MEANT.dense()


def test_a_fused_kernel_that_drops_height_and_width_is_identified() -> None:
    """sglang#34446, #36762: the ids are right, but all pairs rotate by the first axis."""
    dropped = QWEN3_VL.rotate(IDS[[0, 0, 0]]).astype(np.float32)
    diagnosis = check(read(dropped, QWEN3_VL.rotary), PROMPT, "mrope-qwen3")
    assert diagnosis.token == 31  # the first patch with a column other than the frame's id
    assert diagnosis.cause == "axis 0 (frame) is used in place of every other axis"
    identification = identify(dropped, QWEN3_VL.rotary, MEANT)
    assert identification.cause == "all pairs rotate by axis 0 (frame): other axes are dropped"
    assert identification.first_wrong == 31


def test_sections_instead_of_interleaved_pairs_are_identified() -> None:
    """vllm-gaudi#1437: the sections are those of the config, but their pairs are in blocks."""
    mixed = Case(QWEN3_VL.rotary, blocks(24, 20, 20), ladder(64, 5e6))
    identification = identify(mixed.rotate(IDS).astype(np.float32), QWEN3_VL.rotary, MEANT)
    assert identification.cause == "pairs are allocated as 'sections', not as 'mrope-interleaved'"
    assert identification.rotary is not None
    assert identification.rotary.allocation == "sections"
    assert identification.first_wrong == 31  # token 30 has one id on all axes


def test_the_first_wrong_token_is_found_beyond_the_sample_and_unexplained_keys() -> None:
    documents = SegmentTable.from_documents([[Text(4500), Grid(6, 6), Text(9)]])
    table = place(documents, "mrope-qwen3")
    keys = QWEN3_VL.rotate(table.dense()[[0, 0, 0]], heads=1)
    keys[17], keys[4000] = np.nan, np.random.default_rng(1).normal(size=(1, 128))
    assert identify(keys, QWEN3_VL.rotary, table).first_wrong == 4501  # the second patch, in the next column


def test_wrong_ids_of_drafts_are_identified_and_no_rotation_is_blamed() -> None:
    """The keys contain two windows of drafts, each after a correct token."""
    segments = SegmentTable.from_documents([[Text(4), Grid(6, 9), Text(12)]])
    ids = place(segments, "mrope-qwen3").dense()
    ids[:, [63, 64, 65, 67, 68, 69]] += 1
    keys = QWEN3_VL.rotate(ids).astype(np.float32)
    diagnosis = check(read(keys, QWEN3_VL.rotary), segments, "mrope-qwen3")
    assert (diagnosis.token, diagnosis.explained, diagnosis.different_tokens) == (63, 6, 6)
    assert diagnosis.cause == "2 runs of tokens have ids that are 1 too large; the tokens between them are right"
    identification = identify(keys, QWEN3_VL.rotary, place(segments, "mrope-qwen3"))
    assert identification.cause == "no known rotation explains the keys"
    assert identification.residual < 0.1  # only six of seventy tokens are off by one id
    assert not identification.named


@pytest.mark.parametrize("seed", [0, 30])
def test_slow_pairs_of_bfloat16_do_not_hide_which_axes_were_dropped(seed: int) -> None:
    """With Qwen3.5's settings, several rotations have small residuals; the one with the smallest is reported."""
    meant = Rotary(256, 1e7, rotary_dim=64, allocation="mrope-interleaved", mrope_section=[11, 11, 10])
    table = place(SegmentTable.from_documents([[Text(4), Grid(7, 11), Text(9)]]), "mrope-qwen3")
    for axis, cause in (
        (blocks(32), "all pairs rotate by axis 0 (frame): other axes are dropped"),
        (blocks(11, 11, 10), "pairs are allocated as 'sections', not as 'mrope-interleaved'"),
    ):
        keys = torch.tensor(Case(meant, axis, ladder(32, 1e7)).rotate(table.dense(), heads=1, seed=seed)).bfloat16()
        assert identify(keys, meant, table).cause == cause


def test_num_tokens_counts_compared_tokens_if_an_axis_is_unknown() -> None:
    segments = SegmentTable.from_documents([[Text(4), Grid(5, 7), Text(9)]])
    ids = place(segments, "mrope").dense()
    case = CASES["vector"]  # no pair rotates by the first axis
    assert check(read(case.rotate(ids), case.rotary), segments, "mrope").num_tokens == 0
    ids[1, 20:] += 7
    diagnosis = check(read(case.rotate(ids), case.rotary), segments, "mrope")
    assert (diagnosis.different_tokens, diagnosis.num_tokens) == (28, 48)


MISTAKES: dict[str, tuple[Case, str]] = {
    "pairing": (
        Case(Rotary(128, 5e6, allocation="mrope-interleaved", pairing="adjacent"), QWEN3, ladder(64, 5e6)),
        "pairs are 'adjacent', not 'half'",
    ),
    "theta": (Case(QWEN3_VL.rotary, QWEN3, ladder(64, 1e6)), "theta is 1,000,000, not 5,000,000"),
    "half rotated": (
        Case(
            Rotary(128, 5e6, rotary_dim=64, allocation="mrope-interleaved", mrope_section=[12, 10, 10]),
            np.array([0, 1, 2] * 10 + [0, 0]),
            ladder(32, 5e6),
        ),
        "64 channels of a head are rotated, not 128",
    ),
    "backwards": (Case(QWEN3_VL.rotary, QWEN3, -ladder(64, 5e6)), "pairs rotate backwards"),
    "swapped": (
        Case(QWEN3_VL.rotary, np.array([0, 2, 1])[QWEN3], ladder(64, 5e6)),
        "axes are swapped: pairs of (frame, row, col) rotate by (frame, col, row)",
    ),
    "missing": (
        Case(QWEN3_VL.rotary, np.array([0, -1, 2])[QWEN3], ladder(64, 5e6)),
        "pairs of axis 1 (row) are not rotated",
    ),
    "twice": (
        Case(QWEN3_VL.rotary, np.array([0, 2, 2])[QWEN3], ladder(64, 5e6)),
        "pairs of axis 1 (row) rotate by axis 2 (col)",
    ),
    "factor": (
        Case(QWEN3_VL.rotary, QWEN3, ladder(64, 5e6) / 8),
        "all frequencies are 0.125 times the intended ones, or all ids are divided by 8",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_rotation_is_identified(name: str) -> None:
    case, cause = MISTAKES[name]
    identification = identify(case.rotate(IDS).astype(np.float32), QWEN3_VL.rotary, MEANT)
    assert (identification.as_meant, identification.cause) == (False, cause)
    assert identification.residual < 0.01 < identification.meant
    assert identification.remedy


@pytest.mark.parametrize(
    ("meant", "applied", "cause"),
    [
        (YaRN(4.0, 4096), YaRN(8.0, 4096), "factor of the scaling 'yarn' is 8, not 4"),
        (YaRN(4.0, 4096), YaRN(4.0, 32768), "original_max_position of the scaling 'yarn' is 32,768, not 4,096"),
        (Llama3(8.0, 1.0, 4.0, 8192), Llama3(32.0, 1.0, 4.0, 8192), "factor of the scaling 'llama3' is 32, not 8"),
        (NTK(4.0), NTK(2.0), "factor of the scaling 'ntk' is 2, not 4"),
        (Linear(4.0), Linear(8.0), "factor of the scaling 'linear' is 8, not 4"),
        (NTK(4.0), None, "the scaling 'ntk' is missing"),
        (None, NTK(4.0), "the scaling 'ntk' by 4 is applied, but none is intended"),
        (None, YaRN(4.0, 4096), "the scaling 'yarn' by 4 from 4,096 positions is applied, but none is intended"),
    ],
)
def test_a_wrong_scaling_is_identified(meant: Scaling | None, applied: Scaling | None, cause: str) -> None:
    ids = np.arange(600)[None]
    inv_freq = Rotary(64, 5e5, axes=1, scaling=applied).inv_freq_array
    keys = Case(Rotary(64, 5e5, axes=1), np.zeros(32, np.int64), inv_freq).rotate(ids).astype(np.float32)
    assert identify(keys, Rotary(64, 5e5, axes=1, scaling=meant), ids).cause == cause


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 100), (torch.float16, 300), (torch.float16, 1000)])
def test_cast_angles_are_identified(dtype: torch.dtype, tokens: int) -> None:
    """The products of ids and frequencies are right, but are then cast."""
    rotary, ids = Rotary(64, axes=1), np.arange(tokens)
    angle = torch.tensor(ids[:, None] * ladder(32, 1e4)).to(dtype).double().numpy()
    keys = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)[:, None].astype(np.float32)
    cause = f"angles are cast to {str(dtype)[6:]}: their error is up to"
    assert identify(keys, rotary, ids[None]).cause.startswith(cause)


def test_pairs_on_other_axes_are_counted_if_they_exceed_the_noise() -> None:
    axis = QWEN3.copy()
    axis[np.flatnonzero(axis == 1)[::2]] = 2
    keys = torch.tensor(Case(QWEN3_VL.rotary, axis, ladder(64, 5e6)).rotate(IDS)).bfloat16()
    identification = identify(keys, QWEN3_VL.rotary, MEANT)
    assert identification.cause.endswith("of 64 (first: 1) rotate by other axes: 2 instead of 1")


def test_the_intended_rotation_is_recognized() -> None:
    for dtype in DTYPES.values():
        keys = torch.tensor(QWEN3_VL.rotate(IDS)).to(dtype)
        identification = identify(keys, QWEN3_VL.rotary, MEANT)
        assert identification.as_meant
        assert identification.first_wrong is None
        assert identification.rotary == QWEN3_VL.rotary
        assert str(identification).startswith("The keys have the intended rotation.")


def test_an_unusual_theta_is_fitted() -> None:
    identification = identify(Case(QWEN3_VL.rotary, QWEN3, ladder(64, 3.3e6)).rotate(IDS), QWEN3_VL.rotary, MEANT)
    assert identification.rotary is not None
    assert isinstance(identification.rotary.theta, float)
    assert abs(identification.rotary.theta / 3.3e6 - 1) < 1e-2


@pytest.mark.parametrize(
    ("truncate", "bounds", "place"), [(False, (8, 18), "at"), (True, (8.09278, 17.39802), "between")]
)
def test_a_wrongly_rounded_yarn_ramp_is_identified(truncate: bool, bounds: tuple[float, float], place: str) -> None:
    meant = Rotary(64, 150000.0, axes=1, scaling=YaRN(32.0, 4096, truncate=truncate))
    ramp = np.clip((np.arange(32) - bounds[0]) / (bounds[1] - bounds[0]), 0, 1)
    case = Case(meant, np.zeros(32, np.int64), ladder(32, 150000.0) * (1 - ramp + ramp / 32))
    ids = np.arange(600)[None]
    identification = identify(case.rotate(ids), meant, ids)
    assert identification.cause == f"YaRN's ramp begins and ends {place} whole pairs"
    assert identification.rotary == Rotary(64, 150000.0, axes=1, scaling=YaRN(32.0, 4096, truncate=not truncate))


def test_a_missing_attention_factor_is_identified() -> None:
    meant = Rotary(128, 1e6, axes=1, scaling=YaRN(4.0, 32768))
    ids = np.arange(600)[None]
    scaled = Case(meant, np.zeros(64, np.int64), meant.inv_freq_array)
    key = scaled.rotate([[0]])[0]
    identification = identify(scaled.rotate(ids), meant, ids, reference=key)
    assert identification.cause == "cos and sin are multiplied by 1, not by 1.139"  # 0.1·ln 4 + 1
    assert identify(scaled.rotate(ids) * meant.attention_factor, meant, ids, reference=key).as_meant


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cause", ["ids are cast to {} before the multiplication", "frequencies are stored in {}"])
def test_casts_to_few_bits_are_reported_with_their_error(cause: str, dtype: str) -> None:
    def cast(values: Floats) -> Floats:
        return np.asarray(torch.tensor(values).to(getattr(torch, dtype)).double())

    ids = np.arange(3001)[None].astype(np.float64)
    rotary, freq = Rotary(128, 1e4, axes=1), ladder(64, 1e4)
    axis = np.zeros(64, np.int64)
    keys = Case(rotary, axis, freq).rotate(cast(ids)) if "ids" in cause else Case(rotary, axis, cast(freq)).rotate(ids)
    identification = identify(keys, rotary, ids)
    assert identification.cause.startswith(cause.format(dtype) + ": their error is up to")
    assert identification.cause.endswith("rad at id 3000")
    assert identification.rotary is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: (k.astype(np.int8), {}), "keys: got dtype int8, want floats; multiply quantised keys"),
        (lambda k: (k[:, 0], {}), "keys: got shape (5, 64), want (tokens, kv_heads, 64), without padding"),
        (lambda k: (k.swapaxes(1, 2), {}), "keys: got shape (5, 64, 2), want (tokens, kv_heads, 64)"),
        (lambda k: (k[:0], {}), "keys: got shape (0, 2, 64), want at least one token"),
        (lambda k: (k, {"reference": 5}), "reference: got 5, want a token from 0 to 4"),
        (lambda k: (k, {"reference": k[0, 0]}), "reference: got shape (64,), want a token, or a key (2, 64)"),
        (lambda k: (k * np.nan, {}), "reference: token 0: got NaN or infinity, want finite numbers"),
        (lambda k: (k * 0, {}), "reference: token 0: got nothing but zeros, want finite"),
        (lambda k: (k * 1e20, {}), "reference: token 0: got numbers up to "),
        (lambda k: (k * 1e300, {}), "reference: token 0: got NaN or infinity, want"),
    ],
)
def test_invalid_keys_are_refused(change: Callable[[Floats], tuple[Any, dict[str, Any]]], message: str) -> None:
    case = CASES["1-D"]
    keys, options = change(case.rotate([np.arange(5)]))
    with pytest.raises(InvalidInputError) as error:
        read(keys, case.rotary, **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("inv_freq", [[0.0] * 32, [1e-30] * 32, [np.pi] * 32, [1e9] * 32])
def test_ids_that_no_frequency_separates_are_unknown(inv_freq: list[float]) -> None:
    rotary = Rotary(64, axes=1, inv_freq=inv_freq)
    case = Case(rotary, np.zeros(32, np.int64), np.array(inv_freq))
    keys = case.rotate([[0, 1, 2, 900]])
    for reference in (None, case.rotate([[0]])[0]):
        assert not read(keys, rotary, reference=reference).known.any()
    assert identify(keys, rotary, [[0, 1, 2, 900]]).as_meant


def test_nan_tokens_and_pairs_of_nearly_zero_length_do_not_hide_the_rotation() -> None:
    case = CASES["1-D"]
    keys = case.rotate([np.arange(40)])
    keys[[0, 7]], keys[9] = np.nan, np.inf
    assert identify(keys, case.rotary, [np.arange(40)], reference=1).as_meant
    weak = np.where(np.arange(64) % 32 < 4, 1, 5e-4)
    assert identify(case.rotate([np.arange(40)]) * weak, case.rotary, [np.arange(40)]).as_meant


@pytest.mark.parametrize("ratio", [300, 1000])
@pytest.mark.parametrize("name", ["1-D", "mrope-interleaved"])
def test_much_longer_pairs_hide_neither_ids_nor_the_rotation(name: str, ratio: int) -> None:
    case = CASES[name]
    for seed in range(4):
        long = np.random.default_rng(seed).integers(0, case.freq.size, 1 + seed % 2)
        lengths = np.where(np.isin(np.arange(case.freq.size), long), 1, 1 / ratio)
        ids = random_ids(case, 25, seed)
        keys = case.rotate(ids, heads=4, seed=seed).astype(np.float32) * np.tile(lengths, 2)
        reading = read(keys, case.rotary)
        assert known_and_wrong(reading, ids)[1] == 0
        if ratio < 1000:
            assert reading.known.all()
        assert identify(keys, case.rotary, ids).as_meant


def test_a_search_finds_the_best_of_all_ids() -> None:
    rng = np.random.default_rng(4)
    ids = np.arange(-(2**18), 2**18 + 1)
    for theta, noise in [(1e4, 0.3), (30.0, 0.2)]:
        freq = ladder(9, theta)
        turns = np.rint(freq / (2 * np.pi) * 2.0**63).astype(np.uint64) * np.uint64(2)
        pairs = Ladder(turns, freq, rng.uniform(0.5, 2, 9))
        wanted = [-(2**18), 2**18, *rng.integers(-(2**18), 2**18, 2)]
        angles = np.multiply.outer(np.array(wanted), freq) + noise * rng.normal(size=(4, 9))
        for angle, best in zip(angles, pairs.search(np.exp(1j * angles).astype(np.complex64)), strict=True):
            scores = sum(w * np.cos(a - ids * f) for w, a, f in zip(pairs.weights, angle, freq, strict=True))
            assert scores[int(best) + 2**18] >= scores.max() - 1e-5 * pairs.weights.sum()


def test_the_doubt_about_an_id_is_a_sum_over_all_other_ids_within_reach() -> None:
    rng, pairs, across = np.random.default_rng(2), 9, 0.8
    freq, lengths, by_pair = ladder(pairs, 1e4), rng.uniform(0.5, 2, pairs), rng.uniform(0.5, 2, pairs)
    turns = np.rint(freq / (2 * np.pi) * 2.0**63).astype(np.uint64) * np.uint64(2)
    noise = 1e-6 * 2.0 ** (np.array([27, 64, 67, 69, 70, 73]) / 4) * (1 - 1e-12)  # rounded up to these steps
    misfit = noise * 2.0**-2.5
    weight = lengths / lengths.sum()
    own = weight**2 * by_pair / (weight @ by_pair)
    angles = np.arange(1, 2**19 + 1)[:, None] * freq
    squares, along, sines = 2 * (1 - np.cos(angles)) @ weight, 2 * (1 - np.cos(angles)) @ own, np.sin(angles) ** 2 @ own
    onward = np.sqrt((across * sines + along - sines) / squares)
    want = [
        min(float(np.exp(-((np.maximum(np.sqrt(squares) / 2 - off, 0) / (n * onward)) ** 2) / 2).sum()), 1.0)
        for n, off in zip(noise, misfit, strict=True)
    ]
    doubt = Ladder(turns, freq, lengths).doubt(noise, misfit, by_pair, across)
    np.testing.assert_allclose(doubt, want, rtol=1e-6, atol=1e-11)
    assert doubt[0] < 1e-9 < doubt[2] < 0.01 < doubt[3] < doubt[5] == 1


def test_other_invalid_arguments_are_refused() -> None:
    case = CASES["1-D"]
    keys = case.rotate([np.arange(5)])
    with pytest.raises(InvalidInputError, match=r"rotary: got str, want a mmpos.rotary.Rotary"):
        read(keys, "rope")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="rotary: got kv_heads 4, want one layout for all heads"):
        read(np.ones((5, 4, 16)), Rotary(16, kv_heads=4, allocation=[0, 1, 2, -1] * 8))
    with pytest.raises(InvalidInputError, match=r"positions: got shape \(1, 4\), want \(1, 5\)"):
        identify(keys, case.rotary, [[0, 1, 2, 3]])
    reading = read(keys, case.rotary)
    with pytest.raises(InvalidInputError, match="reading: got 1 axes and 5 tokens, want 2 axes and 5"):
        check(reading, SegmentTable.from_documents([[Text(5)]]))
    with pytest.raises(InvalidInputError, match="scheme requires a SegmentTable, got ids"):
        check(reading, np.arange(5), "mrope-qwen3")
    other = Rotary(128, pairing="adjacent")
    with pytest.raises(InvalidInputError, match="reading: got no known id, want at least one"):
        check(read(CASES["interleaved"].rotate(np.tile(np.arange(300), (2, 1))), other), np.arange(300))


def test_a_reading_is_compared_with_dense_ids() -> None:
    case = CASES["interleaved"]
    ids = np.array([[0, 1, 1, 2], [0, 1, 2, 2]])
    assert check(read(case.rotate(ids), case.rotary), ids).equal
    diagnosis = check(read(case.rotate(ids), case.rotary), [0, 1, 2, 3])
    assert (diagnosis.token, diagnosis.axis, diagnosis.got) == (2, 0, (1.0, 2.0))
    assert diagnosis.want == (Fraction(2), Fraction(2))
