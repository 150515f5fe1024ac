"""Cos and sin of a document's pairs, computed by diffusers' own classes from the inputs that their pipelines pass.

tests/golden/diffusers_transformers.json names the function of each class and configures a small transformer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmpos import Grid, Text
from mmpos.integrations.diffusers.settings import TransformerSettings

CPU = torch.device("cpu")
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
        rotation: key in ROTATIONS of a function that returns (tokens, pairs) cos and sin, text first.
        dtype: dtype of the angles.
        text: whether text has positions.
        images: the maximum number of images in a document; −2 requires exactly two.
        frames: whether images have frames.
        even: number by which the number of text tokens must be divisible.
        pairing: how the attention processors pair the channels that they rotate.
        pipeline: the pipeline whose inputs ``rotation`` uses, if pipelines of the class compute different ids.
    """

    config: Mapping[str, Any]
    rotation: str
    dtype: str = "float64"
    text: bool = True
    images: int = 1
    frames: bool = False
    even: int = 1
    pairing: str = "adjacent"
    pipeline: str | None = None


GOLDEN = Path(__file__).parents[1] / "golden" / "diffusers_transformers.json"
PEERS = {name: Peer(**row) for name, row in json.loads(GOLDEN.read_text(encoding="utf-8")).items()}


def transformer_of(name: str) -> Any:
    """Build a small transformer of the named class."""
    import diffusers

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


def _ids(document: Document, text: tuple[int, ...] = (0, 0, 0), start: Any = (0, 0, 0), first: int = 0) -> Tensor:
    """Return (tokens, 3) ids: text counts from ``first`` on the axes marked in ``text``, and images begin at ``start``.

    ``start`` may depend on the index of the image.
    """
    parts = [first * torch.tensor(text) + torch.arange(document.text)[:, None] * torch.tensor(text)]
    for k, (frames, height, width) in enumerate(document.images):
        at = start(k) if callable(start) else start
        parts.append(_grid(*at, frames=frames, height=height, width=width))
    return torch.cat(parts)


def _image_ids(document: Document) -> Tensor:
    """Return the (tokens, 3) ids of the generated image, from 0 on each axis."""
    return _ids(Document(0, document.images[:1]))


def _ones(document: Document) -> tuple[Tensor, ...]:
    """Return the indices on each axis of the generated image."""
    return tuple(torch.arange(n) for n in document.images[0])


def _flux_2(transformer: Any, document: Document) -> CosSin:
    from diffusers import Flux2Pipeline as pipeline  # noqa: N813

    (_, height, width), *references = document.images
    text = pipeline._prepare_text_ids(torch.zeros(1, document.text, 1))[0]
    ids = [text, pipeline._prepare_latent_ids(torch.zeros(1, 1, height, width))[0]]
    if references:
        ids.append(pipeline._prepare_image_ids([torch.zeros(1, 1, h, w) for _, h, w in references])[0])
    return _repeated(transformer.pos_embed(torch.cat(ids)))


def _flux_3(transformer: Any, document: Document) -> CosSin:
    ids = torch.zeros(document.text, 4)
    ids[:, 3] = torch.arange(document.text)
    grids = [_image_ids(Document(0, (image,))) * 0.5 for image in document.images]
    parts = [torch.cat([grid, torch.full((len(grid), 1), -float(k))], 1) for k, grid in enumerate(grids)]
    return _repeated(transformer.pos_embed(torch.cat([ids, *parts])))


def _qwen(transformer: Any, document: Document) -> CosSin:
    images, text = transformer.pos_embed([list(document.images)], max_txt_seq_len=document.text, device=CPU)
    return _complex(torch.cat([text, images]))


def _qwen_21(transformer: Any, document: Document) -> CosSin:
    is_image = torch.arange(document.text + len(_image_ids(document))) >= document.text
    return _complex(transformer.pos_embed(list(document.images), is_image, CPU))


def _by_latents(
    transformer: Any, document: Document, form: Callable[[Any], CosSin] = _repeated, module: str = "rope"
) -> CosSin:
    """Return the rotation by a module that takes latents and does not rotate text."""
    latents = document.latents[:, :, 0] if "2DModel" in type(transformer).__name__ else document.latents
    return _still(document.text, form(getattr(transformer, module)(latents)))


def _any_flow_far(transformer: Any, document: Document) -> CosSin:
    """Rotate a context of compressed frames, then full-size frames."""
    (context, rows, columns), (frames, height, width) = document.images
    rope = transformer.rope
    coarse = rope._forward_compressed_frame(context, rows, columns, CPU).flatten(0, 2)
    fine = rope._forward_full_frame(context + frames, height, width, CPU)[context:].flatten(0, 2)
    return _complex(torch.cat([coarse, fine]))


def _cog_video(transformer: Any, document: Document) -> CosSin:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    config, (frames, height, width) = transformer.config, document.images[0]
    base = config.sample_width // config.patch_size, config.sample_height // config.patch_size
    arguments: dict[str, Any] = {"crops_coords": get_resize_crop_region_for_grid((height, width), *base)}
    if config.get("patch_size_t") is not None:
        arguments = {"crops_coords": None, "grid_type": "slice", "max_size": base[::-1]}
    pair = get_3d_rotary_pos_embed(
        config.attention_head_dim, grid_size=(height, width), temporal_size=frames, **arguments
    )
    return _still(document.text, _repeated(pair))


def _hunyuan_dit(transformer: Any, document: Document) -> CosSin:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    (_, height, width), side = document.images[0], transformer.config.patch_size
    crops = get_resize_crop_region_for_grid((height, width), 512 // 8 // side)
    head = transformer.inner_dim // transformer.num_heads
    pair = get_2d_rotary_pos_embed(head, crops, (height, width), output_type="pt")
    return _repeated(pair)


def _allegro(transformer: Any, document: Document) -> CosSin:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    config, (frames, height, width) = transformer.config, document.images[0]
    scales = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
    tables = get_3d_rotary_pos_embed_allegro(
        config.attention_head_dim, ((0, 0), (height, width)), (height, width), frames, interpolation_scale=scales
    )
    index = _image_ids(document).T
    cos, sin = (torch.stack([axis[part][i] for axis, i in zip(tables[:3], index, strict=True)], 1) for part in (0, 1))
    cos, sin = _halves((cos, sin))
    return cos.reshape(index.shape[1], -1), sin.reshape(index.shape[1], -1)


def _ltx(transformer: Any, document: Document) -> CosSin:
    """Use the coordinates of LTXConditionPipeline: pixels of causal frames at 25 frames per second."""
    grid = _image_ids(document).T.float()
    coordinates = torch.stack([(8 * grid[0] - 7).clamp(min=0) / 25, 32 * grid[1], 32 * grid[2]])
    channels = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    hidden_states = torch.zeros(1, grid.shape[1], channels)
    return _repeated(transformer.rope(hidden_states, video_coords=coordinates[None]))


def _ltx_2(transformer: Any, document: Document) -> CosSin:
    coordinates = transformer.rope.prepare_video_coords(1, *document.images[0], CPU)
    cos, sin = transformer.rope(coordinates)
    if transformer.config.rope_type == "interleaved":
        return _repeated((cos, sin))
    return cos[0].swapaxes(0, 1).flatten(1), sin[0].swapaxes(0, 1).flatten(1)


def _minimax_h3(transformer: Any, document: Document) -> CosSin:
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    frames, height, width = document.images[0]
    text = torch.zeros(document.text, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(document.text)
    places, _ = before_denoise._frame_position_grid(2 * height, 2 * width, 2, 2)
    times = before_denoise._temporal_position_grid(frames, float(document.text))
    video = torch.cat([times.repeat_interleave(len(places))[:, None], places.repeat(frames, 1)], 1)
    return _halves(transformer.rope(torch.cat([text, video])))


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
    ids = _ids(document, (1, 0, 0), (document.text, 0, 0)).float()
    angles = transformer.pos_embed(ids.roll(-document.text, 0)[None])[0, :, 0]
    return angles.cos(), angles.sin()


def _wan_animate_2(transformer: Any, document: Document) -> CosSin:
    """Rotate the generated video, and the reference to the right of it."""
    starts = (0, 0, 0), (1, 0, document.images[1][2])
    pairs = transformer.config.dim // transformer.config.num_heads // 2
    split = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    parts = []
    for start, image in zip(starts, document.images, strict=True):
        table, index = transformer._rope_freqs(start, CPU), _image_ids(Document(0, (image,)))
        parts.append(torch.cat([x[i] for x, i in zip(table.split(split, 1), index.T, strict=True)], 1))
    return _complex(torch.cat(parts))


ROTATIONS: Mapping[str, Callable[[Any, Document], CosSin]] = {
    "allegro": _allegro,
    "any_flow": lambda t, d: _complex(t.rope._forward_full_frame(*d.images[0], CPU)),
    "any_flow_far": _any_flow_far,
    "bria_fibo_2": lambda t, d: _complex(
        t.rope_embedder(_ids(d, (1, 0, 0), lambda k: (t.config.max_num_gist_tokens + 1 + k, 0, 0), 1))
    ),
    "by_ids": lambda t, d: _repeated(t.pos_embed(_ids(d, start=lambda k: (k, 0, 0)).float())),
    "by_latents": _by_latents,
    "cog_video": _cog_video,
    "cosmos": lambda t, d: _by_latents(t, d, _halves),
    "cosmos_3": lambda t, d: _halves(
        t.rotary_emb(
            _ids(d, (1, 1, 1), (d.text + t.config.unified_3d_mrope_temporal_modality_margin, 0, 0)).T[:, None],
            CPU,
            torch.float32,
        )
    ),
    "easy_animate": lambda t, d: _by_latents(t, d, module="rope_embedding"),
    "ernie": _ernie,
    "flux_2": _flux_2,
    "flux_3": _flux_3,
    "glm_image": lambda t, d: _by_latents(t, d, _halves),
    "hidream": lambda t, d: _matrices(t.pe_embedder(_ids(d).float()[None])),
    "hunyuan_dit": _hunyuan_dit,
    "ideogram_4": lambda t, d: _halves(t.rotary_emb(_ids(d, (1, 1, 1), (65536,) * 3)[None])),
    "joy_image": lambda t, d: _still(d.text, _repeated(t.get_rotary_pos_embed(list(d.images[0]))[0])),
    "joy_image_plus": _joy_image_plus,
    "kandinsky_5": lambda t, d: _matrices(t.visual_rope_embeddings((1, *d.images[0]), _ones(d))),
    "kandinsky_6": lambda t, d: _matrices(t.visual_rope_embeddings(_ones(d), t.config.scale_factor)),
    "krea_2": lambda t, d: _repeated(t.rotary_emb(_ids(d).float())),
    "longcat_image": lambda t, d: _repeated(t.pos_embed(_ids(d, (0, 1, 1), lambda k: (k + 1, d.text, d.text)).float())),
    "ltx": _ltx,
    "ltx_2": _ltx_2,
    "lumina_2": lambda t, d: _complex(t.rope_embedder(d.latents[:, :, 0], torch.ones(1, d.text, dtype=torch.int64))[3]),
    "minimax_h3": _minimax_h3,
    "ovis_image": lambda t, d: _repeated(t.pos_embed(_ids(d, (0, 1, 1)).float())),
    "prx": lambda t, d: _still(d.text, _matrices(t.pe_embedder(_image_ids(d)[None, :, 1:]))),
    "qwen": _qwen,
    "qwen_21": _qwen_21,
    "sana_wm": lambda t, d: _complex(t.rope(d.images[0])),
    "wan": lambda t, d: _repeated(t.rope(d.latents)),
    "wan_animate_2": _wan_animate_2,
    "z_image": lambda t, d: _complex(t.rope_embedder(_ids(d, (1, 0, 0), (1 + d.text, 0, 0), 1))),
}
"""The rotation of each class, or of several classes with the same inputs."""
