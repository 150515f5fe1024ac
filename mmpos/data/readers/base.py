"""Protocol of readers, and helpers shared by all readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mmpos.data.examples import Location, Record, RecordError
from mmpos.data.stores import StorePath, store_path
from mmpos.support.checks import integer

__all__ = ["FileReader", "Raw", "Reader", "broken", "is_chosen", "stride"]

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
        path: path or URL of the file.
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
        """Return None, since counting the records would require reading them."""
        return None

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file."""
        return self._records(*stride(start, step))

    @abstractmethod
    def _records(self, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Read the records start, start + step, … of the file."""

    def lost(self, error: Exception, index: int, start: int, step: int) -> Iterator[tuple[Location, Raw]]:
        """Yield the error instead of a record and all later ones, if that record is among those to read."""
        here = Location(self.path, index)
        record = broken(here, error, rest=True)
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
