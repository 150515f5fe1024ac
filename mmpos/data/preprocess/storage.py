"""Ready sequences in Parquet files: examples in, one whole file out, and the same examples back."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from mmpos.data.examples import Example, Location, Record, RecordError
from mmpos.data.preprocess.settings import differences
from mmpos.data.readers.base import Raw, broken, is_chosen, stride
from mmpos.data.stores import open_parquet, store_path
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, counted, integer, text

__all__ = [
    "FORMAT_VERSION",
    "SCHEMA",
    "ListedFile",
    "SequenceRows",
    "SequenceShard",
    "SequenceWriter",
    "from_row",
    "get_example",
    "to_row",
]

GROUP_BYTES = 32 * 2**20
"""Size of the arrays of a row group at which the group is closed."""

GROUP_ROWS = 1024
"""Most examples in a row group."""

_MAX_VALUE = 2**31 - 1  # bytes that one value of a Parquet column may hold
_PATCHES = ("uint8", "float32")
_IDS = pa.list_(pa.int64())

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_images", pa.int64(), nullable=False),
        pa.field("input_ids", _IDS, nullable=False),
        pa.field("labels", _IDS, nullable=False),
        pa.field("part_offsets", _IDS, nullable=False),
        pa.field("kind", pa.binary(), nullable=False),  # (segments,) uint8
        pa.field("extents", pa.binary(), nullable=False),  # (3, segments) int64; this and all below: little-endian
        pa.field("seconds_per_frame", pa.binary()),  # (2, segments) int64
        pa.field("row_separator", pa.binary()),  # (segments,) bool
        pa.field("extra_tokens", pa.binary()),  # (segments,) int64
        pa.field("table", pa.binary(), nullable=False),  # (5 + 4 axes, segments) int64
        pa.field("documents", pa.binary(), nullable=False),  # (4, 1) int64
        pa.field("fractional", pa.bool_(), nullable=False),
        pa.field("scheme", pa.string(), nullable=False),
        pa.field("grid_thw", pa.binary(), nullable=False),  # (images, 3) int64
        pa.field("image_spans", pa.binary(), nullable=False),  # (images, 2) int64
        pa.field("image_margins", _IDS, nullable=False),  # two numbers
        pa.field("audio_margins", _IDS, nullable=False),  # two numbers
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),
        pa.field("patches", pa.large_binary()),
        pa.field("patches_dtype", pa.string()),
        pa.field("patches_shape", _IDS),
    ]
)


FORMAT_VERSION = 3
"""Of the columns; a file of another version is refused."""

_METADATA = b"mmpos"

Number = TypeVar("Number", bound=np.generic)

Facts: TypeAlias = dict[str, Any]
"""Anything JSON, by name."""

Row: TypeAlias = dict[str, Any]
"""Values of an example by column, as pyarrow takes them."""


class _Footer(TypedDict):
    version: int
    axes: int
    facts: Facts


class SequenceWriter:
    """Writer of examples to one Parquet file, in row groups of bounded size.

    The file is there, and what was there before it is gone, when the writer is closed without an error.

    Args:
        path: the file, or its URL.

    Attributes:
        facts: anything JSON; it goes into the footer, and SequenceShard.facts gives it back.

    Raises:
        OSError: here and later: the file cannot be written; the error names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._rows: list[Row] = []
        self._bytes = 0
        self._axes: int | None = None
        self.facts: Facts = {}
        with ExitStack() as stack:
            self._sink = _HashedFile(stack.enter_context(store_path("path", path).write()))
            # A page of pixels is not worth a dictionary, and a checksum finds a broken disk.
            self._parquet = parquet.ParquetWriter(
                self._sink,
                SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["scheme", "patches_dtype"],
                write_statistics=False,
                write_page_checksum=True,
            )
            self._file = stack.pop_all()

    @property
    def size(self) -> int:
        """Bytes written; when the writer is closed, those of the file."""
        return self._sink.size

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes written."""
        return self._sink.digest.hexdigest()

    def write(self, example: Example) -> None:
        """Add one example.

        Raises:
            InvalidInputError: it is not one document, or its positions have other axes than those before it.
            LimitExceededError: its patches do not fit in a Parquet file.
        """
        row = to_row(example)
        axes = example.sequence.positions.axes
        if self._axes not in (None, axes):
            raise InvalidInputError(
                f"{example.key}: positions: got {counted(axes, 'axis')}, want {self._axes} as before it"
            )
        self._axes = axes
        self._rows.append(row)
        self._bytes += sum(len(value) if isinstance(value, bytes) else 8 * np.size(value) for value in row.values())
        if self._bytes >= GROUP_BYTES or len(self._rows) == GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the examples that are left, and the footer with the facts."""
        with self._file:
            self._flush()
            footer = {"version": FORMAT_VERSION, "axes": self._axes, "facts": self.facts}
            self._parquet.add_key_value_metadata({_METADATA: json.dumps(footer, sort_keys=True).encode()})
            self._parquet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(OSError):  # not worth finishing
            self._parquet.close()
        self._file.__exit__(kind, error, trace)

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_table(pa.Table.from_pylist(self._rows, SCHEMA), row_group_size=len(self._rows))
            self._rows, self._bytes = [], 0


class _HashedFile:
    """File that counts and hashes what is written to it.

    Args:
        file: takes the bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Leave the file open, as its owner closes it."""

    @property
    def closed(self) -> bool:
        return self._file.closed


@dataclass(frozen=True)
class ListedFile:
    """Facts that a manifest has of a file.

    Args:
        manifest: path of the manifest.
        rows: examples of the file.
        settings: with which it was made.
    """

    manifest: str
    rows: int
    settings: Mapping[str, object] = field(repr=False, hash=False)

    def check(self, path: object, rows: int, facts: Facts) -> None:
        """Check the file itself.

        Args:
            path: of the file.
            rows: its examples.
            facts: that its writer stored.

        Raises:
            InvalidInputError: it is not the file that the manifest lists.
        """
        if rows != self.rows:
            raise InvalidInputError(f"{path}: rows: got {rows}, want {self.rows} as {self.manifest} says")
        if other := differences(facts.get("settings", {}), self.settings):
            raise InvalidInputError(f"{path}: settings: got {', and '.join(other)} as {self.manifest} says")


@dataclass(frozen=True)
class SequenceShard:
    """Parquet file of ready sequences.

    Args:
        path: the file, or its URL.
        axes: axes that its positions must have; None takes any.
        listed: what a manifest says of it, which is checked when it is opened; None takes any file.
    """

    path: str | os.PathLike[str]
    axes: int | None = None
    listed: ListedFile | None = None

    @property
    def facts(self) -> Facts:
        """Facts that its writer stored."""
        with self._open() as file:
            return self._footer(file)["facts"]

    @property
    def lengths(self) -> IntArray:
        """(examples,) tokens of each example; nothing else is read."""
        lengths: IntArray = self.columns(["num_tokens"])["num_tokens"].to_numpy().astype(np.int64)
        return lengths

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Read these columns of ``SCHEMA`` of all examples; nothing else is read."""
        with self._open() as file:
            self._footer(file)
            return file.read(list(names))

    @property
    def source(self) -> str:
        """Path of the file."""
        return str(self.path)

    def count(self) -> int:
        """Return the number of examples, from the footer."""
        with self._open() as file:
            self._footer(file)
            return int(file.metadata.num_rows)

    def examples(self, start: int = 0) -> Iterator[Example]:
        """Read the examples in the order in which they were written; one row group is in memory at a time.

        Args:
            start: the first to give; row groups before it are not read.

        Raises:
            InvalidInputError: no file of ready sequences, one of another version or of other axes, or a broken one.
        """
        for _, example in self._rows(start, 1):
            if isinstance(example, RecordError):
                raise example
            yield example

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the examples as records, of which ``get_example`` makes examples again in a loader."""
        for index, example in self._rows(start, step):
            yield Location(self.source, index), example if isinstance(example, RecordError) else {"example": example}

    def rows(self, groups: int) -> SequenceRows:
        """Open the file to read examples in any order; see SequenceRows."""
        file = self._open()
        return SequenceRows(self, file, self._footer(file)["axes"], groups)

    def _rows(self, start: int, step: int) -> Iterator[tuple[int, Example | RecordError]]:
        start, step = stride(start, step)
        with self._open() as file:
            axes = self._footer(file)["axes"]
            first = 0
            for group in range(file.num_row_groups):
                stop = first + file.metadata.row_group(group).num_rows
                wanted = [index for index in range(first, stop) if is_chosen(index, start, step)]
                if wanted:
                    rows = self.group(file, group)
                    for index in wanted:
                        yield index, self.example(rows, index - first, Location(self.source, index), axes)
                first = stop

    def group(self, file: parquet.ParquetFile, group: int) -> pa.Table | Exception:
        """Read a row group, or return why it cannot be read."""
        try:
            return file.read_row_group(group, SCHEMA.names)
        except (OSError, pa.ArrowException) as error:
            return error

    def example(self, rows: pa.Table | Exception, i: int, here: Location, axes: int) -> Example | RecordError:
        """Make an example of row i of a row group, or return why it cannot be made."""
        if isinstance(rows, Exception):
            return broken(here, rows)
        try:
            return from_row({name: rows[name][i] for name in SCHEMA.names}, axes)
        except (LookupError, TypeError, ValueError) as error:
            return RecordError(f"{here}: {error}")

    def _open(self) -> parquet.ParquetFile:
        try:
            return open_parquet(store_path("path", self.path), page_checksum_verification=True)
        except pa.ArrowException as error:
            raise InvalidInputError(f"{self.path}: got no Parquet file ({error}), want ready sequences") from error

    def _footer(self, file: parquet.ParquetFile) -> _Footer:
        stored = (file.metadata.metadata or {}).get(_METADATA)
        if stored is None:
            raise InvalidInputError(f"{self.path}: got a Parquet file of others, want ready sequences of mmpos")
        footer: _Footer = json.loads(stored)
        if footer["version"] != FORMAT_VERSION:
            got = footer["version"]
            raise InvalidInputError(
                f"{self.path}: got sequences of version {got}, want {FORMAT_VERSION}: write them anew"
            )
        if self.axes is not None and footer["axes"] not in (None, self.axes):
            raise InvalidInputError(f"{self.path}: got positions of {footer['axes']} axes, want {self.axes}")
        if self.listed is not None:
            self.listed.check(self.path, file.metadata.num_rows, footer["facts"])
        return footer


class SequenceRows:
    """Examples of a SequenceShard in any order; the row groups that were read last stay in memory.

    Args:
        shard: the shard.
        file: its open file.
        axes: axes of its positions.
        groups: most row groups in memory.
    """

    def __init__(self, shard: SequenceShard, file: parquet.ParquetFile, axes: int, groups: int) -> None:
        self._shard, self._file, self._axes, self._most = shard, file, axes, groups
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._groups = OrderedDict[int, pa.Table | Exception]()

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, row: int) -> Example:
        """Read an example.

        Raises:
            InvalidInputError: there is no such row.
            RecordError: it cannot be read.
        """
        row = integer("row", row, minimum=0, maximum=len(self) - 1)
        group = int(self._ends.searchsorted(row, side="right"))
        if group not in self._groups:
            self._groups[group] = self._shard.group(self._file, group)
            while len(self._groups) > self._most:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        first = int(self._ends[group]) - self._file.metadata.row_group(group).num_rows
        here = Location(self._shard.source, row)
        example = self._shard.example(self._groups[group], row - first, here, self._axes)
        if isinstance(example, RecordError):
            raise example
        return example

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def get_example(record: Record, location: Location) -> Example:
    """Return the example of a record of a SequenceShard; stands where a Preprocess does for other shards."""
    example = record.get("example")
    if not isinstance(example, Example):
        raise RecordError(f"{location}: got a raw record, want one of a SequenceShard, which opens ready sequences")
    return example


def to_row(example: Example) -> Row:
    """Turn an example into a row of the file.

    Raises:
        InvalidInputError: it is not one document, its key is no Unicode, or its patches are of another type.
        LimitExceededError: its patches do not fit in one value of a Parquet file.
    """
    sequence = example.sequence
    segments, positions, patches = sequence.segments, sequence.positions, sequence.patches
    if segments.num_documents != 1 or positions.num_documents != 1:
        name = "positions" if segments.num_documents == 1 else "segments"
        got = getattr(sequence, name).num_documents
        raise InvalidInputError(f"{example.key}: {name}: got {counted(got, 'document')}, want one")
    row: Row = {
        "key": text("key", example.key),
        "num_tokens": example.num_tokens,
        "num_images": len(sequence.grid_thw),
        "input_ids": sequence.input_ids,
        "labels": example.labels,
        "part_offsets": sequence.part_offsets,
        "kind": segments.kind.tobytes(),
        "extents": _bytes(segments.extents),
        "seconds_per_frame": None if segments.seconds_per_frame is None else _bytes(segments.seconds_per_frame),
        "row_separator": None if segments.row_separator is None else segments.row_separator.tobytes(),
        "extra_tokens": None if segments.extra_tokens is None else _bytes(segments.extra_tokens),
        "table": _bytes(positions.table),
        "documents": _bytes(positions.documents),
        "fractional": positions.fractional,
        "scheme": positions.scheme,
        "grid_thw": _bytes(sequence.grid_thw),
        "image_spans": _bytes(sequence.image_spans),
        "image_margins": sequence.image_margins,
        "audio_margins": sequence.audio_margins,
        "image_hashes": list(sequence.image_hashes),
    }
    if patches is not None:
        if patches.dtype.name not in _PATCHES:
            raise InvalidInputError(f"{example.key}: patches: got {patches.dtype}, want uint8 or float32")
        if patches.nbytes > _MAX_VALUE:
            raise LimitExceededError(f"{example.key}: patches: got {patches.nbytes} bytes, want at most {_MAX_VALUE}")
        shape = list(patches.shape)
        row |= {"patches": _bytes(patches), "patches_dtype": patches.dtype.name, "patches_shape": shape}
    return row


def from_row(row: Mapping[str, pa.Scalar], axes: int) -> Example:
    """Turn a row into an example with arrays of its own; every table is checked.

    Args:
        row: a pyarrow scalar for every column.
        axes: of its positions.
    """
    kind = _array(row["kind"], np.uint8, (-1,))
    segments = SegmentTable(
        kind,
        _array(row["extents"], np.int64, (3, -1)),
        np.array([0, kind.size]),
        _optional(row["seconds_per_frame"], np.int64, (2, -1)),
        _optional(row["row_separator"], np.bool_, (-1,)),
        _optional(row["extra_tokens"], np.int64, (-1,)),
    )
    input_ids = _numbers(row["input_ids"])
    if row["num_tokens"].as_py() != input_ids.size:
        raise InvalidInputError(f"num_tokens: got {row['num_tokens']}, want {input_ids.size}, those of input_ids")
    image_spans = _array(row["image_spans"], np.int64, (-1, 2))
    _check_spans(image_spans, row["image_margins"].as_py(), input_ids.size)
    positions = PositionTable.from_arrays(
        _array(row["table"], np.int64, (AXES + 4 * axes, -1)),
        _array(row["documents"], np.int64, (4, -1)),
        input_ids.size,
        fractional=row["fractional"].as_py(),
        scheme=row["scheme"].as_py(),
    )
    patches = None
    if row["patches"].is_valid:
        patches = _array(
            row["patches"], np.dtype(row["patches_dtype"].as_py()).type, tuple(row["patches_shape"].as_py())
        )
    sequence = InterleavedSequence(
        input_ids=input_ids,
        token_type_ids=positions.token_types(segments),
        segments=segments,
        positions=positions,
        patches=patches,
        grid_thw=_array(row["grid_thw"], np.int64, (-1, 3)),
        image_spans=image_spans,
        image_hashes=tuple(row["image_hashes"].as_py()),
        part_offsets=_numbers(row["part_offsets"]),
        image_margins=tuple(row["image_margins"].as_py()),
        audio_margins=tuple(row["audio_margins"].as_py()),
    )
    return Example(row["key"].as_py(), sequence, _numbers(row["labels"]))


def _check_spans(spans: npt.NDArray[np.int64], margins: list[int], num_tokens: int) -> None:
    """Check that images with their markers follow one another inside of a document."""
    before, after = margins
    bounds = np.concatenate([[0], (spans + np.array([-before, after])).ravel(), [num_tokens]])
    if min(margins) < 0 or (np.diff(bounds) < 0).any():
        got = f"{spans.tolist()} with margins of {before} and {after} tokens"
        raise InvalidInputError(f"image_spans: got {got}, want spans in order within {num_tokens} tokens")


def _bytes(array: npt.NDArray[np.generic]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(value: pa.Scalar, dtype: type[Number], shape: tuple[int, ...]) -> npt.NDArray[Number]:
    """Copy an array out of a value, so that it is writable and keeps no row group in memory."""
    stored = np.frombuffer(value.as_buffer(), np.dtype(dtype).newbyteorder("<"))
    return stored.astype(dtype).reshape(shape)


def _optional(value: pa.Scalar, dtype: type[Number], shape: tuple[int, ...]) -> npt.NDArray[Number] | None:
    return _array(value, dtype, shape) if value.is_valid else None


def _numbers(value: pa.Scalar) -> IntArray:
    numbers: IntArray = value.values.to_numpy().copy()
    return numbers
