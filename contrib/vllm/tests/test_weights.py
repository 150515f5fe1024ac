"""The channels of q and k are sorted in every tensor that has them, and the inverse permutation restores them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mmpos_vllm import permute_qk
from torch import Tensor, nn

from mmpos import MmposError
from mmpos.rotary import Rotary

HEADS, KV_HEADS, WIDTH = 4, 2, 24
ROTARY = Rotary(head_dim=12, rotary_dim=8, theta=100.0)
LAYER = "model.layers.0.self_attn."
ORDER = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11])


def layer(prefix: str = LAYER) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rows = {"q_proj": 12 * HEADS, "k_proj": 12 * KV_HEADS, "v_proj": 12 * KV_HEADS}
    weights = {f"{prefix}{name}.weight": torch.randn(n, WIDTH, generator=generator) for name, n in rows.items()}
    weights |= {f"{prefix}{name}.bias": torch.randn(n, generator=generator) for name, n in rows.items()}
    return weights | {f"{prefix}{name}_norm.weight": torch.rand(12, generator=generator) for name in "qk"}


def sorted_rows(x: Tensor) -> Tensor:
    """Return the rows of every head in the new order."""
    return x.unflatten(0, (-1, 12))[:, ORDER].flatten(0, 1)


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


def test_an_adapter_for_q_alone_is_sorted_like_its_base() -> None:
    name = f"base_model.model.{LAYER}q_proj."
    a, b = torch.randn(3, WIDTH), torch.randn(12 * HEADS, 3)
    magnitude = torch.rand(12 * HEADS)
    adapter = {
        f"{name}lora_A.weight": a,
        f"{name}lora_B.default.weight": b,
        f"{name}lora_B.default.bias": b[:, 0],
        f"{name}lora_magnitude_vector.default.weight": magnitude,
    }
    got = permute_qk(adapter, ROTARY)
    assert got[f"{name}lora_A.weight"] is a
    assert torch.equal(got[f"{name}lora_B.default.weight"], sorted_rows(b))
    assert torch.equal(got[f"{name}lora_B.default.bias"], sorted_rows(b[:, 0]))
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
    "got an unknown tensor of shape (12,), which may hold channels of q or k; split it if it holds both, pass norms= "
    "to sort it like a norm, or leave= if its channels are not rotated"
)


IN_ATTENTION = ["per_dim_scale", "norm.weight"]  # refused because they are next to q_proj


NAMES = ["qkv_proj.weight", "q_proj_x.weight", "query_proj.weight", "q_ln.weight", "norm_q.weight", "query_rms.scale"]


@pytest.mark.parametrize("name", [*NAMES, "k_layer_norm.weight", "qk_norm.weight", *IN_ATTENTION])
@pytest.mark.parametrize("first", [False, True])
def test_an_unknown_tensor_of_q_or_k_is_refused_unless_norms_or_leave_matches(name: str, first: bool) -> None:
    norm = {f"{LAYER}{name}": torch.rand(12)}
    weights = {**norm, **layer()} if first else {**layer(), **norm}
    with pytest.raises(MmposError, match=f"^{re.escape(f'{LAYER}{name}: {UNKNOWN}')}"):
        permute_qk(weights, ROTARY)
    part = re.escape(name)
    permuted = permute_qk(weights, ROTARY, norms=part)
    assert torch.equal(permuted[f"{LAYER}{name}"], norm[f"{LAYER}{name}"][ORDER])
    left = permute_qk(weights, ROTARY, leave=part)
    assert left[f"{LAYER}{name}"] is norm[f"{LAYER}{name}"]
    for got in (permuted, left):
        assert torch.equal(got[f"{LAYER}q_proj.weight"], sorted_rows(weights[f"{LAYER}q_proj.weight"]))
    back = permute_qk(permuted, ROTARY, norms=part, inverse=True)
    assert all(torch.equal(back[key], tensor) for key, tensor in weights.items())


def test_towers_and_tensors_that_hold_no_channels_of_q_or_k_are_passed_through() -> None:
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
    for tower in ("audio_tower.", "model.visual.", "thinker.vision_model.encoder.", "vit."):
        others |= layer(f"{tower}layers.0.attn.")
    others |= {"model.layers.0.mlp.up_proj.weight": torch.rand(36, WIDTH), "model.norm.weight": torch.rand(WIDTH)}
    permuted = permute_qk({**layer(), **others}, ROTARY)
    assert all(permuted[name] is tensor for name, tensor in others.items())


Q, OUTPUT = f"{LAYER}q_proj.", f"{LAYER}o_proj.weight"
GATED = {**layer(), f"{Q}weight": torch.ones(24 * HEADS, WIDTH), OUTPUT: torch.ones(WIDTH, 12 * HEADS)}
NONE = "weights: got no q_proj or k_proj of a language model, want at least one"
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
    ("norms: got '[', want a regular expression", {}, {"norms": "["}),
    ("leave: got 1, want a regular expression", {}, {"leave": 1}),
    ("inverse: got 1, want True or False", {}, {"inverse": 1}),
]


@pytest.mark.parametrize(("message", "weights", "options"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_weights_and_options_are_refused(message: str, weights: Any, options: dict[str, Any]) -> None:
    with pytest.raises(MmposError, match=f"^{re.escape(message)}"):
        permute_qk(weights, ROTARY, **options)
