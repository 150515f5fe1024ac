"""Assertions of torchdata and webdataset about loaders and archives, made of ours, with both of them installed.

torchdata 0.11 at 088e4347, test/stateful_dataloader/test_state_dict.py: snapshots at any step, at the begin and at the
    end, as JSON, in the same loader and in a new one, and of workers that live on. Those of map-style datasets,
    samplers and the number of calls are about torchdata alone.
webdataset 1.0 at e0953f9b, tests/test_writer.py, test_loaders.py and test_compat.py: records of archives, its writers
    and splitting. What it asserts of handlers, shuffling and batches is in test_data_loader.py and test_data_damage.py;
    URLs, pipes, decoders and resampling have no counterpart here.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from peer_cases import meeting
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset.tariterators import group_by_keys, tar_file_expander

from mmpos import SequenceBuilder
from mmpos.data import BatchDataset, Batcher, Document, Location, Packer, Pairs, Piece, Preprocess, RecordError, shards
from mmpos.data.packing import Pack
from mmpos.data.readers import TarReader
from mmpos.data.stream import Split

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]


@dataclass(frozen=True)
class Lines:
    """A shard of short texts."""

    source: str
    size: int

    def records(self, start: int = 0, step: int = 1) -> Iterator[tuple[Location, Any]]:
        for i in range(start, self.size, step):
            yield Location(self.source, i), {"key": f"{self.source}/{i}", "text": "x" * (i % 7 + 1)}

    def count(self) -> int | None:
        return self.size


def document(record: Any, location: Location) -> Document:
    return Document(record["key"], (Piece(record["text"]),))


def listed(group: Any) -> list[tuple[str, int]]:
    """The content of a group: keys, and tokens of each."""
    examples = group.examples if isinstance(group, Pack) else group
    return [(example.key, len(example.labels)) for example in examples]


CORPUS = [Lines("a", 0), Lines("b", 100), Lines("c", 37)]
"""Theirs: shards of none, 100 and 37."""

BATCHINGS: dict[str, Batcher | Packer] = {
    "one": Batcher(1),
    "seven": Batcher(7),
    "packs": Packer(24, buffer=5, split_text=True),
}


def dataset(batching: str = "one", shuffle: int = 0, **options: object) -> BatchDataset:
    given: dict[str, Any] = {"preprocess": Preprocess(document, SequenceBuilder()), "shards": CORPUS} | options
    return BatchDataset(batching=BATCHINGS[batching], collate=listed, seed=3, shuffle=shuffle, **given)


def loader(data: BatchDataset, workers: int = 0, every: int = 1, persistent: bool = False, **options: object) -> Any:
    context = "fork" if workers else None
    return StatefulDataLoader(
        data, batch_size=None, num_workers=workers, multiprocessing_context=context, snapshot_every_n_steps=every,
        persistent_workers=persistent, **options,
    )  # fmt: skip


WORKERS = ((0, False), (2, False), (3, True))
"""Workers, and whether they outlive an epoch."""


# torchdata


@pytest.mark.parametrize(
    ("workers", "batching", "interrupt", "every", "shuffle", "carried"),
    meeting(
        {
            "workers": WORKERS,
            "batching": tuple(BATCHINGS),
            "interrupt": (0, 1, 10),
            "every": (1, 2, 5),
            "shuffle": (0, 9),
            "carried": (False, True),
        }
    ),
)
def test_a_new_loader_goes_on_from_a_snapshot(
    workers: tuple[int, bool], batching: str, interrupt: int, every: int, shuffle: int, carried: bool
) -> None:
    count, persistent = workers
    begun = loader(dataset(batching, shuffle), count, every, persistent)
    batches = iter(begun)
    for _ in range(interrupt):
        next(batches)
    state = begun.state_dict()
    rest = list(batches)
    assert rest
    resumed = loader(dataset(batching, shuffle), count, every, persistent)
    resumed.load_state_dict(json.loads(json.dumps(state)) if carried else state)
    assert list(resumed) == rest


@pytest.mark.parametrize(("workers", "batching"), list(zip(WORKERS, BATCHINGS, strict=True)))
def test_snapshots_of_one_loader_at_its_begin_within_and_at_its_end(workers: tuple[int, bool], batching: str) -> None:
    count, persistent = workers
    one = loader(dataset(batching, 9), count, 10, persistent)
    before = one.state_dict()
    assert len(before.get("_snapshot", {}).get("_worker_snapshots", ())) == count
    batches = iter(one)
    zero = one.state_dict()
    head = list(islice(batches, 4))
    four = one.state_dict()
    kept = deepcopy(four)
    whole = head + list(batches)
    end = one.state_dict()
    assert four == kept
    assert end != four
    for state, want in ((zero, whole), (four, whole[4:]), (end, whole), (before, whole)):
        one.load_state_dict(state)
        assert list(one) == want
    assert list(one) == whole  # and the next epoch
    used = loader(dataset(batching, 9), count, 10, persistent)
    list(islice(iter(used), 2))
    used.load_state_dict(end)
    assert list(used) == whole


@pytest.mark.parametrize(("every", "interrupt"), [(1, 11), (17, 19)])
def test_a_snapshot_soon_after_another_one(every: int, interrupt: int) -> None:
    """Before every worker has given a batch again."""
    one = loader(dataset("seven", 9, shards=[Lines(name, 50) for name in "abcd"]), 4, every, True)
    batches = iter(one)
    list(islice(batches, interrupt))
    state = one.state_dict()
    _, _, *rest = batches
    one.load_state_dict(state)
    batches = iter(one)
    list(islice(batches, 2))
    again = one.state_dict()
    other = loader(dataset("seven", 9, shards=[Lines(name, 50) for name in "abcd"]), 4, 1, True)
    other.load_state_dict(again)
    assert list(other) == rest


@pytest.mark.parametrize(
    ("persistent", "interrupt", "asked_before"),
    meeting({"persistent": (False, True), "interrupt": (2, 9), "asked_before": (False, True)}),
)
def test_a_state_may_be_loaded_before_or_after_one_was_asked_for(
    persistent: bool, interrupt: int, asked_before: bool
) -> None:
    one = loader(dataset(shuffle=9), 2, persistent=persistent)
    batches = iter(one)
    list(islice(batches, interrupt))
    state = one.state_dict()
    rest = list(batches)
    other = loader(dataset(shuffle=9), 2, persistent=persistent)
    if asked_before:
        assert len(other.state_dict()["_snapshot"]["_worker_snapshots"]) == 2
    other.load_state_dict(state)
    if not asked_before:
        assert other.state_dict() == state
    assert list(other) == rest


@pytest.mark.parametrize(("made", "loaded"), [(0, 3), (3, 0)])
def test_a_state_of_other_workers_is_refused(made: int, loaded: int) -> None:
    one = loader(dataset(), made)
    iter(one)
    other = loader(dataset(), loaded)
    other.load_state_dict(one.state_dict())
    with pytest.raises(AssertionError):  # torchdata's
        iter(other)


def test_torchs_own_loader_gives_the_same() -> None:
    plain = DataLoader(dataset("packs", 9), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert list(loader(dataset("packs", 9), 2)) == list(plain)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_four_epochs_are_two_and_two_after_a_resume(workers: int, chosen: bool) -> None:
    def read(one: Any, data: BatchDataset, epochs: range) -> list[list[Any]]:
        found = []
        for epoch in epochs:
            if chosen:
                data.set_epoch(epoch)
            found.append(list(one))
        return found

    data, later, straight = (dataset("seven", 9) for _ in range(3))
    first, second = loader(data, workers), loader(later, workers)
    epochs = read(first, data, range(2))
    second.load_state_dict(first.state_dict())
    epochs += read(second, later, range(2, 4))
    assert epochs == read(loader(straight, workers), straight, range(4))
    assert len({str(epoch) for epoch in epochs}) == (4 if chosen else 1)


@pytest.mark.parametrize(("workers", "batching"), [(0, "one"), (0, "packs"), (2, "seven"), (2, "packs")])
def test_the_last_state_of_an_epoch_is_not_the_first_of_the_next(workers: int, batching: str) -> None:
    one = loader(dataset(batching), workers)
    whole = []
    for batch in one:
        whole.append(batch)
        inside = one.state_dict()
    for state, want in ((inside, []), (one.state_dict(), whole)):
        other = loader(dataset(batching), workers)
        other.load_state_dict(state)
        assert list(other) == want


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_holds_each_place_once(workers: int) -> None:
    one = loader(dataset(), workers)
    batches = iter(one)
    list(islice(batches, 3))
    state = one.state_dict()
    for part in state["_snapshot"]["_worker_snapshots"].values() if workers else [state]:
        held = part["dataset_state"], (part["fetcher_state"] or {}).get("dataset_iter_state")
        assert sum(one is not None for one in held) == 1


# webdataset


def theirs(path: Path) -> Iterator[dict[str, Any]]:
    """The records of an archive as webdataset reads it."""
    with path.open("rb") as stream:
        yield from group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}]))


def members_of(draw: random.Random) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Files in groups of a key, and what else an archive may hold: folders, links, names that belong to no record."""
    for i in range(draw.randint(1, 12)):
        folder = draw.choice(["", "", "d/", "d.e/f/", "./", "é/"])
        key = draw.choice([f"{i:04}", f"x_{i}", "n" * 120 + str(i), f"Größe{i}", f"{i // 2}"])
        extensions = ["jpg", "txt", "json", "seg.png", "JPG", "tar.gz", "cls", "0", "a b"]
        for extension in draw.sample(extensions, draw.randint(1, 4)):
            yield (
                tarfile.TarInfo(f"{folder}{key}.{extension}"),
                draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])),
            )
        odd = draw.choice(
            ["", "", "noextension", ".hidden", "__skip__/a.txt", "__meta__.json", "d/.b.txt", "d/__x__.txt"]
        )
        if odd:
            yield tarfile.TarInfo(odd), b"odd"
        if draw.random() < 0.3:
            other = tarfile.TarInfo(f"{folder}{key}.{draw.choice(['link', 'dir', 'fifo'])}")
            other.type = draw.choice([tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE])
            other.linkname = "0000.jpg" if other.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            yield other, b""


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_records_of_random_archives_are_those_of_webdataset(format_: int, compression: str, tmp_path: Path) -> None:
    draw = random.Random(f"{format_} {compression}")
    for round_ in range(20):
        path = tmp_path / f"{round_}.tar"
        with tarfile.open(path, f"w:{compression}", format=format_) as tar:  # type: ignore[call-overload]
            for member, data in members_of(draw):
                member.size = len(data)
                if format_ != tarfile.USTAR_FORMAT or len(member.name) <= 100:
                    tar.addfile(member, io.BytesIO(data))
        want: list[dict[str, Any]] = []
        twice = False
        try:
            want.extend(theirs(path))
        except ValueError as error:
            twice = "duplicate file name" in str(error)
            assert twice
        found = [raw for _, raw in TarReader(str(path)).records()]
        # A record with two files of one name ends their reading; ours has an error in its place, and goes on.
        assert found[: len(want)] == want
        assert len(found) == len(want) or twice
        assert isinstance(found[len(want)], RecordError) if twice else True
        for start in range(3):
            part = [raw for _, raw in TarReader(str(path)).records(start, 3)]
            assert list(map(str, part)) == list(map(str, found[start::3]))


def sample(i: int) -> dict[str, Any]:
    """A record as programs give it to webdataset's writer."""
    return {
        "__key__": f"{i:03}",
        "txt": f"caption {i}",
        "cls": i % 3,
        "json": {"caption": f"from json {i}"},
        "npy": np.arange(i),
        "png": np.full((4, 6, 3), i / 50, np.float32),
        "tar.gz": bytes(i),
    }


def written(folder: Path, count: int = 50, per_shard: int = 5, compress: str = "") -> list[Path]:
    with webdataset.ShardWriter(f"{folder}/%02d.tar{compress}", maxcount=per_shard, verbose=0) as sink:
        for i in range(count):
            sink.write(sample(i))
    return sorted(folder.glob(f"*.tar{compress}"))


@pytest.mark.parametrize("compress", ["", ".gz"])
def test_what_its_writers_write_is_read(compress: str, tmp_path: Path) -> None:
    paths = written(tmp_path, compress=compress)
    readers = shards(f"{tmp_path}/*.tar{compress}")
    assert [reader.source for reader in readers] == list(map(str, paths))
    assert len(paths) == 10
    found: list[Any] = [raw for reader in readers for _, raw in reader.records()]
    assert found == [record for path in paths for record in theirs(path)]
    assert [raw["__key__"] for raw in found] == [f"{i:03}" for i in range(50)]
    for i, raw in enumerate(found):
        assert set(raw) == {*sample(i), "__url__"}
        assert (raw["txt"], raw["cls"], json.loads(raw["json"])) == (
            f"caption {i}".encode(),
            str(i % 3).encode(),
            sample(i)["json"],
        )
        assert np.array_equal(np.load(io.BytesIO(raw["npy"])), np.arange(i))
        made = Pairs()(raw, Location(raw["__url__"], i))
        assert made.parts == [raw["png"], f"caption {i}"]
        del raw["txt"]
        assert Pairs()(raw, Location(raw["__url__"], i)).parts[1] == f"from json {i}"


@pytest.mark.parametrize(("world", "workers"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (5, 2)])
def test_shards_are_split_as_by_node_and_by_worker(world: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"{i}.tar" for i in range(11)]
    seen = []
    for rank in range(world):
        for worker in range(workers):
            numbers = {"RANK": rank, "WORLD_SIZE": world, "WORKER": worker, "NUM_WORKERS": workers}
            for name, number in numbers.items():
                monkeypatch.setenv(name, str(number))
            pipeline = webdataset.DataPipeline(
                webdataset.SimpleShardList(urls), webdataset.split_by_node, webdataset.split_by_worker
            )
            want = [found["url"] for found in pipeline]
            portions = Split(rank, world, worker, workers).portions(len(urls))
            assert [urls[portion.shard] for portion in portions] == want
            assert {(portion.first, portion.step) for portion in portions} == {(0, 1)}
            seen += want
    assert sorted(seen) == sorted(urls)
