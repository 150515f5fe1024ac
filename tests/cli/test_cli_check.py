"""mmpos check: its output and exit code for ids in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mmpos
from mmpos.cli.options import as_config
from mmpos.errors import InvalidInputError
from mmpos.segments.kinds import Grid, Text

Fail = Callable[..., tuple[int, str]]
Run = Callable[..., tuple[int, str, str]]
Check = Callable[..., tuple[int, str]]
RIGHT = [[0, 1, 2, 6, 6, 6, 10, 10, 10, 14, 15], [0, 1, 2, 5, 8, 11, 5, 8, 11, 14, 15]]


@pytest.fixture
def check(run: Run) -> Check:
    """Return a function that runs mmpos check on ids, and returns its exit code and output."""

    def command(ids: npt.ArrayLike, *arguments: str) -> tuple[int, str]:
        np.save("ids.npy", np.asarray(ids))
        code, out, err = run("check", "ids.npy", *arguments)
        assert err == ""
        return code, out

    return command


SPOKEN = ("--spec", "1,2x1,1", "--spec", "2", "--scheme", "mrope-qwen3")
ROWS = [[0, 1, 1, 3, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 1, 3, 0, 1]]
COUNTED = [0, 1, 2, 3, 0, 1]


def test_a_text_row_before_the_axes_is_compared(check: Check) -> None:
    equal = (0, "All 6 tokens of 2 documents have the ids of mrope-qwen3.\n")
    assert check([[COUNTED], *([row] for row in ROWS)], *SPOKEN) == equal
    assert check([[row[:4], [*row[4:], 7, 7]] for row in (COUNTED, *ROWS)], *SPOKEN) == equal
    code, output = check([[[0, 1, 2, 3, 4, 5]], *([row] for row in ROWS)], *SPOKEN)
    assert (code, output.splitlines()) == (
        3,
        [
            "documents[1], token 0, is token 0 of a run of text (segment 3): "
            "got 4, want 0 in the text row of mrope-qwen3.",
            "2 of 6 tokens differ, in 1 of 2 documents.",
            "Cause: the text row is not reset at each document, so Transformers reads the pack as one document.",
            "To do: count the tokens of each document from 0, as position_ids(text_row=True) does.",
        ],
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], *ROWS], "repeats axis 0, and Transformers starts a new document"),
        ([[0, 1, 2, 3, 0, 9], *ROWS], "Cause unknown"),
        ([COUNTED, [0, 1, 1, 2, 0, 1], *ROWS[1:]], "documents[0], token 3"),
    ],
)
def test_a_difference_in_or_below_the_text_row_is_explained(check: Check, rows: Any, words: str) -> None:
    code, output = check([[row] for row in rows], *SPOKEN)
    assert (code, words in output) == (3, True)


def test_documents_are_read_from_files_and_options_with_a_scheme_and_a_start(check: Check) -> None:
    Path("batch.json").write_text(json.dumps({"documents": [[{"text": 1}, {"grid": [2, 1, 2]}], [{"text": 2}]]}))
    segments = mmpos.SegmentTable.from_documents([[Text(1), Grid(1, 2, frames=2)], [Text(2)], [Text(3)]])
    ids = mmpos.place(segments, "mrope", 7).dense()
    arguments = ("--spec", "batch.json", "--spec", "3", "--scheme", "mrope")
    sentence = "All 10 tokens of 3 documents have the ids of mrope.\n"
    assert check(ids, *arguments, "--start", "7") == (0, sentence)
    code, output = check(ids, *arguments)
    assert (code, output.splitlines()[2]) == (3, "Cause: documents start at 7, not at 0.")
    assert check(ids, *arguments, "--start", "6", "--tolerance", "1") == (0, sentence)
    video = mmpos.place(
        mmpos.SegmentTable.from_documents([[Text(1), Grid(1, 1, frames=2)]]), mmpos.schemes.RopeTie(axes=3)
    )
    assert check(video.dense(), "--spec", "1,2x1x1", "-s", "rope-tie,axes=3")[0] == 0


def test_padded_batches_are_compared(check: Check) -> None:
    ids, _ = mmpos.place(mmpos.SegmentTable.from_documents([[Text(3), Grid(2, 3)], [Text(4)]])).padded(side="left")
    specs = ("--spec", "3,2x3", "--spec", "4")
    assert check(ids, *specs, "--padding", "left")[0] == 0
    code, output = check(ids, *specs)
    assert (code, output.splitlines()[2]) == (3, "Cause: position ids and token ids are padded on opposite sides.")


def test_json_contains_every_field_and_the_sentences(check: Check) -> None:
    ids = mmpos.place(mmpos.SegmentTable.from_documents([[Text(1), Grid(1, 2)]]), "rope-tie-v2").dense()
    assert json.loads(check(np.floor(ids), "--spec", "1,1x2", "--scheme", "rope-tie-v2", "--json")[1]) == {
        "equal": False,
        "scheme": "rope-tie-v2",
        "num_tokens": 3,
        "num_documents": 1,
        "different_tokens": 2,
        "different_documents": 1,
        "document": 0,
        "token": 1,
        "what": "row 0, column 0 of a grid of width 2 (segment 1)",
        "axis": 0,
        "got": [1, 1],
        "want": ["3/2", 1],
        "cause": "fractions are truncated, as by .long() or .astype(int)",
        "remedy": "keep ids as float64, or as exact integers in the table; never call .long() on them",
        "explained": 2,
        "message": "documents[0], token 1, is row 0, column 0 of a grid of width 2 (segment 1): got (1, 1), want "
        "(3/2, 1) in rope-tie-v2. 2 of 3 tokens differ, in 1 of 1 document. Cause: fractions are truncated, as by "
        ".long() or .astype(int). To do: keep ids as float64, or as exact integers in the table; never call .long() on "
        "them.",
    }
    printed = json.loads(check([0], "--spec", "1", "--json")[1])
    assert (printed["equal"], printed["want"]) == (True, None)
    assert printed["message"] == "All 1 token of 1 document have the ids of rope-tie."


@pytest.mark.parametrize(("ids", "got"), [(np.array([0, np.inf]), ["inf"]), (np.array([0, 1.5], np.longdouble), [1.5])])
def test_infinite_and_longdouble_ids_are_valid_json(check: Check, ids: npt.ArrayLike, got: list[object]) -> None:
    assert json.loads(check(ids, "--spec", "2", "--json")[1])["got"] == got


QWEN = '{"model_type": "qwen2_5_vl"}'


def test_a_config_provides_the_scheme_and_a_file_the_frame_times_of_a_video(check: Check) -> None:
    Path("config.json").write_text(QWEN)
    clip = {"grid": [3, 1, 1], "seconds_per_frame": 0.5}
    Path("batch.json").write_text(json.dumps({"documents": [[{"text": 1}, clip, {"text": 1}]]}))
    arguments = ("--spec", "batch.json", "--config", "config.json")
    sentence = "All 5 tokens of 1 document have the ids of mrope-transformers(tokens_per_second=4).\n"
    assert check([[0, 1, 3, 5, 2], [0, 1, 1, 1, 2], [0, 1, 1, 1, 2]], *arguments) == (0, sentence)
    code, output = check([[0, 1, 5, 9, 2], [0, 1, 1, 1, 2], [0, 1, 1, 1, 2]], *arguments)
    assert code == 3
    assert output.splitlines()[2] == "Cause: seconds_per_frame is forgotten: frames are one second apart."


def test_the_start_defaults_to_the_first_id_of_the_model(check: Check) -> None:
    Path("config.json").write_text(json.dumps({"model_type": "paligemma", "text_config": {}, "vision_config": {}}))
    arguments = ("--spec", "3", "--config", "config.json")
    assert check([[1, 2, 3]], *arguments) == (0, "All 3 tokens of 1 document have the ids of flatten.\n")
    assert check([[4, 5, 6]], *arguments, "--start", "4")[0] == 0
    assert check([[0, 1, 2]], *arguments)[0] == 3


def test_a_config_is_read_from_standard_input(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(QWEN.encode())))
    assert check([[0, 1, 2]] * 3, "--spec", "3", "--config", "-") == (
        0,
        "All 3 tokens of 1 document have the ids of mrope-transformers(tokens_per_second=4).\n",
    )
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"{")))
    with pytest.raises(InvalidInputError, match=r"--config: got invalid JSON \(.*\), want the config\.json of a model"):
        as_config(Path("-"))


@pytest.mark.parametrize("content", ["{", "[" * 100_000, None, '{"model_type": "blip"}', "{}"])
def test_errors_name_an_invalid_config(fail: Fail, content: str | None) -> None:
    np.save("ids.npy", np.arange(3))
    if content is not None:
        Path("config.json").write_text(content)
    code, message = fail("check", "ids.npy", "--spec", "3", "--config", "config.json")
    assert code == 2
    assert message.startswith(("config.json:", "config.model_type: got ", "config: got 'config.json', where"))


def save_archive(path: Path) -> None:
    np.savez("ids.npz", ids=[0])
    Path("ids.npz").rename(path)


def saved_with(shape: bytes) -> Callable[[Path], object]:
    """Return a function that saves a number in a file whose header has this shape."""

    def save(path: Path) -> None:
        np.save(path, np.zeros(1))
        before, begin, end = path.read_bytes().partition(b"'shape': (1,), }")
        path.write_bytes(before + begin[:9] + shape + b", }" + end[len(shape) - 4 :])

    return save


WANT = "want an array saved with numpy.save"


@pytest.mark.parametrize(
    ("save", "line"),
    [
        (lambda path: path.write_bytes(b""), f"ids.npy: got no .npy file, {WANT}"),
        (lambda path: path.write_text("[0, 1]"), f"ids.npy: got no .npy file, {WANT}"),
        (lambda path: path.mkdir(), f"ids.npy: got Is a directory, {WANT}"),
        (lambda path: None, f"ids.npy: got No such file or directory, {WANT}"),
        (save_archive, f"ids.npy: got an archive (.npz or torch.save), {WANT}"),
        (lambda path: np.save(path, np.array([None])), "ids.npy: got "),
        (lambda path: np.save(path, np.array(["a"])), "ids: got dtype <U1, want integers or floats"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff{"), "ids.npy: got "),
        (lambda path: np.save(path, np.zeros((2, 0))), "ids: got shape (2, 0), want"),
        (saved_with(b"(True,)"), "ids.npy: got "),
        (saved_with(b"(3000000000000,)"), "ids.npy: got "),  # refused before allocation
        (saved_with(b"(99999999999999999999,)"), "ids.npy: got "),
        (saved_with(b"(3, ["), "ids.npy: got "),
    ],
)
def test_errors_name_a_file_without_ids(fail: Fail, save: Any, line: str) -> None:
    save(Path("ids.npy"))
    code, message = fail("check", "ids.npy", "--spec", "3")
    assert code == 2
    assert message.startswith(line)


def test_the_default_scheme_is_named_only_if_no_scheme_was_chosen(fail: Fail) -> None:
    np.save("ids.npy", np.zeros((3, 3)))
    default = "for scheme rope-tie, the default; choose another with --scheme"
    assert default in fail("check", "ids.npy", "--spec", "3")[1]
    assert default not in fail("check", "ids.npy", "--spec", "3", "--scheme", "rope-tie")[1]


def test_positions_writes_the_file_that_check_reads(run: Run, fail: Fail) -> None:
    assert run("positions", "3,2x3,2", "-o", "ids.npy")[1].startswith("11 tokens, scheme rope-tie")
    assert np.load("ids.npy").tolist() == RIGHT
    equal = "All 11 tokens of 1 document have the ids of rope-tie.\n"
    assert run("check", "ids.npy", "--spec", "3,2x3,2") == (0, equal, "")
    assert fail("positions", "3", "-o", "ids.txt") == (2, "--output: got 'ids.txt', want a file ending in .npy")
