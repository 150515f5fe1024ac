"""Paths on this machine, in memory and on an S3 server behave the same."""

from __future__ import annotations

import io
import json
import multiprocessing
import pickle
import re
import signal
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import IO, Any, ClassVar, Literal

import pyarrow as pa
import pytest
from data_corpus import records, write_jsonl, write_parquet, write_tar
from pyarrow import parquet
from s3 import ENVIRONMENT, make_bucket, s3_server

from mmpos import ImageProcessor, SequenceBuilder
from mmpos.data import HFImages, Pairs, Preprocess, Reader, RecordError, shards, write_sequences
from mmpos.data.stores import StorePath, _errors_of, open_parquet, store_path
from mmpos.errors import InvalidInputError

_NUMBERS = count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorePath:
    """Create an empty folder in each kind of store."""
    number = next(_NUMBERS)
    if request.param == "local":
        return store_path("folder", tmp_path)
    if request.param == "memory":
        return store_path("folder", f"memory://folder-{number}/in")
    address = request.getfixturevalue("server")
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{address}"}.items():
        monkeypatch.setenv(name, value)
    make_bucket(address, f"bucket-{number}")
    return store_path("folder", f"s3://bucket-{number}/in")


def test_a_file_can_be_written_read_with_seeks_and_removed(folder: StorePath) -> None:
    path = folder / "a b%20ü.bin"
    data = bytes(range(256)) * 4096
    assert not path.exists()
    path.write_bytes(b"before")
    with path.write() as file:
        file.write(data[:1000])
        file.write(data[1000:])
    with path.open() as read:
        assert read.seek(300_000) == 300_000
        assert read.read(10) == data[300_000:300_010]
        assert read.seek(-3, 2) == len(data) - 3
        assert read.read() == data[-3:]
        assert read.seek(len(data) + 5) == len(data) + 5
        assert read.read(1) == b""
    assert pickle.loads(pickle.dumps(path)).read_bytes() == data
    assert [path.is_file(), path.exists(), folder.is_file(), folder.exists()] == [True, True, False, True]
    path.remove()
    path.remove()
    assert not path.exists()


def test_a_failed_with_block_leaves_the_existing_file_unchanged(folder: StorePath) -> None:
    path = folder / "a"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), path.write() as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"before"
    assert folder.glob("*") == [path]


def test_the_identity_changes_when_a_file_is_rewritten(folder: StorePath) -> None:
    path = folder / "a"
    path.write_bytes(b"one")
    first = path.identity()
    assert first == path.identity()
    assert first["size"] == 3
    path.write_bytes(b"two")
    assert path.identity() != first


def test_folder_names_are_not_patterns(folder: StorePath) -> None:
    inside = folder / "a[1]*" / "b"
    inside.parent.make_folder()
    inside.write_bytes(b"x")
    assert (folder / "a[1]*").glob("*") == [inside]


def test_patterns_match_files_at_any_depth(folder: StorePath) -> None:
    names = ["a-0.tar", "a-1.tar", "b.tar", "deep/a-2.tar", "deep/er/a-3.tar"]
    for name in names:
        (folder / name).parent.make_folder()
        (folder / name).write_bytes(b"x")
    for pattern, want in {
        "a-*.tar": names[:2],
        "a-[1-9].tar": names[1:2],
        "?.tar": names[2:3],
        "*/a-?.tar": names[3:4],
        "**/a-*.tar": [*names[:2], *names[3:]],
        "none*": [],
    }.items():
        assert folder.glob(pattern) == [folder / name for name in want], pattern


def test_errors_name_a_missing_file(folder: StorePath) -> None:
    path = folder / "none"
    for call in (path.open, path.read_bytes, path.identity, lambda: open_parquet(path)):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(str(path)))):
            call()


def test_parquet_files_are_read(folder: StorePath) -> None:
    path = folder / "a.parquet"
    table = pa.table({"n": range(10_000), "text": [f"row {i}" for i in range(10_000)]})
    with path.write() as file:
        parquet.write_table(table, file, row_group_size=1000)
    with open_parquet(path, buffer_size=2**16, pre_buffer=False) as opened:
        assert opened.read_row_group(3, ["n"])["n"].to_pylist() == list(range(3000, 4000))
        assert opened.read() == table


def _read(path: StorePath) -> None:
    assert path.read_bytes() == b"x"
    path.with_name("by-child").write_bytes(b"y")


def test_a_forked_process_opens_its_own_connections(folder: StorePath) -> None:
    if folder.text.startswith("memory"):
        pytest.skip("memory belongs to one process")
    path = folder / "a"
    path.write_bytes(b"x")
    child = multiprocessing.get_context("fork").Process(target=_read, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert path.with_name("by-child").read_bytes() == b"y"


@pytest.mark.parametrize(
    ("path", "want"),
    [
        ("a/b", "a/b"),
        (Path("s3://bucket/a"), "s3://bucket/a"),  # pathlib drops a slash
        ("S3://Bucket/A", "s3://Bucket/A"),
        ("file:///a%20b", "/a b"),
        (Path("file:///a"), "/a"),
        ("file://localhost/a", "/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("gs://anonymous@bucket/a", "gs://anonymous@bucket/a"),
        ("s3://b/a?.tar", "s3://b/a?.tar"),
    ],
)
def test_paths_and_urls_are_normalized(path: str | Path, want: str) -> None:
    assert str(store_path("path", path)) == want


def test_parents_and_siblings_of_urls_keep_the_options() -> None:
    path = store_path("path", "s3://bucket/a.b/c.tar.gz?region=eu-west-1")
    assert (path.name, path.stem) == ("c.tar.gz", "c.tar")
    assert str(path.parent) == "s3://bucket/a.b?region=eu-west-1"
    assert str(path.with_name("d")) == "s3://bucket/a.b/d?region=eu-west-1"
    with pytest.raises(TypeError, match="want a path on this machine"):
        Path(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3://AKIA:hidden@bucket/a",
            "x: got a URL with the scheme s3 and credentials, want credentials in the environment",
        ),
        ("s3://AKIA:hid/den@bucket/a", "x: got a URL with the scheme s3 and credentials"),
        ("https://hidden@host/a", "x: got a URL with the scheme https and credentials"),
        (
            "https://host/a?sig=hidden",
            "x: got a URL with the scheme https and the option 'sig', want a URL without options",
        ),
        (
            "s3://bucket/a?secret=hidden",
            "x: got a URL with the scheme s3 and the option 'secret', want endpoint_override, region",
        ),
        (
            "https://bucket.s3.amazonaws.com/a.tar?X-Amz-Credential=AKIAhid&X-Amz-Signature=hidden",
            "x: got a URL with the scheme https and the option 'X-Amz-Credential', want a URL without options",
        ),
        (
            "s3://bucket/a?X-Amz-Signature=hid*den",
            "x: got a URL with the scheme s3 and the option 'X-Amz-Signature', want endpoint",
        ),
        ("s3://anonymous@bucket/a", "x: got a URL with the scheme s3 and credentials"),
        ("file://host/a", "x: got 'file://host/a', want file:/// and a path on this machine"),
    ],
)
def test_urls_with_credentials_are_refused_and_not_printed(url: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}") as raised:
        store_path("x", url)
    assert "hid" not in str(raised.value)


def test_errors_name_unknown_schemes_and_missing_packages() -> None:
    with pytest.raises(
        InvalidInputError, match=r"got a URL with the scheme 'nope', want a scheme of pyarrow.fs or fsspec"
    ):
        store_path("x", "nope://bucket/a").open()
    want = r"^sftp URLs: paramiko is not installed; install it with: pip install paramiko$"
    with pytest.raises(ImportError, match=want):
        store_path("x", "sftp://host/a").open()


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("s3://bucket/in/a?region=us-east-1", "bucket/in/a"),
        ("gs://anonymous@bucket/in/a", "bucket/in/a"),
        ("gcs://anonymous@bucket/in/a", "bucket/in/a"),
        ("abfs://container@account.dfs.core.windows.net/in/a", "container/in/a"),
        ("memory://bucket/in/a", "/bucket/in/a"),
        ("https://host/in/a", "https://host/in/a"),
        ("ftp://host/in/a", "/in/a"),
    ],
)
def test_keys_are_paths_inside_the_library_filesystem(url: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.implementations.ftp.FTPFileSystem._connect", lambda self: None)
    assert store_path("url", url)._key == key


def test_patterns_match_files_on_an_http_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    for name in ("a-0.jsonl", "a-1.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        folder = store_path("folder", f"http://127.0.0.1:{server.server_port}")
        paths = folder.glob("a-*.jsonl")
        contents = [path.read_bytes() for path in paths]
        server.shutdown()
    assert paths == [folder / "a-0.jsonl", folder / "a-1.jsonl"]
    assert contents == [b"{}", b"{}"]


def test_an_interrupted_upload_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = store_path("path", "memory://interrupted/a")
    path.write_bytes(b"before")

    def copy(spool: IO[bytes], file: IO[bytes], length: int) -> None:
        file.write(spool.read(2))
        signal.raise_signal(signal.SIGINT)
        file.write(spool.read())

    monkeypatch.setattr("mmpos.data.stores.shutil.copyfileobj", copy)
    with pytest.raises(KeyboardInterrupt):
        path.write_bytes(b"after")
    assert path.read_bytes() == b"after"


class _ServerError(Exception):
    response: ClassVar[dict[str, Any]] = {"ResponseMetadata": {"HTTPStatusCode": 503}}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("reading key 'logs/404/x' in bucket 'b': AWS Error NETWORK_CONNECTION: timeout"), OSError),
        (OSError("reading key 'logs/404/NoSuchKey' in bucket 'b': AWS Error NETWORK_CONNECTION: timeout"), OSError),
        (OSError("reading key 'logs/404/x' in bucket 'b': AWS Error NO_SUCH_KEY"), FileNotFoundError),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."), PermissionError),
        (OSError("AWS Error UNKNOWN (HTTP status 403) during HeadObject operation"), PermissionError),
        (_ServerError("NoSuchKey"), OSError),
    ],
)
def test_errors_are_classified_independently_of_file_names(error: Exception, kind: type[OSError]) -> None:
    path = "s3://b/logs/404/NoSuchKey" if "NoSuchKey" in str(error) else "s3://b/logs/404/x"
    with pytest.raises(OSError, match="logs/404") as raised, _errors_of(store_path("path", path)):
        raise error
    assert type(raised.value) is kind


def _read_all(reader: Reader, start: int, step: int) -> list[tuple[int, dict[str, object]]]:
    read = [(location.index, record) for location, record in reader.records(start, step)]
    assert not any(isinstance(record, RecordError) for _, record in read), read
    return [(index, {**record, "__url__": ""}) for index, record in read if not isinstance(record, RecordError)]


def test_shards_in_a_store_are_read_like_local_ones(folder: StorePath, tmp_path: Path) -> None:
    here, rows = tmp_path / "here", records(0, 5)
    here.mkdir()
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_jsonl(here / name, rows)
    (here / "b.jsonl.zst").write_bytes(pa.compress((here / "a.jsonl").read_bytes(), "zstd", asbytes=True))
    for name in ("c.tar", "c.tar.gz"):
        write_tar(here / name, rows)
    write_parquet(here / "d.parquet", rows, group=2)
    for path in here.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    readers, wanted = (shards([str(path / "*.jsonl*"), str(path / "[cd].*")]) for path in (folder, here))
    assert [reader.source for reader in readers] == [str(folder / Path(reader.source).name) for reader in wanted]
    for reader, want in zip(readers, wanted, strict=True):
        for start, step in ((0, 1), (1, 2), (9, 1)):
            assert _read_all(reader, start, step) == _read_all(want, start, step), reader
    with pytest.raises(InvalidInputError, match=r"^paths\[1\]: got '.*none\.tar', want a file, or a pattern"):
        shards([str(folder / "c.tar"), str(folder / "none.tar")])


@pytest.fixture(params=["local", "ray"])
def engine(
    request: pytest.FixtureRequest, server: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Literal["local", "ray"]]:
    """Run each engine with workers that can use the S3 server."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{server}"}.items():
        monkeypatch.setenv(name, value)
    if request.param == "local":
        yield "local"
        return
    ray = pytest.importorskip("ray")
    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield "ray"
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_corpus_on_s3_produces_the_same_rows_as_a_local_one(
    kind: str, engine: Literal["local", "ray"], server: str, tmp_path: Path
) -> None:
    bucket, rows = f"corpus-{kind}-{engine}", records(0, 1000)
    make_bucket(server, bucket)
    for row in rows:  # more than one request reads
        row["image"]["bytes"] += bytes(10_000)
    for row in rows[7::100]:
        row["image"] = {"bytes": b"broken", "path": None}
    write, format_ = (write_tar, Pairs()) if kind == "tar" else (write_parquet, HFImages())
    data = write(tmp_path / f"written.{kind}", rows).read_bytes()
    preprocess = Preprocess(format_, SequenceBuilder(images=ImageProcessor(max_tokens=4)))
    outputs = {}
    here = store_path("folder", tmp_path)
    there = store_path("folder", f"s3://{bucket}")
    engines: dict[StorePath, Literal["local", "ray"]] = {here: "local", there: engine}
    for folder, name in engines.items():
        (folder / f"corpus.{kind}").write_bytes(data)
        readers = shards(str(folder / f"corpus.{kind}"))
        summary = write_sequences(readers, folder / "ready", preprocess, on_error="skip", engine=name)
        assert (summary.counts.documents, summary.counts.skipped) == (990, 10)
        files = {path.name: path.read_bytes() for path in (folder / "ready").glob("*")}
        tables = [parquet.read_table(io.BytesIO(files[name])) for name in sorted(files) if name.endswith("parquet")]
        lines = [
            json.loads(line)
            for name, file in sorted(files.items())
            if name.endswith("jsonl")
            for line in file.splitlines()
        ]
        assert [line["index"] for line in lines] == list(range(7, 1000, 100))
        assert all("image" in line["error"] for line in lines)
        reasons = [line["error"].replace(str(folder), "") for line in lines]
        outputs[folder] = [table.replace_schema_metadata() for table in tables], reasons
    assert outputs[here] == outputs[there]
