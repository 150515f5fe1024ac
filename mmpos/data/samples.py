"""Rows of NeMo Curator's interleaved tables: joined to samples, one a record, and written from documents."""

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
        pa.field("train", pa.bool_()),  # of ours: whether the row is trained on
    ]
)
"""Columns of INTERLEAVED_SCHEMA of NeMo Curator 1.4, and ``train``."""

_ID = "sample_id"
_GROUP_BYTES = 2**26  # of a row group
_TYPES = {b"\xff\xd8\xff": "jpeg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif"}


class TableReader(Reader, Protocol):
    """Reader of a table, which can read a column alone."""

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a column of all rows."""


@dataclass(frozen=True)
class SampleReader:
    """Reader that joins the rows of each sample to one record, ``{"id": …, "rows": […]}``, which ``Curator`` reads.

    The rows of a sample are neighbours, also across row groups; they may be in any order. Where a row cannot be read,
    or rows of one sample stand in several places, the sample is an error as a whole. The column ``sample_id`` is read
    before the rows.

    Args:
        reader: of the rows: that of a Parquet file or of a Lance fragment.
    """

    reader: TableReader

    def __post_init__(self) -> None:
        given: object = self.reader
        if not callable(getattr(given, "column", None)):
            raise InvalidInputError(f"reader: got {type(given).__name__}, want that of a Parquet file or of Lance")

    @property
    def source(self) -> str:
        """Path or name of the table."""
        return self.reader.source

    def count(self) -> int | None:
        """Return the number of samples; None if the column of their ids cannot be read."""
        try:
            return len(self._samples()[0]) - 1
        except (OSError, pa.ArrowException):
            return None

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Raw]]:
        """Read samples; of those before the start only the ids are read."""
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
        """Return (samples + 1,) first rows, and (samples,) in how many places rows of the same id stand."""
        codes = _codes(self.reader.column(_ID))
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        places: IntArray = np.bincount(codes[starts])[codes[starts]]
        return np.append(starts, codes.size), places


def _joined(here: Location, rows: Sequence[Raw], places: int) -> Raw:
    read = list[Record]()
    for row in rows:
        if isinstance(row, RecordError):
            return RecordError(f"{here}: {row}")
        read.append(row)
    name = read[0][_ID]
    if places > 1:
        return RecordError(f"{here}: {_ID}: got {name!r} in {places} places, want the rows of a sample side by side")
    return {"id": name, "rows": read}


def join_samples(table: pa.Table | pa.RecordBatch) -> pa.Table:
    """Join the rows of each sample in a table to one row of ``id`` and ``rows``, for a Stage with the format Curator.

    Args:
        table: whole samples, their rows in any order.

    Returns:
        a table with a row for each sample, in order of their first rows.

    Raises:
        InvalidInputError: there is no column of ids.
    """
    given: object = table
    if not isinstance(given, pa.Table | pa.RecordBatch):
        raise InvalidInputError(f"table: got {type(given).__name__}, want an Arrow table")
    whole = pa.table(table)
    if _ID not in whole.column_names:
        got = ", ".join(whole.column_names) or "none"
        raise InvalidInputError(f"table: got the columns {got}, want {_ID} among them")
    codes = _codes(whole[_ID])
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    offsets = np.append(0, counts.cumsum())
    if (np.diff(order) != 1).any():
        whole = whole.take(order)
    rows = pa.LargeListArray.from_arrays(offsets, whole.to_struct_array().combine_chunks())
    return pa.table({"id": whole[_ID].take(offsets[:-1]), "rows": rows})


def _codes(ids: pa.ChunkedArray) -> IntArray:
    """Number the ids of rows in order of their first rows; null is an id of its own."""
    try:
        texts = ids.cast(pa.large_string())
    except pa.ArrowException:
        raise InvalidInputError(f"{_ID}: got a column of {ids.type}, want text") from None
    codes: IntArray = texts.combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
    return codes


def write_samples(documents: Iterable[Document], path: str | os.PathLike[str]) -> int:
    """Write documents as rows of NeMo Curator, a Parquet file that its InterleavedParquetReader reads.

    A text is a row, and an image another: the bytes of its file in ``binary_content``, or its path in ``source_ref``.

    Args:
        documents: with keys that differ.
        path: path or URL of the file; it is there wholly or not at all.

    Returns:
        the number of rows.

    Raises:
        InvalidInputError: a key comes twice, or a part is no text and no image file.
        OSError: the file cannot be written.
    """
    keys, count = set[str](), 0
    rows, size = list[dict[str, object]](), 0
    with store_path("path", path).write() as file, pq.ParquetWriter(file, SAMPLE_SCHEMA) as writer:
        for document in documents:
            if document.key in keys:
                raise InvalidInputError(f"documents: got the key {document.key!r} again, want each once")
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
