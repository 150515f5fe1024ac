"""Test and measure the kernels on a GPU in three parts that can run separately: `make gpu`.

Part 1 runs the tests marked gpu and the tests of rotations. Part 2 measures every launch together with a copy and
peers. Part 3 runs a test of each kind under compute-sanitizer. Each part finishes in less than nine minutes. Test
results are written as JUnit XML and figures in the format of `mmpos bench`; report.md summarizes all results. Requires
numpy and torch with Triton; part 1 also requires pytest, hypothesis and mpmath.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from mmpos.support.files import write_text
from mmpos.support.info import cores
from mmpos_bench.machine import stamp
from mmpos_bench.results import Measurement, SuiteReport, from_json, markdown, to_json, to_markdown
from mmpos_bench.suites import QUICK, Comparison, SuiteOptions

ROOT = Path(__file__).parents[2]
"""The repository whose tests are run."""

TESTS: Mapping[str, float] = {"tests/gpu": 300.0, "tests/rotary": 230.0}
"""Test folders with their time limits in seconds; a dry run uses only the first."""

SPEED_SECONDS = 500.0
"""Time limit of part 2."""

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_SECONDS = 120.0
"""Time limit of each sanitizer."""

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_SELECTED = re.compile(r"collected (\d+) items / \d+ deselected / (\d+) selected")


def shortened(error: object, most: int = 300) -> str:
    """Return an error as one line of at most ``most`` characters."""
    words = " ".join(str(error).split())
    return words if len(words) <= most else words[: most - 1] + "…"


class Part:
    """One part of `make gpu`, whose report is written to a file after every step."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.options, self.path = options, options.out / f"part-{number}.json"
        machine = stamp("default")
        machine = replace(machine, commit=options.commit or machine.commit)
        command = f"make gpu PART={number}" + " DRY=1" * options.dry
        self.report = SuiteReport("gpu", command, options.dry, machine, ())
        self.write()

    def write(self) -> None:
        """Write the report."""
        write_text(self.path, to_json(self.report))

    def run(self, *command: str, seconds: float, **variables: str) -> tuple[int | None, str]:
        """Run a program with these variables of the environment, and kill its process group when time runs out.

        Returns:
            the program's exit status, or None if the program was killed, and its output, which is also written to a
            log.
        """
        folders = [ROOT, ROOT / "server", ROOT / "benchmarks", os.environ.get("PYTHONPATH"), self.options.peers]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "TRITON_INTERPRET": "1" if self.options.dry else "0",
            **variables,
        }
        with self.path.with_suffix(".log").open("a+") as log:
            begin = log.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            status: int | None = None
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                with suppress(subprocess.TimeoutExpired):  # pytest writes its XML when interrupted
                    process.send_signal(signal.SIGINT)
                    process.wait(10)
            finally:
                if status is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(begin)
            return status, log.read()


def pytest_command(*arguments: str) -> list[str]:
    """Return a command that runs tests; warnings are no errors, since versions differ from the project's own."""
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "--import-mode=importlib"]
    return [sys.executable, "-m", "pytest", "-v", "-ra", *arguments, *options]


def tests(part: Part) -> None:
    """Run the tests, with several workers if pytest-xdist is installed; a dry run runs one of each kind."""
    for path in part.options.out.glob("tests-*.xml"):
        path.unlink()
    for folder, seconds in list(TESTS.items())[: 1 if part.options.dry else None]:
        which = ["--one-of-each"] if part.options.dry else ["-m", "not slow"]
        command = pytest_command(*which, folder, f"--junitxml={part.options.out / folder.replace('/', '-')}.xml")
        if not part.options.dry and importlib.util.find_spec("xdist"):
            command += ["-n", str(min(8, cores())), "--dist", "worksteal"]  # loadgroup waits for crashed workers
        status, output = part.run(*command, seconds=seconds)
        if part.options.dry and (selected := _SELECTED.search(output)):
            others = " and ".join(list(TESTS)[1:])
            ran = f"{selected[2]} of {selected[1]} tests, one of each kind"
            part.report.missing[folder] = f"a dry run runs {ran}, and none of {others}"
        if status not in (0, 1):
            part.report.failed[f"{folder} did not finish"] = f"status {status}: {shortened(output[-400:])}"
        part.write()


def speed(part: Part) -> None:
    """Measure in a separate process, which writes the report after every comparison, and report how it ended."""
    words = ["--measure", str(part.path), *["--dry"] * part.options.dry]
    status, output = part.run(sys.executable, "-m", "mmpos_bench.gpu", *words, seconds=SPEED_SECONDS)
    part.report = from_json(part.path.read_text())
    if status:
        part.report.failed["speed"] = f"ended with {status}: {shortened(output[-400:])}"
    if status is None:
        part.report.missing["speed"] = "out of time; the last comparisons were not measured"
    part.write()


def measure(path: Path, cases: Callable[[SuiteOptions], Iterator[Comparison]], synchronize: Callable[[], None]) -> None:
    """Measure every case and write the report after each; a contestant that fails is recorded and left out.

    Args:
        path: the report of part 2.
        cases: returns the comparisons.
        synchronize: waits for the device, and raises RuntimeError if its context is lost, which ends the measurement.
    """
    report = from_json(path.read_text())
    options = SuiteOptions(quick=report.quick, peers=not report.quick, missing=report.missing)

    def attempt(name: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:  # of any kind: it becomes a line of the report
            report.failed[name] = f"{type(error).__name__}: {shortened(error)}"
            write_text(path, to_json(report))
            synchronize()
        return name not in report.failed

    def add(case: Comparison) -> None:
        nonlocal report
        done = case.measure(QUICK if report.quick else case.budget, attempt)
        report = replace(report, measurements=(*report.measurements, done))
        write_text(path, to_json(report))

    for case in cases(options):
        attempt(case.title, partial(add, case))


def sanitize(part: Part) -> None:
    """Run a test of each kind under every sanitizer; one that is not installed or prints no summary is missing."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        part.report.missing["compute-sanitizer"] = "the program is not installed"
    for tool in SANITIZERS if program else ():
        command = [f"{program}", "--tool", tool, "--print-limit", "5", *pytest_command("--one-of-each", "tests/gpu")]
        status, output = part.run(*command, seconds=SANITIZER_SECONDS, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        if summary := _SUMMARY.search(output):
            measurement = Measurement("compute-sanitizer", tool, (), {}, "", {"findings": float(summary[1])})
            part.report = replace(part.report, measurements=(*part.report.measurements, measurement))
            if measurement.facts["findings"]:
                part.report.failed[tool] = f"{summary[1]} findings"
        else:
            part.report.missing[tool] = f"ended with {status}: {shortened(output[-300:])}"
    part.write()


PARTS: Mapping[int, Callable[[Part], None]] = {1: tests, 2: speed, 3: sanitize}


# The report.


def read_tests(folder: Path) -> Iterator[tuple[str, dict[str, float], list[str]]]:
    """Yield each JUnit XML file's name, its counts (with the largest share of an error bound), and its failures."""
    for path in sorted(folder.glob("tests-*.xml")):
        suite = ElementTree.parse(path).getroot()
        suite = suite if suite.tag == "testsuite" else suite[0]
        counts = {name: float(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped", "time")}
        shares = [x.get("value", "nan") for x in suite.iter("property") if x.get("name") == "share_of_bound"]
        counts["worst error"] = max(map(float, shares), default=0.0)
        failures = []
        for case in suite.iter("testcase"):
            for failure in (*case.iter("failure"), *case.iter("error")):
                message = shortened(failure.get("message"), 400)
                failures.append(f"{case.get('classname')}::{case.get('name')}: {message}")
        yield path.stem.replace("-", "/"), counts, failures


def problems_in(folder: Path) -> list[str]:
    """Return failures of our tests, launches and parts; failures of peers are excluded."""
    from mmpos_bench.peers.rotations import DIFFUSERS, ROTATIONS

    peers = tuple(f", {peer}" for peer in (*ROTATIONS, *DIFFUSERS))
    failed = [item for report in reports_in(folder) for item in report.failed.items()]
    return [failure for _, _, failures in read_tests(folder) for failure in failures] + [
        f"{name}: {error}" for name, error in failed if not name.endswith(peers)
    ]


def reports_in(folder: Path) -> list[SuiteReport]:
    """Read the figures of all existing parts."""
    return [from_json(path.read_text()) for path in sorted(folder.glob("part-*.json"))]


def write_report(folder: Path) -> None:
    """Write report.md to the results folder."""
    lines, reports = ["# The kernels on a GPU"], reports_in(folder)
    if any(report.quick for report in reports):
        lines += ["\n**A dry run with toy sizes in Triton's interpreter; the figures are meaningless.**"]
    lines += [f"\n`{report.command}`: {report.machine}, {report.machine.versions}." for report in reports]
    problems = problems_in(folder)
    lines += ["\n## Problems\n" if problems else "\nNo problems.", *(f"- {problem}" for problem in problems)]
    if results := list(read_tests(folder)):
        lines += ["\n## Tests\n\nThe worst difference from the reference is a fraction of its bound.\n"]
        rows = [[name, *(f"{value:.4g}" for value in counts.values())] for name, counts, _ in results]
        lines += [markdown([["folder", *results[0][1]], *rows])]
    for report in reports:
        lines += [f"\n## {group}\n\n{to_markdown(report.group(group))}" for group in report.groups]
        if report.missing:
            lines += ["\n## Missing\n", *(f"- {name}: {reason}" for name, reason in report.missing.items())]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Run the requested parts; return 1 if there are problems."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu", description=__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--out", type=Path, help="output folder; default benchmarks/results/gpu, or out/gpu if dry")
    parser.add_argument("--peers", type=Path, help="folder of unpacked peer packages; installed packages take priority")
    parser.add_argument("--commit", help="the commit, if the sources are not in their repository")
    parser.add_argument("--dry", action="store_true", help="toy sizes in Triton's interpreter, to test this program")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU is available; --dry runs one of each kind in Triton's interpreter")
    if options.measure is not None:
        from mmpos_bench.cuda import synchronize
        from mmpos_bench.rotary import Bench, compared

        measure(options.measure, partial(compared, Bench("cpu" if options.dry else "cuda", options.dry)), synchronize)
        return 0
    options.out = (options.out or ROOT / ("out/gpu" if options.dry else "benchmarks/results/gpu")).resolve()
    options.peers = options.peers and options.peers.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in options.part:
        print(f"part {number}, less than nine minutes", flush=True)
        part = Part(number, options)
        try:
            PARTS[number](part)
        finally:
            write_report(options.out)
    print((options.out / "report.md").read_text())
    return 1 if problems_in(options.out) else 0


if __name__ == "__main__":
    sys.exit(main())
