"""Engines that preprocess many inputs: processes of this machine, or a pipeline of Ray Data."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import pyarrow as pa

from mmpos.data.job import Job, Step, Task
from mmpos.data.paths import is_url
from mmpos.support.extras import needed_for
from mmpos.support.interrupts import no_interrupts

__all__ = ["run_local", "run_ray"]

_PAUSE = 0.1  # seconds between two messages from a worker


def run_local(job: Job, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks on this machine, several at a time in processes, each of which has a pipe to this one.

    Raises:
        ChildProcessError: a worker was killed.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield from job.run(task)
        return
    # Workers are spawned, since a fork of a process with threads (torch, pyarrow) may hang.
    context, work = multiprocessing.get_context("spawn"), pickle.dumps(job)
    waiting, pipes, processes = [pickle.dumps(task) for task in reversed(tasks)], list[Connection](), list[Any]()
    try:
        resource_tracker.ensure_running()  # starting it inside no_interrupts would let interrupts through
        with no_interrupts():  # workers inherit the blocked signals, so only this process handles them
            for _ in range(workers):
                here, there = context.Pipe()
                processes.append(context.Process(target=_work, args=(there, work)))
                processes[-1].start()
                there.close()  # so that the pipe ends with the worker
                pipes.append(here)
        for pipe in pipes:
            with _living():
                pipe.send_bytes(waiting.pop())
        while pipes:
            for pipe in [pipe for pipe in wait(pipes) if isinstance(pipe, Connection)]:
                with _living():
                    message = pipe.recv_bytes()
                step = _raise(message)
                if step is not None:
                    yield step
                elif waiting:
                    with _living():
                        pipe.send_bytes(waiting.pop())
                else:
                    pipes.remove(pipe)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _living() -> Iterator[None]:
    """Raise ChildProcessError if the worker at the other end of a pipe has ended."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError("a worker process was killed, possibly out of memory; use fewer workers") from error


def _work(pipe: Connection, work: bytes) -> None:
    """Run the tasks that arrive; send back each finished file, the progress at intervals, and None after each task."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; the processes already use all cores
    # Skipped records are counted and written to files; warnings of many processes would clutter the terminal.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        job, reported_at = pickle.loads(work), time.monotonic()  # one job, since its SkipLimit counts across all tasks
        while True:
            for step in job.run(pickle.loads(pipe.recv_bytes())):
                if step.is_finished or time.monotonic() - reported_at > _PAUSE:
                    pipe.send_bytes(pickle.dumps(step))
                    reported_at = time.monotonic()
            pipe.send_bytes(pickle.dumps(None))
    except Exception as error:
        pipe.send_bytes(pickle.dumps(_portable(error)))


def _die_with_parent() -> None:
    """Exit this process when its parent exits."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    parent.join()
    os._exit(1)


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


def run_ray(job: Job, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks as a Ray Data pipeline: Ray reads, maps, writes, and repeats the work of a machine that dies.

    The pipeline runs in the cluster that Ray is connected to; else in the one that RAY_ADDRESS names or that runs on
    this machine; else in one started for the pipeline and stopped at the end. A row is an input, whose files are
    written whole, so repeated work writes the same bytes. Inputs and outputs must have the same paths on all machines;
    relative paths are resolved against the current folder of this process.
    """
    with needed_for("the ray engine", extra="ray"):
        import ray
        import ray.cloudpickle
        import ray.data
    if not tasks:
        return
    with _connected(ray):
        dumps: Any = ray.cloudpickle.dumps  # also pickles readers defined in a script
        rows = [{"task": dumps(replace(task, prefix=_absolute(task.prefix)))} for task in tasks]
        actors = ray.data.ActorPoolStrategy(
            min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=2
        )
        options: Any = {"batch_size": 1, "batch_format": "pyarrow", "compute": actors, "num_cpus": 1}
        steps = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            TaskRunner, fn_constructor_args=(job, os.getcwd()), **options
        )
        steps.context.target_max_block_size = 1  # each finished file is reported at once
        steps.context.enable_progress_bars = False  # the caller reports progress itself
        steps.context.print_on_execution_start = False
        for row in steps.iter_rows():
            yield _raise(row["step"])


class TaskRunner:
    """Callable that an actor runs for ``map_batches``: writes the files of an input and returns their last steps."""

    def __init__(self, job: Job, folder: str) -> None:
        self._job = job
        with suppress(OSError):  # the folder may not exist on another machine
            os.chdir(folder)

    def __call__(self, rows: pa.Table) -> Iterator[dict[str, list[bytes]]]:
        """Run the task of one row; an error is returned as a value, since Ray would wrap a raised one."""
        try:
            for step in self._job.run(pickle.loads(rows["task"][0].as_buffer())):
                if step.is_finished:
                    yield {"step": [pickle.dumps(step)]}
        except Exception as error:
            yield {"step": [pickle.dumps(_portable(error))]}


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


@contextmanager
def _connected(ray: ModuleType) -> Iterator[None]:
    """Connect to an existing or a new cluster for the duration of the block, unless already connected."""
    if ray.is_initialized():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            # Ray has replaced the handler by its own, which exits.
            signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        ray.shutdown()
