"""Define the command-line flags, and the addresses and settings that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmpos.errors import InvalidInputError
from mmpos_server.access import TlsFiles
from mmpos_server.config import ServerConfig, load
from mmpos_server.listening import Listen, split

__all__ = ["Flags"]


def _flag(text: str, *, metavar: str = "FILE", default: str | bool = True, **settings: Any) -> Any:
    """Return the option for a flag; ``default`` replaces the default value in the help text."""
    return typer.Option(help=text, metavar=metavar, show_default=default, **settings)


@dataclass(frozen=True)
class Flags:
    """Command-line flags, with their help.

    Raises:
        InvalidInputError: a flag is wrong, contradicts another flag, or requires one.
    """

    listen: Annotated[
        list[str] | None,
        _flag(
            "HOST:PORT, where 0.0.0.0 is all addresses of this machine and port 0 a free one; or unix:PATH, a socket "
            "for this user only. Repeat the flag for one of each.",
            metavar="ADDRESS",
            default="127.0.0.1:50051",
        ),
    ] = None
    config: Annotated[Path | None, _flag("Settings file, TOML.", default="embedded")] = None
    workers: Annotated[int, _flag("Worker processes that share the port.", metavar="N", min=1, max=1024)] = 1
    metrics: Annotated[
        str | None, _flag("HOST:PORT of the HTTP page with /metrics, /livez and /readyz.", metavar="ADDRESS")
    ] = None
    tls_cert: Annotated[Path | None, _flag("Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, _flag("Private key of the certificate, PEM.")] = None
    tls_client_ca: Annotated[Path | None, _flag("CA certificates, PEM; clients must then present a certificate.")] = (
        None
    )
    token_file: Annotated[Path | None, _flag("File with lines NAME TOKEN; calls must then carry a token.")] = None
    rotations: Annotated[
        bool, typer.Option("--rotations", help="Serve CosSin and Rotate too, and import torch before the start.")
    ] = False
    check: Annotated[Path | None, _flag("Check this settings file and its profiles, and exit.")] = None

    def __post_init__(self) -> None:
        if self.workers > 1 and self.address.uds:
            raise InvalidInputError(f"--workers: got {self.workers} with --listen unix:PATH, which allows one process")
        assert self.page is None or self.metrics  # raises an error if the flag is wrong
        if self.check and self.config:
            raise InvalidInputError("--check: got --config too, want one settings file")

    @property
    def address(self) -> Listen:
        """Addresses to listen on, TLS and tokens."""
        names = self.listen or ["127.0.0.1:50051"]
        sockets = [name.removeprefix("unix:") for name in names if name.startswith("unix:")]
        ports = [split("--listen", name) for name in names if not name.startswith("unix:")]
        if len(sockets) > 1 or len(ports) > 1 or "" in sockets:
            raise InvalidInputError(f"--listen: got {' and '.join(names)}, want one HOST:PORT, one unix:PATH, or both")
        host, port = ports[0] if ports else ("127.0.0.1", 0)
        uds = Path(sockets[0]) if sockets else None
        return Listen(host, port, self._tls(), tcp=bool(ports), uds=uds, token_file=self.token_file)

    @property
    def page(self) -> tuple[str, int] | None:
        """Host and port of the page."""
        return None if self.metrics is None else split("--metrics", self.metrics)

    def settings(self) -> ServerConfig:
        """Read the settings from the file."""
        return load(self.config)

    def _tls(self) -> TlsFiles | None:
        if self.tls_cert and self.tls_key:
            return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        missing = [flag for flag, path in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key)) if not path]
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            if getattr(self, name):
                raise InvalidInputError(f"--{name.replace('_', '-')} requires {' and '.join(missing)}")
        return None
