"""Ready sequences as Parquet: examples in, one whole file out, and the same examples back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from mmpos.data.documents import Location, RecordError
from mmpos.data.examples import Example
from mmpos.data.preprocess.storage_rows import SCHEMA, from_row, to_row
from mmpos.data.readers.base import Raw, broken, is_chosen, stride
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray, counted, integer
from mmpos.support.files import whole_file

__all__ = ["FORMAT_VERSION", "SequenceShard", "SequenceWriter", "ready"]

FORMAT_VERSION = 2
"""Of the columns; a file of another version is refused."""

_METADATA = b"mmpos"


class SequenceWriter:
    """Writes examples to one Parquet file, in row groups of bounded size.

    The file is there, and what was there before it is gone, when the writer is closed without an error.

    Args:
        path: the file.
        group_bytes: a row group is closed when its arrays reach this size.
        group_rows: most examples in a row group.

    Attributes:
        facts: anything JSON; it goes into the footer, and SequenceShard.facts gives it back.

    Raises:
        OSError: here and later: the file cannot be written; the error names it.
    """

    def __init__(self, path: Path, *, group_bytes: int = 32 * 2**20, group_rows: int = 1024) -> None:
        self._group_bytes = integer("group_bytes", group_bytes, minimum=1)
        self._group_rows = integer("group_rows", group_rows, minimum=1)
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self._axes: int | None = None
        self.facts: dict[str, Any] = {}
        with ExitStack() as stack:
            # A page of pixels is not worth a dictionary, and a checksum tells a broken disk from broken code.
            self._parquet = parquet.ParquetWriter(
                stack.enter_context(whole_file(path)),
                SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["scheme", "patches_dtype"],
                write_statistics=False,
                write_page_checksum=True,
            )
            self._file = stack.pop_all()

    def write(self, example: Example) -> None:
        """Add one example.

        Raises:
            InvalidInputError: it is not one document, or its positions have other axes than those before it.
            LimitExceededError: its patches do not fit in a Parquet file.
        """
        row = to_row(example)
        axes = example.sequence.positions.axes
        if self._axes not in (None, axes):
            raise InvalidInputError(
                f"{example.key}: positions: got {counted(axes, 'axis')}, want {self._axes} as before it"
            )
        self._axes = axes
        self._rows.append(row)
        self._bytes += sum(len(value) if isinstance(value, bytes) else 8 * np.size(value) for value in row.values())
        if self._bytes >= self._group_bytes or len(self._rows) == self._group_rows:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the footer with the facts."""
        with self._file:
            self._flush()
            footer = {"version": FORMAT_VERSION, "axes": self._axes, "facts": self.facts}
            self._parquet.add_key_value_metadata({_METADATA: json.dumps(footer, sort_keys=True).encode()})
            self._parquet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with suppress(OSError):  # not worth finishing
            self._parquet.close()
        self._file.__exit__(kind, error, trace)

    def _flush(self) -> None:
        if self._rows:
            self._parquet.write_table(pa.Table.from_pylist(self._rows, SCHEMA), row_group_size=len(self._rows))
            self._rows, self._bytes = [], 0


@dataclass(frozen=True)
class SequenceShard:
    """A file of ready sequences.

    Args:
        path: the file.
        axes: what its positions must have; None takes what there is.
    """

    path: str | Path
    axes: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What its writer knew of it."""
        with self._open() as file:
            return self._footer(file)["facts"]

    @property
    def lengths(self) -> IntArray:
        """(examples,) tokens of each example, read without the rest."""
        with self._open() as file:
            self._footer(file)
            found: IntArray = file.read(["num_tokens"])["num_tokens"].to_numpy().astype(np.int64)
            return found

    @property
    def source(self) -> str:
        """The path."""
        return str(self.path)

    def count(self) -> int:
        """Number of examples, from the footer."""
        with self._open() as file:
            self._footer(file)
            return int(file.metadata.num_rows)

    def examples(self, start: int = 0) -> Iterator[Example]:
        """Its examples in order, as they were written; one row group is in memory at a time.

        Args:
            start: the first to give; row groups before it are not read.

        Raises:
            InvalidInputError: no file of ready sequences, one of another version or of other axes, or a broken one.
        """
        for _, found in self._rows(start, 1):
            if isinstance(found, RecordError):
                raise found
            yield found

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """See Reader: with ``ready`` in the place of a Preprocess, a loader takes these files as any other shards."""
        for index, found in self._rows(start, step):
            yield Location(self.source, index), found if isinstance(found, RecordError) else {"example": found}

    def _rows(self, start: int, step: int) -> Iterator[tuple[int, Example | RecordError]]:
        start, step = stride(start, step)
        with self._open() as file:
            axes = self._footer(file)["axes"]
            first = 0
            for group in range(file.num_row_groups):
                stop = first + file.metadata.row_group(group).num_rows
                wanted = [index for index in range(first, stop) if is_chosen(index, start, step)]
                if wanted:
                    rows = self._group(file, group)
                    for index in wanted:
                        yield index, self._example(rows, index - first, Location(self.source, index), axes)
                first = stop

    def _group(self, file: Any, group: int) -> Any:
        try:
            return file.read_row_group(group, SCHEMA.names)
        except (OSError, pa.ArrowException) as error:
            return error

    def _example(self, rows: Any, i: int, here: Location, axes: int) -> Example | RecordError:
        if isinstance(rows, Exception):
            return broken(here, rows)
        try:
            return from_row({name: rows[name][i] for name in SCHEMA.names}, axes)
        except (LookupError, TypeError, ValueError) as error:
            return RecordError(f"{here}: {error}")

    def _open(self) -> Any:
        try:
            return parquet.ParquetFile(self.path, page_checksum_verification=True)
        except pa.ArrowException as error:
            raise InvalidInputError(f"{self.path}: got no Parquet file ({error}), want ready sequences") from error

    def _footer(self, file: Any) -> dict[str, Any]:
        found = (file.metadata.metadata or {}).get(_METADATA)
        if found is None:
            raise InvalidInputError(f"{self.path}: got a Parquet file of others, want ready sequences of mmpos")
        footer: dict[str, Any] = json.loads(found)
        if footer["version"] != FORMAT_VERSION:
            got = footer["version"]
            raise InvalidInputError(
                f"{self.path}: got sequences of version {got}, want {FORMAT_VERSION}: write them anew"
            )
        if self.axes is not None and footer["axes"] not in (None, self.axes):
            raise InvalidInputError(f"{self.path}: got positions of {footer['axes']} axes, want {self.axes}")
        return footer


def ready(record: Mapping[str, Any], location: Location) -> Example:
    """The example of a record of a SequenceShard: what a Preprocess is for other shards."""
    example = record.get("example")
    if not isinstance(example, Example):
        raise RecordError(f"{location}: got a raw record, want one of a SequenceShard, which opens ready sequences")
    return example
