"""Errors of phases and growth of ids: truths of 60 digits and of the specification, and what their pictures say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpmath import mp
from pictures import texts
from tolerance import gamma, printed

from mmpos.analysis.plot import id_growth, phase_errors, plot_growth, plot_phase_error
from mmpos.analysis.plot.canvas import COLOURS, scheme_styles
from mmpos.analysis.plot.curves import DECADES, exact_turns, float32_angles, true_turns, turns_rest
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Llama3, Rotary
from mmpos.schemes import SCHEMES, V2PE

IDS = np.array([0, 1, 2, 4095, 32768, 10**6, 2**24 + 1, 2**31 - 1, -1, -(2**31)])
ROTARIES = {
    "1e4": Rotary(64),
    "5e5": Rotary(128, theta=5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "fast": Rotary(4, inv_freq=[7.0, 1e9]),
}


@pytest.mark.parametrize("name", ROTARIES)
def test_the_truth_is_within_two_units_of_2_to_the_minus_64(name: str) -> None:
    rotary = ROTARIES[name]
    found = true_turns(IDS, rotary.turns, turns_rest(rotary))
    with mp.workdps(60):
        for i, row in zip(IDS.tolist(), found.tolist(), strict=True):
            for value, frequency in zip(row, rotary.exact_inv_freq, strict=True):
                true = mp.mpf(str(frequency)) * i / (2 * mp.pi) * 2**64
                assert abs((mp.mpf(value) - true + 2**63) % 2**64 - 2**63) < 1.5


def test_errors_are_those_of_the_specification() -> None:
    # A window of 4,096 finds 0.797 at 10⁷, where the specification, from fewer ids, has 0.77.
    found = phase_errors(Rotary(128), [32_768, 131_072, 10**6, 10**7], window=4096)
    assert found["hf"].tolist() == [printed("1.94e-3"), printed("7.76e-3"), printed("6.09e-2"), printed("0.797")]
    assert found["float32"].tolist() == found["hf"].tolist()
    assert (found["exact"] <= 1.9e-9).all()
    made = phase_errors(Rotary(128, theta=5e5), [10**6])  # frequencies made in float32 err more than rounded ones
    assert [made["float32"][0], made["hf"][0]] == [printed("0.0492"), printed("0.0728")]


def test_exact_errors_stay_below_their_bound_up_to_the_last_id() -> None:
    found = phase_errors(Rotary(128))
    assert (DECADES[0], DECADES[-1]) == (1, 2**31 - 1)
    assert 1.3e-9 < found["exact"].min() < found["exact"].max() <= 1.9e-9
    assert found["hf"][-1] == printed("3.1416")  # π: as wrong as can be


def test_the_largest_error_is_that_of_a_loop_in_60_digits() -> None:
    rotary, window = Rotary(8), range(985, 1001)
    with mp.workdps(60):
        worst = mp.mpf(0)
        for i in window:
            for j in range(4):
                # θ_j = 10⁴^(−j/4), in float32 as 1 over the rounded power
                inv_freq = np.float32(1) / np.float32(10.0**j)
                error = mp.mpf(float(np.float32(i) * inv_freq)) - i * mp.mpf(10) ** -j
                worst = max(worst, abs(error))
    found = phase_errors(rotary, [1000], window=16)["hf"][0]
    assert found == pytest.approx(float(worst), rel=0, abs=1000 * gamma(4, np.float64))  # compared in float64


def test_errors_never_fall_from_one_id_to_the_next() -> None:
    found = phase_errors(Rotary(8), [1000, 1024, 1100], window=2)
    assert all((np.diff(curve) >= 0).all() for curve in found.values())


def test_turns_and_angles_are_the_bits_of_the_torch_path() -> None:
    torch = pytest.importorskip("torch")
    from mmpos.rotary import reference
    from mmpos.rotary.device import frequencies_of

    exact, hf = Rotary(128, axes=1), Rotary(128, axes=1, precision="hf")
    fixed = reference.fixed_positions(torch.from_numpy(IDS)[None], reference.DENSE_INTEGER, IDS.size)
    words, pair_axis = frequencies_of(exact)
    assert exact_turns(IDS, exact.turns).tolist() == reference.turns(fixed, pair_axis.to(torch.int64), words).tolist()
    inv_freq, pair_axis = frequencies_of(hf)
    angles = torch.from_numpy(float32_angles(IDS, inv_freq.numpy()))
    cos, sin = reference.cos_sin_as_hf(fixed, pair_axis.to(torch.int64), inv_freq)
    assert torch.equal(angles.cos(), cos)
    assert torch.equal(angles.sin(), sin)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"ids: got \[\], want ascending ids, at least one"),
        ([3, 2], r"ids: got \[3, 2\], want ascending ids"),
        ([-1], r"ids\[0\]: got -1, want >= 0"),
        ([2**31], r"ids\[0\]: got 2147483648, want <= 2147483647"),
    ],
)
def test_ids_that_have_no_errors(ids: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        phase_errors(Rotary(8), ids)


def test_ids_of_squares_and_strips_are_those_of_the_specification() -> None:
    found = id_growth(["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope"], [24, 64, 128])
    squares, strips = np.stack([*found.values()], axis=1)
    assert squares.T.tolist() == [[624, 576, 576, 24, 24], [4224, 4096, 4096, 64, 64], [16640, 16384, 16384, 128, 128]]
    assert strips[:, 0].tolist() == [1153, 576, 576, 1153, 576]
    assert set(SCHEMES) - set(id_growth(sides=[1])) == {"rows", "grid-2d"}
    assert {name: ids[0].tolist() for name, ids in id_growth([V2PE(stride=128), "v2pe"], [8]).items()} == {
        "v2pe(stride=128)": [32],
        "v2pe": [16],
    }


def test_what_cannot_grow() -> None:
    with pytest.raises(UnsupportedError, match="rows"):
        id_growth(["rows"])
    with pytest.raises(InvalidInputError, match=r"sides\[1\]: got 1025, want <= 1024"):
        id_growth(["mrope"], [1, 1025])


def test_pictures_of_curves_name_what_they_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_growth(path=tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert "rope-tie-fractional, rope-tie-v2, flatten, xd-rope" in words
    assert {"rope-tie", "rope-tie-lcm", "vrope", "videorope", "v2pe", "squares, n×n", "strips, 1×n²"} <= set(words)
    assert {"patches of the image", "ids consumed", "1,000"} <= set(words)
    plot_phase_error(Rotary(128), tmp_path / "b.svg")
    words = texts(tmp_path / "b.svg")
    assert {"0.061 rad at id 1,000,000", "1.8e-9 rad at id 2,147,483,647", "position id", "error in rad"} <= set(words)


@pytest.mark.parametrize("chosen", [["mrope", "rope-tie", "mine", "v2pe(stride=16)", "mrope-transformers"], [*SCHEMES]])
def test_the_order_of_curves_does_not_change_their_styles(chosen: list[str]) -> None:
    styles = scheme_styles(chosen)
    assert scheme_styles(chosen[::-1]) == styles[::-1]
    assert len({style["color"] for style in styles}) == min(len(chosen), len(COLOURS) + 1)
    assert len({(style["color"], style["linestyle"]) for style in styles}) == len(chosen)
    assert styles[chosen.index("rope-tie")] == scheme_styles(["rope-tie"])[0]
