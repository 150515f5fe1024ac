"""RankLoader: the batches of one rank as a trainer takes them, as many on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast, get_args

import torch
from torch import distributed

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.support.checks import boolean, one_of

__all__ = ["Even", "RankLoader", "RankState"]

Even = Literal["drop", "repeat"]
"""Ways of ranks to one number of batches: all stop with the shortest, or go on until the longest has ended."""

_LOG = logging.getLogger(__name__)

_Item = TypeVar("_Item")


_VERSION = 1


class RankState(TypedDict):
    """State of a RankLoader between two batches, fit for JSON if that of its loader is.

    Args:
        version: of this form.
        epoch: the epoch that is read.
        steps: batches given in the epoch.
        repeats: whether the rank has given all of its batches and began again.
        over: whether the epoch has ended.
        loader: state of the loader, or of its dataset where the loader has none.
    """

    version: int
    epoch: int
    steps: int
    repeats: bool
    over: bool
    loader: Any


@dataclass(frozen=True)
class _Progress:
    """Point in an epoch; see RankState."""

    steps: int = 0
    repeats: bool = False
    over: bool = False


class RankLoader(Generic[_Item]):
    """Loader of the batches of this rank, whole, and as many as on every other rank.

    It is no DataLoader, so that accelerate, which cuts the batches of one for its ranks, leaves it as it is: a dataset
    of ours gives each rank its own. Every rank makes one and iterates over it as often as the others, and stops within
    an epoch, if at all, after the same step.

    Even steps cost one all-reduce of three bytes over gloo a step, on the host and before the batch is given: ranks
    wait for the slowest loader there, as they would for its gradients, and no device waits.

    Args:
        loader: ``DataLoader(dataset, batch_size=None)`` of a BatchDataset, or any other that begins again when it is
            iterated over again.
        even: "drop" ends the epoch when the first rank has no more batches, and logs on which ranks some are left;
            "repeat" lets ranks that have ended begin again, until every rank has given all of its batches; None gives
            what the loader gives, and ranks may differ.
        endless: whether one iteration goes on with the next epoch, and the next, instead of ending: for a trainer that
            counts steps alone, and would begin again with the first epoch when a run goes on.

    Raises:
        InvalidInputError: loader is no iterable, or even is something else; in the first step and on every rank, one
            has no batch to repeat.
    """

    def __init__(self, loader: Iterable[_Item], even: Even | None = None, *, endless: bool = False) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise InvalidInputError(f"loader: got {type(loader).__name__}, want a DataLoader or another iterable")
        self.loader = loader
        self.even = one_of("even", even, (None, *get_args(Even)))
        self.endless = boolean("endless", endless)
        self._group: distributed.ProcessGroup | None = None
        self._epoch = int(getattr(self.dataset, "epoch", 0))
        self._progress, self._resumed = _Progress(), False
        if even and _ranks() > 1:
            self._group = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo"))

    @property
    def dataset(self) -> object:
        """Dataset of the loader, or the loader itself if it has none."""
        return getattr(self.loader, "dataset", self.loader)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of batches that the next epoch gives on every rank; None where a rank does not know it.

        It is that of the loader if it has a length, and else of ``BatchDataset.num_batches``. Every rank must ask.
        """
        count = getattr(self.dataset, "num_batches", None)
        steps: int | None = _length(self.loader) if count is None else count(getattr(self.loader, "num_workers", 0))
        if self._group is None:
            return steps
        # The fewest, the most as the fewest of negative numbers, and whether all are known.
        shared = torch.tensor([steps or 0, -(steps or 0), steps is not None], dtype=torch.int64)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN, self._group)
        fewest, most, known = shared.tolist()
        return (fewest if self.even == "drop" else -most) if known else None

    @property
    def drop_last(self) -> bool:
        """Nothing: accelerate looks here before it skips the batches of a run that goes on, in a loader of its own.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "drop_last: got a RankLoader, which accelerate is about to replace to skip batches, want it left as it is: "
            "TrainingArguments(ignore_data_skip=True), and load_state_dict before the run goes on"
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the dataset; see BatchDataset.set_epoch. An endless loader keeps that of a state."""
        if self.endless and self._resumed:
            return
        self._epoch = epoch
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def state_dict(self) -> RankState:
        """Return the state of this rank behind the latest batch; every rank has its own.

        Raises:
            UnsupportedError: workers read the dataset of a DataLoader, or neither has a state.
        """
        state = {"version": _VERSION, "epoch": self._epoch, **asdict(self._progress)}
        return cast(RankState, {**state, "loader": self._stateful.state_dict()})

    def load_state_dict(self, state: RankState) -> None:
        """Let the next iteration go on behind the batch that was the latest of a state, on every rank.

        The batches that follow are those of an epoch that was not interrupted, also where the rank was repeating; of an
        epoch that had ended, none follow.

        Raises:
            InvalidInputError: what is no state of a RankLoader, or the loader refuses its own.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            got = f"version {state.get('version')}" if isinstance(state, Mapping) else type(state).__name__
            raise InvalidInputError(f"state: got {got}, want one of version {_VERSION} from RankLoader.state_dict")
        self._epoch, self._resumed = state["epoch"], True
        self._progress = _Progress(state["steps"], state["repeats"], state["over"])
        if not state["over"]:
            self._stateful.load_state_dict(state["loader"])

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over the batches of an epoch, from its start or from the state that was loaded."""
        yield from self._of_epoch()
        while self.endless:
            if not self._progress.steps:
                raise InvalidInputError("loader: got an epoch without batches, want some to go on with")
            self.set_epoch(self._epoch + 1)
            yield from self._of_epoch()

    def _of_epoch(self) -> Iterator[_Item]:
        if self._group is None and self.even and _ranks() > 1:
            raise InvalidInputError(
                "even: got a loader made before torch.distributed was initialised, want it made after"
            )
        if not self._resumed:
            self._progress = _Progress()
        self._resumed = False
        if self._progress.over:
            return
        batches = iter(self.loader)
        while True:
            batch = next(batches, _END)
            repeats = self._progress.repeats or batch is _END
            if self._ends(repeats):
                break
            if batch is _END:
                batches = iter(self.loader)
                batch = next(batches, _END)
                if batch is _END:
                    raise InvalidInputError("loader: got no batches when begun again, want the same as before")
            self._progress = _Progress(self._progress.steps + 1, repeats)
            yield cast(_Item, batch)
        self._progress = replace(self._progress, over=True)
        if not repeats:
            steps = self._progress.steps
            _LOG.warning("even='drop': the epoch ends after %d steps and leaves batches of this rank", steps)

    def _ends(self, ended: bool) -> bool:
        """Whether the epoch ends, as this rank has given all of its batches or not, and so the others."""
        if self._group is None:
            return ended
        flags = torch.tensor([ended, not ended, ended and not self._progress.steps], dtype=torch.uint8)
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, self._group)
        some_ended, some_go_on, some_empty = map(bool, flags.tolist())
        if some_ended if self.even == "drop" else not some_go_on:
            return True
        if some_empty:
            raise InvalidInputError("even: got 'repeat' and a rank without batches, want more records than ranks")
        return False

    @property
    def _stateful(self) -> Any:
        """The loader or its dataset, whichever has a state."""
        for each in (self.loader, self.dataset):
            if hasattr(each, "state_dict"):
                return each
        got = type(self.loader).__name__
        raise UnsupportedError(f"loader: got {got} without a state, want a StatefulDataLoader or a BatchDataset")


_END = object()


def _length(loader: object) -> int | None:
    """Number of batches of a loader; None if it has no length, as a DataLoader of a stream finds out when asked."""
    try:
        return len(cast(Sized, loader))
    except TypeError:
        return None


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
