"""Cos and sin of a document's pairs, computed by diffusers' own classes from the inputs that their pipelines pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models import embeddings
from torch import Tensor

from mmpos import Grid, Text
from mmpos.integrations.diffusers.settings import TransformerSettings

__all__ = ["PEERS", "Document", "Peer", "transformer_of"]

CosSin = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Document:
    """The number of text tokens, and the sizes of images in tokens, the generated image first."""

    text: int
    images: tuple[tuple[int, int, int], ...]

    def parts(self, settings: TransformerSettings, *, text: bool = True) -> list[Text | Grid]:
        """Return the parts to pass to ``settings.place``."""
        texts = [Text(self.text)] if text and self.text else []
        seconds = 1 / (25 if settings.scheme.name == "ltx" else 24)  # as in the pipelines
        return [*texts, *(Grid(h, w, frames=f, seconds_per_frame=seconds) for f, h, w in self.images)]

    @property
    def latents(self) -> Tensor:
        """Zero latents for the generated image, with one channel and 2 × 2 latents per token."""
        frames, height, width = self.images[0]
        return torch.zeros(1, 1, frames, 2 * height, 2 * width)


@dataclass(frozen=True)
class Peer:
    """A diffusers transformer class.

    Args:
        config: config for a small transformer.
        rotation: function of a transformer and a document that returns (tokens, pairs) cos and sin, text first.
        dtype: dtype of the angles.
        text: whether text has positions.
        images: the maximum number of images in a document; −2 requires exactly two.
        frames: whether images have frames.
        even: number by which the number of text tokens must be divisible.
        pairing: how the attention processors pair the channels that they rotate.
        pipeline: the pipeline whose inputs ``rotation`` uses, if pipelines of the class compute different ids.
    """

    config: Mapping[str, Any]
    rotation: Callable[[Any, Document], CosSin]
    dtype: torch.dtype = torch.float64
    text: bool = True
    images: int = 1
    frames: bool = False
    even: int = 1
    pairing: str = "adjacent"
    pipeline: str | None = None


def transformer_of(name: str) -> Any:
    """Build a small transformer of the named class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(diffusers, name)(**PEERS[name].config)


def _grid(*starts: int, frames: int, height: int, width: int) -> Tensor:
    """Return (tokens, 3) ids of a grid with these starts."""
    ranges = (torch.arange(s, s + n) for s, n in zip(starts, (frames, height, width), strict=True))
    return torch.cartesian_prod(*ranges).reshape(-1, 3)


def _repeated(pair: CosSin) -> CosSin:
    """Keep one of every two adjacent channels of (tokens, channels), which must be equal."""
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in pair)
    assert torch.equal(cos[:, ::2], cos[:, 1::2])
    return cos[:, ::2], sin[:, ::2]


def _halves(pair: CosSin) -> CosSin:
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in pair)
    pairs = cos.shape[1] // 2
    assert torch.equal(cos[:, :pairs], cos[:, pairs:])
    return cos[:, :pairs], sin[:, :pairs]


def _complex(x: Tensor) -> CosSin:
    x = x.reshape(-1, x.shape[-1])
    return x.real, x.imag


def _matrices(x: Tensor) -> CosSin:
    """Take cos and sin from (…, pairs, 2, 2) rotations."""
    x = x.reshape(-1, *x.shape[-3:])
    assert torch.equal(x[..., 0, 0], x[..., 1, 1])
    assert torch.equal(x[..., 0, 1], -x[..., 1, 0])
    return x[..., 0, 0], x[..., 1, 0]


def _still(text: int, pair: CosSin) -> CosSin:
    """Prepend text, which an image-only rotation leaves unrotated."""
    cos, sin = pair
    return torch.cat([torch.ones(text, cos.shape[1]), cos]), torch.cat([torch.zeros(text, sin.shape[1]), sin])


def _by_ids(name: str = "pos_embed") -> Callable[[Any, Document], CosSin]:
    def rotation(transformer: Any, document: Document) -> CosSin:
        images = [_grid(k, 0, 0, frames=1, height=h, width=w) for k, (_, h, w) in enumerate(document.images)]
        ids = torch.cat([torch.zeros(document.text, 3), *images]).float()
        return _repeated(getattr(transformer, name)(ids))

    return rotation


def _flux_2(transformer: Any, document: Document) -> CosSin:
    pipeline = diffusers.Flux2Pipeline
    (_, height, width), *references = document.images
    text = pipeline._prepare_text_ids(torch.zeros(1, document.text, 1))[0]
    ids = [text, pipeline._prepare_latent_ids(torch.zeros(1, 1, height, width))[0]]
    if references:
        ids.append(pipeline._prepare_image_ids([torch.zeros(1, 1, h, w) for _, h, w in references])[0])
    return _repeated(transformer.pos_embed(torch.cat(ids)))


def _flux_3(transformer: Any, document: Document) -> CosSin:
    ids = torch.zeros(document.text, 4)
    ids[:, 3] = torch.arange(document.text)
    parts = [ids]
    for k, (_, height, width) in enumerate(document.images):
        grid = _grid(0, 0, 0, frames=1, height=height, width=width) * 0.5
        parts.append(torch.cat([grid, torch.full((len(grid), 1), -float(k))], 1))
    return _repeated(transformer.pos_embed(torch.cat(parts)))


def _qwen(transformer: Any, document: Document) -> CosSin:
    cpu = torch.device("cpu")
    images, text = transformer.pos_embed([list(document.images)], max_txt_seq_len=document.text, device=cpu)
    return _complex(torch.cat([text, images]))


def _qwen_21(transformer: Any, document: Document) -> CosSin:
    (_, height, width), *_ = document.images
    is_image = torch.arange(document.text + height * width) >= document.text
    return _complex(transformer.pos_embed(list(document.images), is_image, torch.device("cpu")))


def _lumina_2(transformer: Any, document: Document) -> CosSin:
    mask = torch.ones(1, document.text, dtype=torch.int64)
    return _complex(transformer.rope_embedder(document.latents[:, :, 0], mask)[3])


def _z_image(transformer: Any, document: Document) -> CosSin:
    (frames, height, width), *_ = document.images
    text = _grid(1, 0, 0, frames=document.text, height=1, width=1)
    image = _grid(1 + document.text, 0, 0, frames=frames, height=height, width=width)
    return _complex(transformer.rope_embedder(torch.cat([text, image])))


def _bria_fibo_2(transformer: Any, document: Document) -> CosSin:
    text = _grid(1, 0, 0, frames=document.text, height=1, width=1)
    plane = transformer.config.max_num_gist_tokens + 1
    images = [_grid(plane + k, 0, 0, frames=1, height=h, width=w) for k, (_, h, w) in enumerate(document.images)]
    return _complex(transformer.rope_embedder(torch.cat([text, *images])))


def _shifted(*, text_axes: tuple[int, ...], at: Callable[[int], int], name: str = "pos_embed") -> Callable[..., CosSin]:
    """Rotate text that counts on some axes, and images with planes from 1 and rows and columns from ``at(text)``."""

    def rotation(transformer: Any, document: Document) -> CosSin:
        text = torch.zeros(document.text, 3)
        text[:, text_axes] = torch.arange(document.text).float()[:, None]
        start, parts = at(document.text), [text]
        for k, (_, height, width) in enumerate(document.images):
            plane = k + (1 if start else 0)
            parts.append(_grid(plane, start, start, frames=1, height=height, width=width))
        return _repeated(getattr(transformer, name)(torch.cat(parts)))

    return rotation


def _by_latents(form: Callable[[Any], CosSin], *, flat: bool = False, name: str = "rope") -> Callable[..., CosSin]:
    """Return the rotation by a module that takes latents and does not rotate text."""

    def rotation(transformer: Any, document: Document) -> CosSin:
        latents = document.latents[:, :, 0] if flat else document.latents
        return _still(document.text, form(getattr(transformer, name)(latents)))

    return rotation


def _wan(transformer: Any, document: Document) -> CosSin:
    return _repeated(transformer.rope(document.latents))


def _any_flow(transformer: Any, document: Document) -> CosSin:
    frames, height, width = document.images[0]
    return _complex(transformer.rope._forward_full_frame(frames, height, width, torch.device("cpu")))


def _any_flow_far(transformer: Any, document: Document) -> CosSin:
    """Rotate a context of compressed frames, then full-size frames."""
    (context, rows, columns), (frames, height, width) = document.images
    rope, cpu = transformer.rope, torch.device("cpu")
    coarse = rope._forward_compressed_frame(context, rows, columns, cpu).flatten(0, 2)
    fine = rope._forward_full_frame(context + frames, height, width, cpu)[context:].flatten(0, 2)
    return _complex(torch.cat([coarse, fine]))


def _sana_wm(transformer: Any, document: Document) -> CosSin:
    return _complex(transformer.rope(document.images[0]))


def _cog_video(transformer: Any, document: Document) -> CosSin:
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    config, (frames, height, width) = transformer.config, document.images[0]
    base = config.sample_width // config.patch_size, config.sample_height // config.patch_size
    arguments: dict[str, Any] = {"crops_coords": get_resize_crop_region_for_grid((height, width), *base)}
    if config.get("patch_size_t") is not None:
        arguments = {"crops_coords": None, "grid_type": "slice", "max_size": base[::-1]}
    pair = embeddings.get_3d_rotary_pos_embed(
        config.attention_head_dim, grid_size=(height, width), temporal_size=frames, **arguments
    )
    return _still(document.text, _repeated(pair))


def _hunyuan_dit(transformer: Any, document: Document) -> CosSin:
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    (_, height, width), side = document.images[0], transformer.config.patch_size
    crops = get_resize_crop_region_for_grid((height, width), 512 // 8 // side)
    head = transformer.inner_dim // transformer.num_heads
    pair = embeddings.get_2d_rotary_pos_embed(head, crops, (height, width), output_type="pt")
    return _repeated(pair)


def _allegro(transformer: Any, document: Document) -> CosSin:
    config, (frames, height, width) = transformer.config, document.images[0]
    scales = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
    tables = embeddings.get_3d_rotary_pos_embed_allegro(
        config.attention_head_dim, ((0, 0), (height, width)), (height, width), frames, interpolation_scale=scales
    )
    index = _grid(0, 0, 0, frames=frames, height=height, width=width).T
    cos, sin = (torch.stack([axis[part][i] for axis, i in zip(tables[:3], index, strict=True)], 1) for part in (0, 1))
    cos, sin = _halves((cos, sin))
    return cos.reshape(index.shape[1], -1), sin.reshape(index.shape[1], -1)


def _ltx(transformer: Any, document: Document) -> CosSin:
    """Use the coordinates of LTXConditionPipeline: pixels of causal frames at 25 frames per second."""
    frames, height, width = document.images[0]
    grid = _grid(0, 0, 0, frames=frames, height=height, width=width).T.float()
    coordinates = torch.stack([(8 * grid[0] - 7).clamp(min=0) / 25, 32 * grid[1], 32 * grid[2]])
    channels = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    hidden_states = torch.zeros(1, grid.shape[1], channels)
    return _repeated(transformer.rope(hidden_states, video_coords=coordinates[None]))


def _ltx_2(transformer: Any, document: Document) -> CosSin:
    coordinates = transformer.rope.prepare_video_coords(1, *document.images[0], torch.device("cpu"))
    cos, sin = transformer.rope(coordinates)
    if transformer.config.rope_type == "interleaved":
        return _repeated((cos, sin))
    return cos[0].swapaxes(0, 1).flatten(1), sin[0].swapaxes(0, 1).flatten(1)


def _kandinsky(*, batch: bool = False) -> Callable[..., CosSin]:
    def rotation(transformer: Any, document: Document) -> CosSin:
        sizes = document.images[0]
        indices = tuple(torch.arange(n) for n in sizes)
        if batch:
            return _matrices(transformer.visual_rope_embeddings((1, *sizes), indices))
        return _matrices(transformer.visual_rope_embeddings(indices, transformer.config.scale_factor))

    return rotation


def _ideogram_4(transformer: Any, document: Document) -> CosSin:
    text = torch.arange(document.text)[:, None].expand(-1, 3)
    frames, height, width = document.images[0]
    image = 65536 + _grid(0, 0, 0, frames=frames, height=height, width=width)
    return _halves(transformer.rotary_emb(torch.cat([text, image])[None]))


def _cosmos_3(transformer: Any, document: Document) -> CosSin:
    text = torch.arange(document.text)[:, None].expand(-1, 3)
    frames, height, width = document.images[0]
    margin = transformer.config.unified_3d_mrope_temporal_modality_margin
    video = _grid(document.text + margin, 0, 0, frames=frames, height=height, width=width)
    ids = torch.cat([text, video]).T[:, None]
    return _halves(transformer.rotary_emb(ids, torch.device("cpu"), torch.float32))


def _minimax_h3(transformer: Any, document: Document) -> CosSin:
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    frames, height, width = document.images[0]
    text = torch.zeros(document.text, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(document.text)
    places, _ = before_denoise._frame_position_grid(2 * height, 2 * width, 2, 2)
    times = before_denoise._temporal_position_grid(frames, float(document.text))
    video = torch.cat([times.repeat_interleave(len(places))[:, None], places.repeat(frames, 1)], 1)
    return _halves(transformer.rope(torch.cat([text, video])))


def _joy_image(transformer: Any, document: Document) -> CosSin:
    pair, _ = transformer.get_rotary_pos_embed(list(document.images[0]))
    return _still(document.text, _repeated(pair))


def _joy_image_plus(transformer: Any, document: Document) -> CosSin:
    """Place images one after another on the frame axis."""
    parts, first = [], 0
    for frames, height, width in document.images:
        parts.append(transformer._get_rotary_pos_embed_for_range((first, 0, 0), (first + frames, height, width)))
        first += frames
    cos, sin = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return _still(document.text, _repeated((cos, sin)))


def _ernie(transformer: Any, document: Document) -> CosSin:
    """Compute the angles of all channels, with the image first as in the model's forward."""
    _, height, width = document.images[0]
    text = torch.zeros(document.text, 3)
    text[:, 0] = torch.arange(document.text)
    image = _grid(document.text, 0, 0, frames=1, height=height, width=width)
    angles = transformer.pos_embed(torch.cat([image, text])[None])[0, :, 0]
    return angles.cos(), angles.sin()


def _wan_animate_2(transformer: Any, document: Document) -> CosSin:
    """Rotate the generated video, and the reference to the right of it."""
    (frames, height, width), reference = document.images
    generated = transformer._rope_freqs((0, 0, 0), torch.device("cpu"))
    right = transformer._rope_freqs((1, 0, reference[2]), torch.device("cpu"))
    pairs = transformer.config.dim // transformer.config.num_heads // 2
    split = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    parts = []
    for table, sizes in ((generated, (frames, height, width)), (right, reference)):
        index = _grid(0, 0, 0, frames=sizes[0], height=sizes[1], width=sizes[2])
        parts.append(torch.cat([x[i] for x, i in zip(table.split(split, 1), index.T, strict=True)], 1))
    return _complex(torch.cat(parts))


def _hidream(transformer: Any, document: Document) -> CosSin:
    _, height, width = document.images[0]
    ids = torch.cat([torch.zeros(document.text, 3), _grid(0, 0, 0, frames=1, height=height, width=width)])
    return _matrices(transformer.pe_embedder(ids[None]))


def _prx(transformer: Any, document: Document) -> CosSin:
    _, height, width = document.images[0]
    ids = _grid(0, 0, 0, frames=1, height=height, width=width)[None, :, 1:]
    return _still(document.text, _matrices(transformer.pe_embedder(ids)))


_TINY: dict[str, Any] = {"num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 2}
_FLUX: dict[str, Any] = {**_TINY, "num_single_layers": 1, "joint_attention_dim": 16, "axes_dims_rope": (8, 12, 12)}
_WAN: dict[str, Any] = {**_TINY, "text_dim": 16, "ffn_dim": 16, "freq_dim": 16}
_HUNYUAN: dict[str, Any] = {
    **_TINY, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16, "rope_axes_dim": (8, 12, 12)
}  # fmt: skip
_JOY: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 2, "num_layers": 1, "text_dim": 16, "rope_dim_list": [8, 12, 12]
}  # fmt: skip
_COG_VIDEO: dict[str, Any] = {
    **_TINY, "use_rotary_positional_embeddings": True, "text_embed_dim": 16, "time_embed_dim": 8
}  # fmt: skip
_LTX: dict[str, Any] = {**_TINY, "cross_attention_dim": 64, "caption_channels": 8}
_LTX_2: dict[str, Any] = {
    **_LTX, "audio_num_attention_heads": 2, "audio_attention_head_dim": 16, "audio_cross_attention_dim": 32
}  # fmt: skip
_KANDINSKY: dict[str, Any] = {
    "time_dim": 8, "model_dim": 64, "ff_dim": 8, "num_visual_blocks": 1, "axes_dims": (8, 12, 12)
}  # fmt: skip
_KANDINSKY_TEXT: dict[str, Any] = {**_KANDINSKY, "in_text_dim": 8, "in_text_dim2": 8, "num_text_blocks": 1}

PEERS: Mapping[str, Peer] = {
    "FluxTransformer2DModel": Peer({**_FLUX, "pooled_projection_dim": 8}, _by_ids(), images=3),
    "ChromaTransformer2DModel": Peer({**_FLUX, "approximator_hidden_dim": 16}, _by_ids(), images=3),
    "BriaTransformer2DModel": Peer({**_FLUX, "rope_theta": 5000}, _by_ids(), images=3),
    "BriaFiboTransformer2DModel": Peer({**_FLUX, "text_encoder_dim": 8}, _by_ids(), images=3),
    "Krea2Transformer2DModel": Peer(
        {
            **_TINY,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
            "text_hidden_dim": 20,
            "text_num_attention_heads": 1,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 8,
            "axes_dims_rope": (8, 12, 12),
        },
        _by_ids("rotary_emb"),
    ),
    "Flux2Transformer2DModel": Peer({**_FLUX, "axes_dims_rope": (8, 8, 8, 8)}, _flux_2, images=4),
    "Flux3Transformer2DModel": Peer({**_FLUX, "axes_dims_rope": (8, 8, 8, 8)}, _flux_3, images=3),
    "QwenImageTransformer2DModel": Peer(
        {**_TINY, "joint_attention_dim": 16, "axes_dims_rope": (8, 12, 12)},
        _qwen,
        torch.float32,
        images=3,
        frames=True,
    ),
    "NucleusMoEImageTransformer2DModel": Peer(
        {
            **_TINY,
            "num_key_value_heads": 1,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 12, 12),
            "moe_intermediate_dim": 8,
            "num_experts": 2,
        },
        _qwen,
        torch.float32,
    ),
    "QwenImage21Transformer2DModel": Peer(
        {**_TINY, "context_in_dim": 16, "axes_dims_rope": (8, 12, 12)}, _qwen_21, torch.float32
    ),
    "Lumina2Transformer2DModel": Peer(
        {
            "hidden_size": 48,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "axes_dim_rope": (8, 8, 8),
            "cap_feat_dim": 16,
        },
        _lumina_2,
    ),
    "ZImageTransformer2DModel": Peer(
        {
            "dim": 64,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 12, 12],
        },
        _z_image,
        torch.float32,
        even=32,
    ),
    "BriaFibo2Transformer2DModel": Peer(
        {"dim": 64, "n_layers": 1, "n_heads": 2, "cap_feat_dim": 16, "axes_dims": (8, 12, 12)},
        _bria_fibo_2,
        torch.float32,
        images=3,
    ),
    "LongCatImageTransformer2DModel": Peer(
        {**_FLUX, "pooled_projection_dim": 8}, _shifted(text_axes=(1, 2), at=lambda text: text), images=2
    ),
    "OvisImageTransformer2DModel": Peer(_FLUX, _shifted(text_axes=(1, 2), at=lambda text: 0)),
    "HiDreamImageTransformer2DModel": Peer(
        {
            **_TINY,
            "num_single_layers": 1,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "caption_channels": [8, 8],
            "text_emb_dim": 8,
            "axes_dims_rope": (8, 12, 12),
            "max_resolution": (64, 64),
        },
        _hidream,
    ),
    "HunyuanVideoTransformer3DModel": Peer(
        {**_HUNYUAN, "pooled_projection_dim": 8}, _by_latents(_repeated), torch.float32, frames=True
    ),
    "HunyuanVideo15Transformer3DModel": Peer(
        {
            **_TINY,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 16,
            "image_embed_dim": 16,
            "rope_axes_dim": (8, 12, 12),
            "patch_size": 2,
        },
        _by_latents(_repeated),
        torch.float32,
        frames=True,
    ),
    "MotifVideoTransformer3DModel": Peer(
        {**_TINY, "num_single_layers": 1, "num_decoder_layers": 0, "text_embed_dim": 16, "rope_axes_dim": (8, 12, 12)},
        _by_latents(_repeated),
        frames=True,
    ),
    "HunyuanImageTransformer2DModel": Peer(
        {**_HUNYUAN, "rope_axes_dim": (16, 16), "patch_size": (2, 2)}, _by_latents(_repeated, flat=True), torch.float32
    ),
    "GlmImageTransformer2DModel": Peer(
        {**_TINY, "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 8},
        _by_latents(_halves, flat=True),
        torch.float32,
        pairing="half",
    ),
    "PRXTransformer2DModel": Peer(
        {"hidden_size": 64, "num_heads": 2, "depth": 1, "context_in_dim": 16, "axes_dim": [16, 16]}, _prx
    ),
    "JoyImageEditTransformer3DModel": Peer(_JOY, _joy_image, torch.float32, frames=True),
    "JoyImageEditPlusTransformer3DModel": Peer(_JOY, _joy_image_plus, torch.float32, frames=True, images=3),
    "ErnieImageTransformer2DModel": Peer(
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_layers": 1,
            "ffn_hidden_size": 16,
            "text_in_dim": 16,
            "rope_axes_dim": (8, 12, 12),
        },
        _ernie,
        torch.float32,
        pairing="half",
    ),
    "WanAnimateTransformer3DModel": Peer(
        {
            **_WAN,
            "image_dim": 8,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8},
            "motion_encoder_size": 8,
            "motion_style_dim": 8,
            "motion_dim": 2,
            "motion_encoder_dim": 8,
            "face_encoder_hidden_dim": 8,
            "face_encoder_num_heads": 1,
        },
        _wan,
        text=False,
        frames=True,
    ),
    "WanAnimate2Transformer3DModel": Peer(
        {"dim": 64, "num_heads": 2, "ffn_dim": 16, "freq_dim": 16, "text_dim": 16, "num_layers": 1},
        _wan_animate_2,
        text=False,
        frames=True,
        images=-2,
    ),
    "SanaWMTransformer3DModel": Peer(
        {
            "num_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "linear_head_dim": 32,
            "caption_channels": 8,
            "chunk_plucker_post_attn_blocks": 1,
        },
        _sana_wm,
        torch.float32,
        text=False,
        frames=True,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Peer(_LTX_2, _ltx_2, torch.float32, text=False, frames=True),
    "Kandinsky6SRTransformer3DModel": Peer(_KANDINSKY, _kandinsky(), torch.float32, text=False, frames=True),
    "WanTransformer3DModel": Peer(_WAN, _wan, text=False, frames=True),
    "WanVACETransformer3DModel": Peer({**_WAN, "vace_layers": [0]}, _wan, text=False, frames=True),
    "SkyReelsV2Transformer3DModel": Peer(_WAN, _wan, text=False, frames=True),
    "ChronoEditTransformer3DModel": Peer(_WAN, _wan, text=False, frames=True),
    "SanaVideoTransformer3DModel": Peer(
        {
            **_TINY,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 16,
        },
        _wan,
        text=False,
        frames=True,
    ),
    "AnyFlowTransformer3DModel": Peer(_WAN, _any_flow, text=False, frames=True),
    "AnyFlowFARTransformer3DModel": Peer(_WAN, _any_flow_far, text=False, frames=True, images=-2),
    "CogVideoXTransformer3DModel": Peer(_COG_VIDEO, _cog_video, torch.float32, frames=True),
    "ConsisIDTransformer3DModel": Peer({**_COG_VIDEO, "is_train_face": False}, _cog_video, torch.float32, frames=True),
    "EasyAnimateTransformer3DModel": Peer(
        {**_TINY, "patch_size": 2, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8},
        _by_latents(_repeated, name="rope_embedding"),
        torch.float32,
        frames=True,
    ),
    "HunyuanDiT2DModel": Peer(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "hidden_size": 32,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "pooled_projection_dim": 8,
        },
        _hunyuan_dit,
        torch.float32,
        text=False,
    ),
    "AllegroTransformer3DModel": Peer(
        {**_TINY, "attention_head_dim": 24, "cross_attention_dim": 48, "caption_channels": 8},
        _allegro,
        torch.float32,
        text=False,
        frames=True,
        pairing="half",
    ),
    "LTXVideoTransformer3DModel": Peer(
        _LTX, _ltx, torch.float32, text=False, frames=True, pipeline="LTXConditionPipeline"
    ),
    "LTX2VideoTransformer3DModel": Peer(
        {**_LTX_2, "rope_type": "split"}, _ltx_2, torch.float32, text=False, frames=True, pairing="half"
    ),
    "CosmosTransformer3DModel": Peer(
        {
            **_TINY,
            "text_embed_dim": 16,
            "adaln_lora_dim": 8,
            "extra_pos_embed_type": None,
            "rope_scale": (2.0, 1.0, 4.0),
        },
        _by_latents(_halves),
        torch.float32,
        text=False,
        frames=True,
        pairing="half",
        pipeline="Cosmos2_5_PredictBasePipeline",
    ),
    "Kandinsky5Transformer3DModel": Peer(
        _KANDINSKY_TEXT,
        _kandinsky(batch=True),
        torch.float32,
        text=False,
        pipeline="Kandinsky5T2IPipeline",
    ),
    "Kandinsky6Transformer3DModel": Peer(_KANDINSKY_TEXT, _kandinsky(), torch.float32, text=False, frames=True),
    "Ideogram4Transformer2DModel": Peer(
        {
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "num_layers": 1,
            "intermediate_size": 16,
            "adaln_dim": 8,
            "llm_features_dim": 16,
            "mrope_section": (6, 5, 5),
        },
        _ideogram_4,
        torch.float32,
        pairing="half",
    ),
    "MiniMaxH3Transformer3DModel": Peer(
        {
            **_TINY,
            "num_refiner_layers": 1,
            "hidden_size": 32,
            "ffn_dim": 16,
            "text_dim": 16,
            "freq_dim": 16,
            "time_embed_hidden_dim": 8,
            "time_embed_dim": 8,
            "rope_freq_dim": 4,
        },
        _minimax_h3,
        torch.float32,
        frames=True,
        pairing="half",
    ),
    "Cosmos3OmniTransformer": Peer(
        {
            "head_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 1,
            "vocab_size": 32,
            "rope_axes_dim": [6, 5, 5],
        },
        _cosmos_3,
        torch.float32,
        frames=True,
        pairing="half",
    ),
}
