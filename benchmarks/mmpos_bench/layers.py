"""Layers of models as tensors to rotate, and what their rotation should be: a formula in float64 from ids of a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt
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
from mmpos_bench.workloads import Document, Ids, loop_ids, workload

Pair = tuple[Tensor, Tensor]

THETA, EPS = 10000.0, 1e-6
PAGE = 16  # slots in a block of the cache
_BLOCK = 1024  # tokens that are judged at a time, in float64

ROUNDING = {torch.bfloat16: (1.01 * 2**-8, 2**-6), torch.float32: (1e-6, 2e-6)}
"""Greatest error, over the length of the pair that turns: of one rounding, and with cos and sin rounded before."""


def interleaved(tokens: int) -> Document:
    """Make a document of text and images, one of 16×16 in every 320 tokens, or of 2×2 where it is shorter."""
    side, every = (16, 320) if tokens >= 320 else (2, 8)
    (document,) = workload(1, tokens, tokens // every, side)
    return document


def prompted_image(tokens: int) -> Document:
    """Make a document of a prompt, about a ninth of its tokens, and the square image that is made of it."""
    side = isqrt(tokens - tokens // 9)
    return [Text(tokens - side * side), Grid(side, side)]


def video(tokens: int) -> Document:
    """Make a document of one video: 21 frames of 30 rows, or the largest divisors of these that its tokens have."""
    frames = gcd(tokens, 21)
    height = gcd(tokens // frames, 30)
    return [Grid(height, tokens // frames // height, frames=frames)]


@dataclass(frozen=True)
class LayerShape:
    """A layer of a model: its heads and their rotation, its documents and where a scheme places them.

    Args:
        q_heads: heads of q.
        k_heads: heads of k.
        head_dim: channels of a head.
        axes_dim: channels that each axis turns, by a ladder of its own; none where the axes take turns on one ladder.
        pairing: which two channels are a pair.
        scheme: of the ids.
        document: makes a document of as many tokens.
        joint_norm: whether q and k have one norm over all heads each, not one over every head.
    """

    q_heads: int
    k_heads: int
    head_dim: int
    axes_dim: tuple[int, ...] = ()
    pairing: Literal["half", "adjacent"] = "half"
    scheme: str = "rope-tie"
    document: Callable[[int], Document] = interleaved
    joint_norm: bool = False

    @property
    def rotary(self) -> Rotary:
        """Rotation of its heads."""
        axes_dim, axes = self.axes_dim or None, len(self.axes_dim) or 2
        allocation = "axial" if axes_dim else "interleaved"
        return Rotary(
            self.head_dim, theta=THETA, axes=axes, allocation=allocation, axes_dim=axes_dim, pairing=self.pairing
        )

    @property
    def toy(self) -> LayerShape:
        """The same with the fewest and shortest heads."""
        axes_dim = {0: (), 2: (8, 8), 3: (4, 6, 6)}[len(self.axes_dim)]
        return replace(self, q_heads=2, k_heads=1, head_dim=16, axes_dim=axes_dim)


SHAPES = {
    "7B layer": LayerShape(32, 8, 128),
    "72B layer": LayerShape(64, 8, 128),
    "vision encoder": LayerShape(16, 16, 80, (40, 40)),
    "FLUX.1 layer": LayerShape(24, 24, 128, (16, 56, 56), "adjacent", "flux", prompted_image),
    "video layer": LayerShape(40, 40, 128, (44, 42, 42), "adjacent", "wan", video),
    "Wan layer": LayerShape(40, 40, 128, (44, 42, 42), "adjacent", "wan", video, joint_norm=True),
}


class Layer:
    """q and k of one layer, and their positions in the forms that contestants take.

    Args:
        shape: of the layer.
        documents: what the tokens are, all together one row.
        dtype: of q and k.
        device: where everything lies.
        sets: of q, k, v and slots, so that each of several calls finds its own cold.
        how: the implementation that ours are called with.
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
        """Draw new tensors like q and k, (1, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        q, k = (
            torch.randn(1, self.tokens, heads, self.shape.head_dim, generator=generator, device=self.device)
            for heads in (self.shape.q_heads, self.shape.k_heads)
        )
        return q.to(self.dtype), k.to(self.dtype)

    @property
    def moved(self) -> int:
        """Bytes of q and k, read and written."""
        return 2 * (self.q.nbytes + self.k.nbytes)

    @cached_property
    def values(self) -> list[Tensor]:
        """v of each set."""
        return [torch.randn_like(k) for _, k in self.sets]

    @cached_property
    def caches(self) -> Pair:
        """Paged keys and values, with room for all sets."""
        blocks = len(self.sets) * -(-self.tokens // PAGE)
        keys, values = torch.zeros(2, blocks, PAGE, *self.k.shape[2:], dtype=self.dtype, device=self.device).unbind(0)
        return keys, values

    @cached_property
    def slots(self) -> list[Tensor]:
        """Slots of each set, in blocks that are dealt out anew."""
        order = torch.randperm(self.caches[0].shape[0], generator=torch.Generator().manual_seed(0))
        rows = (order[:, None] * PAGE + torch.arange(PAGE)).view(len(self.sets), -1)
        return [row[: self.tokens].to(self.device) for row in rows]

    @cached_property
    def weights(self) -> Pair:
        """Of the norms of q and of k."""
        generator = torch.Generator(self.device).manual_seed(7)
        q, k = (
            (torch.rand(width, generator=generator, device=self.device) + 0.5).to(self.dtype)
            for width in self._norm_widths
        )
        return q, k

    @property
    def _norm_widths(self) -> tuple[int, int]:
        heads = (self.shape.q_heads, self.shape.k_heads) if self.shape.joint_norm else (1, 1)
        return heads[0] * self.shape.head_dim, heads[1] * self.shape.head_dim

    @property
    def norm(self) -> Norm:
        """Of q and k."""
        return Norm(*self.weights, EPS)

    def normed(self, pair: Pair) -> Pair:
        """Normalise q and k, each by its own weight."""
        q, k = (
            rms_norm(x.flatten(2) if self.shape.joint_norm else x, w.shape, w.to(x.dtype), EPS).view_as(x)
            for x, w in zip(pair, self.weights, strict=True)
        )
        return q, k

    @cached_property
    def angles(self) -> Tensor:
        """Those of all tokens, (tokens, pairs)."""
        return self.angles_of(loop_ids(self.documents, self.shape.scheme))

    @cached_property
    def following(self) -> tuple[PositionTable, Tensor]:
        """As many tokens of text that follow the document, as generation places them, and their angles."""
        longer: Document = [*self.documents[0], Text(self.tokens)]
        ids = loop_ids([longer], self.shape.scheme)[:, -self.tokens :]
        return self.positions.decode(self.tokens), self.angles_of(ids)

    def angles_of(self, dense: Ids) -> Tensor:
        """Compute (tokens, pairs) float64 angles of (axes, tokens) ids: every pair's position by its frequency."""
        ids = torch.from_numpy(dense).to(self.device)
        dims = self.shape.axes_dim or (self.shape.head_dim,)
        frequencies = [THETA ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim) for dim in dims]
        axis = torch.arange(self.shape.head_dim // 2) % 2
        if self.shape.axes_dim:
            axis = torch.arange(len(dims)).repeat_interleave(torch.tensor(dims) // 2)
        return ids[axis.to(self.device)].T * torch.cat(frequencies).to(self.device)

    @cached_property
    def tables(self) -> Pair:
        """cos and sin as models hand them to their layers: (1, tokens, head_dim) in the dtype of q and k."""
        cos, sin = (self.of_channels(table).to(self.dtype)[None] for table in (self.angles.cos(), self.angles.sin()))
        return cos, sin

    def of_channels(self, table: Tensor) -> Tensor:
        """Give both channels of each pair the pair's number: (tokens, pairs) to (tokens, head_dim)."""
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
        angles: Tensor | None = None,
    ) -> None:
        """Check a rotation at every token and channel.

        Args:
            got: rotated q and k, or one of them.
            before: q and k themselves.
            rounded: whether by cos and sin in the dtype of q and k.
            norm: whether q and k, both, are normalised before.
            angles: other ones than those of the positions, such as their negatives.

        Raises:
            NotEqualError: saying how far it is from the formula.
        """
        at_most = ROUNDING[self.dtype][rounded]
        angles = self.angles if angles is None else angles
        errors: list[Tensor] = []
        for at in range(0, self.tokens, _BLOCK):
            some = slice(at, at + _BLOCK)
            wide = [x[:, some].double() for x in before]
            want = self.normed((wide[0], wide[1])) if norm else wide
            errors += [self._error(one[:, some], x, angles[some]) for one, x in zip(got, want, strict=True)]
        worst = float(torch.stack(errors).amax())  # NaN where one is, which Python's max would lose
        holds(worst <= at_most, f"an error of {worst:.1e}", f"at most {at_most:.1e}")

    def _error(self, got: Tensor, x: Tensor, angles: Tensor) -> Tensor:
        """Measure how far got is at most from x turned by angles, over the length of the pair; NaN where one is."""
        cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        (a, b), (turned_a, turned_b) = self._pairs(x), self._pairs(got.double())
        wrong = torch.hypot(a * cos - b * sin - turned_a, b * cos + a * sin - turned_b)
        return (wrong / torch.hypot(a, b).clamp_min(1e-30)).amax()

    def _pairs(self, x: Tensor) -> Pair:
        """View the first and the second channels of pairs."""
        a, b = (x[..., ::2], x[..., 1::2]) if self.shape.pairing == "adjacent" else x.chunk(2, dim=-1)
        return a, b
