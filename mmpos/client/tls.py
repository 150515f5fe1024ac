"""Transport security of a client, as data that can be pickled."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpos.errors import InvalidInputError

if TYPE_CHECKING:
    import grpc

Pem = bytes | str | os.PathLike[str]


@dataclass(frozen=True)
class Tls:
    """Certificates, each as the bytes of a PEM file or as its path; files are read when a channel opens.

    Args:
        root_certificates: whom to trust; None: what gRPC trusts by itself.
        certificate: the client's own, where the server wants one.
        key: its private key.
        server_name: the name that the server's certificate must hold; None: the host of the first address.

    Raises:
        InvalidInputError: of the wrong type, or a certificate without its key.
    """

    root_certificates: Pem | None = None
    certificate: Pem | None = None
    key: Pem | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("root_certificates", "certificate", "key"):
            value = getattr(self, name)
            if not isinstance(value, bytes | str | os.PathLike | None):
                raise InvalidInputError(f"tls.{name}: got {type(value).__name__}, want bytes of PEM, or a path")
        if (self.certificate is None) != (self.key is None):
            got, want = ("a key", "its certificate") if self.certificate is None else ("a certificate", "its key")
            raise InvalidInputError(f"tls: got {got}, want {want} too")
        if not isinstance(self.server_name, str | None):
            raise InvalidInputError(f"tls.server_name: got {self.server_name!r}, want a name or None")

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel.

        Raises:
            InvalidInputError: a file that cannot be read.
        """
        import grpc

        names = ("root_certificates", "key", "certificate")
        return grpc.ssl_channel_credentials(*(_read(name, getattr(self, name)) for name in names))


def _read(name: str, pem: Any) -> bytes | None:
    if pem is None or isinstance(pem, bytes):
        return pem
    try:
        return Path(pem).read_bytes()
    except OSError as error:
        raise InvalidInputError(f"tls.{name}: got {os.fspath(pem)!r}, want a file that can be read ({error})") from None
