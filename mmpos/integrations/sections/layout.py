"""Sections: how a rotation is carried by a kernel that knows contiguous blocks of pairs only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary.apply import cos_sin
from mmpos.rotary.config import Rotary
from mmpos.support.checks import INT32_MAX, IntArray, boolean, integer

__all__ = ["Sections", "pair_order", "qk_channels"]

BLOCK = 1 << 14
"""Rows of the cache computed at a time."""

ROWS = ((0, 0, 0), (0, 0, 1), (0, 1, 2))
"""The axis of each row of ids, for one, two and three axes."""


def pair_order(rotary: Rotary) -> IntArray:
    """(pairs,) the pair that comes in each place once pairs are sorted by their axis: evens then odds, if interleaved.

    >>> pair_order(Rotary(head_dim=12)).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return np.argsort(rotary.pair_axis, kind="stable")


def qk_channels(rotary: Rotary) -> IntArray:
    """(head_dim,) the channel of q and k that comes in each place once pairs are sorted by their axis.

    A head of q or k in the new order is ``head[qk_channels(rotary)]``; channels that do not turn stay.

    >>> qk_channels(Rotary(head_dim=10, rotary_dim=8)).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7, 8, 9]
    >>> qk_channels(Rotary(head_dim=8, pairing="adjacent")).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    _check_rotary(rotary)
    order = pair_order(rotary)
    channels = np.arange(rotary.head_dim)
    if rotary.pairing == "adjacent":
        channels[: rotary.rotary_dim] = np.stack([2 * order, 2 * order + 1], axis=1).ravel()
    else:
        channels[: rotary.rotary_dim] = np.concatenate([order, order + rotary.num_pairs])
    return channels


def _check_rotary(rotary: Rotary) -> None:
    if not isinstance(rotary, Rotary):
        raise InvalidInputError(f"rotary: got {type(rotary).__name__}, want a Rotary")


@dataclass(frozen=True)
class Sections:
    """A rotation of one to three axes as engines with contiguous M-RoPE sections carry it.

    Their kernels turn the first pairs by the first row of ids, the next ones by the second and the last by the third.
    Pairs that are sorted by axis fit as they are. Others fit once the channels of q and k come in that order in the
    weights (``permute_qk``), which changes no score: q·k is a sum over channels, whatever their order.

    >>> from mmpos.rotary import Rotary
    >>> sections = Sections(Rotary(head_dim=128), max_position=131072, permuted=True)
    >>> sections.mrope_section, sections.rows
    ((0, 32, 32), (0, 0, 1))

    Args:
        rotary: the rotation that the model was trained with.
        max_position: rows of the engine's cos/sin cache; ids are 0 to max_position − 1.
        permuted: whether the weights of q and k are those of ``permute_qk``.

    Raises:
        UnsupportedError: more than three axes, or an allocation that needs ``permute_qk`` without it.
    """

    rotary: Rotary
    max_position: int
    permuted: bool = False

    def __post_init__(self) -> None:
        _check_rotary(self.rotary)
        maximum = integer("max_position", self.max_position, minimum=1, maximum=INT32_MAX + 1)
        object.__setattr__(self, "max_position", maximum)
        object.__setattr__(self, "permuted", boolean("permuted", self.permuted))
        if self.rotary.axes > len(ROWS):
            raise UnsupportedError(f"rotary: got {self.rotary.axes} axes, want at most 3, the rows of ids of an engine")
        if not self.permuted and (np.diff(self.rotary.pair_axis) < 0).any():
            raise UnsupportedError(
                f"rotary: got allocation {self.rotary.allocation!r}, want one of contiguous sections, such as 'split', "
                "or weights from permute_qk and permuted=True"
            )

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Pairs turned by each row of ids, as the engine's config has them; 0 for the first row of two axes."""
        counts = np.bincount(self.rotary.pair_axis, minlength=self.rotary.axes).tolist()
        first, second, third = {1: (*counts, 0, 0), 2: (0, *counts)}.get(self.rotary.axes, counts)
        return first, second, third

    @property
    def rows(self) -> tuple[int, int, int]:
        """The axis of each row of ids: (0, 0, 1) is row, row, column."""
        return ROWS[self.rotary.axes - 1]

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """What the config of the checkpoint must say so that an engine builds modules of this shape; a new dict."""
        theta, head_dim = self.rotary.theta, self.rotary.head_dim
        factor = self.rotary.rotary_dim / head_dim
        if int(head_dim * factor) < self.rotary.rotary_dim:  # as engines round it
            factor = math.nextafter(factor, 1)
        return {
            "rope_type": "default",
            "rope_theta": theta if isinstance(theta, float) else theta[0],
            "mrope_section": list(self.mrope_section),
            "partial_rotary_factor": factor,
        }

    @property
    def order(self) -> IntArray:
        """(pairs,) the model's pair in each place of the engine's."""
        return pair_order(self.rotary)

    @property
    def is_neox_style(self) -> bool:
        """Whether pairs are channels (j, j + rotary_dim/2), in the words of engines."""
        return self.rotary.pairing == "half"

    def cos_sin_cache(self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """The cache that engines gather from, in the order of the sections, times the attention factor.

        With ``precision="exact"`` every entry is within 2e-7 of the truth before it is rounded to dtype; with "hf" it
        is that of Transformers' float32 angles. Scalings that depend on the length are those of ``Rotary.for_length``.

        Args:
            dtype: of the cache; engines hold that of the model, or float32.
            device: where to make it; None is the CPU.

        Returns:
            (max_position, rotary_dim) cos of all pairs, then sin; a new tensor.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidInputError(f"dtype: got {dtype}, want a floating dtype of torch")
        pairs = self.rotary.num_pairs
        cache = torch.empty(self.max_position, 2 * pairs, dtype=dtype, device=device)
        order = torch.from_numpy(self.order).to(cache.device)
        for start in range(0, self.max_position, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, self.max_position), device=cache.device)
            cos, sin = cos_sin(self.rotary, ids.expand(self.rotary.axes, -1))
            rows = cache[start : start + BLOCK]
            rows[:, :pairs], rows[:, pairs:] = cos[:, order], sin[:, order]
        return cache
