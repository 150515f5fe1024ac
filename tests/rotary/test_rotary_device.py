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
from rotary_oracle import normal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmpos import Grid, InvalidInputError, LimitExceededError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, apply_rotary


def table(*documents: list[Text | Grid], scheme: str = "rope-tie") -> PositionTable:
    return place(SegmentTable.from_documents(documents), scheme)


POSITIONS = table([Text(3), Grid(2, 3), Text(2)], [Text(4)])
OTHER = table([Text(1), Grid(3, 2), Text(1), Grid(1, 2), Text(1)], [Text(4)])
EQUAL = table([Text(2), Grid(2, 3)], [Text(8)])
HALVES = table([Text(3), Grid(3, 2), Text(2)], [Text(4)], scheme="rope-tie-v2")
FAR = table([Text(9_000_000), Grid(3, 2), Text(2)], scheme="rope-tie-v2").slice(8_999_993, 9_000_008)
ROTARY = Rotary(head_dim=16, rotary_dim=12)


def test_a_device_table_is_a_copy_whose_unused_columns_begin_after_the_last_token() -> None:
    for capacity in (None, 7):
        device, columns = DevicePositions.from_table(POSITIONS, capacity=capacity), torch.tensor(POSITIONS.table)
        assert torch.equal(device.table[:, :4], columns)
        assert device.table.shape == (13, capacity or 4)
        assert device.table[0, 4:].tolist() == [15] * ((capacity or 4) - 4)
        assert (device.table[2:5, 4:] == 1).all()  # height, width and denominator are divisors and must not be 0
        assert (device.axes, device.num_tokens, device.row_length, device.fractional) == (2, 15, 0, False)
        device.table.fill_(7)
        assert torch.equal(columns, torch.tensor(POSITIONS.table))


@pytest.mark.parametrize(
    ("positions", "length"),
    [(POSITIONS, 0), (EQUAL, 8), (POSITIONS.pad(), 11), (table([Text(5)]), 5), (table(), 0), (POSITIONS.decode(), 1)],
    ids=["unequal", "equal", "padded", "one", "none", "decoding"],
)
def test_row_length_is_the_common_length_of_documents_or_0(positions: PositionTable, length: int) -> None:
    assert DevicePositions.from_table(positions).row_length == length


@pytest.mark.parametrize("positions", [POSITIONS, HALVES, FAR, POSITIONS.pad(side="left"), table()])
def test_dense_ids_are_bit_equal_to_those_of_the_table(positions: PositionTable) -> None:
    for spare in (0, 5):
        dense = DevicePositions.from_table(positions, capacity=max(1, positions.num_segments + spare)).dense()
        torch.testing.assert_close(dense, torch.from_numpy(positions.dense()), rtol=0, atol=0)


def test_refresh_writes_another_table_to_the_same_address() -> None:
    device = DevicePositions.from_table(POSITIONS, capacity=8)
    address, q = device.table.data_ptr(), normal(15, 2, 16)
    for positions in (OTHER, POSITIONS, OTHER):
        device.refresh(positions)
        assert device.table.data_ptr() == address
        assert torch.equal(device.dense(), torch.from_numpy(positions.dense()))
        assert torch.equal(apply_rotary(q, None, device, ROTARY)[0], apply_rotary(q, None, positions, ROTARY)[0])


DIFFERENT = {
    (2, False, 16, 0): table([Text(3), Grid(2, 3), Text(2)], [Text(5)]),
    (2, False, 15, 15): table([Text(3), Grid(2, 3), Text(6)]),
    (2, True, 15, 0): HALVES,
    (3, False, 15, 0): table([Text(3), Grid(2, 3), Text(2)], [Text(4)], scheme="mrope"),
}
FACTS = "positions: got (axes, fractional, tokens, document length)"
CAPACITY = "capacity: got 4, want >= 6, the number of segments"
REFUSED: list[tuple[str, type[Exception], Callable[[DevicePositions], object]]] = [
    (CAPACITY, LimitExceededError, lambda _: DevicePositions.from_table(OTHER, capacity=4)),
    (CAPACITY, LimitExceededError, lambda device: device.refresh(OTHER)),
    ("capacity: got 0, want >= 1", InvalidInputError, lambda _: DevicePositions.from_table(OTHER, capacity=0)),
    *(
        (
            f"{FACTS} {got}, want (2, False, 15, 0) as before",
            InvalidInputError,
            lambda device, x=other: device.refresh(x),
        )
        for got, other in DIFFERENT.items()
    ),
]


@pytest.mark.parametrize(("message", "error", "call"), REFUSED)
def test_a_table_that_does_not_fit_is_refused_and_not_written(message: str, error: Any, call: Any) -> None:
    device = DevicePositions.from_table(POSITIONS)
    with pytest.raises(error) as caught:
        call(device)
    assert (type(caught.value), str(caught.value)) == (error, message)
    assert torch.equal(device.dense(), torch.from_numpy(POSITIONS.dense()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.to("cpu")])
def test_copies_and_other_devices_keep_all_but_the_device(copied: Callable[[Any], Any]) -> None:
    device = DevicePositions.from_table(HALVES, capacity=6)
    for same in (copied(device), device.to("meta"), DevicePositions.from_table(HALVES, "meta", 6)):
        assert (same.axes, same.num_tokens, same.row_length, same.fractional) == (2, 15, 0, True)
        assert same.table.shape == device.table.shape
    assert (same.device, device.to("meta").device) == (torch.device("meta"), torch.device("meta"))
    assert torch.equal(copied(device).table, device.table)
    assert copy.deepcopy(device).table.data_ptr() != device.table.data_ptr()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory requires CUDA")
def test_pin_memory_returns_a_page_locked_copy() -> None:
    device = DevicePositions.from_table(EQUAL)
    pinned = device.pin_memory()
    assert pinned.table.is_pinned()
    assert torch.equal(pinned.table, device.table)
    assert (pinned.num_tokens, pinned.row_length, pinned.fractional) == (16, 8, False)


@pytest.mark.parametrize("rotary", [ROTARY, Rotary(16, precision="hf")], ids=["exact", "hf"])
def test_autocast_does_not_affect_the_rotation(rotary: Rotary) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k = normal(15, 2, 16, dtype=dtype), normal(15, 1, 16, dtype=dtype)
        want = apply_rotary(q, k, FAR, rotary)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = apply_rotary(q, k, FAR, rotary)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


class Heads(nn.Linear):
    """A projection to four heads, which are rotated."""

    def forward(self, x: Tensor, positions: Any) -> Tensor:  # type: ignore[override]
        return apply_rotary(super().forward(x).unflatten(-1, (4, 16)), None, positions, ROTARY)[0].clone()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fsdp2_mixed_precision_casts_weights_but_not_positions_or_frequencies() -> None:
    torch.manual_seed(0)
    model, x = Heads(32, 64), normal(15, 32)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    for positions in (DevicePositions.from_table(FAR), DevicePositions.from_table(EQUAL.slice(0, 15)).dense()):
        got, expected = model(x, positions), plain(x.to(torch.bfloat16), positions)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, expected)
    got.float().square().sum().backward()
    expected.float().square().sum().backward()
    gradient: Any = model.weight.grad
    assert torch.equal(gradient.full_tensor().to(torch.bfloat16), plain.weight.grad)  # type: ignore[arg-type]
    # The policy casts float64 ids to bfloat16, which rounds 9,000,000 to a multiple of 65,536, so they are refused.
    with pytest.raises(InvalidInputError, match=r"^positions: got dtype torch.bfloat16, want int32, int64 or float64"):
        model(x, torch.from_numpy(FAR.dense()))
