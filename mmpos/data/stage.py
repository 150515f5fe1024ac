"""Stage: turn a batch of raw records into a batch of preprocessed examples, in Ray Data, Daft and other engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmpos.data.examples import Example, ImageError, Location, MakeExample, Record, RecordError
from mmpos.data.preprocess.storage import SCHEMA, from_row, to_row
from mmpos.errors import InvalidInputError, LimitExceededError

__all__ = ["STAGE_SCHEMA", "Block", "Stage", "read_examples"]

Block: TypeAlias = pa.Table | pa.RecordBatch | Mapping[str, npt.NDArray[Any]]
"""A batch of records: an Arrow table or record batch, or numpy columns by name."""

STAGE_SCHEMA = pa.schema(
    [
        *(field.with_nullable(True) for field in SCHEMA),
        pa.field("axes", pa.int32()),  # number of axes of the positions
        pa.field("error", pa.string()),  # why there is no example; all other columns except key are then null
    ]
)
"""Columns of the output of a stage: for each record, a preprocessed sequence or an error."""


@dataclass(frozen=True)
class Stage:
    """Picklable, stateless callable that converts a batch of records to preprocessed examples.

    An unusable record becomes a row with its ``error`` and never fails the batch.

    Args:
        preprocess: converts a record and its location to an example, as for a loader.
        source: column with the origin of a record, such as "path", for error messages and keys; None uses "batch".
    """

    preprocess: MakeExample
    source: str | None = None

    def __post_init__(self) -> None:
        call: object = self.preprocess
        if not callable(call):
            raise InvalidInputError(
                f"preprocess: got {type(call).__name__}, want a callable that takes a record and a location"
            )
        source: object = self.source
        if source is not None and not isinstance(source, str):
            raise InvalidInputError(f"source: got {source!r}, want the name of a column or None")

    def __call__(self, block: Block) -> pa.Table:
        """Convert a batch of records to examples.

        Args:
            block: the records; its columns are the fields that the format reads.

        Returns:
            a table of ``STAGE_SCHEMA`` with one row per record.

        Raises:
            InvalidInputError: block is not a batch, or lacks the column ``source``.
            UnsupportedError: the builder lacks a component that a record needs.
            ServiceError: the service that builds sequences does not respond.
            Exception: any other error raised by the callable; a note on the error names the record.
        """
        records = _records(block)
        if records and self.source is not None and self.source not in records[0]:
            raise InvalidInputError(f"source: got {self.source!r}, want a column of the batch: {', '.join(records[0])}")
        return pa.Table.from_pylist([self._row(record, i) for i, record in enumerate(records)], STAGE_SCHEMA)

    def example(self, record: Record, here: Location) -> Example:
        """Convert one record to an example.

        Raises:
            RecordError, LimitExceededError: the record is unusable.
            InvalidInputError: the callable did not return an Example.
            Exception: any other error raised by the callable; a note on the error names the record.
        """
        try:
            example: object = self.preprocess(record, here)
        except (RecordError, LimitExceededError):
            raise
        except Exception as error:
            if str(here) not in str(error):
                error.add_note(f"raised for the record {here}")
            raise
        if not isinstance(example, Example):
            raise InvalidInputError(f"preprocess: got {type(example).__name__} for {here}, want an Example")
        return example

    def _row(self, record: Record, index: int) -> dict[str, Any]:
        here = Location("batch" if self.source is None else _source(record[self.source]), index)
        try:
            example = self.example(record, here)
            return to_row(example) | {"axes": example.sequence.positions.axes}
        except (RecordError, LimitExceededError) as error:
            if isinstance(error, ImageError) and error.on_error == "raise":
                raise
            return {"key": _unicode(str(here)), "error": _unicode(str(error))}


def read_examples(block: pa.Table | pa.RecordBatch) -> Iterator[Example]:
    """Read the examples from the output of a stage, skipping rows with an error.

    Args:
        block: a table with the columns of ``STAGE_SCHEMA`` and possibly others.

    Raises:
        InvalidInputError: a column is missing or has the wrong type, or a row is invalid.
    """
    argument: object = block
    if not isinstance(argument, pa.Table | pa.RecordBatch):
        raise InvalidInputError(f"block: got {type(argument).__name__}, want an Arrow table")
    missing = [name for name in STAGE_SCHEMA.names if name not in block.schema.names]
    if missing:
        raise InvalidInputError(f"block: got no column {missing[0]!r}, want the columns of STAGE_SCHEMA")
    table = pa.table([_cast(block[field.name], field) for field in STAGE_SCHEMA], schema=STAGE_SCHEMA)
    for i in range(table.num_rows):
        if not table["error"][i].is_valid:
            try:
                yield from_row({name: table[name][i] for name in SCHEMA.names}, table["axes"][i].as_py())
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise InvalidInputError(f"block[{i}]: got an invalid row ({error}), want a row of a Stage") from error


def _cast(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InvalidInputError(f"block.{field.name}: got {column.type}, want {field.type}") from error


def _source(value: object) -> str:
    return _unicode(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _records(block: Block) -> list[dict[str, Any]]:
    """Convert a batch to a list of records."""
    if isinstance(block, pa.Table | pa.RecordBatch):
        try:
            return block.to_pylist()
        except UnicodeDecodeError:  # invalid text is kept as bytes, so that only its record fails
            texts = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
            binary = [column.cast(texts.get(column.type, column.type)) for column in block.columns]
            return pa.Table.from_arrays(binary, names=block.schema.names).to_pylist()
    if not isinstance(block, Mapping) or not all(isinstance(column, np.ndarray) for column in block.values()):
        raise InvalidInputError(f"block: got {type(block).__name__}, want an Arrow table or numpy columns by name")
    flat = [name for name, column in block.items() if not column.ndim]
    if flat:
        raise InvalidInputError(f"block[{flat[0]!r}]: got one value, want an array with one value per record")
    sizes = {len(column) for column in block.values()}
    if len(sizes) > 1:
        raise InvalidInputError(f"block: got columns of {', '.join(map(str, sorted(sizes)))} rows, want equal numbers")
    columns = {name: column.tolist() if column.ndim == 1 else list(column) for name, column in block.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
