"""Blends: records of several corpora are drawn by weight, and a run resumes exactly on any number of ranks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from data_corpus import NumberedShard, keys, load
from results import assert_equal
from torchdata.stateful_dataloader import StatefulDataLoader

from mmpos.data import Blend, PackedCollator, RecordError, read_quarantine
from mmpos.data.examples import Example, Location
from mmpos.data.packing import Batcher, Packer
from mmpos.errors import InvalidInputError
from mmpos_bench.data import labelled


def example(raw: int, location: Location) -> Example:
    """Make an example of 5 to 17 tokens, whose key is its location, from every record but each eleventh."""
    if raw % 11 == 10:
        raise RecordError(f"{location}: got {raw}, want a usable number")
    return labelled(str(location), ["x" * (5 + raw % 13)])


def tiny(raw: int, location: Location) -> Example:
    return labelled(str(location), ["x"])


def refuse(raw: int, location: Location) -> Example:
    raise RecordError(f"{location}: got {raw}, want nothing")


def blend(sizes: dict[str, Any], batching: Any = None, **options: Any) -> Any:
    """Blend corpora with shards of these sizes; batches are lists of keys unless ``collate`` is given."""
    shards = {
        name: [NumberedShard(f"{name}{i}", size) for i, size in enumerate([of] if isinstance(of, int) else of)]
        for name, of in sizes.items()
    }
    defaults: dict[str, Any] = {"preprocess": tiny, "collate": keys, "weights": dict.fromkeys(sizes, 1), "seed": 3}
    return Blend(shards, batching=batching or Batcher(1), **defaults | options)


def joined(batches: Iterable[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]


def corpus_of(key: str) -> str:
    return key.rstrip("0123456789[]")


# Drawing


@pytest.mark.parametrize("weights", [(3, 1, 1), (1, 1), (0.02, 0.98), (5, 1, 1, 1, 2)])
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_records_are_drawn_by_weight(weights: tuple[float, ...], seed: int) -> None:
    names = [chr(97 + i) for i in range(len(weights))]
    dataset = blend(dict.fromkeys(names, 700), weights=dict(zip(names, weights, strict=True)), seed=seed, shuffle=50)
    draws = 5000
    counts = Counter(map(corpus_of, joined(islice(dataset, draws))))
    # Hoeffding: a share of n independent draws is off by t or more with probability 2·exp(−2nt²) at most; here 1e-9.
    bound = math.sqrt(math.log(2 / 1e-9) / (2 * draws))
    for name, weight in zip(names, weights, strict=True):
        assert abs(counts[name] / draws - weight / sum(weights)) < bound
    report = dataset.state_dict()["counts"]
    assert {name: report[f"records/{name}"] for name in names} == counts
    assert report["records"] == draws


def test_consumers_and_epochs_draw_independently() -> None:
    def drawn(**options: Any) -> tuple[str, ...]:
        dataset = blend({"a": 999, "b": 999}, **{"rank": 0, "world_size": 2} | options)
        return tuple(map(corpus_of, joined(islice(dataset, 400))))

    assert len({drawn(), drawn(), drawn(rank=1), drawn(seed=4)}) == 3


@pytest.mark.parametrize(("stop", "short"), [("first", 30), ("last", 300)])
def test_a_blend_stops_when_its_first_or_last_corpus_ends(stop: Any, short: int) -> None:
    drawn = joined(blend({"a": 30, "b": 300}, stop=stop, shuffle=8))
    a, b = (Counter(key for key in drawn if corpus_of(key) == name).values() for name in "ab")
    assert (len(a), set(b)) == (30, {1})
    if stop == "first":
        assert set(a) == {1}
    else:
        assert len(b) == 300
        assert max(a) - min(a) <= 1, "started over evenly"


def test_a_corpus_that_ends_is_shuffled_again() -> None:
    drawn = [key for key in joined(islice(blend({"a": [6, 7], "b": [999]}, shuffle=20), 200)) if key[0] == "a"]
    rounds = [drawn[i : i + 13] for i in range(0, 39, 13)]
    assert len({tuple(one) for one in rounds}) == 3
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
    kept = [key for key in joined(islice(blend({"a": [3], "b": [999]}), 60)) if key[0] == "a"]
    assert kept[:6] == ["a0[0]", "a0[1]", "a0[2]"] * 2, "shuffle=0 keeps the order"


def test_a_small_corpus_reaches_all_consumers_and_one_without_records_is_refused_when_it_starts_over() -> None:
    for rank in range(4):
        dataset = blend({"a": 1, "b": 400}, rank=rank, world_size=4)
        assert Counter(map(corpus_of, joined(islice(dataset, 100))))["a"] > 25
    with pytest.raises(InvalidInputError, match=r"^shards\['a'\]: got no records, want at least one"):
        list(islice(blend({"a": 0, "b": 400}), 100))
    assert set(map(corpus_of, joined(blend({"a": 0, "b": 400}, stop="first")))) <= {"b"}


def test_each_corpus_has_its_own_preprocess_and_its_own_limit_on_skipped_records(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_error": "skip", "quarantine": tmp_path, "stop": "first"}
    dataset = blend({"a": 200, "b": 200}, preprocess={"a": tiny, "b": example}, max_skipped=1.0, **options)
    drawn, counts = joined(dataset), dataset.counts
    assert counts["skipped"] == counts["skipped/b"] == len(read_quarantine(tmp_path)) > 10
    assert "skipped/a" not in counts
    assert len(drawn) == counts["records/a"] + counts["records/b"] - counts["skipped"]
    # 101 of the first 1,000 records of b are too many, even if they are 3 % of all records.
    dataset = blend({"a": 4000, "b": 900}, preprocess={"a": tiny, "b": refuse}, weights={"a": 97, "b": 3}, **options)
    with pytest.raises(InvalidInputError, match="max_skipped: got 101 skipped of the first 101 records"):
        list(dataset)


# Resuming


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(
    ("workers", "every", "persistent"), [(0, 1, False), (0, 5, False), (2, 1, True), (2, 2, False)]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_blend_resumes_exactly(ranks: int, workers: int, every: int, persistent: bool, tmp_path: Path) -> None:
    stop: Any = "last" if persistent or every == 5 else None

    def new(rank: int) -> Any:
        dataset = blend(
            {"a": [40, 23], "b": [9], "c": [90, 30, 31]},
            Packer(60, buffer=5, split_text=True),
            preprocess={"a": example, "b": example, "c": tiny},
            weights={"a": 3, "b": 1, "c": 1},
            collate=PackedCollator(),
            stop=stop,
            shuffle=6,
            rank=rank,
            world_size=ranks,
            on_error="skip",
            max_skipped=1,
            quarantine=tmp_path / "q",
            threads=2 * (every == 5),
        )
        options: dict[str, Any] = {"persistent_workers": persistent, "snapshot_every_n_steps": every}
        return load(dataset, workers, StatefulDataLoader, **options)

    for rank in range(ranks):
        whole = list(islice(new(rank), 24))
        assert stop or len(whole) == 24
        for after in (0, 3, len(whole) - 1) if workers == 0 else (len(whole) // 2,):
            loader = new(rank)
            batches = iter(loader)
            head = list(islice(batches, after))
            state = json.loads(json.dumps(loader.state_dict()))
            del batches, loader
            resumed = new(rank)
            resumed.load_state_dict(state)
            assert_equal(head + list(islice(resumed, len(whole) - after)), whole)
    lines = [line["index"] for line in read_quarantine(tmp_path / "q")]
    assert len(lines) > 4
    assert {index % 11 for index in lines} == {10}, "the records that cannot be used"


def test_all_ranks_and_workers_together_read_every_record() -> None:
    seen: Counter[str] = Counter()
    for rank in range(2):
        dataset = blend({"a": [5, 17], "b": [29]}, stop="last", shuffle=4, rank=rank, world_size=2, split="records")
        seen.update(joined(load(dataset, 2)))
    assert set(seen) == {f"{name}[{i}]" for name, size in (("a0", 5), ("a1", 17), ("b0", 29)) for i in range(size)}


def test_a_state_is_small_and_other_arguments_are_refused() -> None:
    dataset = blend({"a": 300, "b": 300}, Packer(60, buffer=5))
    list(islice(dataset, 20))
    state = json.loads(json.dumps(dataset.state_dict()))
    assert len(json.dumps(state)) < 1500
    for names, options, message in (
        ("ab", {"weights": {"a": 2, "b": 1}}, r"weights \[\['a', 1.0\], .*, want \[\['a', 2.0\]"),
        ("ab", {"stop": "last"}, "stop None, want last"),
        ("ba", {}, "(shards|weights) .*, want"),
        ("ac", {}, "shards 2 with checksum .*, want 2"),
    ):
        with pytest.raises(InvalidInputError, match=f"state: got {message}"):
            blend(dict.fromkeys(names, 300), Packer(60, buffer=5), **options).load_state_dict(state)


def test_the_number_of_batches_is_known_if_the_blend_ends() -> None:
    for stop in ("first", "last"):
        dataset = blend({"a": 30, "b": 41}, Batcher(3), stop=stop, shuffle=5, rank=1, world_size=2)
        assert dataset.num_batches() == len(list(dataset))
    assert blend({"a": 30, "b": 41}, Batcher(3)).num_batches() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": []}, "shards: got list, want a mapping from at least one name to readers"),
        ({"shards": {}}, "shards: got none, want a mapping from at least one name to readers"),
        ({"shards": {"a": [3]}, "weights": {"a": 1}}, r"shards\['a'\]\[0\]: got int, want a Reader"),
        ({"weights": {"a": 1}}, r"weights: got \['a'\], want the names in shards: \['a', 'b'\]"),
        ({"weights": [3, 1]}, r"weights: got list, want the names in shards: \['a', 'b'\]"),
        ({"weights": {"a": 1, "b": 0}}, r"weights\['b'\]: got 0, want a finite number > 0"),
        ({"weights": {"a": math.inf, "b": 1}}, r"weights\['a'\]: got inf, want a finite number > 0"),
        ({"preprocess": {"a": tiny}}, r"preprocess: got \['a'\], want the names in shards: \['a', 'b'\]"),
        ({"preprocess": {"a": tiny, "b": None}}, r"preprocess\['b'\]: got NoneType, want a Preprocess, or get_example"),
        ({"stop": "any"}, "stop: got 'any', want one of None, 'first', 'last'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    shards = {name: [NumberedShard(name, 3)] for name in "ab"}
    defaults: dict[str, Any] = {"shards": shards, "preprocess": tiny, "weights": {"a": 1, "b": 1}}
    with pytest.raises(InvalidInputError, match=message):
        Blend(**defaults | options, batching=Batcher(1))
