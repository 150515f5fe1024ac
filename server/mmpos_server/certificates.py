"""TLS files of a server: checked, reread when they change, and passed to the transport."""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import file_version
from mmpos.support.extras import needed_for

if TYPE_CHECKING:
    from mmpos_server.logs import Logs

__all__ = ["Certificates", "Tls", "not_after"]

_SECONDS = 1.0


@dataclass(frozen=True)
class Tls:
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

    def read(self) -> tuple[Any, datetime]:
        """Read the files; returns the configuration for the transport, and the time at which the certificate expires.

        Raises:
            InvalidInputError: a file cannot be read, or certificate and key do not belong together.
        """
        cert, key = _read("tls-cert", self.cert), _read("tls-key", self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise InvalidInputError(
                f"tls-cert: got {self.cert} with {self.key} ({error}), want a PEM certificate and its key"
            ) from None
        ca = None
        if self.client_ca is not None:
            ca = _read("tls-client-ca", self.client_ca)
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

    def __init__(self, tls: Tls, logs: Logs) -> None:
        self._tls, self._logs = tls, logs
        self._versions = self._seen()
        self._latest, self._not_after = tls.read()
        self._given = self._latest
        self._contexts: list[ssl.SSLContext] = []
        self._expired = False
        self._check_expiry()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port; every handshake uses the latest certificates."""
        wanted = self._tls.client_ca is not None
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(self._given, self._fetch, wanted)
        return credentials

    def context(self) -> ssl.SSLContext:
        """Return the SSL context of a port that is not of gRPC; every handshake uses the latest certificate.

        New CA certificates are added; one that was removed from its file stays valid until the server ends.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if self._tls.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._contexts.append(context)
        self._load(context)
        return context

    def refresh(self) -> None:
        """Reread the files if one has changed; from any thread, one at a time."""
        versions = self._seen()
        if versions != self._versions:
            # Noted before reading: a version written meanwhile is read the next time.
            self._versions = versions
            try:
                self._latest, self._not_after = self._tls.read()
                for context in self._contexts:
                    self._load(context)
            except InvalidInputError as error:
                self._logs.error("certificates stay as they were", reason=str(error))
            else:
                self._expired = False
                self._logs.info("certificates read", file=str(self._tls.cert), not_after=self._not_after.isoformat())
        self._check_expiry()

    async def watch(self) -> None:
        """Call ``refresh`` every second, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            try:
                # In a thread: the files may lie on a network.
                await asyncio.to_thread(self.refresh)
            except Exception as error:  # any error: the next version must be read
                self._logs.error("certificates stay as they were", error)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._tls.cert, self._tls.key)
        if self._tls.client_ca is not None:
            context.load_verify_locations(self._tls.client_ca)

    def _fetch(self) -> Any:
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


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{name}: got {path} ({error.strerror}), want a file that can be read") from None
