"""A unix socket to listen on: a file that is never open to more than it should be, and that nobody else loses."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mmpos.errors import InvalidInputError

__all__ = ["Uds"]

_LONGEST = 107  # bytes of a path that sockaddr_un of Linux holds, without the zero after it


@dataclass(frozen=True)
class Uds:
    """Where a unix socket is, and who may use it.

    Args:
        path: of the socket; a stale one there is replaced.
        mode: its permissions; to connect is to write.

    Raises:
        InvalidInputError: a path that is too long for a socket, or a mode that is none.
    """

    path: Path
    mode: int = 0o600

    def __post_init__(self) -> None:
        size = len(os.fsencode(self.path))
        if size > _LONGEST:
            raise InvalidInputError(f"uds: got a path of {size} bytes, want <= {_LONGEST}: {self.path}")
        if not 0 <= self.mode <= 0o777:
            raise InvalidInputError(f"uds-mode: got {self.mode:o}, want permissions from 0 to 777")

    @property
    def address(self) -> str:
        """As clients write it."""
        return f"unix:{self.path}"

    def check(self) -> None:
        """See that a server can be there.

        Raises:
            InvalidInputError: a live server has it, or something else is there, or its folder is not.
        """
        try:
            if not self.path.parent.is_dir():
                raise InvalidInputError(f"uds: got {self.path}, want a path in a folder that exists")
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidInputError(f"uds: got {self.path} ({error.strerror}), want a path to listen on") from None
        if not stat.S_ISSOCK(kind):
            raise InvalidInputError(f"uds: got {self.path}, where something else is, want a free path")
        with socket.socket(socket.AF_UNIX) as found:
            found.settimeout(1.0)
            try:
                found.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                return  # whoever made it is gone
            except OSError:
                pass  # somebody is there, with a full queue or not for us
        raise InvalidInputError(f"uds: got {self.path}, which is taken, want a free one")

    def listen(self, add: Callable[[str], object]) -> Callable[[], None]:
        """Have a socket listened on.

        It is made in a folder that nobody else can enter, and put in its place when its permissions are right. So the
        process's umask, which all threads share, stays as it is; and gRPC, which in the end deletes whatever is at
        the path that it was given, finds nothing there.

        Args:
            add: listens on an address of gRPC.

        Returns:
            What removes the socket, if it is still this one that is at the path.

        Raises:
            InvalidInputError: see ``check``, or the folder cannot be written to.
        """
        self.check()
        try:
            with tempfile.TemporaryDirectory(prefix=".mmpos-", dir=self.path.parent) as folder:
                made = self._make(folder, add)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidInputError(f"uds: got {self.path} ({reason}), want a path to listen on") from None

        def remove() -> None:
            with suppress(OSError):
                if _identity(self.path.lstat()) == made:
                    self.path.unlink()

        return remove

    def _make(self, folder: str, add: Callable[[str], object]) -> tuple[int, int]:
        """Make the socket in the folder and move it from there; gives what tells it from others."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # A name of its own also for who reads it when the number stands for another folder.
            name = Path(folder).name
            # By the number of the folder, so that a long path of it makes none that is too long.
            add(f"unix:/proc/self/fd/{fd}/{name}")
            os.chmod(name, self.mode, dir_fd=fd)
            made = _identity(os.stat(name, dir_fd=fd))
            os.rename(name, self.path, src_dir_fd=fd)
        finally:
            os.close(fd)
        return made


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
