"""Collate examples into a batch, packed into one row or padded to rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mmpos.data.batch import Batch, construct
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable, Side
from mmpos.segments.kinds import AUDIO_TOKEN, PATCH
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, IntArray, counted, integer, one_of
from mmpos.support.ragged import true_runs

__all__ = ["PackedCollator", "PaddedCollator"]

Examples = Sequence[Example] | Sequence[Pack] | Pack


class _Arrays(NamedTuple):
    """Arrays and properties of a batch, in the order in which the C extension returns them."""

    table: IntArray
    documents: IntArray
    input_ids: IntArray
    labels: IntArray
    text_positions: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    attention_mask: IntArray | None
    grid_thw: IntArray
    image_spans: IntArray
    feature_spans: IntArray
    audio_spans: IntArray | None
    audio_feature_spans: IntArray | None
    scheme: str | None  # common scheme of all documents, if any
    fractional: bool
    pixels: bool  # whether any example has patches


_READ = (
    *("sequence", "labels", "input_ids", "token_type_ids", "image_spans", "grid_thw", "patches", "positions"),
    *("table", "documents", "num_tokens", "scheme", "fractional"),
)
"""Attributes that the C extension reads from an example, its sequence and its positions."""

_LATER = ("text_positions", "cu_seqlens", "grid_thw", "image_spans", "feature_spans")
"""Fields of a batch that are made when they are first read."""

_MAKE = (np.empty, np.dtype(np.int64), np.dtype(np.int32))


class _Collator:
    """Collator of documents in rows padded on a side, or in one packed row if the side is None."""

    side: Side | None
    multiple_of: int
    length: int | None
    pad_token_id: int

    def __post_init__(self) -> None:
        integer("multiple_of", self.multiple_of, minimum=1)
        integer("pad_token_id", self.pad_token_id, minimum=0, maximum=INT32_MAX)
        if self.length is not None and integer("length", self.length, minimum=1, maximum=INT32_MAX) % self.multiple_of:
            raise InvalidInputError(f"length: got {self.length}, want a multiple of multiple_of={self.multiple_of}")

    def __call__(self, examples: Examples) -> Batch:
        """Collate examples, or the examples of one or more Packs, into one batch.

        Raises:
            InvalidInputError: an example is incompatible with the first, or the batch or a row exceeds length.
        """
        flattened = list(examples.examples) if type(examples) is Pack else _flatten(examples)
        core, tensor = native.core, torch.from_numpy
        layout = (self.multiple_of, self.length, self.pad_token_id, self.side)
        fields = None if core is None else core.collate(flattened, _READ, _MAKE, *layout)
        arrays = _Arrays._make(fields or _write(flattened, self))
        schemes = dict.fromkeys(example.sequence.positions.scheme for example in flattened) if not arrays.scheme else {}
        table, documents, tokens = arrays.table, arrays.documents, arrays.input_ids.size
        table.setflags(write=False)
        documents.setflags(write=False)
        fractional, scheme = arrays.fractional, arrays.scheme or " + ".join(schemes)
        positions = construct(
            PositionTable, table=table, documents=documents, num_tokens=tokens, fractional=fractional, scheme=scheme
        )
        pixels = _patches(flattened) if arrays.pixels else None
        optional = (arrays.attention_mask, pixels, arrays.audio_spans, arrays.audio_feature_spans)
        mask, patches, audio, audio_rows = [None if array is None else tensor(array) for array in optional]
        later = {name: getattr(arrays, name) for name in _LATER}
        return construct(
            Batch,
            keys=tuple([example.key for example in flattened]),
            positions=positions,
            input_ids=tensor(arrays.input_ids),
            labels=tensor(arrays.labels),
            attention_mask=mask,
            patches=patches,
            shifted=False,
            world_size=1,
            audio_spans=audio,
            audio_feature_spans=audio_rows,
            _later={"device_positions": positions, **later},
        )

    def sizes(self, examples: Sequence[Example]) -> tuple[list[int], int]:
        """Return the padded size of every document or row, and the size of the padding after the last."""
        lengths = [example.num_tokens for example in examples]
        if self.side is None:
            sizes = [-(-length // self.multiple_of) * self.multiple_of for length in lengths]
            if self.length is not None and (tokens := sum(sizes)) > self.length:
                documents = counted(len(examples), "document")
                raise InvalidInputError(f"examples: got {tokens} tokens in {documents}, want at most {self.length}")
            return sizes, 0 if self.length is None else self.length - sum(sizes)
        seq = -(-max(lengths) // self.multiple_of) * self.multiple_of if self.length is None else self.length
        for i, length in enumerate(lengths):
            if length > seq:
                raise InvalidInputError(f"{_name(examples, i)}: got {length} tokens, want at most {seq}")
        return [seq] * len(examples), 0


@dataclass(frozen=True)
class PackedCollator(_Collator):
    """Collator that concatenates documents into one row; a picklable collate_fn.

    Args:
        multiple_of: multiple to which the length of every document is padded, as part of the document in cu_seqlens;
            2 * world_size for zigzag context parallelism.
        length: number of tokens in every batch, for static shapes, filled with one document of padding; None for any.
        pad_token_id: value of input_ids on padding.
    """

    multiple_of: int = 1
    length: int | None = None
    pad_token_id: int = 0

    side = None


@dataclass(frozen=True)
class PaddedCollator(_Collator):
    """Collator that pads every document to a row of the same length; a picklable collate_fn for DataLoader.

    Args:
        side: side of the padding, "right" or "left".
        multiple_of: multiple to which the length is rounded up.
        length: number of tokens in every row; None uses the length of the longest document.
        pad_token_id: value of input_ids on padding.
    """

    side: Side = "right"
    multiple_of: int = 1
    length: int | None = None
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        one_of("side", self.side, ("right", "left"))
        super().__post_init__()


def _write(examples: Sequence[Example], collator: _Collator) -> _Arrays:
    """Write the arrays document by document, as the C extension does; raise if the examples do not fit."""
    _check_fit(examples)
    side, (sizes, rest) = collator.side, collator.sizes(examples)
    positions = PositionTable.concatenate([example.sequence.positions for example in examples])
    positions = positions.pad(sizes, side or "right")
    if rest:
        positions = PositionTable.concatenate([positions, positions.window([0], [0], [0]).pad(rest)])
    tokens = positions.num_tokens
    input_ids, labels = np.full(tokens, collator.pad_token_id, np.int64), np.full(tokens, IGNORE_INDEX, np.int64)
    text_positions, attention_mask = np.zeros(tokens, np.int32), np.zeros(tokens, np.int64)
    types, image_starts = np.zeros(tokens, np.uint8), []
    stop = 0
    for example, size in zip(examples, sizes, strict=True):
        start, stop = stop + (size - example.num_tokens if side == "left" else 0), stop + size
        sequence, here = example.sequence, slice(start, start + example.num_tokens)
        input_ids[here], labels[here], types[here] = sequence.input_ids, example.labels, sequence.token_type_ids
        labels[start] = IGNORE_INDEX  # no token predicts the first one
        text_positions[start:stop] = np.arange(stop - start)
        attention_mask[here] = 1
        image_starts.append(sequence.image_spans[:, 0] + start)
    text_positions[stop:] = np.arange(rest)
    images, audio = true_runs(types == PATCH, np.concatenate(image_starts)), true_runs(types == AUDIO_TOKEN)
    shape = (tokens,) if side is None else (len(examples), sizes[0])
    return _Arrays(
        positions.table,
        positions.documents,
        input_ids.reshape(shape),
        labels.reshape(shape),
        text_positions.reshape(shape),
        positions.cu_seqlens.copy(),
        None if side is None else attention_mask.reshape(shape),
        np.concatenate([example.sequence.grid_thw for example in examples]),
        images,
        _feature_rows(images),
        audio if len(audio) else None,
        _feature_rows(audio) if len(audio) else None,
        scheme=positions.scheme,
        fractional=positions.fractional,
        pixels=True,
    )


def _feature_rows(spans: IntArray) -> IntArray:
    """Assign consecutive feature rows to spans of tokens: (spans, 2) first row and one past the last."""
    lengths = spans[:, 1] - spans[:, 0]
    stops = lengths.cumsum()
    return np.stack([stops - lengths, stops], axis=1)


def _flatten(examples: object) -> list[Example]:
    """Return the examples of a list or of several Packs."""
    if not isinstance(examples, list | tuple):
        raise InvalidInputError(f"examples: got {type(examples).__name__}, want a list of Examples or a Pack")
    flattened: list[Example] = []
    for i, entry in enumerate(examples):
        if isinstance(entry, Example):
            flattened.append(entry)
        elif isinstance(entry, Pack):
            flattened += entry.examples
        else:
            raise InvalidInputError(f"examples[{i}]: got {type(entry).__name__}, want an Example or a Pack")
    if not flattened:
        raise InvalidInputError("examples: got none, want at least one")
    return flattened


def _check_fit(examples: Sequence[Example]) -> None:
    """Raise an error for the first example that has no tokens or differs from the first one in its number of axes."""
    axes = examples[0].sequence.positions.axes
    for i, example in enumerate(examples):
        if not example.num_tokens:
            raise InvalidInputError(f"{_name(examples, i)}: got no tokens, want at least one")
        if (got := example.sequence.positions.axes) != axes:
            want = f"{axes} as in the first"
            raise InvalidInputError(f"{_name(examples, i)}: positions: got {counted(got, 'axis')}, want {want}")


def _patches(examples: Sequence[Example]) -> npt.NDArray[np.generic] | None:
    """Concatenate the pixels of all images, which must have the same dtype and shape; return None without pixels."""
    numbered = [(i, example.sequence.patches) for i, example in enumerate(examples) if len(example.sequence.grid_thw)]
    kinds = [None if patches is None else (str(patches.dtype), *patches.shape[1:]) for _, patches in numbered]
    for (i, _), kind in zip(numbered, kinds, strict=True):
        if kind != kinds[0]:
            got, want = (("no pixels" if k is None else " ".join(map(str, k))) for k in (kind, kinds[0]))
            want += f" as in examples[{numbered[0][0]}]"
            raise InvalidInputError(f"{_name(examples, i)}: patches: got {got}, want {want}")
    arrays = [patches for _, patches in numbered if patches is not None]
    return np.concatenate(arrays) if arrays else None


def _name(examples: Sequence[Example], i: int) -> str:
    return f"examples[{i}] ({examples[i].key})"
