"""rope_index and ModelSettings beside get_rope_index of every model that has it: the same bits, dtypes and shapes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cache_name import CACHE
from model_configs import CONFIGS, config_of
from rope_batches import FAMILIES, LIKE, MODELS, OMNI, VISION, Request, hunyuan, kind_of, method_of, with_settings
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from mmpos import InvalidInputError, MmposError, Placeholders, UnsupportedError
from mmpos.integrations.hf import (
    canvas_rope_index,
    generating_rope_index,
    get_rope_index,
    install,
    omni_rope_index,
    rope_index,
    uninstall,
)
from mmpos.integrations.hf.get_rope_index import (
    CanvasRopeIndex,
    GeneratingRopeIndex,
    OmniRopeIndex,
    RopeIndex,
    TimedRopeIndex,
    XDRopeIndex,
)
from mmpos.integrations.models import MODEL_TYPES
from mmpos.positions.table_rows import NEXT_POSITION
from mmpos.segments import CropMarkers
from mmpos.support import native

FEW = 60


def both_ways() -> Iterator[None]:
    """With the extension in C, if it was built, then without it."""
    with pytest.MonkeyPatch.context() as patched:
        yield
        patched.setattr(native, "core", None)
        yield


def assert_same(got: Any, want: Any, said: object = "") -> None:
    """Compare tensors, and tuples of them, bit for bit."""
    if isinstance(want, tuple):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other, said)
    elif want is None:
        assert got is None, said
    else:
        assert (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape), said
        assert torch.equal(got, want), said


def assert_settings_agree(asked: Request, want: Any) -> None:
    """Compare the table of ModelSettings with the answer of the method; padding has no id."""
    assert asked.settings is not None
    assert asked.model is not None
    told, model = dict(asked.settings), asked.model
    prompt = model.segments(told.pop("input_ids"), told.pop("image_grid_thw"), told.pop("video_grid_thw", None), **told)
    placed, real = model.place(prompt), np.asarray(asked.settings["attention_mask"])
    (ids, deltas), ahead = want if model.generates else (want, None)
    got, following = placed.dense().reshape(ids.shape) * real, placed.documents[NEXT_POSITION]
    if model.model_type == "qwen3_omni_moe":  # theirs are sums of float32
        np.testing.assert_allclose(got, ids.numpy() * real, rtol=1e-6, atol=1e-4)
        ends = real.sum(axis=1) + deltas.numpy()[:, 0]  # where theirs lies between two ids, no integer follows
        between = following == np.iinfo(np.int64).min
        assert (np.where(between, abs(ends - ends.round()) > 1e-2, abs(ends - following) < 1e-3)).all()
        return
    np.testing.assert_array_equal(got, ids.numpy() * real)
    if not model.generates:
        assert following.tolist() == (real.sum(axis=1) + deltas.numpy()[:, 0]).tolist()
        assert placed.deltas.tolist() == deltas[:, 0].tolist()
    elif ahead is not None:
        counts = told["images_per_sample"]
        laid = model.place(model.generated(prompt, asked.settings["image_grid_thw"] or [], counts), start=following)
        own = [d for d, n in enumerate(counts) if n]  # Transformers has none for a row without grids
        for theirs, d in zip(ahead, own, strict=True):
            ours = laid.dense()[:, slice(*laid.cu_seqlens[d : d + 2])]
            np.testing.assert_array_equal(ours, theirs[:, : ours.shape[1]])
            assert (theirs[:, ours.shape[1] :] == ours[:, -1:]).all()


def compare(model: str, count: int, seed: str = "") -> None:
    """Compare random batches with the answers of the method."""
    random = Random(model + seed)
    for _ in range(count):
        asked = FAMILIES[model](random, model)
        want = asked.theirs(**asked.needed | asked.arguments)
        for _ in both_ways():
            assert_same(asked.ours(**asked.arguments), want, asked)
            if asked.settings is not None:
                assert_settings_agree(asked, want)


@pytest.mark.parametrize("model", MODELS)
def test_ids_and_deltas_have_the_bits_of_get_rope_index(model: str) -> None:
    compare(model, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_many_ids_and_deltas_have_the_bits_of_get_rope_index(model: str, batches: int) -> None:
    compare(model, batches, "many")


def test_every_type_whose_class_has_the_method_is_served() -> None:
    """By the class that the auto map names, which need not be in a file of the type's own."""
    library: Any = transformers
    files = Path(library.__path__[0], "models").glob("*/modeling_*.py")
    with_method = {path.parent.name for path in files if "def get_rope_index" in path.read_text()}
    kinds = {model: names if isinstance(names, str) else names[0] for model, names in MODEL_MAPPING_NAMES.items()}
    modules = {model: library._class_to_module.get(kind, "").split(".") for model, kind in kinds.items()}
    found = {model for model, module in modules.items() if not with_method.isdisjoint(module)}
    assert {modules[model][1] for model in found} == with_method
    types = {model for model in found if hasattr(getattr(library, kinds[model]), "get_rope_index")}
    assert types == {*MODELS} - {*OMNI} | {f"{model}_thinker" for model in OMNI}
    assert {name for name, row in MODEL_TYPES.items() if row.has_rope_index} == types | {*OMNI}


# Parameters, and what a config says.

TEXT, IMAGE, VIDEO = 0, 1, 2
PLAIN, TIMED, APART = RopeIndex(2), TimedRopeIndex(2, tokens_per_second=25), RopeIndex(2, frames_apart=True)
XD = XDRopeIndex(2, 4)
CROPS = CropMarkers(22, 23, 24, 25, 26)
CANVAS = CanvasRopeIndex(CROPS, 4)
BEGIN, END = 16384, 16385
GENERATING = GeneratingRopeIndex(BEGIN, END)
PATCH, FRAME, AUDIO, SOUND, SOUND_END, VISION_END = 151655, 151656, 151646, 151647, 151648, 151653
OMNI_TOKENS = Placeholders(PATCH, FRAME, AUDIO)
OMNI_25 = OmniRopeIndex(OMNI_TOKENS, 2, 25, VISION, SOUND, tokens_per_chunk=50)
OMNI_3 = OmniRopeIndex(OMNI_TOKENS, 2, 13, VISION, SOUND, audio_chunk=100)


def changed(model: str, **changes: Any) -> Any:
    """The config of a model with other values, those of the encoder or the thinker by a dot, as in vision.merge."""
    config = hunyuan(4)[0] if model == "hunyuan_vl" else config_of(model)
    config = copy.deepcopy(config)
    for path, value in changes.items():
        inner, _, name = path.rpartition("__")
        setattr(getattr(config, inner) if inner else config, name, value)
    return config


def omni_config(model: str, part: str = "") -> Any:
    config, _ = with_settings(model)
    return config.thinker_config if part else config


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_get_rope_index(model: str) -> None:
    want = list(inspect.signature(kind_of(model).get_rope_index).parameters.values())[1:]
    config = omni_config(model) if model in OMNI else changed(model)
    got = inspect.signature(rope_index(config)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize(
    ("config", "function"),
    [
        (
            changed(model, vision_config__spatial_merge_size=3),
            RopeIndex(3, 2 if model == "ernie4_5_vl_moe" else 1, like == "qwen3_vl"),
        )
        for model, like in LIKE.items()
        if model != "qwen2_5_vl"
    ]
    + [
        (changed("qwen2_5_vl", vision_config__tokens_per_second=7), TimedRopeIndex(2, tokens_per_second=7)),
        (changed("hunyuan_vl", vision_config__spatial_merge_size=4), XDRopeIndex(4, 4)),
        (hunyuan(5)[0], XDRopeIndex(2, 5)),
        (changed("minicpmv4_7", downsample_mode="16x"), CANVAS),
        (changed("minicpmv4_7", downsample_mode="4x"), CanvasRopeIndex(CROPS, 2)),
        (config_of("glm_image"), GENERATING),
        *((omni_config("qwen2_5_omni", part), OMNI_25) for part in ("", "_thinker")),
        *((omni_config("qwen3_omni_moe", part), OMNI_3) for part in ("", "_thinker")),
    ],
)
def test_sizes_and_tokens_are_those_of_the_config(config: Any, function: Any) -> None:
    assert rope_index(config) == function


@pytest.mark.parametrize("part", ["", "_thinker"])
def test_no_rotation_is_needed(part: str) -> None:
    """The class of Qwen3-Omni has heads of 73 channels, which cannot turn."""
    config = CONFIGS[f"qwen3_omni_moe{part}"]()
    thinker = config if part else config.thinker_config
    thinker.vision_start_token_id, thinker.position_id_per_seconds = VISION, 13
    assert rope_index(config) == OMNI_3


THINKER = "config.thinker_config: got none, want the config of the language model and the encoders"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "config.model_type: got 'llama', want one of cohere_compass, "),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 0}},
            "config.vision_config.tokens_per_second: got 0, want >= 1",
        ),
        ({"model_type": "qwen2_5_omni"}, THINKER),
        ({"model_type": "qwen3_omni_moe", "thinker_config": None}, THINKER),
        (
            {"model_type": "qwen3_omni_moe", "thinker_config": {}},
            "config.thinker_config.vision_config: got none, want the config of the encoder",
        ),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}, "vision_start_token_id": 1}},
            "config.thinker_config.audio_start_token_id: got none, want an integer",
        ),
    ],
)
def test_configs_without_what_is_needed_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(MmposError) as raised:
        rope_index(config)
    assert str(raised.value).startswith(said)


# Quirks that random batches do not hold.


def told(kinds: Any, **more: Any) -> dict[str, Any]:
    """Arguments of these token types (batch, seq); lists among the others become tensors."""
    made = {name: torch.tensor(value) for name, value in more.items()}
    return {"input_ids": torch.zeros(len(kinds), len(kinds[0]), dtype=torch.int64), **made} | {
        "mm_token_type_ids": torch.tensor(kinds)
    }


def tensors(**values: Any) -> dict[str, Any]:
    """Tensors of lists, all else as it is; no grids have three columns."""
    made = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in values.items()}
    return {name: torch.zeros(0, 3, dtype=torch.int64) if values[name] == [] else value for name, value in made.items()}


@pytest.mark.parametrize("seconds", [2 / 23.976, 0.28 - 4e-11])  # the second is seven ids in float32 alone
def test_seconds_of_a_list_are_multiplied_before_they_are_rounded(seconds: float) -> None:
    asked, frame = told([[VIDEO] * 30], video_grid_thw=[[30, 2, 2]]), torch.arange(30)
    for given, product in (
        ([seconds], torch.tensor(25 * seconds)),
        (torch.tensor([seconds]), 25 * torch.tensor(seconds)),
    ):
        ids, _ = TIMED(**asked, second_per_grid_ts=given)
        assert ids[0, 0].tolist() == (frame * product).long().tolist()


def test_images_and_frames_that_touch_have_ids() -> None:
    ids, deltas = PLAIN(**told([[TEXT, IMAGE, IMAGE, IMAGE, TEXT]], image_grid_thw=[[1, 2, 4], [1, 2, 2]]))
    assert ids[:, 0].tolist() == [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert deltas.tolist() == [[0]]
    ids, _ = APART(**told([[TEXT, VIDEO, VIDEO, TEXT]], video_grid_thw=[[2, 2, 2]]))
    assert ids[:, 0].tolist() == [[0, 1, 2, 3]] * 3


def test_patches_under_a_mask_take_no_grid_from_those_that_are_seen() -> None:
    """Trainers append an image that nothing sees where a batch has none."""
    asked = told([[TEXT, IMAGE, TEXT, IMAGE]], attention_mask=[[1.0, 1.0, 1.0, 0.0]], image_grid_thw=[[1, 2, 2]] * 2)
    ids, deltas = PLAIN(**asked)
    assert ids[:, 0].tolist() == [[0, 1, 2, 0]] * 3
    assert deltas.tolist() == [[0]]


def test_deltas_do_not_hold_the_memory_of_the_ids() -> None:
    _, deltas = PLAIN(**told([[TEXT] * 100]))
    assert deltas.untyped_storage().nbytes() == 8


def test_no_rows_have_no_ids() -> None:
    nothing = torch.zeros(0, 4, dtype=torch.int64)
    for function, second in ((PLAIN, nothing), (OMNI_3, nothing[:, :3])):
        ids, deltas = function(nothing, second)
        assert (ids.shape, deltas.shape) == ((3, 0, 4), (0, 1))


# Of MiniCPM-V 4.7: a picture of 1×2 tokens over two slices of 1×1 beside each other, and one of 2×1 tokens alone.
PICTURES = [[5, 22, 20, 20, 23, 24, 20, 25, 24, 20, 25, 6], [0, 0, 0, 0, 0, 0, 5, 22, 21, 21, 23, 6]]


def pictures(**more: Any) -> dict[str, Any]:
    ids = torch.tensor(PICTURES)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == 20).int() + 2 * (ids == 21).int(),
        "target_sizes": torch.tensor([[4, 8], [4, 4], [4, 4]]),
        "target_sizes_videos": torch.tensor([[8, 4]]),
        "attention_mask": (ids > 0).long(),
        **more,
    }


def test_markers_that_are_one_token_are_told_apart_by_their_places() -> None:
    """An end may be a newline, too; ids are those of five tokens."""
    ids = torch.tensor(PICTURES)
    alike = CanvasRopeIndex(CropMarkers(22, 23, 24, 23, 23), 4)
    assert_same(alike(**pictures(input_ids=torch.where(ids == 25, 23, ids))), CANVAS(**pictures()))


def test_the_method_takes_any_tokens_around_a_picture() -> None:
    """The token before takes the ids of a marker, whatever it is, and text goes on after the picture."""
    ids = torch.tensor([[5, 6, 20, 20, 7, 8]])
    asked: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == 20).int()}
    asked["target_sizes"] = torch.tensor([[4, 8]])
    got, _ = method_of("minicpmv4_7", config_of("minicpmv4_7"))(**asked)
    assert got.tolist() == [[[0, 1, 1, 1, 4, 5]], [[0, 0, 1, 1, 4, 5]], [[0, 0, 1, 2, 4, 5]]]
    with pytest.raises(InvalidInputError, match=r"^placeholders\.crops: got token 6 before the placeholders at docum"):
        CANVAS(**asked)


# Of GLM-Image: a prompt with an image of 1×2, after which 1×2 and 2×1 are to come, and one without, padded on the left.
PROMPTS = tensors(
    input_ids=[[7, BEGIN, 7, 7, END, BEGIN], [0, 0, 0, 0, 7, BEGIN]],
    attention_mask=[[1] * 6, [0, 0, 0, 0, 1, 1]],
    image_grid_thw=[[1, 1, 2], [1, 1, 2], [1, 2, 1], [1, 1, 1]],
    images_per_sample=[3, 1],
)


# Of Qwen Omni.


def theirs(function: Any, ids: Any, **asked: Any) -> Any:
    model = OMNI[function is OMNI_3]
    return FAMILIES[model](Random(0), model).theirs(input_ids=ids, **asked)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_without_grids_the_mask_alone_is_counted(function: Any, dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]]).to(dtype)
    for ids in (None, torch.full((3, 4), AUDIO)):
        assert_same(function(ids, attention_mask=mask), theirs(function, ids, attention_mask=mask))


def test_seconds_of_qwen_omni_are_multiplied_as_float32() -> None:
    """The fifth frame at 1.64 seconds a frame: the exact product lies below 164, that of float32 at it."""
    seconds = torch.tensor([1.64], dtype=torch.float64) - 1e-9
    got, _ = OMNI_25(
        torch.tensor([[VISION, *[FRAME] * 5]]), **tensors(video_grid_thw=[[5, 2, 2]]), second_per_grids=seconds
    )
    assert got[0, 0].tolist() == [0, 1, 42, 83, 124, 165]


def clip_of(frames: int, audio: int, text: int) -> list[int]:
    """Text, then a video with its audio; the next token is text."""
    return [*[5] * text, VISION, SOUND, *[FRAME] * frames, *[AUDIO] * audio, SOUND_END, VISION_END, 5]


def test_each_sum_is_rounded_to_float32_and_decides_what_comes_first() -> None:
    """Frames 10/13 s apart, from id 2 + 2: 14.000001 is a float, and comes after audio token 10. From 1000 + 2 it
    is not, so that the second frame is at 1012, and comes before the audio token there."""
    asked = tensors(video_grid_thw=[[2, 2, 2]], second_per_grids=[10 / 13 + 1e-7])
    early, _ = OMNI_3(torch.tensor([clip_of(2, 12, 2)]), **asked, use_audio_in_video=True)
    late, _ = OMNI_3(torch.tensor([clip_of(2, 12, 1000)]), **asked, use_audio_in_video=True)
    assert early[1, 0, 4:18].tolist() == [4, *range(4, 15), 4, 15]
    assert 14 < early[0, 0, 16].item() < 14.00001
    assert late[1, 0, 1002:1016].tolist() == [1002, *range(1002, 1012), 1002, 1012, 1013]
    assert late[0, 0, 1013].item() == 1012


@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_placeholders_without_grids_and_marker_are_text(function: Any) -> None:
    """Random tokens, as in Transformers' own tests, hold the placeholder of videos, of which there are none."""
    rows = torch.tensor(
        [[FRAME, VISION, PATCH, VISION_END, 5, FRAME, FRAME], [5, 5, VISION, PATCH, VISION_END, FRAME, 5]]
    )
    asked = tensors(image_grid_thw=[[1, 2, 2]] * 2, attention_mask=[[1] * 7, [0, *[1] * 6]])
    for _ in both_ways():
        got = function(rows, **asked)
        assert_same(got, theirs(function, rows, **asked))
        assert got[0][0].tolist() == [list(range(7)), [int(function is OMNI_25), *range(6)]]


@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_what_is_text_to_the_method_has_the_ids_of_its_kind(function: Any) -> None:
    ids = torch.tensor([[5, VISION, FRAME, FRAME, VISION_END]])  # silent, where videos may have sound
    asked = tensors(video_grid_thw=[[2, 2, 2]], second_per_grids=[1.0], attention_mask=[[1] * 5])
    assert theirs(function, ids, **asked, use_audio_in_video=True)[0].tolist() == [[[0, 1, 2, 3, 4]]] * 3
    after = 3 + function.tokens_per_second
    assert function(ids, **asked, use_audio_in_video=True)[0].tolist() == [
        [[0, 1, 2, after - 1, after]],
        *[[[0, 1, 2, 2, after]]] * 2,
    ]
    if function is OMNI_25:
        image, grid = torch.tensor([[5, PATCH, PATCH, 5]]), torch.tensor([[1, 2, 4]])
        assert theirs(function, image, image_grid_thw=grid)[0].tolist() == [[[0, 1, 2, 3]]] * 3
        assert function(image, grid)[0].tolist() == [[[0, 1, 1, 3]], [[0, 1, 1, 3]], [[0, 1, 2, 3]]]


# Refusals.

ONE = [[TEXT, IMAGE, TEXT]]
MOVING = told([[VIDEO, VIDEO, TEXT, VIDEO, VIDEO]], video_grid_thw=[[2, 2, 2]] * 2)
INTERVALS = "a number >= 0, and ids within int32"


def row(*tokens: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([tokens]), **tensors(**more)}


def without_marker() -> Tensor:
    """The pictures with text in the place of the first marker."""
    ids = torch.tensor(PICTURES)
    ids[0, 1] = 7
    return ids


MARKERS = "input_ids: got other tokens before the placeholders from document 0, token"
UNOPENED = "input_ids[0]: got an image_end_token_id without its image_start_token_id"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (PLAIN, told(ONE), "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on"),
    (
        APART,
        told([[TEXT, VIDEO, VIDEO, TEXT, VIDEO]], video_grid_thw=[[3, 2, 4]]),
        "video_grid_thw[1]: got a run of 1 placeholder at document 0, token 4, want 2 for 1x1x2 after merging",
    ),
    *(
        (
            PLAIN,
            told(ONE, image_grid_thw=grids),
            f"image_grid_thw[0]: got {tuple(grids[0])}, want at least (1, 2, 2), one token",
        )
        for grids in ([[1, 2, 1]], [[1, 0, 2], [1, 2, 2]])
    ),
    (
        APART,
        told([[VIDEO]], video_grid_thw=[[0, 2, 2], [1, 1, 2], [1, 2, 2]]),
        "video_grid_thw[1]: got (1, 1, 2), want at least (1, 2, 2), one token",
    ),
    (PLAIN, told([[TEXT, 3]]), "mm_token_type_ids: got 3, want 0, 1 or 2"),
    (PLAIN, told([[0.5]]), "mm_token_type_ids: got torch.float32, want integers"),
    (
        PLAIN,
        told(ONE) | {"input_ids": torch.zeros(1, 2)},
        "mm_token_type_ids: got shape (1, 3), want (1, 2) as input_ids",
    ),
    (PLAIN, told(ONE, attention_mask=[1, 1, 1]), "attention_mask: got shape (3,), want (1, 3) as input_ids"),
    (PLAIN, told(ONE) | {"input_ids": torch.zeros(3)}, "input_ids: got shape (3,), want (batch, seq)"),
    (PLAIN, told(ONE) | {"mm_token_type_ids": None}, "mm_token_type_ids: got NoneType, want a tensor"),
    (PLAIN, told(ONE) | {"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw: got list, want a tensor"),
    (PLAIN, told([[TEXT], [TEXT]], attention_mask=[[1], [0]]), "attention_mask[1]: got no tokens, want at least one"),
    (
        TIMED,
        told([[VIDEO, TEXT, VIDEO]], video_grid_thw=[[1, 2, 2]] * 2, second_per_grid_ts=[1.0]),
        "second_per_grid_ts: got shape (1,), want at least 2 values, one per video",
    ),
    *(
        (TIMED, MOVING | {"second_per_grid_ts": seconds}, f"second_per_grid_ts{said}")
        for seconds, said in (
            ("ab", ": got str, want a tensor or a list"),
            (["ab", 1.0], "[0]: got str, want a number"),
            ([1.0, torch.ones(2)], "[1]: got shape (2,), want a number"),
            ([1, 2**31], "[1]: got 2147483648, want <= 2147483647"),
            (torch.tensor([1j, 1]), ": got torch.complex64, want real numbers"),
            ([1.0, float("nan")], f"[1]: got frames that are nan ids apart, want {INTERVALS}"),
            (torch.tensor([1e30, 1]), f"[0]: got frames that are 2.5e+31 ids apart, want {INTERVALS}"),
            ([1.0, -0.04], f"[1]: got frames that are -1 ids apart, want {INTERVALS}"),
        )
    ),
    (
        XD,
        told([[IMAGE, IMAGE]], image_grid_thw=[[1, 2, 1]]),
        "image_grid_thw[0]: got (1, 2, 1), want at least (0, 2, 2), one token",
    ),
    (CANVAS, pictures(mm_token_type_ids=None), "mm_token_type_ids: got NoneType, want a tensor"),
    (CANVAS, pictures(downsample_mode="8x"), "downsample_mode: got '8x', want one of '4x', '16x'"),
    (
        CANVAS,
        pictures(target_sizes=torch.tensor([[4, 4], [4, 4], [4, 4]])),
        "target_sizes: got 3 grids, want more for 1 placeholder from document 0, token 9 on",
    ),
    (CANVAS, pictures(target_sizes=torch.tensor([[1, 4, 8]])), "target_sizes: got shape (1, 3), want (n, 2)"),
    (
        CANVAS,
        pictures(target_sizes_videos=torch.tensor([[8, 3]])),
        "target_sizes_videos[0]: got (8, 3), want at least (4, 4), one token",
    ),
    (
        CANVAS,
        pictures(input_ids=without_marker()),
        "placeholders.crops: got token 7 before the placeholders at document 0, token 2, "
        "want thumbnail_start or tile_start",
    ),
    (GENERATING, row(7, END, BEGIN, image_grid_thw=[[1, 1, 1]], images_per_sample=[1]), UNOPENED),
    (GENERATING, row(BEGIN, BEGIN, 7, END, END, image_grid_thw=[[1, 1, 2]] * 2, images_per_sample=[2]), UNOPENED),
    (
        GENERATING,
        row(7, BEGIN, image_grid_thw=[[2, 1, 1]], images_per_sample=[1]),
        "image_grid_thw[0, 0]: got 2 frames, want 1",
    ),
    (OMNI_25, row(5, 5), "attention_mask: got None, want a tensor, where there are no grids"),
    *(
        (OMNI_3, row(*tokens, image_grid_thw=[[1, 2, 2]], **mask), f"{MARKERS} {at} on, want {kind}_start_token_id")
        for tokens, at, kind, mask in (
            ((5, PATCH, 5), 1, "vision", {}),
            ((VISION, PATCH, SOUND, AUDIO, 5), 3, "audio", {}),
            ((PATCH, 5), 0, "vision", {}),
            ((PATCH,), 0, "vision", {}),
            ((5, PATCH), 0, "vision", {"attention_mask": [[0, 1]]}),
        )
    ),
    (
        OMNI_25,
        row(VISION, PATCH, 5, video_grid_thw=[[1, 2, 2]]),
        "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on",
    ),
    (
        OMNI_25,
        row(5, 5, FRAME, AUDIO, 5, 5, video_grid_thw=[[1, 2, 2]], second_per_grids=[1.0]),
        "use_audio_in_video: got False, want True for a video with audio between its frames",
    ),
    (
        OMNI_25,
        row(5, AUDIO, 5, image_grid_thw=[], audio_seqlens=[8]),
        "audio_lengths[0]: got 2, want 1, the audio tokens in input_ids",
    ),
    *(
        (
            OMNI_25,
            row(5, FRAME, 5, FRAME, FRAME, video_grid_thw=[[1, 2, 2], [2, 2, 2]], second_per_grids=seconds),
            f"second_per_grids{said}",
        )
        for seconds, said in (
            (None, ": got None, want at least 2 values, one per video"),
            ([1.0], ": got shape (1,), want at least 2 values, one per video"),
            ([-1.0, 1.0], "[0]: got -1.0, want a number >= 0"),
            ([1.0, float("nan")], "[1]: got nan, want a number >= 0"),
            ([1.0, 1e30], "[1]: got 1e+30, want ids of its frames within int32"),
        )
    ),
    (
        OMNI_25,
        row(5, PATCH, image_grid_thw=[[1, 2, 2]], attention_mask=[[1]]),
        "attention_mask: got shape (1, 1), want (1, 2) as input_ids",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "said"), REFUSED, ids=range(len(REFUSED)))
def test_arguments_that_contradict_each_other_are_refused(function: Any, arguments: dict[str, Any], said: str) -> None:
    for _ in both_ways():
        with pytest.raises(InvalidInputError) as raised:
            function(**arguments)
        assert str(raised.value) == said


# Graphs and devices.

SILENT = tensors(attention_mask=[[0, *[1] * 8]], video_grid_thw=[[1, 2, 2]], audio_seqlens=[3], second_per_grids=[0.5])
CLIP = {"input_ids": torch.tensor([[0, *clip_of(1, 1, 1)]]), **SILENT, "use_audio_in_video": True}
FILM = told([[TEXT, IMAGE, TEXT, VIDEO, VIDEO]], attention_mask=[[True] * 5], image_grid_thw=[[1, 2, 2]])
FILM |= {"video_grid_thw": torch.tensor([[2, 2, 2]]), "mm_token_type_ids": FILM["mm_token_type_ids"].int()}
ROWS = told([[TEXT, IMAGE, IMAGE, TEXT]], attention_mask=[[0, 1, 1, 1]], image_grid_thw=[[1, 2, 2]])
CALLS: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "Qwen2-VL": (PLAIN.__call__, FILM, get_rope_index, ""),
    "Qwen2.5-VL": (TIMED.__call__, {**FILM, "second_per_grid_ts": torch.tensor([0.5])}, get_rope_index, ""),
    "HunYuan-VL": (XD.__call__, ROWS, get_rope_index, "xd"),
    "GLM-Image": (GENERATING.with_generated, PROMPTS, generating_rope_index, ""),
    "MiniCPM-V": (CANVAS.__call__, pictures(), canvas_rope_index, ""),
    "Qwen2.5-Omni": (OMNI_25.__call__, CLIP, omni_rope_index, ""),
    "Qwen3-Omni": (OMNI_3.__call__, CLIP, omni_rope_index, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_graphs_without_breaks_hold_the_functions(name: str) -> None:
    function, asked, _, _ = CALLS[name]
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    asked = asked | ({"input_ids": asked["input_ids"].int()} if name == "MiniCPM-V" else {})  # whose ids are int64
    got, want = compiled(**asked), function(**asked)
    assert_same(got, want)
    assert [each.stride() for each in tree_leaves(got)] == [each.stride() for each in tree_leaves(want)]


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "GLM-Image", "MiniCPM-V"])
def test_tokens_of_whole_batches_are_read_in_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, answers = native.core, []

    def scan(*arguments: Any) -> Any:
        answers.append(core.scan(*arguments))
        return answers[-1]

    others = {name: getattr(core, name) for name in dir(core) if name != "scan"}
    monkeypatch.setattr(native, "core", SimpleNamespace(**others, scan=scan))
    function, asked, _, _ = CALLS[name]
    function(**asked)
    assert len(answers) == 1
    assert answers[0] is not None


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "GLM-Image", "MiniCPM-V"])
def test_results_are_on_the_device_of_input_ids_whatever_the_default_one_is(name: str) -> None:
    function, asked, _, _ = CALLS[name]
    want = function(**asked)
    with torch.device("meta"):
        assert_same(function(**asked), want)


class Away(Tensor):
    """Tensor that says that it is on an accelerator, and is on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        device = torch.device("xla:0")
        made: Away = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func}: a mode has taken it")


class Counting(TorchDispatchMode):
    """Mode in which copies between Away and the host are counted."""

    to_host = to_device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        away = any(isinstance(value, Away) for value in tree_leaves(args))
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            goes = kwargs["device"].type == "xla"
            self.to_host += away and not goes
            self.to_device += goes and not away
            away, kwargs["device"] = goes, None
        result = func(*tree_map_only(Away, lambda value: value.held, args), **kwargs)
        return tree_map_only(Tensor, Away, result) if away else result


@pytest.mark.parametrize("name", CALLS)
def test_an_accelerator_gives_all_in_one_copy_and_gets_all_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, asked, module, kind = CALLS[name]
    compute, operator = f"_compute{kind and '_' + kind}", f"{kind and '_' + kind.upper()}_OPERATOR"
    monkeypatch.setattr(module, operator, getattr(module, compute))  # in sight of the mode
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = function(**tree_map_only(Tensor, Away, asked))
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert all(isinstance(each, Away) for each in tree_leaves(got))
    assert_same(tree_map_only(Away, lambda value: value.held, got), function(**asked))


# On models.


def weightless(model: str, config: Any) -> Any:
    """A model with the method and a config, without weights."""
    kind = kind_of(model)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.config = config
    return made


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("qwen3_vl", config_of("qwen3_vl")),
        ("hunyuan_vl", hunyuan(4)[0]),
        ("minicpmv4_7", config_of("minicpmv4_7")),
        ("qwen2_5_omni", omni_config("qwen2_5_omni").thinker_config),
    ],
)
def test_what_is_installed_is_kept_by_copies_and_taken_out_by_uninstall(model: str, config: Any) -> None:
    module, function = weightless(model, config), rope_index(config)
    around = nn.Sequential(nn.Identity(), module)
    assert install(install(around)) is around
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert one.get_rope_index == function
        assert list(one.state_dict()) == []
        assert uninstall(uninstall(one)) is one
        assert "get_rope_index" not in vars(one)
        assert one.get_rope_index == kind_of(model).get_rope_index.__get__(one)


def decoding(model: Any) -> list[Tensor]:
    """The ids of a prompt and of three steps of decoding of GLM-Image, as the model computes them."""
    asked: dict[str, Any] = PROMPTS | {"inputs_embeds": torch.zeros(2, 6, 1), CACHE: None}
    made = [model.compute_3d_position_ids(**asked)]
    for step in range(3):
        cache = SimpleNamespace(get_seq_length=lambda seen=6 + step: seen)
        asked |= {"inputs_embeds": torch.zeros(2, 1, 1), CACHE: cache}
        made.append(model.compute_3d_position_ids(**asked))
    return made


def test_ids_of_images_to_come_are_left_on_the_model_for_its_decoding() -> None:
    def made() -> Any:
        model = weightless("glm_image", config_of("glm_image"))
        model.rope_deltas = model._cached_decode_position_ids = model._prefill_len = None
        return model

    want, model = decoding(made()), install(install(made()))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        got = decoding(one)
        assert all(map(torch.equal, got, want))
        assert got[3].tolist() == [[[8], [3]], [[8], [3]], [[8], [3]]]
        assert_same(one._cached_decode_position_ids, GENERATING.with_generated(**PROMPTS)[1])
        assert one._prefill_len == 6
        one.get_rope_index(PROMPTS["input_ids"][:, :3])
        assert (one._prefill_len, one._cached_decode_position_ids) == (3, None)
    assert "get_rope_index" not in vars(uninstall(model))


def test_models_without_the_method_of_another_type_or_with_another_function_are_refused_whole() -> None:
    inner, other = (weightless("qwen3_vl", config_of("qwen3_vl")) for _ in range(2))
    talker = weightless("qwen2_5_omni", config_of("qwen2_5_omni").talker_config)
    for bad, said in (
        (nn.Linear(2, 2), "model: got Linear, want a model with get_rope_index"),
        (nn.ModuleList([inner, talker]), "config.model_type: got 'qwen2_5_omni_talker', want one of cohere_compass, "),
        (nn.ModuleList([inner, other]), "model: got Qwen3VLModel.get_rope_index set on the instance, want that of the"),
    ):
        other.get_rope_index = mine = partial(print)
        with pytest.raises(UnsupportedError) as raised:
            install(bad)
        assert str(raised.value).startswith(said)
        assert "get_rope_index" not in vars(inner)
        assert uninstall(other).get_rope_index is mine
