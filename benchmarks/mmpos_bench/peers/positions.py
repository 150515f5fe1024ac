"""Position ids computed by other projects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmpos.segments.kinds import Grid
from mmpos.support.checks import IntArray
from mmpos_bench.workloads import Document

RopeIndexes = Callable[[IntArray, int, IntArray], Mapping[str, Callable[[], IntArray]]]
"""Function of (batch, seq) token ids, the placeholder id for patches, and (images, 3) grids before merging. It returns
calls by name, each of which returns (3, batch · seq) ids with the rows of the batch concatenated.
"""


def engine_loop(documents: list[Document]) -> tuple[IntArray, list[int]]:
    """Compute M-RoPE ids as serving engines do, in a Python loop with one np.indices call per image.

    Returns:
        (3, tokens) ids of packed documents, and the delta of each document.
    """
    packed, deltas = [], []
    for document in documents:
        blocks: list[IntArray] = []
        cursor = tokens = 0
        for part in document:
            if isinstance(part, Grid):
                blocks.append(np.indices((part.frames, part.height, part.width)).reshape(3, -1) + cursor)
            else:
                blocks.append(np.broadcast_to(np.arange(part.length), (3, part.length)) + cursor)
            cursor = int(blocks[-1].max()) + 1
            tokens += blocks[-1].shape[1]
        packed.append(np.concatenate(blocks, axis=1))
        deltas.append(cursor - tokens)
    return np.concatenate(packed, axis=1), deltas


def load_rope_index() -> RopeIndexes:
    """Load two rope index functions with merge size 2: that of Transformers' Qwen2-VL, without weights, and our own."""
    import torch
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    from mmpos.integrations.hf.get_rope_index import RopeIndex

    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = Qwen2VLModel.get_vision_position_ids.__get__(model)
    # Transformers annotates tensors of a specific dtype, but torch's functions return plain tensors.
    method: Any = partial(Qwen2VLModel.get_rope_index, model)

    def rope_indexes(
        input_ids: IntArray, image_token_id: int, image_grid_thw: IntArray
    ) -> Mapping[str, Callable[[], IntArray]]:
        ids, grids = torch.from_numpy(input_ids), torch.from_numpy(image_grid_thw)
        kinds = (ids == image_token_id).int()  # not timed, since Transformers' processor provides the kinds
        functions = {"rope_index": RopeIndex(spatial_merge_size=2), "Transformers": method}
        return {name: partial(_rows, function, ids, kinds, grids) for name, function in functions.items()}

    return rope_indexes


def _rows(function: Any, *tensors: Any) -> Any:
    """Call a rope index function and return its ids as a (3, batch · seq) array."""
    return function(*tensors)[0].reshape(3, -1).numpy()
