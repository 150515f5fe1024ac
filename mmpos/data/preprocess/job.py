"""``write_sequences``: many shards into a folder of ready sequences, which a later run completes."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from multiprocessing.pool import ThreadPool
from operator import add
from pathlib import Path
from typing import Literal

import numpy as np
from filelock import FileLock, Timeout

from mmpos.data.examples import MakeExample
from mmpos.data.packing import first_fit_decreasing
from mmpos.data.preprocess.engines import run_local, run_ray
from mmpos.data.preprocess.shard_job import Counts, ShardJob, Task, quarantine_of
from mmpos.data.preprocess.storage import SequenceShard
from mmpos.data.quarantine import MAX_SKIPPED, OnError
from mmpos.data.readers import SUFFIXES, Reader
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, boolean, integer, one_of
from mmpos.support.files import leftovers, local_path

__all__ = ["Engine", "Fill", "Output", "Progress", "Summary", "locked", "write_sequences"]

_LOCK = ".mmpos.lock"


@dataclass(frozen=True)
class Progress:
    """Progress of the job.

    Args:
        shards: in all.
        done: shards that are finished, those of earlier runs included.
        reused: those of earlier runs.
        counts: records of this run, and their results.
    """

    shards: int
    done: int
    reused: int
    counts: Counts


@dataclass(frozen=True)
class Output:
    """Finished shard.

    Args:
        source: path or name of its input.
        path: the file of ready sequences; SequenceShard reads it.
        counts: its records, and their results.
        reused: whether an earlier run had made it.
    """

    source: str
    path: Path
    counts: Counts
    reused: bool

    @property
    def quarantine(self) -> Path:
        """File of the records that were skipped; it exists if there are any."""
        return quarantine_of(self.path)


@dataclass(frozen=True)
class Fill:
    """Fill rate that packing by first-fit decreasing would reach.

    Args:
        max_tokens: most tokens in a pack.
        packs: packs of the documents that fit in one.
        tokens: tokens in them.
        longer: documents that do not fit, and would have to be cut.
    """

    max_tokens: int
    packs: int
    tokens: int
    longer: int

    @property
    def rate(self) -> float:
        """Tokens over capacity; 0 without packs."""
        return self.tokens / (self.packs * self.max_tokens) if self.packs else 0.0


@dataclass(frozen=True)
class Summary:
    """Results of the job.

    Args:
        outputs: in the order of the inputs.
        fill: of all their documents.
        seconds: duration of this run, without the packing.
    """

    outputs: tuple[Output, ...]
    fill: Fill
    seconds: float

    @property
    def counts(self) -> Counts:
        """Counts of all outputs."""
        return reduce(add, (output.counts for output in self.outputs), Counts())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this run over its seconds."""
        tokens = sum(output.counts.tokens for output in self.outputs if not output.reused)
        return tokens / self.seconds if self.seconds else 0.0


Engine = Literal["local", "ray"]

_PAUSE = 0.1  # seconds between two reports


def write_sequences(
    readers: Sequence[Reader],
    folder: Path,
    preprocess: MakeExample,
    *,
    engine: Engine = "local",
    workers: int = 1,
    on_error: OnError = "raise",
    max_skipped: float = MAX_SKIPPED,
    patches: bool = True,
    overwrite: bool = False,
    max_tokens: int = 8192,
    report: Callable[[Progress], None] | None = None,
) -> Summary:
    """Preprocess all shards into files of ready sequences, one Parquet file for each.

    A file is there wholly or not at all, so the same call completes a run that was killed: finished shards are not done
    again, unless its input or the settings changed, which is an error. A file of input that was touched or
    copied is the same if its content is. Of other inputs only name and number of records are known. The files do not
    depend on the engine, on the workers, or on interruptions. One run at a time writes to a folder, which it locks.

    Args:
        readers: the input; mmpos.data.readers.shards makes them from paths.
        folder: folder of the files, each named after its input; created if it is missing.
        preprocess: a Preprocess, or a callable of your own; it must pickle for several workers and for Ray.
        engine: "local" for processes of this machine, "ray" for the cluster that Ray is connected to, or a local one.
        workers: shards that are worked on at the same time.
        on_error: "raise" stops at the first record that cannot be used and says where it is; "skip" counts such records
            and writes them to a file beside the output. A mistake of the set-up always stops.
        max_skipped: largest share of the first 1,000 records of a worker that may be skipped, 0 to 1; also judged at
            the end of each shard before. Ten may always be skipped.
        patches: whether pixels are stored.
        overwrite: whether outputs of other inputs or settings are replaced; without it they are an error.
        max_tokens: of the packs whose fill rate is in the summary.
        report: called with the progress about ten times a second, and at the end.

    Raises:
        InvalidInputError: an argument is wrong, outputs are there of another input or of other settings, another run
            writes to the folder, or more records were skipped than max_skipped.
        RecordError, UnsupportedError: a record, or a part for this builder, cannot be used; finished shards stay.
        OSError: a file cannot be read or written; for one that cannot be written the error names it.
    """
    one_of("engine", engine, ("local", "ray"))
    workers = integer("workers", workers, minimum=1)
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    overwrite = boolean("overwrite", overwrite)
    folder = local_path("folder", folder)
    job = ShardJob(preprocess, on_error, patches, max_skipped)
    tasks = _tasks(readers, folder)
    begin = time.monotonic()
    with locked(folder):
        reused = {} if overwrite else _finished(job, tasks, workers)
        missing = [i for i in range(len(tasks)) if i not in reused]
        tell = _teller(report, len(tasks), len(reused))
        made = _make(engine, job, [tasks[i] for i in missing], workers, tell)
        tell(len(made), made)
        seconds = time.monotonic() - begin
        counts = reused | dict(zip(missing, made, strict=True))
        outputs = tuple(Output(task.reader.source, task.output, counts[i], i in reused) for i, task in enumerate(tasks))
        return Summary(outputs, _fill(tasks, max_tokens), seconds)


def _teller(
    report: Callable[[Progress], None] | None, shards: int, reused: int
) -> Callable[[int, Iterable[Counts]], None]:
    """Make the function that reports how many tasks are done, and the counts of all that have begun."""

    def tell(done: int, counts: Iterable[Counts]) -> None:
        if report is not None:
            report(Progress(shards, reused + done, reused, reduce(add, counts, Counts())))

    return tell


def _tasks(readers: Sequence[Reader], folder: Path) -> list[Task]:
    if not readers:
        raise InvalidInputError("readers: got none, want at least one shard")
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"folder: got {str(folder)!r}, which is a file, want a folder")
    tasks = [Task(reader, folder / f"{_stem(reader.source)}.parquet") for reader in readers]
    first: dict[Path, str] = {}
    inputs = {Path(reader.source).resolve() for reader in readers}
    for task in tasks:
        source = task.reader.source
        if task.output in first:
            raise InvalidInputError(
                f"readers: got {first[task.output]!r} and {source!r}, which would both become {str(task.output)!r}, "
                "want different names"
            )
        first[task.output] = source
        if task.output.resolve() in inputs:
            raise InvalidInputError(f"folder: got {str(folder)!r}, where {source!r} would overwrite an input")
    folder.mkdir(parents=True, exist_ok=True)
    return tasks


def _stem(source: str) -> str:
    """Return the name of an input without its suffixes."""
    name = Path(source).name
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")
    return name.removesuffix(suffix) or name


def _finished(job: ShardJob, tasks: Sequence[Task], workers: int) -> dict[int, Counts]:
    with ThreadPool(min(workers, len(tasks))) as threads:  # inputs that were touched or copied are read
        numbered = enumerate(threads.imap(job.finished, tasks))
        return {i: counts for i, counts in numbered if counts is not None}


def _make(
    engine: Engine, job: ShardJob, tasks: Sequence[Task], workers: int, tell: Callable[[int, Iterable[Counts]], None]
) -> list[Counts]:
    """Run the tasks, and remove the temporary files of runs and workers that were killed.

    Args:
        engine: see write_sequences, as for the workers.
        job: the work.
        tasks: what is missing.
        workers: see write_sequences.
        tell: is given, now and then, the number of tasks that are done, and the counts of all that have begun.
    """
    if not tasks:
        return []
    names = {path.name for task in tasks for path in (task.output, quarantine_of(task.output))}
    made: dict[int, Counts] = {}
    done, told_at = 0, -_PAUSE
    try:
        _sweep(tasks[0].output.parent, names)
        run = run_local if engine == "local" else run_ray
        with closing(run(job, tasks, workers)) as steps:
            for step in steps:
                made[step.number] = step.counts
                done += step.last
                if time.monotonic() - told_at >= _PAUSE and done < len(tasks):
                    tell(done, made.values())
                    told_at = time.monotonic()
    finally:
        _sweep(tasks[0].output.parent, names)
    return [made[number] for number in range(len(tasks))]


def _sweep(folder: Path, names: Collection[str]) -> None:
    for path in leftovers(folder, names):
        path.unlink(missing_ok=True)


def _fill(tasks: Sequence[Task], max_tokens: int) -> Fill:
    lengths: IntArray = np.concatenate([SequenceShard(task.output).lengths for task in tasks])
    fitting = lengths[lengths <= max_tokens]
    packs = len(first_fit_decreasing(fitting, max_tokens))
    return Fill(max_tokens, packs, int(fitting.sum()), lengths.size - fitting.size)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for the time of the block, so that no other run writes to it.

    A killed holder locks nothing. Over NFS the lock holds among all machines, unless it is mounted with local_lock;
    some other network filesystems lock one machine only, or have no locks, which gives a RuntimeWarning.

    Raises:
        InvalidInputError: another run has the lock, in this process or any other.
        OSError: the file of the lock cannot be made; the error names it.
    """
    lock = FileLock(folder / _LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise InvalidInputError(
            f"folder: got {str(folder)!r}, to which another run is writing, want one run at a time"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        message = f"{folder} cannot be locked ({error.strerror}): see that no other run writes to it"
        warnings.warn(message, RuntimeWarning, stacklevel=4)  # the caller of write_sequences
    try:
        yield
    finally:
        lock.release()
