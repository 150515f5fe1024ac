"""Slots that no door has seen: those on a device are read by nobody before they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from store_oracle import CACHES, DEVICE, Cache, assert_holds, write
from torch import Tensor

from mmpos import InvalidInputError
from mmpos.rotary import Rotary, apply_rotary, operators, paged, rotate_and_store
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.paged import NO_SCALES
from mmpos.rotary.reference import NONE, REFERENCE, TRITON

TABLE = packed("rope-tie").slice(4, 17)
ROTARY = Rotary(12)


def unseen(cache: Cache, slots: Tensor, implementation: int) -> tuple[Tensor, Tensor]:
    """The operator itself, with v and the rotated k that it should store."""
    q, k, v = (heads(13, n, 12, seed=n).to(DEVICE) for n in (3, 2, 2))
    operators.rotate_and_store(
        q[None], k[None], v[None], cache.key, cache.value, slots.to(DEVICE), *arguments(implementation)
    )
    turned = apply_rotary(k, None, TABLE, ROTARY, implementation="reference")[0]
    return v, turned


def arguments(implementation: int) -> tuple[Any, ...]:
    made = position_ids(TABLE, torch.device(DEVICE))
    numbers = made.mode, False, 1.0, False, implementation
    return False, *NO_SCALES, *NONE, made.tensor, *constants(ROTARY, DEVICE), *numbers


BEYOND = [3, 64, 2**31, 2**40 + 5, -(2**40), 63, -1, 2**63 - 1, 0, -(2**63), 128, 9, 65]


@pytest.mark.parametrize("implementation", [REFERENCE, TRITON])
@pytest.mark.parametrize("slots", [BEYOND, [5, 64, 100]])
def test_nothing_is_written_beyond_a_cache(slots: list[int], implementation: int) -> None:
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    v, turned = unseen(cache, torch.tensor(slots), implementation)
    write(want, turned, v, [slot if slot < 64 else -1 for slot in slots])
    assert_holds(cache, want)


@pytest.mark.parametrize(
    "slots", [BEYOND, [-1] * 13, [-(2**40)], [7] + [-1] * 12, [-1, 5, 64], list(range(13)), [0, -1, 5]]
)
@pytest.mark.parametrize("name", CACHES)
def test_the_plain_write_that_waits_for_nothing_writes_the_same(name: str, slots: list[int]) -> None:
    cache, want = (CACHES[name](4, 16, 2, 12, torch.float32) for _ in range(2))
    k, v = heads(13, 2, 12).to(DEVICE), heads(13, 2, 12, seed=1).to(DEVICE)
    write(want, k, v, [slot if slot < 64 else -1 for slot in slots])
    pages = [paged.pages_of("cache", x, cache.layout, ("x", k[None])) for x in (cache.key, cache.value)]  # type: ignore[arg-type]
    rows = [x[: len(slots)] for x in (k, v)]
    paged._write_waiting_for_nothing(pages, rows, torch.tensor(slots, device=DEVICE))
    assert_holds(cache, want)


def test_the_plain_write_that_waits_for_nothing_leaves_a_cache_of_no_blocks_alone() -> None:
    none, x = torch.zeros(0, 16, 2, 12), heads(2, 2, 12)
    paged._write_waiting_for_nothing([none], [x], torch.tensor([-1, 3]))


def test_slots_that_the_host_does_not_look_at_are_refused_if_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as little is known of those on a device
    pages, slots = torch.zeros(4, 16, 2, 12), torch.tensor([[3, 64]], dtype=torch.int32)
    assert torch.equal(paged.slots_of(slots, 1, 2, pages, validate=False), slots[0])
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[1\]: got 64, want < 64, the slots of key_cache$"):
        paged.slots_of(slots, 1, 2, pages, validate=True)
    twice = torch.tensor([3, 2, -1, -1, 3])
    assert torch.equal(paged.slots_of(twice, 1, 5, pages, validate=False), twice)
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[4\]: got 3, the slot of token 0, want"):
        paged.slots_of(twice, 1, 5, pages, validate=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_what_autograd_has_saved_is_known_to_have_changed(implementation: Any, inplace: bool) -> None:
    cache = CACHES["NHD"](4, 16, 2, 12, torch.float32)
    q, k, v = (heads(13, n, 12).to(DEVICE) for n in (3, 2, 2))
    options: Any = {"implementation": implementation, "inplace": inplace, "return_k": inplace}
    factor = torch.zeros((), requires_grad=True, device=DEVICE)
    written = [cache.key, cache.value, *([q, k] if inplace else [])]
    saved = [(factor * x).sum() for x in written]
    slots = torch.arange(13, device=DEVICE)
    rotate_and_store(q, k, v, TABLE, ROTARY, cache.key, cache.value, slots, **options)
    for total in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
