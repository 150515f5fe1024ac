"""Unpatched Transformers models on packed batches: losses and gradients equal those of the separate documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import OLDER
from refusals import assert_refused
from torch import Tensor
from training_models import CONFIGS, examples_of, noise, tiny_config, tiny_images, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, Glm4vProcessor
from transformers.masking_utils import flash_attention_mask

import mmpos
from mmpos.data import ModelCollator, PaddedCollator, ProcessedInputs, model_inputs
from mmpos.data.examples import IGNORE_INDEX, Example, Location
from mmpos.data.model_inputs import MODEL_INPUTS
from mmpos.errors import UnsupportedError
from mmpos.integrations.models import MODEL_TYPES

HALF = torch.finfo(torch.float32).eps ** 0.5
"""Half of the digits: summing in another order changes the last digits; attending to another document changes the first
ones.
"""

FULL = {"layer_types": ["full_attention"] * 2}
"""Layer types of Qwen3.5 that separate documents without GPU kernels."""

Result = tuple[Tensor, dict[str, Tensor]]


def trained(model: Any, inputs: Mapping[str, Any], labels: Tensor) -> Result:
    """Return the loss summed over all tokens, and the gradient of each weight."""
    model.zero_grad()
    total = model(**inputs).loss * (labels[:, 1:] != IGNORE_INDEX).sum()
    total.backward()
    return total.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def one_by_one(model: Any, documents: list[dict[str, Any]]) -> Result:
    """Return the summed losses and gradients of separate documents, whose positions the model computes itself."""
    loss, gradients = torch.zeros(()), dict[str, Tensor]()
    for inputs in documents:
        document_loss, document_gradients = trained(model, inputs, inputs["labels"])
        loss = loss + document_loss
        gradients |= {name: gradients.get(name, torch.zeros(())) + each for name, each in document_gradients.items()}
    return loss, gradients


def assert_same(got: Result, want: Result) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=HALF, atol=0)
    assert got[1].keys() == want[1].keys()
    for name, expected in want[1].items():
        # A key bias does not change attention, so its gradient is 0 up to rounding.
        scale = want[1][name.replace("k_proj.bias", "k_proj.weight")].abs().max()
        torch.testing.assert_close(got[1][name], expected, rtol=0, atol=HALF * float(scale), msg=name)


def assert_trained_apart(model: Any, pack: Mapping[str, Any], documents: list[dict[str, Any]]) -> None:
    """Assert that a pack has the loss and gradients of its documents."""
    assert_same(trained(model, pack, pack["labels"]), one_by_one(model, documents))


def alone(collator: ModelCollator, example: Example) -> dict[str, Any]:
    """Return the inputs of one document as the model's processor would return them."""
    arguments = collator([example])
    names = ("input_ids", "labels", "mm_token_type_ids", "moe_mm_token_type_ids", "pixel_values", "image_grid_thw")
    return {name: arguments[name] for name in names if name in arguments}


def with_images(model_type: str) -> tuple[Any, ModelCollator, list[Example]]:
    """Return a config, a collator for its model, and documents with and without images."""
    config = tiny_config(model_type, **(FULL if model_type.startswith("qwen3_5") else {}))
    layer_type = "sliding_attention" if model_type == "cohere_compass" else None
    settings = mmpos.from_hf_config(config, layer_type=layer_type)
    images = tiny_images(settings)
    builder = mmpos.SequenceBuilder(images=images, scheme=settings.scheme, markers=settings.markers)
    first, last = ["see ", noise(16, 24), " so"], [noise(8, 8, 1), "b", noise(32, 16, 2), "cc"]
    documents: list[list[Any]] = [first, ["text"], last]
    return config, ModelCollator(settings, images), examples_of(builder, *documents)


IMAGE_TYPES = sorted(name for name, inputs in MODEL_INPUTS.items() if inputs.images)
PROCESSED = ("cosmos3_edge", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
"""Types tested with packs of processed inputs; the first has no other test, since ImageProcessor cannot produce its
patches.
"""
GLM_TYPES = [name for name in IMAGE_TYPES if name.startswith("glm")]
QUICK = "qwen3_vl"


@pytest.mark.parametrize(
    "model_type",
    [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in IMAGE_TYPES if name not in (QUICK, PROCESSED[0]))],
)
def test_a_pack_with_images_trains_like_separate_documents(model_type: str) -> None:
    config, collator, examples = with_images(model_type)
    model, pack = tiny_model(config), collator(examples)
    assert config.text_config.use_cache, "with a cache, documents would attend to each other"
    assert "pixel_values" in pack
    assert_trained_apart(model, pack, [alone(collator, example) for example in examples])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODEL_INPUTS.keys() - set(IMAGE_TYPES)))
def test_a_pack_of_text_trains_like_separate_documents(model_type: str) -> None:
    layer_type = "sliding_attention" if model_type.startswith("gemma3") else None
    config = tiny_config(model_type, num_hidden_layers=1)
    settings = mmpos.from_hf_config(config, layer_type=layer_type)
    collator = ModelCollator(settings)
    examples = examples_of(mmpos.SequenceBuilder(scheme="flatten"), ["one"], ["the second"], ["3rd"])
    model, pack = tiny_model(config), collator(examples)
    assert_trained_apart(model, pack, [alone(collator, example) for example in examples])


def test_padded_rows_train_like_separate_documents() -> None:
    config, packed, examples = with_images("qwen2_5_vl")
    collator = ModelCollator(packed.settings, packed.images, PaddedCollator(side="left"))
    model, rows = tiny_model(config), collator(examples)
    want = one_by_one(model, [alone(packed, example) for example in examples])
    assert_same(trained(model, rows, rows["labels"]), want)


def by_bounds(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any) -> Any:
    """Compute attention within the bounds of documents, as FlashAttention does, regardless of positions."""
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


def test_attention_by_document_bounds_separates_documents() -> None:
    AttentionInterface.register("flash_by_bounds", by_bounds)
    AttentionMaskInterface.register("flash_by_bounds", flash_attention_mask)
    config, collator, examples = with_images("qwen2_vl")
    model, pack = tiny_model(config), collator(examples)
    want = one_by_one(model, [alone(collator, example) for example in examples])
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_by_bounds"  # the public setter would load kernels of this name
    assert_same(trained(model, pack, pack["labels"]), want)


def record(ids: list[int], types: Tensor | None = None, **more: Any) -> dict[str, Any]:
    """Return the output of a processor, with labels on all of its text."""
    tokens = torch.tensor([ids])
    types = (tokens == 300).int() + 2 * (tokens == 301).int() if types is None else types
    labels = torch.where(types > 0, IGNORE_INDEX, tokens)
    values = {name: value if isinstance(value, Tensor) else torch.tensor(value) for name, value in more.items()}
    return {"input_ids": tokens, "labels": labels, "mm_token_type_ids": types, **values}


def processed(model_type: str, seed: int) -> dict[str, Any]:
    """Return the output of a processor for a document with an image, a video and another image."""
    rng, frames = np.random.default_rng(seed), 3
    apart, values = model_type in ("cosmos3_edge", "qwen3_vl"), 48 if model_type == "cosmos3_edge" else 96
    image, video = [302, *[300] * 6, 303], [302, *[301] * 4, 303]
    text = rng.integers(3, 200, 7).tolist()
    videos = [each for f in range(frames) for each in (*text[: 1 + f], *video)] if apart else [302, *[301] * 12, 303]
    ids = [*text, *image, *text, *videos, *text[:2], 302, *[300] * 2, 303, *text]
    rows = {"pixel_values": 24 + 8, "pixel_values_videos": 48}
    more: dict[str, Any] = {name: rng.standard_normal((n, values), np.float32) for name, n in rows.items()}
    more |= {"second_per_grid_ts": [0.5]} if model_type == "qwen2_5_vl" else {}
    return record(ids, image_grid_thw=[[1, 4, 6], [1, 2, 4]], video_grid_thw=[[frames, 4, 4]], **more)


def processed_by_glm(seed: int, *, video: bool) -> dict[str, Any]:
    """Return the output of a GLM processor for two images, or for a video of two frames.

    Video frames use the placeholder of images.
    """
    rng = np.random.default_rng(seed)
    text, image = rng.integers(3, 200, 7).tolist(), [302, *[300] * 4, 303]
    inside = [*image, *text[:2], *image, *text[:2]]
    ids = [*text, *([304, *inside, 305] if video else inside), *text]
    pixels = rng.standard_normal((32, 96), np.float32)
    processor: Any = SimpleNamespace(image_token_id=300, video_start_id=304, video_end_id=305)
    types = torch.tensor(Glm4vProcessor.create_mm_token_type_ids(processor, [ids]))
    if video:
        return record(ids, types, pixel_values_videos=pixels, video_grid_thw=[[2, 4, 4]])
    return record(ids, types, pixel_values=pixels, image_grid_thw=[[1, 4, 4]] * 2)


VIDEOS, MIXED = (True, True), (True, False, True)


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        *(("glm4v", kinds) for kinds in (VIDEOS, MIXED)),
        *(pytest.param(name, MIXED, marks=pytest.mark.slow) for name in GLM_TYPES if name != "glm4v"),
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in PROCESSED),
    ],
)
def test_a_pack_of_processed_inputs_trains_like_separate_documents(model_type: str, kinds: tuple[bool, ...]) -> None:
    config = tiny_config(model_type)
    settings = mmpos.from_hf_config(config)
    records = [processed_by_glm(seed, video=video) for seed, video in enumerate(kinds)]
    records = records or [processed(model_type, seed) for seed in range(2)]
    examples = [ProcessedInputs(settings)(each, Location("processed", i)) for i, each in enumerate(records)]
    model, pack = tiny_model(config), ModelCollator(settings)(examples)
    assert ("pixel_values_videos" in pack) == all(kinds)
    assert_trained_apart(model, pack, records)
    if kinds:
        types = [each["mm_token_type_ids"] for each in records]
        assert torch.equal(pack["mm_token_type_ids"], torch.cat(types, 1))
        rows = ModelCollator(settings, collate=PaddedCollator(side="left"))(examples)
        assert rows["mm_token_type_ids"][0, -types[0].shape[1] :].tolist() == types[0][0].tolist()


def test_linear_attention_refuses_packed_documents_if_its_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = mmpos.from_hf_config(CONFIGS["qwen3_5"]())
    with monkeypatch.context() as patch:
        patch.setattr(model_inputs, "version", lambda name: "5.19.0")
        mixes = "settings.model_type: got 'qwen3_5', whose documents Transformers 5.19.0 mixes in a pack without"
        assert_refused(mixes, lambda: ModelCollator(settings), UnsupportedError)
        assert ModelCollator(settings, collate=PaddedCollator()).inputs.seq_idx
        patch.setattr(model_inputs, "find_spec", lambda name: "found")
        assert ModelCollator(settings).inputs.seq_idx
    if OLDER:
        return
    _, collator, examples = with_images("qwen3_5")
    config = tiny_config("qwen3_5", layer_types=["linear_attention", "full_attention"])
    pack = collator(examples)
    assert pack["seq_idx"].tolist() == [[document for document, each in enumerate(examples) for _ in each.labels]]
    with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
        tiny_model(config)(**pack)


def test_models_that_mix_documents_are_refused_and_all_others_are_supported() -> None:
    assert MODEL_INPUTS.keys() < MODEL_TYPES.keys()
    assert {name for name, inputs in MODEL_INPUTS.items() if inputs.text_row} == {
        name for name in MODEL_INPUTS if MODEL_TYPES[name].scheme.startswith("mrope")
    }
    assert all(row.inputs is not None for row in MODEL_TYPES.values() if row.has_rope_index)
    settings = mmpos.from_hf_config(CONFIGS["gpt_oss"]())
    masks = "settings.model_type: got 'gpt_oss' (its masks do not read the doc"
    assert_refused(masks, lambda: ModelCollator(settings), UnsupportedError)
    unknown = "settings.model_type: got 'aria' (it is not known to separate the doc"
    assert_refused(unknown, lambda: ModelCollator(replace(settings, model_type="aria")), UnsupportedError)
