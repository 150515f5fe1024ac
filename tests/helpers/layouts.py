"""Batches like those from Transformers' processors, and the answers of Transformers' get_rope_index."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmpos import Placeholders, SegmentTable

IMAGE, VIDEO = 8, 9
MERGE = 2
"""The model's spatial_merge_size."""
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Model types whose thinker has the method."""

FRAME_RATES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 23.976, 24, 25, 29.97, 30, 50, 60)
"""Common frame rates of videos, in frames per second; a grid of Qwen2.5-VL spans two frames."""

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """One batch.

    Args:
        input_ids: (batch, seq); every placeholder is one merged patch.
        attention_mask: (batch, seq) of 0 and 1; None without padding.
        images: (frames, height, width) of every image before merging.
        videos: (frames, height, width) of every video before merging.
        rate: tokens_per_second of Qwen2.5-VL.
        seconds: seconds per grid, one number per video, or None.
        apart: whether every frame of a video is its own grid (Qwen3-VL).
    """

    input_ids: Array
    attention_mask: Array | None = None
    images: list[list[int]] | None = None
    videos: list[list[int]] | None = None
    rate: int = 2
    seconds: list[float] | None = None
    apart: bool = False

    def segments(self) -> SegmentTable:
        """Build the segment table of the batch."""
        return SegmentTable.from_input_ids(
            self.input_ids,
            Placeholders(image=IMAGE, video=VIDEO),
            self.images,
            self.videos,
            spatial_merge_size=MERGE,
            attention_mask=self.attention_mask,
            seconds_per_frame=self.seconds,
            frames_apart=self.apart,
        )


class Answer(NamedTuple):
    """The result of get_rope_index: ids (3, batch, seq) and deltas (batch,)."""

    ids: Array
    deltas: Array


def classes(module: Any) -> list[Any]:
    """Return the values defined in a module itself."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def modeling(model: str) -> Any:
    model = {"glmga": "glm46v"}.get(model, model)
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


@cache
def kind_of(model: str) -> Any:
    """Return the class of a model type that defines the method; for Qwen Omni, the base class of thinker and talker."""
    kinds = [cls for cls in classes(modeling(model)) if "get_rope_index" in vars(cls)]
    if model in OMNI:
        kinds = [cls for cls in kinds if "PreTrained" in cls.__name__]
    (kind,) = kinds
    return kind


def weightless(model: str, config: Any) -> Any:
    """Return a model that has the method and a config, but no weights."""
    kind = kind_of(model)
    built = kind.__new__(kind)
    nn.Module.__init__(built)
    built.config, built.spatial_merge_size = config, MERGE
    return built


def rope_index(model: str, layout: Layout, listed: bool = False) -> Answer:
    """Call the model's method with a config but without weights.

    ``listed`` passes the seconds as a list of floats instead of a tensor.
    """
    ids, kinds = layout.input_ids, (layout.input_ids == IMAGE) + 2 * (layout.input_ids == VIDEO)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=layout.rate)
    method = weightless(model, SimpleNamespace(vision_config=vision)).get_rope_index
    seconds: dict[str, Any] = {}
    if layout.seconds is not None:
        seconds = {"second_per_grid_ts": layout.seconds if listed else torch.tensor(layout.seconds)}
    position_ids, deltas = method(
        torch.from_numpy(ids),
        torch.from_numpy(kinds),
        None if layout.images is None else torch.tensor(layout.images),
        None if layout.videos is None else torch.tensor(layout.videos),
        attention_mask=None if layout.attention_mask is None else torch.from_numpy(layout.attention_mask),
        **seconds,
    )
    return Answer(position_ids.numpy(), deltas.numpy()[:, 0])


def padded(rows: Sequence[Sequence[int]], side: str, value: int = 0, width: int = 0) -> Tensor:
    """Pad rows to (batch, seq) on one side."""
    width = max(width, *map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*pad, *row] if side == "left" else [*row, *pad] for row, pad in zip(rows, pads, strict=True)])
