"""Readers of tables: Parquet files, Lance datasets, and Hugging Face datasets, with images left undecoded."""

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

_BATCH_ROWS = 16  # rows decoded at once
_LANCE_BUFFER = 2**26  # bytes that Lance reads ahead


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """Reader of a Parquet file; a record is a row converted to Python objects.

    Row groups before the start are not read. Only a few rows of a row group, and the pages that contain them, are in
    memory at a time. If a page is damaged, each row from that page to the end of the row group becomes an error.

    Args:
        path: path or URL of the file.
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
        """Yield a mark for the first row of the row group after every ``size`` bytes."""
        pa = _arrow()
        index = offset = 0
        next_offset = size
        with suppress(OSError, pa.ArrowException), self._open() as file:
            for number in range(file.num_row_groups):
                if offset >= next_offset:
                    yield Mark(index, offset)
                    next_offset = offset + size
                group = file.metadata.row_group(number)
                index += group.num_rows
                offset += sum(group.column(i).total_compressed_size for i in range(group.num_columns))

    def count(self) -> int | None:
        """Return the number of rows from the footer, or None if the footer cannot be read."""
        pa = _arrow()
        try:
            with self._open() as file:
                return int(file.metadata.num_rows)
        except pa.ArrowException:
            return None

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Read a column of all rows.

        Raises:
            InvalidInputError: the file has no column with this name.
        """
        with self._open() as file:
            _check_column(name, file.schema_arrow.names, self.path)
            return file.read([name])[name]

    def _open(self) -> ParquetFile:
        # Buffered reads keep memory use constant; checksums, where present, are cheap enough to verify.
        return open_parquet(self.file, buffer_size=2**16, pre_buffer=False, page_checksum_verification=True)


@dataclass(frozen=True)
class LanceReader:
    """Reader of a fragment of a Lance dataset; a record is a row converted to Python objects. Deleted rows are skipped.

    If a row cannot be read, it and all later rows become errors. Lance starts threads, so workers must be spawned, not
    forked.

    Args:
        path: folder of the dataset, a path or a URL that Lance opens.
        fragment: number of the fragment.
        version: version of the dataset.
    """

    path: str
    fragment: int
    version: int

    @property
    def source(self) -> str:
        """Path of the dataset, with the fragment number appended."""
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
        """Return the number of rows, excluding deleted ones."""
        return int(self._open().count_rows())

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """Read a column of all rows.

        Raises:
            InvalidInputError: the dataset has no column with this name.
        """
        fragment = self._open()
        _check_column(name, fragment.schema.names, self.source)
        return fragment.to_table(columns=[name])[name]

    def _open(self) -> LanceFragment:
        fragment = _open_lance(self.path, self.version).get_fragment(self.fragment)
        if fragment is None:
            raise InvalidInputError(f"fragment: got {self.fragment}, want a fragment of {self.path}")
        return fragment


def lance_readers(path: str) -> list[LanceReader]:
    """Open a reader for each fragment of the latest version of a Lance dataset, in order."""
    dataset = _open_lance(path)
    return [LanceReader(path, fragment.fragment_id, dataset.version) for fragment in dataset.get_fragments()]


def _open_lance(path: str, version: int | None = None) -> LanceDataset:
    """Open a Lance dataset.

    Raises:
        InvalidInputError: the dataset or its version does not exist.
    """
    with needed_for("Lance datasets", extra="lance"):
        import lance
    try:
        return lance.dataset(path, version)
    except ValueError as error:
        want = "a Lance dataset" if version is None else f"a Lance dataset with version {version}"
        raise InvalidInputError(f"{path}: got {str(error).partition(', /')[0]}, want {want}") from error


def _check_column(name: str, columns: Sequence[str], source: str) -> None:
    if name not in columns:
        raise InvalidInputError(f"{source}: got the columns {', '.join(columns)}, want {name} among them")


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


def row(table: pyarrow.Table | pyarrow.RecordBatch | Exception, index: int, source: str) -> Raw:
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
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
            return
        # Not a for loop, which in a DataLoader worker would yield only a share of the rows.
        index = start
        for rows in arrow.skip(start).iter(_BATCH_ROWS):
            for i in range(rows.num_rows):
                if is_chosen(index, start, step):
                    yield Location(self.source, index), row(rows.slice(i, 1), index, self.source)
                index += 1

    def count(self) -> int | None:
        """Return the number of rows in a Dataset, or None for an IterableDataset."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None


def dataset_shards(
    dataset: Dataset | IterableDataset, num_shards: int | None = None, name: str = "dataset"
) -> list[DatasetReader]:
    """Split a dataset into shards.

    Args:
        dataset: a Dataset or an IterableDataset.
        num_shards: number of shards; None means 1 for a Dataset, and the number of its own shards for an
            IterableDataset.
        name: name of the dataset in error messages.
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
