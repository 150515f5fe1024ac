"""The work on one shard: every record through one callable into one file, with the settings it was made with."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from mmpos.data.examples import Location, MakeExample, RecordError
from mmpos.data.preprocess.settings import describe, differences
from mmpos.data.preprocess.storage import Facts, SequenceShard, SequenceWriter
from mmpos.data.quarantine import MAX_SKIPPED, Line, OnError, Quarantine, SkipLimit, json_line, skips_images
from mmpos.data.readers.base import Raw, Reader
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import boolean, one_of
from mmpos.support.files import whole_file

__all__ = ["Counts", "ShardJob", "Task", "quarantine_of"]


@dataclass(frozen=True)
class Counts:
    """Counts of records and of what they became.

    Args:
        documents: records that became sequences.
        tokens: their tokens, patches and markers included.
        images: their images.
        skipped: records in the quarantine.
        images_dropped: images that were left out of documents, in the quarantine, too.
    """

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0
    images_dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Task:
    """One input and its output.

    Args:
        reader: the shard.
        output: the file that it becomes.
    """

    reader: Reader
    output: Path

    @property
    def identity(self) -> dict[str, object]:
        """Name and size of the input, and of a file when it and its entry in the folder changed, in nanoseconds.

        The size is bytes of a file, and records of anything else, of which no more is known.
        """
        path = Path(self.reader.source)
        if not path.is_file():
            return {"source": path.name, "size": self.reader.count()}
        status = path.stat()
        return {"source": path.name, "size": status.st_size, "changed": [status.st_mtime_ns, status.st_ctime_ns]}

    def digest(self) -> str | None:
        """Read a file for the SHA-256 of its content; None for anything else."""
        path = Path(self.reader.source)
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


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
            of each shard before.
    """

    preprocess: MakeExample
    on_error: OnError = "raise"
    patches: bool = True
    max_skipped: float = MAX_SKIPPED
    limit: SkipLimit = field(init=False, repr=False, compare=False)
    settings: Mapping[str, object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.preprocess):
            raise InvalidInputError(
                f"preprocess: got {type(self.preprocess).__name__}, want a callable of record and location"
            )
        one_of("on_error", self.on_error, ("raise", "skip"))
        settings = describe({"preprocess": self.preprocess, "patches": boolean("patches", self.patches)})
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "limit", SkipLimit(self.max_skipped))

    def run(self, task: Task) -> Generator[Counts, None, None]:
        """Run a task, record by record; its output exists once the iterator is exhausted, and not before.

        Args:
            task: input and output.

        Yields:
            Counts of the records so far, after each record.

        Raises:
            RecordError: a record cannot be used, and on_error is "raise".
            InvalidInputError: the input changed meanwhile, or this process skipped more than max_skipped.
        """
        identity, digest = task.identity, task.digest()
        counts, refused = Counts(), list[Line]()
        quarantine = Quarantine(self.on_error, refused.append, self.limit)
        with SequenceWriter(task.output) as writer:
            for location, raw in task.reader.records():
                self.limit.read()
                try:
                    counts += self._write(writer, quarantine, location, raw)
                except RecordError as error:
                    quarantine.refuse(location, raw, error)
                    counts += Counts(skipped=1)
                yield counts
            self.limit.end()
            if task.identity != identity and task.digest() != digest:
                raise InvalidInputError(
                    f"{task.reader.source}: got a file that changed while it was read, want it at rest"
                )
            done = {each.name: getattr(counts, each.name) for each in fields(counts)}
            writer.facts = {**identity, "sha256": digest, "settings": self.settings, **done}
            # Before the output has its name: where there is one, its quarantine is whole.
            _write_lines(quarantine_of(task.output), refused)

    def finished(self, task: Task) -> Counts | None:
        """Return the counts of the output that an earlier run made of this task; None if there is none.

        Raises:
            InvalidInputError: the output is there, but is of another input or other settings, or no such file.
        """
        if not task.output.exists():
            return None
        facts = SequenceShard(task.output).facts
        if other := _other_input(task, facts) or differences(facts["settings"], self.settings):
            remedy = "; remove it to make it anew, or overwrite all"
            raise InvalidInputError(f"{task.output}: got the output of {', and '.join(other)}{remedy}")
        counts = Counts(*(facts.get(each.name, 0) for each in fields(Counts)))
        if counts.skipped and self.on_error == "raise" and not skips_images(self.preprocess):
            raise InvalidInputError(f"{task.output}: got {counts.skipped} skipped records, want none, or overwrite")
        return counts

    def _write(self, writer: SequenceWriter, quarantine: Quarantine, location: Location, raw: Raw) -> Counts:
        if isinstance(raw, RecordError):
            raise raw
        example = self.preprocess(raw, location)
        if not self.patches:
            example = replace(example, sequence=replace(example.sequence, patches=None))
        try:
            writer.write(example)
        except LimitExceededError as error:
            raise RecordError(f"{location}: {error}") from error
        if example.dropped_images:
            quarantine.drop(location, raw, example.dropped_images)
        images, dropped = len(example.sequence.grid_thw), len(example.dropped_images)
        return Counts(1, example.num_tokens, images, images_dropped=dropped)


def _other_input(task: Task, facts: Facts) -> list[str]:
    """Name what differs between an input and that of an output; content only where the file was touched or copied."""
    want = task.identity
    other = [
        f"{name} {facts.get(name)}, want {want[name]}" for name in ("source", "size") if facts.get(name) != want[name]
    ]
    touched = facts.get("changed") != want.get("changed")
    if not other and touched and facts.get("sha256") != task.digest():
        return [f"{want['source']} with other content"]
    return other


def _write_lines(path: Path, lines: Sequence[Line]) -> None:
    """Write a file of these lines, or remove it if there are none."""
    if not lines:
        path.unlink(missing_ok=True)
        return
    with whole_file(path) as file:
        file.writelines(map(json_line, lines))


def quarantine_of(output: Path) -> Path:
    """Return the path of the file of records that did not get into this output."""
    return output.with_name(f"{output.stem}.quarantine.jsonl")
