"""The commands that ask a server instead of this process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmpos.cli import report
from mmpos.cli.commands import Axes, SchemeName, Specs, Start, app, make_scheme
from mmpos.errors import ServiceUnavailableError
from mmpos.extras import needed_for
from mmpos.segments import SegmentTable
from mmpos.specs import IMAGE_SUFFIXES, read_documents

if TYPE_CHECKING:
    from mmpos.client import Client

remote = typer.Typer(name="remote", invoke_without_command=True)
app.add_typer(remote)

Server = Annotated[
    str,
    typer.Option("--server", metavar="HOST:PORT", help="The server, or unix:PATH; several are separated by commas."),
]
Profile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Settings of a model.", show_default="the server's first")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait for an answer.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Holds the token of the client.", show_default=False)
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Whom to trust, PEM; without any of the three files there is no TLS.", show_default=False
    ),
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="The client's certificate.", show_default=False)]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_HERE = "localhost:50051"


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def serve(context: typer.Context) -> Any:
    """Serve positions, sequences and rotations over gRPC; [bold]mmpos serve --help[/bold] lists the options."""
    with needed_for("mmpos serve", extra="server"):
        from mmpos_server.options import app as server
    return server(args=context.args, prog_name="mmpos serve", standalone_mode=False)


@remote.callback()
def root(context: typer.Context) -> None:
    """Ask a server started with [bold]mmpos serve[/bold]."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@remote.command()
def health(
    server: Server = _HERE,
    timeout: Timeout = 5.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Say whether the server takes calls."""
    with _client(server, None, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        if not client.healthy():
            raise ServiceUnavailableError(f"{server}: got no answer or NOT_SERVING, want a server that takes calls")
        typer.echo(f"{server} is serving")


@remote.command()
def info(
    server: Server = _HERE,
    timeout: Timeout = 5.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Print the server's version, profiles and limits."""
    with _client(server, None, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        found = client.info()
    out = report.console()
    out.print(f"mmpos {found.version} at {server}, rotations on {found.device or 'no device'}\n")
    profiles = report.new_table("profile", "scheme", "begin id", "end id", "patch id", "row id", "patch size", "merge")
    for profile in found.profiles:
        row = "-" if profile.row_token_id is None else profile.row_token_id
        ids = (profile.begin_token_id, profile.end_token_id, profile.patch_token_id, row)
        sizes = (profile.patch_size, profile.spatial_merge_size)
        profiles.add_row(profile.name, profile.scheme, *map(str, (*ids, *sizes)))
    report.show(out, profiles)
    limits = report.new_table("limit of a request", "at most", right=("at most",))
    for name, value in asdict(found.limits).items():
        limits.add_row(name, f"{value:,}")
    out.print()
    report.show(out, limits)


@remote.command()
def positions(
    documents: Specs,
    scheme: SchemeName = "rope-tie",
    start: Start = 0,
    axes: Axes = None,
    json: Json = False,
    server: Server = _HERE,
    profile: Profile = None,
    timeout: Timeout = 30.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Print the ids of documents, as [bold]mmpos positions[/bold] does."""
    read = read_documents(documents)
    segments = SegmentTable.from_documents(read)
    with _client(server, profile, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        placed = client.place(segments, make_scheme(scheme, axes), start)
    if json:
        typer.echo(report.to_json_text(read, placed))
    else:
        report.print_positions(report.console(), segments, placed)


@remote.command()
def build(
    parts: Annotated[
        list[str],
        typer.Argument(metavar="TEXT|IMAGE...", help="Parts in order: image files, and text.", show_default=False),
    ],
    server: Server = _HERE,
    profile: Profile = None,
    timeout: Timeout = 30.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Build the sequence of texts and images, and print its segments and ids."""
    given = [Path(part) if Path(part).suffix.lower() in IMAGE_SUFFIXES else part for part in parts]
    with _client(server, profile, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        sequence = client.build(given)
    out = report.console()
    out.print(f"{sequence!r}\n")
    report.print_positions(out, sequence.segments, sequence.positions)


def _client(
    server: str,
    profile: str | None,
    timeout: float,
    token: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> Client:
    from mmpos.client import Client, Tls

    addresses = server.split(",")
    tls = Tls(ca, cert, key) if ca or cert or key else None
    return Client(addresses if len(addresses) > 1 else server, profile=profile, timeout=timeout, tls=tls, token=token)
