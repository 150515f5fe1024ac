"""Reader of WebDataset tar files: adjacent members whose names differ only in the extension form one record."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, BinaryIO, Self

from mmpos.data.examples import Location, RecordError
from mmpos.data.readers.base import FileReader, Raw, is_chosen

__all__ = ["TarReader"]

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
        path: path or URL of the file.
    """

    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Read records."""
        index = 0
        with self.file.open() as packed:
            archive = _Archive(packed)
            try:
                for key, members in groupby(archive.members(), key=itemgetter(0)):
                    here = Location(self.path, index)
                    wanted = is_chosen(index, start, step)
                    record = archive.record({"__key__": key, "__url__": self.path}, members, here, wanted)
                    if wanted:
                        yield here, record
                    index += 1
                archive.check_rest()
            except _BROKEN as error:
                yield from self.lost(archive.placed(error), index, start, step)


class _Archive:
    """Archive that checks itself in the same way for every choice of records, so that all readers find the same damage.

    Args:
        packed: file of the archive.
    """

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
