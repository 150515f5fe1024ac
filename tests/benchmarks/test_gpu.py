"""`make gpu` writes results after every step, continues after failures, and writes a report."""

from __future__ import annotations

import os
import re
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


def test_the_report_contains_all_problems_and_figures(part: Callable[[int], Part], tmp_path: Path) -> None:
    (tmp_path / "tests-gpu.xml").write_text(XML)
    part_2 = part(2)
    speeds(part_2.kept, [case("n", limit("copy", int), giving("wrong", int, 1), giving("ours", int, 0))], never, True)
    kept = part_2.kept
    kept.failed["g: n, torch.compile"] = "RuntimeError: of a peer"
    kept.report.missing["Liger"] = "not installed"
    kept.write()
    gpu.write_report(tmp_path)
    assert gpu.problems_in(tmp_path) == [
        "tests.gpu.a::b: assert 1 == 2",
        "::tests.gpu.e: collection failure",
        "g: n, wrong: NotEqualError: []: got 0, want 1",
    ]
    report = (tmp_path / "report.md").read_text()
    for line in (
        "**A dry run with toy sizes in Triton's interpreter; the figures are meaningless.**",
        "- g: n, wrong: NotEqualError: []: got 0, want 1",
        "| folder | tests | failures | errors | skipped | time | worst error |",
        "| tests/gpu | 4 | 1 | 1 | 1 | 3.5 | 0.5 |",
        "|  | copy (limit) | ours (× limit) |",
        "- Liger: not installed",
    ):
        assert line in report.splitlines()
    assert "`make gpu PART=2 DRY=1`: " in report
    assert "(abc)" in report


def never() -> bool:
    return False


# Results after failures.


def test_a_process_that_exits_loses_only_its_current_work(part: Callable[[int], Part]) -> None:
    path = part(2).path
    done: list[str] = []

    def work(name: str) -> None:
        done.append(name)
        if name == "b":
            raise SystemExit  # as if the process ended

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
    speeds(kept, cases(), never, True)  # nothing is left to do
    assert done == [*"ab", *"acab", *"ac"]


def test_a_failed_comparison_is_recorded_and_later_ones_still_run(part: Callable[[int], Part]) -> None:
    kept = part(2).kept
    broken = Comparison("g", "broken", Mock(side_effect=RuntimeError("out of memory")))
    speeds(kept, [broken, case("next", limit("copy", int))], never, True)
    assert kept.failed == {"g: broken": "RuntimeError: out of memory"}
    assert [m.name for m in Kept(kept.path).report.measurements] == ["next"]


def test_a_process_whose_context_is_lost_is_replaced(
    part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = part(2).kept
    monkeypatch.setattr("mmpos_bench.gpu_launches.synchronize", Mock(side_effect=[RuntimeError("lost"), None]))
    cases = [case("n", limit("copy", int), giving("wrong", int, 1), giving("right", int, 0))]
    with pytest.raises(SystemExit, match=str(gpu.BROKEN)):
        speeds(kept, cases, never, True)
    restarted = Kept(kept.path)
    speeds(restarted, cases, never, True)
    assert list(restarted.failed) == ["g: n, wrong"]
    assert [[e.name for e in m.entries] for m in restarted.report.measurements] == [["copy", "right"]]


def test_no_comparison_begins_after_the_time_limit(part: Callable[[int], Part]) -> None:
    kept = part(2).kept
    speeds(kept, [case("n", limit("copy", int))], lambda: True, True)
    assert (Kept(kept.path).report.missing, kept.report.measurements) == ({"g: n": "out of time"}, ())


# The parts.


def test_sanitizer_findings_are_recorded(
    part: Callable[[int], Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tools" / "compute-sanitizer"
    tool.parent.mkdir()
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", "true")
    part_3 = part(3)
    for name, text in (
        ("memcheck", "========= ERROR SUMMARY: 0 errors"),
        ("racecheck", "a race between\n===== RACECHECK SUMMARY: 2 hazards displayed"),
        ("initcheck", "Device not supported"),
    ):
        tool.write_text(f'#!/bin/sh\necho "$@"\necho "{text}"\n')
        tool.chmod(0o755)
        gpu.sanitize(part_3, (name,))
    report = part_3.kept.report
    assert {m.name: m.facts for m in report.measurements} == {
        "memcheck, 8 tokens of 1": {"findings": 0},
        "racecheck, 8 tokens of 1": {"findings": 2},
    }
    command = "--tool initcheck --print-limit 5 true -m mmpos_bench.gpu_launches launch --tokens 8 --documents 1"
    assert report.missing == {"initcheck, 8 tokens of 1": f"ended with 0: {command} Device not supported"}
    assert gpu.problems_in(tmp_path) == ["racecheck, 8 tokens of 1: 2 findings"]


def test_missing_tools_are_reported(part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    part_3 = part(3)
    gpu.sanitize(part_3, ("memcheck",))
    assert part_3.kept.report.missing == {"compute-sanitizer": "the program is not installed"}


def test_a_program_and_its_children_are_killed_when_time_is_up(part: Callable[[int], Part]) -> None:
    status, output = part(1).run("sh", "-c", "echo begun; sleep 1000 & wait", seconds=1.0)
    assert (status, output) == (None, "begun\n")


def test_a_crashed_measurement_is_restarted_as_long_as_it_makes_progress(
    part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    part_2 = part(2)
    starts: list[str] = []

    def run(self: Part, *command: str, seconds: float) -> tuple[int, str]:
        starts.append(command[3])
        if len(starts) < 3:
            kept = self.kept
            kept.failed[str(len(starts))] = "an error"
            kept.write()
        return -11, "Segmentation fault"

    monkeypatch.setattr(Part, "run", run)
    part_2.measure("speed", 100.0)
    assert starts == ["speed"] * 3
    assert part_2.kept.failed == {"1": "an error", "2": "an error", "speed": "ended with -11: Segmentation fault"}


LOST = """
import sys
from types import SimpleNamespace

def lose():
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # importing torch would take seconds in every worker
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
def test_a_worker_whose_context_is_lost_is_replaced_and_no_other_test_fails(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "lost.py").write_text(LOST)
    (tmp_path / "test_some.py").write_text(BREAKS)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    folders = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--junitxml=tests-some.xml"]
    environment["PYTHONPATH"] = folders
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    ((_, counts, failures),) = gpu.read_tests(tmp_path)
    assert counts["failures"] + counts["errors"] == len(failures) <= 2  # the test and its worker
    assert all("test_some[3]" in failure for failure in failures)
    assert counts["tests"] - len(failures) == 11


# A whole dry run.

ABSENT = ("typer", "rich", "pydantic", "grpc", "tokenizers", "transformers", "PIL", "mmpos._native")


@pytest.mark.slow
def test_a_dry_run_requires_neither_an_installed_package_nor_the_extension(tmp_path: Path) -> None:
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
    cases = [case.get("name", "") for case in ElementTree.parse(out / "tests-gpu.xml").getroot().iter("testcase")]
    launches = sorted(name.partition("[")[2].partition(" tokens=")[0] for name in cases if " tokens=" in name)
    assert launches == ["backward", "cached", "dense", "rerotate", "rotate", "store"]
    assert len({name.partition("[")[0] for name in cases}) == len(cases) - len(launches) + 1
    ran = re.search(r"\n- tests/gpu: a dry run runs (\d+) of (\d+) tests, one of each kind, and none of ", done.stdout)
    assert ran is not None
    assert (int(ran[1]), int(ran[2]) > 100) == (len(cases), True)
    reports = gpu.reports_in(out)
    assert {(report.machine.commit, report.machine.native) for report in reports} == {("abc", False)}
    timed = {m.group.removesuffix(", bfloat16"): m for m in reports[1].measurements}
    ours = {name: [way.name for way in group.ways] for name, group in {**GROUPS, **GENERATION_GROUPS}.items()}
    assert {name: [e.name for e in m.entries] for name, m in timed.items()} == ours
    assert sum(path.stat().st_size for path in out.iterdir()) < 200_000
