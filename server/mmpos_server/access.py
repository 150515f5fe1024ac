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
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, get_token, is_token, to_status
from mmpos_server.transport import abort

if TYPE_CHECKING:
    from mmpos_server.logs import Logs
    from mmpos_server.metrics import Metrics

__all__ = ["LEAST_CHARACTERS", "OPEN", "TokenInterceptor", "Tokens", "token_name"]


OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
"""Methods answered without a token, which probes and load balancers do not have."""

_SECONDS = 1.0
_STATUS, _DETAILS = to_status(ServiceUnauthenticatedError('authorization: got no known token, want "Bearer TOKEN"'))

_token_name: ContextVar[str | None] = ContextVar("token_name", default=None)


def token_name() -> str | None:
    """Return the client name of the token that the running call carries; None where no token is required."""
    return _token_name.get()


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor before all methods, known or not, that lets calls with a known token pass and refuses all others.

    Args:
        tokens: known tokens and their client names.
        metrics: counts refused calls.
        logs: gets a line about refused calls, once a second at most.
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
        """Return the handler of a call, or one that refuses the call."""
        if not self.authenticate(handler_call_details.method, handler_call_details.invocation_metadata):
            return self._refusal
        return await continuation(handler_call_details)

    def authenticate(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Check whether a call may pass, and note the name of its token for the running task."""
        if method in OPEN:
            return True
        token = get_token(metadata)
        name = None if token is None else self._tokens.name(token)
        if name is None:
            return False
        _token_name.set(name)
        return True

    def refused(self, peer: str) -> tuple[str, str]:
        """Count a refused call of this peer; returns the status and details that the call ends with."""
        self._refused, self._peer = self._refused + 1, peer
        self._metrics.unauthenticated.inc()
        return _STATUS, _DETAILS

    def open(self) -> None:
        """Start checking every second whether the token file has changed."""
        self._watch = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop checking the token file."""
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
"""Least length of a token; a shorter one could be guessed."""

_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

_Version = tuple[int, int, int, int]


class Tokens:
    """The tokens of a file: one "NAME TOKEN" in a line, or a comment after "#"; a name may have several.

    To rotate a token, add the new one under the same name, let clients change over, and remove the old one.

    Args:
        path: the file.
        logs: gets an error when a new version of the file is wrong; the tokens then stay as they were.

    Raises:
        InvalidInputError: the file is wrong; the message names file and line, and never quotes the line.
    """

    def __init__(self, path: Path, logs: Logs) -> None:
        self._path, self._logs = path, logs
        self._version: _Version | None
        self._version, self._names = _read(path)

    def name(self, token: str) -> str | None:
        """Return the client name of a token; None for an unknown token."""
        return self._names.get(_digest(token))

    def refresh(self) -> None:
        """Read the file again if it has changed; from any thread, one at a time."""
        try:
            status = os.stat(self._path)
        except OSError:
            status = None
        version = None if status is None else file_version(status)
        if version == self._version:
            return
        # Noted before it is read: what is wrong is said once, and what is written meanwhile is read the next time.
        self._version = version
        try:
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(f"{self._path}: got a pipe or a device, want a regular file")
            self._version, self._names = _read(self._path)
        except InvalidInputError as error:
            self._logs.error("tokens stay as they were", reason=str(error))
        else:
            self._logs.info("tokens read", file=str(self._path), clients=len(set(self._names.values())))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path) -> tuple[_Version, dict[bytes, str]]:
    """Read a token file; returns its version, and the client names by digest of their tokens."""
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
    """Parse a line into digest and name; errors quote nothing of the line, as any word of it could be a token."""
    if len(words) != 2:
        raise InvalidInputError(f"got {len(words)} words, want 2: a name and a token")
    name, token = words
    if not _NAME.fullmatch(name):
        raise InvalidInputError("got a name with other characters, want up to 128 of a-z, A-Z, 0-9 and _.:/+=@-")
    if len(token) < LEAST_CHARACTERS:
        raise InvalidInputError(f"got a token of {len(token)} characters, want >= {LEAST_CHARACTERS}")
    if not is_token(token):
        raise InvalidInputError(f"got a token with other characters, want {TOKEN_CHARACTERS}")
    return _digest(token), name
