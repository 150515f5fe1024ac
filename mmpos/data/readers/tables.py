"""Tables: Parquet files, Lance datasets and those of the library ``datasets``, with images as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from mmpos.data.examples import Location
from mmpos.data.readers.base import FileReader, Mark, Raw, broken, is_chosen, stride
from mmpos.data.stores import open_parquet
from mmpos.errors import InvalidInputError
from mmpos.support.checks import integer
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset
    from lance import LanceDataset, LanceFragment
    from pyarrow.parquet import ParquetFile

__all__ = ["DatasetReader", "LanceReader", "ParquetReader", "dataset_shards", "lance_readers", "row"]

_BATCH_ROWS = 16  # that are decoded at once
_LANCE_BUFFER = 2**26  # bytes that Lance reads ahead


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """Reader of a Parquet file; a record is a row as Python has it, with bytes as bytes.

    Row groups before the start are not read. Of a row group, a few rows and the pages that hold them are in memory.
    Where a page is broken, the rows from it to the end of the row group are errors, each in its place.

    Args:
        path: the file, a path or a URL.
    """

    def records_from(self, begin: Mark, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
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
                            yield Location(self.path, index), row(table, index, self.path)
                first = stop

    def marks(self, size: int) -> Iterator[Mark]:
        """Yield the first row of the row group behind every ``size`` bytes."""
        pa = _arrow()
        index = offset = 0
        behind = size
        with suppress(OSError, pa.ArrowException), self._open() as file:
            for number in range(file.num_row_groups):
                if offset >= behind:
                    yield Mark(index, offset)
                    behind = offset + size
                group = file.metadata.row_group(number)
                index += group.num_rows
                offset += sum(group.column(i).total_compressed_size for i in range(group.num_columns))

    def count(self) -> int | None:
        """Return the number of rows, from the footer; None if the footer cannot be read."""
        pa = _arrow()
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
            _check_column(name, file.schema_arrow.names, self.path)
            return file.read([name])[name]

    def _open(self) -> ParquetFile:
        # Buffered columns instead of whole ones keep memory flat; a checksum, where there is one, is worth its time.
        return open_parquet(self.file, buffer_size=2**16, pre_buffer=False, page_checksum_verification=True)


@dataclass(frozen=True)
class LanceReader:
    """Reader of a fragment of a Lance dataset; a record is a row as Python has it. Rows that were deleted are no rows.

    Where a row cannot be read, it and those after it are errors, each in its place. Lance has threads of its own, so
    that workers must be spawned and not forked.

    Args:
        path: the folder of the dataset, a path or a URL that Lance opens.
        fragment: number of the fragment.
        version: of the dataset.
    """

    path: str
    fragment: int
    version: int

    @property
    def source(self) -> str:
        """Path of the dataset with the number of the fragment."""
        return f"{self.path}-{self.fragment:05}"

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read records; those before the start are not read."""
        start, step = stride(start, step)
        fragment, count = self._open(), self.count()
        if start >= count:
            return
        batches = fragment.to_batches(batch_size=_BATCH_ROWS, offset=start, io_buffer_size=_LANCE_BUFFER)
        for index, table in _numbered(batches, start, count):
            if is_chosen(index, start, step):
                yield Location(self.source, index), row(table, index, self.source)

    def count(self) -> int:
        """Return the number of rows, without those that were deleted."""
        return int(self._open().count_rows())

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Read a column of all rows, as that of a Parquet file.

        Raises:
            InvalidInputError: there is none of this name.
        """
        fragment = self._open()
        _check_column(name, fragment.schema.names, self.source)
        return fragment.to_table(columns=[name])[name]

    def _open(self) -> LanceFragment:
        fragment = _open_lance(self.path, self.version).get_fragment(self.fragment)
        if fragment is None:
            raise InvalidInputError(f"fragment: got {self.fragment}, want one of {self.path}")
        return fragment


def lance_readers(path: str) -> list[LanceReader]:
    """Open a reader for each fragment of the newest version of a Lance dataset, in their order."""
    dataset = _open_lance(path)
    return [LanceReader(path, fragment.fragment_id, dataset.version) for fragment in dataset.get_fragments()]


def _open_lance(path: str, version: int | None = None) -> LanceDataset:
    """Open a Lance dataset.

    Raises:
        InvalidInputError: there is none, or it has no such version any more.
    """
    with needed_for("Lance datasets", extra="lance"):
        import lance
    try:
        return lance.dataset(path, version)
    except ValueError as error:
        want = "a Lance dataset" if version is None else f"a Lance dataset with its version {version}"
        raise InvalidInputError(f"{path}: got {str(error).partition(', /')[0]}, want {want}") from error


def _check_column(name: str, columns: Sequence[str], source: str) -> None:
    if name not in columns:
        raise InvalidInputError(f"{source}: got the columns {', '.join(columns)}, want {name} among them")


def _numbered(
    batches: Iterator[pyarrow.RecordBatch], first: int, stop: int
) -> Iterator[tuple[int, pyarrow.RecordBatch | Exception]]:
    """Yield the number of each row from first to stop, with a table of that row or the error that hides it."""
    pa = _arrow()
    index = first
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


def _arrow() -> ModuleType:
    with needed_for("Parquet files", extra="data"):
        import pyarrow as pa
    return pa


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
        """Read records; a Dataset reads the rows that are wanted, an IterableDataset also those before them."""
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
