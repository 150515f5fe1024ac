"""For every token, the id that best explains its key, whether or not the id is certain, and the id's residual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos_probe.keys import ALIKE, Axis, Keys
from mmpos_probe.ladder import Follower, Phasors
from mmpos_probe.words import Flags, Float64Array, IntArray

RARE = 0.01
"""Fraction of tokens that may be exceptions, with ids between integers (if more have them, ids count as fractions) or
with pairs of other lengths.
"""

MOST = 0.5
"""Fraction of tokens that must fit ids for any id to be trusted; otherwise the rotary is wrong."""

ANY_ANGLE = np.pi / 3**0.5
"""Root mean square in rad of random angles."""

COARSE = 0.04
"""Noise in rad of e4m3, the coarsest dtype; larger noise has another cause, which pairs may share."""

ROUNDED = 0.02
"""Largest error in rad of angles in float32."""

EXPLAINED = 0.005
"""Residual in rad that an id may have beyond the noise of other tokens: bfloat16 keys among float32 keys have less."""

FACTOR = 0.02
"""Largest mean relative error of the lengths of a token's pairs; wrong attention factors are larger."""


@dataclass(frozen=True, eq=False)
class Traces:
    """Ids of all tokens, whether or not they are certain, and their errors.

    Args:
        axes: the pairs of every axis; if some pairs are not rotated, they follow as axis −1.
        ids: (axes, tokens) ids; NaN if no id explains the key.
        across: (axes, tokens) residual of the phases in rad.
        along: (axes, tokens) error of the lengths, the noise along phasors.
        length: (axes, tokens) mean lengths of phasors.
        by_pair: for each axis, (pairs,) mean squared errors of lengths.
        away: (axes, tokens) distance in ids to where the phases would fit best.
        still: (tokens,) mean squared rotation, in rad², of the pairs that should not be rotated.
        alike: (tokens,) whether the token's pairs are as long as the reference's.
        futile: whether searches were abandoned.
        scale: factor by which keys are longer than an unrotated reference.
        factor: the factor by which they should be longer; None if the reference is a token.
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
        """(axes, tokens) the larger of ``across`` and ``along``."""
        return np.maximum(self.across, self.along)

    @property
    def residual(self) -> Float64Array:
        """(tokens,) root mean square residual in rad over the pairs, assuming random angles on axes without an id."""
        ladders = [axis.ladder for axis in self.axes]
        weights = np.array([ladder.weights.sum() for ladder in ladders])
        squares = np.minimum(self.noise, ANY_ANGLE) ** 2
        if len(ladders) > len(squares):
            squares = np.concatenate([squares, self.still[None]])
        if not weights.any():  # the reference is zero in all pairs with a frequency
            return np.where(self.alike, ANY_ANGLE, np.nan)
        return np.where(self.alike, np.sqrt(np.average(squares, axis=0, weights=weights)), np.nan)

    @property
    def _right(self) -> Flags:
        """(tokens,) whether a token is used to estimate noise: all, or tokens with the right factor if most have it."""
        if self.scale != self.factor:
            return np.ones_like(self.alike)
        return np.asarray((np.abs(self.length - 1) <= FACTOR).all(axis=0))

    def unexplained(self, rounding: float, certain: Flags | None = None) -> Flags:
        """Return (tokens,) flags: whether a key is not the reference rotated by its ids, given other tokens' noise.

        Args:
            rounding: ``Keys.rounding``.
            certain: (axes, tokens) ids that are certain even if the token has more noise than others; by default all.
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
            few = np.flatnonzero(~(read & (noise <= EXPLAINED)))  # all other tokens are within every bound
            with np.errstate(invalid="ignore"):
                off, typical = (
                    np.sqrt(across[at] ** 2 - np.minimum(across[at], chance * np.maximum(along[at], usual)) ** 2)
                    for at in (few, good)
                )
                least = max(min(3 * chance * float(np.median(typical)), ROUNDED), 3 * rounding, EXPLAINED)
                fits = off <= np.fmax(least, ladder.rounding(ids[few]))
            trusted = True if certain is None else certain[axis, few]
            fits &= read[few] & (noise[few] <= 2 * most + np.where(trusted, 2 * COARSE, EXPLAINED))
            tail = 2 * most if self.alike.mean() > 1 - RARE else 0.0
            broken[few] |= np.where(self.alike[few], ~fits, ~(along[few] <= max(ALIKE, tail)))
        return broken | (self._other_factor(driven, rounding) if driven and self.alike.any() else False)

    def _other_factor(self, driven: list[int], rounding: float) -> Flags:
        """Return (tokens,) flags: whether a token's pairs are all longer or shorter than usual, or than intended."""
        weights = [self.axes[axis].ladder.weights for axis in driven]
        shares = np.concatenate(weights) / np.concatenate(weights).sum()
        length = np.average(self.length[driven], axis=0, weights=[pairs.sum() for pairs in weights])
        some = _some(self.alike & self._right)
        off = np.abs(length / (1.0 if self.scale == self.factor else np.median(length[some])) - 1)
        noise = float(np.median(self.along[:, some][driven])) * float(np.sqrt(shares @ shares))
        scatter = max(noise, float(np.median(off[some])) / 0.6745)
        return self.alike & (off > max(FACTOR, 6 * scatter, 2 * rounding))


def follow(keys: Keys, ids: Float64Array | None = None) -> Traces:
    """Find the ids of every token, or measure the residuals of known (axes, tokens) ids."""
    tokens, axes = keys.num_tokens, keys.axes()
    turning = axes[: keys.rotary.axes]
    readings = np.full((3, len(turning), tokens), np.inf)
    readings[0] = np.nan
    along, length = np.zeros((len(turning), tokens)), np.ones((len(turning), tokens))
    by_pair, counts = [np.zeros(axis.columns.size) for axis in turning], [0] * len(turning)
    still, same = np.zeros(tokens), np.zeros(tokens, np.bool_)
    followers = [Follower(axis.ladder, np.ones(axis.columns.size, np.complex64)) for axis in turning]
    plain = keys.reference[:, 2 * keys.rotary.num_pairs :]
    factor = keys.rotary.attention_factor if keys.token is None else None
    scale, at = 1.0, 0
    for index, block in enumerate(keys.blocks()):
        here = slice(at, at + len(block))
        at = here.stop
        pairs = keys.pairs(block)
        phasors = [axis.phasors(pairs) for axis in axes]
        if index == 0:
            scale = _scale(axes, phasors, factor)
        if scale != 1.0:
            phasors = [row / np.float32(scale) for row in phasors]
        same[here] = _unturned_alike(block, plain)
        with np.errstate(invalid="ignore", over="ignore"):
            measured = [axis.ladder.lengths(row) for axis, row in zip(axes, phasors, strict=True)]
            if len(axes) > len(turning):
                still[here] = np.abs(phasors[-1] - 1) ** 2 @ axes[-1].ladder.weight
        same[here] &= np.all([off <= ALIKE**2 for (_, off), _ in measured], axis=0)
        for a, follower in enumerate(followers):
            lengths, squares = measured[a]
            if not turning[a].columns.size:
                continue
            if ids is None:
                readings[:, a, here] = follower.read(phasors[a], lengths, same[here])
            else:
                with np.errstate(invalid="ignore", over="ignore"):
                    readings[:, a, here], _ = follower.ladder.explain(phasors[a], lengths, ids[a, here])
            length[a, here], along[a, here] = lengths[0], np.sqrt(lengths[1])
            good = same[here]
            if good.any():
                good = good & (lengths[1] <= 16 * np.median(lengths[1][good][::16]))
            by_pair[a] += (squares if good.all() else squares[good]).sum(axis=0)
            counts[a] += int(good.sum())
    best, across, away = readings
    by_pair = [squares / max(count, 1) for squares, count in zip(by_pair, counts, strict=True)]
    futile = any(follower.futile for follower in followers)
    return Traces(axes, best, across, along, length, by_pair, away, still, same, futile, scale, factor)


def _some(good: Flags) -> IntArray:
    """Choose up to 2¹⁶ of the good tokens, evenly spread: enough for a median."""
    tokens = np.flatnonzero(good)
    return tokens[:: max(1, tokens.size >> 15)]


def _scale(axes: list[Axis], phasors: list[Phasors], factor: float | None) -> float:
    """Estimate the attention factor: by how much the rotated pairs of most tokens are longer than the reference's.

    If most tokens have nearly the right factor and some have exactly the right one, the result is the right factor, and
    most tokens count as wrong.
    """
    weights = np.concatenate([axis.ladder.weights for axis in axes])
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
    """Return (tokens,) flags: whether a token's channels that are not rotated equal those of the reference."""
    if not plain.size:
        return np.ones(len(block), np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        off = ((block[..., block.shape[-1] - plain.shape[-1] :] - plain) ** 2).sum(axis=(1, 2))
        return np.asarray(off <= ALIKE**2 * (plain**2).sum(), np.bool_)
