"""rope_index beside get_rope_index of MiniCPM-V 4.7: the same bits, dtypes, shapes, parameters, tokens."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import Counter
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import ARGUMENTS, config_of, settings_of
from test_hf_rope_index import Answered, Away, Counting, Request, assert_same, both_ways, mask_of
from test_models_rope_index import Rows, minicpm_row, unbound
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import MiniCPMV4_7Config, MiniCPMV4_7ForConditionalGeneration

from mmpos import InvalidInputError
from mmpos.integrations.hf import canvas_rope_index, install, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import CanvasRopeIndex
from mmpos.segments import CropMarkers

MODEL = "minicpmv4_7"
FEW = 300
IMAGE, VIDEO, BEGIN, END, SLICE, LAST, NEWLINE = range(20, 27)
"""Of the config of tests."""
FUNCTION = CanvasRopeIndex(CropMarkers(BEGIN, END, SLICE, LAST, NEWLINE), 4)


def request(random: Random, settings: Any) -> Request:
    """Images and frames of videos, padded, masked with holes, of any dtype, merged as the config or a call says."""
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    rows = Rows.padded(random, [minicpm_row(random, settings, grids) for _ in range(random.randint(1, 4))])
    kinds = ((rows.input_ids == IMAGE) + 2 * (rows.input_ids == VIDEO)) * rows.real
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(rows.input_ids).to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": torch.from_numpy(kinds).to(random.choice([torch.int64, torch.int32, torch.uint8])),
    }
    traits = [str(arguments["input_ids"].dtype)]
    if rows.mask is not None or random.random() < 0.3:
        around = np.isin(rows.input_ids, (BEGIN, END, SLICE, LAST))  # newlines may be under a hole
        arguments["attention_mask"], holes = mask_of(random, rows.real, kinds + around)
        traits += ["holes"] * holes
    mode = random.choice([None, "16x", "4x"])
    merge = 2 if mode == "4x" else 4
    if mode is not None:
        arguments["downsample_mode"] = mode
        traits.append(mode)
    for name, patch in (("target_sizes", IMAGE), ("target_sizes_videos", VIDEO)):
        sizes = [[merge * side // 4 + random.randrange(merge) for side in grid[1:]] for grid in grids[patch]]
        if random.random() < 0.2:  # a crop that no token is left for
            sizes.append(random.choice([[4, 8], [1, 8]]))
            traits.append(f"surplus {name}")
        if sizes:
            arguments[name] = torch.tensor(sizes)
    left = rows.mask is not None and bool((rows.mask[:, 0] == 0).any())
    return Request(arguments, {}, [*traits, *["padding on the left"] * left, *arguments])


def answered(count: int, seed: str = "") -> Answered:
    """As many requests, each with the answer of the method; the same in every run."""
    random, (kind, stand_in) = Random(MODEL + seed), unbound(MODEL, config_of(MODEL))
    settings = settings_of(MODEL)
    asked = [request(random, settings) for _ in range(count)]
    return [(each, kind.get_rope_index(stand_in, **each.arguments)) for each in asked]


few = cache(partial(answered, FEW))


@pytest.mark.usefixtures("way")
def test_ids_and_deltas_of_minicpm_have_the_bits_of_its_method() -> None:
    function = rope_index(config_of(MODEL))
    for asked, want in few():
        assert_same(function(**asked.arguments), want, asked)


@pytest.mark.slow
def test_many_ids_and_deltas_of_minicpm_have_the_bits_of_its_method(batches: int) -> None:
    function, traits = rope_index(config_of(MODEL)), Counter[str]()
    for asked, want in answered(batches, "many"):
        for got in both_ways(function, asked.arguments):
            assert_same(got, want, asked)
        traits.update(asked.traits)
    wanted = ["attention_mask", "holes", "padding on the left", "torch.int32", "torch.int64", "4x", "16x"]
    wanted += [f"{surplus}target_sizes{videos}" for surplus in ("", "surplus ") for videos in ("", "_videos")]
    assert {name: traits[name] for name in wanted if traits[name] < batches // 60} == {}


def test_parameters_are_those_of_the_method_of_minicpm() -> None:
    kind, _ = unbound(MODEL, config_of(MODEL))
    want = list(inspect.signature(kind.get_rope_index).parameters.values())[1:]
    got = inspect.signature(rope_index(config_of(MODEL))).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize(("mode", "merge"), [("16x", 4), ("4x", 2)])
def test_markers_and_merge_size_are_those_of_the_config(mode: str, merge: int) -> None:
    config = config_of(MODEL)
    config.downsample_mode = mode
    assert rope_index(config) == CanvasRopeIndex(FUNCTION.crop_markers, merge)


# A picture of 1×2 tokens over two slices of 1×1 beside each other, and one of 2×1 tokens alone.
ROWS = [
    [5, BEGIN, IMAGE, IMAGE, END, SLICE, IMAGE, LAST, SLICE, IMAGE, LAST, 6],
    [0, 0, 0, 0, 0, 0, 5, BEGIN, VIDEO, VIDEO, END, 6],
]


def told(**more: Any) -> dict[str, Any]:
    ids = torch.tensor(ROWS)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        "target_sizes": torch.tensor([[4, 8], [4, 4], [4, 4]]),
        "target_sizes_videos": torch.tensor([[8, 4]]),
        "attention_mask": (ids > 0).long(),
        **more,
    }


@pytest.mark.usefixtures("way")
def test_ids_worked_out_by_hand() -> None:
    ids, deltas = FUNCTION(**told())
    assert ids.tolist() == [
        [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 4]],
        [[0, 0, 1, 1, 2, 1, 1, 1, 1, 1, 1, 4], [0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]],
        [[0, 0, 1, 2, 3, 1, 1, 1, 2, 2, 2, 4], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 4]],
    ]
    assert deltas.tolist() == [[-7], [-1]]


def test_markers_that_are_one_token_are_told_apart_by_their_places() -> None:
    """An end may be a newline, too; ids are those of five tokens."""
    alike = CanvasRopeIndex(CropMarkers(BEGIN, END, SLICE, END, END), 4)
    ids = torch.tensor(ROWS)
    assert_same(alike(**told(input_ids=torch.where(ids == LAST, END, ids))), FUNCTION(**told()))


def test_rows_of_text_need_no_sizes() -> None:
    ids, deltas = FUNCTION(torch.tensor([[5, 6, NEWLINE]]), torch.zeros(1, 3, dtype=torch.int64))
    assert ids.tolist() == [[[0, 1, 2]]] * 3
    assert deltas.tolist() == [[0]]


def test_the_method_takes_any_tokens_around_a_picture() -> None:
    """The token before takes the ids of a marker, whatever it is, and text goes on after the picture."""
    kind, stand_in = unbound(MODEL, config_of(MODEL))
    ids = torch.tensor([[5, 6, IMAGE, IMAGE, 7, 8]])
    asked: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
    asked["target_sizes"] = torch.tensor([[4, 8]])
    got, _ = kind.get_rope_index(stand_in, **asked)
    assert got.tolist() == [[[0, 1, 1, 1, 4, 5]], [[0, 0, 1, 1, 4, 5]], [[0, 0, 1, 2, 4, 5]]]
    with pytest.raises(
        InvalidInputError, match=r"^placeholders\.crops: got token 6 before the placeholders at document 0, "
    ):
        FUNCTION(**asked)


def without(row: int, token: int) -> Tensor:
    """The rows with text in the place of a token."""
    ids = torch.tensor(ROWS)
    ids[row, token] = 7
    return ids


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no types": ({"mm_token_type_ids": None}, "mm_token_type_ids: got NoneType, want a tensor"),
    "other types": (
        {"mm_token_type_ids": 3 * (torch.tensor(ROWS) == IMAGE).int()},
        "mm_token_type_ids: got 3, want 0, 1 or 2",
    ),
    "a mode": ({"downsample_mode": "8x"}, "downsample_mode: got '8x', want one of '4x', '16x'"),
    "no sizes": (
        {"target_sizes": None},
        "target_sizes: got 0 grids, want more for 4 placeholders from document 0, token 2 on",
    ),
    "another size": (
        {"target_sizes": torch.tensor([[4, 4], [4, 4], [4, 4]])},
        "target_sizes: got 3 grids, want more for 1 placeholder from document 0, token 9 on",
    ),
    "frames": (
        {"target_sizes": torch.tensor([[1, 4, 8]])},
        "target_sizes: got shape (1, 3), want (n, 2)",
    ),
    "a size below a token": (
        {"target_sizes_videos": torch.tensor([[8, 3]])},
        "target_sizes_videos[0]: got (8, 3), want at least (4, 4), one token",
    ),
    "no marker before": (
        {"input_ids": without(0, 1)},
        "placeholders.crops: got token 7 before the placeholders at document 0, token 2, "
        "want thumbnail_start or tile_start",
    ),
    "no marker after": (
        {"input_ids": without(1, 10)},
        "placeholders.crops: got token 7 after the placeholders at document 1, token 2, want thumbnail_end or tile_end",
    ),
    "a slice apart": (
        {
            "input_ids": torch.tensor([[BEGIN, IMAGE, END, 7, SLICE, IMAGE, LAST]]),
            "mm_token_type_ids": torch.tensor([[0, 1, 0, 0, 0, 1, 0]]),
            "attention_mask": None,
            "target_sizes": torch.tensor([[4, 4], [4, 4]]),
        },
        "segment 2: got a tile, want a thumbnail or another tile right before it",
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", REFUSED)
def test_pictures_that_do_not_fit_are_refused(name: str) -> None:
    more, said = REFUSED[name]
    with pytest.raises(InvalidInputError) as raised:
        FUNCTION(**told(**more))
    assert str(raised.value) == said


def test_graphs_hold_the_function_of_minicpm_as_one_operator() -> None:
    compiled = torch.compile(FUNCTION.__call__, backend="aot_eager", fullgraph=True)
    half = [size // 2 for size in (told()["target_sizes"], told()["target_sizes_videos"])]
    for more in ({}, dict(zip(("target_sizes", "target_sizes_videos"), half, strict=True)) | {"downsample_mode": "4x"}):
        asked = told(**more, input_ids=torch.tensor(ROWS, dtype=torch.int32))
        assert_same(compiled(**asked), FUNCTION(**told()))


def test_an_accelerator_gives_and_gets_all_of_minicpm_in_one_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        canvas_rope_index, "_CANVAS_OPERATOR", canvas_rope_index._compute_canvas
    )  # in sight of the mode
    away: dict[str, Any] = {name: Away(value) for name, value in told().items()}
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = FUNCTION(**away)
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert_same(tree_map_only(Away, lambda value: value.held, got), FUNCTION(**told()))


# In a tiny model.


@cache
def tiny() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_parameters": rope,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind: Any = MiniCPMV4_7Config
    own = kind(
        text_config=text,
        vision_config={**vision, "patch_size": 4, "image_size": 64},
        insert_layer_id=0,
        **ARGUMENTS[MODEL],
    )
    torch.manual_seed(0)
    return MiniCPMV4_7ForConditionalGeneration(own).eval()


@torch.no_grad()
def test_a_tiny_minicpm_generates_the_same_tokens_with_it_installed() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = {"pixel_values": 64, "pixel_values_videos": 32}  # patches
    asked = told(**{name: torch.randn(1, 3, 4, 4 * n, generator=generator) for name, n in pixels.items()})
    length: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    plain, installed = tiny(), install(copy.deepcopy(tiny()))
    assert installed.model.get_rope_index == FUNCTION
    want, got = (model.generate(**asked, **length, output_logits=True) for model in (plain, installed))
    assert got.sequences.shape == (2, 16)
    assert_same((got.sequences, *got.logits), (want.sequences, *want.logits))
    assert installed.model.rope_deltas.tolist() == [[-7], [-1]]


def test_uninstall_takes_it_out_of_minicpm_and_of_copies() -> None:
    model = install(install(copy.deepcopy(tiny())))
    other = pickle.loads(pickle.dumps(model))
    assert other.model.get_rope_index == FUNCTION
    assert "get_rope_index" not in vars(uninstall(other).model)
    assert "get_rope_index" in vars(model.model)
