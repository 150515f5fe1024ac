"""Reading of position ids from rotated keys; only ids that are certain are returned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpos.rotary import Rotary
from mmpos_probe.keys import Keys, read_keys
from mmpos_probe.ladder import LEAST_NOISE, REACH, SURE, Ladder
from mmpos_probe.traces import COARSE, EXPLAINED, FACTOR, MOST, RARE, ROUNDED, Traces, follow
from mmpos_probe.words import Flags, Float64Array, IntArray, counted

UNKNOWN = int(np.iinfo(np.int64).min)
"""The numerator of an unknown id."""

ONE_KEY = "All tokens have one key: values, keys before their rotation, copies of heads, or one id for all."

MOST_DENOMINATOR = 4096
"""Largest denominator that is searched for."""

FINE = 64
"""Denominator that must be distinguishable if the denominators of some fractions could not be found."""

HIDDEN = 2.5
"""Scatter about integers, relative to the expected noise, above which ids may be fractions."""

PRESUMED = 8
"""Weight, in tokens, of the prior for the noise of pairs, which assumes more noise in short pairs."""

NOISY = 0.35
"""Noise in rad above which the phases of a token fit no id."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The positions by which keys were rotated, as far as the keys show them.

    Args:
        position_ids: (axes, tokens) int64 numerators, UNKNOWN if an id is not certain: relative to the reference token,
            or absolute if the reference is an unrotated key.
        denominators: (tokens,) int64 denominators of the ids; 1 for integers.
        residual: (tokens,) float64 root mean square, over the pairs, of the angles in rad that the id leaves
            unexplained; NaN if the token is unlike the reference.
        confidence: (axes, tokens) float64 lower bound on the probability that no other id within ±262,144 explains the
            keys.
        alike: (tokens,) whether the token's pairs have the same lengths as the reference's, which is the case if all
            tokens share one hidden state.
        explained: (tokens,) whether the token's key is the reference rotated by some id, given the noise of other
            tokens. False for a key that was never written, was overwritten, lacks the attention factor of the others or
            was rotated differently; and for an id between integers if at most 1 in 100 ids lie between integers.
        reference: the token that ids are relative to; None if ids are absolute.
        notes: sentences that say which ids are unknown, and why.
    """

    position_ids: IntArray
    denominators: IntArray
    residual: Float64Array
    confidence: Float64Array
    alike: Flags
    explained: Flags
    reference: int | None
    notes: tuple[str, ...]

    @property
    def axes(self) -> int:
        """Number of position axes."""
        return int(self.position_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return int(self.position_ids.shape[1])

    @property
    def known(self) -> Flags:
        """(axes, tokens) whether an id is known."""
        return self.position_ids != UNKNOWN

    def __repr__(self) -> str:
        known = f"{int(self.known.sum())} of {self.known.size} ids known"
        return f"Reading(axes={self.axes}, tokens={self.num_tokens}, {known})"


def read(
    keys: Any,
    rotary: Rotary,
    *,
    reference: Any = None,
) -> Reading:
    """Read the positions by which keys were rotated.

    All tokens must have the same hidden state, so that their keys are rotations of one vector; ``write_checkpoint``
    writes such models. Pair j of a token then differs from pair j of the reference by the angle inv_freq[j] ·
    (difference of ids on the axis of j). Together, the pairs of an axis determine this difference exactly if they
    separate it from all others within ±262,144 at the noise level that the lengths of the keys show.

    >>> import numpy as np
    >>> rotary = Rotary(8, axes=1)
    >>> rotated = np.exp(1j * np.arange(5)[:, None, None] * rotary.inv_freq_array)
    >>> read(np.concatenate([rotated.real, rotated.imag], axis=-1), rotary).position_ids.tolist()
    [[0, 1, 2, 3, 4]]

    Args:
        keys: (tokens, kv_heads, head_dim) without padding; floats of any width, numpy or torch.
        rotary: the intended rotation.
        reference: the token that ids are relative to, by default the first; or a
            (kv_heads, head_dim) unrotated key, for absolute ids.

    Raises:
        InvalidInputError: keys are not floats, or their shape does not match the rotary; the reference is zero or not
            finite.
    """
    state = read_keys(keys, rotary, reference)
    return _certain(state, follow(state))


def _certain(keys: Keys, raw: Traces) -> Reading:
    """Keep the ids that are certain, and split fractions into numerators and denominators."""
    ladders = [axis.ladder for axis in raw.axes[: len(raw.ids)]]
    read = np.isfinite(raw.across)
    # A token whose noise happens to be small is trusted no more than its neighbours.
    usual = _usual(raw.noise, read)
    noise = np.maximum(raw.noise, np.maximum(usual, keys.rounding)[:, None])
    confidence, unfit = np.zeros_like(noise), np.zeros(noise.shape, np.bool_)
    for axis, ladder in enumerate(ladders):
        if ladder.turns.size and read[axis].any():
            doubt, unfit[axis] = _doubt(ladder, raw.across[axis], raw.along[axis], raw.by_pair[axis], keys.rounding)
            confidence[axis] = 1 - doubt
    confidence[~(np.abs(raw.ids) <= REACH) | (noise > NOISY)] = 0
    per_rad = np.array([ladder.ids_per_rad for ladder in ladders])
    spread = 6 * np.where(read, noise, 0) * per_rad[:, None]
    # One or two pairs fit any phases at some fraction; estimate how many fractions fit by chance.
    wrapping = np.array([(np.abs(ladder.inv_freq) * REACH > np.pi).sum() for ladder in ladders])
    narrow = np.clip(6 * noise / np.pi, LEAST_NOISE, 1) ** wrapping[:, None]
    chance = 2 * REACH / (30 * np.maximum(spread, LEAST_NOISE)) * narrow
    numerators, denominators, rational, between = _rational(raw.ids, spread, chance <= 1 - SURE)
    # The best fit of phases is closer to an integer id than to a fraction that noise hides.
    away = [row[here] for row, here in zip(raw.away, read, strict=True)]  # all of them share the noise of the reference
    scatter = np.array([np.median(np.abs(row - np.median(row))) / 0.6745 if row.size else 0 for row in away])
    hidden = scatter > np.maximum(HIDDEN * np.where(read.any(axis=1), usual, 0) * per_rad, 1 / FINE)
    rational &= ~(hidden[:, None] & (spread > 0.5 / FINE))
    between &= (confidence >= SURE) & (np.abs(raw.ids - numerators) > EXPLAINED * per_rad[:, None])
    confidence[~rational] = 0
    driven = np.array([ladder.turns.size > 0 for ladder in ladders])
    fits = raw.alike & np.isfinite(raw.ids[driven]).all(axis=0)
    if keys.token is not None and keys.num_tokens > 1:
        fits = np.delete(fits, keys.token)  # the reference always fits itself
    misfit = bool(fits.mean() < MOST)
    if misfit:
        confidence[:] = 0
    position_ids = np.where(confidence >= SURE, numerators, UNKNOWN)
    explained = ~(raw.unexplained(keys.rounding, position_ids != UNKNOWN) | between.any(axis=0))
    notes = _notes(keys, raw, position_ids, explained, rational, unfit, misfit)
    return Reading(position_ids, denominators, raw.residual, confidence, raw.alike, explained, keys.token, notes)


def _usual(noise: Float64Array, read: Flags) -> Float64Array:
    """Return (axes,) medians of the noise of tokens that were read."""
    return np.array([np.median(row[here]) if here.any() else np.inf for row, here in zip(noise, read, strict=True)])


def _doubt(
    ladder: Ladder, across: Float64Array, along: Float64Array, by_pair: Float64Array, rounding: float
) -> tuple[Float64Array, Flags]:
    """Bound the (tokens,) probabilities of another id, from the noise in the lengths and additional phase errors.

    The noise of a pair is estimated from its lengths in all tokens; with few tokens, every pair is presumed to have the
    same absolute noise, whatever its length.

    Returns:
        the bounds, and (tokens,) whether phases have larger errors than rounding explains.
    """
    read = np.isfinite(across)
    weight = ladder.weight.astype(np.float64)
    presumed = float(weight @ by_pair) * np.maximum(1, weight**-2.0 / (1 / weight).sum())
    count = int(read.sum())
    by_pair = np.maximum((count * by_pair + PRESUMED * presumed) / (count + PRESUMED), rounding**2)
    usual = max(float(np.median(along[read])), rounding)
    share = min((max(float(np.median(across[read])), rounding) / usual) ** 2 / max(1 - ladder.one, ladder.one), 1.0)
    along = np.maximum(along, usual)
    honest = np.minimum(across, along * np.sqrt(share) * ladder.chance)
    with np.errstate(invalid="ignore"):
        misfit = np.sqrt(across**2 - honest**2)
    noise = np.maximum(along, honest / np.sqrt(share))
    unseen = ladder.chance * np.maximum(misfit, np.median(misfit[read]))
    doubt = ladder.doubt(noise * np.maximum(1, noise / COARSE), unseen, by_pair, share)
    doubt[misfit > ROUNDED] = 1
    return doubt, misfit > ROUNDED


def _rational(ids: Float64Array, spread: Float64Array, unique: Flags) -> tuple[IntArray, IntArray, Flags, Flags]:
    """Find the fraction with the smallest denominator within the spread of every id, where it is unique.

    Returns:
        (axes, tokens) numerators, (tokens,) denominators, (axes, tokens) whether these are certain, and (axes, tokens)
        whether an id is between integers although nearly all others are integers.
    """
    known = np.isfinite(ids)
    values, spread = np.where(known, ids, 0), np.where(known, spread, 0)
    off = np.abs(values - np.rint(values))
    between = off > spread
    denominators = np.ones(ids.shape[1], np.int64)
    if between.sum() <= RARE * known.sum():  # these are the tails of the noise
        close = off <= 2 * spread
        return np.rint(values).astype(np.int64), denominators, known & close, known & ~close
    by_axis = np.ones(ids.shape, np.int64)
    # Up to this denominator, a fraction lies within the spread of a number by chance one time in thirty.
    most = np.sqrt(1 / (30 * np.maximum(spread, LEAST_NOISE)))
    left = np.nonzero(between & unique)
    for denominator in range(2, MOST_DENOMINATOR + 1):
        left = tuple(index[most[left] >= denominator] for index in left)
        if not left[0].size:
            break
        scaled = values[left] * denominator
        fits = np.abs(scaled - np.rint(scaled)) <= denominator * spread[left]
        by_axis[tuple(index[fits] for index in left)] = denominator
        left = tuple(index[~fits] for index in left)
    lost = between & (by_axis == 1)
    # If some ids are fractions, an integer is certain only if the fractions around it are excluded.
    certain = known & ~lost & (spread <= 0.5 / max(int(by_axis.max()), FINE if lost.any() else 2))
    np.lcm.reduce(np.where(certain, by_axis, 1), axis=0, out=denominators)
    return np.rint(values * denominators).astype(np.int64), denominators, certain, np.zeros_like(certain)


def _notes(
    keys: Keys, raw: Traces, ids: IntArray, explained: Flags, rational: Flags, unfit: Flags, misfit: bool
) -> tuple[str, ...]:
    """Write the sentences about unknown ids."""
    notes = []
    if not raw.alike.all():
        notes.append(
            f"{_counted(~raw.alike)} have pairs of other lengths than the reference, or NaN: "
            "another hidden state, a normalisation after the rotation, or another pairing or rotary_dim."
        )
    if not explained.all() and not misfit:
        notes.append(f"{_counted(~explained)} have keys that no id explains at the noise of the others.")
    alone = keys.token is not None and keys.num_tokens == 1
    if alone:
        notes.append("The only token is the reference: its ids relative to itself are 0, which shows nothing.")
    if keys.num_tokens > 1 and (ids == ids[:, :1]).all() and (ids != UNKNOWN).any():
        notes.append(ONE_KEY)
    for axis, pairs in enumerate(raw.axes[: len(ids)]):
        if not pairs.columns.size:
            notes.append(f"Axis {axis} has no rotated pair: its ids cannot be read.")
        else:
            unknown = (ids[axis] == UNKNOWN) & raw.alike
            notes += _notes_of_axis(axis, raw, unknown, explained, rational[axis], unfit[axis])
    if misfit:
        notes.append("No id is returned, since most tokens fit none: another rotary, or different hidden states.")
    if raw.futile:
        notes.append("The search was abandoned after nine of ten tokens had no result.")
    if raw.axes[-1].axis < 0 and raw.still[raw.alike].max(initial=0) > 0.05**2:
        notes.append("Pairs that should not be rotated are rotated.")
    if raw.factor is not None and abs(raw.scale / raw.factor - 1) > FACTOR and raw.alike.mean() > MOST:
        notes.append(f"Rotated keys are {raw.scale:.4g} times as long as the reference, want {raw.factor:.4g}.")
    return tuple(notes)


def _notes_of_axis(
    axis: int, raw: Traces, unknown: Flags, explained: Flags, rational: Flags, unfit: Flags
) -> Iterator[str]:
    """Explain why the (tokens,) ids of an axis are unknown."""
    fitted = unknown & ~np.isnan(raw.ids[axis])
    if (unknown & ~fitted).any():
        lost = _counted(unknown & ~fitted)
        yield f"Axis {axis}: no id within ±262,144 explains the keys of {lost}: they have another rotary."
    fractions, off = fitted & explained & ~rational, fitted & unfit & rational
    if fractions.any():
        count = counted(int(fractions.sum()), "token")
        yield f"Axis {axis}: {count} have fractions that cannot be distinguished at this noise."
    if off.any():
        yield (
            f"Axis {axis}: the keys of {counted(int(off.sum()), 'token')} are further from any id than their noise "
            "explains: another rotary, or angles with few bits."
        )
    hidden = int((unknown & explained).sum() - fractions.sum() - off.sum())
    if hidden > 0:
        ladder, noise = raw.axes[axis].ladder, float(np.median(raw.noise[axis][unknown]))
        yield (
            f"Axis {axis}: {counted(hidden, 'id')} of {unknown.size} (first: token {int(unknown.argmax())}) are "
            f"ambiguous: {counted(ladder.turns.size, 'pair')} of at most "
            f"{float(np.abs(ladder.inv_freq).max()):.2g} rad per id do not separate them at a noise of {noise:.2g} rad."
        )


def _counted(tokens: Flags) -> str:
    """Count tokens, and name the first."""
    return f"{counted(int(tokens.sum()), 'token')} (first: {int(tokens.argmax())})"
