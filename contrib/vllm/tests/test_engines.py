"""The rotations of vLLM 0.33.0 and SGLang 0.5.23 on sorted channels equal those of mmpos, where they are installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mmpos_vllm import Sections, install_cache, qk_channels, request_positions
from torch import Tensor

import mmpos
from mmpos import Grid, SegmentTable, Text
from mmpos.rotary import Rotary, apply_rotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def vllm_torch(sections: Sections, rows: Tensor, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    mrope = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.mrope", exc_type=ImportError)
    config = pytest.importorskip("vllm.config")
    with config.set_current_vllm_config(config.VllmConfig(device_config=config.DeviceConfig("cpu"))):
        module = mrope.MRotaryEmbedding(*arguments(sections), positions_factor=1)
    install_cache(module, sections)
    return module.forward_native(rows, q, k)


def vllm_triton(sections: Sections, rows: Tensor, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    mrope = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.mrope", exc_type=ImportError)
    cos, sin = sections.cos_sin_cache()[rows].chunk(2, dim=-1)
    size = sections.rotary.head_dim, sections.rotary.rotary_dim
    return mrope.triton_mrope(q, k, cos, sin, list(sections.mrope_section), *size, False, sections.is_neox_style)


def sglang_torch(sections: Sections, rows: Tensor, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    mrope = pytest.importorskip("sglang.srt.layers.rotary_embedding.mrope", exc_type=ImportError)
    module = mrope.MRotaryEmbedding(*arguments(sections))
    install_cache(module, sections)
    rotated = module.forward_native(rows, q, k)
    module._ensure_cos_sin_cache_length(600)
    longer = Sections(sections.rotary, len(module.cos_sin_cache), permuted=True).cos_sin_cache()
    assert len(longer) > 600
    assert torch.equal(module.cos_sin_cache, longer)
    return rotated


def sglang_triton(sections: Sections, rows: Tensor, q: Tensor, k: Tensor) -> Sequence[Tensor]:
    kernels = pytest.importorskip("sglang.kernels.ops.attention.rotary_triton", exc_type=ImportError)
    size, section = (sections.rotary.head_dim, sections.rotary.rotary_dim), list(sections.mrope_section)
    neox, cache = sections.is_neox_style, sections.cos_sin_cache()
    kernels.triton_mrope_fused(q, k, cache, rows, section, *size, False, False, neox, None)  # in place
    return q, k


def arguments(sections: Sections) -> tuple[Any, ...]:
    rotary, section = sections.rotary, list(sections.mrope_section)
    sizes = rotary.head_dim, rotary.rotary_dim, sections.max_position
    return *sizes, rotary.theta, sections.is_neox_style, torch.float32, section


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("rotate", [vllm_torch, vllm_triton, sglang_torch, sglang_triton])
@pytest.mark.parametrize(
    "rotary",
    [
        pytest.param(Rotary(64), id="half"),
        pytest.param(Rotary(64, pairing="adjacent"), id="adjacent"),
        pytest.param(Rotary(64, rotary_dim=22, theta=5e5), id="partial, odd"),
    ],
)
def test_an_engine_rotates_sorted_channels_like_mmpos(
    rotary: Rotary, rotate: Callable[..., Sequence[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM keeps Triton without a driver only if no device is visible.
    for variable, value in {
        "VLLM_TARGET_DEVICE": "cpu",
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }.items():
        monkeypatch.setenv(variable, value)
    sections = Sections(rotary, max_position=512, permuted=True)
    positions = mmpos.place(SegmentTable.from_documents([[Text(5), Grid(4, 7), Text(3), Grid(2, 3), Text(9)]]))
    rows, _ = request_positions(positions, sections)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(positions.num_tokens, heads, 64, generator=generator) for heads in (4, 2))
    channels = torch.from_numpy(qk_channels(rotary))
    got = rotate(sections, rows, *(x[..., channels].flatten(1).contiguous() for x in (q, k)))
    error = 0.0 if rotate in (sglang_torch, sglang_triton) else 1e-6
    for rotated, x in zip(got, apply_rotary(q, k, positions, rotary), strict=True):
        assert x is not None
        torch.testing.assert_close(rotated.view(x.shape), x[..., channels], rtol=0, atol=error)
