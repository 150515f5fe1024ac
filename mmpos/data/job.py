"""The work of a run: read an input in parts, and write each part to a file that holds its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
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

__all__ = ["Counts", "Output", "Part", "PartJob", "Step", "Task", "facts_of_input", "settings_of"]

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


class Part(NamedTuple):
    """Records of one file."""

    number: int  # of the file among those of its input
    stop: int  # index of the first record after the part
    read: int  # bytes, or records, of the input
    records: list[tuple[Location, Raw]]
    is_last: bool


@dataclass(frozen=True)
class Task:
    """Input, and the files to make from it."""

    number: int
    reader: Reader
    prefix: str  # path of the files without number and suffix
    facts: Mapping[str, Any]  # facts that identify the input
    begin: tuple[int, int, int] = (0, 0, 0)  # first part to write, its first record, and what was read before it
    finished: frozenset[int] = frozenset()  # parts that exist

    @property
    def size(self) -> int:
        """Bytes or records of the input; 0 if that is unknown."""
        return int(self.facts.get("size") or self.facts.get("records") or 0)

    def output(self, part: int = 0) -> str:
        """Return the path of the file of a part."""
        return f"{self.prefix}.part{part:05}.parquet" if part else f"{self.prefix}.parquet"

    def parts(self) -> Iterator[Part]:
        """Read the unfinished parts of the input; their boundaries depend only on the records.

        Raises:
            InvalidInputError: the input changed while it was read; raised before the last part.
        """
        number, stop, position = self.begin
        rows, first = self.reader.count(), position - paths.BytesRead.total
        records = self.reader.records(stop)
        ahead = next(records, None)
        while True:
            held, size, before = [], 0, position
            while ahead is not None and size < PART_BYTES:
                held.append(ahead)
                size += _size(ahead[1])
                ahead = next(records, None)
            stop = held[-1][0].index + 1 if held else stop
            if ahead is None and facts_of_input(self.reader) != self.facts:
                want = "want one that does not change"
                raise InvalidInputError(f"{self.reader.source}: got a file that changed while it was read, {want}")
            position = self.size * stop // rows if rows else min(first + paths.BytesRead.total, self.size)
            position = self.size if ahead is None else position
            if number not in self.finished:
                yield Part(number, stop, position - before, held, ahead is None)
            if ahead is None:
                return
            number += 1


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


class PartJob:
    """Work done on every part with the arguments of write_sequences; picklable if its callable is."""

    def __init__(self, preprocess: MakeExample, on_error: OnError = "raise", max_skipped: float = MAX_SKIPPED) -> None:
        one_of("on_error", on_error, ("raise", "skip"))
        self._stage, self._limit = Stage(preprocess), SkipLimit(max_skipped)
        self.preprocess, self.on_error, self.settings = preprocess, on_error, settings_of(preprocess)

    def run(self, task: Task) -> Generator[Step, None, None]:
        """Write the unfinished files of a task, as ``write`` does."""
        for part in task.parts():
            yield from self.write(task, part)

    def write(self, task: Task, part: Part) -> Generator[Step, None, None]:
        """Write the file of a part; yield a step after each record, and one when the file is finished.

        Raises:
            RecordError: a record is unusable, and on_error is "raise".
            InvalidInputError: this process skipped more records than max_skipped allows.
        """
        counts, reasons, path = Counts(), Counter[str](), task.output(part.number)

        def step(read: int, is_finished: bool = False) -> Step:
            output = Output(task.reader.source, path, read, counts, reasons, False)
            return Step(task.number, part.number, output, is_finished)

        with SequenceWriter(path) as writer:
            quarantine = Quarantine(self.on_error, lambda line: None, self._limit)  # the rows hold the errors
            for number, (here, raw) in enumerate(part.records):
                self._limit.read()
                try:
                    if isinstance(raw, RecordError):
                        raise raw
                    example = self._stage.example(raw, here)
                    writer.write(example)
                except (RecordError, LimitExceededError) as error:
                    message = quarantine.refuse(here, raw, error)
                    writer.refuse(str(here), message)
                    counts += Counts(skipped=1)
                    reasons[reason(message, here)] += 1
                else:
                    dropped, images = example.dropped_images, len(example.sequence.grid_thw)
                    counts += Counts(1, example.num_tokens, images, images_dropped=len(dropped))
                    if dropped:
                        quarantine.drop(here, raw, dropped)
                        reasons.update(f"image: {reason(error, here)}" for error in dropped)
                yield step(part.read * number // len(part.records))
            self._limit.end()
            writer.facts = {
                "input": task.facts,
                "settings": self.settings,
                "counts": asdict(counts),
                "reasons": reasons,
            }
            writer.facts |= {"stop": part.stop, "read": part.read, "is_last": part.is_last}
        yield step(part.read, True)


def settings_of(preprocess: MakeExample) -> dict[str, object]:
    """Describe the settings that determine the outputs."""
    return describe({"preprocess": preprocess, "part_bytes": PART_BYTES})
