"""Results as lines of JSON, each written at once: a process that ends at any moment loses no more than it was doing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""A result: its "kind", and usually its "name"; with "error" what went wrong."""

_ENDED = "the process ended while this ran"


def shortened(error: object, most: int = 300) -> str:
    """Write an error in one line, without what is beyond some characters."""
    words = " ".join(str(error).split())
    return words if len(words) <= most else words[: most - 1] + "…"


class Journal:
    """A file of results, which a process that was started anew goes on with.

    Args:
        path: the file; nothing is in it yet where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]
        under_way = self.of("begin")
        if under_way and not self.has(under_way[-1]["of"], under_way[-1]["name"]):
            self.write(under_way[-1]["of"], name=under_way[-1]["name"], error=_ENDED)

    def of(self, kind: str) -> list[Row]:
        """Return the results of a kind."""
        return [row for row in self.rows if row["kind"] == kind]

    def has(self, kind: str, name: str) -> bool:
        """Tell whether there is such a result, or an error in its place."""
        return any(row["kind"] == kind and row.get("name") == name for row in self.rows)

    def write(self, kind: str, **values: Any) -> None:
        """Add a result."""
        row = {"kind": kind, **values}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def attempt(self, kind: str, name: str, work: Callable[[], Mapping[str, Any]]) -> bool:
        """Do some work, unless its result is there; whatever goes wrong is its result.

        Returns:
            Whether nothing went wrong.
        """
        if self.has(kind, name):
            return True
        self.write("begin", of=kind, name=name)
        try:
            self.write(kind, name=name, **work())
        # One contestant that fails, in whatever way, is one line.
        except Exception as error:
            self.write(kind, name=name, error=f"{type(error).__name__}: {shortened(error)}")
            return False
        return True


def numbers(values: Mapping[str, float], digits: int = 4) -> Iterator[tuple[str, float]]:
    """Round to significant digits: more is noise."""
    for name, value in values.items():
        yield name, float(f"{value:.{digits}g}")
