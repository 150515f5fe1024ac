"""Calls that are alike share what one of them has checked, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from functions_called import functions_called
from torch import Tensor

from mmpos import Placeholders, PositionTable, SegmentTable, place
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.rotary import Cache, Norm, Rotary, apply_rotary, rerotate, rotate_and_store
from mmpos.rotary.kernel import tiling

ROTARY, IDS = Rotary(64, axes=3), torch.arange(48, dtype=torch.int32).view(3, 16)
WEIGHT = torch.ones(64, requires_grad=True)


def heads(count: int) -> Tensor:
    return torch.randn(16, count, 64, generator=torch.Generator().manual_seed(count))


def placed() -> PositionTable:
    table = SegmentTable.from_input_ids(np.array([1, 2, 9, 9, 9, 9, 3]), Placeholders(image=9), [[1, 2, 2]])
    return place(table, "rope-tie")


def train(norm: Norm | None = None) -> None:
    outs = apply_rotary(heads(4).requires_grad_(), heads(2).requires_grad_(), IDS, ROTARY, norm=norm)
    torch.autograd.backward([x.sum() for x in outs if x is not None])


def store(**changed: Any) -> None:
    fields = {name: torch.zeros(20, 4, 64) for name in ("key_cache", "value_cache")} | {
        "slot_mapping": torch.arange(16)
    }
    rotate_and_store(heads(4), heads(4), heads(4), IDS, ROTARY, Cache(**(fields | changed)))


@pytest.mark.parametrize(
    ("most", "call"),
    [
        (8, lambda: apply_rotary(heads(4), None, IDS, ROTARY)),
        (51, lambda: apply_rotary(heads(4)[:7], None, placed(), Rotary(64))),
        (20, train),
        (20, lambda: train(Norm(WEIGHT, WEIGHT))),
        (26, store),
        (28, lambda: rerotate(torch.zeros(20, 4, 64), torch.arange(16), IDS, IDS + 1, ROTARY)),
    ],
    ids=["inference", "inference with a new table", "training", "training with a norm", "store", "rerotate"],
)
def test_a_warm_call_runs_few_functions(most: int, call: Callable[[], object]) -> None:
    assert functions_called(call) <= most


def test_alike_calls_use_their_own_tensors() -> None:
    weights, q, k = (torch.linspace(0.5, 1, 64), torch.linspace(1, 2, 64)), heads(2), heads(2) + 1
    for a, b, ids in itertools.product(weights, weights, (IDS, IDS + 5)):
        got: Any = apply_rotary(q, k, ids, ROTARY, norm=Norm(a, b), implementation="reference")
        for x, y, weight in ((q, got[0], a), (k, got[1], b)):
            want = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * weight
            rotated, _ = apply_rotary(want, None, ids, ROTARY, implementation="reference")
            assert torch.equal(y, rotated)


@pytest.mark.parametrize("name", ["inplace", "conjugate", "validate"])
def test_options_that_equal_those_of_an_earlier_call_are_still_checked(name: str) -> None:
    q, options = heads(4), dict[str, Any]({name: 0})
    for norm in (None, Norm(torch.ones(64), eps=1.0)):
        apply_rotary(q, None, IDS, ROTARY, norm=norm)
        with pytest.raises(InvalidInputError, match=f"{name}: got 0, want True or False"):
            apply_rotary(q, None, IDS, ROTARY, norm=norm, **options)
        with pytest.raises(InvalidInputError, match=r"layout: got \['thd'\]"):
            apply_rotary(q, None, IDS, ROTARY, norm=norm, layout=["thd"])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"norm.after: got 0, want True or False"):
        apply_rotary(q, None, IDS, ROTARY, norm=Norm(torch.ones(64), eps=1.0, after=0))  # type: ignore[arg-type]


def test_values_memory_and_gradients_are_checked_in_every_call() -> None:
    q, norm, ids = heads(4), Norm(torch.ones(64)), IDS.long()

    def rotate(q: Tensor, k: Tensor, ids: Tensor) -> None:
        apply_rotary(q, k, ids, ROTARY, norm=norm, inplace=True)

    rotate(q, q.clone(), ids)
    with pytest.raises(InvalidInputError, match="positions: got ids from"):
        rotate(q, q.clone(), ids + 2**31)
    with pytest.raises(InvalidInputError, match="k: got the memory of q"):
        rotate(q, q, ids)
    with pytest.raises(UnsupportedError, match="got q that requires gradients"):
        rotate(q.clone().requires_grad_(), q.clone(), ids)
    store()
    with pytest.raises(InvalidInputError, match=r"slot_mapping\[4\]: got 20, want < 20"):
        store(slot_mapping=torch.arange(16, 32))
    with pytest.raises(InvalidInputError, match="key_cache: got the memory of value_cache"):
        store(**dict.fromkeys(("key_cache", "value_cache"), torch.zeros(20, 4, 64)))


def test_kernels_are_kept_by_dtypes_strides_alignment_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        """Stands for a kernel of Triton: compiling it returns the arguments, and running those returns None."""

        def __init__(self) -> None:
            self.compiled: list[Any] = []

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            assert grid in ((3, 2), (3, 2, 1))
            return self

        def __call__(self, *arguments: Any, **constants: Any) -> Kernel | None:
            if "num_warps" in constants:
                assert constants == {"num_warps": 4, "enable_fp_fusion": False, "BLOCK": constants["BLOCK"]}
                self.compiled.append(arguments)
            return self

    monkeypatch.setattr(tiling, "_COMPILED", {})
    monkeypatch.setattr(tiling, "MOST_COMPILED", 6)
    kernel, x = Kernel(), torch.zeros(1, 4, 2, 64)
    different = (x, 7), (x.half(), 7), (x[..., 1:], 7), (x[..., 4:], 7), (x, 8)
    for _ in range(2):
        for tensor, number in different:
            tiling.launch(kernel, (3, 2), 4, tiling.heads_of(tensor), number, BLOCK=16)
    assert len(kernel.compiled) == 4  # x[..., 4:] is aligned like x
    for block in range(20):
        tiling.launch(kernel, (3, 2), 4, tiling.heads_of(x), 7, BLOCK=block)
        assert len(tiling._COMPILED) <= 6
