"""Growth: ids of squares and strips as the specification has them, and the picture that groups what is alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import texts

from mmpos.analysis.plot import id_growth, plot_growth
from mmpos.analysis.plot.canvas import COLOURS, scheme_styles
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.schemes import SCHEMES, V2PE


def test_ids_of_squares_and_strips_are_those_of_the_specification() -> None:
    found = id_growth(["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope"], [24, 64, 128])
    assert found.patches.tolist() == [576, 4096, 16384]
    assert found.squares.T.tolist() == [
        [624, 576, 576, 24, 24],
        [4224, 4096, 4096, 64, 64],
        [16640, 16384, 16384, 128, 128],
    ]
    assert found.strips[:, 0].tolist() == [1153, 576, 576, 1153, 576]


def test_every_scheme_with_a_next_position_is_there() -> None:
    found = id_growth(sides=[1, 24])
    assert set(SCHEMES) - set(found.schemes) == {"rows", "grid-2d"}
    groups = [{found.schemes[i] for i in group} for group in found.alike]
    assert {"rope-tie-fractional", "rope-tie-v2", "flatten", "xd-rope"} in groups
    assert {"rope-tie"} in groups
    assert sum(map(len, groups)) == len(found.schemes)


def test_a_scheme_object_keeps_its_parameters() -> None:
    assert id_growth([V2PE(stride=128), "v2pe"], [8]).squares.tolist() == [[32], [16]]


def test_what_cannot_grow() -> None:
    with pytest.raises(UnsupportedError, match="rows"):
        id_growth(["rows"])
    with pytest.raises(InvalidInputError, match=r"sides\[1\]: got 1025, want <= 1024"):
        id_growth(["mrope"], [1, 1025])


def test_the_picture_names_every_scheme_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_growth(id_growth(sides=[1, 2, 3, 32]), tmp_path / "a.svg")
    words = texts(tmp_path / "a.svg")
    assert "rope-tie-fractional, rope-tie-v2, flatten, xd-rope" in words
    assert {"rope-tie", "rope-tie-lcm", "vrope", "videorope", "v2pe", "squares, n×n", "strips, 1×n²"} <= set(words)
    assert {"patches of the image", "ids consumed", "1,000"} <= set(words)
    plot_growth(id_growth(sides=[1, 2, 3, 32]), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("chosen", [["mrope", "rope-tie", "mine", "v2pe(stride=16)", "mrope-transformers"], [*SCHEMES]])
def test_the_order_of_curves_does_not_change_their_styles(chosen: list[str]) -> None:
    styles = scheme_styles(chosen)
    assert scheme_styles(chosen[::-1]) == styles[::-1]
    assert len({style["color"] for style in styles}) == min(len(chosen), len(COLOURS) + 1)
    assert len({(style["color"], style["linestyle"]) for style in styles}) == len(chosen)
    assert styles[chosen.index("rope-tie")] == scheme_styles(["rope-tie"])[0]
