"""Recorded keys of Transformers models are at the right positions with chunks, caches, padding and packing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mmpos.analysis.probe import KeyRecorder
from mmpos.analysis.probe import transformers as keys_of
from mmpos.errors import InvalidInputError, UnsupportedError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from cache_name import CACHE  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    kind = transformers.CONFIG_MAPPING[name]
    sizes = {key: size for key, size in SIZES.items() if not isinstance(getattr(kind, key, None), property)}
    config = kind(**sizes | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def rotated(reference: npt.NDArray[np.float32], positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Rotate a (kv_heads, 16) key to positions: its halves form complex numbers, turned by position·10000^(-pair/8)."""
    number = reference[:, :8].astype(np.float64) + 1j * reference[:, 8:]
    angle = np.asarray(positions)[..., None, None] * 10000.0 ** (-np.arange(8) / 8)
    number = number * np.exp(1j * angle)
    return np.concatenate([number.real, number.imag], axis=-1)


def assert_at(layers: Any, positions: npt.ArrayLike) -> None:
    """Check that every layer's keys are its reference rotated to these (batch, tokens) positions."""
    assert [layer.layer for layer in layers] == [0, 1]
    for layer in layers:
        np.testing.assert_allclose(layer.keys, rotated(layer.reference, positions), atol=1e-5)
        assert np.abs(layer.reference).max() > 1e-3


IDS = torch.randint(1, 64, (1, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_keys_equal_the_reference_rotated_to_their_positions(name: str, attention: str) -> None:
    model = model_of(name)
    model.set_attn_implementation(attention)
    assert_at(keys_of(model, {"input_ids": IDS}), [range(7)])


@pytest.mark.parametrize("static", [False, True])
def test_each_chunk_continues_where_the_previous_one_ended(static: bool) -> None:
    model = model_of("llama")
    first: dict[str, Any] = {"input_ids": IDS[:, :4]}
    if static:
        first[CACHE] = transformers.StaticCache(config=model.config, max_cache_len=16)
    assert_at(keys_of(model, first, {"input_ids": IDS[:, 4:6]}, {"input_ids": IDS[:, 6:]}), [range(7)])


def test_a_chunk_requires_the_cache_of_the_previous_one() -> None:
    first = {"input_ids": IDS[:, :4], "use_cache": False}
    with pytest.raises(UnsupportedError, match=r"^model: got an output without a cache, want a cache for the next "):
        keys_of(model_of("llama"), first, {"input_ids": IDS[:, 4:]})
    assert_at(keys_of(model_of("llama"), first), [range(4)])


def test_generated_tokens_follow_the_prompt() -> None:
    assert_at(keys_of(model_of("llama"), {"input_ids": IDS}, generate=4), [range(10)])


def test_left_padded_and_packed_rows_have_the_ids_that_the_model_uses() -> None:
    model = model_of("llama")
    ids, mask = IDS.repeat(2, 1), torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    padded = keys_of(model, {"input_ids": ids, "attention_mask": mask}, generate=2)
    # Transformers starts counting at the first token after the padding.
    assert_at([type(layer)(layer.layer, layer.keys[1:, 3:], layer.reference) for layer in padded], [range(5)])
    packed = [[0, 1, 2, 0, 1, 2, 3]]
    assert_at(keys_of(model, {"input_ids": IDS, "position_ids": torch.tensor(packed)}), packed)


def test_the_zero_embedding_of_padding_is_not_used_as_the_hidden_state() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), IDS[:, :5]], dim=1)
    call = {"input_ids": padded, "attention_mask": (padded > 0).long(), "position_ids": torch.arange(7)[None]}
    assert_at(keys_of(model, call), [range(7)])


def test_a_norm_after_the_rotation_leaves_no_reference() -> None:
    layers = keys_of(model_of("hunyuan_v1_dense"), {"input_ids": IDS})
    assert [layer.reference for layer in layers] == [None, None]
    assert layers[0].keys.shape == (1, 7, 2, 16)


def test_calls_without_a_cache_are_recorded() -> None:
    model = model_of("llama")
    with KeyRecorder(model) as recorder, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert_at(recorder.layers, [range(7)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_recomputed_in_the_backward_pass_are_recorded_once(reentrant: bool) -> None:
    model = model_of("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with KeyRecorder(model) as recorder:
        model(IDS).logits.sum().backward()
        assert len(calls) == 2
        assert_at(recorder.layers, [range(7)])
        model(IDS[:, :4])
    assert_at(recorder.layers, [[*range(7), *range(4)]])


@pytest.mark.parametrize(
    ("name", "sizes", "rotary"),
    [
        ("gpt_neox", {"rotary_pct": 1.0}, {}),
        ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8}, {"rotary_dim": 8, "pairing": "adjacent"}),
        ("falcon", {}, {}),
    ],
)
def test_a_cache_named_layer_past_is_recorded(name: str, sizes: dict[str, Any], rotary: dict[str, Any]) -> None:
    from mmpos.analysis.probe import read
    from mmpos.rotary import Rotary

    model = model_of(name, **sizes)
    layers = keys_of(model, {"input_ids": IDS[:, :4]}, {"input_ids": IDS[:, 4:]})
    ids = [read(layer.keys[0], Rotary(16, axes=1, **rotary)).position_ids.tolist() for layer in layers]
    assert ids == [[list(range(7))]] * 2
    assert [layer.reference is None for layer in layers] == [name != "gptj"] * 2


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_passed_by_the_argument_name_that_the_model_uses(name: str) -> None:
    class Attention(torch.nn.Linear):  # type: ignore[misc,name-defined]
        layer_idx = 0

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(8, 8)

        def forward(self, states: Any, use_cache: bool, **cached: Any) -> dict[str, Any]:
            cache = cached.setdefault(name, transformers.DynamicCache())
            self.attention(states, **{name: cache})
            return {name: cache}

    def forward(self: Any, hidden_states: Any, cache: Any) -> None:
        key = torch.nn.Linear.forward(self, hidden_states)[:, None]
        cache.update(key + cache.get_seq_length(), key, 0)

    Attention.forward = (
        forward if name == "cache" else lambda self, states, past_key_values: forward(self, states, past_key_values)
    )
    states = torch.ones(1, 2, 8)
    (layer,) = keys_of(Model(), {"states": states}, {"states": states}, {"states": states})
    assert (layer.keys - layer.keys[:, :1])[0, :, 0, 0].tolist() == pytest.approx([0, 0, 2, 2, 4, 4])


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_its_cache_are_restored(fails: bool) -> None:
    model = model_of("llama")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    product = model.model.layers[1].self_attn.o_proj
    names = [set(vars(module)) for module in model.modules()] + [set(vars(cache))]
    if fails:  # in the attention of the second layer
        model.model.layers[1].self_attn.o_proj = torch.nn.Linear(3, 3)
        with pytest.raises(RuntimeError):
            keys_of(model, {"input_ids": IDS, CACHE: cache})
        model.model.layers[1].self_attn.o_proj = product
    else:
        keys_of(model, {"input_ids": IDS, CACHE: cache})
    assert [set(vars(module)) for module in model.modules()] + [set(vars(cache))] == names
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_invalid_arguments_are_refused() -> None:
    model = model_of("llama")
    with pytest.raises(InvalidInputError, match=r"^calls: got 0, want 1 or more$"):
        keys_of(model)
    with pytest.raises(InvalidInputError, match=r"^calls: got 2, want 1 with generate$"):
        keys_of(model, {"input_ids": IDS}, {"input_ids": IDS}, generate=1)
    with pytest.raises(UnsupportedError, match=r"^model: got Linear, want a model with attention that takes a cache$"):
        keys_of(torch.nn.Linear(1, 1), {})
    wrong: Any = "x"
    with pytest.raises(InvalidInputError, match=r"^model: got str, want a Module, as returned by from_pretrained"):
        keys_of(wrong, {"input_ids": IDS})
    with pytest.raises(InvalidInputError, match=r"^calls\[1\]: got str, want a Mapping, as returned by a processor$"):
        keys_of(model, {"input_ids": IDS}, wrong)
