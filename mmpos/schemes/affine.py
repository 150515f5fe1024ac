"""Values that a scheme gives at chosen points, and a check of what a scheme declares about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mmpos.errors import InvalidInputError, MmposError
from mmpos.schemes.base import Grids, Placement, Scheme, TextRuns
from mmpos.support.checks import IntArray, integer

__all__ = ["POINT", "NotAffineError", "Values", "check", "linear", "text_values", "unit_points", "values"]

POINT = ("cursor", "start", "number", "text_tokens")
"""What ids may depend on besides the shape of a grid: the columns of points."""


class NotAffineError(Exception):
    """Ids that no table of coefficients describes: split grids, fractions of ids consumed, or wrong shapes."""


class Values(NamedTuple):
    """What a scheme returns for each shape at each point; all arrays are (shapes, points).

    Args:
        fixed: what must not depend on the point: advance, cleared, denominator, and steps of each axis.
        origins: origin of each axis.
        lowest: smallest next position; None if only the cursor matters.
    """

    fixed: dict[str, IntArray]
    origins: list[IntArray]
    lowest: IntArray | None


def values(scheme: Scheme, shapes: IntArray, points: IntArray) -> Values:
    """Place every shape at every point.

    Args:
        scheme: the scheme.
        shapes: (4, shapes) frames, height, width, and whether rows end in a separator.
        points: (points, 4) see POINT.

    Raises:
        NotAffineError: coefficients cannot describe the placement.
        MmposError: the scheme refuses a shape.
    """
    count, cursor, start, number, text = shapes.shape[1], *np.tile(points, (shapes.shape[1], 1)).T
    # Each point is the last grid of a document of its own, after as many grids of the same shape as it has to follow.
    document = np.arange(number.size).repeat(number + 1)
    last = (number + 1).cumsum() - 1
    of_shape = shapes.repeat(len(points), axis=1)[:, document]
    separator = of_shape[3] > 0 if shapes[3].any() else None
    grids = Grids(of_shape[:3], start[document], document, separator, text_tokens=text[document])
    if scheme.unit(grids) is not None:
        raise NotAffineError
    before = cursor[document]
    placement, lowest, cleared = scheme.place(grids, before), scheme.next_after(grids, before), scheme.cleared(grids)
    if placement.pieces is not None and placement.pieces.tokens.size != document.size:
        raise NotAffineError

    def at_points(array: IntArray | int) -> IntArray:
        return _integers(array, document.size)[last].reshape(count, len(points))

    fixed, origins = _placement(scheme, placement)
    fixed |= {"advance": scheme.advance(grids), "cleared": 0 if cleared is None else cleared}
    return Values(
        {name: at_points(array) for name, array in fixed.items()},
        [at_points(array) for array in origins],
        None if lowest is None else at_points(lowest),
    )


def text_values(scheme: Scheme, points: IntArray) -> Values:
    """Place a run of text at every point; like ``values``, with one row instead of shapes."""
    count = len(points)
    runs = TextRuns(np.arange(1, count + 1), np.arange(count), np.arange(count), points[:, POINT.index("start")])
    if not scheme.text or (_integers(scheme.advance_text(runs), count) != runs.lengths).any():
        raise NotAffineError
    fixed, origins = _placement(scheme, scheme.place_text(runs, points[:, POINT.index("cursor")]))
    return Values(
        {name: _integers(array, count)[None] for name, array in fixed.items()},
        [_integers(array, count)[None] for array in origins],
        None,
    )


def _placement(scheme: Scheme, placement: Placement) -> tuple[dict[str, IntArray | int], list[IntArray | int]]:
    fixed: dict[str, IntArray | int] = {"denominator": placement.denominator}
    for name in ("origin", "step_frame", "step_row", "step_col"):
        per_axis = getattr(placement, name)
        per_axis = [0] * scheme.axes if per_axis is None else list(per_axis)
        if len(per_axis) != scheme.axes:
            raise NotAffineError
        if name == "origin":
            origins = per_axis
        else:
            fixed |= {f"{name}[{axis}]": steps for axis, steps in enumerate(per_axis)}
    return fixed, origins


def _integers(array: IntArray | int, count: int) -> IntArray:
    numbers = np.asarray(array)
    if numbers.dtype.kind not in "iu":
        raise NotAffineError
    return np.broadcast_to(numbers.astype(np.int64), count)


def check(scheme: Scheme, *, points: int = 1000, seed: int = 0) -> None:
    """Check that a scheme of your own places grids as its ``linear_in`` declares; call it from your tests.

    ``place`` asks a scheme with ``linear_in`` once per shape, and computes all other ids from the answer. If the
    declaration is wrong, ids are wrong.

    >>> from mmpos.schemes import RopeTie
    >>> check(RopeTie())

    Args:
        scheme: the scheme.
        points: number of random cursors, first ids, numbers of earlier grids and numbers of text tokens.
        seed: seed of the random choices.

    Raises:
        InvalidInputError: the scheme declares nothing, or the message names the value that differs, with its shape and
            its point.
    """
    if not isinstance(scheme, Scheme):
        raise InvalidInputError(f"scheme: got {scheme!r}, want a scheme object")
    if scheme.linear_in is None:
        raise InvalidInputError(f"scheme {scheme.name!r}: got linear_in None, want some of {', '.join(POINT)}")
    count, rng = integer("points", points, minimum=1), np.random.default_rng(integer("seed", seed, minimum=0))
    drawn = np.stack([rng.integers(low, high, count) for low, high in _RANGES], axis=1)
    drawn[::3, :2] %= 10
    _compare(scheme, "text", ("cursor", "start"), drawn, lambda at: text_values(scheme, at))
    shapes = rng.integers(1, 40, (_SHAPES, 4))
    shapes[:, 0] = rng.integers(1, 5, _SHAPES) if scheme.frames else 1
    shapes[:, 3] = rng.integers(0, 2, _SHAPES) if scheme.row_separators else 0
    for shape in shapes:
        frames, height, width, _ = shape.tolist()
        what = f"a grid of {frames}×{height}×{width}"
        _compare(scheme, what, scheme.linear_in, drawn, lambda at, shape=shape: values(scheme, shape[:, None], at))  # type: ignore[misc]


_SHAPES = 24
"""Number of random shapes that are checked."""

_RANGES = ((-(2**20), 2**20), (-(2**20), 2**20), (0, 12), (0, 2**20))
"""Ranges of random points."""


def unit_points(names: Sequence[str]) -> IntArray:
    """Return the points that determine a linear function of the named columns: 0, then 1 in one column each."""
    points = np.zeros((1 + len(names), len(POINT)), np.int64)
    points[np.arange(1, 1 + len(names)), [POINT.index(name) for name in names]] = 1
    return points


def linear(at_units: IntArray, names: Sequence[str]) -> tuple[IntArray, IntArray]:
    """Return the (shapes,) values at 0 and their (shapes, 4) slopes, 0 in columns that are not named."""
    slopes = np.zeros((len(at_units), len(POINT)), np.int64)
    slopes[:, [POINT.index(name) for name in names]] = at_units[:, 1:] - at_units[:, :1]
    return at_units[:, 0], slopes


def _compare(
    scheme: Scheme, what: str, names: Sequence[str], points: IntArray, ask: Callable[[IntArray], Values]
) -> None:
    """Compare values at random points with those that values at unit points predict."""
    try:
        at_units, got = ask(unit_points(names)), ask(points)
    except (MmposError, NotAffineError):  # place asks the scheme about every such segment
        return
    axes = {f"origin[{axis}]": pair for axis, pair in enumerate(zip(at_units.origins, got.origins, strict=True))}
    fixed = {name: (array, got.fixed[name]) for name, array in at_units.fixed.items()}
    lowest = {} if at_units.lowest is None or got.lowest is None else {"next_after": (at_units.lowest, got.lowest)}
    for name, (known, wanted) in (axes | fixed | lowest).items():
        zero, slopes = linear(known, names)
        slopes *= name not in fixed
        different = (wanted != zero[:, None] + slopes @ points.T)[0]
        if different.any():
            i = int(different.argmax())
            at = ", ".join(f"{column} {value}" for column, value in zip(POINT, points[i].tolist(), strict=True))
            declared = "a constant" if name in fixed else f"linear in {', '.join(names) or 'nothing'}"
            raise InvalidInputError(
                f"scheme {scheme.name!r}: {name} of {what} must be {declared}, got {wanted[0, i]} at {at}"
            )
    advance = int(got.fixed["advance"].min()) if "advance" in got.fixed else 0
    if advance < 0:
        raise InvalidInputError(f"scheme {scheme.name!r}: got advance {advance} for {what}, want >= 0")
