"""Which scheme and which encoding has which property: the matrix by hand, and schemes that break one property each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import combinations
from math import cos, log2, sin
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import record
from record import QUOTING
from tolerance import cos_sin, gamma

from mmpos import Scheme
from mmpos.__main__ import main
from mmpos.analysis.compare import (
    ENCODING_PROPERTIES,
    SCHEME_PROPERTIES,
    Matrix,
    Property,
    PropertyValue,
    measure,
    measure_encodings,
)
from mmpos.encodings import AdditiveTable, AttentionBias, Encoding, LearnedAbsolute, Sinusoidal
from mmpos.errors import InvalidInputError
from mmpos.schemes import Grids, MRopeQwen25, Naive2D, Placement, RopeTieV2, TextRuns
from mmpos.support.checks import IntArray

MARKS = {"✓": True, "✗": False, "–": None}

# From the formulas of the schemes, with h×w patches after the text id L and before K:
# symmetric: (L+K)/2 is the middle of the ids on every axis. naive-2d and mrope end where the longer side does, v2pe
#   goes on at the next whole id, videorope's middle is c for odd sides only, a reset's rows are near 0, as are all but
#   one axis of xd-rope.
# unique: a vision encoder counts every grid from 0, xd-rope without places, too; ⌊t·¼·2⌋ gives two frames one id.
# linear shift, relative: rows and columns of a reset and of xd-rope stay where they are; a line of text does not move
#   a grid below it.
# delta 0: ids consumed less patches; rows and grid-2d have no next position.
# prefix-stable: a frame more changes the strides, or the centre, of three-axis ties.
# Ids of h×w: (h+1)(w+1)−1, hw, hw, lcm(h+1, w+1)−1, hw, max(h, w), ⌈hw/4⌉, 1, h+w−1; in three axes with f = 1
#   2(h+1)(w+1)−1, hw, hw, lcm(2, h+1, w+1)−1.
# Growth: log2 of the ids of 128×128 by those of 64×64; for lcm of 127×128 by 63×64, in three axes 126×128 by 62×64.
SCHEMES = f"""
    rope-tie                     2 ✓✓✓✓✓✓✗✓✓ 624 1153 {log2(16640 / 4224)}
    rope-tie-fractional          2 ✓✓✓✓✓✓✓✗✓ 576 576 2
    rope-tie-v2                  2 ✓✓✓✓✓✓✓✗✓ 576 576 2
    rope-tie-lcm                 2 ✓✓✓✓✓✓✗✓✓ 24 1153 {log2(16511 / 4159)}
    flatten                      1 ✓✓✓✓✓✓✓✓✓ 576 576 2
    rows                         2 ✗✗✓✓✓✗–✓✓ – – –
    naive-2d                     2 ✓✗✓✓✓✓✗✓✓ 24 576 1
    grid-2d                      2 ––✗✓✓✓–✓✓ – – –
    mrope                        3 ✓✗✓✓✓✓✗✓✓ 24 576 1
    mrope-transformers           3 ✓✗✓✓✓✓✗✓✓ 24 576 1
    mrope-qwen2.5                3 ✓✗✗✓✓✓✗✓✓ 24 576 1
    mrope-qwen3                  3 ✓✗✓✓✓✓✗✓✓ 24 576 1
    mrope-interleave-reset       3 ✓✗✓✓✗✗✗✓✓ 24 576 1
    mrope-canvas                 3 ✓✗✓✓✓✓✗✓✓ 25 577 {log2(129 / 65)}
    tmrope                       3 ✓✗✓✓✓✓✗✓✓ 24 576 1
    tmrope-qwen3                 3 ✓✗✓✓✓✓✗✗✓ 24 576 1
    v2pe                         1 ✓✗✓✓✓✓✗✗✓ 144 144 2
    videorope                    3 ✓✗✓✓✓✓✗✓✓ 1 1 0
    vrope                        4 ✓✓✓✓✓✓✗✓✓ 47 576 {log2(255 / 127)}
    xd-rope                      4 ✓✗✓✓✗✗✓✓✓ 576 576 2
    rope-tie(axes=3)             3 ✓✓✓✓✓✓✗✓✗ 1249 2307 {log2(33281 / 8449)}
    rope-tie-fractional(axes=3)  3 ✓✓✓✓✓✓✓✗✗ 576 576 2
    rope-tie-v2(axes=3)          3 ✓✓✓✓✓✓✓✗✗ 576 576 2
    rope-tie-lcm(axes=3)         3 ✓✓✓✓✓✓✗✓✗ 49 1153 {log2(32765 / 8189)}
    grid-2d(axes=3)              3 ––✗✓✓✓–✓✓ – – –
    xd-rope(axes=3)              3 ✓✗✗✓✗✗✓✓✓ 576 576 2
"""

# axes; unique, bounded, length-independent, linear shift, relative, extrapolates, deterministic.
# Far keys share a bias where distances are clipped or in buckets, all do without one; p, p/(T−1) and the products of
# bits and of one sine are not of p − q; a map from sin(ωp) to sin(ω(p+1)) would have to know cos(ωp).
# HoPE does not tell times apart.
ENCODINGS = """
    integer            1 ✓✗✓✓✗✓✓
    normalised         1 ✓✓✗✓✗✓✓
    binary             1 ✓✓✓✗✗✓✓
    single-sinusoid    1 ✓✓✓✗✗✓✓
    sinusoidal         1 ✓✓✓✓✓✓✓
    learned-absolute   1 ✓✓✓✗✗✗✗
    clipped-relative   1 ✗✓✓–✓✓✗
    t5-buckets         1 ✗✓✓–✓✓✗
    alibi              1 ✓✗✓–✓✓✓
    nope               1 ✗✓✓–✓✓✓
    rope-1d            1 ✓✓✓✓✓✓✓
    rope-1d-adjacent   1 ✓✓✓✓✓✓✓
    rope-2d            2 ✓✓✓✓✓✓✓
    rope-nd            3 ✓✓✓✓✓✓✓
    p-rope             1 ✓✓✓✓✓✓✓
    hope               3 ✗✓✓✓✓✓✓
    mhrope             3 ✓✓✓✓✓✓✓
"""


def by_hand(table: str) -> dict[str, list[Any]]:
    rows = [line.split() for line in table.strip().splitlines()]
    return {
        name: [int(axes), *(MARKS[mark] for mark in marks), *map(number, numbers)]
        for name, axes, marks, *numbers in rows
    }


def number(text: str) -> Any:
    return None if text == "–" else pytest.approx(float(text), rel=gamma(4, np.float64))


def values(matrix: Matrix, *left_out: str) -> dict[str, list[Any]]:
    kept = [each.name for each in matrix.properties if each.name not in left_out]
    return {row: [matrix[row, name].value for name in kept] for row in matrix.rows}


def test_every_scheme_has_the_properties_that_follow_from_its_formula() -> None:
    assert values(record.schemes()) == by_hand(SCHEMES)
    assert list(record.schemes().rows) == list(by_hand(SCHEMES))


def test_every_encoding_has_the_properties_that_follow_from_its_formula() -> None:
    assert values(record.encodings(), "separation") == by_hand(ENCODINGS)


def test_separation_is_that_of_the_nearest_two_positions() -> None:
    found = {name: record.encodings()[name, "separation"].value for name in record.encodings().rows}
    pairs = list(combinations(range(256), 2))
    sines = [abs(2 * cos(0.05 * (p + q)) * sin(0.05 * (p - q))) for p, q in pairs]
    assert found["integer"] == found["alibi"] == pytest.approx(1 / 255, rel=gamma(4, np.float64))
    # The least is a difference of two sines, which are off by as much as those of an angle of 26 are.
    off = cos_sin(0.1 * 256, 1, np.float64)
    assert found["single-sinusoid"] == pytest.approx(min(sines) / max(sines), rel=2 * off / min(sines))
    assert (found["binary"], found["t5-buckets"], found["nope"]) == (1, 0, 0)
    assert found["sinusoidal"] == pytest.approx(found["rope-1d"], abs=0.1)


def why(matrix: Matrix) -> dict[tuple[str, str], str]:
    return {(name, each.name): words for name, each, words in matrix.reasons}


def test_what_does_not_hold_has_its_smallest_counterexample() -> None:
    said = why(record.schemes())
    holds = "; holds for {} of 144 images, those with {}"
    odd, even = holds.format(36, "h and w odd"), holds.format(72, "h and w both odd or both even")
    line = holds.format(23, "h = 1 or w = 1")
    expected = {
        ("naive-2d", "symmetric"): "1,1x2,1: gaps (1, 1) and (2, 1)" + holds.format(12, "h = w"),
        ("videorope", "symmetric"): "1,1x2,1: gaps (1, 1, 1) and (1, 1, 0)" + odd,
        ("v2pe", "symmetric"): "1,1x1,1: gaps 1/4 and 7/4",
        ("rows", "text-is-rope-1d"): "2: start 0 puts token 1 at (0, 1)",
        ("rows", "relative"): (
            "2,1x1,1: a token more in front changes the way from token 0 to 2 from (1, 0) to (1, -1)"
        ),
        ("grid-2d", "unique"): "1x1,1x1: tokens 0 and 1 are both at (0, 0)",
        ("mrope-qwen2.5", "unique"): (
            "1,2x1x1,1 (1/4 s per frame): tokens 1 and 2 are both at (1, 1, 1); holds for every image"
        ),
        ("mrope-interleave-reset", "linear-shift"): "1,1x1,1: start 1 moves token 1 from (1, 0, 0) to (2, 0, 0)",
        ("mrope", "delta-0"): "1,2x2,1: delta -2" + line,
        ("rope-tie-v2", "integer"): "1,1x2,1: token 1 is at (3/2, 1)" + even,
        ("rope-tie(axes=3)", "prefix-stable"): "1,1x1: a frame more moves token 1 from (4, 4, 4) to (4, 6, 6)",
        ("rows", "growth"): "rows has no next position",
        ("grid-2d", "symmetric"): "grid-2d takes no text",
    }
    assert {key: said[key] for key in expected} == expected
    assert len(said) == sum(marks.count("✗") + marks.count("–") for marks in SCHEMES.split("\n"))


def test_encodings_have_counterexamples_too() -> None:
    said = why(record.encodings())
    expected = {
        ("integer", "bounded"): "512 has 512, the first 64 positions at most 63",
        ("normalised", "length-independent"): "1 has 0.06667 among 16 positions and 0.003922 among 256",
        ("integer", "relative"): "0 and 0 give 0, 1 and 1 give 48",
        ("hope", "unique"): "0, 0, 0 is as 1, 0, 0",
        ("clipped-relative", "unique"): "keys 16 and 17 before a query have the same bias",
        ("t5-buckets", "unique"): "keys 8 and 9 before a query have the same bias",
        ("t5-buckets", "deterministic"): "weights: 32×4 numbers to learn",
        ("learned-absolute", "extrapolates"): "positions[0]: got 512, want < 512",
        ("alibi", "linear-shift"): "a bias belongs to two positions: there is no vector to shift",
    }
    assert {key: said[key] for key in expected} == expected


@dataclass(frozen=True)
class Backwards(Naive2D):
    name: ClassVar[str] = "backwards"

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return Placement([cursor + runs.lengths - 1] * 2, step_col=[-1, -1])


@dataclass(frozen=True)
class Crowded(Naive2D):
    """Knows whether other grids are in the batch."""

    name: ClassVar[str] = "crowded"

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        origin = cursor + 1000 * (grids.frames.size > 1)
        return Placement([origin, origin], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class Foreseeing(Naive2D):
    """Knows whether its document has another grid."""

    name: ClassVar[str] = "foreseeing"

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        more = np.append(cursor[1:] > cursor[:-1], np.False_) * 1000
        return Placement([cursor + more, cursor + more], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class FarOff(Naive2D):
    """Right up to id 500."""

    name: ClassVar[str] = "far-off"

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        origin = cursor + (cursor > 500)
        return Placement([origin, origin], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class Floored(MRopeQwen25):
    """Only the floored times: the ends of a video are symmetric, and what is between them is not."""

    name: ClassVar[str] = "floored"
    axes = 1
    tokens_per_second: int = 1

    def advance(self, grids: Grids) -> IntArray:
        sides = np.minimum(grids.extents, [[2**31], [1], [1]])
        return super().advance(replace(grids, extents=sides, row_separator=None))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        whole = super().place(grids, cursor)
        return Placement(whole.origin[:1], None, [0], [0], pieces=whole.pieces)


def found(properties: tuple[Property, ...], named: Any, name: str) -> PropertyValue:
    """One property alone: the others take time."""
    return next(each for each in properties if each.name == name).measure(named)


@pytest.mark.parametrize(
    ("scheme", "name", "words"),
    [
        (Backwards(), "text-is-rope-1d", "2: start 0 puts token 0 at (1, 1)"),
        (Backwards(), "prefix-stable", "1,1x1,1: a token more moves token 2 from (2, 2) to (3, 3)"),
        (Crowded(), "length-independent", "1,1x1,1: others beside it move token 1 from (1, 1) to (1001, 1001)"),
        (Foreseeing(), "length-independent", "1,1x1,1: 3x2 after it moves token 1 from (1, 1) to (1001, 1001)"),
        (FarOff(), "symmetric", "1,1x1,1: gaps (2, 2) and (0, 0)"),
        (FarOff(), "unique", "1,1x1,1: tokens 1 and 2 are both at (1002, 1002); holds for 132 of 144 images"),
        (FarOff(), "linear-shift", "1,1x1,1: start 1000 moves token 1 from (1, 1) to (1002, 1002)"),
        (FarOff(), "relative", "2,1x1,1: start 1000 changes the way from token 0 to 2 from (2, 2) to (3, 3)"),
        (
            Floored(),
            "symmetric",
            "1,3x1x1,1 (3/2 s per frame): gaps 2 and 3 at patch 1; holds for every image",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_scheme_that_breaks_a_property_is_told_where(scheme: Scheme, name: str, words: str) -> None:
    assert found(SCHEME_PROPERTIES, scheme, name) == PropertyValue(False, words)


@dataclass(frozen=True)
class Fine(Naive2D):
    """naive-2d in units so fine, and different, that no 64-bit integer holds their common denominator."""

    name: ClassVar[str] = "fine"
    fractional = True

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        unit = 2**20 + 2 * grids.height + 26 * grids.width + 1
        return Placement([cursor * unit, cursor * unit], None, [unit, 0], [0, unit], unit)


def test_units_beyond_64_bits_are_exact() -> None:
    fine, naive = measure([Fine()]), measure(["naive-2d"])
    assert fine.rows["fine"] == naive.rows["naive-2d"]


def test_schemes_with_parameters_are_named_with_them() -> None:
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


@dataclass(frozen=True)
class Product(AttentionBias):
    name: ClassVar[str] = "product"
    num_heads: int = 1

    def bias(self, query_positions: npt.ArrayLike, key_positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return (np.asarray(query_positions)[:, None] * 1.0 - 2.0 * np.asarray(key_positions))[None]


@pytest.mark.parametrize(
    ("encoding", "name", "words"),
    [
        (Halved(), "unique", "0 is as 1"),
        (Product(), "relative", "0 and 0 give 0, 1 and 1 give -1"),
        (Product(), "bounded", "512 has 512, the first 64 positions at most 63"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_encoding_that_breaks_a_property_is_told_where(encoding: Encoding, name: str, words: str) -> None:
    assert found(ENCODING_PROPERTIES, encoding, name) == PropertyValue(False, words)


def test_tables_of_other_sizes_are_measured_as_far_as_they_go() -> None:
    matrix = measure_encodings([LearnedAbsolute.drawn(20, 4), LearnedAbsoluteToo.drawn(100, 64), Sinusoidal(128)])
    assert values(matrix, "separation") == {
        "learned-absolute": [1, True, True, True, False, False, False, False],
        "too": [1, True, True, True, None, False, False, False],
        "sinusoidal(dim=128)": [1, True, True, True, True, True, True, True],
    }
    assert matrix["too", "linear-shift"].why == "100 positions are too few to tell: a matrix of 64 channels fits any"


class LearnedAbsoluteToo(LearnedAbsolute):
    name = "too"


class Wordless(Encoding):
    name: ClassVar[str] = "wordless"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure("rope-tie"), "schemes: got 'rope-tie', want a list of names or Scheme objects"),
        (lambda: measure(5), "schemes: got 5, want a list of names or Scheme objects"),  # type: ignore[arg-type]
        (lambda: measure_encodings(5), "encodings: got 5, want a list of names or "),  # type: ignore[arg-type]
        (lambda: measure([]), "schemes: got none, want at least one"),
        (lambda: measure(["rows", "rows"]), "schemes: got 'rows' twice, want every name once"),
        (lambda: measure(["tie"]), "scheme: got 'tie', want a Scheme or one of "),
        (lambda: measure_encodings(["rope"]), "encoding: got 'rope', want one of 'integer', "),
        (
            lambda: measure_encodings(Halved()),  # type: ignore[arg-type]
            "encodings: got Halved(dim=1), want a list of names or Encoding objects",
        ),
        (lambda: measure_encodings([Wordless()]), "encoding: got <"),
        (lambda: record.encodings()["alibi", "symmetric"], "property: got 'symmetric', want one of 'axes', "),
        (lambda: record.schemes()["alibi", "symmetric"], "scheme: got 'alibi', want one of 'rope-tie', "),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_every_property_says_what_it_is() -> None:
    for properties in (SCHEME_PROPERTIES, ENCODING_PROPERTIES):
        assert len({each.name for each in properties}) == len({each.title for each in properties}) == len(properties)
        assert all(each.definition.endswith(".") and "\n" not in each.definition for each in properties)


@pytest.mark.parametrize("page", QUOTING, ids=lambda page: page.name)
def test_pages_tell_what_is_measured(page: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert record.filled_in(text) == text


def test_pages_quote_everything_and_nothing_else() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in QUOTING)
    assert all(f"<!-- compare: {name} -->" in pages for name in record.QUOTES)
    with pytest.raises(SystemExit, match="quote: got 'colours', want one of schemes, "):
        record.filled_in("<!-- compare: colours -->\n<!-- /compare -->")
    changed = "<!-- compare: encodings -->\n| stale |\n<!-- /compare -->"
    assert record.filled_in(changed).splitlines()[1] == (
        "| encoding | axes | unique | separation | bounded | length-independent | linear shift | relative "
        "| extrapolates | deterministic |"
    )


def run(*arguments: str) -> str:
    testing, app = pytest.importorskip("typer.testing"), pytest.importorskip("mmpos.cli").app
    result = testing.CliRunner().invoke(app, ["compare", *arguments])
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return str(result.stdout)


def test_the_command_prints_tables_that_fit_and_why() -> None:
    printed = run("rope-tie", "alibi", "--why", "--define")
    lines = printed.splitlines()
    rows = [line.split() for line in lines if line.startswith(("rope-tie ", "alibi "))]
    assert rows == [
        ["rope-tie", "2", *"✓✓✓✓✓✓✗"],
        ["rope-tie", *"✓✓", "624", "1,153", "2"],
        ["alibi", "1", "✓", "0.0039", *"✗✓–✓✓"],
        ["alibi", "✓"],
    ]
    assert "rope-tie, delta 0: 1,1x1,1: delta 2" in lines
    assert "integer: Every id is a whole number." in lines
    assert max(len(line) for line in lines if "──" in line) <= 100


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_matrix_is_printed_as_tables_that_fit(width: int) -> None:
    matrix = measure_encodings(["alibi"])
    lines = matrix.to_text(width).splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert words.count("alibi") == words.count("encoding") == {40: 4, 80: 2, 100: 2}[width]
    assert {"length-", "independent", "extrapolates", "deterministic", "0.0039"} <= set(words)


def test_print_shows_a_matrix_as_a_table_and_a_notebook_as_markdown() -> None:
    matrix = measure(["rope-tie"]).part(["rope-tie"])
    assert str(matrix).splitlines()[:4] == [
        "                  text                              length-       linear              delta",
        "scheme     axes   is RoPE-1D   symmetric   unique   independent   shift    relative   0",
        "───────────────────────────────────────────────────────────────────────────────────────────",
        "rope-tie   2      ✓            ✓           ✓        ✓             ✓        ✓          ✗",
    ]
    assert str(matrix) == matrix.to_text()
    assert repr(matrix) == "Matrix(1 scheme, 13 properties)"
    assert repr(matrix.properties[0]) == "Property(name='axes', title='axes')"
    assert matrix._repr_markdown_() == matrix.to_markdown()


def test_json_and_markdown_hold_the_same() -> None:
    found = json.loads(run("naive-2d", "nope", "--json"))
    naive, nope = measure(["naive-2d"]), measure_encodings(["nope"])
    assert found == {"schemes": naive.to_dict(), "encodings": nope.to_dict()}
    assert found["schemes"]["naive-2d"]["ids-of-a-square"] == {"value": 24, "why": ""}
    assert run("naive-2d", "nope", "--markdown") == naive.to_markdown() + "\n" + nope.to_markdown()
    assert naive.to_markdown().splitlines()[2] == (
        "| `naive-2d` | 2 | ✓ | ✗ | ✓ | ✓ | ✓ | ✓ | ✗ | ✓ | ✓ | 24 | 576 | 1 |"
    )


def test_an_unknown_name_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "alibby"]) == 2
    assert capsys.readouterr().err.startswith(
        "mmpos: error: NAME: got 'alibby' (did you mean 'alibi'?), want one of rope-tie, rope-tie-fractional"
    )


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import mmpos; "
        "print(mmpos.analysis.compare.measure(['rows'])['rows', 'symmetric'].cell, "
        "mmpos.analysis.compare.measure_encodings(['rope-nd'])['rope-nd', 'unique'].cell)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("✗ ✓\n", "")
