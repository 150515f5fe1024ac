"""A module that rotates, whose buffers are integers and so survive every cast of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpos.rotary.apply import Layout, rotate_with
from mmpos.rotary.config import Rotary
from mmpos.rotary.device import Implementation, Positions, frequencies_of
from mmpos.rotary.reference import NormOrder, norm_of

__all__ = ["RotaryEmbedding"]


class RotaryEmbedding(nn.Module):
    """Rotates q and k; ``model.to(bfloat16)``, autocast and mixed precision leave its frequencies alone.

    Args:
        rotary: frequencies, and how they are allotted to axes and channels.
    """

    frequencies: Tensor
    pair_axis: Tensor

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        frequencies, pair_axis = self._values()
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("pair_axis", pair_axis, persistent=False)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        positions: Positions,
        *,
        layout: Layout | None = None,
        inplace: bool = False,
        conjugate: bool = False,
        q_norm_weight: Tensor | None = None,
        k_norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_weight_offset: float = 0.0,
        norm_order: NormOrder = "before",
        implementation: Implementation = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """Apply this module's rotary; arguments and errors are those of ``apply_rotary``."""
        as_hf = self.rotary.precision == "hf"
        frequencies = self.frequencies.view(torch.float32) if as_hf else self.frequencies
        return rotate_with(
            (frequencies, self.pair_axis),
            q,
            k,
            positions,
            self.rotary,
            layout=layout,
            inplace=inplace,
            conjugate=conjugate,
            norm=norm_of(q, k, q_norm_weight, k_norm_weight, norm_eps, norm_weight_offset, norm_order),
            implementation=implementation,
            validate=False,
        )

    def _values(self) -> tuple[Tensor, Tensor]:
        frequencies, pair_axis = frequencies_of(self.rotary)
        # float32 frequencies are kept as their bits, since a cast of the model touches floating buffers only.
        return frequencies.view(torch.int32) if frequencies.is_floating_point() else frequencies, pair_axis

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        before = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.frequencies is not before:
            # ``to_empty`` after a start on the meta device leaves buffers unset, and no checkpoint holds these.
            self.frequencies, self.pair_axis = (value.to(self.frequencies.device) for value in self._values())
        return self

    def extra_repr(self) -> str:
        """Show the rotary."""
        return repr(self.rotary)
