"""vLLM's Qwen-VL models with positions on two axes. Only this file imports vLLM's models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmpos.errors import UnsupportedError
from mmpos.integrations.sections import Sections, install_cache, permute_qk
from mmpos.integrations.vllm.requests import check_apart, mrope_input_positions
from mmpos.integrations.vllm.settings import ServedModel, mmpos_options

__all__ = ["PlacedQwen2VL", "PlacedQwen3VL", "PlacedQwen25VL"]

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs, TimingContext

NO_DRAFT_MODEL = ("ngram", "suffix")
"""Speculative decoding methods without a draft model; vLLM derives the cache slots of draft models from ids."""


class _Placed:
    """Base class of the models: they use the ids, weights and rotations of the scheme in their config."""

    language_model: torch.nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        self.served = ServedModel.from_config(model_config.hf_config, model_config.max_model_len)
        _check_config(vllm_config, permute=self.served.permute)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        _install_rotary(self.language_model, self.served.sections)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Compute positions for SupportsMRoPE, even for adjacent images, because an exception would stop the engine."""
        return mrope_input_positions(
            input_tokens,
            mm_features,
            scheme=self.served.scheme,
            sections=self.served.sections,
            spatial_merge_size=self.served.spatial_merge_size,
            strict=False,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights of a whole checkpoint, with q and k in the order of the sections."""
        if self.served.permute:
            weights = permute_qk(weights, self.served.sections.rotary)
        return super().load_weights(weights)  # type: ignore[misc]


def _install_rotary(model: torch.nn.Module, sections: Sections) -> None:
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


def _check_config(vllm_config: VllmConfig, *, permute: bool) -> None:
    """Raise UnsupportedError for configs that vLLM would silently serve with wrong ids, weights or limits."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in NO_DRAFT_MODEL:
        raise UnsupportedError(
            f"speculative_config.method: got {speculative.method!r}, want {' or '.join(NO_DRAFT_MODEL)}; vLLM derives "
            "the cache slots of a draft model from ids, but ids are not token indices here"
        )
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal.enable_mm_embeds:
        raise UnsupportedError("enable_mm_embeds: got True, want False; video embeddings would bypass the limits")
    if multimodal.is_multimodal_pruning_enabled():
        raise UnsupportedError("multimodal pruning: got enabled, want disabled, because pruning computes its own ids")
    if permute and vllm_config.lora_config is not None:
        raise UnsupportedError("lora_config: got one, want none, or a permuted checkpoint and permuted adapters")
    if permute and vllm_config.quant_config is not None:
        got = type(vllm_config.quant_config).__name__
        raise UnsupportedError(f"quant_config: got {got}, want none, or weights permuted before quantisation")


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
