"""Examples into a batch: packed in one row, or padded to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.checks import INT32_MAX, IntArray, integer, one_of
from mmpos.data.batches.batch import Batch
from mmpos.data.batches.packing import Pack
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.errors import InvalidInputError
from mmpos.positions import PositionTable, Side

__all__ = ["PackedCollator", "PaddedCollator", "collate_packed", "collate_padded"]

Examples = Sequence[Example] | Sequence[Pack] | Pack


@dataclass(frozen=True)
class PackedCollator:
    """Puts documents side by side in one row; a collate_fn for DataLoader that pickles.

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
        """One batch of all these examples, or of those of a Pack or of several.

        Raises:
            InvalidInputError: an example does not fit the first, or all together do not fit length.
        """
        examples = _read(examples)
        lengths = np.array([example.num_tokens for example in examples])
        padded = _round_up(lengths, self.multiple_of)
        positions = _join(examples)
        if (padded > lengths).any():
            positions = positions.pad(padded)
        rest = 0 if self.length is None else self.length - positions.num_tokens
        if rest < 0:
            raise InvalidInputError(
                f"examples: got {positions.num_tokens} tokens in {len(examples)} documents, want at most {self.length}"
            )
        if rest:
            positions = PositionTable.concatenate([positions, positions.window([0], [0], [0]).pad(rest)])
            padded = np.append(padded, rest)
        starts = np.cumsum(padded) - padded
        text_positions = np.arange(positions.num_tokens, dtype=np.int32) - starts.astype(np.int32).repeat(padded)
        return _batch(examples, positions, starts[: len(examples)], self.pad_token_id, text_positions)


@dataclass(frozen=True)
class PaddedCollator:
    """Puts every document in a row of its own, padded to one length; a collate_fn for DataLoader that pickles.

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
        """One batch of all these examples, or of those of a Pack or of several.

        Raises:
            InvalidInputError: an example does not fit the first, or is longer than length.
        """
        examples = _read(examples)
        lengths = np.array([example.num_tokens for example in examples])
        seq = int(_round_up(lengths.max(keepdims=True), self.multiple_of)[0]) if self.length is None else self.length
        if (lengths > seq).any():
            i = int((lengths > seq).argmax())
            raise InvalidInputError(f"{_name(examples, i)}: got {lengths[i]} tokens, want at most {seq}")
        rows, column = np.arange(len(examples)), np.arange(seq, dtype=np.int32)
        before = seq - lengths if self.side == "left" else np.zeros_like(lengths)
        token = column - before[:, None].astype(np.int32)
        attention_mask = ((token >= 0) & (token < lengths[:, None])).astype(np.int64)
        text_positions = np.maximum(token, 0)
        positions = _join(examples).pad(seq, self.side)
        return _batch(examples, positions, rows * seq + before, self.pad_token_id, text_positions, attention_mask)


def collate_packed(
    examples: Examples, *, multiple_of: int = 1, length: int | None = None, pad_token_id: int = 0
) -> Batch:
    """One packed batch; the arguments are those of PackedCollator."""
    return PackedCollator(multiple_of, length, pad_token_id)(examples)


def collate_padded(
    examples: Examples,
    *,
    side: Side = "right",
    multiple_of: int = 1,
    length: int | None = None,
    pad_token_id: int = 0,
) -> Batch:
    """One padded batch; the arguments are those of PaddedCollator."""
    return PaddedCollator(side, multiple_of, length, pad_token_id)(examples)


def _batch(
    examples: Sequence[Example],
    positions: PositionTable,
    starts: IntArray,
    pad_token_id: int,
    text_positions: npt.NDArray[np.int32],
    attention_mask: IntArray | None = None,
) -> Batch:
    """The batch whose documents begin at these columns of dense()."""
    input_ids = np.full(positions.num_tokens, pad_token_id)
    labels = np.full(positions.num_tokens, IGNORE_INDEX)
    for example, start in zip(examples, starts.tolist(), strict=True):
        stop = start + example.num_tokens
        input_ids[start:stop] = example.sequence.input_ids
        labels[start:stop] = example.labels
    labels[starts] = IGNORE_INDEX
    sequences = [example.sequence for example in examples]
    images = [len(sequence.grid_thw) for sequence in sequences]
    spans = np.concatenate([sequence.image_spans for sequence in sequences])
    return Batch.from_arrays(
        tuple(example.key for example in examples),
        positions,
        input_ids=input_ids.reshape(text_positions.shape),
        labels=labels.reshape(text_positions.shape),
        text_positions=text_positions,
        attention_mask=attention_mask,
        patches=_patches(examples),
        grid_thw=np.concatenate([sequence.grid_thw for sequence in sequences]),
        image_spans=spans + starts.repeat(images)[:, None],
    )


def _read(examples: Any) -> Sequence[Example]:
    """The examples of anything that holds some, all fit for one batch."""
    given = [examples] if isinstance(examples, Pack) else examples
    if not isinstance(given, list | tuple):
        raise InvalidInputError(f"examples: got {type(given).__name__}, want a list of Examples or a Pack")
    found: list[Example] = []
    for i, one in enumerate(given):
        if not isinstance(one, Example | Pack):
            raise InvalidInputError(f"examples[{i}]: got {type(one).__name__}, want an Example or a Pack")
        found += one.examples if isinstance(one, Pack) else [one]
    if not found:
        raise InvalidInputError("examples: got none, want at least one")
    axes = found[0].sequence.positions.axes
    for i, example in enumerate(found):
        if not example.num_tokens:
            raise InvalidInputError(f"{_name(found, i)}: got no tokens, want at least one")
        if example.sequence.positions.axes != axes:
            got = example.sequence.positions.axes
            raise InvalidInputError(f"{_name(found, i)}: positions: got {got} axes, want {axes} as in the first")
    return found


def _join(examples: Sequence[Example]) -> PositionTable:
    return PositionTable.concatenate([example.sequence.positions for example in examples])


def _patches(examples: Sequence[Example]) -> npt.NDArray[Any] | None:
    """Pixels of all images in order, if all that have images have pixels of one sort."""
    found = [(i, example.sequence.patches) for i, example in enumerate(examples) if len(example.sequence.grid_thw)]
    sorts = [None if patches is None else (str(patches.dtype), *patches.shape[1:]) for _, patches in found]
    for (i, _), sort in zip(found, sorts, strict=True):
        if sort != sorts[0]:
            got, want = (("no pixels" if s is None else " ".join(map(str, s))) for s in (sort, sorts[0]))
            raise InvalidInputError(
                f"{_name(examples, i)}: patches: got {got}, want {want} as in examples[{found[0][0]}]"
            )
    arrays = [patches for _, patches in found if patches is not None]
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
