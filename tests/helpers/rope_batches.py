"""Random calls of get_rope_index of every model type that has it, the method itself, and our function beside it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
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
from layouts import FRAME_RATES, random_layout
from model_configs import ARGUMENTS, CONFIGS, TEXT, XDROPE, config_of
from torch import Tensor

import mmpos
from mmpos.integrations.hf import rope_index
from mmpos.integrations.hf.get_rope_index import GeneratingRopeIndex
from mmpos.integrations.models import ModelSettings

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
"""Model types whose method reads token types, and that whose random layouts they are given."""

OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Model types whose thinker has the method."""

MODELS = (*LIKE, "glm_image", "hunyuan_vl", "minicpmv4_7", *OMNI)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Request:
    """One call, and what both sides make of it.

    Args:
        ours: the function of the config of this call.
        theirs: the method of the model, with this config and no weights.
        arguments: of both.
        settings: arguments of ``ModelSettings.segments`` for the same batch, if a processor may give it.
        model: the settings.
        needed: arguments that the method alone needs.
    """

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    arguments: dict[str, Any]
    settings: dict[str, Any] | None = None
    model: ModelSettings | None = None
    needed: dict[str, Any] = field(default_factory=dict)


def classes(module: Any) -> list[Any]:
    """Those of a module itself."""
    return [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]


def modeling(model: str) -> Any:
    model = {"glmga": "glm46v"}.get(model, model)
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


@cache
def kind_of(model: str) -> Any:
    """The class of a model type with the method; of Qwen Omni that of the thinker and the talker."""
    kinds = [each for each in classes(modeling(model)) if "get_rope_index" in vars(each)]
    if model in OMNI:
        kinds = [each for each in kinds if "PreTrained" in each.__name__]
    (kind,) = kinds
    return kind


def unbound(model: str, config: Any) -> tuple[Any, Any]:
    """The class of a model with get_rope_index, and an object with its helpers and no weights."""
    kind, told = kind_of(model), SimpleNamespace(config=config, spatial_merge_size=2)
    helpers = ("get_vision_position_ids", "_group_visual_frames", "_frame_end_idx", "get_chunked_index")
    for name in (*helpers, "get_llm_pos_ids_for_vision"):
        if hasattr(kind, name):
            static = any(isinstance(vars(base).get(name), staticmethod) for base in kind.__mro__)
            setattr(told, name, getattr(kind, name) if static else getattr(kind, name).__get__(told))
    return kind, told


def method_of(model: str, config: Any) -> Callable[..., Any]:
    """get_rope_index of a model, with a config and no weights."""
    kind, told = unbound(model, config)
    bound: Callable[..., Any] = kind.get_rope_index.__get__(told)
    return bound


def padded(rows: Sequence[Sequence[int]], side: str, value: int = 0, width: int = 0) -> Tensor:
    """(batch, seq) of rows, padded on one side."""
    width = max(width, *map(len, rows))
    pads = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([[*pad, *row] if side == "left" else [*row, *pad] for row, pad in zip(rows, pads, strict=True)])


def batch_of(random: Random, rows: list[list[int]]) -> tuple[Tensor, Array]:
    """Ids of rows, padded with text or a token of theirs, and (batch, seq) whether a token is one."""
    width, side = max(map(len, rows)) + random.randint(0, 2), random.choice(["left", "right"])
    fill = random.choice([0, random.choice(rows[0])])
    return padded(rows, side, fill, width), padded([[1] * len(row) for row in rows], side, 0, width).bool().numpy()


def mask_of(random: Random, real: Array, kinds: Array) -> tuple[Tensor, bool]:
    """A mask of any dtype, and whether it has holes, each of them after a token of text that stays."""
    mask, kept = torch.from_numpy(real.astype(np.int64)), (real != 0) & (kinds == 0)
    rows, tokens = np.nonzero(kept[:, 2::2] & kept[:, 1:-1:2])
    holes = list(zip(rows.tolist(), (2 + 2 * tokens).tolist(), strict=True))
    made = [hole for hole in holes if random.random() < 0.3] if random.random() < 0.3 else []
    for row, token in made:
        mask[row, token] = 0
    dtype = random.choice([torch.int64, torch.int32, torch.bool, torch.float32])
    return mask.to(dtype), bool(made)


def text_of(random: Random, most: int) -> list[int]:
    return [random.randint(1, 7) for _ in range(random.randint(0, most))]


def any_integers(random: Random, values: Array) -> Tensor:
    return torch.from_numpy(values).to(random.choice([torch.int64, torch.int32, torch.uint8]))


# Qwen-VL and those that follow it.


def _grids(random: Random, grids: list[list[int]] | None, merge: int, frames: int) -> Tensor | None:
    """Grids before merging, whose sides and frames merging need not divide."""
    if grids is None:
        return None
    more = [[random.randrange(frames), random.randrange(merge), random.randrange(merge)] for _ in grids]
    return torch.tensor(grids) * torch.tensor([frames, 1, 1]) + torch.tensor(more)


def _seconds(random: Random, videos: int) -> Tensor | list[float] | None:
    """Seconds between frames, as processors and casts of trainers give them."""
    rates = [
        2 / random.choice(FRAME_RATES) if random.random() < 0.7 else random.uniform(0.01, 3) for _ in range(videos)
    ]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ways: list[Any] = [None, rates, rates, [round(1 + rate) for rate in rates], list(torch.tensor(rates))]
    return random.choice([*ways, *(torch.tensor(rates, dtype=dtype) for dtype in dtypes)])


def like_qwen(random: Random, model: str) -> Request:
    """Images and videos, padded, masked with holes; at times more grids than tokens are left for."""
    layout = random_layout(random, LIKE[model], random.random() < 0.8)
    frames = 2 if model == "ernie4_5_vl_moe" else 1
    images, videos = _grids(random, layout.images, layout.merge, 1), _grids(random, layout.videos, layout.merge, frames)
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(layout.input_ids),
        "mm_token_type_ids": any_integers(random, layout.kinds),
    }
    if layout.attention_mask is not None or random.random() < 0.3:
        arguments["attention_mask"], _ = mask_of(random, layout.real, layout.kinds)
    elif random.random() < 0.3:  # which theirs takes only without a mask
        arguments["input_ids"] = arguments["input_ids"].int()
    if random.random() < 0.2:  # an image that no token is left for, with room for tokens, or for none
        more = torch.tensor([random.choice([[1, 6, 6], [1, 0, 6]])])
        images = more if images is None else torch.cat([images, more])
    if videos is not None and random.random() < 0.2:  # a video of which the last frames are cut off, or that is
        if layout.apart:
            videos[-1, 0] += random.randint(1, 3)
        videos = torch.cat([videos, torch.tensor([random.choice([[2, 6, 12], [2, 6, 0], [0, 6, 12]])])])
        if layout.apart and random.random() < 0.5:  # a video without frames is no grid
            videos = torch.cat([torch.tensor([[0, 6, 12]]), videos])
    if LIKE[model] == "qwen2_5_vl" and videos is not None:
        arguments["second_per_grid_ts"] = _seconds(random, len(videos))
    arguments |= {"image_grid_thw": images, "video_grid_thw": videos}
    vision = {"spatial_merge_size": layout.merge, "tokens_per_second": layout.rate, "temporal_merge_size": frames}
    theirs = method_of(model, SimpleNamespace(vision_config=SimpleNamespace(**vision)))
    return Request(rope_index({"model_type": model, "vision_config": vision}), theirs, arguments)


# HunYuan-VL.


@cache
def hunyuan(axes: int) -> tuple[Any, ModelSettings]:
    """A config with as many axes, of 16 pairs and what is left, and its settings."""
    rope = {**XDROPE["rope_parameters"], "xdrope_section": [64 - 16 * (axes - 1), *[16] * (axes - 1)]}
    text = ARGUMENTS["hunyuan_vl"]["text_config"] | {"rope_parameters": rope}
    config = CONFIGS["hunyuan_vl"](text_config=deepcopy(text))
    return config, mmpos.from_hf_config(config)


def _hunyuan_row(random: Random, settings: ModelSettings, images: list[list[int]]) -> list[int]:
    """Text and images, each between its markers, with a token at the end of each row and mostly one on both sides."""
    (begin, end), patch = settings.image_markers or (0, 0), settings.placeholders.image or 0
    row = [TEXT, *text_of(random, 5)]
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        height, width = random.randint(1, 5), random.randint(1, 5)
        images.append([1, 2 * height, 2 * width])
        row += [begin, *[patch] * (height * (width + 1) + random.choice([2, 2, 0])), end, *text_of(random, 4)]
    return row


def like_hunyuan(random: Random, model: str) -> Request:
    """Rows with images, whose sides merging need not divide, padded, masked with holes, of any dtype."""
    config, settings = hunyuan(random.choice([3, 4, 4, 5]))
    images: list[list[int]] = []
    ids, real = batch_of(random, [_hunyuan_row(random, settings, images) for _ in range(random.randint(1, 4))])
    kinds = ((ids.numpy() == settings.placeholders.image) & real).astype(np.int64)
    types = kinds.copy()
    types[(kinds == 0) & (np.arange(kinds.size).reshape(kinds.shape) % 7 == random.randrange(9))] = 2  # is text
    arguments: dict[str, Any] = {
        "input_ids": ids.to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": any_integers(random, types),
    }
    holes = False
    if not real.all() or random.random() < 0.3:
        arguments["attention_mask"], holes = mask_of(random, real, types)
    clean = not holes
    if images and random.random() < 0.9:
        more = [[random.randrange(3), random.randrange(2), random.randrange(2)] for _ in images]
        arguments["image_grid_thw"] = torch.tensor(images) + torch.tensor(more)
    elif images:
        clean = False
    told = {"input_ids": ids, "image_grid_thw": images or None, "attention_mask": real.astype(np.int64)}
    theirs = method_of(model, config)
    return Request(rope_index(config), theirs, arguments, told if clean else None, settings)


# GLM-Image.


def _glm_image_row(random: Random, settings: ModelSettings, grids: list[list[int]]) -> tuple[list[int], int]:
    """A prompt with images between their markers and the marker that begins an image to generate; and its grids."""
    (begin, end), patch = settings.image_markers or (0, 0), settings.placeholders.image or 0
    row = [TEXT, *text_of(random, 5)]
    sources, targets = random.choice([0, 0, 1, 2]), random.choice([0, 1, 2, 2, 3])
    for _ in range(sources):
        height, width = random.randint(1, 5), random.randint(1, 5)
        grids.append([1, height, width])
        row += [begin, *[patch] * (height * width), end, *text_of(random, 4)]
    grids += [[1, random.randint(1, 6), random.randint(1, 6)] for _ in range(targets)]
    return [*row, TEXT, begin], sources + targets


@cache
def with_settings(model: str) -> tuple[Any, ModelSettings]:
    """A config, that of Qwen Omni with the marker that its class has no default for, and its settings."""
    config = config_of(model)
    if model in OMNI:
        config.thinker_config.vision_start_token_id = VISION
    if model == "qwen3_omni_moe":
        config.thinker_config.position_id_per_seconds = 13
    return config, mmpos.from_hf_config(config)


def like_glm_image(random: Random, model: str) -> Request:
    """Rows with images, complete or to generate, padded, masked with holes; at times the same grids for each row."""
    config, settings = with_settings(model)
    grids: list[list[int]] = []
    alike = random.random() < 0.2
    made = [_glm_image_row(random, settings, grids) for _ in range(1 if alike else random.randint(1, 4))]
    ids, real = batch_of(random, [row for row, _ in made] * (random.randint(1, 3) if alike else 1))
    counts, holes = [count for _, count in made], False
    told: dict[str, Any] = {"input_ids": ids, "image_grid_thw": grids or None, "attention_mask": real.astype(np.int64)}
    arguments: dict[str, Any] = {"input_ids": ids}
    patch = settings.placeholders.image or 0
    if random.random() < 0.5:  # the model writes the codes of images in the place of placeholders before it calls
        arguments["input_ids"] = ids.masked_fill(ids == patch, TEXT)
    if not real.all() or random.random() < 0.3:
        around = np.isin(ids.numpy(), (patch, *(settings.image_markers or ())))
        arguments["attention_mask"], holes = mask_of(random, real, around)
    elif random.random() < 0.3:
        arguments["attention_mask"] = torch.ones(len(ids), ids.shape[1] + 3, dtype=torch.int64)
    elif random.random() < 0.7:  # which theirs takes only without a mask
        arguments["input_ids"] = arguments["input_ids"].int()
    if grids or random.random() < 0.5:
        arguments["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
        if not alike:
            arguments["images_per_sample"] = torch.tensor(counts)
    kind, stand_in = unbound(model, config)

    def theirs(**given: Any) -> Any:
        ids = kind.get_rope_index(stand_in, **given)
        return ids, stand_in._cached_decode_position_ids

    clean = not alike and not holes
    told["images_per_sample"] = counts
    function = rope_index(config)
    assert isinstance(function, GeneratingRopeIndex)
    return Request(function.with_generated, theirs, arguments, told if clean else None, settings)


# MiniCPM-V 4.7.


def _minicpm_picture(random: Random, settings: ModelSettings, patch: int, grids: list[list[int]]) -> list[int]:
    """A thumbnail, mostly with rows of slices: mostly of one size, and as many in each row."""
    markers, side = settings.placeholders.crops, settings.spatial_merge_size
    assert markers is not None

    def crop(before: int, after: int, height: int, width: int) -> list[int]:
        grids.append([1, side * height, side * width])
        return [before, *[patch] * (height * width), after]

    def size() -> tuple[int, int]:
        return random.randint(1, 9), random.randint(1, 9)

    row = crop(markers.thumbnail_start, markers.thumbnail_end, *size())
    rows, columns, first = random.choice([0, 0, 1, 2, 3, 4]), random.randint(1, 4), size()
    for r in range(rows):
        row += [markers.newline] * (random.choice([1, 1, 1, 2]) if r else random.random() < 0.1)
        for _ in range(columns if random.random() < 0.9 else random.randint(1, 4)):
            row += crop(markers.tile_start, markers.tile_end, *(first if random.random() < 0.8 else size()))
    return row


def _minicpm_row(random: Random, settings: ModelSettings, grids: dict[int, list[list[int]]]) -> list[int]:
    """Text, images and frames of videos, which follow each other with and without markers or text between them."""
    assert settings.placeholders.crops is not None
    newline = settings.placeholders.crops.newline
    row = text_of(random, 3)
    for _ in range(random.randint(0, 3)):
        patch = random.choice(list(grids))
        for _ in range(1 if patch == settings.placeholders.image else random.randint(1, 3)):
            row += _minicpm_picture(random, settings, patch, grids[patch])
        row += [newline] * random.choice([0, 0, 0, 1, 2]) + text_of(random, 3) + [newline] * (random.random() < 0.2)
    return row or [TEXT]


def like_minicpm(random: Random, model: str) -> Request:
    """Images and frames of videos, padded, masked with holes, of any dtype, merged as the config or a call says."""
    config, settings = with_settings(model)
    image, video = settings.placeholders.image or 0, settings.placeholders.video or 0
    grids: dict[int, list[list[int]]] = {image: [], video: []}
    ids, real = batch_of(random, [_minicpm_row(random, settings, grids) for _ in range(random.randint(1, 4))])
    kinds = ((ids == image).numpy() + 2 * (ids == video).numpy()) * real
    arguments: dict[str, Any] = {
        "input_ids": ids.to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": any_integers(random, kinds),
    }
    holes = False
    if not real.all() or random.random() < 0.3:
        markers = settings.placeholders.crops
        assert markers is not None
        around = (markers.thumbnail_start, markers.thumbnail_end, markers.tile_start, markers.tile_end)
        arguments["attention_mask"], holes = mask_of(random, real, kinds + np.isin(ids.numpy(), around))
    mode = random.choice([None, "16x", "4x"])
    merge = 2 if mode == "4x" else 4
    told: dict[str, Any] = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
    told |= {"image_grid_thw": grids[image] or None, "video_grid_thw": grids[video] or None}
    clean = not holes
    if mode is not None:
        arguments["downsample_mode"] = mode
    for name, patch in (("target_sizes", image), ("target_sizes_videos", video)):
        sizes = [[merge * side // 4 + random.randrange(merge) for side in grid[1:]] for grid in grids[patch]]
        if random.random() < 0.2:  # a crop that no token is left for
            sizes.append(random.choice([[4, 8], [1, 8]]))
        if sizes:
            arguments[name] = torch.tensor(sizes)
    theirs = method_of(model, config)
    return Request(rope_index(config), theirs, arguments, told if clean else None, settings)


# Qwen Omni.

VISION, VISION_END, SOUND, SOUND_END = 151652, 151653, 151647, 151648
IMAGE, VIDEO, AUDIO = 151655, 151656, 151646
SECONDS = [*(Fraction(2, fps) for fps in (1, 2, 3, 4, 5, 8)), Fraction(5), Fraction(9)]


def audio_tokens(model: str, features: int) -> int:
    module = importlib.import_module(f"transformers.models.{model}.processing_{model}")
    return int(module._get_feat_extract_output_lengths(features))


@dataclass
class _Prompts:
    """Rows of token ids, and what stands in them."""

    rows: list[list[int]] = field(default_factory=list)
    images: list[tuple[int, int, int]] = field(default_factory=list)
    videos: list[tuple[int, int, int]] = field(default_factory=list)
    seconds: list[Fraction] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    audio: list[int] = field(default_factory=list)

    def sound(self, model: str, random: Random) -> list[int]:
        self.features.append(random.choice([3, 8, 20, 60, 200, 600]))
        self.audio.append(audio_tokens(model, self.features[-1]))
        return [AUDIO] * self.audio[-1]

    def part(self, model: str, random: Random, what: str) -> list[int]:
        height, width = random.choice([(1, 1), (2, 3), (3, 2), (1, 30), (40, 1), (4, 4)])
        if what == "text":
            return [TEXT] * random.randint(1, 5)
        if what == "audio":
            return [SOUND, *self.sound(model, random), SOUND_END]
        if what == "image":
            self.images.append((1, 2 * height, 2 * width))
            return [VISION, *[IMAGE] * (height * width), VISION_END]
        frames = random.randint(1, 6)
        self.videos.append((frames, 2 * height, 2 * width))
        self.seconds.append(random.choice(SECONDS))
        patches = [VIDEO] * (frames * height * width)
        if what == "video":
            return [VISION, *patches, VISION_END]
        mixed = patches[1:] + self.sound(model, random)
        random.shuffle(mixed)  # neither side reads the order
        return [VISION, SOUND, VIDEO, *mixed, SOUND_END, VISION_END]


def _prompts(model: str, random: Random, clips: bool) -> _Prompts:
    made = _Prompts()
    while not made.images and not made.videos:
        made = _Prompts()
        for _ in range(random.randint(1, 3)):
            row = [TEXT] * random.randint(1, 4)
            for _ in range(random.randint(0, 4)):
                row += made.part(model, random, random.choice(["text", "image", "audio", "clip" if clips else "video"]))
            made.rows.append(row + [TEXT] * random.randint(0, 3))
    return made


def _seconds_of_frames(random: Random, video: Fraction) -> float:
    """As videos have them, any, or about those of whole ids, where rounding joins two ids."""
    about = random.randint(1, 20) / 13 * (1 + random.choice([0, 1e-7, -1e-7, 3e-7]))
    return random.choice([float(video), random.uniform(0.01, 9), about])


def like_omni(random: Random, model: str) -> Request:
    """Rows of text, images, audio and videos, silent or with their sound, padded, masked with holes."""
    config, settings = with_settings(model)
    clips, side = random.random() < 0.6, random.choice(["left", "right"])
    made = _prompts(model, random, clips)
    ids, real = padded(made.rows, side), padded([[1] * len(row) for row in made.rows], side)
    asked: dict[str, Any] = {"use_audio_in_video": clips}
    told: dict[str, Any] = {"input_ids": ids, "attention_mask": real, "audio_lengths": made.audio}
    clean = random.random() < 0.4
    for name, grids in (("image_grid_thw", made.images), ("video_grid_thw", made.videos)):
        told[name] = grids or None
        if grids:
            asked[name] = torch.tensor(grids)
    if made.videos:
        told["seconds_per_frame"] = made.seconds
        rates = [float(each) if clean else _seconds_of_frames(random, each) for each in made.seconds]
        dtype = random.choice([torch.float32] if clean else [torch.float32, torch.float64, torch.bfloat16])
        asked["second_per_grids"] = torch.tensor(rates, dtype=dtype)
    if made.features:
        asked["audio_seqlens"] = torch.tensor(made.features)
    if not real.all() or random.random() < 0.5:
        asked["attention_mask"], holes = mask_of(random, real.bool().numpy(), (ids != TEXT).int().numpy())
        clean = clean and not holes
    if not clean and random.random() < 0.3:
        grids = asked.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        asked["image_grid_thw"] = torch.cat([grids, torch.tensor([random.choice([[1, 6, 6], [1, 1, 6]])])])
    # Theirs takes other integers only without a mask.
    asked["input_ids"] = ids.int() if "attention_mask" not in asked and random.random() < 0.5 else ids
    needed = {} if model == "qwen2_5_omni" or "attention_mask" in asked else {"attention_mask": torch.ones_like(ids)}
    theirs = method_of(model, config.thinker_config)
    return Request(rope_index(config), theirs, asked, told if clean else None, settings, needed)


FAMILIES: Mapping[str, Callable[[Random, str], Request]] = {
    **dict.fromkeys(LIKE, like_qwen),
    "glm_image": like_glm_image,
    "hunyuan_vl": like_hunyuan,
    "minicpmv4_7": like_minicpm,
    **dict.fromkeys(OMNI, like_omni),
}
"""What makes random requests of each of MODELS."""
