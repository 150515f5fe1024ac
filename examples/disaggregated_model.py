"""What stands for a model in disaggregated.py: q and k of tokens and pixels, their rotation, and the token to come."""

from __future__ import annotations

import zlib
from math import factorial, pi
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.polynomial.polynomial import polyval

from mmpos import ImageProcessor, InterleavedSequence
from mmpos.rotary import Rotary

Array = npt.NDArray[Any]

HEADS, HEAD_DIM = 2, 16
IMAGES = ImageProcessor(backend="pillow", order="merged", max_tokens=48)
ROTARY = Rotary(head_dim=HEAD_DIM, axes=2)

_RANDOM = np.random.default_rng(0)
_WORDS = _RANDOM.standard_normal((259, 2, HEADS, HEAD_DIM), np.float32)
_PIXELS = _RANDOM.integers(-3, 4, (4 * 14 * 14 * 3, 2 * HEADS * HEAD_DIM))
_COS = [(-1) ** n / factorial(2 * n) for n in range(14)]
_SIN = [(-1) ** n / factorial(2 * n + 1) for n in range(14)]


def embed_text(ids: Array) -> Array:
    """(tokens, 2, heads, head_dim) q and k of text, before rotation."""
    return _WORDS[ids]


def embed(sequence: InterleavedSequence) -> Array:
    """(tokens, 2, heads, head_dim) q and k of a sequence with its pixels, before rotation."""
    states = embed_text(sequence.input_ids)
    assert sequence.patches is not None
    # Whole numbers, so that a sum has the same bits however the tokens are batched.
    pixels = sequence.patches.reshape(-1, len(_PIXELS)).astype(np.int64) @ _PIXELS
    states[sequence.token_type_ids == 1] = (pixels / 2.0**16).reshape(-1, 2, HEADS, HEAD_DIM)
    return states


def rotate(x: Array, ids: Array) -> Array:
    """Rotate (tokens, 2, heads, head_dim) by (axes, tokens) ids: what apply_rotary does, in numpy.

    The angle is a whole number of 2⁻⁶⁴ turns, and sums and products are all there is to cos and sin: the same bits
    wherever a window begins, which np.cos does not promise.
    """
    turn = ids.astype(np.int64).view(np.uint64)[ROTARY.pair_axis].T * ROTARY.turns
    angle = turn.view(np.int64) * (2 * pi * 2.0**-64)
    cos, sin = polyval(angle**2, _COS), angle * polyval(angle**2, _SIN)
    cos, sin = (part.astype(np.float32)[:, None, None] for part in (cos, sin))
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def next_token(k: Array) -> int:
    """The token after those whose rotated k this is: another one if a single bit of them differs."""
    return zlib.crc32(k.tobytes()) % 256
