"""The work of two ranks under diffusers' context parallelism, in a module that spawned processes can import."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers_models
import torch
from diffusers_models import MODELS, Model
from tolerance import rounding
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from mmpos import MmposError
from mmpos.integrations.diffusers import patch

NAMES = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")
CASES = {"packed": ((0, 2), False), "padded": ((0, 1, 2), True)}
"""Images, and whether each has its own row; ranks share tokens evenly, since gloo only gathers equal shapes."""


def run(rank: int, folder: Path) -> None:
    """Write by how much the outputs of two ranks differ from those of one process, relative to the rounding bounds."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=300)
    distributed.init_process_group("cpu:gloo", store, rank=rank, world_size=2, timeout=limit)
    diffusers_models.TEXTS = (6, 4, 8)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by this count
    results: dict[str, Any] = {
        f"{name}, {case}": _compared(MODELS[name], *CASES[case]) for name in NAMES for case in CASES
    }
    results["ring"] = _refused(MODELS["Flux2Transformer2DModel"], ring_degree=2)
    results["ltx"] = _refused(MODELS["LTXVideoTransformer3DModel"], ulysses_degree=2)
    distributed.barrier()
    (folder / str(rank)).write_text(json.dumps(results))
    distributed.destroy_process_group()


@torch.no_grad()
def _compared(kind: type[Model], which: tuple[int, ...], batch: bool) -> float:
    torch.manual_seed(0)
    model = kind()
    transformer = patch(model.transformer())
    positions = model.positions(which)
    want = model.call(transformer, which, batch, positions)
    bound = rounding(lambda: model.call(transformer, which, batch, positions), transformer.parameters())
    got = model.call(_parallel(transformer, ulysses_degree=2), which, batch, positions)
    return max(float((a - b).abs().max()) / off for a, b, off in zip(got, want, bound, strict=True))


def _parallel(transformer: Any, ring_degree: int = 1, ulysses_degree: int = 1) -> Any:
    mesh = init_device_mesh("cpu", (ring_degree, ulysses_degree), mesh_dim_names=("ring", "ulysses"))
    config = diffusers.ContextParallelConfig(ring_degree=ring_degree, ulysses_degree=ulysses_degree, mesh=mesh)
    transformer.enable_parallelism(config=config)

    def call(**arguments: Any) -> SimpleNamespace:
        sample: Tensor = transformer(**arguments, return_dict=False)[0]  # diffusers' hooks require this call
        return SimpleNamespace(sample=sample)

    return call


@torch.no_grad()
def _refused(kind: type[Model], **degrees: int) -> str:
    torch.manual_seed(0)
    model = kind()
    call = _parallel(patch(model.transformer()), **degrees)
    try:
        model.call(call, (0, 2), False, model.positions((0, 2)))
    except MmposError as error:
        return str(error)
    return ""
