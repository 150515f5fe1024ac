"""Rotary position embedding of one axis, in the two orders of channels that checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mmpos.encodings.base import HEAD_DIM, Rotation
from mmpos.rotary import Rotary

__all__ = ["Rope1D", "Rope1DAdjacent"]


@dataclass(frozen=True)
class Rope1D(Rotation):
    """Channels (j, j + d/2) of q and k turn by p·θ_j, θ_j = theta^(−2j/d), as in NeoX, Llama and Qwen.

    R_mᵀR_n = R_{n−m}: scores see only distances, norms stay, and the same c added to all positions changes nothing.

    *Corrected*: one source rotates the embedding once, before the network. q and k of every layer turn
    instead: W_q R_p x is not R_p W_q x, so scores of its layer know absolute positions. Its table of shape
    (seq, 1, dim/2) must be (1, seq, dim/2), too: beside a batch it goes by the batch index, or does not fit.

    Source: RoFormer (Su et al., 2021); the order of channels is that of GPT-NeoX.

    >>> Rope1D(head_dim=4).rotate([[1, 1, 0, 0]], [1]).round(6).tolist()
    [[0.540302, 0.99995, 0.841471, 0.01]]

    Args:
        head_dim: channels of a head; even.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    theta: float = 10000.0
    name: ClassVar[str] = "rope-1d"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=1, pairing="half")


@dataclass(frozen=True)
class Rope1DAdjacent(Rotation):
    """As ``Rope1D`` with channels (2j, 2j + 1) as pair j, as in RoFormer and GPT-J: a permutation of channels apart.

    Source: RoFormer (Su et al., 2021).

    >>> Rope1DAdjacent(head_dim=4).rotate([[1, 0, 1, 0]], [1]).round(6).tolist()
    [[0.540302, 0.841471, 0.99995, 0.01]]

    Args:
        head_dim: channels of a head; even.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    theta: float = 10000.0
    name: ClassVar[str] = "rope-1d-adjacent"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=1, pairing="adjacent")
