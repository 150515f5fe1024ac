"""Settings of models and their own get_rope_index in Transformers, on random batches: ids, deltas, next positions."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from layouts import IMAGE, VIDEO, random_layout, rope_index
from model_configs import settings_of

APART = ("cohere_compass", "cosmos3_edge", "cosmos3_omni", "qwen4_exp")
"""Model types whose frames are grids of their own, with timestamps between."""
BATCHES = [pytest.param(100, id="100"), pytest.param(2100, id="2100", marks=pytest.mark.slow)]


def agree(ours: Any, input_ids: Any, mask: Any, ids: Any, deltas: Any) -> None:
    """Compare a placed batch with ids (axes, batch, seq) and deltas (batch,); the ids of padding are left out."""
    real = np.ones(np.shape(input_ids), bool) if mask is None else np.asarray(mask, bool)
    np.testing.assert_array_equal(ours.dense().reshape(np.shape(ids)) * real, np.asarray(ids) * real)
    assert ours.next_positions.tolist() == (np.asarray(deltas) + real.sum(axis=1)).tolist()
    assert ours.deltas.tolist() == np.asarray(deltas).tolist()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize("model", APART)
def test_frames_apart_have_the_ids_of_the_model(model: str, count: int) -> None:
    random, settings = Random(model), settings_of(model)
    for _ in range(count):
        layout = random_layout(random, "qwen3_vl", videos=True)
        told = replace(settings, image_token_id=IMAGE, video_token_id=VIDEO, spatial_merge_size=layout.merge)
        segments = told.segments(layout.input_ids, layout.images, layout.videos, attention_mask=layout.attention_mask)
        agree(told.place(segments), layout.input_ids, layout.attention_mask, *rope_index(model, layout))
