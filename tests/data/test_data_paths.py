"""Files on this machine, in memory and on an S3 server behave the same, through fsspec."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import IO, Any

import boto3
import pyarrow as pa
import pytest
from data_corpus import records, write_jsonl, write_parquet, write_tar
from fsspec.implementations.memory import MemoryFile
from moto.server import ThreadedMotoServer

from mmpos.data import Reader, paths, sequence_shards, shards
from mmpos.data.paths import checked_path, join, kind_of, matches, open_file, open_parquet, remove, write_file
from mmpos.data.preprocess import _is_ours
from mmpos.errors import InvalidInputError

_NUMBERS = count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run an S3 server that holds its buckets in memory, and yield its address."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process and its children use the S3 server, and return a client."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "not-checked")
    settings = {"DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true", "ENDPOINT_URL": server}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return boto3.client("s3")


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Create an empty folder in each kind of store."""
    number = next(_NUMBERS)
    if request.param == "local":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://folder-{number}/in"
    request.getfixturevalue("s3").create_bucket(Bucket=f"bucket-{number}")
    return f"s3://bucket-{number}/in"


def write(path: str, data: bytes) -> None:
    paths.make_folder(path.rpartition("/")[0])
    with write_file(path) as file:
        file.write(data)


def read(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


def test_a_file_can_be_written_read_with_seeks_and_removed(folder: str) -> None:
    path, data = join(folder, "a b%20ü.bin"), bytes(range(256)) * 4096
    assert kind_of(path) is None
    for call in (open_file, paths.facts_of, open_parquet):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(path))):
            call(path)
    write(path, b"before")
    with pytest.raises(TypeError), write_file(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert (read(path), matches("*", folder)) == (b"before", [path])
    with write_file(path) as file:
        file.write(data[:1000])
        file.write(data[1000:])
    with open_file(path) as opened:
        assert opened.seek(300_000) == 300_000
        assert opened.read(10) == data[300_000:300_010]
        assert opened.seek(-3, 2) == len(data) - 3
        assert opened.read() == data[-3:]
        assert opened.seek(len(data) + 5) == len(data) + 5
        assert opened.read(1) == b""
    assert read(path) == data
    assert (kind_of(path), kind_of(folder)) == ("file", "folder")
    first = paths.facts_of(path)
    assert first == paths.facts_of(path)
    write(path, data + b"x")
    assert first["size"] == len(data)
    assert paths.facts_of(path) != first
    remove(path)
    remove(path)
    assert kind_of(path) is None


def test_patterns_match_files_at_any_depth_but_folder_names_are_not_patterns(folder: str) -> None:
    names = ["a-0.tar", "a-1.tar", "b.tar", "deep/a-2.tar", "deep/er/a-3.tar", "odd[1]*/x"]
    for name in names:
        write(join(folder, name), b"x")
    for pattern, want in {
        "a-*.tar": names[:2],
        "a-[1-9].tar": names[1:2],
        "?.tar": names[2:3],
        "*/a-?.tar": names[3:4],
        "**/a-*.tar": [*names[:2], *names[3:5]],
        "none*": [],
    }.items():
        assert matches(pattern, folder) == [join(folder, name) for name in want], pattern
        assert matches(join(folder, pattern)) == matches(pattern, folder)
    assert matches("*", join(folder, "odd[1]*")) == [join(folder, "odd[1]*/x")]


def test_a_forked_process_opens_its_own_connections(s3: Any) -> None:
    s3.create_bucket(Bucket="forked")
    write("s3://forked/a", b"x")
    child = multiprocessing.get_context("fork").Process(target=write, args=("s3://forked/a", b"by child"))
    child.start()
    child.join(300)
    assert (child.exitcode, read("s3://forked/a")) == (0, b"by child")


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
        ("file://host/a", "got 'file://host/a', want file:/// and"),
        ("s3://AKIA:hidden@bucket/a", "got a URL with the scheme s3 and credentials, want credentials in the environ"),
        ("s3://AKIA:hid/den@bucket/a", "got a URL with the scheme s3 and credentials"),
        ("https://host/a?sig=hidden", "got a URL with the scheme https and options, want options in the environment"),
        ("s3://bucket/a?X-Amz-Signature=hid*den", "got a URL with the scheme s3 and options"),
        ("s3://anonymous@bucket/a", "got a URL with the scheme s3 and credentials"),
    ],
)
def test_paths_and_urls_are_normalized_and_secrets_refused_but_not_printed(path: str | Path, want: str) -> None:
    if not want.startswith("got "):
        assert checked_path("x", path) == want
        return
    with pytest.raises(InvalidInputError, match=f"^x: {re.escape(want)}") as raised:
        checked_path("x", path)
    assert "hid" not in str(raised.value)


def test_errors_name_unknown_schemes_and_missing_packages() -> None:
    with pytest.raises(InvalidInputError, match=r"got a URL with the scheme 'nope', want a scheme of fsspec"):
        open_file("nope://bucket/a")
    want = r"^sftp URLs: paramiko is not installed; install it with: pip install paramiko$"
    with pytest.raises(ImportError, match=want):
        open_file("sftp://host/a")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError("AWS Error NETWORK_CONNECTION"), OSError, "AWS Error NETWORK_CONNECTION"),
        (FileNotFoundError("no key"), FileNotFoundError, "no key"),
        (PermissionError("no"), PermissionError, "no"),
        (OSError(errno.ETIMEDOUT, "late"), TimeoutError, "late"),
        (RuntimeError("GET https://user:hidden@cdn/a?sig=hidden 403"), OSError, "GET https://cdn/a 403"),
    ],
)
def test_errors_of_a_store_keep_their_words_but_no_secrets(error: Exception, kind: type[OSError], words: str) -> None:
    with pytest.raises(OSError, match=re.escape(words)) as raised, paths._store("memory://b/k"):
        raise error
    assert (type(raised.value), raised.value.filename) == (kind, "memory://b/k")
    assert raised.value.errno
    assert "hidden" not in f"{raised.value} {raised.value.__cause__}"


def test_files_are_found_and_read_on_an_http_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    for name in ("a-0.jsonl", "a-1.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"id": "x"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        folder = f"http://127.0.0.1:{server.server_port}"
        readers = shards(f"{folder}/a-*.jsonl")
        contents = [[raw for _, raw in reader.records()] for reader in readers]
        server.shutdown()
    assert [reader.source for reader in readers] == [f"{folder}/a-0.jsonl", f"{folder}/a-1.jsonl"]
    assert contents == [[{"id": "x"}]] * 2


def test_an_interrupted_upload_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "memory://interrupted/a"
    write(path, b"before")

    def copy(spool: IO[bytes], file: IO[bytes], length: int) -> None:
        file.write(spool.read(2))
        signal.raise_signal(signal.SIGINT)
        file.write(spool.read())

    monkeypatch.setattr("mmpos.data.paths.shutil.copyfileobj", copy)
    with pytest.raises(KeyboardInterrupt):
        write(path, b"after")
    assert read(path) == b"after"


def test_an_upload_that_lost_a_part_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos.data.paths.shutil.copyfileobj", lambda spool, file, _: file.write(spool.read(2)))
    with pytest.raises(OSError, match=r"got 2 bytes after an upload of 5.*'memory://lost/a'"):
        write("memory://lost/a", b"after")
    assert kind_of("memory://lost/a") is None


@pytest.mark.parametrize("fault", ["busy", "cut"])
@pytest.mark.parametrize(("kind", "make"), [("jsonl", write_jsonl), ("tar", write_tar), ("parquet", write_parquet)])
def test_a_failing_store_is_not_a_record_error(
    kind: str, make: Any, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: object, size: int) -> bytes:
        if fault == "busy":
            raise RuntimeError("503 SlowDown")
        return bytes(size // 2)

    path = f"memory://failing/a.{kind}"
    write(path, make(tmp_path / f"a.{kind}", records(0, 9)).read_bytes())
    (reader,) = shards(path)
    monkeypatch.setattr(MemoryFile, "read", fail, raising=False)
    with pytest.raises(OSError, match=rf"(503 SlowDown|the store sent \d+ of \d+ bytes).*'{path}'") as raised:
        list(reader.records())
    assert raised.value.errno == errno.EIO


def test_only_unfinished_uploads_of_our_files_are_removed(s3: Any) -> None:
    s3.create_bucket(Bucket="uploads")
    for key in ("out/a.parquet", "out/sub/b.parquet", "out/c.bin", "outer/d.parquet"):
        s3.create_multipart_upload(Bucket="uploads", Key=key)
    paths.abort_uploads("s3://uploads/out/", _is_ours)
    left = [upload["Key"] for upload in s3.list_multipart_uploads(Bucket="uploads")["Uploads"]]
    assert sorted(left) == ["out/c.bin", "out/sub/b.parquet", "outer/d.parquet"]
    with pytest.warns(UserWarning, match=r"^s3://none/out: uploads of killed runs could not be removed \(.*NoSuch"):
        paths.abort_uploads("s3://none/out", _is_ours)


def test_shards_in_a_store_are_read_like_local_ones(folder: str, tmp_path: Path) -> None:
    here, rows = tmp_path / "here", records(0, 5)
    here.mkdir()
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_jsonl(here / name, rows)
    (here / "b.jsonl.zst").write_bytes(pa.compress((here / "a.jsonl").read_bytes(), "zstd", asbytes=True))
    for name in ("c.tar", "c.tar.gz"):
        write_tar(here / name, rows)
    write_parquet(here / "d.parquet", rows, group=2)
    for path in here.iterdir():
        write(join(folder, path.name), path.read_bytes())

    def read_all(reader: Reader, *arguments: int) -> list[tuple[int, dict[str, object]]]:
        records: Any = reader.records(*arguments)
        return [(location.index, {**record, "__url__": ""}) for location, record in records]

    readers, wanted = (shards([join(path, "*.jsonl*"), join(path, "[cd].*")]) for path in (folder, str(here)))
    assert [reader.source for reader in readers] == [join(folder, Path(reader.source).name) for reader in wanted]
    for reader, want in zip(readers, wanted, strict=True):
        for start, step in ((0, 1), (1, 2), (9, 1)):
            assert read_all(reader, start, step) == read_all(want, start, step), reader
    with pytest.raises(InvalidInputError, match=r"^paths\[1\]: got '.*none\.tar', want a file, or a pattern"):
        shards([join(folder, "c.tar"), join(folder, "none.tar")])


PREPROCESS = """
import json, os, sys
from mmpos import ImageProcessor, SequenceBuilder
from mmpos.data import Pairs, Preprocess, job, shards, storage, write_sequences
job.PART_BYTES, storage.GROUP_ROWS = 2**16, 4
pairs = Preprocess(Pairs(), SequenceBuilder(images=ImageProcessor("pillow", max_tokens=64)))
if __name__ == "__main__":
    print("begun", flush=True)
    write_sequences(shards(sys.argv[1]), sys.argv[2], pairs, on_error="skip", workers=int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("store", ["local", "s3"])
def test_killed_runs_lose_double_and_leave_nothing(store: str, workers: int, s3: Any, tmp_path: Path) -> None:
    bucket, rows = f"killed-{workers}", records(0, 200)
    s3.create_bucket(Bucket=bucket)
    for row in rows:
        row["image"]["bytes"] += bytes(5000)
    rows[7]["image"] = {"bytes": b"broken", "path": None}
    for name in ("a", "b", "c"):
        write_tar(tmp_path / f"{name}.tar", [{**row, "id": f"{name}{row['id']}"} for row in rows])
    (tmp_path / "run.py").write_text(PREPROCESS)
    place = str(tmp_path) if store == "local" else f"s3://{bucket}"

    def finishes(out: str, within: float) -> bool:
        """Run the program, and kill it after this time; return whether it had finished."""
        arguments = [sys.executable, str(tmp_path / "run.py"), f"{tmp_path}/*.tar", out, str(workers)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert process.wait(within) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                return False
        return True

    begun = time.monotonic()
    assert finishes(f"{place}/whole", 300)
    seconds, chance, kills = time.monotonic() - begun, random.Random(0), 0
    while kills < (KILLS if store == "local" else KILLS / 2):  # a run on S3 takes longer
        out = f"{place}/out-{next(_NUMBERS)}"
        while not finishes(out, chance.random() * seconds):
            kills += 1
        keys, errors = list[str](), list[str]()
        for shard in sequence_shards(out):
            keys += [example.key for example in shard.examples()]
            errors += shard.errors()
        assert sorted(keys) == sorted(f"{name}{i}" for name in "abc" for i in range(200) if i != 7)
        assert sorted(map(paths.base_name, errors)) == ["a.tar[7]", "b.tar[7]", "c.tar[7]"]
        left = os.listdir(out) if store == "local" else [paths.base_name(path) for path in matches("*", out)]
        assert all(re.fullmatch(r"_run\.json|[abc](\.part\d{5})?\.parquet", name) for name in left), left
    assert not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


KILLS = int(os.environ.get("MMPOS_KILLS", "10"))
