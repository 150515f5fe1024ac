"""Context-parallel shards of a batch: which tokens, labels and pieces of images a rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmpos.data.examples import IGNORE_INDEX
from mmpos.errors import UnsupportedError
from mmpos.positions.table import Layout
from mmpos.rotary.device import DevicePositions
from mmpos.support.checks import IntArray
from mmpos.support.ragged import ragged_arange

if TYPE_CHECKING:
    from mmpos.data.batch import Batch

PER_TOKEN = ("input_ids", "labels", "text_positions", "attention_mask")
"""The tensors of a batch that have one value per token."""


def shift_labels(batch: Batch) -> Batch:
    """See ``Batch.shift_labels``."""
    if batch.shifted:
        return batch
    labels = torch.full_like(batch.labels, IGNORE_INDEX)
    flat = labels.view(-1)
    flat[:-1] = batch.labels.reshape(-1)[1:]
    flat[batch.cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    return replace(batch, labels=labels, shifted=True)


def shard(batch: Batch, rank: int, world_size: int, layout: Layout) -> Batch:
    """See ``Batch.shard``."""
    if str(layout).endswith("sequence") and not batch.packed:
        raise UnsupportedError(f"layout: got {layout!r} for a padded batch, want 'zigzag' or 'contiguous', row by row")
    starts, stops = batch.positions.shard_ranges(rank, world_size, layout)
    positions = batch.positions.shard(rank, world_size, layout)
    indices = torch.from_numpy(batch.positions.shard_indices(rank, world_size, layout)).to(batch.device)
    shape = (*batch.input_ids.shape[:-1], -1)
    whole = shift_labels(batch)
    per_token = {name: tensor for name in PER_TOKEN if (tensor := getattr(whole, name)) is not None}
    spans, features = (tensor.cpu().numpy() for tensor in (batch.image_spans, batch.feature_spans))
    image_spans, feature_spans = _pieces(spans, features[:, 0], starts, stops)
    return replace(
        whole,
        positions=positions,
        device_positions=DevicePositions.from_table(positions, batch.device),
        cu_seqlens=torch.from_numpy(positions.cu_seqlens).to(batch.device),
        image_spans=torch.from_numpy(image_spans).to(batch.device),
        feature_spans=torch.from_numpy(feature_spans).to(batch.device),
        world_size=batch.world_size * world_size,
        **{name: tensor.reshape(-1)[indices].reshape(shape) for name, tensor in per_token.items()},
    )


def _pieces(spans: IntArray, features: IntArray, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray]:
    """The pieces of spans inside ascending token ranges that are then put side by side.

    Args:
        spans: (spans, 2) first token and one past the last.
        features: (spans,) the feature of each span's first token.
        starts: (ranges,) first token.
        stops: (ranges,) one past the last token.

    Returns:
        (pieces, 2) tokens, counted over the ranges, and (pieces, 2) features.
    """
    first = np.searchsorted(stops, spans[:, 0], side="right")
    count = np.maximum(np.searchsorted(starts, spans[:, 1], side="left") - first, 0)
    owner, piece = ragged_arange(count, first)
    begin = np.maximum(starts[piece], spans[owner, 0])
    lengths = np.minimum(stops[piece], spans[owner, 1]) - begin
    before = (stops - starts).cumsum() - (stops - starts)
    token = before[piece] + begin - starts[piece]
    feature = features[owner] + begin - spans[owner, 0]
    return tuple(np.stack([value, value + lengths], axis=1) for value in (token, feature))  # type: ignore[return-value]
