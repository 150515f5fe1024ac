"""The properties of schemes, and the function that measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, wraps
from math import log2
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.documents import (
    SHIFTS,
    STARTS,
    Document,
    PlacedDocument,
    around,
    first_token,
    grids,
    placed,
    small_grids,
    spec,
    verdict,
)
from mmpos.analysis.compare.matrix import Matrix, Property, PropertyValue, measured
from mmpos.errors import InvalidInputError
from mmpos.positions.place import ids_consumed, place
from mmpos.positions.table_rows import DELTA
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable

Failures = Iterator[tuple[int, str]]
"""Index and words of every grid that fails."""

_LONGEST = 8


def _of_grids(
    choose: Callable[[Scheme], tuple[Grid, ...]], needs: Literal["text", "resumable"] | None = None
) -> Callable[[Callable[[Scheme], Failures]], Callable[[Scheme], PropertyValue]]:
    """Make a property of a generator of failures: it holds if no grid fails, and applies to schemes with what it needs.

    Args:
        choose: gives the grids that are tried, the smallest first.
        needs: the attribute that a scheme must have.
    """

    def property_of(failures: Callable[[Scheme], Failures]) -> Callable[[Scheme], PropertyValue]:
        @wraps(failures)
        def measure(scheme: Scheme) -> PropertyValue:
            if needs is not None and not getattr(scheme, needs):
                return _without(scheme, needs)
            return verdict(choose(scheme), failures(scheme))

        return measure

    return property_of


def _without(scheme: Scheme, needs: str) -> PropertyValue:
    return PropertyValue(None, f"{scheme.name} {'takes no text' if needs == 'text' else 'has no next position'}")


def axes(scheme: Scheme) -> PropertyValue:
    """The numbers in a position."""
    return PropertyValue(scheme.axes)


def text_is_rope_1d(scheme: Scheme) -> PropertyValue:
    """Text alone, in one run or in two, has the ids start, start + 1, … on every axis.

    A rotation with one ladder of frequencies for all axes then turns it as RoPE-1D does, so that a language model
    finds what it was trained on.
    """
    if not scheme.text:
        return _without(scheme, "text")
    runs: list[Document] = [[Text(n)] for n in range(1, _LONGEST + 1)]
    runs += [[Text(n), Text(_LONGEST - n)] for n in range(1, _LONGEST)]
    for start in STARTS:
        for each in placed(scheme, runs, start):
            want = start + np.arange(each.values.shape[1])
            token = first_token(each.values != want * each.denominator)
            if token is not None:
                return PropertyValue(False, f"{each.spec}: start {start} puts token {token} at {each.at(token)}")
    return PropertyValue(True)


@_of_grids(grids, needs="text")
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


@_of_grids(grids)
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


@_of_grids(grids)
def integer(scheme: Scheme) -> Failures:
    """Every id is a whole number."""
    for d, each in enumerate(placed(scheme, [around(scheme, grid) for grid in grids(scheme)])):
        token = first_token(each.values % each.denominator != 0)
        if token is not None:
            yield d, f"{each.spec}: token {token} is at {each.at(token)}"


@_of_grids(grids)
def linear_shift(scheme: Scheme) -> Failures:
    """A start that is k higher makes every id k higher on every axis."""
    documents = [around(scheme, grid) for grid in grids(scheme)]
    rested = placed(scheme, documents)
    for shift in SHIFTS:
        yield from _moved(f"start {shift} moves", rested, placed(scheme, documents, shift), shift)


@_of_grids(small_grids)
def length_independent(scheme: Scheme) -> Failures:
    """The position of a token is the same however its document goes on after it, and whatever documents stand beside
    that. Grids have at most 16 patches.
    """
    documents = [around(scheme, grid) for grid in small_grids(scheme)]
    batch = placed(scheme, documents)
    alone = [placed(scheme, [document])[0] for document in documents]
    yield from _moved("others beside it move", alone, batch)
    later: list[Document] = [[Grid(3, 2)], *([[Text(5)]] if scheme.text else [])]
    for more in later:
        longer = placed(scheme, [[*document, *more] for document in documents])
        yield from _moved(f"{spec(more)} after it moves", batch, longer)


@_of_grids(grids)
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


def _moved(what: str, before: Sequence[PlacedDocument], after: Sequence[PlacedDocument], shift: int = 0) -> Failures:
    """Find documents with a token whose ids are not just shift more afterwards."""
    for d, (old, new) in enumerate(zip(before, after, strict=True)):
        want = (old.values + shift * old.denominator) * new.denominator
        token = first_token(want != new.values[:, : want.shape[1]] * old.denominator)
        if token is not None:
            yield d, f"{old.spec}: {what} token {token} from {old.at(token)} to {new.at(token)}"


_PAIRS = 4  # of channels, for each axis
_TOLERANCE = 1e-9  # of a score of a few units; angles of ids up to 2,000 are good to 1e-12


@_of_grids(small_grids)
def relative(scheme: Scheme) -> Failures:
    """The score of a rotated query and a rotated key stays, to 1e-9, when their document starts at another id and when
    more text stands in front of it: scores depend on what is between two tokens, not on what is before both.

    Rotations have base 10,000 and four pairs of channels for each axis, interleaved. Scores are those of all pairs of
    tokens, in documents whose grid has at most 16 patches.
    """
    rested = placed(scheme, [around(scheme, grid, before=2) for grid in small_grids(scheme)])
    scores = [_scores(each) for each in rested]
    for what, moved in _elsewhere(scheme, rested):
        for d, (old, new) in enumerate(zip(rested, moved, strict=True)):
            changed = np.abs(scores[d] - _scores(new)) > _TOLERANCE
            if changed.any():
                q, k = divmod(int(changed.argmax()), len(changed))
                ways = (each.written(each.values[:, k] - each.values[:, q]) for each in (old, new))
                yield d, f"{old.spec}: {what} changes the way from token {q} to {k} from {' to '.join(ways)}"


def _elsewhere(scheme: Scheme, rested: Sequence[PlacedDocument]) -> Iterator[tuple[str, list[PlacedDocument]]]:
    """The same tokens with another start, and with other text in front."""
    for shift in SHIFTS:
        yield f"start {shift}", placed(scheme, [each.document for each in rested], shift)
        if scheme.text:
            longer = placed(scheme, [around(scheme, grid, before=2 + shift) for grid in small_grids(scheme)])
            name = "a token" if shift == 1 else f"{shift} tokens"
            yield f"{name} more in front", [each.tokens_from(shift) for each in longer]


def _scores(document: PlacedDocument) -> npt.NDArray[np.float64]:
    """(tokens, tokens) of one query and one key, rotated to all places."""
    rotary = _rotary(len(document.values))
    ids = (document.values / document.denominator).astype(np.float64)
    turns = np.exp(1j * ids[rotary.pair_axis].T * rotary.inv_freq_array)
    # A pair of channels as one complex number; any that are nothing special.
    q, k = np.random.default_rng(0).standard_normal((2, rotary.num_pairs, 2)).view(np.complex128)[..., 0]
    scores: npt.NDArray[np.float64] = ((q * turns) @ (k * turns).conj().T).real
    return scores


@cache
def _rotary(axes: int) -> Rotary:
    return Rotary(head_dim=2 * _PAIRS * axes, axes=axes)


@_of_grids(grids, needs="resumable")
def delta_0(scheme: Scheme) -> Failures:
    """Generation goes on at the id that is the number of tokens before it, counted from the start, whatever grids are
    among them: the decode delta is 0.
    """
    documents = [around(scheme, grid) for grid in grids(scheme)]
    table = place(SegmentTable.from_documents([list(document) for document in documents]), scheme)
    deltas = np.where(table.resumable, table.documents[DELTA], 0)  # a document that ends between two ids has none
    yield from ((int(d), f"{spec(documents[d])}: delta {deltas[d]}") for d in deltas.nonzero()[0])


_SIDE = 64


def ids_of_a_square(scheme: Scheme) -> PropertyValue:
    """The ids that an image of 24×24 patches consumes: by so much does text after it go on."""
    return _consumed(scheme, Grid(24, 24))


def ids_of_a_row(scheme: Scheme) -> PropertyValue:
    """The ids that an image of 1×576 patches consumes: as many patches as 24×24, in one row."""
    return _consumed(scheme, Grid(1, 576))


def growth(scheme: Scheme) -> PropertyValue:
    """The power of its side with which the ids of an image grow: twice the side takes 2^p times as many.

    From side 64 to side 128, each time the image of sides up to 8 shorter that takes the most.
    """
    if not scheme.resumable:
        return _without(scheme, "resumable")
    sides = (_SIDE, 2 * _SIDE)
    families = ([Grid(side - i, side - j) for i in range(9) for j in range(9)] for side in sides)
    small, large = (max(1, int(ids_consumed(scheme, images).max())) for images in families)
    return PropertyValue(log2(large / small))


def _consumed(scheme: Scheme, image: Grid) -> PropertyValue:
    return PropertyValue(int(ids_consumed(scheme, [image])[0])) if scheme.resumable else _without(scheme, "resumable")


SCHEME_PROPERTIES = (
    Property("axes", "axes", axes),
    Property("text-is-rope-1d", "text is RoPE-1D", text_is_rope_1d),
    Property("symmetric", "symmetric", symmetric),
    Property("unique", "unique", unique),
    Property("length-independent", "length-independent", length_independent),
    Property("linear-shift", "linear shift", linear_shift),
    Property("relative", "relative", relative),
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
        schemes: names, or objects such as your own; None is every scheme of mmpos, and again with three axes those
            that have the choice.

    Raises:
        InvalidInputError: an unknown scheme, none, or one twice.
    """
    if schemes is not None and (isinstance(schemes, str) or not isinstance(schemes, Iterable)):
        raise InvalidInputError(f"schemes: got {schemes!r}, want a list of names or Scheme objects")
    chosen = every_scheme() if schemes is None else [get_scheme(scheme) for scheme in schemes]
    return measured("scheme", ((scheme.label, scheme) for scheme in chosen), SCHEME_PROPERTIES)


def every_scheme() -> list[Scheme]:
    """Every scheme with its default parameters, then with three axes those that have the choice."""
    made: list[Scheme] = [scheme() for scheme in SCHEMES.values()]
    choice = [type(scheme) for scheme in made if "axes" in vars(scheme)]  # where the axes are a parameter
    return made + [scheme(axes=3) for scheme in choice]  # type: ignore[call-arg]
