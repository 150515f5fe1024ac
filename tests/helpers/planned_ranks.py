"""The work of each of four ranks that follow a plan, in a module that spawned processes can import."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mmpos.data import IGNORE_INDEX, Batch, PackedCollator, PlannedPacks


def model() -> nn.Sequential:
    """Build the same tiny model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 16), nn.Tanh(), nn.Linear(16, 300))


def losses(model: nn.Sequential, batch: Batch) -> torch.Tensor:
    """Return the loss for each label in a batch."""
    labels = batch.shift_labels().labels
    kept = labels != IGNORE_INDEX
    return cross_entropy(model(batch.input_ids)[kept], labels[kept], reduction="none")


def run(rank: int, folder: Path) -> None:
    """Sum the weighted losses over the steps of a plan; rank 0 writes their mean and the gradient of the mean."""
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=4, timeout=limit)
    parallel = nn.parallel.DistributedDataParallel(model())  # averages gradients across ranks
    packs, total = PlannedPacks(folder / "index.parquet", rank), torch.zeros(())
    for microbatches in packs:
        means = []
        for microbatch in microbatches:
            batch = PackedCollator()(microbatch.pack)
            labels = batch.shift_labels().labels
            means.append(
                microbatch.weight * cross_entropy(parallel(batch.input_ids), labels, ignore_index=IGNORE_INDEX)
            )
        loss = torch.stack(means).mean() / len(packs)
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    if rank == 0:
        torch.save((float(total) / 4, parallel.module[0].weight.grad), folder / "result")
    torch.distributed.destroy_process_group()
