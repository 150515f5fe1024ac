"""The work of a run: read a shard in parts, and write each part to a file with its settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from mmpos.data import paths
from mmpos.data.examples import Location, MakeExample, RecordError
from mmpos.data.quarantine import MAX_SKIPPED, Line, OnError, Quarantine, SkipLimit
from mmpos.data.readers import Raw, Reader
from mmpos.data.settings import describe
from mmpos.data.stage import Stage
from mmpos.data.storage import SequenceWriter
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import one_of

__all__ = ["Counts", "Output", "PartJob", "ShardPart", "Step", "Task", "facts_of_input", "settings_of"]

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
    """Finished file of preprocessed sequences; SequenceShard reads it.

    Args:
        source: path or name of its input.
        path: path of the file.
        counts: counts of its records and sequences.
        reasons: number of skipped records and dropped images by reason.
        reused: whether an earlier run wrote it.
    """

    source: str
    path: str
    counts: Counts
    reasons: Mapping[str, int]
    reused: bool


class ShardPart(NamedTuple):
    """Records of one output file."""

    number: int  # of the file among those of its input
    stop: int  # index of the first record after the part
    position: int  # bytes, or records, of the input up to the end of the part
    amount: int  # those of this part
    records: list[tuple[Location, Raw]]
    is_last: bool


class Step(NamedTuple):
    """Progress of one part: what was read, the counts and the reasons so far, and whether its file is finished."""

    task: int
    part: int
    read: int
    counts: Counts
    reasons: Mapping[str, int]
    is_finished: bool = False


@dataclass(frozen=True)
class Task:
    """Shard, and the output files to make from it."""

    number: int
    reader: Reader
    folder: str
    stem: str  # prefix of the output names
    facts: Mapping[str, Any]  # facts about the input
    outputs: Mapping[int, Output] = field(default_factory=dict)  # finished outputs by part number
    begin: tuple[int, int, int] | None = (0, 0, 0)  # part number, record and position; None if nothing is left

    def output(self, part: int = 0) -> str:
        """Return the path of the output of a part."""
        return paths.join(self.folder, f"{self.stem}.part{part:05}.parquet" if part else f"{self.stem}.parquet")

    @property
    def size(self) -> int:
        """Bytes or records of the input; 0 if that is unknown."""
        return int(self.facts.get("size") or self.facts.get("records") or 0)

    def parts(self) -> Iterator[ShardPart]:
        """Read the unfinished parts of the shard; part boundaries depend only on the records.

        Raises:
            InvalidInputError: the shard changed while it was read; raised before the last part.
        """
        assert self.begin is not None, "unfinished tasks have a part to begin with"
        number, stop, position = self.begin
        rows, begun, first = self.reader.count(), paths.BytesRead.total, position
        records = self.reader.records(stop)
        ahead = next(records, None)
        while True:
            held, size = [], 0
            while ahead is not None and size < PART_BYTES:
                held.append(ahead)
                size += _size(ahead[1])
                ahead = next(records, None)
            stop = held[-1][0].index + 1 if held else stop
            if ahead is None and facts_of_input(self.reader) != self.facts:
                want = "want one that does not change"
                raise InvalidInputError(f"{self.reader.source}: got a file that changed while it was read, {want}")
            before = position
            done = self.size * stop // rows if rows else min(first + paths.BytesRead.total - begun, self.size)
            position = self.size if ahead is None else done
            if number not in self.outputs:
                yield ShardPart(number, stop, position, position - before, held, ahead is None)
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


@dataclass(frozen=True)
class PartJob:
    """Work done on every part with the arguments of write_sequences; picklable if its callable is."""

    preprocess: MakeExample
    on_error: OnError = "raise"
    max_skipped: float = MAX_SKIPPED
    stage: Stage = field(init=False, repr=False, compare=False)
    limit: SkipLimit = field(init=False, repr=False, compare=False)
    settings: Mapping[str, object] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", Stage(self.preprocess))
        one_of("on_error", self.on_error, ("raise", "skip"))
        object.__setattr__(self, "settings", settings_of(self.preprocess))
        object.__setattr__(self, "limit", SkipLimit(self.max_skipped))

    def write(self, task: Task, part: ShardPart) -> Generator[Step, None, None]:
        """Write the file of a part; yield a step after each record, and one when the file is finished.

        Raises:
            RecordError: a record is unusable, and on_error is "raise".
            InvalidInputError: this process skipped more records than max_skipped allows.
        """
        counts, reasons = Counts(), Counter[str]()
        with SequenceWriter(task.output(part.number)) as writer:

            def keep(line: Line) -> None:
                if "dropped_images" not in line:
                    writer.refuse(f"{line['source']}[{line['index']}]", str(line["error"]))

            quarantine = Quarantine(self.on_error, keep, self.limit)
            for number, (location, raw) in enumerate(part.records):
                self.limit.read()
                try:
                    counts += self._write(writer, quarantine, location, raw, reasons)
                except RecordError as error:
                    quarantine.refuse(location, raw, error)
                    counts += Counts(skipped=1)
                    reasons[_reason(str(error))] += 1
                yield Step(task.number, part.number, part.amount * number // len(part.records), counts, reasons)
            self.limit.end()
            writer.facts = {
                "input": task.facts,
                "settings": self.settings,
                "counts": asdict(counts),
                "reasons": reasons,
                "stop": part.stop,
                "position": part.position,
                "is_last": part.is_last,
            }
        yield Step(task.number, part.number, part.amount, counts, reasons, True)

    def _write(
        self, writer: SequenceWriter, quarantine: Quarantine, here: Location, raw: Raw, reasons: Counter[str]
    ) -> Counts:
        if isinstance(raw, RecordError):
            raise raw
        try:
            example = self.stage.example(raw, here)
            writer.write(example)
        except LimitExceededError as error:
            raise RecordError(f"{here}: {error}") from error
        if example.dropped_images:
            quarantine.drop(here, raw, example.dropped_images)
            reasons.update(f"image: {_reason(error)}" for error in example.dropped_images)
        images, dropped = len(example.sequence.grid_thw), len(example.dropped_images)
        return Counts(1, example.num_tokens, images, images_dropped=dropped)


def settings_of(preprocess: MakeExample) -> dict[str, object]:
    """Describe the settings that determine the outputs."""
    return describe({"preprocess": preprocess, "part_bytes": PART_BYTES})


def _reason(message: str) -> str:
    """Return what an error says, without the record, the numbers and the quoted texts that it names."""
    said = message.partition("]): ")[2] or message.partition("]: ")[2] or message
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "…", said)[:200]
