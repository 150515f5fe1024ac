"""Probe vLLM's engine on a CPU: the probe raises no false alarm, and names known bugs patched into the engine.

vLLM pins another torch, so it needs a separate environment with mmpos, pytest and Pillow. Its CPU platform works
without the kernels of a CPU build as long as attention and gelu_quick are not called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from mmpos_probe import Identification, check, identify, read, write_checkpoint
from PIL import Image
from torch import Tensor

from mmpos import Diagnosis, Grid, SegmentTable, Text, place
from mmpos.rotary import Rotary

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; README.md says what was run with it", allow_module_level=True)
for name, value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM then keeps Triton even without a driver
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(name, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    import vllm._custom_ops
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.mm.rope import RopeState

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CHUNK, BLOCK = 64, 32
TEXT: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 1280,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
TOKENS = {"image_token_id": 555, "video_token_id": 556, "vision_start_token_id": 552, "vision_end_token_id": 553}
ROPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "qwen3_vl": {"rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
QWEN25 = Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24])
QWEN3 = Rotary(128, 5e6, allocation="mrope-interleaved", mrope_section=[24, 20, 20])
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
WIDE, HIGH = (300, 200), (90, 150)
"""Widths and heights: 7 rows of 11 tokens and 5 rows of 3 in Qwen2.5-VL; WIDE is 6 rows of 9 in Qwen3-VL."""
PROMPT = f"abc{IMAGE}def"
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


Documents = Sequence[Sequence[Text | Grid]]


class Engine:
    """An engine that serves a probe checkpoint, one request at a time, and the keys in its paged cache."""

    def __init__(self, name: str, **options: Any) -> None:
        self.pages: dict[str, dict[int, Any]] = {}
        self.blocks: list[int] = []
        self.rotary, self.scheme = (QWEN25, "mrope-qwen2.5") if name == "qwen2_5_vl" else (QWEN3, "mrope-qwen3")
        with TemporaryDirectory() as folder:
            config = {"num_hidden_layers": 2, "bos_token_id": 300, "eos_token_id": None}
            rope = {"rope_parameters": {"rope_type": "default", **ROPES[name]}}
            kind: Any = transformers.CONFIG_MAPPING[name]
            write_checkpoint(kind(text_config={**TEXT, **config, **rope}, **TOKENS).to_dict(), folder)
            self.llm = vllm.LLM(
                folder,
                dtype="float32",
                enforce_eager=True,
                compilation_config={"custom_ops": ["none"]},
                max_model_len=512,
                max_num_batched_tokens=CHUNK,
                max_num_seqs=2,
                block_size=BLOCK,
                kv_cache_memory_bytes=1 << 26,
                enable_prefix_caching=True,
                **options,
            )

    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        """Make attention use this engine, and empty the engine's caches."""
        monkeypatch.setattr(Attention, "forward", lambda layer, query, key, *_, **__: self.attention(layer, query, key))
        self.llm.reset_prefix_cache()
        self.pages.clear()
        return self

    def serve(self, prompt: str, *sizes: tuple[int, int], tokens: int = 6) -> tuple[Any, int]:
        """Generate tokens for one request.

        Returns:
            the (layers, tokens, kv_heads, head_dim) keys of all tokens except the last (which never passes through
            forward), as left in the cache, with zeros where nothing was written; and the number of prompt tokens that
            were already cached.
        """
        data = {"multi_modal_data": {"image": [Image.new("RGB", size) for size in sizes]}} if sizes else {}
        sampling = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        (output,) = self.llm.generate({"prompt": prompt, **data}, sampling, use_tqdm=False)
        length = len(output.prompt_token_ids) + tokens - 1
        slots = [self.blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(length)]
        empty = np.zeros((1, 128), np.float32)
        keys = np.stack([[page.get(slot, empty) for slot in slots] for page in self.pages.values()])
        return keys, output.num_cached_tokens

    @property
    def rope(self) -> MRotaryEmbedding:
        """The rotation that all layers share."""
        (modules,) = self.llm.apply_model(
            lambda model: [module for module in model.modules() if isinstance(module, MRotaryEmbedding)]
        )
        assert all(module is modules[0] for module in modules)
        return modules[0]

    def check(self, keys: Any, documents: Documents) -> Diagnosis:
        """Diagnose the second layer, and check that the first has the same diagnosis."""
        segments = SegmentTable.from_documents(documents)
        first, second = (check(read(layer, self.rotary), segments, self.scheme) for layer in keys)
        assert (first.document, first.token, first.cause) == (second.document, second.token, second.cause)
        return second

    def identify(self, keys: Any, documents: Documents, rotary: Rotary | None = None) -> Identification:
        """Identify the rotation of the second layer, and check that the first layer gives the same cause."""
        positions = place(SegmentTable.from_documents(documents), self.scheme)
        first, second = (identify(layer, rotary or self.rotary, positions) for layer in keys)
        assert first.cause == second.cause
        return second

    def attention(self, layer: Attention, query: Any, key: Any) -> Any:
        """Store keys in their slots, and return zeros, since the checkpoint discards the attention output."""
        metadata: Any = get_forward_context().attn_metadata
        mine = metadata[layer.layer_name]
        rows = key.view(-1, layer.num_kv_heads, layer.head_size).numpy().copy()
        page = self.pages.setdefault(layer.layer_name, {})
        page.update(zip(mine.slot_mapping.tolist(), rows, strict=False))  # the remaining slots are padding
        self.blocks = mine.block_table[0].tolist()
        return torch.zeros_like(query)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Start Qwen2.5-VL, and Qwen3-VL with n-gram drafts, without the kernels of a CPU build."""
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        library.define("init_cpu_memory_env(int[] nodes) -> ()")
        library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setattr(vllm._custom_ops, "cpu_attn_get_scheduler_metadata", lambda *_, **__: torch.zeros(1))
        patch.setattr(Attention, "forward", lambda layer, query, *_, **__: torch.zeros_like(query))
        yield {"plain": Engine("qwen2_5_vl"), "drafting": Engine("qwen3_vl", speculative_config=DRAFTS)}


@pytest.fixture
def plain(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    return engines["plain"].fresh(monkeypatch)


@pytest.fixture
def drafting(engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    return engines["drafting"].fresh(monkeypatch)


def test_chunks_and_prefix_hits_of_qwen25_raise_no_alarm(plain: Engine) -> None:
    for tail, hit in ((0, 0), (60, 64)):
        keys, cached = plain.serve(PROMPT + tail * "x", WIDE)
        assert cached == hit  # the text before the image, five rows of patches, and five more patches
        assert plain.check(keys, [[Text(4), Grid(7, 11), Text(9 + tail)]]).equal
        assert plain.identify(keys, [[Text(4), Grid(7, 11), Text(9 + tail)]]).as_meant


def test_drafts_of_qwen3_raise_no_alarm(drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, own = list[int](), RopeState.prepare_positions

    def count(self: RopeState, rows: Tensor, starts: Tensor, *rest: Tensor) -> None:
        steps.append(int(starts[len(rows)]))
        own(self, rows, starts, *rest)

    monkeypatch.setattr(RopeState, "prepare_positions", count)
    keys, _ = drafting.serve(PROMPT, WIDE, tokens=12)
    assert drafting.check(keys, [[Text(4), Grid(6, 9), Text(15)]]).equal
    assert drafting.identify(keys, [[Text(4), Grid(6, 9), Text(15)]]).as_meant
    assert steps == [62, 4, 4, 4]  # the prompt, then a token with three drafts in each step


def test_a_rotation_that_reads_one_position_per_token_is_identified(
    plain: Engine, drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#34446, #36762: the kernel expects 1-D positions, so it reads only the first row."""
    monkeypatch.setattr(
        MRotaryEmbedding, "forward", lambda self, positions, query, key: self.forward_native(positions[0], query, key)
    )
    for engine, grid in ((plain, Grid(7, 11)), (drafting, Grid(6, 9))):
        with monkeypatch.context() as patch:
            keys, _ = engine.fresh(patch).serve(PROMPT, WIDE)
        diagnosis = engine.check(keys, [[Text(4), grid, Text(9)]])
        assert diagnosis.token == 5  # the first patch has its frame's id on all axes
        assert diagnosis.cause == "axis 0 (frame) is used in place of every other axis"
        identification = engine.identify(keys, [[Text(4), grid, Text(9)]])
        assert identification.cause == "all pairs rotate by axis 0 (frame): other axes are dropped"


def test_sections_instead_of_interleaved_pairs_are_identified(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-gaudi#1437: the rotation ignores mrope_interleaved."""
    monkeypatch.setattr(drafting.rope, "mrope_interleaved", False)
    keys, _ = drafting.serve(PROMPT, WIDE)
    identification = drafting.identify(keys, [[Text(4), Grid(6, 9), Text(9)]])
    assert identification.cause == "pairs are allocated as 'sections', not as 'mrope-interleaved'"


def test_sections_of_another_model_are_identified(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain.rope, "mrope_section", [24, 20, 20])
    keys, _ = plain.serve(PROMPT, WIDE)
    identification = plain.identify(keys, [[Text(4), Grid(7, 11), Text(9)]])
    assert identification.cause == "12 pairs of 64 (first: 16) rotate by other axes: 0, 1 instead of 1, 2"


def test_a_delta_lost_before_decoding_is_identified(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM#15661: decoding gets no delta."""
    use_delta(monkeypatch, lambda deltas: 0)
    keys, _ = plain.serve(PROMPT, WIDE)
    diagnosis = plain.check(keys, [[Text(4), Grid(7, 11), Text(9)]])
    assert diagnosis.token == 85  # the first generated token
    assert diagnosis.cause == "from the first difference on, ids are the token's index: the delta -66 is forgotten"


def test_the_delta_of_a_previous_request_is_identified(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-vlm#1619, #1983: the delta is stored in the model, not with the request."""
    use_delta(monkeypatch, lambda deltas: deltas[0])
    before, _ = plain.serve(f"hello {IMAGE}!", HIGH)
    keys, _ = plain.serve(PROMPT, WIDE)
    documents: Documents = [[Text(7), Grid(5, 3), Text(7)], [Text(4), Grid(7, 11), Text(9)]]
    diagnosis = plain.check(np.concatenate([before, keys], axis=1), documents)
    assert (diagnosis.document, diagnosis.token) == (1, 85)
    assert diagnosis.cause == "the delta -10 of documents[0] is used for documents[1], from the first difference on"


def use_delta(monkeypatch: pytest.MonkeyPatch, choose: Callable[[list[int]], int]) -> None:
    """Decode with a delta chosen from those of the requests so far."""
    deltas, own = list[int](), RopeState.init_prefill_positions

    def init_prefill_positions(self: RopeState, request: int, *rest: Any, **named: Any) -> None:
        own(self, request, *rest, **named)
        deltas.append(int(self.prefill_delta.np[request]))
        self.prefill_delta.np[request] = choose(deltas)

    monkeypatch.setattr(RopeState, "init_prefill_positions", init_prefill_positions)


def test_ids_that_restart_after_a_prefix_hit_are_identified(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#48835: tokens after a cached prefix are placed as a separate prompt."""
    plain.serve(70 * "a")
    begin_prompts_at(monkeypatch, 64)
    keys, cached = plain.serve(70 * "a" + 60 * "b")
    assert cached == 64
    diagnosis = plain.check(keys, [[Text(135)]])
    assert diagnosis.token == 64
    assert diagnosis.cause == "ids are reset inside a document: they restart at this token"


def test_a_chunk_with_the_first_positions_of_its_prompt_is_identified(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-vlm#1741: every chunk gets the positions of the whole prompt, and uses the first of these positions."""
    begin_prompts_at(monkeypatch, None)
    for tail in (0, 60):
        keys, cached = plain.fresh(monkeypatch).serve(PROMPT + tail * "x", WIDE)
        assert cached == 0
        diagnosis = plain.check(keys, [[Text(4), Grid(7, 11), Text(9 + tail)]])
        assert diagnosis.token == CHUNK
        assert diagnosis.cause == "from token 64 on, ids repeat those of the document's beginning"


def begin_prompts_at(monkeypatch: pytest.MonkeyPatch, computed: int | None) -> None:
    """Restart the positions of prompt tokens at token ``computed`` or, if it is None, at the start of each step."""
    own = RopeState.prepare_positions

    def prepare_positions(self: RopeState, rows: Tensor, starts: Tensor, lengths: Tensor, done: Tensor) -> None:
        left = done - (done if computed is None else computed)
        own(self, rows, starts, lengths, torch.where(done < lengths, left, done))

    monkeypatch.setattr(RopeState, "prepare_positions", prepare_positions)


def test_drafts_written_to_the_slots_of_their_ids_are_identified(
    drafting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#54498: drafts use their positions on the first axis as slots, and overwrite keys of the prompt."""
    own = BlockTables.compute_slot_mappings

    def compute_slot_mappings(self: Any, rows: Tensor, starts: Tensor, positions: Tensor, **named: Any) -> Tensor:
        if int(starts[len(rows)]) == 4:
            positions = positions.clone()
            positions[1:4] -= 45  # the 58 tokens before the last text consume 13 ids
        return own(self, rows, starts, positions, **named)

    monkeypatch.setattr(BlockTables, "compute_slot_mappings", compute_slot_mappings)
    keys, _ = drafting.serve(PROMPT, WIDE, tokens=12)
    diagnosis = drafting.check(keys, [[Text(4), Grid(6, 9), Text(15)]])
    assert diagnosis.token == 18  # the slot of 63, the first draft
    assert diagnosis.cause is not None
    assert diagnosis.cause.endswith(", or keys are in the cache slots of their ids")
    assert diagnosis.explained == diagnosis.different_tokens == 9
