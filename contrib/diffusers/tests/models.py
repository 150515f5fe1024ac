"""Small diffusers transformers with random weights, and calls to them with and without ``positions``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

from mmpos import Grid, PositionTable, Text
from mmpos.integrations.diffusers import TransformerSettings, from_diffusers, pack_latents, unpack_latents

__all__ = ["MODELS", "Flux2", "Model", "Wan", "joined"]

SIZES = ((2, 4, 6), (3, 3, 5), (1, 8, 2))
"""Frames, rows and columns of three images in tokens; models without frames ignore the first number."""

TEXTS = (5, 3, 7)
REFERENCES = (((2, 3),), (), ((3, 2), (2, 2), (4, 3)))
"""Rows and columns of the reference images of each image, for models that take references."""

CONFIGS = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
"""The contents of a config.json for each class of this module."""


class Model:
    """A transformer and its inputs, text and image tokens, for three images of different sizes.

    Attributes:
        takes: arguments that all calls pass, one value per row.
    """

    frames: ClassVar[bool] = False
    text: ClassVar[bool] = True
    references: ClassVar[bool] = False
    pipeline: ClassVar[str | None] = None
    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.config = CONFIGS[type(self).__name__]
        self.timestep, self.guidance = torch.tensor([0.5]), torch.tensor([3.0])
        self.pooled_projections = torch.randn(1, 8)
        self.texts = [torch.randn(n, 24) for n in TEXTS]
        self.sizes = [size if self.frames else (1, *size[1:]) for size in SIZES]
        tokens = [f * h * w for f, h, w in self.sizes]
        self.references_of = REFERENCES if self.references else ((), (), ())
        more = [sum(h * w for h, w in sizes) for sizes in self.references_of]
        self.images = [torch.randn(n + m, 16) for n, m in zip(tokens, more, strict=True)]
        self.latents = [torch.randn(4, f, 2 * h, 2 * w) for f, h, w in self.sizes]

    def transformer(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformer = getattr(diffusers, self.config["_class_name"]).from_config(self.config).eval()
        for parameter in transformer.parameters():
            nn.init.normal_(parameter, std=0.2)
        return transformer

    def settings(self) -> TransformerSettings:
        return from_diffusers(self.config, self.pipeline)

    def document(self, i: int) -> list[Text | Grid]:
        """Return the text and images of document i."""
        f, h, w = self.sizes[i]
        grids = [Grid(h, w, frames=f, seconds_per_frame=1 / 25), *(Grid(h, w) for h, w in self.references_of[i])]
        return [Text(TEXTS[i]), *grids] if self.text else [*grids]

    def positions(self, which: Sequence[int]) -> PositionTable:
        return self.settings().place([self.document(i) for i in which])

    def alone(self, transformer: Any, i: int) -> Tensor:
        """Run image i with only the arguments that diffusers defines."""
        output = transformer(
            hidden_states=self.image(i)[None],
            encoder_hidden_states=self.texts[i][None],
            timestep=self.timestep,
            **{name: getattr(self, name) for name in self.takes},
            **self.one(i),
        )
        return output.sample[0]

    def call(self, transformer: Any, which: Sequence[int], batch: bool, positions: PositionTable) -> list[Tensor]:
        """Run images with ``positions``, either packed or as rows of a batch."""
        rows = {name: getattr(self, name) for name in ("timestep", *self.takes)}
        output = transformer(
            hidden_states=self.hidden_states(which, batch),
            encoder_hidden_states=self.encoder_hidden_states(which, batch),
            positions=positions,
            **{name: x.expand(len(which), *x.shape[1:]) if batch else x for name, x in rows.items()},
            **self.all(which, batch),
        )
        return self.separate(output.sample, which, batch)

    def encoder_hidden_states(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined([self.texts[i] for i in which], batch)

    def image(self, i: int) -> Tensor:
        return self.images[i]

    def hidden_states(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined([self.images[i] for i in which], batch)

    def separate(self, output: Tensor, which: Sequence[int], batch: bool) -> list[Tensor]:
        lengths = [len(self.images[i]) for i in which]
        return [row[:n] for row, n in zip(output if batch else output[0].split(lengths), lengths, strict=True)]

    def planes(self, i: int) -> list[tuple[int, int, int]]:
        """Return the index, rows and columns of every image."""
        sizes = [self.sizes[i][1:], *self.references_of[i]]
        return [(k, height, width) for k, (height, width) in enumerate(sizes)]

    def one(self, i: int) -> dict[str, Any]:
        """Return the other arguments of a call without positions."""
        return {}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        """Return the other arguments of a call with positions."""
        return {}


def joined(xs: Sequence[Tensor], batch: bool) -> Tensor:
    """Join tokens into one row, or put each document's tokens into its own row with random padding."""
    if not batch:
        return torch.cat(list(xs)).unsqueeze(0)
    rows = torch.randn(len(xs), max(len(x) for x in xs), xs[0].shape[1]) * 9
    for row, x in zip(rows, xs, strict=True):
        row[: len(x)] = x
    return rows


def _ids(width: int, *axes: Tensor) -> Tensor:
    ids = torch.cartesian_prod(*axes).reshape(-1, len(axes)).float()
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]))


class Chroma(Model):
    """Transformers built like FLUX.1.

    Attributes:
        counted: whether text counts rows and columns.
        after: whether images begin after the text, and on plane 1.
    """

    references = True
    counted = False
    after = False

    def one(self, i: int) -> dict[str, Any]:
        text, start = torch.zeros(TEXTS[i], 3), TEXTS[i] if self.after else 0
        if self.counted:
            text[:, 1:] = torch.arange(TEXTS[i])[:, None]
        images = [
            _ids(3, torch.tensor([k + self.after]), torch.arange(start, start + h), torch.arange(start, start + w))
            for k, h, w in self.planes(i)
        ]
        return {"img_ids": torch.cat(images), "txt_ids": text}


class Bria(Chroma):
    """Takes the same arguments."""


class Flux(Chroma):
    takes = ("pooled_projections", "guidance")


class LongCatImage(Chroma):
    counted = True
    after = True


class OvisImage(Chroma):
    references = False
    counted = True


class Flux2(Model):
    references = True
    takes = ("guidance",)

    def one(self, i: int) -> dict[str, Any]:
        ids = [_ids(4, torch.tensor([10 * k]), torch.arange(h), torch.arange(w)) for k, h, w in self.planes(i)]
        text = torch.zeros(TEXTS[i], 4)
        text[:, 3] = torch.arange(TEXTS[i])
        return {"img_ids": torch.cat(ids), "txt_ids": text}


class QwenImage(Model):
    references = True

    def one(self, i: int) -> dict[str, Any]:
        return {"img_shapes": [[self.sizes[i], *((1, h, w) for h, w in self.references_of[i])]]}


class Ltx(Model):
    frames = True
    text = False
    pipeline = "LTXPipeline"

    def one(self, i: int) -> dict[str, Any]:
        sizes = dict(zip(("num_frames", "height", "width"), self.sizes[i], strict=True))
        scale = (8 / 25, 32, 32)
        return sizes | {"rope_interpolation_scale": scale, "encoder_attention_mask": torch.ones(1, TEXTS[i])}

    def encoder_hidden_states(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined(self.texts, batch=True)[list(which)]

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        mask = torch.arange(max(TEXTS)) < torch.tensor(TEXTS)[:, None]
        return {"encoder_attention_mask": mask[list(which)].float()}


class LtxCondition(Ltx):
    pipeline = "LTXConditionPipeline"

    def one(self, i: int) -> dict[str, Any]:
        frames, height, width = self.sizes[i]
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width)).T.float()
        coordinates = torch.stack([(8 * grid[0] - 7).clamp(min=0) / 25, 32 * grid[1], 32 * grid[2]])
        return {"video_coords": coordinates[None], "encoder_attention_mask": torch.ones(1, TEXTS[i])}


class Latents(Model):
    """Transformers of videos that split latents into patches."""

    frames = True

    def image(self, i: int) -> Tensor:
        return self.latents[i]

    def hidden_states(self, which: Sequence[int], batch: bool) -> Tensor:
        return pack_latents([self.latents[i] for i in which], 2, batch=batch)

    def encoder_hidden_states(self, which: Sequence[int], batch: bool) -> Tensor:
        return joined([self.texts[i] for i in which], batch=True)

    def separate(self, output: Tensor, which: Sequence[int], batch: bool) -> list[Tensor]:
        return unpack_latents(output, [self.latents[i].shape[1:] for i in which], 2)


class HunyuanVideo(Latents):
    takes = ("pooled_projections", "guidance")

    def one(self, i: int) -> dict[str, Any]:
        return {"encoder_attention_mask": torch.ones(1, TEXTS[i], dtype=torch.int64)}


class Wan(Latents):
    text = False
    tokens = 6
    """Length of all texts, which Wan's pipeline pads."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = [torch.randn(self.tokens, 24) for _ in TEXTS]


class ChronoEdit(Wan):
    """Takes the same arguments."""


class WanVace(Wan):
    def __init__(self) -> None:
        super().__init__()
        self.control = [torch.randn_like(x) for x in self.latents]

    def one(self, i: int) -> dict[str, Any]:
        return {"control_hidden_states": self.control[i][None]}

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"control_hidden_states": pack_latents([self.control[i] for i in which], 2, batch=batch)}


class WanFromImages(Wan):
    """Wan whose cross-attention also attends to images; texts must have 512 tokens."""

    tokens = 512

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.randn(3, 7, 8)

    def one(self, i: int) -> dict[str, Any]:
        return self.all([i], True)

    def all(self, which: Sequence[int], batch: bool) -> dict[str, Any]:
        return {"encoder_hidden_states_image": self.seen[list(which)]}


_ALL = (
    Flux, Bria, Chroma, LongCatImage, OvisImage, Flux2, QwenImage, HunyuanVideo, Ltx, LtxCondition, Wan, WanVace,
    ChronoEdit, WanFromImages,
)  # fmt: skip
MODELS: dict[str, type[Model]] = {model.__name__: model for model in _ALL}
