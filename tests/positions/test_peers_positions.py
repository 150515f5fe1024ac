"""Assertions of peers about their ids and the axes of their frequencies, made of ours.

Multimodal-RoPEs, of the authors of arXiv 2510.23095, at cd413b9e: tests/test_rope_golden_hf4571.py and
    tests/test_qwen35_partial_rope.py, for the designs that we have: vanilla-rope, mrope, mrope-interleave with and
    without spatial_reset, ilrope and omnirope at a stride of 1, videorope, v2pe, grape; and the allocations of all
    that turn pairs of every head alike. Their one prompt, and random batches of prompts like it.
vLLM 0.33, tests of get_mrope_input_positions of PaddleOCR-VL: its four prompts, and random requests.
SGLang 0.5.23, TestMropePositionsFastPath: extending and decoding text.

The rules are theirs in our words, token after token; nothing here knows of tables.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracle import exact
from peer_cases import drawn, float32_angles
from tolerance import assert_within, cos_sin
from torch import Tensor

import mmpos.rotary
from mmpos import Grid, Placeholders, Scheme, SegmentTable, Text, place
from mmpos.integrations.sections import Sections, window_positions
from mmpos.integrations.vllm import mrope_input_positions
from mmpos.rotary import Rotary
from mmpos.schemes import V2PE

pytestmark = pytest.mark.slow

START, END, IMAGE, VIDEO = 52, 53, 55, 56
"""Tokens before and after a grid, and its placeholders."""


class Prompt(NamedTuple):
    """Tokens, and the grids of images and videos before merging; every frame of a video is between START and END."""

    tokens: list[int]
    images: list[list[int]]
    videos: list[list[int]]


def prompt(parts: Sequence[Any], merge: int = 2) -> Prompt:
    """A prompt of numbers of text tokens, images ("image", h, w) and videos ("video", frames, h, w), merged sides."""
    made = Prompt([], [], [])
    for part in parts:
        if isinstance(part, int):
            made.tokens.extend(range(100, 100 + part))
            continue
        kind, *frames, height, width = part
        grids, placeholder = (made.images, IMAGE) if kind == "image" else (made.videos, VIDEO)
        grids.append([*(frames or [1]), height * merge, width * merge])
        for frame in range(*(frames or [1])):
            timestamp = [300 + frame] if kind == "video" else []
            made.tokens.extend([*timestamp, START, *[placeholder] * (height * width), END])
    return made


CANONICAL = prompt([5, ("image", 2, 2), 2, ("video", 2, 2, 2), 1])
"""Theirs, but for one token of text that stands after the second frame instead of before it."""


def random_prompt(random: Random, merge: int) -> Prompt:
    parts: list[Any] = []
    for _ in range(random.randint(1, 5)):
        sides = random.randint(1, 5), random.randint(1, 5)
        parts.append(random.choice([random.randint(1, 6), ("image", *sides), ("video", random.randint(1, 4), *sides)]))
    return prompt([*parts, *([random.randint(1, 3)] if random.random() < 0.5 else [])], merge)


Id = tuple[Fraction | int, ...]
Rule = Callable[[int, int, int], tuple[list[Id], int]]
"""From the next id of text, height and width to the ids of a grid and the next id of text after it."""


def walked(prompt: Prompt, merge: int, rule: Rule) -> tuple[list[Id], int]:
    """Three ids per token, and the next one less the number of tokens: text counts on, grids follow the rule."""
    ids: list[Id] = []
    cursor = 0
    images, videos = iter(prompt.images), iter([grid for grid in prompt.videos for _ in range(grid[0])])
    at = 0
    while at < len(prompt.tokens):
        token = prompt.tokens[at]
        if token not in (IMAGE, VIDEO):
            ids.append((cursor,) * 3)
            cursor, at = cursor + 1, at + 1
            continue
        _, height, width = next(images if token == IMAGE else videos)
        placed, cursor = rule(cursor, height // merge, width // merge)
        ids += placed
        at += len(placed)
    return ids, cursor - len(ids)


def rasters(height: int, width: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(height) for j in range(width)]


def vanilla(cursor: int, height: int, width: int) -> tuple[list[Id], int]:
    return [(cursor + k,) * 3 for k in range(height * width)], cursor + height * width


def mrope(cursor: int, height: int, width: int) -> tuple[list[Id], int]:
    ids: list[Id] = [(cursor, cursor + i, cursor + j) for i, j in rasters(height, width)]
    return ids, 1 + max(int(value) for position in ids for value in position)


def reset(cursor: int, height: int, width: int) -> tuple[list[Id], int]:
    local: list[Id] = [(0, i, j) for i, j in rasters(height, width)]
    end = max(int(value) for position in local for value in position) + 1 + cursor  # the id of END
    return [(cursor, i, j) for _, i, j in local], end


def videorope(cursor: int, height: int, width: int) -> tuple[list[Id], int]:
    up, left = (height - 1) // 2, (width - 1) // 2
    return [(cursor, cursor + i - up, cursor + j - left) for i, j in rasters(height, width)], cursor + 1


def v2pe(stride: Fraction) -> Rule:
    def rule(cursor: int, height: int, width: int) -> tuple[list[Id], int]:
        ids: list[Id] = [(cursor - 1 + stride * (k + 1),) * 3 for k in range(height * width)]
        return ids, math.ceil(ids[-1][0]) + 1

    return rule


DESIGNS: dict[str, tuple[str | Scheme, Rule]] = {
    "vanilla-rope": ("flatten", vanilla),
    "mrope": ("mrope-qwen3", mrope),
    "mrope-interleave": ("mrope", mrope),
    "mrope-interleave with spatial_reset, ilrope, omnirope": ("mrope-interleave-reset", reset),
    "videorope": ("videorope", videorope),
    "v2pe of a quarter a token": (V2PE(stride=64), v2pe(Fraction(1, 4))),
    "v2pe of 3/16 a token": (V2PE(stride=48), v2pe(Fraction(3, 16))),
}


def table_of(batch: Sequence[Prompt], merge: int, left: bool = False) -> SegmentTable:
    """A batch as a tokeniser hands it over, padded on one side where prompts differ in length."""
    width = max(len(one.tokens) for one in batch)
    pads = [(width - len(one.tokens)) * np.array([left, not left]) for one in batch]
    rows = [np.pad(one.tokens, pad) for one, pad in zip(batch, pads, strict=True)]
    mask = [np.pad(np.ones(len(one.tokens), int), pad) for one, pad in zip(batch, pads, strict=True)]
    return SegmentTable.from_input_ids(
        np.array(rows),
        Placeholders(image=IMAGE, video=VIDEO),
        [grid for one in batch for grid in one.images] or None,
        [grid for one in batch for grid in one.videos] or None,
        spatial_merge_size=merge,
        attention_mask=np.array(mask),
        frames_apart=True,
    )


@pytest.mark.parametrize("design", DESIGNS)
def test_designs_of_multimodal_ropes(design: str) -> None:
    scheme, rule = DESIGNS[design]
    random = Random(design)
    for round_ in range(40):
        merge, left = random.choice([1, 2, 3]), random.random() < 0.5
        batch = [random_prompt(random, merge) for _ in range(random.randint(1, 3))] if round_ else [CANONICAL]
        merge = merge if round_ else 2
        positions = place(table_of(batch, merge, left), scheme)
        ids, width = exact(positions), max(len(one.tokens) for one in batch)
        for d, one in enumerate(batch):
            want, delta = walked(one, merge, rule)
            first = d * width + (width - len(want)) * left
            assert ids[first : first + len(want)] == [position[: positions.axes] for position in want]
            # Theirs counts the padding of a row as tokens of it.
            assert positions.next_positions[d] - len(want) == delta


def test_ids_that_multimodal_ropes_spells_out() -> None:
    """Five tokens, an image of 2×2 between its marks, two tokens, and what follows: ids of the image, and deltas."""
    table = table_of([CANONICAL], 2)
    quarter = place(table, V2PE(stride=64))
    assert quarter.dense()[:, 6:10].tolist() == [[5.25, 5.5, 5.75, 6.0]]
    assert quarter.deltas.tolist() == [-9]
    assert place(table, "mrope-interleave-reset").dense()[:, 6:10].tolist() == [[6] * 4, [0, 0, 1, 1], [0, 1, 0, 1]]
    assert place(table, "mrope").dense()[:, 6:10].tolist() == [[6] * 4, [6, 6, 7, 7], [6, 7, 6, 7]]


def test_prompts_without_grids_have_the_ids_of_text() -> None:
    for left in (False, True):
        table = table_of([prompt([3]), prompt([7])], 2, left)
        first = [0] * 4 * left + [0, 1, 2] + [0] * 4 * (not left)
        for scheme in ("mrope", "mrope-interleave-reset", "videorope"):
            positions = place(table, scheme)
            assert positions.dense().tolist() == [[*first, *range(7)]] * 3
            assert positions.next_positions.tolist() == [3, 7]


# Which axis turns which pair, of 64 pairs and three axes.


def every_second(section: list[int]) -> list[int]:
    """VideoRoPE: rows and columns in turn from the fastest pairs on, time behind them and in the first."""
    axes = [0] * 64
    for axis in (1, 2):
        for j in range(axis, 2 * section[axis], 2):
            axes[j] = axis
    return axes


def every_third(section: list[int]) -> list[int]:
    """MRoPE-Interleave: time, row, column in turn, and time where the others are used up."""
    pairs = sum(section)
    return [j % 3 if j < 3 * section[j % 3] else 0 for j in range(pairs)]


META = [0, 0, 1, 2, 1, 2, 1, 2] * 8
"""MM-RoPE: components of eight pairs."""

ALLOCATIONS: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "vanilla-rope": ({"axes": 3, "allocation": [0] * 64}, [0] * 64, False),
    "mrope": ({"allocation": "sections", "mrope_section": [16, 24, 24]}, [0] * 16 + [1] * 24 + [2] * 24, False),
    "mrope-interleave": (
        {"allocation": "mrope-interleaved", "mrope_section": [24, 20, 20]}, every_third([24, 20, 20]), False,
    ),
    "videorope": ({"allocation": every_second([16, 24, 24])}, every_second([16, 24, 24]), False),
    "hope": ({"allocation": every_second([16, 24, 24])}, every_second([16, 24, 24]), True),
    "mmrope": ({"allocation": META}, META, False),
    "grape, alternating": ({"axes": 3, "allocation": "interleaved"}, [j % 3 for j in range(64)], False),
}  # fmt: skip
"""Our arguments, their axis of each pair, and whether time does not turn."""


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocations_of_multimodal_ropes(name: str) -> None:
    arguments, axes, still = ALLOCATIONS[name]
    ids = torch.from_numpy(place(table_of([CANONICAL], 2), "videorope").dense())
    turning = ids * torch.tensor([[0 if still else 1], [1], [1]])
    angles = float32_angles(turning, 128, 5e6)[torch.tensor(axes), :, torch.arange(64)].T
    if still:  # a pair that does not turn has frequency zero
        powers = 1.0 / torch.pow(5e6, torch.arange(0, 128, 2).float() / 128)
        arguments = {**arguments, "inv_freq": [0.0 if a == 0 else float(p) for a, p in zip(axes, powers, strict=True)]}
    else:
        arguments = {**arguments, "theta": 5e6}
    rotary = Rotary(128, precision="hf", **arguments)
    assert rotary.pair_axis.tolist() == axes
    for ours, theirs in zip(mmpos.rotary.cos_sin(rotary, ids), (angles.cos(), angles.sin()), strict=True):
        assert_within(ours, theirs, cos_sin())  # of the same float32 angles; theirs: 1e-5


def test_partial_rotations_of_qwen35_are_those_of_transformers() -> None:
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    config = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig()
    config.rope_parameters = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    }
    rotary = Rotary.from_hf_config(config, precision="hf")
    assert (rotary.rotary_dim, rotary.pair_axis.tolist()) == (64, every_third([11, 11, 10]))
    text = torch.arange(32).expand(3, 1, -1)
    for ids in (
        text,
        drawn(5000, 3, 1, 40).cpu(),
        torch.from_numpy(place(table_of([CANONICAL], 2), "mrope").dense())[:, None],
    ):
        theirs = module.Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), ids)
        for ours, other in zip(mmpos.rotary.cos_sin(rotary, ids, layout="transformers"), theirs, strict=True):
            assert_within(ours, other, cos_sin())


# Serving: vLLM's requests by their features, SGLang's steps over text.

SECTIONS = Sections(Rotary(128, 1e6, allocation="sections", mrope_section=[16, 24, 24]), max_position=1 << 15)


def requested(tokens: list[int], offsets: Sequence[int], grids: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
    """Ask our ids as vLLM asks a model, with images of these spans and merged sides."""
    features = [
        SimpleNamespace(
            modality="image",
            data={"image_grid_thw": SimpleNamespace(data=torch.tensor([1, 2 * height, 2 * width]))},
            mm_position=SimpleNamespace(offset=offset, length=height * width, is_embed=None),
        )
        for offset, (height, width) in zip(offsets, grids, strict=True)
    ]
    return mrope_input_positions(tokens, features, scheme="mrope", sections=SECTIONS, spatial_merge_size=2)


PADDLE = {
    "text only": ([11, 12, 13, 14, 15], [], [], [[0, 1, 2, 3, 4]] * 3),
    "one image": (
        [10, START, *[IMAGE] * 4, END, 30, 31], [2], [(2, 2)],
        [[0, 1, 2, 2, 2, 2, 4, 5, 6], [0, 1, 2, 2, 3, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4, 5, 6]],
    ),
    "two images": (
        [10, START, *[IMAGE] * 4, END, 20, 21, START, *[IMAGE] * 3, END, 30], [2, 10], [(2, 2), (1, 3)],
        [
            [0, 1, 2, 2, 2, 2, 4, 5, 6, 7, 8, 8, 8, 11, 12],
            [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8, 8, 11, 12],
            [0, 1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        ],
    ),
    "an image first": (
        [START, *[IMAGE] * 4, END, 10, 11], [1], [(2, 2)],
        [[0, 1, 1, 1, 1, 3, 4, 5], [0, 1, 1, 2, 2, 3, 4, 5], [0, 1, 2, 1, 2, 3, 4, 5]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDLE)
def test_vllms_ids_of_paddleocrs_prompts(name: str) -> None:
    tokens, offsets, grids, want = PADDLE[name]
    ids, delta = requested(tokens, offsets, grids)
    assert ids.tolist() == want
    assert delta == int(ids.max()) + 1 - len(tokens)


def test_vllms_ids_of_random_requests() -> None:
    random = Random(7)
    for _ in range(60):
        drawn = random_prompt(random, 2)._replace(videos=[])
        drawn.tokens[:] = [token for token in drawn.tokens if token != VIDEO]
        starts = [i for i, token in enumerate(drawn.tokens) if token == IMAGE and drawn.tokens[i - 1] != IMAGE]
        ids, delta = requested(drawn.tokens, starts, [[side // 2 for side in grid[1:]] for grid in drawn.images])
        want, want_delta = walked(drawn, 2, mrope)
        assert (ids.T.tolist(), delta) == ([list(map(int, position)) for position in want], want_delta)


def test_sglangs_steps_over_text() -> None:
    """Extending counts on from the prefix, and decoding is at the length less one, on every axis."""
    prefixes, extended = [0, 100, 3], [5, 2048, 1]
    lengths = [prefix + more for prefix, more in zip(prefixes, extended, strict=True)]
    positions = place(SegmentTable.from_documents([[Text(n)] for n in lengths]), "mrope")
    ids = window_positions(positions, SECTIONS, range(3), prefixes, extended)
    want = torch.cat([torch.arange(start, stop) for start, stop in zip(prefixes, lengths, strict=True)])
    assert ids.dtype == torch.int64
    assert ids.is_contiguous()
    assert torch.equal(ids, want.expand(3, -1))
    prompts = place(SegmentTable.from_documents([[Text(1)], [Text(5)], [Text(4000)]]), "mrope")
    decoded = window_positions(prompts, SECTIONS, range(3), [0, 16, 4095], [1, 1, 1])
    assert decoded.tolist() == [[0, 16, 4095]] * 3


def test_windows_into_a_grid_and_past_the_prompt() -> None:
    """The same with an image, in which prefixes end, and after which the delta of the prompt counts on."""
    positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]), "mrope")
    whole, delta = positions.dense(), int(positions.deltas[0])
    for prefix in range(14):
        got = window_positions(positions, SECTIONS, [0], [prefix], [5]).tolist()
        after = [list(range(max(prefix, 11) + delta, max(prefix + 5, 11) + delta))] * 3
        assert got == [a + b for a, b in zip(whole[:, prefix : prefix + 5].tolist(), after, strict=True)]
