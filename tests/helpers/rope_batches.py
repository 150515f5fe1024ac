"""Random calls to get_rope_index for every model type that has this method, the method itself, and our function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
from layouts import FRAME_RATES, OMNI, method_of, modeling, padded, random_layout
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


def text_of(random: Random, most: int) -> list[int]:
    return [random.randint(1, 7) for _ in range(random.randint(0, most))]


def any_integers(random: Random, values: Array) -> Tensor:
    return torch.from_numpy(values).to(random.choice([torch.int64, torch.int32, torch.uint8]))


# Qwen-VL and the models that follow it.


def _grids(random: Random, grids: list[list[int]] | None, merge: int, frames: int) -> Tensor | None:
    """Return unmerged grids, whose sides and frames need not be divisible by the merge sizes."""
    if grids is None:
        return None
    more = [[random.randrange(frames), random.randrange(merge), random.randrange(merge)] for _ in grids]
    return torch.tensor(grids) * torch.tensor([frames, 1, 1]) + torch.tensor(more)


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
    layout = random_layout(random, LIKE[model], random.random() < 0.8)
    frames = 2 if model == "ernie4_5_vl_moe" else 1
    images, videos = _grids(random, layout.images, layout.merge, 1), _grids(random, layout.videos, layout.merge, frames)
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(layout.input_ids),
        "mm_token_type_ids": any_integers(random, layout.kinds),
    }
    if layout.attention_mask is not None or random.random() < 0.3:
        arguments["attention_mask"] = mask_of(random, layout.real, layout.kinds)
    elif random.random() < 0.3:  # the method accepts int32 only without a mask
        arguments["input_ids"] = arguments["input_ids"].int()
    if random.random() < 0.2:  # an image without tokens, whose grid may or may not have an area
        more = torch.tensor([random.choice([[1, 6, 6], [1, 0, 6]])])
        images = more if images is None else torch.cat([images, more])
    if videos is not None and random.random() < 0.2:  # a video whose last frames, or all of whose frames, are cut off
        if layout.apart:
            videos[-1, 0] += random.randint(1, 3)
        videos = torch.cat([videos, torch.tensor([random.choice([[2, 6, 12], [2, 6, 0], [0, 6, 12]])])])
        if layout.apart and random.random() < 0.5:  # a video without frames has no grid
            videos = torch.cat([torch.tensor([[0, 6, 12]]), videos])
    if LIKE[model] == "qwen2_5_vl" and videos is not None:
        arguments["second_per_grid_ts"] = _seconds(random, len(videos))
    arguments |= {"image_grid_thw": images, "video_grid_thw": videos}
    vision = {"spatial_merge_size": layout.merge, "tokens_per_second": layout.rate, "temporal_merge_size": frames}
    theirs = method_of(model, SimpleNamespace(vision_config=SimpleNamespace(**vision)))
    return Request(rope_index({"model_type": model, "vision_config": vision}), theirs, arguments)


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
        row = [TEXT, *text_of(random, 5)]
        for token in random.choices(list(grids), k=random.choice([0, 1, 1, 2, 3])):
            frames = random.randint(1, 3) if token == 120124 else 1
            height, width = random.randint(1, 5), random.randint(1, 5)
            grids[token].append([frames, 2 * height, 2 * width])
            row += [begin, *[token] * (frames * height * (width + 1) + random.choice(more)), end, *text_of(random, 4)]
        rows.append(row)
    ids, real = batch_of(random, rows)
    types = np.zeros(real.shape, np.int64)
    for kind, token in enumerate(grids, 1):
        types[(ids.numpy() == token) & real] = kind
    if not hy4:  # type 2 counts as text
        types[(types == 0) & (np.arange(types.size).reshape(types.shape) % 7 == random.randrange(9))] = 2
    arguments: dict[str, Any] = {
        "input_ids": ids if hy4 else ids.to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": any_integers(random, types),
    }
    if not real.all() or random.random() < 0.3:
        arguments["attention_mask"] = mask_of(random, real, types)
    for name, own in zip(("image_grid_thw", "video_grid_thw"), grids.values(), strict=False):
        every = [
            [f + random.randrange(1 if hy4 else 3), h + random.randrange(2), w + random.randrange(2)] for f, h, w in own
        ]
        every += [[1, 6, 6]] if hy4 and random.random() < 0.2 else []
        if every and (hy4 or random.random() < 0.9):
            arguments[name] = torch.tensor(every)
    return Request(rope_index(config), method_of(model, config), arguments)


# Qwen Omni.

VISION, VISION_END, SOUND, SOUND_END = 151652, 151653, 151647, 151648
IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
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
    """Rows of token ids, and their images, videos and audio."""

    rows: list[list[int]] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    features: list[int] = field(default_factory=list)

    def sound(self, model: str, random: Random) -> list[int]:
        self.features.append(random.choice([3, 8, 20, 60, 200, 600]))
        return [AUDIO] * audio_tokens(model, self.features[-1])

    def part(self, model: str, random: Random, kind: str) -> list[int]:
        height, width = random.choice([(1, 1), (2, 3), (3, 2), (1, 30), (40, 1), (4, 4)])
        if kind == "text":
            return [TEXT] * random.randint(1, 5)
        if kind == "audio":
            return [SOUND, *self.sound(model, random), SOUND_END]
        if kind == "image":
            self.images.append((1, 2 * height, 2 * width))
            return [VISION, *[IMAGE] * (height * width), VISION_END]
        frames = random.randint(1, 6)
        self.videos.append((frames, 2 * height, 2 * width))
        patches = [VIDEO] * (frames * height * width)
        if kind == "video":
            return [VISION, *patches, VISION_END]
        mixed = patches[1:] + self.sound(model, random)
        random.shuffle(mixed)  # neither side depends on the order
        return [VISION, SOUND, VIDEO, *mixed, SOUND_END, VISION_END]


def _prompts(model: str, random: Random, clips: bool) -> _Prompts:
    prompts = _Prompts()
    while not prompts.images and not prompts.videos:
        prompts = _Prompts()
        for _ in range(random.randint(1, 3)):
            row = [TEXT] * random.randint(1, 4)
            for _ in range(random.randint(0, 4)):
                row += prompts.part(
                    model, random, random.choice(["text", "image", "audio", "clip" if clips else "video"])
                )
            prompts.rows.append(row + [TEXT] * random.randint(0, 3))
    return prompts


def _seconds_of_frames(random: Random) -> float:
    """Draw seconds per frame: a video's, random ones, or ones near whole ids, where rounding merges two ids."""
    about = random.randint(1, 20) / 13 * (1 + random.choice([0, 1e-7, -1e-7, 3e-7]))
    return random.choice([float(random.choice(SECONDS)), random.uniform(0.01, 9), about])


def like_omni(random: Random, model: str) -> Request:
    """Draw rows of text, images, audio and videos with or without sound, padded and masked with holes."""
    config, clips, side = omni_config(model), random.random() < 0.6, random.choice(["left", "right"])
    prompts = _prompts(model, random, clips)
    ids, real = padded(prompts.rows, side), padded([[1] * len(row) for row in prompts.rows], side)
    arguments: dict[str, Any] = {"use_audio_in_video": clips}
    for name, grids in (("image_grid_thw", prompts.images), ("video_grid_thw", prompts.videos)):
        if grids:
            arguments[name] = torch.tensor(grids)
    if prompts.videos:
        rates = [_seconds_of_frames(random) for _ in prompts.videos]
        dtype = random.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        arguments["second_per_grids"] = torch.tensor(rates, dtype=dtype)
    if prompts.features:
        arguments["audio_seqlens"] = torch.tensor(prompts.features)
    if not real.all() or random.random() < 0.5:
        arguments["attention_mask"] = mask_of(random, real.bool().numpy(), (ids != TEXT).int().numpy())
    if random.random() < 0.2:
        grids = arguments.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        arguments["image_grid_thw"] = torch.cat([grids, torch.tensor([random.choice([[1, 6, 6], [1, 1, 6]])])])
    # The method accepts other integers only without a mask.
    arguments["input_ids"] = ids.int() if "attention_mask" not in arguments and random.random() < 0.5 else ids
    needed = (
        {} if model == "qwen2_5_omni" or "attention_mask" in arguments else {"attention_mask": torch.ones_like(ids)}
    )
    return Request(rope_index(config), method_of(model, config.thinker_config), arguments, needed)


FAMILIES: Mapping[str, Callable[[Random, str], Request]] = {
    **dict.fromkeys(LIKE, like_qwen),
    **dict.fromkeys(("hunyuan_vl", "hy_v4_vl"), like_hunyuan),
    **dict.fromkeys(OMNI, like_omni),
}
"""The function that draws random requests of each of MODELS."""
