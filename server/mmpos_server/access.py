"""Read a server's bearer tokens and TLS certificates, and reload them whenever their files change."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, is_token
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from mmpos_server.telemetry import Logs

__all__ = ["LEAST_CHARACTERS", "Certificates", "TlsFiles", "TokenFile", "not_after"]


LEAST_CHARACTERS = 16
"""Minimum length of a token; a shorter token could be guessed."""

_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

_Version = tuple[int, int, int, int]


class TokenFile:
    """Tokens from a file with one "NAME TOKEN" per line and comments after "#"; a name may have several tokens.

    To rotate a token, add the new one under the same name, let clients switch to it, and remove the old one.

    Args:
        path: the file.
        logs: log to which an error is written when a new version of the file is wrong; the old tokens then stay valid.

    Raises:
        InvalidInputError: the file is wrong; the message names the file and the line but never quotes the line.
    """

    def __init__(self, path: Path, logs: Logs) -> None:
        self._path, self._logs = path, logs
        self._version: _Version | None
        self._version, self._names = _read_tokens(path)

    def name(self, token: str) -> str | None:
        """Return the client name of a token; None for an unknown token."""
        return self._names.get(_digest(token))

    def refresh(self) -> None:
        """Read the file again if it has changed. Any thread may call this, one at a time."""
        try:
            status = os.stat(self._path)
        except OSError:
            status = None
        version = None if status is None else file_version(status)
        if version == self._version:
            return
        # Set this before reading, so that a wrong file is reported once and a version written meanwhile is read next
        # time.
        self._version = version
        try:
            if status is not None and not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(f"{self._path}: got a pipe or a device, want a regular file")
            self._version, self._names = _read_tokens(self._path)
        except InvalidInputError as error:
            self._logs.error("tokens not reloaded", reason=str(error))
        else:
            self._logs.info("tokens read", file=str(self._path), clients=len(set(self._names.values())))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read_tokens(path: Path) -> tuple[_Version, dict[bytes, str]]:
    """Read a token file and return its version and the client name for each token digest."""
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
                raise InvalidInputError("the token is already on an earlier line")
        except InvalidInputError as error:
            raise InvalidInputError(f"token-file: {path}: line {number}: {error}") from None
        names[digest] = name
    if not names:
        raise InvalidInputError(f"token-file: {path}: got no token, want at least one line with a name and a token")
    return version, names


def _entry(words: list[str]) -> tuple[bytes, str]:
    """Parse a line into digest and name; errors do not quote the line because any word in it could be a token."""
    if len(words) != 2:
        raise InvalidInputError(f"got {len(words)} words, want 2: a name and a token")
    name, token = words
    if not _NAME.fullmatch(name):
        raise InvalidInputError("the name must be 1 to 128 characters from a-z, A-Z, 0-9 and _.:/+=@-")
    if len(token) < LEAST_CHARACTERS:
        raise InvalidInputError(f"got a token of {len(token)} characters, want >= {LEAST_CHARACTERS}")
    if not is_token(token):
        raise InvalidInputError(f"the token must consist of {TOKEN_CHARACTERS}")
    return _digest(token), name


@dataclass(frozen=True)
class TlsFiles:
    """TLS files of a server.

    Args:
        cert: certificate chain, PEM.
        key: private key of the certificate, PEM.
        client_ca: CA certificates, PEM; clients must then present a certificate. With None, clients need no
            certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all files."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)

    def read(self) -> tuple[grpc.ServerCertificateConfiguration, datetime]:
        """Read the files and return the configuration for the transport and the certificate's expiry time.

        Raises:
            InvalidInputError: a file cannot be read, or the certificate and the key do not match.
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
    """A server's certificates, which are reloaded whenever their files change.

    Args:
        tls: TLS files.
        logs: log to which a line is written when the files are reloaded, when a new version is wrong (the old one then
            stays in use), and when a certificate has expired.

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
        """Return the credentials for a gRPC port; every handshake uses the latest certificates."""
        require_client = self._tls.client_ca is not None
        fetch: Callable[[], Any] = self._fetch  # may return None, although grpc's annotations do not say so
        return grpc.dynamic_ssl_server_credentials(self._given, fetch, require_client)

    def refresh(self) -> None:
        """Read the files again if one has changed. Any thread may call this, one at a time."""
        versions = self._seen()
        if versions != self._versions:
            # Set this before reading, so that a version written meanwhile is read next time.
            self._versions = versions
            try:
                self._latest, self._not_after = self._tls.read()
            except InvalidInputError as error:
                self._logs.error("certificates not reloaded", reason=str(error))
            else:
                self._expired = False
                self._logs.info("certificates read", file=str(self._tls.cert), not_after=self._not_after.isoformat())
        self._check_expiry()

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates before a handshake, or None if they have not changed."""
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
        InvalidInputError: the bytes are not a certificate.
    """
    with needed_for("TLS", extra="server"):
        from cryptography import x509
    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc
    except ValueError as error:
        raise InvalidInputError(f"tls-cert: want a certificate in PEM ({error})") from None


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
