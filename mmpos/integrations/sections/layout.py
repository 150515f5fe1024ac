"""Contiguous M-RoPE sections: how an engine carries a rotation, and the ids of requests, windows and drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.rotary.apply import cos_sin
from mmpos.rotary.config import Rotary
from mmpos.support.checks import INT32_MAX, IntArray, boolean, counted, first_bad, int_array, integer

__all__ = [
    "Sections",
    "draft_positions",
    "pair_order",
    "qk_channels",
    "request_positions",
    "window_positions",
]

BLOCK = 1 << 14
"""Rows of the cache computed at a time."""

ROWS = ((0, 0, 0), (0, 0, 1), (0, 1, 2))
"""The axis of each row of ids, for one, two and three axes."""


def pair_order(rotary: Rotary) -> IntArray:
    """Sort pairs by their axis: (pairs,) the old pair at each new one; evens then odds, if interleaved.

    >>> pair_order(Rotary(head_dim=12)).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return np.argsort(_axes(rotary), kind="stable")


def _axes(rotary: Rotary) -> IntArray:
    """Return the axis of each pair: the first for one that does not turn, as the cache has it by no id."""
    return np.maximum(rotary.pair_axis, 0)


def qk_channels(rotary: Rotary) -> IntArray:
    """Sort the channels of q and k by the axis of their pairs: (head_dim,) the old channel at each new one.

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
    if rotary.own_heads:
        want = "one for all heads, as kernels of engines have it"
        raise UnsupportedError(f"rotary: got one with {rotary.told_by}, want {want}")


@dataclass(frozen=True)
class Sections:
    """Rotation of one to three axes as engines with contiguous M-RoPE sections carry it.

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
        UnsupportedError: more than three axes, or an allocation that needs ``permute_qk`` without it; a rotary with
            head_axes.
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
        if not self.permuted and (np.diff(_axes(self.rotary)) < 0).any():
            raise UnsupportedError(
                f"rotary: got allocation {self.rotary.allocation!r}, want one of contiguous sections, such as 'split', "
                "or weights from permute_qk and permuted=True"
            )

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Pairs rotated by each row of ids, as the engine's config has them; 0 for the first row of two axes."""
        counts = np.bincount(_axes(self.rotary), minlength=self.rotary.axes).tolist()
        first, second, third = {1: (*counts, 0, 0), 2: (0, *counts)}.get(self.rotary.axes, counts)
        return first, second, third

    @property
    def rows(self) -> tuple[int, int, int]:
        """Axis of each row of ids: (0, 0, 1) is row, row, column."""
        return ROWS[self.rotary.axes - 1]

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Fields of the checkpoint's config by which an engine builds modules of this shape; a new dict."""
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
        """(pairs,) the model's pair at each of the engine's."""
        return pair_order(self.rotary)

    @property
    def is_neox_style(self) -> bool:
        """Whether pairs are channels (j, j + rotary_dim/2), in the words of engines."""
        return self.rotary.pairing == "half"

    def cos_sin_cache(self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """Compute the cache that engines gather from, in the order of the sections, times the attention factor.

        With ``precision="exact"`` every entry is within 2e-7 of the truth before it is rounded to dtype; with "hf" it
        is that of Transformers' float32 angles. Scalings that depend on the length are those of ``Rotary.for_length``.

        Args:
            dtype: of the cache; engines hold that of the model, or float32.
            device: device of the cache; None is the CPU.

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


def request_positions(
    positions: PositionTable, sections: Sections, *, max_new_tokens: int = 0, computed: int = 0
) -> tuple[Tensor, int]:
    """Return the ids of a prompt, and the delta by which the engine places what it generates.

    The engine gives token i of the request, counted from 0, the id i + delta once i is beyond the prompt.

    Args:
        positions: one document: the prompt, or what is left of it after a cached prefix, placed with ``start`` at the
            cursor of the prefix.
        sections: layout of the engine's rotation.
        max_new_tokens: tokens that it may generate, drafts included.
        computed: tokens of the request before this document.

    Returns:
        (3, tokens) int64 ids, a new tensor, and delta.

    Raises:
        InvalidInputError: other than one document; padding; a negative id; axes other than those of the rotary.
        UnsupportedError: ids that may be fractions, or a scheme without a next position.
        LimitExceededError: ids, or the cursor and max_new_tokens, reach beyond the cache.
    """
    _check_table(positions, sections)
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {counted(positions.num_documents, 'document')}, want 1")
    new = integer("max_new_tokens", max_new_tokens, minimum=0)
    before = integer("computed", computed, minimum=0)
    cursor = int(positions.next_positions[0])
    ids = _checked_ids(positions, sections, np.zeros(1, np.int64))
    if cursor + new > sections.max_position:
        raise LimitExceededError(
            f"documents[0]: got cursor {cursor} and max_new_tokens {new}, want at most max_position "
            f"{sections.max_position} in all, the rows of the cos/sin cache"
        )
    return torch.from_numpy(ids), cursor - positions.num_tokens - before


def window_positions(
    positions: PositionTable,
    sections: Sections,
    documents: npt.ArrayLike,
    starts: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> Tensor:
    """Return the ids of one step: windows of requests, as for chunked prefill, cached prefixes and drafts.

    Args:
        positions: one document per request, from its first token.
        sections: layout of the engine's rotation.
        documents: (windows,) the request of each window, in any order.
        starts: (windows,) tokens of the request that are computed already.
        lengths: (windows,) tokens scheduled; those past the prompt are generated, or drafts one after the other.

    Returns:
        (3, sum of lengths) int64 ids, the windows one after the other; a new tensor.
    """
    _check_table(positions, sections)
    documents = int_array("documents", documents, (None,))
    window = positions.window(documents, starts, lengths)
    return torch.from_numpy(_checked_ids(window, sections, documents))


def draft_positions(
    positions: PositionTable, sections: Sections, start: int, depths: npt.ArrayLike, document: int = 0
) -> Tensor:
    """Return the ids of a tree of drafts after a request; drafts of one depth share one id.

    Args:
        positions: one document per request, from its first token.
        sections: layout of the engine's rotation.
        start: tokens of the request before the root of the tree; at least those of the prompt.
        depths: (drafts,) depth of each draft; 0 for the root.
        document: the request.

    Returns:
        (3, drafts) int64 ids; a new tensor.
    """
    _check_table(positions, sections)
    document = integer("document", document, minimum=0, maximum=positions.num_documents - 1)
    length = int(positions.lengths[document])
    start = integer("start", start, minimum=length, maximum=INT32_MAX)
    depths = int_array("depths", depths, (None,))
    first_bad("depths", depths, minimum=0, maximum=INT32_MAX)
    ids = int(positions.next_positions[document]) + (start - length) + depths
    _check_ids(ids[None], np.array([document]), np.array([0]), sections)
    return torch.from_numpy(ids).repeat(3, 1)


def _check_table(positions: PositionTable, sections: Sections) -> None:
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    if not isinstance(sections, Sections):
        raise InvalidInputError(f"sections: got {type(sections).__name__}, want Sections")
    if positions.axes != sections.rotary.axes:
        raise InvalidInputError(
            f"positions: got {counted(positions.axes, 'axis')}, want {sections.rotary.axes} as in rotary"
        )
    if positions.fractional:
        raise UnsupportedError(
            f"positions: got scheme {positions.scheme!r}, whose ids may be fractions, want integers: an id is a row of "
            "the engine's cos/sin cache, and each generated token is one row further"
        )
    if positions.is_padding.any():
        raise InvalidInputError("positions: got padding, want a table without: engines pack requests")


def _checked_ids(positions: PositionTable, sections: Sections, owners: IntArray) -> IntArray:
    ids = positions.dense(dtype=np.int64, axes=sections.rows)
    full = np.flatnonzero(positions.lengths)
    _check_ids(ids, owners[full], positions.documents[FIRST_TOKEN][full], sections)
    return ids


def _check_ids(ids: IntArray, owners: IntArray, firsts: IntArray, sections: Sections) -> None:
    """Raise unless all ids are rows of the cache; each owner has the tokens from its first to the next one's."""
    if not ids.size or (ids.min() >= 0 and ids.max() < sections.max_position):
        return
    low = np.minimum.reduceat(ids, firsts, axis=1).min(axis=0)
    high = np.maximum.reduceat(ids, firsts, axis=1).max(axis=0)
    if low.min() < 0:
        w = int((low < 0).argmax())
        raise InvalidInputError(
            f"documents[{owners[w]}]: got id {low[w]}, want >= 0: ids are rows of the cos/sin cache"
        )
    w = int((high >= sections.max_position).argmax())
    raise LimitExceededError(
        f"documents[{owners[w]}]: got id {high[w]}, want < max_position {sections.max_position}, the rows of the "
        "cos/sin cache"
    )
