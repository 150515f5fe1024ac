"""Image options and the image processor of MMPosProcessor: options work as in Transformers, or are refused by name."""

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
def test_image_and_video_processors_have_the_attributes_of_transformers() -> None:
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


@pytest.mark.parametrize("options", BYTES)
def test_image_options_have_the_same_effects_as_in_transformers(options: dict[str, Any]) -> None:
    ours, theirs = both("qwen2_vl")
    images = ours.images
    factor = 1 if options.get("do_rescale") is False else options.get("rescale_factor", 1 / 255)
    mean, std = (np.broadcast_to(options.get(f"image_{name}", getattr(images, name)), 3) for name in ("mean", "std"))
    if options.get("do_normalize") is False:
        mean, std = np.zeros(3), np.ones(3)
    bound = normalised(*((each / (255 * factor)).tolist() for each in (mean, std)))
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (60, 90, 3), np.uint8)
    clip = random.integers(0, 256, (4, 60, 90, 3), np.uint8)
    blocks = [{"type": "image", "image": picture}, {"type": "video", "video": clip}]
    chat = [{"role": "user", "content": blocks}]
    for arguments in (options, {"images_kwargs": options}):
        want = theirs.apply_chat_template(
            chat, tokenize=True, return_dict=True, processor_kwargs={**arguments, "return_tensors": "pt"}
        )
        assert_same(ours(text=chat, return_tensors="pt", **arguments), want, bound)
        if arguments == options:
            alone = ours.image_processor(picture, return_tensors="pt", **options)
            assert_same(alone, theirs.image_processor(picture, return_tensors="pt", **options), bound)


UNSUPPORTED: dict[str, Any] = {
    "do_resize": False, "do_convert_rgb": False, "resample": 0, "patch_size": 28, "merge_size": 1,
    "temporal_patch_size": 1, "do_pad": True, "do_center_crop": True, "default_to_square": True,
    "crop_size": {"height": 28, "width": 28}, "data_format": "channels_last", "input_data_format": "channels_first",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_image_options_are_refused_by_every_method(name: str) -> None:
    ours, _ = both("qwen2_vl")
    plain = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers, False, temporal_patch_size=2)
    options, size = {name: UNSUPPORTED[name]}, mmpos.ImageSize(56, 56)
    chat = [{"role": "user", "content": [{"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}]}]
    calls: list[Any] = [
        lambda: ours(size, QWENS[2], **options),
        lambda: ours(size, QWENS[2], images_kwargs=options),
        lambda: ours(text=chat, **options),
        lambda: ours.apply_chat_template(chat, tokenize=True, return_dict=True, processor_kwargs=options),
        lambda: ours._get_num_multimodal_tokens([(90, 120)], **options),
        lambda: ours._get_num_multimodal_tokens([(90, 120)], images_kwargs=options),
        lambda: ours.image_processor(size, **options),
        lambda: ours.image_processor.get_number_of_image_patches(90, 120, options),
        lambda: plain(size, QWENS[2], **options),
    ]
    want = {"do_resize": True, "do_convert_rgb": True, "resample": 3, "patch_size": 14, "merge_size": 2}.get(name)
    for call in calls:
        with pytest.raises(InvalidInputError, match=rf"^{name}: got .*, want {want or ''}"):
            call()


def test_an_option_unsupported_for_images_is_accepted_for_videos() -> None:
    ours, theirs = both("qwen2_vl")
    random = np.random.default_rng(0)
    clip, picture = (random.integers(0, 256, (*shape, 60, 90, 3), np.uint8) for shape in ((4,), ()))
    video, image_and_video = QWENS[3], f"{QWENS[2]} {QWENS[3]}"
    options: dict[str, Any] = {"return_tensors": "pt", "videos": [clip]}
    bound = normalised(ours.images.mean, ours.images.std)
    more: dict[str, Any]
    for more in ({"resample": 0}, {"videos_kwargs": {"resample": 0}}):
        assert_same(ours(text=video, **options, **more), theirs(text=video, **options, **more), bound)
    more = {"images": [picture], "videos_kwargs": {"resample": 0}}
    assert_same(ours(text=image_and_video, **options, **more), theirs(text=image_and_video, **options, **more), bound)
    with pytest.raises(InvalidInputError, match=r"^merge_size: got 1, want 2, the merge_size of images$"):
        ours(text=video, videos_kwargs={"merge_size": 1}, **options)
    with pytest.raises(InvalidInputError, match=r"^videos\[0\]: video: shape .* is invalid for input of size"):
        ours(text=video, do_resize=False, **options)
    settings: dict[str, Any] = {"video_processor": transformers.Qwen2VLVideoProcessor(merge_size=1)}
    with pytest.raises(InvalidInputError, match=r"^video_processor\.merge_size: got 1, want 2, as for images$"):
        MMPosProcessor.from_hf_config(config_of("qwen2_vl"), ours.tokenizer, images=ours.images, **settings)


def test_unknown_options_and_invalid_values_are_refused_by_every_method() -> None:
    ours, _ = both("qwen2_vl")
    for call in (
        lambda: ours._get_num_multimodal_tokens([(90, 120)], foo=2),
        lambda: ours.image_processor(mmpos.ImageSize(9, 9), foo=2),
        lambda: ours.image_processor.get_number_of_image_patches(90, 120, {"foo": 2}),
    ):
        with pytest.raises(InvalidInputError, match=r"^foo: got an unknown option, want "):
            call()
    for options, message in (
        ({"do_normalize": None}, "do_normalize: got None, want True or False"),
        ({"do_rescale": 1}, "do_rescale: got 1, want True or False"),
        ({"rescale_factor": 0}, "rescale_factor: got 0, want a finite number > 0"),
        ({"image_mean": None}, "image_mean: got None, want three finite numbers"),
        ({"image_std": [1, 1]}, r"image_std: got \[1, 1\], want three finite numbers > 0"),
    ):
        with pytest.raises(InvalidInputError, match=f"^{message}"):
            ours(mmpos.ImageSize(9, 9), QWENS[2], **options)
    with pytest.raises(InvalidInputError, match=r"^video_sizes: video: 'shortest_edge'$"):
        ours._get_num_multimodal_tokens(video_sizes=[(4, 90, 120)], size={"longest_edge": 10**6})
    patches = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers)
    with pytest.raises(InvalidInputError, match=r"^do_normalize cannot be combined with uint8 patches"):
        patches(mmpos.ImageSize(9, 9), QWENS[2], do_normalize=False)


def test_image_limits_can_be_set_in_a_call() -> None:
    ours, _ = both("qwen2_vl")
    text, image = QWENS[2], mmpos.ImageSize(500, 500)
    unlimited = ours(image, text)["image_grid_thw"].tolist()
    limits: list[dict[str, Any]] = [
        {"max_pixels": 28 * 28 * 9},
        {"images_kwargs": {"max_pixels": 28 * 28 * 9}},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9}},
        {"images_kwargs": {"size": {"longest_edge": 28 * 28 * 9}}},
        {"size": SizeDict(shortest_edge=28 * 28, longest_edge=28 * 28 * 9)},
        {"max_tokens": 9},
    ]
    assert [ours(image, text, **options)["image_grid_thw"].tolist() for options in limits] == [[[1, 6, 6]]] * 6
    assert ours(image, text, max_pixels=None)["image_grid_thw"].tolist() == unlimited == [[1, 8, 8]]
    for options, message in (
        ({"images_kwargs": {"pixels": 5}}, r"^images_kwargs: got an unknown option 'pixels', want min_pixels, max_p"),
        ({"images_kwargs": 5}, r"^images_kwargs: got int, want a mapping from names to options$"),
        ({"min_pixels": 5, "images_kwargs": {"min_pixels": 5}}, r"^min_pixels cannot be combined with images_kwargs\["),
        ({"max_pixels": 5}, r"^max_pixels: got 5, want >= 3136$"),
        ({"size": {"height": 5}}, r"^size: got \{'height': 5\}, want shortest_edge and longest_edge"),
        ({"size": {"longest_edge": 10**6}, "max_pixels": 10**6}, r"^size: got .*, without min_pixels and max_pixels"),
        ({"fsp": 2}, r"^fsp: got an unknown option, want return_tensors, .*, images_kwargs, videos_kwargs$"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            ours(image, text, **options)


LIMITS: list[dict[str, Any]] = [
    {"max_pixels": 28 * 28 * 6},
    {"min_pixels": 28 * 28 * 30, "max_pixels": 28 * 28 * 40},  # min_pixels first exceeds the old max_pixels
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}},
    {"image_mean": [0.5, 0.25, 0.0], "image_std": [0.5, 0.5, 1.0]},
]


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("assigned", LIMITS)
def test_values_assigned_to_the_image_processor_apply_to_later_calls(tmp_path: Path, assigned: dict[str, Any]) -> None:
    ours, theirs = both("qwen2_vl")
    for processor in (ours, theirs):
        for name, value in assigned.items():
            setattr(processor.image_processor, name, value)
    picture = np.random.default_rng(0).integers(0, 256, (100, 180, 3), np.uint8)
    want = theirs(picture, QWENS[2], return_tensors="pt")
    bound = normalised(ours.images.mean, ours.images.std)
    assert_same(ours(picture, QWENS[2], return_tensors="pt"), want, bound)
    ours.save_pretrained(tmp_path)
    loaded = MMPosProcessor.from_pretrained(tmp_path)
    assert_same(loaded(picture, QWENS[2], return_tensors="pt"), want, bound)
    settings = loaded.image_processor.to_dict()
    assert settings.pop("image_processor_type") == type(theirs.image_processor).__name__
    created = transformers.Qwen2VLImageProcessor(**settings)
    assert_same(loaded.image_processor(picture, return_tensors="pt"), created(picture, return_tensors="pt"), bound)
    assert {name: getattr(created, name) for name in settings} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    for name, value in assigned.items():
        assert getattr(ours.image_processor, name) == value


def test_one_edge_of_size_can_be_assigned() -> None:
    ours, theirs = both("qwen2_vl")
    for processor in (ours, theirs):
        processor.image_processor.size["longest_edge"] = 28 * 28 * 6
    size = (100, 180)
    assert ours._get_num_multimodal_tokens([size]) == theirs._get_num_multimodal_tokens([size])
    assert ours.images.max_pixels == ours.image_processor.max_pixels == 28 * 28 * 6
    ours.images = mmpos.ImageProcessor()
    assert ours.image_processor.size == {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    ours.image_processor.size["longest_edge"] = 9
    with pytest.raises(InvalidInputError, match=r"^max_pixels: got 9, want >= 3136$"):
        ours(mmpos.ImageSize(56, 56), QWENS[2])


def test_limits_assigned_for_glm_count_the_pixels_of_all_frames_in_a_patch() -> None:
    images = mmpos.ImageProcessor(small_images="glm-v", min_pixels=1000, max_pixels=10**6)
    ours: Any = ImagesOfProcessor(images, 2, read_files=False)
    ours.max_pixels = 5000
    assert ours.size == {"shortest_edge": 2000, "longest_edge": 10000}
    assert (ours.images.min_pixels, ours.images.max_pixels) == (1000, 5000)
    assert repr(ours).startswith("ImagesOfProcessor({'image_processor_type': 'Glm4vImageProcessor', 'size': {'shortest")


def test_invalid_assignments_to_the_image_processor_are_refused() -> None:
    ours, _ = both("qwen2_vl")
    cases: list[tuple[str, object, str]] = [
        ("max_pixels", 1.5, "max_pixels: got 1.5, want an integer"),
        ("min_pixels", -1, "min_pixels: got -1, want >= 0"),
        ("size", {"height": 5}, "size: got {'height': 5}, want shortest_edge and longest_edge"),
        ("image_mean", [1], "image_mean: got [1], want three finite numbers"),
        ("do_rescale", False, "image_processor.do_rescale: got False, want an assignment to size, min_pixels, m"),
        ("foo", 28, "image_processor.foo: got 28, want an assignment to size, "),
    ]
    for name, value, message in cases:
        assert_refused(message, partial(setattr, ours.image_processor, name, value))
    ours.image_processor.do_rescale = True  # its current value
    assert ours.images == both("qwen2_vl")[0].images
