"""Phase errors and growth of ids, compared with 60-digit numbers and the specification, and their plots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mpmath import mp
from pictures import texts
from tolerance import gamma, printed

from mmpos.analysis.plot import id_growth, phase_errors, plot_growth, plot_phase_error
from mmpos.analysis.plot.canvas import COLOURS, scheme_styles
from mmpos.analysis.plot.curves import DECADES
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, V2PE, LatentScheme

FOLLOWED = [name for name, scheme in SCHEMES.items() if not issubclass(scheme, LatentScheme)]
"""Schemes in which text follows grids."""


def test_errors_match_the_specification() -> None:
    # With a window of 4,096 ids the error at 10⁷ is 0.797; the specification states 0.77, computed from fewer ids.
    errors = phase_errors(Rotary(128), [32_768, 131_072, 10**6, 10**7], window=4096)
    assert errors["hf"].tolist() == [printed("1.94e-3"), printed("7.76e-3"), printed("6.09e-2"), printed("0.797")]
    assert errors["float32"].tolist() == errors["hf"].tolist()
    assert (errors["exact"] <= 1.9e-9).all()
    larger = phase_errors(Rotary(128, theta=5e5), [10**6])  # frequencies computed in float32 have larger errors
    assert [larger["float32"][0], larger["hf"][0]] == [printed("0.0492"), printed("0.0728")]


def test_exact_errors_stay_below_their_bound_up_to_the_last_id() -> None:
    errors = phase_errors(Rotary(128))
    assert (DECADES[0], DECADES[-1]) == (1, 2**31 - 1)
    assert 1.3e-9 < errors["exact"].min() < errors["exact"].max() <= 1.9e-9
    assert errors["hf"][-1] == printed("3.1416")  # π, the largest possible error


def test_the_largest_errors_equal_those_of_a_loop_in_60_digit_arithmetic() -> None:
    torch = pytest.importorskip("torch")
    from mmpos.rotary import reference
    from mmpos.rotary.device import frequencies_of

    rotary = Rotary(8, axes=1)
    words, pair_axis = frequencies_of(rotary)
    for last in (1000, 2**31 - 1):
        ids = np.arange(last - 15, last + 1)
        fixed = reference.fixed_positions(torch.from_numpy(ids)[None], reference.DENSE_INTEGER, ids.size)
        turns = reference.turns(fixed, pair_axis.to(torch.int64), words).tolist()
        with mp.workdps(60):
            hf, exact = mp.mpf(0), mp.mpf(0)
            for i, row in zip(ids.tolist(), turns, strict=True):
                for j, turn in enumerate(row):
                    # θ_j = 10⁴^(−j/4), computed in float32 as 1 over the rounded power
                    angle = np.float32(i) * (np.float32(1) / np.float32(10.0**j))
                    true = i * mp.mpf(10) ** -j
                    for name, got in (("hf", mp.mpf(float(angle))), ("exact", mp.mpf(turn) * 2 * mp.pi / 2**32)):
                        off = abs((got - true + mp.pi) % (2 * mp.pi) - mp.pi)
                        hf, exact = (max(hf, off), exact) if name == "hf" else (hf, max(exact, off))
        errors = phase_errors(rotary, [last], window=16)
        assert errors["hf"][0] == pytest.approx(float(hf), rel=0, abs=last * gamma(4, np.float64))  # in float64
        assert errors["exact"][0] == pytest.approx(float(exact), rel=0, abs=2 * np.pi * 2.0**-62)


def test_errors_never_decrease_as_ids_grow() -> None:
    errors = phase_errors(Rotary(8), [1000, 1024, 1100], window=2)
    assert all((np.diff(curve) >= 0).all() for curve in errors.values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"ids: got \[\], want ascending ids, at least one"),
        ([3, 2], r"ids: got \[3, 2\], want ascending ids"),
        ([-1], r"ids\[0\]: got -1, want >= 0"),
        ([2**31], r"ids\[0\]: got 2147483648, want <= 2147483647"),
    ],
)
def test_invalid_ids_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        phase_errors(Rotary(8), ids)


def test_ids_of_squares_and_strips_match_the_specification() -> None:
    growth = id_growth(["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope"], [24, 64, 128])
    squares, strips = np.stack([*growth.values()], axis=1)
    assert squares.T.tolist() == [[624, 576, 576, 24, 24], [4224, 4096, 4096, 64, 64], [16640, 16384, 16384, 128, 128]]
    assert strips[:, 0].tolist() == [1153, 576, 576, 1153, 576]
    assert set(id_growth(sides=[1])) == {*FOLLOWED} - {"rows", "grid-2d"}
    assert {name: ids[0].tolist() for name, ids in id_growth([V2PE(stride=128), "v2pe"], [8]).items()} == {
        "v2pe(stride=128)": [32],
        "v2pe": [16],
    }


def test_schemes_without_next_positions_and_invalid_sides_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rows"):
        id_growth(["rows"])
    with pytest.raises(InvalidInputError, match=r"sides\[1\]: got 1025, want <= 1024"):
        id_growth(["mrope"], [1, 1025])


def test_curve_plots_are_labelled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_growth(path=tmp_path / "a.svg")
    labels = texts(tmp_path / "a.svg")
    assert "rope-tie-fractional, rope-tie-v2, flatten, xd-rope" in labels
    assert {"rope-tie", "rope-tie-lcm", "vrope", "videorope, bagel", "v2pe", "squares, n×n", "strips, 1×n²"} <= set(
        labels
    )
    assert {"patches of the image", "ids consumed", "1,000"} <= set(labels)
    plot_phase_error(Rotary(128), tmp_path / "b.svg")
    labels = texts(tmp_path / "b.svg")
    assert {"0.061 rad at id 1,000,000", "1.8e-9 rad at id 2,147,483,647", "position id", "error in rad"} <= set(labels)


@pytest.mark.parametrize("chosen", [["mrope", "rope-tie", "mine", "v2pe(stride=16)", "mrope-transformers"], FOLLOWED])
def test_the_order_of_curves_does_not_affect_their_styles(chosen: list[str]) -> None:
    styles = scheme_styles(chosen)
    assert scheme_styles(chosen[::-1]) == styles[::-1]
    assert len({style["color"] for style in styles}) == min(len(chosen), len(COLOURS) + 1)
    assert len({(style["color"], style["linestyle"]) for style in styles}) == len(chosen)
    assert styles[chosen.index("rope-tie")] == scheme_styles(["rope-tie"])[0]
