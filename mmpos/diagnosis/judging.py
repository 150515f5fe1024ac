"""Which of the known mistakes explains a difference."""

from __future__ import annotations

from dataclasses import dataclass

from mmpos.diagnosis.case import Case, Flags, Guess
from mmpos.diagnosis.suspects import SUSPECTS


@dataclass(frozen=True)
class Verdict:
    """A mistake, what to do about it, and how many of the different tokens have exactly the ids that it gives."""

    cause: str
    remedy: str
    explained: int


def find_cause(case: Case) -> Verdict | None:
    """The first mistake that gives every id that came; else the one that gives most of them.

    Every mistake named gives the first difference, and agrees with more tokens than the scheme itself does.
    """
    best, most = None, int((~case.wrong).sum())
    for suspect in SUSPECTS:
        for guess in suspect.guesses(case):
            if not _agrees(case, guess, slice(case.first, case.first + 1)).all():
                continue
            agrees = _agrees(case, guess, slice(None))
            if agrees.sum() > most:
                best = Verdict(guess.cause, suspect.remedy, int((agrees & case.wrong).sum()))
                most = int(agrees.sum())
            if most == agrees.size:
                return best
    return best


def _agrees(case: Case, guess: Guess, tokens: slice) -> Flags:
    """Whether the tokens have the ids of the mistake."""
    return case.near(case.held(guess.ids[..., tokens]), case.got[:, tokens])
