"""Examples by number: what a Packer is for packed batches, a Batcher is for padded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mmpos.data.documents import RecordError
from mmpos.data.examples import Example
from mmpos.data.packing import Pack, Packer
from mmpos.support.checks import boolean, integer

__all__ = ["Batcher", "Batching", "members", "regroup", "settings"]


class Batching(Protocol):
    """What makes groups of a stream of examples.

    One to which the pending examples of another with the same settings are added, in their order, gives no group
    meanwhile and goes on exactly as the other would. It may cut examples by ``Example.slice`` only.
    """

    @property
    def pending(self) -> Sequence[Example]:
        """The examples held, in order."""

    def add(self, example: Example, /) -> Sequence[Any]:
        """Take an example, and give the groups that are ready."""

    def flush(self) -> Sequence[Any]:
        """All that is held, in groups."""


class Batcher:
    """So many examples per batch, in the order in which they come.

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
        """The examples held, in order."""
        return tuple(self._held)

    def add(self, example: Example) -> list[list[Example]]:
        """Take an example, and give a batch if it is the last of one.

        Raises:
            RecordError: it is longer than max_tokens; nothing else changes.
        """
        if self.max_tokens is not None and example.num_tokens > self.max_tokens:
            raise RecordError(f"{example.key}: tokens: got {example.num_tokens}, want at most {self.max_tokens}")
        self._held.append(example)
        return self._cut() if len(self._held) == self.batch_size else []

    def flush(self) -> list[list[Example]]:
        """What is left, as a batch, unless it is to be dropped."""
        found = self._cut()
        return found if found[0] and not self.drop_last else []

    def _cut(self) -> list[list[Example]]:
        group, self._held = self._held, []
        return [group]


def settings(batching: Batching) -> dict[str, Any]:
    """What a batching was made with: its public attributes."""
    return {name: value for name, value in vars(batching).items() if not name.startswith("_")}


def members(group: Any) -> Sequence[Example]:
    """The examples of a group."""
    return group.examples if isinstance(group, Pack) else group


def regroup(batching: Batching, examples: Sequence[Example]) -> Any:
    """The group that a batching made of these examples."""
    return Pack(tuple(examples), batching.max_tokens) if isinstance(batching, Packer) else list(examples)
