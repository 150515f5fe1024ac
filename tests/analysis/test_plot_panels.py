"""Several tables in one picture: every document under every scheme, on one scale or each on its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import table, texts
from tolerance import printed

from mmpos.analysis.plot import plot_positions
from mmpos.errors import InvalidInputError, LimitExceededError

pytest.importorskip("matplotlib")


def test_every_scheme_has_its_name_gaps_and_next_position(tmp_path: Path) -> None:
    schemes = ("rope-tie", "naive-2d", "flatten", "rows", "mrope")
    plot_positions([table("4,4x6,4", scheme=scheme) for scheme in schemes], tmp_path / "ids.svg", "Five")
    words = texts(tmp_path / "ids.svg")
    notes = {
        "rope-tie": ["gap (7, 5) on both sides", "next position 42"],
        "naive-2d": ["gaps (1, 1) and (3, 1)", "next position 14"],
        "flatten": ["next position 32"],
        "rows": ["no next position"],
        "mrope": ["gaps (1, 1) and (3, 1)", "next position 14"],
    }
    for scheme, lines in notes.items():
        assert words[words.index(scheme) + 1 :][: len(lines)] == lines
    legend = ["text", "image", "from the text before to the text after", "next position", "(frame ids are not drawn)"]
    assert words[-5:] == legend
    assert words.count("Five") == 1


def test_panels_of_one_kind_share_their_scale_unless_told(tmp_path: Path) -> None:
    tables = [table("4,4x6,4", scheme=scheme) for scheme in ("rope-tie", "mrope", "flatten")]
    plot_positions(tables, tmp_path / "same.svg")
    plot_positions(tables, tmp_path / "own.svg", same_scale=False)
    # 40 is a tick of both axes of rope-tie, which ends at 42; mrope ends at 14, and flatten is of another kind.
    assert texts(tmp_path / "same.svg").count("40") == 4
    assert texts(tmp_path / "own.svg").count("40") == 2


def test_documents_stand_together_under_all_schemes(tmp_path: Path) -> None:
    tables = [table("3", "1,2x2,1,2x2,1", scheme=scheme) for scheme in ("rope-tie", "mrope")]
    plot_positions(tables, tmp_path / "ids.svg")
    words = texts(tmp_path / "ids.svg")
    heads = [word for word in words if word.startswith("document")]
    assert heads == ["document 1, rope-tie", "document 1, mrope", "document 2, rope-tie", "document 2, mrope"]
    assert words.count("gaps equal on both sides") == 2  # squares are symmetric under mrope, too
    assert words[words.index("text") + 1 :][:2] == ["image 1", "image 2"]


def test_gaps_of_several_images_that_differ_are_said_to(tmp_path: Path) -> None:
    plot_positions([table("1,2x3,1,2x2,1", scheme="naive-2d")], tmp_path / "ids.svg")
    assert "gaps not equal on both sides" in texts(tmp_path / "ids.svg")


@pytest.mark.parametrize(("count", "height"), [(1, "4.76"), (2, "4.76"), (3, "3.427"), (4, "9.14"), (7, "9.52")])
def test_panels_fill_the_width_of_a_page(tmp_path: Path, count: int, height: str) -> None:
    plot_positions([table("1,2x2,1")] * count, tmp_path / "ids.svg")
    found = re.search(r'width="([0-9.]+)pt" height="([0-9.]+)pt"', (tmp_path / "ids.svg").read_text())
    assert found is not None
    assert [float(side) / 72 for side in found.groups()] == [printed("8.00"), printed(height)]


@pytest.mark.parametrize(
    ("count", "options", "error", "message"),
    [
        (0, {}, InvalidInputError, "positions: got no table, want at least one to draw"),
        (10, {}, LimitExceededError, "positions: got 10 documents in all, want at most 9"),
        (2, {"pictures": [np.zeros((2, 2, 3), np.uint8)]}, InvalidInputError, "pictures: got 1 beside several tables"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path, count: int, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plot_positions([table("1")] * count, tmp_path / "ids.svg", **options)
    assert list(tmp_path.iterdir()) == []


def test_the_table_that_is_too_large_is_named(tmp_path: Path) -> None:
    with pytest.raises(LimitExceededError, match=r"positions\[1\]: got 1048577 tokens, want at most 1048576"):
        plot_positions([table("1"), table("1048577")], tmp_path / "ids.svg")
