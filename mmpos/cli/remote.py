"""The commands that use a server instead of computing in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmpos.cli import report
from mmpos.cli.commands import Documents, Start, group
from mmpos.cli.options import flat, make_scheme, read_specs, scheme_option
from mmpos.errors import MmposError, ServiceTimeoutError, ServiceUnavailableError
from mmpos.segments.table import SegmentTable
from mmpos.support.program import console

if TYPE_CHECKING:
    from mmpos.client import Client

remote = group("remote", "Use a server that was started with [bold]mmpos serve[/bold].")

Profile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Profile of a model on the server.", show_default="the first")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit for the answer.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_OPTIONS = {
    "tls=Tls(...)": "pass --tls-ca",
    "Tls(..., certificate, key)": "pass --tls-cert and --tls-key",
    "want tls=None": "want no --tls-ca",
    "tls.root_certificates": "--tls-ca",
    "tls.certificate": "--tls-cert",
    "another address": "another --server",
}
"""Arguments that the client's errors name, and the options that set them here."""


def _problem(message: str) -> str:
    """Describe why no server answered, without gRPC's details."""
    for argument, option in _OPTIONS.items():
        message = message.replace(argument, option)
    if message.startswith(("tls", "--tls")):
        cause, _, _ = message.partition(" (failed to connect")
        return message if cause.endswith("the handshake failed") else cause
    want = ", want a running server: start one with mmpos serve, or pass another --server"
    return message if message.endswith(want) else f"got {message}{want}"


def _file(description: str) -> Any:
    return typer.Option(metavar="FILE", help=description, show_default=False)


@dataclass(frozen=True)
class Connection:
    """The options for the connection to a server."""

    server: Annotated[
        str, typer.Option("--server", metavar="HOST:PORT", help="The server; also unix:PATH or dns:///HOST:PORT.")
    ] = "localhost:50051"
    token_file: Annotated[Path | None, _file("File with only the client's token.")] = None
    tls_ca: Annotated[Path | None, _file("Trusted certificates, PEM; without the three TLS files, no TLS.")] = None
    tls_cert: Annotated[Path | None, _file("The client's certificate, PEM.")] = None
    tls_key: Annotated[Path | None, _file("The client's private key, PEM.")] = None

    @contextmanager
    def client(self, timeout: float, profile: str | None = None) -> Iterator[Client]:
        """Open a client for the server; if the server does not answer, the error names a remedy."""
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC prints a line for each failed handshake
        from mmpos.client import Client, Tls

        files = self.tls_ca, self.tls_cert, self.tls_key
        tls = Tls(*files) if any(files) else None
        try:
            with Client(self.server, profile=profile, timeout=timeout, tls=tls, token=self.token_file) as client:
                yield client
        except ServiceUnavailableError as error:
            said = _problem(str(error)).removeprefix(f"{self.server}: ")
            raise ServiceUnavailableError(f"{self.server}: {said}") from error
        except ServiceTimeoutError as error:
            remedy = "check that mmpos serve is running, or pass a longer --timeout"
            raise ServiceTimeoutError(f"{self.server}: got no answer within {timeout:g} s; {remedy}") from error


@remote.command()
@flat
def health(connection: Connection, timeout: Timeout = 5.0) -> None:
    """Check that the server accepts calls."""
    with connection.client(timeout) as client:
        if not client.healthy():
            try:
                client.info()  # raises the cause if no server answers
            except (ServiceUnavailableError, ServiceTimeoutError):
                raise
            except MmposError:
                pass  # a server answered
            raise ServiceUnavailableError("NOT_SERVING")
        typer.echo(f"{connection.server} is serving")


@remote.command()
@flat
def info(connection: Connection, timeout: Timeout = 5.0) -> None:
    """Print the server's version, profiles and limits."""
    with connection.client(timeout) as client:
        description = client.info()
    out = console()
    out.print(f"mmpos {description.version} at {connection.server}, rotations on {description.device or 'no device'}\n")
    profiles = report.new_table("profile", "scheme", "begin id", "end id", "patch id", "row id", "patch size", "merge")
    for profile in description.profiles:
        tokens = profile.placeholders
        row = tokens.rows[0] if tokens.rows else "-"
        markers = (None if token_id < 0 else token_id for token_id in (profile.begin_token_id, profile.end_token_id))
        ids = (*markers, tokens.image if tokens.HasField("image") else None, row)
        sizes = (profile.patch_size, profile.spatial_merge_size)
        profiles.add_row(profile.name, profile.scheme, *map(str, (*ids, *sizes)))
    report.show(out, profiles)
    limits = report.new_table("limit of a request", "at most", right=("at most",))
    for field, value in description.limits.ListFields():
        limits.add_row(field.name, f"{value:,}")
    out.print()
    report.show(out, limits)


@remote.command()
@flat
def positions(
    *,
    documents: Documents,
    scheme: Annotated[str | None, scheme_option("the scheme of the profile")] = None,
    start: Start = 0,
    json: Json = False,
    connection: Connection,
    profile: Profile = None,
    timeout: Timeout = 30.0,
) -> None:
    """Print the ids of documents, as [bold]mmpos positions[/bold] does."""
    specs = read_specs(documents)
    name = specs.scheme if scheme is None else scheme
    segments = SegmentTable.from_documents(specs.documents)
    with connection.client(timeout, profile) as client:
        # The server may know more names.
        placed = client.place(segments, make_scheme(name) if name and set(name) & set(",:(") else name, start)
    if json:
        typer.echo(report.to_json_text(specs.documents, placed, placed.scheme if name is None else name))
    else:
        report.print_positions(console(), segments, placed)
