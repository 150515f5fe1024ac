"""Batches under accelerate, which Trainer uses for loading: kept whole or refused, and equally many on each rank."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_corpus import NumberedShard, keys, load
from torchdata.stateful_dataloader import StatefulDataLoader

from mmpos import Grid, ImageProcessor, SequenceBuilder
from mmpos.data.collate import PackedCollator
from mmpos.data.examples import Document, Example, Location, Piece, Preprocess
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Batcher, Packer
from mmpos.data.ranks import Even, RankLoader
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos_bench.data import labelled

operations = pytest.importorskip("accelerate.utils.operations")


class Shards(NumberedShard):
    """A shard whose even records are long, so that the second of two ranks fills fewer packs."""

    @staticmethod
    def example(raw: Any, location: Location) -> Example:
        return labelled(str(location), ["x" * (5 if raw % 2 else 30)])


BATCH: Any = PackedCollator()([labelled("a", ["two", Grid(2, 2)])] * 2)
INSTEAD = r"batch: got a Batch instead .*, want ModelCollator\(settings\) as data_c"


def test_moving_collating_and_copying_leaves_arguments_unchanged() -> None:
    arguments = BATCH.as_dict(batched=True)
    moved = operations.send_to_device(arguments, torch.device("cpu"))
    collected, collected_by_worker = (next(iter(load([arguments], workers))) for workers in (0, 1))
    copies = (moved, collected, collected_by_worker, copy.deepcopy(arguments), pickle.loads(pickle.dumps(arguments)))
    with pytest.raises(TypeError, match="Can only find the batch size of tensors"):
        operations.find_batch_size(dict(arguments))
    whole = r"tensors but got .*\.Batch'>, which stays whole: load it through mmpos\.data\.RankLoader\("
    for divide in (operations.find_batch_size, lambda batch: operations.concatenate([batch, batch])):
        with pytest.raises(TypeError, match=whole):  # as accelerate's dispatcher does
            divide(BATCH)
    for copied in copies:
        assert type(copied) is type(arguments)
        assert list(copied) == list(arguments)
        for name, value in arguments.items():
            assert torch.equal(copied[name], value) if isinstance(value, torch.Tensor) else copied[name] == value


# Ranks


class Epochs(list[int]):
    """Dataset that records calls to set_epoch."""

    set_epoch = list[int].append


@pytest.mark.parametrize("even", [None, "drop", "repeat"])
def test_one_rank_yields_all_batches_and_set_epoch_reaches_the_dataset(even: Even | None) -> None:
    ranked = RankLoader(Epochs([1, 2]), even)
    assert list(ranked) == list(ranked) == [1, 2]
    ranked.set_epoch(3)
    assert ranked.dataset == [1, 2, 3]
    RankLoader([1]).set_epoch(3)
    assert getattr(of_rank(0, 1), "generator", None) is None


def of_rank(rank: int, world_size: int) -> Any:
    return BatchDataset([], Shards.example, Packer(60), rank=rank, world_size=world_size)


def packs_of_forty() -> RankLoader[Any]:
    """Create a loader that yields packs as lists of their documents' keys."""
    dataset = BatchDataset([Shards("a", 40)], Shards.example, Packer(60), keys, seed=3, shuffle=9)
    return RankLoader(load(dataset, 0), "repeat")


def test_one_rank_resumes_from_its_state_also_at_the_end_of_an_epoch() -> None:
    epoch = list(packs_of_forty())
    for steps in (0, 1, 4, len(epoch)):
        first, resumed = packs_of_forty(), packs_of_forty()
        batches = iter(first)
        for _ in range(steps + (steps == len(epoch))):
            next(batches, None)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert list(batches) == list(resumed) == epoch[steps:]
        assert list(resumed) == epoch


def test_an_endless_loader_continues_across_epochs_and_resumes_despite_set_epoch() -> None:
    def endless() -> RankLoader[Any]:
        return RankLoader(packs_of_forty().loader, endless=True)

    want: list[Any] = []
    for epoch in range(3):
        single = packs_of_forty()
        single.set_epoch(epoch)
        want += list(single)
    first = endless()
    first.set_epoch(0)
    batches = iter(first)
    assert [next(batches) for _ in want[:-2]] == want[:-2]
    resumed = endless()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed.set_epoch(0)
    assert [batch for batch, _ in zip(resumed, range(3), strict=False)][:2] == want[-2:]
    assert resumed.state_dict()["epoch"] == 3


WRONG: Any = 3
OLD: Any = {"version": 0}
BARE: Any = {"version": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: "labels" in BATCH, INSTEAD),
        (lambda: BATCH["labels"], INSTEAD),
        (lambda: list(BATCH), INSTEAD),
        (lambda: operations.get_data_structure(BATCH.as_dict()), "batch: got .* want the whole batch; .*RankLoader"),
        # accelerate reads the generator of a dataset that it would split over ranks a second time.
        (lambda: of_rank(1, 2).generator, "generator: got a dataset for rank 1 of 2, .*; load it through .*RankLoader"),
        (lambda: RankLoader([1], WRONG), "even: got 3, want one of None, 'drop', 'repeat'"),
        (lambda: RankLoader(WRONG), "loader: got int, want a DataLoader or another iterable"),
        (lambda: list(RankLoader([], endless=True)), "loader: got an epoch without batches, want at least one"),
        (lambda: RankLoader([1]).state_dict(), "loader: got list without a state, want a StatefulDataLoader or a B"),
        (lambda: RankLoader([1]).load_state_dict(OLD), "state: got version 0, want version 1 from state_d"),
        (lambda: RankLoader([1]).load_state_dict(BARE), "state: got no epoch, loader, over, repeats, st"),
        (lambda: RankLoader([1]).load_state_dict(WRONG), "state: got int, want version 1 from state_dict"),
    ],
)
def test_batches_as_mappings_and_invalid_arguments_and_states_are_refused(call: Any, message: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedError), match=f"^{message}"):
        call()


# Steps


class Sized(Shards):
    """Shard with known lengths."""

    @property
    def lengths(self) -> Any:
        return np.array([5 if i % 2 else 30 for i in range(self.size)])


def text(raw: Any, location: Location) -> Document:
    return Document(str(location), (Piece("x" * (5 if raw % 2 else 30)),))


def with_images(policy: Any) -> Preprocess:
    return Preprocess(text, SequenceBuilder(images=ImageProcessor("pillow")), on_image_error=policy)


@pytest.mark.parametrize(
    ("shard", "batching", "preprocess", "is_known"),
    [
        (Sized, Packer(35, buffer=1), Shards.example, True),
        (Sized, Packer(47, buffer=3, multiple_of=47), Shards.example, True),
        (Sized, Batcher(3, max_tokens=30), Shards.example, True),
        (Shards, Batcher(7), Shards.example, True),
        (Shards, Packer(60), Shards.example, False),
        (Shards, Batcher(2, max_tokens=40), Shards.example, False),
        (Sized, Packer(60, split_text=True), Shards.example, False),
        (Sized, Packer(60, overlong="truncate"), Shards.example, False),
        *((Shards, Batcher(2), with_images(policy), is_known)
          for policy, is_known in ((None, True), ("raise", True), ("drop", False), ("skip-document", False))),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("rank", "workers", "split"), [(0, 2, "records"), (1, 0, "shards")])
def test_the_number_of_batches_is_known_from_lengths_unless_texts_are_cut_or_documents_skipped(
    shard: Any, batching: Any, preprocess: Any, is_known: bool, rank: int, workers: int, split: Any, tmp_path: Path
) -> None:
    def new(on_error: str) -> RankLoader[Any]:
        options: dict[str, Any] = {"rank": rank, "world_size": 2, "on_error": on_error, "quarantine": tmp_path}
        shards = [shard(name, 23) for name in "abc"]
        dataset = BatchDataset(shards, preprocess, batching, keys, seed=2, shuffle=4, split=split, **options)
        dataset.set_epoch(5)
        return RankLoader(load(dataset, workers))

    assert new("skip").steps_per_epoch is None
    assert new("raise").steps_per_epoch == (len(list(new("raise"))) if is_known else None)
    assert RankLoader([1, 2, 3]).steps_per_epoch == 3
    assert RankLoader(iter([1])).steps_per_epoch is None


# Two ranks


def run(rank: int, folder: Path) -> None:
    """Check a loader on one of two ranks, with 5 batches on the first rank and 2 on the second."""
    early = RankLoader([1], "drop")
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2, timeout=limit)
    with pytest.raises(InvalidInputError, match=r"^even: got a loader created before torch.distributed was init"):
        next(iter(early))
    batches = [10 * rank + i for i in range((5, 2)[rank])]
    repeated = [10, 11, 10, 11, 10] if rank else batches
    cases: list[tuple[Even, list[int], int]] = [("drop", batches[:2], 2), ("repeat", repeated, 10)]
    for even, want, _ in cases:
        taken = RankLoader(load(batches, 1), even)
        assert (list(taken), list(taken), taken.steps_per_epoch) == (want, want, len(want))
    with pytest.raises(InvalidInputError, match=r"^even: got 'repeat' and a rank without batches"):
        list(RankLoader(batches if rank else [], "repeat"))
    assert list(RankLoader(batches if rank else [], "drop")) == []
    unknown: Any = batches if rank else iter(batches)
    assert RankLoader(unknown, "drop").steps_per_epoch is None

    def make(even: Even) -> RankLoader[Any]:
        dataset = BatchDataset([Shards("a", 40)], Shards.example, Packer(60), keys)
        return RankLoader(load(dataset, rank, StatefulDataLoader), even)

    for even, _, count in cases:  # resume an epoch from the state after every step
        resumable, whole = make(even), list(make(even))
        states = [resumable.state_dict()] + [resumable.state_dict() for _ in resumable] + [resumable.state_dict()]
        assert len(whole) == count
        for steps, state in enumerate(states):
            again = make(even)
            again.load_state_dict(state)
            assert list(again) == whole[steps:], (even, steps)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_receive_equal_numbers_of_batches_and_resume_while_repeating_them(tmp_path: Path) -> None:
    multiprocessing: Any = torch.multiprocessing
    importable = importlib.import_module("test_data_trainers")  # by a name that spawned processes can import
    multiprocessing.spawn(importable.run, (tmp_path,), nprocs=2)
