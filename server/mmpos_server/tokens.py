"""Who may call: a file of names and their tokens, of which digests alone are kept, read again when it changes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, is_token

if TYPE_CHECKING:
    from mmpos_server.logs import Logs

__all__ = ["LEAST_CHARACTERS", "Tokens"]

LEAST_CHARACTERS = 16
"""A token of fewer could be guessed."""

_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

_Version = tuple[int, int, int, int]


class Tokens:
    """The tokens of a file: one "NAME TOKEN" in a line, or a comment after "#"; a name may have several.

    Two valid tokens of one name are a rotation: the new one is added, clients change, the old one is taken away.

    Args:
        path: the file.
        logs: where it is written that a new version of the file is wrong; it is then as if it had not changed.

    Raises:
        InvalidInputError: the file is wrong; the message names file and line, and never says what stands there.
    """

    def __init__(self, path: Path, logs: Logs) -> None:
        self._path, self._logs = path, logs
        self._version: _Version | None
        self._version, self._names = _read(path)

    def name(self, token: str) -> str | None:
        """Whose token it is; None if it is nobody's."""
        return self._names.get(_digest(token))

    def refresh(self) -> None:
        """Read the file again if it has changed; from any thread, one at a time."""
        try:
            found = os.stat(self._path)
        except OSError:
            found = None
        version = None if found is None else file_version(found)
        if version == self._version:
            return
        # Noted before it is read: what is wrong is said once, and what is written meanwhile is read the next time.
        self._version = version
        try:
            if found is not None and not stat.S_ISREG(found.st_mode):
                raise InvalidInputError(f"{self._path}: got a pipe or the like, want a file: it is not waited for")
            self._version, self._names = _read(self._path)
        except InvalidInputError as error:
            self._logs.error("tokens stay as they were", reason=str(error))
        else:
            self._logs.info("tokens read", file=str(self._path), clients=len(set(self._names.values())))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path) -> tuple[_Version, dict[bytes, str]]:
    """Version of a file, and its names by the digests of their tokens."""
    try:
        with path.open("rb") as file:
            version = file_version(os.fstat(file.fileno()))
            text = file.read().decode()
    except OSError as error:
        raise InvalidInputError(f"token-file: got {path} ({error.strerror}), want a file that can be read") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"token-file: {path}: got bytes that are not UTF-8, want text") from None
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            digest, name = _entry(words)
            if digest in names:
                raise InvalidInputError("got a token that a line above has, want another one")
        except InvalidInputError as error:
            raise InvalidInputError(f"token-file: {path}: line {number}: {error}") from None
        names[digest] = name
    if not names:
        raise InvalidInputError(f"token-file: {path}: got no token, want at least one line with a name and a token")
    return version, names


def _entry(words: list[str]) -> tuple[bytes, str]:
    """Digest and name of a line; errors quote nothing of it, as any word of it could be a token."""
    if len(words) != 2:
        raise InvalidInputError(f"got words: {len(words)}, want 2: a name and a token")
    name, token = words
    if not _NAME.fullmatch(name):
        raise InvalidInputError("got a name with other characters, want up to 128 of a-z, A-Z, 0-9 and _.:/+=@-")
    if len(token) < LEAST_CHARACTERS:
        raise InvalidInputError(f"got a token of {len(token)} characters, want >= {LEAST_CHARACTERS}")
    if not is_token(token):
        raise InvalidInputError(f"got a token with other characters, want {TOKEN_CHARACTERS}")
    return _digest(token), name
