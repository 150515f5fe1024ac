"""Open, write and list files on this machine and in the stores of fsspec, by path or URL."""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

from mmpos.errors import InvalidInputError, MmposError
from mmpos.support.extras import missing, needed_for
from mmpos.support.files import named, whole_file
from mmpos.support.interrupts import no_interrupts

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/?]*)(.*?)(\?[\w.-]+=.*)?", re.DOTALL | re.IGNORECASE)
_ARROW = ("abfs", "abfss", "gcs", "gs", "s3")  # fsspec's wrapper of pyarrow.fs opens these without another package
_USERS = ("abfs", "abfss", "hdfs")  # schemes whose URLs name a container or a user before an @
_SECRET = re.compile(r"(?<=//)[^/@\s]+@|\?[^\s'\"]+")
_VERSIONS = ("ETag", "etag", "blob_id", "oid", "md5Hash", "generation", "last_modified", "mtime", "created")

_BUFFER, _LOCAL_BUFFER = 2**23, 2**18  # bytes per request, or call, in sequential reads
_COPY, _MEMORY = 2**24, 2**26  # bytes copied at once in an upload, and held in memory; larger uploads are on disk


def checked_path(name: str, path: str | os.PathLike[str]) -> str:
    """Check a path or a URL without opening it, and return it as text.

    >>> checked_path("output", "S3://bucket/folder")
    's3://bucket/folder'

    Raises:
        InvalidInputError: it is neither, or the URL holds credentials, which would be printed and stored, or options.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError(f"{name}: got {path!r}, want a path or a URL")
    text = os.fsdecode(path)
    url = _URL.fullmatch(text)
    if url is None:
        return text
    scheme, authority, rest = url[1].lower(), url[2], url[3]
    user, at, host = authority.rpartition("@")
    is_public = scheme in _USERS or (user == "anonymous" and scheme in ("gs", "gcs"))
    secret = "options" if url[4] else None
    if (at and not is_public) or ":" in user or re.search(r":(?!\d+$)", host):
        secret = "credentials"
    if secret is not None:
        want = f"{secret} in the environment or the configuration of the store"
        raise InvalidInputError(f"{name}: got a URL with the scheme {scheme} and {secret}, want {want}")
    if scheme == "file":  # pathlib turns file:///a into file:/a
        slashes = len(text[5:]) - len(text[5:].lstrip("/"))
        if slashes == 2 and authority != "localhost":
            raise InvalidInputError(f"{name}: got {text!r}, want file:/// and a path on this machine")
        return unquote(rest if slashes == 2 else f"/{authority}{rest}")
    return f"{scheme}://{authority}{rest}"


def is_url(path: str) -> bool:
    """Return whether a checked path is in a store."""
    return _URL.fullmatch(path) is not None


def join(folder: str, name: str) -> str:
    """Return the path of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def base_name(path: str) -> str:
    """Return the last part of a path."""
    return PurePosixPath(path).name


class BytesRead:
    """Bytes of its file, as stored, that the reader of an input used for the last record that it yielded."""

    total: ClassVar[int] = 0


def open_file(path: str) -> io.BufferedReader:
    """Open a file for reading and seeking.

    Raises:
        OSError: the file does not exist or cannot be read, or the store failed even after its client library retried,
            or sent fewer bytes than the file has; raised here or in a later read. The error names the path and has an
            errno.
    """
    if is_url(path):
        return io.BufferedReader(_StoreFile(path), _BUFFER)
    return io.BufferedReader(io.FileIO(path), _LOCAL_BUFFER)


class _StoreFile(io.RawIOBase):
    """Seekable file over an object in a store; its errors name the URL."""

    _file: Any = None

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._at = url, 0
        with _store(url) as (filesystem, key):
            self._file = filesystem.open(key, "rb")
            self._size = self._file.seek(0, io.SEEK_END)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        want = min(len(buffer), self._size - self._at)
        if want <= 0:
            return 0
        with _store(self._url):
            self._file.seek(self._at)
            data = self._file.read(want)
            if len(data) != want:
                raise OSError(errno.EIO, f"the store sent {len(data)} of {want} bytes at byte {self._at}")
        buffer[:want] = data
        self._at += want
        return want

    def close(self) -> None:
        if self._file is not None and not self.closed:
            self._file.close()
        super().close()


def open_parquet(path: str, **options: Any) -> ParquetFile:
    """Open a Parquet file; reads from a store are coalesced, or buffered per column if ``buffer_size`` is set.

    Raises:
        OSError, pyarrow.ArrowException: see pyarrow.parquet.ParquetFile and ``open_file``.
    """
    with needed_for("Parquet files", extra="data"):
        from pyarrow import parquet
    if not is_url(path):
        return parquet.ParquetFile(path, **options)
    if options.get("buffer_size"):
        options["buffer_size"] = _BUFFER
    return parquet.ParquetFile(_StoreFile(path), **{"pre_buffer": True} | options)


@contextmanager
def write_file(path: str) -> Iterator[IO[bytes]]:
    """Write a file whole: it is complete if the block ends without an error, and unchanged otherwise.

    On this machine, a temporary file in the same folder is renamed. For a store, the content is held in memory, or
    above 64 MiB in a temporary file, and uploaded when the block ends.

    Raises:
        OSError: the file cannot be written; the error names the path. An existing file is unchanged.
    """
    if not is_url(path):
        with whole_file(path) as file:
            yield file
        return
    with tempfile.SpooledTemporaryFile(_MEMORY) as spool:
        yield spool
        size = spool.seek(0, io.SEEK_END)
        spool.seek(0)
        # If an exception ended an upload early, the library would still complete the object, truncated.
        with no_interrupts(), _store(path) as (filesystem, key):
            with filesystem.open(key, "wb") as upload:
                shutil.copyfileobj(spool, upload, _COPY)
            if (stored := filesystem.info(key)["size"]) != size:
                filesystem.rm_file(key)
                raise OSError(errno.EIO, f"got {stored} bytes after an upload of {size}; removed the object")


def facts_of(path: str) -> dict[str, object]:
    """Return facts about a file that change when the file is rewritten, in JSON.

    Raises:
        OSError: the file does not exist, or the store does not respond; the error names the path.
    """
    if not is_url(path):
        with named(path):
            status = os.stat(path)
        seconds, rest = divmod(status.st_mtime_ns, 10**9)
        return {"size": status.st_size, "modified": f"{datetime.fromtimestamp(seconds, UTC):%F %T}.{rest:09} UTC"}
    with _store(path) as (filesystem, key):
        info = filesystem.info(key)
    return {"size": info["size"], "version": next((str(info[name]) for name in _VERSIONS if info.get(name)), None)}


def kind_of(path: str) -> str | None:
    """Return whether a path is a "file" or a "folder", or None; a folder in a store exists if files are below it."""
    if not is_url(path):
        return "file" if os.path.isfile(path) else "folder" if os.path.exists(path) else None
    with suppress(FileNotFoundError), _store(path) as (filesystem, key):
        return "file" if filesystem.info(key)["type"] == "file" else "folder"
    return None


def matches(pattern: str, folder: str | None = None) -> list[str]:
    """List the files that match a pattern with ``*``, ``?``, ``[…]`` or ``**``, sorted; see fsspec's glob.

    Raises:
        OSError: the store cannot be listed; the error names the path.
    """
    if folder is not None:
        pattern = join(glob.escape(folder), pattern)
    if not is_url(pattern):
        return sorted(match for match in glob.glob(pattern, recursive=True) if os.path.isfile(match))
    with _store(pattern) as (filesystem, key):
        filesystem.invalidate_cache()
        infos = filesystem.glob(key, detail=True)
    root = _root(pattern)
    base = key.removesuffix(pattern.removeprefix(root))
    files = (name for name, info in infos.items() if info["type"] == "file")
    return sorted(f"{root}/{name.removeprefix(base).lstrip('/')}" for name in files)


def make_folder(path: str) -> None:
    """Create a folder and its parents; do nothing in an object store, which has no folders."""
    if not is_url(path):
        os.makedirs(path, exist_ok=True)
    elif path.partition(":")[0] not in _ARROW:
        with _store(path) as (filesystem, key):
            filesystem.makedirs(key, exist_ok=True)


def remove(path: str) -> None:
    """Remove a file if it exists.

    Raises:
        OSError: the file cannot be removed; the error names the path.
    """
    if not is_url(path):
        Path(path).unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError), _store(path) as (filesystem, key):
        filesystem.rm_file(key)


def abort_uploads(folder: str, is_ours: Callable[[str], bool]) -> None:
    """Remove parts of objects with our names that killed processes uploaded to S3; other stores do this alone."""
    if folder.partition(":")[0] != "s3":
        return
    with needed_for("output on S3", extra="s3"):
        import boto3
    client = boto3.client("s3")
    bucket, _, prefix = f"{folder.removeprefix('s3://').rstrip('/')}/".partition("/")
    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                if is_ours(upload["Key"].removeprefix(prefix)):
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except Exception as error:  # the rights to list and abort uploads are separate from those to write
        public = _SECRET.sub("", str(error))[:300]
        warnings.warn(f"{folder}: uploads of killed runs could not be removed ({public})", UserWarning, stacklevel=4)


@contextmanager
def _store(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the fsspec filesystem of a URL and the path inside it.

    Each error of the store in the block becomes an OSError with the URL, an errno and the library's words, without
    secrets.
    """
    root = _root(url)
    try:
        filesystem, base = _filesystem(root, os.getpid())
        yield filesystem, base + url.removeprefix(root)
    except (MmposError, ImportError):
        raise
    except Exception as error:
        number = getattr(error, "errno", None)
        if not isinstance(number, int):
            kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
            number = next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)
        words = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        public = _SECRET.sub("", " ".join(words.split()))[:300]
        raise OSError(number, public, url) from (error if _SECRET.search(str(error)) is None else None)


def _root(url: str) -> str:
    """Return the URL of the bucket."""
    match = _URL.fullmatch(url)
    assert match is not None, "paths on this machine have no root"
    return f"{match[1]}://{match[2]}"


@lru_cache(maxsize=64)
def _filesystem(root: str, pid: int) -> tuple[Any, str]:
    """Open the filesystem of a bucket, once in each process, since connections do not survive a fork."""
    with needed_for("URLs", extra="data"):
        import fsspec
        from fsspec.implementations.arrow import ArrowFSWrapper
        from fsspec.registry import known_implementations
        from pyarrow import fs
    scheme = root.partition(":")[0]
    if scheme in _ARROW:
        filesystem, base = fs.FileSystem.from_uri(root)
        return ArrowFSWrapper(filesystem), base.rstrip("/")
    if scheme not in known_implementations and scheme not in fsspec.available_protocols():
        raise InvalidInputError(f"{root}: got a URL with the scheme {scheme!r}, want a scheme of fsspec")
    try:
        filesystem, base = fsspec.core.url_to_fs(root)
    except ImportError as error:
        module = known_implementations[scheme]["class"].partition(".")[0]
        if module == "fsspec":  # the module is part of fsspec but needs another package
            module = getattr(error.__cause__, "name", None) or str(error)
        raise missing(f"{scheme} URLs", module.replace("_", "-"), extra=None) from error
    return filesystem, str(base).rstrip("/")
