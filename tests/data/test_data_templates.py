"""Chats rendered by a tokenizer's chat template: tokens equal those from the processor, labels cover the answers."""

from __future__ import annotations

import pickle
import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
from chat_tokenizer import QWENS, chat_tokenizer

from mmpos import ByteTokenizer, Grid, ImageProcessor, InvalidInputError, Markers, SequenceBuilder
from mmpos.data import Chat, ChatTemplate, LLaVA, Location, Preprocess, RecordError, TokenizerTemplate
from mmpos.integrations.hf import MMPosProcessor
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


def turn(role: str, *content: Any) -> dict[str, Any]:
    blocks = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in content
    ]
    return {"role": role, "content": blocks}


def answers(example: Any, inner: Any) -> list[str]:
    """Decode each run of labels."""
    labels = example.labels
    runs = np.split(labels, np.flatnonzero(np.diff(labels == -100)) + 1)
    return [inner.decode(run) for run in runs if run[0] != -100]


CHAT = [
    turn("user", "What is ", PHOTO, "this?"),
    turn("assistant", "A cat"),
    turn("user", "a cup"),
    turn("assistant", "it"),
]


def test_labels_cover_answers_and_the_text_that_ends_them() -> None:
    own = builder()
    example = Preprocess(Chat(), own)({"messages": CHAT}, HERE)
    inner = tokenizer()
    patches = f"{BEGIN}{PATCH * 6}{END}"
    want = (
        f"<|user|>\nWhat is {patches}this?</s>\n<|assistant|>\nA cat</s>\n<|user|>\na cup</s>\n<|assistant|>\nit</s>\n"
    )
    assert inner.decode(example.sequence.input_ids) == want
    assert answers(example, inner) == ["A cat</s>\n", "it</s>\n"]
    assert example.sequence.grid_thw.tolist() == [[1, 2, 3]]


def test_tokens_match_those_from_the_processor() -> None:
    draw = random.Random(0)
    own, processor = builder(), MMPosProcessor(tokenizer(), IMAGES, markers=Markers(None, None, PATCH))
    preprocess = Preprocess(Chat(), own)
    for _ in range(30):
        chat = []
        for number in range(draw.randint(1, 5)):
            content: list[Any] = draw.choices(
                ["A cat", " looks at you", "a cup of", PHOTO, PHOTO[:8]], k=draw.randint(1, 4)
            )
            chat.append(turn("assistant", "it") if number % 2 else turn("user", *content))
        example = preprocess({"messages": chat}, HERE)
        options: dict[str, Any] = {"processor_kwargs": {"add_special_tokens": False}}
        batch: Any = processor.apply_chat_template(chat, tokenize=True, return_dict=True, **options)
        assert [example.sequence.input_ids.tolist()] == batch["input_ids"]
        if "patches" in batch:
            np.testing.assert_array_equal(example.sequence.patches, batch["patches"])


def test_dropping_an_image_removes_its_template_text() -> None:
    chat = [turn("user", "What is ", b"broken", "this?"), turn("assistant", "A cat")]
    example = Preprocess(Chat(), builder(), on_image_error="drop")({"messages": chat}, HERE)
    assert tokenizer().decode(example.sequence.input_ids) == "<|user|>\nWhat is this?</s>\n<|assistant|>\nA cat</s>\n"


OMNI = CHATML.replace(
    "{% else %}{{ c.text }}",
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif c.type == 'audio' %}<audio>"
    "{% else %}{{ c.text }}",
)
"""Chat template in the style of Qwen2.5-Omni."""


def read_media(part: Any) -> object:
    """Return a Clip for a video, and an Audio with one token per letter for audio."""
    return Clip(1, 2, frames=2, audio=3, seconds_per_frame=1) if part["type"] == "video" else Audio(len(part["audio"]))


def omni(chat: list[dict[str, Any]], template: str = OMNI) -> Any:
    markers = Markers(BEGIN, END, PATCH, video=QWENS[3], audio=900, audio_begin=901, audio_end=902)
    own = builder(template, markers=markers, scheme=TMRope(tokens_per_second=2, seconds_per_chunk=1))
    return Preprocess(Chat(media=read_media), own)({"messages": chat}, HERE).sequence


def test_videos_and_audio_replace_their_placeholders_in_the_template() -> None:
    chat = [turn("user", "a cat", Grid(2, 3), "a cup"), turn("assistant", "it")]
    chat[0]["content"][1:1] = [{"type": "audio", "audio": "wau"}, {"type": "video", "video": "a.mp4"}]
    sequence = omni(chat)
    begin, end, patch, video = (tokenizer().convert_tokens_to_ids(name) for name in QWENS)
    clip = [begin, 901, video, video, 900, 900, video, video, 900, 902, end]
    before, after = (
        tokenizer().encode(text, add_special_tokens=False)
        for text in ("<|user|>\na cat", "a cup</s>\n<|assistant|>\nit</s>\n")
    )
    want = [*before, 901, *[900] * 3, 902, *clip, begin, *[patch] * 6, end, *after]
    assert sequence.input_ids.tolist() == want


def test_a_template_without_video_support_is_refused() -> None:
    chat = [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]
    with pytest.raises(InvalidInputError, match="writes nothing for a video, want the template of a model with videos"):
        omni(chat, CHATML.replace("{{ c.text }}", "{{ c.text or '' }}"))


def test_a_video_placeholder_in_the_text_of_a_chat_with_a_video_is_refused() -> None:
    chat = [turn("user", "<|vision_start|><|video_pad|><|vision_end|>")]
    chat[0]["content"].append({"type": "video", "video": "a.mp4"})
    with pytest.raises(
        RecordError, match="got 2 placeholders in the text of the chat template, want 1, one for each of the videos"
    ):
        omni(chat)


def test_llava_also_uses_the_template() -> None:
    record = {
        "image": PHOTO,
        "conversations": [{"from": "human", "value": "<image>\na cup"}, {"from": "gpt", "value": "it"}],
    }
    example = Preprocess(LLaVA(), builder())(record, HERE)
    assert tokenizer().decode(example.sequence.input_ids).startswith(f"<|user|>\n{BEGIN}{PATCH}")
    assert answers(example, tokenizer()) == ["it</s>\n"]


def test_templates_for_text_models_receive_strings() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"  # noqa: E501
    own = builder(template)
    example = Preprocess(Chat(), own)({"messages": [turn("user", " A", " cat "), turn("assistant", "it")]}, HERE)
    assert tokenizer().decode(example.sequence.input_ids) == "<|user|>A cat</s><|assistant|>it</s>"
    with pytest.raises(
        InvalidInputError, match=r"^template: got a chat template that writes nothing for an image, want"
    ):
        Preprocess(Chat(), own)({"messages": [turn("user", "A", PHOTO)]}, HERE)


def test_template_arguments_are_passed_on() -> None:
    template = "{{ name }}: {% for m in messages %}{{ m.content }}{% endfor %}"
    named = TokenizerTemplate(tokenizer(template), {"name": "Ann"})
    document = Chat(named)({"messages": [{"role": "user", "content": "A cat"}]}, HERE)
    assert document.parts == ["Ann: A cat"]
    assert pickle.loads(pickle.dumps(Chat(named)))({"messages": [turn("user", "A cat")]}, HERE).parts == ["Ann: A cat"]


@pytest.mark.parametrize(
    ("chat", "template", "message"),
    [
        ([turn("assistant", "A")], CHATML, r"messages\[0\]\.role: got 'assistant', want a turn with another role"),
        (
            [turn("user", f"{BEGIN}{PATCH}{END}", PHOTO)],
            CHATML,
            r"messages\[0\]\.role: got 2 placeholders in the text of the chat template, want 1, one for each of",
        ),
        (
            [turn("user", "A")],
            "{{ raise_exception('no users') }}",
            r"messages\[0\]\.role: got TemplateError \(no users\) from the chat template, want a conversation that the",
        ),
        (
            [turn("user", "A"), turn("assistant", "B"), turn("user", "C")],
            "{{ messages | length }}",
            r"messages\[1\]\.role: got 'assistant', want a chat template that writes a turn independently",
        ),
    ],
)  # fmt: skip
def test_chats_that_the_template_does_not_support_are_refused(chat: Any, template: str, message: str) -> None:
    with pytest.raises(RecordError, match=rf"^shard\.jsonl\[3\]: {message}"):
        Chat(TokenizerTemplate(tokenizer(template)))({"messages": chat}, HERE)


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
