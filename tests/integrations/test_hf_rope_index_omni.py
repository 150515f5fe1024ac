"""rope_index beside get_rope_index of the Qwen Omni models: the same bits, dtypes, shapes, parameters."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import CONFIGS, TEXT, config_of
from test_hf_rope_index import Away, Counting, Request, assert_same, both_ways, mask_of
from test_models_omni import AUDIO, IMAGE, MODELS, SOUND, SOUND_END, VIDEO, VISION, VISION_END, Prompts, prompts, theirs
from test_models_peers import padded
from torch import nn
from torch.utils._pytree import tree_map_only

from mmpos import InvalidInputError, UnsupportedError
from mmpos.integrations.hf import install, omni_rope_index, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import FloatOmniRopeIndex, OmniRopeIndex

FEW = 150
MODEL, FLOATS = MODELS
FUNCTION = OmniRopeIndex(IMAGE, VIDEO, AUDIO, 2, 25, VISION, SOUND, 50)
FUNCTIONS = {MODEL: FUNCTION, FLOATS: FloatOmniRopeIndex(IMAGE, VIDEO, AUDIO, 2, 13, VISION, SOUND, 100)}


def seconds_of(rng: random.Random, video: Fraction) -> float:
    """Seconds between frames: as videos have them, any, or about those of whole ids, where rounding joins two ids."""
    about = rng.randint(1, 20) / 13 * (1 + rng.choice([0, 1e-7, -1e-7, 3e-7]))
    return rng.choice([float(video), rng.uniform(0.01, 9), about])


def arguments_of(rng: random.Random, made: Prompts, clips: bool) -> dict[str, Any]:
    """Grids, frames of audio and seconds, whose products with float32 are rounded in many ways."""
    asked: dict[str, Any] = {"use_audio_in_video": clips}
    if made.images:
        asked["image_grid_thw"] = torch.tensor(made.images)
    if made.videos:
        asked["video_grid_thw"] = torch.tensor(made.videos)
        rates = [seconds_of(rng, seconds) for seconds in made.seconds]
        dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        asked["second_per_grids"] = torch.tensor(rates, dtype=dtype)
    if made.features:
        asked["audio_seqlens"] = torch.tensor(made.features)
    return asked


def request(rng: random.Random, model: str) -> Request:
    """Rows of text, images, audio and videos, silent or with their sound, padded, masked with holes."""
    clips, side = rng.random() < 0.6, rng.choice(["left", "right"])
    made = prompts(model, rng, clips)
    ids, real = padded(made.rows, side), padded([[1] * len(row) for row in made.rows], side)
    asked, traits = arguments_of(rng, made, clips), ["clips" if clips and made.videos else "no clips"]
    if not real.all() or rng.random() < 0.5:
        asked["attention_mask"], holes = mask_of(rng, real.bool().numpy(), (ids != TEXT).int().numpy())
        traits += ["holes"] * holes
    if rng.random() < 0.2:
        grids = asked.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
        asked["image_grid_thw"] = torch.cat([grids, torch.tensor([rng.choice([[1, 6, 6], [1, 1, 6]])])])
        traits.append("surplus image")
    # Theirs takes other integers only without a mask.
    asked["input_ids"] = ids.int() if "attention_mask" not in asked and rng.random() < 0.5 else ids
    return Request(asked, {}, [*traits, *asked, str(asked["input_ids"].dtype)])


def compare(model: str, count: int, seed: str = "") -> Counter[str]:
    """Compare random batches with the answers of the method; returns how many had each trait."""
    rng, (method, stand_in), traits = random.Random(model + seed), theirs(model), Counter[str]()
    for _ in range(count):
        asked = request(rng, model)
        needed = {} if model == MODEL else {"attention_mask": torch.ones_like(asked.arguments["input_ids"])}
        want = method(stand_in, **needed | asked.arguments)
        for got in both_ways(FUNCTIONS[model], asked.arguments):
            assert_same(got, want, asked)
        whole = torch.equal(want[1], want[1].round())
        traits.update([*asked.traits, "whole deltas" if whole else "fractions of deltas"])
    return traits


@pytest.mark.parametrize("model", MODELS)
def test_ids_and_deltas_have_the_bits_of_the_method(model: str) -> None:
    compare(model, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_many_ids_and_deltas_have_the_bits_of_the_method(model: str, batches: int) -> None:
    traits = compare(model, batches, "many")
    wanted = ["attention_mask", "holes", "image_grid_thw", "video_grid_thw", "audio_seqlens", "clips", "no clips"]
    wanted += ["surplus image", "torch.int32", "torch.int64", *["fractions of deltas"] * (model == FLOATS)]
    assert {name: traits[name] for name in wanted if traits[name] < batches // 60} == {}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", ["", "_thinker"])
def test_token_ids_and_rates_are_those_of_the_thinker(model: str, part: str) -> None:
    config = config_of(model + part)
    thinker = config if part else config.thinker_config
    thinker.vision_start_token_id = VISION
    if model == FLOATS:
        thinker.position_id_per_seconds = 13
    assert rope_index(config) == FUNCTIONS[model]
    thinker.text_config.rope_parameters["mrope_section"] = [1, 1, 2]  # of no rotation here, and nothing to ids
    assert rope_index(config) == FUNCTIONS[model]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": MODEL},
            "config.thinker_config: got none, want the config of the language model and the encoders",
        ),
        (
            {"model_type": FLOATS, "thinker_config": {}},
            "config.thinker_config.vision_config: got none, want the config of the encoder",
        ),
        (
            {"model_type": MODEL, "thinker_config": {"vision_config": {}, "vision_start_token_id": 1}},
            "config.thinker_config.audio_start_token_id: got none, want an integer",
        ),
    ],
)
def test_a_config_without_what_ids_need_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        rope_index(config)
    assert str(raised.value) == said


@pytest.mark.parametrize("part", ["", "_thinker"])
def test_no_rotation_is_needed(part: str) -> None:
    """The class of Qwen3-Omni has heads of 73 channels, which cannot turn."""
    config = CONFIGS[FLOATS + part]()
    thinker = config if part else config.thinker_config
    thinker.vision_start_token_id, thinker.position_id_per_seconds = VISION, 13
    assert rope_index(config) == FUNCTIONS[FLOATS]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("part", ["vision_config", "thinker_config"])
def test_a_part_that_is_missing_is_named(model: str, part: str) -> None:
    config = config_of(model).to_dict()
    (config if part == "thinker_config" else config["thinker_config"])[part] = None
    name = part if part == "thinker_config" else f"thinker_config.{part}"
    with pytest.raises(InvalidInputError, match=f"^config.{name}: got none, want the config of the"):
        rope_index(config)


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_method_of_the_model(model: str) -> None:
    method, _ = theirs(model)
    want = list(inspect.signature(method).parameters.values())[1:]
    got = inspect.signature(FUNCTIONS[model]).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("model", MODELS)
def test_without_grids_the_mask_alone_is_counted(model: str, dtype: torch.dtype) -> None:
    method, stand_in = theirs(model)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]]).to(dtype)
    for ids in (None, torch.full((3, 4), AUDIO)):
        assert_same(FUNCTIONS[model](ids, attention_mask=mask), method(stand_in, ids, attention_mask=mask))
    with pytest.raises(InvalidInputError, match=r"^attention_mask: got None, want a tensor, where there are no grids$"):
        FUNCTIONS[model](torch.zeros(1, 2, dtype=torch.int64))


def test_seconds_are_multiplied_as_float32() -> None:
    """The fifth frame at 1.64 seconds a frame: the exact product lies below 164, that of float32 at it."""
    ids = torch.tensor([[VISION, *[VIDEO] * 5]])
    grid, seconds = torch.tensor([[5, 2, 2]]), torch.tensor([1.64], dtype=torch.float64) - 1e-9
    got, _ = FUNCTION(ids, video_grid_thw=grid, second_per_grids=seconds)
    assert got[0, 0].tolist() == [0, 1, 42, 83, 124, 165]


def clip_of(frames: int, audio: int, text: int) -> list[int]:
    """Text, then a video with its audio; the next token is text."""
    return [*[TEXT] * text, VISION, SOUND, *[VIDEO] * frames, *[AUDIO] * audio, SOUND_END, VISION_END, TEXT]


def test_each_sum_is_rounded_to_float32_and_decides_what_comes_first() -> None:
    """Frames 10/13 s apart, from id 2 + 2: 14.000001 is a float, and comes after audio token 10. From 1000 + 2 it
    is not, so that the second frame is at 1012, and comes before the audio token there."""
    seconds = torch.tensor([10 / 13 + 1e-7])
    asked: dict[str, Any] = {"video_grid_thw": torch.tensor([[2, 2, 2]]), "second_per_grids": seconds}
    early, _ = FUNCTIONS[FLOATS](torch.tensor([clip_of(2, 12, 2)]), **asked, use_audio_in_video=True)
    late, _ = FUNCTIONS[FLOATS](torch.tensor([clip_of(2, 12, 1000)]), **asked, use_audio_in_video=True)
    assert early[1, 0, 4:18].tolist() == [4, *range(4, 15), 4, 15]
    assert 14 < early[0, 0, 16].item() < 14.00001
    assert late[1, 0, 1002:1016].tolist() == [1002, *range(1002, 1012), 1002, 1012, 1013]
    assert late[0, 0, 1013].item() == 1012


def test_deltas_are_fractions_after_a_video_and_rounded() -> None:
    """Two frames two thirds of a second apart, from id 2 on: 2 and 10.667, so that text goes on at 11.667 and 12.667,
    and decoding at 13.667, which is 7.667 beyond the six tokens."""
    ids, deltas = FUNCTIONS[FLOATS](
        torch.tensor([[TEXT, VISION, VIDEO, VIDEO, VISION_END, TEXT]]),
        video_grid_thw=torch.tensor([[2, 2, 2]]),
        second_per_grids=torch.tensor([2 / 3]),
    )
    last = np.float32(np.float32(2 / 3) * np.float32(13)) + np.float32(2)
    assert ids[0, 0].tolist() == [0, 1, 2, last, last + np.float32(1), last + np.float32(2)]
    assert deltas.tolist() == [[last + np.float32(3) - np.float32(6)]]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            [TEXT, IMAGE, TEXT],
            "input_ids: got other tokens before the placeholders from document 0, token 1 on, want "
            "vision_start_token_id",
        ),
        (
            [VISION, IMAGE, SOUND, AUDIO, TEXT],
            "input_ids: got other tokens before the placeholders from document 0, token 3 on, want "
            "audio_start_token_id",
        ),
        (
            [IMAGE, TEXT],
            "input_ids: got other tokens before the placeholders from document 0, token 0 on, want "
            "vision_start_token_id",
        ),
    ],
)
def test_placeholders_without_a_marker_of_their_own_are_refused(row: list[int], said: str) -> None:
    """The method counts them as text, or fails."""
    with pytest.raises(InvalidInputError) as raised:
        FUNCTIONS[FLOATS](torch.tensor([row]), image_grid_thw=torch.tensor([[1, 2, 2]]))
    assert str(raised.value) == said


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("model", MODELS)
def test_placeholders_without_grids_and_marker_are_text(model: str) -> None:
    """Random tokens, as in Transformers' own tests, hold the placeholder of videos, of which there are none."""
    method, stand_in = theirs(model)
    rows = [
        [VIDEO, VISION, IMAGE, VISION_END, TEXT, VIDEO, VIDEO],
        [TEXT, TEXT, VISION, IMAGE, VISION_END, VIDEO, TEXT],
    ]
    asked: dict[str, Any] = {
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
        "attention_mask": torch.ones(2, 7, dtype=torch.int64),
    }
    asked["attention_mask"][1, 0] = 0
    got = FUNCTIONS[model](torch.tensor(rows), **asked)
    assert_same(got, method(stand_in, torch.tensor(rows), **asked))
    assert got[0][0].tolist() == [list(range(7)), [int(model == MODEL), *range(6)]]
    with pytest.raises(InvalidInputError, match=r"^video_grid_thw: got 0 grids, want more for 2 placeholders from"):
        FUNCTIONS[model](torch.tensor([[VISION, VIDEO, VIDEO]]), image_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.raises(InvalidInputError, match=r"^image_grid_thw: got 0 grids, want more for 1 placeholder from"):
        FUNCTIONS[model](torch.tensor([[VISION, IMAGE, TEXT]]), video_grid_thw=torch.tensor([[1, 2, 2]]))


def test_an_image_of_qwen2_5_omni_without_its_marker_is_text_to_the_method() -> None:
    method, stand_in = theirs(MODEL)
    ids = torch.tensor([[TEXT, IMAGE, IMAGE, TEXT]])
    asked: dict[str, Any] = {"image_grid_thw": torch.tensor([[1, 2, 4]])}
    assert method(stand_in, ids, **asked)[0].tolist() == [[[0, 1, 2, 3]]] * 3
    assert FUNCTION(ids, **asked)[0].tolist() == [[[0, 1, 1, 3]], [[0, 1, 1, 3]], [[0, 1, 2, 3]]]


@pytest.mark.parametrize("model", MODELS)
def test_a_silent_video_is_text_to_the_method_where_videos_may_have_sound(model: str) -> None:
    method, stand_in = theirs(model)
    ids = torch.tensor([[TEXT, VISION, VIDEO, VIDEO, VISION_END]])
    asked: dict[str, Any] = {"video_grid_thw": torch.tensor([[2, 2, 2]]), "second_per_grids": torch.tensor([1.0])}
    asked |= {"attention_mask": torch.ones_like(ids), "use_audio_in_video": True}
    assert method(stand_in, ids, **asked)[0].tolist() == [[[0, 1, 2, 3, 4]]] * 3
    rate = FUNCTIONS[model].tokens_per_second
    times, rows, columns = [0, 1, 2, 2 + rate, 3 + rate], [0, 1, 2, 2, 3 + rate], [0, 1, 2, 2, 3 + rate]
    assert FUNCTIONS[model](ids, **asked)[0].tolist() == [[times], [rows], [columns]]


def test_one_token_that_is_left_is_refused_as_any_without_its_marker() -> None:
    ids, grid = torch.tensor([[TEXT, IMAGE]]), torch.tensor([[1, 2, 2]])
    said = r"^input_ids: got other tokens before the placeholders from document 0, token 0 on, want vision_start_token"
    with pytest.raises(InvalidInputError, match=said):
        FUNCTIONS[FLOATS](ids[:, 1:], image_grid_thw=grid)
    with pytest.raises(InvalidInputError, match=said):
        FUNCTIONS[FLOATS](ids, image_grid_thw=grid, attention_mask=torch.tensor([[0, 1]]))


def test_no_rows_have_no_ids_of_qwen3_omni() -> None:
    ids, deltas = FUNCTIONS[FLOATS](torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64))
    assert (ids.shape, deltas.shape, ids.dtype, deltas.dtype) == ((3, 0, 4), (0, 1), torch.float32, torch.float32)


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
    "seconds beyond the ids": (
        [TEXT, VIDEO, TEXT, VIDEO, VIDEO],
        {"video_grid_thw": [[1, 2, 2], [2, 2, 2]], "second_per_grids": [1.0, 1e30]},
        "second_per_grids[1]: got 1e+30, want ids of its frames within int32",
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


@pytest.mark.parametrize("model", MODELS)
def test_graphs_hold_the_functions_of_qwen_omni(model: str) -> None:
    asked: dict[str, Any] = {"video_grid_thw": torch.tensor([[2, 2, 2]]), "second_per_grids": torch.tensor([1.0])}
    ids, function = torch.tensor([[VISION, VIDEO, VIDEO, TEXT]]), FUNCTIONS[model]
    compiled = torch.compile(function.__call__, backend="eager", fullgraph=True)
    assert_same(compiled(ids, **asked), function(ids, **asked))


@pytest.mark.parametrize(("model", "name"), [(MODEL, "omni"), (FLOATS, "float_omni")])
def test_an_accelerator_gives_and_gets_all_of_qwen_omni_in_one_copy_each(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = getattr(omni_rope_index, f"_compute_{name}")
    monkeypatch.setattr(omni_rope_index, f"_{name.upper()}_OPERATOR", compute)  # in sight of the mode
    row = [0, *clip_of(1, 1, 1)]
    asked: dict[str, Any] = {
        "input_ids": torch.tensor([row]),
        "attention_mask": torch.tensor([[0, *[1] * (len(row) - 1)]]),
        "video_grid_thw": torch.tensor([[1, 2, 2]]),
        "audio_seqlens": torch.tensor([3]),
        "second_per_grids": torch.tensor([0.5]),
    }
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = FUNCTIONS[model](**{key: Away(value) for key, value in asked.items()}, use_audio_in_video=True)
    assert (counting.to_host, counting.to_device) == (1, 1)
    want = FUNCTIONS[model](**asked, use_audio_in_video=True)
    assert_same(tree_map_only(Away, lambda value: value.held, got), want)


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
    with pytest.raises(InvalidInputError, match=r"^config\.vision_start_token_id: got none, want an integer$"):
        install(thinker)  # the class of the config has no default
    config.thinker_config.vision_start_token_id = VISION
    assert install(thinker).get_rope_index == FUNCTION
    assert "get_rope_index" not in vars(uninstall(thinker))
    both = nn.ModuleList([thinker, stand_in_of(config.talker_config)])
    with pytest.raises(UnsupportedError, match=r"config\.model_type: got 'qwen2_5_omni_talker', want one of cohere_"):
        install(both)
    assert "get_rope_index" not in vars(thinker)
