"""A packed batch as a plain loop over documents makes it in torch, with the ids of every document."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.data.examples import IGNORE_INDEX, Example

__all__ = ["collate_loop"]


def collate_loop(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens,) token ids and labels, (axes, tokens) position ids, and (documents + 1,) first tokens."""
    ids, labels, positions, cu_seqlens = [], [], [], [0]
    for example in examples:
        ids.append(torch.from_numpy(example.sequence.input_ids))
        labels.append(torch.tensor(example.labels))
        labels[-1][0] = IGNORE_INDEX
        positions.append(torch.from_numpy(example.sequence.positions.dense()))
        cu_seqlens.append(cu_seqlens[-1] + example.num_tokens)
    return torch.cat(ids), torch.cat(labels), torch.cat(positions, dim=1), torch.tensor(cu_seqlens, dtype=torch.int32)
