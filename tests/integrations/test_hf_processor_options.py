"""Options and parts of the processor that are of its images: as in Transformers, or refused by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from chat_tokenizer import QWENS
from PIL import Image
from qwen_processors import SIZE, assert_same, both, config_of
from refusals import assert_refused
from tolerance import normalised
from transformers.image_utils import SizeDict

import mmpos
from mmpos import InvalidInputError
from mmpos.integrations.hf import MMPosProcessor
from mmpos.integrations.hf.vision import ImagesOfProcessor


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
def test_parts_have_the_names_of_transformers() -> None:
    ours, theirs = both("qwen2_vl")
    for name in ("patch_size", "merge_size", "temporal_patch_size", "model_input_names"):
        assert getattr(ours.image_processor, name) == getattr(theirs.image_processor, name), name
    for name in ("image_mean", "image_std"):
        assert getattr(ours.image_processor, name) == list(getattr(theirs.image_processor, name)), name
    assert ours.image_processor.size == SIZE
    assert (ours.image_processor.min_pixels, ours.image_processor.max_pixels) == (56 * 56, 28 * 28 * 20)
    assert ours.video_processor is theirs.video_processor
    assert [ours.video_token, ours.video_token_id] == [theirs.video_token, theirs.video_token_id]
    assert ours.video_token_ids == theirs.video_token_ids
    assert set(ours.model_input_names) == set(theirs.model_input_names)
    picture = Image.new("RGB", (100, 80), (9, 60, 200))
    want = theirs.image_processor(picture, return_tensors="pt", max_pixels=28 * 28 * 6)
    for call in (ours.image_processor, ours.image_processor.preprocess):
        assert_same(
            call(picture, return_tensors="pt", max_pixels=28 * 28 * 6),
            want,
            normalised(ours.images.mean, ours.images.std),
        )
    size = (300, 200, {"max_pixels": 28 * 28 * 9})
    assert ours.image_processor.get_number_of_image_patches(
        *size
    ) == theirs.image_processor.get_number_of_image_patches(*size)


BYTES: list[dict[str, Any]] = [
    {"do_normalize": False},
    {"do_rescale": False},
    {"do_rescale": False, "do_normalize": False},
    {"rescale_factor": 1 / 127},
    {"do_rescale": False, "rescale_factor": 0.5, "image_std": (40.0, 50.5, 60.0)},
    {"image_mean": [0.5, 0.25, 0.0], "image_std": 0.5},
    {"do_normalize": False, "image_mean": [0.5] * 3},
    {"resample": 3, "patch_size": 14, "merge_size": 2, "do_resize": True, "do_pad": None, "temporal_patch_size": 2},
]


@pytest.mark.parametrize("told", BYTES)
def test_options_of_images_do_what_they_do_in_transformers(told: dict[str, Any]) -> None:
    ours, theirs = both("qwen2_vl")
    images = ours.images
    factor = 1 if told.get("do_rescale") is False else told.get("rescale_factor", 1 / 255)
    mean, std = (np.broadcast_to(told.get(f"image_{name}", getattr(images, name)), 3) for name in ("mean", "std"))
    if told.get("do_normalize") is False:
        mean, std = np.zeros(3), np.ones(3)
    bound = normalised(*((each / (255 * factor)).tolist() for each in (mean, std)))
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (60, 90, 3), np.uint8)
    clip = random.integers(0, 256, (4, 60, 90, 3), np.uint8)
    blocks = [{"type": "image", "image": picture}, {"type": "video", "video": clip}]
    chat = [{"role": "user", "content": blocks}]
    for options in (told, {"images_kwargs": told}):
        want = theirs.apply_chat_template(
            chat, tokenize=True, return_dict=True, processor_kwargs={**options, "return_tensors": "pt"}
        )
        assert_same(ours(text=chat, return_tensors="pt", **options), want, bound)
        if options == told:
            alone = ours.image_processor(picture, return_tensors="pt", **told)
            assert_same(alone, theirs.image_processor(picture, return_tensors="pt", **told), bound)


OTHER_IMAGES: dict[str, Any] = {
    "do_resize": False, "do_convert_rgb": False, "resample": 0, "patch_size": 28, "merge_size": 1,
    "temporal_patch_size": 1, "do_pad": True, "do_center_crop": True, "default_to_square": True,
    "crop_size": {"height": 28, "width": 28}, "data_format": "channels_last", "input_data_format": "channels_first",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_IMAGES)
def test_options_that_images_cannot_have_are_refused_wherever_they_come(name: str) -> None:
    ours, _ = both("qwen2_vl")
    plain = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers, False, temporal_patch_size=2)
    told, size = {name: OTHER_IMAGES[name]}, mmpos.ImageSize(56, 56)
    chat = [{"role": "user", "content": [{"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}]}]
    calls: list[Any] = [
        lambda: ours(size, QWENS[2], **told),
        lambda: ours(size, QWENS[2], images_kwargs=told),
        lambda: ours(text=chat, **told),
        lambda: ours.apply_chat_template(chat, tokenize=True, return_dict=True, processor_kwargs=told),
        lambda: ours._get_num_multimodal_tokens([(90, 120)], **told),
        lambda: ours._get_num_multimodal_tokens([(90, 120)], images_kwargs=told),
        lambda: ours.image_processor(size, **told),
        lambda: ours.image_processor.get_number_of_image_patches(90, 120, told),
        lambda: plain(size, QWENS[2], **told),
    ]
    want = {"do_resize": True, "do_convert_rgb": True, "resample": 3, "patch_size": 14, "merge_size": 2}.get(name)
    for call in calls:
        with pytest.raises(InvalidInputError, match=rf"^{name}: got .*, want {want or ''}"):
            call()


def test_an_option_that_images_cannot_have_may_be_one_of_videos() -> None:
    ours, theirs = both("qwen2_vl")
    random = np.random.default_rng(0)
    clip, picture = (random.integers(0, 256, (*shape, 60, 90, 3), np.uint8) for shape in ((4,), ()))
    video, both_of_them = QWENS[3], f"{QWENS[2]} {QWENS[3]}"
    told: dict[str, Any] = {"return_tensors": "pt", "videos": [clip]}
    bound = normalised(ours.images.mean, ours.images.std)
    given: dict[str, Any]
    for given in ({"resample": 0}, {"videos_kwargs": {"resample": 0}}):
        assert_same(ours(text=video, **told, **given), theirs(text=video, **told, **given), bound)
    given = {"images": [picture], "videos_kwargs": {"resample": 0}}
    assert_same(ours(text=both_of_them, **told, **given), theirs(text=both_of_them, **told, **given), bound)
    with pytest.raises(InvalidInputError, match=r"^merge_size: got 1, want 2, by which tokens are counted$"):
        ours(text=video, videos_kwargs={"merge_size": 1}, **told)
    with pytest.raises(InvalidInputError, match=r"^videos\[0\]: video: shape .* is invalid for input of size"):
        ours(text=video, do_resize=False, **told)
    merged: dict[str, Any] = {"video_processor": transformers.Qwen2VLVideoProcessor(merge_size=1)}
    with pytest.raises(InvalidInputError, match=r"^video_processor\.merge_size: got 1, want 2, as of images$"):
        MMPosProcessor.from_hf_config(config_of("qwen2_vl"), ours.tokenizer, images=ours.images, **merged)


def test_an_option_that_nobody_knows_is_refused_wherever_tokens_are_counted_or_images_read() -> None:
    ours, _ = both("qwen2_vl")
    for call in (
        lambda: ours._get_num_multimodal_tokens([(90, 120)], foo=2),
        lambda: ours.image_processor(mmpos.ImageSize(9, 9), foo=2),
        lambda: ours.image_processor.get_number_of_image_patches(90, 120, {"foo": 2}),
    ):
        with pytest.raises(InvalidInputError, match=r"^foo: got an argument of this name, want "):
            call()
    for told, message in (
        ({"do_normalize": None}, "do_normalize: got None, want True or False"),
        ({"do_rescale": 1}, "do_rescale: got 1, want True or False"),
        ({"rescale_factor": 0}, "rescale_factor: got 0, want a finite number > 0"),
        ({"image_mean": None}, "image_mean: got None, want three finite numbers"),
        ({"image_std": [1, 1]}, r"image_std: got \[1, 1\], want three finite numbers > 0"),
    ):
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            ours(mmpos.ImageSize(9, 9), QWENS[2], **told)
    with pytest.raises(InvalidInputError, match=r"^video_sizes: video: 'shortest_edge'$"):
        ours._get_num_multimodal_tokens(video_sizes=[(4, 90, 120)], size={"longest_edge": 10**6})
    patches = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers)
    with pytest.raises(InvalidInputError, match=r"^do_normalize: got one, want none: patches are bytes, normalised wh"):
        patches(mmpos.ImageSize(9, 9), QWENS[2], do_normalize=False)


def test_images_have_their_own_limits_in_a_call() -> None:
    ours, _ = both("qwen2_vl")
    text, image = QWENS[2], mmpos.ImageSize(500, 500)
    whole = ours(image, text)["image_grid_thw"].tolist()
    few: list[dict[str, Any]] = [
        {"max_pixels": 28 * 28 * 9},
        {"images_kwargs": {"max_pixels": 28 * 28 * 9}},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9}},
        {"images_kwargs": {"size": {"longest_edge": 28 * 28 * 9}}},
        {"size": SizeDict(shortest_edge=28 * 28, longest_edge=28 * 28 * 9)},
        {"max_tokens": 9},
    ]
    assert [ours(image, text, **told)["image_grid_thw"].tolist() for told in few] == [[[1, 6, 6]]] * 6
    assert ours(image, text, max_pixels=None)["image_grid_thw"].tolist() == whole == [[1, 8, 8]]
    for told, message in (
        ({"images_kwargs": {"pixels": 5}}, r"^images_kwargs: got an argument 'pixels', want min_pixels, max_pixels"),
        ({"images_kwargs": 5}, r"^images_kwargs: got int, want options by their names$"),
        ({"min_pixels": 5, "images_kwargs": {"min_pixels": 5}}, r"^min_pixels: got it twice, want it beside images_k"),
        ({"max_pixels": 5}, r"^max_pixels: got 5, want >= 3136$"),
        ({"size": {"height": 5}}, r"^size: got \{'height': 5\}, want shortest_edge and longest_edge"),
        ({"size": {"longest_edge": 10**6}, "max_pixels": 10**6}, r"^size: got .* and neither min_pixels nor max_p"),
        ({"fsp": 2}, r"^fsp: got an argument of this name, want return_tensors, .*, images_kwargs, videos_kwargs$"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            ours(image, text, **told)


LIMITS: list[dict[str, Any]] = [
    {"max_pixels": 28 * 28 * 6},
    {"min_pixels": 28 * 28 * 30, "max_pixels": 28 * 28 * 40},  # more than max_pixels was, until the second is assigned
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}},
    {"image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.5, 1.0]},
]


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("assigned", LIMITS)
def test_what_is_assigned_to_the_image_processor_holds_for_later_calls(
    tmp_path: Path, assigned: dict[str, Any]
) -> None:
    ours, theirs = both("qwen2_vl")
    for each in (ours, theirs):
        for name, value in assigned.items():
            setattr(each.image_processor, name, value)
    picture = np.random.default_rng(0).integers(0, 256, (100, 180, 3), np.uint8)
    want = theirs(picture, QWENS[2], return_tensors="pt")
    bound = normalised(ours.images.mean, ours.images.std)
    assert_same(ours(picture, QWENS[2], return_tensors="pt"), want, bound)
    ours.save_pretrained(tmp_path)
    again = MMPosProcessor.from_pretrained(tmp_path)
    assert_same(again(picture, QWENS[2], return_tensors="pt"), want, bound)
    settings = again.image_processor.to_dict()
    made = transformers.Qwen2VLImageProcessor(**settings)
    assert_same(again.image_processor(picture, return_tensors="pt"), made(picture, return_tensors="pt"), bound)
    assert {name: getattr(made, name) for name in settings if name != "image_processor_type"} == {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in settings.items()
        if name != "image_processor_type"
    }
    assert settings["image_processor_type"] == type(theirs.image_processor).__name__
    for name, value in assigned.items():
        assert getattr(ours.image_processor, name) == value


def test_an_edge_of_size_may_be_assigned_alone() -> None:
    ours, theirs = both("qwen2_vl")
    for each in (ours, theirs):
        each.image_processor.size["longest_edge"] = 28 * 28 * 6
    size = (100, 180)
    assert ours._get_num_multimodal_tokens([size]) == theirs._get_num_multimodal_tokens([size])
    assert ours.images.max_pixels == ours.image_processor.max_pixels == 28 * 28 * 6
    ours.images = mmpos.ImageProcessor()
    assert ours.image_processor.size == {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    ours.image_processor.size["longest_edge"] = 9
    with pytest.raises(InvalidInputError, match=r"^max_pixels: got 9, want >= 3136$"):
        ours(mmpos.ImageSize(56, 56), QWENS[2])


def test_sizes_of_glm_are_those_of_whole_patches_when_they_are_assigned() -> None:
    images = mmpos.ImageProcessor(small_images="glm-v", min_pixels=1000, max_pixels=10**6)
    ours: Any = ImagesOfProcessor(images, 2, read_files=False)
    ours.max_pixels = 5000
    assert ours.size == {"shortest_edge": 2000, "longest_edge": 10000}
    assert (ours.images.min_pixels, ours.images.max_pixels) == (1000, 5000)
    assert repr(ours).startswith("ImagesOfProcessor({'image_processor_type': 'Glm4vImageProcessor', 'size': {'shortest")


def test_what_cannot_be_assigned_to_the_image_processor_is_refused() -> None:
    ours, _ = both("qwen2_vl")
    cases: list[tuple[str, object, str]] = [
        ("max_pixels", 1.5, "max_pixels: got 1.5, want an integer"),
        ("min_pixels", -1, "min_pixels: got -1, want >= 0"),
        ("size", {"height": 5}, "size: got {'height': 5}, want shortest_edge and longest_edge"),
        ("image_mean", [1], "image_mean: got [1], want three finite numbers"),
        ("do_rescale", False, "image_processor.do_rescale: got False, want assignments to size, min_pixels, max_p"),
        ("foo", 28, "image_processor.foo: got 28, want assignments to size, "),
    ]
    for name, value, message in cases:
        assert_refused(message, partial(setattr, ours.image_processor, name, value))
    ours.image_processor.do_rescale = True  # as it is
    assert ours.images == both("qwen2_vl")[0].images
