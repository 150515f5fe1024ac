"""What keys say of every token, sure or not: the id that explains it best, and what that leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.analysis.probe.keys import ALIKE, Axis, Keys
from mmpos.analysis.probe.ladder import Flags, Follower, Phasors
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray

RARE = 0.01
"""Share of tokens whose ids may be off integers by noise before all are taken for fractions, or of unlike lengths."""

MOST = 0.5
"""Share of tokens that must fit ids before any is believed: else the rotary is another one."""

ANY_ANGLE = np.pi / 3**0.5
"""Root mean square in rad of angles that mean nothing."""

COARSE = 0.04
"""Noise in rad of e4m3, the coarsest of numbers; beyond it something else is at work, which pairs may share."""

ROUNDED = 0.02
"""Most, in rad, that angles in float32 may be off."""

EXPLAINED = 0.005
"""What an id may leave, in rad, beyond the noise of other tokens: bfloat16 among float32 leaves less."""

FACTOR = 0.02
"""What the lengths of a token's pairs may be off on average, relative: as factors on cos and sin, which are larger."""


@dataclass(frozen=True, eq=False)
class Traces:
    """What keys say, sure or not.

    Args:
        axes: pairs of every axis, and of those that do not turn, last.
        ids: (axes, tokens) NaN where none explains the keys.
        across: (axes, tokens) rad that ids leave of the phases.
        along: (axes, tokens) what lengths are off, the noise along phasors.
        length: (axes, tokens) mean lengths of phasors.
        by_pair: of each axis (pairs,) the mean squares of what lengths are off.
        away: (axes, tokens) how many ids away the keys would fit best.
        still: (tokens,) mean square of rad by which pairs have turned that should not.
        alike: (tokens,) whether pairs are as long as the reference's.
        futile: whether searches were given up.
        scale: how much longer keys are than a reference that was not turned.
        factor: how much longer they should be; None where the reference is a token.
    """

    axes: list[Axis]
    ids: Float64Array
    across: Float64Array
    along: Float64Array
    length: Float64Array
    by_pair: list[Float64Array]
    away: Float64Array
    still: Float64Array
    alike: Flags
    futile: bool
    scale: float
    factor: float | None

    @property
    def noise(self) -> Float64Array:
        """(axes, tokens) the larger one of both."""
        return np.maximum(self.across, self.along)

    @property
    def residual(self) -> Float64Array:
        """(tokens,) root mean square in rad over the pairs, those of axes without an id at any angle."""
        ladders = [each.ladder for each in self.axes]
        weights = np.array([ladder.weights.sum() for ladder in ladders])
        squares = np.minimum(self.noise, ANY_ANGLE) ** 2
        if len(ladders) > len(squares):
            squares = np.concatenate([squares, self.still[None]])
        if not weights.any():  # where the reference has nothing but pairs of no frequency
            return np.where(self.alike, ANY_ANGLE, np.nan)
        return np.where(self.alike, np.sqrt(np.average(squares, axis=0, weights=weights)), np.nan)

    @property
    def _right(self) -> Flags:
        """(tokens,) by which noise is judged: all, or where many have another factor, those that have the right one."""
        if self.scale != self.factor:
            return np.ones_like(self.alike)
        return np.asarray((np.abs(self.length - 1) <= FACTOR).all(axis=0))

    def unexplained(self, rounding: float, told: Flags | None = None) -> Flags:
        """Tell (tokens,) whose keys are not the reference's, turned by their ids, at the noise that other tokens have.

        Args:
            rounding: ``Keys.rounding``.
            told: (axes, tokens) ids that are sure although the token has more noise than others; by default all.
        """
        broken = ~self.alike & (self.along <= ALIKE).all(axis=0) | (self.still > (0.05 + 3 * rounding) ** 2)
        driven = [axis for axis in range(len(self.ids)) if self.axes[axis].columns.size]
        for axis in driven:
            ladder, ids, across, along = self.axes[axis].ladder, self.ids[axis], self.across[axis], self.along[axis]
            read, noise, chance = np.isfinite(ids) & self.alike, np.maximum(across, along), ladder.chance
            good = _some(read & self._right)
            if not good.size:
                return np.ones_like(broken)
            usual = max(float(np.median(along[good])), rounding)
            most = chance * max(usual, min(float(np.median(noise[good])), ROUNDED))
            few = np.flatnonzero(~(read & (noise <= EXPLAINED)))  # the others are within all bounds
            with np.errstate(invalid="ignore"):
                off, typical = (
                    np.sqrt(across[at] ** 2 - np.minimum(across[at], chance * np.maximum(along[at], usual)) ** 2)
                    for at in (few, good)
                )
                least = max(min(3 * chance * float(np.median(typical)), ROUNDED), 3 * rounding, EXPLAINED)
                fits = off <= np.fmax(least, ladder.rounding(ids[few]))
            sure = True if told is None else told[axis, few]
            fits &= read[few] & (noise[few] <= 2 * most + np.where(sure, 2 * COARSE, EXPLAINED))
            tail = 2 * most if self.alike.mean() > 1 - RARE else 0.0
            broken[few] |= np.where(self.alike[few], ~fits, ~(along[few] <= max(ALIKE, tail)))
        return broken | (self._other_factor(driven, rounding) if driven and self.alike.any() else False)

    def _other_factor(self, driven: list[int], rounding: float) -> Flags:
        """Tell (tokens,) whose pairs are all longer or shorter than those of most tokens, or than they should be."""
        weights = [self.axes[axis].ladder.weights for axis in driven]
        every = np.concatenate(weights) / np.concatenate(weights).sum()
        length = np.average(self.length[driven], axis=0, weights=[each.sum() for each in weights])
        some = _some(self.alike & self._right)
        off = np.abs(length / (1.0 if self.scale == self.factor else np.median(length[some])) - 1)
        noise = float(np.median(self.along[:, some][driven])) * float(np.sqrt(every @ every))
        scatter = max(noise, float(np.median(off[some])) / 0.6745)
        return self.alike & (off > max(FACTOR, 6 * scatter, 2 * rounding))


def follow(keys: Keys, progress: Callable[[int, int], None] | None = None, ids: Float64Array | None = None) -> Traces:
    """Find the ids of every token, sure or not; or see what (axes, tokens) ids leave that are given."""
    tokens, axes = keys.num_tokens, keys.axes()
    turning = axes[: keys.rotary.axes]
    found = np.full((3, len(turning), tokens), np.inf)
    found[0] = np.nan
    along, length = np.zeros((len(turning), tokens)), np.ones((len(turning), tokens))
    by_pair, counts = [np.zeros(each.columns.size) for each in turning], [0] * len(turning)
    still, same = np.zeros(tokens), np.zeros(tokens, np.bool_)
    followers = [Follower(each.ladder, np.ones(each.columns.size, np.complex64)) for each in turning]
    plain = keys.reference[:, 2 * keys.rotary.num_pairs :]
    factor = keys.rotary.attention_factor if keys.token is None else None
    scale, at = 1.0, 0
    for index, block in enumerate(keys.blocks()):
        here = slice(at, at + len(block))
        at = here.stop
        pairs = keys.pairs(block)
        phasors = [each.phasors(pairs) for each in axes]
        if index == 0:
            scale = _scale(axes, phasors, factor)
        if scale != 1.0:
            phasors = [each / np.float32(scale) for each in phasors]
        same[here] = _unturned_alike(block, plain)
        with np.errstate(invalid="ignore", over="ignore"):
            measured = [each.ladder.lengths(some) for each, some in zip(axes, phasors, strict=True)]
            if len(axes) > len(turning):
                still[here] = np.abs(phasors[-1] - 1) ** 2 @ axes[-1].ladder.weight
        same[here] &= np.all([off <= ALIKE**2 for (_, off), _ in measured], axis=0)
        for axis, follower in enumerate(followers):
            lengths, squares = measured[axis]
            if not turning[axis].columns.size:
                continue
            if ids is None:
                found[:, axis, here] = follower.read(phasors[axis], lengths, same[here])
            else:
                with np.errstate(invalid="ignore", over="ignore"):
                    found[:, axis, here], _ = follower.ladder.explain(phasors[axis], lengths, ids[axis, here])
            length[axis, here], along[axis, here] = lengths[0], np.sqrt(lengths[1])
            good = same[here]
            if good.any():
                good = good & (lengths[1] <= 16 * np.median(lengths[1][good][::16]))
            by_pair[axis] += (squares if good.all() else squares[good]).sum(axis=0)
            counts[axis] += int(good.sum())
        if progress is not None:
            progress(at, tokens)
    _, across, away = found
    by_pair = [squares / max(count, 1) for squares, count in zip(by_pair, counts, strict=True)]
    futile = any(each.futile for each in followers)
    return Traces(axes, found[0], across, along, length, by_pair, away, still, same, futile, scale, factor)


def _some(good: Flags) -> IntArray:
    """Pick up to 2¹⁶ of the tokens that are good, spread over all: enough for a median."""
    tokens = np.flatnonzero(good)
    return tokens[:: max(1, tokens.size >> 15)]


def _scale(axes: list[Axis], phasors: list[Phasors], factor: float | None) -> float:
    """How much longer the turned pairs of most tokens are than those of the reference: an attention factor.

    Where most have nearly the factor that is right, and some have it, it is that factor: others are wrong, though many.
    """
    weights = np.concatenate([each.ladder.weights for each in axes])
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.abs(np.concatenate(phasors, axis=1)) @ weights / max(weights.sum(), 1e-300)
    lengths = lengths[np.isfinite(lengths)]
    scale = float(np.median(lengths)) if lengths.size else 1.0
    if scale <= 0 or (factor is None and abs(scale - 1) <= FACTOR):
        return 1.0
    if factor is not None and FACTOR < abs(scale / factor - 1) <= ALIKE:
        return factor if (np.abs(lengths / factor - 1) <= FACTOR).mean() > RARE else scale
    return scale


def _unturned_alike(block: npt.NDArray[np.float32], plain: npt.NDArray[np.float32]) -> Flags:
    """Tell (tokens,) whether the channels that do not turn are those of the reference."""
    if not plain.size:
        return np.ones(len(block), np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        off = ((block[..., block.shape[-1] - plain.shape[-1] :] - plain) ** 2).sum(axis=(1, 2))
        return np.asarray(off <= ALIKE**2 * (plain**2).sum(), np.bool_)
