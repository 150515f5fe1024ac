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
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

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


_Pipe: TypeAlias = "Connection[object, Step | Exception]"

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
    processes: list[SpawnProcess] = []
    pipes: list[_Pipe] = []
    left = iter(enumerate(tasks))
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            process = context.Process(target=_work, args=(theirs,))
            with _no_interrupts():  # which are for this process alone
                process.start()
                processes.append(process)
            theirs.close()  # so that the pipe ends with the process
        for pipe in pipes:
            _send(pipe, job)
            _send(pipe, next(left))
        busy = set(pipes)
        while busy:
            for pipe in busy.intersection(wait(busy)):
                step = _receive(pipe)
                if isinstance(step, Exception):
                    raise step
                yield step
                if step.last:
                    task = next(left, None)
                    if task is None:
                        busy.remove(pipe)
                    else:
                        _send(pipe, task)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for pipe in pipes:
            pipe.close()  # which ends those that wait for tasks
        for process in processes:
            process.join()


def _send(pipe: _Pipe, value: object) -> None:
    with _alive():
        pipe.send(value)


def _receive(pipe: _Pipe) -> Step | Exception:
    with _alive():
        return pipe.recv()


@contextmanager
def _alive() -> Iterator[None]:
    """Raise ChildProcessError where the pipe of a worker has ended."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError("a worker process was killed (for its memory?), want fewer workers") from error


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block; processes that start meanwhile ignore it for good."""
    resource_tracker.ensure_running()  # whose start would let it through
    held: list[int] = []
    # A mask is inherited; another thread may hear what it keeps from this one.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number)) if main else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if held:
            signal.raise_signal(signal.SIGINT)


def _work(pipe: Connection[Step | Exception, Any]) -> None:
    """Run the tasks that come through a pipe, in a process of its own, until the pipe ends."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as there should be threads; before torch is there
    # Skipped records are counted and written down; many processes on one terminal only disturb.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        job = pipe.recv()
        while True:
            number, task = pipe.recv()
            _do(job, number, task, pipe)
    except Exception as error:
        with suppress(OSError):  # the parent has closed the pipe
            pipe.send(_portable(error))


def _do(job: ShardJob, number: int, task: Task, pipe: Connection[Step | Exception, Any]) -> None:
    counts, sent_at = Counts(), time.monotonic()
    with closing(job.run(task)) as steps:
        for counts in steps:
            if time.monotonic() - sent_at > _PAUSE:
                pipe.send(Step(number, counts, False))
                sent_at = time.monotonic()
    pipe.send(Step(number, counts, True))


def _die_with_parent() -> None:
    """End this process with its parent, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    parent.join()
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """Return the error with its traceback as a note; as a RuntimeError of its words where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


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
        return {"number": list(rows["number"]), "result": [self._result(task) for task in rows["task"]]}

    def _result(self, task: bytes) -> bytes:
        result: Counts | Exception = Counts()
        try:
            with closing(self._job.run(pickle.loads(task))) as steps:
                for counts in steps:
                    result = counts
        except Exception as error:
            result = error
        return pickle.dumps(result)


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
            result = pickle.loads(row["result"])
            if isinstance(result, Exception):
                raise result
            yield Step(row["number"], result, True)


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
