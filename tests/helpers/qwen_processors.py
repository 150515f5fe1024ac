"""Processors for tiny Qwen-VL models, ours and Transformers', and chats for both."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from chat_tokenizer import QWENS, chat_tokenizer
from tiny_models import tiny_config
from tolerance import assert_within
from transformers import BatchFeature

import mmpos
from mmpos.integrations.hf import MMPosProcessor

NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
TOKENS = {
    "vision_start_token": QWENS[0],
    "vision_end_token": QWENS[1],
    "image_token": QWENS[2],
    "video_token": QWENS[3],
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type in ('image', 'video') %}"
    "<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}
KINDS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
"""Model types and the prefixes of their class names."""


@cache
def config_of(model: str) -> Any:
    config = tiny_config(model)
    for name, token in zip(NAMES, range(5, 9), strict=True):
        setattr(config, name, token)
    config.text_config.update({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    return config


def both(model: str, tokenizer: Any = None) -> tuple[MMPosProcessor, Any]:
    """Build our processor and Transformers' from the same parts."""
    config = config_of(model)
    if tokenizer is None:
        tokenizer = chat_tokenizer(QWENS, extra_special_tokens=TOKENS, chat_template=TEMPLATE, padding_side="left")
    half: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if model == "qwen3_vl" else {}
    images = transformers.Qwen2VLImageProcessor(patch_size=config.vision_config.patch_size, size=SIZE, **half)
    video_class: Any = transformers.Qwen3VLVideoProcessor if model == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    options = {"cap_pixels_per_frame": False, "size": {**SIZE, "longest_edge": 28 * 28 * 60}}
    videos = video_class(**options)
    theirs = getattr(transformers, f"{KINDS[model]}Processor")(images, tokenizer, videos, chat_template=TEMPLATE)
    settings = mmpos.from_hf_config(config)
    own = settings.image_processor(
        mean=images.image_mean, std=images.image_std, min_pixels=SIZE["shortest_edge"], max_pixels=SIZE["longest_edge"]
    )
    ours = MMPosProcessor.from_hf_config(config, tokenizer, images=own, video_processor=videos)
    return ours, theirs


def drawn_chats(random: np.random.Generator) -> list[list[dict[str, Any]]]:
    """Draw one to three chats that contain texts, images and videos."""

    def block() -> dict[str, Any]:
        height, width = random.integers(30, 130, 2)
        match random.integers(4):
            case 0:
                return {"type": "image", "image": random.integers(0, 256, (height, width, 3), np.uint8)}
            case 1:
                frames = random.integers(2, 9)
                return {"type": "video", "video": random.integers(0, 256, (frames, height, width, 3), np.uint8)}
            case _:
                return {"type": "text", "text": " ".join(random.choice(["A cat", "looks", "at you", "a cup"], 2))}

    answer = {"role": "assistant", "content": "A"}
    sizes = random.integers(1, 5, random.integers(1, 4))
    return [[{"role": "user", "content": [block() for _ in range(size)]}, answer] for size in sizes]


def assert_same(ours: BatchFeature, theirs: BatchFeature, bound: float) -> None:
    assert set(ours) == set(theirs)
    for key in theirs:
        if key.startswith("pixel"):
            assert_within(ours[key], theirs[key], bound)
        else:
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key
