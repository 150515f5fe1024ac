"""Tables of kept figures in pages, between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmpos_bench.results import Rows, markdown

RESULTS = Path(__file__).parent / "results"
"""The figures of every machine."""


def fill_in(page: str, mark: str, write: Callable[[str], str]) -> str:
    """Make everything anew that stands between the marks of a page.

    Args:
        page: the text.
        mark: "x" for ``<!-- x -->`` and ``<!-- x: name -->``, both of which ``<!-- /x -->`` ends.
        write: makes what stands between them from the name, which may be empty.
    """
    quote = re.compile(rf"(<!-- {mark}(?:: ([^>]+?))? -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    return quote.sub(lambda found: found[1] + write(found[2] or "") + found[3], page)


def kept_figures(pattern: str) -> list[dict[str, Any]]:
    """Read the files in results/ whose names fit, in their order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))]


def quoted(pattern: str, tables: Callable[[dict[str, Any]], Iterable[Rows]]) -> str:
    """Write the tables of all kept figures, each file's under its machine and the command that made it."""
    text = ""
    for kept in kept_figures(pattern):
        text += f"\n{kept['machine']['cpu']}, {kept['machine']['cores']} cores, `{kept['command']}`:\n\n"
        text += "\n".join(map(markdown, tables(kept)))
    return text + "\n"
