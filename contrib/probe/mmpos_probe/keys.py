"""Keys of tokens with the same hidden state, as phasors: the rotation of every pair relative to a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Rotary
from mmpos_probe.ladder import Ladder, Phasors
from mmpos_probe.words import Array, Float32Array, IntArray, host_array

BLOCK = 4096
"""Number of tokens that are read at a time."""

ALIKE = 0.15
"""Largest relative error of the lengths of a token's pairs, on average over the pairs."""


LARGEST = 1e15
"""Largest number in a reference; float32 holds its square."""


class UnwrittenError(InvalidInputError):
    """The key of the reference token was never written."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of tokens, and the reference key that they are compared with.

    Args:
        all: (tokens, kv_heads, head_dim): numpy, or torch on any device.
        rotary: the intended rotation.
        reference: (kv_heads, head_dim) float32.
        token: the reference token; None if the reference is an unrotated key.
    """

    all: Any
    rotary: Rotary
    reference: Float32Array
    token: int | None

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.all)

    def blocks(self) -> Iterator[Float32Array]:
        """Yield (tokens, kv_heads, head_dim) float32, at most BLOCK tokens at a time."""
        for start in range(0, self.num_tokens, BLOCK):
            yield _float32(self.all[start : start + BLOCK])

    def take(self, tokens: IntArray) -> Float32Array:
        """Return the (tokens, kv_heads, head_dim) float32 keys of some tokens."""
        return _float32(self.all[tokens])

    @property
    def rounding(self) -> float:
        """Rounding noise in rad, from the smallest relative step between the numbers of a head.

        It is the root mean square of two numbers with an error of up to half a step each. The residual of the angles
        does not show this noise, since pairs that rotate by less than a step do not move at all.
        """
        some = np.abs(next(self.blocks())[:: max(1, min(self.num_tokens, BLOCK) // 64)])
        steps = [1.0]
        for head in np.moveaxis(some, 1, 0):
            numbers = np.unique(head[np.isfinite(head) & (head > 0)])
            steps.append(float((np.diff(numbers) / numbers[1:]).min(initial=1.0)))
        return min(steps) / 6**0.5

    def pairs(self, keys: Float32Array) -> Phasors:
        """View (…, kv_heads, head_dim) keys as (…, kv_heads, pairs) complex numbers."""
        pairs = self.rotary.num_pairs
        if self.rotary.pairing == "adjacent":
            return np.ascontiguousarray(keys[..., : 2 * pairs]).view(np.complex64)
        out = np.empty((*keys.shape[:-1], pairs), np.complex64)
        out.real, out.imag = keys[..., :pairs], keys[..., pairs : 2 * pairs]
        return out

    def axes(self) -> list[Axis]:
        """Return the pairs of every axis; if some pairs are not rotated, they follow as axis −1."""
        rotary = self.rotary
        reference = self.pairs(self.reference)
        turns, inv_freq = rotary.turns, rotary.inv_freq_array
        axes = []
        for axis in (*range(rotary.axes), -1):
            mine = rotary.pair_axis == axis
            if axis >= 0:
                mine = mine & (inv_freq != 0)
            length = np.sqrt((np.abs(reference) ** 2 * mine).sum(axis=0, dtype=np.float64))
            columns = np.flatnonzero(length > 1e-3 * max(length.max(initial=0), 1e-30))
            back = reference[:, columns].conj() / length[columns] ** 2
            ladder = Ladder(turns[columns], inv_freq[columns], length[columns])
            axes.append(Axis(axis, columns, back.astype(np.complex64), ladder))
        return axes if (rotary.pair_axis == -1).any() else axes[:-1]


@dataclass(frozen=True, eq=False)
class Axis:
    """The pairs of one axis.

    Args:
        axis: number of the axis; −1 for pairs that are not rotated.
        columns: (pairs,) indices of the pairs.
        back: (kv_heads, pairs) factors that rotate a token's pairs back by the reference; summed over heads, the pairs
            of the reference then have length 1.
        ladder: frequencies and weights of the pairs.
    """

    axis: int
    columns: IntArray
    back: Phasors
    ladder: Ladder

    def phasors(self, pairs: Phasors) -> Phasors:
        """Compute (tokens, pairs) phasors relative to the reference from (tokens, kv_heads, all pairs)."""
        if len(self.back) == 1:
            with np.errstate(invalid="ignore", over="ignore"):
                return np.take(pairs[:, 0], self.columns, axis=1) * self.back[0]
        return np.einsum("thp,hp->tp", np.take(pairs, self.columns, axis=2), self.back)


def read_keys(keys: Any, rotary: Rotary, reference: Any) -> Keys:
    """Check keys and reference; see ``read``."""
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a mmpos.rotary.Rotary")
    for name in ("kv_heads", "head_axes"):
        if getattr(rotary, name) is not None:
            raise UnsupportedError(f"rotary: got {name} {getattr(rotary, name)}, want one layout for all heads")
    array = keys if hasattr(keys, "detach") else host_array("keys", keys)
    _check_floats("keys", array)
    shape = tuple(array.shape)
    if len(shape) != 3 or shape[-1] != rotary.head_dim:
        want = f"(tokens, kv_heads, {rotary.head_dim}), without padding"
        raise InvalidInputError(f"keys: got shape {shape}, want {want}; transpose and unpage a cache first")
    tokens, kv_heads, _ = shape
    if not tokens * kv_heads:
        raise InvalidInputError(f"keys: got shape {shape}, want at least one token and one head")
    checked = Keys(array, rotary, np.empty((0, 0), np.float32), None)
    if reference is None or isinstance(reference, int | np.integer):
        token = 0 if reference is None else int(reference)
        if not 0 <= token < tokens:
            raise InvalidInputError(f"reference: got {token}, want a token from 0 to {tokens - 1}")
        (key,) = checked.take(np.array([token]))
        checked, name = replace(checked, reference=key, token=token), f"reference: token {token}"
    else:
        name = "reference"
        key = reference if hasattr(reference, "detach") else host_array("reference", reference)
        _check_floats("reference", key)
        if tuple(key.shape) != (kv_heads, rotary.head_dim):
            raise InvalidInputError(
                f"reference: got shape {tuple(key.shape)}, want a token, or a key ({kv_heads}, {rotary.head_dim})"
            )
        checked = replace(checked, reference=_float32(key))
    key = checked.reference
    if not np.isfinite(key).all() or not key[:, : rotary.rotary_dim].any():
        got = "NaN or infinity" if key.any() else "nothing but zeros"
        error = InvalidInputError if checked.token is None else UnwrittenError
        raise error(f"{name}: got {got}, want finite numbers, not all zero in the rotated channels")
    largest = float(np.abs(key[:, : rotary.rotary_dim]).max())
    if not 1 / LARGEST <= largest <= LARGEST:
        got = f"numbers up to {largest:.2g} in the rotated channels"
        raise InvalidInputError(f"{name}: got {got}, want {1 / LARGEST:.0e} to {LARGEST:.0e}: scale the keys")
    return checked


def _check_floats(name: str, array: Any) -> None:
    dtype = str(array.dtype).removeprefix("torch.")
    if not dtype.startswith(("float", "bfloat")):
        raise InvalidInputError(
            f"{name}: got dtype {dtype}, want floats; multiply quantised keys by their scales first"
        )


def _float32(array: Array | Any) -> Float32Array:
    if hasattr(array, "detach"):
        array = array.detach().float().cpu().numpy()
    with np.errstate(over="ignore"):  # infinities are checked later
        return np.asarray(array, np.float32)
