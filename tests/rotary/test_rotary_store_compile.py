"""torch.compile of rotate_and_store: whole graphs that write into the caches that came, and torch's own checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from store_oracle import CACHES, DEVICE, Cache, assert_holds
from tolerance import assert_within, rotations
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos import InvalidInputError, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Rotary, rotate_and_store
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.operators import rotate_and_store as store
from mmpos.rotary.operators import rotate_and_store_ as store_
from mmpos.rotary.paged import NO_SCALES
from mmpos.rotary.reference import AUTO, NONE

ROTARY = Rotary(12)
TABLE = packed("rope-tie").slice(4, 17)
IDS = torch.arange(26, device=DEVICE).view(2, 13)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(tokens: int) -> list[Tensor]:
    """Views of one buffer, as a projection gives them."""
    return list(heads(tokens, 7, 12, seed=tokens).to(DEVICE).split([3, 2, 2], dim=1))


def layer(x: list[Tensor], positions: Any, cache: Cache, slots: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Some arithmetic before and after, and a view of the cache as vLLM makes it."""
    q, k, v = x
    key, value = cache.key, cache.value
    out, k_out = rotate_and_store(
        q * 2, k, v, positions, ROTARY, key, value, slots, cache_layout=cache.layout, **options  # type: ignore[arg-type]
    )  # fmt: skip
    return out + 1, k_out


REST = [(name, return_k) for name in CACHES for return_k in (False, True) if (name, return_k) != ("HND", True)]


@pytest.mark.parametrize(
    ("name", "return_k"), [("HND", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_whole_graphs_write_into_the_caches_that_came(name: str, return_k: bool) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    cache, want = (CACHES[name](4, 16, 2, 12, torch.float32) for _ in range(2))
    slots = torch.arange(13, device=DEVICE).flip(0)
    slots[2] = -1
    with torch.inference_mode():
        got = compiled(qkv(13), DevicePositions.from_table(TABLE, DEVICE), cache, slots, return_k=return_k)
        expected = layer(qkv(13), TABLE, want, slots, return_k=return_k)
    assert torch.equal(got[0], expected[0])
    assert (got[1] is None) == (expected[1] is None)
    assert not return_k or torch.equal(got[1], expected[1])  # type: ignore[arg-type]
    assert_holds(cache, want)


@pytest.mark.parametrize("sizes", [(13, 2, 40), pytest.param((13, 1, 2, 40, 7), marks=pytest.mark.slow)])
def test_batches_of_many_sizes_take_few_graphs(sizes: tuple[int, ...]) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    cache, want = (CACHES["k and v side by side"](8, 16, 2, 12, torch.float32) for _ in range(2))
    with torch.no_grad():
        for tokens in sizes:
            positions = DevicePositions.from_table(
                place(SegmentTable.from_documents([[Text(tokens)]]), "rope-tie"), DEVICE
            )
            slots = torch.arange(tokens, device=DEVICE) * 3 % 128
            got = compiled(qkv(tokens), positions, cache, slots)
            assert torch.equal(got[0], layer(qkv(tokens), positions, want, slots)[0]), tokens
    assert_holds(cache, want)
    assert counter.frame_count <= (3 if 1 in sizes else 2)


def test_in_place_under_compile_writes_into_all_that_came() -> None:
    slots = torch.arange(13, device=DEVICE)

    def step(q: Tensor, k: Tensor, v: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, _ = rotate_and_store(q, k, v, IDS, ROTARY, key, value, slots, inplace=True, return_k=True)
        return out + 1

    calls: list[Any] = [step, torch.compile(step, fullgraph=True, backend="aot_eager")]
    results = []
    for call in calls:
        cache = CACHES["k and v by page"](4, 16, 2, 12, torch.float32)
        fused = heads(13, 7, 12).to(DEVICE)
        with torch.no_grad():
            out = call(*fused.split([3, 2, 2], dim=1), cache.key, cache.value)
        results.append((out, fused, cache))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert_holds(results[0][2], results[1][2])


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_tensor_twice_is_refused_also_while_a_graph_is_traced(
    traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, cache = heads(13, 2, 12).to(DEVICE), CACHES["NHD"](4, 16, 2, 12, torch.float32)

    def step(x: Tensor) -> Tensor:
        slots = torch.arange(13, device=DEVICE)
        return rotate_and_store(x, x, x, IDS, ROTARY, cache.key, cache.value, slots, inplace=True)[0]

    refused = pytest.raises(InvalidInputError, match="q: got the memory of k, want memory of its own")
    if traced:
        with refused:
            torch.compile(step, backend="eager")(same)
        return
    with refused:
        step(same)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # when nothing is known of addresses
    with refused:
        step(same)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["k and v side by side", "NHD"])
def test_inductor_writes_what_eager_writes_and_copies_no_cache(name: str) -> None:
    from torch._inductor.utils import run_and_get_code  # which takes seconds to import

    compiled: Any = torch.compile(layer, fullgraph=True, dynamic=False)
    cache, want = (CACHES[name](4, 16, 2, 12, torch.float32) for _ in range(2))
    positions, slots = DevicePositions.from_table(TABLE, DEVICE), torch.arange(13, device=DEVICE)
    with torch.inference_mode():
        got, (code,) = run_and_get_code(compiled, qkv(13), positions, cache, slots)
        expected = layer(qkv(13), positions, want, slots)
    assert_within(got[0], expected[0], rotations(expected[0].abs() + 1))  # before 1 was added
    assert_holds(cache, want)
    assert f"empty_strided_{DEVICE.type}((1, 13, 3, 12)" in code  # twice q
    assert f"empty_strided_{DEVICE.type}((4, " not in code


# The operators.


def arguments(
    cache: Cache, slots: Tensor, positions: Any = TABLE, *, return_k: bool = False, weights: Any = None
) -> tuple[Any, ...]:
    made = position_ids(positions, slots.device)
    q, k, v = (x[None] for x in qkv(13))
    key, value = (x.transpose(1, 2) if cache.layout == "HND" else x for x in (cache.key, cache.value))
    norm = NONE if weights is None else (*weights, 1e-6, 1.0, False)
    numbers = made.mode, False, 1.0, False, AUTO
    return q, k, v, key, value, slots, return_k, *NO_SCALES, *norm, made.tensor, *constants(ROTARY, DEVICE), *numbers


SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "NHD": lambda: arguments(CACHES["NHD"](4, 16, 2, 12, torch.float32), torch.arange(13, device=DEVICE)),
    "HND": lambda: arguments(
        CACHES["HND"](4, 16, 2, 12, torch.float32), torch.arange(13, device=DEVICE), return_k=True
    ),
    "norm": lambda: arguments(
        CACHES["NHD"](4, 16, 2, 12, torch.float32),
        torch.arange(13, device=DEVICE),
        weights=(torch.ones(12, device=DEVICE), None),
    ),
    "ids": lambda: arguments(
        CACHES["NHD"](4, 16, 2, 12, torch.float32),
        torch.arange(9, device=DEVICE) - 2,
        torch.from_numpy(TABLE.dense()).to(DEVICE),
    ),
}


CHECKED = ((store, "HND"), (store_, "norm"))


@pytest.mark.parametrize(
    ("operator", "sample"),
    [
        pytest.param(operator, sample, marks=[pytest.mark.slow] * ((operator, sample) not in CHECKED))
        for operator in (store, store_)
        for sample in SAMPLES
    ],
)
def test_the_operators_pass_torchs_own_checks(operator: Any, sample: str) -> None:
    torch.library.opcheck(operator, SAMPLES[sample]())
