"""Run the ranks of a distributed test in processes that share the imports of one new process."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

Run = Callable[[int, Path], None]

SECONDS = 300


def run_ranks(run: Run, ranks: int, folder: Path) -> None:
    """Call ``run(rank, folder)`` in a process for each rank, and check that all processes exit with 0.

    Importing torch takes longer than the work of a rank. Therefore one spawned process imports the module of ``run``,
    and the ranks are forked from it. They are not forked from this process, since its threads would not exist in them.
    """
    with _started(multiprocessing.get_context("spawn").Process(target=_fork, args=(run, ranks, folder))) as (process,):
        process.join(SECONDS + 60)
        assert process.exitcode == 0


def _fork(run: Run, ranks: int, folder: Path) -> None:
    """Fork the ranks, and exit with 1 if one of them fails."""
    torch.compiler.reset()  # imports torch.compile, which every rank would import in DistributedDataParallel
    context = multiprocessing.get_context("fork")
    with _started(*(context.Process(target=run, args=(rank, folder)) for rank in range(ranks))) as processes:
        for process in processes:
            process.join(SECONDS)
        codes = [process.exitcode for process in processes]
    sys.exit(f"exit codes of the ranks: {codes}" if any(codes) or None in codes else 0)


@contextmanager
def _started(*processes: BaseProcess) -> Iterator[tuple[BaseProcess, ...]]:
    """Start processes, and kill those that are still running at the end."""
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
