"""vLLM's own code, on a CPU: its ids, its slicing, its kernels in the interpreter, and its models, against ours.

Needs vLLM beside mmpos, in an environment of its own: it pins another torch. Attention alone is replaced, since vLLM's
needs an accelerator or a build for CPUs.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

for name, value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM then keeps Triton although no driver is there
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(name, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed here; docs/vllm.md says what was run with it")
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, triton_mrope
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_mrope
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
        PlaceholderRange,
    )
    from vllm.v1.worker.gpu.mm.rope import _prepare_rope_positions_kernel
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import mmpos
from mmpos.rotary import Rotary, apply_rotary
from mmpos.vllm import Sections, mrope_input_positions, request_segments, window_positions
from mmpos.vllm.plugin import ARCHITECTURES, register

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

MERGE = 2
VISION = {"spatial_merge_size": MERGE, "tokens_per_second": 2}
THREE = Sections(Rotary(128, allocation="sections", mrope_section=[16, 24, 24]), max_position=1 << 17)
TWO = Sections(Rotary(32), max_position=512, permuted=True)


def feature(modality: str, offset: int, length: int, mask: Tensor | None = None, **data: Any) -> Any:
    item = {
        key: MultiModalFieldElem(data=torch.tensor(value), field=MultiModalSharedField(batch_size=1))
        for key, value in data.items()
    }
    place = PlaceholderRange(offset=offset, length=length, is_embed=mask)
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(item), modality=modality, identifier="", mm_position=place
    )


def request(draw: random.Random, video: str, last_text: bool = True) -> tuple[list[int], list[Any]]:
    """Token ids and features of a prompt; videos are "none", "whole" or "apart"."""
    tokens, features = [1] * draw.randint(0, 5), []
    for _ in range(draw.randint(1, 5)):
        tokens += [92]
        height, width = draw.randint(1, 5), draw.randint(1, 5)
        frames = 1 if video == "none" or draw.random() < 0.5 else draw.randint(2, 4)
        kind, offset = "image" if frames == 1 else "video", len(tokens)
        grid = {f"{kind}_grid_thw": [frames, MERGE * height, MERGE * width]}
        mask = None
        if frames > 1 and video == "apart":
            frame = [0] * draw.randint(1, 3) + [92] + [91] * height * width + [93]
            tokens += frame * frames
            mask = torch.tensor(frame * frames) == 91
        else:
            tokens += [90 if frames == 1 else 91] * frames * height * width
            if frames > 1:
                grid["second_per_grid_ts"] = draw.choice([0.5, 1.0, 1.5])  # type: ignore[assignment]
        features.append(feature(kind, offset, len(tokens) - offset, mask, **grid))
        tokens += [93] + [1] * draw.randint(0, 4)
    return (tokens if last_text else tokens[: offset + features[-1].mm_position.length]), features


@pytest.mark.parametrize(
    ("model", "scheme", "video"),
    [
        (Qwen2VLForConditionalGeneration, "mrope", "none"),
        (Qwen2_5_VLForConditionalGeneration, mmpos.schemes.MRopeQwen25(2), "whole"),
        (Qwen3VLForConditionalGeneration, "mrope-qwen3", "apart"),
    ],
    ids=["qwen2", "qwen2.5", "qwen3"],
)
def test_ids_and_delta_are_those_of_vllms_models(model: Any, scheme: Any, video: str) -> None:
    draw = random.Random(7)
    config = SimpleNamespace(
        vision_config=SimpleNamespace(**VISION), video_token_id=91, vision_start_token_id=92, vision_end_token_id=93
    )
    own = SimpleNamespace(config=config)
    for method in ("iter_mm_grid_thw", "_get_mrope_input_positions"):
        if hasattr(model, method):
            found = getattr(model, method)
            own.__dict__[method] = found if method.startswith("_") else found.__get__(own)
    for _ in range(200):
        tokens, features = request(draw, video, last_text=draw.random() < 0.8)
        want, delta = model.get_mrope_input_positions(own, tokens, features)
        got, ours = mrope_input_positions(tokens, features, scheme=scheme, sections=THREE, spatial_merge_size=MERGE)
        assert got.dtype == want.dtype and got.tolist() == want.tolist()
        assert (ours, type(ours)) == (delta, type(delta))
