"""Read JSON and write files atomically, with errors that contain the file names."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["leftovers", "local_path", "named", "read_json", "whole_file", "write_text"]

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL | re.IGNORECASE)
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Check that a path is not a URL, which pathlib would turn into a local path such as ``./s3:/bucket``.

    >>> local_path("folder", "s3://bucket/out")
    Traceback (most recent call last):
    mmpos.errors.InvalidInputError: folder: got 's3://bucket/out', want a path on this machine, not a URL
    """
    url = _URL.fullmatch(os.fsdecode(path))
    if url:
        got = path if isinstance(path, str) else f"{url[1]}://{url[2]}"  # pathlib drops one of the slashes
        raise InvalidInputError(f"{name}: got {got!r}, want a path on this machine, not a URL")
    return Path(path)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a temporary file in the same folder, and rename it to ``path`` when the block ends without an error.

    A reader sees either the old file or the new one, never a partial file, even after a crash or a power failure. A
    link stays a link, and a device or a pipe is written to directly.

    Args:
        path: file to write; an existing file is replaced.

    Yields:
        A file to write bytes to. It exposes no descriptor, because libraries that write to a descriptor do not report
        what failed.

    Raises:
        OSError: the file cannot be written; the error contains the path, whichever call failed.
    """
    with named(path):
        if os.path.isdir(path):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        target = Path(os.path.realpath(path))
        beside = os.path.isfile(path) or not os.path.exists(path)
        written = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp") if beside else Path(path)
        raw = _Raw(written, "x" if beside else "w", path)
    file = io.BufferedWriter(raw)
    try:
        yield file
        with named(path):
            file.flush()
            if beside:
                raw.sync()
            file.close()
            if beside:
                if target.exists():
                    shutil.copymode(target, written)
                written.replace(target)
    except BaseException:
        with suppress(OSError):  # the rest of the buffer cannot be written either
            file.close()
        if beside:
            written.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some systems cannot open folders to sync the new name
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8 with ``whole_file``.

    Raises:
        OSError: the file cannot be written; the error contains the path.
    """
    with whole_file(path) as file:
        file.write(text.encode())


def leftovers(folder: Path, is_ours: Callable[[str], bool]) -> list[Path]:
    """List the temporary files that killed writers left in a folder."""
    matches = ((path, _TEMPORARY.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(path for path, match in matches if match and is_ours(match[1]))


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Replace the path in operating-system errors with ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), os.fspath(path)) from None


class _Raw(io.FileIO):
    """File whose errors contain its final path."""

    def __init__(self, written: Path, mode: str, path: str | os.PathLike[str]) -> None:
        super().__init__(written, mode)
        self._path = path

    def write(self, data: Buffer, /) -> int:
        with named(self._path):
            return super().write(data)

    def sync(self) -> None:
        os.fsync(super().fileno())

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        InvalidInputError: the file cannot be read or does not contain a JSON object; the message names the file and the
            line.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        at, got = f"{path}:{error.lineno}", f"no valid JSON ({error.msg}, column {error.colno})"
    except (ValueError, RecursionError) as error:
        at, got = str(path), f"no valid JSON ({error})"
    except OSError as error:
        at, got = str(path), error.strerror or str(error)
    else:
        if isinstance(values, dict):
            return values
        at, got = str(path), type(values).__name__
    raise InvalidInputError(f"{at}: got {got}, want a JSON object")
