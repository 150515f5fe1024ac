"""A stand-in for vLLM where it is not installed, with exactly what mmpos.integrations.vllm uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Registry:
    """The part of ModelRegistry that plugins use."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def register_model(self, architecture: str, where: str) -> None:
        self.models[architecture] = where


class MRotaryEmbedding(nn.Module):
    """The cache and sizes of vLLM's class."""

    cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int],
        positions_factor: int = 4,
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.is_neox_style, self.mrope_section, self.mrope_interleaved = is_neox_style, mrope_section, False
        rows = positions_factor * max_position
        self.register_buffer("cos_sin_cache", torch.zeros(rows, rotary_dim, dtype=dtype), persistent=False)


class Model(nn.Module):
    """A model whose layers share one rotation, and which returns the weights it loads."""

    shared = MRotaryEmbedding(16, 16, 64, 1e4, True, torch.float32, [0, 4, 4])

    def __init__(self, *, vllm_config: object, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.language_model = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.language_model:
            layer.rotary_emb = self.shared

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return dict(weights)


class Info:
    """Processing info that contains only a config."""

    def __init__(self, config: object = None) -> None:
        self.config = config

    def get_hf_config(self) -> object:
        return self.config

    def get_supported_mm_limits(self) -> dict[str, None]:
        return {"image": None, "video": None}


class Processor:
    """A processor that returns its inputs as placeholders."""

    def __init__(self, info: Info) -> None:
        self.info = info

    def apply(self, inputs: object, timing_ctx: object) -> dict[str, object]:
        return {"mm_placeholders": inputs, "timing": timing_ctx}


def register_processor(processor: type, *, info: type, dummy_inputs: type) -> Callable[[Any], Any]:
    def wrapper(model: Any) -> Any:
        model.factories = (processor, info, dummy_inputs)
        return model

    return wrapper


def install(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Put vLLM's names into sys.modules, and make sure that mmpos.integrations.vllm.models is imported again."""
    registry, rooms = Registry(), {}
    for room, name in {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}.items():
        classes = {
            f"{name}ForConditionalGeneration": type(name, (Model,), {}),
            f"{name}ProcessingInfo": Info,
            f"{name}MultiModalProcessor": Processor,
            f"{name}DummyInputsBuilder": object,
        }
        rooms[room] = classes
    modules: dict[str, dict[str, object]] = {
        "vllm": {"ModelRegistry": registry},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.rotary_embedding": {"MRotaryEmbedding": MRotaryEmbedding},
        "vllm.model_executor.models": {room: SimpleNamespace(**classes) for room, classes in rooms.items()},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": SimpleNamespace(register_processor=register_processor)},
    }
    for module, names in modules.items():
        fake = ModuleType(module)
        fake.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.delitem(sys.modules, "mmpos.integrations.vllm.models", raising=False)
    return registry
