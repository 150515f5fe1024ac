"""Unpatched models of Transformers on packs of ours: losses and gradients are those of the documents one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_models import CONFIGS, examples_of, noise, tiny_config, tiny_images, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

import mmpos
from mmpos.data import ModelCollator, PackedCollator, PaddedCollator, ProcessedInputs
from mmpos.data.examples import IGNORE_INDEX, Example, Location
from mmpos.data.model_inputs import MODEL_INPUTS
from mmpos.errors import UnsupportedError
from mmpos.integrations.models import MODEL_TYPES

HALF = torch.finfo(torch.float32).eps ** 0.5
"""Half of the digits: sums in another order change the last ones, a token that sees too much the first."""

FULL = {"layer_types": ["full_attention"] * 2}
"""Layers of Qwen3.5, whose others need kernels of a GPU to keep documents apart."""

Result = tuple[Tensor, dict[str, Tensor]]


def trained(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> Result:
    """The sum of the losses of all tokens, and the gradient of each weight."""
    model.zero_grad()
    total = model(**inputs).loss * (labels[:, 1:] != IGNORE_INDEX).sum()
    total.backward()
    return total.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def one_by_one(model: Any, documents: list[dict[str, Any]]) -> Result:
    """The same of documents by themselves, whose positions the model makes."""
    loss, gradients = torch.zeros(()), dict[str, Tensor]()
    for inputs in documents:
        more, new = trained(model, inputs, inputs["labels"])
        loss = loss + more
        gradients |= {name: gradients.get(name, torch.zeros(())) + each for name, each in new.items()}
    return loss, gradients


def assert_same(got: Result, want: Result) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=HALF, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, expected in want[1].items():
        torch.testing.assert_close(got[1][name], expected, rtol=0, atol=HALF * float(expected.abs().max()), msg=name)


def alone(collator: ModelCollator, example: Example) -> dict[str, Any]:
    """What a processor of the model would give for one document."""
    arguments = collator([example])
    names = ("input_ids", "labels", "mm_token_type_ids", "moe_mm_token_type_ids", "pixel_values", "image_grid_thw")
    return {name: arguments[name] for name in names if name in arguments}


def with_images(model_type: str) -> tuple[Any, ModelCollator, list[Example]]:
    """A config, a collator for its model, and documents with and without images."""
    config = tiny_config(model_type, **(FULL if model_type.startswith("qwen3_5") else {}))
    settings = mmpos.from_hf_config(config)
    images = tiny_images(settings)
    builder = mmpos.SequenceBuilder(images=images, scheme=settings.scheme, markers=settings.markers)
    documents: list[list[Any]] = [
        ["see ", noise(16, 24), " so"],
        ["text"],
        [noise(8, 8, 1), "b", noise(32, 16, 2), "cc"],
    ]
    return config, ModelCollator(settings, images), examples_of(builder, *documents)


IMAGE_TYPES = sorted(name for name, inputs in MODEL_INPUTS.items() if inputs.images)
QUICK = "qwen3_vl"


@pytest.mark.parametrize(
    "model_type", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in IMAGE_TYPES if name != QUICK)]
)
def test_a_pack_with_images_trains_as_its_documents_do(model_type: str) -> None:
    config, collator, examples = with_images(model_type)
    model, pack = tiny_model(config), collator(examples)
    assert config.text_config.use_cache, "what would let documents see each other"
    want = one_by_one(model, [alone(collator, example) for example in examples])
    assert_same(trained(model, pack, pack["labels"]), want)


def test_a_model_sees_the_pixels_of_a_batch_that_is_told_the_model() -> None:
    config, collator, (first, *_) = with_images("qwen2_5_vl")
    settings = mmpos.from_hf_config(config)
    builder = mmpos.SequenceBuilder(images=collator.images, scheme=settings.scheme, markers=settings.markers)
    (other,) = examples_of(builder, ["see ", noise(16, 24, 5), " so"])
    model = tiny_model(config)
    with torch.no_grad():
        one, two = (float(model(**PackedCollator()([each]).as_dict(model=collator)).loss) for each in (first, other))
        want = float(model(**alone(collator, first)).loss)
    assert one == pytest.approx(want, rel=HALF)
    assert one != pytest.approx(two, rel=HALF)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_INPUTS.keys() - set(IMAGE_TYPES)))
def test_a_pack_of_text_trains_as_its_documents_do(model_type: str) -> None:
    layer_type = "sliding_attention" if model_type.startswith("gemma3") else None
    config = tiny_config(model_type, num_hidden_layers=1)
    settings = mmpos.from_hf_config(config, layer_type=layer_type)
    collator = ModelCollator(settings)
    examples = examples_of(mmpos.SequenceBuilder(scheme="flatten"), ["one"], ["the second"], ["3rd"])
    model, pack = tiny_model(config), collator(examples)
    want = one_by_one(model, [alone(collator, example) for example in examples])
    assert_same(trained(model, pack, pack["labels"]), want)


def test_padded_rows_train_as_their_documents_do() -> None:
    config, packed, examples = with_images("qwen2_5_vl")
    collator = ModelCollator(packed.settings, packed.images, PaddedCollator(side="left"))
    model, rows = tiny_model(config), collator(examples)
    want = one_by_one(model, [alone(packed, example) for example in examples])
    assert_same(trained(model, rows, rows["labels"]), want)


def by_bounds(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any) -> Any:
    """Attention as FlashAttention has it: by the bounds of documents, whatever the positions are."""
    lengths = {name: options[name].diff().tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    assert max(lengths["cu_seq_lens_q"]) == options["max_length_q"]
    assert max(lengths["cu_seq_lens_k"]) == options["max_length_k"]
    is_causal = options.get("is_causal")
    causal = module.is_causal if is_causal is None else is_causal
    heads = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(heads, dim=1) for each in (key, value))
    parts = [each.split(lengths["cu_seq_lens_k"], 2) for each in (query, key, value)]
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    out = [attention(*qkv, is_causal=causal, scale=options["scaling"]) for qkv in zip(*parts, strict=True)]
    return torch.cat(out, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llama"])
def test_an_attention_that_reads_bounds_keeps_documents_apart(model_type: str) -> None:
    AttentionInterface.register("flash_by_bounds", by_bounds)
    AttentionMaskInterface.register("flash_by_bounds", flash_attention_mask)
    if model_type == "llama":
        config = tiny_config(model_type)
        collator = ModelCollator(mmpos.from_hf_config(config))
        examples = examples_of(mmpos.SequenceBuilder(scheme="flatten"), ["one"], ["the second"])
    else:
        config, collator, examples = with_images(model_type)
    model, pack = tiny_model(config), collator(examples)
    want = one_by_one(model, [alone(collator, example) for example in examples])
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_by_bounds"  # its setter would load kernels of this name
    assert_same(trained(model, pack, pack["labels"]), want)


def processed(model_type: str, seed: int) -> dict[str, Any]:
    """What a processor gives for a document with an image, a video and another image."""
    rng = np.random.default_rng(seed)
    frames = 3
    apart = model_type == "qwen3_vl"
    image, video = [302, *[300] * 6, 303], [302, *[301] * 4, 303]
    text = rng.integers(3, 200, 7).tolist()
    videos = [each for f in range(frames) for each in (*text[: 1 + f], *video)] if apart else [302, *[301] * 12, 303]
    ids = [*text, *image, *text, *videos, *text[:2], 302, *[300] * 2, 303, *text]
    grids = {"image_grid_thw": [[1, 4, 6], [1, 2, 4]], "video_grid_thw": [[frames, 4, 4]]}
    rows = {"pixel_values": 24 + 8, "pixel_values_videos": 48}
    pixels = {name: torch.from_numpy(rng.standard_normal((n, 96), np.float32)) for name, n in rows.items()}
    seconds = {"second_per_grid_ts": torch.tensor([0.5])} if model_type == "qwen2_5_vl" else {}
    tokens = torch.tensor([ids])
    types = (tokens == 300).int() + 2 * (tokens == 301).int()
    labels = torch.where(types > 0, IGNORE_INDEX, tokens)
    named = {name: torch.tensor(grid) for name, grid in grids.items()}
    return {"input_ids": tokens, "labels": labels, "mm_token_type_ids": types, **named, **pixels, **seconds}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_pack_of_what_a_processor_gave_trains_as_its_documents_do(model_type: str) -> None:
    config = tiny_config(model_type)
    settings = mmpos.from_hf_config(config)
    records = [processed(model_type, seed) for seed in range(2)]
    examples = [ProcessedInputs(settings)(each, Location("processed", i)) for i, each in enumerate(records)]
    model, pack = tiny_model(config), ModelCollator(settings)(examples)
    assert_same(trained(model, pack, pack["labels"]), one_by_one(model, records))


def test_layers_without_attention_refuse_to_mix_documents_where_their_kernels_are_missing() -> None:
    _, collator, examples = with_images("qwen3_5")
    config = tiny_config("qwen3_5", layer_types=["linear_attention", "full_attention"])
    pack = collator(examples)
    assert pack["seq_idx"].tolist() == [[document for document, each in enumerate(examples) for _ in each.labels]]
    with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
        tiny_model(config)(**pack)


def test_models_that_mix_documents_are_refused_and_all_others_are_known() -> None:
    assert MODEL_INPUTS.keys() < MODEL_TYPES.keys()
    assert {name for name, inputs in MODEL_INPUTS.items() if inputs.text_row} == {
        name for name in MODEL_INPUTS if MODEL_TYPES[name].scheme.startswith("mrope")
    }
    settings = mmpos.from_hf_config(CONFIGS["gpt_oss"]())
    with pytest.raises(
        UnsupportedError, match=r"^settings.model_type: got 'gpt_oss', .* want one of cohere, deepseek_vl"
    ):
        ModelCollator(settings)
    model = tiny_model(tiny_config("gpt_oss"))
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    with torch.no_grad():
        both, second = (model(ids[:, n:], position_ids=positions[:, n:], use_cache=False).logits for n in (0, 2))
    assert (both[:, 2:] - second).abs().max() > HALF * second.abs().max(), "once it keeps them apart, it can be known"
