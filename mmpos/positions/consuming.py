"""How many ids images consume under a scheme, by placing them."""

from __future__ import annotations

from collections.abc import Iterable

from mmpos.positions.place import place
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.parts import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray

__all__ = ["ids_consumed"]


def ids_consumed(scheme: str | Scheme, grids: Iterable[Grid]) -> IntArray:
    """By how much text goes on from before a grid to after it, its own tokens taken away.

    >>> from mmpos.segments.parts import Grid
    >>> ids_consumed("rope-tie", [Grid(24, 24), Grid(1, 576)]).tolist()
    [624, 1153]

    Args:
        scheme: a name from mmpos.SCHEMES or a scheme object.
        grids: each is placed in a document of its own, between two tokens of text where the scheme takes text.

    Returns:
        (grids,) int64, new.

    Raises:
        UnsupportedError: the scheme has no next position, or no place for frames that are there.
    """
    scheme = get_scheme(scheme)
    text = [Text(1)] if scheme.text else []
    documents: list[list[Text | Grid]] = [[*text, grid, *text] for grid in grids]
    return place(SegmentTable.from_documents(documents), scheme).next_positions - 2 * len(text)
