"""Compare MMPosProcessor with the processors of Qwen2-VL, GLM-4V and PaddleOCR-VL on random calls."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chat_tokenizer import QWENS, chat_tokenizer
from model_configs import config_of
from qwen_processors import NAMES, both
from tokenizers.processors import TemplateProcessing
from tolerance import assert_within, normalised

from mmpos.integrations.hf import MMPosProcessor

transformers = pytest.importorskip("transformers")
PaddingStrategy = pytest.importorskip("transformers.utils").PaddingStrategy

IMAGES = transformers.Qwen2VLImageProcessor()
PIXELS = normalised(IMAGES.image_mean, IMAGES.image_std)
IMAGE = "".join(QWENS[token] for token in (0, 2, 1))
MARKED = {"extra_special_tokens": {"image_token": QWENS[2], "video_token": QWENS[3]}}


def test_initial_options_of_the_tokenizer_are_the_defaults_of_a_call() -> None:
    ours, theirs = both("qwen2_vl", chat_tokenizer(QWENS, **MARKED, padding="max_length", max_length=117))
    got, want = (processor(text=["A cat"], return_tensors="np") for processor in (ours, theirs))
    assert got["input_ids"].shape == want["input_ids"].shape == (1, 117)
    options: dict[str, Any] = {"padding": "longest", "truncation": None, "max_length": 2}
    assert ours(text=["A cat"], **options)["input_ids"] == ours(text=["A cat"], padding=False)["input_ids"]
    ours.tokenizer.padding_side = "left"  # a call uses the attribute's current value
    assert ours(text=["A cat"])["attention_mask"][0][0] == 0


TOKENIZER_OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "padding": (0.3, [True, False, "longest", "max_length", "do_not_pad"]),
    "max_length": (0.3, [3, 6, 12, 24, 40]),
    "truncation": (0.15, [True, False, "longest_first", "do_not_truncate"]),
    "padding_side": (0.7, ["left", "right"]),
    "truncation_side": (0.6, ["left", "right"]),
    "pad_to_multiple_of": (0.15, [4, 8]),
    "model_max_length": (0.3, [10, 30, 100]),
}
CALL_OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "padding": (0.6, [True, False, "longest", "max_length", "do_not_pad", PaddingStrategy.MAX_LENGTH]),
    "max_length": (0.5, [1, 2, 3, 5, 9, 14, 24, 33, 50]),
    "truncation": (0.5, [True, False, None, "longest_first", "only_first", "do_not_truncate"]),
    "padding_side": (0.4, ["left", "right", None]),
    "pad_to_multiple_of": (0.2, [4, 8, None]),
    "return_tensors": (0.6, ["pt", "np", None]),
    "add_special_tokens": (0.3, [True, False]),
}
WORDS = ["What", "is", "this", "A", "cat", "looks", "at", "you", "and", "a", "cup", "of", "coffee", "stands", "it"]


def drawn(random: np.random.Generator, choices: dict[str, tuple[float, list[object]]]) -> dict[str, Any]:
    """Draw some of the options, and a value for each."""
    return {
        name: values[random.integers(len(values))]
        for name, (share, values) in choices.items()
        if random.random() < share
    }


def drawn_tokenizer(random: np.random.Generator) -> Any:
    """Draw a tokenizer, with or without limits from its file or its arguments, and with or without <s> and </s>."""
    backend = chat_tokenizer(QWENS).backend_tokenizer
    template = ["$A", "<s> $A", "<s> $A </s>"][random.integers(3)]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    sides = ["left", "right"]
    if random.random() < 0.2:
        backend.enable_truncation([6, 15, 40][random.integers(3)], direction=sides[random.integers(2)])
    if random.random() < 0.2:
        length = [None, 20, 50][random.integers(3)]
        backend.enable_padding(direction=sides[random.integers(2)], pad_id=2, pad_token="<pad>", length=length)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = drawn(random, TOKENIZER_OPTIONS)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names, **MARKED, **settings)


def drawn_rows(random: np.random.Generator) -> tuple[list[npt.NDArray[np.uint8]], list[str]]:
    """Draw images, and one to three texts with their placeholders."""
    photos: list[npt.NDArray[np.uint8]] = []
    texts = []
    for _ in range(random.integers(1, 4)):
        pieces = [str(word) for word in random.choice(WORDS, random.integers(8))]
        for _ in range([0, 0, 1, 2][random.integers(4)]):
            pieces.insert(random.integers(len(pieces) + 1), IMAGE)
            photos.append(random.integers(0, 256, (*random.integers(28, 90, 2), 3), np.uint8))
        texts.append(" ".join(pieces) or "A")
    return photos, texts


def batch_or_error(processor: Any, images: Any, texts: list[str], options: dict[str, Any]) -> Any:
    """Return the batch of a call, or the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Transformers warns about an unused max_length
            return processor(images or None, texts, **options)
    except ValueError as error:
        return error


def to_list(value: object) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def outcome(got: Any, want: Any) -> str:
    """Compare two batches or errors; return "equal" if all keys have equal values of the same types."""
    if isinstance(got, ValueError):
        if isinstance(want, ValueError):
            return "both refuse"
        lengths = [len(row) for row in want["input_ids"]]
        if "want True for return_tensors='np'" in str(got) and len(set(lengths)) > 1:
            return "we refuse an array of rows of different lengths"
        limit = re.search(r"max_length(?: =|: got) (\d+)", str(got))
        if limit is not None and max(lengths) > int(limit[1]):
            return "we refuse rows longer than max_length"
        return str(got)
    if isinstance(want, ValueError):
        return f"only they refuse: {want}"
    for key in want:
        ours, theirs = got[key], want[key]
        if key == "pixel_values":
            assert_within(ours, theirs, PIXELS)
        elif to_list(ours) != to_list(theirs) or (key != "image_grid_thw" and type(ours) is not type(theirs)):
            return f"{key}: {ours} and {theirs}"
    return "equal"


@pytest.mark.parametrize("calls", [80, pytest.param(300, marks=pytest.mark.slow)])
def test_batches_of_random_calls_equal_those_of_transformers(calls: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(calls):
        random = np.random.default_rng(seed)
        ours, theirs = both("qwen2_vl", drawn_tokenizer(random))
        (photos, texts), options = drawn_rows(random), drawn(random, CALL_OPTIONS)
        if seed % 3 == 0:
            options = {"text_kwargs": options}
        got, want = (batch_or_error(processor, photos, texts, options) for processor in (ours, theirs))
        result = outcome(got, want)
        assert result in ("equal", "both refuse") or result.startswith("we refuse"), (seed, options, texts, result)
        counts[result] += 1
    assert counts["equal"] > calls / 2


OTHERS = {
    "glm4v": ("image_start_token_id", "image_end_token_id", "image_token_id", "video_token_id"),
    "paddleocr_vl": NAMES,
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # raised by GLM-4V's processor
@pytest.mark.parametrize("model", OTHERS)
def test_glm_and_paddleocr_folders_give_the_same_batches_as_their_own_processors(tmp_path: Path, model: str) -> None:
    """The video processor in the GLM-4V folder is ignored, since GLM-4V videos are not supported."""
    config, kind = config_of(model), {"glm4v": "Glm4v", "paddleocr_vl": "PaddleOCRVL"}[model]
    for name, token in zip(OTHERS[model], range(5, 9), strict=True):
        setattr(config, name, token)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    images, tokenizer = getattr(transformers, f"{kind}ImageProcessor")(), chat_tokenizer(QWENS, **MARKED)
    images.save_pretrained(tmp_path)
    if model == "glm4v":
        transformers.Glm4vVideoProcessor().save_pretrained(tmp_path)
        assert (tmp_path / "video_preprocessor_config.json").exists()
    videos = [transformers.Glm4vVideoProcessor()] if model == "glm4v" else []
    theirs = getattr(transformers, f"{kind}Processor")(images, tokenizer, *videos)
    ours = MMPosProcessor.from_hf_config(tmp_path, tokenizer)
    rows = [f"{IMAGE} a cat", f"A cup {IMAGE}, {IMAGE}"]
    random = np.random.default_rng(0)
    photos = [random.integers(0, 256, shape, np.uint8) for shape in ((70, 120, 3), (9, 605, 3), (200, 60, 3))]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    got, want = ours(photos, rows, **options), theirs([photos[:1], photos[1:]], rows, **options)
    assert set(got) == set(want)
    bound = normalised(ours.images.mean, ours.images.std)
    for key in sorted(want):
        assert got[key].shape == want[key].shape, key
        if key == "pixel_values":
            assert_within(got[key], want[key], bound)
        else:
            assert torch.equal(got[key], want[key]), key
