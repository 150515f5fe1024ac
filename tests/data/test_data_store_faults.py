"""Failing stores: requests are retried, or an error names the URL; partial files are never taken for complete ones."""

from __future__ import annotations

import errno
import io
import re
import tarfile
from collections.abc import Callable, Iterator
from itertools import count

import pyarrow as pa
import pytest
from faulty_store import Fault, FaultyStore, faulty_store
from pyarrow import parquet
from s3 import ENVIRONMENT, make_bucket, s3_server

from mmpos.data import shards
from mmpos.data.paths import join, kind_of, open_file, write_file

_NUMBERS = count()
DATA = bytes(range(256)) * 256


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def faults(server: str) -> Iterator[FaultyStore]:
    with faulty_store(server) as store:
        yield store
        assert not store.unused


@pytest.fixture
def path(server: str, faults: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a file to the store behind the proxy."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{faults.address}"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"faulty-{next(_NUMBERS)}"
    make_bucket(server, bucket)
    path = f"s3://{bucket}/in/data.bin"
    write(path, DATA)
    return path


def write(path: str, data: bytes) -> None:
    with write_file(path) as file:
        file.write(data)


def read(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


@pytest.mark.parametrize("fault", ["slow", "busy", "cut"])
def test_a_request_that_fails_once_is_retried(fault: Fault, faults: FaultyStore, path: str) -> None:
    faults.fail(fault, "GET", "data.bin", times=1)
    assert read(path) == DATA
    if fault != "cut":  # responses to HEAD and PUT have no body to cut off
        faults.fail(fault, "HEAD", "data.bin", times=1)
        faults.fail(fault, "PUT", "data.bin", times=1)
    write(path, DATA[:-1])
    assert read(path) == DATA[:-1]


SLOW = pytest.mark.slow  # the storage library retries for several seconds


@pytest.mark.parametrize("fault", [pytest.param("busy", marks=SLOW), pytest.param("cut", marks=SLOW), "denied"])
def test_a_failed_read_names_the_url(fault: Fault, faults: FaultyStore, path: str) -> None:
    faults.fail(fault, "GET", "data.bin")
    with pytest.raises(OSError, match=re.escape(repr(path))) as raised:
        read(path)
    assert raised.value.errno == errno.EIO


def _tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for i in range(3):
            member = tarfile.TarInfo(f"{i}.txt")
            member.size = 1000
            tar.addfile(member, io.BytesIO(bytes(range(200)) * 5))
    return packed.getvalue()


def _table() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"n": range(1000)}), file, row_group_size=100)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.tar", _tar), ("a.parquet", _table), ("a.jsonl", lambda: b'{"n": 1}\n' * 100)],
    ids=["tar", "parquet", "jsonl"],
)
@SLOW
@pytest.mark.parametrize("fault", ["busy", "cut"])
def test_a_failing_store_is_not_a_record_error(
    fault: Fault, name: str, data: Callable[[], bytes], faults: FaultyStore, path: str
) -> None:
    shard = join(path.rpartition("/")[0], name)
    write(shard, data())
    (reader,) = shards(shard)
    faults.fail(fault, "GET", name)
    with pytest.raises(OSError, match=re.escape(repr(shard))) as raised:
        list(reader.records())
    assert raised.value.errno == errno.EIO


@pytest.mark.parametrize("fault", [pytest.param("busy", marks=SLOW), "denied"])
def test_a_failed_upload_leaves_the_existing_file_unchanged(fault: Fault, faults: FaultyStore, path: str) -> None:
    faults.fail(fault, "PUT", "data.bin")
    with pytest.raises(OSError, match=re.escape(repr(path))):
        write(path, b"after")
    assert read(path) == DATA


def test_losing_part_of_an_upload_causes_an_error_and_leaves_no_file(faults: FaultyStore, path: str) -> None:
    large = join(path.rpartition("/")[0], "large.bin")
    faults.fail("lost", "PUT", "partNumber=2")
    with pytest.raises(OSError, match=re.escape(repr(large))):
        write(large, bytes(12 * 2**20))
    assert kind_of(large) is None
