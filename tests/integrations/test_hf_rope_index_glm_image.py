"""rope_index beside get_rope_index of GLM-Image: the same bits, and the same ids of images to generate on the model."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_name import CACHE
from model_configs import config_of, settings_of
from test_hf_rope_index import Away, Counting, Request, assert_same, both_ways, mask_of
from test_models_rope_index import Rows, glm_image_row, unbound
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mmpos import InvalidInputError
from mmpos.integrations.hf import generating_rope_index, install, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import GeneratingRopeIndex

FEW = 150
MODEL, TEXT, BEGIN, END = "glm_image", 7, 16384, 16385
FUNCTION = GeneratingRopeIndex(BEGIN, END)


def request(random: Random, settings: Any) -> Request:
    """Rows with images, complete or to generate, padded, masked with holes; at times the same grids for each row."""
    grids: list[list[int]] = []
    alike = random.random() < 0.2
    made = [glm_image_row(random, settings, grids) for _ in range(1 if alike else random.randint(1, 4))]
    rows = Rows.padded(random, [row for row, _, _ in made] * (random.randint(1, 3) if alike else 1))
    tokens = torch.from_numpy(rows.input_ids)
    if random.random() < 0.5:  # the model writes the codes of images in the place of placeholders before it calls
        tokens = tokens.masked_fill(tokens == settings.placeholders.image, TEXT)
    arguments: dict[str, Any] = {"input_ids": tokens}
    traits = ["alike"] * alike
    if rows.mask is not None or random.random() < 0.3:
        arguments["attention_mask"], holes = mask_of(random, rows.real, (rows.input_ids >= BEGIN).astype(int))
        traits += ["attention_mask", *["holes"] * holes]
    elif random.random() < 0.3:
        arguments["attention_mask"] = torch.ones(len(tokens), tokens.shape[1] + 3, dtype=torch.int64)
        traits.append("a longer mask")
    elif random.random() < 0.5:  # which theirs takes only without a mask
        arguments["input_ids"] = tokens.int()
        traits.append("torch.int32")
    if grids or random.random() < 0.5:
        arguments["image_grid_thw"] = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
        if not alike:
            arguments["images_per_sample"] = torch.tensor([sources + targets for _, sources, targets in made])
        traits.append("image_grid_thw")
    return Request(arguments, {}, traits)


def compare(count: int, seed: str = "") -> Counter[str]:
    """Compare random batches with the answers of the method, and with what it leaves on the model."""
    random, config, settings, traits = Random(MODEL + seed), config_of(MODEL), settings_of(MODEL), Counter[str]()
    kind, stand_in = unbound(MODEL, config)
    for _ in range(count):
        asked = request(random, settings)
        want = kind.get_rope_index(stand_in, **asked.arguments)
        left = stand_in._cached_decode_position_ids
        for got, ahead in both_ways(FUNCTION.with_generated, asked.arguments):
            assert_same(got, want, asked)
            assert (left is None) == (ahead is None), asked
            if ahead is not None:
                assert_same((ahead,), (left,), asked)
        traits.update(["images to generate"] * (left is not None and left.shape[2] > 1))
        traits.update(asked.traits)
    return traits


def test_ids_and_those_of_images_to_come_have_the_bits_of_the_method() -> None:
    compare(FEW)


@pytest.mark.slow
def test_many_ids_and_those_of_images_to_come_have_the_bits_of_the_method(batches: int) -> None:
    traits = compare(batches, "many")
    wanted = ["attention_mask", "holes", "image_grid_thw", "images to generate", "alike", "a longer mask"]
    wanted += ["torch.int32"]
    assert {name: traits[name] for name in wanted if traits[name] < batches // 60} == {}


def test_parameters_and_markers_are_those_of_the_model() -> None:
    config = config_of(MODEL)
    kind, _ = unbound(MODEL, config)
    assert rope_index(config) == FUNCTION
    want = list(inspect.signature(kind.get_rope_index).parameters.values())[1:]
    got = inspect.signature(FUNCTION).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


def told() -> dict[str, Tensor]:
    """A prompt with an image of 1×2, and one without, padded on the left; 2×1 and 1×2 are to come in the first."""
    return {
        "input_ids": torch.tensor([[TEXT, BEGIN, TEXT, TEXT, END, BEGIN], [0, 0, 0, 0, TEXT, BEGIN]]),
        "attention_mask": torch.tensor([[1] * 6, [0, 0, 0, 0, 1, 1]]),
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 2], [1, 2, 1], [1, 1, 1]]),
        "images_per_sample": torch.tensor([3, 1]),
    }


AHEAD = [
    [[6, 6, 8, 8, 10], [6, 7, 8, 8, 10], [6, 6, 8, 9, 10]],
    [[2, 3, 3, 3, 3], [2, 3, 3, 3, 3], [2, 3, 3, 3, 3]],
]


def test_ids_are_laid_ahead_of_the_last_grid_first() -> None:
    (ids, deltas), ahead = FUNCTION.with_generated(**told())
    assert ids.tolist() == [
        [[0, 1, 2, 2, 4, 5], [1, 1, 1, 1, 0, 1]],
        [[0, 1, 2, 2, 4, 5], [1, 1, 1, 1, 0, 1]],
        [[0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 0, 1]],
    ]
    assert deltas.tolist() == [[0], [0]]
    assert ahead is not None
    assert ahead.tolist() == AHEAD


def model_of() -> Any:
    """A model with the method and a config, without weights."""
    config = config_of(MODEL)
    kind, _ = unbound(MODEL, config)
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.config, model.rope_deltas = config, None
    model._cached_decode_position_ids = model._prefill_len = None
    return model


def steps(model: Any) -> list[Tensor]:
    """The ids of a prompt and of three steps of decoding, as the model computes them."""
    asked: dict[str, Any] = told() | {"inputs_embeds": torch.zeros(2, 6, 1), CACHE: None}
    made = [model.compute_3d_position_ids(**asked)]
    for step in range(3):
        cache = SimpleNamespace(get_seq_length=lambda seen=6 + step: seen)
        asked |= {"inputs_embeds": torch.zeros(2, 1, 1), CACHE: cache}
        made.append(model.compute_3d_position_ids(**asked))
    return made


def test_an_installed_function_leaves_them_on_the_model_for_its_decoding() -> None:
    want, model = steps(model_of()), install(install(model_of()))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        got = steps(one)
        assert all(map(torch.equal, got, want))
        assert got[3].tolist() == [[[8], [3]], [[8], [3]], [[8], [3]]]
        assert one._cached_decode_position_ids.tolist() == AHEAD
        assert one._prefill_len == 6
        one.get_rope_index(told()["input_ids"][:, :3])
        assert (one._prefill_len, one._cached_decode_position_ids) == (3, None)
    assert "get_rope_index" not in vars(uninstall(model))


REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "an image without its begin": (
        [TEXT, END, BEGIN],
        {"image_grid_thw": [[1, 1, 1]], "images_per_sample": [1]},
        "input_ids[0]: got an image_end_token_id without its image_start_token_id",
    ),
    "markers inside markers": (
        [BEGIN, BEGIN, TEXT, END, END],
        {"image_grid_thw": [[1, 1, 2]] * 2, "images_per_sample": [2]},
        "input_ids[0]: got an image_end_token_id without its image_start_token_id",
    ),
    "an image of another size": (
        [BEGIN, TEXT, TEXT, END],
        {"image_grid_thw": [[1, 1, 3]], "images_per_sample": [1]},
        "image_grid_thw[0]: got a run of 2 placeholders at document 0, token 1, want 3 for 1x1x3 after merging",
    ),
    "other grids than rows have": (
        [TEXT, BEGIN],
        {"image_grid_thw": [[1, 1, 1]], "images_per_sample": [2]},
        "images_per_sample: got a sum of 2, want 1, one per grid",
    ),
    "frames": (
        [TEXT, BEGIN],
        {"image_grid_thw": [[2, 1, 1]], "images_per_sample": [1]},
        "image_grid_thw[0, 0]: got 2 frames, want 1",
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", REFUSED)
def test_images_that_do_not_fit_their_markers_are_refused(name: str) -> None:
    row, more, said = REFUSED[name]
    with pytest.raises(InvalidInputError) as raised:
        FUNCTION(torch.tensor([row]), **{key: torch.tensor(value) for key, value in more.items()})
    assert str(raised.value) == said


def test_graphs_hold_the_function_of_glm_image() -> None:
    compiled = torch.compile(FUNCTION.with_generated, backend="eager", fullgraph=True)
    (got, ahead), (want, laid) = compiled(**told()), FUNCTION.with_generated(**told())
    assert ahead is not None
    assert laid is not None
    assert_same((*got, ahead), (*want, laid))


def test_an_accelerator_gives_and_gets_all_of_glm_image_in_one_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = generating_rope_index._compute_generating
    monkeypatch.setattr(generating_rope_index, "_GENERATING_OPERATOR", compute)  # in sight of the mode
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got, ahead = FUNCTION.with_generated(**{name: Away(value) for name, value in told().items()})
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert_same(tree_map_only(Away, lambda value: value.held, got), FUNCTION(**told()))
    assert isinstance(ahead, Away)
    assert ahead.held.tolist() == AHEAD
