"""The commands that ask a server instead of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmpos.cli import report
from mmpos.cli.commands import Documents, Start, app, scheme_words
from mmpos.cli.options import IMAGE_SUFFIXES, Axes, make_scheme, read_specs, scheme_option
from mmpos.errors import InvalidInputError, ServiceTimeoutError, ServiceUnavailableError
from mmpos.segments.table import SegmentTable
from mmpos.support.program import console

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
_TRANSPORT = ("failed to connect", "errors resolving", "connections to all backends failing")


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
    with _asking(server, None, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        if not client.healthy():
            raise ServiceUnavailableError("no answer, or NOT_SERVING")
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
    with _asking(server, None, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        description = client.info()
    out = console()
    out.print(f"mmpos {description.version} at {server}, rotations on {description.device or 'no device'}\n")
    profiles = report.new_table("profile", "scheme", "begin id", "end id", "patch id", "row id", "patch size", "merge")
    for profile in description.profiles:
        tokens = profile.placeholders
        row = "-" if tokens.rows is None else tokens.rows[0]
        ids = (profile.begin_token_id, profile.end_token_id, tokens.image, row)
        sizes = (profile.patch_size, profile.spatial_merge_size)
        profiles.add_row(profile.name, profile.scheme, *map(str, (*ids, *sizes)))
    report.show(out, profiles)
    limits = report.new_table("limit of a request", "at most", right=("at most",))
    for name, value in asdict(description.limits).items():
        limits.add_row(name, f"{value:,}")
    out.print()
    report.show(out, limits)


@remote.command()
def positions(
    documents: Documents,
    scheme: Annotated[str | None, scheme_option("that of the profile")] = None,
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
    specs = read_specs(documents)
    words, axes = scheme_words(specs, scheme, axes)
    if words is None and axes is not None:
        raise InvalidInputError(f"--axes: got {axes} without --scheme, want both: the profile has a scheme of its own")
    segments = SegmentTable.from_documents(specs.documents)
    with _asking(server, profile, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        placed = client.place(segments, None if words is None else make_scheme(words, axes), start)
    if json:
        typer.echo(report.to_json_text(specs.documents, placed, placed.scheme if words is None else words))
    else:
        report.print_positions(console(), segments, placed)


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
    read = [Path(part) if Path(part).suffix.lower() in IMAGE_SUFFIXES else part for part in parts]
    with _asking(server, profile, timeout, token_file, tls_ca, tls_cert, tls_key) as client:
        sequence = client.build(read)
    out = console()
    out.print(f"{sequence!r}\n")
    report.print_positions(out, sequence.segments, sequence.positions)


@contextmanager
def _asking(
    server: str,
    profile: str | None,
    timeout: float,
    token: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> Iterator[Client]:
    """Open a client of the server; where no answer comes, the error says what to do about it."""
    from mmpos.client import Client, Tls

    addresses = server.split(",")
    tls = Tls(ca, cert, key) if ca or cert or key else None
    client = Client(addresses if len(addresses) > 1 else server, profile=profile, timeout=timeout, tls=tls, token=token)
    try:
        with client:
            yield client
    except ServiceUnavailableError as error:
        got = str(error)
        if got.startswith(_TRANSPORT):  # its last words are the reason
            got = got.rpartition(": ")[2].rstrip("]")
        raise ServiceUnavailableError(
            f"{server}: got {got}, want a server there: start one with mmpos serve, or name another with --server"
        ) from error
    except ServiceTimeoutError as error:
        raise ServiceTimeoutError(
            f"{server}: got no answer in {timeout:g} s, want one: see that mmpos serve runs there, or give it more "
            "time with --timeout"
        ) from error
