"""Properties of where a scheme places tokens: text, symmetry, one place for one token, whole numbers."""

from __future__ import annotations

import numpy as np

from mmpos.analysis.compare.batch import Batch, Mask
from mmpos.analysis.compare.family import STARTS, Document, around, grids
from mmpos.analysis.compare.finding import Finding
from mmpos.analysis.compare.trial import Trial
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid, Text
from mmpos.support.checks import IntArray

__all__ = ["axes", "integer", "symmetric", "text_is_rope_1d", "unique"]

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
