"""Transformers' processors for tiny Qwen-VL models."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from chat_tokenizer import QWENS, chat_tokenizer
from tiny_models import tiny_config

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
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}


@cache
def config_of(model: str) -> Any:
    config = tiny_config(model)
    for name, token in zip(NAMES, range(5, 9), strict=True):
        setattr(config, name, token)
    config.text_config.update({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    return config


def processor_of(model: str) -> Any:
    """Build the processor of qwen2_vl, qwen2_5_vl or qwen3_vl."""
    tokenizer = chat_tokenizer(QWENS, extra_special_tokens=TOKENS, chat_template=TEMPLATE, padding_side="left")
    half: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if model == "qwen3_vl" else {}
    size = config_of(model).vision_config.patch_size
    images = transformers.Qwen2VLImageProcessor(patch_size=size, size=SIZE, **half)
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[model]
    videos = getattr(transformers, f"{'Qwen3VL' if model == 'qwen3_vl' else 'Qwen2VL'}VideoProcessor")(
        cap_pixels_per_frame=False, size={**SIZE, "longest_edge": 28 * 28 * 60}
    )
    return getattr(transformers, f"{kind}Processor")(images, tokenizer, videos, chat_template=TEMPLATE)
