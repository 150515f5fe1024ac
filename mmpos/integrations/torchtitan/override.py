"""The override of torchtitan's command line that puts multimodal rotations into a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.rope import RoPE as TitanRoPE
from torchtitan.protocols.module import Module

from mmpos.integrations.torchtitan.rope import RoPE, rotary_from_config

__all__ = ["MultimodalRoPE", "multimodal_rope"]


class MultimodalRoPE(RoPE, Module):  # type: ignore[misc]
    """RoPE that is one of torchtitan's own Modules, as its trainer asks of every module of a model."""


class _Builds:
    """Method of both configs that builds the rotation, whose state is the same on every rank."""

    def build(self, **_: object) -> MultimodalRoPE:
        """Build the module; a sharding of the cache is ignored, since it has none."""
        return MultimodalRoPE(rotary_from_config(self, **self.rotary))  # type: ignore[attr-defined]


@dataclass(kw_only=True, slots=True)
class CosSinConfig(_Builds, CosSinRoPE.Config):  # type: ignore[misc]
    """CosSinRoPE.Config with arguments of Rotary, recognised by checkpoint adapters and length checks."""

    rotary: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class ComplexConfig(_Builds, ComplexRoPE.Config):  # type: ignore[misc]
    """ComplexRoPE.Config with arguments of Rotary, likewise."""

    rotary: dict[str, Any]


@override(  # type: ignore[untyped-decorator]
    target=TitanRoPE.Config,
    fqns=["layers.*.attention.rope", "model_spec.model.layers.*.attention.rope"],
    description="multimodal rotations of mmpos in the decoder's layers",
)
def multimodal_rope(config: TitanRoPE.Config, **rotary: object) -> CosSinConfig | ComplexConfig:
    """Make the config of a decoder layer's rope multimodal; rope of vision encoders is not touched.

    Args:
        config: a CosSinRoPE.Config or ComplexRoPE.Config, or one that inherits from them, such as Qwen3.5's MRoPE.
        rotary: arguments of Rotary that replace those of the config, such as axes and allocation.
    """
    rotation = rotary_from_config(config, **rotary)
    kept = {**rotary, "axes": rotation.axes, "allocation": rotation.allocation, "mrope_section": rotation.mrope_section}
    target = ComplexConfig if isinstance(config, ComplexRoPE.Config) else CosSinConfig
    return derive(config, target, rotary=kept)
