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
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mmpos
import mmpos.sections
from mmpos.rotary import Rotary, apply_rotary
from mmpos.vllm import Sections, mrope_input_positions, request_segments, window_positions
from mmpos.vllm.plugin import ARCHITECTURES, register

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
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, triton_mrope
    from vllm.model_executor.model_loader.utils import initialize_model
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
    return MultiModalFeatureSpec(data=MultiModalKwargsItem(item), modality=modality, identifier="", mm_position=place)


def request(draw: random.Random, video: str, last_text: bool = True) -> tuple[list[int], list[Any]]:
    """Token ids and features of a prompt; videos are "none", "whole" or "apart"."""
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
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
        assert (ours, type(ours)) == (delta, type(delta))


def tie_requests(count: int) -> tuple[list[Tensor], list[int], mmpos.PositionTable]:
    """Ids and deltas of random requests under rope-tie, and their table."""
    draw = random.Random(3)
    drawn = [request(draw, "none", last_text=draw.random() < 0.7) for _ in range(count)]
    tables = [request_segments(len(tokens), features, spatial_merge_size=MERGE) for tokens, features in drawn]
    wanted: dict[str, Any] = {"scheme": "rope-tie", "sections": TWO, "spatial_merge_size": MERGE, "strict": False}
    found = [mrope_input_positions(tokens, features, **wanted) for tokens, features in drawn]
    placed = mmpos.PositionTable.concatenate([mmpos.place(table, "rope-tie", strict=False) for table in tables])
    return [ids for ids, _ in found], [delta for _, delta in found], placed


def steps(lengths: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Computed and scheduled tokens of every request: prefixes, chunks, decoding, and drafts after the prompt."""
    draw = random.Random(11)
    for _ in range(30):
        computed = [draw.choice([0, draw.randrange(n), n - 1, n, n + draw.randint(1, 9)]) for n in lengths]
        yield computed, [draw.choice([1, 4, draw.randint(1, n + 6)]) for n in lengths]


def test_the_first_runner_slices_our_ids_into_our_windows() -> None:
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


def test_the_kernel_of_the_second_runner_slices_our_ids_into_our_windows() -> None:
    ids, deltas, placed = tie_requests(6)
    lengths = [request.shape[1] for request in ids]
    staged = torch.zeros(len(ids), 3, 512, dtype=torch.int32)
    for row, own in zip(staged, ids, strict=True):
        row[:, : own.shape[1]] = own
    for computed, scheduled in steps(lengths):
        # A step of this runner is of the prompt or after it: what would pass its end is cut there.
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
def test_vllms_rotation_of_permuted_channels_is_ours(engine_config: VllmConfig, rotary: Rotary, kernel: str) -> None:
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
    mmpos.sections.install_cache(own, sections)
    ids, _, placed = tie_requests(3)
    rows = torch.cat(ids, dim=1)
    torch.manual_seed(0)
    q, k = torch.randn(rows.shape[1], 4, 32), torch.randn(rows.shape[1], 2, 32)
    channels = torch.from_numpy(mmpos.sections.qk_channels(rotary))
    want_q, want_k = apply_rotary(q, k, placed, rotary)
    assert want_k is not None
    turned = q[..., channels].flatten(1), k[..., channels].flatten(1)
    if kernel == "torch":
        got_q, got_k = own.forward_native(rows, *turned)
    else:
        cos, sin = own.cos_sin_cache[rows].chunk(2, dim=-1)
        got_q, got_k = triton_mrope(
            *turned, cos, sin, own.mrope_section, 32, rotary.rotary_dim, False, sections.is_neox_style
        )
    torch.testing.assert_close(got_q.view_as(q), want_q[..., channels], rtol=0, atol=1e-6)
    torch.testing.assert_close(got_k.view_as(k), want_k[..., channels], rtol=0, atol=1e-6)


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [0, 4, 4]}
ENCODER = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 2}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
CONFIGS: dict[str, dict[str, Any]] = {
    "MMPosQwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
        "vision_config": {**ENCODER, "depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **TEXT,
    },
    "MMPosQwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
        "vision_config": {
            **ENCODER,
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        **TEXT,
    },
    "MMPosQwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": ROPE, **TEXT},
        "vision_config": {
            **ENCODER,
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
}


class Causal(nn.Module):
    """Attention over one prompt, in place of vLLM's, which reads a paged cache."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (n, -1)).transpose(0, 1)
            for x, n in ((q, self.heads), *((x, self.kv_heads) for x in (k, v)))
        )
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        )


class Reference(nn.Module):
    """mmpos's own rotation of two axes in place of vLLM's."""

    def __init__(self, rotary: Rotary, positions: mmpos.PositionTable) -> None:
        super().__init__()
        self.rotary, self.positions = rotary, positions

    def forward(self, _rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dim = self.rotary.head_dim
        q, turned = apply_rotary(q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), self.positions, self.rotary)
        assert turned is not None
        return q.flatten(1), turned.flatten(1)


@pytest.fixture(scope="module")
def _distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("gelu_quick(Tensor! out, Tensor input) -> ()")  # named by an activation of the encoder, not called
    where = tmp_path_factory.mktemp("rendezvous") / "file"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{where}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    del library


def served(folder: Path, architecture: str, **mmpos_config: Any) -> tuple[VllmConfig, Any]:
    config = {"architectures": [architecture], **CONFIGS[architecture], **TOKENS, "mmpos": mmpos_config}
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=200,
        limit_mm_per_prompt={"image": 4},
    )
    vllm_config = VllmConfig(
        model_config=model, device_config=DeviceConfig("cpu"), compilation_config={"custom_ops": ["none"], "mode": 0}
    )
    with set_current_vllm_config(vllm_config):
        return vllm_config, initialize_model(vllm_config)


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """Random weights under the names of a checkpoint, q, k and v apart."""
    found = {}
    for name, parameter in model.named_parameters():
        values = 0.2 * torch.randn(parameter.shape) + (1.0 if "norm" in name and "weight" in name else 0.0)
        old = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        old = "model." + old if old.startswith("visual.") else old
        if ".qkv_proj." in name:
            for part, value in zip("qkv", values.split([64, 32, 32]), strict=True):
                found[old.replace("qkv_proj", f"{part}_proj")] = value
        elif ".gate_up_proj." in name:
            for part, value in zip(("gate", "up"), values.chunk(2), strict=True):
                found[old.replace("gate_up_proj", f"{part}_proj")] = value
        else:
            found[old] = values
    return found


def hidden_states(model: Any, tokens: list[int], rows: Tensor) -> Tensor:
    for layer in model.language_model.model.layers:
        layer.self_attn.attn = Causal(4, 2)
    for module in model.language_model.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = functional.linear  # in place of vLLM's, of which only a build for CPUs has all
    with torch.no_grad():
        return model.language_model.model(torch.tensor(tokens), rows)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.usefixtures("_distributed")
def test_a_model_served_in_two_axes_is_the_one_that_was_trained(tmp_path: Path, architecture: str) -> None:
    register()
    register()
    vllm_config, model = served(tmp_path, architecture, scheme="rope-tie")
    assert type(model).__module__ == "mmpos.vllm.models"
    assert supports_mrope(model)
    assert vllm_config.model_config.uses_mrope
    assert vllm_config.model_config.mrope_num_dims == 3

    torch.manual_seed(1)
    weights = checkpoint(model)
    tokens, features = request(random.Random(5), "none")
    rows, delta = model.get_mrope_input_positions(tokens, features)
    positions = mmpos.place(request_segments(len(tokens), features, spatial_merge_size=MERGE), "rope-tie")
    assert rows.tolist() == positions.dense(axes=(0, 0, 1)).tolist()
    assert [delta] == positions.deltas.tolist()
    with set_current_vllm_config(vllm_config):
        loaded = model.load_weights((name, weights[name]) for name in weights)
        assert {name for name, _ in model.named_parameters()} <= loaded
        got = hidden_states(model, tokens, rows)

        model.served = replace(model.served, sections=Sections(Rotary(16, allocation="split"), 600))
        model.load_weights(weights.items())  # as they are
        wrong = hidden_states(model, tokens, rows)
        for layer in model.language_model.model.layers:
            layer.self_attn.rotary_emb = Reference(Rotary(16), positions)
        want = hidden_states(model, tokens, rows)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert (wrong - want).abs().max() > 0.1
