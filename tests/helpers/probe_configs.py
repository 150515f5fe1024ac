"""Token ids and small image sizes for the configs from which the probe tests write checkpoints, by model family."""

from __future__ import annotations

from typing import Any

QWEN = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
GLM = {
    "image_token_id": 543,
    "video_token_id": 544,
    "image_start_token_id": 539,
    "image_end_token_id": 540,
    "video_start_token_id": 541,
    "video_end_token_id": 542,
}
GEMMA3: dict[str, Any] = {
    "vision_config": {"image_size": 56, "patch_size": 14},
    "image_token_index": 598,
    "boi_token_index": 596,
    "eoi_token_index": 597,
    "mm_tokens_per_image": 4,
}
