"""Groups of examples: packs of bounded size from a stream or from known lengths, and batches by number."""

from __future__ import annotations

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

__all__ = [
    "Batcher",
    "Batching",
    "Group",
    "Overlong",
    "Pack",
    "PackCounts",
    "Packer",
    "first_fit_decreasing",
]

Overlong = Literal["raise", "truncate", "drop"]

MIN_PIECE = 32
"""Fewest tokens on either side of a cut that fills a pack; a document longer than a pack is cut wherever it must be."""

HELD_PACKS = 16
"""Packs whose tokens a Packer holds at most between calls: more fill better and cost memory, mostly of pixels."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Examples that become one packed batch.

    Args:
        examples: in the order in which they will stand; at least one.
        max_tokens: the tokens that there was room for.
    """

    examples: tuple[Example, ...]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the examples, padding not counted."""
        return sum(example.num_tokens for example in self.examples)

    @property
    def fill(self) -> float:
        """Tokens over capacity."""
        return self.num_tokens / self.max_tokens


@dataclass(frozen=True)
class PackCounts:
    """Counts of the work of a Packer since it was made.

    Args:
        packs: packs given out.
        tokens: tokens in them, padding not counted.
        capacity: tokens that there was room for in them.
        splits: cuts through documents, whose parts all went on.
        truncated: examples that lost their end.
        dropped: examples that were lost whole.
        tokens_lost: tokens of both.
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
        """Tokens over capacity of all packs; 0 before the first."""
        return self.tokens / self.capacity if self.capacity else 0.0


class Packer:
    """Packer of a stream of examples, which holds some of them and combines those that fill a pack best.

    A pack begins with the example that has waited longest, so that each is packed in time, and goes on with the longest
    that still fits. With split_text what then remains is filled with the head of a document, cut between two text
    tokens; the rest of it goes on as an example of its own, with the ids that it has in the whole.
    A Packer to which the ``pending`` examples of another with the same arguments are added, in their order, gives no
    pack meanwhile and goes on exactly as the other would; only its counts restart.

    Args:
        max_tokens: most tokens in a pack.
        buffer: most examples held between calls, and at most the tokens of HELD_PACKS packs.
        split_text: whether documents may be cut between text tokens; images and audio with their markers stay whole.
        multiple_of: documents count as padded to a multiple of this; see PackedCollator.
        overlong: policy for examples that cannot be packed: longer than max_tokens, or with split_text
            an image that is. "raise" a RecordError, "truncate" before what does not fit, or "drop"; both are counted.
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
        self._held, self._sizes = dict[int, Example](), dict[int, int]()  # by number of arrival
        self._arrived = 0
        self._counts = Counter[str]()

    @property
    def pending(self) -> tuple[Example, ...]:
        """Examples held, in order; save these, and add them to a new Packer to resume."""
        return tuple(self._held.values())

    @property
    def counts(self) -> PackCounts:
        """Counts of what was packed, cut and lost, and the fill rate of the packs."""
        return PackCounts(**self._counts)

    def add(self, example: Example) -> list[Pack]:
        """Add an example, and return the packs for which there is no more reason to wait.

        Raises:
            RecordError: it cannot be packed, and overlong is "raise"; the Packer is as it was before.
        """
        if not isinstance(example, Example):
            raise InvalidInputError(f"example: got {type(example).__name__}, want an Example")
        admitted = self._admit(example)
        if admitted is None:
            return []
        self._hold(self._arrived, admitted)
        self._arrived += 1
        packs = []
        while len(self._held) > self.buffer or sum(self._sizes.values()) > HELD_PACKS * self.max_tokens:
            packs.append(self._pack())
        return packs

    def flush(self) -> list[Pack]:
        """Pack everything that is held; the last pack may be far from full."""
        packs = []
        while self._held:
            packs.append(self._pack())
        return packs

    def _pack(self) -> Pack:
        first = next(iter(self._held))
        whole = self._sizes[first] <= self.max_tokens
        chosen = [self._release(first) if whole else self._split(first, _last_cut(self._held[first], self.max_tokens))]
        gap = self.max_tokens - self._size(chosen[0])
        # The longest first, and of several the one that came first: what does not fit now never will.
        for number, size in sorted(self._sizes.items(), key=itemgetter(1), reverse=True):
            if size <= gap:
                chosen.append(self._release(number))
                gap -= size
        while self.split_text and gap >= MIN_PIECE and (cut := self._best_cut(gap)):
            chosen.append(self._split(*cut))
            gap -= self._size(chosen[-1])
        pack = Pack(tuple(chosen), self.max_tokens)
        self._counts.update(packs=1, tokens=pack.num_tokens, capacity=self.max_tokens)
        return pack

    def _best_cut(self, gap: int) -> tuple[int, int] | None:
        """Find the example whose head fills most of the gap, the first of several, and where to cut it."""
        best, where = MIN_PIECE - 1, None
        for number, example in self._held.items():
            cut = _last_cut(example, min(gap, example.num_tokens - MIN_PIECE))
            if cut > best:
                best, where = cut, (number, cut)
            if best == gap:
                break
        return where

    def _split(self, number: int, cut: int) -> Example:
        """Cut the head off a held example; the rest keeps its turn."""
        example = self._held[number]
        self._hold(number, example.slice(cut, example.num_tokens))
        self._counts["splits"] += 1
        return example.slice(0, cut)

    def _hold(self, number: int, example: Example) -> None:
        self._held[number], self._sizes[number] = example, self._size(example)

    def _release(self, number: int) -> Example:
        del self._sizes[number]
        return self._held.pop(number)

    def _size(self, example: Example) -> int:
        return -(-example.num_tokens // self.multiple_of) * self.multiple_of

    def _admit(self, example: Example) -> Example | None:
        """Return the example, or what can be packed of it, or None."""
        tokens = example.num_tokens
        if not tokens:
            raise RecordError(f"{example.key}: tokens: got none, want at least one")
        if tokens <= self.max_tokens:
            return example
        keep = _last_cut(example, self.max_tokens)
        what = f"tokens: got {tokens}, want at most {self.max_tokens}"
        if self.split_text:
            spans = example.sequence.marked_spans
            sizes = spans[:, 1] - spans[:, 0]
            if not (sizes > self.max_tokens).any():
                return example
            long = int((sizes > self.max_tokens).argmax())
            keep = int(spans[long, 0])
            name = example.sequence.span_name(long)
            what = f"{name}: got {sizes[long]} tokens with its markers, want at most {self.max_tokens}"
        if self.overlong == "raise":
            raise RecordError(f"{example.key}: {what}; or choose overlong='truncate' or 'drop'")
        if self.overlong == "drop" or not keep:
            self._counts.update(dropped=1, tokens_lost=tokens)
            return None
        self._counts.update(truncated=1, tokens_lost=tokens - keep)
        return example.slice(0, keep)


def _last_cut(example: Example, limit: int) -> int:
    """Return the last token up to limit where Example.slice may cut: limit, or the start of an image or audio."""
    spans = example.sequence.marked_spans
    span = int(np.searchsorted(spans[:, 1], limit, side="right"))  # the first that ends beyond the limit
    return min(limit, int(spans[span, 0])) if span < len(spans) else limit


Group: TypeAlias = Pack | Sequence[Example]
"""Examples of one batch."""


class Batching(Protocol):
    """Maker of groups of a stream of examples.

    One to which the pending examples of another with the same settings are added, in their order, gives no group
    meanwhile and goes on exactly as the other would. It may cut examples by ``Example.slice`` only.
    """

    @property
    def pending(self) -> Sequence[Example]:
        """Examples held, in order."""

    def add(self, example: Example, /) -> Sequence[Group]:
        """Add an example, and return the groups that are ready."""

    def flush(self) -> Sequence[Group]:
        """Return everything that is held, in groups."""


class Batcher:
    """Maker of batches of a fixed number of examples, in the order in which they come.

    Args:
        batch_size: examples in a batch.
        max_tokens: most tokens of an example; None takes any.
        drop_last: whether fewer, at the end, are dropped instead of a smaller batch.
    """

    def __init__(self, batch_size: int, *, max_tokens: int | None = None, drop_last: bool = False) -> None:
        self.batch_size = integer("batch_size", batch_size, minimum=1)
        self.max_tokens = None if max_tokens is None else integer("max_tokens", max_tokens, minimum=1)
        self.drop_last = boolean("drop_last", drop_last)
        self._held: list[Example] = []

    @property
    def pending(self) -> tuple[Example, ...]:
        """Examples held, in order."""
        return tuple(self._held)

    def add(self, example: Example) -> list[list[Example]]:
        """Add an example, and return the batch that it completes.

        Raises:
            RecordError: it is longer than max_tokens; nothing else changes.
        """
        if self.max_tokens is not None and example.num_tokens > self.max_tokens:
            raise RecordError(f"{example.key}: tokens: got {example.num_tokens}, want at most {self.max_tokens}")
        self._held.append(example)
        return self._cut() if len(self._held) == self.batch_size else []

    def flush(self) -> list[list[Example]]:
        """Return what is left as a batch, unless it is to be dropped."""
        groups = self._cut()
        return groups if groups[0] and not self.drop_last else []

    def _cut(self) -> list[list[Example]]:
        group, self._held = self._held, []
        return [group]


def first_fit_decreasing(lengths: npt.ArrayLike, max_tokens: int) -> list[list[int]]:
    """Group lengths that are all known: the longest first, each into the first group that has room for it.

    >>> first_fit_decreasing([3, 5, 2, 4], 7)
    [[1, 2], [3, 0]]

    Args:
        lengths: (examples,) tokens of each, 1 to max_tokens.
        max_tokens: most tokens in a group.

    Returns:
        indices into lengths, group by group; every index once.
    """
    lengths = int_array("lengths", lengths, (None,))
    max_tokens = integer("max_tokens", max_tokens, minimum=1)
    first_bad("lengths", lengths, minimum=1, maximum=max_tokens)
    # Two groups in a row hold more than max_tokens together, which bounds how many there are.
    groups: list[list[int]] = [[] for _ in range(min(lengths.size, 2 * int(lengths.sum()) // max_tokens + 1))]
    # A tournament tree: leaves are the room in every group, and inner nodes the most room below them.
    leaves = 1 << max(len(groups) - 1, 0).bit_length()
    room = [max_tokens] * (2 * leaves)
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        groups[node - leaves].append(index)
        left = room[node] = room[node] - length
        while node > 1:
            sibling = room[node ^ 1]
            left = sibling if sibling > left else left
            node //= 2
            if room[node] == left:
                break
            room[node] = left
    return [group for group in groups if group]
