"""rotate_and_store with 8-bit caches: caches and scales are compared with float64 and the nearest 8-bit numbers."""

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
    """Return random q, k or v on the device."""
    return heads_on_host(*args, **options).to(DEVICE)


def qkv(dtype: torch.dtype = torch.float32, v_dim: int = 12) -> list[Tensor]:
    """Return q with three heads, and k and v with two."""
    return [heads(13, n, d, dtype, seed) for seed, (n, d) in enumerate(((3, 12), (2, 12), (2, v_dim)))]


def like(cache: Held) -> list[Tensor]:
    """Return unwritten k scales and v scales for every slot and head."""
    return [filled(*x.shape[:-1], dtype=torch.float32) for x in (cache.key, cache.value)]


def store(way: str, tensors: list[Tensor], cache: Held, **options: Any) -> tuple[Tensor, Tensor | None]:
    scales = {name: options.pop(name) for name in ("k_scale", "v_scale", "q_scale") if name in options}
    arguments: dict[str, Any] = {"positions": TABLE, "rotary": ROTARY, "implementation": way, **options}
    q, k, v = tensors
    return rotate_and_store(q, k, v, cache=cache.with_slots(torch.tensor(SLOTS, device=DEVICE), **scales), **arguments)


def at(cache: Held, view: Tensor) -> Tensor:
    """Return the rows of all stored tokens in a view of a cache."""
    return torch.stack([cache.at(view, slot) for slot in SLOTS if slot >= 0]).cpu()


def of_slots(cache: Held, scales: Tensor) -> Tensor:
    """Return the (stored, heads) scales of all stored tokens."""
    return at(cache, scales.unsqueeze(-1)).squeeze(-1)


def true_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact float64 keys before division, and the error bound of the arithmetic."""
    x = k.detach().double().cpu().numpy()
    truth, bound = rotated(x, ids_of(TABLE), ROTARY), ARITHMETIC * lengths(x, ROTARY)
    return torch.from_numpy(truth)[STORED], torch.from_numpy(bound)[STORED]


def assert_divided(got: Tensor, truth: Tensor, bound: Any, scale: Tensor) -> None:
    """Assert that every number is the nearest to truth / scale, up to the errors of the arithmetic and the division."""
    scale = scale.double().cpu().unsqueeze(-1)
    bound = bound / scale + 2 * unit(torch.float32) * (truth / scale).abs()
    low, high = (nearest(truth / scale + sign * bound, got.dtype) for sign in (-1, 1))
    assert ((got.double() >= low) & (got.double() <= high)).all()


SCALES = {"0-d": torch.tensor(0.013), "one": torch.tensor([0.013]), "per head": torch.tensor([0.004, 0.3])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_stores_k_and_v_divided_by_static_scales(name: str, way: str) -> None:
    scale = SCALES["per head"].to(DEVICE)
    cache, (q, k, v) = CACHES[name](13, 5, 2, 12, E4M3), qkv()
    q_got, k_got = store(way, [q, k, v], cache, k_scale=scale, v_scale=scale.flip(0), return_k=True)
    assert_divided(at(cache, cache.key), *true_keys(k), scale)
    assert_divided(at(cache, cache.value), v.double().cpu()[STORED], 0, scale.flip(0))
    # Nothing else has changed, and returned q and k do not depend on scales.
    want = CACHES[name](13, 5, 2, 12, E4M3)
    for target, view in ((want.key, cache.key), (want.value, cache.value)):
        for slot in (slot for slot in SLOTS if slot >= 0):
            want.at(target, slot).copy_(cache.at(view, slot))
    assert_holds(cache, want)
    for got, expected in zip((q_got, k_got), apply_rotary(q, k, TABLE, ROTARY), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("qkv_dtype", "dtype", "scale"),
    [
        (torch.float32, E4M3, "0-d"),
        (torch.float32, E5M2, "per head"),
        (torch.bfloat16, E4M3, "per head"),
        (torch.bfloat16, E5M2, "one"),
        (torch.float16, E4M3, "one"),
        (torch.float16, E5M2, "0-d"),
    ],
)  # each 8-bit dtype with each dtype of q, k and v, and with each scale
def test_every_dtype_is_rounded_once_and_saturates(qkv_dtype: torch.dtype, dtype: torch.dtype, scale: str) -> None:
    tensors = qkv(qkv_dtype, v_dim=10)
    tensors[1] *= torch.finfo(dtype).max / 100
    divisor = SCALES[scale].to(DEVICE)
    caches = []
    for way in WAYS:
        key, value = filled(4, 16, 2, 12, dtype=dtype), filled(4, 16, 2, 10, dtype=dtype)
        caches.append(Held(key, value, (key, value), "NHD", 16))
        store(way, tensors, caches[-1], k_scale=divisor, v_scale=divisor)
    assert_holds(caches[0], caches[1])
    got = at(caches[0], caches[0].key)
    assert_divided(got, *true_keys(tensors[1]), divisor.expand(2))
    assert (got.double().abs() == torch.finfo(dtype).max).any()
    assert_divided(at(caches[0], caches[0].value), tensors[2].double().cpu()[STORED], 0, divisor.expand(2))


@pytest.mark.parametrize("name", ["NHD", "HND", "all layers in a block", "a pool of slots"])
@pytest.mark.parametrize("way", WAYS)
def test_scales_are_computed_for_each_token_and_head(name: str, way: str) -> None:
    cache, (q, k, v) = CACHES[name](4, 16, 2, 12, E4M3), qkv(torch.bfloat16)
    scales = like(cache)
    store(way, [q, k, v], cache, k_scale=scales[0], v_scale=scales[1])
    truths = (true_keys(k), (v.double().cpu()[STORED], torch.zeros(())))
    for (truth, bound), view, scale in zip(truths, (cache.key, cache.value), scales, strict=True):
        computed, got = of_slots(cache, scale), at(cache, view)
        error = (computed.double() - truth.abs().amax(-1) / 448).abs()
        assert (error <= bound.max() / 448 + 2 * unit(torch.float32) * computed).all()
        assert_divided(got, truth, bound, computed)
        assert (got.double().abs().amax(-1) == 448).all()
        assert int(scale.isnan().sum()) == scale.numel() - 2 * len(STORED)


@pytest.mark.parametrize("way", WAYS)
def test_values_without_channels_get_the_smallest_scale(way: str) -> None:
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
        outs = [
            store(way, qkv(), cache, k_scale=k_scale, v_scale=v_scale, q_scale=q_scale)[0]
            for way, cache, (k_scale, v_scale), q_scale in zip(WAYS, caches, scales, queries, strict=True)
        ]
        assert_same_bits(outs[0], outs[1])
        assert_same_bits(queries[0], queries[1])
        assert_holds(caches[0], caches[1])
        for one, other in zip(*scales, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["thd", "bshd", "bhsd"])
def test_queries_are_returned_in_8_bits_with_one_scale_per_token_and_head(layout: str, way: str) -> None:
    q, k, v = qkv()
    shape = (13, 3) if layout == "thd" else (1, 13, 3) if layout == "bshd" else (1, 3, 13)
    tensors = [x if layout == "thd" else x[None] if layout == "bshd" else x[None].transpose(1, 2) for x in (q, k, v)]
    scale = torch.full(shape, torch.nan, device=DEVICE)
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    got, none = store(way, tensors, cache, q_scale=scale, layout=layout)
    assert none is None
    assert (got.dtype, got.shape) == (E4M3, tensors[0].shape)
    expected, _ = store(way, tensors, want, layout=layout)
    computed = flat(scale.unsqueeze(-1), layout).squeeze(-1).cpu()
    truth = flat(expected, layout).double().cpu()
    assert torch.equal(computed, (truth.abs().amax(-1) / 448).float())
    assert_divided(flat(got, layout).cpu(), truth, 0, computed)
    assert_holds(cache, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("rotary_dim", [8, 12])
def test_normalised_keys_of_every_pairing_are_stored(rotary_dim: int, pairing: Any, way: str) -> None:
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
def test_q_and_k_in_place_keep_their_dtype_and_caches_may_have_different_dtypes(way: str) -> None:
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


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")  # numpy in the interpreter
@pytest.mark.parametrize("way", WAYS)
def test_heads_with_only_zeros_and_heads_with_nan_or_infinity_are_stored(way: str) -> None:
    q, k, v = qkv()
    v[0], v[1, 0, 3], v[2, 0, 3] = 0, torch.nan, torch.inf
    v[4] *= 1e-38
    cache = CACHES["NHD"](4, 16, 2, 12, E4M3)
    k_scale, v_scale = like(cache)
    store(way, [q, k, v], cache, k_scale=k_scale, v_scale=v_scale)
    got, scale = at(cache, cache.value).double(), of_slots(cache, v_scale)
    assert (got[0] == 0).all()
    assert (scale[0] == 2.0**-100).all()
    # NaN does not affect other channels; infinity makes the other channels of its head zero.
    assert got[1, 0].isnan().nonzero().tolist() == [[3]]
    assert float(scale[1, 0]) == pytest.approx(float(v[1, 0].nan_to_num(0).abs().max()) / 448)
    assert float(scale[2, 0]) == torch.inf
    assert got[2, 0].isnan().nonzero().tolist() == [[3]]
    assert (got[3] == 0).all()  # token 4, below the smallest scale


def error_of_values(dtype: torch.dtype, kind: str, uneven: bool) -> float:
    """Return the relative error norm for 4,096 tokens with two heads of 64 normally distributed values."""
    x, channels = heads(4096, 2, 64), heads(1, 1, 64, seed=1).exp()
    x = x * channels if uneven else x
    cache, none = CACHES["NHD"](256, 16, 2, 64, dtype), CACHES["NHD"](256, 16, 2, 64, torch.float32)
    largest, of_heads = torch.finfo(dtype).max, x.abs().amax((0, 2))
    kinds = {"token and head": like(cache)[1], "head": of_heads / largest, "all": of_heads.amax() / largest}
    scale = kinds.get(kind, torch.ones((), device=DEVICE))
    ids, slots = torch.zeros(2, 4096, dtype=torch.int32, device=DEVICE), torch.arange(4096, device=DEVICE)
    rotate_and_store(x, x, x, ids, Rotary(64), Cache(none.key, cache.value, slots, v_scale=scale))
    got, scale = cache.value.flatten(0, 1).float(), scale.flatten(0, 1) if scale.dim() == 3 else scale.expand(2)
    scale = scale.unsqueeze(-1)
    # Half the spacing of normal or subnormal numbers.
    bound = torch.maximum(x.abs() * torch.finfo(dtype).eps / 2, scale * torch.finfo(dtype).smallest_normal / 8)
    assert ((got * scale - x).abs() <= bound * (1 + 1e-5)).all()
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
def test_the_error_of_8_bit_values_is_as_documented(dtype: torch.dtype, kind: str, uneven: bool, error: float) -> None:
    assert error_of_values(dtype, kind, uneven) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_autograd_detects_that_saved_scales_were_overwritten(way: str) -> None:
    cache = CACHES["NHD"](4, 16, 2, 12, E4M3)
    scales = [torch.ones(shape, device=DEVICE) for shape in ((4, 16, 2), (4, 16, 2), (13, 3))]
    factor = torch.zeros((), requires_grad=True, device=DEVICE)
    saved = [(factor * x).sum() for x in scales]
    store(way, qkv(), cache, k_scale=scales[0], v_scale=scales[1], q_scale=scales[2])
    for total in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
