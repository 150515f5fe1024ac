"""Layers of models as tensors to rotate, and what their rotation should be: a formula in float64 from ids of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.rotary import DevicePositions, Norm, Rotary
from mmpos.rotary.device import Implementation
from mmpos.segments.kinds import Text
from mmpos.segments.table import SegmentTable
from mmpos.support.cached import cached_property
from mmpos_bench.proofs import holds
from mmpos_bench.workloads import Document, Ids, loop_ids, workload

Pair = tuple[Tensor, Tensor]

THETA, SCHEME, EPS = 10000.0, "rope-tie", 1e-6
PAGE = 16  # slots in a block of the cache
_BLOCK = 1024  # tokens that are judged at a time, in float64

ROUNDING = {torch.bfloat16: (1.01 * 2**-8, 2**-6), torch.float32: (1e-6, 2e-6)}
"""Greatest error, over the length of the pair that turns: of one rounding, and with cos and sin rounded before."""


@dataclass(frozen=True)
class LayerShape:
    """A layer of a model: heads, their channels, and how the axes share them."""

    q_heads: int
    k_heads: int
    head_dim: int
    allocation: str = "interleaved"


SHAPES = {
    "7B layer": LayerShape(32, 8, 128),
    "72B layer": LayerShape(64, 8, 128),
    "vision encoder": LayerShape(16, 16, 80, "axial"),
}


def interleaved(tokens: int, documents: int = 1) -> list[Document]:
    """Make documents of equal length, an image of 16×16 in every 320 tokens, or of 2×2 where they are shorter."""
    each = tokens // documents
    side, every = (16, 320) if each >= 320 else (2, 8)
    return workload(documents, each, each // every, side)


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
        self.rotary = Rotary(shape.head_dim, theta=THETA, allocation=shape.allocation, axes=2)
        self.positions: PositionTable = place(SegmentTable.from_documents(documents), SCHEME)
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
        drawn = torch.rand(2, self.shape.head_dim, generator=generator, device=self.device) + 0.5
        q, k = drawn.to(self.dtype).unbind()
        return q, k

    @property
    def norm(self) -> Norm:
        """Of q and k."""
        return Norm(*self.weights, EPS)

    def normed(self, pair: Pair) -> Pair:
        """Normalise the heads of q and k, each by its own weight."""
        q, k = (rms_norm(x, w.shape, w.to(x.dtype), EPS) for x, w in zip(pair, self.weights, strict=True))
        return q, k

    @cached_property
    def angles(self) -> Tensor:
        """Those of all tokens, (tokens, pairs)."""
        return self.angles_of(loop_ids(self.documents, SCHEME))

    @cached_property
    def following(self) -> tuple[PositionTable, Tensor]:
        """As many tokens of text that follow the document, as generation places them, and their angles."""
        longer: Document = [*self.documents[0], Text(self.tokens)]
        return self.positions.decode(self.tokens), self.angles_of(loop_ids([longer], SCHEME)[:, -self.tokens :])

    def angles_of(self, dense: Ids) -> Tensor:
        """Compute (tokens, pairs) float64 angles of (axes, tokens) ids: every pair's position by its frequency."""
        ids = torch.from_numpy(dense).to(self.device)
        dim = self.shape.head_dim
        pair = torch.arange(dim // 2, device=self.device, dtype=torch.float64)
        if self.shape.allocation == "axial":  # the first half of the pairs turns by rows, the other by columns
            axis, step, ladder = pair // (dim // 4), pair % (dim // 4), dim // 2
        else:
            axis, step, ladder = pair % 2, pair, dim
        return ids[axis.long()].T * THETA ** (-2 * step / ladder)

    @cached_property
    def tables(self) -> Pair:
        """cos and sin as models hand them to their layers: (1, tokens, head_dim) in the dtype of q and k."""
        cos, sin = (
            torch.cat((table, table), dim=-1).to(self.dtype)[None] for table in (self.angles.cos(), self.angles.sin())
        )
        return cos, sin

    def judge(
        self, got: Sequence[Tensor], before: Sequence[Tensor], *, rounded: bool = False, angles: Tensor | None = None
    ) -> None:
        """Check a rotation at every token and channel.

        Args:
            got: rotated q and k, or one of them.
            before: q and k themselves.
            rounded: whether by cos and sin in the dtype of q and k.
            angles: other ones than those of the positions, such as their negatives.

        Raises:
            NotEqualError: saying how far it is from the formula.
        """
        at_most = ROUNDING[self.dtype][rounded]
        angles = self.angles if angles is None else angles
        errors = [
            _error(after[:, at : at + _BLOCK], x[:, at : at + _BLOCK], angles[at : at + _BLOCK])
            for after, x in zip(got, before, strict=True)
            for at in range(0, self.tokens, _BLOCK)
        ]
        worst = float(torch.stack(errors).amax())  # NaN where one is, which Python's max would lose
        holds(worst <= at_most, f"an error of {worst:.1e}", f"at most {at_most:.1e}")


def _error(got: Tensor, x: Tensor, angles: Tensor) -> Tensor:
    """Measure the greatest difference from x turned by angles, over the length of the pair; NaN where anything is."""
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    a, b = x.double().chunk(2, dim=-1)
    turned_a, turned_b = got.double().chunk(2, dim=-1)
    wrong = torch.hypot(a * cos - b * sin - turned_a, b * cos + a * sin - turned_b)
    return (wrong / torch.hypot(a, b).clamp_min(1e-30)).amax()
