"""The token of a client: given as it is, or read from a file whenever that has changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, is_token, put_token

Pair = tuple[str, str]


@dataclass
class _Read:
    """The version of a file that was read, and what it held; together, so that threads cannot mix two."""

    latest: tuple[tuple[int, ...], Pair] | None = None


@dataclass(frozen=True)
class Token:
    """What a client shows to be let in; never shown in a repr.

    Args:
        source: the token, or the path of the file that holds it.
    """

    source: str | Path = field(repr=False)
    _read: _Read = field(default_factory=_Read, init=False, repr=False, compare=False)

    @classmethod
    def checked(cls, source: Any) -> Token | None:
        """The token, or what is wrong with it; it is not repeated.

        Raises:
            InvalidInputError: neither a token nor a path.
        """
        if source is None:
            return None
        if isinstance(source, os.PathLike):
            return cls(Path(source))
        if not isinstance(source, str):
            raise InvalidInputError(f"token: got {type(source).__name__}, want a token, the path of one, or None")
        if not is_token(source):
            raise InvalidInputError(f"token: got other characters, want {TOKEN_CHARACTERS}")
        return cls(source)

    def pair(self) -> Pair:
        """The metadata of a call that begins now.

        Raises:
            InvalidInputError: the file held no token that could be read, neither now nor before.
        """
        if isinstance(self.source, str):
            return put_token(self.source)
        latest = self._read.latest
        try:
            # Before it is read: what is written meanwhile is read at the next call.
            version = file_version(os.stat(self.source))
            if latest is None or version != latest[0]:
                text = self.source.read_text(encoding="ascii").strip()
                if not is_token(text):
                    raise ValueError("no token in it")
                self._read.latest = latest = version, put_token(text)
        except (OSError, ValueError) as error:
            # One that is being replaced may be gone or empty for a moment.
            if latest is None:
                reason = error.strerror if isinstance(error, OSError) else "no token in it"
                raise InvalidInputError(f"token: got {self.source} ({reason}), want a file with a token") from None
        return latest[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.source,)
