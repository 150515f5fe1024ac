"""Compare measured properties of schemes and encodings with a handwritten matrix; measure schemes that violate one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import cos, log2, sin
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from tolerance import cos_sin, gamma

from mmpos import Scheme
from mmpos.__main__ import main
from mmpos.analysis.compare import (
    ENCODING_PROPERTIES,
    SCHEME_PROPERTIES,
    PropertyValue,
    measure,
    measure_encodings,
)
from mmpos.encodings import ENCODINGS, AdditiveTable, Encoding, LearnedAbsolute, Sinusoidal
from mmpos.errors import InvalidInputError
from mmpos.schemes import Cosmos, Grids, MRopeQwen25, Naive2D, Placement, RopeTieV2, TextRuns
from mmpos.support.checks import IntArray

schemes, encodings = cache(measure), cache(measure_encodings)
MARKS = {"✓": True, "✗": False, "–": None}

# Derived from the formulas of the schemes, for h×w patches between the text ids L and K:
# symmetric: (L+K)/2 is the middle of the ids on every axis. naive-2d and mrope end where the longer side does; v2pe
#   continues at the next integer; videorope's middle is c for odd sides only; rows of a reset are near 0, as are all
#   axes of xd-rope but one, and the rows of qwen-image-2.1 around 0. In bagel, an image of any size has one id.
# unique: a vision encoder counts every grid from 0, and so does xd-rope without its token axis; ⌊t·¼·2⌋ and ⌊t·25/30⌋
#   of tmrope give two frames one id.
# delta 0: ids consumed minus patches; rows and grid-2d have no next position.
# prefix-stable: another frame changes the strides, or the centre, of three-axis ties.
# Ids of h×w: (h+1)(w+1)−1, hw, hw, lcm(h+1, w+1)−1, hw, max(h, w), ⌈hw/4⌉, 1, h+w−1; in three axes with f = 1
#   2(h+1)(w+1)−1, hw, hw, lcm(2, h+1, w+1)−1.
# Growth: log2 of the ids of 128×128 over those of 64×64; for lcm 127×128 over 63×64, on three axes 126×128 over 62×64.
SCHEMES = f"""
    rope-tie                     2 ✓✓✓✗✓✓ 624 1153 {log2(16640 / 4224)}
    rope-tie-fractional          2 ✓✓✓✓✗✓ 576 576 2
    rope-tie-v2                  2 ✓✓✓✓✗✓ 576 576 2
    rope-tie-lcm                 2 ✓✓✓✗✓✓ 24 1153 {log2(16511 / 4159)}
    flatten                      1 ✓✓✓✓✓✓ 576 576 2
    rows                         2 ✗✗✓–✓✓ – – –
    naive-2d                     2 ✓✗✓✗✓✓ 24 576 1
    grid-2d                      2 ––✗–✓✓ – – –
    mrope                        3 ✓✗✓✗✓✓ 24 576 1
    mrope-transformers           3 ✓✗✓✗✓✓ 24 576 1
    mrope-qwen2.5                3 ✓✗✗✗✓✓ 24 576 1
    mrope-qwen3                  3 ✓✗✓✗✓✓ 24 576 1
    mrope-interleave-reset       3 ✓✗✓✗✓✓ 24 576 1
    mrope-canvas                 3 ✓✗✓✗✓✓ 25 577 {log2(129 / 65)}
    tmrope                       3 ✓✗✗✗✓✓ 24 576 1
    tmrope-qwen3                 3 ✓✗✓✗✗✓ 24 576 1
    v2pe                         1 ✓✗✓✗✗✓ 144 144 2
    videorope                    3 ✓✗✓✗✓✓ 1 1 0
    vrope                        4 ✓✓✓✗✓✓ 47 576 {log2(255 / 127)}
    xd-rope                      4 ✓✗✓✓✓✓ 576 576 2
    qwen-image-2.1               3 ✓✗✓✗✓✓ 24 576 1
    bagel                        1 ✓✓✗✗✓✓ 1 1 0
    omnigen2                     3 ✓✗✓✗✓✓ 24 576 1
    rope-tie(axes=3)             3 ✓✓✓✗✓✗ 1249 2307 {log2(33281 / 8449)}
    rope-tie-fractional(axes=3)  3 ✓✓✓✓✗✗ 576 576 2
    rope-tie-v2(axes=3)          3 ✓✓✓✓✗✗ 576 576 2
    rope-tie-lcm(axes=3)         3 ✓✓✓✗✓✗ 49 1153 {log2(32765 / 8189)}
    grid-2d(axes=3)              3 ––✗–✓✓ – – –
    xd-rope(axes=3)              3 ✓✗✗✓✓✓ 576 576 2
"""

# Far keys share a bias if distances are clipped or bucketed. nope adds no bias, and HoPE does not distinguish times.
NOT_UNIQUE = {"clipped-relative", "t5-buckets", "nope", "hope"}
ENCODING_AXES = {"rope-2d": 2, "rope-nd": 3, "hope": 3, "mhrope": 3}


def by_hand(table: str) -> dict[str, list[Any]]:
    rows = [line.split() for line in table.strip().splitlines()]
    return {
        name: [int(axes), *(MARKS[mark] for mark in marks), *map(number, numbers)]
        for name, axes, marks, *numbers in rows
    }


def number(text: str) -> Any:
    return None if text == "–" else pytest.approx(float(text), rel=gamma(4, np.float64))


def test_every_scheme_has_the_properties_that_follow_from_its_formula() -> None:
    matrix, want = schemes(), by_hand(SCHEMES)
    assert {name: [cell.value for cell in row.values()] for name, row in matrix.rows.items()} == want
    assert list(matrix.rows) == list(want)


def test_every_encoding_has_the_properties_that_follow_from_its_formula() -> None:
    matrix = encodings()
    assert {name for name in matrix.rows if not matrix[name, "unique"].value} == NOT_UNIQUE
    assert {name: matrix[name, "axes"].value for name in matrix.rows} == dict.fromkeys(ENCODINGS, 1) | ENCODING_AXES


def test_separation_is_the_distance_between_the_two_nearest_positions() -> None:
    separation = {name: encodings()[name, "separation"].value for name in encodings().rows}
    pairs = list(combinations(range(256), 2))
    sines = [abs(2 * cos(0.05 * (p + q)) * sin(0.05 * (p - q))) for p, q in pairs]
    assert separation["integer"] == separation["alibi"] == pytest.approx(1 / 255, rel=gamma(4, np.float64))
    # The smallest distance is a difference of two sines. Their angles, up to 26, determine the bound.
    error = cos_sin(0.1 * 256, 1, np.float64)
    assert separation["single-sinusoid"] == pytest.approx(min(sines) / max(sines), rel=2 * error / min(sines))
    assert (separation["binary"], separation["t5-buckets"], separation["nope"]) == (1, 0, 0)
    assert separation["sinusoidal"] == pytest.approx(separation["rope-1d"], abs=0.1)


def test_a_property_that_fails_comes_with_its_smallest_counterexample() -> None:
    reasons = {(name, column.name): reason for name, column, reason in schemes().reasons}
    holds = "; holds for {} of 144 images, those with {}"
    even = holds.format(72, "h and w both odd or both even")
    expected = {
        ("naive-2d", "symmetric"): "1,1x2,1: gaps (1, 1) and (2, 1)" + holds.format(12, "h = w"),
        ("videorope", "symmetric"): "1,1x2,1: gaps (1, 1, 1) and (1, 1, 0)" + holds.format(36, "h and w odd"),
        ("v2pe", "symmetric"): "1,1x1,1: gaps 1/4 and 7/4",
        ("rows", "text-is-rope-1d"): "2: start 0 puts token 1 at (0, 1)",
        ("grid-2d", "unique"): "1x1,1x1: tokens 0 and 1 are both at (0, 0)",
        ("mrope-qwen2.5", "unique"): (
            "1,2x1x1,1 (1/4 s per frame): tokens 1 and 2 are both at (1, 1, 1); holds for every image"
        ),
        ("mrope", "delta-0"): "1,2x2,1: delta -2" + holds.format(23, "h = 1 or w = 1"),
        ("rope-tie-v2", "integer"): "1,1x2,1: token 1 is at (3/2, 1)" + even,
        ("rope-tie(axes=3)", "prefix-stable"): "1,1x1: another frame moves token 1 from (4, 4, 4) to (4, 6, 6)",
        ("rows", "growth"): "rows has no next position",
        ("grid-2d", "symmetric"): "grid-2d does not support text",
    }
    assert {key: reasons[key] for key in expected} == expected
    assert len(reasons) == sum(marks.count("✗") + marks.count("–") for marks in SCHEMES.split("\n"))
    assert {name: reason for name, _, reason in encodings().reasons} == {
        "hope": "positions (0, 0, 0) and (1, 0, 0) have the same vector",
        "clipped-relative": "keys 16 and 17 before a query have the same bias",
        "t5-buckets": "keys 8 and 9 before a query have the same bias",
        "nope": "keys 0 and 1 before a query have the same bias",
    }


@dataclass(frozen=True)
class Backwards(Naive2D):
    name: ClassVar[str] = "backwards"

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return Placement([cursor + runs.lengths - 1] * 2, step_col=[-1, -1])


@dataclass(frozen=True)
class FarOff(Naive2D):
    """naive-2d up to id 500; later images begin one id too late."""

    name: ClassVar[str] = "far-off"

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        origin = cursor + (cursor > 500)
        return Placement([origin, origin], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class Floored(MRopeQwen25):
    """The floored times alone: the ends of a video are symmetric, but the frames between them are not."""

    name: ClassVar[str] = "floored"
    axes = 1
    tokens_per_second: int = 1

    def advance(self, grids: Grids) -> IntArray:
        sides = np.minimum(grids.extents, [[2**31], [1], [1]])
        return super().advance(replace(grids, extents=sides, row_separator=None))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        placement = super().place(grids, cursor)
        return Placement(placement.origin[:1], None, [0], [0], pieces=placement.pieces)


@pytest.mark.parametrize(
    ("scheme", "name", "reason"),
    [
        (Backwards(), "text-is-rope-1d", "2: start 0 puts token 0 at (1, 1)"),
        (Backwards(), "prefix-stable", "1,1x1,1: another text token moves token 2 from (2, 2) to (3, 3)"),
        (FarOff(), "symmetric", "1,1x1,1: gaps (2, 2) and (0, 0)"),
        (FarOff(), "unique", "1,1x1,1: tokens 1 and 2 are both at (1002, 1002); holds for 132 of 144 images"),
        (Cosmos(), "integer", "2x1x1 (1/30 s per frame): token 1 is at (4/5, 0, 0); holds for every image"),
        (Floored(), "symmetric", "1,3x1x1,1 (3/2 s per frame): gaps 2 and 3 at patch 1; holds for every image"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_broken_property_comes_with_a_counterexample(scheme: Scheme, name: str, reason: str) -> None:
    (broken,) = (column for column in SCHEME_PROPERTIES if column.name == name)
    assert broken.measure(scheme) == PropertyValue(False, reason)


@dataclass(frozen=True)
class Fine(Naive2D):
    """naive-2d in fine units that differ between images, so that their common denominator exceeds 64 bits."""

    name: ClassVar[str] = "fine"
    fractional = True

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        unit = 2**20 + 2 * grids.height + 26 * grids.width + 1
        return Placement([cursor * unit, cursor * unit], None, [unit, 0], [0, unit], unit)


def test_common_denominators_beyond_64_bits_are_exact() -> None:
    fine, naive = measure([Fine()]), measure(["naive-2d"])
    assert fine.rows["fine"] == naive.rows["naive-2d"]


def test_names_of_schemes_include_their_parameters() -> None:
    matrix = measure(["rope-tie-v2", RopeTieV2(rounding="floor")])
    assert list(matrix.rows) == ["rope-tie-v2", "rope-tie-v2(rounding=floor)"]
    assert (matrix["rope-tie-v2(rounding=floor)", "integer"], matrix["rope-tie-v2", "integer"].value) == (
        PropertyValue(True),
        False,
    )


@dataclass(frozen=True)
class Halved(AdditiveTable):
    name: ClassVar[str] = "halved"
    dim: int = 1

    def table(self, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.asarray(positions, np.float64)[..., None] // 2


def test_two_positions_with_the_same_vector_are_reported() -> None:
    matrix = measure_encodings([Halved(), LearnedAbsolute.drawn(20, 4), Sinusoidal(128)])
    assert [value.value for value in matrix.rows["halved"].values()] == [1, False, 0]
    assert matrix["halved", "unique"].why == "positions 0 and 1 have the same vector"
    assert [matrix[name, "unique"].value for name in ("learned-absolute", "sinusoidal(dim=128)")] == [True, True]


class Wordless(Encoding):
    name: ClassVar[str] = "wordless"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure("rope-tie"), "schemes: got 'rope-tie', want a list of names or Scheme objects"),
        (lambda: measure(5), "schemes: got 5, want a list of names or Scheme objects"),  # type: ignore[arg-type]
        (lambda: measure_encodings(5), "encodings: got 5, want a list of names or "),  # type: ignore[arg-type]
        (lambda: measure([]), "schemes: got none, want at least one"),
        (lambda: measure(["rows", "rows"]), "schemes: got 'rows' twice, want each name once"),
        (lambda: measure(["tie"]), "scheme: got 'tie', want a Scheme or one of "),
        (lambda: measure_encodings(["rope"]), "encoding: got 'rope', want one of 'integer', "),
        (
            lambda: measure_encodings(Halved()),  # type: ignore[arg-type]
            "encodings: got Halved(dim=1), want a list of names or Encoding objects",
        ),
        (lambda: measure_encodings([Wordless()]), "encoding: got <"),
        (lambda: encodings()["alibi", "symmetric"], "property: got 'symmetric', want one of 'axes', "),
        (lambda: schemes()["alibi", "symmetric"], "scheme: got 'alibi', want one of 'rope-tie', "),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_every_property_has_a_definition() -> None:
    for columns in (SCHEME_PROPERTIES, ENCODING_PROPERTIES):
        assert len({column.name for column in columns}) == len({column.title for column in columns}) == len(columns)
        assert all(column.definition.endswith(".") and "\n" not in column.definition for column in columns)


def run(*arguments: str) -> str:
    testing, app = pytest.importorskip("typer.testing"), pytest.importorskip("mmpos.cli").app
    result = testing.CliRunner().invoke(app, ["compare", *arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return str(result.stdout)


def test_the_command_prints_reasons_and_tables_that_fit_the_line() -> None:
    lines = run("rope-tie", "alibi", "--why").splitlines()
    rows = [line.split() for line in lines if line.startswith(("rope-tie ", "alibi "))]
    assert rows == [["rope-tie", "2", *"✓✓✓✗✓✓", "624"], ["rope-tie", "1,153", "2"], ["alibi", "1", "✓", "0.0039"]]
    assert "rope-tie, delta 0: 1,1x1,1: delta 2" in lines
    assert max(len(line) for line in lines if "──" in line) <= 100


def test_the_command_measures_schemes_of_generative_models_by_name() -> None:
    rows = [line.split() for line in run("flux", "wan", "rope-tie").splitlines() if line.startswith(("flux", "wan"))]
    assert rows[:2] == [["flux", "3", *"✗✗✗–✓✓–"], ["wan", "3", *"––✗–✓✓–"]]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_matrix_is_printed_as_tables_that_fit_the_width(width: int) -> None:
    lines = measure(["rows"]).to_text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split().count("rows") == {40: 4, 80: 2, 140: 1}[width]


def test_print_and_notebooks_show_a_matrix_as_a_table() -> None:
    matrix = measure(["rope-tie"]).part(["rope-tie"])
    assert str(matrix).splitlines()[:3] == [
        "scheme     axes   text is RoPE-1D   symmetric   unique   delta 0   integer   prefix-stable   24×24",
        "──────────────────────────────────────────────────────────────────────────────────────────────────",
        "rope-tie   2      ✓                 ✓           ✓        ✗         ✓         ✓               624",
    ]
    assert str(matrix) == matrix.to_text()
    assert repr(matrix) == "Matrix(1 scheme, 10 properties)"
    assert repr(matrix.properties[0]) == "Property(name='axes', title='axes')"
    assert matrix._repr_html_().count("<tr>") == 1 + len(matrix.rows)


def test_part_keeps_only_the_properties_that_apply_to_its_rows() -> None:
    part = measure(["rope-tie", "wan"]).part(["wan"])
    assert list(part.rows) == ["wan"]
    assert (
        list(part.rows["wan"])
        == [column.name for column in part.properties]
        == ["axes", "unique", "integer", "prefix-stable"]
    )


def test_the_command_prints_the_same_values_as_json() -> None:
    printed = json.loads(run("naive-2d", "nope", "--json"))
    naive, nope = measure(["naive-2d"]), measure_encodings(["nope"])
    assert printed == {"schemes": naive.to_dict(), "encodings": nope.to_dict()}
    assert printed["schemes"]["naive-2d"]["ids-of-a-square"] == {"value": 24, "why": ""}


def test_an_unknown_name_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "alibby"]) == 2
    assert capsys.readouterr().err.startswith(
        "mmpos: error: NAME: got 'alibby' (did you mean 'alibi'?), want one of rope-tie, rope-tie-fractional"
    )


def test_compare_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import mmpos; "
        "print(mmpos.analysis.compare.measure(['rows'])['rows', 'symmetric'].cell, "
        "mmpos.analysis.compare.measure_encodings(['rope-nd'])['rope-nd', 'unique'].cell)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("✗ ✓\n", "")
