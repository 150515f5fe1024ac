"""Properties of what becomes of ids when a document moves, grows, or has others beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmpos.analysis.compare.batch import Batch, Mask
from mmpos.analysis.compare.family import SHIFTS, Document, around, grids, small_grids, spec
from mmpos.analysis.compare.finding import Finding
from mmpos.analysis.compare.trial import Trial
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid, Text

__all__ = ["length_independent", "linear_shift", "prefix_stable"]


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
