"""Contiguous M-RoPE sections: the layout of a rotation in an engine, and the ids of requests and windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos import PositionTable
from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rotary import Rotary, cos_sin
from mmpos_vllm.checks import INT32_MAX, boolean, integer

__all__ = ["Sections", "pair_order", "qk_channels", "request_positions", "window_positions"]

IntArray = npt.NDArray[np.int64]
"""Indices of pairs or channels, and ids."""

BLOCK = 1 << 14
"""Number of cache rows computed at a time."""

ROWS = ((0, 0, 0), (0, 0, 1), (0, 1, 2))
"""Axis for each row of ids, with one, two and three axes."""


def pair_order(rotary: Rotary) -> IntArray:
    """Return the indices (pairs,) of a stable sort of pairs by axis: for two interleaved axes, the even pairs first.

    >>> pair_order(Rotary(head_dim=12)).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    return np.argsort(_axes(rotary), kind="stable")


def _axes(rotary: Rotary) -> IntArray:
    """Return the axis of each pair; pairs that are not rotated count as axis 0, because no id affects them."""
    return np.maximum(rotary.pair_axis, 0)


def qk_channels(rotary: Rotary) -> IntArray:
    """Return the indices (head_dim,) that sort the channels of q and k by the axis of their pairs.

    A head of q or k in the new order is ``head[qk_channels(rotary)]``; channels that are not rotated keep their places.

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
        want = "one rotation for all heads, as in the kernels of engines"
        raise UnsupportedError(f"rotary: got a Rotary with {rotary.varies_by}, want {want}")


@dataclass(frozen=True)
class Sections:
    """Layout of a rotation with one to three axes in engines with contiguous M-RoPE sections.

    The kernels of such engines rotate the first pairs by the first row of ids, the next pairs by the second row and the
    last pairs by the third. A rotation whose pairs are sorted by axis needs no change. Any other rotation needs weights
    in which the channels of q and k are sorted (``permute_qk``). Sorting does not change attention scores, because q·k
    is a sum over channels.

    >>> from mmpos.rotary import Rotary
    >>> sections = Sections(Rotary(head_dim=128), max_position=131072, permuted=True)
    >>> sections.mrope_section, sections.rows
    ((0, 32, 32), (0, 0, 1))

    Args:
        rotary: rotation of the trained model.
        max_position: number of rows in the engine's cos/sin cache; ids are 0 to max_position − 1.
        permuted: whether the weights of q and k were permuted by ``permute_qk``.

    Raises:
        UnsupportedError: the rotary has more than three axes or has head_axes, or its allocation requires
            ``permute_qk`` and permuted is False.
    """

    rotary: Rotary
    max_position: int
    permuted: bool = False

    def __post_init__(self) -> None:
        _check_rotary(self.rotary)
        maximum = integer("max_position", self.max_position, 1, INT32_MAX + 1)
        object.__setattr__(self, "max_position", maximum)
        object.__setattr__(self, "permuted", boolean("permuted", self.permuted))
        if self.rotary.axes > len(ROWS):
            raise UnsupportedError(
                f"rotary: got {self.rotary.axes} axes, want at most 3, one per row of ids in an engine"
            )
        if not self.permuted and (np.diff(_axes(self.rotary)) < 0).any():
            raise UnsupportedError(
                f"rotary: got allocation {self.rotary.allocation!r}, want contiguous sections, such as 'split', or "
                "weights from permute_qk and permuted=True"
            )

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """Numbers of pairs that the rows of ids rotate, as in the engine's config; with two axes, the first is 0."""
        counts = np.bincount(_axes(self.rotary), minlength=self.rotary.axes).tolist()
        first, second, third = {1: (*counts, 0, 0), 2: (0, *counts)}.get(self.rotary.axes, counts)
        return first, second, third

    @property
    def rows(self) -> tuple[int, int, int]:
        """Axis for each row of ids, such as (0, 0, 1) for row, row, column."""
        return ROWS[self.rotary.axes - 1]

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """Fields of the checkpoint's config from which an engine builds matching modules; a new dict."""
        theta, head_dim = self.rotary.theta, self.rotary.head_dim
        factor = self.rotary.rotary_dim / head_dim
        if int(head_dim * factor) < self.rotary.rotary_dim:  # engines truncate this product
            factor = math.nextafter(factor, 1)
        return {
            "rope_type": "default",
            "rope_theta": theta if isinstance(theta, float) else theta[0],
            "mrope_section": list(self.mrope_section),
            "partial_rotary_factor": factor,
        }

    @property
    def order(self) -> IntArray:
        """(pairs,) index of the model's pair for each of the engine's pairs."""
        return pair_order(self.rotary)

    @property
    def is_neox_style(self) -> bool:
        """Whether pairs are channels (j, j + rotary_dim/2); engines use this name."""
        return self.rotary.pairing == "half"

    def cos_sin_cache(self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """Compute the engine's cos/sin cache in the order of the sections, multiplied by the attention factor.

        With ``precision="exact"``, every entry is within 2e-7 of the exact value before it is rounded to dtype; with
        "hf", it is computed from Transformers' float32 angles. See ``Rotary.for_length`` for scaling by length.

        Args:
            dtype: dtype of the cache; engines use the model's dtype or float32.
            device: device of the cache; None uses the CPU.

        Returns:
            (max_position, rotary_dim) cos of all pairs, followed by sin; a new tensor.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidInputError(f"dtype: got {dtype}, want a floating-point torch dtype")
        pairs = self.rotary.num_pairs
        cache = torch.empty(self.max_position, 2 * pairs, dtype=dtype, device=device)
        order = torch.from_numpy(self.order).to(cache.device)
        for start in range(0, self.max_position, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, self.max_position), device=cache.device)
            cos, sin = cos_sin(self.rotary, ids.expand(self.rotary.axes, -1))
            rows = cache[start : start + BLOCK]
            rows[:, :pairs], rows[:, pairs:] = cos[:, order], sin[:, order]
        return cache


def request_positions(positions: PositionTable, sections: Sections, *, max_new_tokens: int = 0) -> tuple[Tensor, int]:
    """Return the ids of a prompt and the delta of the tokens generated after it.

    If token i of the request, counted from 0, comes after the prompt, the engine assigns it the id i + delta.

    Args:
        positions: the prompt, as one document.
        sections: layout of the engine's rotation.
        max_new_tokens: maximum number of generated tokens, including drafts.

    Returns:
        (3, tokens) int64 ids in a new tensor, and the delta.

    Raises:
        InvalidInputError: positions do not contain exactly one document, contain padding or a negative id, or differ
            from rotary in the number of axes.
        UnsupportedError: ids may be fractions, or the scheme has no next position.
        LimitExceededError: ids, or the cursor plus max_new_tokens, exceed the cache.
    """
    _check_table(positions, sections)
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {positions.num_documents} documents, want 1")
    new = integer("max_new_tokens", max_new_tokens, 0)
    cursor = int(positions.next_positions[0])
    ids = _checked_ids(positions, sections, np.zeros(1, np.int64))
    if cursor + new > sections.max_position:
        raise LimitExceededError(
            f"documents[0]: got cursor {cursor} plus max_new_tokens {new}, want at most max_position "
            f"{sections.max_position}, the rows of the cos/sin cache"
        )
    return torch.from_numpy(ids), cursor - positions.num_tokens


def window_positions(
    positions: PositionTable,
    sections: Sections,
    documents: npt.ArrayLike,
    starts: npt.ArrayLike,
    lengths: npt.ArrayLike,
) -> Tensor:
    """Return the ids of one step, a set of windows of requests: chunked prefill, cached prefixes, drafts.

    A tree of drafts is one window per draft: drafts of the same depth begin at the same token, and share an id.

    Args:
        positions: one document per request, from its first token.
        sections: layout of the engine's rotation.
        documents: (windows,) index of each window's request, in any order.
        starts: (windows,) number of tokens in the request that are already computed.
        lengths: (windows,) number of scheduled tokens; tokens past the prompt are generated tokens or drafts.

    Returns:
        (3, sum of lengths) int64 ids of the concatenated windows; a new tensor.
    """
    _check_table(positions, sections)
    window = positions.window(documents, starts, lengths)
    return torch.from_numpy(_checked_ids(window, sections, np.asarray(documents)))


def _check_table(positions: PositionTable, sections: Sections) -> None:
    if not isinstance(positions, PositionTable):
        raise InvalidInputError(f"positions: got {type(positions).__name__}, want a PositionTable")
    if not isinstance(sections, Sections):
        raise InvalidInputError(f"sections: got {type(sections).__name__}, want Sections")
    if positions.axes != sections.rotary.axes:
        raise InvalidInputError(f"positions: got {positions.axes} axes, want {sections.rotary.axes} as in rotary")
    if positions.fractional:
        raise UnsupportedError(
            f"positions: got scheme {positions.scheme!r}, whose ids may be fractions, want integers; an id is a row of "
            "the engine's cos/sin cache, and each generated token uses the next row"
        )
    if positions.is_padding.any():
        raise InvalidInputError("positions: got padding, want none; engines pack requests")


def _checked_ids(positions: PositionTable, sections: Sections, owners: IntArray) -> IntArray:
    """Return the ids of a table; raise an error unless all are rows of the cache, naming the owner of the document."""
    ids = positions.dense(dtype=np.int64, axes=sections.rows)
    if not ids.size or (ids.min() >= 0 and ids.max() < sections.max_position):
        return ids
    full = np.flatnonzero(positions.lengths)
    firsts = positions.cu_seqlens[full]
    low = np.minimum.reduceat(ids, firsts, axis=1).min(axis=0)
    high = np.maximum.reduceat(ids, firsts, axis=1).max(axis=0)
    w = int(((low < 0) | (high >= sections.max_position)).argmax())
    if low[w] < 0:
        raise InvalidInputError(
            f"documents[{owners[full[w]]}]: got id {low[w]}, want >= 0; ids are rows of the cos/sin cache"
        )
    raise LimitExceededError(
        f"documents[{owners[full[w]]}]: got id {high[w]}, want < max_position {sections.max_position}, the rows of the "
        "cos/sin cache"
    )
