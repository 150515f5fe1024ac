"""How serving engines compute M-RoPE ids today: a Python loop with one np.indices per image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.segments.kinds import Grid
from mmpos_bench.workloads import Document


def engine_loop(documents: list[Document]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """(3, tokens) ids of packed documents and the delta of each."""
    packed, deltas = [], []
    for document in documents:
        blocks: list[npt.NDArray[np.int64]] = []
        cursor = tokens = 0
        for part in document:
            if isinstance(part, Grid):
                shape = (part.frames, part.height, part.width)
                blocks.append(np.indices(shape).reshape(3, -1) + cursor)
            else:
                blocks.append(np.broadcast_to(np.arange(part.length), (3, part.length)) + cursor)
            cursor = int(blocks[-1].max()) + 1
            tokens += blocks[-1].shape[1]
        packed.append(np.concatenate(blocks, axis=1))
        deltas.append(cursor - tokens)
    return np.concatenate(packed, axis=1), deltas
