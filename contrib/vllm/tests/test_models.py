"""vLLM's own models and processors with the plugin, on a CPU and with attention replaced.

vLLM pins another torch, so it needs a separate environment with mmpos, mmpos-vllm, pytest and Pillow. Its CPU platform
works without the kernels of a CPU build as long as attention and gelu_quick are not called.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mmpos_vllm import Sections
from mmpos_vllm.plugin import ARCHITECTURES, register
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import mmpos
from mmpos import Grid, Text, UnsupportedError
from mmpos.rotary import Rotary, apply_rotary

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; README.md says what was run with it", allow_module_level=True)
for variable, value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",  # vLLM then keeps Triton even without a driver
    "TRITON_INTERPRET": "1",
}.items():
    os.environ.setdefault(variable, value)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmpos_vllm.models import install_rotary
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
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

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TEXT: dict[str, Any] = {
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
}
ROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}  # as published
ENCODER: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
ENCODER |= {"num_heads": 2, "depth": 1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "model_type": "qwen2_vl",
        "vision_config": {**ENCODER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "rope_scaling": ROPE,
        **TEXT,
    },
    "Qwen2_5_VL": {
        "model_type": "qwen2_5_vl",
        "vision_config": {**ENCODER, "window_size": 112, "fullatt_block_indexes": [0]},
        "rope_scaling": ROPE,
        **TEXT,
    },
    "Qwen3VL": {
        "model_type": "qwen3_vl",
        "vision_config": {**ENCODER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_parameters": ROPE, **TEXT},
    },
}
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 50176}


class Causal(nn.Module):
    """Attention over one prompt, which replaces vLLM's attention over a paged cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, 16)).transpose(0, 1) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.transpose(0, 1).flatten(1)


class Reference(nn.Module):
    """mmpos's rotation with two axes, which replaces vLLM's."""

    def __init__(self, positions: mmpos.PositionTable) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, _rows: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        rotated = (apply_rotary(x.unflatten(-1, (-1, 16)), None, self.positions, Rotary(16))[0] for x in tensors)
        return tuple(x.flatten(1) for x in rotated)


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


def model_config(folder: Path, architecture: str) -> ModelConfig:
    """Write a checkpoint as published, without weights, and return vLLM's config with two axes set by overrides."""
    special = {"<|vision_start|>": 92, "<|vision_end|>": 93, "<|image_pad|>": 90, "<|video_pad|>": 91}
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(90)} | special, unk_token="w0"))
    words.add_special_tokens(list(special))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    name = architecture.removeprefix("MMPos").removesuffix("ForConditionalGeneration")
    video = "Qwen3VLVideoProcessor" if name == "Qwen3VL" else "Qwen2VLVideoProcessor"
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{name}Processor"}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {**image, **PATCHES},
        "video_preprocessor_config.json": {"video_processor_type": video, **PATCHES},
        "config.json": {"architectures": [architecture.removeprefix("MMPos")], **CONFIGS[name], **TOKENS},
    }
    for file, fields in files.items():
        (folder / file).write_text(json.dumps(fields))
    overrides = {
        "architectures": [architecture],
        "mmpos": {"scheme": "rope-tie"},
        "text_config": {"rope_parameters": {"mrope_section": [0, 4, 4]}},
    }
    limits = {"image": 4}
    return ModelConfig(
        str(folder), dtype="float32", max_model_len=200, limit_mm_per_prompt=limits, hf_overrides=overrides
    )


def processed(config: ModelConfig) -> tuple[list[int], list[Any]]:
    """Process a prompt with two images; adjacent images and videos are refused."""
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    images = [Image.new("RGB", (84, 140)), Image.new("RGB", (112, 84))]
    items = processor.info.parse_mm_data({"image": images})
    with pytest.raises(ValueError, match="an image at token 16 right after an image"):
        processor.apply(ProcessorInputs([1, 90, 90, 2], items), TimingContext(enabled=False))
    with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\)"):
        processor.info.validate_num_items("video", 1)
    inputs = processor.apply(ProcessorInputs([1, 2, 92, 90, 93, 3, 92, 90, 93, 4], items), TimingContext(enabled=False))
    return inputs["prompt_token_ids"], [
        MultiModalFeatureSpec(data=data, modality="image", identifier="", mm_position=place)
        for data, place in zip(inputs["mm_kwargs"]["image"], inputs["mm_placeholders"]["image"], strict=True)
    ]


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
        layer.self_attn.attn = Causal()
    for module in model.language_model.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = functional.linear  # vLLM's own function requires a CPU build
    with torch.no_grad():
        return model.language_model.model(torch.tensor(tokens), rows)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.usefixtures("_distributed")
def test_a_served_model_computes_the_hidden_states_of_the_trained_model(tmp_path: Path, architecture: str) -> None:
    load_general_plugins()
    register()
    config = model_config(tmp_path, architecture)
    assert config.uses_mrope
    assert config.mrope_num_dims == 3
    options = {"custom_ops": ["none"], "mode": 0}
    vllm_config = VllmConfig(model_config=config, device_config=DeviceConfig("cpu"), compilation_config=options)
    with set_current_vllm_config(vllm_config):
        model: Any = initialize_model(vllm_config)
    assert type(model).__module__ == "mmpos_vllm.models"
    assert supports_mrope(model)

    tokens, features = processed(config)
    rows, delta = model.get_mrope_input_positions(tokens, features)
    document: list[Text | Grid] = [Text(3), Grid(5, 3), Text(3), Grid(3, 4), Text(2)]
    positions = mmpos.place(mmpos.SegmentTable.from_documents([document]), "rope-tie")
    assert rows.tolist() == positions.dense(axes=(0, 0, 1)).tolist()
    assert [delta] == positions.deltas.tolist()

    torch.manual_seed(1)
    weights = checkpoint(model)
    with set_current_vllm_config(vllm_config):
        loaded = model.load_weights((name, weights[name]) for name in weights)
        assert {name for name, _ in model.named_parameters()} <= loaded
        got = hidden_states(model, tokens, rows)
        rotations = {layer.self_attn.rotary_emb for layer in model.language_model.model.layers}
        assert [len(rotation.cos_sin_cache) for rotation in rotations] == [3 * 200]
        with pytest.raises(UnsupportedError, match="head_size: got 16, want an MRotaryEmbedding with 32"):
            install_rotary(model.language_model, Sections(Rotary(32), 600, permuted=True))
        model.served = replace(model.served, permute=False)
        model.load_weights(weights.items())  # not permuted
        wrong = hidden_states(model, tokens, rows)
        for layer in model.language_model.model.layers:
            layer.self_attn.rotary_emb = Reference(positions)
        want = hidden_states(model, tokens, rows)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert (wrong - want).abs().max() > 0.1
