"""Which of the known mistakes explains a difference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Flags, Guess
from mmpos.analysis.diagnosis.suspects import SUSPECTS
from mmpos.support.checks import IntArray


@dataclass(frozen=True)
class Verdict:
    """A mistake, what to do about it, and how many of the different tokens have exactly the ids that it gives."""

    cause: str
    remedy: str
    explained: int


def find_cause(case: Case) -> Verdict | None:
    """The first mistake that gives every id that came; else the one that explains most.

    A mistake is chosen by the first difference, so that one proves nothing: it must give the second as well, and agree
    with more tokens than the scheme does, by more than those that it was made to fit.
    """
    best, most = None, 0
    wrong = np.flatnonzero(case.wrong)
    right = case.wrong.size - wrong.size
    for suspect in SUSPECTS:
        for guess in suspect.guesses(case):
            if not _agrees(case, guess, wrong[:2]).all():
                continue
            agrees = _agrees(case, guess, slice(None))
            beyond = int(agrees.sum()) - right - guess.evidence
            if beyond > 0 and (beyond > most or agrees.all()):
                best = Verdict(guess.cause, suspect.remedy, int((agrees & case.wrong).sum()))
                most = beyond
                if agrees.all():
                    return best
    return best


def _agrees(case: Case, guess: Guess, tokens: slice | IntArray) -> Flags:
    """Whether the tokens have the ids of the mistake."""
    return case.near(case.held(guess.ids[..., tokens]), case.got[:, tokens])
