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
"""Index and reason of every grid that fails."""

NEEDS = {"text": "does not support text", "resumable": "has no next position"}
"""Attributes that a property may require of a scheme, and the reason given for a scheme without them."""


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
    """Turn a generator of failures into a property, which holds if no grid fails."""
    return wraps(failures)(lambda scheme: verdict(failures(scheme)))


def axes(scheme: Scheme) -> PropertyValue:
    """Count the numbers in a position."""
    return PropertyValue(scheme.axes)


@needing("text")
def text_is_rope_1d(scheme: Scheme) -> PropertyValue:
    """Check that text alone, in one run or two, has the ids start, start + 1, … on every axis.

    On text, a rotation with one ladder of frequencies for all axes then equals the RoPE-1D that the language model was
    trained with.
    """
    runs: list[Document] = [[Text(n)] for n in range(1, 9)]
    runs += [[Text(n), Text(8 - n)] for n in range(1, 8)]
    for start in STARTS:
        for document in placed(scheme, runs, start):
            want = start + np.arange(document.values.shape[1])
            token = first_token(document.values != want * document.denominator)
            if token is not None:
                reason = f"{document.spec}: start {start} puts token {token} at {document.at(token)}"
                return PropertyValue(False, reason)
    return PropertyValue(True)


@needing("text")
@of_grids
def symmetric(scheme: Scheme) -> Failures:
    """Check that a grid is equally far from the text before and after it.

    On every axis, the gap from the last text token before the grid to a patch must equal the gap from the opposite
    patch to the next text token.
    """
    for before in (1, 3):
        documents = [around(scheme, grid, before) for grid in grids(scheme)]
        for start in STARTS:
            for d, document in enumerate(placed(scheme, documents, start)):
                patches = document.values[:, before:-1]
                left = patches - document.values[:, before - 1 : before]
                right = document.values[:, -1:] - patches[:, ::-1]
                patch = first_token(left != right)
                if patch is not None:
                    gaps = f"gaps {document.written(left[:, patch])} and {document.written(right[:, patch])}"
                    yield d, f"{document.spec}: {gaps}" + (f" at patch {patch}" if patch else "")


@of_grids
def unique(scheme: Scheme) -> Failures:
    """Check that no two tokens of a document with one grid, or with two equal grids, have the same position."""
    between: Document = [Text(1)] if scheme.text else []
    for repeats in (1, 2):
        documents = [[*between, *[part for _ in range(repeats) for part in (grid, *between)]] for grid in grids(scheme)]
        for start in STARTS:
            for d, document in enumerate(placed(scheme, documents, start)):
                first: dict[tuple[int, ...], int] = {}
                for token, position in enumerate(zip(*document.values.tolist(), strict=True)):
                    other = first.setdefault(position, token)
                    if other < token:
                        yield d, f"{document.spec}: tokens {other} and {token} are both at {document.at(token)}"
                        break


@of_grids
def integer(scheme: Scheme) -> Failures:
    """Check that every id is an integer."""
    for d, document in enumerate(placed(scheme, [around(scheme, grid) for grid in grids(scheme)])):
        token = first_token(document.values % document.denominator != 0)
        if token is not None:
            yield d, f"{document.spec}: token {token} is at {document.at(token)}"


@of_grids
def prefix_stable(scheme: Scheme) -> Failures:
    """Check that positions stay the same when a text token or a video frame is appended to a document.

    If the scheme does not support frames, the new frame is another grid after a text token.
    """
    documents: list[Document] = [around(scheme, grid)[:-1] or [grid] for grid in grids(scheme)]
    longer = placed(scheme, [_with_another_frame(scheme, document) for document in documents])
    yield from _moved("another frame moves", placed(scheme, documents), longer)
    if scheme.text:
        short, long = ([around(scheme, grid, after=after) for grid in grids(scheme)] for after in (1, 2))
        yield from _moved("another text token moves", placed(scheme, short), placed(scheme, long))


def _with_another_frame(scheme: Scheme, document: Document) -> Document:
    *before, grid = document
    if scheme.frames and isinstance(grid, Grid):
        return [*before, replace(grid, frames=grid.frames + 1)]
    return [*document, *before, grid]


def _moved(change: str, before: Sequence[PlacedDocument], after: Sequence[PlacedDocument]) -> Failures:
    """Yield the documents in which the change moves a token."""
    for d, (old, new) in enumerate(zip(before, after, strict=True)):
        want = old.values * new.denominator
        token = first_token(want != new.values[:, : want.shape[1]] * old.denominator)
        if token is not None:
            yield d, f"{old.spec}: {change} token {token} from {old.at(token)} to {new.at(token)}"


@needing("resumable")
@of_grids
def delta_0(scheme: Scheme) -> Failures:
    """Check that generation continues at start plus the number of tokens: the decode delta is 0 after any grid."""
    for d, document in enumerate(placed(scheme, [around(scheme, grid) for grid in grids(scheme)])):
        if document.delta:
            yield d, f"{document.spec}: delta {document.delta}"


@needing("resumable")
def ids_of_a_square(scheme: Scheme) -> PropertyValue:
    """Count the ids that an image of 24×24 patches consumes: by how much the ids of the text after it advance."""
    return PropertyValue(_most_ids(scheme, [Grid(24, 24)]))


@needing("resumable")
def ids_of_a_row(scheme: Scheme) -> PropertyValue:
    """Count the ids that an image of 1×576 patches consumes: the same number of patches as 24×24, in one row."""
    return PropertyValue(_most_ids(scheme, [Grid(1, 576)]))


@needing("resumable")
def growth(scheme: Scheme) -> PropertyValue:
    """Compute the growth exponent p: an image with sides twice as long consumes 2^p times as many ids.

    Compare side 64 with side 128. For each, take the image that consumes the most ids among those whose height and
    width are at most 8 patches shorter.
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
    """Measure every property of schemes, using exact ids on a fixed family of documents.

    Args:
        schemes: names or objects, including your own; None measures every scheme in mmpos and the three-axis variants
            of schemes that take ``axes``, but not LatentScheme, which is for models that generate images or videos.

    Raises:
        InvalidInputError: a scheme is unknown or repeated, or the list is empty.
    """
    if schemes is not None and (isinstance(schemes, str) or not isinstance(schemes, Iterable)):
        raise InvalidInputError(f"schemes: got {schemes!r}, want a list of names or Scheme objects")
    chosen = every_scheme() if schemes is None else [get_scheme(scheme) for scheme in schemes]
    return measured("scheme", ((scheme.label, scheme) for scheme in chosen), SCHEME_PROPERTIES)


def every_scheme() -> list[Scheme]:
    """Return every scheme with its default parameters, then the three-axis variants of schemes that take ``axes``.

    Schemes of class LatentScheme are omitted, because most properties concern grids whose ids depend on the text before
    them.
    """
    schemes: list[Scheme] = [scheme() for scheme in SCHEMES.values() if not issubclass(scheme, LatentScheme)]
    choice = [type(scheme) for scheme in schemes if "axes" in vars(scheme)]  # axes is a parameter
    return schemes + [scheme(axes=3) for scheme in choice]  # type: ignore[call-arg]
