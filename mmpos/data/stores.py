"""Read, write and list files on this machine and in object stores through one path class."""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

from mmpos.errors import InvalidInputError, MmposError
from mmpos.support.extras import missing, needed_for
from mmpos.support.files import named, whole_file
from mmpos.support.interrupts import no_interrupts

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

__all__ = ["StorePath", "open_parquet", "store_path"]

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/?]*)(.*?)(\?[\w.-]+=.*)?", re.DOTALL | re.IGNORECASE)
_ARROW = ("abfs", "abfss", "gcs", "gs", "s3")  # schemes that pyarrow.fs opens
_USERS = ("abfs", "abfss", "hdfs")  # schemes whose URLs name a container or a user before an @
_OPTIONS = {"endpoint_override", "region", "retry_limit_seconds", "scheme"}

_BUFFER = 2**23  # bytes per request in sequential reads
_COPY = 2**24  # bytes copied at once in an upload
_MEMORY = 2**26  # bytes of an upload held in memory; larger uploads are held on disk


@dataclass(frozen=True, order=True)
class StorePath:
    """Path of a file or a folder on this machine or in an object store; create it with ``store_path``.

    A path holds no connection and no credentials: it can be pickled and printed. A path on this machine works as an
    ``os.PathLike``.

    Args:
        text: the path on this machine, or the URL.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        if self.is_url:
            raise TypeError(f"got {self.text!r}, want a path on this machine, not a URL")
        return self.text

    def __truediv__(self, name: str) -> StorePath:
        head, options = self._split()
        return StorePath(f"{head.rstrip('/')}/{name}{options}" if self.is_url else os.path.join(self.text, name))

    @property
    def is_url(self) -> bool:
        """Whether the path is in a store."""
        return _URL.fullmatch(self.text) is not None

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self._split()[0]).name

    @property
    def stem(self) -> str:
        """Last part of the path, without its last suffix."""
        return PurePosixPath(self._split()[0]).stem

    @property
    def parent(self) -> StorePath:
        """Folder of the path."""
        head, options = self._split()
        return StorePath(head.rstrip("/").rpartition("/")[0] + options if self.is_url else str(Path(head).parent))

    def with_name(self, name: str) -> StorePath:
        """Return the path with this name in the same folder."""
        return self.parent / name

    def exists(self) -> bool:
        """Return whether the path is a file or a folder; a folder in a store exists if there are files below it."""
        if not self.is_url:
            return os.path.exists(self.text)
        return self._info().type.name != "NotFound"

    def is_file(self) -> bool:
        """Return whether the path is a file."""
        return bool(self._info().is_file) if self.is_url else os.path.isfile(self.text)

    def identity(self) -> dict[str, object]:
        """Return JSON-compatible file metadata that changes whenever the file is rewritten.

        Returns:
            ``size`` in bytes; for a file on this machine, also ``changed``, its modification and status change times in
            nanoseconds; for an object, also ``version``, its ETag or checksum if the store has one, else the time of
            the last change.

        Raises:
            OSError: the file does not exist, or the store does not respond; the error names the path.
        """
        if not self.is_url:
            with named(self.text):
                status = os.stat(self.text)
            return {"size": status.st_size, "changed": [status.st_mtime_ns, status.st_ctime_ns]}
        with _errors_of(self):
            if self._scheme == "s3":
                head = _s3_client(self._root, os.getpid()).head_object(**self._s3_names())
                return {"size": head["ContentLength"], "version": head["ETag"].strip('"')}
            if self._scheme not in _ARROW:
                facts = _unwrapped(self._filesystem()).info(self._key)
                names = ("ETag", "etag", "blob_id", "oid", "md5Hash", "generation", "last_modified", "mtime", "created")
                version = next((str(facts[name]) for name in names if facts.get(name)), None)
                return {"size": facts["size"], "version": version}
            info = self._info()
            if not info.is_file:
                raise FileNotFoundError
            return {"size": info.size, "version": str(info.mtime_ns)}

    def open(self) -> io.BufferedReader:
        """Open a file for reading and seeking.

        If a store sends fewer bytes than the file contains, reading raises an error; the file never appears shorter
        than it is.

        Raises:
            OSError: the file does not exist or cannot be read, or the store failed even after its client library
                retried; raised here or in a later read. The error names the path and has an errno.
        """
        if not self.is_url:
            return open(self.text, "rb")
        return io.BufferedReader(_ObjectFile(self), _BUFFER)

    def read_bytes(self) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: see ``open``.
        """
        with self.open() as file:
            return file.read()

    @contextmanager
    def write(self) -> Iterator[IO[bytes]]:
        """Write a file atomically: it is complete if the block ends without an error, and unchanged otherwise.

        On this machine, a temporary file in the same folder is renamed. For a store, the content is held in memory, or
        above 64 MiB in a temporary file, and uploaded when the block ends.

        Yields:
            A file to write bytes to.

        Raises:
            OSError: the file cannot be written; the error names the path. An existing file is unchanged.
        """
        if not self.is_url:
            with whole_file(self.text) as file:
                yield file
            return
        with tempfile.SpooledTemporaryFile(_MEMORY) as spool:
            yield spool
            self._upload(spool)

    def write_bytes(self, data: bytes) -> None:
        """Write a file atomically.

        Raises:
            OSError: see ``write``.
        """
        with self.write() as file:
            file.write(data)

    def glob(self, pattern: str) -> list[StorePath]:
        """List the files below this folder that match a pattern with ``*``, ``?``, ``[…]`` or ``**``, sorted.

        Raises:
            OSError: the store cannot be listed; the error names the path.
        """
        if not self.is_url:
            return (StorePath(glob.escape(self.text)) / pattern).matches()
        head, options = self._split()
        return StorePath(f"{glob.escape(head).rstrip('/')}/{pattern}{options}").matches()

    def matches(self) -> list[StorePath]:
        """List the files that match this path as a pattern, sorted.

        Raises:
            OSError: see ``glob``.
        """
        if not self.is_url:
            return sorted(StorePath(match) for match in glob.glob(self.text, recursive=True) if os.path.isfile(match))
        with _errors_of(self):
            infos = _unwrapped(self._filesystem()).glob(self._key, detail=True)
            root, question, options = self._root.partition("?")
            start = len(self._base)
        files = (name for name, info in infos.items() if info["type"] == "file")
        return sorted(StorePath(f"{root}/{name[start:].lstrip('/')}{question}{options}") for name in files)

    def make_folder(self) -> None:
        """Create a folder and its parents; do nothing in an object store, which has no folders."""
        if not self.is_url:
            os.makedirs(self.text, exist_ok=True)
        elif self._scheme not in _ARROW:
            with _errors_of(self):
                _unwrapped(self._filesystem()).makedirs(self._key, exist_ok=True)

    def remove(self) -> None:
        """Remove a file if it exists.

        Raises:
            OSError: the file cannot be removed; the error names the path.
        """
        if not self.is_url:
            Path(self.text).unlink(missing_ok=True)
        elif self.is_file():
            with _errors_of(self):
                self._filesystem().delete_file(self._key)

    def _split(self) -> tuple[str, str]:
        """Return the path without the URL options, and the options."""
        url = _URL.fullmatch(self.text)
        options = (url[4] if url else None) or ""
        return self.text[: len(self.text) - len(options)], options

    @property
    def _scheme(self) -> str:
        return self.text.partition(":")[0]

    @property
    def _root(self) -> str:
        """URL of the bucket with its options, from which a filesystem is opened."""
        url = _URL.fullmatch(self.text)
        assert url is not None, "paths on this machine have no root"
        return f"{url[1]}://{url[2]}{url[4] or ''}"

    @property
    def _key(self) -> str:
        """Path inside the filesystem, including the bucket."""
        head, _ = self._split()
        return self._base + head.removeprefix(self._root.partition("?")[0])

    @property
    def _base(self) -> str:
        """Path of the bucket inside the filesystem."""
        return _filesystem(self._root, os.getpid())[1]

    def _filesystem(self) -> Any:
        return _filesystem(self._root, os.getpid())[0]

    def _info(self) -> Any:
        with _errors_of(self):
            return self._filesystem().get_file_info(self._key)

    def _s3_names(self) -> dict[str, str]:
        bucket, _, key = self._key.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _upload(self, spool: IO[bytes]) -> None:
        size = spool.seek(0, io.SEEK_END)
        spool.seek(0)
        # If an exception ended the block early, the library's stream would still complete the object, truncated.
        with no_interrupts(), _errors_of(self):
            with self._filesystem().open_output_stream(self._key, compression=None) as file:
                shutil.copyfileobj(spool, file, _COPY)
            stored = self._filesystem().get_file_info(self._key).size
        if stored != size:
            self.remove()
            raise _failed(self, errno.EIO, f"got {stored} bytes after an upload of {size}; removed the object")


def store_path(name: str, path: str | os.PathLike[str]) -> StorePath:
    """Check a path or a URL without opening it.

    >>> store_path("output", "s3://bucket/folder/") / "a.parquet"
    StorePath(text='s3://bucket/folder/a.parquet')

    Args:
        name: name of the argument in error messages.
        path: path on this machine, or URL with a scheme that pyarrow.fs or fsspec opens; ``file:`` means this machine.

    Raises:
        InvalidInputError: the URL holds credentials, which would be printed and stored, or an unknown option.
    """
    if isinstance(path, StorePath):
        return path
    text = os.fsdecode(path)
    url = _URL.fullmatch(text)
    if url is None:
        return StorePath(text)
    scheme, authority, rest, options = url[1].lower(), url[2], url[3], url[4] or ""
    user, at, host = authority.rpartition("@")
    anonymous = user == "anonymous" and scheme in ("gs", "gcs")
    names_user = at and scheme not in _USERS and not anonymous
    if names_user or ":" in user or re.search(r":(?!\d+$)", host):
        want = "credentials in the environment or the configuration of the store"
        raise InvalidInputError(f"{name}: got a URL with the scheme {scheme} and credentials, want {want}")
    if unknown := set(parse_qs(options[1:], keep_blank_values=True)) - (_OPTIONS if scheme in _ARROW else set()):
        want = ", ".join(sorted(_OPTIONS)) if scheme in _ARROW else "a URL without options"
        raise InvalidInputError(
            f"{name}: got a URL with the scheme {scheme} and the option {min(unknown)!r}, want {want}"
        )
    if scheme == "file":
        # file:///a means /a, and so does file:/a, because pathlib turns the first into the second.
        slashes = text[5 : 5 + len(text[5:]) - len(text[5:].lstrip("/"))]
        if len(slashes) == 2 and authority != "localhost":
            raise InvalidInputError(f"{name}: got {text!r}, want file:/// and a path on this machine")
        return StorePath(unquote(rest if len(slashes) == 2 else f"/{authority}{rest}"))
    return StorePath(f"{scheme}://{authority}{rest}{options}")


def open_parquet(path: StorePath, **options: Any) -> ParquetFile:
    """Open a Parquet file; reads from a store are coalesced, or buffered per column if ``buffer_size`` is set.

    Args:
        path: the file.
        options: options for ``pyarrow.parquet.ParquetFile``; a ``buffer_size`` is raised to 8 MiB for a store.

    Raises:
        OSError, pyarrow.ArrowException: see ParquetFile; an OSError from a store names the path and has an errno.
    """
    with needed_for("Parquet files", extra="data"):
        from pyarrow import parquet
    if not path.is_url:
        return parquet.ParquetFile(path.text, **options)
    if options.get("buffer_size"):
        options["buffer_size"] = _BUFFER
    return parquet.ParquetFile(_ObjectFile(path), **{"pre_buffer": True} | options)


class _ObjectFile(io.RawIOBase):
    """Seekable file over an object in a store; its errors name the URL.

    Args:
        path: URL of the object.
    """

    def __init__(self, path: StorePath) -> None:
        super().__init__()
        self._path, self._at = path, 0
        with _errors_of(path):
            self._file = path._filesystem().open_input_file(path._key)
            self._size = int(self._file.size())

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
            with _errors_of(self._path):
                data = self._file.read_at(want, self._at)
            if len(data) != want:
                raise _failed(self._path, errno.EIO, f"the store sent {len(data)} of {want} bytes at byte {self._at}")
            view[:want] = data
            self._at += want
        return want

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@lru_cache(maxsize=64)
def _filesystem(root: str, pid: int) -> tuple[Any, str]:
    """Open the filesystem of a bucket, and return the filesystem and the path of the bucket inside it.

    The cache is keyed by process, since connections do not survive a fork.
    """
    with needed_for("URLs", extra="data"):
        from pyarrow import fs
    if root.partition(":")[0] in _ARROW:
        filesystem, base = fs.FileSystem.from_uri(root)
    else:
        filesystem, base = _fsspec(root)
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
    return filesystem, base.rstrip("/")


def _fsspec(root: str) -> tuple[Any, str]:
    """Open the filesystem of a bucket with fsspec, and return the filesystem and the path of the bucket inside it."""
    with needed_for("URLs", extra="data"):
        import fsspec
        from fsspec.registry import known_implementations
    scheme = root.partition(":")[0]
    try:
        filesystem, base = fsspec.core.url_to_fs(root)
        return filesystem, str(base)
    except ImportError as error:
        module = known_implementations[scheme]["class"].partition(".")[0]
        if module == "fsspec":  # the module is part of fsspec but needs another package
            module = getattr(error.__cause__, "name", None) or str(error)
        raise missing(f"{scheme} URLs", module.replace("_", "-"), extra=None) from error
    except ValueError as error:
        if scheme in known_implementations:
            raise
        raise InvalidInputError(
            f"{root}: got a URL with the scheme {scheme!r}, want a scheme of pyarrow.fs or fsspec"
        ) from error


def _unwrapped(filesystem: Any) -> Any:
    """Return the fsspec equivalent of a pyarrow filesystem, which supports patterns."""
    with needed_for("URLs", extra="data"):
        from fsspec.implementations.arrow import ArrowFSWrapper
    handler = getattr(filesystem, "handler", None)
    return ArrowFSWrapper(filesystem) if handler is None else handler.fs


@lru_cache(maxsize=64)
def _s3_client(root: str, pid: int) -> Any:
    """Create an S3 client for ETags, which pyarrow lacks."""
    with needed_for("versions of objects on S3", extra="s3"):
        import boto3
    options = {name: values[0] for name, values in parse_qs(root.partition("?")[2]).items()}
    endpoint = options.get("endpoint_override")
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    return boto3.client("s3", endpoint_url=endpoint, region_name=options.get("region"))


@contextmanager
def _errors_of(path: StorePath) -> Iterator[None]:
    """Convert every store error to an OSError that names the path and has an errno."""
    try:
        yield
    except (MmposError, ImportError):
        raise
    except Exception as error:
        raise _failed(path, _number(error, path), str(error) or type(error).__name__) from error


def _number(error: Exception, path: StorePath) -> int:
    """Return the errno for a store error, based on its type, its HTTP status, or its message without the path."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, PermissionError | FileNotFoundError):
        return errno.EACCES if isinstance(error, PermissionError) else errno.ENOENT
    response = getattr(error, "response", error)
    if isinstance(response, dict):  # a botocore error
        status = response["ResponseMetadata"]["HTTPStatusCode"]
    else:
        status = getattr(response, "status_code", getattr(response, "status", None))
    if status is not None:
        return {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}.get(status, errno.EIO)
    words = str(error)
    for name in filter(None, (path.text, *path.text.partition("://")[2].split("/", 1), path.name)):
        words = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "", words)
    denied = r"access.?denied|permission.?denied|status:? 40[13]\b|no ?credentials|unable to locate credentials"
    absent = r"status:? 404\b|no.?such.?(bucket|key)|resource.?not.?found"
    if re.search(denied, words, re.I):
        return errno.EACCES
    return errno.ENOENT if re.search(absent, words, re.I) else errno.EIO


def _failed(path: StorePath, number: int, words: str) -> OSError:
    standard = os.strerror(number)
    detail = "" if not path.is_url or words.startswith("[Errno") else f" ({' '.join(words.split())[:300]})"
    return OSError(number, f"{standard}{detail}", path.text)
