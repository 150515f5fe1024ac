"""Cos and sin of a document's pairs, computed by diffusers' own classes from the inputs that their pipelines pass.

tests/golden/diffusers_transformers.json names the function of each class and configures a small transformer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
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
        rotation: name of the function below that returns (tokens, pairs) cos and sin, text first.
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

    def cos_sin(self, transformer: Any, document: Document) -> CosSin:
        """Return the cos and sin of the class for a document."""
        pair: CosSin = globals()[f"_{self.rotation}"](transformer, document)
        return pair


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


def _by_ids(transformer: Any, document: Document, name: str = "pos_embed") -> CosSin:
    images = [_grid(k, 0, 0, frames=1, height=h, width=w) for k, (_, h, w) in enumerate(document.images)]
    return _repeated(getattr(transformer, name)(torch.cat([torch.zeros(document.text, 3), *images]).float()))


_krea_2 = partial(_by_ids, name="rotary_emb")


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


def _ovis_image(transformer: Any, document: Document, start: int = 0) -> CosSin:
    """Rotate text that counts on rows and columns, and images whose rows and columns start at ``start``."""
    text = torch.zeros(document.text, 3)
    text[:, 1:] = torch.arange(document.text).float()[:, None]
    grids = enumerate(document.images, 1 if start else 0)
    images = [_grid(k, start, start, frames=1, height=h, width=w) for k, (_, h, w) in grids]
    return _repeated(transformer.pos_embed(torch.cat([text, *images])))


def _longcat_image(transformer: Any, document: Document) -> CosSin:
    return _ovis_image(transformer, document, document.text)


def _by_latents(
    transformer: Any, document: Document, form: Callable[[Any], CosSin] = _repeated, name: str = "rope"
) -> CosSin:
    """Return the rotation by a module that takes latents and does not rotate text."""
    latents = document.latents[:, :, 0] if "2DModel" in type(transformer).__name__ else document.latents
    return _still(document.text, form(getattr(transformer, name)(latents)))


_glm_image = _cosmos = partial(_by_latents, form=_halves)
_easy_animate = partial(_by_latents, name="rope_embedding")


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


def _kandinsky_5(transformer: Any, document: Document) -> CosSin:
    sizes = document.images[0]
    return _matrices(transformer.visual_rope_embeddings((1, *sizes), tuple(torch.arange(n) for n in sizes)))


def _kandinsky_6(transformer: Any, document: Document) -> CosSin:
    indices = tuple(torch.arange(n) for n in document.images[0])
    return _matrices(transformer.visual_rope_embeddings(indices, transformer.config.scale_factor))


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
