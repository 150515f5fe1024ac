"""``write_sequences``: preprocess shards into a folder of sequences; a later run completes an earlier one."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from mmpos.data.examples import MakeExample
from mmpos.data.packing import first_fit_decreasing
from mmpos.data.preprocess.engines import run_local, run_ray
from mmpos.data.preprocess.manifest import Manifest, ShardFiles
from mmpos.data.preprocess.settings import differences
from mmpos.data.preprocess.shard_job import Counts, ShardJob, Step, Task, part_name, quarantine_of
from mmpos.data.preprocess.storage import SequenceShard
from mmpos.data.quarantine import MAX_SKIPPED, OnError
from mmpos.data.readers import SUFFIXES, Reader
from mmpos.data.stores import StorePath, store_path
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, boolean, integer, one_of
from mmpos.support.files import leftovers

__all__ = ["Engine", "Fill", "Output", "Progress", "Summary", "write_sequences"]


@dataclass(frozen=True)
class Progress:
    """Progress of the job.

    Args:
        shards: number of shards.
        done: number of finished shards, including those of earlier runs.
        reused: number of shards that earlier runs finished.
        counts: counts of the records and sequences in this run.
    """

    shards: int
    done: int
    reused: int
    counts: Counts


@dataclass(frozen=True)
class Output:
    """Finished file of preprocessed sequences.

    Args:
        source: path or name of its input.
        path: path of the file; SequenceShard reads it.
        counts: counts of its records and sequences.
        reused: whether an earlier run wrote it.
    """

    source: str
    path: StorePath
    counts: Counts
    reused: bool

    @property
    def quarantine(self) -> StorePath:
        """File of skipped records; it exists only if records were skipped."""
        return quarantine_of(self.path)


@dataclass(frozen=True)
class Fill:
    """Fill rate of the documents packed by first-fit decreasing.

    Args:
        max_tokens: maximum number of tokens in a pack.
        packs: number of packs that hold the documents that fit.
        tokens: number of tokens in these packs.
        longer: number of documents with more than max_tokens, which would have to be cut.
    """

    max_tokens: int
    packs: int
    tokens: int
    longer: int

    @property
    def rate(self) -> float:
        """Tokens divided by capacity; 0 without packs."""
        return self.tokens / (self.packs * self.max_tokens) if self.packs else 0.0


@dataclass(frozen=True)
class Summary:
    """Results of the job.

    Args:
        outputs: finished files, in the order of the inputs and of the records in each input.
        fill: fill rate of all documents of the outputs.
        seconds: duration of this run, excluding the packing for ``fill``.
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
        """Tokens that this run wrote per second."""
        tokens = sum(output.counts.tokens for output in self.outputs if not output.reused)
        return tokens / self.seconds if self.seconds else 0.0


Engine = Literal["local", "ray"]

_PAUSE = 0.1  # seconds between two reports
_SAVE = 10.0  # minimum number of seconds between two writes of the manifest
_SAVE_SHARE = 0.05  # maximum fraction of a run's time spent writing the manifest


def write_sequences(
    readers: Sequence[Reader],
    folder: str | os.PathLike[str],
    preprocess: MakeExample,
    *,
    engine: Engine = "local",
    workers: int = 1,
    on_error: OnError = "raise",
    max_skipped: float = MAX_SKIPPED,
    overwrite: bool = False,
    max_tokens: int = 8192,
    report: Callable[[Progress], None] | None = None,
) -> Summary:
    """Preprocess shards into Parquet files of sequences: one file for each 64 MiB part of a shard.

    Files are written atomically, so the same call completes a killed run. It reuses finished files, or raises an error
    if their input or the settings changed. A file that was touched or copied counts as unchanged; for inputs other than
    files, only the name and number of records are compared. The engine, number of workers and interruptions do not
    affect the files. ``sequence_shards`` opens the folder using its manifest. Another run on this machine is refused.

    Args:
        readers: readers of the shards; ``mmpos.data.shards`` creates them from paths.
        folder: path or URL of the output folder, created if missing; each file is named after its input.
        preprocess: a Preprocess, or a callable of your own; it must be picklable for several workers and for Ray.
        engine: "local" uses processes of this machine; "ray" uses the connected Ray cluster, else the one that
            RAY_ADDRESS names or that runs here, else one started for the run, as always with RAY_ADDRESS=local.
        workers: number of processes on this machine, or maximum number of Ray actors.
        on_error: "raise" stops at the first unusable record and names it; "skip" counts such records and writes them to
            a file next to the output. Configuration errors always stop the run.
        max_skipped: largest fraction of the first 1,000 records of a worker that may be skipped, 0 to 1; until a worker
            has read that many, the fraction is also checked at the end of each part. Ten records may always be skipped.
        overwrite: whether to replace outputs made from other inputs or with other settings, instead of failing.
        max_tokens: capacity of the packs for the fill rate in the summary.
        report: called with the progress about ten times a second, and at the end.

    Raises:
        InvalidInputError: an argument is invalid, an existing output was made from another input or with other
            settings, another run writes to the folder, or more records were skipped than max_skipped allows.
        RecordError, UnsupportedError: a record is invalid, or has a part that is not supported; finished files stay.
        OSError: a file cannot be read or written; errors while writing name the file.
    """
    one_of("engine", engine, ("local", "ray"))
    workers = integer("workers", workers, minimum=1)
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    boolean("overwrite", overwrite)
    job = ShardJob(preprocess, on_error, max_skipped)
    output = store_path("folder", folder)
    tasks, begin = _tasks(readers, output), time.monotonic()
    with _locked(output):
        manifest = _opened(output, job, tasks, overwrite)
        before = {task.stem: frozenset(manifest.shards[task.stem].files) for task in tasks}
        missing = [replace(task, done=before[task.stem]) for task in tasks if not manifest.shards[task.stem].complete]
        lengths = _run(engine, job, missing, workers, manifest, _Progress(report, len(tasks), len(missing)))
        if overwrite:
            manifest.remove_strays()
        seconds = time.monotonic() - begin
    outputs = tuple(_outputs(manifest, tasks, before))
    return Summary(outputs, _fill(outputs, lengths, max_tokens), seconds)


@contextmanager
def _locked(folder: StorePath) -> Iterator[None]:
    """Lock a folder on this machine for the duration of the block; the lock of a killed process ends with it.

    Folders in stores, and on file systems without locks, are not locked.

    Raises:
        InvalidInputError: another run on this machine holds the lock.
    """
    if folder.is_url:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInputError(
                f"folder: got {str(folder)!r}, to which another run is writing, want one run at a time"
            ) from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _opened(folder: StorePath, job: ShardJob, tasks: Sequence[Task], overwrite: bool) -> Manifest:
    """Open the manifest of a folder and record the finished parts of the tasks in it.

    Raises:
        InvalidInputError: existing outputs were made from other inputs or with other settings, and overwrite is False.
    """
    try:
        manifest = Manifest.load(folder) or Manifest(folder, job.settings)
    except InvalidInputError:
        if not overwrite:
            raise
        manifest = Manifest(folder, job.settings)
    own, other = {task.stem for task in tasks}, differences(manifest.settings, job.settings)
    if overwrite:
        manifest.shards = {} if other else {name: manifest.shards[name] for name in manifest.shards.keys() - own}
    else:
        manifest.resume(job, tasks)
        if other and (others := manifest.shards.keys() - own):
            path = folder / part_name(min(others), 0)
            raise InvalidInputError(f"{path}: got the output of {', and '.join(other)}; remove it, or overwrite all")
    manifest.settings = job.settings
    for task in tasks:
        manifest.shards.setdefault(task.stem, ShardFiles({}))
    return manifest


def _outputs(manifest: Manifest, tasks: Sequence[Task], before: Mapping[str, Collection[int]]) -> Iterator[Output]:
    for task in tasks:
        for part, file in sorted(manifest.shards[task.stem].files.items()):
            yield Output(task.reader.source, task.output(part), file.counts, part in before[task.stem])


class _Progress:
    """Progress of a run, reported at intervals.

    Args:
        report: called with the progress; None reports nothing.
        shards: number of shards.
        missing: number of shards that earlier runs have not finished.
    """

    def __init__(self, report: Callable[[Progress], None] | None, shards: int, missing: int) -> None:
        self._report, self._shards, self._reused = report, shards, shards - missing
        self._finished, self._running = Counts(), dict[tuple[int, int], Counts]()
        self._reported_at = -_PAUSE

    def add(self, step: Step, done: int) -> None:
        """Add a step, and report unless a report was just made; ``done`` counts the shards this run has finished."""
        if step.file is not None:
            self._finished += step.counts
            self._running.pop((step.task, step.part), None)
        else:
            self._running[step.task, step.part] = step.counts
        if time.monotonic() - self._reported_at >= _PAUSE and self._reused + done < self._shards:
            self.report(done)

    def report(self, done: int) -> None:
        """Report the progress; ``done`` counts the shards this run has finished."""
        if self._report is not None:
            counts = reduce(add, self._running.values(), self._finished)
            self._report(Progress(self._shards, self._reused + done, self._reused, counts))
        self._reported_at = time.monotonic()


def _tasks(readers: Sequence[Reader], folder: StorePath) -> list[Task]:
    if not readers:
        raise InvalidInputError("readers: got none, want at least one shard")
    if folder.is_file():
        raise InvalidInputError(f"folder: got {str(folder)!r}, which is a file, want a folder")
    tasks = [Task(number, reader, folder, _stem(reader.source)) for number, reader in enumerate(readers)]
    first: dict[str, str] = {}
    inputs = {_resolved(store_path("source", reader.source)) for reader in readers}
    for task in tasks:
        source, output = task.reader.source, task.output()
        part = re.fullmatch(r"(.+)\.part\d{5,}", task.stem, re.DOTALL)
        other = first.get(task.stem) or (first.get(part[1]) if part else None)
        if other is not None:
            raise InvalidInputError(
                f"readers: got {other!r} and {source!r}, both of which would become {str(output)!r}, want different "
                "names"
            )
        first[task.stem] = source
        if _resolved(output) in inputs:
            raise InvalidInputError(f"folder: got {str(folder)!r}, where {source!r} would overwrite an input")
    folder.make_folder()
    return tasks


def _resolved(path: StorePath) -> str:
    return str(path) if path.is_url else os.path.realpath(path)


def _stem(source: str) -> str:
    """Return the name of an input without its suffixes."""
    name = PurePosixPath(source).name
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")
    return name.removesuffix(suffix) or name


def _run(
    engine: Engine,
    job: ShardJob,
    tasks: Sequence[Task],
    workers: int,
    manifest: Manifest,
    progress: _Progress,
) -> Counter[int]:
    """Run the tasks, record finished parts, and remove temporary files left by killed runs and workers.

    Args:
        engine: see write_sequences.
        job: work to do on each task.
        tasks: tasks with missing parts.
        workers: see write_sequences.
        manifest: manifest of the folder, saved at intervals and at the end.
        progress: receives every step.

    Returns:
        number of documents of each length, keyed by length.
    """
    lengths = Counter[int]()
    numbered = {task.number: task for task in tasks}
    done, save_at = 0, time.monotonic() + _SAVE
    if tasks:
        manifest.save()
        _sweep(manifest)
        try:
            run_tasks = run_local if engine == "local" else run_ray
            with closing(run_tasks(job, tasks, workers)) as steps:
                for step in steps:
                    manifest.add(numbered[step.task], step)
                    lengths.update(step.lengths)
                    done += step.source is not None and manifest.shards[numbered[step.task].stem].complete
                    progress.add(step, done)
                    if (now := time.monotonic()) > save_at:
                        manifest.save()
                        seconds = time.monotonic() - now
                        save_at = time.monotonic() + max(_SAVE, seconds / _SAVE_SHARE)
        finally:
            _sweep(manifest)
            manifest.save()
    progress.report(done)
    return lengths


def _sweep(manifest: Manifest) -> None:
    """Remove the temporary files that killed writers left in a folder on this machine."""
    if not manifest.folder.is_url:
        for path in leftovers(Path(manifest.folder), manifest.owns):
            path.unlink(missing_ok=True)


def _fill(outputs: Sequence[Output], written: Counter[int], max_tokens: int) -> Fill:
    """Pack all documents by their lengths, which are read from the files of earlier runs and known for this run."""
    reused = [SequenceShard(output.path).lengths for output in outputs if output.reused]
    lengths: IntArray = np.concatenate([*reused, np.fromiter(written.elements(), np.int64)])
    fitting = lengths[lengths <= max_tokens]
    packs = len(first_fit_decreasing(fitting, max_tokens))
    return Fill(max_tokens, packs, int(fitting.sum()), lengths.size - fitting.size)
