"""`make gpu` writes results after every step, continues after failures, and writes a report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from mmpos_bench import gpu
from mmpos_bench.gpu import Part, measure
from mmpos_bench.results import SuiteReport, from_json
from mmpos_bench.rotary import ALL_GROUPS
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


def measured(part: Part, *cases: Comparison, synchronize: Callable[[], None] = lambda: None) -> SuiteReport:
    """Measure cases as part 2 does, and return its report."""
    measure(part.path, lambda options: iter(cases), synchronize)
    return from_json(part.path.read_text())


def test_the_report_contains_all_problems_and_figures(part: Callable[[int], Part], tmp_path: Path) -> None:
    (tmp_path / "tests-gpu.xml").write_text(XML)
    part_2 = part(2)
    part_2.report = measured(part_2, case("n", limit("copy", int), giving("wrong", int, 1), giving("ours", int, 0)))
    part_2.report.failed["g: n, torch.compile"] = "RuntimeError: of a peer"
    part_2.report.missing["Liger"] = "not installed"
    part_2.write()
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


def test_failures_are_recorded_and_left_out_until_the_context_is_lost(part: Callable[[int], Part]) -> None:
    broken = Comparison("g", "broken", Mock(side_effect=RuntimeError("out of memory")))
    first = case("n", limit("copy", int), giving("wrong", int, 1), giving("right", int, 0))
    report = measured(part(2), first, broken, case("next", limit("copy", int)))
    wrong = {"g: n, wrong": "NotEqualError: []: got 0, want 1"}
    assert report.failed == {**wrong, "g: broken": "RuntimeError: out of memory"}
    names = {m.name: [e.name for e in m.entries] for m in report.measurements}
    assert names == {"n": ["copy", "right"], "next": ["copy"]}
    lost, part_2 = Mock(side_effect=RuntimeError("lost")), part(2)
    with pytest.raises(RuntimeError, match="lost"):
        measured(part_2, case("m", limit("copy", int)), first, case("next", limit("copy", int)), synchronize=lost)
    report = from_json(part_2.path.read_text())
    assert [m.name for m in report.measurements] == ["m"]
    assert report.failed == {**wrong, "g: n": "RuntimeError: lost"}


def test_a_part_that_does_not_finish_is_reported(part: Callable[[int], Part], monkeypatch: pytest.MonkeyPatch) -> None:
    for status, failed, missing in (
        (0, {}, {}),
        (1, {"speed": "ended with 1: Segmentation fault"}, {}),
        (None, {}, {"speed": "out of time; the last comparisons were not measured"}),
    ):
        monkeypatch.setattr(Part, "run", lambda self, *_, status=status, **__: (status, "Segmentation fault"))
        part_2 = part(2)
        gpu.speed(part_2)
        assert (part_2.report.failed, part_2.report.missing) == (failed, missing)
        assert from_json(part_2.path.read_text()) == part_2.report


def test_findings_of_sanitizers_and_missing_ones_are_recorded(
    part: Callable[[int], Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tools" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\ncase $2 in memcheck) echo ==== ERROR SUMMARY: 0 errors;; initcheck) echo Device not supported;;\n"
        "racecheck) echo ==== RACECHECK SUMMARY: 2 hazards displayed;; *) echo $* | grep -o one-of-each;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    part_3 = part(3)
    gpu.sanitize(part_3)
    report = from_json(part_3.path.read_text())
    assert {m.name: m.facts for m in report.measurements} == {"memcheck": {"findings": 0}, "racecheck": {"findings": 2}}
    assert report.failed == {"racecheck": "2 findings"}
    missing = {"initcheck": "ended with 0: Device not supported", "synccheck": "ended with 0: one-of-each"}
    assert report.missing == missing
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    part_3 = part(3)
    gpu.sanitize(part_3)
    assert part_3.report.missing == {"compute-sanitizer": "the program is not installed"}


def test_a_program_and_its_children_are_killed_when_time_is_up(part: Callable[[int], Part]) -> None:
    for seconds in (1.0, 10.0, 100.0):  # more time each time, until the program begins before it is up
        status, output = part(1).run("sh", "-c", "echo begun; sleep 1000 & wait", seconds=seconds)
        if output:
            break
    assert (status, output) == (None, "begun\n")


BREAKS = """
import sys
from types import SimpleNamespace

import pytest

def synchronize():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.mark.parametrize("n", range(12))
def test_some(n):
    assert "torch" not in sys.modules, "the context of this worker is lost"
    if n == 3:
        cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
        sys.modules["torch"] = SimpleNamespace(cuda=cuda)  # importing torch would take seconds in every worker
        raise AssertionError
"""


@pytest.mark.slow
def test_a_worker_whose_context_is_lost_is_replaced_and_no_other_test_fails(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(BREAKS)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "--junitxml=tests-some.xml"]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    ((_, counts, failures),) = gpu.read_tests(tmp_path)
    assert counts["failures"] + counts["errors"] == len(failures) <= 2  # the test and its worker
    assert all("test_some[3]" in failure for failure in failures)
    assert counts["tests"] - len(failures) == 11


def test_stealing_from_an_ended_worker_is_no_error(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    scheduling = pytest.importorskip("xdist.scheduler").WorkStealingScheduling
    monkeypatch.setattr(scheduling, "__init__", lambda *_: None)
    monkeypatch.setattr(scheduling, "check_schedule", Mock(side_effect=OSError("closed")))
    hooks: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    hooks.pytest_xdist_make_scheduler(Mock(getoption={"dist": "worksteal"}.get), print).check_schedule()
    assert scheduling.check_schedule.called
    assert hooks.pytest_xdist_make_scheduler(Mock(getoption={"dist": "load"}.get), print) is None


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
    parts = ["part-1.json", "part-1.log", "part-2.json", "part-2.log", "part-3.json"]
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
    ours = {name: [way.name for way in group.ways] for name, group in ALL_GROUPS.items()}
    assert {name: [e.name for e in m.entries] for name, m in timed.items()} == ours
    assert sum(path.stat().st_size for path in out.iterdir()) < 200_000
