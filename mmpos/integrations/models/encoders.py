"""Positions of vision encoders that rotate by rows and columns, by their own model types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mmpos.rotary.hf_config import Fields
from mmpos.rotary.hf_models import OTHER_ROTATIONS
from mmpos.schemes import Grid2D

__all__ = ["ENCODERS", "UNSUPPORTED_ENCODERS", "Encoder"]


@dataclass(frozen=True)
class Encoder:
    """Positions of the patches of a vision encoder, as its code has them.

    Args:
        order: "raster", or "merged" in blocks of spatial_merge_size.
        axes: 2, rows and columns, or 3, frames before them.
        first: id of the first row and column; with 1 a class token may be at 0.
        note: peculiarities, for readers.
    """

    order: Literal["raster", "merged"] = "raster"
    axes: int = 2
    first: int = 0
    note: str = ""

    def scheme(self, vision: Fields) -> Grid2D:
        """Make the scheme of an encoder with this config.

        Raises:
            InvalidInputError: the config has no spatial_merge_size, and the order needs one.
        """
        side = 1 if self.order == "raster" else vision.integer("spatial_merge_size", needed=True, minimum=1)
        return Grid2D(self.order, side, self.axes, self.first)


_WINDOWS = "some layers attend in windows, whose order is undone after the last"

ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {
        "cohere_compass_vision": Encoder("merged"),
        "dots3_note_vision_encoder": Encoder("merged"),
        "ernie4_5_vl_moe_vision": Encoder("merged"),
        "exaone4_5_vision": Encoder("merged", note=_WINDOWS),
        "gemma4_vision": Encoder(note="view the halves of a head as heads, which turn by columns and by rows"),
        "glm4v_moe_vision": Encoder("merged"),
        "glm4v_vision": Encoder("merged"),
        "glm5_next_vision": Encoder("merged"),
        "glm_ocr_vision": Encoder("merged"),
        "inkling2_vision": Encoder("merged", first=1, note="a class token before the patches of each image"),
        "kimi_k25_vision": Encoder(note="frames have absolute positions"),
        "lfm3_vl_vision": Encoder("merged", note="layers of convolution do not turn"),
        "llama4_vision_model": Encoder(first=1, note="tiles of image_size, a class token after the patches of each"),
        "minimax_m3_vl_vision": Encoder("merged", axes=3),
        "muse_glimmer_vision": Encoder(first=1, note=_WINDOWS),
        "muse_spark_vision": Encoder(first=1, note=_WINDOWS),
        "paddleocr_vl_vision": Encoder(note="patches are merged after the encoder"),
        "pixtral": Encoder(),
        "qwen2_5_omni_vision_encoder": Encoder("merged", note=_WINDOWS),
        "qwen2_5_vl_vision": Encoder("merged", note=_WINDOWS),
        "qwen2_vl_vision": Encoder("merged"),
        "qwen3_5_moe_vision": Encoder("merged"),
        "qwen3_5_vision": Encoder("merged"),
        "qwen3_omni_moe_vision_encoder": Encoder("merged"),
        "qwen3_vl_moe_vision": Encoder("merged"),
        "qwen3_vl_vision": Encoder("merged"),
        "qwen4_exp_vision": Encoder("merged"),
        "step3p5_vision": Encoder(note="beside learned absolute positions"),
    }
)
"""Vision encoders whose positions are known."""

_REFUSED = "dinov3_vit edgetam_video efficientloftr eomt_dinov3 sam2_video sam3_tracker_video sapiens2"

UNSUPPORTED_ENCODERS: Mapping[str, str] = MappingProxyType(
    {
        **{name: OTHER_ROTATIONS[name] for name in _REFUSED.split()},
        "deepseek_ocr2_encoder": "its patches and its queries after them count as text",
        "mlcd_vision_model": "the angles of its class token are weights",
        "pe_video_encoder": "its frames count as text",
        "sam3_vit_model": "its layers count within windows, or in fractions of a window",
        "video_llama_3_vision": "how many patches merge is told with each image",
        "vjepa2": "the two channels of a pair turn by different frequencies",
    }
)
"""Vision encoders that rotate by positions that no scheme here has, and why."""
