"""A server in a separate process, with its log, its metrics and its exit."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from waiting import children

PATIENT = "overload_ms = 60_000\n"
"""Settings of a server that a busy machine does not lead to refuse calls."""


@dataclass(frozen=True)
class Program:
    """A server in a separate process."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    @classmethod
    def launch(cls, log: Path, *arguments: str, before: str = "") -> Self:
        """Start a server on a free port, and wait for its address; its process runs the code ``before`` first."""
        program = ["-c", f"{before}\nimport sys, mmpos_server.__main__ as program\nsys.exit(program.main())"]
        command = [sys.executable, *(program if before else ["-m", "mmpos_server"]), *arguments]
        if "--listen" not in arguments:
            command += ["--listen", "127.0.0.1:0"]
        if "--config" not in arguments:
            (settings := log.with_suffix(".toml")).write_text(PATIENT)
            command += ["--config", str(settings)]
        with log.open("w") as err:  # a file, since a pipe that nobody reads would block a server that logs
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        assert process.stdout is not None
        address = re.fullmatch(r"mmpos_server listening on (127\.0\.0\.1:\d+)\n", process.stdout.readline())
        server = cls(process, address[1] if address else "", log)
        if not address:
            server.kill()  # a later test would fail when this process is collected
        assert address, log.read_text()
        return server

    def kill(self) -> None:
        """Kill the server if it is still running, and close its output."""
        self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    @property
    def workers(self) -> list[int]:
        """Pids of the worker processes: children of the process from which all workers are forked."""
        return sorted(worker for child in children(self.process.pid) for worker in children(child))

    def lines(self) -> list[dict[str, Any]]:
        """Return the log records so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Wait for a server that was asked to stop, and return its exit code and its log."""
        out, _ = self.process.communicate(timeout=300)
        assert out == ""
        return self.process.returncode, self.lines()


Start = Callable[..., Program]
"""Start a server with these arguments; it is killed at the end of the test."""


def answer(port: int, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, str]:
    """Return the status and the text with which a page answers."""
    with closing(http.client.HTTPConnection(host, port, timeout=300)) as connection:
        connection.request(method, path)
        with connection.getresponse() as response:
            return response.status, response.read().decode()


def metrics_of(port: int) -> dict[str, float]:
    """Read the metrics page, omitting histogram buckets."""
    lines = answer(port, "/metrics")[1].splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_bucket" not in line]
    return {name: float(value) for name, value in pairs}
