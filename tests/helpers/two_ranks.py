"""The work of each of two ranks, in a module that spawned processes can import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from data_corpus import NumberedShard, load
from torchdata.stateful_dataloader import StatefulDataLoader

from mmpos.data.examples import Example, Location
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Packer
from mmpos.data.ranks import Even, RankLoader
from mmpos.errors import InvalidInputError
from mmpos_bench.data import labelled


class Shards(NumberedShard):
    """A shard whose even records are long, so that the second of two ranks fills fewer packs."""

    @staticmethod
    def example(raw: Any, location: Location) -> Example:
        return labelled(str(location), ["x" * (5 if raw % 2 else 30)])


def as_keys(group: Any) -> Any:
    return [example.key for example in getattr(group, "examples", group)]


def run(rank: int, folder: Path) -> None:
    """Check a loader on one of two ranks."""
    early = RankLoader([1], "drop")
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2, timeout=limit)
    with pytest.raises(InvalidInputError, match=r"^even: got a loader created before torch.distributed was init"):
        next(iter(early))
    check_epochs([10 * rank + i for i in range((5, 2)[rank])], rank)
    check_resumed(rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check_epochs(batches: list[int], rank: int) -> None:
    """Run two epochs with each value of ``even``, with 5 batches on the first rank and 2 on the second."""
    repeated = [10, 11, 10, 11, 10] if rank else batches
    cases: list[tuple[Even, list[int]]] = [("drop", batches[:2]), ("repeat", repeated)]
    for even, want in cases:
        taken = RankLoader(load(batches, 1), even)
        assert (list(taken), list(taken), taken.steps_per_epoch) == (want, want, len(want))
    with pytest.raises(InvalidInputError, match=r"^even: got 'repeat' and a rank without batches"):
        list(RankLoader(batches if rank else [], "repeat"))
    assert list(RankLoader(batches if rank else [], "drop")) == []
    unknown: Any = batches if rank else iter(batches)
    assert RankLoader(unknown, "drop").steps_per_epoch is None


def check_resumed(rank: int) -> None:
    """Run an epoch with each value of ``even``, and resume it from the state after every step."""

    def make(even: Even) -> RankLoader[Any]:
        dataset = BatchDataset([Shards("a", 40)], Shards.example, Packer(60), as_keys)
        return RankLoader(load(dataset, rank, StatefulDataLoader), even)

    cases: list[tuple[Even, int]] = [("drop", 2), ("repeat", 10)]
    for even, count in cases:
        taken, whole = make(even), list(make(even))
        states = [taken.state_dict()] + [taken.state_dict() for _ in taken] + [taken.state_dict()]
        assert len(whole) == count
        for steps, state in enumerate(states):
            again = make(even)
            again.load_state_dict(state)
            assert list(again) == whole[steps:], (even, steps)
