"""Readers of tables: Parquet files and Hugging Face datasets, with images left undecoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from mmpos.data.examples import Location
from mmpos.data.readers.base import FileReader, Raw, broken, is_chosen, stride
from mmpos.data.stores import open_parquet
from mmpos.errors import InvalidInputError
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset
    from pyarrow.parquet import ParquetFile

__all__ = ["DatasetReader", "ParquetReader", "dataset_shards"]

_BATCH_ROWS = 16  # rows decoded at once


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """Reader of a Parquet file; a record is a row converted to Python objects.

    Row groups before the start are not read. Only a few rows of a row group, and the pages that contain them, are in
    memory at a time. If a page is damaged, each row from that page to the end of the row group becomes an error.

    Args:
        path: path or URL of the file.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Read records."""
        pa = _arrow()
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
                    batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
                    for index, table in _numbered(batches, first, stop):
                        if is_chosen(index, start, step):
                            yield Location(self.path, index), _row(table, index, self.path)
                first = stop

    def count(self) -> int | None:
        """Return the number of rows from the footer, or None if the footer cannot be read."""
        pa = _arrow()
        try:
            with self._open() as file:
                return int(file.metadata.num_rows)
        except pa.ArrowException:
            return None

    def _open(self) -> ParquetFile:
        # Buffered reads keep memory use constant; checksums, where present, are cheap enough to verify.
        return open_parquet(self.file, buffer_size=2**16, pre_buffer=False, page_checksum_verification=True)


def _numbered(
    batches: Iterator[pyarrow.RecordBatch], first: int, stop: int
) -> Iterator[tuple[int, pyarrow.RecordBatch | Exception]]:
    """Yield the index of each row from first to stop, with a table of that row, or the error in its place."""
    pa = _arrow()
    index = first
    try:
        for batch in batches:
            for i in range(batch.num_rows):
                yield index + i, batch.slice(i, 1)
            index += batch.num_rows
        fault: Exception = ValueError(f"{index - first} rows in a row group of {stop - first}")
    except (OSError, pa.ArrowException) as error:
        fault = error
    yield from ((lost, fault) for lost in range(index, stop))


def _row(table: pyarrow.Table | pyarrow.RecordBatch | Exception, index: int, source: str) -> Raw:
    """Return the record in a table of one row, or the error in its place."""
    here = Location(source, index)
    if isinstance(table, Exception):
        return broken(here, table)
    try:
        record: Raw = table.to_pylist()[0]
    except UnicodeDecodeError as error:
        return broken(here, error)
    return record


def _arrow() -> ModuleType:
    with needed_for("Parquet files", extra="data"):
        import pyarrow as pa
    return pa


@dataclass(frozen=True, eq=False)
class DatasetReader:
    """Reader of a Dataset or an IterableDataset as one shard; images stay structs of bytes and path.

    Args:
        dataset: the dataset; errors raised by its own code, such as a map function or a download, are raised unchanged.
        source: name of the dataset in error messages.
    """

    dataset: Dataset | IterableDataset = field(repr=False)
    source: str = "dataset"

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "with_format"):
            raise InvalidInputError(f"dataset: got {type(self.dataset).__name__}, want a Dataset or an IterableDataset")

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read records; unlike a Dataset, an IterableDataset also reads the rows before and between these records."""
        start, step = stride(start, step)
        arrow = self.dataset.with_format("arrow")  # images stay undecoded
        if hasattr(arrow, "__len__"):
            for first in range(start, len(arrow), step * _BATCH_ROWS):
                wanted = range(first, min(first + step * _BATCH_ROWS, len(arrow)), step)
                rows = arrow[wanted]
                for i, index in enumerate(wanted):
                    yield Location(self.source, index), _row(rows.slice(i, 1), index, self.source)
            return
        # Not a for loop, which in a DataLoader worker would yield only a share of the rows.
        index = start
        for rows in arrow.skip(start).iter(_BATCH_ROWS):
            for i in range(rows.num_rows):
                if is_chosen(index, start, step):
                    yield Location(self.source, index), _row(rows.slice(i, 1), index, self.source)
                index += 1

    def count(self) -> int | None:
        """Return the number of rows in a Dataset, or None for an IterableDataset."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


def dataset_shards(dataset: Dataset | IterableDataset, name: str = "dataset") -> list[DatasetReader]:
    """Open a reader for each shard of an IterableDataset, or one for a Dataset.

    Args:
        dataset: a Dataset or an IterableDataset.
        name: name of the dataset in error messages.
    """
    whole = DatasetReader(dataset, name)
    count = 1 if whole.count() is not None else dataset.num_shards
    if count == 1:
        return [whole]
    return [
        DatasetReader(dataset.shard(num_shards=count, index=i), f"{name}-{i:05}-of-{count:05}") for i in range(count)
    ]
