"""RankLoader: yield the batches of one rank to a trainer, the same number on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast, get_args

import torch
from torch import distributed

from mmpos.data.loader import checked_state, num_ranks
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import boolean, one_of

__all__ = ["Even", "RankLoader", "RankState"]

Even = Literal["drop", "repeat"]
"""How ranks agree on a number of batches: "drop" stops with the shortest rank, "repeat" with the longest."""

_LOG = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class RankState(TypedDict):
    """State of a RankLoader between two batches; JSON-compatible if the state of its loader is.

    Args:
        version: version of the state.
        epoch: current epoch.
        steps: number of batches yielded in the epoch.
        repeats: whether the rank has yielded all of its batches and started over.
        over: whether the epoch has ended.
        loader: state of the loader, or of its dataset if the loader has no ``state_dict`` method.
    """

    version: int
    epoch: int
    steps: int
    repeats: bool
    over: bool
    loader: Any


class RankLoader(Generic[_Item]):
    """Loader that yields the whole batches of this rank, the same number on every rank.

    A BatchDataset already gives each rank its own batches, but accelerate would split the batches of a DataLoader
    across ranks again; it leaves a RankLoader unchanged. Every rank must create a RankLoader and iterate over it
    equally often; if ranks stop within an epoch, they must stop after the same step. Keeping the number of steps equal
    takes one all-reduce of three bytes per step over gloo on the host, before the batch is yielded.

    Args:
        loader: ``DataLoader(dataset, batch_size=None)`` of a BatchDataset, or any other iterable that starts over when
            iterated again.
        even: "drop" ends the epoch when the first rank runs out of batches, and logs a warning on ranks with batches
            left; "repeat" starts over on ranks that run out, until every rank has yielded all of its batches; None
            yields what the loader yields, so the number of batches may differ between ranks.
        endless: whether an iteration continues with the next epochs instead of ending, for a trainer that only counts
            steps and would restart at the first epoch when a run resumes.

    Raises:
        InvalidInputError: loader is not iterable, or even is invalid; or, raised on every rank in the first step, a
            rank has no batch to repeat.
    """

    def __init__(self, loader: Iterable[_Item], even: Even | None = None, *, endless: bool = False) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise InvalidInputError(f"loader: got {type(loader).__name__}, want a DataLoader or another iterable")
        self.loader = loader
        self.even = one_of("even", even, (None, *get_args(Even)))
        self.endless = boolean("endless", endless)
        self._group: distributed.ProcessGroup | None = None
        self._epoch = int(getattr(self.dataset, "epoch", 0))
        self._steps, self._repeats, self._over, self._resumed = 0, False, False, False
        if even and num_ranks() > 1:
            self._group = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo"))

    @property
    def dataset(self) -> object:
        """Dataset of the loader, or the loader itself if it has none."""
        return getattr(self.loader, "dataset", self.loader)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of batches on every rank in the next epoch, or None if any rank does not know it.

        The number comes from ``BatchDataset.num_batches`` or the length of the loader. Every rank must read this
        property, which is a collective operation.
        """
        count = getattr(self.dataset, "num_batches", None)
        steps: int | None = _length(self.loader) if count is None else count(getattr(self.loader, "num_workers", 0))
        if self._group is None:
            return steps
        # Reduce the minimum, the maximum as the minimum of negated numbers, and whether all are known.
        shared = torch.tensor([steps or 0, -(steps or 0), steps is not None], dtype=torch.int64)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN, self._group)
        fewest, most, known = shared.tolist()
        return (fewest if self.even == "drop" else -most) if known else None

    @property
    def drop_last(self) -> bool:
        """Raise UnsupportedError: accelerate reads it before it replaces a loader to skip batches of a resumed run."""
        raise UnsupportedError(
            "drop_last: got a RankLoader, which accelerate is about to replace to skip batches, want it unchanged; "
            "pass ignore_data_skip=True to TrainingArguments, and call load_state_dict before the run resumes"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset; see BatchDataset.set_epoch. Endless loaders keep a loaded state's epoch."""
        if self.endless and self._resumed:
            return
        self._epoch = epoch
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def state_dict(self) -> RankState:
        """Return the state of this rank after the latest batch; every rank has its own.

        Raises:
            UnsupportedError: worker processes read the dataset of a DataLoader, or neither the loader nor its dataset
                has a ``state_dict`` method.
        """
        own = self._stateful.state_dict()
        steps, repeats, over = self._steps, self._repeats, self._over
        return RankState(version=1, epoch=self._epoch, steps=steps, repeats=repeats, over=over, loader=own)

    def load_state_dict(self, state: RankState) -> None:
        """Resume the next iteration after the latest batch of a state; call this on every rank.

        The batches equal those of an uninterrupted epoch; if it had ended, the next iteration yields no batches.

        Raises:
            InvalidInputError: the state is not from a RankLoader, or the loader rejects its part of the state.
        """
        checked_state(state, RankState.__required_keys__)
        self._epoch, self._resumed = state["epoch"], True
        self._steps, self._repeats, self._over = state["steps"], state["repeats"], state["over"]
        if not state["over"]:
            self._stateful.load_state_dict(state["loader"])

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over the batches of an epoch, from its start or from the state that was loaded."""
        yield from self._of_epoch()
        while self.endless:
            if not self._steps:
                raise InvalidInputError("loader: got an epoch without batches, want at least one")
            self.set_epoch(self._epoch + 1)
            yield from self._of_epoch()

    def _of_epoch(self) -> Iterator[_Item]:
        if self._group is None and self.even and num_ranks() > 1:
            got = "a loader created before torch.distributed was initialised"
            raise InvalidInputError(f"even: got {got}, want it created after")
        if not self._resumed:
            self._steps, self._repeats, self._over = 0, False, False
        self._resumed = False
        if self._over:
            return
        batches = iter(self.loader)
        while True:
            batch = next(batches, _END)
            ended = self._repeats or batch is _END
            if self._ends(ended):
                break
            if batch is _END:
                batches = iter(self.loader)
                batch = next(batches, _END)
                if batch is _END:
                    want = "the same batches as before"
                    raise InvalidInputError(f"loader: got no batches when iterated again, want {want}")
            self._steps, self._repeats = self._steps + 1, ended
            yield cast(_Item, batch)
        self._over = True
        if not ended:
            _LOG.warning("even='drop': the epoch ends after %d steps and leaves batches of this rank", self._steps)

    def _ends(self, ended: bool) -> bool:
        """Return whether the epoch ends, given whether this rank has yielded all of its batches."""
        if self._group is None:
            return ended
        flags = torch.tensor([ended, not ended, ended and not self._steps], dtype=torch.uint8)
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, self._group)
        some_ended, some_go_on, some_empty = map(bool, flags.tolist())
        if some_ended if self.even == "drop" else not some_go_on:
            return True
        if some_empty:
            raise InvalidInputError("even: got 'repeat' and a rank without batches, want more records than ranks")
        return False

    @property
    def _stateful(self) -> Any:
        for candidate in (self.loader, self.dataset):
            if hasattr(candidate, "state_dict"):
                return candidate
        got = type(self.loader).__name__
        raise UnsupportedError(f"loader: got {got} without a state, want a StatefulDataLoader or a BatchDataset")


_END = object()


def _length(loader: object) -> int | None:
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return None
