"""Bearer tokens: their file, read again as it changes, and the interceptor that refuses calls without a known one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import InvalidInputError, ServiceUnauthenticatedError
from mmpos.rpc.bearer import TOKEN_CHARACTERS, file_version, get_token, is_token
from mmpos.rpc.errors import to_status
from mmpos_server.transport import abort

if TYPE_CHECKING:
    from mmpos_server.logs import Logs
    from mmpos_server.metrics import Metrics

__all__ = ["LEAST_CHARACTERS", "OPEN", "Door", "Tokens", "token_name"]


OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
"""What is answered to everybody: probes and balancers have no token."""

_SECONDS = 1.0
_STATUS, _DETAILS = to_status(
    ServiceUnauthenticatedError('authorization: got no token that is known, want "Bearer TOKEN"')
)

_token_name: ContextVar[str | None] = ContextVar("token_name", default=None)


def token_name() -> str | None:
    """Whose token the running call has; None where none was asked for."""
    return _token_name.get()


class Door(grpc.aio.ServerInterceptor):
    """Stands before all methods, those of other handlers and unknown ones included, and is closed unless told.

    Args:
        tokens: who may pass.
        metrics: where those who may not are counted.
        logs: where they are written, once a second at most.
    """

    def __init__(self, tokens: Tokens, metrics: Metrics, logs: Logs) -> None:
        self._tokens, self._metrics, self._logs = tokens, metrics, logs
        # As a stream, since of a stream nothing is read before the handler wants it; on the wire both are the same.
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._refused, self._peer = 0, ""
        self._watch: asyncio.Task[None] | None = None

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, or the one that refuses it."""
        if not self.lets_in(handler_call_details.method, handler_call_details.invocation_metadata):
            return self._refusal
        return await continuation(handler_call_details)

    def lets_in(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call of this path may pass; the running task has then the name of its token."""
        if method in OPEN:
            return True
        token = get_token(metadata)
        name = None if token is None else self._tokens.name(token)
        if name is None:
            return False
        _token_name.set(name)
        return True

    def refused(self, peer: str) -> tuple[str, str]:
        """Count a call of this peer that may not pass; gives its status and its details."""
        self._refused, self._peer = self._refused + 1, peer
        self._metrics.unauthenticated.inc()
        return _STATUS, _DETAILS

    def open(self) -> None:
        """Begin to look, every second, whether the tokens have changed."""
        self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        """End that."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                # In a thread: the file may lie on a network.
                await asyncio.to_thread(self._tokens.refresh)
            except Exception as error:  # whatever it is: a token that was taken away must not stay for good
                self._logs.error("tokens stay as they were", error)
            if self._refused:
                self._logs.warning("unauthenticated", calls=self._refused, last_peer=self._peer)
                self._refused = 0

    async def _refuse(self, _requests: object, context: Any) -> None:
        status, details = self.refused(context.peer())
        await abort(context, grpc.StatusCode[status], details)


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
