"""Which records each worker of each rank reads: all of them together read every record once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmpos.support.checks import integer, one_of

__all__ = ["Portion", "Split", "SplitBy"]

SplitBy = Literal["auto", "shards", "records"]


@dataclass(frozen=True, slots=True)
class Portion:
    """What a consumer reads of a shard: the records first, first + step, …

    Args:
        shard: number of the shard in the order of the epoch.
        first: its first record.
        step: distance to the next.
    """

    shard: int
    first: int = 0
    step: int = 1


@dataclass(frozen=True)
class Split:
    """One consumer among all: a worker of a rank.

    >>> Split(rank=1, world_size=2).portions(3)
    [Portion(shard=1, first=0, step=1)]
    >>> Split(rank=1, world_size=2, by="records").portions(2)
    [Portion(shard=0, first=1, step=2), Portion(shard=1, first=0, step=2)]

    Args:
        rank: 0 to world_size − 1.
        world_size: ranks.
        worker: 0 to num_workers − 1.
        num_workers: workers of each rank, the same for all; one that loads in its own process is 1.
        by: "shards" gives whole shards, each read by one consumer only; "records" gives every consumer its part of
            every shard, even to one record, for which all walk through all shards; "auto" is "shards" where there
            are at least as many of them as consumers, else "records".

    Raises:
        InvalidInputError: a number is out of its range, or by is something else.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    by: SplitBy = "auto"

    def __post_init__(self) -> None:
        integer("world_size", self.world_size, minimum=1)
        integer("rank", self.rank, minimum=0, maximum=self.world_size - 1)
        integer("num_workers", self.num_workers, minimum=1)
        integer("worker", self.worker, minimum=0, maximum=self.num_workers - 1)
        one_of("by", self.by, ("auto", "shards", "records"))

    @property
    def consumers(self) -> int:
        """Workers of all ranks."""
        return self.world_size * self.num_workers

    @property
    def consumer(self) -> int:
        """Number of this one, from 0. Ranks count first, so that left-over shards go to different ranks."""
        return self.worker * self.world_size + self.rank

    def portions(self, num_shards: int) -> list[Portion]:
        """What this consumer reads of so many shards."""
        mine, all_ = self.consumer, self.consumers
        if self.by == "shards" or (self.by == "auto" and num_shards >= all_):
            return [Portion(shard) for shard in range(mine, num_shards, all_)]
        # Each shard begins with the next consumer, so that short shards do not all go to the first ones.
        return [Portion(shard, (mine - shard) % all_, all_) for shard in range(num_shards)]
