"""Search for the id that explains the phases of one axis, the angles between the axis's pairs and a reference's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property  # noqa: TID251  # no data loader forks while it probes

import numpy as np
import numpy.typing as npt

from mmpos_probe.words import Flags, Float32Array, Float64Array, IntArray, UInt64Array

Phasors = npt.NDArray[np.complex64]

REACH = 2**18
"""Largest difference between ids that is searched, for ids within ±131,072."""

SPAN = 512
"""Number of ids in a span: all spans share one table of phases, and a span is searched or skipped as a whole."""

SPANS = 16
"""Number of spans that are searched at a time, the most promising first."""

STEP_PAIRS = 10
"""Number of fastest pairs, from which steps between neighbours are estimated."""

NEAR_STEPS = 64
"""Largest step that is known from the beginning; larger ones are learned."""

FITS = 0.8
"""Smallest mean cosine of the residual angles for an id to explain its phases."""

FAR = 2.0**40
"""Largest id that slow pairs may lead to; ids beyond REACH are not returned."""

SURE = 1 - 1e-6
"""Smallest confidence of an id that is returned."""

FUTILE = 256
"""Number of searches after which searching stops, if nine of ten had no result."""

ROUNDED = 2.0**-22
"""Largest relative error of angles in float32: the errors of the frequency and of the product, and a margin for the
power.
"""

ROUNDS = 1e-4
"""Squared residual in rad² above which it is measured by a mean cosine in float32."""

TRUSTED = 0.15
"""Largest noise in rad at which an id needs no search: with fast pairs, an error of one id has this residual."""

LEAST_NOISE = 1e-6
"""Noise of float32 keys in rad, which includes the rounding of the phases in this module."""


@dataclass(frozen=True, eq=False)
class Ladder:
    """The pairs of one axis.

    Args:
        turns: (pairs,) turns per id in units of 2⁻⁶⁴.
        inv_freq: (pairs,) rad per id.
        weights: (pairs,) weight of each pair: its length in the reference.
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
        """(pairs,) ids per rad: the coefficients that estimate the error of an id from phases, by least squares."""
        heavy = self.weights * self.inv_freq
        return np.asarray(heavy / max(float((heavy * self.inv_freq).sum()), 1e-300), np.float32)

    @cached_property
    def ids_per_rad(self) -> float:
        """Error of an id, in ids, per rad of noise on every phase."""
        return float(np.sqrt((self.slope.astype(np.float64) ** 2).sum()))

    @cached_property
    def ids_per_rounding(self) -> float:
        """Error of an id per rad of noise that is proportional to frequency, such as the rounding of angles."""
        return float(np.sqrt(((self.slope * self.inv_freq) ** 2).sum()) / max(self.stiffness**0.5, 1e-300))

    @cached_property
    def stiffness(self) -> float:
        """Mean squared angle in rad² that an error of one id adds to the noise."""
        return float(self.weight @ self.inv_freq**2)

    @cached_property
    def one(self) -> float:
        """Sum of squared weights: one over the number of pairs if all weigh the same."""
        return float(np.square(self.weight, dtype=np.float64).sum())

    @cached_property
    def chance(self) -> float:
        """Factor by which the noise of a token's pairs exceeds the usual noise once in a million tokens.

        Source: B. Laurent and P. Massart, Adaptive estimation of a quadratic functional by model selection, 2000,
        lemma 1.
        """
        rare = -np.log(1 - SURE)
        return float(np.sqrt(1 + 2 * np.sqrt(rare * self.one) + 2 * rare * self.one))

    def rounding(self, ids: Float64Array) -> Float64Array:
        """Compute the (ids,) error in rad that angles in float32 may have, relative to those of the reference."""
        return 2 * ROUNDED * np.fmin(np.abs(ids), REACH) * self.stiffness**0.5

    def phases(self, ids: Float64Array, pairs: slice | IntArray = slice(None)) -> Phasors:
        """Compute (ids, pairs) phasors e^(i·id·inv_freq) from exact turns."""
        floor = np.floor(ids)
        turn = floor.astype(np.int64).astype(np.uint64)[:, None] * self.turns[pairs]
        angle = turn.view(np.int64).astype(np.float32)
        angle *= np.float32(2 * np.pi * 2.0**-64)
        fraction = ids - floor
        if fraction.any():
            angle += (fraction[:, None] * self.inv_freq[pairs]).astype(np.float32)
        out = np.empty(angle.shape, np.complex64)
        np.cos(angle, out=out.real)
        np.sin(angle, out=out.imag)
        return out

    @cached_property
    def fastest(self) -> IntArray:
        """The pairs from which steps are estimated."""
        return np.argsort(-np.abs(self.inv_freq), kind="stable")[:STEP_PAIRS]

    @cached_property
    def _span(self) -> Float32Array:
        """(2·pairs, SPAN) cosines and sines of ids from −SPAN / 2 on."""
        return self.phases(np.arange(-SPAN // 2, SPAN // 2, dtype=np.float64)).view(np.float32).T.copy()

    @cached_property
    def _centres(self) -> Phasors:
        """(spans, pairs) phasors that rotate back by the middle of each span."""
        return self.phases(np.arange(REACH, -REACH - 1, -SPAN, dtype=np.float64))

    def search(self, phasors: Phasors) -> Float64Array:
        """Find the (tokens,) integer ids within ±REACH that explain (tokens, pairs) phasors best, from scratch.

        The fit of a span is bounded by the nearest angle that each of its pairs reaches. Spans with a bound below the
        fit of the best id so far, or below FITS, are skipped. If no id fits, the result need not be the best id.
        """
        best_ids = np.zeros(len(phasors))
        half = np.minimum(np.abs(self.inv_freq) * (SPAN / 2), np.pi).astype(np.float32)
        cos, sin = np.cos(half), np.sin(half)
        for i, token in enumerate(phasors * self.weight):
            rest, length = token * self._centres, np.abs(token)
            nearest = rest.real * cos + np.abs(rest.imag) * sin
            bound = np.where(rest.real >= length * cos, length, nearest).sum(axis=1)
            order = np.argsort(-bound)
            best, least = -np.inf, FITS * float(length.sum())
            for start in range(0, order.size, SPANS):
                spans = order[start : start + SPANS]
                if start and bound[spans[0]] < max(best, least) - 1e-4:
                    break
                scores = rest[spans].view(np.float32) @ self._span
                top = int(scores.argmax())
                if scores.flat[top] > best:
                    best = float(scores.flat[top])
                    best_ids[i] = spans[top // SPAN] * SPAN - REACH + top % SPAN - SPAN // 2
        return best_ids

    def step(self, moved: Phasors, known: Float64Array) -> Float64Array:
        """Estimate (tokens,) steps from (tokens, fastest) phasors between neighbours: refine the nearest known step."""
        weight, inv_freq = self.weight[self.fastest], self.inv_freq[self.fastest]
        table, parts = self.phases(known, self.fastest) * weight, moved.view(np.float32)
        best = (parts @ table.view(np.float32).T).argmax(axis=1)
        across = table * (1j * inv_freq / max(float(weight @ inv_freq**2), 1e-300)).astype(np.complex64)
        return known[best] + np.einsum("tp,tp->t", parts, np.take(across.view(np.float32), best, axis=0))

    def lengths(self, phasors: Phasors) -> tuple[Float32Array, Float32Array]:
        """Compute the lengths of (tokens, pairs) phasors.

        Returns:
            (2, tokens) mean lengths and mean squared deviations from 1, and (tokens, pairs) squared deviations.
        """
        off = np.abs(phasors) - np.float32(1)
        mean = 1 + off @ self.weight
        np.square(off, out=off)
        return np.stack([mean, off @ self.weight]), off

    def left(self, phasors: Phasors, ids: Float64Array) -> Float64Array:
        """Compute (3, tokens) residuals of ids: mean cosine, distance in ids to the best fit, and mean squared sine."""
        rest = (phasors * self.phases(-ids)).view(np.float32)
        return np.stack([*(rest @ self._sums).T, np.square(rest, out=rest) @ self._sines], dtype=np.float64)

    @cached_property
    def _sums(self) -> Float32Array:
        """(2·pairs, 2) weights of cosines and the slope of sines, for phasors viewed as pairs of reals."""
        zero = np.zeros_like(self.weight)
        return np.stack([self.weight, zero, zero, self.slope], axis=1).reshape(-1, 2)

    @cached_property
    def _sines(self) -> Float32Array:
        """(2·pairs,) weights of squared sines."""
        return np.stack([np.zeros_like(self.weight), self.weight], axis=1).ravel()

    def explain(
        self, phasors: Phasors, lengths: Float32Array, ids: Float64Array, left: Float64Array | None = None
    ) -> tuple[Float64Array, Flags]:
        """Measure how well ids explain phasors; pass the result of ``left`` if it is known.

        Returns:
            (3, tokens) ids, residuals in rad, and distances in ids to the best fit; and (tokens,) whether the id
            explains the phases.
        """
        cosine, away, across = self.left(phasors, ids) if left is None else left
        far = 2 * (lengths[0] - cosine)  # this equals the squared sines of small angles, and grows beyond a right angle
        across = np.where(far > ROUNDS, np.maximum(across, far), across)
        return np.stack([ids, np.sqrt(np.maximum(across, LEAST_NOISE**2)), away]), cosine >= FITS * lengths[0]

    def doubt(self, noise: Float64Array, misfit: Float64Array, by_pair: Float64Array, across: float) -> Float64Array:
        """Bound the (tokens,) probabilities that noise lets another integer within REACH explain the phases as well.

        An id at distance k, with phasors d(k) away, does so if the noise in its direction, n(k), exceeds half of d(k).
        With normal noise, the union bound over all k is Σ_k exp(−(d(k)/2 − misfit)² / (2·n(k)²)). Phase errors with
        causes other than the noise of single pairs (the misfit) count fully in every direction.

        Args:
            noise: (tokens,) noise along phasors, independent in every pair.
            misfit: (tokens,) additional phase error in rad.
            by_pair: (pairs,) squared noise of the pairs, at any scale.
            across: ratio of the squared noise across phasors to that along them.
        """
        weight = self.weights / max(self.weights.sum(), 1e-300)
        noises = weight**2 * by_pair / max(float(weight @ by_pair), 1e-300)
        rads = np.fmin(np.fmax([noise, misfit], LEAST_NOISE), 8.0)
        steps = np.ceil(4 * np.log2(rads / LEAST_NOISE)).astype(
            np.int16
        )  # values are below 93, and int16 sorts quickly
        levels, inverse = np.unique(steps[0] * np.int16(128) + steps[1], return_inverse=True)
        own, off = LEAST_NOISE * 2.0 ** (np.array(np.divmod(levels, 128)) / 4)
        # Skip spans with all ids further away than nine times the largest noise in any direction.
        reach = off + 9 * own * float(np.sqrt((noises / np.maximum(weight, 1e-300)).max(initial=0)))
        least = np.sqrt(self._least_squares(weight)) / 2
        order, out = np.argsort(least), np.zeros(levels.size)
        for start in range(0, order.size, SPANS):
            spans = order[start : start + SPANS]
            counting = np.flatnonzero((out < 1) & (reach > least[spans[0]]))
            if not counting.size:
                break
            squares, along, sines = self._apart(spans, weight, noises)
            half = np.sqrt(squares) / 2
            onward = np.maximum(across * sines + np.maximum(along - sines, 0), 1e-300)
            onward = np.sqrt(onward / np.maximum(squares, 1e-300))
            for level in counting.tolist():
                with np.errstate(under="ignore"):
                    out[level] += np.exp(-np.square(np.maximum(half - off[level], 0) / (own[level] * onward)) / 2).sum()
        return np.minimum(out, 1)[inverse]

    def _least_squares(self, weight: Float64Array) -> Float64Array:
        """Bound the (spans,) squared distances from below, by the nearest angle to 0 of each pair in a span."""
        middle = np.abs(_rad(np.arange(SPAN // 2, 2 * REACH, SPAN), self.turns))
        return 2 * (1 - np.cos(np.maximum(middle - np.abs(self.inv_freq) * (SPAN / 2), 0))) @ weight

    def _apart(
        self, spans: IntArray, weight: Float64Array, noises: Float64Array
    ) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Compare the phasors of ids that are k apart, for every k of some spans.

        k is a multiple of SPAN plus a remainder, so that one matrix product computes all cosines.

        Returns:
            (k,) squared distances 2·Σ w·(1 − cos(k·ω)), then the same sum with noises n in place of weights w, then
            Σ n·sin²(k·ω).
        """
        cos, sin = self._part_of_span
        there = _rad(spans * SPAN, self.turns)
        far_cos, far_sin = np.cos(there), np.sin(there)

        def cosines(weights: Float64Array) -> Float64Array:
            return ((far_cos * weights) @ cos.T - (far_sin * weights) @ sin.T).ravel()

        # sin² = (1 − cos of twice the angle) / 2, and cos of twice an angle is 2·cos² − 1
        double = (
            ((2 * far_cos**2 - 1) * noises) @ (2 * cos**2 - 1).T - (2 * far_sin * far_cos * noises) @ (2 * sin * cos).T
        ).ravel()
        squares, along = (np.maximum(2 * (row.sum() - cosines(row)), 0) for row in (weight, noises))
        return squares, along, np.maximum(noises.sum() - double, 0) / 2

    @cached_property
    def _part_of_span(self) -> tuple[Float64Array, Float64Array]:
        """(SPAN, pairs) cosines and sines of 1 to SPAN ids."""
        rad = _rad(np.arange(1, SPAN + 1), self.turns)
        return np.cos(rad), np.sin(rad)


def _rad(ids: IntArray, turns: UInt64Array) -> Float64Array:
    """Compute (ids, pairs) angles from −π to π from exact turns."""
    return (ids.astype(np.uint64)[:, None] * turns).view(np.int64).astype(np.float64) * (2 * np.pi * 2.0**-64)


@dataclass(eq=False)
class Follower:
    """Reads the ids of one axis token by token, using known steps, or a search if these fail.

    Args:
        ladder: the pairs of the axis.
        last: (pairs,) phasors of the last token that was read.
        known: the steps to try.
        last_id: id of the last token that was read.
        searches: number of tokens whose ids were searched for.
        successes: number of searches that led to an id with no residual beyond the noise.
        trusted: noise in rad up to which an id from a known step needs no search, whatever the lengths of pairs show.
    """

    ladder: Ladder
    last: Phasors
    known: Float64Array = field(default_factory=lambda: np.arange(-NEAR_STEPS, NEAR_STEPS + 1, dtype=np.float64))
    last_id: float = 0.0
    searches: int = 0
    successes: int = 0
    trusted: float = 0.01

    @property
    def futile(self) -> bool:
        """Whether most searches have failed, so that further ones are skipped."""
        return self.searches >= FUTILE and self.successes < self.searches / 10

    def read(self, phasors: Phasors, lengths: Float32Array, alike: Flags) -> Float64Array:
        """Read a block of tokens.

        Args:
            phasors: (tokens, pairs) phasors relative to the reference.
            lengths: the (2, tokens) result of ``Ladder.lengths``.
            alike: (tokens,) whether a token can be read at all.

        Returns:
            The (3, tokens) result of ``Ladder.explain``, with NaN as the id if no id explains the phases.
        """
        readings = np.full((3, len(phasors)), np.inf)
        readings[0] = np.nan
        if not alike.all():
            if alike.any():
                readings[:, alike] = self.read(phasors[alike], lengths[:, alike], alike[alike])
            return readings
        start, restarts = 0, 0
        while start < len(phasors):
            guess = self.last_id + np.cumsum(self._steps(phasors[start:]))
            readings[:, start:], fits = self.settle(phasors[start:], lengths[:, start:], guess)
            readings[0, start:][~fits] = np.nan
            failed = start + np.flatnonzero(~fits | self._doubted(readings[:, start:], lengths[:, start:]))
            good = int(failed[0]) if failed.size else len(phasors)
            if good > start:
                self.last, self.last_id = phasors[good - 1], float(readings[0, good - 1])
            if not failed.size or self.futile:
                break
            tracked = readings[0, good]
            restarts += 1
            self._search(phasors, lengths, failed if restarts > 32 else failed[:1], readings)
            if readings[0, good] == tracked:  # the search confirms the id, so its residual is noise
                self.trusted = min(max(self.trusted, 1.5 * readings[1, good]), TRUSTED)
            if restarts > 32:
                break
            start = good + 1
        return readings

    def _doubted(self, readings: Float64Array, lengths: Float32Array) -> Flags:
        """Return (tokens,) flags: whether the residual of each id exceeds the noise."""
        return np.asarray(readings[1] > np.maximum(self.trusted, 3 * np.sqrt(lengths[1])), np.bool_)

    def _steps(self, phasors: Phasors) -> Float64Array:
        """Estimate the (tokens,) step from the previous token to each token."""
        fast = np.take(phasors, self.ladder.fastest, axis=1)
        moved = fast * np.concatenate([self.last[None, self.ladder.fastest], fast[:-1]]).conj()
        return self.ladder.step(moved, self.known)

    def _search(self, phasors: Phasors, lengths: Float32Array, at: IntArray, readings: Float64Array) -> None:
        for start in range(0, at.size, 64):
            if self.futile:
                return
            few = at[start : start + 64]
            searched, fits = self.settle(phasors[few], lengths[:, few], self.ladder.search(phasors[few]))
            better = fits & (np.isnan(readings[0, few]) | (readings[1, few] > 1.5 * searched[1]))
            readings[:, few[better]] = searched[:, better]
            good = fits & ~self._doubted(searched, lengths[:, few])
            self.searches += few.size
            self.successes += int(good.sum())
            if good[-1]:  # steps are not measured from a token without a certain id
                self._learn(float(readings[0, few[-1]]) - self.last_id)
                self.last, self.last_id = phasors[few[-1]], float(readings[0, few[-1]])

    def _learn(self, step: float) -> None:
        if step == round(step) and step not in self.known:
            near, learned = np.split(self.known, [2 * NEAR_STEPS + 1])
            self.known = np.concatenate([near, learned[-255:], [step]])

    def settle(self, phasors: Phasors, lengths: Float32Array, guess: Float64Array) -> tuple[Float64Array, Flags]:
        """Move guesses to the best fit of the phases, to integers if these fit; return their ``Ladder.explain``."""
        ids = np.clip(guess, -FAR, FAR)
        ids = np.where(np.abs(ids - np.rint(ids)) < 0.1, np.rint(ids), ids)
        along = np.maximum(lengths[1].astype(np.float64), LEAST_NOISE**2)  # these do not depend on the id
        within = np.minimum(6 * np.sqrt(along) * self.ladder.ids_per_rad, 0.5)  # beyond 0.5, another integer is nearer
        left = self.ladder.left(phasors, ids)
        moving = np.arange(ids.size)
        for _ in range(15):
            moving = moving[np.abs(left[1, moving]) > within[moving]]
            if not moving.size:
                break
            _, off, across = left[:, moving]
            there = np.clip(ids[moving] + off, -FAR, FAR)
            without = np.maximum(across - off**2 * self.ladder.stiffness, along[moving])
            scatter = 6 * np.sqrt(without)
            rounded = np.minimum(scatter * self.ladder.ids_per_rounding, ROUNDED * min(np.abs(ids).max(), REACH))
            near = np.abs(there - np.rint(there)) <= np.maximum(scatter * self.ladder.ids_per_rad, rounded)
            there = np.where(near, np.rint(there), there)
            moved = there != ids[moving]
            moving = moving[moved]
            ids[moving] = there[moved]
            left[:, moving] = self.ladder.left(phasors[moving], ids[moving])
        return self.ladder.explain(phasors, lengths, ids, left)
