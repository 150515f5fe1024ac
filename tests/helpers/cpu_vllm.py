"""vLLM on a CPU as a reference; importing this module skips a test file where vLLM is not installed.

vLLM pins another torch, so it needs a separate environment with mmpos, pytest and Pillow. Its CPU platform works
without the kernels of a CPU build as long as attention is not called.
"""

from __future__ import annotations

import os
import random
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; docs/vllm.md says what was run with it", allow_module_level=True)
for name, value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM then keeps Triton even without a driver
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(name, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.model_executor.models.qwen2_5_vl
    import vllm.model_executor.models.qwen3_vl
    import vllm.v1.worker.gpu.mm.rope
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
        PlaceholderRange,
    )

MERGE = 2


def feature(modality: str, offset: int, length: int, mask: Tensor | None = None, **data: Any) -> Any:
    item = {
        key: MultiModalFieldElem(data=torch.tensor(value), field=MultiModalSharedField(batch_size=1))
        for key, value in data.items()
    }
    place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
    return MultiModalFeatureSpec(data=MultiModalKwargsItem(item), modality=modality, identifier="", mm_position=place)


def request(draw: random.Random, video: str, last_text: bool = True) -> tuple[list[int], list[Any]]:
    """Draw a prompt's token ids and features; videos are "none", "whole" or "apart"."""
    tokens, features = [1] * draw.randint(0, 5), []
    for _ in range(draw.randint(1, 5)):
        tokens += [92]
        height, width = draw.randint(1, 5), draw.randint(1, 5)
        frames = 1 if video == "none" or draw.random() < 0.5 else draw.randint(2, 4)
        kind, offset = "image" if frames == 1 else "video", len(tokens)
        grid: dict[str, Any] = {f"{kind}_grid_thw": [frames, MERGE * height, MERGE * width]}
        mask = None
        if frames > 1 and video == "apart":
            frame = [0] * draw.randint(1, 3) + [92] + [91] * height * width + [93]
            tokens += frame * frames
            mask = torch.tensor(frame * frames) == 91
        else:
            tokens += [90 if frames == 1 else 91] * frames * height * width
            if frames > 1:
                grid["second_per_grid_ts"] = draw.choice([0.5, 1.0, 1.5])
        features.append(feature(kind, offset, len(tokens) - offset, mask, **grid))
        tokens += [93] + [1] * draw.randint(0, 4)
    return (tokens if last_text else tokens[: offset + features[-1].mm_position.length]), features
