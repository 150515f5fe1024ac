"""Tables: Parquet files, and datasets of the library ``datasets``, with their images as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from mmpos.data.examples import Location
from mmpos.data.readers.base import FileReader, Raw, broken, is_chosen, stride
from mmpos.errors import InvalidInputError
from mmpos.support.checks import integer
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset
    from pyarrow.parquet import ParquetFile

__all__ = ["DatasetReader", "ParquetReader", "dataset_shards", "row"]

_BATCH_ROWS = 16  # that are decoded at once


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """Reader of a Parquet file; a record is a row as Python has it, with bytes as bytes.

    Row groups before the start are not read. Of a row group, a few rows and the pages that hold them are in memory.
    Where a page is broken, the rows from it to the end of the row group are errors, each in its place.

    Args:
        path: the file.
    """

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read records."""
        start, step = stride(start, step)
        pa, _ = _arrow()
        try:
            file = self._open()
        except (OSError, pa.ArrowException) as error:
            yield from self.lost(error, 0, start, step)
            return
        with file:
            first = 0
            for group in range(file.num_row_groups):
                stop = first + file.metadata.row_group(group).num_rows
                if stop > start:
                    for index, table in self._group(file, group, first, stop):
                        if is_chosen(index, start, step):
                            yield Location(self.path, index), row(table, index, self.path)
                first = stop

    def count(self) -> int | None:
        """Return the number of rows, from the footer; None if the footer cannot be read."""
        pa, _ = _arrow()
        try:
            with self._open() as file:
                return int(file.metadata.num_rows)
        except pa.ArrowException:
            return None

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Read a column of all rows.

        Raises:
            InvalidInputError: there is none of this name.
        """
        with self._open() as file:
            columns = file.schema_arrow.names
            if name not in columns:
                raise InvalidInputError(f"{self.path}: got the columns {', '.join(columns)}, want {name} among them")
            return file.read([name])[name]

    def _open(self) -> ParquetFile:
        # Buffered columns instead of whole ones keep memory flat; a checksum, where there is one, is worth its time.
        _, parquet = _arrow()
        return parquet.ParquetFile(self.path, buffer_size=2**16, pre_buffer=False, page_checksum_verification=True)

    def _group(
        self, file: ParquetFile, group: int, first: int, stop: int
    ) -> Iterator[tuple[int, pyarrow.RecordBatch | Exception]]:
        """Yield the number of each row of a row group, with a table of that row or the error that hides it."""
        pa, _ = _arrow()
        index = first
        batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
        try:
            for batch in batches:
                for i in range(batch.num_rows):
                    yield index + i, batch.slice(i, 1)
                index += batch.num_rows
            wrong: Exception = ValueError(f"{index - first} rows in a row group of {stop - first}")
        except (OSError, pa.ArrowException) as error:
            wrong = error
        yield from ((lost, wrong) for lost in range(index, stop))


def row(table: pyarrow.Table | pyarrow.RecordBatch | Exception, index: int, source: str) -> Raw:
    """Return the record in a table of one row, or the error that hides it."""
    here = Location(source, index)
    if isinstance(table, Exception):
        return broken(here, table)
    try:
        record: Raw = table.to_pylist()[0]
    except UnicodeDecodeError as error:
        return broken(here, error)
    return record


def _arrow() -> tuple[ModuleType, ModuleType]:
    with needed_for("Parquet files", extra="data"):
        import pyarrow as pa
        from pyarrow import parquet
    return pa, parquet


@dataclass(frozen=True, eq=False)
class DatasetReader:
    """Reader of a Dataset or an IterableDataset as one shard; images stay structs of bytes and path.

    Args:
        dataset: the object; errors of its own code (a map function, a download) are raised as they are.
        source: its name in messages.
    """

    dataset: Dataset | IterableDataset = field(repr=False)
    source: str = "dataset"

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "with_format"):
            raise InvalidInputError(f"dataset: got {type(self.dataset).__name__}, want a Dataset or an IterableDataset")

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read records; a Dataset reads the rows that are wanted, an IterableDataset those before them, too."""
        start, step = stride(start, step)
        arrow = self.dataset.with_format("arrow")  # the stored columns: nothing is decoded
        if hasattr(arrow, "__len__"):
            for first in range(start, len(arrow), step * _BATCH_ROWS):
                wanted = range(first, min(first + step * _BATCH_ROWS, len(arrow)), step)
                rows = arrow[wanted]
                for i, index in enumerate(wanted):
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
            return
        # iter, and not a for loop, in which a worker of a DataLoader would get a share of its own.
        index = start
        for rows in arrow.skip(start).iter(_BATCH_ROWS):
            for i in range(rows.num_rows):
                if is_chosen(index, start, step):
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
                index += 1

    def count(self) -> int | None:
        """Return the number of rows of a Dataset; None for an IterableDataset."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


def dataset_shards(
    dataset: Dataset | IterableDataset, num_shards: int | None = None, name: str = "dataset"
) -> list[DatasetReader]:
    """Split a dataset into shards.

    Args:
        dataset: a Dataset or an IterableDataset.
        num_shards: number of shards; None keeps those of an IterableDataset, and is 1 for a Dataset.
        name: name in messages.
    """
    whole = DatasetReader(dataset, name)
    if num_shards is None:
        num_shards = 1 if whole.count() is not None else dataset.num_shards
    num_shards = integer("num_shards", num_shards, minimum=1)
    if num_shards == 1:
        return [whole]
    return [
        DatasetReader(dataset.shard(num_shards=num_shards, index=i), f"{name}-{i:05}-of-{num_shards:05}")
        for i in range(num_shards)
    ]
