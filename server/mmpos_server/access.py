"""Bearer tokens and TLS certificates of a server, reread from their files as these change."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import ssl
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from mmpos.errors import InvalidInputError, ServiceUnauthenticatedError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, get_token, is_token, to_status
from mmpos.support.extras import needed_for
from mmpos_server.transport import CallContext, Handler, abort

if TYPE_CHECKING:
    from mmpos_server.telemetry import Logs, Metrics

__all__ = [
    "LEAST_CHARACTERS",
    "OPEN",
    "Certificates",
    "TlsFiles",
    "TokenFile",
    "TokenInterceptor",
    "not_after",
    "token_name",
]


OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    }
)
"""Methods answered without a token, which probes and load balancers do not have."""

S = TypeVar("S")
T = TypeVar("T")

_SECONDS = 1.0
_STATUS, _DETAILS = to_status(ServiceUnauthenticatedError('authorization: got no known token, want "Bearer TOKEN"'))

token_name: ContextVar[str | None] = ContextVar("token_name", default=None)
"""Client name of the token that the running call carries; None where no token is required."""


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor before all methods, known or not, that lets calls with a known token pass and refuses all others.

    Args:
        tokens: known tokens and their client names.
        metrics: counts refused calls.
        logs: gets a line about refused calls, once a second at most.
    """

    def __init__(self, tokens: TokenFile, metrics: Metrics, logs: Logs) -> None:
        self._tokens, self._metrics, self._logs = tokens, metrics, logs
        # As a stream, since of a stream nothing is read before the handler wants it; on the wire both are the same.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._refused, self._peer = 0, ""
        self._watch: asyncio.Task[None] | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[T, S] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[T, S] | None:
        """Return the handler of a call, or one that refuses the call."""
        if handler_call_details.method not in OPEN:
            token = get_token(handler_call_details.invocation_metadata)
            name = None if token is None else self._tokens.name(token)
            if name is None:
                return self._refusal  # type: ignore[return-value]
            token_name.set(name)
        return await continuation(handler_call_details)

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
            await _refreshed(self._tokens.refresh, "tokens stay as they were", self._logs)
            if self._refused:
                self._logs.warning("unauthenticated", calls=self._refused, last_peer=self._peer)
                self._refused = 0

    async def _refuse(self, _requests: object, context: CallContext) -> None:
        self._refused, self._peer = self._refused + 1, context.peer()
        self._metrics.unauthenticated.inc()
        await abort(context, grpc.StatusCode[_STATUS], _DETAILS)


async def _refreshed(refresh: Callable[[], None], failed: str, logs: Logs) -> None:
    """Reread a file, a second later; after any error, the next version must still be read."""
    await asyncio.sleep(_SECONDS)
    try:
        await asyncio.to_thread(refresh)  # the file may lie on a network
    except Exception as error:
        logs.error(failed, error)


LEAST_CHARACTERS = 16
"""Least length of a token; a shorter one could be guessed."""

_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

_Version = tuple[int, int, int, int]


class TokenFile:
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
        self._version, self._names = _read_tokens(path)

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
            self._version, self._names = _read_tokens(self._path)
        except InvalidInputError as error:
            self._logs.error("tokens stay as they were", reason=str(error))
        else:
            self._logs.info("tokens read", file=str(self._path), clients=len(set(self._names.values())))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read_tokens(path: Path) -> tuple[_Version, dict[bytes, str]]:
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


@dataclass(frozen=True)
class TlsFiles:
    """TLS files of a server.

    Args:
        cert: certificate chain, PEM.
        key: private key of the certificate, PEM.
        client_ca: CA certificates, PEM; clients must then present a certificate. None asks for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all files."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def read(self) -> tuple[grpc.ServerCertificateConfiguration, datetime]:
        """Read the files; returns the configuration for the transport, and the time at which the certificate expires.

        Raises:
            InvalidInputError: a file cannot be read, or certificate and key do not belong together.
        """
        cert, key = _read_file("tls-cert", self.cert), _read_file("tls-key", self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise InvalidInputError(
                f"tls-cert: got {self.cert} with {self.key} ({error}), want a PEM certificate and its key"
            ) from None
        ca = None
        if self.client_ca is not None:
            ca = _read_file("tls-client-ca", self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise InvalidInputError(
                    f"tls-client-ca: got {self.client_ca} ({error}), want PEM certificates"
                ) from None
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca), not_after(cert)


class Certificates:
    """Certificates of a server, reloaded as their files change.

    Args:
        tls: TLS files.
        logs: gets a line when the files were reread, when a new version is wrong (the old one then stays), and when a
            certificate has expired.

    Raises:
        InvalidInputError: a file is wrong.
    """

    def __init__(self, tls: TlsFiles, logs: Logs) -> None:
        self._tls, self._logs = tls, logs
        self._versions = self._seen()
        self._latest, self._not_after = tls.read()
        self._given = self._latest
        self._expired = False
        self._check_expiry()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port; every handshake uses the latest certificates."""
        wanted = self._tls.client_ca is not None
        fetch: Callable[[], Any] = self._fetch  # also None, which the annotations of grpc lack
        return grpc.dynamic_ssl_server_credentials(self._given, fetch, wanted)

    def refresh(self) -> None:
        """Reread the files if one has changed; from any thread, one at a time."""
        versions = self._seen()
        if versions != self._versions:
            # Noted before reading: a version written meanwhile is read the next time.
            self._versions = versions
            try:
                self._latest, self._not_after = self._tls.read()
            except InvalidInputError as error:
                self._logs.error("certificates stay as they were", reason=str(error))
            else:
                self._expired = False
                self._logs.info("certificates read", file=str(self._tls.cert), not_after=self._not_after.isoformat())
        self._check_expiry()

    async def watch(self) -> None:
        """Call ``refresh`` every second, until cancelled."""
        while True:
            await _refreshed(self.refresh, "certificates stay as they were", self._logs)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates before a handshake; None is no change."""
        latest = self._latest
        if latest is self._given:
            return None
        self._given = latest
        return latest

    def _seen(self) -> list[tuple[int, ...] | None]:
        return [_version(path) for path in self._tls.paths]

    def _check_expiry(self) -> None:
        if not self._expired and self._not_after <= datetime.now(UTC):
            self._expired = True
            self._logs.warning(
                "certificate has expired", file=str(self._tls.cert), not_after=self._not_after.isoformat()
            )


def not_after(pem: bytes) -> datetime:
    """Return the time at which the first certificate of a chain expires.

    Raises:
        InvalidInputError: the bytes are no certificate.
    """
    with needed_for("TLS", extra="server"):
        from cryptography import x509
    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc
    except ValueError as error:
        raise InvalidInputError(f"tls-cert: got no certificate ({error}), want PEM") from None


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        return file_version(os.stat(path))
    except OSError:
        return None


def _read_file(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{name}: got {path} ({error.strerror}), want a file that can be read") from None
