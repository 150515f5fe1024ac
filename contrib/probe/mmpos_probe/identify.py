"""Identification of the rotation that was applied to keys, if it is not the intended one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property  # noqa: TID251  # no data loader forks while it probes
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos import PositionTable
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos_probe.keys import Keys, read_keys
from mmpos_probe.suspects import NO_THETA, STILL, Suspect, if_valid, of_axes, suspects
from mmpos_probe.traces import EXPLAINED, FACTOR, MOST, ROUNDED, follow
from mmpos_probe.words import Flags, Float64Array, IntArray, counted, host_array

FITS = 0.1
"""Largest residual, in rad, of the rotation that was applied to the keys."""

AS_MEANT = "the keys have the intended rotation"
UNEXPLAINED = "no known rotation explains the keys"

SAMPLE = 512
"""Number of tokens that are sampled if ids are known: the first READ, and others spread over all tokens."""

READ = 64
"""Number of tokens that are sampled from the beginning."""


@dataclass(frozen=True)
class Identification:
    """The rotation that explains keys best.

    Args:
        as_meant: whether most keys have the intended rotation; all have it if ``first_wrong`` is None as well.
        rotary: the rotation; None if no known rotation explains the keys, or if a Rotary cannot describe it.
        cause: the difference from the intended rotation, in words.
        remedy: how to fix it.
        residual: root mean square residual in rad.
        meant: root mean square residual of the intended rotation in rad.
        first_wrong: the first token with a wrong key; None if there is none.
        kind: the cause without numbers that were fitted to the keys.
    """

    as_meant: bool
    rotary: Rotary | None
    cause: str
    remedy: str
    residual: float
    meant: float
    first_wrong: int | None = None
    kind: str = ""

    @property
    def named(self) -> bool:
        """Whether a rotation explains the keys."""
        return self.residual <= FITS and self.cause != UNEXPLAINED

    def __str__(self) -> str:
        if self.as_meant:
            return f"{self.cause[0].upper()}{self.cause[1:]}. The residual is {self.residual:.2g} rad."
        residuals = f"The residual is {self.residual:.2g} rad, that of the intended rotation {self.meant:.2g} rad."
        first = "" if self.first_wrong is None else f"The first token with a wrong key is {self.first_wrong}. "
        return f"{first}Cause: {self.cause}. To do: {self.remedy}. {residuals}"


def identify(
    keys: Any,
    rotary: Rotary,
    positions: PositionTable | npt.ArrayLike,
    *,
    reference: Any = None,
) -> Identification:
    """Find the rotation that was applied to keys, and say how it differs from the intended one.

    Every candidate rotation predicts every key from its ids, so that a wrong base, axis or direction is found, and so
    are angles computed with few bits.

    Args:
        keys: keys of tokens that share one hidden state, as for ``read``.
        rotary: the intended rotation.
        positions: the tokens' ids: a table, or (axes, tokens) integers or floats.
        reference: as for ``read``.

    Raises:
        InvalidInputError: as for ``read``; the shape of positions does not match the keys.
    """
    state = read_keys(keys, rotary, reference)
    judged = _Judge(state, _ids(positions, rotary.axes, state.num_tokens))
    meant = Suspect(AS_MEANT, "nothing", rotary)
    own = judged.residual(meant)
    if own <= judged.close:
        return judged.as_meant(own)
    best, least = judged.best(meant, own)
    if best is not meant and least <= FITS and judged.believed(best):
        return judged.named(meant, own, best, least)
    if own <= 3 * judged.noise + ROUNDED:
        return judged.as_meant(own)
    remedy = "check whether all tokens had one hidden state and whether the ids are right"
    return Identification(False, None, UNEXPLAINED, remedy, own, own, judged.first_unexplained, UNEXPLAINED)


def _ids(positions: PositionTable | npt.ArrayLike, axes: int, tokens: int) -> Float64Array:
    if isinstance(positions, PositionTable):
        ids = positions.dense(dtype=np.float64)
    else:
        ids = np.asarray(host_array("positions", positions), np.float64)
    if ids.shape != (axes, tokens):
        raise InvalidInputError(f"positions: got shape {ids.shape}, want ({axes}, {tokens}), as in rotary and keys")
    return ids


@dataclass(frozen=True, eq=False)
class _Turned:
    """Pairs of some tokens relative to those of the reference.

    Args:
        phases: (tokens, kv_heads, pairs) angles in rad; 0 for pairs that are zero in the reference.
        lengths: (tokens, kv_heads, pairs) ratios of lengths; 1 for pairs that are zero in the reference.
        weights: (kv_heads, pairs) lengths of the pairs of the reference.
    """

    phases: Float64Array
    lengths: Float64Array
    weights: Float64Array


@dataclass(frozen=True, eq=False)
class _Sample:
    """A sample of keys, and their ids.

    Args:
        keys: all keys, with their reference.
        tokens: (tokens, kv_heads, head_dim) sampled keys.
        ids: (axes, tokens) ids of the sampled keys.
        zero: (axes, 1) ids of the reference.
    """

    keys: Keys
    tokens: npt.NDArray[np.float32]
    ids: Float64Array
    zero: Float64Array
    _turned: dict[tuple[str, int], _Turned] = field(default_factory=dict)

    def turned(self, rotary: Rotary) -> _Turned:
        """Measure the rotation of a rotary's pairs; the result is cached by pairing and number of pairs."""
        layout = rotary.pairing, rotary.num_pairs
        if layout not in self._turned:
            keys = replace(self.keys, rotary=rotary)
            reference, pairs = keys.pairs(keys.reference), keys.pairs(self.tokens)
            square = np.abs(reference) ** 2
            phasors = pairs * reference.conj() / np.maximum(square, 1e-30)
            phasors = np.where(square > 1e-6 * square.max(), phasors, 1)
            self._turned[layout] = _Turned(np.angle(phasors), np.abs(phasors), np.abs(reference))
        return self._turned[layout]

    def angles(self, suspect: Suspect) -> Float64Array:
        """Compute the (tokens, kv_heads or 1, pairs) angles of a suspect relative to the reference, in rad."""
        angles = _angles(suspect, self.ids)
        with np.errstate(invalid="ignore"):
            if self.keys.token is not None:
                angles = angles - _angles(suspect, self.zero)
        return np.where(np.isfinite(angles), angles, np.pi)

    def squares(self, suspect: Suspect) -> Float64Array:
        """Return (tokens,) mean squared residuals in rad², with pairs weighted by their lengths.

        Channels that are not rotated contribute their relative error.
        """
        turned, still = self.turned(suspect.rotary), slice(suspect.rotary.rotary_dim, None)
        off = _wrapped(turned.phases - self.angles(suspect))
        weights = turned.weights * (turned.weights > 1e-3 * turned.weights.max())  # turned() skips the other pairs
        plain = np.abs(self.keys.reference[:, still])
        moved = np.abs(self.tokens[..., still] - self.keys.reference[:, still])
        moved = np.minimum(moved / np.maximum(plain, 1e-30), np.pi)
        total = np.tensordot(off**2, weights, 2) + np.tensordot(moved**2, plain, 2)
        return total / (weights.sum() + plain.sum())

    def scanned(
        self, meant: Rotary, frequencies: Callable[[float], Float64Array], bounds: tuple[float, float]
    ) -> float:
        """Find the value whose frequencies fit best, refining it with tokens ever further from the reference."""
        distance = np.abs(self.ids - self.zero).max(axis=0)
        phases, ids = self.turned(meant).phases, _by_pair(meant, self.ids - self.zero)
        grid, reach = np.geomspace(*bounds, 1000), max(16.0, float(distance.min()))
        while True:
            near = distance <= reach
            there, here = phases[near], ids[near]
            fits = [np.cos(there - here * frequencies(candidate)).mean() for candidate in grid]
            value = float(grid[int(np.argmax(fits))])
            fine = grid[1] / grid[0] - 1
            if reach > distance.max() and fine * distance.max() < 1e-3:
                return value
            grid, reach = value * np.exp(np.linspace(-2, 2, 33) * np.log(grid[1] / grid[0])), 4 * reach


class _Judge:
    """Judges rotations by their residuals on keys.

    Args:
        keys: the rotated keys.
        ids: (axes, tokens) ids of the keys.
    """

    def __init__(self, keys: Keys, ids: Float64Array) -> None:
        spread = np.linspace(0, keys.num_tokens - 1, min(keys.num_tokens, SAMPLE)).astype(np.int64)
        tokens = np.unique(np.concatenate([np.arange(min(keys.num_tokens, READ)), spread]))
        sample = keys.take(tokens)
        finite = np.isfinite(sample).all(axis=(1, 2))
        self.keys, self.ids = keys, ids
        self.zero = np.zeros((keys.rotary.axes, 1)) if keys.token is None else ids[:, [keys.token]]
        self.sample = _Sample(keys, sample[finite], ids[:, tokens[finite]], self.zero)

    def residual(self, suspect: Suspect) -> float:
        """Return the root mean square residual of a suspect in rad."""
        return float(np.sqrt(self.sample.squares(suspect).mean()))

    def best(self, meant: Suspect, own: float) -> tuple[Suspect, float]:
        """Choose the suspect with the smallest residual; known suspects precede those that are fitted to the keys."""
        best, least = meant, own
        for suspect in suspects(meant.rotary):
            residual = self.residual(suspect)
            if residual < 0.9 * least and (best is not meant or least > FITS or residual < 0.5 * least):
                best, least = suspect, residual
        if best is not meant and least <= self.close:
            return best, least
        share = 1.0 if least > FITS else 0.5  # slow pairs fit nearly any rotation
        for suspect in chain(self._by_pair(meant.rotary), self._scaled(meant.rotary)):
            residual = self.residual(suspect)
            if residual < share * least:
                best, least, share = suspect, residual, min(share, 0.9)
            if least <= self.close:
                break
        return best, least

    def named(self, meant: Suspect, own: float, best: Suspect, least: float) -> Identification:
        """Return the identification of the chosen suspect, with the first token that was rotated wrongly."""
        cause = best.cause
        if best.cast:
            exact = self.sample.angles(replace(best, cast=""))
            error = float(np.abs(_wrapped(self.sample.angles(best) - exact)).max(initial=0))
            cause += f": their error is up to {error:.2g} rad at id {np.abs(self.ids).max():g}"
        rotary = best.rotary if best.sign > 0 and not best.cast else None
        wrong = self._first_wrong(meant, best, 3 * max(self.noise, least) + 1e-4)
        return Identification(False, rotary, cause, best.remedy, least, own, wrong, best.kind or best.cause)

    def as_meant(self, residual: float) -> Identification:
        """Return the identification of the intended rotation, perhaps with a wrong attention factor or wrong tokens."""
        meant = self.keys.rotary
        if self.keys.token is None and abs(self.scale / meant.attention_factor - 1) > FACTOR:
            cause = f"cos and sin are multiplied by {self.scale:.4g}, not by {meant.attention_factor:.4g}"
            remedy = "multiply cos and sin by the attention factor of the config's scaling, once"
            return Identification(False, None, cause, remedy, residual, residual, self.first_unexplained, remedy)
        cause, remedy = AS_MEANT, "nothing"
        if self.first_unexplained is not None:
            count = counted(int(self.unexplained.sum()), "token")
            cause += f", except those of {count} (first: {self.first_unexplained})"
            remedy = "check how these tokens enter the cache: with other ids, or without the attention factor"
        return Identification(True, meant, cause, remedy, residual, residual, self.first_unexplained, AS_MEANT)

    @cached_property
    def unexplained(self) -> Flags:
        """(tokens,) whether a key does not match the intended rotation by its ids."""
        return follow(self.keys, ids=self.ids - self.zero).unexplained(self.keys.rounding)

    @property
    def first_unexplained(self) -> int | None:
        """The first unexplained token."""
        return int(self.unexplained.argmax()) if self.unexplained.any() else None

    def believed(self, suspect: Suspect) -> bool:
        """Return whether to trust a suspect: not if the intended rotation, with other ids, explains the keys better.

        With slow pairs, slightly wrong ids look like another rotation; but only ids explain the keys down to the noise.
        """
        free = follow(read_keys(self.sample.tokens, self.keys.rotary, self.keys.reference))
        good = free.alike & ~free.unexplained(self.keys.rounding)
        if good.mean() < MOST:
            return True
        noise = max(float(np.median(free.residual[good])), self.noise)
        if noise > 3 * self.noise + ROUNDED:
            return True
        residual = np.sqrt(self.sample.squares(suspect)[good])
        return bool((residual**2).mean() <= (3 * noise + 1e-4) ** 2 and residual.max() <= 6 * noise + EXPLAINED)

    def _first_wrong(self, meant: Suspect, best: Suspect, limit: float) -> int | None:
        """Find the first token with a residual above the limit for the intended rotation, but not for the best one."""
        stop = 0
        for block in self.keys.blocks():
            start, stop = stop, stop + len(block)
            sample = _Sample(self.keys, block, self.ids[:, start:stop], self.zero)
            with np.errstate(invalid="ignore"):
                wrong = (sample.squares(meant) > limit**2) & (sample.squares(best) <= limit**2)
            if wrong.any():
                return start + int(wrong.argmax())
        return None

    @cached_property
    def noise(self) -> float:
        """Median noise of keys in rad, from the lengths of their pairs; at most FITS / 3."""
        turned = self.sample.turned(self.keys.rotary)
        with np.errstate(over="ignore"):  # if most keys were never written
            off = (turned.lengths / self.scale - 1) ** 2
            squares = np.tensordot(off, turned.weights / turned.weights.sum(), 2)
        return min(float(np.sqrt(np.median(squares))), FITS / 3)

    @property
    def close(self) -> float:
        """Largest residual in rad of a rotation that explains the keys down to their noise."""
        return 3 * self.noise + 1e-4

    @cached_property
    def scale(self) -> float:
        """Median ratio of the lengths of rotated and unrotated pairs."""
        turned = self.sample.turned(self.keys.rotary)
        lengths = np.tensordot(turned.lengths, turned.weights / turned.weights.sum(), 2)
        return max(float(np.median(lengths)), 1e-30)

    def _scaled(self, meant: Rotary) -> Iterator[Suspect]:
        """Yield rotations whose base, or a factor on all frequencies, is fitted to the keys."""
        base = meant.inv_freq_array
        if isinstance(meant.theta, float) and meant.theta > 1 and meant.inv_freq is None and meant.scaling is None:
            power = self.sample.scanned(meant, lambda value: base**value, (0.25, 3.0))  # θ^(−2j/d) to this power
            theta, remedy = meant.theta**power, "configure the engine with the theta of the config"
            cause = f"theta is about {theta:,.0f}, not {meant.theta:,.0f}"
            yield from if_valid(cause, remedy, meant, kind="theta differs", theta=theta)
        factor = self.sample.scanned(meant, lambda value: base * value, (1e-2, 1e2))
        integer = round(factor)
        if integer > 1:
            cause = f"all ids or all frequencies are {integer} times the intended ones"
            remedy = "count each token once, and scale frequencies as in the config"
            yield from if_valid(cause, remedy, meant, inv_freq=(base * integer).tolist(), **NO_THETA)
        cause = f"all frequencies are {factor:.5g} times the intended ones, or all ids are divided by {1 / factor:.5g}"
        inv_freq = (base * factor).tolist()
        yield from if_valid(cause, "", meant, kind="all frequencies are multiplied", inv_freq=inv_freq, **NO_THETA)

    def _by_pair(self, meant: Rotary) -> Iterator[Suspect]:
        """Yield the rotation with the intended frequencies and, for every pair, the axis that fits best."""
        sample = self.sample
        phases = np.angle(np.exp(1j * sample.turned(meant).phases).mean(axis=1))
        ids = np.concatenate([sample.ids - self.zero, np.zeros((1, sample.ids.shape[1]))])
        left = (_wrapped(phases[:, None] - ids.T[:, :, None] * meant.inv_freq_array) ** 2).mean(axis=0)
        axis = left.argmin(axis=0)
        axis[axis == meant.axes] = STILL
        own = np.take_along_axis(left, meant.pair_axis[None] % (meant.axes + 1), axis=0)[0]
        axis = np.where(own <= 2 * left.min(axis=0) + 4 * self.noise**2 + 1e-9, meant.pair_axis, axis)
        moved = np.flatnonzero(axis != meant.pair_axis)
        if moved.size:
            cause = f"{counted(moved.size, 'pair')} of {axis.size} (first: {moved[0]}) rotate by other axes: "
            cause += f"{_runs(axis[moved])} instead of {_runs(meant.pair_axis[moved])}"
            yield from of_axes(cause, meant, axis, kind="pairs rotate by other axes")


def _angles(suspect: Suspect, ids: Float64Array) -> Float64Array:
    """Compute the (tokens, kv_heads or 1, pairs) angles in rad of (axes, tokens) ids, as a suspect computes them."""
    rotary, frequencies = suspect.rotary, suspect.rotary.inv_freq_array
    dtype, _, values = suspect.cast.partition(" ")
    if values in ("ids", "angles"):
        ids = _cast(ids, dtype)
    if values in ("frequencies", "angles"):
        frequencies = _cast(frequencies, dtype)
    with np.errstate(invalid="ignore", over="ignore"):  # ids beyond float16
        angles = _by_pair(rotary, suspect.sign * ids) * frequencies
        return _cast(angles, dtype) if values in ("angles", "products") else angles


def _by_pair(rotary: Rotary, ids: Float64Array) -> Float64Array:
    """Expand (axes, tokens) ids to (tokens, kv_heads or 1, pairs)."""
    ids = rotary.pair_ids(ids)
    return np.moveaxis(ids[None] if ids.ndim == 2 else ids, 2, 0)


def _wrapped(rad: Float64Array) -> Float64Array:
    """Reduce angles to −π to π."""
    return rad - 2 * np.pi * np.rint(rad / (2 * np.pi))


def _cast(values: Float64Array, dtype: str) -> Float64Array:
    """Round values to bfloat16 or float16, halves to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _runs(axes: IntArray) -> str:
    """Format the axes of pairs, with equal neighbours merged.

    >>> _runs(np.array([0, 0, 2, 1, 1]))
    '0, 2, 1'
    """
    return ", ".join(str(axes[i]) for i in np.flatnonzero(np.concatenate([[True], axes[1:] != axes[:-1]])))
