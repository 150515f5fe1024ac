"""Stage: a batch of raw records in, a batch of ready examples out, as Ray Data, Daft and other engines call it."""

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
from mmpos.support.checks import boolean

__all__ = ["STAGE_SCHEMA", "Block", "Stage", "read_examples"]

Block: TypeAlias = pa.Table | pa.RecordBatch | Mapping[str, npt.NDArray[Any]]
"""A batch of records: an Arrow table or record batch, or columns of numpy by name."""

STAGE_SCHEMA = pa.schema(
    [
        *(field.with_nullable(True) for field in SCHEMA),
        pa.field("axes", pa.int32()),  # of its positions
        pa.field("error", pa.string()),  # why there is no example; all other columns but key are then null
    ]
)
"""What a stage gives: a row of a ready sequence, or an error, for each record."""


@dataclass(frozen=True)
class Stage:
    """Callable that makes ready examples of a batch of records; it pickles, and keeps nothing between calls.

    A record that cannot be used is a row with its ``error``, in its place, and never fails the batch.

    Args:
        preprocess: makes an example of a record and its location, as for a loader.
        patches: whether pixels stay.
        source: column that says where a record comes from, such as "path", for errors and keys; None for none.
    """

    preprocess: MakeExample
    patches: bool = True
    source: str | None = None

    def __post_init__(self) -> None:
        given: object = self.preprocess
        if not callable(given):
            raise InvalidInputError(f"preprocess: got {type(given).__name__}, want a callable of record and location")
        boolean("patches", self.patches)

    def __call__(self, block: Block) -> pa.Table:
        """Make the examples of a batch.

        Args:
            block: the records, whose columns are the fields that the format reads.

        Returns:
            a table of ``STAGE_SCHEMA`` with a row for each record.

        Raises:
            InvalidInputError: something else than a batch, or one without the column ``source``.
            UnsupportedError: the set-up lacks something that a record needs.
            ServiceError: a service that builds does not answer.
        """
        records = _records(block)
        if records and self.source is not None and self.source not in records[0]:
            raise InvalidInputError(f"source: got {self.source!r}, want a column of the batch: {', '.join(records[0])}")
        return pa.Table.from_pylist([self._row(record, i) for i, record in enumerate(records)], STAGE_SCHEMA)

    def _row(self, record: Record, index: int) -> dict[str, Any]:
        here = Location("batch" if self.source is None else str(record[self.source]), index)
        try:
            example = self.preprocess(record, here)
            row = to_row(example)
        except ImageError as error:
            if error.on_error == "raise":
                raise
            return {"key": str(here), "error": str(error)}
        except (RecordError, LimitExceededError) as error:
            return {"key": str(here), "error": str(error)}
        if not self.patches:
            row |= {"patches": None, "patches_dtype": None, "patches_shape": None}
        return row | {"axes": example.sequence.positions.axes}


def read_examples(block: pa.Table | pa.RecordBatch) -> Iterator[Example]:
    """Read the examples of a batch that a stage made; rows with an error are left out.

    Args:
        block: a table of ``STAGE_SCHEMA``, whatever else it has.

    Raises:
        InvalidInputError: a column is missing, or a row is broken.
    """
    missing = [name for name in STAGE_SCHEMA.names if name not in block.schema.names]
    if missing:
        raise InvalidInputError(f"block: got no column {missing[0]!r}, want the columns of STAGE_SCHEMA")
    table = pa.table({name: block[name] for name in STAGE_SCHEMA.names}).cast(STAGE_SCHEMA)
    for i in range(table.num_rows):
        if not table["error"][i].is_valid:
            yield from_row({name: table[name][i] for name in SCHEMA.names}, table["axes"][i].as_py())


def _records(block: Block) -> list[dict[str, Any]]:
    """Return the records of a batch as Python has them."""
    if isinstance(block, pa.Table | pa.RecordBatch):
        return block.to_pylist()
    if not isinstance(block, Mapping) or not all(isinstance(column, np.ndarray) for column in block.values()):
        raise InvalidInputError(f"block: got {type(block).__name__}, want an Arrow table or columns of numpy by name")
    sizes = {len(column) for column in block.values()}
    if len(sizes) > 1:
        raise InvalidInputError(f"block: got columns of {', '.join(map(str, sorted(sizes)))} rows, want one number")
    columns = {name: column.tolist() if column.ndim == 1 else list(column) for name, column in block.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
