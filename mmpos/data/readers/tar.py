"""Tar shards as webdataset has them: neighbours whose names differ in their extension only are one record."""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Self

from mmpos.data.documents import Location, RecordError
from mmpos.data.readers.base import Raw, broken, is_chosen, stride
from mmpos.extras import needed_for

__all__ = ["TarReader"]

_META = re.compile(r"__[^/]*__($|/)")
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError)

_Member = tuple[str, str, tarfile.TarInfo]


@dataclass(frozen=True)
class TarReader:
    """A tar file of records in the manner of webdataset, compressed or not.

    A record has ``__key__``, ``__url__`` and the bytes of each file under its extension in lower case, as webdataset
    would give it, but an archive that is truncated or broken in the middle does not pass for a short one: the record
    that was being read is an error, and the shard ends there. Files of records that are skipped are not read.

    Args:
        path: the file.
    """

    path: str

    @property
    def source(self) -> str:
        """The path."""
        return self.path

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """See Reader."""
        start, step = stride(start, step)
        index = 0
        try:
            with tarfile.open(self.path, "r:*", tarinfo=_StrictInfo) as tar:
                for index, (key, files) in enumerate(groupby(_members(tar), key=itemgetter(0))):
                    if is_chosen(index, start, step):
                        here = Location(self.path, index)
                        yield here, _record(tar, {"__key__": key, "__url__": self.path}, files, here)
        except _BROKEN as error:
            here = Location(self.path, index)
            lost = broken(here, error, rest=True)
            if is_chosen(index, start, step):
                yield here, lost

    def count(self) -> int | None:
        """None: records are counted by walking through the archive."""
        return None


class _StrictInfo(tarfile.TarInfo):
    """A member whose header is whole; tarfile takes a broken one in the middle for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The member of a header."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the zeros that end an archive
            raise tarfile.ReadError(f"a broken archive: {error}") from error


def _members(tar: tarfile.TarFile) -> Iterator[_Member]:
    """Key, extension and member of each file that belongs to a record."""
    with needed_for("tar shards", extra="data"):
        from webdataset.tariterators import base_plus_ext
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # which it keeps for random access
        if member.isreg() and not _META.match(member.name):
            key, extension = base_plus_ext(member.name)
            if key is not None:
                yield key, extension.lower(), member


def _record(tar: tarfile.TarFile, record: dict[str, Any], files: Iterable[_Member], here: Location) -> Raw:
    wrong = None
    for _, extension, member in files:
        if extension in record:
            wrong = RecordError(f"{here}: {extension}: got two files, want one")
        file = tar.extractfile(member)
        assert file is not None, "only regular files come here"
        record[extension] = file.read()
    return wrong or record
