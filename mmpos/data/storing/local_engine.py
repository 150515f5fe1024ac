"""The engine of one machine: shards in this process, or in several that end with it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mmpos.data.storing.shard_job import Counts, ShardJob, Task

__all__ = ["Step", "run_local"]

Step = tuple[int, Counts, bool]
"""Number of a task, what has come of its records so far, and whether that is all."""

_PAUSE = 0.1  # seconds between two looks at the workers, and between two words of a worker


@dataclass(frozen=True)
class _Channel:
    """What a worker process shares with its parent."""

    steps: Any
    stop: Any


_channels: list[_Channel] = []
"""Of a worker process: its channel, which can be inherited but not sent with a task."""


def run_local(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Do the tasks, several at a time.

    Args:
        job: what to do.
        tasks: with what.
        workers: processes; with one worker it is done in this process.

    Raises:
        ChildProcessError: a worker was killed.
    """
    workers = min(workers, len(tasks))
    return _in_processes(job, tasks, workers) if workers > 1 else _in_process(job, tasks)


def _in_process(job: ShardJob, tasks: Sequence[Task]) -> Generator[Step, None, None]:
    for number, task in enumerate(tasks):
        counts = Counts()
        with closing(job.run(task)) as steps:
            for counts in steps:
                yield number, counts, False
        yield number, counts, True


def _in_processes(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    # Spawned, since a fork of a process with threads (torch, pyarrow) may hang.
    context = multiprocessing.get_context("spawn")
    channel = _Channel(context.SimpleQueue(), context.RawValue("b", 0))
    finished: queue.SimpleQueue[Future[tuple[int, Counts]]] = queue.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (channel,))
    try:
        for number, task in enumerate(tasks):
            pool.submit(_work, job, number, task).add_done_callback(finished.put)
        left = len(tasks)
        while left:
            while not channel.steps.empty():
                yield channel.steps.get()
            try:
                number, counts = finished.get(timeout=_PAUSE).result()
            except queue.Empty:
                continue
            left -= 1
            yield number, counts, True
    except BrokenProcessPool as error:
        raise ChildProcessError("a worker process was killed (for its memory?), want fewer workers") from error
    finally:
        channel.stop.value = 1
        pool.shutdown(cancel_futures=True)


def _start_worker(channel: _Channel) -> None:
    """Set up a worker process, before its first task imports torch."""
    _channels.append(channel)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many processes as there should be threads
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and says stop
    # Skipped records are counted and written down; many processes on one terminal only disturb.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker waits for tasks for ever, also when its parent was killed: nobody would tell it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: ShardJob, number: int, task: Task) -> tuple[int, Counts]:
    """One task in a worker process; it stops between two records when it is told to."""
    channel, counts, said = _channels[0], Counts(), time.monotonic()
    with closing(job.run(task)) as steps:
        for counts in steps:
            if channel.stop.value:
                raise InterruptedError("stopped")
            if time.monotonic() - said > _PAUSE:
                channel.steps.put((number, counts, False))
                said = time.monotonic()
    return number, counts
