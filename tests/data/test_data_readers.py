"""Readers: every format and any start yield the same records, with errors in place of broken records."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from data_corpus import Record, caption, records, write_jsonl, write_parquet, write_tar
from torch.utils.data import DataLoader, IterableDataset

from mmpos.data.examples import RecordError
from mmpos.data.readers import (
    DatasetReader,
    JsonlReader,
    ParquetReader,
    Reader,
    TarReader,
    dataset_shards,
    shards,
)
from mmpos.errors import InvalidInputError

ROWS = records(0, 21)
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar", "tar.gz", "dataset", "iterable"]


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
    assert reader.count() == (21 if kind in ("parquet", "dataset") else None)
    if kind in ("parquet", "dataset", "iterable"):
        assert [raw for _, raw in reader.records()] == ROWS, "images are left undecoded"
    assert kind == "iterable" or read(make(kind, tmp_path, [])) == []
    for arguments, message in (((-1, 1), "start: got -1, want >= 0"), ((0, 0), "step: got 0, want >= 1")):
        with pytest.raises(InvalidInputError, match=message):
            next(reader.records(*arguments))


def test_tar_members_with_one_key_form_a_record_as_in_webdataset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    names = ["b/x.y.JPG", "b/x.json", "__skip__/z.txt", "no_extension", "b/z.txt", "c.txt", "b/x.txt"]
    names += ["__meta__", ".hidden", "d.e/.hidden", "d.e/no_extension", "d.e/f.tar.gz", "./g.txt"]
    with tarfile.open(path, "w") as tar:
        tar.addfile(_member("b", 0, tarfile.DIRTYPE))
        tar.addfile(_member("b/x.link", 0, tarfile.SYMTYPE))
        for name in names:
            tar.addfile(_member(name, 5), io.BytesIO(name[:5].encode()))
    assert [raw for _, raw in TarReader(str(path)).records()] == [
        {"__key__": key, "__url__": str(path), **members}
        for key, members in [
            ("b/x", {"y.jpg": b"b/x.y", "json": b"b/x.j"}),
            ("b/z", {"txt": b"b/z.t"}),
            ("c", {"txt": b"c.txt"}),
            ("b/x", {"txt": b"b/x.t"}),
            ("d.e/f", {"tar.gz": b"d.e/f"}),
            ("./g", {"txt": b"./g.t"}),
        ]
    ]


def _member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member


def test_reading_continues_after_an_invalid_line(tmp_path: Path) -> None:
    lines = {
        b'{"id": 0}': "0",
        b'{"id": ': "a.jsonl[1]: got Expecting value: line 2 column 1",
        b"": None,
        b"[1]": "a.jsonl[3]: got list, want a JSON object",
        b'{"id": "\xff"}': "a.jsonl[4]: got 'utf-8' codec can't decode byte 0xff",
        b"[" * 200_000: "a.jsonl[5]: got maximum recursion depth exceeded",
        b'{"id": 6}': "6",
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    seen = read(JsonlReader(str(path)))
    want = [(i, start) for i, start in enumerate(lines.values()) if start is not None]
    assert [(i, text[: len(start)]) for (i, text), (_, start) in zip(seen, want, strict=True)] == want
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


def test_invalid_unicode_causes_an_error_only_for_its_row(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    table = pa.table({"id": pa.array([b"0", b"\xff", b"2"]).view(pa.string())})
    pa.parquet.write_table(table, path)
    (first, (_, message), last) = read(ParquetReader(str(path)))
    assert (first, last) == ((0, "0"), (2, "2"))
    assert message.startswith("a.parquet[1]: got 'utf-8' codec can't decode byte 0xff")


def test_every_shard_of_a_dataset_has_a_reader() -> None:
    dataset = datasets.Dataset.from_list(ROWS, features=FEATURES)
    readers = dataset_shards(dataset.to_iterable_dataset(num_shards=4), "photos")
    assert [reader.source for reader in readers] == [f"photos-0000{i}-of-00004" for i in range(4)]
    assert sorted((text for reader in readers for _, text in read(reader)), key=int) == [str(i) for i in range(21)]
    (whole,) = dataset_shards(dataset)
    assert (whole.source, whole.count()) == ("dataset", 21)
    with pytest.raises(InvalidInputError, match="dataset: got list, want a Dataset or an IterableDataset"):
        DatasetReader([1])


def test_every_worker_reads_all_rows_of_an_iterable_dataset(tmp_path: Path) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(read(make("iterable", tmp_path)))

    loader: Any = DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
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
        ([tmp_path / "a.tar", tmp_path / "a.csv"], f"paths[1]: got '{tmp_path}/a.csv', want a name ending in one of "),
        (tmp_path / "b.tar", f"paths[0]: got '{tmp_path}/b.tar', want a file, or a pattern that matches files"),
        (f"{tmp_path}/*.parquet", f"paths[0]: got '{tmp_path}/*.parquet', want a file, or a pattern"),
        (tmp_path, f"paths[0]: got '{tmp_path}', want a file"),
        ([tmp_path / "a.tar", f"{tmp_path}/*.tar"], f"paths[1]: got '{tmp_path}/a.tar' again, want each file once"),
    ]
    for paths, message in refusals:
        with pytest.raises(InvalidInputError) as refused:
            shards(paths)
        assert str(refused.value).startswith(message)


@pytest.mark.parametrize("kind", ["parquet", "jsonl.zst", "jsonl", "tar"])
def test_a_missing_file_or_library_is_not_a_record_error(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    reader = make(kind, tmp_path)
    if kind in ("parquet", "jsonl.zst"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pyarrow", None)
            with pytest.raises(ImportError, match=r'"multimodal-positions\[data\]"'):
                next(reader.records())
    os.unlink(reader.source)
    with pytest.raises(FileNotFoundError):
        list(reader.records())
