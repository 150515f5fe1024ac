"""Launches kernels of many sorts past Triton's binder and by it, and prints as JSON what came of it.

Run by test_rotary_launches.py in a process without Triton's interpreter: kernels are bound and specialised by Triton
for a GPU that is not there, but not compiled.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton.compiler
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

import mmpos
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, apply_rotary, kernel, rerotate, rotate_and_store
from mmpos.rotary.apply import _arguments
from mmpos.rotary.kernel import launching
from mmpos.rotary.kernel.rotate import rotary_kernel
from mmpos.rotary.operators import rotate_backward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H100 = GPUTarget("cuda", 90, 32)
LAUNCHES: list[tuple[Any, ...]] = []
BOUND: Counter[str] = Counter()


class StandIn:
    """A driver of Triton for a GPU that is not there: kernels are compiled for it, and a launch does nothing."""

    class Launcher:
        """Takes the arguments of a launch."""

        def __init__(self, source: object, metadata: object) -> None: ...

        def __call__(self, *arguments: object) -> None:
            """Launch nothing."""

    def __init__(self, target: GPUTarget = H100) -> None:
        self._target = target
        self.launcher_cls = self.Launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 0, 0, 1024),  # module, function, registers, spills, most threads
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
        )

    def get_current_target(self) -> GPUTarget:
        """The GPU that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def uncompiled(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
    """A kernel that notes its launches, and what it would be compiled from."""
    constants = {path: str(value) for path, value in source.constants.items()}
    name = f"{source.fn.__name__} {source.signature} {constants} {source.attrs} {options}"

    def run(x: int, y: int, z: int, stream: int, function: str, *arguments: Any) -> None:
        LAUNCHES.append((x, y, z, stream, function, arguments[0], *map(form, arguments[4:])))  # without those of hooks

    return SimpleNamespace(run=run, function=name, packed_metadata="metadata", launch_metadata=lambda *_: None)


def form(x: Any) -> Any:
    """All of an argument but the address, which is another one for every new tensor."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.data_ptr() % 16
    return tuple(map(form, x)) if isinstance(x, tuple) else x


def often(draw: random.Random, usual: Any, *others: Any) -> Any:
    """Mostly the same, so that many calls are of one sort."""
    return usual if draw.random() < 0.9 else draw.choice(others)


def heads(draw: random.Random, tokens: int, count: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Heads in one of many strides, at an address of one of many alignments."""
    left, right, step = often(draw, 0, 1, 8, 16), often(draw, 0, 3, 16), often(draw, 1, 2)
    wide = torch.zeros(tokens, count, left + dim * step + right, dtype=dtype)
    return wide[:, :, left : left + dim * step : step]


def call(draw: random.Random) -> Any:
    """A launch of one of the kernels, of one of many sorts."""
    tokens, dim, dtype = draw.choice((1, 2, 16, 17, 64)), often(draw, 16, 12, 32), often(draw, *DTYPES)
    q_heads, k_heads = draw.choice((1, 2, 16)), often(draw, 16, 1, 2)
    parts: list[mmpos.Text | mmpos.Grid] = (
        [mmpos.Text(tokens)] if tokens < 3 else [mmpos.Text(tokens - 2), mmpos.Grid(1, 2)]
    )
    scheme = often(draw, "rope-tie", "rope-tie-fractional")
    table = mmpos.place(mmpos.SegmentTable.from_documents([parts]), scheme=scheme)
    ids = (torch.zeros(2, tokens, dtype=each) for each in (torch.int32, torch.int64, torch.float64))
    positions = often(draw, DevicePositions.from_table(table), *ids)
    by_head: Any = {"allocation": "heads", "axes": 2, "head_axes": [head % 2 for head in range(k_heads)]}
    kinds: Any = {"pairing": often(draw, "half", "adjacent"), "precision": often(draw, "exact", "hf")}
    rotary = Rotary(dim, **kinds, **often(draw, {}, {} if q_heads % k_heads else by_head))
    q, k = heads(draw, tokens, q_heads, dim, dtype), heads(draw, tokens, k_heads, dim, dtype)
    weights = [often(draw, None, *(torch.ones(dim, dtype=each) for each in DTYPES)) for _ in range(2)]
    norm = Norm(weights[0], weights[1], after=often(draw, False, True))
    options: Any = {"implementation": "triton", "inplace": often(draw, False, True), "norm": norm}
    whole = positions.dtype != torch.float64 if isinstance(positions, Tensor) else not positions.fractional
    if whole:
        caches = (torch.ones(80 + draw.choice((0, 1)), dim, dtype=each) for each in DTYPES)
        options["cos_sin"] = often(draw, None, *caches)
    kind = draw.choice(("apply", "store", "store", "apply", "dense", "backward", "rerotate"))
    if kind == "dense":
        columns = DevicePositions.from_table(table).table
        return lambda: kernel.launch_dense(columns, tokens, table.axes, table.fractional)
    if kind == "rerotate":
        pages = heads(draw, 64, k_heads, dim, often(draw, dtype, torch.float8_e4m3fn))
        scales = torch.ones(64, k_heads) if pages.dtype.itemsize == 1 else None
        where = torch.arange(tokens, dtype=often(draw, torch.int64, torch.int32))
        return lambda: rerotate(pages, where, positions, positions, rotary, k_scale=scales, implementation="triton")
    if kind == "backward":
        norm = norm._replace(q_weight=torch.ones(dim))
        rotation = _arguments(q[None], k[None], positions, rotary, options.get("cos_sin"), True, "triton", False)
        wanted = [draw.random() < 0.5 for _ in range(4)]
        return lambda: rotate_backward(q[None], k[None], q[None], k[None], wanted, *norm, *rotation)
    if kind == "apply":
        return lambda: apply_rotary(q, k, positions, rotary, **options)
    v = heads(draw, tokens, k_heads, often(draw, 16, 8), dtype)
    keys, values = (heads(draw, 64, k_heads, x.shape[2], dtype) for x in (k, v))
    slots = torch.arange(tokens, dtype=often(draw, torch.int64, torch.int32))
    return lambda: rotate_and_store(q, k, v, positions, rotary, Cache(keys, values, slots), **options)


def launched(rotate: Any) -> tuple[Any, int]:
    """Return what was launched, and how many launches Triton bound."""
    LAUNCHES.clear()
    before = BOUND.total()
    rotate()
    (only,) = LAUNCHES
    return only, BOUND.total() - before


def by_triton(rotate: Any) -> Any:
    """Return what Triton launches."""
    with patch.object(launching, "_goes_straight", lambda _: False):
        return launched(rotate)[0]


def main() -> dict[str, Any]:
    """Compare many launches, and count those that Triton bound where something is out of the ordinary."""
    draw = random.Random(20)
    calls = [call(draw) for _ in range(300)]
    bound = [launched(rotate)[1] for rotate in calls]
    straight = [launched(rotate) for rotate in calls]
    expected = [by_triton(rotate) for rotate in calls]
    rotate = next(each for each in calls if launched(each)[0][4].startswith("rotary_kernel"))

    def once() -> int:
        return launched(rotate)[1]

    facts: dict[str, Any] = {
        "calls": len(calls),
        "sorts": sum(bound),
        "kernels": len({launch[4] for launch in expected}),
        "bound again": sum(count for _, count in straight),
        "fused": sum("'enable_fp_fusion': False" not in launch[4] for launch in expected),
        "names": sorted({launch[4].split()[0] for launch in expected}),
        "different": [str(want) for (got, _), want in zip(straight, expected, strict=True) if got != want],
    }
    rotary_kernel.add_pre_run_hook(lambda *_, **__: None)
    facts["with a hook of the kernel"] = once()
    rotary_kernel.pre_run_hooks.clear()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hook = getattr(knobs.runtime, name)
        hook.add(id)
        facts[f"with {name}"] = once()
        hook.remove(id)
    with patch.object(knobs.compilation, "instrumentation_mode", "fpsan"):
        facts["instrumented"] = once()
    for name, known in (("older", ((9, 0), (9, 1))), ("newer", ((1, 0), (1, 1)))):
        launching._known.cache_clear()
        with patch.object(launching, "KNOWN", known):
            facts[name] = once()
    launching._known.cache_clear()
    facts["as before"] = once()
    facts["straight on AMD"] = launching._known(StandIn(GPUTarget("hip", "gfx942", 64)))
    return facts


if __name__ == "__main__":
    triton.compiler.compile = uncompiled
    usual = JITFunction.run
    JITFunction.run = lambda self, *args, **options: BOUND.update([self.__name__]) or usual(self, *args, **options)
    driver.set_active(StandIn())
    os.environ["TRITON_INTERPRET"] = "1"  # read by the door of the kernels, which are not interpreted any more
    with torch.inference_mode():
        print(json.dumps(main()))
