"""Test mmpos against the vectors, their schema and independent readers, and the runner on faulty programs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from waiting import alive, eventually

from mmpos.__main__ import main
from mmpos.analysis.conformance import Case, Outcome, Tolerances, load_cases, run
from mmpos.cli.conformance import PlacedRequest
from mmpos.errors import InvalidInputError
from mmpos.integrations.models import MODEL_TYPES
from mmpos.schemes import SCHEMES, LatentScheme

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "foreign" / "conformance"
VECTORS = ROOT / "mmpos" / "analysis" / "conformance" / "vectors"
SCHEMA = json.loads((VECTORS / "schema.json").read_bytes())
ASKED = {"prefill", "chunk", "decode", "draft", "pruned", "padded", "packed", "rotation"}

FEW = ["rope-tie-v2/[01]/*", "mrope-qwen2.5/[13]/*", "qwen3_omni_moe/1/*", "hunyuan_vl/*", "gpt_oss/*"]
"""Fractions, times, a clip, images that are counted over a batch, two rotations, YaRN."""
ALL = [pytest.param(FEW, id="few"), pytest.param([], id="all", marks=pytest.mark.slow)]


# The vectors.


@pytest.mark.parametrize("patterns", ALL)
def test_mmpos_answers_every_case_correctly(patterns: list[str]) -> None:
    tolerances = Tolerances(turned=3e-7)
    cases = load_cases(patterns)
    assert len(cases) > 50
    answers = ((case, PlacedRequest(dict(case.request)).answer()) for case in cases)
    assert [(case.name, case.difference(answer, tolerances)) for case, answer in answers] == [
        (case.name, None) for case in cases
    ]


def test_float64_angles_match_every_decimal_of_every_rotation() -> None:
    cases = load_cases(["*-rotation"])
    assert len(cases) > 150
    for case in cases:
        placed = PlacedRequest(dict(case.request))
        rotary, ids = placed.rotary, placed.positions.dense()[:, case.request["tokens"]]
        angles = rotary.pair_ids(ids.astype(np.float64)).T * rotary.inv_freq_array
        rotations = {
            name: (rotary.attention_factor * function(angles)).tolist()
            for name, function in (("cos", np.cos), ("sin", np.sin))
        }
        answer = {"pair_axis": rotary.pair_axis.tolist(), **rotations}
        assert case.difference(answer, Tolerances(turned=1e-10)) is None
        assert case.difference({**answer, "cos": (angles * 0 + 1).tolist()}, Tolerances(turned=1e-10)) is not None


def test_the_vectors_contain_ids_computed_by_hand() -> None:
    (tie,) = load_cases(["rope-tie/0/0-prefill"])
    # Text at 7, 8, 9; L = 9; rows 9 + 4i, columns 9 + 3j; text again at 9 + 4·3.
    assert tie.request["documents"][0]["segments"][:3] == [{"text": 3}, {"grid": [1, 2, 3]}, {"text": 2}]
    assert [axis[:11] for axis in tie.want["position_ids"]] == [
        [7, 8, 9, 13, 13, 13, 17, 17, 17, 21, 22],
        [7, 8, 9, 12, 15, 18, 12, 15, 18, 21, 22],
    ]
    (halves,) = load_cases(["rope-tie-v2/0/0-prefill"])
    # An image consumes six ids, so text continues at 16, and columns are centred at (9 + 16) / 2.
    assert halves.want["position_ids"][1][3:6] == ["23/2", "25/2", "27/2"]
    (frames,) = load_cases(["qwen2_vl/1/0-prefill"])
    # Two frames of 2×2 begin at 2, time advances by 1, and text follows at 4, since frames are not counted.
    assert [axis[2:11] for axis in frames.want["position_ids"]] == [
        [2, 2, 2, 2, 3, 3, 3, 3, 4],
        [2, 2, 3, 3, 2, 2, 3, 3, 4],
        [2, 3, 2, 3, 2, 3, 2, 3, 4],
    ]


def test_every_scheme_and_model_type_has_cases_of_every_kind() -> None:
    kinds: dict[str, set[str]] = {}
    for case in load_cases():
        kinds.setdefault(case.name.split("/")[0], set()).add(case.request["ask"])
    assert kinds.keys() == SCHEMES.keys() | MODEL_TYPES.keys()
    following = {"decode", "draft"}  # these schemes have no next position
    assert {name: ASKED - covered for name, covered in kinds.items() if covered != ASKED} == {
        "rows": following,
        "grid-2d": following,
        "neomme": following,
        **{name: following for name, scheme in SCHEMES.items() if issubclass(scheme, LatentScheme)},
    }


@pytest.mark.parametrize(
    "pattern", [pytest.param("schemes/v2pe", id="few"), pytest.param("*/*", id="all", marks=pytest.mark.slow)]
)
def test_lines_and_requests_conform_to_the_schema(pattern: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    line = jsonschema.Draft202012Validator(SCHEMA)
    for path in VECTORS.glob(f"{pattern}.jsonl"):
        for text in path.read_text().splitlines():
            line.validate(json.loads(text))
    request, answer = (
        jsonschema.Draft202012Validator({**SCHEMA["$defs"][name], "$defs": SCHEMA["$defs"]})
        for name in ("request", "answer")
    )
    for case in load_cases([] if pattern == "*/*" else ["v2pe/0/*"]):
        request.validate(case.request)
    for case in load_cases(["v2pe/0/*"]):  # the schema of a line contains that of an answer
        answer.validate({"case": case.name, **case.want})


@pytest.mark.parametrize(
    ("field", "value"), [("ask", "everything"), ("steps", -1), ("want", {}), ("want", {"cos": [["a"]]}), ("more", 1)]
)
def test_the_schema_refuses_an_invalid_line(field: str, value: object) -> None:
    line = json.loads((VECTORS / "schemes/flatten.jsonl").read_text().splitlines()[0])
    line["cases"][0][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line, SCHEMA)


def test_the_manifest_lists_every_file_and_the_files_are_small() -> None:
    files = {path.relative_to(VECTORS).as_posix(): path.read_bytes() for path in VECTORS.glob("*/*.jsonl")}
    manifest = json.loads((VECTORS / "manifest.json").read_bytes())
    assert manifest["files"] == {path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())}
    assert manifest["format"] == 1
    assert sum(map(len, files.values())) < 2_000_000


@pytest.mark.parametrize("page", ["README.md", "docs/conformance.md", "CHANGELOG.md"])
def test_pages_state_the_number_of_cases(page: str) -> None:
    assert f" {len(load_cases()):,} cases" in (ROOT / page).read_text()


@pytest.mark.slow
def test_the_generator_writes_these_vectors(tmp_path: Path) -> None:
    """Run the generator in another process, since models in other tests change the configs of their classes."""
    generator = ROOT / "tests" / "helpers" / "conformance_vectors.py"
    path = os.pathsep.join(str(ROOT / "tests" / room) for room in ("helpers", "oracles", "integrations"))
    subprocess.run([sys.executable, generator, tmp_path], check=True, env={**os.environ, "PYTHONPATH": path})
    written = {file.relative_to(tmp_path).as_posix(): file.read_bytes() for file in tmp_path.rglob("*.json*")}
    kept = {file.relative_to(VECTORS).as_posix(): file.read_bytes() for file in VECTORS.rglob("*.json*")}
    assert {path: data == kept.get(path) for path, data in written.items()} == dict.fromkeys(
        kept.keys() - {"schema.json"}, True
    )


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Copy the vectors and change one id."""
    copy = shutil.copytree(VECTORS, tmp_path / "vectors")
    path = copy / "schemes/mrope.jsonl"
    path.write_text(path.read_text().replace("[[7,8,9,10,", "[[7,8,9,11,", 1))
    return copy


def test_a_damaged_file_is_refused(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos.analysis.conformance.cases.VECTORS", damaged)
    with pytest.raises(InvalidInputError, match=r"schemes/mrope\.jsonl: the checksum differs from manifest\.json"):
        load_cases()


# Readers that do not use mmpos.


def program(name: str) -> str:
    """Return the path of a program installed in this environment or, failing that, on this machine."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


READERS: dict[str, Callable[[], list[str]]] = {
    "reader.py": lambda: [sys.executable, "-I"],
    "reader.js": lambda: [program("node")],
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_without_mmpos_verifies_its_own_schemes(name: str, damaged: Path) -> None:
    command = [*READERS[name](), str(FOREIGN / name)]
    done = subprocess.run([*command, str(VECTORS)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("53 the same, 0 different\n", "")
    refused = subprocess.run([*command, str(damaged)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "schemes/mrope.jsonl: the checksum differs" in refused.stderr


def test_a_cpp_program_answers_cases(tmp_path: Path) -> None:
    binary = tmp_path / "program"
    source = FOREIGN / "program.cpp"
    subprocess.run([program("g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", binary, source], check=True)
    report = run([str(binary)], load_cases(["rope-tie/0/*"]))
    declined = [name.partition("-")[2].partition("-")[2] for name in report.unsupported]
    assert (report.same, report.findings, Counter(declined)) == (9, [], {"padded": 2, "rotation": 6})
    assert set(report.unsupported.values()) == {"padding, rotations or row separators"}
    # The program supports only two axes, so it answers a case with three axes wrongly.
    (deep,) = run([str(binary)], load_cases(["rope-tie/2/0-prefill"])).findings
    assert str(deep) == "rope-tie/2/0-prefill: position_ids: got 2 values, want 3"


@pytest.mark.parametrize("name", ["reader.py", "reader.js", "program.cpp"])
def test_readers_have_fewer_than_60_lines(name: str) -> None:
    assert len((FOREIGN / name).read_text().splitlines()) < 60


# Answers.

WANT = {"position_ids": [[0, None, 2], ["1/2", 4, 5]], "next_position": 3, "cos": [[0.5403023059, 1.0]]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"position_ids": [[0, 99, 2.0], [0.5, "8/2", 5]]}, None),
        ({"position_ids": [[0, 99, 3], ["1/2", 4, 5]]}, "position_ids[0][2]: got 3, want 2"),
        ({"position_ids": [[0, 0, 2], [0.25, 4, 5]]}, "position_ids[1][0]: got 0.25, want 1/2"),
        ({"position_ids": [[0, 0, 2], ["1/0", 4, 5]]}, 'position_ids[1][0]: got "1/0", want the number 1/2'),
        ({"position_ids": [[0, 0, 2], [float("nan"), 4, 5]]}, "position_ids[1][0]: got NaN, want the number 1/2"),
        ({"position_ids": [[0, 0, 2], [1e400, 4, 5]]}, "position_ids[1][0]: got Infinity, want the number 1/2"),
        ({"position_ids": [[0, 0, 2], [0.3333, 4, 5]]}, "position_ids[1][0]: got 0.3333, want 1/2"),
        (
            {"position_ids": [[0, 0, 2], ["1e999999999", 4, 5]]},
            'position_ids[1][0]: got "1e999999999", want the number 1/2',
        ),
        ({"position_ids": [[0, 0, 2], ["١/٢", 4, 5]]}, r'position_ids[1][0]: got "\u0661/\u0662", want the number 1/2'),
        ({"position_ids": [[0, 0, "2"], ["1/2", 4, 5]]}, 'position_ids[0][2]: got "2", want the number 2'),
        ({"position_ids": {"0": [0, 0, 2]}}, 'position_ids: got {"0": [0, 0, 2]}, want 2 values in a list'),
        ({"next_position": 10**99}, f"next_position: got 1{'0' * 56}..., want 3"),
        ({"next_position": 10**400}, f"next_position: got 1{'0' * 56}..., want 3"),
        ({"cos": [[-(10**400), 1.0]]}, f"cos[0][0]: got -1{'0' * 55}..., want 0.5403023059"),
        ({"position_ids": [[0, 0, True], ["1/2", 4, 5]]}, "position_ids[0][2]: got true, want the number 2"),
        ({"position_ids": [[0, 0, 2]]}, "position_ids: got 1 value, want 2"),
        ({"position_ids": [[0, 0], [1, 4, 5]]}, "position_ids[0]: got 2 values, want 3"),
        ({"position_ids": [7, 8]}, "position_ids[0]: got 7, want 3 values in a list"),
        ({"position_ids": None}, "position_ids: got null, want 2 values in a list"),
        ({"next_position": 4}, "next_position: got 4, want 3"),
        ({"next_position": None}, "next_position: got null, want the number 3"),
        ({"cos": [[0.54031, 1.0]]}, None),
        ({"cos": [[0.54032, 1.0]]}, "cos[0][0]: got 0.54032, want 0.5403023059"),
    ],
)
def test_the_first_difference_is_reported(changed: dict[str, Any], message: str | None) -> None:
    assert Case("a", {}, WANT).difference(WANT | {"position_ids": [[0, 1, 2], ["1/2", 4, 5]]} | changed) == message


def test_lists_nested_too_deeply_to_print_are_described() -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    assert Case("a", {}, {"delta": 1}).difference({"delta": deep}) == "delta: got lists in lists, want the number 1"


def test_a_missing_field_is_reported() -> None:
    assert Case("a", {}, {"delta": -4}).difference({}) == "delta: missing, want -4"


def test_tolerances_apply_to_floats_but_not_to_integers() -> None:
    case = Case("a", {}, {"position_ids": [[3, "1/3"]]})
    assert case.difference({"position_ids": [[3.001, 0.333]]}, Tolerances(ids=0.01)) is None
    assert case.difference({"position_ids": [[4, "1/3"]]}, Tolerances(ids=2.0)) == "position_ids[0][0]: got 4, want 3"
    assert (
        case.difference({"position_ids": [[3, "1/2"]]}, Tolerances(ids=2.0)) == "position_ids[0][1]: got 1/2, want 1/3"
    )
    # Some languages write 0.0 as 0.
    assert case.difference({"position_ids": [[3, 0]]}, Tolerances(ids=0.5)) is None
    with pytest.raises(InvalidInputError, match=r"tolerance of ids: got nan, want a finite number >= 0"):
        Tolerances(ids=float("nan"))


# Programs.

CASES = [Case(f"a/0/{n}-prefill", {"case": f"a/0/{n}-prefill", "n": n}, {"delta": n}) for n in range(5)]
LOOP = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    n = request["n"]
    answer = {"case": request["case"], "delta": n}
    {body}
    print(json.dumps(answer), flush=True)
"""


def ran(body: str = "pass", cases: Sequence[Case] = CASES, time_limit: float = 60.0, end: str = "") -> Outcome:
    """Run a program that answers correctly, after inserting one statement into its loop and another at its end."""
    return run([sys.executable, "-c", LOOP.replace("{body}", body) + end], cases, time_limit=time_limit)


def test_a_program_with_correct_answers_passes() -> None:
    report = ran()
    assert (report.same, report.findings, report.unsupported, report.not_asked) == (5, [], {}, 0)
    assert report.passed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if n == 2: answer['delta'] = 7", "delta: got 7, want 2"),
        ("if n == 2: del answer['delta']", "delta: missing, want 2"),
        ("if n == 2: answer['case'] = 'b'", "got an answer with case '\"b\"', want 'a/0/2-prefill'"),
        ("if n == 2: answer = [1]", "got the line '[1]', want a JSON object; logs belong on standard error"),
        ("if n == 2: print('loading')", "got the line 'loading', want a JSON object; logs belong on standard error"),
        ("if n == 2: sys.exit(9)", "the program ended with exit code 9, want an answer"),
        ("if n == 2: os.kill(os.getpid(), 11)", "the program ended with signal 11, want an answer"),
        ("if n == 2: print('x' * 2**25)", "got more than 16777216 bytes in one answer"),
        ("if n == 2: answer['delta'] = float('nan')", "delta: got NaN, want the number 2"),
        ("if n == 2: answer['delta'] = [2]", "delta: got [2], want the number 2"),
        (
            "if n == 1: print(json.dumps(answer))",
            "got an answer with case '\"a/0/1-prefill\"', want 'a/0/2-prefill'",
        ),
        ("if n == 2: print()", "got the line '', want a JSON object; logs belong on standard error"),
        (
            r"if n == 2: os.write(1, b'\xff\x00\xed\xa0\x80\n')",
            r"got the line '\xff\x00\xed\xa0\x80', want a JSON object; logs belong on standard error",
        ),
    ],
)
def test_one_wrong_answer_counts_as_one_mismatch_and_the_other_cases_are_still_sent(body: str, message: str) -> None:
    report = ran(body)
    assert list(map(str, report.findings)) == [f"a/0/2-prefill: {message}"]
    assert (report.same, report.not_asked, report.passed) == (4, 0, False)


@pytest.mark.parametrize("depth", [500, 10**5])
def test_deeply_nested_lists_count_as_one_mismatch(depth: int) -> None:
    lists = f"'[' * {depth} + ']' * {depth}"
    body = f"""if n == 2: print('{{"case": "a/0/2-prefill", "delta": ' + {lists} + '}}', flush=True); continue"""
    report = ran(body)
    assert ([finding.case for finding in report.findings], report.same) == (["a/0/2-prefill"], 4)


def test_a_second_answer_to_the_last_case_counts_as_a_mismatch() -> None:
    report = ran("if n == 4: print(json.dumps(answer))")
    line = """'{"case": "a/0/4-prefill", "delta": 4}\\n'"""
    message = f"after the last case: got the line {line}, want one line per case"
    assert list(map(str, report.findings)) == [f"a/0/4-prefill: {message}"]


def test_a_program_that_waits_for_all_cases_times_out() -> None:
    body = "rest = [json.loads(line) for line in sys.stdin]; print(json.dumps(rest[::-1]))"
    report = ran(body, CASES[:1], time_limit=0.1)
    assert list(map(str, report.findings)) == ["a/0/0-prefill: no answer within 0.1 s"]


LONG = Case("a", {"case": "a", "more": "x" * 2**20}, {"delta": 1})
"""A request that exceeds the buffer of a pipe."""


@pytest.mark.parametrize("case", [CASES[0], LONG], ids=["short", "long"])
def test_a_program_that_never_reads_times_out(case: Case) -> None:
    report = run([sys.executable, "-c", "import time; time.sleep(600)"], [case], time_limit=0.1)
    assert list(map(str, report.findings)) == [f"{case.name}: no answer within 0.1 s"]


@pytest.mark.parametrize("case", [CASES[0], LONG], ids=["short", "long"])
@pytest.mark.parametrize("time_limit", [60.0, 1e12, float("inf")])
def test_a_program_that_exits_immediately_counts_as_a_mismatch(case: Case, time_limit: float) -> None:
    report = run([sys.executable, "-c", ""], [case], time_limit=time_limit)
    assert list(map(str, report.findings)) == [f"{case.name}: the program ended with exit code 0, want an answer"]


def test_a_program_may_write_its_answer_before_reading_the_case() -> None:
    answer = "{'case': 'a', 'delta': 1, 'more': 'x' * 2**20}"
    body = f"import json, sys; print(json.dumps({answer}), flush=True); sys.stdin.read()"
    assert run([sys.executable, "-c", body], [LONG]).passed


def test_reasons_are_printed_as_one_printable_line_each() -> None:
    report = ran(r"if n != 2: answer['unsupported'] = ['no videos', '\ud800', '', 'a\nb', ['odd']][n]")
    assert list(report.unsupported.values()) == ["no videos", r'"\ud800"', r'"a\nb"', '["odd"]']


def test_declined_cases_pass_unless_all_are_declined() -> None:
    report = ran("if n != 2: answer = {'case': request['case'], 'unsupported': 'odd'}")
    assert (report.same, report.findings, report.passed) == (1, [], True)
    assert report.unsupported == {f"a/0/{n}-prefill": "odd" for n in (0, 1, 3, 4)}
    assert not ran("answer = {'case': request['case'], 'unsupported': 'all'}").passed


def test_a_program_that_never_answers_is_abandoned() -> None:
    report = ran("sys.exit(1)")
    assert [finding.case for finding in report.findings] == [f"a/0/{n}-prefill" for n in range(3)]
    assert report.not_asked == 2


def test_nonconsecutive_failures_do_not_end_the_run() -> None:
    report = ran("if n != 2: sys.exit(1)")
    assert (report.same, len(report.findings), report.not_asked) == (1, 4, 0)


def test_a_nonzero_exit_code_counts_as_a_mismatch() -> None:
    report = ran(end="sys.exit(5)")
    assert list(map(str, report.findings)) == ["a/0/4-prefill: after the last case: exit code 5, want exit code 0"]
    assert report.same == 5


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for programs to exit."""
    wait = subprocess.Popen.wait

    def at_once(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        return wait(self, None if timeout is None else 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", at_once)


@pytest.mark.usefixtures("endless")
def test_a_program_that_does_not_exit_counts_as_a_mismatch() -> None:
    message = "after the last case, the program did not exit within 60 s of the end of its input"
    assert list(map(str, ran(end="time.sleep(600)").findings)) == [f"a/0/4-prefill: {message}"]


@pytest.mark.usefixtures("endless")
def test_a_program_that_closes_its_output_counts_as_a_mismatch() -> None:
    report = ran("if n == 2: os.close(1); time.sleep(600)")
    message = "the program closed its output, want an answer"
    assert str(report.findings[0]) == f"a/0/2-prefill: {message}"


def test_child_processes_of_a_stopped_program_are_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    child = f"import subprocess; open({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    ran(f"{child}; print('garbage')", CASES[:1])
    assert eventually(lambda: not alive(int(mark.read_text())))


def test_a_command_that_cannot_run_is_refused() -> None:
    message = "command: got '/no/such/program' (No such file or directory), want a program that runs"
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        run(["/no/such/program"], CASES)


# The command line.


def mmpos(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["conformance", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SELF = f"{shlex.quote(sys.executable)} -m mmpos conformance answer"


def test_mmpos_passes_its_own_cases(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "run", "--command", SELF, "mrope/*-[!r]*", "--require-all"
    assert mmpos(capsys, *arguments) == (0, "21 cases: 21 the same.\n", "")


def answer_chunks_only(folder: Path, ids: list[list[int | str]]) -> str:
    """Return the command line of a program that answers chunk cases with these ids and declines all others."""
    script = folder / "mine.py"
    script.write_text(
        "import json, sys\nfor line in sys.stdin:\n    request = json.loads(line)\n"
        f"    answer = {{'position_ids': {ids}}} if request['ask'] == 'chunk' else {{'unsupported': 'not yet'}}\n"
        "    print(json.dumps({'case': request['case'], **answer}), flush=True)\n"
    )
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}"


def test_differences_are_printed_and_determine_the_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = answer_chunks_only(tmp_path, [[0]])
    assert mmpos(capsys, "run", "--command", command, "v2pe/0/2-*", "v2pe/0/3-*") == (
        3,
        "v2pe/0/3-chunk: position_ids[0]: got 1 value, want 5\n"
        "unsupported: not yet\n"
        "2 cases: 0 the same, 1 different, 1 unsupported.\n",
        "",
    )
    code, out, _ = mmpos(capsys, "run", "--json", "--command", command, "v2pe/0/2-*", "v2pe/0/3-*")
    assert (code, json.loads(out)) == (
        3,
        {
            "passed": False,
            "same": 0,
            "findings": [{"case": "v2pe/0/3-chunk", "message": "position_ids[0]: got 1 value, want 5"}],
            "unsupported": {"v2pe/0/2-prefill": "not yet"},
            "not_asked": 0,
        },
    )


def test_declined_cases_are_counted_and_require_all_lists_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = answer_chunks_only(tmp_path, [[7, 8, 9, "37/4", "19/2"]])
    arguments = "run", "--command", command, "v2pe/0/2-*", "v2pe/0/3-*"
    summary = "2 cases: 1 the same, 1 unsupported.\n"
    assert mmpos(capsys, *arguments) == (0, f"unsupported: not yet\n{summary}", "")
    assert mmpos(capsys, *arguments, "--require-all") == (3, f"v2pe/0/2-prefill: unsupported: not yet\n{summary}", "")
    code, out, _ = mmpos(capsys, *arguments, "--require-all", "--json")
    assert (code, json.loads(out)["passed"]) == (3, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cases", "no-such/*"], "pattern: got 'no-such/*', which no case matches, want one such as 'rope-tie/*'"),
        (["run", "--command", "'"], '--command: got "\'" (No closing quotation), want a program and its arguments'),
        (["run", "--command", ""], "command: got an empty list, want a program and its arguments"),
        (["run", "--command", "a", "--time-limit", "0"], "time_limit: got 0.0, want seconds > 0"),
    ],
)
def test_invalid_arguments_and_differences_have_different_exit_codes(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mmpos(capsys, *words) == (2, "", f"mmpos: error: {message}\n")


@pytest.mark.parametrize("line", ["garbage", "[]", '{"case": "a", "scheme": {"name": "b"}, "documents": []}', "{}"])
def test_mmpos_refuses_to_answer_invalid_cases(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(line))
    message = f"-: got {line!r}, want a line of mmpos conformance cases"
    assert mmpos(capsys, "answer") == (2, "", f"mmpos: error: {message}\n")


def test_cases_are_printed_as_they_are_sent_to_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = mmpos(capsys, "cases", "flatten/0/5-*")
    assert json.loads(out) == {
        "case": "flatten/0/5-decode",
        "scheme": {"name": "flatten", "parameters": {}},
        "documents": [
            {"start": 7, "segments": [{"text": 3}, {"grid": [1, 2, 3]}, {"text": 2}, {"grid": [1, 4, 2]}, {"text": 1}]}
        ],
        "ask": "decode",
        "steps": 3,
    }
    _, out, _ = mmpos(capsys, "cases", "--want", "flatten/0/5-*")
    assert json.loads(out)["want"] == {"position_ids": [[27, 28, 29]]}
