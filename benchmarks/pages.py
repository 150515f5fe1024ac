"""Insert tables of recorded figures between marks on pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmpos_bench.results import Rows, markdown

RESULTS = Path(__file__).parent / "results"
"""Folder with the figures of every machine."""


def fill_in(page: str, mark: str, write: Callable[[str], str]) -> str:
    """Replace all text between marks on a page.

    Args:
        page: text of the page.
        mark: "x" for ``<!-- x -->`` and ``<!-- x: name -->``, which ``<!-- /x -->`` closes.
        write: function that returns the new text for a name, which may be empty.
    """
    quote = re.compile(rf"(<!-- {mark}(?:: ([^>]+?))? -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    return quote.sub(lambda match: match[1] + write(match[2] or "") + match[3], page)


def kept_figures(pattern: str) -> list[dict[str, Any]]:
    """Read the files in results/ that match a pattern, in sorted order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))]


def quoted(pattern: str, tables: Callable[[dict[str, Any]], Iterable[Rows]]) -> str:
    """Write the tables from all matching files in results/, preceded by each file's machine and command."""
    text = ""
    for kept in kept_figures(pattern):
        text += f"\n{kept['machine']['cpu']}, {kept['machine']['cores']} cores, `{kept['command']}`:\n\n"
        text += "\n".join(map(markdown, tables(kept)))
    return text + "\n"
