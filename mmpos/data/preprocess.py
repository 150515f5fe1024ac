"""``write_sequences``: preprocess shards into a folder of sequences; the same call completes a run that was killed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import reduce
from multiprocessing.pool import ThreadPool
from operator import add
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from mmpos.data import paths
from mmpos.data.engines import run_local, run_ray
from mmpos.data.examples import MakeExample
from mmpos.data.job import Counts, Output, PartJob, Step, Task, facts_of_input, settings_of
from mmpos.data.quarantine import MAX_SKIPPED, OnError, skips_images
from mmpos.data.readers import SUFFIXES, Reader
from mmpos.data.settings import differences
from mmpos.data.storage import SequenceShard
from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, integer, one_of
from mmpos.support.files import leftovers

__all__ = ["Counts", "Engine", "Output", "Progress", "Summary", "sequence_shards", "write_sequences"]

Engine = Literal["local", "ray"]

_RUN = "_run.json"  # engines that read a folder leave out names that begin with an underscore
_PART = re.compile(r"(.+)\.part(\d{5,})", re.DOTALL)
_PAUSE = 0.1  # seconds between two reports
_THREADS = 16  # number of threads that read footers


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Args:
        read: bytes of the input files that were read, or records of other inputs, including those of earlier runs.
        total: bytes or records of all inputs; None if that is unknown.
        unit: "bytes" or "records".
        reused: what earlier runs read.
        seconds: time since the first record.
        counts: counts of this run.
        reasons: number of skipped records and dropped images by reason.
    """

    read: int
    total: int | None
    unit: str
    reused: int
    seconds: float
    counts: Counts
    reasons: Mapping[str, int]


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Args:
        outputs: finished files, in the order of the inputs and of the records in each input.
        seconds: duration of this run.
    """

    outputs: tuple[Output, ...]
    seconds: float

    @property
    def counts(self) -> Counts:
        """Counts of all outputs."""
        return reduce(add, (output.counts for output in self.outputs), Counts())

    @property
    def reasons(self) -> Counter[str]:
        """Number of skipped records and dropped images by reason."""
        return sum((Counter(output.reasons) for output in self.outputs), Counter())

    @property
    def tokens_per_second(self) -> float:
        """Tokens that this run wrote per second."""
        tokens = sum(output.counts.tokens for output in self.outputs if not output.reused)
        return tokens / self.seconds if self.seconds else 0.0


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
    """Preprocess shards into Parquet files of sequences: one file for each 64 MiB of a shard.

    Files are written whole, so the same call completes a killed run: it keeps finished files, or raises an error before
    it writes anything if their input or the settings differ. Engine, workers and interruptions do not affect the files.

    Args:
        readers: readers of the shards; ``mmpos.data.shards`` creates them from paths.
        folder: path or URL of the output folder, created if missing; each file is named after its input.
        preprocess: a Preprocess, or a callable of your own; it must be picklable for several workers and for Ray.
        engine: "local" uses processes of this machine; "ray" runs a pipeline of Ray Data in the connected cluster, else
            in the one that RAY_ADDRESS names or that runs here, else in one started for the run.
        workers: number of processes on this machine, or maximum number of Ray actors.
        on_error: "raise" stops at the first unusable record and names it; "skip" counts such records and writes a row
            with the error instead. Configuration errors always stop the run.
        max_skipped: largest fraction of the first 1,000 records of a worker that may be skipped, 0 to 1; until a worker
            has read that many, the fraction is also checked at the end of each file. Ten records may always be skipped.
        overwrite: whether to replace outputs made from other inputs or with other settings, instead of failing.
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
    job, begun = PartJob(preprocess, on_error, max_skipped), time.monotonic()
    where = paths.checked_path("folder", folder)
    tasks = _tasks(readers, where)
    paths.make_folder(where)
    with _locked(where):
        tasks = _resumed(job, tasks, where, overwrite)
        progress = _Progress(report, tasks)
        try:
            _sweep(where)
            unfinished = [task for task in tasks if task.begin is not None]
            run = run_local if engine == "local" else run_ray
            with closing(run(job, unfinished, workers)) as steps:
                for step in steps:
                    progress.add(step)
        finally:
            _release(where)
        progress.report()
    return Summary(tuple(progress.outputs()), time.monotonic() - begun)


def _tasks(readers: Sequence[Reader], folder: str) -> list[Task]:
    if not readers:
        raise InvalidInputError("readers: got none, want at least one shard")
    if paths.kind_of(folder) == "file":
        raise InvalidInputError(f"folder: got {folder!r}, which is a file, want a folder")
    with ThreadPool(min(_THREADS, len(readers))) as threads:
        facts = list(threads.imap(facts_of_input, readers))
    tasks = [Task(i, reader, folder, _stem(reader.source), facts[i]) for i, reader in enumerate(readers)]
    first: dict[str, str] = {}
    inputs = {_resolved(paths.checked_path("source", reader.source)) for reader in readers}
    for task in tasks:
        source, output, part = task.reader.source, task.output(), _PART.fullmatch(task.stem)
        other = first.get(task.stem) or (first.get(part[1]) if part else None)
        if other is not None:
            got = f"{other!r} and {source!r}, both of which would become {output!r}"
            raise InvalidInputError(f"readers: got {got}, want different names")
        first[task.stem] = source
        if _resolved(output) in inputs:
            raise InvalidInputError(f"folder: got {folder!r}, where {output!r} would overwrite an input")
    return tasks


def _resolved(path: str) -> str:
    return path if paths.is_url(path) else os.path.realpath(path)


def _stem(source: str) -> str:
    """Return the name of an input without its suffixes."""
    name = PurePosixPath(source).name
    suffix = max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")
    return name.removesuffix(suffix) or name


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock a folder on this machine for the duration of the block; the lock of a killed process ends with it."""
    if paths.is_url(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            got = f"{folder!r}, to which another run is writing"
            raise InvalidInputError(f"folder: got {got}, want one run at a time") from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: str) -> None:
    """Remove what killed writers left in a folder."""
    if paths.is_url(folder):
        paths.abort_uploads(folder, _is_ours)
        return
    for path in leftovers(Path(folder), _is_ours):
        path.unlink(missing_ok=True)


def _release(folder: str) -> None:
    """Sweep a folder, and give it up if the run has no output, so that a failed run does not own it."""
    _sweep(folder)
    inputs = (_read_run(folder) or _Run({}, {})).inputs
    if inputs.keys().isdisjoint(_files(folder, list(inputs))):
        paths.remove(paths.join(folder, _RUN))


def _is_ours(name: str) -> bool:
    return name == _RUN or (name.endswith(".parquet") and "/" not in name)


class _Run(NamedTuple):
    """Content of the file that a run writes first: its settings, and the facts of each input by stem."""

    settings: Mapping[str, object]
    inputs: dict[str, Mapping[str, object]]


def _read_run(folder: str) -> _Run | None:
    path = paths.join(folder, _RUN)
    try:
        with paths.open_file(path) as file:
            stored = json.load(file)
        return _Run(dict(stored["settings"]), dict(stored["inputs"]))
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidInputError(f"{path}: got an invalid file ({error!r}), want the file of a run") from error


def _resumed(job: PartJob, tasks: Sequence[Task], folder: str, overwrite: bool) -> list[Task]:
    """Find the finished outputs of the tasks, then record the run in the folder.

    Raises:
        InvalidInputError: an output was made from another input or with other settings, and overwrite is False; nothing
            was written.
    """
    run, other = None, list[str]()
    with suppress(InvalidInputError) if overwrite else nullcontext():
        run = _read_run(folder)
    others = {} if run is None else {stem: run.inputs[stem] for stem in run.inputs.keys() - {t.stem for t in tasks}}
    if run is not None and (other := differences(run.settings, job.settings)) and not overwrite:
        path = paths.join(folder, _RUN)
        raise InvalidInputError(f"{path}: got a run with {', and '.join(other)}; want the same settings, or overwrite")
    files = _files(folder, [*others, *(task.stem for task in tasks)])
    if overwrite:
        replaced = [task.stem for task in tasks] + (list(others) if other else [])
        for path in (path for stem in replaced for path in files.get(stem, {}).values()):
            paths.remove(path)
        others = {} if other else others
    else:
        with ThreadPool(min(_THREADS, len(tasks))) as threads:
            # Results arrive in order, so that the error always names the first refused output.
            tasks = list(threads.imap(lambda task: _with_outputs(job, task, files.get(task.stem, {})), tasks))
    stored = {"settings": job.settings, "inputs": others | {task.stem: task.facts for task in tasks}}
    with paths.write_file(paths.join(folder, _RUN)) as file:
        file.write((json.dumps(stored, indent=1) + "\n").encode())
    return list(tasks)


def _files(folder: str, stems: Sequence[str]) -> dict[str, dict[int, str]]:
    """List the output files in a folder by stem of the input and part number."""
    files: dict[str, dict[int, str]] = {}
    for path in paths.matches("*.parquet", folder):
        stem = paths.base_name(path).removesuffix(".parquet")
        part = _PART.fullmatch(stem)
        if part is not None and stem not in stems and part[1] in stems:
            files.setdefault(part[1], {})[int(part[2])] = path
        else:
            files.setdefault(stem, {})[0] = path
    return files


def _with_outputs(job: PartJob, task: Task, files: Mapping[int, str]) -> Task:
    """Return the task with its finished outputs, and where to begin."""
    outputs, begin = {}, (0, 0, 0)
    finished: tuple[int, int, int] | None = begin
    for number, path in sorted(files.items()):
        facts = SequenceShard(path).facts
        if not {"input", "settings", "counts", "stop"} <= facts.keys():
            raise InvalidInputError(f"{path}: got a file of another program, want none; remove it, or overwrite")
        other = [f"{name} {facts['input'].get(name)}, want {value}" for name, value in task.facts.items()
                 if facts["input"].get(name) != value] or differences(facts["settings"], job.settings)  # fmt: skip
        if other:
            remedy = "remove it to write it again, or overwrite"
            raise InvalidInputError(f"{path}: got the output of {', and '.join(other)}; {remedy}")
        counts = Counts(**facts["counts"])
        if counts.skipped and job.on_error == "raise" and not skips_images(job.preprocess):
            raise InvalidInputError(f"{path}: got {counts.skipped} skipped records, want none, or overwrite")
        outputs[number] = Output(task.reader.source, path, counts, facts["reasons"], True)
        if finished is not None and number == finished[0]:
            finished = None if facts["is_last"] else (number + 1, facts["stop"], facts["position"])
    return replace(task, outputs=outputs, begin=finished)


class _Progress:
    """Progress of a run, reported at intervals."""

    def __init__(self, report: Callable[[Progress], None] | None, tasks: Sequence[Task]) -> None:
        self._report, self._tasks = report, tasks
        units = {"bytes" if "size" in task.facts else "records" for task in tasks}
        is_known = len(units) == 1 and all(task.size or "size" in task.facts for task in tasks)
        self._total = sum(task.size for task in tasks) if is_known else None
        self._unit = units.pop() if is_known else "records"
        self._reused = sum(task.size if task.begin is None else task.begin[2] for task in tasks)
        self._steps: dict[tuple[int, int], Step] = {}
        self._begun = self._reported_at = 0.0

    def add(self, step: Step) -> None:
        """Add a step, and report unless a report was just made."""
        now = time.monotonic()
        self._begun = self._begun or now
        self._steps[step.task, step.part] = step
        if now - self._reported_at >= _PAUSE and self._read() != self._total:  # the end is reported once
            self.report()

    def _read(self) -> int:
        if self._total is None:
            return self._reused + sum(step.counts.documents + step.counts.skipped for step in self._steps.values())
        return self._reused + sum(step.read for step in self._steps.values())

    def report(self) -> None:
        """Report the progress."""
        if self._report is not None:
            steps = self._steps.values()
            counts = reduce(add, (step.counts for step in steps), Counts())
            reasons = sum((Counter(step.reasons) for step in steps), Counter[str]())
            seconds = time.monotonic() - self._begun if self._begun else 0.0
            self._report(Progress(self._read(), self._total, self._unit, self._reused, seconds, counts, reasons))
        self._reported_at = time.monotonic()

    def outputs(self) -> Iterator[Output]:
        """Yield the files of earlier runs and of this one, in order."""
        for task in self._tasks:
            written = {
                step.part: Output(task.reader.source, task.output(step.part), step.counts, step.reasons, False)
                for step in self._steps.values() if step.task == task.number and step.is_finished
            }  # fmt: skip
            yield from (output for _, output in sorted({**task.outputs, **written}.items()))


def sequence_shards(folder: str | os.PathLike[str], preprocess: MakeExample | None = None) -> list[SequenceShard]:
    """Open a folder of sequences written by ``write_sequences``, by ``mmpos preprocess`` or by another engine.

    Args:
        folder: path or URL.
        preprocess: callable that the sequences must have been made with; None accepts any, and also folders of other
            engines, whose files have no settings.

    Returns:
        the shards, sorted by the name of their input and, within an input, by the order of its records.

    Raises:
        InvalidInputError: the folder has no sequences, the run did not finish, a file is missing, or settings differ.
    """
    where = paths.checked_path("folder", folder)
    run, path = _read_run(where), paths.join(where, _RUN)
    files = _files(where, [] if run is None else list(run.inputs))
    if run is None:
        if preprocess is not None or not files:
            raise InvalidInputError(f"folder: got {where!r} without {_RUN}, want a folder written by mmpos preprocess")
        return [SequenceShard(parts[0]) for _, parts in sorted(files.items())]
    if preprocess is not None and (other := differences(run.settings, settings_of(preprocess))):
        raise InvalidInputError(f"{path}: settings: got {', and '.join(other)}")
    shards = [SequenceShard(file) for stem in sorted(run.inputs) for _, file in sorted(files.get(stem, {}).items())]
    with ThreadPool(_THREADS) as threads:
        facts = dict(zip(shards, threads.imap(lambda shard: shard.facts, shards), strict=True))
    for shard in shards:
        if other := differences(facts[shard].get("settings", {}), run.settings):
            raise InvalidInputError(f"{shard.path}: settings: got {', and '.join(other)} as {path} says")
    for stem in sorted(run.inputs):
        parts = files.get(stem, {})
        last = SequenceShard(parts[max(parts)]) if parts else None
        if last is None or not facts[last]["is_last"] or len(parts) != max(parts) + 1:
            got = f"{len(parts)} of the files of {run.inputs[stem]['source']}"
            raise InvalidInputError(f"{path}: got {got}, want all; run mmpos preprocess again to finish them")
    return shards
