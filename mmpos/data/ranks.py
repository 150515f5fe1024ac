"""RankLoader: the batches of one rank as a trainer takes them, as many on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeVar, cast, get_args

import torch
from torch import distributed

from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of

__all__ = ["Even", "RankLoader"]

Even = Literal["drop", "repeat"]
"""Ways of ranks to one number of batches: all stop with the shortest, or go on until the longest has ended."""

_LOG = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class RankLoader(Generic[_Item]):
    """Loader of the batches of this rank, whole, and as many as on every other rank.

    It is no DataLoader, so that accelerate, which cuts the batches of one for its ranks, leaves it as it is: a dataset
    of ours gives each rank its own. Every rank makes one and iterates over it as often as the others, and stops within
    an epoch, if at all, after the same step.

    Even steps cost one all-reduce of three bytes over gloo a step, on the host and before the batch is given: ranks
    wait for the slowest loader there, as they would for its gradients, and no device waits.

    Args:
        loader: ``DataLoader(dataset, batch_size=None)`` of a BatchDataset, or any other that begins again when it is
            iterated over again. States are its own: a StatefulDataLoader resumes within an epoch, but does not know
            whether its rank was repeating.
        even: "drop" ends the epoch when the first rank has no more batches, and logs on which ranks some are left;
            "repeat" lets ranks that have ended begin again, until every rank has given all of its batches; None gives
            what the loader gives, and ranks may differ.

    Raises:
        InvalidInputError: even is something else; in the first step and on every rank, one has no batch to repeat.
    """

    def __init__(self, loader: Iterable[_Item], even: Even | None = None) -> None:
        self.loader = loader
        self.even = one_of("even", even, (None, *get_args(Even)))
        self._group: distributed.ProcessGroup | None = None
        if even and _ranks() > 1:
            self._group = cast(distributed.ProcessGroup, distributed.new_group(backend="gloo"))

    @property
    def dataset(self) -> object:
        """Dataset of the loader, or the loader itself if it has none."""
        return getattr(self.loader, "dataset", self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the dataset; see BatchDataset.set_epoch."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[_Item]:
        """Iterate over the batches of an epoch."""
        if self._group is None:
            if self.even and _ranks() > 1:
                raise InvalidInputError(
                    "even: got a loader made before torch.distributed was initialised, want it made after"
                )
            yield from self.loader
            return
        batches, steps, ended = iter(self.loader), 0, False
        while True:
            batch = next(batches, _END)
            ended = ended or batch is _END
            some_ended, some_go_on, some_empty = self._any(ended, not ended, ended and not steps)
            if some_ended if self.even == "drop" else not some_go_on:
                break
            if some_empty:
                raise InvalidInputError("even: got 'repeat' and a rank without batches, want more records than ranks")
            if batch is _END:
                batches = iter(self.loader)
                batch = next(batches, _END)
                if batch is _END:
                    raise InvalidInputError("loader: got no batches when begun again, want the same as before")
            steps += 1
            yield cast(_Item, batch)
        if not ended:
            _LOG.warning("even='drop': the epoch ends after %d steps and leaves batches of this rank", steps)

    def _any(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank."""
        shared = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(shared, distributed.ReduceOp.MAX, self._group)
        return [bool(flag) for flag in shared.tolist()]


_END = object()


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
