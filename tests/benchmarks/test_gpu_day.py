"""`make gpu`: what it writes as it goes, what it goes on behind, and its report; all of it once, as a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pictures import texts

from mmpos import InvalidInputError
from mmpos_bench.gpu import __main__ as day
from mmpos_bench.gpu import measure
from mmpos_bench.gpu.journal import Journal
from mmpos_bench.gpu.plot import plot_shares
from mmpos_bench.gpu.report import problems_in, read_rows, write_report
from mmpos_bench.gpu.ways import WAYS, Size, Way, Work
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.suites import Role

ROOT = Path(__file__).parents[2]

MACHINE = {
    "kind": "machine", "part": 2, "dry": False, "gpu": "H1", "driver": "580", "torch": "2.11", "cuda": "13.0",
    "packages": {"triton": "3.6"}, "commit": "abc", "python": "3.12", "cpu": "EPYC", "cores": 16,
}  # fmt: skip


def speed(way: str, role: str, tokens: int, us: float, size: int = 1000) -> dict[str, Any]:
    return {
        "kind": "speed", "name": f"7B layer, {tokens:,} tokens: {way}", "way": way, "role": role, "shape": "7B layer",
        "tokens": tokens, "documents": 1, "bytes": size, "sets": 2, "us": us, "p20": us, "p80": us,
    }  # fmt: skip


ROWS: list[dict[str, Any]] = [
    MACHINE,
    {"kind": "tests", "name": "tests/gpu", "passed": 1, "failed": 1, "skipped": 0,
     "worst_share_of_bound": 0.5, "seconds": 3.0},
    {"kind": "test", "name": "a.py::b", "outcome": "failed", "error": "assert 1 == 2"},
    {"kind": "missing", "name": "Liger", "why": "it is not here"},
    *(speed("copy", "limit", n, us) for n, us in ((16, 2.0), (8192, 20.0))),
    *(speed("in place", "ours", n, us) for n, us in ((16, 2.5), (8192, 20.5))),
    speed("store", "ours", 8192, 30.0, 1400),
    speed("torch.compile", "peer", 8192, 41.0),
    {"kind": "speed", "name": "7B layer, 8,192 tokens: Liger", "way": "Liger", "role": "peer", "left_out": True},
    {"kind": "speed", "name": "7B layer, 8,192 tokens: norm", "error": "NotEqualError: got 1, want 0"},
    {"kind": "speed", "name": "7B layer, 16 tokens: torch.compile", "error": "RuntimeError: of a peer"},
    {"kind": "host", "name": "in place", "us": 30.0, "p20": 29.0, "p80": 31.0},
    {"kind": "sanitizer", "name": "memcheck, 300 tokens of 3", "found": 0, "said": ""},
    {"kind": "sanitizer", "name": "racecheck, 300 tokens of 3", "found": 2, "said": "a race"},
    {"kind": "sanitizer", "name": "initcheck, 300 tokens of 3", "error": "RuntimeError: no device"},
    {"kind": "ncu", "name": "copy, 8,192 tokens of 1", "error": "RuntimeError: no counters"},
    {"kind": "ncu", "name": "in place, 8,192 tokens of 1", "kernels": [{"kernel": "rotary_kernel", "regs": "80 r"}]},
    {"kind": "note", "text": "out of time before 72B layer"},
]  # fmt: skip

PROBLEMS = [
    "a.py::b: assert 1 == 2",
    "speed, 7B layer, 8,192 tokens: norm: NotEqualError: got 1, want 0",
    "racecheck, 300 tokens of 3: 2 findings: a race",
]

REPORT = """\
# The kernels on H1

Part 2: commit abc, driver 580, torch 2.11, CUDA 13.0, triton 3.6, Python 3.12; EPYC, 16 cores.

## Wrong

- a.py::b: assert 1 == 2
- speed, 7B layer, 8,192 tokens: norm: NotEqualError: got 1, want 0
- racecheck, 300 tokens of 3: 2 findings: a race

## Tests

The worst error is a share of its bound, of launches against float64.

| folder | passed | failed | skipped | worst error | s of all workers |
|---|--:|--:|--:|--:|--:|
| tests/gpu | 1 | 1 | 0 | 0.5 | 3.0 |

## Bandwidth

Microseconds of a call by replays of a graph, with cold caches; and its share of the bandwidth of a copy
of q and k in one launch. The last line compares the fastest peer with ours, without and with a norm:
above 1, ours is faster.

### 7B layer

| tokens | 16 | 8,192 |
|---|--:|--:|
| copy | 2 (1.00) | 20 (1.00) |
| in place | 2.5 (0.80) | 20.5 (0.98) |
| store |  | 30 (0.93) |
| torch.compile |  | 41 (0.49) |
| fastest peer / ours |  | 2.00× |

## The host

Microseconds of the host for a call, and the 20th and 80th percentile.

| call | µs | from | to |
|---|--:|--:|--:|
| in place | 30 | 29 | 31 |

## compute-sanitizer

- memcheck, 300 tokens of 3: no findings
- racecheck, 300 tokens of 3: 2 findings
- initcheck, 300 tokens of 3: RuntimeError: no device

## Hardware counters

| launch | regs |
|---|--:|
| in place, 8,192 tokens of 1: rotary_kernel | 80 r |

## Hardware counters that were not read

- copy, 8,192 tokens of 1: RuntimeError: no counters

## Not here

- Liger: it is not here
- out of time before 72B layer
"""


def written(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "part-2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_report_says_what_was_wrong_and_all_figures(tmp_path: Path) -> None:
    write_report(written(tmp_path))
    assert (tmp_path / "report.md").read_text() == REPORT
    assert problems_in(read_rows(tmp_path)) == PROBLEMS


def test_plot_has_a_curve_for_each_of_ours_and_each_peer(tmp_path: Path) -> None:
    figure = plot_shares(read_rows(written(tmp_path)), tmp_path / "shares.svg")
    (axes,) = figure.axes
    curves = {str(line.get_label()): list(map(float, line.get_ydata())) for line in axes.lines[:-1]}  # type: ignore[arg-type]
    assert curves == {"in place": [0.8, 20 / 20.5], "store": [1.4 / 1.5], "torch.compile": [20 / 41]}
    assert {"7B layer", "H1, commit abc", "16", "8,192", "tokens"} <= set(texts(tmp_path / "shares.svg"))


def test_plot_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="rows: got none that was timed, want those of part 2"):
        plot_shares([MACHINE])


# A journal.


def test_what_a_process_ended_in_is_an_error_and_the_next_process_goes_on_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "part-2.jsonl"
    done: list[str] = []

    def work(name: str) -> dict[str, int]:
        done.append(name)
        if name == "b":
            raise SystemExit  # as a process that ends
        return {"us": 1}

    for _ in range(2):
        journal = Journal(path)
        try:
            for name in "abc":
                journal.attempt("speed", name, lambda name=name: work(name))  # type: ignore[misc]
        except SystemExit:
            pass
    assert done == ["a", "b", "c"]
    assert [row for row in Journal(path).rows if row["kind"] != "begin"] == [
        {"kind": "speed", "name": "a", "us": 1},
        {"kind": "speed", "name": "b", "error": "the process ended while this ran"},
        {"kind": "speed", "name": "c", "us": 1},
    ]


def test_contestant_that_fails_is_a_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    def wrong(work: Work, got: Any, before: Any) -> None:
        raise NotEqualError("got 1, want 0")

    def broken(work: Work) -> Any:
        raise RuntimeError("a peer of another version")

    copy = WAYS[0]
    every = [copy, Way("wrong", copy.make, prove=wrong), Way("broken", broken), Way("none", lambda work: None), WAYS[2]]
    journal = Journal(tmp_path / "part-2.jsonl")
    measure.speeds(journal, (Size("7B layer", 2),), every, lambda: False)
    rows = {row["way"] if "way" in row else row["name"].partition(": ")[2]: row for row in journal.of("speed")}
    assert list(rows) == ["copy", "wrong", "broken", "none", "in place"]
    assert rows["wrong"]["error"] == "NotEqualError: got 1, want 0"
    assert rows["broken"]["error"] == "RuntimeError: a peer of another version"
    assert rows["none"]["left_out"]
    assert {"us", "p20", "p80", "bytes", "sets"} <= set(rows["in place"])
    # A second process has nothing left to do.
    before = len(journal.rows)
    measure.speeds(Journal(journal.path), (Size("7B layer", 2),), every, lambda: False)
    assert len(Journal(journal.path).rows) == before


def test_nothing_new_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "part-2.jsonl")
    measure.speeds(journal, measure.SIZES, list(WAYS), lambda: True)
    assert journal.rows == [{"kind": "note", "text": "out of time before 7B layer, 8,192 tokens"}]


@pytest.mark.slow
def test_every_way_of_ours_is_proved_on_toys(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "part-2.jsonl")
    measure.speeds(journal, (Size("7B layer", 9),), list(WAYS), lambda: False)
    assert [row.get("error") for row in journal.of("speed")] == [None] * len(WAYS)
    assert [way.name for way in WAYS if way.role is Role.LIMIT] == ["copy"]


# The parts.


@pytest.fixture
def part(tmp_path: Path) -> Callable[[int], day.Part]:
    return lambda number: day.Part(number, day.Options(tmp_path, dry=True))


def program(folder: Path, name: str, text: str) -> None:
    """A program that prints a text, and the arguments that it was given into a file."""
    path = folder / name
    (folder / f"{name}.out").write_text(text)
    path.write_text(f'#!/bin/sh\necho "$@" >>{folder}/{name}.args\ncat {folder}/{name}.out\n')
    path.chmod(0o755)


NCU = """\
==PROF== Connected
7B layer done
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","rotary_kernel(float*, int)","gpu__time_duration.sum","us","21.5"
"0","rotary_kernel(float*, int)","launch__grid_size","","2,048"
"1","copy","launch__grid_size","","7"
"""


def test_sanitizers_and_counters_are_read(
    part: Callable[[int], day.Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    program(tools, "compute-sanitizer", "========= ERROR SUMMARY: 0 errors\n")
    program(tools, "ncu", NCU)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    made, launch = part(3), ("true",)
    day.sanitize(made, launch, ((300, 3),), ("memcheck",))
    program(tools, "compute-sanitizer", "a race between\n===== RACECHECK SUMMARY: 2 hazards displayed\n")
    day.sanitize(made, launch, ((300, 3),), ("racecheck",))
    program(tools, "compute-sanitizer", "Device not supported\n")
    day.sanitize(made, launch, ((300, 3),), ("initcheck",))
    day.count(made, launch, (("in place", 8192, 1),))
    first, second, third = Journal(made.path).of("sanitizer")
    assert first == {"kind": "sanitizer", "name": "memcheck, 300 tokens of 3", "found": 0, "said": ""}
    assert (second["found"], second["said"]) == (2, "a race between ===== RACECHECK SUMMARY: 2 hazards displayed")
    assert third["error"] == "RuntimeError: ended with 0: Device not supported"
    (counted,) = Journal(made.path).of("ncu")
    assert counted["kernels"] == [
        {"kernel": "rotary_kernel", "gpu__time_duration.sum": "21.5 us", "launch__grid_size": "2,048"},
        {"kernel": "copy", "launch__grid_size": "7"},
    ]
    asked = (tools / "compute-sanitizer.args").read_text().splitlines()
    assert asked[0] == "--tool memcheck --print-limit 5 true --tokens 300 --documents 3 --warm 0"
    assert "--clock-control none" in (tools / "ncu.args").read_text()  # the clocks of a shared card stay as they are


def test_tools_that_are_not_here_are_named_once(
    part: Callable[[int], day.Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    made = part(3)
    for _ in range(2):
        day.sanitize(made, ("true",), ((300, 3),), ("memcheck",))
    assert [row["name"] for row in Journal(made.path).of("missing")] == ["compute-sanitizer"]


def test_program_is_ended_with_its_children_when_the_time_is_over(part: Callable[[int], day.Part]) -> None:
    status, told = part(1).run("sh", "-c", "echo begun; sleep 1000 & wait", seconds=1.0)
    assert (status, told) == (None, "begun\n")


def test_measurement_that_breaks_is_started_again_and_given_up_when_nothing_comes_of_it(
    part: Callable[[int], day.Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = part(2)
    starts: list[str] = []

    def run(self: day.Part, *command: str, seconds: float, **_: str) -> tuple[int, str]:
        starts.append(command[3])
        if len(starts) < 3:
            Journal(self.path).write("begin", of="speed", name=str(len(starts)))
        return -11, "Segmentation fault"

    monkeypatch.setattr(day.Part, "run", run)
    made.measure("speed", 100.0)
    assert starts == ["speed"] * 3
    assert [
        (row["kind"], row.get("name"), row.get("error"))
        for row in Journal(made.path).rows[1:]
        if row["kind"] != "begin"
    ] == [
        ("speed", "1", "the process ended while this ran"),
        ("speed", "2", "the process ended while this ran"),
        ("note", "speed", "ended with -11: Segmentation fault"),
    ]


TESTS = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_passes(n, record_property):
    record_property("share_of_bound", n / 4)

def test_fails():
    assert {"q": 2.0} == {}

def test_skips():
    pytest.skip("no GPU")
"""


def test_recorder_keeps_what_failed_and_counts(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import a_package_that_is_not_here")
    variables = {
        "MMPOS_JOURNAL": str(tmp_path / "j.jsonl"),
        "MMPOS_SUITE": "some",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # such as of an order of its own
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mmpos_bench.gpu.recorder", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "."]
    done = subprocess.run(command, cwd=tmp_path, env=usual | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    unread, failed, skipped, counts = Journal(tmp_path / "j.jsonl").rows
    assert (unread["name"], unread["outcome"]) == ("test_other.py", "failed")
    assert (failed["name"], failed["outcome"]) == ("test_some.py::test_fails", "failed")
    assert "assert {'q': 2.0} == {}" in failed["error"]
    assert (skipped["outcome"], skipped["error"]) == ("skipped", "Skipped: no GPU")
    want = {"name": "some", "passed": 3, "failed": 2, "skipped": 1, "worst_share_of_bound": 0.5, "exitstatus": 1}
    assert {name: counts[name] for name in want} == want


LOST = """
import torch

def lose():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
"""

BREAKS = """
import pytest
from lost import lose

@pytest.mark.parametrize("n", range(12))
def test_some(n):
    if n == 3:
        lose()
        raise AssertionError
"""


@pytest.mark.slow
def test_worker_whose_context_is_lost_is_replaced_and_no_other_test_fails(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "lost.py").write_text(LOST)
    (tmp_path / "test_some.py").write_text(BREAKS)
    folders = os.pathsep.join([str(tmp_path), *sys.path])
    variables = {"MMPOS_JOURNAL": str(tmp_path / "j.jsonl"), "MMPOS_SUITE": "some", "PYTHONPATH": folders}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mmpos_bench.gpu.recorder", "-n", "2", "--dist", "worksteal"]
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    *failed, counts = Journal(tmp_path / "j.jsonl").rows
    assert {row["name"] for row in failed} == {"test_some.py::test_some[3]"}
    assert counts["passed"] == 11


# All of it.

ABSENT = ("typer", "rich", "pydantic", "grpc", "tokenizers", "transformers", "PIL", "mmpos._native")


@pytest.mark.slow
def test_dry_run_needs_neither_installation_nor_extension(tmp_path: Path) -> None:
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({ABSENT}))"]
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    environment["PYTHONPATH"] = str(tmp_path)
    out = tmp_path / "out"
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={out}", "DRY=1", "COMMIT=abc"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["report.md", *(f"part-{n}.{end}" for n in (1, 2, 3) for end in ("jsonl", "log"))]
    )
    rows = read_rows(out)
    assert [row["part"] for row in rows if row["kind"] == "end"] == [1, 2, 3]
    assert {row["commit"] for row in rows if row["kind"] == "machine"} == {"abc"}
    assert {row["extension"] for row in rows if row["kind"] == "machine"} == {False}
    assert [row["name"] for row in rows if row["kind"] == "tests" and row["passed"]] == ["tests/gpu", "tests/rotary"]
    ours = [row for row in rows if row["kind"] == "speed" and row.get("role") != "peer"]
    assert [row["way"] for row in ours] == [way.name for way in WAYS]
    assert sum(path.stat().st_size for path in out.iterdir()) < 200_000
