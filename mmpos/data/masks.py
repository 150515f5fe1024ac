"""Attention masks of a batch as functions of two tokens, read off the same table as its positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions.rows import FIRST_SEGMENT
from mmpos.positions.table import PositionTable
from mmpos.support.checks import boolean

__all__ = ["MaskMod", "mask_mod", "whole_images"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, q_idx, kv_idx) -> bool, whether the one token sees the other; what FlexAttention takes."""


def mask_mod(
    positions: PositionTable,
    *,
    padded: bool = False,
    image_spans: npt.ArrayLike | Tensor | None = None,
    device: torch.device | str | int = "cpu",
) -> MaskMod:
    """The mask of a batch for ``create_block_mask`` and ``flex_attention``: causal, and documents apart.

    Padding sees nothing and is seen by nothing. The row of a padding token is thus masked throughout:
    flex_attention gives zeros for it, where a plain softmax would give NaN.

    Args:
        positions: the table of the whole batch, no context-parallel shard of it.
        padded: whether rows of the batch are the documents, all of one length, instead of one packed row (b = 0).
        image_spans: (images, 2) integers, ascending: the first patch of each image and one past its last, counted
            over the batch, separators between rows included; the tokens of an image then see one another both ways.
            None is causal everywhere. A table alone cannot tell a row of patches from text, hence the spans.
        device: where the mask will be read; the spans, if a tensor, lie there as well.

    Returns:
        a function for B = 1 and Q = KV = tokens, or with padded for B = documents and Q = KV = length.

    Raises:
        InvalidInputError: padded, and documents of different lengths; or spans of another shape.
    """
    shape = (1, positions.num_tokens)
    if boolean("padded", padded):
        shape = (positions.num_documents, positions.max_seqlen)
        if shape[0] * shape[1] != positions.num_tokens:
            got = f"{positions.lengths.min()} to {shape[1]} tokens"
            raise InvalidInputError(f"positions: got documents of {got}, want one length for padded=True")
    document = torch.from_numpy(_documents(positions).reshape(shape)).to(device)
    image = None if image_spans is None else _images(image_spans, positions.num_tokens, device).reshape(shape)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        mine = document[b, q_idx]
        return (mine == document[b, kv_idx]) & (mine >= 0) & (q_idx >= kv_idx)

    def causal_but_for_images(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert image is not None
        mine = image[b, q_idx]
        return causal(b, h, q_idx, kv_idx) | ((mine == image[b, kv_idx]) & (mine >= 0))

    return causal if image is None else causal_but_for_images


def whole_images(image_spans: Tensor, feature_spans: Tensor, grid_thw: Tensor) -> Tensor:
    """(images, 2) first patch of each image and one past its last, of a batch that is no shard.

    Args:
        image_spans: (spans, 2) of images, or of their rows where those end in separators.
        feature_spans: (spans, 2) the rows of features that belong there, as in Batch.
        grid_thw: (images, 3) frames, height, width after merging.
    """
    images = len(grid_thw)
    if len(image_spans) == images:
        return image_spans
    ends = grid_thw.prod(dim=1).cumsum(0)
    image = torch.searchsorted(ends, feature_spans[:, 0].contiguous(), right=True)
    edges = torch.searchsorted(image, torch.arange(images + 1, device=ends.device))
    return torch.stack([image_spans[edges[:-1], 0], image_spans[edges[1:] - 1, 1]], dim=1)


def _documents(positions: PositionTable) -> npt.NDArray[np.int32]:
    """(tokens,) the document of each token, -1 for padding."""
    segments = np.arange(positions.num_segments)
    document = np.searchsorted(positions.documents[FIRST_SEGMENT], segments, side="right") - 1
    document[positions.is_padding] = -1
    return document.astype(np.int32).repeat(positions.segment_lengths)


def _images(image_spans: Any, tokens: int, device: torch.device | str | int) -> Tensor:
    """(tokens,) the image of each token, -1 for others; made on the device, without waiting for it."""
    spans = torch.as_tensor(image_spans, device=device)
    if spans.dim() != 2 or spans.shape[1] != 2 or spans.is_floating_point():
        raise InvalidInputError(f"image_spans: got {spans.dtype} {tuple(spans.shape)}, want integers (images, 2)")
    token = torch.arange(tokens, device=spans.device)
    if not len(spans):
        return torch.full_like(token, -1)
    image = torch.searchsorted(spans[:, 0].contiguous(), token, right=True) - 1
    inside = (image >= 0) & (token < spans[image.clamp(min=0), 1])
    return torch.where(inside, image, -1).to(torch.int32)
