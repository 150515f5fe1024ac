"""Read a server's bearer tokens and TLS certificates, and reread them whenever their files change."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import TOKEN_CHARACTERS, file_version, is_token
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from mmpos_server.logs import Logs

__all__ = ["Certificates", "TlsFiles", "TokenFile", "not_after"]

_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

_LEAST_CHARACTERS = 16
"""Minimum length of a token; a shorter token could be guessed."""


class _Reread:
    """Files, by flag, that are read again when one changes; a wrong version changes nothing and is logged once."""

    _event: str

    def __init__(self, paths: dict[str, Path], logs: Logs) -> None:
        self._paths, self._logs = paths, logs
        self._versions = self._seen()
        self._use(*map(_read, paths, paths.values()))

    def refresh(self) -> None:
        """Read the files again if one has changed. Any thread may call this, one at a time."""
        versions = self._seen()
        if versions == self._versions:
            return
        # Set this before reading, so that a wrong version is reported once, and one written meanwhile is read later.
        self._versions = versions
        try:
            self._use(*map(_read, self._paths, self._paths.values()))
        except InvalidInputError as error:
            self._logs.error(f"{self._event} not reloaded", reason=str(error))
        else:
            self._logs.info(f"{self._event} read", files=list(map(str, self._paths.values())))

    def _seen(self) -> list[tuple[int, ...] | None]:
        return list(map(_version, self._paths.values()))

    def _use(self, *content: bytes) -> None:
        raise NotImplementedError


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        return file_version(path.stat())
    except OSError:
        return None


def _read(flag: str, path: Path) -> bytes:
    """Read a regular file; a pipe, which might never end, is an error."""
    reason: object = "a pipe or a device"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
    except OSError as error:
        reason = error.strerror
    raise InvalidInputError(f"{flag}: got {path} ({reason}), want a file that can be read")


class TokenFile(_Reread):
    """Tokens from a file with one "NAME TOKEN" per line and comments after "#"; a name may have several tokens.

    Raises:
        InvalidInputError: the file is wrong; the message names the file and the line but never quotes the line.
    """

    _event = "tokens"

    def __init__(self, path: Path, logs: Logs) -> None:
        self._names: dict[bytes, str] = {}
        super().__init__({"--token-file": path}, logs)

    def name(self, token: str) -> str | None:
        """Return the client name of a token; None for an unknown token."""
        return self._names.get(hashlib.sha256(token.encode()).digest())

    def _use(self, *content: bytes) -> None:
        where, names = f"--token-file: {self._paths['--token-file']}", dict[bytes, str]()
        try:
            lines = content[0].decode().splitlines()
        except UnicodeDecodeError:
            raise InvalidInputError(f"{where}: got bytes that are not UTF-8, want text") from None
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            digest = hashlib.sha256(words[-1].encode()).digest()
            if problem := "the token is already on an earlier line" if digest in names else _problem(words):
                raise InvalidInputError(f"{where}: line {number}: {problem}")
            names[digest] = words[0]
        if not names:
            raise InvalidInputError(f"{where}: got no token, want at least one line with a name and a token")
        self._names = names


def _problem(words: list[str]) -> str | None:
    """Describe what is wrong with a line; no line is quoted because any word in it could be a token."""
    if len(words) != 2:
        return f"got {len(words)} words, want 2: a name and a token"
    if not _NAME.fullmatch(words[0]):
        return "the name must be 1 to 128 characters from a-z, A-Z, 0-9 and _.:/+=@-"
    if len(words[1]) < _LEAST_CHARACTERS:
        return f"got a token of {len(words[1])} characters, want >= {_LEAST_CHARACTERS}"
    return None if is_token(words[1]) else f"the token must consist of {TOKEN_CHARACTERS}"


class TlsFiles(NamedTuple):
    """TLS files of a server, PEM: certificate chain, private key, and, if clients need a certificate, their CA's."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class Certificates(_Reread):
    """A server's certificates.

    Raises:
        InvalidInputError: a file is wrong, or the certificate and the key do not match.
    """

    _event = "certificates"

    def __init__(self, tls: TlsFiles, logs: Logs) -> None:
        flags = zip(("--tls-cert", "--tls-key", "--tls-client-ca"), tls, strict=True)
        super().__init__({flag: path for flag, path in flags if path is not None}, logs)
        self._given = self._latest

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials for a gRPC port; every handshake uses the latest certificates."""
        fetch: Callable[[], Any] = self._fetch  # may return None, although grpc's annotations do not say so
        return grpc.dynamic_ssl_server_credentials(self._latest, fetch, "--tls-client-ca" in self._paths)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates before a handshake, or None if they have not changed."""
        before, self._given = self._given, self._latest
        return None if before is self._given else self._given

    def _use(self, *content: bytes) -> None:
        cert, key, *ca = content
        got = ", ".join(map(str, self._paths.values()))
        expires = not_after(cert, key, f"--tls-cert: got {got}")
        for chain in ca:
            not_after(chain, got=f"--tls-client-ca: got {self._paths['--tls-client-ca']}")
        self._latest = grpc.ssl_server_certificate_configuration([(key, cert)], *ca)
        if expires <= datetime.now(UTC):
            self._logs.warning("certificate has expired", not_after=expires.isoformat())


def not_after(pem: bytes, key: bytes | None = None, got: str = "--tls-cert: got bytes") -> datetime:
    """Return the time at which the first certificate of a chain expires; check its private key if there is one.

    Raises:
        InvalidInputError: the bytes are not certificates, or the key is another's; the message begins with ``got``.
    """
    with needed_for("TLS", extra="server"):
        from cryptography import exceptions, x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    try:
        first, *_ = x509.load_pem_x509_certificates(pem)
        if key is not None and load_pem_private_key(key, None).public_key() != first.public_key():
            raise ValueError("the key is not the certificate's")
    except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as error:  # TypeError: the key needs a password
        want = "PEM certificates" if key is None else "a PEM certificate and its key"
        raise InvalidInputError(f"{got} ({error}), want {want}") from None
    return first.not_valid_after_utc
