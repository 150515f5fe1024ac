"""rope_index beside get_rope_index of Qwen2.5-Omni: the same bits, dtypes, shapes, parameters."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from typing import Any

import pytest
import torch
from model_configs import TEXT, config_of
from test_hf_rope_index import Away, Counting, Request, assert_same, mask_of
from test_models_omni import AUDIO, IMAGE, VIDEO, VISION, Prompts, prompts, theirs
from test_models_peers import padded
from torch import nn
from torch.utils._pytree import tree_map_only

from mmpos import InvalidInputError, UnsupportedError
from mmpos.integrations.hf import get_rope_index, install, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import OmniRopeIndex

FEW, MANY = 60, 2100
MODEL = "qwen2_5_omni"
FUNCTION = OmniRopeIndex(IMAGE, VIDEO, AUDIO, 2, 25, 50)


def arguments_of(rng: random.Random, made: Prompts, clips: bool) -> dict[str, Any]:
    """Grids, frames of audio and seconds, whose products with float32 are rounded in many ways."""
    asked: dict[str, Any] = {"use_audio_in_video": clips}
    if made.images:
        asked["image_grid_thw"] = torch.tensor(made.images)
    if made.videos:
        asked["video_grid_thw"] = torch.tensor(made.videos)
        rates = [float(s) if rng.random() < 0.5 else rng.uniform(0.01, 9) for s in made.seconds]
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        asked["second_per_grids"] = torch.tensor(rates, dtype=dtype)
    if made.features:
        asked["audio_seqlens"] = torch.tensor(made.features)
    return asked


def request(rng: random.Random) -> Request:
    """Rows of text, images, audio and videos, silent or with their sound, padded, masked with holes."""
    clips, side = rng.random() < 0.6, rng.choice(["left", "right"])
    made = prompts(MODEL, rng, clips)
    ids, real = padded(made.rows, side), padded([[1] * len(row) for row in made.rows], side)
    asked, traits = arguments_of(rng, made, clips), ["clips" if clips and made.videos else "no clips"]
    if not real.all() or rng.random() < 0.5:
        asked["attention_mask"], holes = mask_of(rng, real.bool().numpy(), (ids != TEXT).int().numpy())
        traits += ["holes"] * holes
    if rng.random() < 0.2:
        grids = asked.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        asked["image_grid_thw"] = torch.cat([grids, torch.tensor([[1, 6, 6]])])
        traits.append("surplus image")
    # Theirs takes other integers only without a mask.
    asked["input_ids"] = ids.int() if "attention_mask" not in asked and rng.random() < 0.5 else ids
    return Request(asked, {}, [*traits, *asked, str(asked["input_ids"].dtype)])


def compare(count: int) -> Counter[str]:
    """Compare random batches with the answers of the method; returns how many had each trait."""
    rng, (method, stand_in), traits = random.Random(MODEL), theirs(MODEL), Counter[str]()
    for _ in range(count):
        asked = request(rng)
        assert_same(FUNCTION(**asked.arguments), method(stand_in, **asked.arguments), asked)
        traits.update(asked.traits)
    return traits


@pytest.mark.usefixtures("way")
def test_ids_and_deltas_of_qwen2_5_omni_have_the_bits_of_its_method() -> None:
    compare(FEW)


@pytest.mark.slow
def test_many_ids_and_deltas_of_qwen2_5_omni_have_the_bits_of_its_method() -> None:
    traits = compare(MANY)
    wanted = ["attention_mask", "holes", "image_grid_thw", "video_grid_thw", "audio_seqlens", "clips", "no clips"]
    wanted += ["surplus image", "torch.int32", "torch.int64"]
    assert {name: traits[name] for name in wanted if traits[name] < 50} == {}


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}_thinker"])
def test_token_ids_and_rates_are_those_of_the_thinker(name: str) -> None:
    assert rope_index(config_of(name)) == FUNCTION


def test_parameters_are_those_of_the_method_of_qwen2_5_omni() -> None:
    method, _ = theirs(MODEL)
    want = list(inspect.signature(method).parameters.values())[1:]
    got = inspect.signature(FUNCTION).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_without_grids_the_mask_alone_is_counted(dtype: torch.dtype) -> None:
    method, stand_in = theirs(MODEL)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]]).to(dtype)
    for ids in (None, torch.full((3, 4), AUDIO)):
        assert_same(FUNCTION(ids, attention_mask=mask), method(stand_in, ids, attention_mask=mask))
    with pytest.raises(InvalidInputError, match=r"^attention_mask: got None, want a tensor, where there are no grids$"):
        FUNCTION(torch.zeros(1, 2, dtype=torch.int64))


def test_seconds_are_multiplied_as_float32() -> None:
    """The fifth frame at 1.64 seconds a frame: the exact product lies below 164, that of float32 at it."""
    ids = torch.tensor([[VISION, *[VIDEO] * 5]])
    grid, seconds = torch.tensor([[5, 2, 2]]), torch.tensor([1.64], dtype=torch.float64) - 1e-9
    got, _ = FUNCTION(ids, video_grid_thw=grid, second_per_grids=seconds)
    assert got[0, 0].tolist() == [0, 1, 42, 83, 124, 165]


CLIP = [TEXT, TEXT, VIDEO, AUDIO, TEXT, TEXT]
REFUSED: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "sound in a video, though it is said to be silent": (
        CLIP,
        {"video_grid_thw": [[1, 2, 2]], "second_per_grids": [1.0]},
        "use_audio_in_video: got False, want True for a video with audio between its frames",
    ),
    "audio of another length": (
        [TEXT, AUDIO, TEXT],
        {"image_grid_thw": [], "audio_seqlens": [8]},
        "audio_lengths[0]: got 2, want 1, the audio tokens in input_ids",
    ),
    "no seconds": (
        [TEXT, VIDEO],
        {"video_grid_thw": [[1, 2, 2]]},
        "second_per_grids: got None, want at least 1 values, one per video",
    ),
    "seconds below zero": (
        [TEXT, VIDEO, VIDEO],
        {"video_grid_thw": [[2, 2, 2]], "second_per_grids": [-1.0]},
        "second_per_grids[0]: got -1.0, want a number >= 0",
    ),
    "no number of seconds": (
        [TEXT, VIDEO, TEXT, VIDEO],
        {"video_grid_thw": [[1, 2, 2]] * 2, "second_per_grids": [1.0, float("nan")]},
        "second_per_grids[1]: got nan, want a number >= 0",
    ),
    "seconds of fewer videos": (
        [TEXT, VIDEO, TEXT, VIDEO],
        {"video_grid_thw": [[1, 2, 2]] * 2, "second_per_grids": [1.0]},
        "second_per_grids: got shape (1,), want at least 2 values, one per video",
    ),
    "another mask": (
        [TEXT, IMAGE],
        {"image_grid_thw": [[1, 2, 2]], "attention_mask": [[1]]},
        "attention_mask: got shape (1, 1), want (1, 2) as input_ids",
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", REFUSED)
def test_audio_and_seconds_that_do_not_fit_are_refused(name: str) -> None:
    row, told, said = REFUSED[name]
    asked: dict[str, Any] = {key: torch.tensor(value) for key, value in told.items()}
    if told.get("image_grid_thw") == []:
        asked["image_grid_thw"] = torch.zeros(0, 3, dtype=torch.int64)
    with pytest.raises(InvalidInputError) as raised:
        FUNCTION(torch.tensor([row]), **asked)
    assert str(raised.value) == said


def test_graphs_hold_the_function_of_qwen2_5_omni() -> None:
    asked: dict[str, Any] = {"video_grid_thw": torch.tensor([[2, 2, 2]]), "second_per_grids": torch.tensor([1.0])}
    ids = torch.tensor([[TEXT, VIDEO, VIDEO, TEXT]])
    compiled = torch.compile(FUNCTION.__call__, backend="eager", fullgraph=True)
    assert_same(compiled(ids, **asked), FUNCTION(ids, **asked))


def test_an_accelerator_gives_and_gets_all_of_qwen2_5_omni_in_one_copy_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_rope_index, "_OMNI_OPERATOR", get_rope_index._compute_omni)  # in sight of the mode
    asked: dict[str, Any] = {
        "input_ids": torch.tensor([[0, *CLIP]]),
        "attention_mask": torch.tensor([[0, *[1] * len(CLIP)]]),
        "video_grid_thw": torch.tensor([[1, 2, 2]]),
        "audio_seqlens": torch.tensor([3]),
        "second_per_grids": torch.tensor([0.5]),
    }
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = FUNCTION(**{name: Away(value) for name, value in asked.items()}, use_audio_in_video=True)
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert_same(tree_map_only(Away, lambda value: value.held, got), FUNCTION(**asked, use_audio_in_video=True))


def stand_in_of(config: Any) -> Any:
    """A module with the method and this config, without weights."""
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerModel

    model = Qwen2_5OmniThinkerModel.__new__(Qwen2_5OmniThinkerModel)
    nn.Module.__init__(model)
    model.config = config
    return model


def test_install_takes_the_thinker_and_refuses_the_talker() -> None:
    config = config_of(MODEL)
    thinker = stand_in_of(config.thinker_config)
    assert install(thinker).get_rope_index == FUNCTION
    assert "get_rope_index" not in vars(uninstall(thinker))
    both = nn.ModuleList([thinker, stand_in_of(config.talker_config)])
    with pytest.raises(UnsupportedError, match=r"config\.model_type: got 'qwen2_5_omni_talker', want one of cohere_"):
        install(both)
    assert "get_rope_index" not in vars(thinker)
