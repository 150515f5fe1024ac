"""Rotary position embedding whose slowest pairs stand still."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mmpos.encodings.base import HEAD_DIM, Rotation
from mmpos.rotary import PRoPE, Rotary

__all__ = ["PRope"]


@dataclass(frozen=True)
class PRope(Rotation):
    """As ``Rope1D``, but pairs from ⌊p·d/2⌋ on do not turn; the others keep their frequencies.

    That is not ``partial_rotary_factor``, which shortens the ladder: for d = 16 and p = 1/4 it is [1, 0.3162, 0, …]
    here and [1, 0.01] there.

    Source: "Round and round we go!" (Barbero et al., 2024).

    >>> PRope(head_dim=16, p=0.25).rotary.inv_freq_array.round(4).tolist()
    [1.0, 0.3162, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Args:
        head_dim: channels of a head; even.
        p: the share of pairs that turn, 0 to 1.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    p: float = 0.5
    theta: float = 10000.0
    name: ClassVar[str] = "p-rope"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=1, scaling=PRoPE(self.p))
