"""Conformance: our ids, deltas and next positions against Transformers' own get_rope_index, on random batches."""

from __future__ import annotations

import numpy as np
import pytest
from layouts import CLASSES, IMAGE, VIDEO, answered

from mmpos import Scheme, place
from mmpos.schemes import MRopeTransformers

COUNT = 350
"""Layouts of each model, with videos and without: 2,100 in all."""


def agreeing(model: str, videos: bool, scheme: str) -> int:
    """Layouts compared; the first that differs fails. Padding is id 0 on both sides and compared, too."""
    compared = 0
    for layout, want in answered(model, videos, COUNT):
        timed = model == "qwen2_5_vl" and scheme == "mrope-transformers"
        known: str | Scheme = MRopeTransformers(tokens_per_second=layout.rate) if timed else scheme
        positions = place(layout.segments(), known)
        np.testing.assert_array_equal(positions.dense().reshape(want.ids.shape), want.ids)
        assert positions.deltas.tolist() == want.deltas.tolist()
        highest = np.where(layout.real, want.ids, -1).max(axis=(0, 2))
        assert positions.next_positions.tolist() == (highest + 1).tolist()
        compared += 1
    return compared


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("model", CLASSES)
def test_on_stills_mrope_is_what_transformers_computes(model: str) -> None:
    assert agreeing(model, False, "mrope") == COUNT


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("model", CLASSES)
def test_with_videos_mrope_transformers_is_what_transformers_computes(model: str) -> None:
    assert agreeing(model, True, "mrope-transformers") == COUNT


def test_on_stills_mrope_transformers_is_mrope() -> None:
    assert agreeing("qwen2_5_vl", False, "mrope-transformers") == COUNT


def test_frames_apart_are_stills_so_mrope_qwen3_is_transformers_qwen3() -> None:
    assert agreeing("qwen3_vl", True, "mrope-qwen3") == COUNT


def test_the_random_batches_hold_every_case() -> None:
    layouts = [layout for model in CLASSES for videos in (False, True) for layout, _ in answered(model, videos, COUNT)]
    assert len(layouts) == 2100
    rows = [(row[real], real) for layout in layouts for row, real in zip(layout.input_ids, layout.real, strict=True)]
    grids = [grid for layout in layouts for grid in [*(layout.images or []), *(layout.videos or [])]]
    census = {
        "several rows": sum(len(layout.input_ids) > 1 for layout in layouts),
        "padded left": sum(not real[0] for _, real in rows),
        "padded right": sum(not real[-1] for _, real in rows),
        "no mask": sum(layout.attention_mask is None for layout in layouts),
        "rows of text": sum(not np.isin(ids, (IMAGE, VIDEO)).any() for ids, _ in rows),
        "grid first": sum(ids[0] in (IMAGE, VIDEO) for ids, _ in rows),
        "grid last": sum(ids[-1] in (IMAGE, VIDEO) for ids, _ in rows),
        "image beside video": sum((ids[1:] + ids[:-1] == IMAGE + VIDEO).any() for ids, _ in rows),
        "sides unequal": sum(height != width for _, height, width in grids),
        "several frames": sum(frames > 1 for frames, _, _ in grids),
        "times": len({time for layout in layouts for time in layout.seconds or []}),
        "merge": len({layout.merge for layout in layouts}),
    }
    wanted = dict.fromkeys(census, 100) | {"times": 19, "merge": 3}
    assert {name: count for name, count in census.items() if count < wanted[name]} == {}
