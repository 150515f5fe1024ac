"""Small diffusers transformers with random weights, and calls to them with and without ``positions``."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

from mmpos import Grid, PositionTable, Text
from mmpos.integrations.diffusers import TransformerSettings, from_diffusers, pack_latents, unpack_latents

__all__ = ["MODELS", "Flux2", "Model", "Wan", "WanFromImages", "joined"]

SIZES = ((2, 4, 6), (3, 3, 5), (1, 8, 2))
"""Frames, rows and columns of three images in tokens; models without frames ignore the first number."""

TEXTS = (5, 3, 7)
REFERENCES = (((2, 3),), (), ((3, 2), (2, 2), (4, 3)))
"""Rows and columns of the reference images of each image, for models that take references."""


class Model(ABC):
    """A transformer and its inputs for three images of different sizes.

    Attributes:
        name: name of its class.
        config: config for a small transformer.
    """

    name: ClassVar[str]
    config: ClassVar[dict[str, Any]]
    frames: ClassVar[bool] = False
    text: ClassVar[bool] = True
    references: ClassVar[bool] = False

    def __init__(self) -> None:
        self.timestep, self.guidance, self.pooled = torch.tensor([0.5]), torch.tensor([3.0]), torch.randn(1, 8)
        self.texts = [torch.randn(n, 24) for n in TEXTS]
        self.sizes = [size if self.frames else (1, *size[1:]) for size in SIZES]
        tokens = [f * h * w for f, h, w in self.sizes]
        self.references_of = REFERENCES if self.references else ((), (), ())
        more = [sum(h * w for h, w in sizes) for sizes in self.references_of]
        self.images = [torch.randn(n + m, 16) for n, m in zip(tokens, more, strict=True)]
        self.latents = [torch.randn(4, f, 2 * h, 2 * w) for f, h, w in self.sizes]

    def transformer(self) -> Any:
        """Build the transformer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformer = getattr(diffusers, self.name)(**self.config).eval()
        for parameter in transformer.parameters():
            nn.init.normal_(parameter, std=0.2)
        return transformer

    def settings(self) -> TransformerSettings:
        return from_diffusers({"_class_name": self.name, **self.config})

    def document(self, i: int) -> list[Text | Grid]:
        """Return the text and images of document i."""
        frames, height, width = self.sizes[i]
        grids = [Grid(height, width, frames=frames), *(Grid(h, w) for h, w in self.references_of[i])]
        return [Text(TEXTS[i]), *grids] if self.text else [*grids]

    def positions(self, which: Sequence[int]) -> PositionTable:
        return self.settings().place([self.document(i) for i in which])

    @abstractmethod
    def alone(self, transformer: Any, i: int) -> Tensor:
        """Run image i with only the arguments that diffusers defines."""

    @abstractmethod
    def call(self, transformer: Any, which: Sequence[int], batch: bool, positions: PositionTable) -> list[Tensor]:
        """Run images with ``positions``, either packed or as rows of a batch."""

    def rows(self, x: Tensor, which: Sequence[int], batch: bool) -> Tensor:
        return x.expand(len(which), *x.shape[1:]) if batch else x


def joined(xs: Sequence[Tensor], batch: bool) -> Tensor:
    """Join tokens into one row, or put each document's tokens into its own row with random padding."""
    if not batch:
        return torch.cat(list(xs)).unsqueeze(0)
    rows = torch.randn(len(xs), max(len(x) for x in xs), xs[0].shape[1]) * 9
    for row, x in zip(rows, xs, strict=True):
        row[: len(x)] = x
    return rows


def cut(rows: Tensor, xs: Sequence[Tensor], batch: bool) -> list[Tensor]:
    if batch:
        return [row[: len(x)] for row, x in zip(rows, xs, strict=True)]
    return list(rows[0].split([len(x) for x in xs]))


def _ids(width: int, *axes: Tensor) -> Tensor:
    ids = torch.cartesian_prod(*axes).reshape(-1, len(axes)).float()
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]))


class Tokens(Model):
    """Transformers whose inputs are text and image tokens."""

    def alone(self, transformer: Any, i: int) -> Tensor:
        output = transformer(
            hidden_states=self.images[i][None],
            encoder_hidden_states=self.texts[i][None],
            timestep=self.timestep,
            **self.one(i),
        )
        return output.sample[0]

    def call(self, transformer: Any, which: Sequence[int], batch: bool, positions: PositionTable) -> list[Tensor]:
        images = [self.images[i] for i in which]
        output = transformer(
            hidden_states=joined(images, batch),
            encoder_hidden_states=joined([self.texts[i] for i in which], batch),
            timestep=self.rows(self.timestep, which, batch),
            positions=positions,
            **self.all(which, batch),
        )
        return cut(output.sample, images, batch)

    @abstractmethod
    def one(self, i: int) -> dict[str, Any]: ...

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {}

    def planes(self, i: int) -> list[tuple[int, int, int]]:
        """Return the index, rows and columns of every image."""
        sizes = [self.sizes[i][1:], *self.references_of[i]]
        return [(k, height, width) for k, (height, width) in enumerate(sizes)]


class Flux(Tokens):
    name = "FluxTransformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
        "axes_dims_rope": (8, 12, 12),
    }
    references = True
    takes: ClassVar[tuple[str, ...]] = ("pooled_projections", "guidance")

    def ids(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the image ids and the text ids."""
        images = [_ids(3, torch.tensor([k]), torch.arange(h), torch.arange(w)) for k, h, w in self.planes(i)]
        return torch.cat(images), torch.zeros(TEXTS[i], 3)

    def one(self, i: int) -> dict[str, Any]:
        return {**dict(zip(("img_ids", "txt_ids"), self.ids(i), strict=True)), **self.all([i], False)}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        values = {"pooled_projections": self.pooled, "guidance": self.guidance}
        return {name: self.rows(values[name], which, batch) for name in self.takes}


class Bria(Flux):
    name = "BriaTransformer2DModel"
    config: ClassVar[dict[str, Any]] = {**Flux.config, "pooled_projection_dim": None, "guidance_embeds": False}
    takes = ()


class Chroma(Flux):
    name = "ChromaTransformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        **{name: Flux.config[name] for name in Flux.config if name not in ("pooled_projection_dim", "guidance_embeds")},
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    }
    takes = ()


class LongCatImage(Flux):
    name = "LongCatImageTransformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        name: Flux.config[name] for name in Flux.config if name not in ("pooled_projection_dim", "guidance_embeds")
    }
    takes = ()

    def ids(self, i: int) -> tuple[Tensor, Tensor]:
        text, start = torch.zeros(TEXTS[i], 3), TEXTS[i]
        text[:, 1:] = torch.arange(start)[:, None]
        images = [
            _ids(3, torch.tensor([1 + k]), torch.arange(start, start + h), torch.arange(start, start + w))
            for k, h, w in self.planes(i)
        ]
        return torch.cat(images), text


class OvisImage(LongCatImage):
    name = "OvisImageTransformer2DModel"
    references = False

    def ids(self, i: int) -> tuple[Tensor, Tensor]:
        text = torch.zeros(TEXTS[i], 3)
        text[:, 1:] = torch.arange(TEXTS[i])[:, None]
        return Flux.ids(self, i)[0], text


class Flux2(Tokens):
    name = "Flux2Transformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (8, 8, 8, 8),
    }
    references = True

    def one(self, i: int) -> dict[str, Any]:
        ids = []
        for k, height, width in self.planes(i):
            ids.append(_ids(4, torch.tensor([10 * k]), torch.arange(height), torch.arange(width)))
        text = torch.zeros(TEXTS[i], 4)
        text[:, 3] = torch.arange(TEXTS[i])
        return {"img_ids": torch.cat(ids), "txt_ids": text, "guidance": self.guidance}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"guidance": self.rows(self.guidance, which, batch)}


class QwenImage(Tokens):
    name = "QwenImageTransformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (8, 12, 12),
    }
    references = True

    def one(self, i: int) -> dict[str, Any]:
        return {"img_shapes": [[self.sizes[i], *((1, h, w) for h, w in self.references_of[i])]]}


class Ltx(Tokens):
    name = "LTXVideoTransformer3DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "num_layers": 1,
        "caption_channels": 24,
    }
    frames = True
    text = False

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.zeros(3, max(TEXTS))
        for row, n in zip(self.mask, TEXTS, strict=True):
            row[:n] = 1

    def one(self, i: int) -> dict[str, Any]:
        frames, height, width = self.sizes[i]
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width)).T.float()
        coordinates = torch.stack([(8 * grid[0] - 7).clamp(min=0) / 25, 32 * grid[1], 32 * grid[2]])
        return {"video_coords": coordinates[None], "encoder_attention_mask": torch.ones(1, TEXTS[i])}

    def call(self, transformer: Any, which: Sequence[int], batch: bool, positions: PositionTable) -> list[Tensor]:
        images = [self.images[i] for i in which]
        output = transformer(
            hidden_states=joined(images, batch),
            encoder_hidden_states=joined(self.texts, batch=True)[list(which)],
            encoder_attention_mask=self.mask[list(which)],
            timestep=self.rows(self.timestep, which, batch),
            positions=positions,
        )
        return cut(output.sample, images, batch)


class Latents(Model):
    """Transformers that split latents into patches.

    Attributes:
        text_name: name of the argument that receives the texts.
    """

    text_name: ClassVar[str] = "encoder_hidden_states"

    def latents_of(self, i: int) -> Tensor:
        return self.latents[i] if self.frames else self.latents[i][:, 0]

    def alone(self, transformer: Any, i: int) -> Tensor:
        return transformer(
            hidden_states=self.latents_of(i)[None],
            timestep=self.timestep,
            **{self.text_name: self.texts[i][None]},
            **self.one(i),
        ).sample[0]

    def call(self, transformer: Any, which: Sequence[int], batch: bool, positions: PositionTable) -> list[Tensor]:
        latents = [self.latents_of(i) for i in which]
        output = transformer(
            hidden_states=pack_latents(latents, 2, batch=batch),
            timestep=self.rows(self.timestep, which, batch),
            positions=positions,
            **{self.text_name: self.texts_in_rows(which, batch)},
            **self.all(which, batch),
        )
        return unpack_latents(output.sample, [x.shape[1:] for x in latents], 2)

    def texts_in_rows(self, which: Sequence[int], batch: bool) -> Tensor:
        """Return the texts, one in each row."""
        return joined([self.texts[i] for i in which], batch=True)

    def one(self, i: int) -> dict[str, Any]:
        return {}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {}


class Wan(Latents):
    name = "WanTransformer3DModel"
    config: ClassVar[dict[str, Any]] = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 24,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 1,
        "rope_max_seq_len": 32,
    }
    frames = True
    text = False

    def __init__(self) -> None:
        super().__init__()
        self.texts = [torch.randn(6, 24) for _ in TEXTS]  # Wan's pipeline pads all texts to one length


class ChronoEdit(Wan):
    name = "ChronoEditTransformer3DModel"


class WanVace(Wan):
    name = "WanVACETransformer3DModel"
    config: ClassVar[dict[str, Any]] = {**Wan.config, "vace_layers": [0], "vace_in_channels": 4}

    def __init__(self) -> None:
        super().__init__()
        self.control = [torch.randn_like(x) for x in self.latents]

    def one(self, i: int) -> dict[str, Any]:
        return {"control_hidden_states": self.control[i][None]}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"control_hidden_states": pack_latents([self.control[i] for i in which], 2, batch=batch)}


class WanFromImages(Wan):
    """Wan whose cross-attention also attends to images; texts must have 512 tokens."""

    config: ClassVar[dict[str, Any]] = {**Wan.config, "image_dim": 8, "added_kv_proj_dim": 48}

    def __init__(self) -> None:
        super().__init__()
        self.texts = [torch.randn(512, 24) for _ in TEXTS]
        self.seen = torch.randn(3, 7, 8)

    def one(self, i: int) -> dict[str, Any]:
        return {"encoder_hidden_states_image": self.seen[i : i + 1]}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"encoder_hidden_states_image": self.seen[list(which)]}


class HunyuanVideo(Latents):
    name = "HunyuanVideoTransformer3DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "text_embed_dim": 24,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (8, 12, 12),
    }
    frames = True

    def one(self, i: int) -> dict[str, Any]:
        mask = torch.ones(1, TEXTS[i], dtype=torch.int64)
        return {"pooled_projections": self.pooled, "guidance": self.guidance, "encoder_attention_mask": mask}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {
            "pooled_projections": self.rows(self.pooled, which, batch),
            "guidance": self.rows(self.guidance, which, batch),
        }


class Lumina2(Latents):
    name = "Lumina2Transformer2DModel"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 4,
        "hidden_size": 48,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "axes_dim_rope": (8, 8, 8),
        "axes_lens": (32, 32, 32),
        "cap_feat_dim": 24,
    }

    def one(self, i: int) -> dict[str, Any]:
        return {"encoder_attention_mask": torch.ones(1, TEXTS[i], dtype=torch.int64)}

    def texts_in_rows(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined([self.texts[i] for i in which], batch)


class ErnieImage(Latents):
    name = "ErnieImageTransformer2DModel"
    text_name = "text_bth"
    config: ClassVar[dict[str, Any]] = {
        "in_channels": 4,
        "out_channels": 4,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_layers": 1,
        "ffn_hidden_size": 32,
        "patch_size": 2,
        "text_in_dim": 24,
        "rope_axes_dim": (8, 12, 12),
    }

    def document(self, i: int) -> list[Text | Grid]:
        return super().document(i)[::-1]

    def one(self, i: int) -> dict[str, Any]:
        return {"text_lens": torch.tensor([TEXTS[i]])}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"text_lens": None}

    def texts_in_rows(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined([self.texts[i] for i in which], batch)


_ALL = (
    Flux, Bria, Chroma, LongCatImage, OvisImage, Flux2, QwenImage, Wan, WanVace, ChronoEdit, HunyuanVideo, Ltx, Lumina2,
    ErnieImage,
)  # fmt: skip
MODELS: dict[str, type[Model]] = {model.name: model for model in _ALL}
