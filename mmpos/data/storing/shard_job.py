"""The work on one shard: every record through the one callable into one whole file of ready sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mmpos.checks import boolean, one_of
from mmpos.data.documents import Location, RecordError
from mmpos.data.examples import Example
from mmpos.data.quarantine import OnError, Quarantine
from mmpos.data.readers.base import Reader
from mmpos.data.storing.fingerprint import fingerprint
from mmpos.data.storing.storage import SequenceShard, SequenceWriter, whole_file
from mmpos.errors import InvalidInputError, LimitExceededError

__all__ = ["Counts", "ShardJob", "Task", "quarantine_of"]


@dataclass(frozen=True)
class Counts:
    """What came of records.

    Args:
        documents: records that became sequences.
        tokens: their tokens, patches and markers included.
        images: their images.
        skipped: records in the quarantine.
    """

    documents: int = 0
    tokens: int = 0
    images: int = 0
    skipped: int = 0

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
    def identity(self) -> dict[str, Any]:
        """Name and size of the input: bytes of a file, records of anything else."""
        path = Path(self.reader.source)
        size = path.stat().st_size if path.is_file() else self.reader.count()
        return {"source": path.name, "size": size}


@dataclass(frozen=True)
class ShardJob:
    """What is done with every shard; the same for every engine, and picklable if its callable is.

    Args:
        preprocess: from a record to an example: a Preprocess, or a callable of your own with its arguments and errors.
        on_error: whether a record that cannot be used stops the job, or is counted and written to a file beside the
            output.
        patches: whether pixels are stored; without them images are still decoded, so that content hashes and the
            records refused are the same.
    """

    preprocess: Callable[[Mapping[str, Any], Location], Example]
    on_error: OnError = "raise"
    patches: bool = True
    settings: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_callable(self.preprocess)
        one_of("on_error", self.on_error, ("raise", "skip"))
        settings = fingerprint({"preprocess": self.preprocess, "patches": boolean("patches", self.patches)})
        object.__setattr__(self, "settings", settings)

    def run(self, task: Task) -> Generator[Counts, None, None]:
        """Do it; the output is there when the iterator is exhausted, and not before.

        Args:
            task: input and output.

        Yields:
            What has come of the records so far, after each.

        Raises:
            RecordError: a record cannot be used, and on_error is "raise".
        """
        identity = task.identity
        counts = Counts()
        # Left from the inside out: where there is an output, its quarantine is whole.
        with (
            whole_file(task.output) as output,
            whole_file(quarantine_of(task.output)) as refused,
            SequenceWriter(output) as writer,
        ):
            quarantine = Quarantine(self.on_error, refused)
            for location, raw in task.reader.records():
                try:
                    counts += self._write(writer, location, raw)
                except RecordError as error:
                    quarantine.refuse(location, raw, error)
                    counts += Counts(skipped=1)
                yield counts
            done = {each.name: getattr(counts, each.name) for each in fields(counts)}
            writer.facts = {**identity, "settings": self.settings, **done}

    def finished(self, task: Task) -> Counts | None:
        """What an earlier run made of this input with these settings; None if it made nothing of it.

        Raises:
            InvalidInputError: the output is there, but is of another input or other settings, or no such file.
        """
        if not task.output.exists():
            return None
        found = SequenceShard(task.output).facts
        for name, want in {**task.identity, "settings": self.settings}.items():
            if found.get(name) != want:
                raise InvalidInputError(
                    f"{task.output}: got the output of {name} {found.get(name)}, want {want}, or overwrite"
                )
        counts = Counts(*(found[each.name] for each in fields(Counts)))
        if counts.skipped and self.on_error == "raise":
            raise InvalidInputError(f"{task.output}: got {counts.skipped} skipped records, want none, or overwrite")
        return counts

    def _write(self, writer: SequenceWriter, location: Location, raw: Any) -> Counts:
        if isinstance(raw, RecordError):
            raise raw
        example = self.preprocess(raw, location)
        if not self.patches:
            example = replace(example, sequence=replace(example.sequence, patches=None))
        try:
            writer.write(example)
        except LimitExceededError as error:
            raise RecordError(f"{location}: {error}") from error
        return Counts(1, example.num_tokens, len(example.sequence.grid_thw))


def _check_callable(value: object) -> None:
    if not callable(value):
        raise InvalidInputError(f"preprocess: got {type(value).__name__}, want a callable of record and location")


def quarantine_of(output: Path) -> Path:
    """Where the records go that did not get into this output."""
    return output.with_name(f"{output.stem}.quarantine.jsonl")
