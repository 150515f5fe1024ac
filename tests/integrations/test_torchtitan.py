"""torchtitan: our module and inputs against its formulas, said again here, and against torch's own load balancer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tolerance import assert_within, rotations, rounded
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    PositionTable,
    SegmentTable,
    Text,
    UnsupportedError,
    place,
)
from mmpos.integrations.torchtitan import (
    RoPE,
    deliver_positions,
    document_positions,
    rope_cache,
    rotary_from_config,
    shard,
    shard_tensors,
    table_tensor,
)
from mmpos.rotary import Llama3, Rotary, YaRN, apply_rotary

DOCUMENTS: list[list[Text | Grid]] = [[Text(3), Grid(2, 3), Text(1)], [Text(4), Grid(3, 3), Text(1)]]
PACKED = place(SegmentTable.from_documents(DOCUMENTS))  # 24 tokens; rows of 12 cut the second document
HALVES = place(SegmentTable.from_documents(DOCUMENTS), "rope-tie-v2")
FAR = place(SegmentTable.from_documents([[Text(9_000_000), Grid(4, 5), Text(4)]]), "rope-tie-v2").slice(
    8_999_996, 9_000_020
)
TABLES = {"far": FAR, "halves": HALVES, "packed": PACKED}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(positions: PositionTable, seq: int) -> Tensor:
    """(batch, seq, axes), as torchtitan's loaders lay ids of images."""
    return torch.from_numpy(positions.dense()).reshape(positions.axes, -1, seq).permute(1, 2, 0)


def with_gradients(rotate: Callable[[Tensor, Tensor], Any], q: Tensor, k: Tensor) -> list[Tensor]:
    """Rotated q and k, and what a weighted sum of them sends back."""
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    out = rotate(q, k)
    return [*out, *torch.autograd.grad(list(out), [q, k], [normal(*x.shape, dtype=x.dtype, seed=7) for x in out])]


def turned(x: Tensor, cache: Tensor) -> Tensor:
    """torchtitan's two formulas, by the sort of the cache, in float32 and rounded once."""
    value = x.float()
    if cache.is_complex():
        pairs = torch.complex(value[..., 0::2], value[..., 1::2]) * cache
        out = torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)
    else:
        cos, sin = cache.chunk(2, dim=-1)
        first, second = value.chunk(2, dim=-1)
        out = value * cos + torch.cat((-second, first), dim=-1) * sin
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(TABLES))
@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_the_module_and_torchtitans_formula_with_our_cache_agree_there_and_back(
    pairing: Any, name: str, dtype: torch.dtype
) -> None:
    rotary, positions = Rotary(head_dim=16, pairing=pairing), TABLES[name]
    q, k = normal(2, 12, 4, 16, dtype=dtype), normal(2, 12, 2, 16, dtype=dtype, seed=1)
    cache, module, table = rope_cache(rotary, positions, 12), RoPE(rotary), table_tensor(positions)
    assert cache.shape == (2, 12, 1, 8 if pairing == "adjacent" else 32)
    expected = with_gradients(lambda q, k: (turned(q, cache), turned(k, cache)), q, k)
    found = with_gradients(lambda q, k: module(q, k, table), q, k)
    assert_within(found, expected, [rounded(x, rotations(x)) for x in expected])


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_and_dense_ids_give_the_bits_of_apply_rotary(name: str) -> None:
    rotary, positions = Rotary(head_dim=16, rotary_dim=12), TABLES[name]
    q, k = normal(2, 12, 4, 16), normal(2, 12, 2, 16, seed=1)
    expected = apply_rotary(q.flatten(0, 1), k.flatten(0, 1), positions, rotary)
    for given in (table_tensor(positions), table_tensor(positions, capacity=20), dense(positions, 12)):
        found = RoPE(rotary)(q, k, given)
        assert_within([x.flatten(0, 1) for x in found], expected, 0)


def test_ids_of_text_are_equal_on_all_axes_and_none_begins_at_zero() -> None:
    rotary = Rotary(head_dim=16)
    q, k = normal(2, 12, 4, 16), normal(2, 12, 2, 16, seed=1)
    module, one = RoPE(rotary), torch.arange(5, 17)[None]
    rows = torch.cat((one, one - 5))
    for given, ids in ((rows, rows), (one, one.expand(2, 12)), (None, torch.arange(12).expand(2, 12))):
        expected = apply_rotary(q, k, ids.expand(2, 2, 12), rotary)
        assert_within(module(q, k, given), expected, 0)


def test_a_folded_batch_is_rotated_as_its_rows_and_restarts_where_the_table_does() -> None:
    """torchtitan's main branch has no batch axis: query (tokens, heads, dim), positions (tokens,) or (tokens, axes)."""
    rotary = Rotary(head_dim=16, rotary_dim=12)
    q, k = normal(24, 4, 16), normal(24, 2, 16, seed=1)
    module, text = RoPE(rotary), document_positions(PACKED)
    assert text.shape == (24,)
    for positions in (PACKED, HALVES, FAR):
        expected = apply_rotary(q, k, positions, rotary)
        for given in (table_tensor(positions), table_tensor(positions, capacity=20), dense(positions, 24)[0]):
            assert_within(module(q, k, given), expected, 0)
    for ids, told in ((text, text), (torch.arange(24), None)):
        assert_within(module(q, k, told), apply_rotary(q, k, ids.expand(2, 24), rotary), 0)


@pytest.mark.parametrize("shape", [(91,), (7, 13), (1, 91), (91, 1), (1,), (1, 1)])
def test_no_number_of_tokens_makes_ids_look_like_a_table(shape: tuple[int, ...]) -> None:
    tokens = torch.Size(shape).numel()
    rotary, placed = Rotary(head_dim=16), place(SegmentTable.from_documents([[Text(tokens)]]), start=5)
    table = table_tensor(placed, capacity=6)
    assert table.numel() == 91
    q, ids = normal(*shape, 2, 16), torch.arange(5, 5 + tokens).view(shape)
    expected = apply_rotary(q.reshape(-1, 2, 16), None, placed, rotary)[0].view(q.shape)
    for given in (table, ids, ids[..., None].expand(*shape, 2)):
        assert_within(RoPE(rotary)(q, q, given)[0], expected, 0)


@pytest.mark.parametrize("pairing", ["adjacent", "half"])
def test_a_folded_batch_with_our_cache_by_torchtitans_formula(pairing: Any) -> None:
    rotary, q = Rotary(head_dim=16, pairing=pairing), normal(24, 4, 16)
    cache = rope_cache(rotary, HALVES)
    assert cache.shape == (24, 1, 8 if pairing == "adjacent" else 32)
    expected = turned(q, cache)
    assert_within(RoPE(rotary)(q, q, table_tensor(HALVES))[0], expected, rotations(expected))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_folded_batch_is_cut_as_one_sequence(world_size: int) -> None:
    order = _HeadTailLoadBalancer(24, world_size, "cpu")._generate_indices()[0].chunk(world_size)
    for rank in range(world_size):
        index = order[rank].long() if world_size > 1 else torch.arange(24)
        found = shard(PACKED, None, rank, world_size)
        assert torch.equal(dense(found, 24 // world_size)[0], dense(PACKED, 24)[0, index])
    tables = shard_tensors(PACKED, None, world_size)
    assert torch.equal(tables[0], table_tensor(shard(PACKED, None, 0, world_size), tables.shape[3] // 13 - 1))
    assert shard(place(SegmentTable.from_documents([])), None, 0, world_size).num_tokens == 0


def test_the_module_outlives_the_meta_device_and_casts() -> None:
    with torch.device("meta"):
        module = RoPE(Rotary(head_dim=16))
    module = module.to_empty(device="cpu").to(torch.bfloat16)
    q = normal(2, 12, 4, 16)
    expected = RoPE(Rotary(head_dim=16))(q, q, table_tensor(PACKED))
    assert torch.equal(module(q, q, table_tensor(PACKED))[0], expected[0])
    assert module.state_dict() == {}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the second and the first does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_heads_of_a_tensor_parallel_rank_come_back_as_they_went(mesh: DeviceMesh) -> None:
    q, k = normal(2, 12, 2, 16), normal(2, 12, 1, 16, seed=1)
    expected = RoPE(Rotary(head_dim=16))(q, k, table_tensor(PACKED))
    sharded = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k)]
    for given in (table_tensor(PACKED), DTensor.from_local(table_tensor(PACKED), mesh, [Replicate()], run_check=False)):
        found = RoPE(Rotary(head_dim=16))(*sharded, given)
        for x, whole, local in zip(found, sharded, expected, strict=True):
            assert isinstance(x, DTensor)
            assert (x.placements, x.shape, x.stride()) == (whole.placements, whole.shape, whole.stride())
            assert torch.equal(x.to_local(), local)
    uneven = DTensor.from_local(
        k, mesh, [Shard(2)], run_check=False, shape=torch.Size((2, 12, 3, 16)), stride=(576, 48, 16, 1)
    )
    assert RoPE(Rotary(head_dim=16))(uneven, uneven, table_tensor(PACKED))[0].shape == uneven.shape
    rows = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in (q, k)]
    with pytest.raises(InvalidInputError, match=r"^positions: got None for tokens on several ranks, want those of the"):
        RoPE(Rotary(head_dim=16))(*rows)
    folded = [DTensor.from_local(x[0], mesh, [Shard(1)], run_check=False) for x in (q, k)]
    found = RoPE(Rotary(head_dim=16))(*folded, table_tensor(PACKED.slice(0, 12)))
    assert [x.shape for x in found] == [(12, 4, 16), (12, 2, 16)]
    assert_within([x.to_local() for x in found], [x[0] for x in expected], 0)
    with pytest.raises(InvalidInputError, match=r"^positions: got None for tokens on several ranks"):
        RoPE(Rotary(head_dim=16))(*[DTensor.from_local(x[0], mesh, [Shard(0)], run_check=False) for x in (q, k)])
    model = Recorder()
    deliver_positions(model, rank=1)
    wrapped = DTensor.from_local(torch.stack((table_tensor(PACKED),) * 2), mesh, [Shard(1)], run_check=False)
    assert torch.equal(model(q, mm_position_ids=wrapped)["positions"], table_tensor(PACKED))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.zeros(1, 1, 12, dtype=torch.int64), "positions: got torch.int64 (1, 1, 12), want int64 (1, 1, columns) "
         "of a table_tensor with 2 axes, a multiple of 13"),
        (PACKED, "positions: got PositionTable, want a tensor, as from table_tensor"),
        (torch.zeros(1, 1, 13), "positions: got torch.float32 (1, 1, 13), want int64 (1, 1, columns) of a "
         "table_tensor with 2 axes, a multiple of 13"),
        (table_tensor(PACKED.slice(0, 23)), "positions: got a table of 23 tokens, want 2·12 as in query"),
        (torch.zeros(12, 2, dtype=torch.int64), "positions: got shape (12, 2), want (1, 1, columns) of a table, "
         "(2, 12) or (2, 12, 2)"),
        (torch.zeros(2, 12, 3, dtype=torch.int64), "positions: got shape (2, 12, 3), want (1, 1, columns) of a "
         "table, (2, 12) or (2, 12, 2)"),
    ],
    ids=["columns", "untold", "float", "tokens", "rows", "axes"],
)  # fmt: skip
def test_positions_that_do_not_fit_are_named(positions: object, message: str) -> None:
    q = normal(2, 12, 4, 16)
    with pytest.raises(InvalidInputError) as caught:
        RoPE(Rotary(head_dim=16))(q, q, positions)
    assert str(caught.value) == message


def test_a_query_without_tokens_and_a_key_that_is_none_are_refused() -> None:
    q: Any = normal(2, 12, 4, 16)
    wanted = "want (batch, seq, num_heads, head_dim) or (tokens, num_heads, head_dim)"
    for query, key, message in (
        (q[0, 0], q, f"query: got shape (4, 16), {wanted}"),
        (q, None, f"key: got NoneType, {wanted}"),
        (q, q[0], "key: got shape (12, 4, 16), want 4 dimensions as query"),
        (q[0], q, "key: got shape (2, 12, 4, 16), want 3 dimensions as query"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            RoPE(Rotary(head_dim=16))(query, key)
        assert str(caught.value) == message


def test_a_table_tensor_has_one_shape_for_every_step_of_a_capacity() -> None:
    assert PACKED.num_segments == 6
    assert table_tensor(PACKED).shape == (1, 1, 13 * 7)
    shorter = place(SegmentTable.from_documents([[Text(24)]]))
    assert table_tensor(shorter, capacity=6).shape == table_tensor(PACKED, capacity=6).shape
    with pytest.raises(LimitExceededError, match=r"^capacity: got 5, want >= 6, the segments of the table$"):
        table_tensor(PACKED, capacity=5)
    empty = table_tensor(place(SegmentTable.from_documents([])))
    q = normal(0, 12, 4, 16)
    assert RoPE(Rotary(head_dim=16))(q, q, empty)[0].shape == q.shape


def test_document_positions_begin_again_with_every_document() -> None:
    expected = [*range(10), *range(14)]
    assert document_positions(PACKED, 12).tolist() == [expected[:12], expected[12:]]
    assert document_positions(PACKED, 12).dtype == torch.int64


def test_padding_is_a_document_of_its_own() -> None:
    short = place(SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(2)], [Text(3)], [Text(5)]]))
    right = [[*range(5), 0], [0, 1, 2, 0, 1, 2], [*range(5), 0]]
    assert document_positions(short.pad(6), 6).tolist() == right
    left = [[0, *range(5)], [0, 1, 2, 0, 1, 2], [0, *range(5)]]
    assert document_positions(short.pad(6, "left"), 6).tolist() == left
    without_second = short.keep([True] * 5 + [False] * 3 + [True] * 5)
    assert document_positions(without_second, 5).tolist() == [[*range(5)]] * 2
    without_last = short.keep([True] * 8 + [False] * 5)
    assert document_positions(without_last, 8).tolist() == [[*range(5), *range(3)]]
    assert document_positions(place(SegmentTable.from_documents([])), 5).shape == (0, 5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seq", [24, 48])
def test_head_tail_shards_are_those_of_torch(seq: int, world_size: int) -> None:
    long = place(SegmentTable.from_documents([*DOCUMENTS, [Grid(7, 10), Text(2)]]))
    ids = dense(long, seq)
    order = _HeadTailLoadBalancer(seq, world_size, "cpu")._generate_indices()[0].chunk(world_size)
    for rank in range(world_size):
        # One rank alone keeps its order: torchtitan does not shard then.
        expected = ids[:, order[rank].long()] if world_size > 1 else ids
        assert torch.equal(dense(shard(long, seq, rank, world_size), seq // world_size), expected)
        plain = ids.chunk(world_size, dim=1)[rank]
        assert torch.equal(dense(shard(long, seq, rank, world_size, None), seq // world_size), plain)


def test_one_rank_has_rows_of_any_length() -> None:
    assert torch.equal(dense(shard(PACKED, 3, 0, 1), 3), dense(PACKED, 3))


def test_one_row_is_cut_as_a_whole_sequence() -> None:
    for name, layout in (("headtail", "zigzag-sequence"), (None, "contiguous-sequence")):
        found, expected = shard(PACKED, 24, 1, 2, name), PACKED.shard(1, 2, layout)  # type: ignore[arg-type]
        assert found.table.tolist() == expected.table.tolist()
        assert found.documents.tolist() == expected.documents.tolist()


def test_shards_of_all_ranks_are_rows_of_one_tensor() -> None:
    found = shard_tensors(PACKED, 12, 2)
    parts = [shard(PACKED, 12, rank, 2) for rank in range(2)]
    most = max(part.num_segments for part in parts)
    assert torch.equal(found, torch.stack([table_tensor(part, most) for part in parts]))
    assert shard_tensors(PACKED, 12, 2, None, capacity=9).shape == (2, 1, 1, 13 * 10)
    assert shard_tensors(place(SegmentTable.from_documents([])), 12, 2).shape == (2, 1, 1, 13 * 2)


class Recorder(nn.Module):
    """A model that gives back what it was called with."""

    def forward(self, tokens: Tensor, **kwargs: object) -> dict[str, Any]:
        return kwargs


def test_positions_of_images_take_the_place_of_those_of_text() -> None:
    model, tokens, text = Recorder(), torch.zeros(2, 12), document_positions(PACKED, 12)
    handle = deliver_positions(model, rank=1)
    tables, ids = shard_tensors(PACKED, 12, 2), dense(PACKED, 12)
    for given, expected in ((tables, tables[1]), (tables[0], tables[0]), (ids, ids), (None, text)):
        found = model(tokens, positions=text, attention_masks="masks", mm_position_ids=given)
        assert sorted(found) == ["attention_masks", "positions"]
        assert torch.equal(found["positions"], expected)
        assert found["attention_masks"] == "masks"
    assert model(tokens, positions=text).keys() == {"positions"}
    handle.remove()
    assert model(tokens, mm_position_ids=ids).keys() == {"mm_position_ids"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mm_position_ids": "ids"}, "mm_position_ids: got str, want a table_tensor, (world_size, 1, 1, columns) of "
         "shard_tensors, or ids (batch, seq, axes) or (tokens, axes)"),
        ({"mm_position_ids": torch.zeros(13)}, "mm_position_ids: got shape (13,), want a table_tensor, (world_size, 1, "
         "1, columns) of shard_tensors, or ids (batch, seq, axes) or (tokens, axes)"),
        ({"mm_position_ids": torch.zeros(2, 1, 1, 13)},
         "mm_position_ids: got tables of 2 ranks, want one for rank 2"),
        ({"mm_position_ids": torch.zeros(13), "mrope_positions": torch.zeros(2, 12, 3)},
         "mrope_positions: got ids beside mm_position_ids, want build_mrope_positions=False"),
    ],
    ids=["sort", "shape", "rank", "twice"],
)  # fmt: skip
def test_what_cannot_be_delivered_is_named(given: dict[str, object], message: str) -> None:
    model = Recorder()
    deliver_positions(model, rank=2)
    with pytest.raises(InvalidInputError) as caught:
        model(torch.zeros(2, 12), **given)
    assert str(caught.value) == message


def test_a_shard_rotates_as_the_tokens_of_the_whole() -> None:
    rotary = Rotary(head_dim=16)
    q = normal(2, 12, 4, 16)
    whole, _ = RoPE(rotary)(q, q, table_tensor(HALVES))
    found, _ = RoPE(rotary)(q[:, 3:9], q[:, 3:9], table_tensor(shard(HALVES, 12, 1, 2)))
    assert torch.equal(found, whole[:, 3:9])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard(PACKED, 12, 0, 4), "seq: got 12, want a multiple of 8 for world_size=4"),
        (lambda: shard(PACKED, 12, 0, 5, None), "seq: got 12, want a multiple of 5 for world_size=5"),
        (lambda: shard(PACKED, 12, 2, 2), "rank: got 2, want <= 1"),
        (lambda: shard(PACKED, 12, 0, 2, "ptrr"),  # type: ignore[arg-type]
         "load_balancer: got 'ptrr', want one of 'headtail', None"),
        (lambda: document_positions(PACKED, 7), "seq: got 7, want a divisor of 24, the tokens of the table"),
        (lambda: rope_cache(Rotary(16), PACKED, 0), "seq: got 0, want >= 1"),
    ],
    ids=["headtail", "contiguous", "rank", "ptrr", "rows", "zero"],
)  # fmt: skip
def test_rows_and_ranks_that_do_not_fit_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert str(caught.value) == message


@dataclass
class Fields:
    """Fields of every RoPE.Config of torchtitan."""

    dim: int = 64
    theta: float = 500000.0
    scaling: str = "none"
    scaling_factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rope_factor: float = 1.0
    beta_fast: float = 16.0
    beta_slow: float = 2.0
    original_seq_len: int = 4096
    truncate: bool = False
    mrope_section: tuple[int, ...] = (12, 10, 10)


def config(*names: str, **values: object) -> Any:
    """A config whose class has these qualified names, the last that of the base."""
    kind: type = Fields
    for name in reversed(names):
        kind = type("Config", (kind,), {"__qualname__": name})
    return kind(**values)


HALF, ADJACENT = "CosSinRoPE.Config", "ComplexRoPE.Config"


def test_a_config_becomes_a_rotation() -> None:
    yarn = YaRN(4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.0, truncate=False)
    scaled = config(HALF, scaling="yarn", rope_factor=4.0)
    assert rotary_from_config(config(HALF)) == Rotary(64, 500000.0)
    assert rotary_from_config(scaled, axes=3) == Rotary(64, 500000.0, 3, scaling=yarn)
    assert rotary_from_config(config(HALF, scaling="yarn")) == Rotary(64, 500000.0)
    assert rotary_from_config(config("Mine.Config", ADJACENT, scaling="llama"), allocation="split") == Rotary(
        64, 500000.0, allocation="split", pairing="adjacent", scaling=Llama3(8.0, 1.0, 4.0, 8192)
    )
    sections = Rotary(64, 500000.0, 3, "mrope-interleaved", mrope_section=(12, 10, 10))
    assert rotary_from_config(config("MRoPE.Config", HALF)) == sections
    assert rotary_from_config(config("MRoPE.Config", HALF), axes=2, allocation="split") == Rotary(
        64, 500000.0, allocation="split"
    )


def test_configs_that_torchtitan_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^config: got dict, want ComplexRoPE.Config or CosSinRoPE.Config$"):
        rotary_from_config({})
    for scaling in ("llama", "ntk"):
        with pytest.raises(UnsupportedError, match=rf"^config.scaling: got '{scaling}' for pairs of the sort 'half'$"):
            rotary_from_config(config(HALF, scaling=scaling))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [(2, 12), (24,)], ids=["rows", "folded"])
def test_graphs_are_whole_for_every_sort_of_positions(tokens: tuple[int, ...]) -> None:
    """torchtitan compiles each block with fullgraph."""
    torch.compiler.reset()
    module = RoPE(Rotary(head_dim=16))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    q, k = normal(*tokens, 4, 16), normal(*tokens, 2, 16, seed=1)
    ids = dense(PACKED, 12).reshape(*tokens, 2)
    for given in (table_tensor(HALVES), table_tensor(FAR), ids, torch.arange(24).view(tokens), None):
        found = with_gradients(lambda q, k, given=given: compiled(q, k, given), q, k)  # type: ignore[misc]
        expected = with_gradients(lambda q, k, given=given: module(q, k, given), q, k)  # type: ignore[misc]
        assert_within(found, expected, 0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Errors of each scenario, on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).parents[1] / "helpers" / "torchtitan_ranks.py"
    started = [subprocess.Popen([sys.executable, "-W", "error", script, str(rank), folder]) for rank in range(2)]
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["context_parallel", "mixed_precision", "pipeline", "tensor_parallel"])
def test_torchs_parallelisms_take_our_inputs_on_two_ranks(ranks: list[dict[str, str]], scenario: str) -> None:
    assert [found.get(scenario, "not run") for found in ranks] == ["", ""]
