"""Find the id behind the phases of one axis: how far the pairs of that axis turned from a reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmpos.rotary.frequencies import Float32Array, Float64Array, UInt64Array
from mmpos.support.checks import IntArray

Phasors = npt.NDArray[np.complex64]
Flags = npt.NDArray[np.bool_]

REACH = 2**18
"""Ids up to which differences are searched: those of ids within ±131,072."""

SPAN = 4096
"""Ids of a search that one table of phases serves."""

SEARCH_PAIRS = 24
"""Pairs that a search compares at first; all of them decide."""

STEP_PAIRS = 10
"""Fastest pairs, by which steps between neighbours are told."""

NEAR_STEPS = 64
"""Steps that are known from the beginning; longer ones are learned."""

FITS = 0.8
"""Least agreement, the mean cosine of what is left over, of an id that explains its phases."""

FAR = 2.0**40
"""Ids up to which pairs that hardly turn may lead; none of them is told."""

FUTILE = 256
"""Searches without a result after which tokens are no more searched, where nine of ten found nothing."""

FEW = 64
"""Last digits of ids, to the base of this number, whose phases are kept."""

LEAST_NOISE = 1e-6
"""Noise of float32 keys in rad, which covers the rounding of the phases here."""


@dataclass(frozen=True, eq=False)
class Ladder:
    """The pairs of one axis.

    Args:
        turns: (pairs,) turns per id in units of 2⁻⁶⁴.
        inv_freq: (pairs,) rad per id.
        weights: (pairs,) how much each pair counts: the length of its reference.
    """

    turns: UInt64Array
    inv_freq: Float64Array
    weights: Float64Array

    @cached_property
    def weight(self) -> Float32Array:
        """(pairs,) weights that sum to 1."""
        return np.asarray(self.weights / max(self.weights.sum(), 1e-300), np.float32)

    @cached_property
    def slope(self) -> Float32Array:
        """(pairs,) ids per rad: the least-squares estimate of what an id is off by, from what each phase is."""
        heavy = self.weights * self.inv_freq
        return np.asarray(heavy / max(float((heavy * self.inv_freq).sum()), 1e-300), np.float32)

    @cached_property
    def ids_per_rad(self) -> float:
        """How far an id is off, in ids, per rad of noise on every phase."""
        return float(np.sqrt((self.slope.astype(np.float64) ** 2).sum()))

    def phases(self, ids: Float64Array, pairs: slice | IntArray = slice(None)) -> Phasors:
        """Compute (ids, pairs) phasors e^(i·id·inv_freq) from exact turns."""
        whole = np.floor(ids)
        if ids.size > 4 * FEW and isinstance(pairs, slice) and (whole == ids).all():
            # Neighbours differ in their last digits alone: an id turns by its last one and by the others.
            others, last = np.divmod(whole.astype(np.int64), FEW)
            first = others.min()
            count = int(others.max() - first) + 1
            if 4 * count < ids.size:
                table = self.phases(np.arange(first, first + count) * float(FEW))
                return table[others - first] * self._last_digits[last]
        turn = whole.astype(np.int64).astype(np.uint64)[:, None] * self.turns[pairs]
        angle = turn.view(np.int64).astype(np.float32)
        angle *= np.float32(2 * np.pi * 2.0**-64)
        fraction = ids - whole
        if fraction.any():
            angle += (fraction[:, None] * self.inv_freq[pairs]).astype(np.float32)
        out = np.empty(angle.shape, np.complex64)
        np.cos(angle, out=out.real)
        np.sin(angle, out=out.imag)
        return out

    @cached_property
    def _last_digits(self) -> Phasors:
        return self.phases(np.arange(FEW, dtype=np.float64))

    @cached_property
    def fastest(self) -> IntArray:
        """The pairs by which steps are told."""
        return np.argsort(-np.abs(self.inv_freq), kind="stable")[:STEP_PAIRS]

    @cached_property
    def _searched(self) -> IntArray:
        count = min(SEARCH_PAIRS, self.turns.size)
        return np.unique(np.linspace(0, self.turns.size - 1, count).round().astype(np.int64))

    @cached_property
    def _span(self) -> Float32Array:
        """(2·pairs, SPAN) cos and sin of the ids of a span."""
        return _planes(self.phases(np.arange(SPAN, dtype=np.float64), self._searched)).T.copy()

    @cached_property
    def _starts(self) -> Float64Array:
        return np.arange(-REACH, REACH + 1, SPAN, dtype=np.float64)

    def search(self, phasors: Phasors) -> Float64Array:
        """Find (tokens,) ids within ±REACH that explain (tokens, pairs) phasors best: integers, nothing presumed."""
        found = np.empty(len(phasors))
        back = self.phases(self._starts, self._searched).conj()
        for i, one in enumerate(phasors):
            scores = _planes((one * self.weight)[self._searched] * back) @ self._span
            best = self._starts + scores.argmax(axis=1)
            found[i] = best[((one * self.phases(best).conj()).real @ self.weight).argmax()]
        return found

    def step(self, steps: Phasors, known: Float64Array) -> Float64Array:
        """Estimate (tokens,) steps from (tokens, fastest) phasors between neighbours: the best known one, refined."""
        fast = self.fastest
        table = self.phases(known, fast)
        few = steps * self.weight[fast]
        best = (_planes(few) @ _planes(table).T).argmax(axis=1)
        heavy = self.inv_freq[fast]
        rest = (few * table.conj()[best]).imag @ heavy
        return known[best] + rest / max(float((self.weight[fast] * heavy**2).sum()), 1e-300)

    @cached_property
    def _distances(self) -> Float32Array:
        """(REACH,) squared distances, 2 − 2·Σ w·cos(k·ω), between the phasors of ids that are k apart, k from 1.

        An id is the sum of one of 512 and a multiple of 512, whose cosines one matrix product makes.
        """
        weight = self.weights / max(self.weights.sum(), 1e-300)
        near, far = np.arange(1, 513, dtype=np.uint64), np.arange(0, REACH, 512, dtype=np.uint64)
        here, there = ((ids[:, None] * self.turns).view(np.int64) * (2 * np.pi * 2.0**-64) for ids in (near, far))
        cosines = (np.cos(there) * weight) @ np.cos(here).T - (np.sin(there) * weight) @ np.sin(here).T
        return np.maximum(2 * (weight.sum() - cosines), 0).astype(np.float32).ravel()

    def doubt(self, noise: Float64Array) -> Float64Array:
        """Bound (tokens,) probabilities that another integer within reach explains the phases as well.

        By the union bound over all of them, with normal noise: Σ_k exp(−d²(k) / (8·noise²·largest weight)).
        """
        levels = np.ceil(2 * np.log2(np.maximum(noise, LEAST_NOISE)))
        out = np.ones(levels.shape)
        heaviest = float(self.weight.max())
        for level in np.unique(levels[np.isfinite(levels)]):
            scale = 8 * heaviest * 2.0**level
            with np.errstate(under="ignore"):
                others = np.exp(-self._distances / scale).sum(dtype=np.float64)
            out[levels == level] = min(1.0, 2 * float(others))
        return out


@dataclass(eq=False)
class Follower:
    """Reads the ids of one axis token after token: by steps that are known, by a search where they fail.

    Args:
        ladder: the pairs of the axis.
        known: steps that occurred.
        last_id: id of the last token that was read.
        last: (pairs,) its phasors.
        searches: tokens that were searched.
        found: those of them whose id was found.
        trusted: noise in rad up to which an id that steps led to needs no search.
    """

    ladder: Ladder
    last: Phasors
    known: Float64Array = field(default_factory=lambda: np.arange(-NEAR_STEPS, NEAR_STEPS + 1, dtype=np.float64))
    last_id: float = 0.0
    searches: int = 0
    found: int = 0
    trusted: float = 0.1

    @property
    def futile(self) -> bool:
        """Whether searches have failed so often that others would."""
        return self.searches >= FUTILE and self.found < self.searches / 10

    def read(self, phasors: Phasors, alike: Flags) -> Float64Array:
        """Read a block of tokens.

        Args:
            phasors: (tokens, pairs) how far they turned.
            alike: (tokens,) whether they can be read at all.

        Returns:
            (3, tokens) of ``settle``; NaN for an id where none explains the phases.
        """
        found = np.full((3, len(phasors)), np.inf)
        found[0] = np.nan
        at = np.flatnonzero(alike)
        restarts = 0
        while at.size:
            part = phasors[at]
            fast = part[:, self.ladder.fastest]
            steps = fast * np.concatenate([self.last[None, self.ladder.fastest], fast[:-1]]).conj()
            guess = self.last_id + np.cumsum(self.ladder.step(steps, self.known))
            found[:, at], fits = self.settle(part, guess)
            failed = np.flatnonzero(~fits | (found[1, at] > self.trusted))
            good = failed[0] if failed.size else at.size
            if good:
                self.last, self.last_id = part[good - 1], float(found[0, at[good - 1]])
            if not failed.size:
                break
            first = at[failed[0]]
            tracked = found[0, first]
            found[0, at[failed]] = np.nan
            if self.futile:
                break
            restarts += 1
            tried = failed if restarts > 32 else failed[:1]
            self._search(phasors, at[tried], found)
            if found[0, first] == tracked:  # so large is the noise
                self.trusted = max(self.trusted, 1.5 * found[1, first])
            if restarts > 32:
                break
            at = at[good + 1 :]
        return found

    def _search(self, phasors: Phasors, at: IntArray, found: Float64Array) -> None:
        for one in range(0, at.size, 64):
            if self.futile:
                return
            few = at[one : one + 64]
            found[:, few], fits = self.settle(phasors[few], self.ladder.search(phasors[few]))
            found[0, few[~fits]] = np.nan
            self.searches += few.size
            self.found += int(fits.sum())
            if fits[-1]:
                self._learn(float(found[0, few[-1]]) - self.last_id)
                self.last, self.last_id = phasors[few[-1]], float(found[0, few[-1]])

    def _learn(self, step: float) -> None:
        if step == round(step) and step not in self.known:
            near, learned = np.split(self.known, [2 * NEAR_STEPS + 1])
            self.known = np.concatenate([near, learned[-255:], [step]])

    def settle(self, phasors: Phasors, guess: Float64Array) -> tuple[Float64Array, Flags]:
        """Move guesses to where the phases fit best, to integers where those do.

        Returns:
            (3, tokens) ids, noise in rad, and how many ids away the phases would fit best; (tokens,) whether the id
            explains the phases.
        """
        ids = np.clip(guess, -FAR, FAR)
        ids = np.where(np.abs(ids - np.rint(ids)) < 0.1, np.rint(ids), ids)
        noise, away, fits = np.empty(len(ids)), np.empty(len(ids)), np.empty(len(ids), np.bool_)
        moving = np.arange(len(ids))
        for _ in range(16):
            rest = phasors[moving] * self.ladder.phases(ids[moving]).conj()
            off = away[moving] = (rest.imag @ self.ladder.slope).astype(np.float64)
            length = np.abs(rest)
            across = rest.imag**2 @ self.ladder.weight
            along = np.maximum((length - 1) ** 2 @ self.ladder.weight, LEAST_NOISE**2)  # whatever the id
            noise[moving] = np.sqrt(np.maximum(across, along))
            fits[moving] = (rest.real @ self.ladder.weight) >= FITS * (length @ self.ladder.weight)
            moves = np.abs(off) > 6 * np.sqrt(along) * self.ladder.ids_per_rad
            if not moves.any():
                break
            there = np.clip(ids[moving[moves]] + off[moves], -FAR, FAR)
            without = np.maximum(across - off**2 * self._stiffness, along)[moves]
            near = np.abs(there - np.rint(there)) <= 6 * np.sqrt(without) * self.ladder.ids_per_rad
            there = np.where(near, np.rint(there), there)
            moving, before = moving[moves], ids[moving[moves]]
            ids[moving] = there
            moving = moving[there != before]
        return np.stack([ids, noise, away]), fits

    @cached_property
    def _stiffness(self) -> float:
        """Mean of squared rad that an id off by one adds to the noise."""
        return float(self.ladder.weight @ self.ladder.inv_freq**2)


def _planes(phasors: Phasors) -> Float32Array:
    """Lay real and imaginary parts side by side: (n, pairs) complex to (n, 2·pairs) reals."""
    return np.concatenate([phasors.real, phasors.imag], axis=1)
