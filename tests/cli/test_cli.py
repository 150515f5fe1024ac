"""The command line: its exact output, and one-line errors with the right exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module, resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import texts
from PIL import Image

from mmpos.analysis.plot import plot_positions
from mmpos.cli.options import read_specs, to_json
from mmpos.positions.place import place
from mmpos.schemes import SCHEMES
from mmpos.segments.kinds import Audio, Clip, Grid, Text, Thumbnail, Tile
from mmpos.segments.table import SegmentTable
from mmpos.support.extras import pip_install

Fail = Callable[..., tuple[int, str]]
Printed = Callable[..., str]
PHOTOS = Path(str(resources.files("mmpos"))) / "photos"


def test_all_ids_of_a_short_document_are_printed(printed: Printed) -> None:
    assert (
        printed("positions", "3,2x3,2")
        == """\
11 tokens, scheme rope-tie, positions (row, col)

tokens   what       first      last       steps
──────────────────────────────────────────────────────────────────
0–2      text 3     (0, 0)     (2, 2)     token +1
3–8      grid 2×3   (6, 5)     (10, 11)   row +(4, 0), col +(0, 3)
9–10     text 2     (14, 14)   (15, 15)   token +1

token  0  1  2  3  4   5   6   7   8   9  10
  row  0  1  2  6  6   6  10  10  10  14  15
  col  0  1  2  5  8  11   5   8  11  14  15

next position 16, delta 5
"""
    )


LONG, SHORT = "100,2x24x24,300 -s mrope --start 7", "1,1x2 -s v2pe"
BOTH, TWENTY, WORDY = "1 2,1x1 -s rows", ",".join(["1,1x1"] * 20), ",".join(["2,3x4"] * 50)


@pytest.mark.parametrize(
    ("arguments", "number", "line"),
    [
        (LONG, 0, "1,552 tokens, scheme mrope, positions (frame, row, col)"),
        (LONG, 3, "─" * 100),
        (LONG, 4, "0–99        text 100       (7, 7, 7)         (106, 106, 106)   token +1"),
        (LONG, 6, f"{'+(0, 0, 1)':>73}"),
        (LONG, 9, "next position 431, delta -1128"),
        (SHORT, 5, "1–2      grid 1×2   1/4     1/2    row +1/2, col +1/4"),
        (SHORT, 8, "   id  0  1/4  1/2"),
        (BOTH, 0, "document 1: 1 token, scheme rows, positions (row, col)"),
        (BOTH, 10, "no next position: in rows the end is not a single integer id"),
        (BOTH, 12, "document 2: 3 tokens, scheme rows, positions (row, col)"),
        (TWENTY, 19, "15       grid 1×1           (30, 30)   (30, 30)   row +(2, 0), col +(0, 2)"),
        (TWENTY, 20, "…        20 more segments   …          …          …"),
        (TWENTY, 21, "36       text 1             (72, 72)   (72, 72)   token +1"),
        (f"1 {TWENTY}", 32, "…        20 more segments   …          …          …"),
        (f"1 {TWENTY}", 36, "39       grid 1×1           (78, 78)   (78, 78)   row +(2, 0), col +(0, 2)"),
        (" ".join(["1"] * 11), -1, "… and 3 more documents (--json prints them all)"),
        (WORDY, 0, "700 tokens, scheme rope-tie, positions (row, col)"),  # no file name may be as long
    ],
)
def test_documents_are_printed_as_one_line_per_segment(
    arguments: str, number: int, line: str, printed: Printed
) -> None:
    assert printed("positions", *arguments.split()).splitlines()[number] == line


def test_json_contains_documents_and_positions(printed: Printed) -> None:
    assert json.loads(printed("positions", "1,2x3,1", "2", "--json", "--scheme", "rope-tie")) == {
        "scheme": "rope-tie",
        "axes": 2,
        "documents": [[{"text": 1}, {"grid": [2, 3]}, {"text": 1}], [{"text": 2}]],
        "position_ids": [[0, 4, 4, 4, 8, 8, 8, 12, 0, 1], [0, 3, 6, 9, 3, 6, 9, 12, 0, 1]],
        "next_positions": [13, 2],
        "deltas": [5, 0],
        "cu_seqlens": [0, 8, 10],
    }


def test_json_for_fractional_schemes_contains_exact_ids(printed: Printed) -> None:
    output = json.loads(printed("positions", "1,1x2,1", "--json", "--scheme", "rope-tie-v2"))
    assert output["position_ids"] == [[0.0, 1.5, 1.5, 3.0], [0.0, 1.0, 2.0, 3.0]]
    assert output["exact_position_ids"] == [["0", "3/2", "3/2", "3"], ["0", "1", "2", "3"]]
    output = json.loads(printed("positions", "2", "--json", "--scheme", "rows"))
    assert (output["next_positions"], output["deltas"]) == (None, None)


SIDE, SECONDS = st.integers(1, 4), st.none() | st.sampled_from([0.25, 0.5, 3.0])
GRIDS: dict[str, Any] = {"frames": SIDE, "row_separator": st.booleans(), "seconds_per_frame": SECONDS}
PARTS = st.one_of(
    *(st.builds(kind, SIDE) for kind in (Text, Audio)),
    *(st.builds(kind, SIDE, SIDE, tokens_after=st.integers(0, 2)) for kind in (Thumbnail, Tile)),
    st.builds(Grid, SIDE, SIDE, first_frame=st.none() | st.integers(-9, 9), **GRIDS),
    st.builds(Clip, SIDE, SIDE, frames=SIDE, audio=SIDE, seconds_per_frame=SECONDS),
)


@given(st.lists(st.lists(PARTS, min_size=1), min_size=1))
def test_documents_written_as_json_are_read_again(documents: Any) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "batch.JSON"
        path.write_text(json.dumps({"documents": to_json(documents), "other": "keys are ignored"}))
        assert read_specs([str(path)]).documents == documents


CLIP = {"clip": [2, 1, 1], "audio": 3, "seconds_per_frame": 0.5}


@pytest.mark.parametrize(
    ("scheme", "parts", "what"),
    [
        ("tmrope", [{"audio": 2}, CLIP, {"text": 1}], "clip 2×1×1 with audio 3"),
        ("mrope-canvas", [{"thumbnail": [1, 1]}, {"tile": [1, 2], "tokens_after": 1}], "tile 1×2 and 1 token after it"),
    ],
)
def test_json_files_can_contain_every_kind_of_part(
    scheme: str, parts: list[object], what: str, tmp_path: Path, printed: Printed
) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"documents": [parts]}))
    assert json.loads(printed("positions", "a.json", "--scheme", scheme, "--json"))["documents"] == [parts]
    assert what in printed("positions", "a.json", "--scheme", scheme)
    assert f" of a {what.partition(' ')[0]} of width " in printed("explain", "a.json", "4", "--scheme", scheme)


def test_explain_prints_the_same_sentence_as_the_library(printed: Printed) -> None:
    assert printed("explain", "3,2x3", "4") == (
        "token 4 (documents[0], token 4) is row 0, column 1 of a grid of width 3 (segment 1): "
        "position (6, 8) = (6, 5) + 0·(4, 0) + 1·(0, 3)\n"
    )


def test_schemes_lists_every_scheme_with_its_summary(printed: Printed) -> None:
    output = printed("schemes")
    rows = [line.split() for line in output.splitlines() if line.split()[:1] and line.split()[0] in SCHEMES]
    assert [row[0] for row in rows] == list(SCHEMES)
    assert [row[1] for row in rows] == [str(scheme().axes) for scheme in SCHEMES.values()]
    consumed = {row[0]: row[2] for row in rows}
    ids = {"rope-tie": "624", "rope-tie-v2": "576", "rope-tie-lcm": "24", "mrope": "24", "rows": "–", "v2pe": "144"}
    assert consumed.items() >= ids.items()
    words = " ".join(output.split())
    assert "centred grids with strides of one" in words
    assert max(map(len, output.splitlines())) <= 100


def test_schemes_are_written_as_json(fail: Fail, printed: Printed) -> None:
    written = json.loads(printed("schemes", "--json"))
    assert list(written) == list(SCHEMES)
    summary = "RoPE-Tie: patch (i, j) at (L + (w+1)·i, L + (h+1)·j), next text at L + (w+1)(h+1)."
    assert written["rope-tie"] == {"axes": 2, "ids_of_24x24": 624, "fractional": False, "description": summary}
    assert (written["rows"]["ids_of_24x24"], written["v2pe"]["fractional"]) == (None, True)
    assert fail("schemes", "--layer-type", "full_attention") == (2, "--layer-type requires --config")


DEMO = """\
Sequence  A photo of a coffee: [IMG] 11×9 patches [/IMG] and one of a cat: [IMG] 8×11 patches [/IMG].

Ids       232 tokens, scheme rope-tie, positions (row, col)

tokens    what                               first        last         steps
─────────────────────────────────────────────────────────────────────────────────────────────────
0–21      'A photo of a coffee: [IMG]'       (0, 0)       (21, 21)     token +1
22–120    11×9 patches                       (31, 33)     (131, 129)   row +(10, 0), col +(0, 12)
121–141   '[/IMG] and one of a cat: [IMG]'   (141, 141)   (161, 161)   token +1
142–229   8×11 patches                       (173, 170)   (257, 260)   row +(12, 0), col +(0, 9)
230–231   '[/IMG].'                          (269, 269)   (270, 270)   token +1

Next      position 271 on every axis, where the answer begins
Delta     39, which decoding adds to the index of a token
Picture   mmpos-demo.png
"""


def test_the_demo_runs_without_torch(tmp_path: Path) -> None:
    root = Path(str(resources.files("mmpos"))).parent
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['mmpos', 'demo']; "
        "import runpy; runpy.run_module('mmpos', run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONUTF8": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", DEMO)
    with Image.open(tmp_path / "mmpos-demo.png") as picture:
        assert picture.size == (1320, 1360)
        assert len(set(picture.convert("RGB").resize((400, 400)).get_flattened_data())) > 5000  # the photographs


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("ids 3,2x3,2", ["image", "next position 16"]),
        ("ids 3,2x3,2 -s mrope -s flatten", ["mrope", "flatten", "next position 8", "token"]),
        ("attention 3,2x3,2 -s rope-tie-v2 -s flatten", ["rope-tie-v2", "flatten"]),
        (
            "attention 3,2x3,2 --token 8 --allocation split --allocation axial",
            ["rope-tie, split", "rope-tie, axial", "text tokens before and after the image"],
        ),
    ],
)
def test_plot_writes_a_file_and_prints_its_name(
    tmp_path: Path, arguments: str, expected: list[str], printed: Printed
) -> None:
    assert printed("plot", *arguments.split(), "-o", "ids.svg") == "ids.svg\n"
    labels = texts(tmp_path / "ids.svg")
    assert [label for label in expected if label not in labels] == []


def test_the_demo_accepts_other_schemes(tmp_path: Path, printed: Printed) -> None:
    lines = printed("demo", "--scheme", "rope-tie-v2", "-o", "v2.svg").splitlines()
    assert lines[9].split()[:7] == ["142–229", "8×11", "patches", "(182,", "361/2)", "(189,", "381/2)"]
    assert lines[-2:] == ["Delta     0, which decoding adds to the index of a token", "Picture   v2.svg"]


def test_plots_of_several_schemes_share_a_scale_unless_each_has_its_own(tmp_path: Path, printed: Printed) -> None:
    command = ["plot", "ids", "3,2x3,2", "-s", "rope-tie", "-s", "mrope", "-o", "ids.png"]
    tables = [place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]), name) for name in command[4:7:2]]
    for same, options in ((True, []), (False, ["--own-scale"])):
        printed(*command, *options)
        plot_positions(tables, tmp_path / "want.png", same_scale=same)
        assert (tmp_path / "ids.png").read_bytes() == (tmp_path / "want.png").read_bytes()


def test_schemes_prints_the_settings_of_a_config(fail: Fail, tmp_path: Path, printed: Printed) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen2_5_vl"}')
    output = printed("schemes", "--config", str(config))
    rows = dict(line.split(maxsplit=1) for line in output.splitlines() if "─" not in line)
    assert [*rows][:4] == ["setting", "model_type", "scheme", "rotary.head_dim"]
    names = ("scheme", "rotary.mrope_section", "placeholders.video", "image_markers")
    want = ["mrope-transformers(tokens_per_second=4)", "(16, 24, 24)", "151656", "(151652, 151653)"]
    assert [rows[name] for name in names] == want
    assert "second_rotary.head_dim" not in rows
    assert printed("schemes", "--config", str(tmp_path)) == output
    written = json.loads(printed("schemes", "--config", str(config), "--json"))
    assert (written["rotary.mrope_section"], written["scheme"]) == ([16, 24, 24], want[0])
    config.write_text('{"model_type": "gemma3"}')
    message = "layer_type: got None, want one of 'full_attention', 'sliding_attention'"
    assert fail("schemes", "--config", str(config)) == (2, message)
    assert "rotary.theta" in printed("schemes", "--config", str(config), "--layer-type", "full_attention")


def test_help_lists_the_commands_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    assert printed() == printed("-h")
    monkeypatch.setattr(import_module("mmpos.cli.commands"), "entry_points", lambda group: [])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed("--help")).partition("Commands")[2].splitlines()
    commands = "demo positions check plot explain schemes info serve remote preprocess data bench"
    assert [line.split()[1] for line in lines if re.match(r"│ \w", line)] == commands.split()


def test_specs_and_image_files_become_documents() -> None:
    assert read_specs(["3,2x3,2", "4x2x3@1/24", "1, 2×3", str(PHOTOS / "chelsea.jpg")]).documents == [
        [Text(3), Grid(2, 3), Text(2)],
        [Grid(2, 3, frames=4, seconds_per_frame=1 / 24)],
        [Text(1), Grid(2, 3)],
        [Text(1), Grid(8, 11), Text(1)],
    ]


def test_the_photographs_are_small_and_have_licences() -> None:
    for name in ("coffee", "chelsea"):
        assert (PHOTOS / f"{name}.jpg").stat().st_size < 25_000
        assert f"`{name}.jpg`" in (PHOTOS / "LICENSES.md").read_text(encoding="utf-8")


WANT_PART = "want a text run such as 3, an image such as 2x3 or a video such as 4x2x3@1/24"
WANT_SUFFIX = "want a spec such as 3,2x3,2 or a file ending in .json .jpg .jpeg .png .webp .gif"

WANT_SCHEME = f"want one of {', '.join(SCHEMES)}, or your own package.module:Class"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["positions", "3,2xx3"], f"SPEC '3,2xx3', part 2: got '2xx3', {WANT_PART}"),
        (["positions", ""], f"SPEC|FILE: got '', {WANT_SUFFIX}"),
        (["positions", "1x2x3@1/0"], f"SPEC '1x2x3@1/0', part 1: got '1x2x3@1/0', {WANT_PART}"),
        (["positions", "3,0"], "SPEC '3,0', part 2: Text.length: got 0, want >= 1"),
        (["positions", "9" * 20], f"SPEC '{'9' * 20}', part 1: Text.length: got {'9' * 20}, want <= 2147483647"),
        (["positions", "ids.txt"], f"SPEC|FILE: got 'ids.txt', {WANT_SUFFIX}"),
        (["positions", "."], f"SPEC|FILE: got '.', {WANT_SUFFIX}"),
        (["positions", "none.json"], "none.json: no such file"),
        (["explain", "3", "3"], "token: got 3, want <= 2"),
        (["positions", "3", "-s", "rope_tie"], f"--scheme: got 'rope_tie' (did you mean 'rope-tie'?), {WANT_SCHEME}"),
        (["positions", "2000000000", "--json"], "--json: got 2000000000 tokens, want at most 4194304"),
        (["plot", "ids", "3", "-o", "ids.bmp"], "path: got 'ids.bmp', want a file ending in .png, .svg or .pdf"),
        (["plot", "ids", "3"], "Missing option '--output' / '-o'; see mmpos plot ids --help"),
        (["plot", "ids", "-o"], "Option '-o' requires an argument; see mmpos plot ids --help"),
        (["serve", "--check"], "Option '--check' requires an argument; see mmpos serve --help"),
        (["plot", "3"], "No such command '3'; see mmpos plot --help"),
        (["demo", "-s", "grid-2d"], "documents[0][0]: got text, want grids only in scheme 'grid-2d'"),
        (["positions"], "Missing argument 'SPEC|FILE...'; see mmpos positions --help"),
        (["check", "ids.npy"], "Missing option '--spec'; see mmpos check --help"),
        (["check", "-", "--spec", "3", "--config", "-", "-s", "mrope"], "--config cannot be combined with --scheme"),
        (["bogus"], "No such command 'bogus'; see mmpos --help"),
        (["help", "bogus"], "No such command 'bogus'; see mmpos --help"),
        (["positon"], "No such command 'positon'. Did you mean 'positions'? See mmpos --help"),
        (["positions", "3", "--jsn"], "No such option: --jsn (Possible options: --json); see mmpos positions --help"),
    ],
)
def test_errors_are_one_line(fail: Fail, arguments: list[str], line: str, tmp_path: Path) -> None:
    assert fail(*arguments) == (2, line)
    assert list(tmp_path.iterdir()) == []


def test_errors_name_a_broken_image(fail: Fail, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    code, message = fail("positions", "broken.png")
    assert (code, message.startswith("broken.png: image: ")) == (2, True)


WANT_FILE = 'want {"documents": [[{"text": 3}, {"grid": [2, 3]}]]}'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[]", f"bad.json: got a JSON list, {WANT_FILE}"),
        ("{}", f"bad.json: got no list of documents, {WANT_FILE}"),
        ("{", None),
        ("[" * 200_000, None),
        ('{"documents": [3]}', "bad.json: documents[0]: got int, want a list of parts"),
        ('{"documents": [[{"text": 0}]]}', "bad.json: documents[0][0]: Text.length: got 0, want >= 1"),
        (
            '{"documents": [[{"txt": 1}]]}',
            'bad.json: documents[0][0]: got {"txt": 1}, '
            'want {"text": n} or {"grid": [height, width] or [frames, height, width]}',
        ),
        (
            '{"documents": [[{"text": 1}, {"grid": [2]}]]}',
            "bad.json: documents[0][1].grid: got [2], want [height, width] or [frames, height, width]",
        ),
        ('{"documents": [[{"grid": [2, 1.5]}]]}', "bad.json: documents[0][0].grid[1]: got 1.5, want an integer"),
        (
            '{"documents": [[{"grid": [2, 1], "row_separator": 1}]]}',
            "bad.json: documents[0][0].row_separator: got 1, want true or false",
        ),
    ],
)
def test_errors_in_json_files_are_one_line(fail: Fail, content: str, line: str | None, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    code, message = fail("positions", "bad.json")
    assert code == 2
    assert message == line or (
        line is None and re.fullmatch(rf"bad.json: got invalid JSON \(.+\), {re.escape(WANT_FILE)}", message)
    )


@pytest.mark.parametrize("missing", ["typer", "matplotlib"])
def test_a_missing_extra_is_named_in_one_line(fail: Fail, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name.startswith((missing, "mmpos.cli", "mmpos.analysis.plot"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    code, message = fail("plot", "ids", "3", "-o", "ids.png")
    feature = {"typer": "the command line", "matplotlib": "plots"}[missing]
    assert (code, message) == (1, f"{feature}: {missing} is not installed; install it with: {pip_install('cli')}")
    if missing == "typer":
        assert fail("serve") == (1, f"{feature}: {missing} is not installed; install it with: {pip_install('server')}")
