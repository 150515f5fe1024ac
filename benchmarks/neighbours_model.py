"""A small causal transformer that knows positions by the rotations of mmpos alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mmpos.rotary import DevicePositions, Rotary, apply_rotary


@dataclass(frozen=True)
class Shape:
    """The sizes of the model.

    Args:
        layers: of attention and a feed-forward net.
        heads: of attention, in each.
        head_dim: channels of a head.
        hidden: channels inside the feed-forward nets.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    hidden: int = 128

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention over what came before, then a feed-forward net, each added to its normalised input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.net = nn.Sequential(nn.Linear(width, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, width))

    def forward(self, x: Tensor, positions: DevicePositions | None, rotary: Rotary | None) -> Tensor:
        """(batch, seq, width) to the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if positions is not None and rotary is not None:
            q, k = apply_rotary(q, k, positions, rotary, layout="bshd")
        # Padding stands on the right, so causal attention keeps it from every token.
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.net(self.norm2(x))


class Model(nn.Module):
    """Logits of colours; what is drawn for its parameters does not depend on the rotation.

    Args:
        shape: its sizes.
        vocabulary: of input ids.
        colours: to answer with.
        rotary: of q and k; None turns nothing.
    """

    def __init__(self, shape: Shape, vocabulary: int, colours: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.rotary = rotary
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, colours, bias=False)

    def forward(self, input_ids: Tensor, asked: Tensor, positions: DevicePositions | None) -> Tensor:
        """Logits where answers are due.

        Args:
            input_ids: (batch, seq) int64.
            asked: (batch, questions) int64 columns.
            positions: of batch × seq tokens; not read without a rotation.

        Returns:
            (batch, questions, colours).
        """
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, positions, self.rotary)
        due = asked[..., None].expand(-1, -1, x.shape[-1])
        logits: Tensor = self.head(self.norm(x.gather(1, due)))
        return logits
