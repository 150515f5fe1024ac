"""Group examples: packs of bounded size, from a stream or from known lengths, and batches of a fixed size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mmpos.data.examples import Example, RecordError
from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean, first_bad, int_array, integer, one_of

__all__ = ["Batcher", "Batching", "Group", "Overlong", "Pack", "PackCounts", "Packer", "best_fit_decreasing"]

Overlong = Literal["raise", "truncate", "drop"]

MIN_PIECE = 32
"""Minimum number of tokens on either side of a cut that fills a pack."""

HELD_PACKS = 16
"""Maximum number of tokens that a Packer holds, in packs; more would fill packs better but need more memory."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Examples, at least one, that become one packed batch, and its capacity in tokens."""

    examples: tuple[Example, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the examples, excluding padding."""
        return sum(example.num_tokens for example in self.examples)

    @property
    def fill(self) -> float:
        """Tokens divided by capacity."""
        return self.num_tokens / self.max_tokens


@dataclass(frozen=True)
class PackCounts:
    """Counts of a Packer since its creation.

    Args:
        packs: packs returned.
        tokens: tokens in these packs, excluding padding.
        capacity: capacity of these packs in tokens.
        splits: cuts through documents whose parts were all kept.
        truncated: examples whose end was cut off.
        dropped: examples that were dropped.
        tokens_lost: tokens lost to truncation and dropping.
    """

    packs: int = 0
    tokens: int = 0
    capacity: int = 0
    splits: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens_lost: int = 0

    @property
    def fill(self) -> float:
        """Tokens divided by the capacity of all packs; 0 before the first pack."""
        return self.tokens / self.capacity if self.capacity else 0.0


class Packer:
    """Packer for a stream of examples; it buffers examples and combines those that fill a pack best.

    A pack starts with the oldest example, so that none waits forever, and continues with the longest ones that still
    fit. With split_text, the remaining space is filled with the head of a document; the rest of the document becomes
    another example that keeps its position ids.

    To resume, add the ``pending`` examples of a Packer, in order, to a new Packer with the same arguments; see
    Batching. Only its counts restart.

    Args:
        max_tokens: maximum number of tokens in a pack.
        buffer: maximum number of examples held between calls, with at most HELD_PACKS times max_tokens tokens.
        split_text: whether documents may be cut between text tokens; images and audio with their markers stay whole.
        multiple_of: multiple to which the size of each document is rounded up; see PackedCollator.
        overlong: policy for examples longer than max_tokens, or, with split_text, with an image or audio longer than
            max_tokens. "raise" raises a RecordError; "truncate" cuts before the part that does not fit; "drop" drops
            the example. The last two are counted.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        buffer: int = 256,
        split_text: bool = False,
        multiple_of: int = 1,
        overlong: Overlong = "raise",
    ) -> None:
        self.max_tokens = integer("max_tokens", max_tokens, minimum=1)
        self.buffer = integer("buffer", buffer, minimum=1)
        self.split_text = boolean("split_text", split_text)
        self.multiple_of = integer("multiple_of", multiple_of, minimum=1)
        self.overlong: Overlong = one_of("overlong", overlong, ("raise", "truncate", "drop"))
        if self.max_tokens % self.multiple_of:
            raise InvalidInputError(f"max_tokens: got {max_tokens}, want a multiple of multiple_of={multiple_of}")
        self._held, self._sizes = dict[int, Example](), dict[int, int]()  # by order of arrival
        self._arrived = 0
        self._counts = Counter[str]()

    @property
    def pending(self) -> tuple[Example, ...]:
        """Buffered examples in order; to resume, save them and add them to a new Packer."""
        return tuple(self._held.values())

    @property
    def counts(self) -> PackCounts:
        """Counts of packed, cut and lost examples, and the fill rate of the packs."""
        return PackCounts(**self._counts)

    def add(self, example: Example) -> list[Pack]:
        """Add an example, and return the packs that must leave to keep the buffer within its limits.

        Raises:
            RecordError: the example cannot be packed, and overlong is "raise"; the Packer is unchanged.
        """
        if not isinstance(example, Example):
            raise InvalidInputError(f"example: got {type(example).__name__}, want an Example")
        admitted = example if 0 < example.num_tokens <= self.max_tokens else self._admit(example)
        if admitted is None:
            return []
        self._held[self._arrived], self._sizes[self._arrived] = admitted, self._size(admitted)
        self._arrived += 1
        packs = []
        while len(self._held) > self.buffer or sum(self._sizes.values()) > HELD_PACKS * self.max_tokens:
            packs.append(self._pack())
        return packs

    def flush(self) -> list[Pack]:
        """Pack all buffered examples; the last pack may be far from full."""
        packs = []
        while self._held:
            packs.append(self._pack())
        return packs

    def _pack(self) -> Pack:
        first, gap = next(iter(self._held)), self.max_tokens
        if self._sizes[first] > gap:
            chosen = [self._split(first, _last_cut(self._held[first], gap))]
            gap -= self._size(chosen[0])
        else:
            gap -= self._sizes.pop(first)
            chosen = [self._held.pop(first)]
        # One pass from the longest example, oldest first among equals, is enough, since the gap only shrinks.
        for number, size in sorted(self._sizes.items(), key=itemgetter(1), reverse=True):
            if size <= gap:
                chosen.append(self._held.pop(number))
                gap -= self._sizes.pop(number)
        while self.split_text and gap >= MIN_PIECE and (cut := self._best_cut(gap)):
            chosen.append(self._split(*cut))
            gap -= self._size(chosen[-1])
        tokens = sum([example.num_tokens for example in chosen])
        self._counts.update(packs=1, tokens=tokens, capacity=self.max_tokens)
        return Pack(tuple(chosen), self.max_tokens)

    def _best_cut(self, gap: int) -> tuple[int, int] | None:
        """Find the example whose head fills most of the gap, the oldest among equals, and where to cut it."""
        best, best_cut = MIN_PIECE - 1, None
        for number, example in self._held.items():
            limit = min(gap, example.num_tokens - MIN_PIECE)
            if limit > best and (cut := _last_cut(example, limit)) > best:
                best, best_cut = cut, (number, cut)
            if best == gap:
                break
        return best_cut

    def _split(self, number: int, cut: int) -> Example:
        """Cut the head off a buffered example; the remaining part keeps its place in the queue."""
        example = self._held[number]
        self._held[number] = rest = example.slice(cut, example.num_tokens)
        self._sizes[number] = self._size(rest)
        self._counts["splits"] += 1
        return example.slice(0, cut)

    def _size(self, example: Example) -> int:
        return -(-example.num_tokens // self.multiple_of) * self.multiple_of

    def _admit(self, example: Example) -> Example | None:
        """Return an overlong example, the part of it that can be packed, or None if it is dropped."""
        tokens = example.num_tokens
        if not tokens:
            raise RecordError(f"{example.key}: tokens: got none, want at least one")
        keep = _last_cut(example, self.max_tokens)
        fault = f"tokens: got {tokens}, want at most {self.max_tokens}"
        if self.split_text:
            spans = example.sequence.marked_spans
            sizes = spans[:, 1] - spans[:, 0]
            if not (sizes > self.max_tokens).any():
                return example
            long = int((sizes > self.max_tokens).argmax())
            keep = int(spans[long, 0])
            name = example.sequence.span_name(long)
            fault = f"{name}: got {sizes[long]} tokens with its markers, want at most {self.max_tokens}"
        if self.overlong == "raise":
            raise RecordError(f"{example.key}: {fault}, or overlong='truncate' or 'drop'")
        if self.overlong == "drop" or not keep:
            self._counts.update(dropped=1, tokens_lost=tokens)
            return None
        self._counts.update(truncated=1, tokens_lost=tokens - keep)
        return example.slice(0, keep)


def _last_cut(example: Example, limit: int) -> int:
    """Return the last position up to limit where Example.slice may cut: limit, or the start of an image or audio."""
    spans = example.sequence.marked_spans
    span = int(np.searchsorted(spans[:, 1], limit, side="right"))  # first span that ends beyond the limit
    return min(limit, int(spans[span, 0])) if span < len(spans) else limit


Group: TypeAlias = Pack | Sequence[Example]
"""Examples of one batch."""


class Batching(Protocol):
    """Protocol of objects that group a stream of examples.

    Adding the pending examples of one object, in order, to a new object with the same settings returns no groups, and
    the new object continues exactly as the old one would. Examples may be cut only with ``Example.slice``.
    """

    @property
    def pending(self) -> Sequence[Example]:
        """Buffered examples in order."""

    def add(self, example: Example, /) -> Sequence[Group]:
        """Add an example, and return the groups that are ready."""

    def flush(self) -> Sequence[Group]:
        """Return all buffered examples in groups."""


class Batcher:
    """Batcher of a fixed number of examples in order of arrival, each of at most max_tokens tokens, if given."""

    def __init__(self, batch_size: int, *, max_tokens: int | None = None) -> None:
        self.batch_size = integer("batch_size", batch_size, minimum=1)
        self.max_tokens = None if max_tokens is None else integer("max_tokens", max_tokens, minimum=1)
        self._held: list[Example] = []

    @property
    def pending(self) -> tuple[Example, ...]:
        """Buffered examples in order."""
        return tuple(self._held)

    def add(self, example: Example) -> list[list[Example]]:
        """Add an example, and return a list with the batch if it is complete.

        Raises:
            RecordError: the example is longer than max_tokens; the Batcher is unchanged.
        """
        if self.max_tokens is not None and example.num_tokens > self.max_tokens:
            raise RecordError(f"{example.key}: tokens: got {example.num_tokens}, want at most {self.max_tokens}")
        self._held.append(example)
        return self._cut() if len(self._held) == self.batch_size else []

    def flush(self) -> list[list[Example]]:
        """Return the remaining examples as a batch."""
        return self._cut() if self._held else []

    def _cut(self) -> list[list[Example]]:
        group, self._held = self._held, []
        return [group]


def best_fit_decreasing(lengths: npt.ArrayLike, max_tokens: int) -> list[list[int]]:
    """Group known lengths by best-fit decreasing: the longest first, each into the fullest group with enough room.

    >>> best_fit_decreasing([3, 5, 2, 4], 7)
    [[1, 2], [3, 0]]

    Args:
        lengths: (examples,) tokens of each example, 1 to max_tokens.
        max_tokens: maximum number of tokens in a group.

    Returns:
        indices into lengths for each group; every index occurs once.
    """
    lengths = int_array("lengths", lengths, (None,))
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    first_bad("lengths", lengths, minimum=1, maximum=max_tokens)
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and index of each group that has room for the shortest, ascending
    order, shortest = np.argsort(-lengths, kind="stable"), lengths.min(initial=max_tokens)
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if (at := bisect_left(rooms, (length,))) < len(rooms):
            room, group = rooms.pop(at)
        else:
            room, group = max_tokens, len(groups)
            groups.append([])
        groups[group].append(index)
        if room - length >= shortest:
            insort(rooms, (room - length, group))
    return groups
