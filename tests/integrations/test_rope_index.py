"""Compare rope_index and ModelSettings with get_rope_index of every model that defines it: bits, dtypes and shapes."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from layouts import OMNI, kind_of, weightless
from model_configs import complete, config_of
from refusals import assert_refused
from results import assert_equal
from rope_batches import FAMILIES, LIKE, MODELS, PLACED, VISION, hunyuan, omni_config
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from mmpos import MmposError, Placeholders, UnsupportedError
from mmpos.integrations.hf import get_rope_index, install, omni_rope_index, rope_index, uninstall
from mmpos.integrations.hf.get_rope_index import OmniRopeIndex, RopeIndex, TimedRopeIndex, XDRopeIndex
from mmpos.integrations.models import MODEL_TYPES
from mmpos.support import native


def both_ways() -> Iterator[None]:
    """Yield once with the C extension, if it was built, and once without it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield
        monkeypatch.setattr(native, "core", None)
        yield


@pytest.mark.parametrize("count", [8, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", FAMILIES)
def test_ids_and_deltas_of_random_batches_equal_those_of_get_rope_index(
    model: str, count: int | None, batches: int
) -> None:
    random = Random(model)
    for _ in range(count or batches):
        request = FAMILIES[model](random, model)
        want = request.theirs(**request.needed | request.arguments)
        for _ in both_ways():
            assert_equal(request.ours(**request.arguments), want)


@complete
def test_every_model_type_with_the_method_is_compared() -> None:
    """Transformers' auto mapping determines the class of a type; it may be defined in the file of another type."""
    library: Any = transformers
    files = Path(library.__path__[0], "models").glob("*/modeling_*.py")
    with_method = {path.parent.name for path in files if "def get_rope_index" in path.read_text()}
    kinds = {model: names if isinstance(names, str) else names[0] for model, names in MODEL_MAPPING_NAMES.items()}
    modules = {model: library._class_to_module.get(kind, "").split(".") for model, kind in kinds.items()}
    candidates = {model for model, module in modules.items() if not with_method.isdisjoint(module)}
    assert {modules[model][1] for model in candidates} == with_method
    types = {model for model in candidates if hasattr(getattr(library, kinds[model]), "get_rope_index")}
    assert types == {*MODELS, *PLACED} - {*OMNI} | {f"{model}_thinker" for model in OMNI}
    assert {name for name, row in MODEL_TYPES.items() if row.has_rope_index} == types | {*OMNI}


# Parameters and configs.

TEXT, IMAGE, VIDEO = 0, 1, 2
PLAIN, TIMED, APART = RopeIndex(2), TimedRopeIndex(2, tokens_per_second=25), RopeIndex(2, frames_apart=True)
XD, HY4 = XDRopeIndex(2, 4), RopeIndex(2, frames_apart=True, row_separator=True)
PATCH, FRAME, AUDIO, SOUND, SOUND_END, VISION_END = 151655, 151656, 151646, 151647, 151648, 151653
OMNI_TOKENS = Placeholders(PATCH, FRAME, AUDIO)
OMNI_25 = OmniRopeIndex(OMNI_TOKENS, 2, 25, VISION, SOUND, tokens_per_chunk=50)
OMNI_3 = OmniRopeIndex(OMNI_TOKENS, 2, 13, VISION, SOUND, audio_chunk=100)
OMNI_FUNCTIONS = dict(zip(OMNI, (OMNI_25, OMNI_3), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_parameters_equal_those_of_get_rope_index(model: str) -> None:
    want = list(inspect.signature(kind_of(model).get_rope_index).parameters.values())[1:]
    config = omni_config(model) if model in OMNI else hunyuan(4) if model == "hunyuan_vl" else config_of(model)
    got = inspect.signature(rope_index(config)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


def with_encoder(model: str, **fields: int) -> dict[str, Any]:
    return {"model_type": model, "vision_config": fields}


@pytest.mark.parametrize(
    ("config", "function"),
    [
        (with_encoder(model, spatial_merge_size=3), RopeIndex(3, 1 + (model == "ernie4_5_vl_moe"), like == "qwen3_vl"))
        for model, like in LIKE.items()
        if model != "qwen2_5_vl"
    ]
    + [
        (with_encoder("qwen2_5_vl", tokens_per_second=7), TimedRopeIndex(2, tokens_per_second=7)),
        (with_encoder("hy_v4_vl", spatial_merge_size=3), RopeIndex(3, 1, True, True)),
        (hunyuan(4).to_dict() | with_encoder("hunyuan_vl", spatial_merge_size=4), XDRopeIndex(4, 4)),
        (hunyuan(5), XDRopeIndex(2, 5)),
        *((omni_config(model), function) for model, function in OMNI_FUNCTIONS.items()),
        *((omni_config(model).thinker_config, function) for model, function in OMNI_FUNCTIONS.items()),
    ],
)
def test_sizes_and_tokens_are_read_from_the_config(config: Any, function: Any) -> None:
    assert rope_index(config) == function


THINKER = "config.thinker_config: got none, want the config of the language model and the encoders"
TYPE = "config.model_type: got"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, f"{TYPE} 'llama', want one of cohere_compass, "),
        *(({"model_type": model}, f"{TYPE} {model!r}, whose method is not replaced: call") for model in PLACED),
        ({"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 0}},
         "config.vision_config.tokens_per_second: got 0, want >= 1"),
        ({"model_type": "qwen2_5_omni", "talker_config": {}}, THINKER),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"vision_start_token_id": 1}},
         "config.thinker_config.vision_config: got none, want the config of the encoder"),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"vision_config": {}, "vision_start_token_id": 1}},
         "config.thinker_config.audio_start_token_id: got none, want an integer"),
    ],
)  # fmt: skip
def test_configs_without_required_fields_are_refused(config: dict[str, Any], message: str) -> None:
    assert_refused(message, lambda: rope_index(config), MmposError)


# Edge cases that random batches do not contain.


def arguments_of(kinds: Any, **more: Any) -> dict[str, Any]:
    """Return arguments with these (batch, seq) token types; the other values are converted to tensors."""
    input_ids = torch.zeros(len(kinds), len(kinds[0]), dtype=torch.int64)
    return {"input_ids": input_ids, "mm_token_type_ids": torch.tensor(kinds)} | tensors(**more)


def tensors(**values: Any) -> dict[str, Any]:
    """Convert lists to tensors and empty lists to zero grids; leave other values unchanged."""
    no_grids = torch.zeros(0, 3, dtype=torch.int64)
    return {
        name: value if not isinstance(value, list) else torch.tensor(value) if value else no_grids
        for name, value in values.items()
    }


def test_adjacent_and_masked_images_are_supported() -> None:
    masked = {"attention_mask": [[1.0, 1.0, 1.0, 0.0]], "image_grid_thw": [[1, 2, 2]] * 2}
    for function, kinds, more, want in (
        (PLAIN, [TEXT, *[IMAGE] * 3, TEXT], {"image_grid_thw": [[1, 2, 4], [1, 2, 2]]}, [0, 1, 2, 3, 4]),
        (APART, [TEXT, VIDEO, VIDEO, TEXT], {"video_grid_thw": [[2, 2, 2]]}, [0, 1, 2, 3]),
        # Trainers append a masked image to batches without images; it does not consume a grid.
        (PLAIN, [TEXT, IMAGE, TEXT, IMAGE], masked, [0, 1, 2, 0]),
    ):
        ids, deltas = function(**arguments_of([kinds], **more))
        assert (ids[2, 0].tolist(), deltas.tolist()) == (want, [[0]])


def test_deltas_do_not_keep_the_ids_in_memory() -> None:
    _, deltas = PLAIN(**arguments_of([[TEXT] * 100]))
    assert deltas.untyped_storage().nbytes() == 8


def test_a_batch_without_rows_has_empty_ids() -> None:
    empty = torch.zeros(0, 4, dtype=torch.int64)
    for function, second in ((PLAIN, empty), (OMNI_3, empty[:, :3])):
        ids, deltas = function(empty, second)
        assert (ids.shape, deltas.shape) == ((3, 0, 4), (0, 1))


# Qwen Omni.


def theirs(function: Any, ids: Any, **arguments: Any) -> Any:
    model = OMNI[function is OMNI_3]
    return FAMILIES[model](Random(0), model).theirs(input_ids=ids, **arguments)


@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_ids_without_grids_depend_only_on_the_mask(function: Any) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 0]])
    for ids in (None, torch.full((3, 4), AUDIO)):
        assert_equal(function(ids, attention_mask=mask), theirs(function, ids, attention_mask=mask))


def clip_of(frames: int, audio: int, text: int) -> list[int]:
    """Return the tokens of text, a video with audio, and one more text token."""
    return [*[5] * text, VISION, SOUND, *[FRAME] * frames, *[AUDIO] * audio, SOUND_END, VISION_END, 5]


def test_frames_and_audio_are_ordered_by_ids_rounded_to_float32() -> None:
    """Frames are just over 10/13 s apart, so the second frame is just over 10 ids after the first.

    If the clip starts at id 4, float32 can represent 14.000001, so the frame follows audio token 10. If it starts at id
    1002, the id of the second frame is rounded to 1012, so the frame precedes the audio token with this id.
    """
    arguments = tensors(video_grid_thw=[[2, 2, 2]], second_per_grids=[10 / 13 + 1e-7])
    early, _ = OMNI_3(torch.tensor([clip_of(2, 12, 2)]), **arguments, use_audio_in_video=True)
    late, _ = OMNI_3(torch.tensor([clip_of(2, 12, 1000)]), **arguments, use_audio_in_video=True)
    assert early[1, 0, 4:18].tolist() == [4, *range(4, 15), 4, 15]
    assert 14 < early[0, 0, 16].item() < 14.00001
    assert late[1, 0, 1002:1016].tolist() == [1002, *range(1002, 1012), 1002, 1012, 1013]
    assert late[0, 0, 1013].item() == 1012


@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_placeholders_without_grids_and_markers_are_text(function: Any) -> None:
    """Random tokens, as in Transformers' tests, may include the video placeholder although there is no video."""
    rows = torch.tensor(
        [[FRAME, VISION, PATCH, VISION_END, 5, FRAME, FRAME], [5, 5, VISION, PATCH, VISION_END, FRAME, 5]]
    )
    arguments = tensors(image_grid_thw=[[1, 2, 2]] * 2, attention_mask=[[1] * 7, [0, *[1] * 6]])
    for _ in both_ways():
        got = function(rows, **arguments)
        assert_equal(got, theirs(function, rows, **arguments))
        assert got[0][0].tolist() == [list(range(7)), [int(function is OMNI_25), *range(6)]]


@pytest.mark.parametrize("function", [OMNI_25, OMNI_3])
def test_images_and_videos_that_the_method_mistakes_for_text_have_grid_ids(function: Any) -> None:
    # There is no audio, although use_audio_in_video is True.
    ids = torch.tensor([[5, VISION, FRAME, FRAME, VISION_END]])
    arguments = tensors(video_grid_thw=[[2, 2, 2]], second_per_grids=[1.0], attention_mask=[[1] * 5])
    assert theirs(function, ids, **arguments, use_audio_in_video=True)[0].tolist() == [[[0, 1, 2, 3, 4]]] * 3
    after = 3 + function.tokens_per_second
    assert function(ids, **arguments, use_audio_in_video=True)[0].tolist() == [
        [[0, 1, 2, after - 1, after]],
        *[[[0, 1, 2, 2, after]]] * 2,
    ]
    if function is OMNI_25:
        image, grid = torch.tensor([[5, PATCH, PATCH, 5]]), torch.tensor([[1, 2, 4]])
        assert theirs(function, image, image_grid_thw=grid)[0].tolist() == [[[0, 1, 2, 3]]] * 3
        assert function(image, grid)[0].tolist() == [[[0, 1, 1, 3]], [[0, 1, 1, 3]], [[0, 1, 2, 3]]]


# Errors.

ONE = [[TEXT, IMAGE, TEXT]]
MOVING = arguments_of([[VIDEO, VIDEO, TEXT, VIDEO, VIDEO]], video_grid_thw=[[2, 2, 2]] * 2)
INTERVALS = "a number >= 0 and ids within int32"


def row(*tokens: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([tokens]), **tensors(**more)}


MARKERS = "input_ids: got other tokens before the placeholders at document 0, token"
LEAST = "want at least (1, 2, 2), one token"
TWO_VIDEOS = {"video_grid_thw": [[1, 2, 2], [2, 2, 2]]}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (PLAIN, arguments_of(ONE), "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on"),
    (APART, arguments_of([[TEXT, VIDEO, VIDEO, TEXT, VIDEO]], video_grid_thw=[[3, 2, 4]]),
     "video_grid_thw[1]: got a run of 1 placeholder at document 0, token 4, want 2 for 1x1x2 after merging"),
    (PLAIN, arguments_of(ONE, image_grid_thw=[[1, 2, 1]]), f"image_grid_thw[0]: got (1, 2, 1), {LEAST}"),
    (PLAIN, arguments_of(ONE, image_grid_thw=[[1, 0, 2], [1, 2, 2]]), f"image_grid_thw[0]: got (1, 0, 2), {LEAST}"),
    (APART, arguments_of([[VIDEO]], video_grid_thw=[[0, 2, 2], [1, 1, 2], [1, 2, 2]]),
     f"video_grid_thw[1]: got (1, 1, 2), {LEAST}"),
    (HY4, arguments_of([[TEXT, IMAGE, IMAGE]], image_grid_thw=[[1, 4, 1]]),
     f"image_grid_thw[0]: got (1, 4, 1), {LEAST}"),
    (replace(HY4, spatial_merge_size=1), arguments_of([[TEXT, IMAGE, IMAGE]], image_grid_thw=[[1, 2, 0]]),
     "image_grid_thw[0]: got (1, 2, 0), want at least (1, 1, 1), one token"),
    (PLAIN, arguments_of([[TEXT, 3]]), "mm_token_type_ids: got 3, want 0, 1 or 2"),
    (PLAIN, arguments_of([[0.5]]), "mm_token_type_ids: got torch.float32, want integers"),
    (PLAIN, arguments_of(ONE) | {"input_ids": torch.zeros(1, 2)},
     "mm_token_type_ids: got shape (1, 3), want (1, 2) as for input_ids"),
    (PLAIN, arguments_of(ONE) | {"input_ids": torch.zeros(3)}, "input_ids: got shape (3,), want (batch, seq)"),
    (PLAIN, arguments_of(ONE) | {"mm_token_type_ids": None}, "mm_token_type_ids: got NoneType, want a tensor"),
    (PLAIN, arguments_of(ONE) | {"image_grid_thw": [[1, 2, 2]]}, "image_grid_thw: got list, want a tensor"),
    (PLAIN, arguments_of([[TEXT], [TEXT]], attention_mask=[[1], [0]]),
     "attention_mask[1]: got no tokens, want at least one"),
    (TIMED, arguments_of([[VIDEO, TEXT, VIDEO]], video_grid_thw=[[1, 2, 2]] * 2, second_per_grid_ts=[1.0]),
     "second_per_grid_ts: got shape (1,), want at least 2 values, one per video"),
    *((TIMED, MOVING | {"second_per_grid_ts": seconds}, f"second_per_grid_ts{message}") for seconds, message in (
        ("ab", ": got str, want a tensor or a list"),
        (["ab", 1.0], "[0]: got str, want a number"),
        ([1.0, torch.ones(2)], "[1]: got shape (2,), want a number"),
        ([1, 2**31], "[1]: got 2147483648, want <= 2147483647"),
        (torch.tensor([1j, 1]), ": got torch.complex64, want real numbers"),
        ([1.0, float("nan")], f"[1]: got frames that are nan ids apart, want {INTERVALS}"),
        (torch.tensor([1e30, 1]), f"[0]: got frames that are 2.5e+31 ids apart, want {INTERVALS}"),
        ([1.0, -0.04], f"[1]: got frames that are -1 ids apart, want {INTERVALS}"),
    )),
    (XD, arguments_of([[IMAGE, IMAGE]], image_grid_thw=[[1, 2, 1]]),
     "image_grid_thw[0]: got (1, 2, 1), want at least (0, 2, 2), one token"),
    (OMNI_25, row(5, 5), "attention_mask: got None, want a tensor if there are no grids"),
    (OMNI_25, row(5, 5, image_grid_thw=[[1, 2, 2]], attention_mask=[[1]]),
     "attention_mask: got shape (1, 1), want (1, 2) as for input_ids"),
    *((OMNI_3, row(*tokens, image_grid_thw=[[1, 2, 2]], **mask), f"{MARKERS} {at}, want {kind}_start_token_id")
      for tokens, at, kind, mask in (
        ((5, PATCH, 5), 1, "vision", {}),
        ((VISION, PATCH, SOUND, AUDIO, 5), 3, "audio", {}),
        ((PATCH, 5), 0, "vision", {}),
        ((5, PATCH), 0, "vision", {"attention_mask": [[0, 1]]}),
    )),
    (OMNI_25, row(VISION, PATCH, 5, video_grid_thw=[[1, 2, 2]]),
     "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on"),
    (OMNI_25, row(5, 5, FRAME, AUDIO, 5, 5, video_grid_thw=[[1, 2, 2]], second_per_grids=[1.0]),
     "use_audio_in_video: got False, want True for a video with audio between its frames"),
    (OMNI_25, row(5, AUDIO, 5, image_grid_thw=[], audio_seqlens=[1, 8]),
     "audio_seqlens[0]: got 2, want 1, the number of audio tokens in input_ids"),
    *((OMNI_25, row(5, FRAME, 5, FRAME, FRAME, **TWO_VIDEOS, second_per_grids=seconds), f"second_per_grids{message}")
      for seconds, message in (
        (None, ": got None, want at least 2 values, one per video"),
        ([1.0], ": got shape (1,), want at least 2 values, one per video"),
        ([-1.0, 1.0], f"[0]: got -1, want {INTERVALS}"),
        ([1.0, float("nan")], f"[1]: got nan, want {INTERVALS}"),
        ([1.0, 1e30], f"[1]: got 1e+30, want {INTERVALS}"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_are_refused(function: Any, arguments: dict[str, Any], message: str) -> None:
    for _ in both_ways():
        assert_refused(message, lambda: function(**arguments))


# Graphs and devices.

SILENT = tensors(attention_mask=[[0, *[1] * 8]], video_grid_thw=[[1, 2, 2]], audio_seqlens=[3], second_per_grids=[0.5])
CLIP = {"input_ids": torch.tensor([[0, *clip_of(1, 1, 1)]]), **SILENT, "use_audio_in_video": True}
FILM = arguments_of([[TEXT, IMAGE, TEXT, VIDEO, VIDEO]], attention_mask=[[True] * 5], image_grid_thw=[[1, 2, 2]])
FILM |= {"video_grid_thw": torch.tensor([[2, 2, 2]]), "mm_token_type_ids": FILM["mm_token_type_ids"].int()}
ROWS = arguments_of([[TEXT, IMAGE, IMAGE, TEXT]], attention_mask=[[0, 1, 1, 1]], image_grid_thw=[[1, 2, 2]])
CALLS: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "Qwen2-VL": (PLAIN.__call__, FILM, get_rope_index, ""),
    "Qwen2.5-VL": (TIMED.__call__, {**FILM, "second_per_grid_ts": torch.tensor([0.5])}, get_rope_index, ""),
    "HunYuan-VL": (XD.__call__, ROWS, get_rope_index, "xd"),
    "Qwen2.5-Omni": (OMNI_25.__call__, CLIP, omni_rope_index, ""),
    "Qwen3-Omni": (OMNI_3.__call__, CLIP, omni_rope_index, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_compiles_to_one_graph(name: str) -> None:
    function, arguments, _, _ = CALLS[name]
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    got, want = compiled(**arguments), function(**arguments)
    assert_equal(got, want)
    assert [each.stride() for each in tree_leaves(got)] == [each.stride() for each in tree_leaves(want)]
    with FakeTensorMode() as mode:  # graphs rely on the shapes and dtypes that the operator announces
        announced = function(**tree_map_only(Tensor, mode.from_tensor, arguments))
    assert [(each.shape, each.dtype) for each in announced] == [(each.shape, each.dtype) for each in want]


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL"])
def test_results_are_on_the_device_of_input_ids_rather_than_the_default_device(name: str) -> None:
    function, arguments, _, _ = CALLS[name]
    want = function(**arguments)
    with torch.device("meta"):
        assert_equal(function(**arguments), want)


class FakeDeviceTensor(Tensor):
    """A host tensor that reports an accelerator as its device."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> FakeDeviceTensor:
        device = torch.device("xla:0")
        fake: FakeDeviceTensor = Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=device)
        fake.host = host
        return fake

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func}: CopyCounter should have handled it")


class CopyCounter(TorchDispatchMode):
    """A mode that counts copies between FakeDeviceTensor and the host."""

    to_host = to_device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_device = any(isinstance(value, FakeDeviceTensor) for value in tree_leaves(args))
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            to_device = kwargs["device"].type == "xla"
            self.to_host += on_device and not to_device
            self.to_device += to_device and not on_device
            on_device, kwargs["device"] = to_device, None
        result = func(*tree_map_only(FakeDeviceTensor, lambda value: value.host, args), **kwargs)
        return tree_map_only(Tensor, FakeDeviceTensor, result) if on_device else result


@pytest.mark.parametrize("name", CALLS)
def test_there_is_one_copy_from_the_device_and_one_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, module, kind = CALLS[name]
    compute, operator = f"_compute{kind and '_' + kind}", f"{kind and '_' + kind.upper()}_OPERATOR"
    monkeypatch.setattr(module, operator, getattr(module, compute))  # the mode cannot see inside an operator
    with CopyCounter() as counter:  # type: ignore[no-untyped-call]
        got = function(**tree_map_only(Tensor, FakeDeviceTensor, arguments))
    assert (counter.to_host, counter.to_device) == (1, 1)
    assert all(isinstance(each, FakeDeviceTensor) for each in tree_leaves(got))
    assert_equal(tree_map_only(FakeDeviceTensor, lambda value: value.host, got), function(**arguments))


# Models.


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("qwen3_vl", config_of("qwen3_vl")),
        ("hunyuan_vl", hunyuan(4)),
        ("qwen2_5_omni", omni_config("qwen2_5_omni").thinker_config),
    ],
)
def test_copies_keep_an_installed_function_and_uninstall_removes_it(model: str, config: Any) -> None:
    module, function = weightless(model, config), rope_index(config)
    parent = nn.Sequential(nn.Identity(), module)
    assert install(install(parent)) is parent
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.get_rope_index == function
        assert list(copied.state_dict()) == []
        assert uninstall(uninstall(copied)) is copied
        assert "get_rope_index" not in vars(copied)
        assert copied.get_rope_index == kind_of(model).get_rope_index.__get__(copied)


def test_install_changes_nothing_if_one_model_is_refused() -> None:
    inner, other = (weightless("qwen3_vl", config_of("qwen3_vl")) for _ in range(2))
    talker = weightless("qwen2_5_omni", config_of("qwen2_5_omni").talker_config)
    for bad, message in (
        (nn.Linear(2, 2), "model: got Linear, want a model with get_rope_index"),
        (nn.ModuleList([inner, talker]), "config.model_type: got 'qwen2_5_omni_talker', want one of cohere_compass, "),
        (nn.ModuleList([inner, other]), "model: got Qwen3VLModel.get_rope_index set on the instance, want the method"),
    ):
        other.get_rope_index = function = partial(print)
        assert_refused(message, partial(install, bad), UnsupportedError)
        assert "get_rope_index" not in vars(inner)
        assert uninstall(other).get_rope_index is function
