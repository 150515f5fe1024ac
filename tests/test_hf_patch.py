"""Patched models of Transformers: logits, gradients, batches, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hf_models import CONFIGS, config_of, model_of, rotary_of, text, tokens, turned_by_hand, two_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.hf import patch, unpatch
from mmpos.rotary import DevicePositions, DynamicNTK, Linear, Llama3, LongRoPE, Rotary, YaRN, apply, operator

NAMES = sorted(CONFIGS)
DTYPES = (torch.bfloat16, torch.float32)
WAYS = ("reference", "fused")


def patched(model: Any, way: str = "reference") -> Any:
    """The model with its own rotation; "fused" is all of the way of the kernel but the kernel."""
    return patch(model, rotary_of(model), implementation="triton" if way == "fused" else "reference")


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension, which gives the same bits, in place of the kernel, which takes seconds in an interpreter."""
    monkeypatch.setattr(apply, "_chosen", lambda *_: operator.AUTO)


def as_ids(table: PositionTable) -> Tensor:
    return torch.from_numpy(table.dense().reshape(table.axes, table.num_documents, -1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_text_alone_has_the_logits_of_the_untouched_model_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, input_ids = model_of(name, dtype), tokens(2, 300)
    with torch.no_grad():
        want = model(input_ids).logits
        patch(model, rotary_of(model, precision="hf"))
        assert torch.equal(model(input_ids, mm_position_ids=text(300, 300)).logits, want)
        assert torch.equal(model(input_ids).logits, want)
        assert torch.equal(model(input_ids, mm_position_ids=None).logits, want)


@pytest.mark.parametrize("name", NAMES)
def test_images_turn_as_if_cos_and_sin_were_made_by_hand(name: str) -> None:
    model, input_ids = model_of(name), tokens(2, 24)
    table, rotary = two_rows("rope-tie-v2"), rotary_of(model)  # half-integers
    with torch.no_grad():
        untouched = model(input_ids).logits
        with turned_by_hand(model, table, rotary, 2):
            want = model(input_ids).logits
        got = patch(model, rotary)(input_ids, mm_position_ids=table).logits
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert (got - untouched).abs().max() > 0.1


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-v2"])
def test_tables_device_positions_and_dense_ids_give_the_same_bits(scheme: str) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows(scheme)
    patched(model)
    forms = [table, DevicePositions.from_table(table), as_ids(table)]
    with torch.no_grad():
        want, *others = [model(input_ids, mm_position_ids=ids).logits for ids in forms]
        embeds = model.get_input_embeddings()(input_ids)
        others.append(model(inputs_embeds=embeds, mm_position_ids=table).logits)
        others.append(model.lm_head(model.model(input_ids, None, None, mm_position_ids=table).last_hidden_state))
    assert all(torch.equal(other, want) for other in others)


def test_any_number_of_axes_and_any_allocation() -> None:
    model, input_ids = model_of("qwen3"), tokens(2, 24)
    for scheme, changes in (
        ("flatten", {"axes": 1}),
        ("mrope", {"allocation": "sections", "mrope_section": [2, 3, 3]}),
        ("vrope", {"axes": 4}),
        ("rope-tie", {"allocation": "axial"}),
    ):
        table, rotary = two_rows(scheme), rotary_of(model, **changes)
        with torch.no_grad(), turned_by_hand(model, table, rotary, 2):
            want = model(input_ids).logits
        patch(model, rotary)
        torch.testing.assert_close(model(input_ids, mm_position_ids=table).logits, want, rtol=0, atol=2e-5)
        unpatch(model)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "linear", "factor": 2.0}, Linear),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, YaRN),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            Llama3,
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicNTK),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.5] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 300,
            },
            LongRoPE,
        ),
    ],
    ids=["linear", "yarn", "llama3", "dynamic", "longrope"],
)
def test_scaled_models_keep_the_bits_of_text(rope: dict[str, Any], scaling: type) -> None:
    model = model_of("llama", rope_parameters={"rope_theta": 5e5, **rope})
    input_ids, rotary = tokens(1, 300), rotary_of(model, precision="hf")
    assert isinstance(rotary.scaling, scaling)
    with torch.no_grad():
        want = model(input_ids).logits
        assert torch.equal(patch(model, rotary)(input_ids, mm_position_ids=text(300)).logits, want)


def test_a_cursor_beyond_what_a_scaling_was_set_for_is_refused() -> None:
    model = model_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    input_ids = tokens(1, 606)
    table = place(SegmentTable.from_documents([[Text(3), Grid(20, 30), Text(3)]]))  # 606 tokens, cursor 656
    rotary = rotary_of(model)
    patch(model, rotary)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=r"go on at 656, .* want a patch with rotary.for_length\(656\)"):
            call(input_ids, mm_position_ids=table)
    unpatch(model)
    with torch.no_grad(), turned_by_hand(model, table, rotary.for_length(700), 1):
        want = model(input_ids).logits
    got = patch(model, rotary.for_length(700))(input_ids, mm_position_ids=table).logits
    torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


# Training.


def gradients(model: Any, input_ids: Tensor, **arguments: Any) -> tuple[Tensor, list[Tensor]]:
    model.train()
    model.zero_grad()
    loss = model(input_ids, labels=input_ids, **arguments).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["gemma3", "llama", "qwen3"])
def test_loss_and_gradients_are_those_of_cos_and_sin_by_hand(name: str) -> None:
    model, input_ids, table = model_of(name), tokens(2, 24), two_rows()
    rotary = rotary_of(model)
    with turned_by_hand(model, table, rotary, 2):
        want, want_gradients = gradients(model, input_ids)
    got, got_gradients = gradients(patch(model, rotary), input_ids, mm_position_ids=table)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for one, other in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_turn_again_by_the_same_positions(reentrant: bool, way: str) -> None:
    model, input_ids, table = model_of("qwen3"), tokens(2, 24), two_rows()
    patched(model, way)
    loss, want = gradients(model, input_ids, mm_position_ids=table)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model.zero_grad()
    again = model(input_ids, labels=input_ids, mm_position_ids=table, use_cache=False).loss
    model.eval()
    with torch.no_grad():  # another call comes between, with other positions
        model(input_ids, mm_position_ids=text(24, 24), use_cache=False)
    model.train()
    again.backward()
    assert torch.equal(again, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))


# Batches.


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_have_the_logits_of_their_own_runs(attention: str, way: str) -> None:
    model = model_of("llama", attn_implementation=attention)
    documents = [[Text(4), Grid(2, 3), Text(3)], [Text(1)], [Grid(2, 2), Text(6)]]
    table = place(SegmentTable.from_documents(documents))
    input_ids = tokens(1, table.num_tokens)
    patched(model, way)
    restart = torch.cat([torch.arange(n) for n in table.lengths.tolist()])[None]
    with torch.no_grad():
        packed = model(input_ids, mm_position_ids=table)
        told = model(input_ids, mm_position_ids=as_ids_of_one_row(table), position_ids=restart, use_cache=False)
        assert packed.past_key_values is None
        assert torch.equal(model(input_ids, mm_position_ids=table, position_ids=restart).logits, packed.logits)
        assert torch.equal(told.logits, packed.logits)
        for d, (start, stop) in enumerate(zip(table.cu_seqlens[:-1], table.cu_seqlens[1:], strict=True)):
            alone = model(input_ids[:, start:stop], mm_position_ids=place(SegmentTable.from_documents([documents[d]])))
            torch.testing.assert_close(packed.logits[:, start:stop], alone.logits, rtol=0, atol=1e-5)


def as_ids_of_one_row(table: PositionTable) -> Tensor:
    return torch.from_numpy(table.dense())[:, None]


def test_packed_documents_are_refused_what_would_let_them_see_each_other() -> None:
    model, table = model_of("llama"), text(4, 5)
    input_ids = tokens(1, 9)
    patched(model)
    with pytest.raises(UnsupportedError, match="use_cache: got True for packed documents"):
        model(input_ids, mm_position_ids=table, use_cache=True)
    with pytest.raises(InvalidInputError, match=r"attention_mask: got shape \(1, 9\) beside packed documents"):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(1, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    document = torch.tensor([0] * 4 + [1] * 5)
    own = (causal & (document[:, None] == document))[None, None]
    with torch.no_grad():
        got = model(input_ids, mm_position_ids=table, attention_mask=own, use_cache=False).logits
        torch.testing.assert_close(got, model(input_ids, mm_position_ids=table).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_logits_of_their_own_runs(side: Any) -> None:
    model = model_of("mistral")
    documents = [[Text(5), Grid(3, 4), Text(7)], [Text(2), Grid(2, 3), Text(1)]]
    padded = place(SegmentTable.from_documents(documents)).pad(side=side)
    ids, mask = place(SegmentTable.from_documents(documents)).padded(side=side)
    attention_mask, input_ids = torch.from_numpy(mask), tokens(2, 24)
    patched(model)
    with torch.no_grad():
        got = model(input_ids, attention_mask=attention_mask, mm_position_ids=padded).logits
        dense = model(input_ids, attention_mask=attention_mask, mm_position_ids=torch.from_numpy(ids)).logits
        assert torch.equal(got, dense)
        for row, document in enumerate(documents):
            real = attention_mask[row].bool()
            table = place(SegmentTable.from_documents([document]))
            alone = model(input_ids[row, real][None], mm_position_ids=table).logits[0]
            torch.testing.assert_close(got[row, real], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_decoding_with_a_cache_is_the_full_forward(name: str, way: str) -> None:
    model, table = model_of(name), two_rows()
    patched(model, way)
    longer = table.window([0, 1], [0, 0], [27, 27])  # the prompts and three tokens after each
    input_ids = tokens(2, 27)
    with torch.no_grad():
        whole = model(input_ids, mm_position_ids=longer).logits
        first = model(input_ids[:, :10], mm_position_ids=table.window([0, 1], [0, 0], [10, 10]))  # cuts both images
        cache, found = first.past_key_values, [first.logits]
        found.append(
            model(
                input_ids[:, 10:24], past_key_values=cache, mm_position_ids=table.window([0, 1], [10] * 2, [14] * 2)
            ).logits
        )
        for step in range(3):
            ids = table.decode(step + 1).take([step, 2 * step + 1], [step + 1, 2 * step + 2])
            found.append(model(input_ids[:, [24 + step]], past_key_values=cache, mm_position_ids=ids).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=2e-5)


# The state of a model.


def state(model: torch.nn.Module) -> list[Any]:
    """Names, attributes and the number of hooks of every module."""
    return [
        (
            name,
            sorted(vars(module)),
            [len(v) for k, v in sorted(vars(module).items()) if "hooks" in k and v is not None],
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("implementation", ["auto", "reference", "triton"])
def test_unpatch_leaves_nothing_behind(implementation: Any) -> None:
    model, input_ids = model_of("qwen2"), tokens(2, 24)
    before, want = state(model), model(input_ids).logits
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert patch(model, rotary_of(model), implementation=implementation) is model
    assert sorted(model.state_dict()) == sorted(weights)
    assert state(model) != before
    model(input_ids, mm_position_ids=two_rows())
    assert unpatch(model) is model
    assert state(model) == before
    assert torch.equal(model(input_ids).logits, want)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="mm_position_ids"):
        model.generate(input_ids, mm_position_ids=two_rows())


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_call_leaves_nothing_to_the_next(way: str) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    want = model(input_ids).logits
    patched(model, way)
    with pytest.raises(RuntimeError):
        model(input_ids, mm_position_ids=table, attention_mask=torch.ones(2, 1, 3, 3))
    assert torch.equal(model(input_ids).logits, want)
    turned = model(input_ids, mm_position_ids=table).logits
    assert torch.equal(model(input_ids).logits, want)
    assert not torch.equal(turned, want)


def test_threads_that_share_a_model_do_not_share_positions() -> None:
    model, input_ids = model_of("llama"), tokens(2, 24)
    patched(model)
    tables = [two_rows(scheme) for scheme in ("rope-tie", "rope-tie-v2", "naive-2d", "rope-tie-fractional")] * 8

    @torch.no_grad()
    def run(table: PositionTable) -> Tensor:
        return model(input_ids, mm_position_ids=table).logits

    want = [run(table) for table in tables]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(run, tables), want, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_patched_and_lead_their_own_life(copied: Callable[[Any], Any], way: str) -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    patched(model, way)
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


def test_a_model_without_its_head_and_one_with_another() -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    patched(model)
    want = model.model(input_ids, mm_position_ids=table).last_hidden_state
    unpatch(model)
    patch(model.model, rotary_of(model))
    assert torch.equal(model.model(input_ids, mm_position_ids=table).last_hidden_state, want)
    with pytest.raises(InvalidInputError, match="want the one that was"):
        unpatch(model)
    unpatch(model.model)
    classifier = AutoModelForSequenceClassification.from_config(config_of("llama"))
    patch(classifier, rotary_of(model))
    assert not torch.equal(classifier(input_ids, mm_position_ids=table).logits, classifier(input_ids).logits)


def test_autocast_decides_the_dtype() -> None:
    model, input_ids, table = model_of("llama"), tokens(2, 24), two_rows()
    patched(model)
    with torch.no_grad():
        want = model(input_ids, mm_position_ids=table).logits
        with torch.autocast("cpu", torch.bfloat16):
            got = model(input_ids, mm_position_ids=table).logits
    assert got.dtype == torch.bfloat16
    assert (got - want).abs().max() < 0.1 * want.abs().max()


# What is refused.


def test_models_and_rotaries_that_do_not_fit_are_refused() -> None:
    model = model_of("llama")
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=1, vocab_size=8))
    with pytest.raises(UnsupportedError, match="got GPT2LMHeadModel, which has no rotary_emb beside its layers"):
        patch(gpt2, Rotary(16))
    for rotary, why in (
        (Rotary(32), "rotary.head_dim: got 32, want 16 as the model has it"),
        (Rotary(16, rotary_dim=8), "rotary.rotary_dim: got 8, want 16"),
        (Rotary(16, pairing="adjacent"), "rotary.pairing: got 'adjacent', want 'half'"),
        (Rotary(16, scaling=YaRN(4.0, 128)), "rotary.attention_factor: got 1.138629.*, want 1.0"),
        ({"full_attention": Rotary(16)}, "rotary: got dict, want one Rotary"),
        ("rope", "rotary: got str, want one Rotary"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            patch(model, rotary)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="implementation: got 'cuda'"):
        patch(model, Rotary(16), implementation="cuda")  # type: ignore[arg-type]
    patch(model, Rotary(16))
    for again in (model, model.model):
        with pytest.raises(InvalidInputError, match="got one that is patched"):
            patch(again, Rotary(16))


def test_layer_types_want_a_rotary_each() -> None:
    model = model_of("gemma3")
    kinds = r"\['full_attention', 'sliding_attention'\]"
    with pytest.raises(InvalidInputError, match=f"rotary: got Rotary, want a mapping with a Rotary .* {kinds}"):
        patch(model, Rotary(16))
    with pytest.raises(InvalidInputError, match=rf"rotary: got \['full_attention'\], want .* {kinds}"):
        patch(model, {"full_attention": Rotary(16)})
    mixed = {"full_attention": Rotary(16), "sliding_attention": Rotary(16, axes=1)}
    with pytest.raises(InvalidInputError, match=r"rotary: got \[1, 2\] axes, want the same"):
        patch(model, mixed)
    mixed["sliding_attention"] = Rotary(8)
    with pytest.raises(InvalidInputError, match=r"rotary\['sliding_attention'\].head_dim: got 8, want 16"):
        patch(model, mixed)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        (torch.zeros(2, 24, dtype=torch.int64), r"got shape \(2, 24\), want \(2, 2, 24\): \(axes, batch, seq\)"),
        (torch.zeros(3, 2, 24, dtype=torch.int64), r"got shape \(3, 2, 24\), want \(2, 2, 24\)"),
        (torch.zeros(2, 2, 24), "got dtype torch.float32, want int32, int64 or float64"),
        (torch.zeros(2, 2, 24, dtype=torch.int64, device="meta"), "got a tensor on meta, want cpu"),
        ([[0] * 24] * 2, "got list, want a PositionTable, DevicePositions or a tensor of ids"),
        (text(24), "got 24 tokens, want 48 in 2 rows of 24"),
        (text(20, 28), "got documents of unequal numbers of tokens, want 24, the length of a row: pad the table"),
        (text(16, 16, 16), "got documents of 16 tokens, want 24"),
        (place(SegmentTable.from_documents([[Text(24)]] * 2), "flatten"), "got 1 axes, want 2"),
    ],
    ids=range(9),
)
def test_ids_that_do_not_fit_the_call_are_refused(ids: Any, why: str) -> None:
    model = model_of("llama")
    patched(model)
    with pytest.raises(InvalidInputError, match=f"mm_position_ids: {why}"):
        model(tokens(2, 24), mm_position_ids=ids)


def test_positions_need_tokens() -> None:
    model = model_of("llama")
    patched(model)
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match="mm_position_ids: got neither input_ids nor inputs_embeds"):
            call(mm_position_ids=two_rows())


def test_a_model_that_loses_arguments_says_so() -> None:
    model = model_of("llama")
    patched(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "mm_turns"}), with_kwargs=True
        )
    with pytest.raises(UnsupportedError, match="got LlamaModel, which hands no arguments of others to its layers"):
        model(tokens(2, 24), mm_position_ids=two_rows())
