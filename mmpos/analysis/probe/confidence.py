"""Read from turned keys where each token was thought to be, and tell only what is sure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.probe.keys import Keys, as_one_head, read_keys
from mmpos.analysis.probe.ladder import LEAST_NOISE, REACH, SURE, Flags, Ladder
from mmpos.analysis.probe.traces import COARSE, EXPLAINED, FACTOR, MOST, RARE, ROUNDED, Traces, follow
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Float64Array
from mmpos.support import html
from mmpos.support.checks import IntArray, counted

UNKNOWN = int(np.iinfo(np.int64).min)
"""The id of what could not be told."""

ONE_KEY = "All tokens have one key: values, keys before their rotation, copies of heads, or one id for all."

MOST_DENOMINATOR = 4096
"""Largest denominator of fractions that are looked for."""

FINE = 64
"""Denominator that must be told where some fractions have one that could not be found."""

HIDDEN = 2.5
"""How many times further than noise explains tokens scatter about integers if their ids may be fractions."""

PRESUMED = 8
"""Tokens whose lengths count as much as what is presumed of the noise of pairs: that short ones have more."""

NOISY = 0.35
"""Noise in rad above which a token's phases fit no id."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The positions that keys were turned by, as far as the keys tell.

    Args:
        position_ids: (axes, tokens) int64 numerators, UNKNOWN where they could not be told: less those of the reference
            token, or absolute where the reference is a key that was not turned.
        denominators: (tokens,) int64 that the numerators are over; 1 for integers.
        residual: (tokens,) float64 rad: root mean square, over the pairs, of what the id leaves unexplained; NaN where
            a token is not like the reference.
        confidence: (axes, tokens) float64: at least so probable is it that no other id within reach explains the keys.
        alike: (tokens,) whether the token's pairs are as long as the reference's, as those of one hidden state are.
        explained: (tokens,) whether the token's key is the reference's, turned by some id, as far as the noise of other
            tokens lets it show; False for a key that was never written, was overwritten, has not the attention factor
            of the others, or was turned by another rotation, and for an id that lies between integers, where no more
            than 1 of 100 do.
        reference: the token that ids are relative to, None where they are absolute.
        row_offsets: (batch + 1,) first token of each row of the batch, then the number of tokens.
        notes: sentences about what could not be told, and why.
    """

    position_ids: IntArray
    denominators: IntArray
    residual: Float64Array
    confidence: Float64Array
    alike: Flags
    explained: Flags
    reference: int | None
    row_offsets: IntArray
    notes: tuple[str, ...]

    @property
    def axes(self) -> int:
        """Position axes."""
        return int(self.position_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.position_ids.shape[1])

    @property
    def known(self) -> Flags:
        """(axes, tokens) which ids could be told."""
        return self.position_ids != UNKNOWN

    def __repr__(self) -> str:
        known = f"{int(self.known.sum())} of {self.known.size} ids known"
        return f"Reading(axes={self.axes}, tokens={self.num_tokens}, {known})"

    def _repr_html_(self) -> str:
        """Show in a notebook how many ids were read, the notes, and a map of the tokens of each row."""
        states = np.where(~self.explained, 1, np.where(self.known.all(axis=0), 0, 2))
        names = ("ids read", "not explained", "ids unknown")
        return html.paragraphs((repr(self), *self.notes)) + html.token_map(states, self.row_offsets, names)


def read(
    keys: Any,
    rotary: Rotary,
    *,
    reference: Any = None,
    lengths: npt.ArrayLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Reading:
    """Read the positions that keys were turned by.

    All tokens must have one hidden state, so that their keys are one vector, turned; see ``write_checkpoint`` for
    models where they have. Then pair j of a token and of the reference differ by the angle inv_freq[j] · (difference of
    ids on the axis of j), and the pairs of an axis together give that difference: exactly, if they can separate it from
    all others within ±262,144 in spite of the noise that the keys' own lengths show.

    >>> import numpy as np
    >>> rotary = Rotary(8, axes=1)
    >>> turned = np.exp(1j * np.arange(5)[:, None, None] * rotary.inv_freq_array)
    >>> read(np.concatenate([turned.real, turned.imag], axis=-1), rotary).position_ids.tolist()
    [[0, 1, 2, 3, 4]]

    Args:
        keys: (tokens, kv_heads, head_dim), or with a batch axis before; floats of any width, numpy or torch.
        rotary: what should have turned them.
        reference: the token that ids are relative to, counted over all rows, by default the first; or
            (kv_heads, head_dim) a key that was not turned, for absolute ids.
        lengths: (batch,) tokens of each row that count, the first ones; by default all.
        progress: called with the tokens that are read, and with all, after each 4,096.

    Raises:
        InvalidInputError: keys that are no floats, or of another shape than the rotary; a reference without direction.
    """
    keys, rotary, reference = as_one_head(keys, rotary, reference)
    state = read_keys(keys, rotary, reference, lengths)
    raw = follow(state, progress)
    return _told(state, raw)


def _told(keys: Keys, raw: Traces) -> Reading:
    """Leave out what is not sure, and write fractions with their denominators."""
    ladders = [each.ladder for each in raw.axes[: len(raw.ids)]]
    read = np.isfinite(raw.across)
    # A token whose noise is small by luck is not trusted more than its neighbours.
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
    # One or two pairs have any phases at some fraction: so many of these fit by chance.
    wrapping = np.array([(np.abs(ladder.inv_freq) * REACH > np.pi).sum() for ladder in ladders])
    narrow = np.clip(6 * noise / np.pi, LEAST_NOISE, 1) ** wrapping[:, None]
    chance = 2 * REACH / (30 * np.maximum(spread, LEAST_NOISE)) * narrow
    numerators, denominators, rational, between = _rational(raw.ids, spread, chance <= 1 - SURE)
    # Integers lie nearer to where phases fit best than fractions do that the noise hides.
    away = [row[here] for row, here in zip(raw.away, read, strict=True)]  # the reference's own noise is in all alike
    scatter = np.array([np.median(np.abs(row - np.median(row))) / 0.6745 if row.size else 0 for row in away])
    hidden = scatter > np.maximum(HIDDEN * np.where(read.any(axis=1), usual, 0) * per_rad, 1 / FINE)
    rational &= ~(hidden[:, None] & (spread > 0.5 / FINE))
    between &= (confidence >= SURE) & (np.abs(raw.ids - numerators) > EXPLAINED * per_rad[:, None])
    confidence[~rational] = 0
    driven = np.array([ladder.turns.size > 0 for ladder in ladders])
    fits = raw.alike & np.isfinite(raw.ids[driven]).all(axis=0)
    if keys.token is not None and keys.num_tokens > 1:
        fits = np.delete(fits, keys.token)  # which fits itself
    misfit = bool(fits.mean() < MOST)
    if misfit:
        confidence[:] = 0
    position_ids = np.where(confidence >= SURE, numerators, UNKNOWN)
    explained = ~(raw.unexplained(keys.rounding, position_ids != UNKNOWN) | between.any(axis=0))
    offsets = np.concatenate([[0], np.cumsum(keys.lengths)])
    notes = _notes(keys, raw, position_ids, explained, rational, unfit, misfit)
    return Reading(
        position_ids, denominators, raw.residual, confidence, raw.alike, explained, keys.token, offsets, notes
    )


def _usual(noise: Float64Array, read: Flags) -> Float64Array:
    """Return (axes,) medians of the noise of tokens that were read."""
    return np.array([np.median(row[here]) if here.any() else np.inf for row, here in zip(noise, read, strict=True)])


def _doubt(
    ladder: Ladder, across: Float64Array, along: Float64Array, by_pair: Float64Array, rounding: float
) -> tuple[Float64Array, Flags]:
    """Bound (tokens,) probabilities that ids are others, by the noise of lengths and by what phases are off beside it.

    The noise of each pair is that of its lengths in all tokens; as long as these are few, that of a pair which has as
    much noise as any other, whatever its length.

    Returns:
        these, and (tokens,) whether phases are off by more than rounding makes them.
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
    """Find the fractions with the smallest denominators within the spread of every token's ids, where these are unique.

    Returns:
        (axes, tokens) numerators, (tokens,) denominators, (axes, tokens) whether these are told, and (axes, tokens)
        which ids lie between integers where nearly all others are integers.
    """
    known = np.isfinite(ids)
    whole, spread = np.where(known, ids, 0), np.where(known, spread, 0)
    off = np.abs(whole - np.rint(whole))
    between = off > spread
    denominators = np.ones(ids.shape[1], np.int64)
    if between.sum() <= RARE * known.sum():  # the tails of noise
        close = off <= 2 * spread
        return np.rint(whole).astype(np.int64), denominators, known & close, known & ~close
    each = np.ones(ids.shape, np.int64)
    # Among fractions up to this denominator one in thirty lies within the spread of a number by chance.
    most = np.sqrt(1 / (30 * np.maximum(spread, LEAST_NOISE)))
    left = np.nonzero(between & unique)
    for denominator in range(2, MOST_DENOMINATOR + 1):
        left = tuple(index[most[left] >= denominator] for index in left)
        if not left[0].size:
            break
        scaled = whole[left] * denominator
        fits = np.abs(scaled - np.rint(scaled)) <= denominator * spread[left]
        each[tuple(index[fits] for index in left)] = denominator
        left = tuple(index[~fits] for index in left)
    lost = between & (each == 1)
    # Where some ids are fractions, an integer is one only if it is told from the fractions around it.
    told = known & ~lost & (spread <= 0.5 / max(int(each.max()), FINE if lost.any() else 2))
    np.lcm.reduce(np.where(told, each, 1), axis=0, out=denominators)
    return np.rint(whole * denominators).astype(np.int64), denominators, told, np.zeros_like(told)


def _notes(
    keys: Keys, raw: Traces, ids: IntArray, explained: Flags, rational: Flags, unfit: Flags, misfit: bool
) -> tuple[str, ...]:
    """Word what could not be told."""
    notes = []
    if not raw.alike.all():
        notes.append(
            f"{_those(~raw.alike)}, have pairs of other lengths than the reference, or NaN: "
            "another hidden state, a normalisation after the rotation, or another pairing or rotary_dim."
        )
    if not explained.all() and not misfit:
        notes.append(f"{_those(~explained)}, have keys that no id explains at the noise of the others.")
    alone = keys.token is not None and keys.num_tokens == 1
    if alone:
        notes.append("The one token is the reference: its ids are 0 from itself, and nothing is told.")
    if (alone or misfit) and keys.rotary.head_axes is None and keys.exchanged:
        notes.append("Heads differ by turns alone, as tokens should: are keys (kv_heads, tokens, head_dim)?")
    if keys.num_tokens > 1 and (ids == ids[:, :1]).all() and (ids != UNKNOWN).any():
        notes.append(ONE_KEY)
    for axis, each in enumerate(raw.axes[: len(ids)]):
        if not each.columns.size:
            notes.append(f"Axis {axis} has no pair that turns: its ids cannot be told.")
        else:
            unknown = (ids[axis] == UNKNOWN) & raw.alike
            notes += _notes_of_axis(axis, raw, unknown, explained, rational[axis], unfit[axis])
    if misfit:
        notes.append("No id is told, since most tokens fit none: another rotary, or other hidden states.")
    if raw.futile:
        notes.append("Searches were given up after nine of ten found nothing.")
    if raw.axes[-1].axis < 0 and raw.still[raw.alike].max(initial=0) > 0.05**2:
        notes.append("Pairs that should stand still have turned.")
    if raw.factor is not None and abs(raw.scale / raw.factor - 1) > FACTOR and raw.alike.mean() > MOST:
        notes.append(f"Turned keys are {raw.scale:.4g} times as long as the reference, want {raw.factor:.4g}.")
    return tuple(notes)


def _notes_of_axis(
    axis: int, raw: Traces, unknown: Flags, explained: Flags, rational: Flags, unfit: Flags
) -> Iterator[str]:
    """Word why (tokens,) ids of an axis are unknown."""
    found = unknown & ~np.isnan(raw.ids[axis])
    if (unknown & ~found).any():
        lost = _those(unknown & ~found)
        yield f"Axis {axis}: no id within ±262,144 explains the keys of {lost}: they were turned by another rotary."
    fractions, off = found & explained & ~rational, found & unfit & rational
    if fractions.any():
        count = counted(int(fractions.sum()), "token")
        yield f"Axis {axis}: {count} have fractions that the noise does not tell apart."
    if off.any():
        yield (
            f"Axis {axis}: the keys of {counted(int(off.sum()), 'token')} are further from any id than their noise "
            "explains: another rotary, or angles of few bits."
        )
    hidden = int((unknown & explained).sum() - fractions.sum() - off.sum())
    if hidden > 0:
        ladder, noise = raw.axes[axis].ladder, float(np.median(raw.noise[axis][unknown]))
        yield (
            f"Axis {axis}: {counted(hidden, 'id')} of {unknown.size}, the first that of token {int(unknown.argmax())}, "
            f"could be others as well: {counted(ladder.turns.size, 'pair')} of at most "
            f"{float(np.abs(ladder.inv_freq).max()):.2g} rad per id do not separate them at a noise of {noise:.2g} rad."
        )


def _those(tokens: Flags) -> str:
    """Count tokens, and name the first."""
    return f"{counted(int(tokens.sum()), 'token')}, the first {int(tokens.argmax())}"
