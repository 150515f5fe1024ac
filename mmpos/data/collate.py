"""Collation: examples become a batch, packed in one row or padded to rows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.data.batch import Batch
from mmpos.data.examples import IGNORE_INDEX, Example
from mmpos.data.packing import Pack
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable, Side
from mmpos.rotary.device import DevicePositions
from mmpos.segments.kinds import AUDIO_TOKEN, PATCH
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
        padded = -(-lengths // self.multiple_of) * self.multiple_of
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
        seq = -(-int(lengths.max()) // self.multiple_of) * self.multiple_of if self.length is None else self.length
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
    tokens, edges = positions.num_tokens, positions.cu_seqlens.tolist()
    input_ids, labels = np.full(tokens, pad_token_id, np.int64), np.full(tokens, IGNORE_INDEX, np.int64)
    text_positions = np.zeros(tokens, np.int32)
    attention_mask = np.zeros(tokens, np.int64) if len(shape) == 2 else None
    types = np.zeros(tokens, np.uint8)
    for example, start, stop in zip(examples, starts.tolist(), edges[1 : len(examples) + 1], strict=True):
        sequence, here = example.sequence, slice(start, start + example.num_tokens)
        input_ids[here], labels[here] = sequence.input_ids, example.labels
        labels[start] = IGNORE_INDEX  # nothing predicts the first token
        text_positions[start:stop] = np.arange(stop - start)
        if attention_mask is not None:
            attention_mask[here] = 1
        types[here] = sequence.token_type_ids
    rest = edges[len(examples)]  # where a document of padding alone begins, or the end
    text_positions[rest:] = np.arange(tokens - rest)
    first = np.concatenate([example.sequence.image_spans[:, 0] for example in examples])
    first += starts.repeat([len(example.sequence.grid_thw) for example in examples])
    images = torch.from_numpy(true_runs(types == PATCH, first))
    audio = torch.from_numpy(true_runs(types == AUDIO_TOKEN))
    patches = _patches(examples)
    return Batch(
        keys=tuple(example.key for example in examples),
        positions=positions,
        device_positions=DevicePositions.from_table(positions),
        input_ids=torch.from_numpy(input_ids).view(shape),
        labels=torch.from_numpy(labels).view(shape),
        text_positions=torch.from_numpy(text_positions).view(shape),
        cu_seqlens=torch.from_numpy(positions.cu_seqlens),
        attention_mask=None if attention_mask is None else torch.from_numpy(attention_mask).view(shape),
        patches=None if patches is None else torch.from_numpy(patches),
        grid_thw=torch.from_numpy(np.concatenate([example.sequence.grid_thw for example in examples])),
        image_spans=images,
        feature_spans=_feature_rows(images),
        audio_spans=audio if len(audio) else None,
        audio_feature_spans=_feature_rows(audio) if len(audio) else None,
    )


def _feature_rows(spans: Tensor) -> Tensor:
    """Count the rows of features that spans of tokens get in turn: (spans, 2) first and one past the last."""
    lengths = spans[:, 1] - spans[:, 0]
    stops = lengths.cumsum(0)
    return torch.stack([stops - lengths, stops], dim=1)


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


def _name(examples: Sequence[Example], i: int) -> str:
    return f"examples[{i}] ({examples[i].key})"


def _check(multiple_of: int, length: int | None, pad_token_id: int) -> None:
    integer("multiple_of", multiple_of, minimum=1)
    integer("pad_token_id", pad_token_id, minimum=0, maximum=INT32_MAX)
    if length is not None and integer("length", length, minimum=1, maximum=INT32_MAX) % multiple_of:
        raise InvalidInputError(f"length: got {length}, want a multiple of multiple_of={multiple_of}")
