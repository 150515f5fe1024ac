"""HTML for notebooks and reports: its contents, and the escaping of user text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from mmpos import Grid, SegmentTable, Text, place
from mmpos.analysis.diagnosis import diagnose
from mmpos.cli import app
from mmpos.errors import InvalidInputError
from mmpos.support.html import page, token_map

SEGMENTS = SegmentTable.from_documents([[Text(2)], [Text(3), Grid(2, 3), Text(2)]])


def test_a_table_shows_its_segments_with_their_ids() -> None:
    html = place(SEGMENTS)._repr_html_()
    cells = re.findall("<td>(.*?)</td>", html)
    assert cells[5:15] == ["2 to 4", "1", "text", "0, 0", "2, 2", "5 to 10", "1", "grid, 2×3", "6, 5", "10, 11"]


def test_a_long_table_shows_the_number_of_hidden_segments() -> None:
    many = SegmentTable.from_documents([[Text(1)]] * 23)
    assert "<p>3 more segments</p>" in place(many)._repr_html_()


def test_a_diagnosis_shows_its_sentences_and_a_map() -> None:
    ids = place(SEGMENTS).dense()
    ids[:, 6:8] += 1
    html = diagnose(ids, SEGMENTS)._repr_html_()
    assert "2 of 13 tokens differ" in html
    assert re.findall(r'font-size="11">(.*?)<', html) == ["segments", "0", "segments", "1", "2", "3"]
    assert re.findall("<title>(.*?)</title>", html) == [
        "tokens 0 to 1: right", "tokens 0 to 3: right", "tokens 4 to 5: wrong", "tokens 6 to 10: right",
    ]  # fmt: skip
    assert diagnose(place(SEGMENTS).dense(), SEGMENTS)._repr_html_() == (
        "<p>All 13 tokens of 2 documents have the ids of rope-tie.</p>\n"
    )


def test_a_map_draws_documents_with_differences_first() -> None:
    html = token_map(np.repeat([0, 1, 0], 2), [0, 2, 4, 6], [0, 2, 4], ("right", "wrong"), most=1)
    svg, more = html.split("</div>")
    (name, *_) = ElementTree.fromstring(f"{svg}</div>").iter("{http://www.w3.org/2000/svg}text")
    assert name.text == "documents[1]"
    assert more == "<p>2 more documents are not drawn.</p>"


def test_a_map_numbers_wide_segments_and_the_segment_of_the_first_difference() -> None:
    wrong = np.zeros(1000, np.int64)
    wrong[[501, 700]] = 1
    starts = [0, 400, 450, 501, 502, 503, 900]  # segments 3 and 4 are single tokens, about a pixel wide
    svg = ElementTree.fromstring(token_map(wrong, [0, 450, 1000], starts, ("right", "wrong")))
    texts = [(x.text, float(x.attrib["x"]), int(x.attrib["y"])) for x in svg.iter("{http://www.w3.org/2000/svg}text")]
    words = "documents[0] segments 0 1 documents[1] segments 2 3 5 6 right wrong"
    assert " ".join(str(text) for text, *_ in texts) == words
    assert min(np.diff([*{y: 0 for *_, y in texts}])) > 12  # lines do not overlap


def test_a_check_report_is_a_complete_page(tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, place(SegmentTable.from_documents([[Text(3), Grid(2, 3)]]), "mrope").dense())
    arguments = ["check", str(ids), "--spec", "3,2x3", "-s", "mrope", "--html"]
    app(args=[*arguments, str(tmp_path / "report.html")], prog_name="mmpos", standalone_mode=False)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "<h1>ids.npy compared with mrope</h1>" in text
    assert text.endswith("</html>\n")
    assert "<script>" not in page("<script>", "")
    with pytest.raises(InvalidInputError, match=r"--html: got '.*report.txt', want a file ending in .html"):
        app(args=[*arguments, str(tmp_path / "report.txt")], prog_name="mmpos", standalone_mode=False)
