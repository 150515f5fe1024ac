"""Rotary position embeddings with one, two or more axes, with one axis per head, and with unrotated pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmpos.encodings.base import HEAD_DIM, Rotation
from mmpos.rotary import PRoPE, Rotary
from mmpos.support.cached import cached_property
from mmpos.support.checks import integer

__all__ = ["HoPE", "MHRope", "PRope", "Rope1D", "Rope1DAdjacent", "Rope2D", "RopeND"]


@dataclass(frozen=True)
class Rope1D(Rotation):
    """Rotate channels (j, j + d/2) of q and k by p·θ_j, θ_j = theta^(−2j/d), as in NeoX, Llama and Qwen.

    R_mᵀR_n = R_{n−m}: scores depend only on distances, norms are preserved, and adding the same c to all positions
    changes nothing.

    *Corrected*: one source rotates the embedding once, before the network, instead of q and k in every layer. But W_q
    R_p x is not R_p W_q x, so its scores depend on absolute positions. Its table has shape (seq, 1, dim/2), which for a
    batch either broadcasts along the batch axis or raises an error; the right shape is (1, seq, dim/2).

    Source: RoFormer (Su et al., 2021); the channels are in the order of GPT-NeoX.

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
    """``Rope1D`` with channels (2j, 2j + 1) as pair j, as in RoFormer and GPT-J: equal up to the order of channels.

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


@dataclass(frozen=True)
class Rope2D(Rotation):
    """Rotate half of the channels by the row and the other half by the column, each as in RoPE-1D with d/2 channels.

    Both axes have the same frequencies theta^(−4j/d). Rotating one pair by both ids would mix the two distances.

    Source: kexue.fm 8397 and 10040; "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> Rope2D(head_dim=4).rotate([[1, 0, 1, 0]], [[1], [0]]).round(6).tolist()
    [[0.540302, 0.841471, 1.0, 0.0]]

    Args:
        head_dim: channels of a head; a multiple of 4.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    theta: float = 10000.0
    name: ClassVar[str] = "rope-2d"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=2, allocation="axial", pairing="adjacent")


@dataclass(frozen=True)
class RopeND(Rotation):
    """``Rope2D`` generalised to n axes: n equal parts of the channels, each rotated as in RoPE-1D with d/n channels.

    Source: kexue.fm 8397; "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> RopeND(head_dim=12, num_axes=3).rotary.inv_freq_array.tolist()
    [1.0, 0.01, 1.0, 0.01, 1.0, 0.01]

    Args:
        head_dim: channels of a head; a multiple of 2·num_axes.
        num_axes: number of axes n.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    num_axes: int = 3
    theta: float = 10000.0
    name: ClassVar[str] = "rope-nd"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=self.num_axes, allocation="axial", pairing="adjacent")


@dataclass(frozen=True)
class PRope(Rotation):
    """``Rope1D`` in which the pairs from ⌊p·d/2⌋ on are not rotated; the others keep their frequencies.

    This differs from ``partial_rotary_factor``, which also changes the frequencies: for d = 16 and p = 1/4 they are
    [1, 0.3162, 0, …] here and [1, 0.01] there.

    Source: "Round and round we go!" (Barbero et al., 2024).

    >>> PRope(head_dim=16, p=0.25).rotary.inv_freq_array.round(4).tolist()
    [1.0, 0.3162, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Args:
        head_dim: channels of a head; even.
        p: fraction of the pairs that are rotated, 0 to 1.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    p: float = 0.5
    theta: float = 10000.0
    name: ClassVar[str] = "p-rope"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=1, scaling=PRoPE(self.p))


@dataclass(frozen=True)
class HoPE(Rotation):
    """``Rope1D`` whose pairs alternate between rows and columns; the slowest pairs belong to time and are not rotated.

    In a long enough context, even the slowest pair rotates past a quarter turn, and then similar tokens score lower
    than dissimilar ones. A pair with frequency zero never rotates. Time is encoded only by rows and columns, which grow
    with time in the position ids of the source.

    Source: "HoPE: Hybrid of Position Embedding" (Li et al., 2025, arXiv 2505.20444): 48 of 64 pairs are rotated.

    >>> HoPE(head_dim=16, still=2).rotary.pair_axis.tolist()
    [1, 2, 1, 2, 1, 2, -1, -1]

    Args:
        head_dim: channels of a head; even.
        still: number of unrotated pairs, the slowest ones.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    still: int = 2
    theta: float = 10000.0
    name: ClassVar[str] = "hope"

    @cached_property
    def rotary(self) -> Rotary:
        turning = self.head_dim // 2 - integer("still", self.still, minimum=0, maximum=self.head_dim // 2)
        axes = [1 + j % 2 for j in range(turning)] + [-1] * self.still
        return Rotary(self.head_dim, self.theta, axes=3, allocation=axes)


@dataclass(frozen=True)
class MHRope(Rotation):
    """``Rope1D`` with one axis per head: each axis has all frequencies, but only in some of the heads.

    If several axes share the pairs of a head, each axis has only some of the frequencies. Here each head has a single
    axis, and later layers combine the axes. Query heads that share a key head use the same axis as that key head.

    Source: "Revisiting Multimodal Positional Encoding" (Huang et al., 2025, arXiv 2510.23095): its axes have 2, 3 and 3
        of 8 heads.

    >>> MHRope(head_dim=4).rotate([[[1] * 4] * 4], [[1], [0], [0]]).round(4).tolist()[0][1:3]
    [[-0.3012, 0.99, 1.3818, 1.0099], [1.0, 1.0, 1.0, 1.0]]

    Args:
        head_dim: channels of a head; even.
        head_axes: axis of each head; 0 is time.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    head_axes: tuple[int, ...] = (0, 0, 1, 2)
    theta: float = 10000.0
    name: ClassVar[str] = "mhrope"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, allocation="heads", head_axes=self.head_axes)
