"""Measure the properties of schemes, and write the table of docs/compare.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import lcm
from pathlib import Path

import numpy as np

from mmpos import SCHEMES, Grid, Scheme, SegmentTable, Text, place
from mmpos.positions.place import ids_consumed
from mmpos.positions.table_rows import DELTA
from mmpos.support.checks import IntArray
from mmpos.support.files import write_text

PAGE = Path(__file__).parents[2] / "docs/compare.md"
TITLES = ("text is RoPE-1D", "symmetric", "unique", "delta 0", "integer", "24×24", "1×576")
MARKS = {True: "✓", False: "✗", None: "–"}
Document = list[Text | Grid]
Row = tuple[bool | int | None, ...]
"""The value of each property in TITLES, and whether ids are prefix-stable; None if the property does not apply."""

STARTS = (0, 1, 1000)
STILLS = [Grid(h, w, seconds_per_frame=1) for h, w in product(range(1, 13), repeat=2)]
VIDEOS = [
    Grid(h, w, frames=f, seconds_per_frame=seconds)
    for f, h, w in product(range(2, 5), range(1, 5), range(1, 5))
    for seconds in (Fraction(1, 24), Fraction(1, 4), Fraction(3, 2), Fraction(1, 30))
]


def every_scheme() -> list[Scheme]:
    """Return every scheme with its default parameters, then the three-axis variants of schemes that take ``axes``."""
    schemes: list[Scheme] = [scheme() for scheme in SCHEMES.values()]
    choice = [type(scheme) for scheme in schemes if "axes" in vars(scheme) and scheme.axes != 3]
    return schemes + [scheme(axes=3) for scheme in choice]  # type: ignore[call-arg]


def exact_ids(scheme: Scheme, documents: Sequence[Sequence[Text | Grid]], start: int = 0) -> Iterator[IntArray]:
    """Return the ids of each document times their common denominator, and below them, the denominator."""
    table = place(SegmentTable.from_documents(documents), scheme, start)
    numerators, denominators = table.rationals()
    for begin, stop in pairwise(table.cu_seqlens.tolist()):
        common = lcm(*set(denominators[begin:stop].tolist()))
        ids = numerators[:, begin:stop] * (common // denominators[begin:stop])
        yield np.concatenate([ids, np.full((1, stop - begin), common)])


def text_is_rope_1d(scheme: Scheme, start: int) -> bool:
    """Check that text alone, in one run or two, has the ids start, start + 1, … on every axis."""
    runs = [[Text(n)] for n in range(1, 9)] + [[Text(n), Text(8 - n)] for n in range(1, 8)]
    placed = exact_ids(scheme, runs, start)
    return all((ids[:-1] == (start + np.arange(ids.shape[1])) * ids[-1]).all() for ids in placed)


def is_symmetric(scheme: Scheme, grids: Sequence[Grid], before: int, start: int) -> bool:
    """Check that opposite patches are equally far from the text before and after each grid."""
    placed = exact_ids(scheme, [[Text(before), grid, Text(1)] for grid in grids], start)
    lines = [ids[:-1, before - 1 :] for ids in placed]
    return all((ids + ids[:, ::-1] == ids[:, :1] + ids[:, -1:]).all() for ids in lines)


def is_prefix(ids: IntArray, longer: IntArray) -> bool:
    """Check that the ids are the first of a longer document."""
    first = longer[:, : ids.shape[1]]
    return bool((ids[:-1] * first[-1] == first[:-1] * ids[-1]).all())


def is_stable(scheme: Scheme, grids: Sequence[Grid]) -> bool:
    """Check that ids stay the same when a frame (or, without frames, a grid) or a text token follows."""
    text: Document = [Text(1)] if scheme.text else []
    before: list[Document] = [[*text, grid] for grid in grids]
    after: list[Document] = [[*document, *(document if scheme.references else text)] for document in before]
    if scheme.frames:
        after = [[*text, replace(grid, frames=grid.frames + 1)] for grid in grids]
    before += [[*document, *text] for document in before]
    after += [[*document, *text] for document in before[len(grids) :]]
    return all(map(is_prefix, exact_ids(scheme, before), exact_ids(scheme, after)))


def measure(scheme: Scheme) -> Row:
    """Measure every property with exact ids, on every image of up to 12×12 patches and on short videos."""
    grids = STILLS + VIDEOS if scheme.frames else STILLS
    text: Document = [Text(1)] if scheme.text else []
    several: list[Document] = [
        [*text, *[grid, *text] * repeats] for repeats in range(1, 2 + scheme.references) for grid in grids
    ]
    table = place(SegmentTable.from_documents(several), scheme)
    ids = [list(exact_ids(scheme, several, start)) for start in STARTS]
    consumed = ids_consumed(scheme, [Grid(24, 24), Grid(1, 576)]).tolist() if scheme.resumable else [None, None]
    return (
        all(text_is_rope_1d(scheme, start) for start in STARTS) if text else None,
        all(is_symmetric(scheme, grids, before, start) for before in (1, 3) for start in STARTS) if text else None,
        all(np.unique(document, axis=1).shape == document.shape for placed in ids for document in placed),
        not table.documents[DELTA, table.resumable].any() if scheme.resumable else None,
        all((document[:-1] % document[-1] == 0).all() for placed in ids for document in placed),
        *consumed,
        is_stable(scheme, grids),
    )


def table() -> str:
    """Write a row for all schemes with the same properties, in the order of their first schemes."""
    rows: dict[tuple[int, Row], list[str]] = {}
    for scheme in every_scheme():
        rows.setdefault((scheme.axes, measure(scheme)[:-1]), []).append(f"`{scheme.label}`")
    lines = [f"| schemes | axes | {' | '.join(TITLES)} |", f"| --- |{' :-: |' * (1 + len(TITLES))}"]
    for (axes, row), names in rows.items():
        cells = [MARKS[value] if value is None or isinstance(value, bool) else f"{value:,}" for value in row]
        lines.append(f"| {', '.join(names)} | {axes} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    marks = re.compile(r"(?<=<!-- properties -->\n).*(?=<!-- /properties -->)", re.DOTALL)
    write_text(PAGE, marks.sub(table(), PAGE.read_text(encoding="utf-8")))
