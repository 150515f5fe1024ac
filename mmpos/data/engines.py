"""Engines that preprocess many shards: processes of this machine, or a pipeline of Ray Data."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa

from mmpos.data.job import PartJob, Step, Task
from mmpos.data.paths import is_url
from mmpos.support.extras import needed_for
from mmpos.support.interrupts import no_interrupts

__all__ = ["run_local", "run_ray"]

_PAUSE = 0.1  # seconds between two messages from a worker


def run_local(job: PartJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks on this machine, several at a time.

    Raises:
        ChildProcessError: a worker was killed.
    """
    workers = min(workers, len(tasks))
    if workers > 1:
        yield from _in_processes(job, tasks, workers)
        return
    for task in tasks:
        with closing(_steps(job, task)) as steps:
            yield from steps


def _steps(job: PartJob, task: Task) -> Generator[Step, None, None]:
    for part in task.parts():
        with closing(job.write(task, part)) as steps:
            yield from steps


def _in_processes(job: PartJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    # Workers are spawned, since a fork of a process with threads (torch, pyarrow) may hang.
    context = multiprocessing.get_context("spawn")
    steps: SimpleQueue[Step] = context.SimpleQueue()
    work, inputs = pickle.dumps(job), [pickle.dumps(task) for task in tasks]
    others, started = set(multiprocessing.active_children()), set[BaseProcess]()
    running: set[Future[bytes]] = set()
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (steps,))
    try:
        resource_tracker.ensure_running()  # starting it inside no_interrupts would let interrupts through
        with no_interrupts():  # workers inherit the blocked signal, so only this process handles Ctrl-C
            running = {pool.submit(_work, work, task) for task in inputs}
            started = set(multiprocessing.active_children()) - others
        while running:
            done, running = wait(running, _PAUSE, FIRST_COMPLETED)
            while not steps.empty():
                yield steps.get()
            for future in done:
                _raise(future.result())
    except BrokenProcessPool as error:
        raise ChildProcessError("a worker process was killed, possibly out of memory; use fewer workers") from error
    finally:
        for process in started if running else ():
            process.kill()
        pool.shutdown(cancel_futures=True)


class _Worker:
    """State of a worker process: the queue for messages to its parent."""

    steps: ClassVar[SimpleQueue[Step]]


def _begin_worker(steps: SimpleQueue[Step]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; the processes already use all cores
    # Skipped records are counted and written to files; warnings of many processes would clutter the terminal.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _Worker.steps = steps


def _work(job: bytes, task: bytes) -> bytes:
    """Run a task in a worker process; send each finished file and, at regular intervals, the progress to the parent."""
    reported_at = time.monotonic()
    try:
        with closing(_steps(_loads(job), pickle.loads(task))) as steps:
            for step in steps:
                if step.is_finished or time.monotonic() - reported_at > _PAUSE:
                    _Worker.steps.put(step)
                    reported_at = time.monotonic()
        return pickle.dumps(None)
    except Exception as error:
        return pickle.dumps(_portable(error))


def _die_with_parent() -> None:
    """Exit this process when its parent exits."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    parent.join()
    os._exit(1)


_loads = cache(pickle.loads)  # one job per process, since its SkipLimit counts across all tasks


def _portable(error: Exception) -> Exception:
    """Return a picklable error with its traceback as a note: the error itself if possible, else a RuntimeError."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


def _raise(result: bytes) -> Any:
    """Unpickle a worker's result; raise it if it is an exception."""
    value = pickle.loads(result)
    if isinstance(value, Exception):
        raise value
    return value


def run_ray(job: PartJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks as a Ray Data pipeline: Ray reads, maps, writes, and repeats the work of a machine that dies.

    The pipeline runs in the cluster that Ray is connected to; else in the one that RAY_ADDRESS names or that runs on
    this machine; else in one started for the pipeline and stopped at the end. A row is a part of a shard with its raw
    records, and becomes a file that is written whole, so repeated work writes the same bytes. Inputs and outputs must
    have the same paths on all machines; relative paths are resolved against the current folder of this process.
    """
    with needed_for("the ray engine", extra="ray"):
        import ray
        import ray.cloudpickle
        import ray.data
    if not tasks:
        return
    with _connected(ray):
        dumps: Callable[[object], bytes] = ray.cloudpickle.dumps  # also pickles readers defined in a script
        rows = [{"task": dumps(replace(task, folder=_absolute(task.folder)))} for task in tasks]
        actors = ray.data.ActorPoolStrategy(
            min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=2
        )
        options: Any = {"batch_size": 1, "batch_format": "pyarrow"}
        parts = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            partial(_read, folder=os.getcwd(), dumps=dumps),
            compute=ray.data.TaskPoolStrategy(workers),
            num_cpus=_READER_CPUS,
            **options,
        )
        steps = parts.map_batches(
            PartWriter, fn_constructor_args=(job, os.getcwd()), compute=actors, num_cpus=1 - _READER_CPUS, **options
        )
        steps.context.target_max_block_size = _BLOCK_BYTES
        steps.context.enable_progress_bars = False  # the caller reports progress itself
        steps.context.print_on_execution_start = False
        for row in steps.iter_rows():
            yield _raise(row["step"])


_BLOCK_BYTES = 2**26  # a part fills a block
_READER_CPUS = 0.25  # fraction of a CPU that a reader gets; an actor gets the rest


def _read(batch: pa.Table, folder: str, dumps: Callable[[object], bytes]) -> Iterator[pa.Table]:
    """Read a shard into one row per part; if reading fails, a row holds the error."""
    _change_folder(folder)
    for row in batch["task"]:
        task = pickle.loads(row.as_buffer())
        try:
            for part in task.parts():
                yield pa.table({"part": pa.array([dumps((task, part))], pa.large_binary())})
        except Exception as error:
            yield pa.table({"part": pa.array([dumps(_portable(error))], pa.large_binary())})


class PartWriter:
    """Callable that an actor runs for ``map_batches``: writes the file of a part and returns its last step as a row."""

    def __init__(self, job: PartJob, folder: str) -> None:
        self._job = job
        _change_folder(folder)

    def __call__(self, rows: pa.Table) -> dict[str, list[bytes]]:
        """Write the part of one row; an error is returned as a value, since Ray would wrap a raised one."""
        content = pickle.loads(rows["part"][0].as_buffer())
        if not isinstance(content, Exception):
            try:
                *_, content = self._job.write(*content)
            except Exception as error:
                content = _portable(error)
        return {"step": [pickle.dumps(content)]}


def _absolute(folder: str) -> str:
    return folder if is_url(folder) else os.path.abspath(folder)


def _change_folder(folder: str) -> None:
    with suppress(OSError):  # the folder may not exist on another machine
        os.chdir(folder)


@contextmanager
def _connected(ray: ModuleType) -> Iterator[None]:
    """Connect to an existing or a new cluster for the duration of the block, unless already connected."""
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()
