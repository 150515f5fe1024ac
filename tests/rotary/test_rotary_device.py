"""Device tables keep their addresses; rotations keep their frequencies under autocast and mixed precision."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmpos import Grid, InvalidInputError, LimitExceededError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary


def table(*documents: list[Text | Grid], scheme: str = "rope-tie") -> PositionTable:
    return place(SegmentTable.from_documents(documents), scheme)


POSITIONS = table([Text(3), Grid(2, 3), Text(2)], [Text(4)])
OTHER = table([Text(1), Grid(3, 2), Text(1), Grid(1, 2), Text(1)], [Text(4)])
EQUAL = table([Text(2), Grid(2, 3)], [Text(8)])
HALVES = table([Text(3), Grid(3, 2), Text(2)], [Text(4)], scheme="rope-tie-v2")
FAR = table([Text(9_000_000), Grid(3, 2), Text(2)], scheme="rope-tie-v2").slice(8_999_993, 9_000_008)
ROTARY = Rotary(head_dim=16, rotary_dim=12)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def refused(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def equal(got: Any, expected: Any) -> bool:
    """Return whether q and k are bit-equal to the expected q and k."""
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# Device tables.


def test_from_table_reserves_one_column_per_segment() -> None:
    device = DevicePositions.from_table(POSITIONS)
    assert torch.equal(device.table, torch.from_numpy(POSITIONS.table.copy()))
    assert (device.axes, device.num_tokens, device.row_length, device.fractional) == (2, 15, 0, False)
    assert device.device == torch.device("cpu")


def test_from_table_copies_the_table() -> None:
    positions = table([Text(3)])
    device = DevicePositions.from_table(positions)
    device.table.fill_(7)
    assert positions.dense().tolist() == [[0, 1, 2], [0, 1, 2]]


def test_the_offset_of_unused_columns_is_the_number_of_tokens() -> None:
    device = DevicePositions.from_table(POSITIONS, capacity=7)
    assert device.table.shape == (13, 7)
    assert torch.equal(device.table[:, :4], torch.from_numpy(POSITIONS.table.copy()))
    assert device.table[0, 4:].tolist() == [15, 15, 15]
    assert (device.table[2:5, 4:] == 1).all()  # height, width and denominator are divisors and must not be 0


@pytest.mark.parametrize(
    ("positions", "length"),
    [(POSITIONS, 0), (EQUAL, 8), (POSITIONS.pad(), 11), (table([Text(5)]), 5), (table(), 0), (POSITIONS.decode(), 1)],
    ids=["unequal", "equal", "padded", "one", "none", "decoding"],
)
def test_row_length_is_the_common_length_of_documents_or_0(positions: PositionTable, length: int) -> None:
    assert DevicePositions.from_table(positions).row_length == length


@pytest.mark.parametrize("positions", [POSITIONS, EQUAL, HALVES, FAR, POSITIONS.pad(side="left"), table()])
@pytest.mark.parametrize("spare", [0, 5])
def test_dense_ids_are_bit_equal_to_those_of_the_table(positions: PositionTable, spare: int) -> None:
    dense = DevicePositions.from_table(positions, capacity=max(1, positions.num_segments + spare)).dense()
    expected = torch.from_numpy(positions.dense())
    assert (dense.dtype, dense.shape) == (expected.dtype, expected.shape)
    assert torch.equal(dense, expected)


def test_refresh_writes_another_table_to_the_same_address() -> None:
    device = DevicePositions.from_table(POSITIONS, capacity=8)
    address, q = device.table.data_ptr(), normal(15, 2, 16)
    for positions in (OTHER, POSITIONS, OTHER):
        device.refresh(positions)
        assert device.table.data_ptr() == address
        assert torch.equal(device.dense(), torch.from_numpy(positions.dense()))
        got, _ = apply_rotary(q, None, device, ROTARY)
        expected, _ = apply_rotary(q, None, positions, ROTARY)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (table([Text(3), Grid(2, 3), Text(2)], [Text(5)]), (2, False, 16, 0)),
        (table([Text(3), Grid(2, 3), Text(6)]), (2, False, 15, 15)),
        (HALVES, (2, True, 15, 0)),
        (table([Text(3), Grid(2, 3), Text(2)], [Text(4)], scheme="mrope"), (3, False, 15, 0)),
    ],
)
def test_refresh_refuses_a_table_that_differs_in_more_than_its_segments(
    other: PositionTable, got: tuple[int, bool, int, int]
) -> None:
    device = DevicePositions.from_table(POSITIONS, capacity=8)
    message = refused(InvalidInputError, lambda: device.refresh(other))
    want = (2, False, 15, 0)
    assert message == f"positions: got (axes, fractional, tokens, document length) {got}, want {want} as before"
    assert torch.equal(device.dense(), torch.from_numpy(POSITIONS.dense()))


def test_more_segments_than_the_capacity_are_refused() -> None:
    want = "capacity: got 4, want >= 6, the number of segments"
    assert refused(LimitExceededError, lambda: DevicePositions.from_table(OTHER, capacity=4)) == want
    assert refused(LimitExceededError, lambda: DevicePositions.from_table(POSITIONS).refresh(OTHER)) == want
    assert refused(InvalidInputError, lambda: DevicePositions.from_table(OTHER, capacity=0)) == (
        "capacity: got 0, want >= 1"
    )


def test_moving_to_another_device_changes_only_the_device() -> None:
    device = DevicePositions.from_table(EQUAL)
    moved = device.to("meta")
    assert moved.device == torch.device("meta")
    assert (moved.axes, moved.num_tokens, moved.row_length, moved.fractional) == (2, 16, 8, False)
    assert DevicePositions.from_table(EQUAL, "meta").table.shape == device.table.shape
    assert torch.equal(device.to("cpu", non_blocking=True).table, device.table)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory requires CUDA")
def test_pin_memory_returns_a_page_locked_copy() -> None:
    device = DevicePositions.from_table(EQUAL)
    pinned = device.pin_memory()
    assert pinned.table.is_pinned()
    assert torch.equal(pinned.table, device.table)
    assert (pinned.num_tokens, pinned.row_length, pinned.fractional) == (16, 8, False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_device_positions_can_be_copied_and_pickled(copied: Callable[[Any], Any]) -> None:
    device = DevicePositions.from_table(HALVES, capacity=6)
    same = copied(device)
    assert torch.equal(same.table, device.table)
    assert same.table.data_ptr() != device.table.data_ptr()
    assert (same.num_tokens, same.row_length, same.fractional) == (15, 0, True)


# Models.

ROTARIES = [ROTARY, Rotary(16, precision="hf"), Rotary(16, scaling=YaRN(4.0, 64), pairing="adjacent")]


@pytest.mark.parametrize("rotary", ROTARIES, ids=["exact", "hf", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_affect_the_rotation(rotary: Rotary, dtype: torch.dtype) -> None:
    q, k = normal(15, 2, 16, dtype=dtype), normal(15, 1, 16, dtype=dtype)
    expected = apply_rotary(q, k, FAR, rotary)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = apply_rotary(q, k, FAR, rotary)
    assert [x.dtype for x in got if x is not None] == [dtype, dtype]
    assert equal(got, expected)


# FSDP2's mixed precision.


class Attention(nn.Module):
    """A qkv projection, the rotation and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(64, 8)

    def forward(self, x: Tensor, positions: Any) -> Tensor:
        q, k = self.qkv(x).unflatten(-1, (4, 16)).split([3, 1], dim=1)
        q_out, k_out = apply_rotary(q, k, positions, ROTARY)
        assert k_out is not None
        out: Tensor = self.out(torch.cat((q_out, k_out), dim=1).flatten(1))
        return out.clone()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_mixed_precision_casts_weights_but_not_positions_or_frequencies() -> None:
    torch.manual_seed(0)
    model, x = Attention(), normal(15, 32)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    near = DevicePositions.from_table(table([Text(3), Grid(2, 3), Text(6)]))
    for positions in (DevicePositions.from_table(FAR), near, near.dense()):
        got, expected = model(x, positions), plain(x.to(torch.bfloat16), positions)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, expected)
    got.float().square().sum().backward()
    expected.float().square().sum().backward()
    gradient: Any = model.qkv.weight.grad
    assert torch.equal(gradient.full_tensor().to(torch.bfloat16), plain.qkv.weight.grad)  # type: ignore[arg-type]
    # The policy casts float64 ids to bfloat16, which rounds 9,000,000 to a multiple of 65,536, so they are refused.
    assert refused(InvalidInputError, lambda: model(x, torch.from_numpy(FAR.dense()))) == (
        "positions: got dtype torch.bfloat16, want int32, int64 or float64 ids"
    )
