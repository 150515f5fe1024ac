"""Prove and measure the kernels on a GPU, in parts that can be run apart: `make gpu`.

Part 1 runs the tests: those marked gpu, and those of the rotations. Part 2 times every launch beside a copy and peers.
Part 3 times the host, and looks at every launch with compute-sanitizer and ncu where they are. Each part ends by itself
in less than nine minutes. It writes part-N.jsonl as it goes, and report.md of all parts that are there.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mmpos.support.info import cores
from mmpos.support.native import core
from mmpos_bench.gpu.journal import Journal, Row, shortened
from mmpos_bench.gpu.report import problems_in, read_rows, write_report
from mmpos_bench.machine import stamp

ROOT = Path(__file__).parents[3]
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

PROFILED = (
    *((way, 8192, 1) for way in ("copy", "in place", "in place, dense ids", "norm", "store", "norm, there and back")),
    *((way, 256, 256) for way in ("in place", "in place, dense ids", "store")),
    ("in place", 2048, 1),
    ("in place", 32768, 1),
    ("in place", 8192, 512),
)
"""Ways, tokens and documents whose hardware counters are read."""

COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "launch__registers_per_thread",
    "launch__grid_size",
    "launch__block_size",
)

_LOGGED = 8000  # characters that are kept of what a program prints
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass(frozen=True)
class Options:
    """Request for a run."""

    out: Path
    peers: Path | None = None
    commit: str | None = None
    dry: bool = False


class Part:
    """One part: its time, its file, and the programs that it runs."""

    def __init__(self, number: int, options: Options) -> None:
        self.options, self.path = options, options.out / f"part-{number}.jsonl"
        self.path.unlink(missing_ok=True)
        self.log = options.out / f"part-{number}.log"
        self.log.write_text("")
        self.begin, self.seconds = time.monotonic(), SECONDS[number]
        Journal(self.path).write("machine", part=number, dry=options.dry, **machine(options.commit))

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.begin)

    def run(self, *command: str, seconds: float = 3600.0, **variables: str) -> tuple[int | None, str]:
        """Run a program, which is ended with all that it started when the time is over.

        Returns:
            Its status, None if it was ended, and its output.
        """
        folders = [ROOT, ROOT / "server", ROOT / "benchmarks", os.environ.get("PYTHONPATH"), self.options.peers]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]),
            "TRITON_INTERPRET": "1" if self.options.dry else "0",
            **variables,
        }
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status: int | None = process.wait(max(1.0, min(seconds, self.left)))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            told = output.read()
        with self.log.open("a") as log:
            log.write(f"\n== {' '.join(command)}: {status}\n{told[-_LOGGED:]}")
        return status, told

    def measure(self, what: str, seconds: float) -> None:
        """Measure in a process of its own, and in another where that one broke, which goes on behind what broke it."""
        end = time.monotonic() + min(seconds, self.left)
        while (left := end - time.monotonic()) > 5:
            before = len(Journal(self.path).rows)
            command = ["--journal", str(self.path), "--seconds", str(int(left - 5))]
            command += ["--dry"] * self.options.dry
            if self.options.peers:
                command += ["--peers", str(self.options.peers)]
            status, told = self.run(sys.executable, "-m", "mmpos_bench.gpu.measure", what, *command, seconds=left)
            if status == 0:
                return
            journal = Journal(self.path)  # which says what was under way
            if len(journal.rows) == before:
                journal.write("note", name=what, error=f"ended with {status}: {shortened(told[-400:])}")
                return


def machine(commit: str | None) -> Row:
    """Describe the machine, its device and driver."""
    import torch

    found = stamp("default")
    values = asdict(replace(found, commit=commit or found.commit))
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        values |= {
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "memory": device.total_memory,
            "l2": device.L2_cache_size,
        }
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if shutil.which(query[0]):
            told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.split()
            values["driver"] = told[0] if told else None
    return values | {"torch": torch.__version__, "cuda": torch.version.cuda, "extension": core is not None}


def tests(part: Part) -> None:
    """Run the tests, with several workers where pytest has them."""
    for folder, (seconds, enough) in TESTS.items():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-ra",
            "-p",
            "mmpos_bench.gpu.recorder",
            "-m",
            "not slow",
            folder,
        ]
        # Warnings are no errors here: versions are not those of the project's own environment.
        command += [
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "-o",
            "filterwarnings=default",
            "--import-mode=importlib",
        ]
        if part.options.dry:
            command += ["-k", enough]
        elif importlib.util.find_spec("xdist"):
            command += ["-n", str(min(8, cores())), "--dist", "worksteal"]  # loadgroup waits for workers that ended
        where = {"MMPOS_JOURNAL": str(part.path), "MMPOS_SUITE": folder}
        status, told = part.run(*command, seconds=seconds, **where)
        if status not in (0, 1):
            name = f"{folder} did not come to its end"
            Journal(part.path).write("note", name=name, error=f"status {status}: {shortened(told[-400:])}")


def speeds(part: Part) -> None:
    """Time every launch on the device."""
    part.measure("speed", part.seconds)


def looks(part: Part) -> None:
    """Time the host, and look at the launches with other tools."""
    part.measure("host", 120.0)
    launch = (sys.executable, "-m", "mmpos_bench.gpu.measure", "launch")
    sizes = ((8, 1),) if part.options.dry else SANITIZED
    sanitize(part, launch, sizes, SANITIZERS[:2])
    count(part, launch, (("in place", 8, 1),) if part.options.dry else PROFILED)
    sanitize(part, launch, sizes, SANITIZERS[2:])


def _tool(part: Part, name: str) -> str | None:
    """Find a program; a missing one is a result."""
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    journal = Journal(part.path)
    if path is None and not journal.has("missing", name):
        journal.write("missing", name=name, why="there is no such program here")
    return path


def sanitize(part: Part, launch: tuple[str, ...], sizes: tuple[tuple[int, int], ...], tools: tuple[str, ...]) -> None:
    """Let compute-sanitizer watch all of our launches, with memory that it can tell apart."""
    program = _tool(part, "compute-sanitizer")
    if program is None:
        return
    for tool in tools:
        for tokens, documents in sizes:
            name = f"{tool}, {tokens:,} tokens of {documents}"
            size = ("--tokens", str(tokens), "--documents", str(documents))
            if tool == SANITIZERS[0]:  # compiles for all of them, which would take long under one
                part.run(*launch, *size, "--warm", "0", seconds=60)

            def work(tool: str = tool, size: tuple[str, ...] = size) -> Mapping[str, object]:
                command = (program, "--tool", tool, "--print-limit", "5", *launch, *size, "--warm", "0")
                status, told = part.run(*command, seconds=70, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
                said = _SUMMARY.search(told)
                if said is None:
                    raise RuntimeError(f"ended with {status}: {told[-300:]}")
                return {"found": int(said[1]), "said": shortened(told[:300]) if int(said[1]) else ""}

            if part.left > 20:
                Journal(part.path).attempt("sanitizer", name, work)


def count(part: Part, launch: tuple[str, ...], profiled: tuple[tuple[str, int, int], ...]) -> None:
    """Read hardware counters of single launches; clocks are left as they are."""
    program = _tool(part, "ncu")
    if program is None:
        return
    for way, tokens, documents in profiled:

        def work(way: str = way, tokens: int = tokens, documents: int = documents) -> Mapping[str, object]:
            command = (program, "--csv", "--clock-control", "none", "--profile-from-start", "off", "-c", "4")
            size = ("--way", way, "--tokens", str(tokens), "--documents", str(documents))
            status, told = part.run(*command, "--metrics", ",".join(COUNTERS), *launch, *size, seconds=40)
            kernels = counters(told)
            if not kernels:
                raise RuntimeError(f"ended with {status}: {told[-300:]}")
            return {"kernels": kernels}

        if part.left > 20:
            Journal(part.path).attempt("ncu", f"{way}, {tokens:,} tokens of {documents}", work)


def counters(told: str) -> list[dict[str, str]]:
    """Read what ncu prints: lines of CSV among others, one for each counter of each launch."""
    lines = csv.DictReader(line for line in told.splitlines() if line.startswith('"'))
    launches: dict[str, dict[str, str]] = {}
    for line in lines:
        row = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"].split("(")[0][:60]})
        row[line["Metric Name"]] = f"{line['Metric Value']} {line.get('Metric Unit') or ''}".strip()
    return list(launches.values())


PARTS: Mapping[int, Callable[[Part], None]] = {1: tests, 2: speeds, 3: looks}


def main() -> int:
    """Run the parts that are asked for; return 1 if anything of ours was wrong."""
    parser = argparse.ArgumentParser(prog="python -m mmpos_bench.gpu", description=__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=sorted(PARTS), default=sorted(PARTS))
    parser.add_argument(
        "--out", type=Path, help="the folder of results; benchmarks/results/gpu, or out/gpu of a dry run"
    )
    parser.add_argument("--peers", type=Path, help="a folder of unpacked packages of peers, behind what is installed")
    parser.add_argument("--commit", help="the commit, where the sources came without their repository")
    parser.add_argument("--dry", action="store_true", help="in Triton's interpreter, toy sizes: proves this code alone")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw results that are there, .png, .svg or .pdf; run nothing"
    )
    given = parser.parse_args()
    out: Path = given.out or ROOT / ("out/gpu" if given.dry else "benchmarks/results/gpu")
    if given.plot:
        from mmpos_bench.gpu.plot import plot_shares

        plot_shares(read_rows(out), given.plot)
        return 0
    import torch

    if not given.dry and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs everything in Triton's interpreter")
    out.mkdir(parents=True, exist_ok=True)
    options = Options(out.resolve(), given.peers and given.peers.resolve(), given.commit, given.dry)
    for number in given.part:
        print(f"part {number}, at most {SECONDS[number]:.0f} s", flush=True)
        part = Part(number, options)
        try:
            PARTS[number](part)
        finally:
            Journal(part.path).write("end", part=number, seconds=round(part.seconds - part.left, 1))
            write_report(options.out)
    print((options.out / "report.md").read_text())
    return 1 if problems_in(read_rows(options.out)) else 0


if __name__ == "__main__":
    sys.exit(main())
