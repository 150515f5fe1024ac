"""Join rows of NeMo Curator's interleaved tables into samples, one per record, and write documents as such tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mmpos.data.examples import Document, Location, Piece, Record, RecordError
from mmpos.data.readers.base import Raw, Reader, broken, is_chosen, stride
from mmpos.data.stores import store_path
from mmpos.errors import InvalidInputError
from mmpos.support.checks import IntArray

__all__ = ["SAMPLE_SCHEMA", "SampleReader", "join_samples", "write_samples"]

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("modality", pa.string(), nullable=False),
        pa.field("content_type", pa.string()),
        pa.field("text_content", pa.string()),
        pa.field("binary_content", pa.large_binary()),
        pa.field("source_ref", pa.string()),
        pa.field("materialize_error", pa.string()),
        pa.field("train", pa.bool_()),  # added by mmpos: whether the row is trained on
    ]
)
"""Columns of INTERLEAVED_SCHEMA of NeMo Curator 1.4, and ``train``."""

_ID = "sample_id"
_GROUP_BYTES = 2**26  # bytes of texts and images in a row group
_TYPES = {b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif"}


class TableReader(Reader, Protocol):
    """Reader of a table that can read a single column."""

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column of all rows."""


@dataclass(frozen=True)
class SampleReader:
    """Reader that joins the rows of each sample into a record ``{"id": …, "rows": […]}``, as ``Curator`` expects.

    The rows of a sample must be adjacent, possibly across row groups, in any order. If a row cannot be read, or the
    rows of a sample are not adjacent, the whole sample becomes an error. The column ``sample_id`` is read before the
    rows.

    Args:
        reader: reader of the rows, of a Parquet file or of a Lance fragment.
    """

    reader: TableReader

    def __post_init__(self) -> None:
        reader: object = self.reader
        if not callable(getattr(reader, "column", None)):
            raise InvalidInputError(
                f"reader: got {type(reader).__name__}, want a reader of a Parquet file or a Lance fragment"
            )

    @property
    def source(self) -> str:
        """Path or name of the table."""
        return self.reader.source

    def count(self) -> int | None:
        """Return the number of samples, or None if the id column cannot be read."""
        try:
            return len(self._samples()[0]) - 1
        except (OSError, pa.ArrowException):
            return None

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read samples; only the ids of samples before the start are read."""
        start, step = stride(start, step)
        try:
            offsets, places = self._samples()
        except (OSError, pa.ArrowException) as error:
            lost = broken(Location(self.source, 0), error, rest=True)
            if start == 0:
                yield Location(self.source, 0), lost
            return
        if start >= places.size:
            return
        rows = (raw for _, raw in self.reader.records(int(offsets[start])))
        for index in range(start, places.size):
            sample = list(islice(rows, int(offsets[index + 1] - offsets[index])))
            if is_chosen(index, start, step):
                here = Location(self.source, index)
                yield here, _joined(here, sample, int(places[index]))

    def _samples(self) -> tuple[IntArray, IntArray]:
        """Return (samples + 1,) first rows, and (samples,) number of separate runs of rows with each sample's id."""
        codes = _codes(self.reader.column(_ID))
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        places: IntArray = np.bincount(codes[starts])[codes[starts]]
        return np.append(starts, codes.size), places


def _joined(here: Location, rows: Sequence[Raw], places: int) -> Raw:
    records = list[Record]()
    for row in rows:
        if isinstance(row, RecordError):
            return RecordError(f"{here}: {row}")
        records.append(row)
    name = records[0][_ID]
    if places > 1:
        return RecordError(f"{here}: {_ID}: got {name!r} in {places} places, want adjacent rows of a sample")
    return {"id": name, "rows": records}


def join_samples(table: pa.Table | pa.RecordBatch) -> pa.Table:
    """Join the rows of each sample into one row with ``id`` and ``rows``, for a Stage with the format Curator.

    Args:
        table: all rows of the samples, in any order.

    Returns:
        a table with one row per sample, in the order of their first rows.

    Raises:
        InvalidInputError: the table has no id column.
    """
    argument: object = table
    if not isinstance(argument, pa.Table | pa.RecordBatch):
        raise InvalidInputError(f"table: got {type(argument).__name__}, want an Arrow table")
    table = pa.table(table)
    if _ID not in table.column_names:
        got = ", ".join(table.column_names) or "none"
        raise InvalidInputError(f"table: got the columns {got}, want {_ID} among them")
    codes = _codes(table[_ID])
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    offsets = np.append(0, counts.cumsum())
    if (np.diff(order) != 1).any():
        table = table.take(order)
    rows = pa.LargeListArray.from_arrays(offsets, table.to_struct_array().combine_chunks())
    return pa.table({"id": table[_ID].take(offsets[:-1]), "rows": rows})


def _codes(ids: pa.ChunkedArray) -> IntArray:
    """Encode the ids of rows as integers in order of first occurrence; null counts as an id."""
    try:
        texts = ids.cast(pa.large_string())
    except pa.ArrowException:
        raise InvalidInputError(f"{_ID}: got a column of {ids.type}, want text") from None
    codes: IntArray = texts.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
    return codes


def write_samples(documents: Iterable[Document], path: str | os.PathLike[str]) -> int:
    """Write documents as NeMo Curator rows to a Parquet file that Curator's InterleavedParquetReader reads.

    Each text and each image is a row; an image is the bytes of its file in ``binary_content``, or its path in
    ``source_ref``.

    Args:
        documents: documents with unique keys.
        path: path or URL of the file, which is written atomically.

    Returns:
        the number of rows.

    Raises:
        InvalidInputError: a key occurs twice, or a part is neither text nor an image file.
        OSError: the file cannot be written.
    """
    keys, count = set[str](), 0
    rows, size = list[dict[str, object]](), 0
    with store_path("path", path).write() as file, pq.ParquetWriter(file, SAMPLE_SCHEMA) as writer:
        for document in documents:
            if document.key in keys:
                raise InvalidInputError(f"documents: got the key {document.key!r} again, want each key once")
            keys.add(document.key)
            for position, piece in enumerate(document.pieces):
                rows.append(_row(document.key, position, piece))
                size += sum(len(value) for value in rows[-1].values() if isinstance(value, str | bytes))
            if size > _GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA))
                count, rows, size = count + len(rows), [], 0
        writer.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA))
    return count + len(rows)


def _row(key: str, position: int, piece: Piece) -> dict[str, object]:
    row: dict[str, object] = {_ID: key, "position": position, "modality": "image", "train": piece.train}
    match piece.part:
        case str(text):
            return row | {"modality": "text", "content_type": "text/plain", "text_content": text}
        case bytes(data):
            kind = next((kind for magic, kind in _TYPES.items() if data.startswith(magic)), None)
            return row | {"content_type": kind and f"image/{kind}", "binary_content": data}
        case PurePath() as path:
            reference = {"path": str(path), "member": None, "byte_offset": None, "byte_size": None}
            return row | {"source_ref": json.dumps(reference)}
    got = f"{key}: pieces[{position}]: got {type(piece.part).__name__}"
    raise InvalidInputError(f"{got}, want text, the bytes of an image file or its path")
