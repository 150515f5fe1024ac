"""Settings of models and their own get_rope_index in Transformers, on random batches: ids, deltas, next positions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from layouts import IMAGE, VIDEO, random_layout, rope_index
from model_configs import ARGUMENTS, CONFIGS, TEXT, XDROPE, config_of, settings_of

import mmpos
import mmpos.rotary
from mmpos.integrations.models import ModelSettings
from mmpos.support import native

APART = ("cohere_compass", "cosmos3_edge", "cosmos3_omni", "qwen4_exp")
"""Model types whose frames are grids of their own, with timestamps between."""
MANY = pytest.param("many", marks=pytest.mark.slow)

Array = npt.NDArray[np.int64]


@pytest.fixture(params=["few", MANY])
def count(request: pytest.FixtureRequest, batches: int) -> int:
    """Batches of a model type."""
    return 100 if request.param == "few" else batches


def both_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the extension where there is one, then without."""
    with monkeypatch.context() as patched:
        if native.core is not None:
            yield
        patched.setattr(native, "core", None)
        yield


class Rows(NamedTuple):
    """Padded rows of token ids, (batch, seq), and their mask, None where no row is padded."""

    input_ids: Array
    mask: Array | None

    @classmethod
    def padded(cls, random: Random, rows: list[list[int]]) -> Rows:
        """Pad rows on one side with text or a token of theirs."""
        width = max(map(len, rows)) + random.randint(0, 2)
        left, fill = random.random() < 0.5, random.choice([0, random.choice(rows[0])])
        ids, mask = np.full((len(rows), width), fill), np.zeros((len(rows), width), np.int64)
        for r, row in enumerate(rows):
            own = slice(width - len(row), None) if left else slice(len(row))
            ids[r, own], mask[r, own] = row, 1
        return cls(ids, None if mask.all() else mask)

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """(batch, seq) whether a token is one."""
        return np.ones(self.input_ids.shape, np.bool_) if self.mask is None else self.mask == 1

    def agree(self, ours: Any, ids: Any, deltas: Any) -> None:
        """Compare a placed batch with ids (axes, batch, seq) and deltas (batch,); padding has no id."""
        real = self.real
        np.testing.assert_array_equal(ours.dense().reshape(np.shape(ids)) * real, np.asarray(ids) * real)
        assert ours.deltas.tolist() == np.asarray(deltas).tolist()
        assert ours.next_positions.tolist() == (np.asarray(deltas) + real.sum(axis=1)).tolist()


def unbound(model: str, config: Any) -> tuple[Any, Any]:
    """The class of a model with get_rope_index, and an object with its helpers and no weights."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kind = next(value for value in vars(module).values() if "get_rope_index" in getattr(value, "__dict__", {}))
    told: Any = SimpleNamespace(config=config)
    for name in ("get_vision_position_ids", "_group_visual_frames", "_frame_end_idx"):
        if hasattr(kind, name):
            static = isinstance(vars(kind)[name], staticmethod)
            setattr(told, name, getattr(kind, name) if static else getattr(kind, name).__get__(told))
    return kind, told


def tensor(values: Any) -> Any:
    """A tensor of integers; None where there are none."""
    return None if values is None or not len(values) else torch.tensor(values)


def text_of(random: Random, most: int) -> list[int]:
    return [random.randint(1, 7) for _ in range(random.randint(0, most))]


@pytest.mark.parametrize("model", APART)
def test_frames_apart_have_the_ids_of_the_model(model: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, settings = Random(model), settings_of(model)
    for _ in range(count):
        layout = random_layout(random, "qwen3_vl", videos=True)
        answer = rope_index(model, layout)
        told = replace(
            settings,
            placeholders=replace(settings.placeholders, image=IMAGE, video=VIDEO),
            spatial_merge_size=layout.merge,
        )
        rows = Rows(layout.input_ids, layout.attention_mask)
        for _ in both_ways(monkeypatch):
            segments = told.segments(rows.input_ids, layout.images, layout.videos, attention_mask=rows.mask)
            rows.agree(told.place(segments), *answer)


# HunYuan-VL.


def hunyuan(sections: int, engine: Any = "transformers") -> tuple[Any, ModelSettings]:
    """A config with as many axes, of 16 pairs and what is left, and its settings."""
    text = ARGUMENTS["hunyuan_vl"]["text_config"] | {
        "rope_parameters": XDROPE["rope_parameters"]
        | {"xdrope_section": [64 - 16 * (sections - 1), *[16] * (sections - 1)]}
    }
    config = CONFIGS["hunyuan_vl"](text_config=deepcopy(text))
    return config, mmpos.from_hf_config(config, engine=engine)


def hunyuan_row(random: Random, settings: ModelSettings, images: list[list[int]]) -> list[int]:
    """Text and images, each between its markers, with a token at the end of each row and mostly one on both sides."""
    (begin, end), patch = settings.image_markers or (0, 0), settings.placeholders.image or 0
    row = [TEXT, *text_of(random, 5)]
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        height, width = random.randint(1, 5), random.randint(1, 5)
        images.append([1, 2 * height, 2 * width])
        row += [begin, *[patch] * (height * (width + 1) + random.choice([2, 2, 0])), end, *text_of(random, 4)]
    return row


@pytest.mark.parametrize("axes", [3, 4])
def test_xd_rope_has_the_ids_of_hunyuan_vl(axes: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, (config, settings) = Random(axes), hunyuan(axes)
    kind, told = unbound("hunyuan_vl", config)
    for _ in range(count // 2):
        images: list[list[int]] = []
        rows = Rows.padded(random, [hunyuan_row(random, settings, images) for _ in range(random.randint(1, 4))])
        types = (rows.input_ids == settings.placeholders.image).astype(np.int64)
        ids, deltas = kind.get_rope_index(
            told, torch.from_numpy(rows.input_ids), tensor(types), tensor(images), attention_mask=tensor(rows.mask)
        )
        for _ in both_ways(monkeypatch):
            segments = settings.segments(rows.input_ids, images or None, attention_mask=rows.mask)
            rows.agree(settings.place(segments), ids, deltas[:, 0])


# GLM-Image.


def glm_image_row(random: Random, settings: ModelSettings, grids: list[list[int]]) -> tuple[list[int], int, int]:
    """A prompt with images between their markers and the marker that begins an image to generate.

    Returns:
        the row, how many images it has, and how many of the grids are of images to generate.
    """
    (begin, end), patch = settings.image_markers or (0, 0), settings.placeholders.image or 0
    row = [TEXT, *text_of(random, 5)]
    sources, targets = random.choice([0, 0, 1, 2]), random.choice([0, 1, 2, 2, 3])
    for _ in range(sources):
        height, width = random.randint(1, 5), random.randint(1, 5)
        grids.append([1, height, width])
        row += [begin, *[patch] * (height * width), end, *text_of(random, 4)]
    grids += [[1, random.randint(1, 6), random.randint(1, 6)] for _ in range(targets)]
    return [*row, TEXT, begin], sources, targets


def test_ids_of_glm_image_are_laid_ahead(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, settings = Random(0), settings_of("glm_image")
    kind, told = unbound("glm_image", config_of("glm_image"))
    for _ in range(count):
        grids: list[list[int]] = []
        made = [glm_image_row(random, settings, grids) for _ in range(random.randint(1, 4))]
        rows = Rows.padded(random, [row for row, _, _ in made])
        counts = [sources + targets for _, sources, targets in made]
        ids, _ = kind.get_rope_index(
            told,
            torch.from_numpy(rows.input_ids),
            torch.tensor(grids).reshape(-1, 3),
            torch.tensor(counts),
            tensor(rows.mask),
        )
        ahead = told._cached_decode_position_ids
        for _ in both_ways(monkeypatch):
            prompt = settings.segments(
                rows.input_ids, grids or None, attention_mask=rows.mask, images_per_sample=counts
            )
            placed = settings.place(prompt)
            np.testing.assert_array_equal(placed.dense().reshape(ids.shape) * rows.real, ids.numpy() * rows.real)
            coming = settings.generated(prompt, grids, counts) if grids else None
            if coming is None:
                continue
            laid = settings.place(coming, start=placed.next_positions)
            bounds = laid.cu_seqlens.tolist()
            own = [d for d, n in enumerate(counts) if n]  # Transformers has none for a row without grids
            for theirs, d in zip(ahead, own, strict=True):
                ours = laid.dense()[:, bounds[d] : bounds[d + 1]]
                np.testing.assert_array_equal(ours, theirs[:, : ours.shape[1]])
                assert (theirs[:, ours.shape[1] :] == ours[:, -1:]).all()


# MiniCPM-V 4.7.


def minicpm_picture(random: Random, settings: ModelSettings, patch: int, grids: list[list[int]]) -> list[int]:
    """A thumbnail, mostly with rows of slices: mostly of one size, and as many in each row."""
    markers, side = settings.placeholders.crops, settings.spatial_merge_size
    assert markers is not None

    def crop(before: int, after: int, height: int, width: int) -> list[int]:
        grids.append([1, side * height, side * width])
        return [before, *[patch] * (height * width), after]

    def size() -> tuple[int, int]:
        return random.randint(1, 9), random.randint(1, 9)

    row = crop(markers.thumbnail_start, markers.thumbnail_end, random.randint(1, 9), random.randint(1, 9))
    rows, columns, first = random.choice([0, 0, 1, 2, 3, 4]), random.randint(1, 4), size()
    for r in range(rows):
        row += [markers.newline] * (random.choice([1, 1, 1, 2]) if r else random.random() < 0.1)
        for _ in range(columns if random.random() < 0.9 else random.randint(1, 4)):
            row += crop(markers.tile_start, markers.tile_end, *(first if random.random() < 0.8 else size()))
    return row


def minicpm_row(random: Random, settings: ModelSettings, grids: dict[int, list[list[int]]]) -> list[int]:
    """Text, images and frames of videos, which follow each other with and without markers or text between them."""
    assert settings.placeholders.crops is not None
    newline = settings.placeholders.crops.newline
    row = text_of(random, 3)
    for _ in range(random.randint(0, 3)):
        patch = random.choice(list(grids))
        for _ in range(1 if patch == settings.placeholders.image else random.randint(1, 3)):
            row += minicpm_picture(random, settings, patch, grids[patch])
        row += [newline] * random.choice([0, 0, 0, 1, 2]) + text_of(random, 3) + [newline] * (random.random() < 0.2)
    return row or [TEXT]


@pytest.mark.parametrize("mode", ["16x", "4x"])
def test_pictures_of_minicpm_lie_on_a_canvas(mode: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random, config = Random(mode), config_of("minicpmv4_7")
    config.downsample_mode = mode
    settings = mmpos.from_hf_config(config)
    kind, told = unbound("minicpmv4_7", config)
    image, video = settings.placeholders.image or 0, settings.placeholders.video or 0
    for _ in range(max(150, count)):
        grids: dict[int, list[list[int]]] = {image: [], video: []}
        rows = Rows.padded(random, [minicpm_row(random, settings, grids) for _ in range(random.randint(1, 3))])
        types = (rows.input_ids == image) + 2 * (rows.input_ids == video)
        sizes = [None if not grids[patch] else torch.tensor(grids[patch])[:, 1:] for patch in (image, video)]
        ids, deltas = kind.get_rope_index(
            told, torch.from_numpy(rows.input_ids), tensor(types), *sizes, attention_mask=tensor(rows.mask)
        )
        for _ in both_ways(monkeypatch):
            segments = settings.segments(
                rows.input_ids, grids[image] or None, grids[video] or None, attention_mask=rows.mask
            )
            rows.agree(settings.place(segments), ids, deltas[:, 0])
