"""One Parquet schema of preprocessed sequences: what a Stage returns, files hold, and loaders read unchanged."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute, parquet

from mmpos.data.examples import Example, Location, Record, RecordError
from mmpos.data.paths import checked_path, open_parquet, write_file
from mmpos.data.readers import Raw, broken, stride
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, counted, integer, text

__all__ = ["SCHEMA", "SequenceRows", "SequenceShard", "SequenceWriter", "from_row", "get_example", "to_row"]

GROUP_BYTES = 32 * 2**20
"""Bytes of arrays at which a row group is closed."""

GROUP_ROWS = 1024
"""Maximum number of rows in a row group."""

_HELD_GROUPS = 64  # row groups in memory for random access; all that one window of a plan uses should fit
_MAX_VALUE = 2**31 - 1  # maximum size in bytes of one value in a Parquet column
_PATCHES = ("uint8", "float32")
_IDS = pa.list_(pa.int64())

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("error", pa.string()),  # why there is no example; all other columns except key are then null
        pa.field("dropped_images", pa.list_(pa.string())),  # errors of the images that were left out
        pa.field("num_tokens", pa.int64()),
        pa.field("num_images", pa.int64()),
        pa.field("input_ids", _IDS),
        pa.field("labels", _IDS),
        pa.field("part_offsets", _IDS),
        pa.field("kind", pa.binary()),  # (segments,) uint8
        pa.field("extents", pa.binary()),  # (3, segments) int64; little-endian, like all arrays below
        pa.field("seconds_per_frame", pa.binary()),  # (2, segments) int64
        pa.field("row_separator", pa.binary()),  # (segments,) bool
        pa.field("extra_tokens", pa.binary()),  # (segments,) int64
        pa.field("axes", pa.int32()),
        pa.field("table", pa.binary()),  # (5 + 4 axes, segments) int64
        pa.field("documents", pa.binary()),  # (4, 1) int64
        pa.field("fractional", pa.bool_()),
        pa.field("scheme", pa.string()),
        pa.field("grid_thw", pa.binary()),  # (images, 3) int64
        pa.field("image_spans", pa.binary()),  # (images, 2) int64
        pa.field("image_margins", _IDS),  # two numbers
        pa.field("audio_margins", _IDS),  # two numbers
        pa.field("image_hashes", pa.list_(pa.string())),
        pa.field("patches", pa.large_binary()),
        pa.field("patches_dtype", pa.string()),
        pa.field("patches_shape", _IDS),
    ]
)
"""Columns of a preprocessed sequence, or of the error of a record without one."""

_VERSION = 4  # of the columns; files of other versions are refused
_METADATA = b"mmpos"

Number = TypeVar("Number", bound=np.generic)

Row: TypeAlias = dict[str, Any]
"""Values of an example by column, in types that pyarrow accepts."""


class SequenceWriter:
    """Writer of examples to one Parquet file, in row groups of bounded size.

    The file is written whole when the writer is closed without an error.

    Args:
        path: path or URL of the file.

    Attributes:
        facts: JSON-compatible values for the footer; SequenceShard.facts returns them.

    Raises:
        OSError: the file cannot be written, now or in a later call; the error names the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._rows: list[Row] = []
        self._bytes = 0
        self._axes: int | None = None
        self.facts: dict[str, Any] = {}
        with ExitStack() as stack:
            sink = stack.enter_context(write_file(checked_path("path", path)))
            # Dictionary encoding does not help pages of pixels; checksums detect disk corruption.
            self._parquet = parquet.ParquetWriter(
                sink,
                SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["scheme", "patches_dtype"],
                write_statistics=["error"],
                write_page_checksum=True,
            )
            stack.push(self._end)
            self._closing = stack.pop_all()

    def write(self, example: Example) -> None:
        """Add one example.

        Raises:
            InvalidInputError: the example is not a single document, or its positions have different axes from those of
                earlier examples.
            LimitExceededError: the patches do not fit in a Parquet file.
        """
        row = to_row(example)
        if self._axes not in (None, row["axes"]):
            got, want = counted(row["axes"], "axis"), f"{self._axes} as in earlier examples"
            raise InvalidInputError(f"{example.key}: positions: got {got}, want {want}")
        self._axes = row["axes"]
        self._add(row)

    def refuse(self, key: str, error: str) -> None:
        """Add the error of a record without an example."""
        self._add({"key": unicode(key), "error": unicode(error)})

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        self._bytes += sum(len(value) if isinstance(value, bytes) else 8 * np.size(value) for value in row.values())
        if self._bytes >= GROUP_BYTES or len(self._rows) == GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write the remaining examples, and the footer with the facts."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._closing.__exit__(*raised)

    def _end(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):  # the file is discarded anyway
                self._parquet.close()
            return
        self._flush()
        footer = {"version": _VERSION, "facts": self.facts}
        self._parquet.add_key_value_metadata({_METADATA: json.dumps(footer, sort_keys=True).encode()})
        self._parquet.close()

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_table(pa.Table.from_pylist(self._rows, SCHEMA), row_group_size=len(self._rows))
            self._rows, self._bytes = [], 0


@dataclass(frozen=True)
class SequenceShard:
    """Parquet file of preprocessed sequences, written here or by another engine; rows with an error are left out.

    Args:
        path: path or URL of the file.
    """

    path: str | os.PathLike[str]

    @property
    def source(self) -> str:
        """Path of the file."""
        return str(self.path)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the file's writer stored; empty if another engine wrote the file."""
        with self.open() as file:
            stored = (file.metadata.metadata or {}).get(_METADATA)
        facts: dict[str, Any] = json.loads(stored)["facts"] if stored else {}
        return facts

    @property
    def lengths(self) -> IntArray:
        """(examples,) number of tokens of each example; no pixels are read."""
        lengths: IntArray = self.columns(["num_tokens"])["num_tokens"].to_numpy().astype(np.int64)
        return lengths

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Read these columns of ``SCHEMA`` for all examples, and no others."""
        with self.open() as file:
            table = file.read(list(dict.fromkeys([*names, "error"])))
        kept = table.filter(compute.is_null(table["error"])).select(list(names))
        return kept.cast(pa.schema([SCHEMA.field(name) for name in names]))

    def errors(self) -> dict[str, str]:
        """Return the error of each record without an example, by the key of the record."""
        with self.open() as file:
            table = file.read(["key", "error"])
        refused = table.filter(compute.is_valid(table["error"]))
        return dict(zip(refused["key"].to_pylist(), refused["error"].to_pylist(), strict=True))

    def count(self) -> int:
        """Return the number of examples."""
        with self.open() as file:
            return len(SequenceRows(self, file))

    def examples(self, start: int = 0) -> Iterator[Example]:
        """Read the examples in the order in which they were written, with one row group in memory at a time.

        Args:
            start: index of the first example; row groups before it are not read.

        Raises:
            InvalidInputError: the file does not contain preprocessed sequences, has another version, or is damaged.
        """
        for _, example in self._rows(start, 1):
            if isinstance(example, RecordError):
                raise example
            yield example

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the examples as records, which ``get_example`` unwraps in a loader."""
        for index, example in self._rows(start, step):
            yield Location(self.source, index), example if isinstance(example, RecordError) else {"example": example}

    def rows(self) -> SequenceRows:
        """Open the file for random access; see SequenceRows."""
        return SequenceRows(self, self.open())

    def _rows(self, start: int, step: int) -> Iterator[tuple[int, Example | RecordError]]:
        start, step = stride(start, step)
        with self.open() as file:
            rows = SequenceRows(self, file, held=1)
            for index in range(start, len(rows), step):
                yield index, rows.read(index)

    def open(self) -> parquet.ParquetFile:
        """Open the file, and check that it holds preprocessed sequences of this version.

        Raises:
            InvalidInputError: the file holds anything else.
            OSError: the file cannot be read.
        """
        try:
            file = open_parquet(checked_path("path", self.path), page_checksum_verification=True)
        except pa.ArrowException as error:
            want = "want preprocessed sequences"
            raise InvalidInputError(f"{self.path}: got no Parquet file ({error}), {want}") from error
        stored = (file.metadata.metadata or {}).get(_METADATA)
        version = json.loads(stored)["version"] if stored else _VERSION
        if version != _VERSION:
            file.close()
            got = f"sequences of version {version}"
            raise InvalidInputError(f"{self.path}: got {got}, want {_VERSION}; write them again")
        if absent := [name for name in SCHEMA.names if name not in file.schema_arrow.names]:
            file.close()
            got = f"a Parquet file without the column {absent[0]!r}"
            raise InvalidInputError(f"{self.path}: got {got}, want preprocessed sequences, as a Stage returns them")
        return file


def _kept(file: parquet.ParquetFile) -> list[IntArray]:
    """Return for each row group the indices of its rows without an error; statistics spare reading the errors."""
    kept = []
    leaf = next(i for i in range(len(file.schema)) if file.schema.column(i).path == "error")
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group)
        statistics = rows.column(leaf).statistics
        if statistics is not None and statistics.has_null_count and statistics.null_count == rows.num_rows:
            kept.append(np.arange(rows.num_rows))
        else:
            errors = file.read_row_group(group, ["error"])["error"]
            kept.append(np.flatnonzero(compute.is_null(errors).to_numpy()))
    return kept


class SequenceRows:
    """Random access to the examples of a SequenceShard; the most recently used row groups stay in memory."""

    def __init__(self, shard: SequenceShard, file: parquet.ParquetFile, held: int = _HELD_GROUPS) -> None:
        self._shard, self._file, self._kept, self._held = shard, file, _kept(file), held
        self._ends = np.cumsum([kept.size for kept in self._kept], dtype=np.int64)
        self._groups = OrderedDict[int, pa.Table | Exception]()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __getitem__(self, row: int) -> Example:
        """Read an example.

        Raises:
            InvalidInputError: the row does not exist.
            RecordError: the example cannot be read.
        """
        example = self.read(integer("row", row, minimum=0, maximum=len(self) - 1))
        if isinstance(example, RecordError):
            raise example
        return example

    def read(self, row: int) -> Example | RecordError:
        """Read an example that exists; return the error if that fails."""
        group = int(self._ends.searchsorted(row, side="right"))
        if group not in self._groups:
            while len(self._groups) >= self._held:
                self._groups.popitem(last=False)
            self._groups[group] = self._read_group(group)
        self._groups.move_to_end(group)
        rows, here = self._groups[group], Location(self._shard.source, row)
        if isinstance(rows, Exception):
            return broken(here, rows)
        kept = self._kept[group]
        i = int(kept[row - int(self._ends[group])])  # counted from the end of the group
        try:
            return from_row({name: rows[name][i] for name in SCHEMA.names})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return RecordError(f"{here}: {error}")

    def _read_group(self, group: int) -> pa.Table | Exception:
        """Read a row group; return the error if it cannot be read."""
        try:
            table = self._file.read_row_group(group, SCHEMA.names).select(SCHEMA.names)
            return table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)
        except (OSError, pa.ArrowException) as error:
            return error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def get_example(record: Record, location: Location) -> Example:
    """Return the example in a record of a SequenceShard; used instead of a Preprocess."""
    example = record.get("example")
    if not isinstance(example, Example):
        raise RecordError(f"{location}: got a raw record, want a record of a SequenceShard")
    return example


def to_row(example: Example) -> Row:
    """Convert an example to a row of the file.

    Raises:
        InvalidInputError: the example is not a single document, its key is not valid Unicode, or its patches are
            neither uint8 nor float32.
        LimitExceededError: the patches do not fit in one value of a Parquet file.
    """
    sequence = example.sequence
    segments, positions, patches = sequence.segments, sequence.positions, sequence.patches
    if segments.num_documents != 1 or positions.num_documents != 1:
        name = "positions" if segments.num_documents == 1 else "segments"
        got = getattr(sequence, name).num_documents
        raise InvalidInputError(f"{example.key}: {name}: got {counted(got, 'document')}, want one")
    if segments.first_frame is not None:
        raise UnsupportedError(f"{example.key}: segments.first_frame: got one, want None in a stored example")
    row: Row = {
        "key": text("key", example.key),
        "dropped_images": [unicode(error) for error in example.dropped_images] or None,
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
        "axes": positions.axes,
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


def from_row(row: Mapping[str, pa.Scalar]) -> Example:
    """Convert a row, a pyarrow scalar of each column, to an example with its own arrays; every table is checked."""
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
        raise InvalidInputError(f"num_tokens: got {row['num_tokens']}, want {input_ids.size}, the size of input_ids")
    image_spans = _array(row["image_spans"], np.int64, (-1, 2))
    _check_spans(image_spans, row["image_margins"].as_py(), input_ids.size)
    positions = PositionTable.from_arrays(
        _array(row["table"], np.int64, (AXES + 4 * row["axes"].as_py(), -1)),
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
    dropped = tuple(row["dropped_images"].as_py() or ())
    return Example(row["key"].as_py(), sequence, _numbers(row["labels"]), dropped_images=dropped)


def _check_spans(spans: npt.NDArray[np.int64], margins: list[int], num_tokens: int) -> None:
    """Check that images with their markers do not overlap and lie within the document."""
    before, after = margins
    bounds = np.concatenate([[0], (spans + np.array([-before, after])).ravel(), [num_tokens]])
    if min(margins) < 0 or (np.diff(bounds) < 0).any():
        got = f"{spans.tolist()} with margins of {before} and {after} tokens"
        raise InvalidInputError(f"image_spans: got {got}, want spans in order within {num_tokens} tokens")


def _bytes(array: npt.NDArray[np.generic]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(value: pa.Scalar, dtype: type[Number], shape: tuple[int, ...]) -> npt.NDArray[Number]:
    """Copy an array out of a value, so that it is writable and does not keep the row group in memory."""
    stored = np.frombuffer(value.as_buffer(), np.dtype(dtype).newbyteorder("<"))
    return stored.astype(dtype).reshape(shape)


def _optional(value: pa.Scalar, dtype: type[Number], shape: tuple[int, ...]) -> npt.NDArray[Number] | None:
    return _array(value, dtype, shape) if value.is_valid else None


def _numbers(value: pa.Scalar) -> IntArray:
    numbers: IntArray = value.values.to_numpy().copy()
    return numbers


def unicode(text: str) -> str:
    """Return the text with lone surrogates, which Parquet cannot hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
