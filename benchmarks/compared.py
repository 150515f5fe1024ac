"""The tables of pages that tell which scheme and which encoding has which property, from measuring it now."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

from mmpos.analysis.compare import Matrix, measure, measure_encodings
from mmpos.schemes import SCHEMES

# <!-- compare: name of a quote --> what it says <!-- /compare -->
_MARK = re.compile(r"(<!-- compare: ([^>]+?) -->\n).*?(<!-- /compare -->)", re.DOTALL)


@cache
def schemes() -> Matrix:
    """All forms of all schemes."""
    return measure()


@cache
def encodings() -> Matrix:
    """All encodings."""
    return measure_encodings()


def fill_in(page: str) -> str:
    """A page with everything about properties that it quotes made anew.

    Raises:
        SystemExit: a quote of a name that is not known.
    """

    def quote(mark: re.Match[str]) -> str:
        begin, name, end = mark.groups()
        if name not in QUOTES:
            raise SystemExit(f"compare: got {name!r}, want one of {', '.join(QUOTES)}")
        return begin + QUOTES[name]() + end

    return _MARK.sub(quote, page)


def definitions(matrix: Matrix) -> str:
    """A line for every property: what it is."""
    return "".join(f"- **{each.title}**: {each.definition}\n" for each in matrix.properties)


def counterexamples(matrix: Matrix) -> str:
    """A line for everything that does not hold: where it fails."""
    wrong = ((name, each) for name, each, _ in matrix.reasons if matrix[name, each.name].value is False)
    return "".join(f"- `{name}`, {each.title}: {matrix[name, each.name].why}\n" for name, each in wrong)


QUOTES: Mapping[str, Callable[[], str]] = {
    "schemes": lambda: schemes().part(SCHEMES).to_markdown(),
    "schemes with three axes": lambda: schemes().part(set(schemes().rows) - set(SCHEMES)).to_markdown(),
    "encodings": lambda: encodings().to_markdown(),
    "properties of schemes": lambda: definitions(schemes()),
    "properties of encodings": lambda: definitions(encodings()),
    "counterexamples of schemes": lambda: counterexamples(schemes()),
    "counterexamples of encodings": lambda: counterexamples(encodings()),
}
"""What a page may quote."""
