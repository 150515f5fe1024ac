"""Chats in a tokenizer's chat template, or by a model folder: tokens equal the processor's, labels cover answers."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import QWENS, chat_tokenizer
from data_corpus import PHOTOS
from PIL import Image
from qwen_processors import config_of, processor_of
from tiny_models import tiny_config

from mmpos import ByteTokenizer, Grid, ImageProcessor, InvalidInputError, Markers, SequenceBuilder
from mmpos.__main__ import main
from mmpos.data import Chat, ChatTemplate, LLaVA, Location, Preprocess, RecordError, SequenceShard, TokenizerTemplate
from mmpos.data.examples import Format
from mmpos.schemes import TMRope
from mmpos.segments import Audio, Clip

HERE = Location("shard.jsonl", 3)
BEGIN, END, PATCH, _ = QWENS
IMAGES = ImageProcessor("pillow", patch_size=4, min_pixels=64)
MARKERS = Markers(BEGIN, END, PATCH)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Chat template in the style of Qwen2-VL."""

PHOTO = np.zeros((16, 24, 3), np.uint8)


def tokenizer(template: str | None = CHATML) -> Any:
    return chat_tokenizer(QWENS, chat_template=template)


def builder(template: str | None = CHATML, **options: Any) -> SequenceBuilder:
    return SequenceBuilder(tokenizer(template), images=IMAGES, **{"markers": MARKERS, **options})


def block(part: Any) -> dict[str, Any]:
    kind = "text" if isinstance(part, str) else "image"
    return part if isinstance(part, dict) else {"type": kind, kind: part}


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [*map(block, content)]}


def answers(example: Any, inner: Any) -> list[str]:
    """Decode each run of labels."""
    labels = example.labels
    runs = np.split(labels, np.flatnonzero(np.diff(labels == -100)) + 1)
    return [inner.decode(run) for run in runs if run[0] != -100]


LLAVA = [{"from": "human", "value": "<image>\na cup"}, {"from": "gpt", "value": "it"}]
TRIMMED = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE = f"{BEGIN}{PATCH * 6}{END}"


@pytest.mark.parametrize(
    ("read", "template", "record", "text", "trained"),
    [
        (Chat(), CHATML, {"messages": [turn("user", "What is ", PHOTO, "this?"), turn("assistant", "A cat"),
                                       turn("user", "a cup"), turn("assistant", "it")]},
         f"<|user|>\nWhat is {IMAGE}this?</s>\n<|assistant|>\nA cat</s>\n<|user|>\na cup</s>\n<|assistant|>\nit</s>\n",
         ["A cat</s>\n", "it</s>\n"]),
        (Chat(), CHATML, {"messages": [turn("user", "What is ", b"broken", "this?"), turn("assistant", "A cat")]},
         "<|user|>\nWhat is this?</s>\n<|assistant|>\nA cat</s>\n", ["A cat</s>\n"]),  # the image is dropped
        (LLaVA(), CHATML, {"image": PHOTO, "conversations": LLAVA},
         f"<|user|>\n{IMAGE}\na cup</s>\n<|assistant|>\nit</s>\n", ["it</s>\n"]),
        (Chat(), TRIMMED, {"messages": [turn("user", " A", " cat "), turn("assistant", "it")]},
         "<|user|>A cat</s><|assistant|>it</s>", ["it</s>"]),  # of a text model, which receives strings
        (Chat(), CHATML, {"messages": [turn("user", "A cat"), turn("assistant", "it"), turn("ipython", "a cup")]},
         "<|user|>\nA cat</s>\n<|assistant|>\nit</s>\n<|ipython|>\na cup</s>\n", ["it</s>\n"]),  # a role of its own
    ],
)  # fmt: skip
def test_labels_cover_answers_and_the_text_that_ends_them(
    read: Format, template: str, record: dict[str, Any], text: str, trained: list[str]
) -> None:
    example, inner = Preprocess(read, builder(template), on_image_error="drop")(record, HERE), tokenizer()
    assert inner.decode(example.sequence.input_ids).replace(" ", "") == text.replace(" ", "")
    assert answers(example, inner) == trained


OMNI = CHATML.replace(
    "{% else %}{{ c.text }}",
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif c.type == 'audio' %}<audio>"
    "{% else %}{{ c.text }}",
)
"""Chat template in the style of Qwen2.5-Omni."""


VIDEO = {"type": "video", "video": "a.mp4"}


def read_media(part: Any) -> object:
    """Return a Clip for a video, and an Audio with one token per letter for audio."""
    return Clip(1, 2, frames=2, audio=3, seconds_per_frame=1) if part["type"] == "video" else Audio(len(part["audio"]))


def omni(chat: list[dict[str, Any]], template: str = OMNI) -> Any:
    markers = Markers(BEGIN, END, PATCH, video=QWENS[3], audio=900, audio_begin=901, audio_end=902)
    own = builder(template, markers=markers, scheme=TMRope(tokens_per_second=2, seconds_per_chunk=1))
    return Preprocess(Chat(media=read_media), own)({"messages": chat}, HERE).sequence


def test_videos_and_audio_replace_their_placeholders_in_the_template() -> None:
    spoken = {"type": "audio", "audio": "wau"}
    sequence = omni([turn("user", "a cat", spoken, VIDEO, Grid(2, 3), "a cup"), turn("assistant", "it")])
    begin, end, patch, video = (tokenizer().convert_tokens_to_ids(name) for name in QWENS)
    clip = [begin, 901, video, video, 900, 900, video, video, 900, 902, end]
    before, after = (
        tokenizer().encode(text, add_special_tokens=False)
        for text in ("<|user|>\na cat", "a cup</s>\n<|assistant|>\nit</s>\n")
    )
    want = [*before, 901, *[900] * 3, 902, *clip, begin, *[patch] * 6, end, *after]
    assert sequence.input_ids.tolist() == want


def test_template_arguments_are_passed_on() -> None:
    template = "{{ name }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    named = TokenizerTemplate(tokenizer(template), {"name": "Ann"})
    document = Chat(named)({"messages": [{"role": "user", "content": "A cat"}]}, HERE)
    assert document.parts == ["Ann: A cat"]
    assert pickle.loads(pickle.dumps(Chat(named)))({"messages": [turn("user", "A cat")]}, HERE).parts == ["Ann: A cat"]


AT = r"shard\.jsonl\[3\]: messages\[0\]\.role:"
SILENT = CHATML.replace("{{ c.text }}", "{{ c.text or '' }}")


@pytest.mark.parametrize(
    ("chat", "template", "error", "message"),
    [
        ([turn("assistant", "A")], CHATML, RecordError, f"{AT} got 'assistant', want a turn with another role"),
        ([turn("user", f"{BEGIN}{PATCH}{END}", PHOTO)], CHATML, RecordError,
         f"{AT} got 2 placeholders in the text of the chat template, want 1, one for each of the images"),
        ([turn("user", f"{BEGIN}<|video_pad|>{END}", VIDEO)], OMNI, RecordError,
         f"{AT} got 2 placeholders in the text of the chat template, want 1, one for each of the videos"),
        ([turn("user", "A")], "{{ raise_exception('no users') }}", RecordError,
         rf"{AT} got TemplateError \(no users\) from the chat template, want a conversation that the"),
        ([turn("user", "A"), turn("assistant", "B"), turn("user", "C")], "{{ messages | length }}", RecordError,
         rf"{AT.replace('0', '1')} got 'assistant', want a chat template that writes a turn independently"),
        ([turn("user", "A"), turn("gpt", "B")], CHATML, RecordError,
         rf"{AT.replace('0', '1')} got 'gpt', want one of system, developer, user, assistant, tool$"),
        ([turn("user", VIDEO)], SILENT, InvalidInputError,
         "template: got a chat template that writes nothing for a video, want the template of a model with videos"),
        ([turn("user", "A", PHOTO)], TRIMMED, InvalidInputError,
         "template: got a chat template that writes nothing for an image, want"),
    ],
)  # fmt: skip
def test_unsupported_chats_are_refused(chat: Any, template: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        omni(chat, template)


def test_each_preprocess_warns_once_about_the_default_template() -> None:
    want = re.escape("template: got None and a tokenizer without a chat template, so turns are written as plain text")
    for own in (SequenceBuilder(ByteTokenizer(), images=IMAGES), builder(None)):
        with pytest.warns(UserWarning, match=want) as caught:
            preprocess = Preprocess(Chat(), own)
        (warning,) = caught
        assert warning.filename == __file__
        example = preprocess({"messages": [{"role": "user", "content": "A"}]}, HERE)
        assert preprocess.format == Chat(ChatTemplate())
        assert example.num_tokens > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Preprocess(Chat(ChatTemplate()), builder()).format == Chat(ChatTemplate())


def test_tokenizers_without_a_template_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^tokenizer: got ByteTokenizer, want a Transformers tokenizer with a"):
        TokenizerTemplate(ByteTokenizer())
    with pytest.raises(InvalidInputError, match=r"^tokenizer: got \w+: "):
        TokenizerTemplate(tokenizer(None))


# The command with a model folder

CONTENT = [{"type": "image", "image": "coffee.jpg"}, {"type": "text", "text": "What is this?"}]
CHAT = [{"role": "user", "content": CONTENT}, {"role": "assistant", "content": "A cup of coffee."}]
BESIDE = [{"role": "user", "content": "<image>What is this?"}, CHAT[1]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work in a folder with a chat and a model; return the model's processor."""
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(json.dumps({"messages": CHAT}))
    config_of("qwen2_vl").save_pretrained("model")
    processor = processor_of("qwen2_vl")
    processor.save_pretrained("model")
    return processor


def run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Preprocess the chat, and return what the command prints to stderr."""
    command = ["preprocess", "chat.jsonl", "-o", "out", "-f", "chat", "--images-from", str(PHOTOS), "--config", "model"]
    main([*command, *options])
    return capsys.readouterr().err


@pytest.mark.parametrize("record", [{"messages": CHAT}, {"messages": BESIDE, "images": ["coffee.jpg"]}])
def test_preprocessing_with_a_model_folder_matches_the_model_processor(
    record: dict[str, Any], model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("chat.jsonl").write_text(json.dumps(record))
    assert ", 1 document" in run(capsys, "--image-option", "backend=pillow")
    (example,) = SequenceShard("out/chat.parquet").examples()
    text = model.apply_chat_template(CHAT, tokenize=False)
    want = model(text=[text], images=[Image.open(PHOTOS / "coffee.jpg")], add_special_tokens=False, return_tensors="np")
    assert example.sequence.input_ids.tolist() == want["input_ids"][0].tolist()
    assert (example.sequence.grid_thw * [1, 2, 2]).tolist() == want["image_grid_thw"].tolist()
    assert example.sequence.positions.scheme == "mrope-transformers"
    assert example.sequence.patches is not None
    assert np.flatnonzero(example.labels >= 0)[0] > example.sequence.image_spans[0, 1]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model/config.json", None, "--config: model: got a folder without config.json, want the folder of a model"),
        ("model/tokenizer.json", "{", "--config: model/tokenizer.json: got "),
        ("chat.jsonl", json.dumps({"messages": BESIDE, "images": []}),
         "chat.jsonl[0]: images: got 0 items, want 1, one for each <image> and each image part without data"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("model")
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
