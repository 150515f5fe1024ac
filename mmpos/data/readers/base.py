"""The protocol of readers, and helpers that all readers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mmpos.data.examples import Location, Record, RecordError
from mmpos.data.stores import StorePath, store_path
from mmpos.support.checks import integer

__all__ = ["FileReader", "Mark", "Raw", "Reader", "broken", "is_chosen", "stride"]

Raw = Record | RecordError
"""A record as its shard has it, images undecoded; or, in its place, the error that hides it."""


@runtime_checkable
class Reader(Protocol):
    """Reader of one shard. It holds no open file, so that it pickles; every call of ``records`` reads anew."""

    @property
    def source(self) -> str:
        """Path or name of the shard."""

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … in the order of the shard, which is always the same.

        A record that cannot be read is a RecordError in its place, never raised, so that what can go on after it
        goes on. Where the rest of the shard is lost, the first record lost is the last one given.

        Args:
            start: number of the first record; those before it are skipped without looking into them.
            step: distance to the next one.
        """

    def count(self) -> int | None:
        """Return the number of records where it is known without reading them, else None."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Beginning of a record in a file.

    Args:
        index: its number.
        offset: its first byte.
    """

    index: int
    offset: int


@dataclass(frozen=True)
class FileReader(ABC):
    """Base of the readers of one file.

    Args:
        path: the file, a path or a URL.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", str(store_path("path", self.path)))

    @property
    def source(self) -> str:
        """Path of the file."""
        return self.path

    @property
    def file(self) -> StorePath:
        """The file."""
        return StorePath(self.path)

    def count(self) -> int | None:
        """Return None, since records are counted by reading them."""
        return None

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file."""
        return self.records_from(Mark(0, 0), *stride(start, step))

    @abstractmethod
    def records_from(self, begin: Mark, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Read records, the first of which is not before a mark of this file."""

    def marks(self, size: int) -> Iterator[Mark]:
        """Yield the first record behind every ``size`` bytes, where that can be found without reading records."""
        return iter(())

    def lost(self, error: Exception, index: int, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Yield the error that hides a record and all after it, if that record is chosen."""
        here = Location(self.path, index)
        record = broken(here, error, rest=True)
        if is_chosen(index, start, step):
            yield here, record


def stride(start: int, step: int) -> tuple[int, int]:
    """Check the arguments of ``records``."""
    return integer("start", start, minimum=0), integer("step", step, minimum=1)


def is_chosen(index: int, start: int, step: int) -> bool:
    """Whether a record is one of start, start + step, …"""
    return index >= start and (index - start) % step == 0


def broken(location: Location, error: BaseException, rest: bool = False) -> RecordError:
    """Make the error that stands in the place of a record that cannot be read.

    Args:
        location: its shard and number.
        error: the cause. One of the operating system or a store (no such file, no permission) is raised: no fault of
            the record.
        rest: whether all after it is also lost.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    lost = "; what follows it is lost" if rest else ""
    return RecordError(f"{location}: got {error or type(error).__name__}, want a record that can be read{lost}")
