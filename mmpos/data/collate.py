"""Collation: examples become a batch, packed in one row or padded to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mmpos.data.batch import Batch
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable, Side
from mmpos.rotary.device import DevicePositions
from mmpos.segments.kinds import AUDIO, AUDIO_TOKEN, PATCH
from mmpos.support.checks import INT32_MAX, IntArray, counted, integer, one_of
from mmpos.support.ragged import true_runs

__all__ = ["PackedCollator", "PaddedCollator"]

Examples = Sequence[Example] | Sequence[Pack] | Pack


@dataclass(frozen=True)
class PackedCollator:
    """Collator that packs documents side by side in one row; a collate_fn for DataLoader that pickles.

    Args:
        multiple_of: every document is padded to a multiple of this, inside its own cu_seqlens; 2 * world_size for
            zig-zag context parallelism.
        length: tokens of every batch, for static shapes: what is left is one more document, of padding alone. None
            adds nothing.
        pad_token_id: stands in input_ids where padding is.
    """

    multiple_of: int = 1
    length: int | None = None
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        _check(self.multiple_of, self.length, self.pad_token_id)

    def __call__(self, examples: Examples) -> Batch:
        """Collate these examples, or those of a Pack or of several, into one batch.

        Raises:
            InvalidInputError: an example does not fit the first, or all together do not fit length.
        """
        examples = _read(examples)
        lengths = np.array([example.num_tokens for example in examples])
        padded = _round_up(lengths, self.multiple_of)
        positions = PositionTable.concatenate([example.sequence.positions for example in examples])
        if (padded > lengths).any():
            positions = positions.pad(padded)
        rest = 0 if self.length is None else self.length - positions.num_tokens
        if rest < 0:
            raise InvalidInputError(
                f"examples: got {positions.num_tokens} tokens in {counted(len(examples), 'document')}, "
                f"want at most {self.length}"
            )
        if rest:
            positions = PositionTable.concatenate([positions, positions.window([0], [0], [0]).pad(rest)])
        return _batch(examples, positions, np.cumsum(padded) - padded, self.pad_token_id, (positions.num_tokens,))


@dataclass(frozen=True)
class PaddedCollator:
    """Collator that pads every document to a row of one length; a collate_fn for DataLoader that pickles.

    Args:
        side: where padding stands, "right" or "left".
        multiple_of: the length is a multiple of this.
        length: tokens of every row, for static shapes; None is what the longest document needs.
        pad_token_id: stands in input_ids where padding is.
    """

    side: Side = "right"
    multiple_of: int = 1
    length: int | None = None
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        one_of("side", self.side, ("right", "left"))
        _check(self.multiple_of, self.length, self.pad_token_id)

    def __call__(self, examples: Examples) -> Batch:
        """Collate these examples, or those of a Pack or of several, into one batch.

        Raises:
            InvalidInputError: an example does not fit the first, or is longer than length.
        """
        examples = _read(examples)
        lengths = np.array([example.num_tokens for example in examples])
        seq = int(_round_up(lengths.max(keepdims=True), self.multiple_of)[0]) if self.length is None else self.length
        if (lengths > seq).any():
            i = int((lengths > seq).argmax())
            raise InvalidInputError(f"{_name(examples, i)}: got {lengths[i]} tokens, want at most {seq}")
        starts = np.arange(len(examples)) * seq + (seq - lengths if self.side == "left" else 0)
        positions = PositionTable.concatenate([example.sequence.positions for example in examples])
        positions = positions.pad(seq, self.side)
        return _batch(examples, positions, starts, self.pad_token_id, (len(examples), seq))


def _batch(
    examples: Sequence[Example], positions: PositionTable, starts: IntArray, pad_token_id: int, shape: tuple[int, ...]
) -> Batch:
    """Make the batch whose documents begin at these columns of dense(); with two dimensions if it is padded."""
    rows = _Rows.empty(positions.num_tokens, masked=len(shape) == 2)
    edges = positions.cu_seqlens.astype(np.int64)
    # A document beyond the examples is padding alone.
    lengths, before = np.zeros((2, positions.num_documents), np.int64)
    lengths[: len(examples)] = [example.num_tokens for example in examples]
    before[: len(examples)] = starts - edges[: len(examples)]
    after = np.diff(edges) - before - lengths
    _lay(rows.input_ids, [example.sequence.input_ids for example in examples], before, after, pad_token_id)
    _lay(rows.labels, [example.labels for example in examples], before, after, IGNORE_INDEX)
    rows.labels[starts] = IGNORE_INDEX  # nothing predicts the first token
    if rows.attention_mask is not None:
        ones = np.ones(positions.max_seqlen, np.int64)
        _lay(rows.attention_mask, [ones[:length] for length in lengths.tolist()], before, after, 0)
    counter = np.arange(positions.max_seqlen, dtype=np.int32)
    counted = [counter[:count] for count in (lengths + after).tolist()]
    _lay(rows.text_positions, counted, before, np.zeros_like(after), 0)
    sequences = [example.sequence for example in examples]
    images = [len(sequence.grid_thw) for sequence in sequences]
    grid_thw = np.concatenate([sequence.grid_thw for sequence in sequences])
    spans = np.concatenate([sequence.image_spans for sequence in sequences]) + starts.repeat(images)[:, None]
    audio_spans = None
    # Read token by token only where spans do not say it: where rows end in separators, and where there is audio.
    mixed = (spans[:, 1] - spans[:, 0] > grid_thw.prod(axis=1)).any()
    if mixed or (np.concatenate([sequence.segments.kind for sequence in sequences]) == AUDIO).any():
        types = np.empty(positions.num_tokens, np.uint8)
        _lay(types, [sequence.token_type_ids for sequence in sequences], before, after, 0)
        spans = true_runs(types == PATCH, spans[:, 0])
        audio_spans = true_runs(types == AUDIO_TOKEN) if (types == AUDIO_TOKEN).any() else None
    patches = _patches(examples)
    tensor = torch.from_numpy
    return Batch(
        keys=tuple(example.key for example in examples),
        positions=positions,
        device_positions=DevicePositions.from_table(positions),
        input_ids=tensor(rows.input_ids.reshape(shape)),
        labels=tensor(rows.labels.reshape(shape)),
        text_positions=tensor(rows.text_positions.reshape(shape)),
        cu_seqlens=tensor(positions.cu_seqlens),
        attention_mask=None if rows.attention_mask is None else tensor(rows.attention_mask.reshape(shape)),
        patches=None if patches is None else tensor(patches),
        grid_thw=tensor(grid_thw),
        image_spans=tensor(spans),
        feature_spans=tensor(_feature_rows(spans)),
        audio_spans=None if audio_spans is None else tensor(audio_spans),
        audio_feature_spans=None if audio_spans is None else tensor(_feature_rows(audio_spans)),
    )


def _feature_rows(spans: IntArray) -> IntArray:
    """Count the rows of features that spans of tokens get in turn: (spans, 2) first and one past the last."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    return np.stack([np.append(0, ends[:-1])[: len(ends)], ends], axis=1)


class _Rows(NamedTuple):
    """Arrays of a batch that have one value per token.

    They lie in one block: the system gives a few megabytes at once in large pages, and the same in pieces in
    hundreds of small ones, each of which costs more than what is written to it.
    """

    input_ids: IntArray
    labels: IntArray
    text_positions: npt.NDArray[np.int32]
    attention_mask: IntArray | None

    @classmethod
    def empty(cls, tokens: int, *, masked: bool) -> _Rows:
        """Allocate rows without initialising them."""
        wide = 3 if masked else 2
        block = np.empty((8 * wide + 4) * tokens, np.uint8)
        rows = block[: 8 * wide * tokens].view(np.int64).reshape(wide, tokens)
        return cls(rows[0], rows[1], block[8 * wide * tokens :].view(np.int32), rows[2] if masked else None)


def _lay(
    row: npt.NDArray[np.generic],
    pieces: Sequence[npt.NDArray[np.generic]],
    before: IntArray,
    after: IntArray,
    padding: int,
) -> None:
    """Write pieces into a row, each with padding before and after it; documents beyond the pieces are empty."""
    if before.any() or after.any():
        gap = np.full(max(before.max(), after.max()), padding, row.dtype)
        pieces = [*pieces, *[gap[:0]] * (before.size - len(pieces))]
        gaps = zip(before.tolist(), pieces, after.tolist(), strict=True)
        pieces = [part for left, piece, right in gaps for part in (gap[:left], piece, gap[:right])]
    np.concatenate(pieces, out=row)


def _read(examples: object) -> Sequence[Example]:
    """Return the examples of a list, of a Pack or of several, checked to fit one batch."""
    entries = [examples] if isinstance(examples, Pack) else examples
    if not isinstance(entries, list | tuple):
        raise InvalidInputError(f"examples: got {type(entries).__name__}, want a list of Examples or a Pack")
    flattened: list[Example] = []
    for i, one in enumerate(entries):
        if not isinstance(one, Example | Pack):
            raise InvalidInputError(f"examples[{i}]: got {type(one).__name__}, want an Example or a Pack")
        flattened += one.examples if isinstance(one, Pack) else [one]
    if not flattened:
        raise InvalidInputError("examples: got none, want at least one")
    axes = flattened[0].sequence.positions.axes
    for i, example in enumerate(flattened):
        if not example.num_tokens:
            raise InvalidInputError(f"{_name(flattened, i)}: got no tokens, want at least one")
        if example.sequence.positions.axes != axes:
            got = example.sequence.positions.axes
            raise InvalidInputError(
                f"{_name(flattened, i)}: positions: got {counted(got, 'axis')}, want {axes} as in the first"
            )
    return flattened


def _patches(examples: Sequence[Example]) -> npt.NDArray[np.generic] | None:
    """Concatenate the pixels of all images, which must be of one sort; None without pixels."""
    numbered = [(i, example.sequence.patches) for i, example in enumerate(examples) if len(example.sequence.grid_thw)]
    sorts = [None if patches is None else (str(patches.dtype), *patches.shape[1:]) for _, patches in numbered]
    for (i, _), sort in zip(numbered, sorts, strict=True):
        if sort != sorts[0]:
            got, want = (("no pixels" if s is None else " ".join(map(str, s))) for s in (sort, sorts[0]))
            raise InvalidInputError(
                f"{_name(examples, i)}: patches: got {got}, want {want} as in examples[{numbered[0][0]}]"
            )
    arrays = [patches for _, patches in numbered if patches is not None]
    return np.concatenate(arrays) if arrays else None


def _round_up(lengths: IntArray, multiple_of: int) -> IntArray:
    return -(-lengths // multiple_of) * multiple_of


def _name(examples: Sequence[Example], i: int) -> str:
    return f"examples[{i}] ({examples[i].key})"


def _check(multiple_of: int, length: int | None, pad_token_id: int) -> None:
    integer("multiple_of", multiple_of, minimum=1)
    integer("pad_token_id", pad_token_id, minimum=0, maximum=INT32_MAX)
    if length is not None and integer("length", length, minimum=1, maximum=INT32_MAX) % multiple_of:
        raise InvalidInputError(f"length: got {length}, want a multiple of multiple_of={multiple_of}")
