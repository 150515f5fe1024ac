"""Batches under accelerate, which Trainer uses for loading: kept whole or refused, and equally many on each rank."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from torch.utils.data import DataLoader
from two_ranks import Shards, as_keys, loader, run

from mmpos import Grid, ImageProcessor, SequenceBuilder
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Example, OnImageError, Preprocess
from mmpos.data.formats import Chat, ChatTemplate
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Batcher, Packer
from mmpos.data.ranks import Even, RankLoader
from mmpos.errors import InvalidInputError, UnsupportedError

operations = pytest.importorskip("accelerate.utils.operations")

BUILDER = SequenceBuilder()


def examples() -> list[Example]:
    """Make three examples, two with an image."""
    parts: list[list[Any]] = [["one"], ["two", Grid(2, 2)], [Grid(1, 3), "three"]]
    sequences = [BUILDER.build(document) for document in parts]
    return [Example(str(i), sequence, sequence.input_ids) for i, sequence in enumerate(sequences)]


def dispatch(batches: list[Any], rank: int) -> Any:
    """Cut one rank's part out of one batch per rank, as accelerate's DataLoaderDispatcher does by default."""
    batch = operations.concatenate(batches)
    operations.get_data_structure(batch)
    rows = operations.find_batch_size(batch) // len(batches)
    return operations.slice_tensors(batch, slice(rank * rows, (rank + 1) * rows))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("collate", [PackedCollator(), PaddedCollator()])
def test_a_dispatcher_raises_an_error_that_names_the_remedy(collate: Any, batched: bool) -> None:
    arguments = collate(examples()).as_dict(batched=batched)
    with pytest.raises(UnsupportedError, match=r"^batch: .* want the whole batch; .*RankLoader"):
        dispatch([arguments], 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_names_the_remedy_for_a_batch_in_a_dispatcher(ranks: int) -> None:
    verb = "find the batch size of" if ranks == 1 else "concatenate"
    remedy = r"which stays whole: load it through mmpos\.data\.RankLoader\(DataLoader\(dataset, batch_size=None\)\)"
    with pytest.raises(
        TypeError, match=rf"^Can only {verb} tensors but got <class 'mmpos\.data\.batch\.Batch'>, {remedy}"
    ):
        dispatch([PackedCollator()(examples())] * ranks, 0)


def test_a_batch_is_not_a_mapping_of_arguments() -> None:
    batch: Any = PackedCollator()(examples())
    reads: list[Callable[[], object]] = [lambda: "labels" in batch, lambda: batch["labels"], lambda: list(batch)]
    for read in reads:
        with pytest.raises(
            UnsupportedError, match=r"^batch: got a Batch instead .*, want ModelCollator\(settings\) as data_c"
        ):
            read()


def test_moving_collating_and_copying_leaves_arguments_unchanged() -> None:
    arguments = PackedCollator()(examples()).as_dict(batched=True)
    moved = operations.send_to_device(arguments, torch.device("cpu"))
    collected = next(iter(loader(arguments)))
    collected_by_worker = next(iter(loader(arguments, num_workers=1)))
    copies = (moved, collected, collected_by_worker, copy.deepcopy(arguments), pickle.loads(pickle.dumps(arguments)))
    for copied in copies:
        assert type(copied) is type(arguments)
        assert list(copied) == list(arguments)
        for name, value in arguments.items():
            assert torch.equal(copied[name], value) if isinstance(value, torch.Tensor) else copied[name] == value


# Ranks


class Epochs:
    """Dataset that records calls to set_epoch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.seen.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


@pytest.mark.parametrize("even", [None, "drop", "repeat"])
def test_one_rank_yields_all_batches_and_set_epoch_reaches_the_dataset(even: Even | None) -> None:
    dataset = Epochs()
    ranked = RankLoader(dataset, even)
    assert list(ranked) == list(ranked) == [1, 2]
    ranked.set_epoch(3)
    assert dataset.seen == [3]
    assert ranked.dataset is dataset
    RankLoader([1]).set_epoch(3)


def test_accelerate_does_not_split_a_dataset_over_ranks_a_second_time() -> None:
    def generator(rank: int, world_size: int) -> object:
        """Read the generator like accelerate's prepare_data_loader with dispatch_batches=False and several ranks."""
        dataset = BatchDataset([], Shards.example, Packer(60), rank=rank, world_size=world_size)
        return getattr(dataset, "generator", None)

    assert generator(0, 1) is None
    with pytest.raises(
        UnsupportedError, match=r"^generator: got a dataset for rank 1 of 2, .*; load it through .*RankLoader"
    ):
        generator(1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], "pad"), "even: got 'pad', want one of None, 'drop', 'repeat'"),
        ((5,), r"^loader: got int, want a DataLoader or another iterable$"),
    ],
)
def test_arguments_are_checked_on_construction(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        RankLoader(*arguments)


def interrupted(make: Callable[[], RankLoader[Any]], steps: int) -> tuple[list[Any], list[Any]]:
    """Return the batches after this number of steps, from the same loader and from a loader resumed at that state."""
    first, second = make(), make()
    batches = iter(first)
    for _ in range(steps):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    return list(batches), list(second)


def packs_of_forty() -> RankLoader[Any]:
    """Create a loader that yields packs as lists of their documents' keys."""
    dataset = BatchDataset([Shards("a", 40)], Shards.example, Packer(60), as_keys, seed=3, shuffle=9)
    return RankLoader(DataLoader(dataset, batch_size=None), "repeat")


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_one_rank_resumes_from_its_state(steps: int) -> None:
    rest, resumed = interrupted(packs_of_forty, steps)
    assert resumed == rest == list(packs_of_forty())[steps:]


def test_a_state_at_the_end_of_an_epoch_yields_no_batches_before_the_next_epoch() -> None:
    first = packs_of_forty()
    epoch = list(first)
    resumed = packs_of_forty()
    resumed.load_state_dict(first.state_dict())
    assert (list(resumed), list(resumed)) == ([], epoch)


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
    with pytest.raises(InvalidInputError, match=r"^loader: got an epoch without batches, want at least one"):
        list(RankLoader([], endless=True))


def test_loaders_without_a_state_and_invalid_states_are_refused() -> None:
    stateless = RankLoader([1])
    with pytest.raises(UnsupportedError, match=r"^loader: got list without a state, want a StatefulDataLoader or a B"):
        stateless.state_dict()
    invalid: list[tuple[Any, str]] = [({"version": 0}, "version 0"), (3, "int")]
    for state, got in invalid:
        with pytest.raises(InvalidInputError, match=f"^state: got {got}, want version 1 from state_dict"):
            stateless.load_state_dict(state)


# Steps


class Sized(Shards):
    """Shard with known lengths."""

    @property
    def lengths(self) -> Any:
        return np.array([5 if i % 2 else 30 for i in range(self.size)])


@pytest.mark.parametrize(
    ("batching", "rank", "workers"),
    [
        (Packer(60), 0, 2),
        (Packer(47, buffer=3, multiple_of=47), 1, 0),
        (Batcher(3, max_tokens=30), 0, 0),
        (Batcher(7), 1, 2),
    ],
)
def test_the_number_of_batches_is_computed_from_lengths(batching: Any, rank: int, workers: int) -> None:
    shards = [Sized(name, 23) for name in "abc"]
    for split in ("records", "shards"):
        dataset = BatchDataset(
            shards, Shards.example, batching, as_keys, seed=2, shuffle=4, split=split, rank=rank, world_size=2
        )
        dataset.set_epoch(5)
        ranked = RankLoader(
            DataLoader(
                dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
        )
        assert ranked.steps_per_epoch == len(list(ranked))


@pytest.mark.parametrize(("policy", "steps"), [(None, 5), ("raise", 5), ("drop", None), ("skip-document", None)])
def test_steps_are_unknown_if_documents_may_be_skipped(
    policy: OnImageError | None, steps: int | None, tmp_path: Path
) -> None:
    preprocess = Preprocess(
        Chat(ChatTemplate()), SequenceBuilder(images=ImageProcessor("pillow")), on_image_error=policy
    )
    dataset = BatchDataset([Shards("a", 9)], preprocess, Batcher(2), quarantine=tmp_path)
    assert RankLoader(DataLoader(dataset, batch_size=None)).steps_per_epoch == steps


def test_steps_are_unknown_without_sizes_or_if_texts_are_cut() -> None:
    def steps(shard: Any, batching: Any, **options: Any) -> int | None:
        return RankLoader(
            DataLoader(BatchDataset([shard], Shards.example, batching, **options), batch_size=None)
        ).steps_per_epoch

    plain, sized = Shards("a", 9), Sized("a", 9)
    assert steps(plain, Batcher(2)) == 5
    assert steps(sized, Packer(60)) == 3
    unknown = [
        steps(plain, Packer(60)),
        steps(plain, Batcher(2, max_tokens=40)),
        steps(sized, Packer(60, split_text=True)),
        steps(sized, Packer(60, overlong="truncate")),
        steps(sized, Packer(60), on_error="skip", quarantine="unused"),
    ]
    assert unknown == [None] * 5
    assert RankLoader([1, 2, 3]).steps_per_epoch == 3
    assert RankLoader(iter([1])).steps_per_epoch is None


def two_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that uses the results of two ranks, so that all these tests run in one process."""
    return pytest.mark.slow(pytest.mark.xdist_group("two ranks")(test))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two ranks once for all tests, since starting them takes longer than their work, and return their results."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, 2, folder)
    return [json.loads((folder / str(rank)).read_text()) for rank in (0, 1)]


@two_ranks
def test_ranks_receive_equal_numbers_of_batches(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["epochs"] for rank in ranks)
    assert first == {"drop": [[0, 1]] * 2, "repeat": [[0, 1, 2, 3, 4]] * 2, "none": [[]], "steps": [2, 5, None]}
    assert second == {"drop": [[10, 11]] * 2, "repeat": [[10, 11, 10, 11, 10]] * 2, "none": [[]], "steps": [2, 5, None]}


@two_ranks
def test_ranks_resume_while_repeating_batches(ranks: list[dict[str, Any]]) -> None:
    for rank in (rank["resumed"] for rank in ranks):
        assert {even: len(whole) for even, whole in rank["whole"].items()} == {"drop": 2, "repeat": 10}
        for even, whole in rank["whole"].items():
            for steps, rest in enumerate(rank[even]):
                assert rest == whole[steps:], (even, steps)


@two_ranks
def test_training_ends_on_ranks_with_different_batch_counts(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["trained"] for rank in ranks)
    assert first["packs"] != second["packs"], "the corpus is uneven"
    for even, longest in (("drop", min), ("repeat", max)):
        steps, _ = first[even]
        assert first[even] == second[even], "the same number of steps and the same weights"
        assert steps == 2 * longest(first["packs"], second["packs"])
