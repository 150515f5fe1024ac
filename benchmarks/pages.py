"""Tables of kept figures: on a terminal, and in pages between marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from mmpos.cli import report

RESULTS = Path(__file__).parent / "results"
"""The figures of every machine."""

Rows = list[list[str]]
"""A table, whose first row is its head."""


def show(rows: Rows) -> None:
    """Print a table, as wide as it is."""
    head, *body = rows
    printed = report.new_table(*head, right=head[1:])
    for cells in body:
        printed.add_row(*cells)
    report.show(Console(width=300, highlight=False), printed)


def markdown(rows: Rows) -> str:
    """Write a table for a page, its numbers flush right."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def fill_in(page: str, mark: str, write: Callable[[str], str]) -> str:
    """Make everything anew that stands between the marks of a page.

    Args:
        page: the text.
        mark: "x" for ``<!-- x -->`` and ``<!-- x: name -->``, both of which ``<!-- /x -->`` ends.
        write: makes what stands between them from the name, which may be empty.
    """
    quote = re.compile(rf"(<!-- {mark}(?:: ([^>]+?))? -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    return quote.sub(lambda found: found[1] + write(found[2] or "") + found[3], page)


def of_machine(machine: Mapping[str, object], command: str, *tables: Rows) -> str:
    """Write tables under the machine and the command that they come from."""
    head = f"\n{machine['cpu']}, {machine['cores']} cores, `{command}`:\n\n"
    return head + "\n".join(map(markdown, tables))
