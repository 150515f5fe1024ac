"""Read from turned keys where each token was thought to be, and compare that with a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis import Diagnosis, diagnose
from mmpos.analysis.probe.keys import ALIKE, Axis, Keys, read_keys
from mmpos.analysis.probe.ladder import LEAST_NOISE, REACH, Flags, Follower, Ladder, Phasors
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import AXES, DENOMINATOR, FIRST_TOKEN, HEIGHT, NO_POSITION, OFFSET, WIDTH
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Float64Array
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, counted, host_array, instance, int_array

UNKNOWN = int(np.iinfo(np.int64).min)
"""The id of what could not be told."""

ONE_KEY = "All tokens have one key: values, keys before their rotation, copies of heads, or one id for all."

SURE = 1 - 1e-6
"""Least confidence of an id that is told."""

MOST_DENOMINATOR = 4096
"""Largest denominator of fractions that are looked for."""

RARE = 0.01
"""Share of tokens whose ids may be off integers by noise before all are taken for fractions, or of unlike lengths."""

MOST = 0.5
"""Share of tokens that must fit ids before any is believed: else the rotary is another one."""

FINE = 64
"""Denominator that must be told where some fractions have one that could not be found."""

HIDDEN = 2.5
"""How many times further than noise explains tokens scatter about integers if their ids may be fractions."""

ANY_ANGLE = np.pi / 3**0.5
"""Root mean square in rad of angles that mean nothing."""

PRESUMED = 8
"""Tokens whose lengths count as much as what is presumed of the noise of pairs: that short ones have more."""

COARSE = 0.04
"""Noise in rad of e4m3, the coarsest of numbers; beyond it something else is at work, which pairs may share."""

ROUNDED = 0.02
"""Most, in rad, that angles in float32 may be off."""

NOISY = 0.35
"""Noise in rad above which a token's phases fit no id."""

EXPLAINED = 0.005
"""What an id may leave, in rad, beyond the noise of other tokens: bfloat16 among float32 leaves less."""

FACTOR = 0.02
"""What the lengths of a token's pairs may be off on average, relative: as factors on cos and sin, which are larger."""


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
    state = read_keys(keys, rotary, reference, lengths)
    raw = follow(state, progress)
    return _told(state, raw)


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
            read, noise, chance = np.isfinite(ids) & self.alike, np.maximum(across, along), _chance(ladder)
            good = _some(read)
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
        """Tell (tokens,) whose pairs are all longer or shorter than those of most tokens."""
        weights = [self.axes[axis].ladder.weights for axis in driven]
        every = np.concatenate(weights) / np.concatenate(weights).sum()
        length = np.average(self.length[driven], axis=0, weights=[each.sum() for each in weights])
        some = _some(self.alike)
        off = np.abs(length / np.median(length[some]) - 1)
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
    scale, at = 1.0, 0
    for index, block in enumerate(keys.blocks()):
        here = slice(at, at + len(block))
        at = here.stop
        pairs = keys.pairs(block)
        phasors = [each.phasors(pairs) for each in axes]
        if index == 0:
            scale = _scale(axes, phasors)
            if keys.token is not None and abs(scale - 1) <= FACTOR:
                scale = 1.0
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
    return Traces(
        axes, found[0], across, along, length, by_pair, away, still, same, any(each.futile for each in followers), scale
    )


def _some(good: Flags) -> IntArray:
    """Pick up to 2¹⁶ of the tokens that are good, spread over all: enough for a median."""
    tokens = np.flatnonzero(good)
    return tokens[:: max(1, tokens.size >> 15)]


def _scale(axes: list[Axis], phasors: list[Phasors]) -> float:
    """How much longer the turned pairs of most tokens are than those of the reference: an attention factor."""
    weights = np.concatenate([each.ladder.weights for each in axes])
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.abs(np.concatenate(phasors, axis=1)) @ weights / max(weights.sum(), 1e-300)
    scale = float(np.median(lengths[np.isfinite(lengths)])) if np.isfinite(lengths).any() else 1.0
    return scale if scale > 0 else 1.0


def _unturned_alike(block: npt.NDArray[np.float32], plain: npt.NDArray[np.float32]) -> Flags:
    """Tell (tokens,) whether the channels that do not turn are those of the reference."""
    if not plain.size:
        return np.ones(len(block), np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        off = ((block[..., block.shape[-1] - plain.shape[-1] :] - plain) ** 2).sum(axis=(1, 2))
        return np.asarray(off <= ALIKE**2 * (plain**2).sum(), np.bool_)


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
    chance = _chance(ladder)
    honest = np.minimum(across, along * np.sqrt(share) * chance)
    with np.errstate(invalid="ignore"):
        misfit = np.sqrt(across**2 - honest**2)
    noise = np.maximum(along, honest / np.sqrt(share))
    unseen = chance * np.maximum(misfit, np.median(misfit[read]))
    doubt = ladder.doubt(noise * np.maximum(1, noise / COARSE), unseen, by_pair, share)
    doubt[misfit > ROUNDED] = 1
    return doubt, misfit > ROUNDED


def _chance(ladder: Ladder) -> float:
    """Return how many times the usual noise the pairs of a token have once in a million.

    Source: B. Laurent and P. Massart, Adaptive estimation of a quadratic functional by model selection, 2000, lemma 1.
    """
    rare = -np.log(1 - SURE)
    return float(np.sqrt(1 + 2 * np.sqrt(rare * ladder.one) + 2 * rare * ladder.one))


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
    unlike = int((~raw.alike).sum())
    if unlike:
        first = int((~raw.alike).argmax())
        notes.append(
            f"{counted(unlike, 'token')}, the first {first}, have pairs of other lengths than the reference, or NaN: "
            "another hidden state, a normalisation after the rotation, or another pairing or rotary_dim."
        )
    if not explained.all() and not misfit:
        broken, first = int((~explained).sum()), int(explained.argmin())
        notes.append(
            f"{counted(broken, 'token')}, the first {first}, have keys that no id explains at the noise of the others."
        )
    alone = keys.token is not None and keys.num_tokens == 1
    if alone:
        notes.append("The one token is the reference: its ids are 0 from itself, and nothing is told.")
    if (alone or misfit) and keys.rotary.head_axes is None and keys.exchanged:
        notes.append("Heads differ by turns alone, as tokens should: are keys (kv_heads, tokens, head_dim)?")
    if keys.num_tokens > 1 and (ids == ids[:, :1]).all() and (ids != UNKNOWN).any():
        notes.append(ONE_KEY)
    for axis, each in enumerate(raw.axes[: len(ids)]):
        unknown = (ids[axis] == UNKNOWN) & raw.alike
        count = int(unknown.sum())
        if not each.columns.size:
            notes.append(f"Axis {axis} has no pair that turns: its ids cannot be told.")
            continue
        if not count:
            continue
        first = int(unknown.argmax())
        lost = int((unknown & np.isnan(raw.ids[axis])).sum())
        if lost:
            notes.append(
                f"Axis {axis}: no id within ±262,144 explains the keys of {counted(lost, 'token')}, the first "
                f"{int((unknown & np.isnan(raw.ids[axis])).argmax())}: they were turned by another rotary."
            )
        odd = int((unknown & explained & ~rational[axis] & ~np.isnan(raw.ids[axis])).sum())
        if odd:
            notes.append(f"Axis {axis}: {counted(odd, 'token')} have fractions that the noise does not tell apart.")
        off = int((unknown & unfit[axis] & rational[axis] & ~np.isnan(raw.ids[axis])).sum())
        if off:
            notes.append(
                f"Axis {axis}: the keys of {counted(off, 'token')} are further from any id than their noise explains: "
                "another rotary, or angles of few bits."
            )
        odd += off
        hidden = int((unknown & explained).sum()) - odd
        if hidden > 0:
            fastest, noise = float(np.abs(each.ladder.inv_freq).max()), float(np.median(raw.noise[axis][unknown]))
            notes.append(
                f"Axis {axis}: {counted(hidden, 'id')} of {ids.shape[1]}, the first that of token {first}, "
                f"could be others as well: {counted(each.columns.size, 'pair')} of at most {fastest:.2g} rad per id do "
                f"not separate them at a noise of {noise:.2g} rad."
            )
    if misfit:
        notes.append("No id is told, since most tokens fit none: another rotary, or other hidden states.")
    if raw.futile:
        notes.append("Searches were given up after nine of ten found nothing.")
    if raw.axes[-1].axis < 0 and raw.still[raw.alike].max(initial=0) > 0.05**2:
        notes.append("Pairs that should stand still have turned.")
    factor = keys.rotary.attention_factor
    if keys.token is None and abs(raw.scale / factor - 1) > 0.02 and raw.alike.mean() > MOST:
        notes.append(f"Turned keys are {raw.scale:.4g} times as long as the reference, want {factor:.4g}.")
    return tuple(notes)


def check(
    reading: Reading,
    documents: SegmentTable | PositionTable | npt.ArrayLike,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
) -> Diagnosis:
    """Compare a reading with the positions that were meant, in the words of ``diagnose``.

    A token whose key no id explains differs. Ids that nothing but noise or slow pairs hide are not compared: the
    Diagnosis has the number of their tokens as ``unknown_tokens``, and counts as compared the tokens of which all ids
    are known, or, if there is a difference, any. Where ids are relative and another row or document would begin below
    zero, the reference's own began too late.

    Args:
        reading: of as many tokens as the documents have, padding left out.
        documents: what the keys are of; mistakes in placing are found only for a SegmentTable. Or (axes, tokens) or
            (tokens,) the integers that the engine was given.
        scheme: for a SegmentTable, a name or a scheme object; "rope-tie" if not given.
        start: for a SegmentTable, id of each document's first token, one or (documents,).

    Raises:
        InvalidInputError: other numbers of tokens or axes; no id that could be told.
    """
    instance("reading", reading, Reading, "mmpos.analysis.probe.read")
    if isinstance(documents, SegmentTable):
        table = place(documents, "rope-tie" if scheme is None else scheme, start)
    else:
        if scheme is not None or np.ndim(start) or start != 0:
            got = "a table" if isinstance(documents, PositionTable) else "ids"
            raise InvalidInputError(f"scheme, start: got one with {got}, want a SegmentTable, or none of them")
        table = documents if isinstance(documents, PositionTable) else _given(documents, reading.axes)
        documents = table
    if (table.axes, table.num_tokens) != (reading.axes, reading.num_tokens):
        got = f"{reading.axes} axes and {counted(reading.num_tokens, 'token')}"
        raise InvalidInputError(f"reading: got {got}, want {table.axes} axes and {table.num_tokens}, as documents have")
    known = reading.known
    if not known.any():
        raise InvalidInputError(f"reading: got no id that could be told, want one; {' '.join(reading.notes)}")
    numerators, denominators = table.rationals()
    want = numerators / denominators
    ids = np.where(known, reading.position_ids, 0) / reading.denominators
    if reading.reference is not None:
        ids += want[:, [reading.reference]]
        ids += _late(reading, ids - want, want, table)
    found = diagnose(np.where(known, ids, want), documents, scheme, start, tolerance=1e-9)
    if found.equal and reading.explained.all():
        unknown = int((~known.all(axis=0)).sum())
        return replace(found, num_tokens=reading.num_tokens - unknown, unknown_tokens=unknown)
    wrong = (known & (np.abs(ids - want) > 1e-9)).any(axis=0) | ~reading.explained
    first, document = int(wrong.argmax()), np.repeat(np.arange(table.num_documents), table.lengths)
    if found.equal:
        cause = f"no id explains the keys of {counted(int(wrong.sum()), 'token')}"
        remedy = "look how such tokens enter the cache: never written, overwritten, without the attention factor, or "
        remedy += "turned by another rotation"
        found = replace(found, equal=False, cause=cause, remedy=remedy, explained=int(wrong.sum()))
    return replace(
        found,
        num_tokens=int((known.any(axis=0) | wrong).sum()),
        unknown_tokens=int((~known.all(axis=0) & ~wrong).sum()),
        different_tokens=int(wrong.sum()),
        different_documents=np.unique(document[wrong]).size,
        document=int(document[first]),
        token=first - int(table.documents[FIRST_TOKEN, document[first]]),
        what=table.describe(first, documents if isinstance(documents, SegmentTable) else None),
        axis=int((~known[:, first] | (np.abs(ids - want)[:, first] > 1e-9)).argmax()),
        got=tuple(np.where(known[:, first] & reading.explained[first], ids[:, first], np.nan).tolist()),
        want=tuple(Fraction(value, int(denominators[first])) for value in numerators[:, first].tolist()),
    )


def _late(reading: Reading, off: Float64Array, want: Float64Array, table: PositionTable) -> float:
    """Return by how much the reference's row began too late: else another row or document would begin below zero."""
    begins = np.unique(np.concatenate([reading.row_offsets[:-1], table.documents[FIRST_TOKEN]]))
    begins = begins[begins < reading.num_tokens]
    told = reading.known.any(axis=1)
    known, off, want = reading.known[told][:, begins].all(axis=0), off[told][:, begins], want[told][:, begins]
    below = known & (off == off[:1]).all(axis=0) & (want >= 0).all(axis=0) & (want + off < 0).any(axis=0)
    return float(-off[0, below].min(initial=0))


def _given(ids: npt.ArrayLike, axes: int) -> PositionTable:
    """Make the table of dense ids: a run of text wherever they count on."""
    array = host_array("documents", ids)
    if array.ndim == 1:
        array = np.tile(array, (axes, 1))
    array = int_array("documents", array, (axes, None))
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(array) != 1).any(axis=0)]))
    lengths = np.diff(np.append(starts, array.shape[1]))
    columns = np.zeros((AXES + 4 * len(array), starts.size), np.int64)
    columns[OFFSET], columns[HEIGHT], columns[WIDTH], columns[DENOMINATOR] = starts, 1, lengths, 1
    columns[AXES::4], columns[AXES + 3 :: 4] = array[:, starts], 1
    header = np.array([[0], [0], [NO_POSITION], [NO_POSITION]])
    return PositionTable.from_arrays(
        columns, header, array.shape[1], fractional=False, scheme="what the engine was given"
    )
