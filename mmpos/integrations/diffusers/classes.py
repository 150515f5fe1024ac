"""Config readers for diffusers transformers: the scheme and the rotation of each class.

``test_diffusers_settings`` compares cos and sin with those of every class. Fields missing from a config.json have the
class's default values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib.resources import files
from math import pi
from types import MappingProxyType
from typing import Any, Literal

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.diffusers.config import TransformerConfig
from mmpos.rotary.allocation import STILL
from mmpos.rotary.config import Rotary
from mmpos.rotary.scaling import NTK, Linspace
from mmpos.schemes import get_scheme
from mmpos.schemes.generation import (
    NOT_AFFINE,
    Flux,
    HunyuanImage,
    JoyImage,
    Lumina2,
    QwenImage,
)
from mmpos.schemes.generation_video import (
    Allegro,
    AnyFlowFar,
    CogVideoX,
    Cosmos,
    Cosmos3,
    Kandinsky,
    Ltx,
    Ltx2,
    MiniMaxH3,
    Wan,
)

__all__ = ["REFUSED", "TRANSFORMERS"]

Pairing = Literal["half", "adjacent"]
Settings = dict[str, Any]
"""Arguments of TransformerSettings other than class_name. If pipelines of a class compute different ids, its scheme is
a mapping from the name of each pipeline to its scheme, or to the reason why it has none."""

Reader = Callable[[TransformerConfig], Settings]

_PACKED = (1, 2, 2)
"""Latents per token in pipelines that pack latents."""


def _axial(
    scheme: Any,
    field: str,
    dims: tuple[int, ...],
    theta: float | str = 10000.0,
    default_theta: float = 10000.0,
    *,
    patch: tuple[int, int, int] | Literal["config"] = _PACKED,
    default_patch: int | tuple[int, ...] = 2,
    limits: tuple[int, int] | str | None = None,
    ends: tuple[int, ...] = (),
) -> Reader:
    """Return a config reader for a rotation with adjacent pairs and one full set of frequencies per axis.

    Args:
        scheme: name of the scheme, or a scheme.
        field: config field that contains the number of channels per axis.
        dims: defaults of ``field``.
        theta: base of the frequencies, or the name of the config field that contains it.
        default_theta: default of the field ``theta``.
        patch: latents per token; "config" if the transformer cuts patches itself, with the size in its config.
        default_patch: default of the patch size in the config.
        limits: lowest and highest id, or the config field that contains the number of ids on each axis, counted from 0.
        ends: defaults of the field ``limits``.
    """

    def read(config: TransformerConfig) -> Settings:
        channels = config.integers(field, dims)
        base = config.number(theta, default_theta) if isinstance(theta, str) else theta
        settings: Settings = {
            "scheme": get_scheme(scheme),
            "rotary": _axes_in_blocks(channels, base),
            "patch_size": config.patch(default=default_patch) if patch == "config" else patch,
        }
        if isinstance(limits, str):
            settings["limits"] = tuple((0, end - 1) for end in config.integers(limits, ends))
        elif limits is not None:
            settings["limits"] = (limits,) * len(channels)
        return settings

    return read


def _axes_in_blocks(channels: tuple[int, ...], theta: float = 10000.0, pairing: Pairing = "adjacent") -> Rotary:
    """Build a rotation with one full set of frequencies per axis, in blocks of channels."""
    axes = len(channels)
    return Rotary(
        head_dim=sum(channels), theta=theta, axes=axes, allocation="axial", axes_dim=channels, pairing=pairing
    )


def _thirds(head_dim: int) -> tuple[int, int, int]:
    """Split a head as Wan does: rows and columns have 2·⌊d/6⌋ channels each, and frames have the others."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _wan(default_head: int, scheme: Any = "wan", *, rows: int | None = None) -> Reader:
    """Return a config reader for models like Wan, whose tables have ``rows`` rows, by default rope_max_seq_len."""

    def read(config: TransformerConfig) -> Settings:
        end = config.integer("rope_max_seq_len", 1024) if rows is None else rows
        return {
            "scheme": get_scheme(scheme),
            "rotary": _axes_in_blocks(_thirds(config.integer("attention_head_dim", default_head))),
            "patch_size": config.patch(),
            "limits": ((0, end - 1),) * 3,
        }

    return read


def _chrono_edit(config: TransformerConfig) -> Settings:
    return _wan(128, Wan(skip_length=config.integer("rope_temporal_skip_len", 8)))(config)


def _sana_wm(config: TransformerConfig) -> Settings:
    config.want("pos_embed_type", "wan_rope", "wan_rope")
    head = config.integer("linear_head_dim", 112)
    return _wan(head, rows=1024)(config) | {"patch_size": config.patch(default=(1, 1, 1))}


def _wan_animate_2(config: TransformerConfig) -> Settings:
    offsets = tuple(
        config.integer(f"refer_offset_{axis}", n, minimum=-1) for axis, n in zip("thw", (1, 0, -1), strict=True)
    )
    if offsets != (1, 0, -1):
        got, want = f"offsets {offsets} of references", "(1, 0, -1), to the right of the generated frames"
        raise UnsupportedError(f"config.refer_offset_t, _h, _w: got {got}, want {want}")
    config.want("refer_stride", 1, 1)
    head = config.integer("dim", 5120) // config.integer("num_heads", 40)
    return _wan(head, Wan(beside=True), rows=512)(config)


def _any_flow_far(config: TransformerConfig) -> Settings:
    patch, coarse = config.patch(), config.patch("compressed_patch_size", (1, 4, 4))
    ratio = coarse[1] // patch[1]
    if coarse != (patch[0], ratio * patch[1], ratio * patch[2]):
        want = "the same multiple of patch_size in rows and columns"
        raise UnsupportedError(f"config.compressed_patch_size: got {list(coarse)}, want {want}")
    return _wan(128, AnyFlowFar(ratio=ratio))(config)


def _qwen_image(config: TransformerConfig) -> Settings:
    scheme = QwenImage(layered=bool(config.get("use_layer3d_rope", False)))
    return _axial(scheme, "axes_dims_rope", (16, 56, 56), limits=(-4096, 4095))(config)


def _z_image(config: TransformerConfig) -> Settings:
    if config.get("siglip_feat_dim") is not None:
        raise UnsupportedError(f"config.siglip_feat_dim: got one, want None: {NOT_AFFINE['z-image-omni']}")
    side, frames = config.integers("all_patch_size", (2,)), config.integers("all_f_patch_size", (1,))
    return _like_lumina(Lumina2(first=1), (*frames, *side, *side), 1024)(config)


def _bria_fibo_2(config: TransformerConfig) -> Settings:
    scheme = Lumina2(first=1, image_at=config.integer("max_num_gist_tokens", 512) + 1)
    side = 2 * config.integer("patch_size", 2)  # the pipeline has already packed 2 × 2 latents
    return _like_lumina(scheme, (1, side, side), 2048)(config)


def _like_lumina(scheme: Lumina2, patch: Any, end: int) -> Reader:
    ends = (end, 512, 512)
    return _axial(scheme, "axes_dims", (32, 48, 48), "rope_theta", 256.0, patch=patch, limits="axes_lens", ends=ends)


def _ernie_image(config: TransformerConfig) -> Settings:
    """Read the config of ERNIE-Image; angles are repeated, so channels j and j + d/2 of a pair differ in angle."""
    dims = config.integers("rope_axes_dim", (32, 48, 48))
    theta = config.number("rope_theta", 256.0)
    unrepeated = _axes_in_blocks(dims, theta)
    axes = [int(axis) for axis in unrepeated.pair_axis.repeat(2)]
    angles = [float(value) for value in unrepeated.inv_freq_array.repeat(2)]
    half = len(axes) // 2
    first, second = (
        Rotary(head_dim=sum(dims), axes=3, allocation=axes[part], inv_freq=angles[part])
        for part in (slice(half), slice(half, None))
    )
    side = config.integer("patch_size", 1)
    patch = (1, 2 * side, 2 * side)  # the pipeline has already packed 2 × 2 latents
    return {"scheme": Lumina2(image_first=True), "rotary": first, "second_rotary": second, "patch_size": patch}


def _ideogram_4(config: TransformerConfig) -> Settings:
    head = config.integer("attention_head_dim", 256)
    section = config.integers("mrope_section", (24, 20, 20))
    axes = [0] * (head // 2)
    for axis in (1, 2):
        places = range(axis, 3 * section[axis], 3)
        if places.stop > head // 2 + 2:
            raise InvalidInputError(f"config.mrope_section: got {list(section)}, want pairs within {head // 2}")
        for place in places:
            axes[place] = axis
    rotary = Rotary(head_dim=head, theta=config.number("rope_theta", 5e6), axes=3, allocation=axes)
    return {"scheme": get_scheme("ideogram4"), "rotary": rotary, "patch_size": _PACKED}


def _hunyuan_image(config: TransformerConfig) -> Settings:
    patch = config.get("patch_size", (1, 1))
    count = len(patch) if isinstance(patch, list | tuple) else 2
    dims = config.integers("rope_axes_dim", (64, 64) if count == 2 else (16, 56, 56), count=count)
    rotary = _axes_in_blocks(dims, config.number("rope_theta", 256.0))
    return {"scheme": HunyuanImage(axes=count), "rotary": rotary, "patch_size": config.patch(default=(1, 1))}


def _glm_image(config: TransformerConfig) -> Settings:
    head = config.integer("attention_head_dim", 40)
    rotary = _axes_in_blocks((head // 2, head // 2), pairing="half")
    return {"scheme": HunyuanImage(), "rotary": rotary, "patch_size": config.patch(default=2)}


def _joy_image(config: TransformerConfig) -> Settings:
    head = config.integer("hidden_size", 3072) // config.integer("num_attention_heads", 24)
    dims = config.integers("rope_dim_list", (16, 56, 56))
    if sum(dims) != head:
        raise InvalidInputError(f"config.rope_dim_list: got {list(dims)}, want sizes that sum to head_dim {head}")
    rotary = _axes_in_blocks(dims, config.number("theta", 256.0))
    return {"scheme": JoyImage(), "rotary": rotary, "patch_size": config.patch()}


def _joy_image_edit(config: TransformerConfig) -> Settings:
    return _joy_image(config) | {"scheme": JoyImage(text_runs=config.get("rope_type") == "mrope")}


def _cog_video(default_head: int = 64, *, stretched: bool = False) -> Reader:
    """Return a config reader for CogVideoX: version 1.0 stretches a base grid, and 1.5 (patch_size_t) crops it."""

    def read(config: TransformerConfig) -> Settings:
        config.want("use_rotary_positional_embeddings", False, True)
        head, side = config.integer("attention_head_dim", default_head), config.integer("patch_size", 2)
        base = config.integer("sample_height", 60) // side, config.integer("sample_width", 90) // side
        rotary = _axes_in_blocks(_quarter(head))
        if stretched or config.get("patch_size_t") is None:
            return {"scheme": CogVideoX(*base), "rotary": rotary, "patch_size": (1, side, side)}
        limits = ((0, 2**31 - 1), (0, base[0] - 1), (0, base[1] - 1))
        scheme = get_scheme("hunyuan-video")
        return {"scheme": scheme, "rotary": rotary, "patch_size": config.patch(default=2), "limits": limits}

    return read


def _quarter(head: int) -> tuple[int, int, int]:
    if head % 16:
        raise InvalidInputError(f"config.attention_head_dim: got {head}, want a multiple of 16")
    return head // 4, head // 8 * 3, head // 8 * 3


def _easy_animate(config: TransformerConfig) -> Settings:
    config.want("time_position_encoding_type", "3d_rope", "3d_rope")
    side = config.integer("patch_size", 2)
    rotary = _axes_in_blocks(_quarter(config.integer("attention_head_dim", 64)))
    return {"scheme": CogVideoX(60 // side, 90 // side), "rotary": rotary, "patch_size": (1, side, side)}


def _hunyuan_dit(config: TransformerConfig) -> Settings:
    """Read the config of HunyuanDiT: columns rotate the first half of channels, rows the second, and frames none."""
    head, side = config.integer("attention_head_dim", 88), config.integer("patch_size", 2)
    inv_freq = [float(value) for value in _axes_in_blocks((head // 2, head // 2)).inv_freq_array]
    axes = [2] * (head // 4) + [1] * (head // 4)
    rotary = Rotary(head_dim=head, axes=3, allocation=axes, inv_freq=inv_freq, pairing="adjacent")
    base = 512 // 8 // side
    return {"scheme": CogVideoX(base, base), "rotary": rotary, "patch_size": (1, side, side)}


def _allegro(config: TransformerConfig) -> Settings:
    """Read the config of Allegro: each axis rotates a third of every head; a third counts as a head with one axis."""
    head, heads = config.integer("attention_head_dim", 96), config.integer("num_attention_heads", 24)
    if head % 6:
        raise InvalidInputError(f"config.attention_head_dim: got {head}, want a multiple of 6")
    scales = [config.fraction(f"interpolation_scale_{axis}", n) for axis, n in zip("thw", (2.2, 2.0, 2.0), strict=True)]
    return {
        "scheme": Allegro(*(1 / scale for scale in scales)),
        "rotary": Rotary(head_dim=head // 3, axes=3, allocation="heads", head_axes=[0, 1, 2] * heads),
        "patch_size": config.patch(default=2),
    }


def _ltx(config: TransformerConfig) -> Settings:
    config.want("patch_size", 1, 1)
    config.want("patch_size_t", 1, 1)
    heads, channels = config.integer("num_attention_heads", 32), config.integer("attention_head_dim", 64)
    whole = ("LTXImageToVideoPipeline", "LTXModularPipeline", "LTXPipeline")  # without a shorter first latent
    causal = ("LTXConditionPipeline", "LTXI2VLongMultiPromptPipeline")
    pipelines = dict.fromkeys(whole, Ltx(causal_offset=8)) | dict.fromkeys(causal, Ltx())
    return {"scheme": pipelines, "rotary": _ltx_rotary(heads, channels)}


def _ltx_2(config: TransformerConfig) -> Settings:
    config.want("patch_size", 1, 1)
    config.want("patch_size_t", 1, 1)
    config.want("rope_type", "interleaved", "interleaved", "split")
    heads, channels = config.integer("num_attention_heads", 32), config.integer("attention_head_dim", 128)
    scales = config.integers("vae_scale_factors", (8, 32, 32))
    rows, columns = (config.integer(name, 2048) for name in ("base_height", "base_width"))
    scheme = Ltx2(
        row_step=Fraction(2 * scales[1], rows),
        col_step=Fraction(2 * scales[2], columns),
        tokens_per_second=Fraction(2, config.integer("pos_embed_max_pos", 20)),
        causal_offset=config.integer("causal_offset", 1, minimum=0),
        frames_per_latent=scales[0],
    )
    pairing: Pairing = "half" if config.get("rope_type") == "split" else "adjacent"
    rotary = _ltx_rotary(heads, channels, config.number("rope_theta", 10000.0), pairing)
    return {"scheme": scheme, "rotary": rotary, "vae_scale": scales}


def _ltx_rotary(heads: int, channels: int, theta: float = 10000.0, pairing: Pairing = "adjacent") -> Rotary:
    """Build the rotation of LTX: frequencies increase across all heads, and each frequency has one pair per axis.

    The first pairs, left over when pairs are divided evenly among the axes, are not rotated.
    """
    frequencies = heads * channels // 6
    return Rotary(
        channels,
        theta=theta,
        allocation=[STILL] * (heads * channels // 2 - 3 * frequencies) + [0, 1, 2] * frequencies,
        axes_dim=[2 * frequencies] * 3,
        kv_heads=heads,
        scaling=Linspace(pi / 2),
        pairing=pairing,
    )


def _cosmos(config: TransformerConfig) -> Settings:
    head = config.integer("attention_head_dim", 128)
    scales = config.get("rope_scale", (2.0, 1.0, 1.0))
    if not isinstance(scales, list | tuple) or len(scales) != 3:
        raise InvalidInputError(f"config.rope_scale: got {scales!r}, want 3 numbers")
    patch = config.patch()
    sizes = config.integers("max_size", (128, 240, 240))
    longest = max(size // n for size, n in zip(sizes, patch, strict=True))
    rotary = Rotary(head, allocation="axial", axes_dim=_thirds(head), scaling=[NTK(scale) for scale in scales])
    limits = ((0, 2**31 - 1), (0, longest - 1), (0, longest - 1))  # frames are scaled after the lookup
    timed = ["AnimaModularPipeline", "Cosmos2TextToImagePipeline", "Cosmos2VideoToWorldPipeline"]
    timed += ["CosmosTextToWorldPipeline", "CosmosVideoToWorldPipeline"]
    by_frame = ("Cosmos2_5_PredictBasePipeline", "Cosmos2_5_TransferPipeline")
    pipelines = dict.fromkeys(timed, Cosmos()) | dict.fromkeys(by_frame, Wan())
    return {"scheme": pipelines, "rotary": rotary, "patch_size": patch, "limits": limits}


def _cosmos_3(config: TransformerConfig) -> Settings:
    config.want("unified_3d_mrope_reset_spatial_ids", True, True)
    config.want("enable_fps_modulation", True, True)
    scaling = config.get("rope_scaling")
    default = tuple(scaling.get("mrope_section", (24, 20, 20))) if isinstance(scaling, Mapping) else (24, 20, 20)
    rotary = Rotary(
        head_dim=config.integer("head_dim", 128),
        theta=config.number("rope_theta", 5e6),
        axes=3,
        allocation="mrope-interleaved",
        mrope_section=config.integers("rope_axes_dim", default),
    )
    side = config.integer("latent_patch_size", 2)
    scheme = Cosmos3(
        tokens_per_second=config.integer("base_fps", 24),
        margin=config.integer("unified_3d_mrope_temporal_modality_margin", 15000, minimum=0),
    )
    return {"scheme": scheme, "rotary": rotary, "patch_size": (1, side, side)}


def _flux(config: TransformerConfig) -> Settings:
    settings = _axial("flux", "axes_dims_rope", (16, 56, 56))(config)
    if config.get("in_channels", 64) == 384:  # FLUX.1 Fill, which VisualCloze also uses
        settings["scheme"] = dict.fromkeys(("VisualClozeGenerationPipeline", "VisualClozePipeline"), Flux(first=1))
        settings["scheme"]["FluxFillPipeline"] = Flux()
    return settings


def _kandinsky_5(config: TransformerConfig) -> Settings:
    reason = (
        "it divides rows and columns by 2 if both sides have 480 to 854 pixels, else by 3.16; use mmpos.schemes."
        "Kandinsky with row_step and col_step of Fraction(1, 2) or Fraction(25, 79)"
    )
    settings = _kandinsky((16, 24, 24))(config)
    same = dict.fromkeys(("Kandinsky5I2IPipeline", "Kandinsky5T2IPipeline"), settings["scheme"])
    by_size = dict.fromkeys(("Kandinsky5I2VPipeline", "Kandinsky5T2VPipeline"), reason)
    return settings | {"scheme": same | by_size}


def _kandinsky(dims: tuple[int, int, int], *, patch: tuple[int, int, int] = (1, 2, 2), scaled: bool = False) -> Reader:
    """Return a config reader for Kandinsky 5, whose pipeline chooses the scales, or 6, whose config defines them."""

    def read(config: TransformerConfig) -> Settings:
        channels = config.integers("axes_dims", dims)
        scales = config.fractions("scale_factor", (1.0, 2.0, 2.0)) if scaled else (Fraction(1),) * 3
        return {
            "scheme": Kandinsky(*(1 / scale for scale in scales)),
            "rotary": _axes_in_blocks(channels),
            "text_rotary": Rotary(head_dim=sum(channels), axes=1, pairing="adjacent"),
            "patch_size": config.patch(default=patch),
        }

    return read


def _kandinsky_6_sr(config: TransformerConfig) -> Settings:
    return _kandinsky((16, 24, 24), patch=(1, 1, 1), scaled=True)(config) | {"text_rotary": None}


def _minimax_h3(config: TransformerConfig) -> Settings:
    rotary = Rotary(
        head_dim=config.integer("attention_head_dim", 128),
        rotary_dim=6 * config.integer("rope_freq_dim", 16),
        theta=config.number("rope_theta", 10000.0),
        axes=3,
        allocation="axial",
    )
    return {"scheme": MiniMaxH3(), "rotary": rotary, "patch_size": config.patch()}


_TABLE = tomllib.loads(files(__package__).joinpath("classes.toml").read_text(encoding="utf-8"))


def _rows(kind: str, reader: Callable[..., Reader]) -> dict[str, Reader]:
    """Return the config readers of the table's rows of one kind, by class."""
    readers: dict[str, Reader] = {}
    for row in _TABLE[kind]:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        readers |= dict.fromkeys(str(values.pop("classes")).split(), reader(**values))
    return readers


TRANSFORMERS: Mapping[str, Reader] = MappingProxyType(
    {
        **_rows("axial", _axial),
        **_rows("wan", _wan),
        "AllegroTransformer3DModel": _allegro,
        "AnyFlowFARTransformer3DModel": _any_flow_far,
        "BriaFibo2Transformer2DModel": _bria_fibo_2,
        "ChronoEditTransformer3DModel": _chrono_edit,
        "CogVideoXTransformer3DModel": _cog_video(),
        "ConsisIDTransformer3DModel": _cog_video(stretched=True),
        "Cosmos3OmniTransformer": _cosmos_3,
        "CosmosTransformer3DModel": _cosmos,
        "EasyAnimateTransformer3DModel": _easy_animate,
        "ErnieImageTransformer2DModel": _ernie_image,
        "FluxTransformer2DModel": _flux,
        "GlmImageTransformer2DModel": _glm_image,
        "HunyuanDiT2DModel": _hunyuan_dit,
        "HunyuanImageTransformer2DModel": _hunyuan_image,
        "Ideogram4Transformer2DModel": _ideogram_4,
        "JoyImageEditPlusTransformer3DModel": _joy_image,
        "JoyImageEditTransformer3DModel": _joy_image_edit,
        "Kandinsky5Transformer3DModel": _kandinsky_5,
        "Kandinsky6SRTransformer3DModel": _kandinsky_6_sr,
        "Kandinsky6Transformer3DModel": _kandinsky((32, 48, 48), scaled=True),
        "LTX2VideoTransformer3DModel": _ltx_2,
        "LTXVideoTransformer3DModel": _ltx,
        "MiniMaxH3Transformer3DModel": _minimax_h3,
        "QwenImageTransformer2DModel": _qwen_image,
        "SanaWMLTX2RefinerTransformer3DModel": _ltx_2,
        "SanaWMTransformer3DModel": _sana_wm,
        "WanAnimate2Transformer3DModel": _wan_animate_2,
        "ZImageTransformer2DModel": _z_image,
    }
)
"""Supported classes, each with its config reader."""

_REASONS = {**_TABLE["refused"], **{NOT_AFFINE[name]: classes for name, classes in _TABLE["not_affine"].items()}}

REFUSED: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, classes in _REASONS.items() for name in classes.split()}
)
"""Classes that from_diffusers refuses, with the reason."""
