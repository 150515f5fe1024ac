"""The matrix of properties: what was measured of every scheme or encoding, as data, JSON, text and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import getdoc
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.support import html
from mmpos.support.checks import counted, one_of


@dataclass(frozen=True)
class PropertyValue:
    """The value of one property.

    Args:
        value: True or False, a number, or None where the property does not apply.
        why: the smallest counterexample where the value is False, the reason where it is None; else empty.
    """

    value: bool | int | float | None
    why: str = ""

    @property
    def cell(self) -> str:
        """The value as tables have it.

        >>> PropertyValue(True).cell, PropertyValue(False, "1x2").cell, PropertyValue(None, "no text").cell
        ('✓', '✗', '–')
        >>> PropertyValue(1153).cell, PropertyValue(1.98).cell, PropertyValue(0.34567).cell
        ('1,153', '2', '0.35')
        """
        if self.value is None or isinstance(self.value, bool):
            return {True: "✓", False: "✗", None: "–"}[self.value]
        return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.2g}"


@dataclass(frozen=True)
class Property:
    """A column of the matrix.

    Args:
        name: for programs.
        title: for people, short.
        measure: finds the value for a scheme or an encoding; its docstring is the definition.
    """

    name: str
    title: str
    measure: Callable[[Any], PropertyValue] = field(repr=False)

    @property
    def definition(self) -> str:
        """The definition, in one paragraph."""
        return " ".join((getdoc(self.measure) or "").split())


@dataclass(frozen=True)
class Matrix:
    """The measured properties of schemes or encodings.

    >>> from mmpos.analysis.compare import measure
    >>> matrix = measure(["rope-tie", "naive-2d"])
    >>> matrix["rope-tie", "symmetric"].value, matrix["naive-2d", "ids-of-a-square"].value
    (True, 24)
    >>> print(matrix["naive-2d", "symmetric"].why)
    1,1x2,1: gaps (1, 1) and (2, 1); holds for 12 of 144 images, those with h = w

    Printed, it is a table, and a notebook shows it as one.

    Args:
        subject: "scheme" or "encoding".
        properties: the columns.
        rows: the findings of each scheme or encoding by its name, and by the name of the property.
    """

    subject: str
    properties: tuple[Property, ...]
    rows: Mapping[str, Mapping[str, PropertyValue]]

    def __getitem__(self, key: tuple[str, str]) -> PropertyValue:
        """The finding of a row and a property by their names."""
        row, name = key
        return self.rows[one_of(self.subject, row, self.rows)][one_of("property", name, self.rows[row])]

    def part(self, rows: Collection[str]) -> Matrix:
        """Some of the rows, in the order that they have here, and the properties that apply to one of them."""
        some = {name: findings for name, findings in self.rows.items() if name in rows}
        applying = [each for each in self.properties if any(some[name][each.name].value is not None for name in some)]
        kept = {name: {each.name: findings[each.name] for each in applying} for name, findings in some.items()}
        return replace(self, properties=tuple(applying), rows=kept)

    @property
    def reasons(self) -> list[tuple[str, Property, str]]:
        """Name, property and words of everything that is not so or does not apply."""
        return [
            (name, each, findings[each.name].why)
            for name, findings in self.rows.items()
            for each in self.properties
            if findings[each.name].why
        ]

    def to_dict(self) -> dict[str, dict[str, dict[str, bool | float | str | None]]]:
        """Value and words by name and property, for JSON."""
        return {name: {key: dict(vars(each)) for key, each in row.items()} for name, row in self.rows.items()}

    def to_text(self, width: int = 100) -> str:
        """The table in plain text: as many below each other as the columns need.

        Args:
            width: of the text, in characters; a column has a table of its own where two are wider.
        """
        names = [self.subject, *self.rows]
        tables: list[list[list[str]]] = []
        for each in self.properties:
            column = [each.title, *(findings[each.name].cell for findings in self.rows.values())]
            if not tables or max(map(len, _lines([*tables[-1], column]))) > width:
                tables.append([names])
            tables[-1].append(column)
        return "\n\n".join("\n".join(_lines(columns)) for columns in tables)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"Matrix({counted(len(self.rows), self.subject)}, {counted(len(self.properties), 'property')})"

    def to_markdown(self) -> str:
        """A table with a row per scheme or encoding; ✓ holds, ✗ does not, – does not apply."""
        head = [self.subject, *(each.title for each in self.properties)]
        rows = [[f"`{name}`", *(finding.cell for finding in findings.values())] for name, findings in self.rows.items()]
        lines = [head, ["---", *[":-:"] * len(self.properties)], *rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        rows = ([name, *(value.cell for value in row.values())] for name, row in self.rows.items())
        return html.table([self.subject, *(each.title for each in self.properties)], rows)


def measured(subject: str, named: Iterable[tuple[str, Any]], properties: Sequence[Property]) -> Matrix:
    """The matrix of what is named.

    Raises:
        InvalidInputError: nothing is named, or two by one name.
    """
    rows: dict[str, dict[str, PropertyValue]] = {}
    for name, each in named:
        if name in rows:
            raise InvalidInputError(f"{subject}s: got {name!r} twice, want every name once")
        rows[name] = {one.name: one.measure(each) for one in properties}
    if not rows:
        raise InvalidInputError(f"{subject}s: got none, want at least one")
    return Matrix(subject, tuple(properties), rows)


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the titles, a rule, and the rows."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:]]
