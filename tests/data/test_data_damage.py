"""Damaged shards: no record is lost silently, and several readers of a shard find the same damage as one reader."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import tarfile
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_corpus import records, write_jsonl, write_parquet

from mmpos.data.examples import RecordError
from mmpos.data.readers import Reader, TarReader, shards

BLOCK = 512
LOST = ", want a readable record; all later records are lost"

Seen = list[tuple[int, Any]]
"""Index, and record or error message, of each record."""


def see(reader: Reader, readers: int = 1) -> Seen:
    """Return the records of a shard in order, read by this number of interleaved readers."""
    seen: Seen = []
    for first in range(readers):
        for location, raw in reader.records(first, readers):
            assert location.source == reader.source
            seen.append((location.index, str(raw) if isinstance(raw, RecordError) else raw))
    return sorted(seen, key=itemgetter(0))


def seen_by_all(path: Path) -> Seen:
    """Return the records of a shard, and check that two and three readers find the same records."""
    (reader,) = shards(path)
    alone = see(reader)
    assert see(reader, 2) == alone
    assert see(reader, 3) == alone
    return alone


def archive(members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def members(records: int, prefix: str = "") -> list[tuple[str, bytes]]:
    """Return the members of records, each a two-block jpg and a one-block txt of incompressible bytes."""
    rng = random.Random(7)
    sizes = (("jpg", 600), ("txt", 30))
    return [(f"{prefix}{i}.{kind}", rng.randbytes(size)) for i in range(records) for kind, size in sizes]


def intact(records: int, path: Path, prefix: str = "") -> Seen:
    """Return the records that an intact archive of these members contains."""
    content = dict(members(records, prefix))
    keys = [f"{prefix}{i}" for i in range(records)]
    return [
        (i, {"__key__": key, "__url__": str(path), "jpg": content[f"{key}.jpg"], "txt": content[f"{key}.txt"]})
        for i, key in enumerate(keys)
    ]


def changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


# An archive of four records has headers in blocks 0, 3, 5, 8, … 18, and ends with 20 blocks of zeros.
FOUR = archive(members(4))
HEADERS = [5 * record + offset for record in range(4) for offset in (0, 3)]


def intact_before_damage(path: Path, prefix: str = "") -> tuple[int, str]:
    """Check that all readers see intact records and then one error for the rest; return its index and message."""
    *before, (last, message) = seen_by_all(path)
    assert before == intact(last, path, prefix)
    assert message.startswith(f"{path}[{last}]: got ")
    assert message.endswith(LOST)
    return last, message.removesuffix(LOST).partition("]: got ")[2]


@pytest.mark.parametrize("packed", [False, True])
def test_archives_without_some_end_or_header_are_errors(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.tar.gz" if packed else "a.tar")
    for block in (*range(22), *HEADERS):
        path.write_bytes(gzip.compress(FOUR[: block * BLOCK]) if packed else FOUR[: block * BLOCK])
        last, got = intact_before_damage(path)
        complete = max(block - 1, 0) // 5
        assert last == min(complete, 3)
        assert f"byte {block * BLOCK}" in got or f"byte {(block - 1) * BLOCK}" in got
        if block in HEADERS:
            data = changed(FOUR, block * BLOCK, bytes(BLOCK))
            path.write_bytes(gzip.compress(data) if packed else data)
            got = f"one block of zeros at byte {block * BLOCK}, where a header or two blocks of zeros should be"
            assert intact_before_damage(path) == (complete, got)


@pytest.mark.parametrize(
    ("data", "records", "got"),
    [
        (b"", 0, "no header at byte 0 (the end of the file)"),
        (bytes(BLOCK), 0, "one block of zeros at byte 0, where a header or two blocks of zeros should be"),
        (FOUR + b"and more", 4, f"data at byte {len(FOUR)}, after the end of the archive"),
        (FOUR + archive(members(2)), 4, f"data at byte {len(FOUR)}, after the end of the archive"),
        (b"no archive" * 100, 0, "no header at byte 0 (invalid header)"),
        (changed(FOUR, 5 * BLOCK, bytes(5 * BLOCK)), 1, f"data at byte {10 * BLOCK}, after the end of the archive"),
        *(
            (changed(FOUR, at, bytes([FOUR[at] ^ 1])), 1, f"no header at byte {8 * BLOCK} (bad checksum)")
            for at in (8 * BLOCK + field for field in (0, 100, 124, 136, 156, 257, 345))
        ),
    ],
)
def test_a_damaged_archive_is_an_error_after_its_intact_records(
    tmp_path: Path, data: bytes, records: int, got: str
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    assert intact_before_damage(path) == (records, got)


def test_an_archive_may_end_with_two_or_more_blocks_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for zeros in (2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 3 * 2**20):
        for count, data in ((4, FOUR[: 20 * BLOCK]), (0, b"")):
            path.write_bytes(data + bytes(zeros))
            assert seen_by_all(path) == intact(count, path)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_truncated_extended_headers_are_errors(tmp_path: Path, form: int) -> None:
    path, prefix = tmp_path / "a.tar", "ä" * 130
    data = archive(members(3, prefix), form)
    path.write_bytes(data)
    assert seen_by_all(path) == intact(3, path, prefix)
    end = len(data.rstrip(b"\0")) // BLOCK + 1  # headers end with zero bytes
    seen = []
    for block in range(end + 1):
        path.write_bytes(data[: block * BLOCK])
        seen.append(intact_before_damage(path, prefix)[0])
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}


def test_a_member_with_a_negative_or_huge_size_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    sizes: dict[str, Any] = {"size": -BLOCK, "pax_headers": {"size": str(-2 * BLOCK)}}
    for name, value in (*sizes.items(), ("size", 2**80)):
        member = tarfile.TarInfo("1.jpg")
        setattr(member, name, value)
        header = member.tobuf(tarfile.GNU_FORMAT if name == "size" else tarfile.PAX_FORMAT)
        path.write_bytes(FOUR[: 5 * BLOCK] + header + bytes(2 * BLOCK))
        ((last, message),) = seen_by_all(path)
        assert last == 0
        assert f"no header at byte {5 * BLOCK} (a size of " in message


def test_sparse_files_are_read_and_truncated_ones_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    # GNU sparse format 1.0: the map of a 2,000-byte file whose data starts at byte 1,000, followed by the data.
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "0.txt", "GNU.sparse.realsize": "2000"}
    layout = b"1\n1000\n1000\n".ljust(BLOCK, b"\0")
    member = tarfile.TarInfo("GNUSparseFile.0/0.txt")
    member.size, member.pax_headers = BLOCK + 1000, pax
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member, io.BytesIO(layout + b"x" * 1000))
    path.write_bytes(out.getvalue())
    assert seen_by_all(path) == [(0, {"__key__": "0", "__url__": str(path), "txt": bytes(1000) + b"x" * 1000})]
    end = len(out.getvalue().rstrip(b"\0"))
    for size in range(0, end, BLOCK):
        path.write_bytes(out.getvalue()[:size])
        ((index, message),) = seen_by_all(path)
        assert (index, message.endswith(LOST)) == (0, True)


# Compressed shards


def zstd(path: Path, mode: str) -> Any:
    return pa.CompressedOutputStream(pa.OSFile(str(path), mode), "zstd")


def tar(compress: Callable[[bytes], bytes]) -> Callable[[Path, object], object]:
    return lambda path, _: path.write_bytes(compress(archive(members(40))))


@pytest.mark.parametrize(
    ("kind", "write"),
    [("jsonl.gz", write_jsonl), ("jsonl.zst", partial(write_jsonl, open_file=zstd)), ("parquet", write_parquet),
     ("tar.gz", tar(gzip.compress)), ("tar.bz2", tar(bz2.compress)), ("tar.xz", tar(lzma.compress))],
)  # fmt: skip
def test_all_readers_agree_on_a_truncated_shard_and_on_a_flipped_byte(
    tmp_path: Path, kind: str, write: Callable[..., object]
) -> None:
    path = tmp_path / f"a.{kind}"
    write(path, records(0, 40))
    reader: Reader = TarReader(str(path)) if "tar" in kind else shards(path)[0]

    def seen() -> Seen:
        alone = see(reader)
        for readers in (2, 3):
            assert see(reader, readers) == alone
        return alone

    data, good = path.read_bytes(), seen()
    assert len(good) == 40
    for size in [0, 1, 9, *range(18, len(data), len(data) // 16), len(data) - 1]:
        path.write_bytes(data[:size])
        *before, (last, message) = seen()
        assert before == good[:last]
        assert message.startswith(f"{path}[{last}]: got ")
        assert message.endswith(LOST)
        assert reader.count() is None
    for at in range(0, len(data), len(data) // 24):
        path.write_bytes(changed(data, at, bytes([data[at] ^ 255])))
        damaged = seen()
        if kind == "parquet":  # one record per row, or a single error if the footer is lost
            assert [index for index, _ in damaged] in ([index for index, _ in good], [0])
        else:  # some metadata bytes can change harmlessly, and pyarrow writes no checksum for zstd
            assert any(isinstance(raw, str) for _, raw in damaged) or damaged == good or kind == "jsonl.zst"


def test_missing_rows_in_a_row_group_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", records(0, 21))
    # Some damage to pages yields fewer rows without an error.
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *arguments, **options: iter(()))
    groups = [8] * 16 + [5] * 5
    assert seen_by_all(path) == [
        (i, f"{path}[{i}]: got 0 rows in a row group of {rows}, want a readable record")
        for i, rows in enumerate(groups)
    ]
