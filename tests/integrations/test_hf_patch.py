"""Patched models: the logits and gradients of manual cos and sin, in every way; state between calls, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hf_models import (
    CONFIGS,
    OTHERS,
    WAYS,
    as_ids,
    by_hand,
    config_of,
    gradients,
    model_of,
    patched,
    rotary_of,
    text,
    tokens,
    two_rows,
)
from refusals import assert_refused
from tolerance import assert_within, rounding
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from mmpos import Grid, InvalidInputError, MmposError, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.hf import patch, unpatch
from mmpos.rotary import DevicePositions, Rotary, YaRN, kernel

NAMES = sorted(CONFIGS)
DTYPES = (torch.bfloat16, torch.float32)


@torch.no_grad()
def text_logits(model: Any, input_ids: Tensor) -> Tensor:
    """Assert that patching does not change the logits of text, bit for bit, and return them."""
    want: Tensor = model(input_ids).logits
    patch(model, rotary_of(model, precision="hf"))
    assert torch.equal(model(input_ids, mm_position_ids=text(*[input_ids.shape[1]] * len(input_ids))).logits, want)
    return want


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in NAMES),
        ("gemma3", torch.float32),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in OTHERS),
    ],
    ids=str,
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, input_ids = model_of(name, dtype), tokens(2, 120)
    want = text_logits(model, input_ids)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, want)
        assert torch.equal(model(input_ids, mm_position_ids=None).logits, want)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_images_have_the_same_logits_as_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids = model_of(name), tokens(2, 24)
    table, rotary = two_rows("rope-tie-v2"), rotary_of(model)  # half-integers
    with torch.no_grad():
        untouched = model(input_ids).logits
        want, bound = by_hand(model, table, rotary, lambda: model(input_ids).logits)
        assert (want - untouched).abs().max() > 0.01 * untouched.abs().max()
        for way in ("reference",) if name == "phi" else WAYS:  # Phi rotates only half of its channels
            got = patched(model, way)(input_ids, mm_position_ids=table).logits
            assert_within(got, want, bound)
            unpatch(model)


@pytest.mark.parametrize(("embedding", "states"), [DTYPES, DTYPES[::-1]], ids=str)
def test_cos_and_sin_have_the_dtype_of_the_hidden_states_rather_than_the_weights(
    embedding: torch.dtype, states: torch.dtype
) -> None:
    model, input_ids = model_of("llama", states), tokens(1, 24)
    model.model.embed_tokens.to(embedding)
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: output.to(states))
    text_logits(model, input_ids)


def test_positions_follow_the_dtype_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert text_logits(model_of("llama"), tokens(2, 24)).dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_heads_with_separate_axes_rotate_by_positions(implementation: Any) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    heads = model.config.num_key_value_heads

    def logits(**allocation: Any) -> Tensor:
        patch(model, rotary_of(model, axes=2, **allocation), implementation=implementation)
        with torch.no_grad():
            out: Tensor = model(input_ids, mm_position_ids=table).logits
        unpatch(model)
        return out

    with torch.no_grad():
        bound = rounding(lambda: model(input_ids).logits, model.parameters())
    columns = logits(allocation="heads", head_axes=[1] * heads)
    assert_within(columns, logits(allocation=[1] * (rotary_of(model).num_pairs)), bound)
    assert (logits(allocation="heads", head_axes=[0, 1] * (heads // 2)) - columns).abs().max() > 0.01


def test_axes_and_allocations_give_the_same_logits_as_manual_cos_and_sin() -> None:
    model, input_ids = model_of("qwen3"), tokens(2, 24)
    for scheme, changes in (
        ("flatten", {"axes": 1}),
        ("mrope", {"allocation": "sections", "mrope_section": [2, 3, 3]}),
        ("vrope", {"axes": 4}),
        ("rope-tie", {"allocation": "axial"}),
    ):
        table, rotary = two_rows(scheme), rotary_of(model, **changes)
        with torch.no_grad():
            want, bound = by_hand(model, table, rotary, lambda: model(input_ids).logits)
            assert_within(patch(model, rotary)(input_ids, mm_position_ids=table).logits, want, bound)
        unpatch(model)


LENGTHS = {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn", "factor": 4.0, **LENGTHS}, {"rope_type": "dynamic", "factor": 2}]
)
def test_text_has_the_same_logits_as_in_the_unpatched_model_with_rope_scaling(rope: dict[str, object]) -> None:
    model = model_of("llama", rope_parameters={"rope_theta": 5e5, **rope})
    assert rotary_of(model).scaling is not None
    text_logits(model, tokens(1, 300))


def test_a_next_position_beyond_the_length_of_a_scaled_rotary_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, input_ids = model_of("llama", rope_parameters=rope, max_position_embeddings=64), tokens(1, 60)
    table = place(SegmentTable.from_documents([[Text(3), Grid(6, 9), Text(3)]]))  # 60 tokens; the next position is 75
    rotary = rotary_of(model)
    patch(model, rotary)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=r"got next position 75, .* a patch with rotary.for_length\(75\)"):
            call(input_ids, mm_position_ids=table)
    unpatch(model)
    want, bound = by_hand(model, table, rotary.for_length(80), lambda: model(input_ids).logits)
    got = patch(model, rotary.for_length(80))(input_ids, mm_position_ids=table).logits
    assert_within(got, want, bound)


# Training.


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_loss_and_gradients_equal_those_with_manual_cos_and_sin(name: str) -> None:
    model, input_ids, table = model_of(name), tokens(2, 24), two_rows()
    rotary = rotary_of(model)
    want, bounds = by_hand(model, table, rotary, lambda: gradients(model, input_ids))
    assert_within(gradients(patch(model, rotary), input_ids, mm_position_ids=table), want, bounds)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_use_the_positions_of_their_own_call(reentrant: bool, way: str) -> None:
    model, input_ids, table = patched("qwen3", way), tokens(2, 24), two_rows()
    loss, *want = gradients(model, input_ids, mm_position_ids=table)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.train()
    model.zero_grad()
    checkpointed = model(input_ids, labels=input_ids, mm_position_ids=table, use_cache=False).loss
    model.eval()
    with torch.no_grad():  # call with other positions before the backward pass
        model(input_ids, mm_position_ids=text(24, 24), use_cache=False)
    model.train()
    checkpointed.backward()
    assert torch.equal(checkpointed, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))


# Compilation.


@pytest.fixture
def reset_dynamo() -> None:
    torch._dynamo.reset()


FUSED = pytest.param(DevicePositions.from_table, "fused", marks=pytest.mark.slow)


@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize(("form", "way"), [(as_ids, "reference"), FUSED])
def test_a_forward_pass_compiles_to_one_graph_with_the_logits_of_eager_mode(form: Any, way: str) -> None:
    model, input_ids, table = patched("llama", way), tokens(2, 24), two_rows()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=table, use_cache=False).logits
        got = compiled(input_ids, mm_position_ids=form(table), use_cache=False).logits
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("reset_dynamo")
@pytest.mark.parametrize("form", [as_ids, DevicePositions.from_table])
def test_different_lengths_share_graphs(form: Any) -> None:
    model, counter = patched(model_of("llama", num_hidden_layers=1)), CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)

    @torch.no_grad()
    def logits(call: Any, height: int) -> Tensor:
        rows = SegmentTable.from_documents([[Text(3), Grid(height, 4), Text(2)]] * 2)
        ids = form(place(rows, "rope-tie-v2"))
        out: Tensor = call(tokens(2, 5 + 4 * height), mm_position_ids=ids, use_cache=False).logits
        return out

    for height in (3, 5, 8, 150):  # the last height requires several blocks of cos and sin
        bound = rounding(partial(logits, model, height), model.parameters(), 5 + 4 * height)
        assert_within(logits(compiled, height), logits(model, height), bound)
    assert counter.frame_count <= 3


# The kernel runs in Triton's interpreter if there is no GPU.


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which each launch of the kernel appends the shape of q."""
    shapes: list[tuple[int, ...]] = []
    original = kernel.launch_rotate

    def launch(q: Tensor, *args: Any, **kwargs: Any) -> None:
        shapes.append(tuple(q.shape))
        original(q, *args, **kwargs)

    monkeypatch.setattr(kernel, "launch_rotate", launch)
    return shapes


def test_the_kernel_replaces_the_rotation_of_the_model_and_auto_uses_it_only_on_a_gpu(
    launches: list[tuple[int, ...]],
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, input_ids = model_of("llama", num_hidden_layers=1).to(device), tokens(1, 5).to(device)
    other = model_of("llama", num_hidden_layers=1).to(device)
    automatic = patch(copy.deepcopy(other), rotary_of(other), implementation="auto")
    table = place(SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(2)]]), "rope-tie-v2")
    rotary = rotary_of(model)
    want, bounds = by_hand(model, table, rotary, lambda: gradients(model, input_ids))
    patch(model, rotary, implementation="triton")
    untouched = other(input_ids).logits
    automatic(input_ids, mm_position_ids=table)
    assert launches == [(1, 5, 4, 16)] * (device == "cuda")
    launches.clear()
    got = gradients(model, input_ids, mm_position_ids=table)
    assert launches == [(1, 5, 4, 16)] * 2  # forward and backward use the same kernel
    assert_within(got, want, bounds)
    assert torch.equal(model(input_ids).logits, untouched)
    assert torch.equal(other(input_ids).logits, untouched)
    assert len(launches) == 2


def state(model: torch.nn.Module) -> list[Any]:
    """Return the name, the attributes and the hook counts of every module."""
    return [
        (
            name,
            sorted(vars(module)),
            [len(v) for k, v in sorted(vars(module).items()) if "hooks" in k and v is not None],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("implementation", ["auto", "reference", "triton"])
def test_unpatch_restores_the_model(implementation: Any) -> None:
    model, input_ids = model_of("qwen2"), tokens(2, 24)
    before, want = state(model), model(input_ids).logits
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert patch(model, rotary_of(model), implementation=implementation) is model
    assert sorted(model.state_dict()) == sorted(weights)
    assert state(model) != before
    has_triton = find_spec("triton") is not None
    replaced = "forward" in vars(model.model.layers[0].self_attn)
    assert replaced == (implementation == "triton" or (implementation == "auto" and has_triton))
    model(input_ids[:1, :4], mm_position_ids=text(4))
    assert unpatch(model) is model
    assert state(model) == before
    assert torch.equal(model(input_ids).logits, want)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="mm_position_ids"):
        model.generate(input_ids, mm_position_ids=two_rows())


def test_a_forward_set_by_other_code_is_not_replaced() -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    want = patched(model)(input_ids, mm_position_ids=table).logits
    unpatch(model)
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward  # as hooks that offload weights do
    before = state(model)
    with pytest.raises(UnsupportedError, match=r"got LlamaAttention\.forward set on the instance"):
        patch(model, rotary_of(model), implementation="triton")
    assert state(model) == before
    patch(model, rotary_of(model), implementation="auto")
    assert torch.equal(model(input_ids, mm_position_ids=table).logits, want)
    unpatch(model)
    assert "forward" in vars(attention)


def test_unpatch_refuses_to_remove_a_forward_set_by_other_code() -> None:
    model = model_of("llama")
    patch(model, rotary_of(model), implementation="triton")
    attention = model.model.layers[1].self_attn
    ours, attention.forward = attention.forward, lambda *args, **kwargs: None
    before = state(model)
    with pytest.raises(InvalidInputError, match=r"got LlamaAttention.forward that was replaced after patch"):
        unpatch(model)
    assert state(model) == before
    attention.forward = ours
    unpatch(model)


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_call_does_not_affect_the_next(way: str) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    want = model(input_ids).logits
    patched(model, way)
    with pytest.raises(RuntimeError):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(2, 1, 3, 3))
    assert torch.equal(model(input_ids).logits, want)
    with_positions = model(input_ids, mm_position_ids=table).logits
    assert torch.equal(model(input_ids).logits, want)
    assert not torch.equal(with_positions, want)


def test_threads_that_share_a_model_use_their_own_positions() -> None:
    model, input_ids = patched("llama"), tokens(2, 24)
    tables = [two_rows(scheme) for scheme in ("rope-tie", "rope-tie-v2", "naive-2d", "rope-tie-fractional")] * 3

    @torch.no_grad()
    def run(table: PositionTable) -> Tensor:
        return model(input_ids, mm_position_ids=table).logits

    want = [run(table) for table in tables]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(run, tables), want, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_patched_and_independent(copied: Callable[[Any], Any], way: str) -> None:
    model, input_ids, table = patched("llama", way), tokens(2, 24), two_rows()
    want = model(input_ids, mm_position_ids=table).logits
    other = copied(model)
    assert torch.equal(other(input_ids, mm_position_ids=table).logits, want)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
        other.lm_head.weight.zero_()
    assert not torch.equal(other(input_ids, mm_position_ids=table).logits, want)
    assert other.generate(input_ids, mm_position_ids=table, max_new_tokens=2)[:, -2:].eq(0).all()
    unpatch(other)
    assert torch.equal(model(input_ids, mm_position_ids=table).logits, want)


def test_models_without_a_head_or_with_a_different_head_can_be_patched() -> None:
    model, input_ids, table = patched("llama"), tokens(2, 24), two_rows()
    want = model.model(input_ids, mm_position_ids=table).last_hidden_state
    unpatch(model)
    patch(model.model, rotary_of(model))
    assert torch.equal(model.model(input_ids, mm_position_ids=table).last_hidden_state, want)
    with pytest.raises(InvalidInputError, match="want the patched module"):
        unpatch(model)
    unpatch(model.model)
    classifier = AutoModelForSequenceClassification.from_config(config_of("llama"))
    patch(classifier, rotary_of(model))
    assert not torch.equal(classifier(input_ids, mm_position_ids=table).logits, classifier(input_ids).logits)


# Errors.


MINICPM3 = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
UNLIKE: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("granite_swa", "GraniteSWAForCausalLM", {"layer_rope_theta": [1e4, 5e5]}, "has 3 modules of type GraniteSWARotar"),
    ("minicpm3", "MiniCPM3ForCausalLM", MINICPM3, "has no head_dim in the self_attn of layer 0"),
    ("beam", "BeamForCausalLM", {}, "does not rotate its layers of type 'full_attention'"),
)


def test_unsupported_models_and_rotaries_are_refused() -> None:
    model, layered, kinds = model_of("llama"), model_of("gemma3"), ("full_attention", "sliding_attention")
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=8))
    ours, want = Rotary(16), f"want a mapping from each layer type of {[*kinds]} to a Rotary"
    cases: tuple[tuple[Any, Any, str], ...] = (
        (gpt2, ours, "model: got GPT2LMHeadModel, which has no rotary_emb next to its layers"),
        (model_of("cohere"), ours, "model: got 'cohere', which has pairing 'adjacent', want pairing 'half'"),
        *((model_of(name, **changes), ours, f"model: got {kind}, which {why}") for name, kind, changes, why in UNLIKE),
        (model, Rotary(32), "rotary.head_dim: got 32, want 16 as in the model"),
        (model, Rotary(16, rotary_dim=8), "rotary.rotary_dim: got 8, want 16"),
        (model, Rotary(16, pairing="adjacent"), "rotary.pairing: got 'adjacent', want 'half'"),
        (model, Rotary(16, scaling=YaRN(4.0, 128)), "rotary.attention_factor: got 1.138629"),
        (model, {"full_attention": ours}, "rotary: got dict, want one Rotary"),
        (model, "rope", "rotary: got str, want one Rotary"),
        (layered, ours, f"rotary: got Rotary, {want}"),
        (layered, {"full_attention": ours}, f"rotary: got ['full_attention'], {want}"),
        (layered, dict(zip(kinds, (ours, Rotary(16, axes=1)), strict=True)), "rotary: got [1, 2] axes, want the same"),
        (
            layered,
            dict(zip(kinds, (ours, Rotary(8)), strict=True)),
            "rotary['sliding_attention'].head_dim: got 8, want",
        ),
    )
    for other, rotary, message in cases:
        assert_refused(message, partial(patch, other, rotary), MmposError)
    wrong: Any = "cuda"
    assert_refused("implementation: got 'cuda'", lambda: patch(model, ours, implementation=wrong))
    patch(model, ours)
    for again in (model, model.model):
        assert_refused("model: got a patched model", partial(patch, again, ours))


@pytest.mark.parametrize("way", WAYS)
def test_cos_and_sin_of_an_unexpected_shape_are_refused(way: str) -> None:
    model = patched(model_of("gpt_oss", num_local_experts=2), way)
    with pytest.raises(UnsupportedError, match=r"got cos of shape \(1, 24, 8\) in GptOssAttention, want \(batch"):
        model(tokens(2, 24), mm_position_ids=two_rows())


PARTLY: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
APART = "which does not rotate q and k in one call"
NO_KERNEL: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("phi3", {"rope_parameters": PARTLY}, "8 of 16 channels, want 'reference'"),
    ("gemma3n_text", {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "intermediate_size": [96] * 2},
     f"Gemma3nTextAttention, {APART}"),
    ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 2, "rotary_dim": 16},
     f"MiniMaxM3VLAttention, {APART}"),  # the indexer receives cos and sin as well
)  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), NO_KERNEL)
def test_the_kernel_is_refused_for_models_that_do_not_rotate_all_of_q_and_k_in_one_call(
    name: str, changes: Any, message: str
) -> None:
    model = model_of(name, **changes)
    kernel = partial(patch, model, implementation="triton")
    got = f"implementation: got 'triton' for {message}"
    assert_refused(got, lambda: kernel(rotary_of(model)), MmposError)
    if name == "phi3":
        by_heads = rotary_of(model, allocation="heads", head_axes=[0, 1])
        assert_refused("rotary: got head_axes, want the same axes", lambda: patch(model, by_heads), MmposError)
    patch(model, rotary_of(model), implementation="auto")
    assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)


def test_invalid_positions_in_a_call_are_refused() -> None:
    model, ids = patched("llama"), torch.zeros(3, 2, 24, dtype=torch.int64)
    for positions, message in (
        (ids[0], "got shape (2, 24), want (2, 2, 24): (axes, batch, seq)"),
        (ids, "got shape (3, 2, 24), want (2, 2, 24)"),
        (ids[:2].float(), "got dtype torch.float32, want int32, int64 or float64"),
        (ids[:2].to("meta"), "got a tensor on meta, want cpu"),
        ([[0] * 24] * 2, "got list, want a PositionTable, DevicePositions or a tensor of ids"),
        (text(24), "got 24 tokens, want 48 in 2 rows of 24"),
        (text(20, 28), "got documents of unequal numbers of tokens, want 24, the length of a row; pad the table"),
        (text(16, 16, 16), "got documents of 16 tokens, want 24"),
        (place(SegmentTable.from_documents([[Text(24)]] * 2), "flatten"), "got 1 axis, want 2"),
    ):
        assert_refused(f"mm_position_ids: {message}", partial(model, tokens(2, 24), mm_position_ids=positions))


def test_positions_require_tokens_and_an_argument_of_their_own() -> None:
    model = patched("llama")
    for table, name in ((two_rows(), "PositionTable"), (DevicePositions.from_table(two_rows()), "DevicePositions")):
        with pytest.raises(InvalidInputError, match=f"position_ids: got {name}, want it in mm_position_ids"):
            model(tokens(2, 24), position_ids=table)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match="mm_position_ids requires input_ids or inputs_embeds, got neither"):
            call(mm_position_ids=two_rows())


def test_a_model_that_drops_extra_arguments_is_refused() -> None:
    model = patched("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "mm_rotations"}),
            with_kwargs=True,
        )
    with pytest.raises(UnsupportedError, match="got LlamaModel, which does not forward extra keyword arguments"):
        model(tokens(2, 24), mm_position_ids=two_rows())
