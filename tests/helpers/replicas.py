"""Servers of this project in processes of their own, each on a port of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from waiting import free_port, without_torch


@dataclass(frozen=True)
class Replica:
    """One of them."""

    process: subprocess.Popen[str]
    address: str
    metrics: str

    def counted(self, name: str) -> float:
        """The sum of a metric, over its labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextmanager
def replicas(count: int, folder: Path, *arguments: str) -> Iterator[list[Replica]]:
    """Servers while inside; those that still run are killed in the end."""
    commands = []
    for _ in range(count):
        port = free_port()
        words = [sys.executable, "-m", "mmpos_server", "--port", "0", "--metrics-port", str(port), *arguments]
        commands.append((words, port))
    processes = []
    try:
        for number, (words, _) in enumerate(commands):
            with (folder / f"{number}.log").open("w") as log:
                environment = without_torch(folder)
                processes.append(
                    subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
                )
        found = []
        for process, (_, port) in zip(processes, commands, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "listening on" in line, [path.read_text() for path in folder.glob("*.log")]
            found.append(Replica(process, line.split()[-1], f"127.0.0.1:{port}"))
        yield found
    finally:
        for process in processes:
            process.kill()
            process.communicate()
