"""The properties of schemes, and the function that measures them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import log2

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.documents import (
    SHIFTS,
    STARTS,
    Batch,
    Document,
    Mask,
    Trial,
    around,
    grids,
    small_grids,
    spec,
)
from mmpos.analysis.compare.matrix import Finding, Matrix, Property, measured
from mmpos.errors import InvalidInputError
from mmpos.positions.place import ids_consumed
from mmpos.positions.table_rows import DELTA
from mmpos.rotary import Rotary
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.support.checks import IntArray

_LONGEST = 8


def axes(scheme: Scheme) -> Finding:
    """The numbers in a position."""
    return Finding(scheme.axes)


def text_is_rope_1d(scheme: Scheme) -> Finding:
    """Text alone, in one run or in two, has the ids start, start + 1, … on every axis.

    A rotation with one ladder of frequencies for all axes then turns it as RoPE-1D does, so that a language model
    finds what it was trained on.
    """
    if not scheme.text:
        return _without_text(scheme)
    runs: list[Document] = [[Text(n)] for n in range(1, _LONGEST + 1)]
    runs += [[Text(n), Text(_LONGEST - n)] for n in range(1, _LONGEST)]
    for start in STARTS:
        batch = Batch.placed(scheme, runs, start)
        want = start + np.arange(batch.owner.size) - batch.offsets[batch.owner]
        wrong = (batch.values != want * batch.denominator).any(axis=0)
        if wrong.any():
            d = int(batch.any_token(wrong).argmax())
            t = batch.first_token(wrong, d)
            return Finding(False, f"{batch.spec(d)}: start {start} puts token {t} at {batch.at(d, t)}")
    return Finding(True)


def symmetric(scheme: Scheme) -> Finding:
    """A grid is as far from the text before it as from the text after it: on every axis, the gap from the last text to
    a patch is the gap from the opposite patch to the next text.
    """
    if not scheme.text:
        return _without_text(scheme)
    trial = Trial(grids(scheme))
    for before in (1, 3):
        documents = [around(scheme, grid, before) for grid in trial.grids]
        for start in STARTS:
            batch = Batch.placed(scheme, documents, start)
            _note_gaps(trial, batch, before)
    return trial.verdict()


def unique(scheme: Scheme) -> Finding:
    """No two tokens of a document have the same position, be there one grid or two of one size."""
    trial = Trial(grids(scheme))
    for repeats in (1, 2):
        documents = [_repeated(scheme, grid, repeats) for grid in trial.grids]
        for start in STARTS:
            batch = Batch.placed(scheme, documents, start)
            twin = _twins(batch)

            def words(d: int, batch: Batch = batch, twin: IntArray = twin) -> str:
                t = batch.first_token(twin >= 0, d)
                other = int(twin[batch.offsets[d] + t] - batch.offsets[d])
                return f"{batch.spec(d)}: tokens {other} and {t} are both at {batch.at(d, t)}"

            trial.note(batch.any_token(twin >= 0), words)
    return trial.verdict()


def integer(scheme: Scheme) -> Finding:
    """Every id is a whole number."""
    trial = Trial(grids(scheme))
    batch = Batch.placed(scheme, [around(scheme, grid) for grid in trial.grids])
    broken = (batch.values % batch.denominator != 0).any(axis=0)

    def words(d: int) -> str:
        t = batch.first_token(broken, d)
        return f"{batch.spec(d)}: token {t} is at {batch.at(d, t)}"

    trial.note(batch.any_token(broken), words)
    return trial.verdict()


def _note_gaps(trial: Trial, batch: Batch, before: int) -> None:
    """Tell the grids whose patches and their opposites are not as far from the texts around them."""
    first, stop = batch.offsets + before, batch.offsets + batch.table.lengths - 1  # of the patches
    token = np.arange(batch.owner.size)
    patch = (token >= first[batch.owner]) & (token < stop[batch.owner])
    opposite = np.where(patch, (first + stop - 1)[batch.owner] - token, token)
    left = batch.values - batch.values[:, first - 1][:, batch.owner]
    right = batch.values[:, stop][:, batch.owner] - batch.values[:, opposite]
    wrong: Mask = patch & (left != right).any(axis=0)

    def words(d: int) -> str:
        t = batch.first_token(wrong, d)
        gaps = (batch.written(gap[:, batch.offsets[d] + t]) for gap in (left, right))
        return f"{batch.spec(d)}: gaps {' and '.join(gaps)}" + (f" at patch {t - before}" if t > before else "")

    trial.note(batch.any_token(wrong), words)


def _twins(batch: Batch) -> IntArray:
    """(tokens,) an earlier token of the document with the same position, or −1."""
    owner, values = batch.owner, batch.values
    if values.dtype == object:  # which sorts in no time worth waiting for
        values = np.unique(values, return_inverse=True)[1].reshape(values.shape)
    order = np.lexsort((*values, owner))  # keeps the order of equals
    same = (np.diff(owner[order]) == 0) & (np.diff(values[:, order], axis=1) == 0).all(axis=0)
    twin = np.full(owner.size, -1)
    twin[order[1:][same]] = order[:-1][same]
    return twin


def _repeated(scheme: Scheme, grid: Grid, repeats: int) -> Document:
    between: Document = [Text(1)] if scheme.text else []
    return [*between, *[part for _ in range(repeats) for part in (grid, *between)]]


def _without_text(scheme: Scheme) -> Finding:
    return Finding(None, f"{scheme.name} takes no text")


def linear_shift(scheme: Scheme) -> Finding:
    """A start that is k higher makes every id k higher on every axis."""
    trial = Trial(grids(scheme))
    documents = [around(scheme, grid) for grid in trial.grids]
    rested = Batch.placed(scheme, documents)
    for shift in SHIFTS:
        moved = Batch.placed(scheme, documents, shift)
        _note(trial, f"start {shift}", rested, moved, rested.astray(moved, shift))
    return trial.verdict()


def length_independent(scheme: Scheme) -> Finding:
    """The position of a token is the same however its document goes on after it, and whatever documents stand beside
    that. Grids have at most 16 patches.
    """
    trial = Trial(small_grids(scheme))
    documents = [around(scheme, grid) for grid in trial.grids]
    batch = Batch.placed(scheme, documents)
    _note_alone(trial, scheme, batch)
    later: list[Document] = [[Grid(3, 2)], *([[Text(5)]] if scheme.text else [])]
    for more in later:
        _note_longer(trial, scheme, f"{spec(more)} after it", batch, [[*document, *more] for document in documents])
    return trial.verdict()


def prefix_stable(scheme: Scheme) -> Finding:
    """A document that grows at its end, by a token of text or by a frame of its video, keeps the positions that it has.

    Where the scheme has no frames, the next one is a grid of its own after a token of text.
    """
    trial = Trial(grids(scheme))
    documents: list[Document] = [around(scheme, grid)[:-1] or [grid] for grid in trial.grids]
    longer = [_with_a_frame_more(scheme, document) for document in documents]
    _note_longer(trial, scheme, "a frame more", Batch.placed(scheme, documents), longer)
    if scheme.text:
        documents = [around(scheme, grid) for grid in trial.grids]
        longer = [around(scheme, grid, after=2) for grid in trial.grids]
        _note_longer(trial, scheme, "a token more", Batch.placed(scheme, documents), longer)
    return trial.verdict()


def _note(trial: Trial, what: str, before: Batch, after: Batch, wrong: Mask) -> None:
    """Tell the documents with tokens that went where they should not."""

    def words(d: int) -> str:
        t = before.first_token(wrong, d)
        return f"{before.spec(d)}: {what} moves token {t} from {before.at(d, t)} to {after.at(d, t)}"

    trial.note(before.any_token(wrong), words)


def _note_longer(trial: Trial, scheme: Scheme, what: str, batch: Batch, longer: Sequence[Document]) -> None:
    after = Batch.placed(scheme, longer).taken(0, batch.table.lengths)
    _note(trial, what, batch, after, batch.astray(after))


def _note_alone(trial: Trial, scheme: Scheme, batch: Batch) -> None:
    """Tell the documents that are placed otherwise when they are alone."""
    alone = [Batch.placed(scheme, [document]) for document in batch.documents]
    wrong = [here.astray(batch.document(d)) for d, here in enumerate(alone)]

    def words(d: int) -> str:
        t = int(wrong[d].argmax())
        return f"{batch.spec(d)}: others beside it move token {t} from {alone[d].at(0, t)} to {batch.at(d, t)}"

    trial.note(np.array([each.any() for each in wrong]), words)


def _with_a_frame_more(scheme: Scheme, document: Document) -> Document:
    *before, grid = document
    if scheme.frames and isinstance(grid, Grid):
        return [*before, replace(grid, frames=grid.frames + 1)]
    return [*document, *before, grid]


_PAIRS = 4  # of channels, for each axis
_TOLERANCE = 1e-9  # of a score of a few units; angles of ids up to 2,000 are good to 1e-12


def relative(scheme: Scheme) -> Finding:
    """The score of a rotated query and a rotated key stays, to 1e-9, when their document starts at another id and when
    more text stands in front of it: scores depend on what is between two tokens, not on what is before both.

    Rotations have base 10,000 and four pairs of channels for each axis, interleaved. Scores are those of all pairs of
    tokens, in documents whose grid has at most 16 patches.
    """
    trial = Trial(small_grids(scheme))
    rested = Batch.placed(scheme, [around(scheme, grid, before=2) for grid in trial.grids])
    scores = list(_scores(rested))
    for what, moved in _moved(scheme, trial, rested):
        changed = [np.abs(old - new) > _TOLERANCE for old, new in zip(scores, _scores(moved), strict=True)]

        def words(
            d: int, what: str = what, moved: Batch = moved, changed: list[npt.NDArray[np.bool_]] = changed
        ) -> str:
            q, k = divmod(int(changed[d].argmax()), len(changed[d]))
            ways = (batch.written(_of(batch, d, k) - _of(batch, d, q)) for batch in (rested, moved))
            return f"{rested.spec(d)}: {what} changes the way from token {q} to {k} from {' to '.join(ways)}"

        trial.note(np.array([each.any() for each in changed]), words)
    return trial.verdict()


def _moved(scheme: Scheme, trial: Trial, rested: Batch) -> Iterator[tuple[str, Batch]]:
    """The same tokens with another start, and with other text in front."""
    for shift in SHIFTS:
        yield f"start {shift}", Batch.placed(scheme, rested.documents, shift)
        if scheme.text:
            longer = Batch.placed(scheme, [around(scheme, grid, before=2 + shift) for grid in trial.grids])
            name = "a token" if shift == 1 else f"{shift} tokens"
            yield f"{name} more in front", longer.taken(shift, rested.table.lengths)


def _scores(batch: Batch) -> Iterator[npt.NDArray[np.float64]]:
    """(tokens, tokens) of each document: one query and one key, rotated to all places."""
    rotary = _rotary(len(batch.values))
    ids = (batch.values / batch.denominator).astype(np.float64)
    turns = np.exp(1j * ids[rotary.pair_axis].T * rotary.inv_freq_array)
    # A pair of channels as one complex number; any that are nothing special.
    q, k = np.random.default_rng(0).standard_normal((2, rotary.num_pairs, 2)).view(np.complex128)[..., 0]
    for part in np.split(turns, batch.table.cu_seqlens[1:-1]):
        yield ((q * part) @ (k * part).conj().T).real


@cache
def _rotary(axes: int) -> Rotary:
    return Rotary(head_dim=2 * _PAIRS * axes, axes=axes)


def _of(batch: Batch, document: int, token: int) -> npt.NDArray[np.int64]:
    position: npt.NDArray[np.int64] = batch.values[:, batch.offsets[document] + token]
    return position


_SIDE = 64


def delta_0(scheme: Scheme) -> Finding:
    """Generation goes on at the id that is the number of tokens before it, counted from the start, whatever grids are
    among them: the decode delta is 0.
    """
    if not scheme.resumable:
        return _no_next(scheme)
    trial = Trial(grids(scheme))
    documents = [around(scheme, grid) for grid in trial.grids]
    table = Batch.placed(scheme, documents).table
    deltas = np.where(table.resumable, table.documents[DELTA], 0)  # a document that ends between two ids has none
    trial.note(deltas != 0, lambda d: f"{spec(documents[d])}: delta {deltas[d]}")
    return trial.verdict()


def ids_of_a_square(scheme: Scheme) -> Finding:
    """The ids that an image of 24×24 patches consumes: by so much does text after it go on."""
    return _consumed(scheme, Grid(24, 24))


def ids_of_a_row(scheme: Scheme) -> Finding:
    """The ids that an image of 1×576 patches consumes: as many patches as 24×24, in one row."""
    return _consumed(scheme, Grid(1, 576))


def growth(scheme: Scheme) -> Finding:
    """The power of its side with which the ids of an image grow: twice the side takes 2^p times as many.

    From side 64 to side 128, each time the image of sides up to 8 shorter that takes the most.
    """
    if not scheme.resumable:
        return _no_next(scheme)
    sides = (_SIDE, 2 * _SIDE)
    families = ([Grid(side - i, side - j) for i in range(9) for j in range(9)] for side in sides)
    small, large = (max(1, int(ids_consumed(scheme, images).max())) for images in families)
    return Finding(log2(large / small))


def _consumed(scheme: Scheme, image: Grid) -> Finding:
    return Finding(int(ids_consumed(scheme, [image])[0])) if scheme.resumable else _no_next(scheme)


def _no_next(scheme: Scheme) -> Finding:
    return Finding(None, f"{scheme.name} has no next position")


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
