"""Preprocess one shard: pass its records through a callable, and write each part to a file along with the settings."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import NamedTuple

from mmpos.data.examples import Location, MakeExample, RecordError
from mmpos.data.preprocess.settings import describe
from mmpos.data.preprocess.storage import Facts, SequenceWriter
from mmpos.data.quarantine import MAX_SKIPPED, Line, OnError, Quarantine, SkipLimit, json_line
from mmpos.data.readers.base import Raw, Reader
from mmpos.data.stage import Stage
from mmpos.data.stores import StorePath, store_path
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import one_of

__all__ = [
    "PART_BYTES",
    "Counts",
    "PartFile",
    "ShardJob",
    "Step",
    "Task",
    "changed",
    "describe_job",
    "part_name",
    "quarantine_of",
    "read_parts",
]

PART_BYTES = 64 * 2**20
"""Bytes of texts and undecoded images after which a part ends; the record that reaches this size is the part's last."""


@dataclass(frozen=True)
class Counts:
    """Counts of records and of the sequences made from them.

    Args:
        documents: records that became sequences.
        tokens: tokens in these sequences, including patches and markers.
        images: images in these sequences.
        skipped: records in the quarantine.
        images_dropped: images left out of their documents; also listed in the quarantine.
    """

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0
    images_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))


@dataclass(frozen=True)
class PartFile:
    """Finished file of a part of a shard.

    Args:
        name: name of the file.
        size: size in bytes.
        sha256: SHA-256 of the content.
        counts: counts of its records and sequences.
    """

    name: str
    size: int
    sha256: str
    counts: Counts


class Step(NamedTuple):
    """Progress of one task.

    Args:
        task: number of the task.
        part: number of the current part of the shard; in the last step of the task, the number of parts.
        counts: counts of the part so far.
        source: facts about the shard, in the last step of a part and of the task.
        file: file of the part once it is finished.
        lengths: number of documents of each length in the file, keyed by length.
    """

    task: int
    part: int
    counts: Counts
    source: Facts | None = None
    file: PartFile | None = None
    lengths: Mapping[int, int] = {}


@dataclass(frozen=True)
class Task:
    """Shard and the output files made from it.

    Args:
        number: number of the task.
        reader: reader of the shard.
        folder: folder of the outputs.
        stem: prefix of the output names.
        done: numbers of the parts that an earlier run finished.
    """

    number: int
    reader: Reader
    folder: StorePath
    stem: str
    done: frozenset[int] = frozenset()

    def output(self, part: int = 0) -> StorePath:
        """Return the path of the output of a part."""
        return self.folder / part_name(self.stem, part)

    @property
    def identity(self) -> Facts:
        """Name and size of the input, and the change times or version of its file; see StorePath.identity.

        The size of a file is its number of bytes; that of any other input is its number of records.
        """
        path = store_path("source", self.reader.source)
        return {"source": path.name, **(path.identity() if path.is_file() else {"size": self.reader.count()})}

    def digest(self) -> str | None:
        """Compute the SHA-256 of an input file on this machine; return None for all other inputs."""
        path = store_path("source", self.reader.source)
        if path.is_url or not path.is_file():
            return None
        with path.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def part_name(stem: str, part: int) -> str:
    """Return the file name of a part.

    >>> part_name("photos-003", 0), part_name("photos-003", 2)
    ('photos-003.parquet', 'photos-003.part00002.parquet')
    """
    return f"{stem}.part{part:05}.parquet" if part else f"{stem}.parquet"


def quarantine_of(output: StorePath) -> StorePath:
    """Return the path of the file that lists the records skipped for this output."""
    return output.with_name(f"{output.stem}.quarantine.jsonl")


def read_parts(task: Task) -> Iterator[tuple[int, Facts, Iterator[tuple[Location, Raw]] | None]]:
    """Read the unfinished parts of a shard; part boundaries depend only on the records.

    Args:
        task: the task of the shard.

    Yields:
        The number of a part, the facts about the shard, and an iterator that reads the records lazily; at the end, the
        number of parts, the facts and None.

    Raises:
        InvalidInputError: the shard changed while it was read; raised before the last part is complete.
    """
    identity = task.identity
    source = {**identity, "sha256": task.digest()}
    size = 0

    def part_of(record: tuple[Location, Raw]) -> int:
        nonlocal size
        before, size = size, size + _size(record[1])
        return before // PART_BYTES

    part = -1
    for part, (_, records) in enumerate(groupby(_records(task, source), part_of)):
        if part not in task.done:
            yield part, source, records
    if part < 0 and 0 not in task.done:
        yield 0, source, iter(())
    yield max(part, 0) + 1, source, None


def changed(task: Task, source: Facts) -> bool:
    """Return whether a shard differs from the recorded facts; a file that was only touched does not."""
    if all(source.get(name) == value for name, value in task.identity.items()):
        return False
    digest = task.digest()
    return digest is None or digest != source.get("sha256")


def _records(task: Task, source: Facts) -> Iterator[tuple[Location, Raw]]:
    """Yield the records of a shard, then check that the shard has not changed."""
    yield from task.reader.records()
    if changed(task, source):
        raise InvalidInputError(
            f"{task.reader.source}: got a file that changed while it was read, want one that does not change"
        )


def _size(value: object) -> int:
    """Return the approximate size of a record: the sum of its bytes and characters, plus eight for each number."""
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 8


@dataclass(frozen=True)
class ShardJob:
    """Work done on every shard, independent of the engine; picklable if its callable is.

    Args:
        preprocess: converts a record to an example: a Preprocess, or a callable with the same arguments and errors.
        on_error: "raise" stops the job at an unusable record; "skip" counts the record and writes it to a quarantine
            file next to the output.
        max_skipped: largest fraction of the first 1,000 records of a process that may be skipped; until a process has
            read that many, the fraction is also checked at the end of each part.
    """

    preprocess: MakeExample
    on_error: OnError = "raise"
    max_skipped: float = MAX_SKIPPED
    stage: Stage = field(init=False, repr=False, compare=False)
    limit: SkipLimit = field(init=False, repr=False, compare=False)
    settings: Mapping[str, object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", Stage(self.preprocess))
        one_of("on_error", self.on_error, ("raise", "skip"))
        object.__setattr__(self, "settings", describe_job(self.preprocess))
        object.__setattr__(self, "limit", SkipLimit(self.max_skipped))

    def run(self, task: Task) -> Generator[Step, None, None]:
        """Run a task record by record; yield the steps of ``write``, then one with the number of parts."""
        for part, source, records in read_parts(task):
            if records is None:
                yield Step(task.number, part, Counts(), source)
            else:
                yield from self.write(task.number, part, task.output(part), source, records)

    def write(
        self, task: int, part: int, output: StorePath, source: Facts, records: Iterable[tuple[Location, Raw]]
    ) -> Generator[Step, None, None]:
        """Write a part of a shard; its file exists only once the iterator is exhausted.

        Args:
            task: number of the task.
            part: number of the part.
            output: path of the file.
            source: facts about the shard.
            records: records of the part.

        Yields:
            A step after each record, and one with the finished file.

        Raises:
            RecordError: a record is unusable, and on_error is "raise".
            InvalidInputError: this process skipped more records than max_skipped allows.
        """
        counts, lengths, refused = Counts(), Counter[int](), list[Line]()
        quarantine = Quarantine(self.on_error, refused.append, self.limit)
        with SequenceWriter(output) as writer:
            for location, raw in records:
                self.limit.read()
                try:
                    written = self._write(writer, quarantine, location, raw)
                    counts += written
                    lengths[written.tokens] += 1
                except RecordError as error:
                    quarantine.refuse(location, raw, error)
                    counts += Counts(skipped=1)
                yield Step(task, part, counts)
            self.limit.end()
            writer.facts = {**source, "settings": self.settings, **asdict(counts)}
            # The quarantine is written before the output is renamed into place, so that every output has a complete
            # one.
            _write_lines(quarantine_of(output), refused)
        yield Step(task, part, counts, source, PartFile(output.name, writer.size, writer.sha256, counts), lengths)

    def _write(self, writer: SequenceWriter, quarantine: Quarantine, location: Location, raw: Raw) -> Counts:
        if isinstance(raw, RecordError):
            raise raw
        try:
            example = self.stage.example(raw, location)
            writer.write(example)
        except LimitExceededError as error:
            raise RecordError(f"{location}: {error}") from error
        if example.dropped_images:
            quarantine.drop(location, raw, example.dropped_images)
        images, dropped = len(example.sequence.grid_thw), len(example.dropped_images)
        return Counts(1, example.num_tokens, images, images_dropped=dropped)


def describe_job(preprocess: MakeExample) -> dict[str, object]:
    """Describe the settings that determine the outputs."""
    return describe({"preprocess": preprocess, "part_bytes": PART_BYTES})


def _write_lines(path: StorePath, lines: Sequence[Line]) -> None:
    """Write the lines to a file, or remove the file if there are none."""
    if not lines:
        path.remove()
        return
    path.write_bytes(b"".join(map(json_line, lines)))
