"""rope_index beside get_rope_index of HunYuan-VL: the same bits, dtypes, shapes, parameters."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from test_hf_rope_index import Away, Counting, Request, assert_same, both_ways, mask_of, told
from test_models_rope_index import Rows, hunyuan, hunyuan_row, unbound
from torch import nn
from torch.utils._pytree import tree_map_only

from mmpos import InvalidInputError
from mmpos.integrations.hf import get_rope_index, install, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import XDRopeIndex

FEW = 60
TEXT, IMAGE = 0, 1


def request(random: Random, settings: Any) -> Request:
    """Rows with images, whose sides merging need not divide, padded, masked with holes, of any dtype."""
    images: list[list[int]] = []
    rows = Rows.padded(random, [hunyuan_row(random, settings, images) for _ in range(random.randint(1, 4))])
    kinds = (rows.input_ids == settings.placeholders.image).astype(np.int64) * rows.real
    kinds[(kinds == TEXT) & (np.arange(kinds.size).reshape(kinds.shape) % 7 == random.randrange(9))] = 2  # is text
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(rows.input_ids).to(random.choice([torch.int64, torch.int32])),
        "mm_token_type_ids": torch.from_numpy(kinds).to(random.choice([torch.int64, torch.int32, torch.uint8])),
    }
    traits = [str(arguments["input_ids"].dtype)]
    if rows.mask is not None or random.random() < 0.3:
        arguments["attention_mask"], holes = mask_of(random, rows.real, kinds)
        traits += ["attention_mask", *["holes"] * holes]
    if images and random.random() < 0.9:
        more = [[random.randrange(3), random.randrange(2), random.randrange(2)] for _ in images]
        arguments["image_grid_thw"] = torch.tensor(images) + torch.tensor(more)
        traits += ["image_grid_thw"]
    elif images:
        traits += ["images without grids"]
    return Request(arguments, {}, traits)


def compare(axes: int, count: int, seed: str = "") -> Counter[str]:
    """Compare random batches with the answers of the method; returns how many had each trait."""
    random, (config, settings) = Random(seed or axes), hunyuan(axes)
    kind, stand_in = unbound("hunyuan_vl", config)
    function, traits = rope_index(config), Counter[str]()
    for _ in range(count):
        asked = request(random, settings)
        want = kind.get_rope_index(stand_in, **asked.arguments)
        for got in both_ways(function, asked.arguments):
            assert_same(got, want, asked)
        traits.update(asked.traits)
    return traits


@pytest.mark.parametrize("axes", [3, 4, 5])
def test_ids_and_deltas_of_hunyuan_vl_have_the_bits_of_its_method(axes: int) -> None:
    compare(axes, FEW)


@pytest.mark.slow
def test_many_ids_and_deltas_of_hunyuan_vl_have_the_bits_of_its_method(batches: int) -> None:
    traits = compare(4, batches, "many")
    wanted = ("attention_mask", "holes", "image_grid_thw", "images without grids", "torch.int32", "torch.int64")
    assert {name: traits[name] for name in wanted if traits[name] < batches // 60} == {}


def test_parameters_are_those_of_the_method_of_hunyuan_vl() -> None:
    config, _ = hunyuan(4)
    kind, _ = unbound("hunyuan_vl", config)
    want = list(inspect.signature(kind.get_rope_index).parameters.values())[1:]
    got = inspect.signature(rope_index(config)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize(("axes", "merge"), [(3, 2), (5, 4)])
def test_axes_and_merge_size_are_those_of_the_config(axes: int, merge: int) -> None:
    config, _ = hunyuan(axes)
    config.vision_config.spatial_merge_size = merge
    assert rope_index(config) == XDRopeIndex(merge, axes)


def test_images_are_counted_over_the_batch() -> None:
    asked = told([[IMAGE, IMAGE, TEXT], [TEXT, IMAGE, IMAGE]], image_grid_thw=[[1, 2, 2]] * 2)
    ids, deltas = XDRopeIndex(2, 4)(**asked)
    assert ids.tolist() == [
        [[0, 1, 2], [0, 1, 2]],
        [[0, 1, 2], [0, 0, 1]],
        [[0, 0, 2], [0, 0, 0]],
        [[0, 0, 2], [0, 1, 1]],
    ]
    assert deltas.tolist() == [[0], [0]]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("kinds", "grids", "said"),
    [
        ([[TEXT, IMAGE, IMAGE]], [], "image_grid_thw: got 0 grids, want 1, one for each run of placeholders"),
        ([[TEXT, TEXT]], [[1, 2, 2]], "image_grid_thw: got 1 grid, want 0, one for each run of placeholders"),
        (
            [[TEXT, IMAGE, IMAGE, IMAGE]],
            [[1, 2, 2]],
            "image_grid_thw[0]: got a run of 3 placeholders at document 0, token 1, want 2 or 4 for 1x1x1 after "
            "merging, whose rows end in one more",
        ),
        ([[IMAGE, IMAGE]], [[1, 2, 1]], "image_grid_thw[0]: got (1, 2, 1), want at least (0, 2, 2), one token"),
    ],
)
def test_grids_that_do_not_fit_the_images_are_refused(kinds: Any, grids: Any, said: str) -> None:
    asked = told(kinds) | {"image_grid_thw": torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)}
    with pytest.raises(InvalidInputError) as raised:
        XDRopeIndex(2, 4)(**asked)
    assert str(raised.value) == said


def test_graphs_hold_the_function_of_hunyuan_vl_as_one_operator() -> None:
    asked = told([[IMAGE, IMAGE, TEXT]], image_grid_thw=[[1, 2, 2]], attention_mask=[[1, 1, 1]])
    function = XDRopeIndex(2, 5)
    compiled = torch.compile(function.__call__, backend="eager", fullgraph=True)
    assert_same(compiled(**asked), function(**asked))


def test_an_accelerator_gives_and_gets_all_of_hunyuan_vl_in_one_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_rope_index, "_XD_OPERATOR", get_rope_index._compute_xd)  # in sight of the mode
    asked = told([[TEXT, IMAGE, IMAGE, TEXT]], attention_mask=[[0, 1, 1, 1]], image_grid_thw=[[1, 2, 2]])
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = XDRopeIndex(2, 4)(**{name: Away(value) for name, value in asked.items()})
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert_same(tree_map_only(Away, lambda value: value.held, got), XDRopeIndex(2, 4)(**asked))


def test_install_puts_the_function_into_hunyuan_vl_and_uninstall_takes_it_out() -> None:
    config, _ = hunyuan(4)
    kind, _ = unbound("hunyuan_vl", config)
    model: nn.Module = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    asked = told([[IMAGE, IMAGE, TEXT]], image_grid_thw=[[1, 2, 2]])
    want = model.get_rope_index(**asked)  # type: ignore[operator]
    assert vars(copy.deepcopy(install(install(model))))["get_rope_index"] == XDRopeIndex(2, 4)
    assert_same(model.get_rope_index(**asked), want)  # type: ignore[operator]
    assert "get_rope_index" not in vars(uninstall(model))
