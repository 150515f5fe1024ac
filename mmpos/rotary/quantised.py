"""Caches of 8 bits: scales of k, v and q, checked once, and rounding to 8 bits in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.rotary.paged import CacheLayout

__all__ = [
    "LEAST_SCALE",
    "NO_SCALES",
    "QUERY",
    "Scales",
    "computed_scale",
    "grown",
    "quantised",
    "scale_of_cache",
    "scale_of_queries",
]

QUERY = torch.float8_e4m3fn
"""Dtype of a q of 8 bits."""

LEAST_SCALE = 2.0**-100
"""The least scale that is computed: heads of zeros need one, and what is divided by it stays a normal number."""


class Scales(NamedTuple):
    """Scales of q, k and v where they are stored in 8 bits, in the order in which the operators take them.

    Args:
        k: (heads,) float32 by which k is divided; None where it is not stored in 8 bits or they are computed.
        v: likewise of v.
        k_computed: (blocks, block_size, heads) float32 where the scale of each key that is stored is written, or None.
        v_computed: likewise of v.
        q_computed: (batch, seq, heads) float32 where that of each query is written, or None for q in its own dtype.
    """

    k: Tensor | None
    v: Tensor | None
    k_computed: Tensor | None
    v_computed: Tensor | None
    q_computed: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether nothing is stored in 8 bits."""
        return all(x is None for x in self)

    @property
    def written(self) -> list[str]:
        """Names of those that are computed, as ``rotate_and_store`` has them."""
        computed = zip(("k_scale", "v_scale", "q_scale"), self[2:], strict=True)
        return [name for name, scale in computed if scale is not None]

    def of_q(self) -> tuple[Tensor | None, Tensor | None]:
        """Return those of q that are read, of which there are none, and that are computed."""
        return None, self.q_computed

    def of_k(self) -> tuple[Tensor | None, Tensor | None]:
        """Return those of k that are read, and that are computed."""
        return self.k, self.k_computed

    def of_v(self) -> tuple[Tensor | None, Tensor | None]:
        """Return those of v that are read, and that are computed."""
        return self.v, self.v_computed


NO_SCALES = Scales(None, None, None, None, None)
"""Nothing is stored in 8 bits."""


def quantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide heads by their scales and round to the nearest numbers of 8 bits, ties to even.

    All beyond the largest number becomes that number, as vLLM's caches have it; NaN stays.

    Args:
        x: (…, heads, head_dim).
        scale: (…, heads) float32.
        dtype: of 8 bits.
    """
    largest = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale.unsqueeze(-1)).clamp_(-largest, largest).to(dtype)


def computed_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the (…, heads) scales that bring the largest channel of heads to the largest number of a dtype."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=LEAST_SCALE)


def grown(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the (…, heads) factor, at least 1, by which scales must grow for heads, in units of them, to fit."""
    return (_largest(x) / torch.finfo(dtype).max).clamp_(min=1.0)


def _largest(x: Tensor) -> Tensor:
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1])
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1)


def scale_of_cache(
    name: str, scale: Tensor, cache: Tensor, pages: Tensor, layout: CacheLayout, validate: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Check the scales of a cache of 8 bits; their values are read only on a host, or with validate.

    Args:
        name: of the scales, for messages.
        scale: (), (1,) or (heads,), which are read, or of the cache's shape without head_dim, which are written.
        cache: as it came.
        pages: it as (blocks, block_size, heads, head_dim).
        layout: of the cache.
        validate: whether to wait for a device.

    Returns:
        (heads,) those that are read, or None, and (blocks, block_size, heads) those that are written, or None.
    """
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"{name}: got {got}, want a tensor of float32")
    if scale.device != pages.device:
        raise InvalidInputError(f"{name}: got a tensor on {scale.device}, want {pages.device} as the cache")
    heads = pages.shape[2]
    if scale.shape in ((), (1,), (heads,)):
        if validate or (scale.device.type == "cpu" and not torch.compiler.is_compiling()):
            _check_values(name, scale)
        return scale.expand(heads), None
    if scale.shape != cache.shape[:-1]:
        raise InvalidInputError(
            f"{name}: got shape {tuple(scale.shape)}, want () or (1,), ({heads},), one for each head, or "
            f"{tuple(cache.shape[:-1])}, one for each slot and head, which are written"
        )
    return None, scale.unsqueeze(1) if scale.dim() == 2 else scale.transpose(1, 2) if layout == "HND" else scale


def scale_of_queries(scale: Tensor, q: Tensor) -> Tensor:
    """Check where the scales of queries are written, float32 of the shape of q without head_dim."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"q_scale: got {got}, want a tensor of float32")
    if scale.device != q.device or scale.shape != q.shape[:-1]:
        raise InvalidInputError(
            f"q_scale: got shape {tuple(scale.shape)} on {scale.device}, "
            f"want {tuple(q.shape[:-1])} on {q.device}, q without head_dim"
        )
    return scale


def _check_values(name: str, scale: Tensor) -> None:
    values = scale.reshape(-1).tolist()
    for i, value in enumerate(values):
        if not 0 < value < float("inf"):
            place = f"[{i}]" if scale.dim() else ""
            raise InvalidInputError(f"{name}{place}: got {value}, want a finite number > 0")
