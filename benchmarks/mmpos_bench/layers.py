"""Model layers as tensors to rotate, and a float64 formula, with ids from a plain loop, that judges the rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary import DevicePositions, Norm, Rotary
from mmpos.rotary.device import Implementation
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.cached import cached_property
from mmpos_bench.proofs import holds
from mmpos_bench.workloads import Document, loop_ids, workload

Pair = tuple[Tensor, Tensor]

THETA, EPS = 10000.0, 1e-6
PAGE = 16  # slots per block of the cache
_BLOCK = 1024  # tokens per block for the float64 check

ROUNDING = {torch.bfloat16: (1.01 * 2**-8, 2**-6), torch.float32: (1e-6, 2e-6)}
"""Largest allowed error relative to the length of the rotated pair, with one rounding and with rounded cos and sin."""


def interleaved(tokens: int) -> Document:
    """Build a document with a 16×16 image every 320 tokens or, if it is too short, a 2×2 image every 8 tokens."""
    side, every = (16, 320) if tokens >= 320 else (2, 8)
    (document,) = workload(1, tokens, tokens // every, side)
    return document


def prompted_image(tokens: int) -> Document:
    """Build a document consisting of a prompt, with about a ninth of the tokens, and a square image."""
    side = isqrt(tokens - tokens // 9)
    return [Text(tokens - side * side), Grid(side, side)]


@dataclass(frozen=True)
class LayerShape:
    """Shape of a model layer: its heads, rotation, documents and scheme.

    Args:
        q_heads: number of q heads.
        k_heads: number of k heads.
        head_dim: channels per head.
        axes_dim: channels per axis, each axis with its own ladder; empty if axes interleave on one ladder.
        pairing: pairing of channels.
        scheme: position scheme that computes the ids.
        document: function that builds a document with a given number of tokens.
    """

    q_heads: int
    k_heads: int
    head_dim: int
    axes_dim: tuple[int, ...] = ()
    pairing: Literal["half", "adjacent"] = "half"
    scheme: str = "rope-tie"
    document: Callable[[int], Document] = interleaved

    @property
    def rotary(self) -> Rotary:
        """Rotation of the heads."""
        axes_dim, axes = self.axes_dim or None, len(self.axes_dim) or 2
        allocation = "axial" if axes_dim else "interleaved"
        return Rotary(
            self.head_dim, theta=THETA, axes=axes, allocation=allocation, axes_dim=axes_dim, pairing=self.pairing
        )

    @property
    def toy(self) -> LayerShape:
        """The same layer with the smallest number and size of heads."""
        axes_dim = {0: (), 2: (8, 8), 3: (4, 6, 6)}[len(self.axes_dim)]
        return replace(self, q_heads=2, k_heads=1, head_dim=16, axes_dim=axes_dim)


SHAPES = {
    "7B layer": LayerShape(32, 8, 128),
    "72B layer": LayerShape(64, 8, 128),
    "vision encoder": LayerShape(16, 16, 80, (40, 40)),
    "FLUX.1 layer": LayerShape(24, 24, 128, (16, 56, 56), "adjacent", "flux", prompted_image),
}


class Layer:
    """Tensors q and k of one layer, with their positions in the forms that contestants need.

    Args:
        shape: shape of the layer.
        documents: documents packed into one row.
        dtype: dtype of q and k.
        device: device of all tensors.
        sets: number of sets of q, k, v and slots; with several sets, each call in a graph finds its memory cold.
        how: the ``implementation`` argument of our calls.
    """

    def __init__(
        self,
        shape: LayerShape,
        documents: list[Document],
        dtype: torch.dtype,
        device: str,
        sets: int = 1,
        how: Implementation = "auto",
    ) -> None:
        self.shape, self.documents, self.dtype, self.device, self.how = shape, documents, dtype, device, how
        self.rotary = shape.rotary
        self.positions: PositionTable = place(SegmentTable.from_documents(documents), shape.scheme)
        self.tokens = self.positions.num_tokens
        self.table = DevicePositions.from_table(self.positions, device)
        self.dense = torch.from_numpy(self.positions.dense()).to(device)
        self.sets = [self.random(seed) for seed in range(sets)]
        self.q, self.k = self.sets[0]

    def random(self, seed: int) -> Pair:
        """Draw random q and k of shape (1, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        q, k = (
            torch.randn(1, self.tokens, heads, self.shape.head_dim, generator=generator, device=self.device)
            for heads in (self.shape.q_heads, self.shape.k_heads)
        )
        return q.to(self.dtype), k.to(self.dtype)

    @property
    def moved(self) -> int:
        """Number of bytes of q and k that are read and written."""
        return 2 * (self.q.nbytes + self.k.nbytes)

    @cached_property
    def values(self) -> list[Tensor]:
        """The v tensor of each set."""
        return [torch.randn_like(k) for _, k in self.sets]

    @cached_property
    def caches(self) -> Pair:
        """Paged caches of keys and values with blocks for all sets."""
        blocks = len(self.sets) * -(-self.tokens // PAGE)
        keys, values = torch.zeros(2, blocks, PAGE, *self.k.shape[2:], dtype=self.dtype, device=self.device).unbind(0)
        return keys, values

    @cached_property
    def slots(self) -> list[Tensor]:
        """Slots of each set, in randomly permuted blocks."""
        order = torch.randperm(self.caches[0].shape[0], generator=torch.Generator().manual_seed(0))
        rows = (order[:, None] * PAGE + torch.arange(PAGE)).view(len(self.sets), -1)
        return [row[: self.tokens].to(self.device) for row in rows]

    @cached_property
    def weights(self) -> Pair:
        """Norm weights of q and of k."""
        generator = torch.Generator(self.device).manual_seed(7)
        q, k = torch.rand(2, self.shape.head_dim, generator=generator, device=self.device).to(self.dtype) + 0.5
        return q, k

    @property
    def norm(self) -> Norm:
        """Norm of q and k."""
        return Norm(*self.weights, EPS)

    def normed(self, pair: Pair) -> Pair:
        """Normalise q and k with their weights."""
        q, k = (rms_norm(x, w.shape, w.to(x.dtype), EPS) for x, w in zip(pair, self.weights, strict=True))
        return q, k

    @cached_property
    def angles(self) -> Tensor:
        """Float64 angles of all tokens, (tokens, pairs): each pair's id times its frequency."""
        ids = torch.from_numpy(loop_ids(self.documents, self.shape.scheme)).to(self.device)
        dims = self.shape.axes_dim or (self.shape.head_dim,)
        frequencies = [THETA ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim) for dim in dims]
        axis = torch.arange(self.shape.head_dim // 2) % 2
        if self.shape.axes_dim:
            axis = torch.arange(len(dims)).repeat_interleave(torch.tensor(dims) // 2)
        return ids[axis.to(self.device)].T * torch.cat(frequencies).to(self.device)

    @cached_property
    def tables(self) -> Pair:
        """Tables of cos and sin as models pass them to layers: (1, tokens, head_dim) in the dtype of q and k."""
        cos, sin = (self.of_channels(table).to(self.dtype)[None] for table in (self.angles.cos(), self.angles.sin()))
        return cos, sin

    def of_channels(self, table: Tensor) -> Tensor:
        """Repeat (tokens, pairs) to (tokens, head_dim), for both channels of each pair."""
        if self.shape.pairing == "adjacent":
            return table.repeat_interleave(2, dim=-1)
        return torch.cat((table, table), dim=-1)

    def judge(
        self,
        got: Sequence[Tensor],
        before: Sequence[Tensor],
        *,
        rounded: bool = False,
        norm: bool = False,
        back: bool = False,
    ) -> None:
        """Check a rotation at every token and channel.

        Args:
            got: rotated q and k, or one of them.
            before: q and k before the rotation.
            rounded: whether cos and sin have the dtype of q and k.
            norm: whether both q and k are normalised first.
            back: whether the rotation is by the negative angles.

        Raises:
            NotEqualError: the error exceeds its bound; the message contains the error.
        """
        at_most = ROUNDING[self.dtype][rounded]
        angles = -self.angles if back else self.angles
        errors: list[Tensor] = []
        for at in range(0, self.tokens, _BLOCK):
            block = slice(at, at + _BLOCK)
            doubles = [x[:, block].double() for x in before]
            want = self.normed((doubles[0], doubles[1])) if norm else doubles
            errors += [self._error(out[:, block], x, angles[block]) for out, x in zip(got, want, strict=True)]
        worst = float(torch.stack(errors).amax())  # keeps NaN, unlike Python's max
        holds(worst <= at_most, f"an error of {worst:.1e}", f"at most {at_most:.1e}")

    def _error(self, got: Tensor, x: Tensor, angles: Tensor) -> Tensor:
        """Return the largest error of ``got`` relative to the length of its pair, or NaN if any error is NaN."""
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        (a, b), (got_a, got_b) = self._pairs(x), self._pairs(got.double())
        error = torch.hypot(a * cos - b * sin - got_a, b * cos + a * sin - got_b)
        return (error / torch.hypot(a, b).clamp_min(1e-30)).amax()

    def _pairs(self, x: Tensor) -> Pair:
        """Return views of the first and second channels of all pairs."""
        a, b = (x[..., ::2], x[..., 1::2]) if self.shape.pairing == "adjacent" else x.chunk(2, dim=-1)
        return a, b
