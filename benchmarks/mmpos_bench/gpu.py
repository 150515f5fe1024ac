"""Test and measure the kernels on a GPU in parts that can run separately: `make gpu`.

Part 1 runs the tests marked gpu and the tests of rotations. Part 2 measures every launch together with a copy and
peers. Part 3 checks every launch with compute-sanitizer if it is installed. Each part finishes in less than nine
minutes. Test results are written as JUnit XML and figures in the format of `mmpos bench`; report.md
summarizes all results. Requires numpy and torch with Triton; part 1 also requires pytest, hypothesis and mpmath.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

from mmpos.support.files import write_text
from mmpos.support.info import cores
from mmpos_bench.machine import stamp
from mmpos_bench.results import Measurement, SuiteReport, from_json, markdown, to_json, to_markdown

ROOT = Path(__file__).parents[2]
"""The repository whose tests are run."""

SECONDS = {1: 530.0, 2: 500.0, 3: 460.0}
"""Time limit of each part; 25 minutes in total."""

TESTS: Mapping[str, float] = {"tests/gpu": 300.0, "tests/rotary": 230.0}
"""Test folders with their time limits in seconds; a dry run uses only the first."""

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ((300, 3), (2100, 1))
"""Token and document counts of the launches under compute-sanitizer: with one warp per program, and with several."""

BROKEN = 75
"""Exit status of a process that has lost its CUDA context."""

_ENDED = "the process ended while this ran"
_SELECTED = re.compile(r"collected (\d+) items / \d+ deselected / (\d+) selected")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def shortened(error: object, most: int = 300) -> str:
    """Return an error as one line of at most ``most`` characters."""
    words = " ".join(str(error).split())
    return words if len(words) <= most else words[: most - 1] + "…"


class Kept:
    """The figures of a part, written to a file after every step so that a restarted process can continue.

    Args:
        path: the file, which `Part` creates.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        (self.report,) = from_json(path.read_text())
        ended = [name for name, error in self.failed.items() if error == _ENDED]
        for name in ended:  # a comparison continues without the contestant that crashed the process
            if any(other.startswith(f"{name}, ") for other in ended):
                del self.failed[name]

    @property
    def failed(self) -> dict[str, str]:
        """Errors of the pieces of work that failed or are in progress, by name."""
        return self.report.failed

    def write(self, *measurements: Measurement) -> None:
        """Add measurements and write the file."""
        self.report = replace(self.report, measurements=(*self.report.measurements, *measurements))
        write_text(self.path, to_json([self.report]))

    def has(self, title: str) -> bool:
        """Return whether a comparison has figures or an error."""
        return title in self.failed or any(f"{m.group}: {m.name}" == title for m in self.report.measurements)

    def interrupt(self) -> None:
        """Discard the marks of work in progress, so that the next process repeats that work."""
        for name in [name for name, error in self.failed.items() if error == _ENDED]:
            del self.failed[name]
        self.write()

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Do a piece of work unless it failed before; record any error and return whether the work succeeded."""
        if name in self.failed:
            return False
        self.failed[name] = _ENDED
        self.write()
        try:
            work()
            del self.failed[name]
        # Any failure of a contestant becomes one line in the report.
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {shortened(error)}"
        self.write()
        return name not in self.failed


class Part:
    """One part of `make gpu`, with its time limit, its files and the programs that it runs."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.number, self.options, self.path = number, options, options.out / f"part-{number}.json"
        self.begin, self.log = time.monotonic(), options.out / f"part-{number}.log"
        self.log.write_text("")
        machine = stamp("default")
        machine = replace(machine, commit=options.commit or machine.commit)
        command = f"make gpu PART={number}" + " DRY=1" * options.dry
        write_text(self.path, to_json([SuiteReport("gpu", command, options.dry, machine, ())]))

    @property
    def kept(self) -> Kept:
        """Figures measured so far."""
        return Kept(self.path)

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return SECONDS[self.number] - (time.monotonic() - self.begin)

    def run(self, *command: str, seconds: float = 3600.0, **variables: str) -> tuple[int | None, str]:
        """Run a program and kill its process group when time runs out.

        Returns:
            the program's exit status, or None if the program was killed, and its output, which is also written to the
            log.
        """
        folders = [ROOT, ROOT / "server", ROOT / "benchmarks", os.environ.get("PYTHONPATH"), self.options.peers]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),
            "TRITON_INTERPRET": "1" if self.options.dry else "0",
            **variables,
        }
        with self.log.open("a+") as log:
            log.write(f"\n== {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            status: int | None = None
            try:
                status = process.wait(max(1.0, min(seconds, self.left)))
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

    def measure(self, what: str, seconds: float) -> None:
        """Measure in a separate process; after a failure, continue in a new process with the next piece of work."""
        end = time.monotonic() + min(seconds, self.left)
        while (left := end - time.monotonic()) > 5:
            before = self.path.read_bytes()
            words = [what, "--kept", str(self.path), "--seconds", str(int(left - 5)), *["--dry"] * self.options.dry]
            status, output = self.run(sys.executable, "-m", "mmpos_bench.gpu_launches", *words, seconds=left)
            if status == 0:
                return
            if self.path.read_bytes() == before:
                kept = self.kept
                kept.failed[what] = f"ended with {status}: {shortened(output[-400:])}"
                kept.write()
                return


def tests(part: Part) -> None:
    """Run the tests, with several workers if pytest-xdist is installed; a dry run runs one of each kind."""
    for path in part.options.out.glob("tests-*.xml"):
        path.unlink()
    for folder, seconds in list(TESTS.items())[: 1 if part.options.dry else None]:
        which = ["--one-of-each"] if part.options.dry else ["-m", "not slow"]
        command = [sys.executable, "-m", "pytest", "-v", "-ra", *which, folder]
        command += [f"--junitxml={part.options.out / folder.replace('/', '-')}.xml", "-p", "no:cacheprovider"]
        # Do not treat warnings as errors, because package versions differ from those of the project's own environment.
        command += ["-o", "addopts=", "-o", "filterwarnings=default", "--import-mode=importlib"]
        if not part.options.dry and importlib.util.find_spec("xdist"):
            command += ["-n", str(min(8, cores())), "--dist", "worksteal"]  # loadgroup waits for crashed workers
        status, output = part.run(*command, seconds=seconds)
        kept = part.kept
        if part.options.dry and (selected := _SELECTED.search(output)):
            others = " and ".join(list(TESTS)[1:])
            ran = f"{selected[2]} of {selected[1]} tests, one of each kind"
            kept.report.missing[folder] = f"a dry run runs {ran}, and none of {others}"
            kept.write()
        if status not in (0, 1):
            kept.failed[f"{folder} did not finish"] = f"status {status}: {shortened(output[-400:])}"
            kept.write()


def sanitize(part: Part, tools: Sequence[str]) -> None:
    """Check all of our launches with compute-sanitizer, with memory caching disabled.

    A tool that is missing or prints no summary is reported as missing, not as a problem.
    """
    kept = part.kept
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        kept.report.missing["compute-sanitizer"] = "the program is not installed"
    for tool, (tokens, documents) in product(tools if program else (), [(8, 1)] if part.options.dry else SANITIZED):
        sizes = "--tokens", str(tokens), "--documents", str(documents)
        launch = sys.executable, "-m", "mmpos_bench.gpu_launches", "launch", *sizes
        if part.left <= 20:
            break
        if tool == SANITIZERS[0]:  # compile the kernels for all tools beforehand; compiling under a tool is slow
            part.run(*launch, seconds=60)
        command = f"{program}", "--tool", tool, "--print-limit", "5", *launch
        status, output = part.run(*command, seconds=70, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        title = f"{tool}, {tokens:,} tokens of {documents}"
        if summary := _SUMMARY.search(output):
            kept.write(Measurement("compute-sanitizer", title, (), {}, "", {"findings": float(summary[1])}))
        else:
            kept.report.missing[title] = f"ended with {status}: {shortened(output[-300:])}"
    kept.write()


PARTS: Mapping[int, Callable[[Part], None]] = {
    1: tests,
    2: lambda part: part.measure("speed", SECONDS[2]),
    3: lambda part: sanitize(part, SANITIZERS),
}


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
    """Return failures of our tests, launches and parts, and sanitizer findings; failures of peers are excluded."""
    from mmpos_bench.peers.rotations import DIFFUSERS, NORMS, ROTATIONS

    problems = [failure for _, _, failures in read_tests(folder) for failure in failures]
    for report in reports_in(folder):
        peers = tuple(f", {peer}" for peer in (*ROTATIONS, *NORMS, *DIFFUSERS))
        problems += [f"{name}: {error}" for name, error in report.failed.items() if not name.endswith(peers)]
        findings = ((m.name, m.facts.get("findings")) for m in report.measurements)
        problems += [f"{name}: {count:.0f} findings" for name, count in findings if count]
    return problems


def reports_in(folder: Path) -> list[SuiteReport]:
    """Read the figures of all existing parts."""
    return [report for path in sorted(folder.glob("part-*.json")) for report in from_json(path.read_text())]


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
    options = parser.parse_args()
    import torch

    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU is available; --dry runs one of each kind in Triton's interpreter")
    options.out = (options.out or ROOT / ("out/gpu" if options.dry else "benchmarks/results/gpu")).resolve()
    options.peers = options.peers and options.peers.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in options.part:
        print(f"part {number}, up to {SECONDS[number]:.0f} s", flush=True)
        part = Part(number, options)
        try:
            PARTS[number](part)
        finally:
            write_report(options.out)
    print((options.out / "report.md").read_text())
    return 1 if problems_in(options.out) else 0


if __name__ == "__main__":
    sys.exit(main())
