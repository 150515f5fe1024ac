"""The ids, windows and rotations of mmpos equal those of vLLM, whose kernels run in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_vllm import MERGE, request
from tolerance import assert_within, rotations
from torch import Tensor
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, triton_mrope
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.v1.worker.gpu.mm.rope import _prepare_rope_positions_kernel
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import mmpos
import mmpos.integrations.sections
from mmpos.integrations.sections import Sections, window_positions
from mmpos.integrations.vllm import mrope_input_positions, request_segments
from mmpos.rotary import Rotary, apply_rotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

VISION = {"spatial_merge_size": MERGE, "tokens_per_second": 2}
THREE = Sections(Rotary(128, allocation="sections", mrope_section=[16, 24, 24]), max_position=1 << 17)
TWO = Sections(Rotary(32), max_position=512, permuted=True)


@pytest.mark.parametrize(
    ("model", "scheme", "video"),
    [
        (Qwen2VLForConditionalGeneration, "mrope", "none"),
        (Qwen2_5_VLForConditionalGeneration, mmpos.schemes.MRopeQwen25(2), "whole"),
        (Qwen3VLForConditionalGeneration, "mrope-qwen3", "apart"),
    ],
    ids=["qwen2", "qwen2.5", "qwen3"],
)
def test_ids_and_delta_equal_those_of_vllms_models(model: Any, scheme: Any, video: str) -> None:
    draw = random.Random(7)
    config = SimpleNamespace(
        vision_config=SimpleNamespace(**VISION), video_token_id=91, vision_start_token_id=92, vision_end_token_id=93
    )
    own = SimpleNamespace(config=config)
    for method in ("iter_mm_grid_thw", "_get_mrope_input_positions"):
        if hasattr(model, method):
            function = getattr(model, method)
            own.__dict__[method] = function if method.startswith("_") else function.__get__(own)
    for _ in range(200):
        tokens, features = request(draw, video, last_text=draw.random() < 0.8)
        want, delta = model.get_mrope_input_positions(own, tokens, features)
        got, ours = mrope_input_positions(tokens, features, scheme=scheme, sections=THREE, spatial_merge_size=MERGE)
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        assert (ours, type(ours)) == (delta, type(delta))


def tie_requests(count: int) -> tuple[list[Tensor], list[int], mmpos.PositionTable]:
    """Return the ids and deltas of random requests under rope-tie, and one table of all requests."""
    draw = random.Random(3)
    drawn = [request(draw, "none", last_text=draw.random() < 0.7) for _ in range(count)]
    tables = [request_segments(len(tokens), features, spatial_merge_size=MERGE) for tokens, features in drawn]
    options: dict[str, Any] = {"scheme": "rope-tie", "sections": TWO, "spatial_merge_size": MERGE, "strict": False}
    results = [mrope_input_positions(tokens, features, **options) for tokens, features in drawn]
    placed = mmpos.PositionTable.concatenate([mmpos.place(table, "rope-tie", strict=False) for table in tables])
    return [ids for ids, _ in results], [delta for _, delta in results], placed


def steps(lengths: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield computed and scheduled tokens of requests: prefixes, chunks, decoding steps, drafts after the prompt."""
    draw = random.Random(11)
    for _ in range(30):
        computed = [draw.choice([0, draw.randrange(n), n - 1, n, n + draw.randint(1, 9)]) for n in lengths]
        yield computed, [draw.choice([1, 4, draw.randint(1, n + 6)]) for n in lengths]


def test_the_model_runner_slices_ids_into_windows_of_the_table() -> None:
    ids, deltas, placed = tie_requests(6)
    lengths = [request.shape[1] for request in ids]
    names = [str(i) for i in range(len(ids))]
    requests = {
        name: SimpleNamespace(
            mrope_positions=own, mrope_position_delta=delta, prompt_token_ids=[1] * own.shape[1], prompt_embeds=None
        )
        for name, own, delta in zip(names, ids, deltas, strict=True)
    }
    for computed, scheduled in steps(lengths):
        out = torch.full((3, sum(scheduled) + 1), -1, dtype=torch.int64)
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=names, num_computed_tokens_cpu=np.array(computed)),
            requests=requests,
            mrope_positions=SimpleNamespace(cpu=out, np=out.numpy()),
        )
        output = SimpleNamespace(num_scheduled_tokens=dict(zip(names, scheduled, strict=True)))
        GPUModelRunner._calc_mrope_positions(runner, output)
        want = window_positions(placed, TWO, range(len(ids)), computed, scheduled)
        assert out[:, :-1].tolist() == want.tolist()


def test_the_kernel_of_the_new_model_runner_slices_ids_into_windows_of_the_table() -> None:
    ids, deltas, placed = tie_requests(6)
    lengths = [request.shape[1] for request in ids]
    staged = torch.zeros(len(ids), 3, 512, dtype=torch.int32)
    for row, own in zip(staged, ids, strict=True):
        row[:, : own.shape[1]] = own
    for computed, scheduled in steps(lengths):
        # A step of this runner is either inside or after the prompt, so steps are cut at the end of the prompt.
        scheduled = [min(s, n - c) if c < n else s for s, c, n in zip(scheduled, computed, lengths, strict=True)]
        out = torch.full((3, sum(scheduled) + 1), -1, dtype=torch.int64)
        starts = torch.tensor([0, *np.cumsum(scheduled)], dtype=torch.int32)
        _prepare_rope_positions_kernel[(len(ids),)](
            out,
            out.stride(0),
            staged,
            staged.stride(0),
            staged.stride(1),
            torch.tensor(deltas, dtype=torch.int32),
            torch.arange(len(ids), dtype=torch.int32),
            starts,
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(computed, dtype=torch.int32),
            BLOCK_SIZE=1024,
            NUM_DIMS=3,
        )
        want = window_positions(placed, TWO, range(len(ids)), computed, scheduled)
        assert out[:, :-1].tolist() == want.tolist()


@pytest.fixture(scope="module")
def engine_config() -> Iterator[VllmConfig]:
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(config):
        yield config


ROTATIONS = [
    pytest.param(Rotary(32), id="half"),
    pytest.param(Rotary(32, pairing="adjacent"), id="adjacent"),
    pytest.param(Rotary(32, rotary_dim=20), id="partial"),
    pytest.param(Rotary(32, rotary_dim=22, theta=5e5), id="odd pairs"),
]


@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("rotary", ROTATIONS)
def test_vllm_rotates_permuted_channels_like_mmpos(engine_config: VllmConfig, rotary: Rotary, kernel: str) -> None:
    sections = Sections(rotary, max_position=512, permuted=True)
    own = MRotaryEmbedding(
        32,
        rotary.rotary_dim,
        512,
        rotary.theta,
        sections.is_neox_style,
        torch.float32,
        list(sections.mrope_section),
        positions_factor=1,
    )
    mmpos.integrations.sections.install_cache(own, sections)
    ids, _, placed = tie_requests(3)
    rows = torch.cat(ids, dim=1)
    torch.manual_seed(0)
    q, k = torch.randn(rows.shape[1], 4, 32), torch.randn(rows.shape[1], 2, 32)
    channels = torch.from_numpy(mmpos.integrations.sections.qk_channels(rotary))
    want_q, want_k = apply_rotary(q, k, placed, rotary)
    assert want_k is not None
    permuted = q[..., channels].flatten(1), k[..., channels].flatten(1)
    if kernel == "torch":
        got_q, got_k = own.forward_native(rows, *permuted)
    else:
        cos, sin = own.cos_sin_cache[rows].chunk(2, dim=-1)
        got_q, got_k = triton_mrope(
            *permuted, cos, sin, own.mrope_section, 32, rotary.rotary_dim, False, sections.is_neox_style
        )
    want = [want_q[..., channels], want_k[..., channels]]
    assert_within([got_q.view_as(q), got_k.view_as(k)], want, [rotations(x) for x in want])
