"""M-RoPE ids as Transformers' Qwen2-VL computes them: its own method, given a configuration and no weights."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

__all__ = ["MERGE", "RopeIndex"]

MERGE = 2
"""Patches that Qwen2-VL merges along each side."""


class RopeIndex:
    """The method, with what Transformers' processor hands to it made beforehand, which costs it nothing here.

    Args:
        input_ids: (batch, seq) int64 token ids.
        image_token_id: the placeholder of image patches.
        image_grid_thw: (images, 3) before merging.
    """

    def __init__(
        self, input_ids: npt.NDArray[np.int64], image_token_id: int, image_grid_thw: npt.NDArray[np.int64]
    ) -> None:
        config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=MERGE))
        model: Any = SimpleNamespace(config=config)
        model.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(model)
        # The annotations of Transformers name tensors of one dtype each, which torch's own functions do not return.
        self._method: Any = partial(Qwen2VLModel.get_rope_index, model)
        self._ids = torch.from_numpy(input_ids)
        self._kinds = (self._ids == image_token_id).int()
        self._grids = torch.from_numpy(image_grid_thw)

    def __call__(self) -> npt.NDArray[np.int64]:
        """(3, batch · seq) ids of the batch, row after row."""
        found, _ = self._method(self._ids, self._kinds, self._grids)
        return found.reshape(3, -1).numpy()
