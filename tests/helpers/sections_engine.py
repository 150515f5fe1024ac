"""The rotation of inference engines with contiguous M-RoPE sections, modelled on vLLM 0.33 and SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class EngineRotary(nn.Module):
    """The M-RoPE module of both engines: its cache keeps frequencies in their natural order, with float32 angles."""

    cos_sin_cache: Tensor
    _ensure_cos_sin_cache_length: Callable[[int], None]  # SGLang's method, which install_cache replaces

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        rows: int,
        base: float,
        neox: bool,
        section: list[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.is_neox_style, self.mrope_section, self.mrope_interleaved = neox, section, False
        frequencies = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
        angle = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies
        cache = torch.cat([angle.cos(), angle.sin()], dim=1)
        self.register_buffer("cos_sin_cache", cache.to(dtype), persistent=False)

    def forward(self, ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rotate (tokens, heads, head_size) tensors by (3, tokens) ids."""
        blocks = self.cos_sin_cache[ids].split([*self.mrope_section, *self.mrope_section], dim=-1)
        rows = [block[i % 3] for i, block in enumerate(blocks)]
        cos, sin = torch.cat(rows[:3], -1)[:, None], torch.cat(rows[3:], -1)[:, None]
        return tuple(self.rotate(x, cos.to(x.dtype), sin.to(x.dtype)) for x in tensors)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first rotary_dim channels of every head, with halves or adjacent channels as pairs."""
        x, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        if self.is_neox_style:
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2), rest], dim=-1)


def step_ids(prompt: Tensor, delta: int, computed: int, scheduled: int) -> Tensor:
    """Return the ids that vLLM uses in one step of a request: the prompt's ids, then index + delta on all axes."""
    inside = prompt[:, computed : computed + scheduled]
    beyond = torch.arange(max(computed, prompt.shape[1]), max(computed + scheduled, prompt.shape[1])) + delta
    return torch.cat([inside, beyond.expand(3, -1)], dim=1)
