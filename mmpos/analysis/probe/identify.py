"""Find out by which rotation keys were turned, where it is not the one that was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.mistakes import bfloat16
from mmpos.analysis.probe.keys import Keys, read_keys
from mmpos.analysis.probe.ladder import Flags
from mmpos.analysis.probe.reading import EXPLAINED, MOST, ROUNDED, follow
from mmpos.errors import InvalidInputError, MmposError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import axis_names
from mmpos.rotary import Rotary
from mmpos.rotary.allocation import ALLOCATIONS, HEADS, STILL
from mmpos.rotary.config import DEFAULT_THETA
from mmpos.rotary.frequencies import Float64Array
from mmpos.rotary.scaling import NTK, Llama3, Scaling, YaRN
from mmpos.support.cached import cached_property
from mmpos.support.checks import IntArray, counted, host_array, instance

THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7, 5e7, 1e8, 1e9)
"""Bases of deployed models."""

FACTORS = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
"""Factors of the scalings of deployed models."""

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Lengths that such models were trained with before they were scaled."""

FITS = 0.1
"""Most of noise, in rad, that a rotation leaves which the keys were turned by."""

UNEXPLAINED = "no rotation that is known explains the keys"

SAMPLE = 512
"""Tokens that are looked at where their ids are known: the first ones, and others spread over all."""

READ = 64
"""Tokens that are looked at, the first ones, where ids are not known."""


@dataclass(frozen=True)
class Identification:
    """The rotation that explains keys best.

    Args:
        as_meant: whether most keys were turned by the first candidate; ``first_wrong`` tells whether all were.
        rotary: the rotation; None where nothing known explains the keys, or none that a Rotary can describe.
        cause: what differs from the one that was meant, in words.
        remedy: what to change.
        residual: rad: root mean square of what it leaves unexplained.
        meant: rad: the same of the one that was meant.
        first_wrong: the first token, counted over all rows, whose key is not the one that was meant, where the ids are
            known: also set where only single keys are wrong.
    """

    as_meant: bool
    rotary: Rotary | None
    cause: str
    remedy: str
    residual: float
    meant: float
    first_wrong: int | None = None

    @property
    def named(self) -> bool:
        """Whether a rotation explains the keys."""
        return self.residual <= FITS and self.cause != UNEXPLAINED

    def __str__(self) -> str:
        if self.as_meant:
            return f"{self.cause[0].upper()}{self.cause[1:]}. It leaves {self.residual:.2g} rad."
        left = f"It leaves {self.residual:.2g} rad, the rotation that was meant {self.meant:.2g} rad."
        first = "" if self.first_wrong is None else f"The first token whose key is another is {self.first_wrong}. "
        return f"{first}Cause: {self.cause}. To do: {self.remedy}. {left}"


@dataclass(frozen=True)
class _Suspect:
    """A rotation, and what is wrong about it: ids are multiplied by sign, and cast with the frequencies."""

    cause: str
    remedy: str
    rotary: Rotary
    sign: int = 1
    cast: str = ""


def identify(
    keys: Any,
    candidates: Rotary | Sequence[Rotary],
    positions: PositionTable | npt.ArrayLike | None = None,
    *,
    reference: Any = None,
    lengths: npt.ArrayLike | None = None,
) -> Identification:
    """Find the rotation that keys were turned by, and say how it differs from the one that was meant.

    With the ids that are known to be right each suspect predicts every key, so that a wrong base, axis or direction and
    angles of few bits show. Without them a suspect is judged by whether any ids explain the keys, which does not tell
    what ids themselves could explain: the direction, and axes that are exchanged or stand for each other.

    Args:
        keys: as ``read`` takes them, of tokens with one hidden state.
        candidates: the rotary that was meant, or several, of which the first was.
        positions: the tokens' ids: a table, or (axes, tokens) integers or floats.
        reference: as ``read`` takes it.
        lengths: likewise.

    Raises:
        InvalidInputError: as for ``read``; positions of another shape than the keys; no candidate.
    """
    rotaries = [candidates] if isinstance(candidates, Rotary) else [*candidates]
    if not rotaries:
        raise InvalidInputError("candidates: got none, want the Rotary that was meant")
    for number, rotary in enumerate(rotaries):
        instance(f"candidates[{number}]", rotary, Rotary, "mmpos.rotary.Rotary")
    meant, *others = rotaries
    state = read_keys(keys, meant, reference, lengths)
    ids = None if positions is None else _ids(positions, meant.axes, state.num_tokens)
    judged = _Judge(state, ids)
    first = _Suspect("the keys were turned by the rotation that was meant", "nothing", meant)
    own = judged.residual(first)
    if own <= 3 * judged.noise + 1e-4:
        return judged.as_meant(own)
    best, least = first, own
    for suspect in (*_others(others), *_suspects(meant, ids is not None)):
        found = judged.residual(suspect)
        if found < 0.9 * least and (best is not first or least > FITS or found < 0.5 * least):
            best, least = suspect, found
    if ids is not None and (best is first or least > 3 * judged.noise + 1e-4):
        share = 1.0 if least > FITS else 0.5  # slow pairs fit whatever they are said to do
        for suspect in (*judged.by_pair(meant), *judged.ladders(meant)):
            found = judged.residual(suspect)
            if found < share * least:
                best, least, share = suspect, found, min(share, 0.9)
    if best is not first and (least > FITS or not judged.believed(best)):
        best = first
    if best is first and own <= 3 * judged.noise + ROUNDED:
        return judged.as_meant(own)
    if best is not first:
        cause, plain = best.cause, best.sign > 0 and not best.cast
        if best.cast and ids is not None:
            cause = f"{cause}: they err by up to {judged.error(best):.2g} rad at id {np.abs(ids).max():g}"
        wrong = judged.first_wrong(first, best, 3 * max(judged.noise, least) + 1e-4)
        return Identification(False, best.rotary if plain else None, cause, best.remedy, least, own, wrong)
    remedy = "look whether all tokens had one hidden state and whether the ids are right"
    if ids is None:
        remedy = "give the ids that are right as positions"
    wrong_tokens = np.flatnonzero(judged.unexplained)
    wrong = int(wrong_tokens[0]) if wrong_tokens.size else None
    return Identification(False, None, UNEXPLAINED, remedy, own, own, wrong)


def _ids(positions: PositionTable | npt.ArrayLike, axes: int, tokens: int) -> Float64Array:
    if isinstance(positions, PositionTable):
        ids = positions.dense(dtype=np.float64)
    else:
        ids = np.asarray(host_array("positions", positions), np.float64)
    if ids.shape != (axes, tokens):
        raise InvalidInputError(f"positions: got shape {ids.shape}, want ({axes}, {tokens}), as rotary and keys have")
    return ids


def _others(rotaries: Sequence[Rotary]) -> Iterator[_Suspect]:
    for number, rotary in enumerate(rotaries, start=1):
        yield _Suspect(f"the keys were turned by candidates[{number}]", "make the engine take the first one", rotary)


def _suspects(meant: Rotary, with_ids: bool) -> Iterator[_Suspect]:
    """Yield what engines are known to do instead; those that ids would explain only where ids are known."""
    other: Literal["half", "adjacent"] = "adjacent" if meant.pairing == "half" else "half"
    remedy = f"pair channels as {meant.pairing!r} says"
    yield _Suspect(f"pairs are {other!r}, not {meant.pairing!r}", remedy, replace(meant, pairing=other))
    yield from _dims(meant)
    if meant.head_axes is None:
        yield from _allocations(meant, with_ids)
    if with_ids:
        yield _Suspect("pairs turn backwards", "rotate by the positive angle: x·cos − y·sin, y·cos + x·sin", meant, -1)
        for cast in ("bfloat16", "float16"):
            remedy = "make angles, cos and sin in float32 or by exact turns, and cast them last"
            yield _Suspect(f"angles are made in {cast}", remedy, meant, cast=f"{cast} angles")
            yield _Suspect(f"angles are cast to {cast}", remedy, meant, cast=f"{cast} products")
            yield _Suspect(f"ids are cast to {cast} before they meet frequencies", remedy, meant, cast=f"{cast} ids")
            yield _Suspect(f"frequencies are held in {cast}", remedy, meant, cast=f"{cast} frequencies")
    if meant.inv_freq is None and isinstance(meant.theta, float):
        for theta in THETAS:
            if theta != meant.theta:
                cause = f"theta is {theta:,.0f}, not {meant.theta:,.0f}"
                yield from _if_made(cause, "give the engine the theta of the config", meant, theta=theta)
                if meant.scaling is not None:
                    yield from _if_made(f"{cause}, and the scaling is left out", "", meant, theta=theta, scaling=None)
        yield from _scalings(meant, with_ids)


def _scalings(meant: Rotary, with_ids: bool) -> Iterator[_Suspect]:
    """Yield other scalings of the frequencies; some where none was meant, if ids are known."""
    mine: Any = meant.scaling
    remedy = "apply the scaling of the config to the frequencies"
    if mine is None:
        for factor in FACTORS if with_ids else ():
            others = [NTK(factor), Llama3(factor, 1.0, 4.0, 8192), *(YaRN(factor, length) for length in LENGTHS)]
            for other in others:
                cause = f"the scaling {other.name!r} by {factor:g}{_from(other)} is applied, and none was meant"
                yield from _if_made(cause, "scale no frequencies, as the config says", meant, scaling=other)
        return
    yield from _if_made(f"the scaling {mine.name!r} is left out", remedy, meant, scaling=None)
    for field, values in (("factor", FACTORS), ("original_max_position", LENGTHS)):
        own = getattr(mine, field, None)
        for value in values if isinstance(own, int | float) else ():
            if value != own:
                cause = f"{field} of the scaling {mine.name!r} is {value:,g}, not {own:,g}"
                yield from _if_made(cause, remedy, meant, scaling=replace(mine, **{field: value}))
    if isinstance(mine, YaRN):
        scaling = replace(mine, truncate=not mine.truncate)
        cause = f"YaRN's ramp begins and ends {'at' if scaling.truncate else 'between'} whole pairs"
        yield from _if_made(cause, "let YaRN take truncate from the config", meant, scaling=scaling)


def _from(scaling: Scaling) -> str:
    length = getattr(scaling, "original_max_position", None)
    return "" if length is None else f" from {length:,} positions"


def _dims(meant: Rotary) -> Iterator[_Suspect]:
    """Yield other numbers of channels that turn, with sections in proportion."""
    for size in sorted({meant.head_dim * quarters // 4 for quarters in range(1, 5)} - {meant.rotary_dim}):
        section = meant.mrope_section and [each * size // meant.rotary_dim for each in meant.mrope_section]
        cause = f"{size} channels of a head turn, not {meant.rotary_dim}"
        remedy = f"turn the first {meant.rotary_dim} channels of a head, and leave the others"
        yield from _if_made(cause, remedy, meant, rotary_dim=size, mrope_section=section)


def _vector(cause: str, meant: Rotary, axis: IntArray) -> Iterator[_Suspect]:
    """Yield the rotation whose pairs keep their frequencies and have these axes."""
    change = {"allocation": axis.tolist(), "mrope_section": None, "axes_dim": None, "theta": DEFAULT_THETA}
    remedy = "give each pair the axis that the config says: Rotary.pair_axis has them"
    yield from _if_made(cause, remedy, meant, **change, scaling=None, inv_freq=meant.inv_freq_array.tolist())


def _if_made(cause: str, remedy: str, meant: Rotary, **change: Any) -> Iterator[_Suspect]:
    try:
        yield _Suspect(cause, remedy or "give the engine the rope parameters of the config", replace(meant, **change))
    except MmposError:
        return


def _allocations(meant: Rotary, with_ids: bool) -> Iterator[_Suspect]:
    """Yield other axes of pairs: by name, exchanged, dropped."""
    mine = meant.allocation if isinstance(meant.allocation, str) else "a vector"
    section = meant.mrope_section or _shares(meant.pair_axis, meant.axes)
    remedy = "give each pair the axis that the config says: Rotary.pair_axis has them"
    names, axis = axis_names(meant.axes), meant.pair_axis
    for name in sorted(ALLOCATIONS, key=lambda name: meant.mrope_section is None or name != "sections"):
        if name not in (meant.allocation, HEADS):
            told = section if name in ("sections", "mrope-interleaved") else None
            change = {"allocation": name, "mrope_section": told, "axes_dim": None}
            yield from _if_made(f"pairs are allocated as {name!r}, not as {mine!r}", remedy, meant, **change)
    vectors: dict[str, IntArray] = {}
    if with_ids:
        for a, name in enumerate(names):
            vectors[f"all pairs turn by axis {a} ({name}): the other axes are dropped"] = np.where(axis < 0, axis, a)
            for b, instead in enumerate(names):
                if a != b and meant.axes > 2:
                    vectors[f"pairs of axis {a} ({name}) turn by axis {b} ({instead}), which counts twice"] = np.where(
                        axis == a, b, axis
                    )
        for order in permutations(range(meant.axes)) if meant.axes <= 4 else ():
            if list(order) != sorted(order):
                came = ", ".join(names[a] for a in order)
                exchanged = np.array([*order, STILL])[axis]
                vectors[f"axes are exchanged: pairs of ({', '.join(names)}) turn by ({came})"] = exchanged
    for a, name in enumerate(names):
        vectors[f"pairs of axis {a} ({name}) do not turn"] = np.where(axis == a, STILL, axis)
    for cause, vector in vectors.items():
        yield from _vector(cause, meant, vector)


def _shares(axis: IntArray, axes: int) -> list[int]:
    return [int((axis == a).sum()) for a in range(axes)]


class _Judge:
    """Measures what rotations leave unexplained of keys.

    Args:
        keys: what was turned.
        ids: (axes, tokens) by which; None if that is not known.
    """

    def __init__(self, keys: Keys, ids: Float64Array | None) -> None:
        tokens = np.arange(min(keys.num_tokens, READ))
        if ids is not None:
            spread = np.linspace(0, keys.num_tokens - 1, min(keys.num_tokens, SAMPLE)).astype(np.int64)
            tokens = np.unique(np.concatenate([tokens, spread]))
        sample = keys.take(tokens)
        finite = np.isfinite(sample).all(axis=(1, 2))
        self.keys, self.sample, self.ids, self.all_ids = keys, sample[finite], None, ids
        if ids is not None:
            self.ids = ids[:, tokens[finite]]
            self.zero = ids[:, [keys.token]] if keys.token is not None else np.zeros((len(ids), 1))

    def residual(self, suspect: _Suspect) -> float:
        """Return the root mean square, in rad, of what is left of the keys' angles."""
        if self.ids is None:
            return self._readable(suspect.rotary)
        return float(np.sqrt(self._squares(suspect).mean()))

    @cached_property
    def unexplained(self) -> Flags:
        """(tokens,) which of all keys are not what the rotation that was meant makes of the ids."""
        if self.all_ids is None:
            return np.zeros(self.keys.num_tokens, np.bool_)
        return follow(self.keys, ids=self.all_ids - self.zero).unexplained(self.keys.rounding)

    def believed(self, suspect: _Suspect) -> bool:
        """Tell whether a rotation leaves as little as other ids would, where these explain the keys as they are meant.

        Ids that are a little off, with slow pairs, are nearly another rotation: the ids explain them to the noise.
        """
        if self.ids is None:
            return True
        free = follow(read_keys(self.sample, self.keys.rotary, self.keys.reference, None))
        good = free.alike & ~free.unexplained(self.keys.rounding)
        if good.mean() < MOST:
            return True
        noise = max(float(np.median(free.residual[good])), self.noise)
        if noise > 3 * self.noise + ROUNDED:
            return True
        left = np.sqrt(self._squares(suspect)[good])
        return bool((left**2).mean() <= (3 * noise + 1e-4) ** 2 and left.max() <= 6 * noise + EXPLAINED)

    def first_wrong(self, meant: _Suspect, found: _Suspect, limit: float) -> int | None:
        """Find the first token of all of which the rotation that was meant leaves more rad than the limit.

        It counts only if the rotation that was found leaves less.
        """
        if self.all_ids is None:
            return None
        block, stop = copy(self), 0
        for block.sample in self.keys.blocks():
            start, stop = stop, stop + len(block.sample)
            block.ids = self.all_ids[:, start:stop]
            with np.errstate(invalid="ignore"):
                wrong = block._squares(meant) > limit**2
                if wrong.any():
                    wrong &= block._squares(found) <= limit**2
            if wrong.any():
                return start + int(wrong.argmax())
        return None

    def as_meant(self, residual: float) -> Identification:
        """Say that the rotation is the one that was meant, but for a factor on cos and sin, or for single tokens."""
        meant = self.keys.rotary
        if self.keys.token is None and abs(self.scale() / meant.attention_factor - 1) > 0.02:
            cause = f"cos and sin are multiplied by {self.scale():.4g}, not by {meant.attention_factor:.4g}"
            remedy = "multiply cos and sin by the attention factor of the config's scaling, once"
            return Identification(False, None, cause, remedy, residual, residual)
        cause = "the keys were turned by the rotation that was meant"
        wrong, remedy, first = int(self.unexplained.sum()), "nothing", None
        if wrong:
            first = int(self.unexplained.argmax())
            cause += f", but for those of {counted(wrong, 'token')}, the first {first}"
            remedy = "look how such tokens enter the cache: with other ids, or without the attention factor"
        return Identification(True, meant, cause, remedy, residual, residual, first)

    @cached_property
    def noise(self) -> float:
        """Noise of most keys in rad, by the lengths of their pairs; no more than a rotation that fits may leave."""
        lengths = np.abs(self._phasors(self.keys.rotary)) / self.scale()
        weights = np.abs(self.keys.pairs(self.keys.reference))
        with np.errstate(over="ignore"):  # where most keys were never written
            squares = np.tensordot((lengths - 1) ** 2, weights / weights.sum(), 2)
        return min(float(np.sqrt(np.median(squares))), FITS / 3)

    def error(self, suspect: _Suspect) -> float:
        """Return the largest angle, in rad, between a suspect and the rotation that was meant, at the ids."""
        exact = self._angles(replace(suspect, cast=""))
        off = np.abs(np.angle(np.exp(1j * (self._angles(suspect) - exact))))
        return float(off.max(initial=0))

    def ladders(self, meant: Rotary) -> Iterator[_Suspect]:
        """Yield the rotations whose base, or whose one factor on all frequencies, is fitted to the keys."""
        base, plain = meant.inv_freq_array, {"theta": DEFAULT_THETA, "scaling": None}
        if isinstance(meant.theta, float) and meant.theta > 1 and meant.inv_freq is None and meant.scaling is None:
            power = self._scanned(meant, lambda value: base**value, (0.25, 3.0))  # θ^(−2j/d) to this power
            theta = meant.theta**power
            cause = f"theta is about {theta:,.0f}, not {meant.theta:,.0f}"
            yield from _if_made(cause, "give the engine the theta of the config", meant, theta=theta)
        factor = self._scanned(meant, lambda value: base * value, (1e-2, 1e2))
        whole = round(factor)
        if whole > 1:
            cause = f"all ids are {whole} times those that were meant, or all frequencies are"
            remedy = "count each token once, and scale frequencies as the config says"
            yield from _if_made(cause, remedy, meant, inv_freq=(base * whole).tolist(), **plain)
        cause = f"all frequencies are {factor:.5g} times those that were meant, as ids over {1 / factor:.5g} would be"
        yield from _if_made(cause, "", meant, inv_freq=(base * factor).tolist(), **plain)

    def by_pair(self, meant: Rotary) -> Iterator[_Suspect]:
        """Yield the rotation in which every pair has its frequency and the axis that fits it best."""
        if meant.head_axes is not None or self.ids is None:
            return
        phasors = self._unit(meant).mean(axis=1)
        ids = np.concatenate([self.ids - self.zero, np.zeros((1, self.ids.shape[1]))])
        angles = ids.T[:, :, None] * meant.inv_freq_array
        left = (np.angle(phasors[:, None] * np.exp(-1j * angles)) ** 2).mean(axis=0)
        axis = left.argmin(axis=0)
        axis[axis == meant.axes] = STILL
        own = np.take_along_axis(left, meant.pair_axis[None] % (meant.axes + 1), axis=0)[0]
        axis = np.where(own <= 2 * left.min(axis=0) + 4 * self.noise**2 + 1e-9, meant.pair_axis, axis)
        moved = np.flatnonzero(axis != meant.pair_axis)
        if moved.size:
            cause = f"{counted(moved.size, 'pair')} of {axis.size}, the first {moved[0]}, turn by other axes: "
            cause += f"{_runs(axis[moved])} instead of {_runs(meant.pair_axis[moved])}"
            yield from _vector(cause, meant, axis)

    def scale(self) -> float:
        """Return how much longer the turned pairs of most tokens are than those of a key that was not turned."""
        weights = np.abs(self.keys.pairs(self.keys.reference))
        lengths = np.tensordot(np.abs(self._phasors(self.keys.rotary)), weights / weights.sum(), 2)
        return max(float(np.median(lengths)), 1e-30)

    def _scanned(
        self, meant: Rotary, frequencies: Callable[[float], Float64Array], bounds: tuple[float, float]
    ) -> float:
        """Find the value whose frequencies fit, first to tokens near the reference, then further and finer."""
        assert self.ids is not None
        distance = np.abs(self.ids - self.zero).max(axis=0)
        unit, ids = self._unit(meant), _by_pair(meant, self.ids - self.zero)
        grid, reach = np.geomspace(*bounds, 1000), max(16.0, float(distance.min()))
        while True:
            near = distance <= reach
            turned = [np.exp(-1j * ids[near] * frequencies(value)) for value in grid.tolist()]
            value = float(grid[int(np.argmax([(unit[near] * each).real.mean() for each in turned]))])
            fine = grid[1] / grid[0] - 1
            if reach > distance.max() and fine * distance.max() < 1e-3:
                return value
            grid, reach = value * np.exp(np.linspace(-2, 2, 33) * np.log(grid[1] / grid[0])), 4 * reach

    def _phasors(self, rotary: Rotary) -> npt.NDArray[np.complex64]:
        """(tokens, kv_heads, pairs) how far pairs turned from the reference, those without length left at 1."""
        keys = replace(self.keys, rotary=rotary)
        reference, pairs = keys.pairs(keys.reference), keys.pairs(self.sample)
        square = np.abs(reference) ** 2
        return np.where(square > 1e-6 * square.max(), pairs * reference.conj() / np.maximum(square, 1e-30), 1)

    def _angles(self, suspect: _Suspect) -> Float64Array:
        """(tokens, kv_heads or 1, pairs) rad from the reference."""
        assert self.ids is not None
        there, here = (_turned(suspect, ids) for ids in (self.ids, self.zero))
        with np.errstate(invalid="ignore"):
            angles = there - here if self.keys.token is not None else there
        return np.where(np.isfinite(angles), angles, np.pi)

    def _unit(self, rotary: Rotary) -> npt.NDArray[np.complex64]:
        phasors = self._phasors(rotary)
        length = np.abs(phasors)
        return np.where(length > 0, phasors / np.where(length > 0, length, 1), 1)

    def _squares(self, suspect: _Suspect) -> Float64Array:
        """Return (tokens,) the mean square of what is left in rad, pairs weighted by their lengths.

        Channels that do not turn count by what they are off.
        """
        keys = replace(self.keys, rotary=suspect.rotary)
        off = np.angle(self._unit(suspect.rotary) * np.exp(-1j * self._angles(suspect)))
        weights = np.abs(keys.pairs(keys.reference))
        weights *= weights > 1e-3 * weights.max()  # as _phasors leaves the others
        still = slice(suspect.rotary.rotary_dim, None)
        plain = np.abs(keys.reference[:, still])
        moved = np.abs(self.sample[..., still] - keys.reference[:, still])
        moved = np.minimum(moved / np.maximum(plain, 1e-30), np.pi)
        off, weights = np.concatenate([off, moved], axis=-1), np.concatenate([weights, plain], axis=-1)
        return np.tensordot(off**2, weights, 2) / weights.sum()

    def _readable(self, rotary: Rotary) -> float:
        """Return what a reading leaves, and half a turn where tokens are not alike."""
        residual = follow(read_keys(self.sample, rotary, self.keys.reference, None)).residual
        alike = np.isfinite(residual)
        return float(np.sqrt(np.mean(residual[alike] ** 2))) if alike.mean() > 0.9 else float(np.pi)


def _turned(suspect: _Suspect, ids: Float64Array) -> Float64Array:
    """Compute (tokens, kv_heads or 1, pairs) rad as a suspect has them."""
    rotary, frequencies = suspect.rotary, suspect.rotary.inv_freq_array
    kind, _, what = suspect.cast.partition(" ")
    if what in ("ids", "angles"):
        ids = _cast(ids, kind)
    if what in ("frequencies", "angles"):
        frequencies = _cast(frequencies, kind)
    with np.errstate(invalid="ignore", over="ignore"):  # ids beyond float16
        angles = _by_pair(rotary, suspect.sign * ids) * frequencies
        return _cast(angles, kind) if what in ("angles", "products") else angles


def _by_pair(rotary: Rotary, ids: Float64Array) -> Float64Array:
    """Lay (axes, tokens) ids out as (tokens, kv_heads or 1, pairs)."""
    ids = rotary.pair_ids(ids)
    return np.moveaxis(ids[None] if ids.ndim == 2 else ids, 2, 0)


def _cast(values: Float64Array, kind: str) -> Float64Array:
    with np.errstate(over="ignore"):
        return bfloat16(values) if kind == "bfloat16" else values.astype(np.float16).astype(np.float64)


def _runs(axes: IntArray) -> str:
    """Write the axes of pairs, equal neighbours once.

    >>> _runs(np.array([0, 0, 2, 1, 1]))
    '0, 2, 1'
    """
    return ", ".join(str(axes[i]) for i in np.flatnonzero(np.concatenate([[True], axes[1:] != axes[:-1]])))
