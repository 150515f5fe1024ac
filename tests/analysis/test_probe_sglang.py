"""SGLang's positions, rotations and kernels on a CPU, probed: calm where they are right, and known bugs are named."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; docs/probe.md says what was run with it", allow_module_level=True)
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate import fused_qk_gemma_rmsnorm_rope_gate
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding
    from sglang.srt.managers.schedule_batch import MultimodalInputs
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from mmpos import Grid, SegmentTable, Text, place
from mmpos.analysis.diagnosis import Diagnosis
from mmpos.analysis.probe import check, identify, read, write_checkpoint
from mmpos.rotary import Rotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

Kernel = Literal["native", "triton", "fused"]
IMAGE, VIDEO, START = 555, 556, 552
QWEN25 = Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24])
QWEN3 = Rotary(128, 5e6, allocation="mrope-interleaved", mrope_section=[24, 20, 20])
QWEN35 = Rotary(256, 1e7, rotary_dim=64, allocation="mrope-interleaved", mrope_section=[11, 11, 10])
WIDE = SegmentTable.from_documents([[Text(4), Grid(7, 11), Text(9)]])
"""A prompt of 85 tokens and 5 that are generated; its text goes on at 4 + 11 after 81 tokens: a delta of −66."""
WIDE_IDS = [1, 2, 3, START] + [IMAGE] * 77 + [553, 4, 5, 6]
HIGH_IDS = [1, 2, 3, 4, 5, 6, START] + [IMAGE] * 15 + [553, 7]
"""5 rows of 3: text goes on at 7 + 5 after 22 tokens, a delta of −10."""


@pytest.fixture(scope="module", autouse=True)
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tell SGLang of a checkpoint and of the CPU; where it would import a kernel of vLLM, it finds none to call."""
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
    """SGLang's rotation with the settings of a rotary."""
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


def turned(rope: Any, positions: Tensor, kernel: Kernel = "native") -> Tensor:
    """(tokens, kv_heads, head_dim) keys of tokens with one hidden state; the fused kernel makes bfloat16."""
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


def request(input_ids: Sequence[int], rows: int, columns: int, model_type: str = "qwen3_vl") -> Any:
    """Positions and delta of a prompt with an image, as the processor keeps them."""
    names = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    grid, seconds = torch.tensor([[1, 2 * rows, 2 * columns]]), {"tokens_per_second": 2}
    told = {"model_type": model_type, "input_ids": torch.tensor([input_ids]), "image_grid_thw": grid, **seconds}
    ids, delta = MRotaryEmbedding.get_rope_index(2, **names, **told)
    return MultimodalInputs([], mrope_positions=ids[:, 0], mrope_position_delta=delta)


def wide(model_type: str = "qwen3_vl") -> Any:
    return request(WIDE_IDS, 7, 11, model_type)


def step(mode: Any, held: Any, length: int, drafts: int = 0, **batch: Any) -> Tensor:
    """(3, tokens) positions of a step of one request that then has this length, by SGLang's ForwardBatch."""
    forward = ForwardBatch.__new__(ForwardBatch)
    forward.seq_lens = forward.seq_lens_cpu = torch.tensor([length])
    forward.forward_mode, runner = mode, SimpleNamespace(device="cpu")
    told = SimpleNamespace(multimodal_inputs=[held], reqs=[SimpleNamespace(session=None)], **batch)
    if drafts:
        forward.compute_spec_mrope_positions(runner, told)
    else:
        forward._compute_mrope_positions(runner, told)
    return forward.mrope_positions


def prefill(held: Any, start: int, stop: int) -> Tensor:
    return step(ForwardMode.EXTEND, held, stop, extend_lens=[stop - start], prefix_lens=[start])


def decode(held: Any, start: int, stop: int) -> Tensor:
    return torch.cat([step(ForwardMode.DECODE, held, token + 1) for token in range(start, stop)], dim=1)


def verify(held: Any, start: int, stop: int) -> Tensor:
    draft = SimpleNamespace(positions=torch.arange(start, stop))
    return step(ForwardMode.TARGET_VERIFY, held, start, stop - start, spec_info=draft)


def found(positions: Sequence[Tensor], segments: SegmentTable = WIDE) -> Diagnosis:
    keys = turned(rope_of(QWEN3), torch.cat([*positions], dim=1))
    return check(read(keys, QWEN3), segments, "mrope-qwen3")


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
    keys = turned(rope_of(rotary), positions, kernel)
    reading = read(keys, rotary)
    assert reading.known.all()
    assert check(reading, WIDE, scheme).equal
    assert identify(keys, rotary, place(WIDE, scheme)).as_meant


def whole(held: Any) -> Tensor:
    return torch.cat([prefill(held, 0, 85), decode(held, 85, 90)], dim=1)


@pytest.mark.parametrize(("rotary", "kernel"), [(QWEN3, "native"), (QWEN35, "fused")])
def test_a_rotation_that_reads_one_position_per_token(rotary: Rotary, kernel: Kernel) -> None:
    """sglang#34446, #36762: the kernel takes positions for 1-D, and reads their first row."""
    keys = turned(rope_of(rotary), whole(wide())[0], kernel)
    diagnosis = check(read(keys, rotary), WIDE, "mrope-qwen3")
    assert diagnosis.token == 5  # the first patch stands where its frame does
    assert diagnosis.cause == "axis 0 (frame) stands in place of every other axis, which is dropped"
    named = identify(keys, rotary, place(WIDE, "mrope-qwen3"))
    assert named.cause == "all pairs turn by axis 0 (frame): the other axes are dropped"


@pytest.mark.parametrize(("rotary", "kernel"), [(QWEN3, "triton"), (QWEN35, "fused")])
def test_sections_in_blocks_where_pairs_are_interleaved(rotary: Rotary, kernel: Kernel) -> None:
    keys = turned(rope_of(rotary, mrope_interleaved=False), whole(wide()), kernel)
    named = identify(keys, rotary, place(WIDE, "mrope-qwen3"))
    assert named.cause == "pairs are allocated as 'sections', not as 'mrope-interleaved'"


def test_half_of_the_frequencies_on_the_wrong_axis() -> None:
    """vllm-omni#1784: frequencies of rows and columns alternate in the model, and lie in two blocks in the engine."""
    keys = turned(rope_of(QWEN25, mrope_section=[0, 32, 32]), whole(wide("qwen2_5_vl")))
    meant = Rotary(128, 1e6, axes=3, allocation=[1, 2] * 32)
    named = identify(keys, meant, place(WIDE, "mrope-qwen2.5"))
    assert named.cause == "pairs are allocated as 'sections', not as 'a vector'"


def test_a_delta_that_is_lost_before_decoding() -> None:
    """TensorRT-LLM#15661: what decodes gets no delta."""
    diagnosis = found([prefill(wide(), 0, 85), decode(None, 85, 90)])
    assert diagnosis.token == 85
    assert diagnosis.cause == "from the first difference on ids are the token's index: the delta -66 is forgotten"


def test_a_delta_of_the_request_before() -> None:
    """mlx-vlm#1619, #1983: the delta is the model's, and not the request's."""
    first, second = request(HIGH_IDS, 5, 3), wide()
    second.mrope_position_delta = first.mrope_position_delta
    before = torch.cat([prefill(first, 0, 24), decode(first, 24, 29)], dim=1)
    both = SegmentTable.from_documents([[Text(7), Grid(5, 3), Text(7)], [Text(4), Grid(7, 11), Text(9)]])
    diagnosis = found([before, whole(second)], both)
    assert (diagnosis.document, diagnosis.token) == (1, 85)
    assert diagnosis.cause == "the delta -10 of documents[0] is used for documents[1], from the first difference on"


def test_a_prefix_hit_after_which_ids_begin_at_zero() -> None:
    """vllm#48835: what follows a cached prefix is placed as a prompt of its own."""
    diagnosis = found([prefill(None, 0, 64), prefill(None, 0, 40)], SegmentTable.from_documents([[Text(104)]]))
    assert diagnosis.token == 64
    assert diagnosis.cause == "ids are reset inside a document: they begin anew at this token"


def test_a_chunk_that_takes_the_first_positions_of_its_prompt() -> None:
    """mlx-vlm#1741: every chunk is given the positions of the whole prompt, and takes their beginning."""
    held = wide()
    diagnosis = found([prefill(held, 0, 64), prefill(held, 0, 21), decode(held, 85, 90)])
    assert diagnosis.token == 64
    assert diagnosis.cause == "from token 64 on ids are those of the document's beginning again"


def test_drafts_one_place_too_far() -> None:
    """vllm#54498: tokens of a draft are not where the one before them leads."""
    held = wide()
    diagnosis = found([prefill(held, 0, 85), decode(held, 85, 86), verify(held, 87, 91)])
    assert diagnosis.token == 86
    assert diagnosis.cause == "from the first difference to the end of the document, ids are 1 too large"
