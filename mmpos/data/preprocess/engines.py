"""Engines that run the work on many shards: processes of this machine, or the actors of Ray Data."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from mmpos.data.preprocess.shard_job import Counts, ShardJob, Task
from mmpos.support.extras import needed_for

__all__ = ["Step", "run_local", "run_ray"]


class Step(NamedTuple):
    """Progress of one task.

    Args:
        number: of the task.
        counts: of its records so far.
        last: whether the task is done.
    """

    number: int
    counts: Counts
    last: bool


_PAUSE = 0.1  # seconds between two messages of a worker


def run_local(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks on this machine, several at a time.

    Args:
        job: the work.
        tasks: inputs and outputs.
        workers: processes; one worker is this process. Others are killed if the iterator is closed early or fails, and
            may leave temporary files.

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
                yield Step(number, counts, False)
        yield Step(number, counts, True)


def _in_processes(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    # Spawned, since a fork of a process with threads (torch, pyarrow) may hang.
    context = multiprocessing.get_context("spawn")
    steps: SimpleQueue[Step] = context.SimpleQueue()
    work, inputs = pickle.dumps(job), [pickle.dumps(task) for task in tasks]
    others, started = set(multiprocessing.active_children()), set[BaseProcess]()
    running: dict[Future[bytes], int] = {}
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (steps,))
    try:
        with _no_interrupts():  # which are for this process alone
            running = {pool.submit(_work, work, number, task): number for number, task in enumerate(inputs)}
            started = set(multiprocessing.active_children()) - others
        while running:
            done, _ = wait(running, _PAUSE, FIRST_COMPLETED)
            while not steps.empty():
                yield steps.get()
            for future in done:
                yield Step(running.pop(future), _counts(future.result()), True)
    except BrokenProcessPool as error:
        raise ChildProcessError("a worker process was killed (for its memory?), want fewer workers") from error
    finally:
        for process in started if running else ():
            process.kill()
        pool.shutdown(cancel_futures=True)


def _counts(result: bytes) -> Counts:
    """Return the counts that a worker sends, or raise its error."""
    counts: Counts | Exception = pickle.loads(result)
    if isinstance(counts, Exception):
        raise counts
    return counts


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; processes that start meanwhile ignore it for good."""
    resource_tracker.ensure_running()  # whose start would let it through
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Worker:
    """What this process tells its parent by, if it is a worker."""

    steps: ClassVar[SimpleQueue[Step]]


def _begin_worker(steps: SimpleQueue[Step]) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there should be threads; before torch is there
    # Skipped records are counted and written down; many processes on one terminal only disturb.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _Worker.steps = steps


def _work(job: bytes, number: int, task: bytes) -> bytes:
    """Run a task in a worker, which tells now and then how far it is."""
    sent_at = time.monotonic()

    def tell(counts: Counts) -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at > _PAUSE:
            _Worker.steps.put(Step(number, counts, False))
            sent_at = time.monotonic()

    return _result(job, task, tell)


def _die_with_parent() -> None:
    """End this process with its parent, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    parent.join()
    os._exit(1)


_loads = cache(pickle.loads)  # the job, whose limit counts over all tasks of a process


def _result(job: ShardJob | bytes, task: bytes, tell: Callable[[Counts], None] | None = None) -> bytes:
    """Run a task, and pickle its counts, or its error: with its traceback as a note, and as words where it must."""
    result: Counts | Exception = Counts()
    try:
        work = _loads(job) if isinstance(job, bytes) else job
        with closing(work.run(pickle.loads(task))) as steps:
            for counts in steps:
                result = counts
                if tell is not None:
                    tell(counts)
        return pickle.dumps(result)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
            result = error
        except Exception:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        result.add_note(trace)
        return pickle.dumps(result)


class ShardWorker:
    """Callable of an actor for ``map_batches``: rows of tasks become rows of their results.

    Args:
        job: the work on every task.
        folder: folder of relative paths.
    """

    def __init__(self, job: ShardJob, folder: str) -> None:
        self._job = job
        with suppress(OSError):  # on another machine it may not be there
            os.chdir(folder)

    def __call__(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[object]]:
        """Run the tasks of some rows; their errors are returned as values, since Ray would wrap them in its own."""
        return {"number": list(rows["number"]), "result": [_result(self._job, task) for task in rows["task"]]}


def run_ray(job: ShardJob, tasks: Sequence[Task], workers: int) -> Generator[Step, None, None]:
    """Run the tasks in the cluster that Ray is connected to; without one, in one that is started and stopped.

    Inputs and outputs must have the same paths on all machines. An actor that dies is replaced and its shard begun
    anew: an output is written under a name of its own and renamed in the end.

    Args:
        job: the work.
        tasks: inputs and outputs.
        workers: actors, of one processor each; where the cluster has fewer, those work that it has room for.

    Yields:
        The last step of each task, as tasks finish.
    """
    with needed_for("the ray engine", extra="ray"):
        import ray
        import ray.cloudpickle
        import ray.data
    with _connected(ray):
        dumps: Callable[[Task], bytes] = ray.cloudpickle.dumps  # also takes readers defined in a script
        rows = [
            {"number": i, "task": dumps(replace(task, output=task.output.absolute()))} for i, task in enumerate(tasks)
        ]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            ShardWorker,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows)), max_tasks_in_flight_per_actor=1),
            fn_constructor_args=(job, os.getcwd()),
            num_cpus=1,
        )
        # The caller reports progress itself.
        dataset.context.enable_progress_bars = False
        dataset.context.print_on_execution_start = False
        for row in dataset.iter_rows():
            yield Step(row["number"], _counts(row["result"]), True)


@contextmanager
def _connected(ray: ModuleType) -> Iterator[None]:
    """Connect to a cluster for the time of the block, unless this process is connected."""
    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()
