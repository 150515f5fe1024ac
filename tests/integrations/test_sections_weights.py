"""Permuted weights give an engine the same attention as the model, and the inverse permutation restores them."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from refusals import assert_refused
from sections_engine import EngineRotary
from tolerance import assert_within, gamma, rounding
from torch import Tensor, nn

import mmpos
import mmpos.rotary
from mmpos import Grid, SegmentTable, Text
from mmpos.integrations.sections import Sections, install_cache, permute_qk, request_positions
from mmpos.rotary import Rotary

HEADS, KV_HEADS, WIDTH = 4, 2, 24
ROTARY = Rotary(head_dim=12, rotary_dim=8, theta=100.0)
LAYER = "model.layers.0.self_attn."
ORDER = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11])


def layer(prefix: str = LAYER, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = {"q_proj": 12 * HEADS, "k_proj": 12 * KV_HEADS, "v_proj": 12 * KV_HEADS}
    weights = {f"{prefix}{name}.weight": torch.randn(n, WIDTH, generator=generator) for name, n in rows.items()}
    weights |= {f"{prefix}{name}.bias": torch.randn(n, generator=generator) for name, n in rows.items()}
    weights |= {f"{prefix}{name}_norm.weight": torch.rand(12, generator=generator) for name in "qk"}
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def sorted_rows(x: Tensor) -> Tensor:
    """Return the rows of every head in the new order."""
    return x.unflatten(0, (-1, 12))[:, ORDER].flatten(0, 1)


def attention(x: Tensor, weights: dict[str, Tensor], rotate: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> Tensor:
    """Compute causal grouped-query attention with q and k norms; ``rotate`` rotates (tokens, heads, 12)."""
    q, k, v = (
        nn.functional.linear(x, weights[f"{LAYER}{name}_proj.weight"], weights[f"{LAYER}{name}_proj.bias"]).unflatten(
            -1, (-1, 12)
        )
        for name in "qkv"
    )
    q, k = (
        nn.functional.rms_norm(y, (12,), weights[f"{LAYER}{name}_norm.weight"], 1e-6)
        for name, y in (("q", q), ("k", k))
    )
    q, k = rotate(q, k)
    q, k, v = (y.transpose(0, 1) for y in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def rotate_as_model(positions: mmpos.PositionTable, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Rotate as the model does, pair j by axis j mod 2, in float64."""
    cos, sin = (table.double().view(-1, 1, 4) for table in mmpos.rotary.cos_sin(ROTARY, positions))
    return tuple(
        torch.cat([x[..., :4] * cos - x[..., 4:8] * sin, x[..., 4:8] * cos + x[..., :4] * sin, x[..., 8:]], dim=-1)
        for x in (q, k)
    )


def test_an_engines_attention_on_sorted_weights_equals_that_of_the_model() -> None:
    positions = mmpos.place(SegmentTable.from_documents([[Text(3), Grid(3, 4), Text(5), Grid(2, 2), Text(1)]]))
    x = torch.randn(positions.num_tokens, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    sections = Sections(ROTARY, 64, permuted=True)
    module = EngineRotary(12, 8, 64, 100.0, True, [0, 2, 2])
    install_cache(module, sections)
    ids, _ = request_positions(positions, sections)
    weights = layer()

    def model() -> Tensor:
        return attention(x, weights, lambda q, k: rotate_as_model(positions, q, k))

    want = model()
    got = attention(x, permute_qk(layer(), ROTARY), lambda q, k: module(ids, q, k))
    assert_within(got, want, rounding(model, [x, *weights.values()]))
    without = attention(x, layer(), lambda q, k: module(ids, q, k))
    assert (without - want).abs().max() > 0.1


def test_rows_of_q_and_k_are_sorted_and_all_other_tensors_are_unchanged() -> None:
    weights = {"model.embed_tokens.weight": torch.ones(3), **layer()}
    before = {name: tensor.clone() for name, tensor in weights.items()}
    got = permute_qk(weights, ROTARY)
    assert list(got) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(tensor, before[name])
        if re.search("[qk]_norm", name):
            assert torch.equal(got[name], tensor[ORDER])
        elif re.search("[qk]_proj", name):
            assert torch.equal(got[name], sorted_rows(tensor))
        else:
            assert got[name] is tensor


def test_an_iterator_is_lazy_and_the_inverse_restores_the_weights() -> None:
    weights, loaded = layer(), []

    def loading() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            loaded.append(name)
            yield name, tensor

    pairs = permute_qk(loading(), ROTARY)
    assert loaded == []
    assert next(pairs)[0] == loaded[-1]
    assert len(loaded) == 1
    rotary = Rotary(head_dim=12)  # its permutation is not its own inverse
    back = permute_qk(permute_qk(weights, rotary), rotary, inverse=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("fused", ["grouped", "stacked"])
def test_q_and_k_of_a_fused_projection_are_sorted_and_v_is_not(fused: str) -> None:
    weights = layer()
    q, k, v = (weights[f"{LAYER}{name}_proj.weight"] for name in "qkv")

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fused == "stacked":
            return torch.cat([q, k, v])
        groups = zip(q.chunk(KV_HEADS), k.chunk(KV_HEADS), v.chunk(KV_HEADS), strict=True)
        return torch.cat([part for group in groups for part in group])

    name = "model.layers.3.self_attn.qkv_proj.weight"
    got = permute_qk({name: joined(q, k, v)}, ROTARY, num_heads=HEADS, num_kv_heads=KV_HEADS, fused=fused)  # type: ignore[call-overload]
    assert torch.equal(got[name], joined(sorted_rows(q), sorted_rows(k), v))


def test_an_adapter_for_q_alone_is_sorted_like_its_base() -> None:
    base = layer()[f"{LAYER}q_proj.weight"]
    name = f"base_model.model.{LAYER}q_proj."
    a, b = torch.randn(3, WIDTH).double(), torch.randn(12 * HEADS, 3).double()
    magnitude = torch.rand(12 * HEADS)
    adapter = {
        f"{name}lora_A.weight": a,
        f"{name}lora_B.default.weight": b,
        f"{name}lora_B.default.bias": b[:, 0],
        f"{name}lora_magnitude_vector.default.weight": magnitude,
    }
    got = permute_qk(adapter, ROTARY)
    assert got[f"{name}lora_A.weight"] is a
    sorted_b = got[f"{name}lora_B.default.weight"]
    # The two sides of the comparison compute the rows in different orders.
    bound = 2 * gamma(4, torch.float64) * sorted_rows(abs(base) + abs(b) @ abs(a))
    assert_within(sorted_rows(base) + sorted_b @ a, sorted_rows(base + b @ a), bound)
    assert torch.equal(got[f"{name}lora_B.default.bias"], sorted_b[:, 0])
    assert torch.equal(got[f"{name}lora_magnitude_vector.default.weight"], sorted_rows(magnitude))


def test_per_row_scales_are_sorted_like_their_rows_and_a_scalar_scale_is_unchanged() -> None:
    weights = layer()
    q = weights[f"{LAYER}q_proj.weight"].to(torch.float8_e4m3fn)
    scale, one = torch.rand(12 * HEADS, 1), torch.tensor(0.5)
    weights |= {
        f"{LAYER}q_proj.weight": q,
        f"{LAYER}q_proj.weight_scale": scale,
        f"{LAYER}k_proj.weight_scale": torch.rand(12 * KV_HEADS, 1),
        f"{LAYER}q_proj.input_scale": one,
    }
    got = permute_qk(weights, ROTARY)
    assert torch.equal(got[f"{LAYER}q_proj.weight"].float(), sorted_rows(q.float()))
    assert torch.equal(got[f"{LAYER}q_proj.weight_scale"], sorted_rows(scale))
    assert got[f"{LAYER}q_proj.input_scale"] is one


def test_norms_with_per_head_weights_are_sorted_within_each_head() -> None:
    per_head, flat = torch.rand(HEADS, 12), torch.rand(12 * HEADS)
    names = ("model.layers.0.self_attn.query_layernorm.weight", "model.layers.0.self_attn.key_layernorm.weight")
    got = permute_qk(dict(zip(names, (per_head, flat), strict=True)), ROTARY)
    assert torch.equal(got[names[0]], per_head[:, ORDER])
    assert torch.equal(got[names[1]], sorted_rows(flat))


UNKNOWN = (
    "got an unknown tensor of shape (12,), which may hold channels of q or k; pass norms= to sort it like a norm, or "
    "leave= if its channels are not rotated"
)


IN_ATTENTION = ["per_dim_scale", "norm.weight"]  # refused because they are next to q_proj


@pytest.mark.parametrize(
    "name", ["q_ln.weight", "norm_q.weight", "k_layer_norm.weight", "qk_norm.weight", "query_rms.scale", *IN_ATTENTION]
)
@pytest.mark.parametrize("first", [False, True])
def test_an_unknown_tensor_of_q_or_k_is_refused_unless_norms_or_leave_matches(name: str, first: bool) -> None:
    norm = {f"{LAYER}{name}": torch.rand(12)}
    weights = {**norm, **layer()} if first else {**layer(), **norm}
    assert_refused(f"{LAYER}{name}: {UNKNOWN}", lambda: permute_qk(weights, ROTARY))
    part = re.escape(name)
    permuted = permute_qk(weights, ROTARY, norms=part)
    assert torch.equal(permuted[f"{LAYER}{name}"], norm[f"{LAYER}{name}"][ORDER])
    left = permute_qk(weights, ROTARY, leave=part)
    assert left[f"{LAYER}{name}"] is norm[f"{LAYER}{name}"]
    for got in (permuted, left):
        assert torch.equal(got[f"{LAYER}q_proj.weight"], sorted_rows(weights[f"{LAYER}q_proj.weight"]))
    back = permute_qk(permuted, ROTARY, norms=part, inverse=True)
    assert all(torch.equal(back[key], tensor) for key, tensor in weights.items())


def test_tensors_without_whole_heads_and_known_parts_of_attention_are_passed_through() -> None:
    others = {
        f"{LAYER}{name}": torch.rand(shape)
        for name, shape in {
            "o_proj.weight": (WIDTH, 12 * HEADS),
            "v_norm.weight": (12,),
            "g_proj.weight": (12 * HEADS, WIDTH),
            "sinks": (12,),
            "k_scale": (),
            "q_lambda": (HEADS,),
            "rotary_emb.inv_freq": (12,),
        }.items()
    }
    others |= {"model.layers.0.mlp.up_proj.weight": torch.rand(36, WIDTH), "model.norm.weight": torch.rand(WIDTH)}
    permuted = permute_qk({**layer(), **others}, ROTARY)
    assert all(permuted[name] is tensor for name, tensor in others.items())


@pytest.mark.parametrize("tower", ["audio_tower.", "model.visual.", "thinker.vision_model.encoder.", "vit."])
def test_towers_are_sorted_only_if_names_matches_them(tower: str) -> None:
    weights = {**layer(f"{tower}layers.0.attn."), **layer()}
    got = permute_qk(weights, ROTARY)
    name = f"{tower}layers.0.attn.q_proj.weight"
    assert got[name] is weights[name]
    named = permute_qk(weights, ROTARY, names=re.escape(tower))
    assert torch.equal(named[name], sorted_rows(weights[name]))
    assert named[f"{LAYER}q_proj.weight"] is weights[f"{LAYER}q_proj.weight"]


Q, OUTPUT = f"{LAYER}q_proj.", f"{LAYER}o_proj.weight"
FUSED = {"a.qkv_proj.weight": torch.ones(96, 2)}
GATED = {**layer(), f"{Q}weight": torch.ones(24 * HEADS, WIDTH), OUTPUT: torch.ones(WIDTH, 12 * HEADS)}
NONE = "weights: got no q_proj, k_proj or qkv_proj of a language model, want at least one; see names"
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    (NONE, {}, {}),
    (NONE, {"visual.q_proj.weight": torch.ones(12)}, {}),
    ("weights: got a.q_proj.weight without a.k_proj.weight, want both", {"a.q_proj.weight": torch.ones(12)}, {}),
    ("weights: got a.k_norm.weight without a.q_norm.weight, want both", {"a.k_norm.weight": torch.ones(12)}, {}),
    ("weights: got a.key_layernorm.weight without a.query_l", {"a.key_layernorm.weight": torch.ones(12)}, {}),
    ("a.q_proj.weight: got 18 rows, want a multiple of head_dim 12", {"a.q_proj.weight": torch.ones(18)}, {}),
    ("a.q_norm.weight: got 18 rows, want a multiple of head_dim 12", {"a.q_norm.weight": torch.ones(12, 18)}, {}),
    (f"{Q}weight: got 96 rows for 48 columns of o_proj, want no gates in q_proj", GATED, {}),
    *(
        (f"{Q}{leaf}: got {each.dtype} {tuple(each.shape)}, want weights with a row per", {f"{Q}{leaf}": each}, {})
        for leaf, each in (
            ("qweight", torch.ones(6, 48, dtype=torch.int32)),
            ("weight", torch.ones(48, 6, dtype=torch.int8)),
            ("weight_scale", torch.ones(12, 2)),
        )
    ),
    ("weights: got Identity, want a mapping, or", nn.Identity(), {}),
    ("weights: got str, want a mapping, or", "model.safetensors", {}),
    ("a.q_proj.weight: got list, want a tensor", {"a.q_proj.weight": [1.0]}, {}),
    ("a.qkv_proj.weight requires num_heads and num_kv_heads to separate q, k and v", FUSED, {}),
    ("a.qkv_proj.weight: got 96 rows, want 120 for q, k", FUSED, {"num_heads": 6, "num_kv_heads": 2}),
    ("num_heads: got 5, want a multiple of num_kv_heads 2", FUSED, {"num_heads": 5, "num_kv_heads": 2}),
    ("num_kv_heads: got None, want an integer", FUSED, {"num_heads": 6}),
    ("fused: got 'packed', want one of 'stacked', 'grouped'", FUSED, {"fused": "packed"}),
    ("names: got '(', want a regular expression", FUSED, {"names": "("}),
    ("norms: got '[', want a regular expression", FUSED, {"norms": "["}),
    ("leave: got 1, want a regular expression", FUSED, {"leave": 1}),
    ("inverse: got 1, want True or False", FUSED, {"inverse": 1}),
]


@pytest.mark.parametrize(("message", "weights", "options"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_weights_and_options_are_refused(message: str, weights: Any, options: dict[str, Any]) -> None:
    assert_refused(message, lambda: permute_qk(weights, ROTARY, **options), mmpos.MmposError)
