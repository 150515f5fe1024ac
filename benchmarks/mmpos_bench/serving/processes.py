"""Processes beside this one: servers, whose processor time the kernel tells, and workers, which run functions."""

from __future__ import annotations

import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmpos.errors import ServiceError

Tell = Callable[[object], None]
"""Sends something from a worker to the process that started it."""

# The server, kept from tuning malloc.
_UNTUNED = (
    "from mmpos_server import __main__, launch; launch.keep_large_blocks = bool; raise SystemExit(__main__.main())"
)


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens at HOST:PORT."""

    pid: int
    address: str

    @property
    def cpu(self) -> float:
        """Seconds of processor time, user and system, of all its threads so far: /proc/PID/stat, but not in ticks."""
        return time.clock_gettime((~self.pid << 3) | 2)  # clock_getcpuclockid(3)

    def memory(self, which: str = "VmRSS") -> float:
        """Read the MiB that the process holds, or (VmHWM) held at most."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{which}:"))


def service(malloc: str, *options: str) -> list[str]:
    """Make the command line of our server, with malloc as it sets it or as the C library does."""
    words = ["-m", "mmpos_server"] if malloc == "tuned" else ["-c", _UNTUNED]
    return [sys.executable, *words, "--port", "0", *options]


def echo(malloc: str) -> list[str]:
    """Make the command line of the echo server."""
    return [sys.executable, "-m", "mmpos_bench.serving.echo", "--malloc", malloc]


@contextmanager
def started(*commands: list[str]) -> Iterator[list[ServerProcess]]:
    """Run servers while inside, all started at once; the first line of each ends in HOST:PORT.

    Raises:
        ServiceError: one does not start.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(_running(command)) for command in commands]
        yield [_listening(process, command) for process, command in zip(running, commands, strict=True)]


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that is told to end on leaving; its log, a line for every call, goes nowhere."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def _listening(process: subprocess.Popen[str], command: list[str]) -> ServerProcess:
    assert process.stdout is not None
    line = process.stdout.readline()
    if "listening on" not in line:
        raise ServiceError(f"server: got none, want one that listens; this says why: {shlex.join(command)}")
    return ServerProcess(process.pid, line.split()[-1])


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep whatever is started inside to this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Worker:
    """A process that runs functions of modules for this one, one after the other.

    Not one of multiprocessing, which would run the caller's program again in each.
    """

    process: subprocess.Popen[bytes]

    def start(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the worker call a function, whose first argument is a `Tell`.

        Raises:
            ServiceError: the worker has ended.
        """
        assert self.process.stdin is not None
        try:
            pickle.dump((function, arguments), self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self) -> Any:
        """Wait for the next thing that the function tells; an error of its is raised.

        Raises:
            ServiceError: the worker has ended.
        """
        assert self.process.stdout is not None
        try:
            message = pickle.load(self.process.stdout)
        except EOFError:
            raise self._ended() from None
        if isinstance(message, Exception):
            raise message
        return message

    def _ended(self) -> ServiceError:
        return ServiceError(f"worker: got exit code {self.process.wait()}, want one that does what it was asked")


@contextmanager
def working(count: int = 1) -> Iterator[list[Worker]]:
    """Run so many workers while inside."""
    words = [sys.executable, "-c", f"from {__name__} import work; work()"]
    with ExitStack() as stack:
        workers = []
        for _ in range(count):
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            workers.append(Worker(process))
        yield workers


def work() -> None:
    """Call the functions that come through standard input, and send what they tell through standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(what: object) -> None:
        pickle.dump(what, answers)
        answers.flush()

    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            function(tell, *arguments)
        except Exception as error:
            tell(error)
