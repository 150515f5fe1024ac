"""One run a folder: a lock that the kernel gives back when its holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmpos.errors import InvalidInputError
from mmpos.support.files import named

__all__ = ["locked"]

_NAME = ".mmpos.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs from writing to a folder.

    The lock is an flock of a file that names its holder and is removed in the end. Killed holders leave the file, which
    locks nothing. Over NFS the lock holds among all machines, unless it is mounted with local_lock; some other network
    filesystems lock one machine only, or know no locks, of which a RuntimeWarning tells.

    Raises:
        InvalidInputError: another run has the lock, in this process or any other.
        OSError: the file cannot be made; the error names it.
    """
    path = folder / _NAME
    while True:
        with named(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(file, folder)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    break
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the holder before has removed it meanwhile
    try:
        with suppress(OSError):  # on a full disk the holder has no name
            os.truncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: whoever opened it before looks whether it is still there
        os.close(file)


def _take(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = b""
        with suppress(OSError):  # where locks keep readers off
            holder = os.pread(file, 200, 0)
        name = holder.decode(errors="replace") or "another process"
        raise InvalidInputError(
            f"folder: got {str(folder)!r}, to which {name} is writing, want one run at a time"
        ) from None
    except OSError as error:
        said = f"{folder} cannot be locked ({error.strerror}): see that no other run writes to it"
        warnings.warn(said, RuntimeWarning, stacklevel=5)  # the caller of write_sequences
