"""`mmpos preprocess --config`: a model folder determines tokens, images and positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from qwen_processors import config_of, processor_of
from tiny_models import tiny_config

from mmpos.__main__ import main
from mmpos.data import SequenceShard

PHOTOS = Path(__file__).parents[2] / "mmpos/photos"
CONTENT = [{"type": "image", "image": "coffee.jpg"}, {"type": "text", "text": "What is this?"}]
CHAT = [{"role": "user", "content": CONTENT}, {"role": "assistant", "content": "A cup of coffee."}]
BESIDE = [{"role": "user", "content": "<image>What is this?"}, CHAT[1]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    config_of("qwen2_vl").save_pretrained("model")
    processor_of("qwen2_vl").save_pretrained("model")
    return Path("model")


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Preprocess the chat, and return what the command prints to stderr."""
    command = ["preprocess", "chat.jsonl", "-o", "out", "-f", "chat", "--images-from", str(PHOTOS), "--config", "model"]
    main([*command, *options])
    return capsys.readouterr().err


@pytest.mark.parametrize("record", [{"messages": CHAT}, {"messages": BESIDE, "images": ["coffee.jpg"]}])
def test_preprocessing_with_a_model_folder_matches_the_model_processor(
    record: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("chat.jsonl").write_text(json.dumps(record))
    assert ", 1 document" in run(capsys, "--image-option", "backend=pillow")
    (example,) = SequenceShard("out/chat.parquet").examples()
    processor = processor_of("qwen2_vl")
    text = processor.apply_chat_template(CHAT, tokenize=False)
    want: Any = processor(
        text=[text], images=[Image.open(PHOTOS / "coffee.jpg")], add_special_tokens=False, return_tensors="np"
    )
    assert example.sequence.input_ids.tolist() == want["input_ids"][0].tolist()
    assert (example.sequence.grid_thw * [1, 2, 2]).tolist() == want["image_grid_thw"].tolist()
    assert example.sequence.positions.scheme == "mrope-transformers"
    assert example.sequence.patches is not None
    assert np.flatnonzero(example.labels >= 0)[0] > example.sequence.image_spans[0, 1]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/config.json", None, "--config: model: got a folder without config.json, want the folder of a model"),
        ("model/config.json", '{"model_type": "eliza"}', "--config: "),
        ("model/tokenizer.json", "{", "--config: model/tokenizer.json: got "),
        ("chat.jsonl", json.dumps({"messages": BESIDE, "images": []}),
         "chat.jsonl[0]: images: got 0 items, want 1, one for each <image> and each image part without data"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("folder")
def test_errors_name_an_unreadable_file(
    capsys: pytest.CaptureFixture[str], file: str, content: str | None, message: str
) -> None:
    Path(file).unlink() if content is None else Path(file).write_text(content)
    announced, error = run(capsys).splitlines()
    assert announced.startswith("reading 1 input (chat.jsonl) into out")
    assert error.startswith(f"mmpos: error: {message}")
    assert not Path("out").exists()


def test_a_text_model_accepts_only_text(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    processor_of("qwen2_vl").tokenizer.save_pretrained("model")
    tiny_config("llama").save_pretrained("model")
    Path("chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "What is this?"}]}))
    assert ", 1 document" in run(capsys)
    (example,) = SequenceShard("out/chat.parquet").examples()
    assert example.sequence.positions.axes == 1
    printed = run(capsys, "--image-option", "max_tokens=8")
    assert "\nmmpos: error: --config: got a text-only model with --image-option, want a model with images\n" in printed
