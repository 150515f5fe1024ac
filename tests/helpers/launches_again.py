"""Repeat calls of many forms three times, and print as JSON how the kernels launch; bound kernels serve the last calls.

tests/rotary/test_rotary_launches.py runs this module in a process without Triton's interpreter: Triton binds and
specialises kernels for an absent GPU, but does not compile them.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import triton.compiler
from aot_compile import StandIn
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime import JITFunction, driver

import mmpos.rotary.kernel  # noqa: F401  # imported before the environment selects the interpreter
from mmpos import Grid, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, apply_rotary, launches, rotate_and_store

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
LAUNCHES: list[tuple[Any, ...]] = []
BOUND: Counter[str] = Counter()


class Uncompiled:
    """A kernel that records its launches and what would be compiled."""

    packed_metadata = "metadata"

    def __init__(self, source: Any, target: Any = None, options: Any = None, **_: Any) -> None:
        constants = {path: str(value) for path, value in source.constants.items()}
        self.function = f"{source.fn.__name__} {source.signature} {constants} {source.attrs} {options}"

    def launch_metadata(self, *_: object) -> None:
        """Return no metadata."""

    def run(self, x: int, y: int, z: int, stream: int, function: str, *arguments: Any) -> None:
        """Record a launch by Triton, whose first arguments are metadata and hooks."""
        LAUNCHES.append((x, y, z, function, *map(form, arguments[4:])))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: LAUNCHES.append((*grid, self.function, *map(form, arguments)))


def form(x: Any) -> Any:
    """Return every property of an argument except its address, which differs for every new tensor."""
    if isinstance(x, Tensor):
        return x.dtype, x.numel(), x.data_ptr() % 16, x.dim() == 1 and x.stride()
    return tuple(map(form, x)) if isinstance(x, tuple) else x


def often(draw: random.Random, usual: Any, *others: Any) -> Any:
    """Return the usual value most of the time, so that many calls have the same form."""
    return usual if draw.random() < 0.95 else draw.choice(others)


def call(draw: random.Random) -> tuple[Any, Callable[[], Any]]:
    """Return the tensors written by a call of one of many forms, and the call."""
    batch, seq, dim, dtype = often(draw, 1, 2), often(draw, 16, 2, 17), often(draw, 16, 32), often(draw, *DTYPES)
    layout = often(draw, "thd", "bshd", "bhsd")

    def heads(count: int, size: int = dim) -> Tensor:
        first, right, step = often(draw, 0, 1), often(draw, 0, 1, 8), often(draw, 1, 2)
        shape = batch, seq, count, size * step + right
        wide = torch.zeros(first + prod(shape), dtype=dtype)[first:].view(shape)[..., : size * step : step]
        return wide.flatten(0, 1) if layout == "thd" else wide.transpose(1, 2) if layout == "bhsd" else wide

    parts: list[Text | Grid] = [Text(seq)] if seq < 3 else [Text(seq - 2), Grid(1, 2)]
    scheme = often(draw, "rope-tie", "rope-tie-fractional")
    table = place(SegmentTable.from_documents([parts] * batch), scheme)
    positions = DevicePositions.from_table(table, capacity=often(draw, None, 64))
    kinds: Any = {"pairing": often(draw, "half", "adjacent"), "precision": often(draw, "exact", "hf")}
    by_head: Any = often(draw, {}, {"allocation": "heads", "head_axes": [0, 1]})
    rotary = Rotary(dim, axes=2, **kinds, **by_head)
    q, k, v = heads(4), heads(2), heads(2, often(draw, 16, 8))
    weights = [often(draw, None, *(torch.ones(dim, dtype=norm_dtype) for norm_dtype in DTYPES)) for _ in range(2)]
    eps, after = draw.choice((1e-6, 1e-5)), draw.random() < 0.5
    norm = draw.choice((None, Norm(weights[0], weights[1], eps, after=after), Norm(torch.ones(dim), eps=eps)))
    options: Any = {"implementation": "triton", "inplace": draw.random() < 0.3, "norm": norm, "layout": layout}
    if draw.random() < 0.5:
        options["conjugate"] = often(draw, False, True)
        return (q, k), lambda: apply_rotary(q, k, positions, rotary, **options)
    paging: Any = draw.choice(("NHD", "HND"))
    block = often(draw, 2, 8)
    shape = (64, block, 2) if paging == "NHD" else (64, 2, block)
    scales: Any = often(draw, {}, *({"k_scale": x, "v_scale": x} for x in (torch.ones(()), torch.ones(2))))
    cache_dtype = torch.float8_e4m3fn if scales else dtype
    keys, values = (torch.zeros(*shape, x.shape[-1]).to(cache_dtype) for x in (k, v))
    slots = often(draw, torch.arange(batch * seq), torch.arange(1), torch.arange(2 * batch * seq)[::2])
    cache = Cache(keys, values, slots, paging, **scales)
    options["return_k"] = often(draw, False, True)
    return (q, keys), lambda: rotate_and_store(q, k, v, positions, rotary, cache, **options)


def launched(rotate: Callable[[], Any], *written: Tensor) -> tuple[Any, ...]:
    """Return the launch, the form of the results, which version counters changed, and whether Triton bound a kernel."""
    LAUNCHES.clear()
    before, versions = BOUND.total(), [x._version for x in written]
    q_out, k_out = rotate()
    (only,) = LAUNCHES
    results = [None if x is None else (x.dtype, x.shape, x.stride()) for x in (q_out, k_out)]
    changed = [x._version > version for x, version in zip(written, versions, strict=True)]
    return (only, results, changed, q_out is written[0]), BOUND.total() > before


def launched_anew(rotate: Callable[[], Any], *written: Tensor) -> tuple[Any, ...]:
    """Return the launch made when no form is known."""
    with patch.dict(launches._KNOWN, clear=True):
        return launched(rotate, *written)[0]


def main() -> dict[str, Any]:
    """Compare the launches of known forms with those of unknown forms."""
    draw = random.Random(32)
    different, straight = [], 0
    for _ in range(400):
        written, rotate = call(draw)
        want, _, _, (got, bound) = launched_anew(rotate, *written), *(launched(rotate, *written) for _ in range(3))
        straight += not bound
        if got != want:
            different.append((str(got), str(want)))
    forms = len(launches._KNOWN)
    launches._KNOWN.clear()
    launches.MOST = 3
    for _ in range(100):
        written, rotate = call(draw)
        want, _, _, (got, _) = launched_anew(rotate, *written), *(launched(rotate, *written) for _ in range(3))
        different += [] if got == want else [(str(got), str(want))]
    few = len(launches._KNOWN) <= 3
    return {"different": different[:3], "straight": straight, "forms": forms, "few": few, "refused": refused()}


def refused() -> list[str]:
    """Return the error messages of invalid calls whose forms are otherwise known."""
    positions, rotary = DevicePositions.from_table(place(SegmentTable.from_documents([[Text(4)]]))), Rotary(16)
    fused, pages = torch.zeros(4, 8, 16), torch.zeros(8, 2, 16)
    options: dict[str, Any] = {"inplace": True, "implementation": "triton"}
    no_number: Any = Norm()._replace(eps=[])  # type: ignore[arg-type]
    messages = []

    def rotate(k_from: int = 4, **changed: Any) -> None:
        apply_rotary(fused[:, :4], fused[:, k_from : k_from + 2], positions, rotary, **(options | changed))

    def store(slots: Tensor) -> None:
        cache = Cache(pages, torch.zeros(8, 2, 16), slots)
        rotate_and_store(fused[:, :4], fused[:, 4:6], fused[:, 6:], positions, rotary, cache, implementation="triton")

    def in_forward_mode() -> None:
        with forward_ad.dual_level():
            q = forward_ad.make_dual(fused[:, :4], fused[:, :4].clone())
            apply_rotary(q, fused[:, 4:6], positions, rotary, **options)

    for _ in range(3):
        rotate()
        store(torch.arange(4))
    mistakes: tuple[Callable[[], None], ...] = (
        lambda: rotate(2), lambda: rotate(inplace=1), lambda: rotate(layout=[]), lambda: rotate(norm=no_number),
        lambda: rotate(conjugate=0), in_forward_mode,
        lambda: store(torch.tensor([0, 1, 1, 2])), lambda: store(torch.tensor([0, 1, 2, 8])),
    )  # fmt: skip
    for mistake in mistakes:
        try:
            mistake()
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    triton.compiler.compile = Uncompiled
    usual = JITFunction.run
    JITFunction.run = lambda self, *args, **options: BOUND.update([self.__name__]) or usual(self, *args, **options)
    driver.set_active(StandIn("sm_90"))
    os.environ["TRITON_INTERPRET"] = "1"  # checked only on entry to the kernels, which are no longer interpreted
    print(json.dumps(main()))
