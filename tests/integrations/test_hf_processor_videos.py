"""The processor of Qwen-VL models beside their own: chats with images and videos, counts of tokens, and generation."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from chat_tokenizer import QWENS, chat_tokenizer
from data_corpus import photo
from PIL import Image
from tolerance import assert_within, normalised
from transformers import BatchFeature
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

import mmpos
from mmpos import InvalidInputError, UnsupportedError
from mmpos.integrations.hf import MMPosProcessor
from mmpos.integrations.hf.vision import ImagesOfProcessor

NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
TOKENS = {
    "vision_start_token": QWENS[0],
    "vision_end_token": QWENS[1],
    "image_token": QWENS[2],
    "video_token": QWENS[3],
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type in ('image', 'video') %}"
    "<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 20}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 400}


class Kind(NamedTuple):
    """A model of Transformers, tiny, and the modules of its classes."""

    modeling: Any
    name: str
    rope: dict[str, Any]
    vision: dict[str, Any]


_TIMED = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
KINDS = {
    "qwen2_vl": Kind(
        modeling_qwen2_vl, "Qwen2VL", _TIMED, {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32}
    ),
    "qwen2_5_vl": Kind(
        modeling_qwen2_5_vl,
        "Qwen2_5_VL",
        _TIMED,
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32},
    ),
    "qwen3_vl": Kind(
        modeling_qwen3_vl,
        "Qwen3VL",
        {**_TIMED, "mrope_interleaved": True},
        {
            "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        },
    ),
}  # fmt: skip


@cache
def config_of(model: str) -> Any:
    kind = KINDS[model]
    text = {**TEXT, "num_key_value_heads": 2, "rope_parameters": kind.rope, "head_dim": 8}
    ids = dict(zip(NAMES, range(5, 9), strict=True))
    make = getattr(transformers, f"{kind.name}Config")
    return make(text_config=text, vision_config=kind.vision, **ids, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def both(model: str) -> tuple[MMPosProcessor, Any]:
    """Our processor and theirs, of the same parts."""
    config, kind = config_of(model), KINDS[model]
    tokenizer = chat_tokenizer(QWENS, extra_special_tokens=TOKENS, chat_template=TEMPLATE, padding_side="left")
    half: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if model == "qwen3_vl" else {}
    images = transformers.Qwen2VLImageProcessor(patch_size=config.vision_config.patch_size, size=SIZE, **half)
    of_videos: Any = transformers.Qwen3VLVideoProcessor if model == "qwen3_vl" else transformers.Qwen2VLVideoProcessor
    told = {"cap_pixels_per_frame": False, "size": {**SIZE, "longest_edge": 28 * 28 * 60}}
    videos = of_videos(**told)
    theirs = getattr(transformers, f"{kind.name}Processor")(images, tokenizer, videos, chat_template=TEMPLATE)
    settings = mmpos.from_hf_config(config)
    own = settings.image_processor(
        mean=images.image_mean,
        std=images.image_std,
        min_pixels=SIZE["shortest_edge"],
        max_pixels=SIZE["longest_edge"],
    )
    ours = MMPosProcessor.from_hf_config(config, tokenizer, images=own, video_processor=videos)
    return ours, theirs


def drawn_chats(random: np.random.Generator) -> list[list[dict[str, Any]]]:
    """One to three chats of texts, images and videos."""

    def block() -> dict[str, Any]:
        height, width = random.integers(30, 130, 2)
        match random.integers(4):
            case 0:
                return {"type": "image", "image": random.integers(0, 256, (height, width, 3), np.uint8)}
            case 1:
                frames = random.integers(2, 9)
                return {"type": "video", "video": random.integers(0, 256, (frames, height, width, 3), np.uint8)}
            case _:
                return {"type": "text", "text": " ".join(random.choice(["A cat", "looks", "at you", "a cup"], 2))}

    answer = {"role": "assistant", "content": "A"}
    sizes = random.integers(1, 5, random.integers(1, 4))
    return [[{"role": "user", "content": [block() for _ in range(size)]}, answer] for size in sizes]


def video_metadata(chats: Any, random: np.random.Generator) -> dict[str, Any]:
    """Frames a second of each video, where there are any."""
    blocks = [block for chat in chats for message in chat for block in message["content"] if isinstance(block, dict)]
    videos = [block["video"] for block in blocks if block["type"] == "video"]
    known = [
        {"total_num_frames": len(video), "fps": float(fps), "frames_indices": list(range(len(video)))}
        for video, fps in zip(videos, random.choice([1, 2, 5, 24, 29.97], len(videos)), strict=True)
    ]
    return {"video_metadata": known} if known else {}


def assert_same(ours: BatchFeature, theirs: BatchFeature, bound: float) -> None:
    assert set(ours) == set(theirs)
    for key in theirs:
        if key.startswith("pixel"):
            assert_within(ours[key], theirs[key], bound)
        else:
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("calls", [3, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", KINDS)
def test_batches_and_positions_of_chats_with_videos_are_those_of_transformers(model: str, calls: int) -> None:
    ours, theirs = both(model)
    kind = getattr(KINDS[model].modeling, f"{KINDS[model].name}Model")
    reader: Any = SimpleNamespace(config=config_of(model))
    reader.get_vision_position_ids = kind.get_vision_position_ids.__get__(reader)
    bound = normalised(ours.images.mean, ours.images.std)
    videos = 0
    for seed in range(calls):
        random = np.random.default_rng(seed)
        chats = drawn_chats(random)
        told: dict[str, Any] = {"padding": True, "return_tensors": "pt", **video_metadata(chats, random)}
        if random.random() < 0.4:
            told |= {"min_pixels": 56 * 56, "max_pixels": int(random.choice([28 * 28 * 10, 28 * 28 * 30]))}
        if model == "qwen3_vl":
            told["do_sample_frames"] = bool(random.random() < 0.5)
        want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(told))
        assert_same(ours(text=chats, **told), want, bound)
        got = ours(text=chats, return_positions=True, **told)
        grids = {name: want.get(name) for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        seconds = {"second_per_grid_ts": grids.pop("second_per_grid_ts")} if model == "qwen2_5_vl" else {}
        named = {name: want[name] for name in ("input_ids", "mm_token_type_ids", "attention_mask")}
        ids, deltas = kind.get_rope_index(reader, **named, **grids, **seconds)
        assert torch.equal(got["mm_position_ids"], ids * want["attention_mask"])
        assert torch.equal(got["deltas"], deltas[:, 0])
        again = ours.positions(
            want["input_ids"], grids["image_grid_thw"], want["attention_mask"],
            video_grid_thw=grids["video_grid_thw"], second_per_grid_ts=seconds.get("second_per_grid_ts"),
        )  # fmt: skip
        np.testing.assert_array_equal(again.table, got["positions"].table)
        videos += "video_grid_thw" in want
    assert videos > calls / 3


@pytest.mark.parametrize("model", KINDS)
def test_unpatched_models_generate_from_our_batches_as_from_theirs(model: str) -> None:
    ours, theirs = both(model)
    torch.manual_seed(0)
    made = getattr(transformers, f"{KINDS[model].name}ForConditionalGeneration")(config_of(model)).eval()
    chats = drawn_chats(np.random.default_rng(2))
    told: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(told))
    got = ours(text=chats, **told)
    assert {"pixel_values", "pixel_values_videos"} <= set(got)
    assert_within(got["pixel_values"], want["pixel_values"], normalised(ours.images.mean, ours.images.std))
    # Bits of a resized picture may differ, and so may the likeliest of random tokens.
    got["pixel_values"] = want["pixel_values"]
    tokens = [made.generate(**batch, max_new_tokens=5, do_sample=False).tolist() for batch in (got, want)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0][0]) == got["input_ids"].shape[1] + 5


@pytest.mark.filterwarnings("ignore:Passing `min_pixels`:FutureWarning")
@pytest.mark.parametrize("model", KINDS)
def test_tokens_are_counted_as_transformers_counts_them(model: str) -> None:
    ours, theirs = both(model)
    random = np.random.default_rng(0)
    images = random.integers(200, 1000, (40, 2)).tolist()
    videos = [(int(n), *size) for n, size in zip(random.integers(2, 50, 40), images, strict=True)]
    options: list[dict[str, Any]] = [
        {},
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 9},
        {"images_kwargs": {"max_pixels": 28 * 28 * 40}},
    ]
    for told in options:
        counted = [made._get_num_multimodal_tokens(images, videos, **told) for made in (ours, theirs)]
        assert counted[0] == counted[1]
    assert ours._get_num_multimodal_tokens(image_sizes=images).num_video_tokens is None
    assert "num_image_tokens" not in ours._get_num_multimodal_tokens(video_sizes=videos)
    made = ours([mmpos.ImageSize(*images[0])], QWENS[2])
    assert [sum(made["mm_token_type_ids"][0])] == ours._get_num_multimodal_tokens(images[:1]).num_image_tokens


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
        {"max_tokens": 9},
    ]
    assert [ours(image, text, **told)["image_grid_thw"].tolist() for told in few] == [[[1, 6, 6]]] * 5
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
    assert ours.image_processor_type == "Glm4vImageProcessor"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_pixels", 1.5, "max_pixels: got 1.5, want an integer"),
        ("size", {"height": 5}, r"size: got \{'height': 5\}, want shortest_edge and longest_edge"),
        ("size", 5, "size: got 5, want shortest_edge and longest_edge"),
        ("image_mean", [1], r"image_mean: got \[1\], want three finite numbers"),
        ("do_rescale", False, "image_processor.do_rescale: got False, want assignments to size, min_pixels, max_p"),
        ("patch_size", 28, "image_processor.patch_size: got 28, want assignments to size, min_pixels, max_pixels"),
        ("foo", 28, "image_processor.foo: got 28, want assignments to size, .*; all else in images=$"),
    ],
)
def test_what_cannot_be_assigned_to_the_image_processor_is_refused(name: str, value: object, message: str) -> None:
    ours, _ = both("qwen2_vl")
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        setattr(ours.image_processor, name, value)
    ours.image_processor.do_rescale = True  # as it is
    assert ours.images == both("qwen2_vl")[0].images


def test_videos_come_in_every_form(tmp_path: Path) -> None:
    ours, _ = both("qwen2_vl")
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (60, 80, 3), np.uint8) for _ in range(4)]
    paths = [tmp_path / f"{k}.png" for k in range(4)]
    for path, frame in zip(paths, frames, strict=True):
        Image.fromarray(frame).save(path)
    text = "".join(QWENS[token] for token in (0, 3, 1))
    want = ours(text=text, videos=np.stack(frames))
    pictures = [Image.fromarray(frame) for frame in frames]
    files = [path.read_bytes() for path in paths]
    chat = [{"role": "user", "content": [{"type": "video", "video": [str(path) for path in paths]}]}]
    tensor = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    forms: list[Any] = [frames, pictures, files, [frames], [[pictures]], [np.stack(frames)], tensor]
    for videos in forms:
        got = ours(text=[text], videos=videos)
        assert got["input_ids"] == want["input_ids"]
        np.testing.assert_array_equal(got["pixel_values_videos"], want["pixel_values_videos"])
    np.testing.assert_array_equal(ours(text=chat)["pixel_values_videos"], want["pixel_values_videos"])
    assert sorted(ours(videos=frames)) == ["pixel_values_videos", "video_grid_thw"]
    (known,) = ours(text=text, videos=frames, return_metadata=True, return_tensors="pt")["video_metadata"]
    assert known.total_num_frames == 4
    refused: list[tuple[Any, str]] = [
        ([frames[0], frames[1][:30]], r"^videos: got frames of \[\(30, 80, 3\), \(60, 80, 3\)\], want one size$"),
        ([[b"no"]], r"^videos\[0\]\.frames\[0\]: image: got "),
        (
            "https://a/b.mp4",
            r"^videos: got the text 'https://a/b.mp4', a URL, which is never fetched, want the path of",
        ),
        ([3], r"^videos\.frames\[0\]: image: got int, want"),
        ([np.zeros((2, 2, 2, 2, 2))], r"^videos\[0\]: got ndarray, want the path of a file, a list of frames"),
        (None, r"^videos: got 0 videos, want 1, the placeholders of text$"),
        ([[frames], [frames]], r"^videos: got 2 lists, want 1, one for each text$"),
        ([[frames, frames]], r"^videos\[0\]: got 2 videos, want 1, the placeholders of text\[0\]$"),
    ]
    for videos, message in refused:
        with pytest.raises(InvalidInputError, match=message):
            ours(text=[text], videos=videos)
    with pytest.raises(InvalidInputError, match=r"^video_metadata: got 2 of them, want 1, one for each video$"):
        ours(text=text, videos=frames, video_metadata=[{}, {}])
    with pytest.raises(InvalidInputError, match=r"^videos\[0\]: video: .*fps"):
        ours(text=text, videos=[frames], videos_kwargs={"fps": 2, "num_frames": 2, "do_sample_frames": True})
    with pytest.raises(InvalidInputError, match=r"^videos: got videos beside a chat, want them in its blocks of type"):
        ours(text=chat, videos=frames)
    with pytest.raises(
        InvalidInputError, match=r"^conversation\[0\]\.content\[0\]\.path: got int, want text or a path$"
    ):
        ours(text=[{"role": "user", "content": [{"type": "video", "path": 3}]}])


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl"])
def test_markers_are_put_around_every_grid_of_a_video(model: str) -> None:
    ours, _ = both(model)
    timestamp = "<{seconds:.1f} seconds>" if model == "qwen3_vl" else None
    marked = MMPosProcessor(
        ours.tokenizer, ours.images, "mrope-qwen3" if timestamp else "mrope", ours.markers, temporal_patch_size=2,
        video_processor=ours.video_processor, video_token=QWENS[3], timestamp=timestamp,
    )  # fmt: skip
    video = np.zeros((4, 56, 56, 3), np.uint8)
    told: dict[str, Any] = {
        "videos": video,
        "add_special_tokens": False,
        "do_sample_frames": False,
        "return_positions": True,
    }
    begin, placeholder, end = (QWENS[token] for token in (0, 3, 1))
    text = f"A{placeholder}A" if timestamp else f"A{begin}{placeholder}{end}A"
    got, want = marked(text=f"A{placeholder}A", **told), ours(text=text, **told)
    assert got["input_ids"] == want["input_ids"]
    np.testing.assert_array_equal(got["positions"].dense(), want["positions"].dense())


def test_a_row_that_ends_between_two_ids_has_a_table_and_no_next_position() -> None:
    qwen, _ = both("qwen2_vl")
    ours = MMPosProcessor(
        qwen.tokenizer, qwen.images, "tmrope-qwen3", qwen.markers, temporal_patch_size=2,
        video_processor=qwen.video_processor, video_token=QWENS[3],
    )  # fmt: skip
    text = f"A{QWENS[3]}A"
    known = {"fps": 3, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
    told: dict[str, Any] = {"do_sample_frames": False, "add_special_tokens": False}
    for video, whole in ((4, False), (2, True)):  # of four frames the second pair is 2/3 s or 26/3 ids behind the first
        frames = np.zeros((video, 28, 28, 3), np.uint8)
        batch = ours(text=text, videos=frames, video_metadata=known, **told)
        assert ("mm_next_positions" in batch, "deltas" in batch) == (whole, whole)
        assert batch["positions"].resumable.tolist() == [whole]


def test_offsets_of_a_video_are_those_of_its_placeholder() -> None:
    ours, _ = both("qwen3_vl")
    text = f"A {QWENS[3]} cat {QWENS[2]}"
    told: dict[str, Any] = {"return_offsets_mapping": True, "add_special_tokens": False}
    batch = ours(mmpos.ImageSize(56, 56), text, videos=np.zeros((4, 56, 56, 3), np.uint8), **told)
    (offsets,), (ids,) = batch["offset_mapping"], batch["input_ids"]
    spans = dict.fromkeys(map(tuple, offsets))
    assert [text[a:b] for a, b in spans if text[a:b].startswith("<|")] == [QWENS[3], QWENS[2]]
    assert {text[a:b] for (a, b), token in zip(offsets, ids, strict=True) if token in (5, 6, 8)} == {QWENS[3]}


def test_a_folder_is_all_that_a_processor_needs(tmp_path: Path) -> None:
    ours, theirs = both("qwen2_5_vl")
    config_of("qwen2_5_vl").save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    chats = drawn_chats(np.random.default_rng(3))
    made = MMPosProcessor.from_hf_config(tmp_path)
    want = ours(text=chats, padding=True, return_tensors="pt")
    assert_same(made(text=chats, padding=True, return_tensors="pt"), want, 0)
    made.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/processor_config.json").read_text())["return_positions"] is False
    again = MMPosProcessor.from_pretrained(tmp_path / "saved")
    assert_same(again(text=chats, padding=True, return_tensors="pt"), want, 0)
    with pytest.raises(InvalidInputError, match=r"^markers: got int, want Markers or its fields$"):
        MMPosProcessor.from_pretrained(tmp_path / "saved", markers=5)
    images = MMPosProcessor.from_hf_config(str(tmp_path), return_positions=True, video_processor=None)
    assert "positions" in images(text="A")


TEXT_OF_HUB = {**TEXT, "num_key_value_heads": 2, "rope_theta": 10000.0}
HUB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2},
        {"size": {"max_pixels": 28 * 28 * 50, "min_pixels": 3136}},
    ),
    "qwen2_5_vl": (
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32,
         "tokens_per_second": 2},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", ["chat_template.json", "chat_template.jinja"])
@pytest.mark.parametrize("model", HUB)
def test_a_folder_as_qwen2_vl_and_qwen2_5_vl_were_released_gives_the_batches_of_its_own_processor(
    tmp_path: Path, model: str, template: str
) -> None:
    """The text at the top of config.json, one preprocessor for images and videos, the chat template beside them."""
    vision, size = HUB[model]
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "model_type": model, "vision_config": vision, **TEXT_OF_HUB, **rope,
            **dict(zip(NAMES, range(5, 9), strict=True)), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        },
        "preprocessor_config.json": {
            "min_pixels": 3136, "max_pixels": 28 * 28 * 50, **size, "patch_size": 14, "temporal_patch_size": 2,
            "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711], "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": f"{KINDS[model].name}Processor",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": list(QWENS),
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "padding_side": "left",
        },
    }  # fmt: skip
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text(chat_tokenizer(QWENS).backend_tokenizer.to_str())
    written = json.dumps({"chat_template": TEMPLATE}) if template.endswith("json") else TEMPLATE
    (tmp_path / template).write_text(written)
    with pytest.raises(
        InvalidInputError,
        match=r"^pretrained_model_name_or_path: got '.*', with no MMPosProcessor \(ma"
        r"rkers\.begin: .*\), want one that it saved, or MMPosProcessor\.from_hf_config\(…\) of the folder of a model$",
    ):
        MMPosProcessor.from_pretrained(tmp_path)
    ours, theirs = MMPosProcessor.from_hf_config(tmp_path), transformers.AutoProcessor.from_pretrained(tmp_path)
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert type(ours.video_processor) is type(theirs.video_processor) is transformers.Qwen2VLVideoProcessor
    assert ours.video_processor.to_dict() == theirs.video_processor.to_dict()
    random, bound = np.random.default_rng(2), normalised(ours.images.mean, ours.images.std)
    picture, clip = (random.integers(0, 256, (*shape, 200, 330, 3), np.uint8) for shape in ((), (6,)))
    text = [f"A {QWENS[0]}{QWENS[2]}{QWENS[1]}", f"{QWENS[0]}{QWENS[3]}{QWENS[1]} cup"]
    told: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    assert_same(ours(picture, text, [clip], **told), theirs(picture, text, [clip], **told), bound)
    chats = drawn_chats(np.random.default_rng(2))
    want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(told))
    assert {"pixel_values", "pixel_values_videos"} <= set(want)
    assert_same(ours(text=chats, **told), want, bound)
    other = MMPosProcessor.from_hf_config(tmp_path, chat_template="{{ bos_token }}")
    assert other.apply_chat_template(chats[0]) == "<s>"


def test_the_file_of_images_is_that_of_videos_of_qwen3_vl_too_where_no_other_is(tmp_path: Path) -> None:
    config_of("qwen3_vl").save_pretrained(tmp_path)
    tokenizer = chat_tokenizer(QWENS)
    values = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "size": SIZE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    made: Any = MMPosProcessor.from_hf_config(tmp_path, tokenizer).video_processor
    assert type(made) is transformers.Qwen3VLVideoProcessor
    assert made.to_dict() == transformers.AutoVideoProcessor.from_pretrained(tmp_path).to_dict()


def test_a_chat_without_a_template_is_told_where_one_may_be() -> None:
    ours, _ = both("qwen2_vl")
    plain = MMPosProcessor(chat_tokenizer(QWENS), ours.images, ours.scheme, ours.markers)
    for call in (lambda: plain(text=[{"role": "user"}]), lambda: plain.apply_chat_template([{"role": "user"}])):
        with pytest.raises(InvalidInputError, match=r"^chat_template: got None, want one in the call, of the process"):
            call()


def test_settings_of_videos_that_do_not_fit_are_named() -> None:
    ours, _ = both("qwen2_vl")
    config, tokenizer = config_of("qwen2_vl"), ours.tokenizer
    glm = transformers.Glm4vConfig(
        text_config={"rope_parameters": {**_TIMED, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}
    )
    for told, message in (
        ({"video_processor": ours.video_processor}, r"^video_token: got None beside a video_processor, want both"),
        ({"video_token": 8}, r"^video_processor: got None beside a video_token, want both or none$"),
        ({"video_token": 8, "video_processor": 5}, r"^video_processor: got 5, want a video processor of Transformers"),
        ({"video_token": 8, "video_processor": {"video_processor_type": "AutoModel"}}, r"^video_processor: got \{"),
        ({"video_token": "no", "video_processor": ours.video_processor}, r"^video_token: got 'no', want a token that"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            MMPosProcessor(tokenizer, ours.images, ours.scheme, ours.markers, **told)
    with pytest.raises(
        InvalidInputError, match=r"^tokenizer: got None beside a config, want the tokenizer, or a folder"
    ):
        MMPosProcessor.from_hf_config(config, images=ours.images)
    with pytest.raises(UnsupportedError, match=r"^video_processor: got one for 'glm4v', want None: images only$"):
        MMPosProcessor.from_hf_config(glm, tokenizer, images=ours.images, video_processor=ours.video_processor)
    with pytest.raises(
        UnsupportedError, match=r"^config: got 'llama', want a model whose config has temporal_patch_size$"
    ):
        MMPosProcessor.from_hf_config(transformers.LlamaConfig(), tokenizer, images=ours.images)
    plain = MMPosProcessor(tokenizer, ours.images, ours.scheme, ours.markers)
    with pytest.raises(
        UnsupportedError, match=r"^video_sizes: got sizes, want None, or a processor with a video_processor$"
    ):
        plain._get_num_multimodal_tokens(video_sizes=[(2, 28, 28)])


def test_text_names_files_only_where_it_may(tmp_path: Path) -> None:
    ours, _ = both("qwen2_vl")
    path = tmp_path / "a photo.jpg"
    path.write_bytes(photo(1))
    closed = MMPosProcessor(ours.tokenizer, ours.images, ours.scheme, ours.markers, False, read_files=False)
    want = ours(path, QWENS[2])["pixel_values"]
    for text in (str(path), path.as_uri()):
        blocks = [{"type": "image", "image": text}, {"type": "image_url", "image_url": {"url": text}}]
        for block in blocks:
            chat = [{"role": "user", "content": [block]}]
            np.testing.assert_array_equal(ours(text=chat)["pixel_values"], want)
            with pytest.raises(
                InvalidInputError, match=r"content\[0\]: got the text .*: with read_files=False no text na"
            ):
                closed(text=chat)
        np.testing.assert_array_equal(ours(text, QWENS[2])["pixel_values"], want)
    with pytest.raises(InvalidInputError, match=r"content\[0\]: got the text .*: with read_files=False no text names"):
        closed(text=[{"role": "user", "content": [{"type": "image", "path": str(path)}]}])
    assert closed(path, QWENS[2])["input_ids"] == ours(path, QWENS[2])["input_ids"]
