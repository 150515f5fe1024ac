"""`make gpu`: what it writes as it goes, what it goes on behind, and its report; all of it once, as a dry run."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from mmpos_bench import gpu
from mmpos_bench.gpu import Kept, Part
from mmpos_bench.gpu_launches import speeds
from mmpos_bench.rotary import GENERATION_GROUPS, GROUPS
from mmpos_bench.suites import Comparison, Contestant, Lineup, giving, limit

ROOT = Path(__file__).parents[2]

XML = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1" time="3.5">
<testcase classname="tests.gpu.a" name="b"><failure message="assert 1 == 2">long</failure></testcase>
<testcase name="c"><properties><property name="share_of_bound" value="0.25"/></properties></testcase>
<testcase name="d"><properties><property name="share_of_bound" value="0.5"/></properties></testcase>
<testcase classname="" name="tests.gpu.e"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def part(tmp_path: Path) -> Callable[[int], Part]:
    return lambda number: Part(number, Namespace(out=tmp_path, peers=None, commit="abc", dry=True))


def case(name: str, *contestants: Contestant) -> Comparison:
    return Comparison("g", name, lambda: Lineup(contestants, {"tokens": 1}))


def test_report_says_what_was_wrong_and_all_figures(part: Callable[[int], Part], tmp_path: Path) -> None:
    (tmp_path / "tests-gpu.xml").write_text(XML)
    made = part(2)
    speeds(made.kept, [case("n", limit("copy", int), giving("wrong", int, 1), giving("ours", int, 0))], never, True)
    kept = made.kept
    kept.failed["g: n, torch.compile"] = "RuntimeError: of a peer"
    kept.report.missing["Liger"] = "it is not here"
    kept.write()
    gpu.write_report(tmp_path)
    assert gpu.problems_in(tmp_path) == [
        "tests.gpu.a::b: assert 1 == 2",
        "::tests.gpu.e: collection failure",
        "g: n, wrong: NotEqualError: []: got 0, want 1",
    ]
    report = (tmp_path / "report.md").read_text()
    for line in (
        "**A dry run: toys in Triton's interpreter, whose figures mean nothing.**",
        "- g: n, wrong: NotEqualError: []: got 0, want 1",
        "| folder | tests | failures | errors | skipped | time | worst error |",
        "| tests/gpu | 4 | 1 | 1 | 1 | 3.5 | 0.5 |",
        "|  | copy, the limit | ours (× limit) |",
        "- Liger: it is not here",
    ):
        assert line in report.splitlines()
    assert "`make gpu PART=2 DRY=1`: " in report
    assert "(abc)" in report


def never() -> bool:
    return False


# What is kept.


def test_a_process_that_ends_loses_no_more_than_it_was_doing(part: Callable[[int], Part]) -> None:
    path = part(2).path
    done: list[str] = []

    def work(name: str) -> None:
        done.append(name)
        if name == "b":
            raise SystemExit  # as a process that ends

    def cases() -> Iterator[Comparison]:
        for title in ("first", "second"):
            ways = [Contestant(name, int, lambda name=name: work(name)) for name in "abc"]  # type: ignore[misc]
            yield case(title, limit("copy", int), *ways)

    for _ in range(3):
        with suppress(SystemExit):
            speeds(Kept(path), cases(), never, True)
    assert done == [*"ab", *"acab", *"ac"]
    kept = Kept(path)
    assert [[e.name for e in m.entries] for m in kept.report.measurements] == [["copy", "a", "c"]] * 2
    ended = "the process ended while this ran"
    assert kept.failed == {f"g: {title}, b": ended for title in ("first", "second")}
    speeds(kept, cases(), never, True)  # has nothing left to do
    assert done == [*"ab", *"acab", *"ac"]


def test_a_comparison_that_fails_is_a_line_and_the_rest_goes_on(part: Callable[[int], Part]) -> None:
    kept = part(2).kept
    broken = Comparison("g", "broken", Mock(side_effect=RuntimeError("out of memory")))
    speeds(kept, [broken, case("next", limit("copy", int))], never, True)
    assert kept.failed == {"g: broken": "RuntimeError: out of memory"}
    assert [m.name for m in Kept(kept.path).report.measurements] == ["next"]


def test_a_process_whose_context_is_lost_ends(part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = part(2).kept
    monkeypatch.setattr("mmpos_bench.gpu_launches.synchronize", Mock(side_effect=[RuntimeError("lost"), None]))
    cases = [case("n", limit("copy", int), giving("wrong", int, 1), giving("right", int, 0))]
    with pytest.raises(SystemExit, match=str(gpu.BROKEN)):
        speeds(kept, cases, never, True)
    again = Kept(kept.path)
    speeds(again, cases, never, True)
    assert list(again.failed) == ["g: n, wrong"]
    assert [[e.name for e in m.entries] for m in again.report.measurements] == [["copy", "right"]]


def test_nothing_new_is_begun_when_the_time_is_over(part: Callable[[int], Part]) -> None:
    kept = part(2).kept
    speeds(kept, [case("n", limit("copy", int))], lambda: True, True)
    assert (Kept(kept.path).report.missing, kept.report.measurements) == ({"g: n": "out of time"}, ())


# The parts.


def test_sanitizers_are_read(part: Callable[[int], Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tools" / "compute-sanitizer"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", "true")
    made = part(3)
    for name, text in (
        ("memcheck", "========= ERROR SUMMARY: 0 errors"),
        ("racecheck", "a race between\n===== RACECHECK SUMMARY: 2 hazards displayed"),
        ("initcheck", "Device not supported"),
    ):
        tool.write_text(f'#!/bin/sh\necho "$@"\necho "{text}"\n')
        tool.chmod(0o755)
        gpu.sanitize(made, (name,))
    report = made.kept.report
    assert {m.name: m.facts for m in report.measurements} == {
        "memcheck, 8 tokens of 1": {"findings": 0},
        "racecheck, 8 tokens of 1": {"findings": 2},
    }
    asked = "--tool initcheck --print-limit 5 true -m mmpos_bench.gpu_launches launch --tokens 8 --documents 1"
    assert report.missing == {"initcheck, 8 tokens of 1": f"ended with 0: {asked} Device not supported"}
    assert gpu.problems_in(tmp_path) == ["racecheck, 8 tokens of 1: 2 findings"]


def test_tools_that_are_not_here_are_named(part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    made = part(3)
    gpu.sanitize(made, ("memcheck",))
    assert made.kept.report.missing == {"compute-sanitizer": "there is no such program here"}


def test_program_is_ended_with_its_children_when_the_time_is_over(part: Callable[[int], Part]) -> None:
    status, told = part(1).run("sh", "-c", "echo begun; sleep 1000 & wait", seconds=1.0)
    assert (status, told) == (None, "begun\n")


def test_measurement_that_breaks_is_started_again_and_given_up_when_nothing_comes_of_it(
    part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = part(2)
    starts: list[str] = []

    def run(self: Part, *command: str, seconds: float) -> tuple[int, str]:
        starts.append(command[3])
        if len(starts) < 3:
            kept = self.kept
            kept.failed[str(len(starts))] = "an error"
            kept.write()
        return -11, "Segmentation fault"

    monkeypatch.setattr(Part, "run", run)
    made.measure("speed", 100.0)
    assert starts == ["speed"] * 3
    assert made.kept.failed == {"1": "an error", "2": "an error", "speed": "ended with -11: Segmentation fault"}


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
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    folders = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--junitxml=tests-some.xml"]
    environment["PYTHONPATH"] = folders
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    ((_, counts, wrong),) = gpu.read_tests(tmp_path)
    assert counts["failures"] + counts["errors"] == len(wrong) <= 2  # the test, and its worker
    assert all("test_some[3]" in each for each in wrong)
    assert counts["tests"] - len(wrong) == 11


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
    parts = [f"part-{n}.{end}" for n in (1, 2, 3) for end in ("json", "log")]
    assert sorted(path.name for path in out.iterdir()) == sorted(["report.md", "tests-gpu.xml", *parts])
    assert "PASSED" in (out / "part-1.log").read_text()
    assert ElementTree.parse(out / "tests-gpu.xml").getroot().tag == "testsuites"
    reports = gpu.reports_in(out)
    assert {(report.machine.commit, report.machine.native) for report in reports} == {("abc", False)}
    timed = {m.group.removesuffix(", bfloat16"): m for m in reports[1].measurements}
    ours = {name: [way.name for way in known.ways] for name, known in {**GROUPS, **GENERATION_GROUPS}.items()}
    assert {name: [e.name for e in m.entries] for name, m in timed.items()} == ours
    assert [m.name for m in reports[2].group("the host")][:1] == ["in place: mmpos, table"]
    assert sum(path.stat().st_size for path in out.iterdir()) < 200_000
