"""Random batches like those from Transformers' processors, and the answers of Transformers' get_rope_index."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmpos import Placeholders, SegmentTable

IMAGE, VIDEO = 8, 9
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
        merge: the model's spatial_merge_size.
        rate: tokens_per_second of Qwen2.5-VL.
        seconds: seconds per grid, one number per video, or None.
        apart: whether every frame of a video is its own grid (Qwen3-VL).
    """

    input_ids: Array
    attention_mask: Array | None = None
    images: list[list[int]] | None = None
    videos: list[list[int]] | None = None
    merge: int = 2
    rate: int = 2
    seconds: list[float] | None = None
    apart: bool = False

    @property
    def kinds(self) -> Array:
        """(batch, seq) 0 for text, 1 for images, 2 for videos: Transformers' mm_token_type_ids."""
        return np.where(self.input_ids == IMAGE, 1, 0) + np.where(self.input_ids == VIDEO, 2, 0)

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """(batch, seq) True for tokens, False for padding."""
        mask = np.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        return mask == 1

    def segments(self, timed: bool = False) -> SegmentTable:
        """Build the segment table of the batch, with one second per grid, Transformers' default, if ``timed``."""
        return SegmentTable.from_input_ids(
            self.input_ids,
            Placeholders(image=IMAGE, video=VIDEO),
            self.images,
            self.videos,
            spatial_merge_size=self.merge,
            attention_mask=self.attention_mask,
            seconds_per_frame=self.seconds or ([1] * len(self.videos or ()) if timed else None),
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


def method_of(model: str, config: Any) -> Callable[..., Any]:
    """Return a model's get_rope_index, bound to an object with a config and the class's helpers but without weights."""
    kind, model_object = kind_of(model), SimpleNamespace(config=config, spatial_merge_size=2)
    helpers = ("get_vision_position_ids", "_group_visual_frames", "_frame_end_idx", "get_chunked_index")
    for name in (*helpers, "get_llm_pos_ids_for_vision"):
        if hasattr(kind, name):
            static = any(isinstance(vars(base).get(name), staticmethod) for base in kind.__mro__)
            setattr(model_object, name, getattr(kind, name) if static else getattr(kind, name).__get__(model_object))
    bound: Callable[..., Any] = kind.get_rope_index.__get__(model_object)
    return bound


def rope_index(model: str, layout: Layout, listed: bool = False) -> Answer:
    """Call the model's method with a config but without weights.

    ``listed`` passes the seconds as a list of floats instead of a tensor.
    """
    vision = SimpleNamespace(spatial_merge_size=layout.merge, tokens_per_second=layout.rate)
    method = method_of(model, SimpleNamespace(vision_config=vision))
    seconds: dict[str, Any] = {}
    if layout.seconds is not None:
        seconds = {"second_per_grid_ts": layout.seconds if listed else torch.tensor(layout.seconds)}
    ids, deltas = method(
        torch.from_numpy(layout.input_ids),
        torch.from_numpy(layout.kinds),
        None if layout.images is None else torch.tensor(layout.images),
        None if layout.videos is None else torch.tensor(layout.videos),
        attention_mask=None if layout.attention_mask is None else torch.from_numpy(layout.attention_mask),
        **seconds,
    )
    return Answer(ids.numpy(), deltas.numpy()[:, 0])


class Row(NamedTuple):
    """The ids of one row, and its grids before merging."""

    ids: list[int]
    images: list[list[int]]
    videos: list[list[int]]


def random_layout(random: Random, model: str, videos: bool) -> Layout:
    """Draw a batch of one to four rows of text, images and videos, padded on one side with text or placeholder tokens.

    No two images and no two videos are adjacent, since Transformers refuses them.
    """
    merge, apart = random.choice([1, 2, 2, 3]), model == "qwen3_vl"
    rows = [_random_row(random, merge, videos, apart) for _ in range(random.randint(1, 4))]
    grids = [grid for row in rows for grid in row.videos]
    timed = model == "qwen2_5_vl" and grids and random.random() < 0.8
    input_ids, mask = _padded(random, [row.ids for row in rows])
    return Layout(
        input_ids,
        None if mask.all() else mask,
        [grid for row in rows for grid in row.images] or None,
        grids or None,
        merge=merge,
        rate=random.choice([2, 4, 25]),
        seconds=[2 / random.choice(FRAME_RATES) for _ in grids] if timed else None,
        apart=apart,
    )


def _random_row(random: Random, merge: int, videos: bool, apart: bool) -> Row:
    row = Row([], [], [])
    for _ in range(random.randint(1, 6)):
        kind = random.choice([0, IMAGE, VIDEO] if videos else [0, IMAGE])
        if kind == 0 or row.ids[-1:] == [kind]:
            row.ids.extend(random.randint(1, 7) for _ in range(random.randint(1, 5)))
        if kind == 0:
            continue
        frames = random.randint(1, 6) if kind == VIDEO else 1
        height, width = random.randint(1, 4), random.randint(1, 4)
        (row.videos if kind == VIDEO else row.images).append([frames, height * merge, width * merge])
        if kind == VIDEO and apart:
            for _ in range(frames):
                row.ids.extend([random.randint(1, 7)] * random.randint(1, 2) + [kind] * (height * width))
        else:
            row.ids.extend([kind] * (frames * height * width))
    return row


def _padded(random: Random, rows: list[list[int]]) -> tuple[Array, Array]:
    """Pad rows to (batch, seq) ids and a mask."""
    width = max(map(len, rows)) + random.randint(0, 2)
    side = "left" if random.random() < 0.5 else "right"
    input_ids = padded(rows, side, random.choice([0, IMAGE, VIDEO]), width)
    return input_ids.numpy(), padded([[1] * len(row) for row in rows], side, 0, width).numpy()


def padded(rows: Sequence[Sequence[int]], side: str, value: int = 0, width: int = 0) -> Tensor:
    """Pad rows to (batch, seq) on one side."""
    width = max(width, *map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*pad, *row] if side == "left" else [*row, *pad] for row, pad in zip(rows, pads, strict=True)])
