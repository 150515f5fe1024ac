"""Loaders: every record is read once, runs are reproducible and resume exactly at any batch, and no loss is silent."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, assert_type

import numpy as np
import pytest
import torch
from data_corpus import NumberedShard, load, records, write_jsonl, write_parquet, write_tar
from functions_called import functions_called
from refusals import assert_refused
from results import assert_equal

from mmpos import Grid, ImageProcessor, SequenceBuilder
from mmpos.client import Client
from mmpos.data.batch import Batch
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Location, Preprocess, RecordError
from mmpos.data.formats import HFImages
from mmpos.data.loader import BatchDataset
from mmpos.data.packing import Batcher, Packer
from mmpos.data.quarantine import Quarantine, read_quarantine
from mmpos.data.readers import Reader, shards
from mmpos.data.stream import BatchStream, Feed, Portion, Split
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos_server.config import load as load_config
from mmpos_server.testing import running

BUILDER = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64))
PREPROCESS = Preprocess(HFImages(), BUILDER)
DROPPING = replace(PREPROCESS, on_image_error="drop")
QUARANTINE = Quarantine()


class Numbers(NumberedShard):
    """Shard of texts with at most 50 letters each."""

    def make(self, i: int) -> Any:
        return {"id": f"{self.source}/{i}", "image": None, "text": "x" * (i % 50 + 1)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    """Write five shards with 53 records in two formats; two records and the end of one shard are broken."""
    folder = tmp_path_factory.mktemp("corpus")
    broken = write_jsonl(folder / "b.jsonl", records(11, 24))
    lines = broken.read_bytes().split(b"\n")
    lines[3] = lines[3][:50]
    lines[7] = b'{"id": "bad", "text": "no image"}'
    broken.write_bytes(b"\n".join(lines))
    truncated = write_jsonl(folder / "d.jsonl.gz", records(33, 44))
    truncated.write_bytes(truncated.read_bytes()[:-1500])
    return shards(
        [
            write_parquet(folder / "a.parquet", records(0, 11), group=4),
            broken,
            write_parquet(folder / "c.parquet", records(24, 33), group=4),
            truncated,
            write_parquet(folder / "e.parquet", records(44, 53), group=4),
        ]
    )


def data(shards: Iterable[Reader], batching: Any = None, **options: Any) -> BatchDataset:
    """Create a dataset that yields small packs, splits texts, buffers some examples, and skips if it may."""
    batching = batching or Packer(200, buffer=5, split_text=True)
    collate = PaddedCollator() if isinstance(batching, Batcher) else PackedCollator()
    defaults: dict[str, Any] = {"preprocess": PREPROCESS, "collate": collate, "seed": 7, "shuffle": 6}
    defaults["on_error"] = "skip" if "quarantine" in options else "raise"
    return BatchDataset(shards, batching=batching, **defaults | options)


def test_type_checkers_infer_the_batch_type_and_the_default_keeps_the_order() -> None:
    for batch in BatchDataset([Numbers("a", 2), Numbers("b", 2)], PREPROCESS, Batcher(4), PackedCollator()):
        assert_type(batch, Batch)
        assert isinstance(batch, Batch)
        assert batch.keys == ("a/0", "a/1", "b/0", "b/1")


def keys(batches: Iterable[Any]) -> list[str]:
    return [key for batch in batches for key in batch.keys]


# Splitting


@pytest.mark.parametrize("by", ["auto", "shards", "records"])
@pytest.mark.parametrize("sizes", [[], [0], [1], [5, 0, 17, 3], [7] * 9, [100]])
@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 1), (1, 3), (2, 2), (3, 4)])
@pytest.mark.parametrize("shuffle", [1, 4])
def test_all_consumers_together_read_every_record_once(
    by: Any, sizes: list[int], world_size: int, num_workers: int, shuffle: int
) -> None:
    readers = tuple(Numbers(f"s{i}", size) for i, size in enumerate(sizes))
    want = Counter(record["id"] for reader in readers for _, record in reader.records())
    seen: Counter[str] = Counter()
    loads = []
    for rank in range(world_size):
        for worker in range(num_workers):
            split = Split(rank, world_size, worker, num_workers, by)
            feed = Feed(readers, PREPROCESS, QUARANTINE, split, shuffle)
            ids = [entry.raw["id"] for entry in feed.entries()]  # type: ignore[index]
            seen.update(ids)
            loads.append(len(ids))
    assert seen == want
    if by == "records":
        assert max(loads) - min(loads) <= len(sizes)


def test_each_of_many_shards_is_read_by_one_consumer_and_a_few_shards_by_all() -> None:
    assert Split().portions(2) == [Portion(0), Portion(1)]
    assert Split(1, 2, 1, 2).portions(9) == [Portion(3), Portion(7)]
    assert Split(1, 2, 1, 2).portions(3) == [Portion(0, 3, 4), Portion(1, 2, 4), Portion(2, 1, 4)]
    # The two leftover shards go to different ranks.
    counts = [len(Split(rank, 2, worker, 2).portions(6)) for rank in (0, 1) for worker in (0, 1)]
    assert counts == [2, 1, 2, 1]


# Order


def test_the_order_depends_on_epoch_seed_and_window_and_is_reproducible() -> None:
    readers = [Numbers(f"s{i}", 10) for i in range(4)]

    def order(epoch: int = 0, **options: object) -> list[str]:
        dataset = data(readers, Batcher(3), **options)
        dataset.set_epoch(epoch)
        return keys(dataset)

    unshuffled = [f"s{i}/{j}" for i in range(4) for j in range(10)]
    assert order(shuffle=0) == unshuffled
    first = order(shuffle=15)
    assert order(shuffle=15) == first
    assert sorted(first) == sorted(unshuffled)
    others = [unshuffled, order(shuffle=15, epoch=1), order(shuffle=15, seed=8), order(shuffle=14)]
    assert all(other != first for other in others)
    assert order(shuffle=2) != unshuffled
    shards = [order(shuffle=1)[at : at + 10] for at in range(0, 40, 10)]
    assert shards != sorted(shards)
    assert [key for shard in sorted(shards) for key in shard] == unshuffled
    # The first window spans two shards.
    assert len({key[:2] for key in first[:15]}) == 2


def test_set_epoch_reaches_persistent_workers() -> None:
    readers = [Numbers(f"s{i}", 10) for i in range(4)]
    dataset = data(readers, Batcher(5), shuffle=20)
    loader = load(dataset, 2, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(keys(loader))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    assert_refused("epoch: got -1, want >= 0", lambda: dataset.set_epoch(-1))


# Loading


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_yield_every_token_once_and_reproducibly(corpus: list[Reader], method: str, tmp_path: Path) -> None:
    def run(workers: int, **options: object) -> list[Any]:
        return list(load(data(corpus, quarantine=tmp_path, **options), workers, method=method))

    alone, two = run(0), run(2)
    assert_equal(two, run(2, threads=3))
    first, second = (Counter(int(token) for batch in one for token in batch.input_ids) for one in (alone, two))
    assert first == second


def test_batches_built_through_a_client_match_those_from_a_builder(tmp_path: Path) -> None:
    settings, rows = tmp_path / "server.toml", records(0, 20)
    settings.write_text('[profiles.default.images]\nbackend = "pillow"\npatch_size = 4\nmin_pixels = 64\n')
    rows[5]["image"]["bytes"] = b"no image at all"
    rows[11]["image"]["bytes"] = rows[11]["image"]["bytes"][:300]
    readers = shards(write_parquet(tmp_path / "a.parquet", rows))

    def run(builder: Any, name: str, threads: int) -> tuple[list[Any], list[tuple[int, str]]]:
        preprocess = Preprocess(HFImages(), builder)
        batches = list(data(readers, preprocess=preprocess, quarantine=tmp_path / name, threads=threads))
        return batches, sorted((line["index"], line["error"]) for line in read_quarantine(tmp_path / name))

    with running(replace(load_config(settings), overload_ms=60_000)) as address, Client(address, timeout=300) as client:
        served = run(client, "served", 4)
    assert_equal(served, run(BUILDER, "alone", 0))
    assert [index for index, _ in served[1]] == [5, 11]


def test_a_dataset_without_collate_yields_groups() -> None:
    packs = list(data([Numbers("a", 9)], collate=None))
    assert sorted(example.key for pack in packs for example in pack.examples) == [f"a/{i}" for i in range(9)]
    groups = list(data([Numbers("a", 9)], Batcher(4), collate=None, shuffle=0))
    assert [[example.key[2:] for example in group] for group in groups] == [[*"0123"], [*"4567"], ["8"]]
    for readers in ([], [Numbers("a", 0)]):
        assert list(data(readers)) == list(data(readers, Batcher(2))) == []


# Resuming


BATCHINGS = {
    "packed": (Packer(200, buffer=5, split_text=True), PackedCollator()),
    "whole": (Packer(200, buffer=9), PackedCollator(multiple_of=4)),
    "bursts": (Packer(40, buffer=40, overlong="truncate"), PackedCollator()),
    "padded": (Batcher(3, max_tokens=150), PaddedCollator()),
}


@pytest.mark.parametrize("shuffle", [0, 6])
@pytest.mark.parametrize("kind", list(BATCHINGS))
def test_resuming_after_any_batch_is_exact(corpus: list[Reader], kind: str, shuffle: int, tmp_path: Path) -> None:
    batching, collate = BATCHINGS[kind]

    def new(threads: int = 0) -> BatchDataset:
        return data(corpus, batching, collate=collate, shuffle=shuffle, quarantine=tmp_path, threads=threads)

    whole, states = [], []
    dataset = new()
    dataset.set_epoch(3)
    batches = iter(dataset)
    states.append(json.dumps(dataset.state_dict()))
    for batch in batches:
        whole.append(batch)
        states.append(json.dumps(dataset.state_dict()))
    states.append(json.dumps(dataset.state_dict()))
    assert len(whole) > 5
    assert any(json.loads(state)["pending"] for state in states) == (kind != "padded")
    assert any(len(json.loads(state)["ready"]) > 1 for state in states) == (kind == "bursts")
    if kind == "packed":
        assert any(len(trace) == 6 for state in states for trace in json.loads(state)["pending"])
    assert max(map(len, states)) < 2000
    chosen = new()
    chosen.set_epoch(4)  # called before a StatefulDataLoader loads its state
    chosen.load_state_dict(json.loads(states[0]))
    assert chosen.epoch == 4
    for i, state in list(enumerate(states))[:: 3 if kind == "bursts" else 1]:
        again = new(threads=2 * (i % 2))
        again.load_state_dict(json.loads(state))
        assert again.epoch == 3
        again.set_epoch(4)  # takes effect at the next iteration
        assert json.loads(json.dumps(again.state_dict())) == json.loads(state)
        assert_equal(list(again), whole[i:])
        assert again.state_dict() == json.loads(states[-1])


def test_a_state_from_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = [Numbers("a", 40), Numbers("b", 40)]
    started = data(readers, shuffle=0)
    iterator = iter(started)
    while not (state := started.state_dict())["pending"]:
        next(iterator)
    for own, arguments, message in (
        (readers[1:], {}, "got shards 2 with checksum .*, want 1 with checksum"),
        (readers, {"seed": 8}, "got seed 7, want 8"),
        (readers, {"shuffle": 6}, "got shuffle 0, want 6"),
        (readers, {"rank": 1, "world_size": 2}, "got consumer 0 of 1 by auto, want 1 of 2 by auto"),
        (readers, {"batching": Packer(100)}, "got batching {.*'max_tokens': 200.*, want {.*'max_tokens': 100"),
    ):
        with pytest.raises(InvalidInputError, match=f"state: {message}"):
            data(own, **{"shuffle": 0, **arguments}).load_state_dict(state)
    others: list[tuple[Any, str]] = [({}, "version None"), (None, "NoneType")]
    for invalid, got in others:
        assert_refused(f"state: got {got}, want version 1 from state_dict", partial(started.load_state_dict, invalid))
    for key in state.keys() - {"version"}:
        without: Any = {name: value for name, value in state.items() if name != key}
        want = f"state: got no {key}, want all that state_dict returned"
        assert_refused(want, partial(started.load_state_dict, without))
    shrunk, again = data([Numbers("a", 2), Numbers("b", 2)], shuffle=0), data(readers, shuffle=0)
    shrunk.load_state_dict(state)
    with pytest.raises(InvalidInputError, match=r"a\[\d+\]: got no such record, want the shards that the state was"):
        iter(shrunk)
    again.load_state_dict(state)
    monkeypatch.setattr("mmpos.data.loader.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=2))
    assert_refused("state: got consumer 0 of 1 by auto, want 0 of 2 by auto", lambda: iter(again))


@pytest.mark.parametrize(
    ("shuffle", "left", "message"),
    [
        (0, 4, "a[4]: got no such record, want the shards that the state was saved with"),
        (0, 1, "a[4]: got no such record, want the shards that the state was saved with"),
        (3, 2, "a[2]: got no such record, want the shards that the state was saved with"),
        (8, 5, "a[0]: got 5 records from here on, of which 5 were read, want the shards"),
        (8, 0, "a[0]: got 0 records from here on, of which 5 were read, want the shards"),
    ],
)
def test_a_shard_that_ends_before_the_bookmark_is_refused(shuffle: int, left: int, message: str) -> None:
    started, resumed = (data([Numbers("a", count)], Batcher(5), shuffle=shuffle) for count in (9, left))
    next(iter(started))
    state = started.state_dict()
    assert state["pending"] == []
    resumed.load_state_dict(state)
    assert_refused(message, lambda: list(resumed))


def test_a_dataset_that_workers_read_has_no_state_of_its_own() -> None:
    dataset = data([Numbers("a", 9)])
    list(load(dataset, 1))
    with pytest.raises(UnsupportedError, match="state_dict: got a dataset that workers read, want the state_dict of"):
        dataset.state_dict()
    next(iter(dataset))
    assert dataset.state_dict()["counts"]["batches"] == 1


def test_examples_too_long_for_a_pack_are_counted_and_logged(
    corpus: list[Reader], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = data(corpus, Packer(60, overlong="drop"), quarantine=tmp_path)
    assert dataset.counts == {}
    kept, counts = keys(dataset), dataset.counts
    assert counts["dropped"] == counts["records"] - counts["skipped"] - len(kept) > 0
    assert f"examples too long for a pack: {dataset.counts['dropped']} dropped" in caplog.text


# Corrupt records


def test_skipped_records_are_counted_logged_and_quarantined(
    corpus: list[Reader], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RecordError, match=r"b.jsonl\[3\]: got no valid JSON in line 4 \(Invalid con"):
        list(data(corpus, shuffle=0))
    folder = tmp_path / "quarantine"
    dataset = data(corpus, quarantine=folder, shuffle=0)
    dataset.set_epoch(2)
    with caplog.at_level(logging.WARNING, "mmpos.data"):
        batches = list(dataset)
    lines = read_quarantine(folder)
    skipped = [(Path(line["source"]).name, line["index"], line["key"], line["epoch"]) for line in lines]
    lost = skipped[2][1]
    assert skipped == [("b.jsonl", 3, None, 2), ("b.jsonl", 7, "bad", 2), ("d.jsonl.gz", lost, None, 2)]
    assert [f"skipped a record: {line['error']}" for line in lines] == caplog.messages
    assert "b.jsonl[7]" in lines[1]["error"]
    assert "image: got columns" in lines[1]["error"]
    want = {str(i) for i in range(53)} - {"14", "18", *(str(i) for i in range(33 + lost, 44))}
    assert set(keys(batches)) == want
    counts = dataset.state_dict()["counts"]
    assert counts["skipped"] == 3
    assert counts["records"] == len(want) + 3
    assert counts["batches"] == counts["packs"] == len(batches)
    list(dataset)
    assert read_quarantine(folder) == lines, "once per epoch"
    dataset.set_epoch(3)
    list(dataset)
    assert [(line["index"], line["epoch"]) for line in read_quarantine(folder)] == [
        (line["index"], epoch) for epoch in (2, 3) for line in lines
    ]


class Photos(NumberedShard):
    """Shard of records with two texts and two images, some of which are broken."""

    def make(self, i: int) -> Any:
        images = [b"broken" if i % 3 == k else np.zeros((56, 56, 3), np.uint8) for k in (1, 2)]
        return {"id": f"{i}", "image": images, "text": [f"a{i}", "b"]}


def test_dropped_images_are_counted_and_quarantined_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def new(threads: int = 0) -> BatchDataset:
        options: dict[str, Any] = {"preprocess": DROPPING, "quarantine": tmp_path, "shuffle": 0, "threads": threads}
        return data([Photos("photos", 9)], Batcher(2), **options)

    dataset, states, batches = new(), [], []
    with caplog.at_level(logging.WARNING, "mmpos.data"):
        for batch in dataset:
            batches.append(batch)
            states.append(json.loads(json.dumps(dataset.state_dict())))
    lines = read_quarantine(tmp_path)
    assert [(line["index"], line["key"], line["dropped_images"]) for line in lines] == [
        (i, str(i), 1) for i in (1, 2, 4, 5, 7, 8)
    ]
    assert [f"dropped images: {line['error']}" for line in lines] == caplog.messages
    assert lines[0]["error"].startswith("1 (photos[1]): parts[0]: image: got ")
    assert dataset.counts["images_dropped"] == 6
    assert "skipped" not in dataset.counts
    assert keys(batches) == [str(i) for i in range(9)]
    for done, state in enumerate(states, 1):
        resumed = new(threads=2)
        resumed.load_state_dict(state)
        assert_equal(list(resumed), batches[done:])
        assert resumed.counts["images_dropped"] == 6
    assert read_quarantine(tmp_path) == lines


def test_image_policies_can_skip_documents_or_stop_the_run(tmp_path: Path) -> None:
    def run(policy: Any, on_error: str) -> list[str]:
        options: dict[str, Any] = {"quarantine": tmp_path / policy, "shuffle": 0, "on_error": on_error}
        preprocess = replace(PREPROCESS, on_image_error=policy)
        return keys(data([Photos("photos", 9)], Batcher(1), preprocess=preprocess, **options))

    assert run("skip-document", "raise") == ["0", "3", "6"]
    assert [line["index"] for line in read_quarantine(tmp_path / "skip-document")] == [1, 2, 4, 5, 7, 8]
    with pytest.raises(RecordError, match=r"^1 \(photos\[1\]\): parts\[0\]: image: got "):
        run("raise", "skip")


def half(record: Any, location: Location) -> Any:
    """Make an example from every other record, and refuse the others for one of two reasons."""
    if location.index % 2:
        want = "an image" * (location.index > 9)
        raise RecordError(f"{record['id']} ({location}): got {record['text']!r}, want {want}")
    return PREPROCESS({**record, "text": "x"}, location)


def test_too_many_skipped_records_stop_a_run_and_a_resumed_run_at_the_same_record(tmp_path: Path) -> None:
    def new(size: int, **options: Any) -> BatchDataset:
        options |= {"shuffle": 0, "quarantine": tmp_path / "q", "preprocess": half, "collate": None}
        return data([Numbers("a", size)], Batcher(1), **options)

    def run(dataset: BatchDataset, message: str) -> list[str]:
        batches: list[Any] = []
        with pytest.raises(InvalidInputError, match=f"^max_skipped: got {re.escape(message)}"):
            batches.extend(dataset)  # keeps the batches before the error
        return [group[0].key for group in batches]

    started, resumed = new(240), new(240)
    first = [group[0].key for group in islice(started, 30)]
    want = "101 skipped of the first 202 records, want at most 100 of 1,000: "
    reasons = ("96 records such as a/11 (a[11]): got 'xxxxxxxxxxxx', want an image", "5 records such as a/1 (a[1]): ")
    whole = run(new(240), want + "; ".join(reasons))
    assert whole == [f"a/{i}" for i in range(0, 202, 2)]
    resumed.load_state_dict(json.loads(json.dumps(started.state_dict())))
    assert first + run(resumed, f"{want}72 records such as a/59 (a[59]): ") == whole
    # With fewer than 1,000 records, the share is checked at the end, and ten may always be skipped.
    run(new(22), "11 skipped of the first 22 records, want at most 10: ")
    assert len(list(new(21))) == 11
    assert len(list(new(240, max_skipped=0.5))) == 120


def test_records_after_the_first_thousand_may_all_be_skipped() -> None:
    quarantine = Quarantine("skip")
    for i in range(2000):
        quarantine.read()
        if i % 10 == 9 or i >= 1000:
            quarantine.refuse(Location("a", i), {}, RecordError(f"a[{i}]: broken"))
    quarantine.end()
    quarantine = Quarantine("skip", records=999, skipped=100)
    quarantine.read()
    want = "max_skipped: got 101 skipped of the first 1,000 records, want at most 100 of 1,000: 1 record such as b[999]"
    assert_refused(want, lambda: quarantine.refuse(Location("b", 999), {}, RecordError("b[999]")))


def test_an_example_too_long_for_a_pack_is_a_record_error(tmp_path: Path) -> None:
    for batching in (Packer(20), Batcher(3, max_tokens=20)):
        with pytest.raises(RecordError, match=r"a\[20\]: a/20: tokens: got 21, want at most 20"):
            list(data([Numbers("a", 30)], batching, shuffle=0))
        folder = tmp_path / type(batching).__name__
        dataset = data([Numbers("a", 30)], batching, quarantine=folder)
        assert sorted(keys(dataset)) == sorted(f"a/{i}" for i in range(20))
        assert dataset.state_dict()["counts"]["skipped"] == 10
        assert len(read_quarantine(folder)) == 10


def test_a_full_disk_leaves_only_complete_lines_in_the_quarantine(
    corpus: list[Reader], tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    def skipped(folder: Path) -> list[bytes]:
        list(data(corpus, quarantine=folder, shuffle=0))
        return (folder / "rank0-worker0.jsonl").read_bytes().splitlines(keepends=True)

    lines = skipped(tmp_path / "whole")
    assert len(lines) == 3
    with full_disk(len(lines[0]) + 20), pytest.raises(OSError, match="File too large") as raised:
        skipped(tmp_path / "full")
    path = tmp_path / "full" / "rank0-worker0.jsonl"
    assert raised.value.filename == str(path)
    assert path.read_bytes() == lines[0]
    assert skipped(tmp_path / "full") == lines


def test_each_worker_writes_its_own_quarantine_file(corpus: list[Reader], tmp_path: Path) -> None:
    for rank in (0, 1):
        dataset = data(corpus, quarantine=tmp_path, rank=rank, world_size=2, split="records", shuffle=0)
        list(load(dataset, 2))
    sources = [reader.source for reader in corpus]
    lines = [(path.name, json.loads(line)) for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == len(read_quarantine(tmp_path)) == 3
    for name, line in lines:
        consumer = (line["index"] + sources.index(line["source"])) % 4
        assert name == f"rank{consumer % 2}-worker{consumer // 2}.jsonl"
    list(data([Numbers("a", 2)], quarantine=tmp_path / "clean"))
    assert read_quarantine(tmp_path / "clean") == []
    want = f"folder: got '{tmp_path}/none', want the existing folder of a run with quarantine=…"
    assert_refused(want, lambda: read_quarantine(tmp_path / "none"))


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (KeyError("a mistake"), KeyError, "a mistake"),
        (LimitExceededError("got 2 tokens, want 1"), RecordError, r"^a\[4\]: got 2 tokens, want 1$"),
        ("x", InvalidInputError, r"preprocess: got str for a\[4\], want an Example"),
    ],
)
@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_in_the_callable_is_raised_and_names_the_record(
    threads: int, result: Any, error: type[Exception], message: str
) -> None:
    def fourth(record: Any, location: Location) -> Any:
        if location.index != 4:
            return PREPROCESS(record, location)
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(error, match=message) as raised:
        list(data([Numbers("a", 9)], preprocess=fourth, shuffle=0, threads=threads))
    assert error is not KeyError or set(raised.value.__notes__) == {"raised for the record a[4]"}


FULL = Packer(9)
FULL.add(PREPROCESS({"id": "a", "image": None, "text": "x"}, Location("a", 0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": ["a.tar"]}, r"shards\[0\]: got str, want a Reader, as returned by mmpos.data.shards\(paths\)"),
        ({"on_error": "skip"}, "quarantine: got None, want a path"),
        ({"preprocess": DROPPING}, "quarantine: got None, want a path; images are never dropped silently"),
        ({"on_error": "ignore"}, "on_error: got 'ignore', want one of 'raise', 'skip'"),
        ({"max_skipped": 10}, "max_skipped: got 10, want a share from 0 to 1"),
        ({"max_skipped": -0.1}, "max_skipped: got -0.1, want a finite number >= 0"),
        ({"seed": -1}, "seed: got -1, want >= 0"),
        ({"shuffle": 2.5}, "shuffle: got 2.5, want an integer"),
        ({"threads": -1}, "threads: got -1, want >= 0"),
        ({"split": "rows"}, "split: got 'rows', want one of"),
        ({"rank": 1}, "rank: got rank 1 and world_size None, want both or neither"),
        ({"rank": 2, "world_size": 2}, "rank: got 2, want <= 1"),
        ({"worker": -1}, "worker: got -1, want >= 0"),
        ({"num_workers": 0}, "num_workers: got 0, want >= 1"),
        ({"by": "rows"}, "by: got 'rows', want one of 'auto', 'shards', 'records'"),
        ({"batching": FULL}, "batching: got 1 pending examples, want an empty one"),
        ({"preprocess": None}, "preprocess: got NoneType, want a Preprocess, or get_example"),
        ({"batching": len}, "batching: got builtin_function_or_method, want a Packer or a Batcher"),
    ],
)
def test_arguments_are_checked(options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Split(**options) if options.keys() & {"by", "worker", "num_workers"} else data(**({"shards": []} | options))


# Ranks


def test_rank_and_world_size_are_read_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    def new() -> BatchDataset:
        return data([Numbers("a", 9)], Batcher(2))

    early, seen = new(), []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        seen.append(keys(new()))
    assert sorted(seen[0] + seen[1]) == [f"a/{i}" for i in range(9)]
    assert {len(one) for one in seen} == {4, 5}
    assert_refused("rank: got a dataset created before torch", lambda: list(early))


# Functions per call


def test_building_and_batching_call_few_functions() -> None:
    grid, builder, packer, collate = Grid(2, 3), SequenceBuilder(), Packer(200), PackedCollator()
    assert functions_called(lambda: builder.build(["A photo of ", grid, " at dusk"])) <= 27
    split, (row,) = Split(), records(0, 1)

    def batch() -> None:
        (packed,) = BatchStream([Feed((One("a", 1),), PREPROCESS, QUARANTINE, split)], packer, collate)
        assert len(packed.grid_thw) == 1

    class One(NumberedShard):
        def make(self, i: int) -> Any:
            return row

    assert functions_called(batch) <= 91


# Memory

_MEMORY = """
import os, re, sys
from pathlib import Path
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the default pool frees memory later, at times of its own
from mmpos import ImageProcessor, SequenceBuilder, data
images = ImageProcessor("pillow", patch_size=4, min_pixels=64)
preprocess = data.Preprocess(getattr(data, sys.argv[1])(), SequenceBuilder(images=images))
dataset = data.BatchDataset(
    data.shards(sys.argv[2:]), preprocess, data.Packer(1000, buffer=32), data.PackedCollator(), shuffle=64
)
peaks = {}
for batch in dataset:  # ru_maxrss would include the peak of the process that started this one
    peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
    peaks[dataset.state_dict()["counts"]["records"] // 1000] = peak
print(peaks[0], peaks[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "suffix", "write"),
    [("HFImages", "parquet", partial(write_parquet, group=1750)), ("HFImages", "jsonl", write_jsonl),
     ("Pairs", "tar", write_tar)],
)  # fmt: skip
def test_memory_use_is_constant_over_thousands_of_records(
    kind: str, suffix: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    parts = {"a": records(0, 3500), "b": records(3500, 5000)}
    paths = [write(tmp_path / f"{name}.{suffix}", part) for name, part in parts.items()]
    early, late = map(int, subprocess.check_output([sys.executable, "-c", _MEMORY, kind, *paths], timeout=300).split())
    assert late - early < 12 * 1024, "KiB"
