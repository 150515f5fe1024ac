"""The properties of schemes, and the function that measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from math import log2

import numpy as np

from mmpos.analysis.compare.documents import (
    STARTS,
    Document,
    PlacedDocument,
    around,
    first_token,
    grids,
    placed,
    verdict,
)
from mmpos.analysis.compare.matrix import Matrix, Property, PropertyValue, measured
from mmpos.errors import InvalidInputError
from mmpos.positions.place import ids_consumed
from mmpos.schemes import SCHEMES, LatentScheme, Scheme, get_scheme
from mmpos.segments.kinds import Grid, Text

Measure = Callable[[Scheme], PropertyValue]
Failures = Iterator[tuple[int, str]]
"""Index and words of every grid that fails."""

NEEDS = {"text": "takes no text", "resumable": "has no next position"}
"""Attributes of a scheme, and what is said of one without."""


def needing(attribute: str) -> Callable[[Measure], Measure]:
    """Apply a property only to schemes with this attribute."""

    def limited(measure: Measure) -> Measure:
        @wraps(measure)
        def measured(scheme: Scheme) -> PropertyValue:
            if getattr(scheme, attribute):
                return measure(scheme)
            return PropertyValue(None, f"{scheme.name} {NEEDS[attribute]}")

        return measured

    return limited


def of_grids(failures: Callable[[Scheme], Failures]) -> Measure:
    """Make a property of a generator of failures: it holds if no grid fails."""
    return wraps(failures)(lambda scheme: verdict(failures(scheme)))


def axes(scheme: Scheme) -> PropertyValue:
    """The numbers in a position."""
    return PropertyValue(scheme.axes)


@needing("text")
def text_is_rope_1d(scheme: Scheme) -> PropertyValue:
    """Text alone, in one run or in two, has the ids start, start + 1, … on every axis.

    A rotation with one ladder of frequencies for all axes then turns it as RoPE-1D does, so that a language model
    finds what it was trained on.
    """
    runs: list[Document] = [[Text(n)] for n in range(1, 9)]
    runs += [[Text(n), Text(8 - n)] for n in range(1, 8)]
    for start in STARTS:
        for each in placed(scheme, runs, start):
            want = start + np.arange(each.values.shape[1])
            token = first_token(each.values != want * each.denominator)
            if token is not None:
                return PropertyValue(False, f"{each.spec}: start {start} puts token {token} at {each.at(token)}")
    return PropertyValue(True)


@needing("text")
@of_grids
def symmetric(scheme: Scheme) -> Failures:
    """A grid is as far from the text before it as from the text after it: on every axis, the gap from the last text to
    a patch is the gap from the opposite patch to the next text.
    """
    for before in (1, 3):
        documents = [around(scheme, grid, before) for grid in grids(scheme)]
        for start in STARTS:
            for d, each in enumerate(placed(scheme, documents, start)):
                patches = each.values[:, before:-1]
                left = patches - each.values[:, before - 1 : before]
                right = each.values[:, -1:] - patches[:, ::-1]
                patch = first_token(left != right)
                if patch is not None:
                    gaps = f"gaps {each.written(left[:, patch])} and {each.written(right[:, patch])}"
                    yield d, f"{each.spec}: {gaps}" + (f" at patch {patch}" if patch else "")


@of_grids
def unique(scheme: Scheme) -> Failures:
    """No two tokens of a document have the same position, be there one grid or two of one size."""
    between: Document = [Text(1)] if scheme.text else []
    for repeats in (1, 2):
        documents = [[*between, *[part for _ in range(repeats) for part in (grid, *between)]] for grid in grids(scheme)]
        for start in STARTS:
            for d, each in enumerate(placed(scheme, documents, start)):
                first: dict[tuple[int, ...], int] = {}
                for token, position in enumerate(zip(*each.values.tolist(), strict=True)):
                    other = first.setdefault(position, token)
                    if other < token:
                        yield d, f"{each.spec}: tokens {other} and {token} are both at {each.at(token)}"
                        break


@of_grids
def integer(scheme: Scheme) -> Failures:
    """Every id is a whole number."""
    for d, each in enumerate(placed(scheme, [around(scheme, grid) for grid in grids(scheme)])):
        token = first_token(each.values % each.denominator != 0)
        if token is not None:
            yield d, f"{each.spec}: token {token} is at {each.at(token)}"


@of_grids
def prefix_stable(scheme: Scheme) -> Failures:
    """A document that grows at its end, by a token of text or by a frame of its video, keeps the positions that it has.

    Where the scheme has no frames, the next one is a grid of its own after a token of text.
    """
    documents: list[Document] = [around(scheme, grid)[:-1] or [grid] for grid in grids(scheme)]
    longer = placed(scheme, [_with_a_frame_more(scheme, document) for document in documents])
    yield from _moved("a frame more moves", placed(scheme, documents), longer)
    if scheme.text:
        short, long = ([around(scheme, grid, after=after) for grid in grids(scheme)] for after in (1, 2))
        yield from _moved("a token more moves", placed(scheme, short), placed(scheme, long))


def _with_a_frame_more(scheme: Scheme, document: Document) -> Document:
    *before, grid = document
    if scheme.frames and isinstance(grid, Grid):
        return [*before, replace(grid, frames=grid.frames + 1)]
    return [*document, *before, grid]


def _moved(what: str, before: Sequence[PlacedDocument], after: Sequence[PlacedDocument]) -> Failures:
    """Find documents with a token whose ids are others afterwards."""
    for d, (old, new) in enumerate(zip(before, after, strict=True)):
        want = old.values * new.denominator
        token = first_token(want != new.values[:, : want.shape[1]] * old.denominator)
        if token is not None:
            yield d, f"{old.spec}: {what} token {token} from {old.at(token)} to {new.at(token)}"


@needing("resumable")
@of_grids
def delta_0(scheme: Scheme) -> Failures:
    """Generation goes on at the id that is the number of tokens before it, counted from the start, whatever grids are
    among them: the decode delta is 0.
    """
    for d, each in enumerate(placed(scheme, [around(scheme, grid) for grid in grids(scheme)])):
        if each.delta:
            yield d, f"{each.spec}: delta {each.delta}"


@needing("resumable")
def ids_of_a_square(scheme: Scheme) -> PropertyValue:
    """The ids that an image of 24×24 patches consumes: by so much does text after it go on."""
    return PropertyValue(_most_ids(scheme, [Grid(24, 24)]))


@needing("resumable")
def ids_of_a_row(scheme: Scheme) -> PropertyValue:
    """The ids that an image of 1×576 patches consumes: as many patches as 24×24, in one row."""
    return PropertyValue(_most_ids(scheme, [Grid(1, 576)]))


@needing("resumable")
def growth(scheme: Scheme) -> PropertyValue:
    """The power of its side with which the ids of an image grow: twice the side takes 2^p times as many.

    From side 64 to side 128, each time the image of sides up to 8 shorter that takes the most.
    """
    families = ([Grid(side - i, side - j) for i in range(9) for j in range(9)] for side in (64, 128))
    small, large = (max(1, _most_ids(scheme, images)) for images in families)
    return PropertyValue(log2(large / small))


def _most_ids(scheme: Scheme, images: Sequence[Grid]) -> int:
    return int(ids_consumed(scheme, images).max())


SCHEME_PROPERTIES = (
    Property("axes", "axes", axes),
    Property("text-is-rope-1d", "text is RoPE-1D", text_is_rope_1d),
    Property("symmetric", "symmetric", symmetric),
    Property("unique", "unique", unique),
    Property("delta-0", "delta 0", delta_0),
    Property("integer", "integer", integer),
    Property("prefix-stable", "prefix-stable", prefix_stable),
    Property("ids-of-a-square", "24×24", ids_of_a_square),
    Property("ids-of-a-row", "1×576", ids_of_a_row),
    Property("growth", "growth", growth),
)
"""The properties of every scheme, in the order of the table."""


def measure(schemes: Iterable[str | Scheme] | None = None) -> Matrix:
    """Every property of schemes, measured with exact ids on a fixed family of documents.

    Args:
        schemes: names, or objects such as your own; None is every scheme of mmpos where grids follow text, and again
            with three axes those that have the choice.

    Raises:
        InvalidInputError: an unknown scheme, none, or one twice.
    """
    if schemes is not None and (isinstance(schemes, str) or not isinstance(schemes, Iterable)):
        raise InvalidInputError(f"schemes: got {schemes!r}, want a list of names or Scheme objects")
    chosen = every_scheme() if schemes is None else [get_scheme(scheme) for scheme in schemes]
    return measured("scheme", ((scheme.label, scheme) for scheme in chosen), SCHEME_PROPERTIES)


def every_scheme() -> list[Scheme]:
    """Every scheme with its default parameters, then with three axes those that have the choice.

    Those of models that generate are left out where nothing before a grid pushes it: most properties are about that.
    """
    made: list[Scheme] = [scheme() for scheme in SCHEMES.values() if not issubclass(scheme, LatentScheme)]
    choice = [type(scheme) for scheme in made if "axes" in vars(scheme)]  # where the axes are a parameter
    return made + [scheme(axes=3) for scheme in choice]  # type: ignore[call-arg]
