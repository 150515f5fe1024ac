"""rotate_and_store into caches of 8 bits: whole caches and scales against float64 and a search for what is nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_oracle import heads as heads_on_host
from rotary_oracle import ids_of, lengths, packed, rotated
from store_oracle import CACHES, DEVICE, Held, assert_holds, assert_same_bits, filled, flat, nearest
from tolerance import ARITHMETIC, unit
from torch import Tensor

from mmpos.rotary import Cache, Norm, Rotary, apply_rotary, rotate_and_store

WAYS = ("reference", "triton")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TABLE = packed("rope-tie-fractional", 70_000).slice(4, 17)
ROTARY = Rotary(12, rotary_dim=8)
SLOTS = [40, 41, 3, -1, 7, 0, 63, -1, 22, 21, -9, 5, 16]
STORED = [token for token, slot in enumerate(SLOTS) if slot >= 0]

pytestmark = pytest.mark.usefixtures("few_programs")


def heads(*args: Any, **options: Any) -> Tensor:
    """Random q, k or v where kernels run."""
    return heads_on_host(*args, **options).to(DEVICE)


def qkv(dtype: torch.dtype = torch.float32, v_dim: int = 12) -> list[Tensor]:
    """q with three heads, k and v with two."""
    return [heads(13, n, d, dtype, seed) for seed, (n, d) in enumerate(((3, 12), (2, 12), (2, v_dim)))]


def like(cache: Held) -> list[Tensor]:
    """Scales of every slot and head of k and of v, none of them touched."""
    return [filled(*x.shape[:-1], dtype=torch.float32) for x in (cache.key, cache.value)]


def store(way: str, tensors: list[Tensor], cache: Held, **options: Any) -> tuple[Tensor, Tensor | None]:
    scales = {name: options.pop(name) for name in ("k_scale", "v_scale", "q_scale") if name in options}
    given: dict[str, Any] = {"positions": TABLE, "rotary": ROTARY, "implementation": way, **options}
    made = cache.with_slots(torch.tensor(SLOTS, device=DEVICE), **scales)
    q, k, v = tensors
    return rotate_and_store(q, k, v, cache=made, **given)


def at(cache: Held, view: Tensor) -> Tensor:
    """Return the cells of a view of a cache that stored tokens have."""
    return torch.stack([cache.at(view, slot) for slot in SLOTS if slot >= 0]).cpu()


def of_slots(cache: Held, scales: Tensor) -> Tensor:
    """(stored, heads) scales of the tokens that are stored."""
    return at(cache, scales.unsqueeze(-1)).squeeze(-1)


def true_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as they should be stored, not divided, and how far the arithmetic may move them, in float64."""
    x = k.detach().double().cpu().numpy()
    truth, room = rotated(x, ids_of(TABLE), ROTARY), ARITHMETIC * lengths(x, ROTARY)
    return torch.from_numpy(truth)[STORED], torch.from_numpy(room)[STORED]


def assert_divided(got: Tensor, truth: Tensor, room: Any, scale: Tensor) -> None:
    """Every number is the nearest to the truth by its scale, moved by the arithmetic and that division at most."""
    scale = scale.double().cpu().unsqueeze(-1)
    room = room / scale + 2 * unit(torch.float32) * (truth / scale).abs()
    low, high = (nearest(truth / scale + sign * room, got.dtype) for sign in (-1, 1))
    assert ((got.double() >= low) & (got.double() <= high)).all()


SCALES = {"0-d": torch.tensor(0.013), "one": torch.tensor([0.013]), "by head": torch.tensor([0.004, 0.3])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_takes_k_and_v_divided_by_static_scales(name: str, way: str) -> None:
    scale = SCALES["by head"].to(DEVICE)
    cache, (q, k, v) = CACHES[name](13, 5, 2, 12, E4M3), qkv()
    q_got, k_got = store(way, [q, k, v], cache, k_scale=scale, v_scale=scale.flip(0), return_k=True)
    assert_divided(at(cache, cache.key), *true_keys(k), scale)
    assert_divided(at(cache, cache.value), v.double().cpu()[STORED], 0, scale.flip(0))
    # Nothing else has changed, and what comes back is what it is without scales.
    want = CACHES[name](13, 5, 2, 12, E4M3)
    for there, here in ((want.key, cache.key), (want.value, cache.value)):
        for slot in (slot for slot in SLOTS if slot >= 0):
            want.at(there, slot).copy_(cache.at(here, slot))
    assert_holds(cache, want)
    for got, expected in zip((q_got, k_got), apply_rotary(q, k, TABLE, ROTARY), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_rounded_once_and_beyond_the_largest_to_it(
    of: torch.dtype, dtype: torch.dtype, scale: str
) -> None:
    tensors = qkv(of, v_dim=10)
    tensors[1] *= torch.finfo(dtype).max / 100
    by = SCALES[scale].to(DEVICE)
    caches = []
    for way in WAYS:
        key, value = filled(4, 16, 2, 12, dtype=dtype), filled(4, 16, 2, 10, dtype=dtype)
        caches.append(Held(key, value, (key, value), "NHD", 16))
        store(way, tensors, caches[-1], k_scale=by, v_scale=by)
    assert_holds(caches[0], caches[1])
    truth, room = true_keys(tensors[1])
    got = at(caches[0], caches[0].key)
    assert_divided(got, truth, room, by.expand(2))
    assert (got.double().abs() == torch.finfo(dtype).max).any()
    assert_divided(at(caches[0], caches[0].value), tensors[2].double().cpu()[STORED], 0, by.expand(2))


@pytest.mark.parametrize("name", ["NHD", "HND", "all layers in a block", "a pool of slots"])
@pytest.mark.parametrize("way", WAYS)
def test_scales_are_computed_for_each_token_and_head(name: str, way: str) -> None:
    cache, (q, k, v) = CACHES[name](4, 16, 2, 12, E4M3), qkv(torch.bfloat16)
    scales = like(cache)
    store(way, [q, k, v], cache, k_scale=scales[0], v_scale=scales[1])
    truths = (true_keys(k), (v.double().cpu()[STORED], torch.zeros(())))
    for (truth, room), view, scale in zip(truths, (cache.key, cache.value), scales, strict=True):
        of_each, got = of_slots(cache, scale), at(cache, view)
        off = (of_each.double() - truth.abs().amax(-1) / 448).abs()
        assert (off <= room.max() / 448 + 2 * unit(torch.float32) * of_each).all()
        assert_divided(got, truth, room, of_each)
        assert (got.double().abs().amax(-1) == 448).all()
        assert int(scale.isnan().sum()) == scale.numel() - 2 * len(STORED)


@pytest.mark.parametrize("way", WAYS)
def test_values_without_channels_have_the_least_scale(way: str) -> None:
    cache, (q, k, v) = CACHES["NHD"](4, 16, 2, 12, E4M3), qkv(v_dim=0)
    scale, values = filled(4, 16, 2, dtype=torch.float32), cache.value[..., :0]
    store(way, [q, k, v], cache._replace(value=values), k_scale=torch.ones((), device=DEVICE), v_scale=scale)
    assert scale[~scale.isnan()].tolist() == [2.0**-100] * (2 * len(STORED))


@pytest.mark.parametrize("form", ["NHD", "HND", "pool"])
def test_all_implementations_compute_the_same_scales_and_bits(form: str) -> None:
    name = {"pool": "a pool of slots"}.get(form, form)
    for dtype in (E4M3, E5M2):
        caches = [CACHES[name](4, 16, 2, 12, dtype) for _ in WAYS]
        scales = [like(cache) for cache in caches]
        queries = [torch.empty(13, 3, device=DEVICE) for _ in WAYS]
        found = [
            store(way, qkv(), cache, k_scale=k_scale, v_scale=v_scale, q_scale=q_scale)[0]
            for way, cache, (k_scale, v_scale), q_scale in zip(WAYS, caches, scales, queries, strict=True)
        ]
        assert_same_bits(found[0], found[1])
        assert_same_bits(queries[0], queries[1])
        assert_holds(caches[0], caches[1])
        for one, other in zip(*scales, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["thd", "bshd", "bhsd"])
def test_queries_come_back_in_8_bits_with_a_scale_for_each(layout: str, way: str) -> None:
    q, k, v = qkv()
    shape = (13, 3) if layout == "thd" else (1, 13, 3) if layout == "bshd" else (1, 3, 13)
    tensors = [x if layout == "thd" else x[None] if layout == "bshd" else x[None].transpose(1, 2) for x in (q, k, v)]
    scale = torch.full(shape, torch.nan, device=DEVICE)
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    got, none = store(way, tensors, cache, q_scale=scale, layout=layout)
    assert none is None
    assert (got.dtype, got.shape) == (E4M3, tensors[0].shape)
    expected, _ = store(way, tensors, want, layout=layout)
    of_each = flat(scale.unsqueeze(-1), layout).squeeze(-1).cpu()
    truth = flat(expected, layout).double().cpu()
    assert torch.equal(of_each, (truth.abs().amax(-1) / 448).float())
    assert_divided(flat(got, layout).cpu(), truth, 0, of_each)
    assert_holds(cache, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("rotary_dim", [8, 12])
def test_a_norm_comes_before_and_every_pairing_is_stored(rotary_dim: int, pairing: Any, way: str) -> None:
    options: dict[str, Any] = {"rotary": Rotary(12, rotary_dim=rotary_dim, pairing=pairing)}
    options["norm"] = Norm(k_weight=heads(1, 1, 12, seed=9).flatten())
    q, k, v = qkv()
    plain, cache = CACHES["NHD"](4, 16, 2, 12, torch.float32), CACHES["NHD"](4, 16, 2, 12, E4M3)
    k_scale, v_scale = like(cache)
    store(way, [q, k, v], plain, **options)
    store(way, [q, k, v], cache, k_scale=k_scale, v_scale=v_scale, **options)
    truth = at(plain, plain.key).double()
    assert_divided(at(cache, cache.key), truth, 0, of_slots(cache, k_scale))
    assert torch.equal(of_slots(cache, k_scale), (truth.abs().amax(-1) / 448).float())


@pytest.mark.parametrize("way", WAYS)
def test_in_place_q_and_k_keep_their_dtype_and_the_caches_may_differ(way: str) -> None:
    key, value = filled(4, 16, 2, 12, dtype=E4M3), filled(4, 16, 2, 12, dtype=torch.float32)
    cache = Held(key, value, (key, value), "NHD", 16)
    q, k, v = qkv()
    expected, scale = apply_rotary(q, k, TABLE, ROTARY), torch.tensor(0.01, device=DEVICE)
    truth = true_keys(k)
    q_got, k_got = store(way, [q, k, v], cache, k_scale=scale, inplace=True, return_k=True)
    assert q_got is q
    assert k_got is k
    for got, want in zip((q, k), expected, strict=True):
        assert_same_bits(got, want)
    assert_divided(at(cache, key), *truth, scale.expand(2))
    assert_same_bits(at(cache, value), v.cpu()[STORED])


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("way", WAYS)
def test_heads_of_zeros_and_of_what_is_no_number_are_stored(way: str) -> None:
    q, k, v = qkv()
    v[0], v[1, 0, 3], v[2, 0, 3] = 0, torch.nan, torch.inf
    v[4] *= 1e-38
    cache = CACHES["NHD"](4, 16, 2, 12, E4M3)
    k_scale, v_scale = like(cache)
    store(way, [q, k, v], cache, k_scale=k_scale, v_scale=v_scale)
    got, scale = at(cache, cache.value).double(), of_slots(cache, v_scale)
    assert (got[0] == 0).all()
    assert (scale[0] == 2.0**-100).all()
    # NaN stays alone; what is beside an infinity is not told from zero.
    assert got[1, 0].isnan().nonzero().tolist() == [[3]]
    assert float(scale[1, 0]) == pytest.approx(float(v[1, 0].nan_to_num(0).abs().max()) / 448)
    assert float(scale[2, 0]) == torch.inf
    assert got[2, 0].isnan().nonzero().tolist() == [[3]]
    assert (got[3] == 0).all()  # token 4, below the least scale


def error_of_values(dtype: torch.dtype, kind: str, uneven: bool) -> float:
    """The error's norm, by that of 4,096 tokens of two heads of 64 normally distributed values."""
    x, channels = heads(4096, 2, 64), heads(1, 1, 64, seed=1).exp()
    x = x * channels if uneven else x
    cache, none = CACHES["NHD"](256, 16, 2, 64, dtype), CACHES["NHD"](256, 16, 2, 64, torch.float32)
    largest, by_head = torch.finfo(dtype).max, x.abs().amax((0, 2))
    kinds = {"token and head": like(cache)[1], "head": by_head / largest, "all": by_head.amax() / largest}
    scale = kinds.get(kind, torch.ones((), device=DEVICE))
    ids, slots = torch.zeros(2, 4096, dtype=torch.int32, device=DEVICE), torch.arange(4096, device=DEVICE)
    rotate_and_store(x, x, x, ids, Rotary(64), Cache(none.key, cache.value, slots, v_scale=scale))
    got, scale = cache.value.flatten(0, 1).float(), scale.flatten(0, 1) if scale.dim() == 3 else scale.expand(2)
    scale = scale.unsqueeze(-1)
    # Half a step, of the mantissa or of the least number.
    room = torch.maximum(x.abs() * torch.finfo(dtype).eps / 2, scale * torch.finfo(dtype).smallest_normal / 8)
    assert ((got * scale - x).abs() <= room * (1 + 1e-5)).all()
    return float((got * scale - x).norm() / x.norm())


@pytest.mark.parametrize(
    ("dtype", "kind", "uneven", "error"),
    [
        (E4M3, "token and head", False, 0.025),
        (E4M3, "head", False, 0.0265),
        (E4M3, "all", False, 0.0265),
        (E4M3, "1", False, 0.0265),
        (E4M3, "token and head", True, 0.0195),
        (E4M3, "head", True, 0.0265),
        (E5M2, "token and head", False, 0.05),
        (E5M2, "all", False, 0.053),
    ],
)
def test_the_error_of_8_bits_is_what_the_docs_say(dtype: torch.dtype, kind: str, uneven: bool, error: float) -> None:
    assert error_of_values(dtype, kind, uneven) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_what_autograd_has_saved_is_known_to_have_changed(way: str) -> None:
    cache = CACHES["NHD"](4, 16, 2, 12, E4M3)
    scales = [torch.ones(shape, device=DEVICE) for shape in ((4, 16, 2), (4, 16, 2), (13, 3))]
    factor = torch.zeros((), requires_grad=True, device=DEVICE)
    saved = [(factor * x).sum() for x in scales]
    store(way, qkv(), cache, k_scale=scales[0], v_scale=scales[1], q_scale=scales[2])
    for total in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
