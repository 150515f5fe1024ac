"""``write_sequences``: preprocess inputs into a folder of sequences; the same call completes a run that was killed.

The complete files are the truth about what is done: the footer of each holds its settings, its input and its counts.
``_run.json`` holds the settings and the inputs of a run that has not yet finished a file of each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

from mmpos.data import paths
from mmpos.data.examples import MakeExample
from mmpos.data.job import Counts, Job, Output, Step, Task, facts_of_input, run_local, run_ray, settings_of
from mmpos.data.quarantine import MAX_SKIPPED, OnError, skips_images
from mmpos.data.readers import SUFFIXES, Reader, checked_readers
from mmpos.data.settings import differences
from mmpos.data.storage import SequenceShard
from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, integer, one_of
from mmpos.support.files import leftovers

__all__ = ["Counts", "Engine", "Output", "Progress", "Summary", "sequence_shards", "write_sequences"]

Engine = Literal["local", "ray"]

_RUN = "_run.json"  # engines that read a folder leave out names that begin with an underscore
_PART = re.compile(r"(.+?)(?:\.part(\d{5,}))?\.parquet", re.DOTALL)
_PAUSE = 0.1  # seconds between two reports
_THREADS = 16  # number of threads that read footers
_REPLACE = "or replace it with overwrite=True (--overwrite)"


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Args:
        read: bytes of the input files that were read, or records of other inputs, including those of earlier runs.
        total: bytes or records of all inputs; None if that is unknown.
        unit: "bytes" or "records".
        reused: what earlier runs read.
        seconds: time since the first record, or with Ray since the start.
        counts: counts of this run.
        kept: counts of the files of earlier runs.
    """

    read: int
    total: int | None
    unit: str
    reused: int
    seconds: float
    counts: Counts
    kept: Counts


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Args:
        outputs: finished files, in the order of the inputs and of the records in each input.
        seconds: time since the first record of this run, or with Ray since its start.
        others: names of the inputs of earlier runs that this run was not given; their files stay in the folder.
    """

    outputs: tuple[Output, ...]
    seconds: float
    others: tuple[str, ...] = ()

    @property
    def counts(self) -> Counts:
        """Counts of all outputs."""
        return _counts(self.outputs)

    @property
    def reasons(self) -> Counter[str]:
        """Number of skipped records and dropped images by reason."""
        return sum((Counter(output.reasons) for output in self.outputs), Counter())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that this run wrote per second."""
        written = [output for output in self.outputs if not output.reused]
        return _counts(written).tokens / self.seconds if self.seconds else 0.0


def _counts(outputs: Iterable[Output]) -> Counts:
    return sum((output.counts for output in outputs), Counts())


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
    report: Callable[[Progress], None] | None = None,
) -> Summary:
    """Preprocess inputs into Parquet files of sequences: one file for each 64 MiB of an input.

    Files are written whole, so the same call completes a killed run: it keeps finished files, or raises an error before
    it writes anything if their input or the settings differ. Further inputs are added. Engine, workers and
    interruptions do not affect the files.

    Args:
        readers: readers of the inputs; ``mmpos.data.shards`` creates them from paths.
        folder: path or URL of the output folder, created if missing; each file is named after its input.
        preprocess: a Preprocess, or a callable of your own; it must be picklable for several workers and for Ray.
        engine: "local" uses processes of this machine; "ray" runs a pipeline of Ray Data in the connected cluster, else
            in the one that RAY_ADDRESS names or that runs here, else in one started for the run.
        workers: number of processes on this machine, or maximum number of Ray actors.
        on_error: "raise" stops at the first unusable record and names it; "skip" counts such records and writes a row
            with the error instead. Configuration errors always stop the run.
        max_skipped: largest fraction of the first 1,000 records of a worker that may be skipped, 0 to 1; until a worker
            has read that many, the fraction is also checked at the end of each file. Ten records may always be skipped.
        overwrite: whether to replace outputs of these inputs, and all outputs with other settings, instead of failing.
        report: called with the progress about ten times a second, and at the end.

    Raises:
        InvalidInputError: an argument is invalid, an existing output was made from another input or with other
            settings, another run writes to the folder, or more records were skipped than max_skipped allows.
        RecordError, UnsupportedError: a record is invalid, or has a part that is not supported; finished files stay.
        OSError: a file cannot be read or written; errors while writing name the file.
    """
    one_of("engine", engine, ("local", "ray"))
    workers = integer("workers", workers, minimum=1)
    boolean("overwrite", overwrite)
    job, where = Job(preprocess, on_error, max_skipped), paths.checked_path("folder", folder)
    tasks = _tasks(readers, where)
    with _locked(where):
        unfinished, kept, others = _resumed(job, tasks, where, overwrite)
        # Ray reports only finished files, so a run on Ray begins before its first one.
        begun, start = (0.0, run_local) if engine == "local" else (time.monotonic(), run_ray)
        progress = _Progress(report, tasks, kept, begun)
        try:
            _sweep(where)
            with closing(start(job, unfinished, workers)) as steps:
                for step in steps:
                    progress.add(step)
        finally:
            _sweep(where)
            run = _read_run(where)
            if run is None or run["inputs"].keys().isdisjoint(_files(where)):
                paths.remove(paths.join(where, _RUN))  # a run that failed without a file does not own the folder
        progress.report(is_finished=True)
    return Summary(progress.outputs, progress.seconds, others)


def _tasks(readers: Sequence[Reader], folder: str) -> list[Task]:
    if not (readers := checked_readers("readers", readers)):
        raise InvalidInputError("readers: got none, want at least one shard")
    if paths.kind_of(folder) == "file":
        raise InvalidInputError(f"folder: got {folder!r}, which is a file, want a folder")
    inputs = {_resolved(paths.checked_path("source", reader.source)) for reader in readers}
    first: dict[str, str] = {}
    for reader in readers:
        source, name = reader.source, paths.base_name(reader.source)
        suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")
        prefix = paths.join(folder, name.removesuffix(suffix) or name)
        if re.search(r"\.part\d{5,}$", prefix):
            want = "want a name that is not that of a further file of another input"
            raise InvalidInputError(f"readers: got {source!r}, which would become '{prefix}.parquet', {want}")
        if prefix in first:
            got = f"{first[prefix]!r} and {source!r}, both of which would become '{prefix}.parquet'"
            raise InvalidInputError(f"readers: got {got}, want different names")
        if _resolved(f"{prefix}.parquet") in inputs:
            raise InvalidInputError(f"folder: got {folder!r}, where '{prefix}.parquet' would overwrite an input")
        first[prefix] = source
    with ThreadPool(min(_THREADS, len(readers))) as threads:
        facts = threads.map(facts_of_input, readers)
    return [Task(i, *task) for i, task in enumerate(zip(readers, first, facts, strict=True))]


def _resolved(path: str) -> str:
    return path if paths.is_url(path) else os.path.realpath(path)


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Make and lock a folder on this machine until the block or the process ends; a new one that stays empty goes."""
    is_new = not os.path.exists(folder)
    paths.make_folder(folder)
    if paths.is_url(folder):
        yield
        return
    with ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            got = f"{folder!r}, to which another run is writing"
            raise InvalidInputError(f"folder: got {got}, want one run at a time") from None
        except OSError:  # the file system has no locks
            pass
        try:
            yield
        finally:
            if is_new:
                with suppress(OSError):  # it is not empty
                    os.rmdir(folder)


def _sweep(folder: str) -> None:
    """Remove what killed writers left in a folder."""
    if paths.is_url(folder):
        paths.abort_uploads(folder, _is_ours)
        return
    for path in leftovers(Path(folder), _is_ours):
        path.unlink(missing_ok=True)


def _is_ours(name: str) -> bool:
    return name == _RUN or (name.endswith(".parquet") and "/" not in name)


def _read_run(folder: str) -> dict[str, dict[str, Any]] | None:
    """Read what a run writes first: its settings, and the facts of its inputs and earlier ones by stem of the files."""
    path = paths.join(folder, _RUN)
    try:
        with paths.open_file(path) as file:
            stored = json.load(file)
        return {name: dict(stored[name]) for name in ("settings", "inputs")}
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInputError(f"{path}: got an invalid file ({error!r}), want the file of a run") from error


def _files(folder: str) -> dict[str, dict[int, str]]:
    """List the Parquet files in a folder by stem of the input and part number."""
    files: dict[str, dict[int, str]] = {}
    for path in paths.matches("*.parquet", folder):
        if name := _PART.fullmatch(paths.base_name(path)):
            files.setdefault(name[1], {})[int(name[2] or 0)] = path
    return files


def _resumed(
    job: Job, tasks: Sequence[Task], folder: str, overwrite: bool
) -> tuple[list[Task], list[Step], tuple[str, ...]]:
    """Record the run in the folder; return the tasks left to do, the finished files and the inputs not given.

    Raises:
        InvalidInputError: an output was made from another input or with other settings, and overwrite is False; nothing
            was written.
    """
    run, kept, left = None, list[Step](), list[Task]()
    with suppress(InvalidInputError) if overwrite else nullcontext():
        run = _read_run(folder)
    run = run or {"settings": dict(job.settings), "inputs": {}}
    inputs = {paths.base_name(task.prefix): task.facts for task in tasks}
    others = {stem: facts for stem, facts in run["inputs"].items() if stem not in inputs}
    files, other = _files(folder), differences(run["settings"], job.settings)
    if overwrite:
        for stem in [*inputs, *(others if other else ())]:
            for path in files.pop(stem, {}).values():
                paths.remove(path)
        others = {} if other else others
    elif other:
        path = paths.join(folder, _RUN)
        raise InvalidInputError(f"{path}: got a run with {', and '.join(other)}; use the same settings, {_REPLACE}")
    with ThreadPool(min(_THREADS, len(tasks))) as threads:
        for task, steps in threads.imap(partial(_left, job, files), tasks):  # in order: the first error is raised
            left += [] if task is None else [task]
            kept += steps
    stored = {"settings": job.settings, "inputs": others | inputs}
    with paths.write_file(paths.join(folder, _RUN)) as file:
        file.write((json.dumps(stored, indent=1) + "\n").encode())
    return left, kept, tuple(facts["source"] for facts in others.values())


def _left(job: Job, files: Mapping[str, Mapping[int, str]], task: Task) -> tuple[Task | None, list[Step]]:
    """Return what is left of a task, or None, and its finished files, whose footers are checked."""
    steps, begin, is_whole = list[Step](), (0, 0, 0), False
    parts = files.get(paths.base_name(task.prefix), {})
    for number, path in sorted(parts.items()):
        facts = SequenceShard(path).facts
        if not {"input", "settings", "counts", "stop"} <= facts.keys():
            raise InvalidInputError(f"{path}: got a file of another program, want none; remove it, {_REPLACE}")
        made_from = facts["input"].get("path", task.reader.source)
        changed = [f"{name} {facts['input'].get(name)}, want {value}" for name, value in task.facts.items()
                   if facts["input"].get(name) != value]  # fmt: skip
        if changed and _resolved(made_from) != _resolved(task.reader.source):
            got = f"the output of {made_from}, want that of {task.reader.source}"
            raise InvalidInputError(f"{path}: got {got}; use another folder, or another name for the input")
        if other := changed or differences(facts["settings"], job.settings):
            got = f"the output of {task.reader.source} with {', and '.join(other)}"
            raise InvalidInputError(f"{path}: got {got}; remove it to write it again, {_REPLACE}")
        counts = Counts(**facts["counts"])
        if counts.skipped and job.on_error == "raise" and not skips_images(job.preprocess):
            raise InvalidInputError(f"{path}: got {counts.skipped} skipped records, want none, {_REPLACE}")
        if number == begin[0]:  # a file after a missing one is written again
            output = Output(task.reader.source, path, facts["read"], counts, facts["reasons"], True)
            steps.append(Step(task.number, number, output, True))
            is_whole, begin = facts["is_last"], (number + 1, facts["stop"], begin[2] + facts["read"])
    return None if is_whole else replace(task, begin=begin), steps


class _Progress:
    """Files of a run, finished or not; reported at intervals."""

    def __init__(
        self, report: Callable[[Progress], None] | None, tasks: Sequence[Task], kept: Sequence[Step], begun: float
    ) -> None:
        self._report = report
        units = {"bytes" if "size" in task.facts else "records" for task in tasks}
        is_known = len(units) == 1 and all(task.size or "size" in task.facts for task in tasks)
        self._total = sum(task.size for task in tasks) if is_known else None
        self._unit = units.pop() if is_known else "records"
        self._kept = _counts([step.output for step in kept])
        self._reused = sum(step.output.read for step in kept)
        self._finished = {(step.task, step.part): step.output for step in kept}
        self._open = dict[tuple[int, int], Output]()  # files that are being written
        self._read, self._counts = 0, Counts()  # of finished files of this run
        self._begun, self._reported_at = begun, 0.0  # 0 until the first step

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Files of earlier runs and of this one, in order."""
        return tuple(self._finished[key] for key in sorted(self._finished))

    @property
    def seconds(self) -> float:
        """Time since the run began; 0 before it."""
        return time.monotonic() - self._begun if self._begun else 0.0

    def add(self, step: Step) -> None:
        """Add a step, and report unless a report was just made."""
        key, output, now = (step.task, step.part), step.output, time.monotonic()
        self._begun = self._begun or now
        self._open[key] = output
        if step.is_finished:
            self._finished[key] = self._open.pop(key)
            self._read, self._counts = self._read + output.read, self._counts + output.counts
        if now - self._reported_at >= _PAUSE:
            self.report()
            self._reported_at = now

    def report(self, is_finished: bool = False) -> None:
        """Report the progress; everything is read only at the end, which is reported once."""
        if self._report is None:
            return
        opened = self._open.values()
        read, counts = sum((output.read for output in opened), self._read), self._counts + _counts(opened)
        read = self._reused + read if self._total is not None else counts.documents + counts.skipped
        if is_finished or read != self._total:
            self._report(Progress(read, self._total, self._unit, self._reused, self.seconds, counts, self._kept))


def sequence_shards(folder: str | os.PathLike[str], preprocess: MakeExample | None = None) -> list[SequenceShard]:
    """Open a folder of sequences written by ``write_sequences``, by ``mmpos preprocess`` or by another engine.

    Args:
        folder: path or URL.
        preprocess: callable that the sequences must have been made with; None accepts any, and also folders of other
            engines, whose files have no settings.

    Returns:
        the shards, sorted by the name of their input and, within an input, by the order of its records.

    Raises:
        InvalidInputError: the folder is missing, is a file or has no sequences, the run did not finish, a file is
            missing, or settings differ.
    """
    where = paths.checked_path("folder", folder)
    if (kind := paths.kind_of(where)) != "folder":
        want = "an existing folder" if kind is None else "a folder; SequenceShard opens a file"
        raise InvalidInputError(f"folder: got {where!r}, want {want}")
    run, path, files = _read_run(where), paths.join(where, _RUN), _files(where)
    if run is None:
        if preprocess is not None or not files:
            raise InvalidInputError(f"folder: got {where!r} without {_RUN}, want a folder written by mmpos preprocess")
        return [SequenceShard(file) for _, parts in sorted(files.items()) for _, file in sorted(parts.items())]
    if preprocess is not None and (other := differences(run["settings"], settings_of(preprocess))):
        raise InvalidInputError(f"{path}: settings: got {', and '.join(other)}")
    inputs = {stem: [SequenceShard(file) for _, file in sorted(files.get(stem, {}).items())] for stem in run["inputs"]}
    shards = [shard for stem in sorted(inputs) for shard in inputs[stem]]
    with ThreadPool(_THREADS) as threads:
        facts = dict(zip(shards, threads.map(lambda shard: shard.facts, shards), strict=True))
    for shard in shards:
        if other := differences(facts[shard].get("settings", {}), run["settings"]):
            raise InvalidInputError(f"{shard.path}: settings: got {', and '.join(other)} as {path} says")
    for stem, parts in sorted(inputs.items()):
        if not parts or not facts[parts[-1]]["is_last"] or len(parts) != max(files[stem]) + 1:
            got = f"{len(parts)} of the files of {run['inputs'][stem]['source']}"
            want = "all; run mmpos preprocess again with this input, or remove it from the inputs in this file"
            raise InvalidInputError(f"{path}: got {got}, want {want}")
    return shards
