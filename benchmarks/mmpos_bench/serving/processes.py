"""Servers in processes of their own, whose processor time the kernel's clock tells."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from mmpos.errors import ServiceError

__all__ = ["ServerProcess", "echo", "service", "started"]

# The server, kept from tuning malloc.
_UNTUNED = (
    "from mmpos_server import __main__, launch; launch.keep_large_blocks = bool; raise SystemExit(__main__.main())"
)


@dataclass(frozen=True)
class ServerProcess:
    """A server that listens.

    Args:
        pid: of its process.
        address: HOST:PORT.
    """

    pid: int
    address: str

    @property
    def cpu(self) -> float:
        """Seconds of processor time, user and system, of all its threads so far: /proc/PID/stat, but not in ticks."""
        return time.clock_gettime((~self.pid << 3) | 2)  # clock_getcpuclockid(3)


def service(malloc: str, *options: str) -> list[str]:
    """The command line of our server, with malloc as it sets it or as the C library does."""
    words = ["-m", "mmpos_server"] if malloc == "tuned" else ["-c", _UNTUNED]
    return [sys.executable, *words, "--port", "0", *options]


def echo(malloc: str) -> list[str]:
    """The command line of the echo server."""
    return [sys.executable, "-m", "mmpos_bench.serving.echo", "--malloc", malloc]


@contextmanager
def started(*commands: list[str]) -> Iterator[list[ServerProcess]]:
    """Servers while inside, all started at once; the first line of each ends in HOST:PORT.

    Raises:
        ServiceError: one does not start.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(_running(command)) for command in commands]
        yield [_listening(process, command) for process, command in zip(running, commands, strict=True)]


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to end on leaving; its log, a line for every call, goes nowhere."""
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
