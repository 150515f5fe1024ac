"""vLLM's Qwen-VL models with positions on two axes. Only this file imports vLLM's models."""

# mypy: allow-subclassing-any

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmpos.errors import UnsupportedError
from mmpos.integrations.vllm import check_apart, mrope_input_positions
from mmpos_vllm.sections import Sections
from mmpos_vllm.served_model import ServedModel, check_engine, mmpos_options
from mmpos_vllm.weights import install_cache, permute_qk

__all__ = ["PlacedQwen2VL", "PlacedQwen3VL", "PlacedQwen25VL", "install_rotary"]

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs, TimingContext


class _Placed:
    """Base class of the models: they use the ids, weights and rotations of the scheme in their config."""

    language_model: torch.nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        self.served = ServedModel.from_config(model_config.hf_config, model_config.max_model_len)
        check_engine(vllm_config, permute=self.served.permute)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        install_rotary(self.language_model, self.served.sections)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Compute positions for SupportsMRoPE, even for adjacent images, because an exception would stop the engine."""
        return mrope_input_positions(
            input_tokens,
            mm_features,
            scheme=self.served.scheme,
            spatial_merge_size=self.served.spatial_merge_size,
            strict=False,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of a whole checkpoint, with q and k in the order of the sections."""
        if self.served.permute:
            weights = permute_qk(weights, self.served.sections.rotary)
        return super().load_weights(weights)  # type: ignore[misc]


def install_rotary(model: torch.nn.Module, sections: Sections) -> None:
    """Replace the rotation of all layers: vLLM shares rotations among models and gives their caches fewer rows."""
    rotary = sections.rotary
    new = MRotaryEmbedding(
        rotary.head_dim,
        rotary.rotary_dim,
        sections.max_position,
        rotary.theta,
        sections.is_neox_style,
        torch.get_default_dtype(),
        mrope_section=list(sections.mrope_section),
        positions_factor=1,
    )
    install_cache(new, sections)
    for layer in [module for module in model.modules() if hasattr(module, "rotary_emb")]:
        _check_same(layer.rotary_emb, new)
        layer.rotary_emb = new


def _check_same(old: object, new: MRotaryEmbedding) -> None:
    for name in ("head_size", "rotary_dim", "is_neox_style"):
        got, want = getattr(old, name, None), getattr(new, name)
        if got != want or not isinstance(old, MRotaryEmbedding):
            raise UnsupportedError(f"{type(old).__name__}.{name}: got {got}, want an MRotaryEmbedding with {want}")


class _ImagesOnly:
    """Processing info that refuses videos when a request arrives, because two axes cannot place frames."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": 0}  # Qwen3-VL reads the video entry


class _SeparateImages:
    """Processor that refuses adjacent images when a request arrives, if the scheme requires text between them."""

    info: BaseProcessingInfo

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> object:
        processed = super().apply(inputs, timing_ctx)  # type: ignore[misc]
        check_apart(processed["mm_placeholders"], mmpos_options(self.info.get_hf_config())["scheme"])
        return processed


class Qwen2VLInfo(_ImagesOnly, qwen2_vl.Qwen2VLProcessingInfo):
    """Processing info that permits only images."""


class Qwen2VLProcessor(_SeparateImages, qwen2_vl.Qwen2VLMultiModalProcessor):
    """Processor that refuses adjacent images if the scheme requires text between them."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2VLProcessor, info=Qwen2VLInfo, dummy_inputs=qwen2_vl.Qwen2VLDummyInputsBuilder
)
class PlacedQwen2VL(_Placed, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL with positions on two axes."""


class Qwen25VLInfo(_ImagesOnly, qwen2_5_vl.Qwen2_5_VLProcessingInfo):
    """Processing info that permits only images."""


class Qwen25VLProcessor(_SeparateImages, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """Processor that refuses adjacent images if the scheme requires text between them."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen25VLProcessor, info=Qwen25VLInfo, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
)
class PlacedQwen25VL(_Placed, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL with positions on two axes."""


class Qwen3VLInfo(_ImagesOnly, qwen3_vl.Qwen3VLProcessingInfo):
    """Processing info that permits only images."""


class Qwen3VLProcessor(_SeparateImages, qwen3_vl.Qwen3VLMultiModalProcessor):
    """Processor that refuses adjacent images if the scheme requires text between them."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor, info=Qwen3VLInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class PlacedQwen3VL(_Placed, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL with positions on two axes."""
