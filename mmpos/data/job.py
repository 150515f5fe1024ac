"""The work of a run: read the records of inputs, and write them to files that hold their settings.

Two engines run it: processes of this machine, and a pipeline of Ray Data.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from types import ModuleType
from typing import Any, NamedTuple

import pyarrow as pa

from mmpos.data import paths
from mmpos.data.examples import Location, MakeExample, RecordError, make_example
from mmpos.data.quarantine import MAX_SKIPPED, OnError, Quarantine, reason
from mmpos.data.readers import Raw, Reader
from mmpos.data.settings import describe
from mmpos.data.stage import Stage
from mmpos.data.storage import SequenceWriter
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.extras import needed_for
from mmpos.support.interrupts import no_interrupts

__all__ = ["Counts", "Job", "Output", "Step", "Task", "facts_of_input", "run_local", "run_ray", "settings_of"]

_PAUSE = 0.1  # seconds between two messages from a worker

PART_BYTES = 64 * 2**20
"""Bytes of texts and undecoded images after which a file ends; the record that reaches this size is its last."""


@dataclass(frozen=True)
class Counts:
    """Counts of records and of the sequences made from them.

    Args:
        documents: records that became sequences.
        tokens: tokens in these sequences, including patches and markers.
        images: images in these sequences.
        skipped: records that became an error instead.
        images_dropped: images left out of their documents.
    """

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0
    images_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))


@dataclass(frozen=True)
class Output:
    """File of preprocessed sequences; SequenceShard reads it.

    Args:
        source: path or name of its input.
        path: path of the file.
        read: bytes, or records, of the input that became this file.
        counts: counts of its records and sequences.
        reasons: number of skipped records and dropped images by reason.
        reused: whether an earlier run wrote it.
    """

    source: str
    path: str
    read: int
    counts: Counts
    reasons: Mapping[str, int]
    reused: bool


class Step(NamedTuple):
    """Progress of one file: what it holds so far, and whether it is finished."""

    task: int
    part: int
    output: Output
    is_finished: bool


@dataclass(frozen=True)
class Task:
    """Input, and the files to make from it."""

    number: int
    reader: Reader
    prefix: str  # path of the files without number and suffix
    facts: Mapping[str, Any]  # facts that identify the input
    begin: tuple[int, int, int] = (0, 0, 0)  # first file to write, its first record, and what was read before it

    @property
    def size(self) -> int:
        """Bytes or records of the input; 0 if that is unknown."""
        return int(self.facts.get("size") or self.facts.get("records") or 0)

    def output(self, part: int) -> str:
        """Return the path of a file."""
        return f"{self.prefix}.part{part:05}.parquet" if part else f"{self.prefix}.parquet"


def _size(value: object) -> int:
    """Return the approximate size of a record: the sum of its bytes and characters, plus eight for each number."""
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


def facts_of_input(reader: Reader) -> dict[str, object]:
    """Return the facts that identify an input: its name, and those of its file or its number of records."""
    path = paths.checked_path("source", reader.source)
    is_file = paths.kind_of(path) == "file"
    return {"source": paths.base_name(path)} | (paths.facts_of(path) if is_file else {"records": reader.count()})


class Job:
    """Work done on every input with the arguments of write_sequences; picklable if its callable is."""

    def __init__(self, preprocess: MakeExample, on_error: OnError = "raise", max_skipped: float = MAX_SKIPPED) -> None:
        self._quarantine = Quarantine(on_error, max_skipped)  # keeps no lines, since the rows hold the errors
        self.preprocess, self.on_error = Stage(preprocess).preprocess, on_error
        self.settings = settings_of(preprocess)

    def run(self, task: Task) -> Generator[Step, None, None]:
        """Write the files of an input that are left; yield a step after each record and after each file.

        The records that a file holds depend only on the records, so every run writes the same files.

        Raises:
            RecordError: a record is unusable, and on_error is "raise".
            InvalidInputError: this process skipped more records than max_skipped allows, or the input changed while it
                was read, which is noticed before the last file is finished.
        """
        part, stop, position = task.begin
        rows, records = task.reader.count(), task.reader.records(stop)
        paths.BytesRead.total = position  # other readers than those of files do not set it
        ahead, read, is_last = next(records, None), paths.BytesRead.total, False
        while not is_last:
            path, counts, reasons, size, before = task.output(part), Counts(), Counter[str](), 0, position
            with SequenceWriter(path) as writer:
                while ahead is not None and size < PART_BYTES:
                    counts += self._write(writer, reasons, *ahead)
                    stop, size = ahead[0].index + 1, size + _size(ahead[1])
                    position = task.size * stop // rows if rows else min(read, task.size)
                    ahead, read = next(records, None), paths.BytesRead.total
                    output = Output(task.reader.source, path, position - before, counts, reasons, False)
                    yield Step(task.number, part, output, False)
                if is_last := ahead is None:
                    position = task.size
                    if facts_of_input(task.reader) != task.facts:
                        got = "got a file that changed while it was read, want one that does not change"
                        raise InvalidInputError(f"{task.reader.source}: {got}")
                self._quarantine.end()
                output = Output(task.reader.source, path, position - before, counts, reasons, False)
                writer.facts = {"input": {**task.facts, "path": task.reader.source}, "settings": self.settings}
                writer.facts |= {"counts": asdict(counts), "reasons": reasons}
                writer.facts |= {"stop": stop, "read": output.read, "is_last": is_last}
            yield Step(task.number, part, output, True)
            part += 1

    def _write(self, writer: SequenceWriter, reasons: Counter[str], here: Location, raw: Raw) -> Counts:
        """Write the row of a record, and return its counts."""
        self._quarantine.read()
        try:
            example = make_example(self.preprocess, raw, here)
            writer.write(example)
        except (RecordError, LimitExceededError) as error:
            message = self._quarantine.refuse(here, raw, error)
            writer.refuse(str(here), message)
            reasons[reason(message, here)] += 1
            return Counts(skipped=1)
        dropped = example.dropped_images
        if dropped:
            self._quarantine.drop(here, raw, dropped)
            reasons.update(f"image: {reason(error, here)}" for error in dropped)
        return Counts(1, example.num_tokens, len(example.sequence.grid_thw), images_dropped=len(dropped))


def settings_of(preprocess: MakeExample) -> dict[str, object]:
    """Describe the settings that determine the outputs."""
    return describe({"preprocess": preprocess, "part_bytes": PART_BYTES})


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
    waiting, pipes, processes = [pickle.dumps(task) for task in reversed(tasks)], list[Any](), list[Any]()
    try:
        resource_tracker.ensure_running()  # starting it inside no_interrupts would let interrupts through
        with no_interrupts():  # workers inherit the blocked signals, so only this process handles them
            for _ in range(workers):
                here, there = context.Pipe()
                processes.append(context.Process(target=_work, args=(there, work)))
                processes[-1].start()
                there.close()  # so that the pipe ends with the worker
                pipes.append(here)
        yield from map(_raise, _messages(pipes, waiting))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _messages(pipes: list[Any], waiting: list[bytes]) -> Iterator[bytes]:
    """Send the tasks to the workers at the other ends of the pipes, one at a time, and yield what they send back."""
    try:
        for pipe in pipes:
            pipe.send_bytes(waiting.pop())
        while pipes:
            ready: list[Any] = wait(pipes)
            for pipe in ready:
                if message := pipe.recv_bytes():
                    yield message
                elif waiting:
                    pipe.send_bytes(waiting.pop())
                else:
                    pipes.remove(pipe)
    except (EOFError, ConnectionError) as error:
        raise ChildProcessError("a worker process was killed, possibly out of memory; use fewer workers") from error


def _work(pipe: Any, work: bytes) -> None:
    """Run the tasks that arrive; send each finished file, the progress at intervals, and nothing after each task."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; the processes already use all cores
    # Skipped records are counted and written to files; warnings of many processes would clutter the terminal.
    logging.getLogger("mmpos").addHandler(logging.NullHandler())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        # One job, since its limit on skipped records holds across all tasks.
        job, reported_at = pickle.loads(work), time.monotonic()
        while True:
            for step in job.run(pickle.loads(pipe.recv_bytes())):
                if step.is_finished or time.monotonic() - reported_at > _PAUSE:
                    pipe.send_bytes(pickle.dumps(step))
                    reported_at = time.monotonic()
            pipe.send_bytes(b"")
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
        wholes = (task.prefix if paths.is_url(task.prefix) else os.path.abspath(task.prefix) for task in tasks)
        rows = [{"task": dumps(replace(task, prefix=whole))} for task, whole in zip(tasks, wholes, strict=True)]
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
