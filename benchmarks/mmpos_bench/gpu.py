"""Prove and measure the kernels on a GPU, in parts that can be run apart: `make gpu`.

Part 1 runs the tests: those marked gpu, and those of the rotations. Part 2 times every launch beside a copy and peers.
Part 3 times the host, and looks at every launch with compute-sanitizer where it is. Each part ends by itself
in less than nine minutes. Tests are kept as JUnit's XML, figures as those of `mmpos bench`, and report.md is made of
all that is there. It needs numpy and torch with triton, and pytest, hypothesis and mpmath for part 1.
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
"""The repository, whose tests are run."""

SECONDS = {1: 530.0, 2: 500.0, 3: 460.0}
"""Of each part, at most: 25 minutes of all."""

TESTS: Mapping[str, tuple[float, str]] = {
    "tests/gpu": (300.0, "dense"),
    "tests/rotary": (230.0, "any_number_of_tokens"),
}
"""Folders of tests, with the seconds that each may take, and those that are enough of a dry run."""

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZED = ((300, 3), (2100, 1))
"""Tokens and documents at which all launches are looked at: with one warp a program, and with several."""

BROKEN = 75
"""Exit status of a process whose CUDA context is lost."""

_ENDED = "the process ended while this ran"
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def shortened(error: object, most: int = 300) -> str:
    """Write an error in one line, without what is beyond some characters."""
    words = " ".join(str(error).split())
    return words if len(words) <= most else words[: most - 1] + "…"


class Kept:
    """The figures of a part in a file, written after every step: a process that was started anew goes on with them.

    Args:
        path: the file, which `Part` begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        (self.report,) = from_json(path.read_text())
        ended = [name for name, error in self.failed.items() if error == _ENDED]
        for name in ended:  # a comparison goes on without the contestant that ended it
            if any(other.startswith(f"{name}, ") for other in ended):
                del self.failed[name]

    @property
    def failed(self) -> dict[str, str]:
        """What went wrong, or is under way."""
        return self.report.failed

    def write(self, *measurements: Measurement) -> None:
        """Add figures, and write all."""
        self.report = replace(self.report, measurements=(*self.report.measurements, *measurements))
        write_text(self.path, to_json([self.report]))

    def has(self, title: str) -> bool:
        """Tell whether there are figures of a comparison, or an error in their place."""
        return title in self.failed or any(f"{m.group}: {m.name}" == title for m in self.report.measurements)

    def interrupt(self) -> None:
        """Leave what is under way to the next process."""
        for name in [name for name, error in self.failed.items() if error == _ENDED]:
            del self.failed[name]
        self.write()

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Do some work, unless it failed before; whatever goes wrong is kept, and tells that it did."""
        if name in self.failed:
            return False
        self.failed[name] = _ENDED
        self.write()
        try:
            work()
            del self.failed[name]
        # One contestant that fails, in whatever way, is one line.
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {shortened(error)}"
        self.write()
        return name not in self.failed


class Part:
    """One part: its time, its file, and the programs that it runs."""

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
        """The figures so far."""
        return Kept(self.path)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return SECONDS[self.number] - (time.monotonic() - self.begin)

    def run(self, *command: str, seconds: float = 3600.0, **variables: str) -> tuple[int | None, str]:
        """Run a program, which is ended with all that it started when the time is over.

        Returns:
            Its status, None if it was ended, and its output, which the log has as it comes.
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
                with suppress(subprocess.TimeoutExpired):  # pytest writes its XML when it is interrupted
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
        """Measure in a process of its own, and in another where that one broke, which goes on behind what broke it."""
        end = time.monotonic() + min(seconds, self.left)
        while (left := end - time.monotonic()) > 5:
            before = self.path.read_bytes()
            words = [what, "--kept", str(self.path), "--seconds", str(int(left - 5)), *["--dry"] * self.options.dry]
            status, told = self.run(sys.executable, "-m", "mmpos_bench.gpu_launches", *words, seconds=left)
            if status == 0:
                return
            if self.path.read_bytes() == before:
                kept = self.kept
                kept.failed[what] = f"ended with {status}: {shortened(told[-400:])}"
                kept.write()
                return


def tests(part: Part) -> None:
    """Run the tests, with several workers where pytest has them."""
    for path in part.options.out.glob("tests-*.xml"):
        path.unlink()
    for folder, (seconds, enough) in list(TESTS.items())[: 1 if part.options.dry else None]:
        command = [sys.executable, "-m", "pytest", "-v", "-ra", "-m", "not slow", folder]
        command += [f"--junitxml={part.options.out / folder.replace('/', '-')}.xml", "-p", "no:cacheprovider"]
        # Warnings are no errors here: versions are not those of the project's own environment.
        command += ["-o", "addopts=", "-o", "filterwarnings=default", "--import-mode=importlib"]
        if part.options.dry:
            command += ["-k", enough]
        elif importlib.util.find_spec("xdist"):
            command += ["-n", str(min(8, cores())), "--dist", "worksteal"]  # loadgroup waits for workers that ended
        status, told = part.run(*command, seconds=seconds)
        if status not in (0, 1):
            kept = part.kept
            kept.failed[f"{folder} did not come to its end"] = f"status {status}: {shortened(told[-400:])}"
            kept.write()


def looks(part: Part) -> None:
    """Time the host, and look at the launches with compute-sanitizer."""
    part.measure("host", 600.0 if part.options.dry else 120.0)  # a dry run costs nobody the time of a GPU
    sanitize(part, SANITIZERS)


def sanitize(part: Part, tools: Sequence[str]) -> None:
    """Let compute-sanitizer watch all of our launches, with memory that it can tell apart.

    A tool that is missing or says nothing is a result, and nothing wrong with ours.
    """
    kept = part.kept
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        kept.report.missing["compute-sanitizer"] = "there is no such program here"
    for tool, (tokens, documents) in product(tools if program else (), [(8, 1)] if part.options.dry else SANITIZED):
        sizes = "--tokens", str(tokens), "--documents", str(documents)
        launch = sys.executable, "-m", "mmpos_bench.gpu_launches", "launch", *sizes
        if part.left <= 20:
            break
        if tool == SANITIZERS[0]:  # compiles for all of them, which would take long under one
            part.run(*launch, seconds=60)
        asked = f"{program}", "--tool", tool, "--print-limit", "5", *launch
        status, told = part.run(*asked, seconds=70, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        title = f"{tool}, {tokens:,} tokens of {documents}"
        if said := _SUMMARY.search(told):
            kept.write(Measurement("compute-sanitizer", title, (), {}, "", {"findings": float(said[1])}))
        else:
            kept.report.missing[title] = f"ended with {status}: {shortened(told[-300:])}"
    kept.write()


PARTS: Mapping[int, Callable[[Part], None]] = {
    1: tests,
    2: lambda part: part.measure("speed", SECONDS[2]),
    3: looks,
}


# The report.


def read_tests(folder: Path) -> Iterator[tuple[str, dict[str, float], list[str]]]:
    """Yield the name, the counts with the worst share of a bound, and the failures of every file of JUnit's XML."""
    for path in sorted(folder.glob("tests-*.xml")):
        suite = ElementTree.parse(path).getroot()
        suite = suite if suite.tag == "testsuite" else suite[0]
        found = {name: float(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped", "time")}
        shares = [each.get("value", "nan") for each in suite.iter("property") if each.get("name") == "share_of_bound"]
        found["worst error"] = max(map(float, shares), default=0.0)
        wrong = []
        for case in suite.iter("testcase"):
            for bad in (*case.iter("failure"), *case.iter("error")):
                wrong.append(f"{case.get('classname')}::{case.get('name')}: {shortened(bad.get('message'), 400)}")
        yield path.stem.replace("-", "/"), found, wrong


def problems_in(folder: Path) -> list[str]:
    """List what is wrong with ours: tests, launches, findings of sanitizers, parts that broke; not peers and tools."""
    from mmpos_bench.peers.rotations import DIFFUSERS, NORMS, ROTATIONS

    found = [problem for _, _, wrong in read_tests(folder) for problem in wrong]
    for report in reports_in(folder):
        theirs = tuple(f", {peer}" for peer in (*ROTATIONS, *NORMS, *DIFFUSERS))
        found += [f"{name}: {error}" for name, error in report.failed.items() if not name.endswith(theirs)]
        looked = ((m.name, m.facts.get("findings")) for m in report.measurements)
        found += [f"{name}: {findings:.0f} findings" for name, findings in looked if findings]
    return found


def reports_in(folder: Path) -> list[SuiteReport]:
    """Read the figures of all parts that are there."""
    return [report for path in sorted(folder.glob("part-*.json")) for report in from_json(path.read_text())]


def write_report(folder: Path) -> None:
    """Write report.md beside the results."""
    lines, reports = ["# The kernels on a GPU"], reports_in(folder)
    if any(report.quick for report in reports):
        lines += ["\n**A dry run: toys in Triton's interpreter, whose figures mean nothing.**"]
    lines += [f"\n`{report.command}`: {report.machine}, {report.machine.versions}." for report in reports]
    problems = problems_in(folder)
    lines += ["\n## Wrong\n" if problems else "\nNothing was wrong.", *(f"- {problem}" for problem in problems)]
    if counted := list(read_tests(folder)):
        lines += ["\n## Tests\n\nThe worst error is a share of its bound, of launches against float64.\n"]
        rows = [[name, *(f"{value:.4g}" for value in found.values())] for name, found, _ in counted]
        lines += [markdown([["folder", *counted[0][1]], *rows])]
    for report in reports:
        lines += [f"\n## {group}\n\n{to_markdown(report.group(group))}" for group in report.groups]
        if report.missing:
            lines += ["\n## Not here\n", *(f"- {name}: {why}" for name, why in report.missing.items())]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Run the parts that are asked for; return 1 if anything of ours was wrong."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu", description=__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument("--out", type=Path, help="a folder; benchmarks/results/gpu, or out/gpu of a dry run")
    parser.add_argument("--peers", type=Path, help="a folder of unpacked packages of peers, behind what is installed")
    parser.add_argument("--commit", help="the commit, where the sources came without their repository")
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, toy sizes: proves this code alone")
    options = parser.parse_args()
    import torch

    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs everything in Triton's interpreter")
    options.out = (options.out or ROOT / ("out/gpu" if options.dry else "benchmarks/results/gpu")).resolve()
    options.peers = options.peers and options.peers.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for number in options.part:
        print(f"part {number}, at most {SECONDS[number]:.0f} s", flush=True)
        part = Part(number, options)
        try:
            PARTS[number](part)
        finally:
            write_report(options.out)
    print((options.out / "report.md").read_text())
    return 1 if problems_in(options.out) else 0


if __name__ == "__main__":
    sys.exit(main())
