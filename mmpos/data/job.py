"""The work of a run: read the records of an input, and write them to files that hold their settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from mmpos.data import paths
from mmpos.data.examples import Location, MakeExample, RecordError
from mmpos.data.quarantine import MAX_SKIPPED, OnError, Quarantine, SkipLimit, reason
from mmpos.data.readers import Raw, Reader
from mmpos.data.settings import describe
from mmpos.data.stage import Stage
from mmpos.data.storage import SequenceWriter
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import one_of

__all__ = ["Counts", "Job", "Output", "Step", "Task", "facts_of_input", "settings_of"]

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
        one_of("on_error", on_error, ("raise", "skip"))
        self._stage, self._limit = Stage(preprocess), SkipLimit(max_skipped)
        self.preprocess, self.on_error, self.settings = preprocess, on_error, settings_of(preprocess)

    def run(self, task: Task) -> Generator[Step, None, None]:
        """Write the files of an input that are left; yield a step after each record and after each file.

        The records that a file holds depend only on the records, so every run writes the same files.

        Raises:
            RecordError: a record is unusable, and on_error is "raise".
            InvalidInputError: this process skipped more records than max_skipped allows, or the input changed while it
                was read, which is noticed before the last file is finished.
        """
        part, stop, position = task.begin
        rows, first = task.reader.count(), position - paths.BytesRead.total
        records = task.reader.records(stop)
        ahead, is_last = next(records, None), False
        while not is_last:
            path, counts, reasons, size, before = task.output(part), Counts(), Counter[str](), 0, position
            with SequenceWriter(path) as writer:
                while ahead is not None and size < PART_BYTES:
                    counts += self._write(writer, reasons, *ahead)
                    stop, size = ahead[0].index + 1, size + _size(ahead[1])
                    ahead = next(records, None)
                    position = task.size * stop // rows if rows else min(first + paths.BytesRead.total, task.size)
                    output = Output(task.reader.source, path, position - before, counts, reasons, False)
                    yield Step(task.number, part, output, False)
                if is_last := ahead is None:
                    position = task.size
                    if facts_of_input(task.reader) != task.facts:
                        got = "got a file that changed while it was read, want one that does not change"
                        raise InvalidInputError(f"{task.reader.source}: {got}")
                self._limit.end()
                output = Output(task.reader.source, path, position - before, counts, reasons, False)
                writer.facts = {"input": task.facts, "settings": self.settings, "counts": asdict(counts)}
                writer.facts |= {"reasons": reasons, "stop": stop, "read": output.read, "is_last": is_last}
            yield Step(task.number, part, output, True)
            part += 1

    def _write(self, writer: SequenceWriter, reasons: Counter[str], here: Location, raw: Raw) -> Counts:
        """Write the row of a record, and return its counts."""
        self._limit.read()
        quarantine = Quarantine(self.on_error, lambda line: None, self._limit)  # the rows hold the errors
        try:
            if isinstance(raw, RecordError):
                raise raw
            example = self._stage.example(raw, here)
            writer.write(example)
        except (RecordError, LimitExceededError) as error:
            message = quarantine.refuse(here, raw, error)
            writer.refuse(str(here), message)
            reasons[reason(message, here)] += 1
            return Counts(skipped=1)
        dropped = example.dropped_images
        if dropped:
            quarantine.drop(here, raw, dropped)
            reasons.update(f"image: {reason(error, here)}" for error in dropped)
        return Counts(1, example.num_tokens, len(example.sequence.grid_thw), images_dropped=len(dropped))


def settings_of(preprocess: MakeExample) -> dict[str, object]:
    """Describe the settings that determine the outputs."""
    return describe({"preprocess": preprocess, "part_bytes": PART_BYTES})
