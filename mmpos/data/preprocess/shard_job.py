"""The work on one shard: its records, part by part, through one callable into files with the settings they have."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
"""Bytes of the texts and undecoded images of a part; the record that reaches them is its last."""


@dataclass(frozen=True)
class Counts:
    """Counts of records and of what they became.

    Args:
        documents: records that became sequences.
        tokens: their tokens, patches and markers included.
        images: their images.
        skipped: records in the quarantine.
        images_dropped: images that were left out of documents, also in the quarantine.
    """

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0
    images_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class PartFile:
    """Finished file of a part of a shard.

    Args:
        name: of the file.
        size: its bytes.
        sha256: of its content.
        counts: its records, and their results.
    """

    name: str
    size: int
    sha256: str
    counts: Counts


class Step(NamedTuple):
    """Progress of one task.

    Args:
        task: its number.
        part: the part of its shard that is worked on; in the last step the number of parts.
        counts: records of the part so far.
        source: facts of the shard, in the last step of a part and of a task.
        file: the part when it is finished.
        lengths: with the file: how many of its documents have each length.
    """

    task: int
    part: int
    counts: Counts
    source: Facts | None = None
    file: PartFile | None = None
    lengths: Mapping[int, int] = {}


@dataclass(frozen=True)
class Task:
    """One shard and the files that it becomes.

    Args:
        number: of the task.
        reader: the shard.
        folder: where the files are written.
        stem: beginning of their names.
        done: parts that are there from an earlier run.
    """

    number: int
    reader: Reader
    folder: StorePath
    stem: str
    done: frozenset[int] = frozenset()

    def output(self, part: int = 0) -> StorePath:
        """Return the path of the file of a part."""
        return self.folder / part_name(self.stem, part)

    @property
    def identity(self) -> Facts:
        """Name and size of the input, and when its file changed or which version it has; see StorePath.identity.

        The size is bytes of a file, and records of anything else, of which no more is known.
        """
        source = store_path("source", self.reader.source)
        path = store_path("path", getattr(self.reader, "path", source))  # a slice is of a file with another name
        if not path.is_file():
            return {"source": source.name, "size": self.reader.count()}
        return {"source": source.name, **path.identity()}

    def digest(self) -> str | None:
        """Read a file of this machine for the SHA-256 of its content; None for anything else, and for slices."""
        path = store_path("source", self.reader.source)
        if path.is_url or not path.is_file():
            return None
        with path.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def part_name(stem: str, part: int) -> str:
    """Return the name of the file of a part.

    >>> part_name("photos-003", 0), part_name("photos-003", 2)
    ('photos-003.parquet', 'photos-003.part00002.parquet')
    """
    return f"{stem}.part{part:05}.parquet" if part else f"{stem}.parquet"


def quarantine_of(output: StorePath) -> StorePath:
    """Return the path of the file of records that did not get into this output."""
    return output.with_name(f"{output.stem}.quarantine.jsonl")


def read_parts(task: Task) -> Iterator[tuple[int, Facts, Iterator[tuple[Location, Raw]] | None]]:
    """Read the parts of a shard that are not done: where they end depends on the records alone.

    Args:
        task: the shard.

    Yields:
        Number of the part, facts of the shard, and its records, which are read as they are taken; at the end the number
        of parts, and None.

    Raises:
        InvalidInputError: the shard changed meanwhile, before the last record of the last part is given.
    """
    identity = task.identity
    source = {**identity, "sha256": task.digest()}
    size = 0

    def part_of(record: tuple[Location, Raw]) -> int:
        nonlocal size
        before, size = size, size + _size(record[1])
        return before // PART_BYTES

    part = -1
    for part, (_, records) in enumerate(groupby(_settled(task, source), part_of)):
        if part not in task.done:
            yield part, source, records
    if part < 0 and 0 not in task.done:
        yield 0, source, iter(())
    yield max(part, 0) + 1, source, None


def changed(task: Task, source: Facts) -> bool:
    """Tell whether a shard is another than these facts say; a file that was only touched is the same."""
    if all(source.get(name) == value for name, value in task.identity.items()):
        return False
    digest = task.digest()
    return digest is None or digest != source.get("sha256")


def _settled(task: Task, source: Facts) -> Iterator[tuple[Location, Raw]]:
    """Yield the records of a shard, and see that it is as it was."""
    yield from task.reader.records()
    if changed(task, source):
        raise InvalidInputError(f"{task.reader.source}: got a file that changed while it was read, want it at rest")


def _size(value: object) -> int:
    """Return the bytes or characters of a record, numbers as eight."""
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return 8


@dataclass(frozen=True)
class ShardJob:
    """Work on every shard; the same for every engine, and picklable if its callable is.

    Args:
        preprocess: from a record to an example: a Preprocess, or a callable of your own with its arguments and errors.
        on_error: whether a record that cannot be used stops the job, or is counted and written to a file beside the
            output.
        patches: whether pixels are stored; without them images are still decoded, so that content hashes and the
            records refused are the same.
        max_skipped: largest share of the first 1,000 records of a process that may be skipped; also judged at the end
            of each part before.
    """

    preprocess: MakeExample
    on_error: OnError = "raise"
    patches: bool = True
    max_skipped: float = MAX_SKIPPED
    stage: Stage = field(init=False, repr=False, compare=False)
    limit: SkipLimit = field(init=False, repr=False, compare=False)
    settings: Mapping[str, object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", Stage(self.preprocess, self.patches))
        one_of("on_error", self.on_error, ("raise", "skip"))
        object.__setattr__(self, "settings", describe_job(self.preprocess, self.patches))
        object.__setattr__(self, "limit", SkipLimit(self.max_skipped))

    def run(self, task: Task) -> Generator[Step, None, None]:
        """Run a task, record by record; see write for its steps, after which comes one with the number of parts."""
        for part, source, records in read_parts(task):
            if records is None:
                yield Step(task.number, part, Counts(), source)
            else:
                yield from self.write(task.number, part, task.output(part), source, records)

    def write(
        self, task: int, part: int, output: StorePath, source: Facts, records: Iterable[tuple[Location, Raw]]
    ) -> Generator[Step, None, None]:
        """Write a part of a shard; its file exists once the iterator is exhausted, and not before.

        Args:
            task: number of the task.
            part: number of the part.
            output: the file.
            source: facts of the shard.
            records: of the part.

        Yields:
            A step after each record, and one with the finished file.

        Raises:
            RecordError: a record cannot be used, and on_error is "raise".
            InvalidInputError: this process skipped more than max_skipped.
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
            done = {each.name: getattr(counts, each.name) for each in fields(counts)}
            writer.facts = {**source, "settings": self.settings, **done}
            # Before the output has its name: where there is one, its quarantine is whole.
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


def describe_job(preprocess: MakeExample, patches: bool) -> dict[str, object]:
    """Describe the settings on which outputs depend."""
    return describe({"preprocess": preprocess, "patches": patches, "part_bytes": PART_BYTES})


def _write_lines(path: StorePath, lines: Sequence[Line]) -> None:
    """Write a file of these lines, or remove it if there are none."""
    if not lines:
        path.remove()
        return
    path.write_bytes(b"".join(map(json_line, lines)))
