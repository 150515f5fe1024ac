"""MMPosProcessor created from a model folder, as saved by Transformers and as released."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chat_tokenizer import QWENS, chat_tokenizer
from PIL import Image
from qwen_processors import KINDS, NAMES, SIZE, TEMPLATE, assert_same, both, config_of, drawn_chats
from tolerance import normalised

from mmpos import InvalidInputError
from mmpos.integrations.hf import MMPosProcessor


def test_a_processor_can_be_created_from_a_folder(tmp_path: Path) -> None:
    ours, theirs = both("qwen2_5_vl")
    config_of("qwen2_5_vl").save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    chats = drawn_chats(np.random.default_rng(3))
    created = MMPosProcessor.from_hf_config(tmp_path)
    want = ours(text=chats, padding=True, return_tensors="pt")
    assert_same(created(text=chats, padding=True, return_tensors="pt"), want, 0)
    created.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/processor_config.json").read_text())["return_positions"] is False
    loaded = MMPosProcessor.from_pretrained(tmp_path / "saved")
    assert_same(loaded(text=chats, padding=True, return_tensors="pt"), want, 0)
    with pytest.raises(InvalidInputError, match=r"^markers: got int, want Markers or its fields$"):
        MMPosProcessor.from_pretrained(tmp_path / "saved", markers=5)
    images = MMPosProcessor.from_hf_config(str(tmp_path / "config.json"), return_positions=True)
    assert "positions" in images(text="A")


TEXT_OF_HUB = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 400, "rope_theta": 10000.0,
}  # fmt: skip
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


def write_release(tmp_path: Path, model: str, template: str) -> None:
    """Write a folder as released: text fields at the top of config.json, and one preprocessor for images and videos."""
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
            "processor_class": f"{KINDS[model]}Processor",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": list(QWENS),
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "padding_side": "left",
        },
    }  # fmt: skip
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text(chat_tokenizer(QWENS).backend_tokenizer.to_str())
    content = json.dumps({"chat_template": TEMPLATE}) if template.endswith("json") else TEMPLATE
    (tmp_path / template).write_text(content)


@pytest.mark.parametrize("template", ["chat_template.json", "chat_template.jinja"])
@pytest.mark.parametrize("model", HUB)
def test_a_folder_as_released_gives_the_same_batches_as_its_own_processor(
    tmp_path: Path, model: str, template: str
) -> None:
    write_release(tmp_path, model, template)
    message = (
        r"^pretrained_model_name_or_path: got '.*', which contains no MMPosProcessor \(markers\.begin: .*\), want a "
        r"folder in which one was saved, or MMPosProcessor\.from_hf_config\(…\) for the folder of a model$"
    )
    with pytest.raises(InvalidInputError, match=message):
        MMPosProcessor.from_pretrained(tmp_path)
    ours, theirs = MMPosProcessor.from_hf_config(tmp_path), transformers.AutoProcessor.from_pretrained(tmp_path)
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert type(ours.video_processor) is type(theirs.video_processor) is transformers.Qwen2VLVideoProcessor
    assert ours.video_processor.to_dict() == theirs.video_processor.to_dict()
    random, bound = np.random.default_rng(2), normalised(ours.images.mean, ours.images.std)
    picture, clip = (random.integers(0, 256, (*shape, 200, 330, 3), np.uint8) for shape in ((), (6,)))
    text = [f"A {QWENS[0]}{QWENS[2]}{QWENS[1]}", f"{QWENS[0]}{QWENS[3]}{QWENS[1]} cup"]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
    assert_same(ours(picture, text, [clip], **options), theirs(picture, text, [clip], **options), bound)
    chats = drawn_chats(np.random.default_rng(2))
    want = theirs.apply_chat_template(chats, tokenize=True, return_dict=True, processor_kwargs=dict(options))
    assert {"pixel_values", "pixel_values_videos"} <= set(want)
    assert_same(ours(text=chats, **options), want, bound)
    other = MMPosProcessor.from_hf_config(tmp_path, chat_template="{{ bos_token }}")
    assert other.apply_chat_template(chats[0]) == "<s>"


def test_the_example_on_the_page_runs_on_a_qwen2_5_vl_folder_as_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Qwen2.5-VL-7B-Instruct"
    folder.mkdir()
    write_release(folder, "qwen2_5_vl", "chat_template.json")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    names: dict[str, Any] = {"MMPosProcessor": MMPosProcessor}
    names["model"] = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    random = np.random.default_rng(0)
    frames = [f"{k}.png" for k in range(4)]
    for name in ("slide.png", *frames):
        Image.fromarray(random.integers(0, 256, (60, 90, 3), np.uint8)).save(tmp_path / name)
    page = Path(__file__).parents[2] / "docs/transformers-processor.md"
    (example,) = re.findall(r"```python no-run\n(processor = .*?)```", page.read_text("utf-8"), re.DOTALL)
    assert example.count('"talk.mp4"') == 1
    example = example.replace('"talk.mp4"', repr(frames))  # a video file requires a decoder
    monkeypatch.chdir(tmp_path)
    exec(example.replace("generate(**batch", "generate(**batch, max_new_tokens=3, do_sample=False"), names)
    batch = names["batch"]
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert batch["video_grid_thw"].tolist() == [[2, 4, 6]]
    assert names["answer"].shape == (1, batch["input_ids"].shape[1] + 3)


def test_the_qwen3_vl_video_processor_falls_back_to_the_file_for_images(tmp_path: Path) -> None:
    config_of("qwen3_vl").save_pretrained(tmp_path)
    tokenizer = chat_tokenizer(QWENS)
    values = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "size": SIZE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    videos: Any = MMPosProcessor.from_hf_config(tmp_path, tokenizer).video_processor
    assert type(videos) is transformers.Qwen3VLVideoProcessor
    assert videos.to_dict() == transformers.AutoVideoProcessor.from_pretrained(tmp_path).to_dict()


def test_the_error_for_a_missing_chat_template_lists_its_sources() -> None:
    ours, _ = both("qwen2_vl")
    plain = MMPosProcessor(chat_tokenizer(QWENS), ours.images, ours.scheme, ours.markers)
    for call in (lambda: plain(text=[{"role": "user"}]), lambda: plain.apply_chat_template([{"role": "user"}])):
        with pytest.raises(InvalidInputError, match=r"^chat_template: got None, want a template from the call, the p"):
            call()
