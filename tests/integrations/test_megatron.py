"""Megatron: its functions, run on a CPU with angles from mmpos, rotate as mmpos does."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import broadcast_rank
import numpy as np
import pytest
import torch
from refusals import assert_refused
from results import assert_equal
from tolerance import FREQUENCY, assert_within, cos_sin, rotations, rounding
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PerDocumentHeadTailLoadBalancer

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.integrations.megatron import MultimodalRotaryEmbedding, rotary_pos_emb
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary

OF_ANGLES = cos_sin(np.pi, 1)  # error of angles that are reduced to one turn and rounded to float32

ROWS = place(SegmentTable.from_documents([[Text(2), Grid(2, 3), Text(4)], [Text(1), Grid(3, 3)]])).pad(12)
"""Two rows of equal length for sbhd; as a pack they are a special case of thd."""
PACK = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(4)], [Grid(5, 2)]]), "rope-tie-v2")
PACKED = PACK.pad([12, 4, 12])
"""Documents of different lengths, each a multiple of four, with half-integer ids."""


@dataclass(frozen=True)
class Ranks:
    """A context-parallel group as seen from one of its ranks."""

    mine: int
    count: int

    def rank(self) -> int:
        return self.mine

    def size(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def megatron() -> SimpleNamespace:
    """Import Megatron, which warns that TransformerEngine is missing, and build a config for each pairing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        embedding = pytest.importorskip("megatron.core.models.common.embeddings.rotary_pos_embedding")
        from megatron.core.transformer.transformer_config import TransformerConfig

        configs = {
            pairing: TransformerConfig(
                num_layers=1, hidden_size=48, num_attention_heads=3, rotary_interleaved=pairing == "adjacent"
            )
            for pairing in ("half", "adjacent")
        }
    return SimpleNamespace(embedding=embedding, configs=configs)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_same(rotated: Tensor, expected: object) -> None:
    assert_within(rotated, expected, rotations(expected, OF_ANGLES))


def theirs(megatron: SimpleNamespace, q: Tensor, freqs: Tensor, rotary: Rotary, **options: Any) -> Tensor:
    """Rotate with the function of Megatron."""
    rotated: Tensor = megatron.embedding.apply_rotary_pos_emb(q, freqs, megatron.configs[rotary.pairing], **options)
    return rotated


def rotate(q: Tensor, positions: PositionTable, rotary: Rotary) -> Tensor:
    return apply_rotary(q, None, positions, rotary)[0]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(("pairing", "rotary_dim"), [("half", 16), ("adjacent", 16), ("half", 12)])
def test_megatron_rotates_the_rows_of_a_rank(
    megatron: SimpleNamespace, pairing: Any, rotary_dim: int, rank: int
) -> None:
    rotary = Rotary(head_dim=16, rotary_dim=rotary_dim, pairing=pairing, scaling=YaRN(4.0, 64))
    shard, q = ROWS.shard(rank, 3), normal(2, 4, 3, 16)
    freqs = rotary_pos_emb(shard, rotary, "sbhd")
    options = {"mscale": rotary.attention_factor, "cp_group": Ranks(rank, 3)}
    rotated = theirs(megatron, q.transpose(0, 1), freqs, rotary, **options)
    assert freqs.shape == (4, 2, 1, rotary_dim)
    assert freqs.is_contiguous()
    assert_same(rotated.transpose(0, 1), rotate(q, shard, rotary))


@pytest.mark.parametrize("positions", [PACKED, ROWS], ids=["packed", "rows of equal length"])
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (0, 2), (1, 2)])
def test_megatron_slices_the_angles_of_a_whole_pack(
    megatron: SimpleNamespace, positions: PositionTable, rank: int, count: int
) -> None:
    rotary = Rotary(head_dim=16)
    freqs = rotary_pos_emb(positions, rotary, "thd")
    assert freqs.shape == (positions.num_tokens, 1, 1, 16)
    q = normal(positions.num_tokens, 3, 16)[torch.from_numpy(positions.shard_indices(rank, count))]
    bounds = torch.from_numpy(positions.cu_seqlens.copy())
    rotated = theirs(megatron, q, freqs, rotary, cu_seqlens=bounds, cp_group=Ranks(rank, count))
    assert_same(rotated, rotate(q, positions.shard(rank, count), rotary))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence"])
def test_one_row_of_a_rank_is_rotated_by_the_angles_of_its_shard(megatron: SimpleNamespace, layout: Any) -> None:
    rotary = Rotary(head_dim=16)
    for rank in range(2):
        shard = PACKED.shard(rank, 2, layout)
        q = normal(PACKED.num_tokens, 3, 16)[torch.from_numpy(PACKED.shard_indices(rank, 2, layout))]
        freqs = rotary_pos_emb(shard, rotary, "thd")
        rotated = theirs(megatron, q.unsqueeze(1), freqs, rotary, cp_group=Ranks(rank, 2))
        assert_same(rotated.squeeze(1), rotate(q, shard, rotary))


def test_latent_attention_uses_half_angles_for_adjacent_channels(megatron: SimpleNamespace) -> None:
    rotary = Rotary(head_dim=16)
    q, freqs = normal(1, ROWS.num_tokens, 3, 16), rotary_pos_emb(ROWS, rotary, "thd")
    function = megatron.embedding._apply_rotary_pos_emb_bshd
    renamed = "mla_rotary_interleaved" in signature(function).parameters  # in Megatron 0.19
    option = "mla_rotary_interleaved" if renamed else "multi_latent_attention"
    rotated = function(q.transpose(0, 1), freqs, **{option: True})
    adjacent = apply_rotary(q[0], None, ROWS, Rotary(head_dim=16, pairing="adjacent"))[0]
    assert_same(rotated.squeeze(1), torch.cat((adjacent[..., ::2], adjacent[..., 1::2]), dim=-1))


SECTIONS = Rotary(head_dim=16, axes=3, allocation="sections", mrope_section=[2, 3, 3])
VIDEO = place(SegmentTable.from_documents([[Text(3), Grid(2, 3, frames=2), Text(1)], [Text(16)]]), "mrope")


def test_the_module_returns_the_angles_of_megatrons_module(megatron: SimpleNamespace) -> None:
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    options = {"seq_len_interpolation_factor": None, "rotary_interleaved": False, "cp_group": None}
    module = SimpleNamespace(inv_freq=inv_freq, **options)
    ids = torch.from_numpy(VIDEO.dense().reshape(3, 2, 16))
    want = megatron.embedding.MultimodalRotaryEmbedding.forward(module, ids, [2, 3, 3])
    bound = cos_sin(want, FREQUENCY + 1)
    for positions in (VIDEO, DevicePositions.from_table(VIDEO), ids):
        freqs = MultimodalRotaryEmbedding(SECTIONS)(positions, [2, 3, 3])
        assert freqs.shape == want.shape
        assert_within((freqs.cos(), freqs.sin()), (want.cos(), want.sin()), bound)


@pytest.mark.parametrize("rank", range(4))
def test_the_module_slices_rows_but_not_packs(rank: int) -> None:
    ids = torch.from_numpy(VIDEO.dense().reshape(3, 2, 16))
    want = rotary_pos_emb(VIDEO, SECTIONS, "sbhd")[[2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]]
    by_argument = MultimodalRotaryEmbedding(SECTIONS)
    by_module = MultimodalRotaryEmbedding(SECTIONS, "sbhd", Ranks(rank, 4))
    packed = MultimodalRotaryEmbedding(SECTIONS, "thd", Ranks(rank, 4))
    for positions in (VIDEO, DevicePositions.from_table(VIDEO), ids):
        assert torch.equal(by_argument(positions, [2, 3, 3], Ranks(rank, 4)), want)
        assert torch.equal(by_module(positions), want)
        assert torch.equal(by_module(positions, cp_group=Ranks(0, 1)), rotary_pos_emb(VIDEO, SECTIONS, "sbhd"))
        assert torch.equal(packed(positions), rotary_pos_emb(VIDEO, SECTIONS, "thd"))
    assert list(by_module.state_dict()) == []


@pytest.fixture
def model(megatron: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Build Megatron's GPTModel with M-RoPE on a CPU, in single-process groups."""
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        rng = SimpleNamespace(fork=contextlib.nullcontext)
        monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: rng)
        parallel_state.initialize_model_parallel()
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "mrope_section": [2, 3, 3]}
        unfused = {"bias_dropout_fusion": False, "masked_softmax_fusion": False}
        initial = {"init_method_std": 0.3, "use_cpu_initialization": True}
        config = type(megatron.configs["half"])(**sizes, **unfused, **initial)
        layers = get_gpt_layer_local_spec(normalization="LayerNorm")
        model = GPTModel(config, layers, vocab_size=64, max_sequence_length=16, position_embedding_type="mrope")
        yield model.eval()
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


@pytest.mark.slow
def test_megatrons_model_has_the_same_logits_with_the_module(model: Any) -> None:
    input_ids = torch.arange(32).reshape(2, 16) * 7 % 64
    ids = torch.from_numpy(VIDEO.dense().reshape(3, 2, 16))
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    want, with_zero_ids = model(input_ids, ids, mask), model(input_ids, torch.zeros_like(ids), mask)
    bound = rounding(lambda: model(input_ids, ids, mask), model.parameters())
    assert (with_zero_ids - want).abs().max() > 0.5
    model.rotary_pos_emb = MultimodalRotaryEmbedding(SECTIONS)
    for positions in (VIDEO, DevicePositions.from_table(VIDEO), ids):
        assert_within(model(input_ids, positions, mask), want, bound)


@pytest.mark.usefixtures("megatron")
def test_a_rank_has_the_tokens_that_megatron_and_torch_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.utils import get_batch_on_this_cp_rank

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in range(3):
        batch = get_batch_on_this_cp_rank({"tokens": torch.arange(24).view(2, 12)}, Ranks(rank, 3))
        assert batch["tokens"].flatten().tolist() == ROWS.shard_indices(rank, 3).tolist()
    per_document = _PerDocumentHeadTailLoadBalancer([PACKED.lengths.tolist()], 2, "cpu")._generate_indices()[0]
    assert [x.tolist() for x in per_document.chunk(2)] == [PACKED.shard_indices(rank, 2).tolist() for rank in (0, 1)]


def test_broadcast_tables_are_equal_in_two_processes(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-W", "error", broadcast_rank.__file__, "1", str(tmp_path)])
    broadcast_rank.main(0, tmp_path)
    assert other.wait(300) == 0
    first, second = (pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2))
    tables = [table for _, table in broadcast_rank.tables()]
    refused = [
        "positions: want a PositionTable on rank 1",
        "group: got a group without rank 0, want a group with this rank",
        "src: got 2, want one of the group's ranks, [0, 1]",
        "src: got 0.0, want an integer",
    ]
    assert_equal(first, (tables, refused))
    refused = [
        "positions: got NoneType, want a PositionTable on rank 1",
        "src: got 0, want one of the group's ranks, [1]",
    ]
    assert_equal(second, ([*tables, tables[0]], refused))


WRONG: Any = "bshd"
UNEQUAL = "positions: got documents of unequal length, want equal lengths; pad or use layout 'thd'"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary_pos_emb(PACKED, Rotary(16), "sbhd"), UNEQUAL),
        (lambda: rotary_pos_emb(DevicePositions.from_table(PACKED), Rotary(16), "sbhd"), UNEQUAL),
        (lambda: rotary_pos_emb(ROWS, Rotary(16), WRONG), "layout: got 'bshd', want one of 'sbhd', 'thd'"),
        (lambda: MultimodalRotaryEmbedding(Rotary(16, scaling=YaRN(4.0, 64, attention_factor=1.001))),
         "mscale: got 1.0, want 1.001, the attention factor of rotary"),
        (lambda: MultimodalRotaryEmbedding(Rotary(16), mscale=WRONG), "mscale: got 'bshd', want a finite number"),
        (lambda: MultimodalRotaryEmbedding(SECTIONS, WRONG), "layout: got 'bshd', want one of 'sbhd', 'thd'"),
        (lambda: MultimodalRotaryEmbedding(SECTIONS)(VIDEO, [4, 2, 2]),
         "mrope_section: got [4, 2, 2], want [2, 3, 3] as in rotary"),
        (lambda: MultimodalRotaryEmbedding(SECTIONS, "sbhd", Ranks(0, 3))(DevicePositions.from_table(VIDEO)),
         "position_ids: got rows of 16 tokens, want a multiple of 6"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    assert_refused(message, call)


def test_a_module_uses_its_mscale_and_its_device_and_empty_tables_have_empty_angles() -> None:
    rotary = Rotary(16, scaling=YaRN(4.0, 64))
    module = MultimodalRotaryEmbedding(rotary, mscale=rotary.attention_factor, device="meta")
    assert (module(ROWS).device.type, module(ROWS).shape) == ("meta", (12, 2, 1, 16))
    empty = place(SegmentTable.from_documents([]))
    for positions in (empty, DevicePositions.from_table(empty)):
        assert rotary_pos_emb(positions, Rotary(16), "sbhd").shape == (0, 1, 1, 16)
        assert rotary_pos_emb(positions, Rotary(16), "thd").shape == (0, 1, 1, 16)
