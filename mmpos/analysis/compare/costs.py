"""Properties of what an image costs: the ids that it consumes, how they grow with its size, and the decode delta."""

from __future__ import annotations

from math import log2

from mmpos.analysis.compare.batch import Batch
from mmpos.analysis.compare.family import around, grids, spec
from mmpos.analysis.compare.finding import Finding
from mmpos.analysis.compare.trial import Trial
from mmpos.positions.place import ids_consumed
from mmpos.schemes import Scheme
from mmpos.segments.kinds import Grid

__all__ = ["delta_0", "growth", "ids_of_a_row", "ids_of_a_square"]

_SIDE = 64


def delta_0(scheme: Scheme) -> Finding:
    """Generation goes on at the id that is the number of tokens before it, counted from the start, whatever grids are
    among them: the decode delta is 0.
    """
    if not scheme.resumable:
        return _no_next(scheme)
    trial = Trial(grids(scheme))
    documents = [around(scheme, grid) for grid in trial.grids]
    deltas = Batch.placed(scheme, documents).table.deltas
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
