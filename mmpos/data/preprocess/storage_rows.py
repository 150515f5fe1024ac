"""A ready sequence as a row of a Parquet file, and back: every array by its bytes, every table by its integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from mmpos.data.examples import Example
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.rows import AXES
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable, token_types
from mmpos.sequence.builder import InterleavedSequence
from mmpos.support.checks import IntArray, counted, text

__all__ = ["SCHEMA", "from_row", "to_row"]

_MAX_VALUE = 2**31 - 1  # bytes that one value of a Parquet column may hold
_PATCHES = ("uint8", "float32")
_IDS = pa.list_(pa.int64())

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_images", pa.int64(), nullable=False),
        pa.field("input_ids", _IDS, nullable=False),
        pa.field("labels", _IDS, nullable=False),
        pa.field("part_offsets", _IDS, nullable=False),
        pa.field("kind", pa.binary(), nullable=False),  # (segments,) uint8
        pa.field("extents", pa.binary(), nullable=False),  # (3, segments) int64; this and all below: little-endian
        pa.field("seconds_per_frame", pa.binary()),  # (2, segments) int64
        pa.field("row_separator", pa.binary()),  # (segments,) bool
        pa.field("table", pa.binary(), nullable=False),  # (5 + 4 axes, segments) int64
        pa.field("documents", pa.binary(), nullable=False),  # (4, 1) int64
        pa.field("fractional", pa.bool_(), nullable=False),
        pa.field("scheme", pa.string(), nullable=False),
        pa.field("grid_thw", pa.binary(), nullable=False),  # (images, 3) int64
        pa.field("image_spans", pa.binary(), nullable=False),  # (images, 2) int64
        pa.field("image_margins", _IDS, nullable=False),  # two numbers
        pa.field("image_hashes", pa.list_(pa.string()), nullable=False),
        pa.field("patches", pa.large_binary()),
        pa.field("patches_dtype", pa.string()),
        pa.field("patches_shape", _IDS),
    ]
)


def to_row(example: Example) -> dict[str, Any]:
    """An example as a row of the file.

    Raises:
        InvalidInputError: it is not one document, its key is no Unicode, or its patches are of another type.
        LimitExceededError: its patches do not fit in one value of a Parquet file.
    """
    sequence = example.sequence
    segments, positions, patches = sequence.segments, sequence.positions, sequence.patches
    if segments.num_documents != 1 or positions.num_documents != 1:
        name = "positions" if segments.num_documents == 1 else "segments"
        got = getattr(sequence, name).num_documents
        raise InvalidInputError(f"{example.key}: {name}: got {counted(got, 'document')}, want one")
    row = {
        "key": text("key", example.key),
        "num_tokens": example.num_tokens,
        "num_images": len(sequence.grid_thw),
        "input_ids": sequence.input_ids,
        "labels": example.labels,
        "part_offsets": sequence.part_offsets,
        "kind": segments.kind.tobytes(),
        "extents": _bytes(segments.extents),
        "seconds_per_frame": None if segments.seconds_per_frame is None else _bytes(segments.seconds_per_frame),
        "row_separator": None if segments.row_separator is None else segments.row_separator.tobytes(),
        "table": _bytes(positions.table),
        "documents": _bytes(positions.documents),
        "fractional": positions.fractional,
        "scheme": positions.scheme,
        "grid_thw": _bytes(sequence.grid_thw),
        "image_spans": _bytes(sequence.image_spans),
        "image_margins": sequence.image_margins,
        "image_hashes": list(sequence.image_hashes),
    }
    if patches is not None:
        if patches.dtype.name not in _PATCHES:
            raise InvalidInputError(f"{example.key}: patches: got {patches.dtype}, want uint8 or float32")
        if patches.nbytes > _MAX_VALUE:
            raise LimitExceededError(f"{example.key}: patches: got {patches.nbytes} bytes, want at most {_MAX_VALUE}")
        shape = list(patches.shape)
        row |= {"patches": _bytes(patches), "patches_dtype": patches.dtype.name, "patches_shape": shape}
    return row


def from_row(row: Mapping[str, Any], axes: int) -> Example:
    """The example of a row, with arrays of its own; every table is checked.

    Args:
        row: a pyarrow scalar for every column.
        axes: of its positions.
    """
    kind = _array(row["kind"], np.uint8, (-1,))
    segments = SegmentTable(
        kind,
        _array(row["extents"], np.int64, (3, -1)),
        np.array([0, kind.size]),
        _optional(row["seconds_per_frame"], np.int64, (2, -1)),
        _optional(row["row_separator"], np.bool_, (-1,)),
    )
    input_ids = _numbers(row["input_ids"])
    positions = PositionTable.from_arrays(
        _array(row["table"], np.int64, (AXES + 4 * axes, -1)),
        _array(row["documents"], np.int64, (4, -1)),
        input_ids.size,
        fractional=row["fractional"].as_py(),
        scheme=row["scheme"].as_py(),
    )
    patches = None
    if row["patches"].is_valid:
        patches = _array(row["patches"], row["patches_dtype"].as_py(), tuple(row["patches_shape"].as_py()))
    sequence = InterleavedSequence(
        input_ids=input_ids,
        token_type_ids=token_types(segments),
        segments=segments,
        positions=positions,
        patches=patches,
        grid_thw=_array(row["grid_thw"], np.int64, (-1, 3)),
        image_spans=_array(row["image_spans"], np.int64, (-1, 2)),
        image_hashes=tuple(row["image_hashes"].as_py()),
        part_offsets=_numbers(row["part_offsets"]),
        image_margins=_margins(row["image_margins"].as_py()),
    )
    return Example(row["key"].as_py(), sequence, _numbers(row["labels"]))


def _bytes(array: npt.NDArray[Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(value: Any, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A copy, so that it may be written to and keeps no row group alive."""
    stored = np.frombuffer(value.as_buffer(), np.dtype(dtype).newbyteorder("<"))
    return stored.astype(dtype).reshape(shape)


def _margins(numbers: list[int]) -> tuple[int, int]:
    before, after = numbers
    return before, after


def _optional(value: Any, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    return _array(value, dtype, shape) if value.is_valid else None


def _numbers(value: Any) -> IntArray:
    found: IntArray = value.values.to_numpy().copy()
    return found
