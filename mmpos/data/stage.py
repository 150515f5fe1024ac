"""Stage: turn a batch of raw records into rows of preprocessed examples, in Ray Data, Daft and datasets."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from mmpos.data.examples import Example, ImageError, Location, MakeExample, Record, RecordError, make_example
from mmpos.data.storage import SCHEMA, from_row, to_row, unicode
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.support.checks import counted

__all__ = ["SCHEMA", "Block", "Stage", "read_examples"]

Block: TypeAlias = pa.Table | pa.RecordBatch | Mapping[str, Sequence[Any]]
"""A batch of records: an Arrow table or record batch, or numpy columns or lists by name."""

_BATCHED = "Dataset.map passes batches if batched=True"


@dataclass(frozen=True)
class Stage:
    """Picklable, stateless callable that converts a batch of records to preprocessed examples.

    An unusable record becomes a row with its ``error`` and never fails the batch. A record without an id of its own
    has the key ``source[index]``.

    Args:
        preprocess: converts a record and its location to an example, as for a loader.
        source: column with the origin of a record, such as "path"; None uses "records".
        index: column with a number of the record that is unique within its source; None computes one from the content,
            so that only records with equal contents and sources in different batches share a number.
    """

    preprocess: MakeExample
    source: str | None = None
    index: str | None = None

    def __post_init__(self) -> None:
        call: object = self.preprocess
        if not callable(call):
            raise InvalidInputError(
                f"preprocess: got {type(call).__name__}, want a callable that takes a record and a location"
            )
        for name in ("source", "index"):
            column: object = getattr(self, name)
            if column is not None and not isinstance(column, str):
                raise InvalidInputError(f"{name}: got {column!r}, want the name of a column or None")

    def __call__(self, block: Block, indices: Sequence[int] | None = None) -> pa.Table:
        """Convert a batch of records to examples.

        Raises:
            InvalidInputError: block is not a batch, lacks the column ``source`` or ``index``, or an index is no number.
            UnsupportedError: the builder lacks a component that a record needs.
            ServiceError: the service that builds sequences does not respond.
            Exception: any other error raised by the callable; a note on the error names the record.
        """
        records = _records(block)
        rows = [
            self._row(record, here) for record, here in zip(records, self._locations(records, indices), strict=True)
        ]
        return pa.Table.from_pylist(rows, SCHEMA)

    def _locations(self, records: Sequence[Record], indices: Sequence[int] | None) -> Iterator[Location]:
        for name in (self.source, self.index):
            if records and name is not None and name not in records[0]:
                raise InvalidInputError(f"{name}: got no column {name!r}, want one of {', '.join(records[0])}")
        if isinstance(indices, int):
            raise InvalidInputError(f"indices: got {indices}, want a number for each record; {_BATCHED}")
        if indices is not None and len(indices) != len(records):
            got = f"{len(indices)} for {counted(len(records), 'record')}"
            raise InvalidInputError(f"indices: got {got}, want one for each record")
        equal = Counter[bytes]()
        for i, record in enumerate(records):
            source = "records" if self.source is None else _source(record[self.source])
            if indices is not None:
                index = indices[i]
            elif self.index is not None:
                index = record[self.index]
                if isinstance(index, bool) or not isinstance(index, int | np.integer):
                    raise InvalidInputError(f"index: got {index!r} in the column {self.index!r}, want an integer")
            else:
                content = hashlib.blake2b(digest_size=7)
                _feed(content, record)
                digest = content.digest()
                index = int.from_bytes(digest, "little") + equal[digest]
                equal[digest] += 1
            yield Location(source, int(index))

    def _row(self, record: Record, here: Location) -> dict[str, Any]:
        try:
            return to_row(make_example(self.preprocess, record, here))
        except (RecordError, LimitExceededError) as error:
            if isinstance(error, ImageError) and error.on_error == "raise":
                raise
            return {"key": unicode(str(here)), "error": unicode(str(error))}


def read_examples(block: pa.Table | pa.RecordBatch) -> Iterator[Example]:
    """Read the examples from the output of a stage, skipping rows with an error.

    Args:
        block: a table with the columns of ``SCHEMA`` and possibly others.

    Raises:
        InvalidInputError: a column is missing or has the wrong type, or a row is invalid.
    """
    argument: object = block
    if not isinstance(argument, pa.Table | pa.RecordBatch):
        raise InvalidInputError(f"block: got {type(argument).__name__}, want an Arrow table")
    missing = [name for name in SCHEMA.names if name not in block.schema.names]
    if missing:
        raise InvalidInputError(f"block: got no column {missing[0]!r}, want the columns of a Stage")
    table = pa.table([_cast(block[field.name], field) for field in SCHEMA], schema=SCHEMA)
    for i in range(table.num_rows):
        if not table["error"][i].is_valid:
            try:
                yield from_row({name: table[name][i] for name in SCHEMA.names})
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise InvalidInputError(f"block[{i}]: got an invalid row ({error}), want a row of a Stage") from error


def _cast(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InvalidInputError(f"block.{field.name}: got {column.type}, want {field.type}") from error


def _feed(digest: hashlib.blake2b, value: object) -> None:
    """Add a value to a digest; equal values have equal digests in every process."""
    if isinstance(value, Mapping | list | tuple):
        digest.update(f"{len(value)}:".encode())
        for item in value.items() if isinstance(value, Mapping) else value:
            _feed(digest, item)
    elif isinstance(value, bytes | bytearray | memoryview):
        digest.update(f"{len(value)}b".encode())
        digest.update(value)
    elif isinstance(value, str | int | float | None):
        digest.update(f"{value!r},".encode("utf-8", "surrogatepass"))
    else:
        digest.update(pickle.dumps(value, protocol=4))


def _source(value: object) -> str:
    return unicode(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))


def _records(block: Block) -> list[dict[str, Any]]:
    """Convert a batch to a list of records."""
    if isinstance(block, pa.Table | pa.RecordBatch):
        try:
            return block.to_pylist()
        except UnicodeDecodeError:  # invalid text is kept as bytes, so that only its record fails
            texts = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
            binary = [column.cast(texts.get(column.type, column.type)) for column in block.columns]
            return pa.Table.from_arrays(binary, names=block.schema.names).to_pylist()
    if not isinstance(block, Mapping):
        want = "an Arrow table, or numpy columns or lists by name"
        raise InvalidInputError(f"block: got {type(block).__name__}, want {want}")
    for name, column in block.items():
        if not isinstance(column, list) and (not isinstance(column, np.ndarray) or not column.ndim):
            got = f"{type(column).__name__} in the column {name!r}"
            raise InvalidInputError(f"block: got {got}, want an array or a list of values; {_BATCHED}")
    sizes = {len(column) for column in block.values()}
    if len(sizes) > 1:
        raise InvalidInputError(f"block: got columns of {', '.join(map(str, sorted(sizes)))} rows, want equal numbers")
    columns = {
        name: column.tolist() if isinstance(column, np.ndarray) and column.ndim == 1 else list(column)
        for name, column in block.items()
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
