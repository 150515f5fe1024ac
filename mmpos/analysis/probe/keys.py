"""Keys of tokens with one hidden state as phasors: how far every pair turned from a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.probe.ladder import Ladder, Phasors
from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Exact, Float32Array, fixed_point_turns
from mmpos.support.checks import Array, IntArray, host_array, instance, int_array, integer

BLOCK = 4096
"""Tokens that are read at a time."""

ALIKE = 0.15
"""Most that the lengths of a token's pairs may be off, relative, on average over the pairs."""


LARGEST = 1e15
"""Largest number of a reference whose squares float32 holds."""


class UnwrittenError(InvalidInputError):
    """The token that ids are relative to was never written."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of tokens, padding left out, and the key that they are compared with.

    Args:
        rows: (batch, tokens, kv_heads, head_dim) as they came: numpy, or torch on any device.
        lengths: (batch,) tokens of each row that count, the first ones.
        rotary: what should have turned them.
        reference: (kv_heads, head_dim) float32.
        token: the token that is the reference, None for a key that was not turned.
    """

    rows: Any
    lengths: IntArray
    rotary: Rotary
    reference: Float32Array
    token: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return int(self.lengths.sum())

    def blocks(self) -> Iterator[Float32Array]:
        """Yield (tokens, kv_heads, head_dim) float32, at most BLOCK tokens at a time."""
        for row, length in zip(self.rows, self.lengths.tolist(), strict=True):
            for start in range(0, length, BLOCK):
                yield _float32(row[start : min(start + BLOCK, length)])

    def take(self, tokens: IntArray) -> Float32Array:
        """Return the keys of these tokens, counted over all rows: (tokens, kv_heads, head_dim) float32."""
        ends = np.cumsum(self.lengths)
        row = np.searchsorted(ends, tokens, side="right")
        column = tokens - (ends - self.lengths)[row]
        return np.concatenate([_float32(self.rows[r][column[row == r]]) for r in np.unique(row)])

    @property
    def rounding(self) -> float:
        """Noise in rad of numbers as coarse as these, by the least relative step between the numbers of a head.

        Root mean square of two numbers that are off by up to half a step each. Pairs that turn by less than a step do
        not move at all, so what is left of their angles does not show it.
        """
        some = np.abs(next(self.blocks())[:: max(1, min(self.num_tokens, BLOCK) // 64)])
        steps = [1.0]
        for head in np.moveaxis(some, 1, 0):
            numbers = np.unique(head[np.isfinite(head) & (head > 0)])
            steps.append(float((np.diff(numbers) / numbers[1:]).min(initial=1.0)))
        return min(steps) / 6**0.5

    @property
    def exchanged(self) -> bool:
        """Whether heads differ by turns alone, as tokens should, and tokens do not."""
        some = next(self.blocks())[:64]
        by_token = self.pairs(some[np.isfinite(some).all(axis=(1, 2))])

        def differ_by_turns(pairs: Phasors) -> bool:
            first, others = pairs[:1], pairs[1:]
            off = np.abs(np.abs(others) - np.abs(first)) / np.maximum(np.abs(first), 1e-30)
            turned = np.abs(others - first) > ALIKE * np.abs(first)
            return others.size > 0 and bool(np.median(off) <= ALIKE and turned.any())

        return differ_by_turns(by_token.swapaxes(0, 1)) and not differ_by_turns(by_token)

    def pairs(self, keys: Float32Array) -> Phasors:
        """View (…, kv_heads, head_dim) keys as (…, kv_heads, pairs) complex numbers."""
        pairs = self.rotary.num_pairs
        if self.rotary.pairing == "adjacent":
            return np.ascontiguousarray(keys[..., : 2 * pairs]).view(np.complex64)
        out = np.empty((*keys.shape[:-1], pairs), np.complex64)
        out.real, out.imag = keys[..., :pairs], keys[..., pairs : 2 * pairs]
        return out

    def axes(self) -> list[Axis]:
        """Return the pairs of every axis, and of axis −1 where some do not turn, last."""
        rotary = self.rotary
        reference = self.pairs(self.reference)
        by_head = np.broadcast_to(rotary.pair_axis, reference.shape)
        turns, inv_freq = rotary.turns, rotary.inv_freq_array
        if rotary.precision == "hf":
            inv_freq = rotary.inv_freq_float32.astype(np.float64)
            turns = fixed_point_turns(Exact().array(inv_freq.tolist()))
        found = []
        for axis in (*range(rotary.axes), -1):
            mine = by_head == axis
            if axis >= 0:
                mine = mine & (inv_freq != 0)
            length = np.sqrt((np.abs(reference) ** 2 * mine).sum(axis=0, dtype=np.float64))
            columns = np.flatnonzero(length > 1e-3 * max(length.max(initial=0), 1e-30))
            heads = np.flatnonzero(mine.any(axis=1))
            back = (reference * mine)[np.ix_(heads, columns)].conj() / length[columns] ** 2
            ladder = Ladder(turns[columns], inv_freq[columns], length[columns])
            found.append(Axis(axis, heads, columns, back.astype(np.complex64), ladder))
        return found if (by_head == -1).any() else found[:-1]


@dataclass(frozen=True, eq=False)
class Axis:
    """The pairs of one axis.

    Args:
        axis: which one; −1 for pairs that do not turn.
        heads: (heads,) kv heads that have such pairs.
        columns: (pairs,) which pairs these are.
        back: (heads, pairs) what turns a token's pairs back by the reference's, and sums them over heads to length 1.
        ladder: their frequencies and weights.
    """

    axis: int
    heads: IntArray
    columns: IntArray
    back: Phasors
    ladder: Ladder

    def phasors(self, pairs: Phasors) -> Phasors:
        """Compute (tokens, pairs) how far the pairs of (tokens, kv_heads, all pairs) turned from the reference."""
        if self.heads.size == 1:
            with np.errstate(invalid="ignore", over="ignore"):
                return np.take(pairs[:, self.heads[0]], self.columns, axis=1) * self.back[0]
        mine = pairs if self.heads.size == pairs.shape[1] else pairs[:, self.heads]
        return np.einsum("thp,hp->tp", np.take(mine, self.columns, axis=2), self.back)


def as_one_head(keys: Any, rotary: Rotary, reference: Any) -> tuple[Any, Rotary, Any]:
    """View keys whose heads share one layout as keys of one long head, whose pairs are neighbours; others as they are.

    Args:
        keys: (..., kv_heads, head_dim), as ``read`` takes them.
        rotary: what should have turned them.
        reference: a token, a key of (kv_heads, head_dim), or None.

    Returns:
        Keys, rotary and reference of one head.
    """
    if not isinstance(rotary, Rotary) or rotary.kv_heads is None:
        return keys, rotary, reference
    heads, channels, turning = rotary.kv_heads, rotary.head_dim, rotary.rotary_dim

    def joined(name: str, given: Any) -> Any:
        array = given if hasattr(given, "detach") else host_array(name, given)
        if len(array.shape) < 2 or tuple(array.shape[-2:]) != (heads, channels):
            got = f"{name}: got shape {tuple(array.shape)}"
            raise InvalidInputError(f"{got}, want (…, {heads}, {channels}), kv_heads and head_dim of rotary")
        array = array[..., :turning]
        if rotary.pairing == "half":
            array = array.reshape(*array.shape[:-1], 2, turning // 2).swapaxes(-1, -2)
        return array.reshape(*array.shape[: len(given.shape) - 2], 1, heads * turning)

    alone = reference is None or isinstance(reference, int | np.integer)
    whole = replace(rotary, head_dim=heads * turning, rotary_dim=heads * turning, kv_heads=None, pairing="adjacent")
    return joined("keys", keys), whole, reference if alone else joined("reference", reference)


def read_keys(keys: Any, rotary: Rotary, reference: Any, lengths: npt.ArrayLike | None) -> Keys:
    """Check keys, lengths and reference; see ``read``."""
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    array = keys if hasattr(keys, "detach") else host_array("keys", keys)
    _check_floats("keys", array)
    shape = tuple(array.shape)
    if len(shape) not in (3, 4) or shape[-1] != rotary.head_dim:
        want = f"(tokens, kv_heads, {rotary.head_dim}) or (batch, tokens, kv_heads, {rotary.head_dim})"
        raise InvalidInputError(f"keys: got shape {shape}, want {want}; a cache is transposed and unpaged first")
    rows = array if len(shape) == 4 else array[None]
    batch, tokens, kv_heads, _ = rows.shape
    if not batch * tokens * kv_heads:
        raise InvalidInputError(f"keys: got shape {shape}, want at least one token and one head")
    if rotary.head_axes is not None and len(rotary.head_axes) != kv_heads:
        raise InvalidInputError(f"keys: got {kv_heads} kv heads, want {len(rotary.head_axes)}, as head_axes has")
    counts = np.full(batch, tokens) if lengths is None else int_array("lengths", lengths, (batch,))
    if counts.min() < 0 or counts.max() > tokens or not counts.any():
        got = f"lengths: got {counts.tolist()}"
        raise InvalidInputError(f"{got}, want 0 to {tokens} tokens of each row, and one at least")
    found = Keys(rows, counts, rotary, np.empty((0, 0), np.float32), None)
    if reference is None or isinstance(reference, int | np.integer):
        token = integer("reference", 0 if reference is None else reference, minimum=0, maximum=int(counts.sum()) - 1)
        (known,) = found.take(np.array([token]))
        found, name = replace(found, reference=known, token=token), f"reference: token {token}"
    else:
        name = "reference"
        given = reference if hasattr(reference, "detach") else host_array("reference", reference)
        _check_floats("reference", given)
        if tuple(given.shape) != (kv_heads, rotary.head_dim):
            raise InvalidInputError(
                f"reference: got shape {tuple(given.shape)}, want a token, or a key ({kv_heads}, {rotary.head_dim})"
            )
        found = replace(found, reference=_float32(given))
    known = found.reference
    if not np.isfinite(known).all() or not known[:, : rotary.rotary_dim].any():
        what = "NaN or infinity" if known.any() else "nothing but zeros"
        wrong = InvalidInputError if found.token is None else UnwrittenError
        raise wrong(f"{name}: got {what}, want a key of finite numbers, not all zero in channels that turn")
    largest = float(np.abs(known[:, : rotary.rotary_dim]).max())
    if not 1 / LARGEST <= largest <= LARGEST:
        got = f"numbers up to {largest:.2g} in channels that turn"
        raise InvalidInputError(f"{name}: got {got}, want {1 / LARGEST:.0e} to {LARGEST:.0e}: scale the keys")
    return found


def _check_floats(name: str, array: Any) -> None:
    words = str(array.dtype).removeprefix("torch.")
    if words.startswith(("float", "bfloat")):
        return
    raise InvalidInputError(
        f"{name}: got dtype {words}, want floats; quantised keys are multiplied by their scales first"
    )


def _float32(array: Array | Any) -> Float32Array:
    if hasattr(array, "detach"):
        array = array.detach().float().cpu().numpy()
    with np.errstate(over="ignore"):  # infinity is told from numbers later
        return np.asarray(array, np.float32)
