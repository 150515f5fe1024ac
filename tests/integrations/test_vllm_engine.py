"""The ids and windows of mmpos equal those of vLLM, whose kernel runs in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_vllm import MERGE, request
from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.v1.worker.gpu.mm.rope import _prepare_rope_positions_kernel
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import mmpos
from mmpos.integrations.vllm import mrope_input_positions, request_segments

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

VISION = {"spatial_merge_size": MERGE, "tokens_per_second": 2}


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
        got, ours = mrope_input_positions(tokens, features, scheme=scheme, spatial_merge_size=MERGE)
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        assert (ours, type(ours)) == (delta, type(delta))


def tie_requests(count: int) -> tuple[list[Tensor], list[int], mmpos.PositionTable]:
    """Return the ids and deltas of random requests under rope-tie, and one table of all requests."""
    draw = random.Random(3)
    drawn = [request(draw, "none", last_text=draw.random() < 0.7) for _ in range(count)]
    tables = [request_segments(len(tokens), features, spatial_merge_size=MERGE) for tokens, features in drawn]
    options: dict[str, Any] = {"scheme": "rope-tie", "spatial_merge_size": MERGE, "strict": False}
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
        want = placed.window(range(len(ids)), computed, scheduled).dense(axes=(0, 0, 1))
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
        want = placed.window(range(len(ids)), computed, scheduled).dense(axes=(0, 0, 1))
        assert out[:, :-1].tolist() == want.tolist()
