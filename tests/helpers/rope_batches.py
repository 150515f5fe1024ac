"""Random calls to get_rope_index for every model type that has this method, the method itself, and our function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from layouts import FRAME_RATES, OMNI, modeling, padded, weightless
from model_configs import ARGUMENTS, CONFIGS, TEXT, XDROPE, config_of
from torch import Tensor

from mmpos.integrations.hf import rope_index

LIKE = {
    **dict.fromkeys(("ernie4_5_vl_moe", "paddleocr_vl", "qwen2_vl"), "qwen2_vl"),
    "qwen2_5_vl": "qwen2_5_vl",
    **dict.fromkeys(
        (
            *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga"),
            *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp"),
        ),
        "qwen3_vl",
    ),
}
"""Model types whose method reads token types, and the model type whose random layouts they use."""

MODELS = (*LIKE, "hy_v4_vl", "hunyuan_vl", *OMNI)
"""Model types for which ``rope_index`` has a function."""

PLACED = ("glm_image", "minicpmv4_7")
"""Other model types with the method, whose positions only ``ModelSettings`` computes."""


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Request:
    """One call, and the functions on both sides.

    Args:
        ours: our function for the call's config.
        theirs: the model's method, with the same config but without weights.
        arguments: arguments for both functions.
        needed: arguments that only the model's method requires.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    arguments: dict[str, Any]
    needed: dict[str, Any] = field(default_factory=dict)


IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
VISION, VISION_END, SOUND, SOUND_END = 151652, 151653, 151647, 151648


def batch_of(random: Random, rows: list[list[int]]) -> tuple[Tensor, Array]:
    """Pad rows with text or with one of their tokens; return the ids and a (batch, seq) mask of the real tokens."""
    width, side = max(map(len, rows)) + random.randint(0, 2), random.choice(["left", "right"])
    fill = random.choice([0, random.choice(rows[0])])
    return padded(rows, side, fill, width), padded([[1] * len(row) for row in rows], side, 0, width).bool().numpy()


def mask_of(random: Random, real: Array, kinds: Array) -> Tensor:
    """Draw a mask of any dtype, sometimes with holes; a hole only follows a text token that is kept."""
    mask, kept = torch.from_numpy(real.astype(np.int64)), (real != 0) & (kinds == 0)
    rows, tokens = np.nonzero(kept[:, 2::2] & kept[:, 1:-1:2])
    if random.random() < 0.3:
        for row, token in zip(rows.tolist(), (2 + 2 * tokens).tolist(), strict=True):
            mask[row, token] = int(random.random() >= 0.3)
    return mask.to(random.choice([torch.int64, torch.int32, torch.bool, torch.float32]))


def types_of(ids: Tensor, tokens: Iterable[int]) -> Array:
    """Return the types of (batch, seq) tokens: 0 for text, 1 for the first of the placeholders and 2 for the second."""
    return sum(kind * (ids.numpy() == token) for kind, token in enumerate(tokens, 1))


def text_of(random: Random, least: int, most: int) -> list[int]:
    return [random.randint(1, 7) for _ in range(random.randint(least, most))]


def any_integers(random: Random, values: Array) -> Tensor:
    return torch.from_numpy(values).to(random.choice([torch.int64, torch.int32, torch.uint8]))


# Qwen-VL and the models that follow it.


def _unmerged(random: Random, grids: list[list[int]], merge: int, frames: int) -> Tensor | None:
    """Return unmerged grids, whose sides and frames need not be divisible by the merge sizes."""
    sizes = (frames, merge, merge)
    scaled = [[n * size + random.randrange(size) for n, size in zip(grid, sizes, strict=True)] for grid in grids]
    return torch.tensor(scaled) if grids else None


def _qwen_row(random: Random, grids: dict[int, list[list[int]]], apart: bool) -> list[int]:
    """Draw a row in which no two images and no two videos are adjacent, since the method refuses them."""
    row: list[int] = []
    for token in random.choices([0, *grids], k=random.randint(1, 6)):
        if token == 0 or row[-1:] == [token]:
            row += text_of(random, 1, 5)
        if token:
            frames = random.randint(1, 6) if token == VIDEO else 1
            height, width = random.randint(1, 4), random.randint(1, 4)
            grids[token].append([frames, height, width])
            for _ in range(frames):
                row += (text_of(random, 1, 2) if apart and token == VIDEO else []) + [token] * (height * width)
    return row


def _seconds(random: Random, videos: int) -> Tensor | list[float] | None:
    """Draw seconds per frame in the types and dtypes that processors return and that trainers cast to."""
    rates = [
        2 / random.choice(FRAME_RATES) if random.random() < 0.7 else random.uniform(0.01, 3) for _ in range(videos)
    ]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    forms: list[Any] = [None, rates, rates, [round(1 + rate) for rate in rates], list(torch.tensor(rates))]
    return random.choice([*forms, *(torch.tensor(rates, dtype=dtype) for dtype in dtypes)])


def like_qwen(random: Random, model: str) -> Request:
    """Draw images and videos, padded and masked with holes; sometimes there are more grids than tokens."""
    apart, frames = LIKE[model] == "qwen3_vl", 2 if model == "ernie4_5_vl_moe" else 1
    merge, rate = random.choice([1, 2, 2, 3]), random.choice([2, 4, 25])
    grids: dict[int, list[list[int]]] = {token: [] for token in random.choice([(IMAGE,), *[(IMAGE, VIDEO)] * 4])}
    ids, real = batch_of(random, [_qwen_row(random, grids, apart) for _ in range(random.randint(1, 4))])
    types = types_of(ids, grids)
    images, videos = _unmerged(random, grids[IMAGE], merge, 1), _unmerged(random, grids.get(VIDEO, []), merge, frames)
    arguments: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": any_integers(random, types)}
    if not real.all() or random.random() < 0.3:
        arguments["attention_mask"] = mask_of(random, real, types)
    elif random.random() < 0.3:  # the method accepts int32 only without a mask
        arguments["input_ids"] = ids.int()
    if random.random() < 0.2:  # an image without tokens, whose grid may or may not have an area
        more = torch.tensor([random.choice([[1, 6, 6], [1, 0, 6]])])
        images = more if images is None else torch.cat([images, more])
    if videos is not None and random.random() < 0.2:  # a video whose last frames, or all of whose frames, are cut off
        if apart:
            videos[-1, 0] += random.randint(1, 3)
        videos = torch.cat([videos, torch.tensor([random.choice([[2, 6, 12], [2, 6, 0], [0, 6, 12]])])])
        if apart and random.random() < 0.5:  # a video without frames has no grid
            videos = torch.cat([torch.tensor([[0, 6, 12]]), videos])
    if LIKE[model] == "qwen2_5_vl" and videos is not None:
        arguments["second_per_grid_ts"] = _seconds(random, len(videos))
    arguments |= {"image_grid_thw": images, "video_grid_thw": videos}
    vision = {"spatial_merge_size": merge, "tokens_per_second": rate, "temporal_merge_size": frames}
    theirs = weightless(model, SimpleNamespace(vision_config=SimpleNamespace(**vision)))
    return Request(rope_index({"model_type": model, "vision_config": vision}), theirs.get_rope_index, arguments)


# HunYuan-VL and Hy4.


@cache
def hunyuan(axes: int) -> Any:
    """Return a config with this number of axes, 16 pairs on each and the rest on the first."""
    rope = {**XDROPE["rope_parameters"], "xdrope_section": [64 - 16 * (axes - 1), *[16] * (axes - 1)]}
    text = ARGUMENTS["hunyuan_vl"]["text_config"] | {"rope_parameters": rope}
    return CONFIGS["hunyuan_vl"](text_config=deepcopy(text))


def like_hunyuan(random: Random, model: str) -> Request:
    """Draw rows of images, and of videos of Hy4, of any size, padded and masked with holes, in any dtype.

    One more token ends each row of each frame; an image of HunYuan-VL mostly has one more before it and one after it.
    """
    hy4, rows = model == "hy_v4_vl", []
    begin, end, more = (TEXT, TEXT, [0]) if hy4 else (120118, 120119, [2, 2, 0])
    config = config_of(model) if hy4 else hunyuan(random.choice([3, 4, 4, 5]))
    grids: dict[int, list[list[int]]] = {token: [] for token in ((120120, 120124) if hy4 else (120120,))}
    for _ in range(random.randint(1, 4)):
        row = [TEXT, *text_of(random, 0, 5)]
        for token in random.choices(list(grids), k=random.choice([0, 1, 1, 2, 3])):
            frames = random.randint(1, 3) if token == 120124 else 1
            height, width = random.randint(1, 5), random.randint(1, 5)
            grids[token].append([frames, height, width])
            row += [
                begin,
                *[token] * (frames * height * (width + 1) + random.choice(more)),
                end,
                *text_of(random, 0, 4),
            ]
        rows.append(row)
    ids, real = batch_of(random, rows)
    types = types_of(ids, grids) * real
    if not hy4:  # type 2 counts as text
        types[(types == 0) & (np.arange(types.size).reshape(types.shape) % 7 == random.randrange(9))] = 2
    arguments: dict[str, Any] = {
        "input_ids": ids if hy4 else ids.to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": any_integers(random, types),
    }
    if not real.all() or random.random() < 0.3:
        arguments["attention_mask"] = mask_of(random, real, types)
    for name, own in zip(("image_grid_thw", "video_grid_thw"), grids.values(), strict=False):
        every = own + ([[1, 3, 3]] if hy4 and random.random() < 0.2 else [])
        if every and (hy4 or random.random() < 0.75):
            arguments[name] = _unmerged(random, every, 2, 1 if hy4 else 3)
    return Request(rope_index(config), weightless(model, config).get_rope_index, arguments)


# Qwen Omni.

SECONDS = [*(Fraction(2, fps) for fps in (1, 2, 3, 4, 5, 8)), Fraction(5), Fraction(9)]


@cache
def omni_config(model: str) -> Any:
    """Return a config with the marker that the class lacks; its rotation, which is not read, is invalid."""
    config = CONFIGS[model]()
    config.thinker_config.vision_start_token_id = VISION
    if model == "qwen3_omni_moe":
        config.thinker_config.position_id_per_seconds = 13
    return config


def audio_tokens(model: str, features: int) -> int:
    module = importlib.import_module(f"transformers.models.{model}.processing_{model}")
    count = getattr(module, "_get_feat_extract_output_lengths", None)
    if count is None:  # in Transformers 5.19, only the encoder of Qwen2.5-Omni has this function
        return int(modeling(model).Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, features)[1])
    return int(count(features))


@dataclass
class _Prompts:
    """The merged grids and the audio of rows of token ids."""

    grids: dict[int, list[list[int]]] = field(default_factory=lambda: {IMAGE: [], VIDEO: []})
    features: list[int] = field(default_factory=list)

    def sound(self, model: str, random: Random) -> list[int]:
        self.features.append(random.choice([3, 8, 20, 60, 200, 600]))
        return [AUDIO] * audio_tokens(model, self.features[-1])

    def part(self, model: str, random: Random, kind: str) -> list[int]:
        if kind == "text":
            return [TEXT] * random.randint(1, 5)
        if kind == "audio":
            return [SOUND, *self.sound(model, random), SOUND_END]
        frames, token = (1, IMAGE) if kind == "image" else (random.randint(1, 6), VIDEO)
        height, width = random.choice([(1, 1), (2, 3), (3, 2), (1, 30), (40, 1), (4, 4)])
        self.grids[token].append([frames, height, width])
        patches = [token] * (frames * height * width)
        if kind != "clip":
            return [VISION, *patches, VISION_END]
        mixed = patches[1:] + self.sound(model, random)
        random.shuffle(mixed)  # neither side depends on the order
        return [VISION, SOUND, VIDEO, *mixed, SOUND_END, VISION_END]


def _seconds_of_frames(random: Random) -> float:
    """Draw seconds per frame: a video's, random ones, or ones near whole ids, where rounding merges two ids."""
    about = random.randint(1, 20) / 13 * (1 + random.choice([0, 1e-7, -1e-7, 3e-7]))
    return random.choice([float(random.choice(SECONDS)), random.uniform(0.01, 9), about])


def like_omni(random: Random, model: str) -> Request:
    """Draw rows of text, images, audio and videos with or without sound, padded and masked with holes."""
    config, clips, prompts = omni_config(model), random.random() < 0.6, _Prompts()
    kinds, rows = ["text", "image", "audio", "clip" if clips else "video"], []
    for _ in range(random.randint(1, 3)):
        rows.append([TEXT] * random.randint(1, 4))
        for kind in random.choices(kinds, k=random.randint(0, 4)):
            rows[-1] += prompts.part(model, random, kind)
        rows[-1] += [TEXT] * random.randint(0, 3)
    if not any(prompts.grids.values()):
        rows[-1] += prompts.part(model, random, "image")
    ids, real = batch_of(random, rows)
    arguments: dict[str, Any] = {"use_audio_in_video": clips}
    videos = prompts.grids[VIDEO]
    images = prompts.grids[IMAGE] + random.choice([[], [], [], [], [[1, 3, 3]], [[1, 0, 3]]])
    for name, grids in (("image_grid_thw", images), ("video_grid_thw", videos)):
        if grids:
            arguments[name] = torch.tensor(grids) * torch.tensor([1, 2, 2])
    if videos:
        rates = [_seconds_of_frames(random) for _ in videos]
        dtype = random.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        arguments["second_per_grids"] = torch.tensor(rates, dtype=dtype)
    if prompts.features:
        arguments["audio_seqlens"] = torch.tensor(prompts.features)
    if not real.all() or random.random() < 0.5:
        arguments["attention_mask"] = mask_of(random, real, (ids != TEXT).int().numpy())
    # The method accepts other integers only without a mask.
    arguments["input_ids"] = ids.int() if "attention_mask" not in arguments and random.random() < 0.5 else ids
    needed = (
        {} if model == "qwen2_5_omni" or "attention_mask" in arguments else {"attention_mask": torch.ones_like(ids)}
    )
    return Request(rope_index(config), weightless(model, config.thinker_config).get_rope_index, arguments, needed)


FAMILIES: Mapping[str, Callable[[Random, str], Request]] = {
    **dict.fromkeys(LIKE, like_qwen),
    **dict.fromkeys(("hunyuan_vl", "hy_v4_vl"), like_hunyuan),
    **dict.fromkeys(OMNI, like_omni),
}
"""The function that draws random requests of each of MODELS."""
