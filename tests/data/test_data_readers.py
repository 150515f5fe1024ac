"""Readers: every format and any start yield the same records, with errors in place of broken records."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import datasets
import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_corpus import Record, caption, records, write_jsonl, write_parquet, write_tar
from webdataset.tariterators import group_by_keys, tar_file_expander

from mmpos.data.examples import RecordError
from mmpos.data.readers import (
    DatasetReader,
    JsonlReader,
    LanceReader,
    ParquetReader,
    Reader,
    TarReader,
    dataset_shards,
    shards,
    split_shards,
)
from mmpos.data.readers.slices import SliceReader
from mmpos.data.samples import SampleReader
from mmpos.errors import InvalidInputError

ROWS = records(0, 21)
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar", "tar.gz", "lance", "dataset", "iterable"]


def make(kind: str, folder: Path, rows: list[Record] = ROWS) -> Reader:
    path = folder / f"a.{kind}"
    if kind == "jsonl.zst":
        write_jsonl(path, rows, lambda path, mode: pa.CompressedOutputStream(pa.OSFile(str(path), mode), "zstd"))
    elif kind.startswith("jsonl"):
        write_jsonl(path, rows)
    elif kind == "parquet":
        write_parquet(path, rows)
    elif kind.startswith("tar"):
        write_tar(path, rows)
    elif kind == "lance":
        lance.write_dataset(pa.Table.from_pylist(rows, FEATURES.arrow_schema), path)
    else:
        dataset = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in FEATURES}, FEATURES)
        return DatasetReader(dataset if kind == "dataset" else dataset.to_iterable_dataset(num_shards=3), "photos")
    (reader,) = shards(path)
    return reader


FEATURES = datasets.Features(
    {"id": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
)


def read(reader: Reader, *args: int) -> list[tuple[int, str]]:
    """Return each record's index, and its id or error message."""
    seen = []
    for location, raw in reader.records(*args):
        assert location.source == reader.source
        if isinstance(raw, RecordError):
            seen.append((location.index, str(raw).replace(str(Path(reader.source).parent) + "/", "")))
        else:
            seen.append((location.index, str(raw.get("id", raw.get("__key__")))))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_start_and_step_select_records(kind: str, tmp_path: Path) -> None:
    reader = make(kind, tmp_path)
    for start, step in [(0, 1), (1, 1), (0, 4), (7, 5), (8, 1), (20, 3), (21, 1), (99, 2)]:
        assert read(reader, start, step) == [(i, str(i)) for i in range(start, 21, step)]
    assert read(reader) == read(pickle.loads(pickle.dumps(reader)))
    assert reader.count() == (21 if kind in ("parquet", "lance", "dataset") else None)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("iterable", "lance")])
def test_an_empty_shard_is_not_an_error(kind: str, tmp_path: Path) -> None:
    assert read(make(kind, tmp_path, [])) == []


@pytest.mark.parametrize("kind", ["parquet", "lance", "dataset", "iterable"])
def test_images_are_left_undecoded(kind: str, tmp_path: Path) -> None:
    assert [raw for _, raw in make(kind, tmp_path).records()] == ROWS


def test_lance_fragments_are_shards_of_the_opened_version(tmp_path: Path) -> None:
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"id": list("abcdefg")}), path, max_rows_per_file=3)
    lance.dataset(path).delete("id = 'b'")
    readers = shards(f"{tmp_path}/*.lance")
    lance.write_dataset(pa.table({"id": ["h"]}), path, mode="append")
    lance.dataset(path).delete("id = 'd'")
    assert [reader.source for reader in readers] == [f"{path}-{i:05}" for i in range(3)]
    assert [read(reader) for reader in readers] == [[(0, "a"), (1, "c")], [(0, "d"), (1, "e"), (2, "f")], [(0, "g")]]
    assert [read(reader) for reader in shards([f"{path}/"])][1] == [(0, "e"), (1, "f")]
    shutil.rmtree(path / "_versions")
    with pytest.raises(InvalidInputError, match="want a Lance dataset with version 2"):
        read(readers[0])


def test_rows_in_a_damaged_fragment_become_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"sample_id": list("aab"), "id": list("012")}), path)
    (file,) = (path / "data").iterdir()
    (reader,) = shards(path)
    file.write_bytes(file.read_bytes()[:100])
    assert [(index, "want a readable record" in message) for index, message in read(reader, 1)] == [
        (1, True), (2, True),
    ]  # fmt: skip
    ((index, message),) = read(SampleReader(cast(LanceReader, reader)))
    assert index == 0
    assert message.endswith("all later records are lost")


def test_tar_records_match_those_read_by_webdataset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    names = ["b/x.y.JPG", "b/x.json", "__skip__/z.txt", "no_extension", "b/z.txt", "c.txt", "b/x.txt"]
    with tarfile.open(path, "w") as tar:
        tar.addfile(_member("b", 0, tarfile.DIRTYPE))
        for name in names:
            tar.addfile(_member(name, 5), io.BytesIO(name[:5].encode()))
    with path.open("rb") as stream:
        theirs = list(group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}])))
    assert [raw for _, raw in TarReader(str(path)).records()] == theirs
    assert [record["__key__"] for record in theirs] == ["b/x", "b/z", "c", "b/x"]


def _member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


SPLIT = ["jsonl", "parquet", "tar"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100, 2000, 10**6])
def test_slices_together_yield_the_records_of_the_file_in_order(kind: str, size: int, tmp_path: Path) -> None:
    reader = make(kind, tmp_path)
    if kind == "parquet":
        pq.write_table(pq.read_table(reader.source), reader.source, row_group_size=4)
    slices = split_shards([reader], size)
    if kind not in SPLIT or size == 10**6:
        assert slices == [reader]
        return
    assert len(slices) > 1
    assert size > 1 or len(slices) == (6 if kind == "parquet" else 21)
    assert slices[1].source == f"{tmp_path}/a-00001-of-{len(slices):05}.{kind}"
    for start, step in [(0, 1), (0, 4), (7, 5), (20, 3), (21, 1)]:
        copies = pickle.loads(pickle.dumps(slices))
        assert [record for part in copies for record in part.records(start, step)] == list(reader.records(start, step))
    counts = [part.count() for part in slices]
    assert counts[-1] is None
    assert sum(filter(None, counts)) == next(iter(slices[-1].records()))[0].index


def test_json_lines_slices_end_at_line_ends_and_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 0}\n\n{"id": 2}\r\n\n\n[]\n' + b'{"id": "' + b"x" * 3000 + b'"}\n{"id": 7}\n\n{"id": 9}')
    want = list(map(repr, JsonlReader(str(path)).records()))
    assert [index for index, _ in read(JsonlReader(str(path)))] == [0, 2, 5, 6, 7, 9]
    for size in (1, 2, 10, 11, 12, 40, 3000):
        slices = split_shards(shards(path), size)
        assert [repr(record) for part in slices for record in part.records()] == want
        offsets = [part.begin.offset for part in slices if isinstance(part, SliceReader)]
        assert all(after >= size + before for before, after in pairwise(offsets))


def test_slices_of_a_tar_file_find_the_same_damage_as_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for i in range(9):
            for extension in ("txt", "json"):
                tar.addfile(_member(f"{'folder/' * 30}{i}.{extension}", 700), io.BytesIO(bytes(700)))
        tar.addfile(_member("9.txt", 5), io.BytesIO(b"12345"))
        tar.addfile(_member("9.TXT", 5), io.BytesIO(b"12345"))
    data = path.read_bytes()
    broken = bytearray(data)
    broken[len(data) // 2 :: 512] = bytes(len(broken[len(data) // 2 :: 512]))
    for content in (data, data[:-3000], data[: len(data) // 3], bytes(broken), data + data):
        path.write_bytes(content)
        want = [(str(location), repr(raw)) for location, raw in TarReader(str(path)).records()]
        slices = split_shards(shards(path), 3000)
        assert len(slices) > 1
        assert [(str(location), repr(raw)) for part in slices for location, raw in part.records()] == want


def test_a_tar_file_with_global_headers_is_not_split(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "ours"}) as tar:
        for i in range(9):
            tar.addfile(_member(f"{i}.txt", 700), io.BytesIO(bytes(700)))
    assert split_shards(shards(path), 1000) == shards(path)
    with pytest.raises(InvalidInputError, match="slice_bytes: got 0, want >= 1"):
        split_shards(shards(path), 0)


def test_reading_continues_after_an_invalid_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = b"[" * 200_000
    lines = [b'{"id": 0}', b'{"id": ', b"", b"[1]", b'{"id": "\xff"}', deep, b'{"id": 6}']
    path.write_bytes(b"\n".join(lines))
    seen = read(JsonlReader(str(path)))
    assert [index for index, _ in seen] == [0, 1, 3, 4, 5, 6]
    assert seen[0][1] == "0"
    assert seen[1][1].startswith("a.jsonl[1]: got Expecting value: line 2 column 1")
    assert seen[2][1] == "a.jsonl[3]: got list, want a JSON object"
    assert seen[3][1].startswith("a.jsonl[4]: got 'utf-8' codec can't decode byte 0xff")
    assert seen[4][1].startswith("a.jsonl[5]: got maximum recursion depth exceeded")
    assert seen[5][1] == "6"
    assert read(JsonlReader(str(path)), 3, 3) == [seen[2], seen[5]]


def test_reading_continues_after_a_record_with_duplicate_names(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("0.txt", "0.TXT", "1.txt"):
            tar.addfile(_member(name, 1), io.BytesIO(b"x"))
    assert read(TarReader(str(path))) == [(0, "a.tar[0]: txt: got two files, want one"), (1, "1")]


def test_rows_on_a_damaged_page_become_errors(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    raw = bytearray(path.read_bytes())
    at = raw.index(caption(12).encode())
    raw[at : at + 4] = b"????"
    path.write_bytes(raw)
    seen = read(ParquetReader(str(path)))
    assert [text for _, text in seen[:8] + seen[16:]] == [str(i) for i in (*range(8), *range(16, 21))]
    assert [index for index, _ in seen] == list(range(21))
    for index, message in seen[8:16]:
        assert message.startswith(f"a.parquet[{index}]: got ")
        assert "CRC" in message
    assert read(ParquetReader(str(path)), 10, 4) == seen[10::4]


def test_a_file_that_is_not_parquet_becomes_a_single_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but not for long")
    ((index, message),) = read(ParquetReader(str(path)))
    assert index == 0
    assert message.startswith("a.parquet[0]: got ")
    assert message.endswith("; all later records are lost")
    assert read(ParquetReader(str(path)), 1) == []
    assert ParquetReader(str(path)).count() is None


def test_invalid_unicode_causes_an_error_only_for_its_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    table = pa.table({"id": pa.array([b"0", b"\xff", b"2"]).view(pa.string())})
    pa.parquet.write_table(table, path)
    (first, (_, message), last) = read(ParquetReader(str(path)))
    assert (first, last) == ((0, "0"), (2, "2"))
    assert message.startswith("a.parquet[1]: got 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tar"])
def test_a_missing_file_is_not_a_record_error(kind: str, tmp_path: Path) -> None:
    reader = make(kind, tmp_path)
    os.unlink(reader.source)
    with pytest.raises(FileNotFoundError):
        list(reader.records())


def test_datasets_are_split_into_shards_without_loss(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS, features=FEATURES)
    stream = dataset.to_iterable_dataset(num_shards=4)
    for readers, number in ((dataset_shards(dataset, 5, "photos"), 5), (dataset_shards(stream), 4)):
        assert len(readers) == number
        ids = [text for reader in readers for _, text in read(reader)]
        assert sorted(ids, key=int) == [str(i) for i in range(21)]
    assert [shard.source for shard in dataset_shards(dataset, 2, "photos")] == [
        "photos-00000-of-00002",
        "photos-00001-of-00002",
    ]
    assert dataset_shards(dataset)[0].count() == 21
    with pytest.raises(InvalidInputError, match="dataset: got list, want a Dataset or an IterableDataset"):
        DatasetReader([1])


class _InWorker(torch.utils.data.IterableDataset[Any]):
    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __iter__(self) -> Any:
        return iter(read(self.reader))


def test_every_worker_reads_all_rows_of_an_iterable_dataset(tmp_path: Path) -> None:
    data = _InWorker(make("iterable", tmp_path))
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(loader) == sorted([[i, str(i)] for i in range(21)] * 2)


def test_readers_are_chosen_by_suffix_and_keep_the_order_of_paths(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tgz", "c.jsonl", "d.ndjson", "e.jsonl.gz", "f.parquet", "g[1].tar"):
        (tmp_path / name).touch()
    (tmp_path / "folder.tar").mkdir()
    readers = shards([tmp_path / "c.jsonl", f"{tmp_path}/*.t*", tmp_path / "f.parquet", f"{tmp_path}/[de].*"])
    assert [(type(reader).__name__, os.path.basename(reader.source)) for reader in readers] == [
        ("JsonlReader", "c.jsonl"),
        ("TarReader", "a.tgz"),
        ("TarReader", "b.tar"),
        ("TarReader", "g[1].tar"),
        ("ParquetReader", "f.parquet"),
        ("JsonlReader", "d.ndjson"),
        ("JsonlReader", "e.jsonl.gz"),
    ]
    assert shards(tmp_path / "g[1].tar")[0].source.endswith("g[1].tar")


def test_paths_without_a_reader_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.tar").touch()
    refusals: list[tuple[Any, str]] = [
        (
            [tmp_path / "a.tar", tmp_path / "a.csv"],
            f"paths[1]: got '{tmp_path}/a.csv', want a name ending in one of .jsonl, ",
        ),
        (tmp_path / "b.tar", f"paths[0]: got '{tmp_path}/b.tar', want a file, or a pattern that matches files"),
        (f"{tmp_path}/*.parquet", f"paths[0]: got '{tmp_path}/*.parquet', want a file, or a pattern"),
        (tmp_path, f"paths[0]: got '{tmp_path}', want a file"),
        ([tmp_path / "a.tar", f"{tmp_path}/*.tar"], f"paths[1]: got '{tmp_path}/a.tar' again, want each file once"),
    ]
    for paths, message in refusals:
        with pytest.raises(InvalidInputError) as refused:
            shards(paths)
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "module"), [("tar", "webdataset.tariterators"), ("parquet", "pyarrow"), ("jsonl.zst", "pyarrow")]
)
def test_a_missing_library_names_the_pip_command(kind: str, module: str, tmp_path: Path, monkeypatch: Any) -> None:
    reader = make(kind, tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "multimodal-positions\[data\]"'):
        next(reader.records())


def test_arguments_are_checked(tmp_path: Path) -> None:
    for kind in KINDS:
        reader = make(kind, tmp_path)
        with pytest.raises(InvalidInputError, match="start: got -1, want >= 0"):
            next(reader.records(-1))
        with pytest.raises(InvalidInputError, match="step: got 0, want >= 1"):
            next(reader.records(0, 0))
