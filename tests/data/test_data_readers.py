"""Readers: every format and any start yield the same records, with errors in place of broken records and damage."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_corpus import Record, caption, load, records, write_jsonl, write_parquet, write_tar
from torch.utils.data import IterableDataset

from mmpos.data.examples import RecordError
from mmpos.data.readers import DatasetReader, JsonlReader, ParquetReader, Reader, TarReader, dataset_shards, shards
from mmpos.errors import InvalidInputError

ROWS = records(0, 21)


def zstd(path: Path, mode: str) -> Any:
    return pa.CompressedOutputStream(pa.OSFile(str(path), mode), "zstd")


WRITERS: dict[str, Callable[..., Path]] = {
    **dict.fromkeys(("jsonl", "jsonl.gz"), write_jsonl),
    "jsonl.zst": partial(write_jsonl, open_file=zstd),
    "parquet": write_parquet,
    **dict.fromkeys(("tar", "tar.gz"), write_tar),
}
KINDS = [*WRITERS, "dataset", "iterable"]


def make(kind: str, folder: Path, rows: list[Record] = ROWS) -> Reader:
    if kind in WRITERS:
        return shards(WRITERS[kind](folder / f"a.{kind}", rows))[0]
    dataset = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in FEATURES}, FEATURES)
    return DatasetReader(dataset if kind == "dataset" else dataset.to_iterable_dataset(num_shards=3), "photos")


FEATURES = datasets.Features(
    {"id": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
)


def archive(
    members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, others: Mapping[str, bytes] | None = None
) -> bytes:
    """Make a tar file of these files, after members of other types."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, kind in (others or {}).items():
            member = tarfile.TarInfo(name)
            member.type = kind
            tar.addfile(member)
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


Seen = list[tuple[int, Any]]
"""Index, and record or error message, of each record."""


def see(reader: Reader, *args: int) -> Seen:
    """Return the records of a shard, with messages that name the file without its folder."""
    seen: Seen = []
    for location, raw in reader.records(*args):
        assert location.source == reader.source
        message = str(raw).replace(f"{os.path.dirname(reader.source)}/", "")
        seen.append((location.index, message if isinstance(raw, RecordError) else raw))
    return seen


def read(reader: Reader, *args: int) -> list[tuple[int, str]]:
    """Return each record's index, and its id or error message."""
    seen = see(reader, *args)
    return [(i, raw if isinstance(raw, str) else str(raw.get("id", raw.get("__key__")))) for i, raw in seen]


def seen_by_all(reader: Reader) -> Seen:
    """Return the records of a shard, and check that two and three interleaved readers find the same records."""
    alone = see(reader)
    for readers in (2, 3):
        together = [one for first in range(readers) for one in see(reader, first, readers)]
        assert sorted(together, key=itemgetter(0)) == alone
    return alone


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
    others = {"b": tarfile.DIRTYPE, "b/x.link": tarfile.SYMTYPE}
    path.write_bytes(archive(((name, name[:5].encode()) for name in names), others=others))
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


def test_reading_continues_after_an_invalid_line(tmp_path: Path) -> None:
    lines = {
        b'{"id": 0}': "0",
        b'{"id": ': "a.jsonl[1]: got no valid JSON in line 2 (Expecting value, column 9), want a JSON object",
        b"": None,
        b"[1]": "a.jsonl[3]: got list, want a JSON object",
        b'{"id": "\xff"}': "a.jsonl[4]: got no valid JSON in line 5 ('utf-8' codec can't decode byte 0xff",
        b"[" * 200_000: "a.jsonl[5]: got no valid JSON in line 6 (maximum recursion depth exceeded",
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
    path.write_bytes(archive((name, b"x") for name in ("0.txt", "0.TXT", "1.txt")))
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

    assert sorted(load(Rows(), 2)) == sorted([[i, str(i)] for i in range(21)] * 2)


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
        (3, "paths: got 3, want a sequence of paths"),
        ([3], "paths[0]: got 3, want a path or a URL"),
        ([tmp_path / "a.tar", f"{tmp_path}/*.tar"], f"paths[1]: got '{tmp_path}/a.tar' again, want each file once"),
    ]
    with pytest.raises(InvalidInputError, match="source: got a URL with the scheme s3 and credentials"):
        JsonlReader("s3://key:secret@bucket/a.jsonl")
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


BLOCK = 512
LOST = ", want a readable record; all later records are lost"


def members(records: int, prefix: str = "") -> list[tuple[str, bytes]]:
    """Return the members of records, each a two-block jpg and a one-block txt of incompressible bytes."""
    rng = random.Random(7)
    sizes = (("jpg", 600), ("txt", 30))
    return [(f"{prefix}{i}.{kind}", rng.randbytes(size)) for i in range(records) for kind, size in sizes]


def intact(records: int, path: Path, prefix: str = "") -> Seen:
    """Return the records that an intact archive of these members contains."""
    heads = [{"__key__": f"{prefix}{i}", "__url__": str(path)} for i in range(records)]
    contents = iter(members(records, prefix))
    return [(i, record | {"jpg": next(contents)[1], "txt": next(contents)[1]}) for i, record in enumerate(heads)]


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# An archive of four records has headers in blocks 0, 3, 5, 8, … 18, and ends with 20 blocks of zeros.
FOUR = archive(members(4))
HEADERS = [5 * record + offset for record in range(4) for offset in (0, 3)]
LONG = "ä" * 130


def intact_before_damage(path: Path, data: bytes, prefix: str = "") -> tuple[int, str]:
    """Check that all readers see intact records and then one error for the rest; return its index and message."""
    path.write_bytes(data)
    *before, (last, message) = seen_by_all(TarReader(str(path)))
    assert before == intact(last, path, prefix)
    assert message.startswith(f"a.tar[{last}]: got ")
    assert message.endswith(LOST)
    return last, message.removesuffix(LOST).partition("]: got ")[2]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["tar", "tar.gz"])
@pytest.mark.parametrize(
    ("data", "prefix", "header"),
    [(FOUR, "", 1), (archive(members(3, LONG)), LONG, 3), (archive(members(3, LONG), tarfile.GNU_FORMAT), LONG, 3)],
    ids=["short names", "pax", "gnu"],
)
def test_an_archive_cut_at_any_block_is_intact_up_to_the_last_record_with_a_header_after_it(
    tmp_path: Path, data: bytes, prefix: str, header: int, compress: Callable[[bytes], bytes]
) -> None:
    path, records = tmp_path / "a.tar", 3 if prefix else 4
    path.write_bytes(compress(data))
    assert seen_by_all(TarReader(str(path))) == intact(records, path, prefix)
    end = len(data.rstrip(b"\0")) // BLOCK + 1
    for block in range(end + 2):  # with one of the two blocks of zeros that end an archive
        last, got = intact_before_damage(path, compress(data[: block * BLOCK]), prefix)
        assert last == min(max(block - header, 0) // (end // records), records - 1)
        assert f"byte {block * BLOCK}" in got or f"byte {(block - 1) * BLOCK}" in got


def sized(size: int, form: Any = tarfile.GNU_FORMAT) -> bytes:
    """Replace the second record by a member whose header, or extended header, has this size."""
    member = tarfile.TarInfo("1.jpg")
    member.size, member.pax_headers = (size, {}) if form == tarfile.GNU_FORMAT else (0, {"size": str(size)})
    return FOUR[: 5 * BLOCK] + member.tobuf(form) + bytes(2 * BLOCK)


@pytest.mark.parametrize(
    ("data", "records", "got"),
    [
        (b"", 0, "no header at byte 0 (the end of the file)"),
        (bytes(BLOCK), 0, "one block of zeros at byte 0, where a header or two blocks of zeros should be"),
        (FOUR + b"and more", 4, f"data at byte {len(FOUR)}, after the end of the archive"),
        (FOUR + bytes(2**21) + b"x", 4, f"data at byte {len(FOUR) + 2**21}, after the end of the archive"),
        (FOUR + archive(members(2)), 4, f"data at byte {len(FOUR)}, after the end of the archive"),
        (b"no archive" * 100, 0, "no header at byte 0 (invalid header)"),
        (changed(FOUR, 5 * BLOCK, bytes(5 * BLOCK)), 1, f"data at byte {10 * BLOCK}, after the end of the archive"),
        *((sized(*size), 0, f"no header at byte {5 * BLOCK} (a size of {size[0]})")
          for size in ((-BLOCK,), (-2 * BLOCK, tarfile.PAX_FORMAT), (2**80,))),
        *((changed(FOUR, block * BLOCK, bytes(BLOCK)), max(block - 1, 0) // 5,
           f"one block of zeros at byte {block * BLOCK}, where a header or two blocks of zeros should be")
          for block in HEADERS),
        *((changed(FOUR, at, bytes([FOUR[at] ^ 1])), 1, f"no header at byte {8 * BLOCK} (bad checksum)")
          for at in (8 * BLOCK + field for field in (0, 100, 124, 136, 156, 257, 345))),
    ],
    ids=count(),
)  # fmt: skip
def test_damage_to_an_archive_follows_intact_records(tmp_path: Path, data: bytes, records: int, got: str) -> None:
    assert intact_before_damage(tmp_path / "a.tar", data) == (records, got)
    assert not data or intact_before_damage(tmp_path / "a.tar", gzip.compress(data)) == (records, got)


def test_an_archive_may_end_with_two_or_more_blocks_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for zeros in (2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 3 * 2**20):
        for size, data in ((4, FOUR[: 20 * BLOCK]), (0, b"")):
            path.write_bytes(data + bytes(zeros))
            assert seen_by_all(TarReader(str(path))) == intact(size, path)


def test_sparse_files_are_read_and_truncated_ones_are_errors(tmp_path: Path) -> None:
    # GNU sparse format 1.0: the map of a 2,000-byte file whose data starts at byte 1,000, followed by the data.
    path, content, out = tmp_path / "a.tar", b"1\n1000\n1000\n".ljust(BLOCK, b"\0") + b"x" * 1000, io.BytesIO()
    member = tarfile.TarInfo("GNUSparseFile.0/0.txt")
    sparse = {"major": "1", "minor": "0", "name": "0.txt", "realsize": "2000"}
    member.size, member.pax_headers = len(content), {f"GNU.sparse.{name}": value for name, value in sparse.items()}
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member, io.BytesIO(content))
    path.write_bytes(out.getvalue())
    want = {"__key__": "0", "__url__": str(path), "txt": bytes(1000) + b"x" * 1000}
    assert seen_by_all(TarReader(str(path))) == [(0, want)]
    for size in range(0, len(out.getvalue().rstrip(b"\0")), BLOCK):
        assert intact_before_damage(path, out.getvalue()[:size])[0] == 0


# Compressed shards


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "tar.gz", "tar.bz2", "tar.xz"])
def test_all_readers_agree_on_a_truncated_shard_and_on_a_flipped_byte(tmp_path: Path, kind: str) -> None:
    path = WRITERS.get(kind, write_tar)(tmp_path / f"a.{kind}", records(0, 40))
    reader: Reader = TarReader(str(path)) if "tar" in kind else shards(path)[0]
    data, good = path.read_bytes(), seen_by_all(reader)
    assert len(good) == 40
    for size in [0, 1, 9, *range(18, len(data), len(data) // 16), len(data) - 1]:
        path.write_bytes(data[:size])
        *before, (last, message) = seen_by_all(reader)
        assert before == good[:last]
        assert message.startswith(f"{path.name}[{last}]: got ")
        assert message.endswith(LOST)
        assert reader.count() is None
    for at in range(0, len(data), len(data) // 24):
        path.write_bytes(changed(data, at, bytes([data[at] ^ 255])))
        damaged = seen_by_all(reader)
        if kind == "parquet":  # one record per row, or a single error if the footer is lost
            assert [index for index, _ in damaged] in ([index for index, _ in good], [0])
        else:  # some metadata bytes can change harmlessly, and pyarrow writes no checksum for zstd
            assert any(isinstance(raw, str) for _, raw in damaged) or damaged == good or kind == "jsonl.zst"


def test_missing_rows_in_a_row_group_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", records(0, 21))
    # Some damage to pages yields fewer rows without an error.
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *arguments, **options: iter(()))
    groups = [8] * 16 + [5] * 5
    assert seen_by_all(ParquetReader(str(path))) == [
        (i, f"a.parquet[{i}]: got 0 rows in a row group of {rows}, want a readable record")
        for i, rows in enumerate(groups)
    ]
