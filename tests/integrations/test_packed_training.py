"""Unpatched Transformers models on packs train as on separate documents; Trainer and accelerate with packs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import trainer_packs
import transformers
from hf_models import EXPERTS, SIZES
from model_configs import OLDER
from refusals import assert_refused
from safetensors.torch import load_file, save_file
from tiny_models import VQ
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_packs import losses, make_config, make_loader, make_model, state_file, train
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4vProcessor,
)
from transformers.masking_utils import flash_attention_mask

import mmpos
from mmpos import SequenceBuilder
from mmpos.data import ModelCollator, PackedCollator, PaddedCollator, ProcessedInputs, RankLoader, model_inputs
from mmpos.data.examples import IGNORE_INDEX, Example, Location
from mmpos.data.model_inputs import MODEL_INPUTS
from mmpos.errors import UnsupportedError
from mmpos.integrations.models import MODEL_TYPES

accelerate = pytest.importorskip("accelerate")

CONFIGS: Any = CONFIG_MAPPING

# Every token is routed to every expert, since rounding could change which expert scores best.
TEXT = {
    **SIZES,
    **EXPERTS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 320,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}

ENCODER = {
    **dict.fromkeys(("embed_dim", "hidden_size", "out_hidden_size"), SIZES["hidden_size"]),
    **dict.fromkeys(("depth", "num_hidden_layers", "spatial_merge_size", "temporal_patch_size"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "patch_size"), 4),
    **dict.fromkeys(("image_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_position_embeddings", "window_size"), 16),
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
}

TOKENS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "image_start_token_id": 302,
    "image_end_token_id": 303,
    "video_start_token_id": 304,
    "video_end_token_id": 305,
}


def tiny_config(model_type: str, **text: Any) -> Any:
    """Build a config of this type, for text tokenized as bytes and images written as token 300 between 302 and 303."""
    default = CONFIGS[model_type]()
    if not hasattr(default, "text_config"):
        return CONFIGS[model_type](**{**TEXT, **text})
    kind = default.text_config.model_type
    arguments: dict[str, Any] = {"text_config": {**TEXT, "model_type": kind, **text}}
    if MODEL_TYPES[model_type].scheme.startswith("mrope"):
        section = [3, 3, 2] if kind.startswith(("cohere", "cosmos3", "ernie", "qwen3", "qwen4")) else [2, 3, 3]
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, "partial_rotary_factor": 1.0}
        by_type = {"sliding_attention": rope, "full_attention": None}
        arguments["text_config"]["rope_parameters"] = by_type if model_type == "cohere_compass" else rope
        arguments |= TOKENS
    if model_type == "cohere_compass":  # one layer has a rotation, the other does not
        arguments["text_config"]["layer_types"] = list(by_type)
    if model_type == "ernie4_5_vl_moe":  # text and images have separate experts of two sizes
        arguments["text_config"] |= {"moe_intermediate_size": [32, 16], "mlp_layer_types": ["dense", "sparse"]}
    vision = getattr(default, "vision_config", None)
    if vision is not None:
        arguments["vision_config"] = {**ENCODER, "model_type": vision.model_type}
    if model_type == "emu3":
        return CONFIGS[model_type](**arguments, vq_config=VQ, vocabulary_map={"<image>": 300})
    return CONFIGS[model_type](**arguments, **({"vq_config": VQ} if model_type == "janus" else {}))


def tiny_model(config: Any) -> Any:
    """Build a model in training mode with random weights that are the same for the same config."""
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    return kind.from_config(config).train()


def tiny_images(settings: mmpos.ModelSettings) -> mmpos.ImageProcessor:
    """Build a tiny model's image processor."""
    options: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.6, 0.7), "min_pixels": 64, "max_pixels": 4096}
    return settings.image_processor(backend="pillow", **options)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw an image of noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def examples_of(builder: mmpos.SequenceBuilder, *documents: list[Any]) -> list[Example]:
    """Build an example from each document, with labels on all of its text."""
    sequences = [builder.build(parts) for parts in documents]
    labels = [np.where(sequence.token_type_ids, IGNORE_INDEX, sequence.input_ids) for sequence in sequences]
    return [Example(str(i), *pair) for i, pair in enumerate(zip(sequences, labels, strict=True))]


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


EXAMPLE = Path(trainer_packs.__file__)


def as_lists(batches: Any) -> list[Any]:
    """Return the tokens, the labels and the pixel sum of each batch."""
    return [
        (batch["input_ids"].tolist(), batch["labels"].tolist(), float(batch["pixel_values"].sum())) for batch in batches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_a_resumed_run_of_the_example_equals_an_uninterrupted_run(tmp_path: Path, model_type: str) -> None:
    """Trainer alone would resume the two older types from random weights."""
    config = make_config() if model_type == "qwen3_vl" else tiny_config(model_type)
    config.vision_config.patch_size, config.vision_config.window_size = 14, 112
    uninterrupted = train(tmp_path / "uninterrupted", 12, save_steps=6, config=config)
    first, *_, last = losses(uninterrupted)
    assert last < first
    history = uninterrupted.state.log_history
    before, after = (entry["eval_loss"] for entry in history if "eval_loss" in entry)
    assert after < before
    checkpoint = tmp_path / "uninterrupted/checkpoint-6"
    resumed = train(tmp_path / "resumed", 12, checkpoint=checkpoint, save_steps=6, config=config)
    assert resumed.state.global_step == 12
    weights, expected = (
        dict(trainer.model.named_parameters()) for trainer in (resumed, uninterrupted) if trainer.model
    )
    assert weights.keys() == expected.keys()
    for name, parameter in expected.items():
        value = parameter.detach()
        bound = torch.finfo(value.dtype).eps ** 0.5
        torch.testing.assert_close(weights[name].detach(), value, rtol=0, atol=bound * float(value.abs().max()))
    loader = make_loader(config)
    loader.load_state_dict(json.loads(state_file(checkpoint, 0).read_text()))
    loader.set_epoch(0)
    batches = as_lists(islice(make_loader(config), 20))
    assert as_lists(islice(loader, 14)) == batches[6:]
    assert batches[8:16] != batches[:8], "the next epoch is in another order"


def test_the_example_refuses_a_checkpoint_that_lacks_a_weight(tmp_path: Path) -> None:
    config = tiny_config("qwen2_5_vl")
    make_model(config, None).save_pretrained(tmp_path)
    make_model(config, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"got weights with {'missing_keys': \['model.language_model.norm.weight'\]}"):
        make_model(config, tmp_path)


@pytest.mark.slow
def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    options = ["--folder", str(tmp_path), "--steps", "10"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    first, last = (float(word) for word in line.split()[1:])
    assert last < first
    states = [json.loads(state_file(tmp_path / "checkpoint-10", rank).read_text()) for rank in (0, 1)]
    assert [state["loader"]["of"]["consumer"] for state in states] == ["0 of 2 by auto", "1 of 2 by auto"]


def test_accelerate_leaves_a_rank_loader_as_it_is_and_batches_refuse_to_be_split() -> None:
    loader = make_loader(make_config(), copies=2)
    plain = loader.loader
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader
    batch = next(iter(loader))
    dispatcher = accelerator.prepare(plain)
    assert type(dispatcher).__name__ == "DataLoaderDispatcher"
    with pytest.raises(UnsupportedError, match=r"^batch: .* want the whole batch; load through mmpos.data.RankLoader"):
        next(iter(dispatcher))
    with pytest.raises(TypeError, match="Can only find the batch size of tensors"):
        accelerate.utils.find_batch_size(dict(batch))


def test_errors_that_trainer_and_accelerate_raise_for_a_batch_name_the_remedy(tmp_path: Path) -> None:
    examples: Any = examples_of(SequenceBuilder(scheme="flatten"), ["one"], ["the second"])
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, remove_unused_columns=False, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    model, collate = torch.nn.Linear(1, 1), cast(Any, PackedCollator())
    trainer = transformers.Trainer(model, arguments, collate, examples)
    with pytest.raises(UnsupportedError, match=r"^batch: got a Batch .* want ModelCollator\(settings\) as data_c"):
        trainer.train()
    loader = DataLoader(examples, batch_size=2, collate_fn=collate)
    options: dict[str, Any] = {"device": torch.device("cpu"), "put_on_device": True, "dispatch_batches": True}
    dispatcher = accelerate.data_loader.prepare_data_loader(loader, **options)
    with pytest.raises(TypeError, match=r"^Can only .*Batch'>, which stays whole: load it through mmpos.data.RankLoad"):
        next(iter(dispatcher))


def test_skipping_batches_outside_the_loader_is_refused() -> None:
    loader: RankLoader[Any] = make_loader(make_config(), copies=2)
    with pytest.raises(UnsupportedError, match=r"^drop_last: .*ignore_data_skip=True"):
        accelerate.skip_first_batches(loader, 1)
