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
from contextlib import contextmanager
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

_BUFFER = 2**23  # bytes per request in sequential reads
_LOCAL_BUFFER = 2**18
_COPY = 2**24  # bytes copied at once in an upload
_MEMORY = 2**26  # bytes of an upload held in memory; larger uploads are held on disk


def checked_path(name: str, path: str | os.PathLike[str]) -> str:
    """Check a path or a URL without opening it, and return it as text.

    >>> checked_path("output", "S3://bucket/folder")
    's3://bucket/folder'

    Raises:
        InvalidInputError: the URL holds credentials, which would be printed and stored, or options.
    """
    text = os.fsdecode(path)
    url = _URL.fullmatch(text)
    if url is None:
        return text
    scheme, authority, rest = url[1].lower(), url[2], url[3]
    user, at, host = authority.rpartition("@")
    anonymous = user == "anonymous" and scheme in ("gs", "gcs")
    if (at and scheme not in _USERS and not anonymous) or ":" in user or re.search(r":(?!\d+$)", host):
        want = "credentials in the environment or the configuration of the store"
        raise InvalidInputError(f"{name}: got a URL with the scheme {scheme} and credentials, want {want}")
    if url[4]:
        got, want = (
            f"a URL with the scheme {scheme} and options",
            "options in the environment or fsspec's configuration",
        )
        raise InvalidInputError(f"{name}: got {got}, want {want}")
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
    """Number of bytes that this process has read from files that ``open_file`` opened."""

    total: ClassVar[int] = 0


def open_file(path: str) -> io.BufferedReader:
    """Open a file for reading and seeking.

    Raises:
        OSError: the file does not exist or cannot be read, or the store failed even after its client library retried,
            or sent fewer bytes than the file has; raised here or in a later read. The error names the path and has an
            errno.
    """
    return io.BufferedReader(_StoreFile(path), _BUFFER) if is_url(path) else _open_local(path)


def _open_local(path: str) -> io.BufferedReader:
    return io.BufferedReader(_LocalFile(path), _LOCAL_BUFFER)


class _LocalFile(io.FileIO):
    """File on this machine that counts the bytes that are read."""

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer) or 0
        BytesRead.total += size
        return size


class _StoreFile(io.RawIOBase):
    """Seekable file over an object in a store; its errors name the URL."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self._at = url, 0
        with _naming(url):
            filesystem, key = _located(url)
            self._file = filesystem.open(key, "rb")
            size = getattr(self._file, "size", None)
            self._size = self._file.seek(0, io.SEEK_END) if size is None else size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        want = max(0, min(len(view), self._size - self._at))
        if want:
            with _naming(self._url):
                self._file.seek(self._at)
                data = self._file.read(want)
                if len(data) != want:
                    raise OSError(errno.EIO, f"the store sent {len(data)} of {want} bytes at byte {self._at}")
            view[:want] = data
            self._at += want
            BytesRead.total += want
        return want

    def close(self) -> None:
        if not self.closed and hasattr(self, "_file"):
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
        with no_interrupts(), _naming(path):
            filesystem, key = _located(path)
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
    info = _info(path)
    return {"size": info["size"], "version": next((str(info[name]) for name in _VERSIONS if info.get(name)), None)}


def kind_of(path: str) -> str | None:
    """Return whether a path is a "file" or a "folder", or None; a folder in a store exists if files are below it."""
    if not is_url(path):
        return "file" if os.path.isfile(path) else "folder" if os.path.exists(path) else None
    try:
        return "file" if _info(path)["type"] == "file" else "folder"
    except FileNotFoundError:
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
    with _naming(pattern):
        filesystem, key = _located(pattern)
        filesystem.invalidate_cache()
        infos = filesystem.glob(key, detail=True)
    root, base = _root_of(pattern)
    files = (name for name, info in infos.items() if info["type"] == "file")
    return sorted(f"{root}/{name[len(base) :].lstrip('/')}" for name in files)


def make_folder(path: str) -> None:
    """Create a folder and its parents; do nothing in an object store, which has no folders."""
    if not is_url(path):
        os.makedirs(path, exist_ok=True)
    elif path.partition(":")[0] not in _ARROW:
        with _naming(path):
            filesystem, key = _located(path)
            filesystem.makedirs(key, exist_ok=True)


def remove(path: str) -> None:
    """Remove a file if it exists.

    Raises:
        OSError: the file cannot be removed; the error names the path.
    """
    if not is_url(path):
        Path(path).unlink(missing_ok=True)
    elif kind_of(path) == "file":
        with _naming(path):
            filesystem, key = _located(path)
            filesystem.rm_file(key)


def abort_uploads(folder: str, is_ours: Callable[[str], bool]) -> None:
    """Remove parts of objects with our names that killed processes uploaded to S3; other stores do this alone."""
    if folder.partition(":")[0] != "s3":
        return
    with needed_for("output on S3", extra="s3"):
        import boto3
    client = boto3.client("s3")
    bucket, _, prefix = f"{_located(folder)[1].rstrip('/')}/".partition("/")
    try:
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
        uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            if is_ours(upload["Key"].removeprefix(prefix)):
                client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except Exception as error:  # the rights to list and abort uploads are separate from those to write
        public = _SECRET.sub("", str(error))[:300]
        warnings.warn(f"{folder}: uploads of killed runs could not be removed ({public})", UserWarning, stacklevel=4)


def _info(url: str) -> Any:
    with _naming(url):
        filesystem, key = _located(url)
        return filesystem.info(key)


def _located(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the path inside the filesystem."""
    root, base = _root_of(url)
    return _filesystem(root, os.getpid())[0], base + url.removeprefix(root)


def _root_of(url: str) -> tuple[str, str]:
    """Return the URL of the bucket, and the path of the bucket inside its filesystem."""
    match = _URL.fullmatch(url)
    assert match is not None, "paths on this machine have no root"
    root = f"{match[1]}://{match[2]}"
    return root, _filesystem(root, os.getpid())[1]


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


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Raise each error of a store as an OSError with the URL, an errno and the library's words, without secrets."""
    try:
        yield
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
