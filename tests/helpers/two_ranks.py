"""The work of each of two ranks, in a module that spawned processes can import."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from data_corpus import NumberedShard, load
from torchdata.stateful_dataloader import StatefulDataLoader

from mmpos import SequenceBuilder
from mmpos.data.examples import Example, Location
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Packer
from mmpos.data.ranks import Even, RankLoader
from mmpos.errors import InvalidInputError

BUILDER = SequenceBuilder()


class Shards(NumberedShard):
    """A shard whose even records are long, so that the second of two ranks fills fewer packs."""

    @staticmethod
    def example(raw: Any, location: Location) -> Example:
        sequence = BUILDER.build(["x" * (5 if raw % 2 else 30)])
        return Example(str(location), sequence, sequence.input_ids)


def as_keys(group: Any) -> Any:
    return [example.key for example in getattr(group, "examples", group)]


def run(rank: int, folder: Path) -> None:
    """Run every case checked by the tests, and write the results."""
    early = RankLoader([1], "drop")
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2, timeout=limit)
    with pytest.raises(
        InvalidInputError, match=r"^even: got a loader created before torch.distributed was initialised"
    ):
        next(iter(early))
    result = {"epochs": _epochs(rank), "resumed": _resumed(rank)}
    torch.distributed.barrier()
    (folder / str(rank)).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def _epochs(rank: int) -> dict[str, Any]:
    """Run two epochs with each value of ``even``, with 5 batches on one rank and 2 on the other."""
    batches = [10 * rank + i for i in range((5, 2)[rank])]
    result: dict[str, Any] = {}
    kinds: tuple[Even, ...] = ("drop", "repeat")
    for even in kinds:
        taken = RankLoader(load(batches, 1), even)
        result[even] = [list(taken), list(taken)]
    with pytest.raises(InvalidInputError, match=r"^even: got 'repeat' and a rank without batches"):
        list(RankLoader(batches if rank else [], "repeat"))
    result["none"] = [list(RankLoader(batches if rank else [], "drop"))]
    loaders = [RankLoader(load(batches, 0), even) for even in kinds]
    unknown: Any = batches if rank else iter(batches)
    result["steps"] = [ranked.steps_per_epoch for ranked in (*loaders, RankLoader(unknown, "drop"))]
    return result


def _resumed(rank: int) -> dict[str, Any]:
    """Run an epoch with each value of ``even``, and resume it from the state after every step."""

    def make(even: Even) -> RankLoader[Any]:
        dataset = BatchDataset([Shards("a", 40)], Shards.example, Packer(60), as_keys)
        return RankLoader(load(dataset, rank, StatefulDataLoader), even)

    result: dict[str, Any] = {"whole": {}}
    kinds: tuple[Even, ...] = ("drop", "repeat")
    for even in kinds:
        taken = make(even)
        states = [taken.state_dict()] + [taken.state_dict() for _ in taken] + [taken.state_dict()]
        result["whole"][even], result[even] = list(make(even)), []
        for state in states:
            again = make(even)
            again.load_state_dict(state)
            result[even].append(list(again))
    return result
