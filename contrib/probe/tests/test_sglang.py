"""Probe SGLang's positions, rotations and kernels on a CPU: they raise no alarm."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; README.md lists what was tested with it", allow_module_level=True)
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate import fused_qk_gemma_rmsnorm_rope_gate
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import MultimodalInputs
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from mmpos_probe import check, identify, read, write_checkpoint

from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import Rotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

Kernel = Literal["native", "triton", "fused"]
IMAGE, VIDEO, START = 555, 556, 552
QWEN25 = Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24])
QWEN3 = Rotary(128, 5e6, allocation="mrope-interleaved", mrope_section=[24, 20, 20])
QWEN35 = Rotary(256, 1e7, rotary_dim=64, allocation="mrope-interleaved", mrope_section=[11, 11, 10])
WIDE = SegmentTable.from_documents([[Text(4), Grid(7, 11), Text(9)]])
"""A prompt of 85 tokens, and 5 generated tokens; text continues at 4 + 11 after 81 tokens, so the delta is −66."""
WIDE_IDS = [1, 2, 3, START] + [IMAGE] * 77 + [553, 4, 5, 6]


@pytest.fixture(scope="module", autouse=True)
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Configure SGLang for a checkpoint on the CPU, and replace the kernel that it imports from vLLM."""
    folder = tmp_path_factory.mktemp("probe") / "qwen3_vl"
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
    text: dict[str, Any] = {"vocab_size": 600, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 128}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    text |= {"num_key_value_heads": 2, "bos_token_id": 300, "rope_parameters": rope}
    config: Any = transformers.CONFIG_MAPPING["qwen3_vl"]
    write_checkpoint(config(text_config=text, vision_end_token_id=553, **tokens).to_dict(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        patch.setitem(sys.modules, "vllm._custom_ops", SimpleNamespace(rotary_embedding=None))
        set_global_server_args_for_scheduler(ServerArgs(model_path=str(folder), device="cpu"))
        yield


def rope_of(rotary: Rotary, **changes: Any) -> Any:
    """Build SGLang's rotation with the settings of a rotary."""
    settings = {
        "head_size": rotary.head_dim,
        "rotary_dim": rotary.rotary_dim,
        "max_position_embeddings": 512,
        "base": rotary.theta,
        "is_neox_style": True,
        "dtype": torch.float32,
        "mrope_section": list(rotary.mrope_section or ()),
        "mrope_interleaved": rotary.allocation == "mrope-interleaved",
    }
    return MRotaryEmbedding(**{**settings, **changes})


def rotated(rope: Any, positions: Tensor, kernel: Kernel = "native") -> Tensor:
    """Return (tokens, kv_heads, head_dim) keys of tokens that share one hidden state; bfloat16 for the fused kernel."""
    tokens, width = positions.shape[-1], rope.head_size
    key = torch.randn(1, width, generator=torch.Generator().manual_seed(3)).repeat(tokens, 1)
    if kernel == "fused":
        q_gate, weights = torch.zeros(tokens, 2 * width, dtype=torch.bfloat16), torch.zeros(width)
        axes = rope.axis_map if positions.ndim == 2 else None
        sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": width, "rotary_dim": rope.rotary_dim}
        _, keys, _ = fused_qk_gemma_rmsnorm_rope_gate(
            q_gate, key.bfloat16(), weights, weights, rope.cos_sin_cache, positions, 1e-6, **sizes, mrope_axis_map=axes
        )
    elif kernel == "triton":
        _, keys = rope.forward_triton(positions, key.clone(), key)
    else:
        _, keys = rope.forward_native(positions, key, key)
    return keys.view(tokens, 1, width)


def wide(model_type: str) -> Any:
    """Return the positions and delta of the prompt, as stored by the processor."""
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "tokens_per_second": 2}
    inputs = {
        "model_type": model_type,
        "input_ids": torch.tensor([WIDE_IDS]),
        "image_grid_thw": torch.tensor([[1, 14, 22]]),
    }
    ids, delta = MRotaryEmbedding.get_rope_index(2, **names, **inputs)
    return MultimodalInputs([], mrope_positions=ids[:, 0], mrope_position_delta=delta)


def step(mode: Any, held: Any, length: int, drafts: int = 0, **batch: Any) -> Tensor:
    """Return the (3, tokens) positions that SGLang's ForwardBatch computes for a step of one request of this length."""
    forward = ForwardBatch.__new__(ForwardBatch)
    forward.seq_lens = forward.seq_lens_cpu = torch.tensor([length])
    forward.forward_mode, runner = mode, SimpleNamespace(device="cpu")
    requests = SimpleNamespace(multimodal_inputs=[held], reqs=[SimpleNamespace(session=None)], **batch)
    if drafts:
        forward.compute_spec_mrope_positions(runner, requests)
    else:
        forward._compute_mrope_positions(runner, requests)
    return forward.mrope_positions


def prefill(held: Any, start: int, stop: int) -> Tensor:
    return step(ForwardMode.EXTEND, held, stop, extend_lens=[stop - start], prefix_lens=[start])


def decode(held: Any, start: int, stop: int) -> Tensor:
    return torch.cat([step(ForwardMode.DECODE, held, token + 1) for token in range(start, stop)], dim=1)


def verify(held: Any, start: int, stop: int) -> Tensor:
    draft = SimpleNamespace(positions=torch.arange(start, stop))
    return step(ForwardMode.TARGET_VERIFY, held, start, stop - start, spec_info=draft)


@pytest.mark.parametrize(
    ("rotary", "model_type", "kernel"),
    [
        (QWEN25, "qwen2_5_vl", "native"),
        (QWEN25, "qwen2_5_vl", "triton"),
        (QWEN3, "qwen3_vl", "native"),
        (QWEN3, "qwen3_vl", "triton"),
        (QWEN35, "qwen3_5", "native"),
        (QWEN35, "qwen3_5", "fused"),
    ],
)
def test_chunks_decoding_and_drafts_raise_no_alarm(rotary: Rotary, model_type: str, kernel: Kernel) -> None:
    held, scheme = wide(model_type), "mrope-qwen2.5" if rotary is QWEN25 else "mrope-qwen3"
    positions = torch.cat(
        [prefill(held, 0, 40), prefill(held, 40, 85), decode(held, 85, 87), verify(held, 87, 90)], dim=1
    )
    keys = rotated(rope_of(rotary), positions, kernel)
    reading = read(keys, rotary)
    assert reading.known.all()
    assert check(reading, WIDE, scheme).equal
    assert identify(keys, rotary, place(WIDE, scheme)).as_meant
