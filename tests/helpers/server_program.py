"""A server as a program: its log, its metrics, and how it ends."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@dataclass(frozen=True)
class Program:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    @property
    def port(self) -> str:
        return self.address.rpartition(":")[2]

    @property
    def workers(self) -> list[int]:
        """The processes that answer: children of the one from which all of them are forked."""
        return sorted(worker for child in _children(self.process.pid) for worker in _children(child))

    def lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Exit code and log of a server that has been told to end."""
        out, _ = self.process.communicate(timeout=60)
        assert out == ""
        return self.process.returncode, self.lines()


Start = Callable[..., Program]
"""Starts a server with these arguments; it is killed in the end."""

Refused = Callable[..., str]
"""Gives what a server with these arguments says, that does not start."""


def metrics_of(port: int) -> dict[str, float]:
    """The metrics page, without bounds of histograms."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_bucket" not in line]
    return {name: float(value) for name, value in pairs}
