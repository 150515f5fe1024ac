"""The benchmark framework: proofs before timing, ratios, the machine's description, JSON and tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fill_tables
import numpy as np
import pytest
from fill_tables import PAGES, filled_in
from rich.console import Console

from mmpos.__main__ import main
from mmpos.support.checks import IntArray
from mmpos_bench.command import print_report
from mmpos_bench.machine import Machine, stamp
from mmpos_bench.measured import MEASURED, ROOT, code_of
from mmpos_bench.proofs import NotEqualError, equal
from mmpos_bench.results import Measurement, SuiteReport, Timed, from_json, to_json, to_markdown
from mmpos_bench.suites import SUITES, Comparison, Lineup, SuiteOptions, giving, limit, run
from mmpos_bench.timing import Budget, Timing, compare

MACHINE = Machine(
    "AMD EPYC", 2, None, "Linux x86_64", "3.11.7", "0.1.0", "abc", True, "tuned", {}, 0.5, {"numpy": "2.4"}
)


def entry(name: str, role: str, median: float) -> Timed:
    return Timed(name, role, Timing(median, median * 0.5, median * 2, 21))


MEASUREMENT = Measurement(
    "ids",
    "a: one",
    (
        entry("fill", "limit", 2e-6),
        entry("mmpos", "ours", 3e-6),
        entry("place", "part", 1e-6),
        entry("loop", "peer", 6e-5),
    ),
    {"tokens": 1000, "bytes": 8000},
    "tokens",
)
OTHER = replace(MEASUREMENT, group="others", facts={"share": 0.996})
REPORT = SuiteReport(
    "positions", "mmpos bench positions", False, MACHINE, (MEASUREMENT, OTHER), {"vLLM": "ImportError: vllm"}
)


@dataclass(frozen=True)
class Inner:
    count: int


@dataclass(frozen=True)
class Outer:
    input_ids: IntArray
    name: str
    inner: Inner


def test_a_wrong_result_ends_the_run_before_anything_is_timed() -> None:
    calls = [Mock(return_value=[1]) for _ in range(3)]
    fill, right, wrong = limit("fill", calls[0]), giving("right", calls[1], [1]), giving("wrong", calls[2], [2])
    timer = Mock()
    case = Comparison("ids", "a", lambda: Lineup((fill, right, wrong), {"tokens": 4}), timer=timer)
    with pytest.raises(NotEqualError, match=re.escape("ids: a, wrong: [0]: got 1, want 2")):
        case.measure(Budget(0.0, 2))
    assert [call.call_count for call in calls] == [0, 1, 1]  # called by the proofs
    assert not timer.called


def test_a_contestant_whose_attempt_fails_is_omitted() -> None:
    names: list[str] = []

    def attempt(name: str, work: Any) -> bool:
        names.append(name)
        return "wrong" not in name

    lineup = Lineup((limit("fill", int), giving("wrong", int, 1), giving("right", int, 0)), {"tokens": 4})
    measured = Comparison("g", "n", lambda: lineup).measure(Budget(0.0, 2), attempt)
    assert [e.name for e in measured.entries] == ["fill", "right"]
    assert names == ["g: n, fill", "g: n, wrong", "g: n, right"]


OUTER = Outer(np.array([1, 2]), "a", Inner(1))


@pytest.mark.parametrize(
    ("got", "want", "at_most", "message"),
    [
        ([1, 2], [[1, 2]], 0, "got shape (2,), want (1, 2)"),
        ([np.nan], [np.nan], 0, "[0]: got nan, want nan"),
        ([np.uint8(1)], [np.uint8(3)], 1, "[0]: got 1, want 3 within 1"),
        ([np.arange(2)], ([0, 1], [3]), 0, "got 1 results, want 2"),
        ((np.arange(2), [3]), ([0, 2], [3]), 0, "[1]: got 1, want 2"),
        (replace(OUTER, input_ids=np.array([1, 3])), OUTER, 0, "input_ids: [1]: got 3, want 2"),
        (replace(OUTER, input_ids=np.array([1, 2], np.int32)), OUTER, 0, "input_ids: got int32, want int64"),
        ([replace(OUTER, input_ids=None)], (OUTER,), 0, "input_ids: got NoneType, want int64"),  # type: ignore[arg-type]
        (replace(OUTER, inner=Inner(2)), OUTER, 0, "inner: count: got 2, want 1"),
        (replace(OUTER, inner=1), OUTER, 0, "inner: got a int, want a Inner"),  # type: ignore[arg-type]
        (replace(OUTER, name="b"), OUTER, 0, "name: got 'b', want 'a'"),
    ],
)
def test_proofs_compare_values_shapes_dtypes_and_types(got: object, want: object, at_most: float, message: str) -> None:
    equal([np.arange(2), [3], replace(OUTER)], ([0, 1], np.array([3.0]), OUTER))
    equal([np.uint8(1)], [np.uint8(2)], 1)
    with pytest.raises(NotEqualError) as caught:
        equal(got, want, at_most)
    assert str(caught.value) == message


def test_contestants_alternate_and_slow_ones_take_at_least_three_turns() -> None:
    turns: list[str] = []
    now = [0.0]

    def call(name: str, seconds: float) -> None:
        now[0] += seconds
        if not turns or turns[-1] != name:
            turns.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmpos_bench.timing.time.perf_counter", lambda: now[0])
        calls = {"fast": lambda: call("fast", 2**-10), "slow": lambda: call("slow", 2.0)}
        times = compare(calls, Budget(1.0, 5))
    assert {name: (t.median, t.turns) for name, t in times.items()} == {"fast": (2**-10, 5), "slow": (2.0, 3)}
    assert turns[2:] == ["fast", "slow"] * 3


def test_our_contestants_are_compared_with_the_limit_and_peers_but_parts_only_with_the_limit() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    ours, part, peer = (MEASUREMENT[name] for name in ("mmpos", "place", "loop"))
    assert [MEASUREMENT.of_limit(e) for e in (ours, part, peer)] == pytest.approx([1.5, 0.5, 30])
    assert MEASUREMENT.over_peers(ours) == {"loop": pytest.approx(20)}
    assert MEASUREMENT.over_peers(part) == MEASUREMENT.over_peers(peer) == {}
    assert MEASUREMENT.per_unit(ours) == pytest.approx(3e-9)
    assert replace(MEASUREMENT, work={"tokens": 0}).per_unit(ours) is None


def test_reports_round_trip_through_json() -> None:
    broken = replace(REPORT, suite="images", measurements=(), missing={}, interrupted=True, failed={"a": "b"})
    assert [from_json(to_json(report)) for report in (REPORT, broken)] == [REPORT, broken]
    precise = replace(MEASUREMENT, entries=(Timed("x", "ours", Timing(1.23456e-6, 1.0, 2.0, 3)),))
    report = from_json(to_json(replace(REPORT, measurements=(precise,))))
    assert report.measurements[0]["x"].timing.median == 1.235e-6


def test_the_machine_description_contains_versions_memory_settings_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H1, 580.65'\necho 'NVIDIA H1, 580.65'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    monkeypatch.setattr("mmpos.support.native.core", None)
    machine = stamp("default")
    assert (machine.gpu, machine.packages["GPU driver"]) == ("2 × NVIDIA H1", "580.65")
    assert (machine.malloc, machine.native, machine.packages["numpy"]) == ("default", False, np.__version__)
    assert "without the C extension, malloc default, GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1" in str(machine)
    words = "AMD EPYC, 2 cores, Python 3.11.7, mmpos 0.1.0 (abc), with the C extension, malloc tuned"
    loads = {0.5: ", load 0.5 on 2 cores", 18.84: ", load 18.8 on 2 cores: do not quote", None: ""}
    for load, said in loads.items():
        assert str(replace(MACHINE, load=load)) == words + said


def test_missing_peers_are_reported_unless_peers_are_disabled() -> None:
    options, disabled = SuiteOptions(peers=True), SuiteOptions()
    assert (options.peer("a peer", lambda: 7), disabled.peer("a peer", lambda: 7)) == (7, None)
    assert options.peer("Nonsense", lambda: import_module("no.such.project")) is None
    assert options.missing == {"Nonsense": "ModuleNotFoundError: No module named 'no'"}
    assert disabled.missing == {}


ONE = "from lists, over tokens: 1 token"


def test_a_suite_runs_only_the_selected_cases_and_names_them() -> None:
    titles, before = list[str](), date.today()
    report = run("positions", quick=True, only=ONE, watch=titles.append)
    assert titles == [ONE]
    (measured,) = report.measurements
    assert (f"{measured.group}: {measured.name}", measured.work["bytes"]) == (ONE, 3 * 4)
    timed = [(e.name, e.role, e.timing.turns) for e in measured.entries]
    assert timed == [("fill", "limit", 2), *((f"mmpos, from {source}", "ours", 2) for source in ("lists", "spans"))]
    assert (report.suite, report.quick, report.missing) == ("positions", True, {})
    assert before <= date.fromisoformat(report.date) <= date.today()
    assert report.code == code_of("positions")
    assert report.command == f"mmpos bench positions --quick --malloc default --only '{ONE}'"


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["bench", "positions", "--quick", "--only", ONE]
    assert main([*arguments, "--json", str(figures)]) == 0
    assert [m.name for m in from_json(figures.read_text()).measurements] == ["1 token"]
    lines = capsys.readouterr().out.splitlines()
    assert "quick: every path ran once; the figures are meaningless" in lines
    at = lines.index("from lists, over tokens")
    assert [line.split("  ")[0].strip() for line in lines[at + 1 :]] == [
        "1 token", "", "fill", "mmpos, from lists", "mmpos, from spans", "limit: fill",
    ]  # fmt: skip
    assert lines[at + 2].split() == ["median", "p20–p80", "per", "token", "of", "limit"]
    assert re.search(r"\d+–\d.*\d×$", lines[at + 4].rstrip())
    assert main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["suite"] == "positions"


def test_pages_select_cases_that_exist() -> None:
    pages = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
    selected = re.findall(r"mmpos bench (\w+)(?: --peers)* --only (?:'([^']+)'|\"([^\"]+)\"|(\w+))", pages)
    assert len(selected) == pages.count(" --only ") >= 5
    for suite, *words in selected:
        titles = [case.title for case in import_module(f"mmpos_bench.{suite}").cases(SuiteOptions(quick=True))]
        assert any("".join(words) in title for title in titles), (suite, words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "suite: got 'nonsense', want one of 'positions', "),
        (["positions", "--only", "nosuch"], "--only: got 'nosuch', want part of a case's name"),
        (["positions", "--json", "/no/such/x.json"], "--json: got '/no/such/x.json', want a file in an existing fold"),
    ],
)
def test_invalid_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "measure", lambda *_: pytest.fail("measured"))
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"mmpos: error: {message}")


def test_an_interrupted_command_writes_the_completed_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases(options: SuiteOptions) -> Iterator[Comparison]:
        for name, call in (("first", int), ("second", Mock(side_effect=KeyboardInterrupt)), ("third", int)):
            yield Comparison("group", name, partial(Lineup, [limit("call", call)], {"tokens": 1}))

    monkeypatch.setattr("mmpos_bench.positions.cases", cases)
    arguments, figures = ["bench", "positions", "--quick", "--json"], tmp_path / "figures.json"
    assert main([*arguments, str(figures)]) == 130
    report = from_json(figures.read_text())
    assert ([m.name for m in report.measurements], report.interrupted) == (["first"], True)
    printed = capsys.readouterr()
    assert "interrupted: only completed cases are shown" in printed.out.splitlines()
    assert printed.err == "group: first\ngroup: second\n"
    assert main([*arguments, str(tmp_path / "none.json"), "--only", "second"]) == 130
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "none.json").exists()


def test_multiples_below_the_limit_are_explained() -> None:
    slower = replace(MEASUREMENT, entries=MEASUREMENT.entries[:2])
    below = ", a single call over the same number of bytes; below 1×: faster than that call"
    for measurement, words in ((MEASUREMENT, below), (slower, "")):
        out = StringIO()
        print_report(Console(file=out, width=100), replace(REPORT, measurements=(measurement,)))
        assert f"limit: fill{words}\n" in out.getvalue()
        assert "\nmissing: vLLM (ImportError: vllm)\n" in out.getvalue()


def test_a_table_shows_multiples_of_the_limit_and_of_our_first_contestant() -> None:
    text = replace(MEASUREMENT, name="d", entries=MEASUREMENT.entries[:2])
    assert to_markdown((MEASUREMENT, text)) == (
        "|  | fill (limit) | mmpos (× limit) | place (× limit) | loop (× mmpos) |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| a: one | 2.00 µs | 3.00 µs (1.50×) | 1.00 µs (0.50×) | 60.0 µs (20.0×) |\n"
        "| d | 2.00 µs | 3.00 µs (1.50×) | – | – |\n"
    )
    full = replace(MEASUREMENT, entries=MEASUREMENT.entries[:1], facts={"fill": 0.99634, "tokens per second": 122975.4})
    assert to_markdown((full, replace(full, name="d", facts={"packs": 3}))) == (
        "|  | fill (limit) | fill | tokens per second | packs |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| a: one | 2.00 µs | 0.9963 | 122,975 | – |\n"
        "| d | 2.00 µs | – | – | 3 |\n"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_on_pages_match_the_recorded_figures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled_in(text) == text


def test_a_table_without_figures_is_refused() -> None:
    with pytest.raises(SystemExit, match="abacus; ids: found no such figures"):
        filled_in("<!-- bench: abacus; ids -->\n<!-- /bench -->")
    assert PAGES[1].read_text(encoding="utf-8").count("<!-- bench: ") >= 5


def test_every_measured_name_exists_and_every_suite_has_a_hash() -> None:
    assert {*MEASURED} == {*SUITES}
    assert [name for names in MEASURED.values() for name in names if not [*ROOT.glob(name)]] == []
    assert len({code_of(suite) for suite in SUITES}) == len(SUITES)


def test_the_hash_of_a_suite_changes_with_the_code_but_not_with_names_and_white_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmpos_bench.measured.ROOT", tmp_path)
    assert code_of("images") == ""
    folder = tmp_path / "mmpos/images/deep"
    folder.mkdir(parents=True)
    for number in range(9):
        (folder / f"{number}.py").write_text(f"x = {number}\n")
    (folder / "b.py").write_text("y = 2\n")
    (folder / "a.pyc").write_bytes(b"\xff")
    before = code_of("images")
    for number in range(9):
        (folder / f"{number}.py").rename(folder.parent / f"{9 - number}.py")
    (folder / "b.py").write_text("y  =  2\n\n")
    assert code_of("images") == before != ""
    (folder / "b.py").write_text("y = 3\n")
    assert code_of("images") != before


def test_a_table_says_when_and_where_it_was_recorded_and_whether_the_code_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_tables, "RESULTS", tmp_path)
    part = replace(MEASUREMENT, entries=MEASUREMENT.entries[:3])
    report = replace(REPORT, measurements=(part,), date="2026-11-29", code=code_of("positions"))
    table = (
        "|  | fill (limit) | mmpos (× limit) |\n| --- | ---: | ---: |\n| a: one | 2.00 µs | 3.00 µs (1.50×) |\n\n"
        "2026-11-29, abc, AMD EPYC, 2 cores, load 0.5"
    )
    for code, age in ((report.code, ""), ("other", ", **before later changes**")):
        (tmp_path / "positions.json").write_text(to_json(replace(report, code=code)))
        page = "<!-- bench: positions; ids -->\n{}<!-- /bench -->\n"
        assert filled_in(page.format("old\n")) == page.format(f"{table}{age}.\n")
    (tmp_path / "positions.json").write_text(to_json(replace(report, quick=True)))
    with pytest.raises(SystemExit, match="positions; ids: found no such figures"):
        filled_in("<!-- bench: positions; ids -->\n<!-- /bench -->")
