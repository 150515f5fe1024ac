"""The command that measures which scheme and which encoding has which property."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mmpos.cli.commands import app
from mmpos.cli.scheme_options import complete_scheme, did_you_mean, make_scheme
from mmpos.errors import InvalidInputError
from mmpos.schemes import SCHEMES
from mmpos.support.program import console

if TYPE_CHECKING:
    from mmpos.analysis.compare import Matrix


def _complete(incomplete: str) -> list[tuple[str, str]]:
    from mmpos.encodings import ENCODINGS

    return complete_scheme(incomplete) + [(name, "") for name in ENCODINGS if name.startswith(incomplete)]


@app.command(
    help="Measure which scheme and which encoding has which property: ✓ yes, ✗ no, – does not apply.\n\n"
    f"NAME is a scheme, one of {', '.join(SCHEMES)}, also with parameters (v2pe,stride=16), or package.module:Class of "
    "your own; or an encoding, such as rope-2d or alibi: without NAME, all are measured."
)
def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="Only these.", show_default=False, autocompletion=_complete),
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
    out = console()
    for i, matrix in enumerate(found):
        if i:
            out.print()
        if markdown:
            typer.echo(matrix.to_markdown(), nl=False)
        else:
            out.out(matrix.to_text(out.width), highlight=False)
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
    from mmpos.analysis.compare import measure, measure_encodings
    from mmpos.analysis.compare.schemes import every_scheme
    from mmpos.encodings import ENCODINGS

    made = [make_scheme(name) for name in names if "," in name or ":" in name]
    for name in names:
        if name not in SCHEMES and name not in ENCODINGS and "," not in name and ":" not in name:
            known = (*SCHEMES, *ENCODINGS)
            raise InvalidInputError(f"NAME: got {name!r}{did_you_mean(name, known)}, want one of {', '.join(known)}")
    schemes = [scheme for scheme in every_scheme() if not names or scheme.name in names] + made
    encodings = [name for name in ENCODINGS if not names or name in names]
    return [
        *([measure(schemes)] if schemes else []),
        *([measure_encodings(encodings)] if encodings else []),
    ]
