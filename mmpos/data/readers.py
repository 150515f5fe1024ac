"""Readers of shards: WebDataset tar files, Parquet, JSON lines, and Hugging Face datasets."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from glob import has_magic
from itertools import groupby
from multiprocessing.pool import ThreadPool
from operator import itemgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self, runtime_checkable

from mmpos.data.examples import Location, Record, RecordError
from mmpos.data.paths import BytesRead, base_name, checked_path, kind_of, matches, open_file, open_parquet
from mmpos.errors import InvalidInputError
from mmpos.support.checks import instance, integer, listed
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset
    from pyarrow.parquet import ParquetFile

__all__ = [
    *("SUFFIXES", "DatasetReader", "FileReader", "JsonlReader", "ParquetReader", "Raw", "Reader", "TarReader"),
    *("broken", "dataset_shards", "is_chosen", "shards", "stride"),
]

Raw = Record | RecordError
"""Raw record with undecoded images, or the error that replaces a record that cannot be read."""


@runtime_checkable
class Reader(Protocol):
    """Reader of one shard. It is picklable, since it holds no open file; each call to ``records`` opens the shard."""

    @property
    def source(self) -> str:
        """Path or name of the shard."""

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … in the fixed order of the shard.

        A record that cannot be read is yielded as a RecordError rather than raised, so that reading can continue. If
        the rest of the shard is lost, the first lost record is the last one yielded.

        Args:
            start: index of the first record; records before it are skipped without parsing.
            step: difference between the indices of consecutive records.
        """

    def count(self) -> int | None:
        """Return the number of records if it is known without reading them, else None."""


@dataclass(frozen=True)
class FileReader(ABC):
    """Base class of readers of one file.

    Args:
        source: path or URL of the file.
    """

    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", checked_path("source", self.source))

    def count(self) -> int | None:
        """Return None, since counting the records would require reading them."""
        return None

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file."""
        return self._records(*stride(start, step))

    @abstractmethod
    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]: ...

    def lost(self, error: Exception, index: int, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Yield the error instead of a record and all later ones, if that record is among those to read."""
        record = broken(here := Location(self.source, index), error, rest=True)
        if is_chosen(index, start, step):
            yield here, record


def stride(start: int, step: int) -> tuple[int, int]:
    """Check the arguments ``start`` and ``step`` of ``records``."""
    return integer("start", start, minimum=0), integer("step", step, minimum=1)


def is_chosen(index: int, start: int, step: int) -> bool:
    """Return whether an index is in the sequence start, start + step, … of a reader."""
    return index >= start and (index - start) % step == 0


def broken(location: Location, error: BaseException, rest: bool = False) -> RecordError:
    """Return the error that replaces a record that cannot be read.

    Args:
        location: shard and index of the record.
        error: the cause. An error from the operating system or a store, such as a missing file or permission, is raised
            instead, since the record is not at fault.
        rest: whether all later records are lost as well.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    lost = "; all later records are lost" if rest else ""
    return RecordError(f"{location}: got {error or type(error).__name__}, want a readable record{lost}")


@dataclass(frozen=True)
class JsonlReader(FileReader):
    """Reader of JSON lines. The index of a record is its line number, counted from 0; empty lines are skipped.

    Reading continues after an invalid line, and ends at corrupt compressed data.

    Args:
        source: path or URL of the file; files ending in .gz or .zst are decompressed.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        index, broken = 0, _BROKEN  # names of modules are gone when the interpreter ends
        try:
            with open_file(self.source) as packed, _unpacked(base_name(self.source), packed) as file:
                while line := file.readline():
                    if is_chosen(index, start, step) and not line.isspace():
                        here = Location(self.source, index)
                        BytesRead.total = packed.tell()  # without what the buffer has read ahead
                        yield here, _parsed(line, here)
                    index += 1
        except broken as error:
            yield from self.lost(error, index, start, step)


def _unpacked(name: str, packed: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    if not name.endswith((".gz", ".zst")):
        return packed
    if not packed.peek(1):
        raise EOFError("an empty file")  # decompressors would return no data without an error
    if name.endswith(".gz"):
        return gzip.open(packed)
    return io.BufferedReader(_arrow("zst files").CompressedInputStream(packed, "zstd"))


def _parsed(line: bytes, location: Location) -> Raw:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        return RecordError(f"{location}: got no valid JSON in line {location.index + 1} ({what}), want a JSON object")
    if not isinstance(value, dict):
        return RecordError(f"{location}: got {type(value).__name__}, want a JSON object")
    return value


_BATCH_ROWS = 16  # rows decoded at once


@dataclass(frozen=True)
class ParquetReader(FileReader):
    """Reader of a Parquet file; a record is a row converted to Python objects.

    Row groups before the start are not read. Only a few rows of a row group, and the pages that contain them, are in
    memory at a time. If a page is damaged, each row from that page to the end of the row group becomes an error.

    Args:
        source: path or URL of the file.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
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
                            yield (here := Location(self.source, index)), _row(table, here)
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
        return open_parquet(self.source, buffer_size=2**16, pre_buffer=False, page_checksum_verification=True)


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


def _row(table: pyarrow.Table | pyarrow.RecordBatch | Exception, here: Location) -> Raw:
    """Return the record in a table of one row, or the error in its place."""
    if isinstance(table, Exception):
        return broken(here, table)
    try:
        record: Raw = table.to_pylist()[0]
    except UnicodeDecodeError as error:
        return broken(here, error)
    return record


def _arrow(used_for: str = "Parquet files") -> ModuleType:
    with needed_for(used_for, extra="data"):
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
        arrow, size = self.dataset.with_format("arrow"), self.count()  # images stay undecoded
        rows = arrow.skip(start) if size is None else arrow.select(range(size)[start::step] or [])
        index = start
        # Not a loop over the rows, which in a DataLoader worker would yield only a share of them.
        for table in rows.iter(_BATCH_ROWS):
            for i in range(table.num_rows):
                if is_chosen(index, start, step):
                    yield (here := Location(self.source, index)), _row(table.slice(i, 1), here)
                index += 1 if size is None else step

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
    shards = [] if count == 1 else [(dataset.shard(count, i), f"{name}-{i:05}-of-{count:05}") for i in range(count)]
    return [DatasetReader(*shard) for shard in shards] or [whole]


# WebDataset's rules: the extension begins at the first dot of the last part of a name; meta files are left out.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_UNPACK: Mapping[bytes, Callable[[Any], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError)

_Member = tuple[str, str, tarfile.TarInfo]


@dataclass(frozen=True)
class TarReader(FileReader):
    """Reader of a WebDataset tar file, compressed or not.

    A record has ``__key__``, ``__url__`` and the bytes of each member under its lowercase extension, as in WebDataset.
    A truncated or damaged archive is detected: an archive must end in two blocks of zeros followed only by zeros, and a
    compressed archive must also end in a valid checksum. Otherwise the current record, or the one after the last,
    becomes an error that names the byte in the unpacked archive, and the shard ends there. Two concatenated archives
    also cause such an error. An archive whose bytes are all zeros from some record to the end looks like a shorter
    archive.

    Members of skipped records are not read, unless the archive is compressed.

    Args:
        source: path or URL of the file.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        index, broken = 0, _BROKEN  # names of modules are gone when the interpreter ends
        with open_file(self.source) as packed:
            archive = _Archive(packed)
            try:
                for key, members in groupby(archive.members(), key=itemgetter(0)):
                    here = Location(self.source, index)
                    wanted = is_chosen(index, start, step)
                    record = archive.record({"__key__": key, "__url__": self.source}, members, here, wanted)
                    if wanted:
                        BytesRead.total = packed.tell()
                        yield here, record
                    index += 1
                archive.check_rest()
            except broken as error:
                yield from self.lost(archive.placed(error), index, start, step)


class _Archive:
    """Archive that checks itself in the same way for every choice of records, so all readers find the same damage."""

    _tar: tarfile.TarFile

    def __init__(self, packed: BinaryIO) -> None:
        size = packed.seek(0, os.SEEK_END)
        packed.seek(0)
        begin = packed.read(6)
        packed.seek(0)
        unpack = next((unpack for magic, unpack in _UNPACK.items() if begin.startswith(magic)), None)
        self._file = packed if unpack is None else unpack(packed)
        self._size = size if unpack is None else None

    def members(self) -> Iterator[_Member]:
        """Yield the key, extension and header of each member that belongs to a record."""
        try:
            with tarfile.open(fileobj=self._file, mode="r:", tarinfo=_StrictInfo) as tar:
                self._tar = tar
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # kept by tarfile for random access
                    name = _NAME.fullmatch(member.name)
                    if member.isreg() and name and not _META.match(member.name):
                        yield name[1], name[2].lower(), member
        except _ZerosError as zeros:
            if self._file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise _DamageError(f"{zeros}, where a header or two blocks of zeros should be") from None

    def record(self, record: dict[str, object], members: Iterable[_Member], here: Location, wanted: bool) -> Raw:
        """Return the record with the contents of its members, which may be left out if the record is not wanted."""
        fault = None
        for _, extension, member in members:
            if self._size is not None and self._tar.offset > self._size:
                raise _DamageError(f"the end of the file at byte {self._size}, inside {member.name}")
            if extension in record:
                fault = RecordError(f"{here}: {extension}: got two files, want one")
            if wanted or self._size is None:
                content = self._tar.extractfile(member)
                assert content is not None, "members() yields only regular files"
                record[extension] = content.read()
        return fault or record

    def check_rest(self) -> None:
        """Check that only zeros follow; reading to the end also verifies the compression checksum."""
        while rest := self._file.read(2**20):
            if rest.count(0) < len(rest):
                at = self._file.tell() - len(rest.lstrip(b"\0"))
                raise _DamageError(f"data at byte {at}, after the end of the archive")

    def placed(self, error: Exception) -> Exception:
        """Add the byte offset to an error in the archive; return errors from the operating system unchanged."""
        if isinstance(error, _DamageError) or (isinstance(error, OSError) and error.errno is not None):
            return error
        at = self._file.tell()
        return _DamageError(f"{error} at byte {at if self._size is None else min(at, self._size)}")


class _DamageError(tarfile.ReadError):
    """Damage to an archive, with its byte offset."""


class _ZerosError(tarfile.HeaderError):
    """Block of zeros where a header should be."""


class _StrictInfo(tarfile.TarInfo):
    """Member that requires an intact header; tarfile takes a damaged header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        """Read the next member."""
        assert tar.fileobj is not None
        at = tar.fileobj.tell()
        try:
            member = super().fromtarfile(tar)
        except _ZerosError:
            raise _ZerosError(f"one block of zeros at byte {at}") from None
        except (tarfile.HeaderError, ValueError, LookupError) as error:  # the last two come from maps of sparse files
            raise _DamageError(f"no header at byte {at} ({error})") from error
        if member.size < 0:  # from an extended header: the next member would start before this one
            raise _DamageError(f"no header at byte {at} (a size of {member.size})")
        return member

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Parse a header; a truncated block is an error."""
        if buf == bytes(tarfile.BLOCKSIZE):
            raise _ZerosError("zeros")
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.HeaderError("the end of the file")
        member = super().frombuf(buf, encoding, errors)
        if not 0 <= member.size < 2**62:
            raise tarfile.HeaderError(f"a size of {member.size}")
        return member


SUFFIXES: dict[str, type[JsonlReader] | type[ParquetReader] | type[TarReader]] = {
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson"), JsonlReader),
    ".parquet": ParquetReader,
    **dict.fromkeys((".tar", ".tar.gz", ".tgz"), TarReader),
}
"""Reader class by file name suffix."""

_REQUESTS = 16  # concurrent requests to a store


def shards(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Reader]:
    """Open a reader for each file in the given order; files that match a pattern are sorted by name.

    Args:
        paths: one or more paths, URLs, or patterns of either with ``*``, ``?``, ``[…]`` or ``**``; the name of an
            existing file is not treated as a pattern.

    Raises:
        InvalidInputError: a file does not exist or is listed twice, a pattern matches nothing, no reader supports the
            suffix, or a URL holds credentials.
        OSError: a store does not respond; the error names the URL.
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else listed("paths", paths, "paths")
    patterns = [checked_path(f"paths[{i}]", path) for i, path in enumerate(entries)]
    readers: dict[str, Reader] = {}
    with ThreadPool(min(_REQUESTS, max(len(patterns), 1))) as threads:
        for i, files in enumerate(threads.imap(_files, patterns)):
            if not files:
                got = repr(patterns[i])
                raise InvalidInputError(f"paths[{i}]: got {got}, want a file, or a pattern that matches files")
            for name in files:
                if name in readers:
                    raise InvalidInputError(f"paths[{i}]: got {name!r} again, want each file once")
                suffix = next((suffix for suffix in SUFFIXES if base_name(name).endswith(suffix)), None)
                if suffix is None:
                    want = f"a name ending in one of {', '.join(SUFFIXES)}"
                    raise InvalidInputError(f"paths[{i}]: got {name!r}, want {want}")
                readers[name] = SUFFIXES[suffix](name)
    return list(readers.values())


def checked_readers(name: str, readers: Iterable[object]) -> tuple[Reader, ...]:
    """Check that each item is a reader."""
    source, items = "mmpos.data.shards(paths)", enumerate(listed(name, readers, "readers"))
    return tuple(instance(f"{name}[{i}]", item, Reader, source) for i, item in items)  # type: ignore[type-abstract]


def _files(pattern: str) -> list[str]:
    if kind_of(pattern) == "file":
        return [pattern]
    return matches(pattern) if has_magic(pattern) else []
