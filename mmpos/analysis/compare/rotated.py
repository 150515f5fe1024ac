"""The property that scores see of positions: differences, and nothing of what stands before both tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.batch import Batch
from mmpos.analysis.compare.family import SHIFTS, around, small_grids
from mmpos.analysis.compare.finding import Finding
from mmpos.analysis.compare.trial import Trial
from mmpos.rotary import Rotary
from mmpos.schemes import Scheme

__all__ = ["relative"]

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
    found: npt.NDArray[np.int64] = batch.values[:, batch.offsets[document] + token]
    return found
