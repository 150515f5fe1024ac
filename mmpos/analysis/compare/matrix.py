"""The matrix of measured properties of schemes or encodings, as data, JSON, text and Markdown."""

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
        why: the smallest counterexample if the value is False; the reason if the value is None; otherwise empty.
    """

    value: bool | int | float | None
    why: str = ""

    @property
    def cell(self) -> str:
        """The value as shown in tables.

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
        name: identifier for programs.
        title: short title for readers.
        measure: measures the value for a scheme or an encoding; its docstring is the definition.
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

    It is displayed as a table by ``print`` and in notebooks.

    Args:
        subject: "scheme" or "encoding".
        properties: the columns.
        rows: the values by scheme or encoding name, then by property name.
    """

    subject: str
    properties: tuple[Property, ...]
    rows: Mapping[str, Mapping[str, PropertyValue]]

    def __getitem__(self, key: tuple[str, str]) -> PropertyValue:
        """Look up a value by the name of the scheme or encoding and the name of the property."""
        row, name = key
        return self.rows[one_of(self.subject, row, self.rows)][one_of("property", name, self.rows[row])]

    def part(self, rows: Collection[str]) -> Matrix:
        """Select rows, in the order of this matrix, and the properties that apply to at least one of them."""
        some = {name: row for name, row in self.rows.items() if name in rows}
        applying = [
            column for column in self.properties if any(row[column.name].value is not None for row in some.values())
        ]
        kept = {name: {column.name: row[column.name] for column in applying} for name, row in some.items()}
        return replace(self, properties=tuple(applying), rows=kept)

    @property
    def reasons(self) -> list[tuple[str, Property, str]]:
        """Name, property and reason for each property that does not hold or does not apply."""
        return [
            (name, column, row[column.name].why)
            for name, row in self.rows.items()
            for column in self.properties
            if row[column.name].why
        ]

    def to_dict(self) -> dict[str, dict[str, dict[str, bool | float | str | None]]]:
        """Return values and reasons by name and property, for JSON."""
        return {name: {key: dict(vars(value)) for key, value in row.items()} for name, row in self.rows.items()}

    def to_text(self, width: int = 100) -> str:
        """Format the matrix as plain text; columns that exceed the width continue in another table below.

        Args:
            width: the maximum number of characters per line; a single column may be wider.
        """
        names = [self.subject, *self.rows]
        tables: list[list[list[str]]] = []
        for prop in self.properties:
            column = [prop.title, *(row[prop.name].cell for row in self.rows.values())]
            if not tables or max(map(len, _lines([*tables[-1], column]))) > width:
                tables.append([names])
            tables[-1].append(column)
        return "\n\n".join("\n".join(_lines(columns)) for columns in tables)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"Matrix({counted(len(self.rows), self.subject)}, {counted(len(self.properties), 'property')})"

    def to_markdown(self) -> str:
        """Format the matrix as a Markdown table: ✓ holds, ✗ does not hold, – does not apply."""
        head = [self.subject, *(column.title for column in self.properties)]
        rows = [[f"`{name}`", *(value.cell for value in row.values())] for name, row in self.rows.items()]
        lines = [head, ["---", *[":-:"] * len(self.properties)], *rows]
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        rows = ([name, *(value.cell for value in row.values())] for name, row in self.rows.items())
        return html.table([self.subject, *(column.title for column in self.properties)], rows)


def measured(subject: str, named: Iterable[tuple[str, Any]], properties: Sequence[Property]) -> Matrix:
    """Measure the properties of named schemes or encodings.

    Raises:
        InvalidInputError: there are no schemes or encodings to measure, or two of them have the same name.
    """
    rows: dict[str, dict[str, PropertyValue]] = {}
    for name, scheme_or_encoding in named:
        if name in rows:
            raise InvalidInputError(f"{subject}s: got {name!r} twice, want each name once")
        rows[name] = {column.name: column.measure(scheme_or_encoding) for column in properties}
    if not rows:
        raise InvalidInputError(f"{subject}s: got none, want at least one")
    return Matrix(subject, tuple(properties), rows)


def _lines(columns: Sequence[Sequence[str]]) -> list[str]:
    """Format the lines of a table: the titles, a rule, and the rows."""
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:]]
