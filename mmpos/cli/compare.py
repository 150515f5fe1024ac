"""The command that measures which scheme and which encoding has which property."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from mmpos.cli import report
from mmpos.cli.commands import app
from mmpos.compare import Matrix, Property, measure, measure_encodings
from mmpos.compare.schemes import every_scheme
from mmpos.encodings import ENCODINGS
from mmpos.errors import InvalidInputError
from mmpos.schemes import SCHEMES

_GAP = 3  # between two columns of a table


@app.command(
    help="Measure which scheme and which encoding has which property: ✓ yes, ✗ no, – does not apply.\n\n"
    f"NAME is one of {', '.join((*SCHEMES, *ENCODINGS))}."
)
def compare(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Only these.", show_default=False)
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Also the smallest counterexample of every ✗.")] = False,
    define: Annotated[bool, typer.Option("--define", help="Also what every property means.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, counterexamples included.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """Measure which scheme and which encoding has which property."""
    found = _measured(names or [])
    if as_json:
        typer.echo(json.dumps({f"{each.subject}s": each.to_dict() for each in found}, ensure_ascii=False, indent=1))
        return
    out = report.console()
    for i, matrix in enumerate(found):
        if i:
            out.print()
        if markdown:
            typer.echo(matrix.to_markdown(), nl=False)
        else:
            _print_tables(out, matrix)
        if define:
            out.print()
            for each in matrix.properties:
                out.print(f"{each.title}: {each.definition}", soft_wrap=True)
        if why:
            out.print()
            for name, each, reason in matrix.reasons:
                out.print(f"{name}, {each.title}: {reason}", soft_wrap=True)


def _measured(names: Sequence[str]) -> list[Matrix]:
    """The matrices of what is named, or of everything."""
    for name in names:
        if name not in SCHEMES and name not in ENCODINGS:
            raise InvalidInputError(f"NAME: got {name!r}, want one of {', '.join((*SCHEMES, *ENCODINGS))}")
    schemes = [scheme for scheme in every_scheme() if not names or scheme.name in names]
    encodings = [name for name in ENCODINGS if not names or name in names]
    return [
        *([measure(schemes)] if schemes else []),
        *([measure_encodings(encodings)] if encodings else []),
    ]


def _print_tables(out: Console, matrix: Matrix) -> None:
    """As many tables below each other as the columns need."""
    names = max(map(len, (matrix.subject, *matrix.rows)))
    for i, columns in enumerate(_columns(matrix, out.width - names)):
        if i:
            out.print()
        table = report.new_table(matrix.subject, *(_title(each) for each in columns))
        for name in matrix.rows:
            table.add_row(name, *(matrix[name, each.name].cell for each in columns))
        report.show(out, table)


def _columns(matrix: Matrix, width: int) -> list[list[Property]]:
    """The properties in groups that fit into a width."""
    groups: list[list[Property]] = [[]]
    left = width
    for each in matrix.properties:
        lines = [*_title(each).split("\n"), *(matrix[name, each.name].cell for name in matrix.rows)]
        needed = max(map(len, lines)) + _GAP
        if needed > left and groups[-1]:
            groups.append([])
            left = width
        groups[-1].append(each)
        left -= needed
    return groups


def _title(each: Property) -> str:
    """In two lines where there is a space or a hyphen."""
    return each.title.replace("-i", "-\ni").replace("-s", "-\ns").replace(" ", "\n", 1)
