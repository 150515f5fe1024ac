"""Define the command-line flags and the objects built from them: addresses, settings and metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry

from mmpos.errors import InvalidInputError
from mmpos_server.access import TlsFiles
from mmpos_server.config import ServerConfig, load
from mmpos_server.listening import Listen
from mmpos_server.page import exposed
from mmpos_server.telemetry import ProcessMetrics

__all__ = ["Flags", "LogLevel"]


class LogLevel(StrEnum):
    """Minimum level at which log lines are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _flag(text: str, *names: str, default: str | None = None, **settings: Any) -> Any:
    """Return the option for a flag; ``default`` replaces the default value in the help text."""
    shown = True if default is None else default
    return typer.Option(*names, help=text, show_default=shown, **settings)


@dataclass(frozen=True)
class Flags:
    """Command-line flags, with their help.

    Raises:
        InvalidInputError: a flag is wrong, or requires another flag.
    """

    host: Annotated[str, _flag("Address to listen on; 0.0.0.0 for all addresses of this machine.")] = "127.0.0.1"
    port: Annotated[
        int | None,
        _flag("Port to listen on; 0 picks a free one.", min=0, max=65535, default="50051, or no port with --uds"),
    ] = None
    uds: Annotated[
        Path | None, _flag("Unix socket to listen on, for this user only; never encrypted.", metavar="PATH")
    ] = None
    config: Annotated[Path | None, _flag("Settings file, TOML.", metavar="FILE", default="embedded")] = None
    workers: Annotated[int, _flag("Worker processes that share the port.", min=1, max=1024)] = 1
    metrics_host: Annotated[str | None, _flag("Address of the metrics page.", default="same as --host")] = None
    metrics_port: Annotated[
        int, _flag("Port of the HTTP page with /metrics, /livez and /readyz; 0 disables it.", min=0, max=65535)
    ] = 0
    tls_cert: Annotated[Path | None, _flag("Certificate chain, PEM.", metavar="FILE")] = None
    tls_key: Annotated[Path | None, _flag("Private key of the certificate, PEM.", metavar="FILE")] = None
    tls_client_ca: Annotated[
        Path | None, _flag("CA certificates, PEM; clients must then present a certificate.", metavar="FILE")
    ] = None
    token_file: Annotated[
        Path | None,
        _flag("File with lines NAME TOKEN, read again when it changes; calls must then carry a token.", metavar="FILE"),
    ] = None
    notice_seconds: Annotated[
        float,
        _flag("Seconds to serve after SIGTERM while health is NOT_SERVING, so that load balancers notice.", min=0),
    ] = 0.0
    drain_seconds: Annotated[float, _flag("Seconds that running calls may take after SIGTERM.", min=0)] = 30.0
    log_level: Annotated[LogLevel, _flag("Minimum level of the log lines that are written.")] = LogLevel.INFO
    otel: Annotated[
        bool, _flag("Export OpenTelemetry spans, configured by the environment variables OTEL_….", "--otel")
    ] = False

    def __post_init__(self) -> None:
        assert self.listen  # raises an error if flags are wrong

    @property
    def listen(self) -> Listen:
        """Addresses to listen on, TLS and tokens."""
        port = 50051 if self.port is None else self.port
        tcp = self.uds is None or self.port is not None
        return Listen(self.host, port, self._tls(), tcp=tcp, uds=self.uds, token_file=self.token_file)

    def settings(self) -> ServerConfig:
        """Read the settings from the file."""
        return load(self.config)

    @contextmanager
    def page(self, registry: CollectorRegistry, live: Callable[[], bool], ready: Callable[[], bool]) -> Iterator[None]:
        """Serve the page with metrics, liveness and readiness, if the flags enable it."""
        registry.register(ProcessMetrics(self.listen.tls))
        if not self.metrics_port:
            yield
            return
        with exposed(registry, live, ready, self.metrics_host or self.host, self.metrics_port):
            yield

    def _tls(self) -> TlsFiles | None:
        if self.tls_cert is not None and self.tls_key is not None:
            return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            value = getattr(self, name)
            if value is not None:
                raise InvalidInputError(f"--{name.replace('_', '-')} requires both --tls-cert and --tls-key")
        return None
