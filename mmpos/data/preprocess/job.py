"""``write_sequences``: many shards into a folder of ready sequences, which a later run completes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from mmpos.data.examples import MakeExample
from mmpos.data.packing import first_fit_decreasing
from mmpos.data.preprocess.claim import Claim, claimed
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
    """Finished file.

    Args:
        source: path or name of its input.
        path: the file of ready sequences; SequenceShard reads it.
        counts: its records, and their results.
        reused: whether an earlier run had made it.
    """

    source: str
    path: StorePath
    counts: Counts
    reused: bool

    @property
    def quarantine(self) -> StorePath:
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
        outputs: in the order of the inputs and of their records.
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
_SAVE = 10.0  # seconds between two manifests, at least
_SAVE_SHARE = 0.05  # of the time of a run, which large manifests may take


def write_sequences(
    readers: Sequence[Reader],
    folder: str | os.PathLike[str],
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
    """Preprocess all shards into files of ready sequences: one Parquet file for each part of 64 MiB of its records.

    A file is there wholly or not at all, so the same call completes a run that was killed: finished files are not made
    again, unless their input or the settings changed, which is an error. An input that was touched or copied is the
    same if its content is; of other inputs only name and number of records are known. Engine, workers and interruptions
    change no file. sequence_shards opens the folder by its manifest. One run at a time claims a folder, by a file.

    Args:
        readers: the input; mmpos.data.readers.shards makes them from paths.
        folder: path or URL of the folder of the files, each named after its input; created if it is missing.
        preprocess: a Preprocess, or a callable of your own; it must pickle for several workers and for Ray.
        engine: "local" for processes of this machine; "ray" for the cluster of Ray that is connected, in RAY_ADDRESS or
            running here, else one started for the run, as always with RAY_ADDRESS=local.
        workers: processes of this machine, or most actors of Ray.
        on_error: "raise" stops at the first record that cannot be used and says where it is; "skip" counts such records
            and writes them to a file beside the output. A mistake of the set-up always stops.
        max_skipped: largest share of the first 1,000 records of a worker that may be skipped, 0 to 1; also judged at
            the end of each part before. Ten may always be skipped.
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
    boolean("overwrite", overwrite)
    job = ShardJob(preprocess, on_error, patches, max_skipped)
    where = store_path("folder", folder)
    tasks, begin = _tasks(readers, where), time.monotonic()
    with claimed(where) as claim:
        manifest = _opened(where, job, tasks, overwrite)
        before = {task.stem: frozenset(manifest.shards[task.stem].files) for task in tasks}
        missing = [replace(task, done=before[task.stem]) for task in tasks if not manifest.shards[task.stem].complete]
        made = _make(engine, job, missing, workers, manifest, claim, _Progress(report, len(tasks), len(missing)))
        if overwrite:
            manifest.remove_strays()
        seconds = time.monotonic() - begin
    outputs = tuple(_outputs(manifest, tasks, before))
    return Summary(outputs, _fill(outputs, made, max_tokens), seconds)


def _opened(folder: StorePath, job: ShardJob, tasks: Sequence[Task], overwrite: bool) -> Manifest:
    """Open the manifest of a folder, with what is finished of the tasks.

    Raises:
        InvalidInputError: outputs are there of other inputs or settings, and are not to be overwritten.
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
    stale = _split_otherwise(manifest, tasks)
    for path in manifest.files_of(stale):
        if not overwrite:
            want = "give the same --split-over, or overwrite all"
            raise InvalidInputError(f"{path}: got the output of the same file, split otherwise; {want}")
        path.remove()
        quarantine_of(path).remove()
    for name in stale:
        del manifest.shards[name]
    manifest.settings = job.settings
    for task in tasks:
        manifest.shards.setdefault(task.stem, ShardFiles({}))
    return manifest


def _split_otherwise(manifest: Manifest, tasks: Sequence[Task]) -> list[str]:
    """Return the shards of a manifest that are of the file of a task, whole or in another number of slices."""
    others = sorted(manifest.shards.keys() - {task.stem for task in tasks})
    alike = {_unsliced(name)[0] for name in others}
    sizes = dict[str, dict[str | None, object]]()  # of each file, by the number of its slices
    for task in tasks:
        whole, slices = _unsliced(task.stem)
        if whole in alike and slices not in sizes.setdefault(whole, {}):
            sizes[whole][slices] = task.identity["size"]
    return [name for name in others if _is_split_otherwise(name, manifest.shards[name], sizes)]


def _is_split_otherwise(name: str, shard: ShardFiles, sizes: Mapping[str, Mapping[str | None, object]]) -> bool:
    whole, slices = _unsliced(name)
    size = shard.source.get("size")  # none where no part was finished
    return any(other != slices and size in (None, want) for other, want in sizes.get(whole, {}).items())


def _unsliced(stem: str) -> tuple[str, str | None]:
    """Return the name of a file of which this may be a slice, and the number of its slices."""
    match = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", stem, re.DOTALL)
    return (match[1], match[2]) if match else (stem, None)


def _outputs(manifest: Manifest, tasks: Sequence[Task], before: Mapping[str, Collection[int]]) -> Iterator[Output]:
    for task in tasks:
        for part, file in sorted(manifest.shards[task.stem].files.items()):
            yield Output(task.reader.source, task.output(part), file.counts, part in before[task.stem])


class _Progress:
    """Progress of a run, which is reported now and then.

    Args:
        report: takes it.
        shards: in all.
        missing: those that earlier runs have not finished.
    """

    def __init__(self, report: Callable[[Progress], None] | None, shards: int, missing: int) -> None:
        self._report, self._shards, self._reused = report, shards, shards - missing
        self._finished, self._running = Counts(), dict[tuple[int, int], Counts]()
        self._reported_at = -_PAUSE

    def add(self, step: Step, done: int) -> None:
        """Add a step of a run that has finished a number of shards."""
        if step.file is not None:
            self._finished += step.counts
            self._running.pop((step.task, step.part), None)
        else:
            self._running[step.task, step.part] = step.counts
        if time.monotonic() - self._reported_at >= _PAUSE and self._reused + done < self._shards:
            self.tell(done)

    def tell(self, done: int) -> None:
        """Report the progress of a run that has finished a number of shards."""
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
                f"readers: got {other!r} and {source!r}, which would both become {str(output)!r}, want different names"
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


def _make(
    engine: Engine,
    job: ShardJob,
    tasks: Sequence[Task],
    workers: int,
    manifest: Manifest,
    claim: Claim,
    progress: _Progress,
) -> Counter[int]:
    """Run the tasks, note what is finished, and remove the temporary files of runs and workers that were killed.

    Args:
        engine: see write_sequences, as for the workers.
        job: the work.
        tasks: shards of which parts are missing.
        workers: see write_sequences.
        manifest: of the folder, which is saved now and then and at the end.
        claim: on the folder.
        progress: takes every step.

    Returns:
        how many documents have each length.
    """
    made = Counter[int]()
    numbered = {task.number: task for task in tasks}
    done, save_at = 0, time.monotonic() + _SAVE
    if tasks:
        manifest.save()
        _sweep(manifest)
        try:
            run = run_local if engine == "local" else run_ray
            with closing(run(job, tasks, workers)) as steps:
                for step in steps:
                    claim.check()
                    manifest.add(numbered[step.task], step)
                    made.update(step.lengths)
                    done += step.source is not None and manifest.shards[numbered[step.task].stem].complete
                    progress.add(step, done)
                    if (now := time.monotonic()) > save_at:
                        manifest.save()
                        seconds = time.monotonic() - now
                        save_at = time.monotonic() + max(_SAVE, seconds / _SAVE_SHARE)
        finally:
            claim.check()
            _sweep(manifest)
            manifest.save()
    progress.tell(done)
    return made


def _sweep(manifest: Manifest) -> None:
    """Remove what killed writers left of the files of a folder on this machine."""
    if not manifest.folder.is_url:
        for path in leftovers(Path(manifest.folder), manifest.owns):
            path.unlink(missing_ok=True)


def _fill(outputs: Sequence[Output], made: Counter[int], max_tokens: int) -> Fill:
    """Pack the documents of earlier runs, whose files are read, and those that this run made, by their lengths."""
    reused = [SequenceShard(output.path).lengths for output in outputs if output.reused]
    lengths: IntArray = np.concatenate([*reused, np.fromiter(made.elements(), np.int64)])
    fitting = lengths[lengths <= max_tokens]
    packs = len(first_fit_decreasing(fitting, max_tokens))
    return Fill(max_tokens, packs, int(fitting.sum()), lengths.size - fitting.size)
