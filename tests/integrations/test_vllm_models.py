"""vLLM's models and processors with the plugin, on a CPU and with attention replaced."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_vllm import MERGE, request
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tolerance import assert_within, rounding
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import supports_mrope
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.plugins import load_general_plugins

import mmpos
from mmpos import Grid, Text
from mmpos.integrations.vllm import ServedModel, mrope_input_positions, request_segments
from mmpos.integrations.vllm.plugin import ARCHITECTURES, register
from mmpos.rotary import Rotary, apply_rotary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [0, 4, 4]}
ENCODER = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 2}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
CONFIGS: dict[str, dict[str, Any]] = {
    "MMPosQwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
        "vision_config": {**ENCODER, "depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **TEXT,
    },
    "MMPosQwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [0, 4, 4]},
        "vision_config": {
            **ENCODER,
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        },
        **TEXT,
    },
    "MMPosQwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": ROPE, **TEXT},
        "vision_config": {
            **ENCODER,
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
}


class Causal(nn.Module):
    """Attention over one prompt, which replaces vLLM's attention over a paged cache."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (n, -1)).transpose(0, 1)
            for x, n in ((q, self.heads), *((x, self.kv_heads) for x in (k, v)))
        )
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        )


class Reference(nn.Module):
    """mmpos's rotation with two axes, which replaces vLLM's."""

    def __init__(self, rotary: Rotary, positions: mmpos.PositionTable) -> None:
        super().__init__()
        self.rotary, self.positions = rotary, positions

    def forward(self, _rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        dim = self.rotary.head_dim
        q, rotated = apply_rotary(q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), self.positions, self.rotary)
        assert rotated is not None
        return q.flatten(1), rotated.flatten(1)


@pytest.fixture(scope="module")
def _distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("gelu_quick(Tensor! out, Tensor input) -> ()")  # used by an activation in the encoder
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    del library


def served(folder: Path, architecture: str, **mmpos_config: object) -> tuple[VllmConfig, Any]:
    config = {"architectures": [architecture], **CONFIGS[architecture], **TOKENS, "mmpos": mmpos_config}
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=200,
        limit_mm_per_prompt={"image": 4},
    )
    vllm_config = VllmConfig(
        model_config=model, device_config=DeviceConfig("cpu"), compilation_config={"custom_ops": ["none"], "mode": 0}
    )
    with set_current_vllm_config(vllm_config):
        return vllm_config, initialize_model(vllm_config)


def checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """Return random weights under the names of a checkpoint, in which q, k and v are separate."""
    weights = {}
    for name, parameter in model.named_parameters():
        values = 0.2 * torch.randn(parameter.shape) + (1.0 if "norm" in name and "weight" in name else 0.0)
        old = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        old = "model." + old if old.startswith("visual.") else old
        if ".qkv_proj." in name:
            for part, value in zip("qkv", values.split([64, 32, 32]), strict=True):
                weights[old.replace("qkv_proj", f"{part}_proj")] = value
        elif ".gate_up_proj." in name:
            for part, value in zip(("gate", "up"), values.chunk(2), strict=True):
                weights[old.replace("gate_up_proj", f"{part}_proj")] = value
        else:
            weights[old] = values
    return weights


def hidden_states(model: Any, tokens: list[int], rows: Tensor) -> Tensor:
    for layer in model.language_model.model.layers:
        layer.self_attn.attn = Causal(4, 2)
    for module in model.language_model.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = functional.linear  # vLLM's own function requires a CPU build
    with torch.no_grad():
        return model.language_model.model(torch.tensor(tokens), rows)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.usefixtures("_distributed")
def test_a_served_model_computes_the_hidden_states_of_the_trained_model(tmp_path: Path, architecture: str) -> None:
    register()
    register()
    vllm_config, model = served(tmp_path, architecture, scheme="rope-tie")
    assert type(model).__module__ == "mmpos.integrations.vllm.models"
    assert supports_mrope(model)
    assert vllm_config.model_config.uses_mrope
    assert vllm_config.model_config.mrope_num_dims == 3

    torch.manual_seed(1)
    weights = checkpoint(model)
    tokens, features = request(random.Random(5), "none")
    rows, delta = model.get_mrope_input_positions(tokens, features)
    positions = mmpos.place(request_segments(len(tokens), features, spatial_merge_size=MERGE), "rope-tie")
    assert rows.tolist() == positions.dense(axes=(0, 0, 1)).tolist()
    assert [delta] == positions.deltas.tolist()
    with set_current_vllm_config(vllm_config):
        loaded = model.load_weights((name, weights[name]) for name in weights)
        assert {name for name, _ in model.named_parameters()} <= loaded
        got = hidden_states(model, tokens, rows)

        model.served = replace(model.served, permute=False)
        model.load_weights(weights.items())  # not permuted
        wrong = hidden_states(model, tokens, rows)
        for layer in model.language_model.model.layers:
            layer.self_attn.rotary_emb = Reference(Rotary(16), positions)
        want = hidden_states(model, tokens, rows)
        bound = rounding(lambda: hidden_states(model, tokens, rows), model.parameters())
    assert_within(got, want, bound)
    assert (wrong - want).abs().max() > 0.1


PATCHES = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 64 * 28 * 28,
}


def processor_of(folder: Path, architecture: str) -> tuple[ModelConfig, Any]:
    """Write a checkpoint as published; return vLLM's config and processor, with two axes set by overrides."""
    special = {"<|vision_start|>": 92, "<|vision_end|>": 93, "<|image_pad|>": 90, "<|video_pad|>": 91}
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(90)} | special, unk_token="w0"))
    words.add_special_tokens(list(special))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    name = architecture.removeprefix("MMPos").removesuffix("ForConditionalGeneration")
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{name}Processor", **PATCHES}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    video = {"video_processor_type": "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**video, **PATCHES}))
    published = {"architectures": [architecture.removeprefix("MMPos")], **CONFIGS[architecture], **TOKENS}
    for part in (published, published.get("text_config", {})):
        for field in {"rope_scaling", "rope_parameters"} & part.keys():
            part[field] = {**part[field], "mrope_section": [2, 3, 3]}
    (folder / "config.json").write_text(json.dumps(published))
    overrides = {
        "architectures": [architecture],
        "mmpos": {"scheme": "rope-tie"},
        "text_config": {"rope_parameters": {"mrope_section": [0, 4, 4]}},
    }
    config = ModelConfig(
        model=str(folder), dtype="float32", max_model_len=200, limit_mm_per_prompt={"image": 4}, hf_overrides=overrides
    )
    return config, MULTIMODAL_REGISTRY.create_processor(config)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_vllm_processes_separate_images_and_refuses_adjacent_ones_and_videos(tmp_path: Path, architecture: str) -> None:
    load_general_plugins()
    config, processor = processor_of(tmp_path, architecture)
    assert config.mrope_num_dims == 3
    images = [Image.new("RGB", (84, 140)), Image.new("RGB", (112, 84))]
    items = processor.info.parse_mm_data({"image": images})
    prompt = [1, 2, 92, 90, 93, 3, 92, 90, 93, 4]
    inputs = processor.apply(ProcessorInputs(prompt, items), TimingContext(enabled=False))
    features = [
        MultiModalFeatureSpec(data=data, modality="image", identifier="", mm_position=place)
        for data, place in zip(inputs["mm_kwargs"]["image"], inputs["mm_placeholders"]["image"], strict=True)
    ]
    served = ServedModel.from_config(config.hf_config, config.max_model_len)
    document: list[Text | Grid] = [Text(3), Grid(5, 3), Text(3), Grid(3, 4), Text(2)]
    want = mmpos.place(mmpos.SegmentTable.from_documents([document]), "rope-tie")
    rows, delta = mrope_input_positions(
        inputs["prompt_token_ids"], features, scheme=served.scheme, sections=served.sections, spatial_merge_size=MERGE
    )
    assert rows.tolist() == want.dense(axes=(0, 0, 1)).tolist()
    assert [delta] == want.deltas.tolist()

    with pytest.raises(ValueError, match="an image at token 16 right after an image"):
        processor.apply(ProcessorInputs([1, 90, 90, 2], items), TimingContext(enabled=False))
    with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
        processor.info.validate_num_items("video", 1)
