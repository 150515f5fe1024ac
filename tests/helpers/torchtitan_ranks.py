"""One of two processes, without a GPU, in which torch's own parallelisms meet our inputs; see test_torchtitan.py."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tolerance import assert_within, rotations, rounding
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _HeadTailLoadBalancer

from mmpos import Grid, InvalidInputError, SegmentTable, Text, place
from mmpos.integrations.torchtitan import RoPE, deliver_positions, shard, table_tensor
from mmpos.rotary import Rotary

WORLD, SEQ = 2, 12
ROTARY = Rotary(head_dim=16)
POSITIONS = place(
    SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(1)], [Text(4), Grid(3, 3), Text(1)]]), "rope-tie-v2"
)
IDS = torch.from_numpy(POSITIONS.dense()).reshape(2, -1, SEQ).permute(1, 2, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """q and k of four heads, rotated and added: enough to see positions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 128, bias=False)
        self.proj.weight.data = normal(128, 64, seed=seed) / 8
        self.rope = RoPE(ROTARY)
        self.came: list[torch.dtype] = []

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        self.came.append(positions.dtype)
        q, k = self.proj(x).unflatten(-1, (2, 4, 16)).unbind(2)
        q, k = self.rope(q, k, positions)
        return x + (q * k).flatten(2)


class Stack(nn.Module):
    """Layers that are handed what the model was called with, as a torchtitan decoder does."""

    def __init__(self, *seeds: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(seed) for seed in seeds)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions)
        return x


def context_parallel(mesh: DeviceMesh) -> None:
    for balancer, name in ((_HeadTailLoadBalancer(SEQ, WORLD, "cpu"), "headtail"), (None, None)):
        (expected,) = _context_parallel_shard(mesh, [IDS.contiguous()], [1], balancer)
        mine = shard(POSITIONS, SEQ, mesh.get_local_rank(), WORLD, name)  # type: ignore[arg-type]
        found = torch.from_numpy(mine.dense()).reshape(2, -1, SEQ // WORLD).permute(1, 2, 0)
        assert_within(found, expected, 0)


def tensor_parallel(mesh: DeviceMesh) -> None:
    q, k = normal(2, SEQ, 4, 16).requires_grad_(), normal(2, SEQ, 2, 16, seed=1).requires_grad_()
    table, rank = table_tensor(POSITIONS), mesh.get_local_rank()
    expected = RoPE(ROTARY)(q, k, table)
    gradients = torch.autograd.grad([x.square().mul(0.5 + x).sum() for x in expected], [q, k])
    local = [x.detach().chunk(WORLD, dim=2)[rank].contiguous().requires_grad_() for x in (q, k)]
    found = RoPE(ROTARY)(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in local), table)
    for x, whole in zip(found, expected, strict=True):
        assert isinstance(x, DTensor)
        assert (x.shape, x.placements) == (whole.shape, (Shard(2),))
        assert torch.equal(x.to_local(), whole.chunk(WORLD, dim=2)[rank])
    back = torch.autograd.grad([x.to_local().square().mul(0.5 + x.to_local()).sum() for x in found], local)
    for x, whole in zip(back, gradients, strict=True):
        mine = whole.chunk(WORLD, dim=2)[rank]
        assert_within(x, mine, rotations(mine))


def mixed_precision(mesh: DeviceMesh) -> None:
    model, policy = Stack(1, 2), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x = normal(2, SEQ, 64)
    found = model(x, table_tensor(POSITIONS))
    found.float().sum().backward()
    plain = Stack(1, 2).bfloat16()
    assert torch.equal(found, plain(x.bfloat16(), table_tensor(POSITIONS)))
    # Dense fractions are floats, and so are rounded on their way: the reason for the table.
    assert [layer.came for layer in model.layers] == [[torch.int64], [torch.int64]]
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    with pytest.raises(
        InvalidInputError, match=r"^positions: got dtype torch.bfloat16, want int32, int64 or float64 ids$"
    ):
        model(x, IDS + 100_000.75)
    assert float(seen[0].flatten()[0]) == 99_840.0


def pipeline(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    model = Stack(1 + rank)
    deliver_positions(model)
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"), group=mesh.get_group())
    batches = [normal(2, SEQ, 64, seed=seed) for seed in (3, 4)]
    # Microbatches have images of their own: one table each, of one capacity.
    tables = [table_tensor(POSITIONS, capacity=8), table_tensor(place(SegmentTable.from_documents([[Text(24)]])), 8)]
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out * target).sum(), scale_grads=False)
    schedule.step(
        arg_mbs=[(x,) for x in batches] if rank == 0 else None,
        kwarg_mbs=[{"mm_position_ids": table} for table in tables],
        target_mbs=batches if rank == WORLD - 1 else None,
        losses=losses if rank == WORLD - 1 else None,
    )
    whole = Stack(1, 2)

    def trained() -> list[Tensor]:
        """The losses of both batches, and what they send back to the layer of this rank."""
        found = torch.stack([(whole(x, table) * x).sum() for x, table in zip(batches, tables, strict=True)])
        return [found, *torch.autograd.grad(found.sum(), list(whole.layers[rank].parameters()))]

    (loss, *want), (bound, *bounds) = trained(), rounding(trained, whole.parameters(), 2 * SEQ * 64)
    assert_within([x.grad for x in model.parameters()], want, bounds)
    if rank == WORLD - 1:
        assert_within(torch.stack(losses), loss, bound)


SCENARIOS: dict[str, Callable[[DeviceMesh], None]] = {
    f.__name__: f for f in (context_parallel, tensor_parallel, mixed_precision, pipeline)
}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD)
    mesh, found = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ranks",)), {}
    for name, scenario in SCENARIOS.items():
        try:
            scenario(mesh)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other rank may wait for ever
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
