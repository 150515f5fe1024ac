"""Rotary position embedding of two axes and of more, each turning channels of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mmpos.encodings.base import HEAD_DIM, Rotation
from mmpos.rotary import Rotary

__all__ = ["Rope2D", "RopeND"]


@dataclass(frozen=True)
class Rope2D(Rotation):
    """The first half of the channels turns by the row and the second by the column, each as RoPE-1D of d/2 channels.

    Both axes have the same frequencies theta^(−4j/d). Turning one pair by both would mix their distances.

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
    """As ``Rope2D`` with n axes: n equal parts of the channels, each as RoPE-1D of d/n channels.

    Source: kexue.fm 8397; "You could have designed state of the art positional encoding" (Fleetwood, 2024).

    >>> RopeND(head_dim=12, num_axes=3).rotary.inv_freq_array.tolist()
    [1.0, 0.01, 1.0, 0.01, 1.0, 0.01]

    Args:
        head_dim: channels of a head; a multiple of 2·num_axes.
        num_axes: n, the axes.
        theta: base of the frequencies.
    """

    head_dim: int = HEAD_DIM
    num_axes: int = 3
    theta: float = 10000.0
    name: ClassVar[str] = "rope-nd"

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.head_dim, self.theta, axes=self.num_axes, allocation="axial", pairing="adjacent")
