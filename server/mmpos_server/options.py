"""Command line of ``mmpos serve`` and ``python -m mmpos_server``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mmpos.errors import InvalidInputError
from mmpos_server.access import TlsFiles
from mmpos_server.launch import LaunchOptions, leave, supervise
from mmpos_server.launch import serve as serve_here
from mmpos_server.listening import Listen, Uds

__all__ = ["app", "serve"]


class LogLevel(StrEnum):
    """Lowest level of log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of log lines."""

    JSON = "json"
    CONSOLE = "console"


app = typer.Typer(
    name="mmpos_server",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port to listen on; 0 picks a free one.", show_default="50051, and none with --uds"
        ),
    ] = None,
    uds: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Unix socket to listen on; never encrypted.", show_default=False)
    ] = None,
    uds_mode: Annotated[
        str | None, typer.Option(metavar="OCTAL", help="Permissions of the unix socket.", show_default="0600")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings file, TOML.", show_default="the embedded ones")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Worker processes that share the port.")] = 1,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of the metrics page.", show_default="that of --host")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the HTTP page with /metrics, /livez and /readyz; 0 for none.")
    ] = 0,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of the certificate, PEM.", show_default=False)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CA certificates, PEM; clients must then present a certificate.", show_default=False
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lines of NAME TOKEN, reread as they change; calls must then carry a token.",
            show_default=False,
        ),
    ] = None,
    max_pending: Annotated[
        int | None,
        typer.Option(min=1, help="Calls of a method that may arrive at the same moment.", show_default="the file's"),
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Cheap calls that may be queued or running.", show_default="the file's")
    ] = None,
    max_in_flight_images: Annotated[
        int | None,
        typer.Option(min=1, help="Calls that decode images and may be queued or running.", show_default="the file's"),
    ] = None,
    image_threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads that decode images.", show_default="the file's")
    ] = None,
    shared_memory: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX",
            help="Accept tensors in shared memory objects named PREFIX…, from clients on this machine.",
            show_default="off",
        ),
    ] = None,
    notice_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds to serve on as NOT_SERVING after SIGTERM, so that load balancers notice."),
    ] = 0.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that calls at work may take after SIGTERM.")
    ] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="Lowest level of log lines that are written.")] = LogLevel.INFO,
    log_format: Annotated[LogFormat, typer.Option(help="Log lines as JSON, or as text for people.")] = LogFormat.JSON,
    otel: Annotated[
        bool, typer.Option("--otel", help="Export OpenTelemetry spans, as the environment variables OTEL_… say.")
    ] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Serve positions, sequences and rotations over gRPC.

    SIGTERM and SIGINT drain: health reports NOT_SERVING, calls that have arrived are answered, then the server exits.
    A second signal ends the server at once. SIGHUP rereads the settings.
    """
    options = LaunchOptions(
        listen=Listen(
            host,
            50051 if port is None else port,
            _tls(tls_cert, tls_key, tls_client_ca),
            reuse_port=worker,
            tcp=uds is None or port is not None,
            uds=_uds(uds, uds_mode),
            token_file=token_file,
        ),
        config=config,
        concurrency=_set(
            max_pending=max_pending, max_in_flight=max_in_flight, max_in_flight_images=max_in_flight_images
        ),
        pools=_set(image=image_threads),
        workers=workers,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        notice_seconds=notice_seconds,
        drain_seconds=drain_seconds,
        log_level=log_level.value,
        log_format=log_format.value,
        otel=otel,
        shared_memory=shared_memory,
        worker=worker,
    )
    if otel:
        # A missing package is reported once, and not by every worker.
        import mmpos_server.tracing  # noqa: F401
    if workers == 1:
        serve_here(options)
    else:
        supervise(options, _words(options))
    leave()


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    if cert is None or key is None:
        for name, value in (("--tls-cert", cert), ("--tls-key", key), ("--tls-client-ca", client_ca)):
            if value is not None:
                raise InvalidInputError(f"{name}: got {value} alone, want --tls-cert and --tls-key")
        return None
    return TlsFiles(cert, key, client_ca)


def _uds(path: Path | None, mode: str | None) -> Uds | None:
    if path is None:
        if mode is not None:
            raise InvalidInputError(f"--uds-mode: got {mode} alone, want --uds")
        return None
    if mode is None:
        return Uds(path)
    if not re.fullmatch("[0-7]{1,4}", mode):
        raise InvalidInputError(f"--uds-mode: got {mode!r}, want octal digits such as 0660")
    return Uds(path, int(mode, 8))


def _set(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _words(options: LaunchOptions) -> Sequence[str]:
    """Return the command line of a worker, without the options that the supervisor adds."""
    listen = options.listen
    tls = listen.tls
    values = {
        "host": listen.host,
        "config": options.config,
        "tls-cert": tls and tls.cert,
        "tls-key": tls and tls.key,
        "tls-client-ca": tls and tls.client_ca,
        "token-file": listen.token_file,
        **{name.replace("_", "-"): value for name, value in (options.concurrency or {}).items()},
        "image-threads": (options.pools or {}).get("image"),
        "notice-seconds": options.notice_seconds,
        "drain-seconds": options.drain_seconds,
        "log-level": options.log_level,
        "log-format": options.log_format,
        "shared-memory": options.shared_memory,
    }
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return [*words, "--otel"] if options.otel else words
