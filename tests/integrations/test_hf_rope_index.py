"""rope_index beside get_rope_index of every model that it stands in for: the same bits, dtypes, shapes, parameters."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
import transformers
from layouts import FRAME_RATES, random_layout
from model_configs import CONFIGS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from mmpos import InvalidInputError, MmposError
from mmpos.integrations.hf import get_rope_index, rope_index
from mmpos.integrations.hf.get_rope_index import RopeIndex, TimedRopeIndex
from mmpos.integrations.models import MODEL_TYPES
from mmpos.support import native

TRANSFORMERS: Any = transformers
FEW = 60

LIKE = {
    "cohere_compass": "qwen3_vl",
    "cosmos3_edge": "qwen3_vl",
    "cosmos3_omni": "qwen3_vl",
    "ernie4_5_vl_moe": "qwen2_vl",
    "glm46v": "qwen3_vl",
    "glm4v": "qwen3_vl",
    "glm4v_moe": "qwen3_vl",
    "glm_ocr": "qwen3_vl",
    "glmga": "qwen3_vl",
    "paddleocr_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
}
"""Every model type, and that whose random layouts it is given."""

ALONE = ("glm_image", "hunyuan_vl", "minicpmv4_7", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
"""Model types with tests in files of their own."""
WHOLE = ("qwen2_5_omni", "qwen3_omni_moe")
"""Model types that have a thinker, which has the method."""


class Request(NamedTuple):
    """Arguments of one call, and the sizes of the model's encoder."""

    arguments: dict[str, Any]
    vision: dict[str, int]
    traits: list[str]


def grids_of(random: Random, grids: list[list[int]] | None, merge: int, frames: int) -> Tensor | None:
    """Grids before merging, whose sides and frames merging need not divide."""
    if grids is None:
        return None
    more = [[random.randrange(frames), random.randrange(merge), random.randrange(merge)] for _ in grids]
    return torch.tensor(grids) * torch.tensor([frames, 1, 1]) + torch.tensor(more)


def mask_of(random: Random, real: Any, kinds: Any) -> tuple[Tensor, bool]:
    """A mask of any dtype; at times with holes, each of them after a token of text that stays."""
    mask, kept = torch.from_numpy(real.astype(np.int64)), (real != 0) & (kinds == 0)
    rows, tokens = np.nonzero(kept[:, 2::2] & kept[:, 1:-1:2])
    holes = list(zip(rows.tolist(), (2 + 2 * tokens).tolist(), strict=True))
    made = [hole for hole in holes if random.random() < 0.3] if random.random() < 0.3 else []
    for row, token in made:
        mask[row, token] = 0
    return mask.to(random.choice([torch.int64, torch.int32, torch.bool, torch.float32])), bool(made)


def seconds_of(random: Random, videos: int) -> Tensor | list[float] | None:
    """Seconds between frames, as processors and casts of trainers give them."""
    rates = [
        2 / random.choice(FRAME_RATES) if random.random() < 0.7 else random.uniform(0.01, 3) for _ in range(videos)
    ]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
    ways: list[Any] = [None, rates, rates, [round(1 + rate) for rate in rates], list(torch.tensor(rates))]
    return random.choice([*ways, *(torch.tensor(rates, dtype=dtype) for dtype in dtypes)])


def request(random: Random, model: str) -> Request:
    """Arguments as a processor or a trainer hands them over."""
    layout = random_layout(random, LIKE[model], random.random() < 0.8)
    kinds, traits = layout.kinds, []
    frames = 2 if model == "ernie4_5_vl_moe" else 1
    images = grids_of(random, layout.images, layout.merge, 1)
    videos = grids_of(random, layout.videos, layout.merge, frames)
    arguments: dict[str, Any] = {
        "input_ids": torch.from_numpy(layout.input_ids),
        "mm_token_type_ids": torch.from_numpy(kinds).to(random.choice([torch.int64, torch.int32, torch.uint8])),
    }
    if layout.attention_mask is not None or random.random() < 0.3:
        arguments["attention_mask"], holes = mask_of(random, layout.real, kinds)
        traits += ["holes"] * holes
    elif random.random() < 0.3:  # which theirs takes only without a mask
        arguments["input_ids"] = arguments["input_ids"].int()
    if random.random() < 0.2:  # an image that no token is left for
        images = torch.cat(
            [
                torch.zeros(0, 3, dtype=torch.int64) if images is None else images,
                torch.tensor([random.choice([[1, 6, 6], [1, 0, 6]])]),  # with room for tokens, and for none
            ]
        )
        traits.append("surplus image")
    if videos is not None and random.random() < 0.2:  # a video of which the last frames are cut off, or that is
        if layout.apart:
            videos[-1, 0] += random.randint(1, 3)
        videos = torch.cat([videos, torch.tensor([random.choice([[2, 6, 12], [2, 6, 0], [0, 6, 12]])])])
        if layout.apart and random.random() < 0.5:  # a video without frames is no grid
            videos = torch.cat([torch.tensor([[0, 6, 12]]), videos])
        traits.append("surplus video")
    if LIKE[model] == "qwen2_5_vl" and videos is not None:
        seconds = seconds_of(random, len(videos))
        traits.append(f"seconds: {seconds.dtype if isinstance(seconds, Tensor) else type(seconds).__name__}")
        arguments["second_per_grid_ts"] = seconds
    arguments |= {"image_grid_thw": images, "video_grid_thw": videos}
    vision = {"spatial_merge_size": layout.merge, "tokens_per_second": layout.rate, "temporal_merge_size": frames}
    return Request(arguments, vision, [*traits, *(name for name in arguments if arguments[name] is not None)])


@cache
def kind_of(model: str) -> Any:
    """The class with the method."""
    name: Any = MODEL_MAPPING_NAMES[model]
    return getattr(TRANSFORMERS, name)


def theirs(model: str, asked: Request) -> tuple[Tensor, Tensor]:
    """The result of the method, with a config and no weights."""
    kind, vision = kind_of(model), SimpleNamespace(**asked.vision)
    unbound = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    unbound.get_vision_position_ids = kind.get_vision_position_ids.__get__(unbound)
    result: tuple[Tensor, Tensor] = kind.get_rope_index(unbound, **asked.arguments)
    return result


def ours(model: str, asked: Request) -> tuple[Tensor, Tensor]:
    """The result of the function that is made from the same config."""
    result: tuple[Tensor, Tensor] = rope_index({"model_type": model, "vision_config": asked.vision})(**asked.arguments)
    return result


Answer = TypeVar("Answer")


def both_ways(function: Callable[..., Answer], arguments: Mapping[str, Any]) -> tuple[Answer, Answer]:
    """The answers with the extension in C, if it was built, and without it."""
    with pytest.MonkeyPatch.context() as patched:
        first = function(**arguments)
        patched.setattr(native, "core", None)
        return first, function(**arguments)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], said: object = "") -> None:
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), said
        assert torch.equal(one, other), said


Answered = list[tuple[Request, tuple[Tensor, Tensor]]]


def answered(model: str, count: int, seed: str = "") -> Answered:
    """As many requests, each with the answer of the method; the same in every run."""
    random = Random(model + seed)
    asked = [request(random, model) for _ in range(count)]
    return [(each, theirs(model, each)) for each in asked]


few = cache(partial(answered, count=FEW))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("model", LIKE)
def test_ids_and_deltas_have_the_bits_of_get_rope_index(model: str) -> None:
    for asked, want in few(model):
        assert_same(ours(model, asked), want, asked)


@pytest.mark.slow
@pytest.mark.parametrize("model", LIKE)
def test_many_ids_and_deltas_have_the_bits_of_get_rope_index(model: str, batches: int) -> None:
    traits: Counter[str] = Counter()
    for asked, want in answered(model, batches, "many"):
        function = rope_index({"model_type": model, "vision_config": asked.vision})
        for got in both_ways(function, asked.arguments):
            assert_same(got, want, asked)
        traits.update(asked.traits)
    wanted = ["attention_mask", "holes", "image_grid_thw", "video_grid_thw", "surplus image", "surplus video"]
    wanted += [name for name in traits if name.startswith("seconds: ")]
    assert {name: traits[name] for name in wanted if traits[name] < batches // 60} == {}
    assert len(wanted) == (12 if model == "qwen2_5_vl" else 6)


@pytest.mark.parametrize("model", LIKE)
def test_parameters_are_those_of_get_rope_index(model: str) -> None:
    want = list(inspect.signature(kind_of(model).get_rope_index).parameters.values())[1:]
    got = inspect.signature(rope_index(CONFIGS[model]())).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.parametrize("model", LIKE)
def test_sizes_are_those_of_the_config(model: str) -> None:
    config, apart = CONFIGS[model](), LIKE[model] == "qwen3_vl"
    vision = config.vision_config
    if model == "qwen2_5_vl":
        vision.tokens_per_second = 7
        assert rope_index(config) == TimedRopeIndex(2, tokens_per_second=7)
        return
    vision.spatial_merge_size = 3
    frames = vision.temporal_merge_size if model == "ernie4_5_vl_moe" else 1
    assert rope_index(config) == RopeIndex(3, frames, apart)


def test_every_type_whose_class_has_the_method_is_served() -> None:
    """By the class that the auto map names, which need not be in a file of the type's own."""
    files = Path(TRANSFORMERS.__path__[0], "models").glob("*/modeling_*.py")
    with_method = {path.parent.name for path in files if "def get_rope_index" in path.read_text()}
    kinds = {model: names if isinstance(names, str) else names[0] for model, names in MODEL_MAPPING_NAMES.items()}
    modules = {model: TRANSFORMERS._class_to_module.get(kind, "").split(".") for model, kind in kinds.items()}
    found = {model for model, module in modules.items() if not with_method.isdisjoint(module)}
    assert {modules[model][1] for model in found} == with_method
    types = [model for model in found if hasattr(kind_of(model), "get_rope_index")]
    assert sorted(types) == sorted([*LIKE, *ALONE])
    served = [name for name, row in MODEL_TYPES.items() if row.has_rope_index]
    assert sorted(served) == sorted([*LIKE, *ALONE, *WHOLE])


# Quirks that random batches do not hold.

TEXT, IMAGE, VIDEO = 0, 1, 2
PLAIN, TIMED, APART = RopeIndex(2), TimedRopeIndex(2, tokens_per_second=25), RopeIndex(2, frames_apart=True)


def told(kinds: Any, **more: Any) -> dict[str, Any]:
    """Arguments of these token types (batch, seq); lists among the others become tensors."""
    made = {name: torch.tensor(value) for name, value in more.items()}
    return {"input_ids": torch.zeros(len(kinds), len(kinds[0]), dtype=torch.int64), **made} | {
        "mm_token_type_ids": torch.tensor(kinds)
    }


def test_seconds_of_a_list_are_multiplied_before_they_are_rounded() -> None:
    asked = told([[VIDEO] * 30], video_grid_thw=[[30, 2, 2]])
    listed, seconds = 2 / 23.976, torch.tensor([2 / 23.976])
    frame = torch.arange(30)
    assert TIMED(**asked, second_per_grid_ts=[listed])[0][0, 0].tolist() == (frame * (25 * listed)).long().tolist()
    assert TIMED(**asked, second_per_grid_ts=seconds)[0][0, 0].tolist() == (frame * (25 * seconds[0])).long().tolist()


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
    ids, deltas = PLAIN(nothing, nothing)
    assert (ids.shape, deltas.shape) == ((3, 0, 4), (0, 1))


ONE = [[TEXT, IMAGE, TEXT]]
MOVING = told([[VIDEO, VIDEO, TEXT, VIDEO, VIDEO]], video_grid_thw=[[2, 2, 2]] * 2)
REFUSED: dict[str, tuple[RopeIndex, dict[str, Any], str]] = {
    "no grids": (
        PLAIN,
        told(ONE),
        "image_grid_thw: got 0 grids, want more for 1 placeholder from document 0, token 1 on",
    ),
    "a missing grid": (
        PLAIN,
        told([[IMAGE, TEXT, IMAGE]], image_grid_thw=[[1, 2, 2]]),
        "image_grid_thw: got 1 grid, want more for 1 placeholder from document 0, token 2 on",
    ),
    "an image that is cut off": (
        PLAIN,
        told([[TEXT, IMAGE]], image_grid_thw=[[1, 2, 4]]),
        "image_grid_thw[0]: got a run of 1 placeholder at document 0, token 1, want 2 for 1x1x2 after merging",
    ),
    "a frame that is cut off": (
        APART,
        told([[TEXT, VIDEO, VIDEO, TEXT, VIDEO]], video_grid_thw=[[3, 2, 4]]),
        "video_grid_thw[1]: got a run of 1 placeholder at document 0, token 4, want 2 for 1x1x2 after merging",
    ),
    "a side below a token": (
        PLAIN,
        told(ONE, image_grid_thw=[[1, 2, 1]]),
        "image_grid_thw[0]: got (1, 2, 1), want at least (1, 2, 2), one token",
    ),
    "a side below a token before others": (
        PLAIN,
        told(ONE, image_grid_thw=[[1, 0, 2], [1, 2, 2]]),
        "image_grid_thw[0]: got (1, 0, 2), want at least (1, 2, 2), one token",
    ),
    "a video without frames that are apart, before one below a token": (
        APART,
        told([[VIDEO]], video_grid_thw=[[0, 2, 2], [1, 1, 2], [1, 2, 2]]),
        "video_grid_thw[1]: got (1, 1, 2), want at least (1, 2, 2), one token",
    ),
    "another modality": (PLAIN, told([[TEXT, 3]]), "mm_token_type_ids: got 3, want 0, 1 or 2"),
    "fractions of types": (PLAIN, told([[0.5]]), "mm_token_type_ids: got torch.float32, want integers"),
    "other tokens": (
        PLAIN,
        told(ONE) | {"input_ids": torch.zeros(1, 2)},
        "mm_token_type_ids: got shape (1, 3), want (1, 2) as input_ids",
    ),
    "another mask": (
        PLAIN,
        told(ONE, attention_mask=[1, 1, 1]),
        "attention_mask: got shape (3,), want (1, 3) as input_ids",
    ),
    "a row alone": (PLAIN, told(ONE) | {"input_ids": torch.zeros(3)}, "input_ids: got shape (3,), want (batch, seq)"),
    "no types": (PLAIN, told(ONE) | {"mm_token_type_ids": None}, "mm_token_type_ids: got NoneType, want a tensor"),
    "a list of grids": (
        PLAIN,
        told(ONE) | {"image_grid_thw": [[1, 2, 2]]},
        "image_grid_thw: got list, want a tensor",
    ),
    "a row without tokens": (
        PLAIN,
        told([[TEXT], [TEXT]], attention_mask=[[1], [0]]),
        "attention_mask[1]: got no tokens, want at least one",
    ),
    "a time missing": (
        TIMED,
        told([[VIDEO, TEXT, VIDEO]], video_grid_thw=[[1, 2, 2]] * 2, second_per_grid_ts=[1.0]),
        "second_per_grid_ts: got shape (1,), want at least 2 values, one per video",
    ),
    **{
        f"seconds of {seconds!r}": (TIMED, MOVING | {"second_per_grid_ts": seconds}, f"second_per_grid_ts{said}")
        for seconds, said in (
            ("ab", ": got str, want a tensor or a list"),
            (["ab", 1.0], "[0]: got str, want a number"),
            ([1.0, torch.ones(2)], "[1]: got shape (2,), want a number"),
            ([1, 2**31], "[1]: got 2147483648, want <= 2147483647"),
            (torch.tensor([1j, 1]), ": got torch.complex64, want real numbers"),
            ([1.0, float("nan")], "[1]: got frames that are nan ids apart, want a number >= 0, and ids within int32"),
            (
                torch.tensor([1e30, 1]),
                "[0]: got frames that are 2.5e+31 ids apart, want a number >= 0, and ids within int32",
            ),
            ([1.0, -0.04], "[1]: got frames that are -1 ids apart, want a number >= 0, and ids within int32"),
        )
    },
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_contradict_each_other_are_refused(name: str) -> None:
    function, arguments, said = REFUSED[name]
    with pytest.raises(InvalidInputError) as raised:
        function(**arguments)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "config.model_type: got 'llama', want one of cohere_compass, "),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 0}},
            "tokens_per_second: got 0, want >= 1",
        ),
    ],
)
def test_configs_without_what_is_needed_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(MmposError, match=re.escape(said)):
        rope_index(config)


# Devices.


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


@pytest.mark.parametrize("timed", [False, True])
def test_an_accelerator_gives_all_in_one_copy_and_gets_all_in_one(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_rope_index, "_OPERATOR", get_rope_index._compute)  # in sight of the mode
    asked = told([[TEXT, IMAGE, TEXT, VIDEO, VIDEO]], attention_mask=[[True] * 5], image_grid_thw=[[1, 2, 2]])
    asked |= {"video_grid_thw": torch.tensor([[2, 2, 2]]), "mm_token_type_ids": asked["mm_token_type_ids"].int()}
    if timed:
        asked["second_per_grid_ts"] = torch.tensor([0.5])
    function = TIMED if timed else PLAIN
    with Counting() as counting:  # type: ignore[no-untyped-call]
        got = function(**{name: Away(value) for name, value in asked.items()})
    assert (counting.to_host, counting.to_device) == (1, 1)
    assert all(isinstance(each, Away) for each in got)
    assert_same(tree_map_only(Away, lambda value: value.held, got), function(**asked))
