"""Formats: documents made from the records of each corpus, and errors for invalid records."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmpos import Grid, ImageProcessor, ImageSize, InvalidInputError, SequenceBuilder, Video
from mmpos.data.examples import Document, Format, Location, Preprocess, RecordError
from mmpos.data.formats import (
    FORMATS,
    MMC4,
    Chat,
    ChatTemplate,
    FineVision,
    HFImages,
    LLaVA,
    Obelics,
    Pairs,
    TarDocuments,
    Texts,
    Turn,
)
from mmpos.data.formats.images import Images
from mmpos.errors import ServiceUnavailableError
from mmpos.segments import Audio, Clip

HERE = Location("shard-3.jsonl", 17)
PHOTOS = Path(str(resources.files("mmpos"))) / "photos"
COFFEE, CAT = ((PHOTOS / name).read_bytes() for name in ("coffee.jpg", "chelsea.jpg"))
LOCAL = Images(PHOTOS)
PNG_BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PNG = base64.b64decode(PNG_BASE64)
TALKS = ("chat", "llava", "finevision")
PNG_URL = f"data:image/png;base64,{PNG_BASE64}"
BUILDER = SequenceBuilder(images=ImageProcessor("pillow", min_pixels=28 * 28, max_pixels=64 * 28 * 28))


def pieces(document: Document) -> list[Any]:
    """Return the parts in order; parts that are not trained on are wrapped in a tuple."""
    return [piece.part if piece.train else (piece.part,) for piece in document.pieces]


def plain(name: str, **options: Any) -> Any:
    """Create a format by name, with a plain-text template for conversations."""
    return FORMATS[name](**options | ({"template": ChatTemplate()} if name in TALKS else {}))


def refusal(read: Callable[..., Any], record: object) -> str:
    with pytest.raises(RecordError) as caught:
        read(record, HERE)
    return str(caught.value)


# Sources of images


def read(images: Images, reference: object) -> Any:
    return images.resolve("r: image", reference)


def refused(images: Images, reference: object) -> str:
    with pytest.raises(RecordError) as caught:
        images.resolve("r: image", reference)
    return str(caught.value)


@pytest.mark.parametrize("data", [PNG, bytearray(PNG), memoryview(PNG)])
def test_bytes_are_accepted_as_images(data: object) -> None:
    assert read(Images(), data) == PNG
    assert read(Images(), {"bytes": data, "path": "elsewhere.png"}) == PNG


@pytest.mark.parametrize(
    "url",
    [
        PNG_URL,
        PNG_URL.replace("data:image/png;base64", "DATA:Image/PNG;Base64"),
        f"data:;base64,{PNG_BASE64}",
        f"data:image/png;name=dot.png;base64,{quote(PNG_BASE64, safe='')}",
        f"data:image/png,{quote(PNG, safe='')}",
    ],
)
def test_data_urls_are_decoded_without_the_resolver(url: str) -> None:
    assert read(Images(resolver=lambda name: pytest.fail(name)), url) == PNG
    assert BUILDER.build([read(Images(), url)]).grid_thw.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png", "got the data URL 'data:image/png', want a comma before the data"),
        ("data:text/plain,hi", "got the data URL 'data:text/plain,hi', want an image/… media type"),
        ("data:image/png,a%2", "got the data URL 'data:image/png,a%2', want ASCII, and two hex digits after each %"),
        ("data:image/png,ä", "got the data URL 'data:image/png,ä', want ASCII, and two hex digits after each %"),
        ("data:image/png;base64,iVBO!A==", "want base64 ("),
        ("data:image/png;base64,iVBOR", "want base64 ("),
        ("data:image/png;base64,", "got 0 bytes, want the bytes of a file"),
        ("data:,", "got 0 bytes, want the bytes of a file"),
    ],
)
def test_an_invalid_data_url_is_refused(url: str, message: str) -> None:
    assert f"r: image: {message}" in refused(Images(), url).replace(f"got the data URL '{url}', want b", "want b")


def test_a_path_must_lead_to_a_file_inside_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base" / "deep").mkdir(parents=True)
    inside = tmp_path / "base" / "deep" / "a.png"
    inside.write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "base" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "base" / "loop").symlink_to(tmp_path / "base" / "loop")
    monkeypatch.chdir(tmp_path)
    images = Images("base")
    monkeypatch.chdir("/")
    for name in ("deep/a.png", "deep/../deep/a.png", str(inside)):
        assert read(images, name) == inside
        assert read(images, {"bytes": None, "path": name}) == inside
    assert read(images, Path("deep/a.png")) == inside
    base = tmp_path / "base"
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "/etc/passwd", ".."):
        message = refused(images, name)
        assert message.startswith(f"r: image: got the path {repr(name)[:38]}")
        assert message.endswith(f", want a path that stays inside {base}")
    for name in ("b.png", "deep", "."):
        assert refused(images, name) == f"r: image: got the path {name!r}, want a file that exists inside {base}"
    for name in ("a\0b", "loop", "x" * 5000, "\ud800"):
        assert f"inside {base}" in refused(images, name)


def test_paths_are_not_read_without_base() -> None:
    want = "want Images(base=…), Images(resolver=…) or --images-from; paths are not read by default"
    assert refused(Images(), "a.png") == f"r: image: got the path 'a.png', {want}"
    assert refused(Images(), {"bytes": None, "path": "a.png"}) == f"r: image.path: got the path 'a.png', {want}"


def test_urls_are_not_fetched_by_default() -> None:
    want = "want Images(fetcher=…) or Images(resolver=…); URLs are not fetched by default"
    assert refused(LOCAL, "https://host/a.png") == f"r: image: got the URL 'https://host/a.png', {want}"
    urls: list[str] = []
    images = Images(fetcher=lambda url: urls.append(url) or PNG)  # type: ignore[func-returns-value]
    assert read(images, "HTTPS://host/a.png") == PNG
    assert urls == ["HTTPS://host/a.png"]
    other = "r: image: got the URL 's3://bucket/a.png', want http or https, or a resolver that knows it"
    assert refused(images, "s3://bucket/a.png") == other
    empty = "r: image: got 0 bytes from the fetcher, want the bytes of a file"
    assert refused(Images(fetcher=lambda url: b""), "http://host/a") == empty


def test_a_resolver_receives_every_name_first_and_may_return_none() -> None:
    size = ImageSize(3, 4)
    known = {"http://host/a": PNG, "b": PHOTOS / "coffee.jpg", "c": size, "d": "text"}
    images = Images(PHOTOS, resolver=known.get)
    assert read(images, "http://host/a") == PNG
    assert read(images, {"bytes": None, "path": "b"}) == PHOTOS / "coffee.jpg"
    assert read(images, "c") is size
    assert read(images, "chelsea.jpg") == PHOTOS / "chelsea.jpg"
    assert refused(images, "d") == "r: image: got 'text' from the resolver, want an image or None"
    strict = Images(resolver=known.__getitem__)
    assert refused(strict, "e") == "r: image: got KeyError ('e') from the resolver for 'e', want an image"


def unavailable(_: object) -> bytes:
    raise ServiceUnavailableError("no answer")


@pytest.mark.parametrize(
    ("read", "record"),
    [
        (Obelics(Images(resolver=unavailable)), {"images": ["a"], "texts": [None]}),
        (Chat(media=unavailable), {"messages": [{"role": "user", "content": [{"type": "audio", "url": "a"}]}]}),
    ],
)
def test_an_unavailable_service_is_not_a_record_error(read: Format, record: dict[str, Any]) -> None:
    with pytest.raises(ServiceUnavailableError, match="no answer"):
        read(record, HERE)


def test_decoded_images_pass_unchanged_and_floats_from_0_to_1_become_uint8() -> None:
    photo, array, size = Image.open(io.BytesIO(COFFEE)), np.zeros((2, 3, 3), np.uint8), ImageSize(2, 3)
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    for image in (photo, array, size, Grid(1, 2), levels):
        assert read(Images(), image) is image
    image = read(Images(), levels / 255)
    assert image.dtype == torch.uint8
    assert torch.equal(image, levels)
    out_of_range = "r: image: got a float tensor from 0 to 255, want 0 to 1, or uint8"
    assert refused(Images(), levels.float()) == out_of_range
    assert "nan" in refused(Images(), torch.full((1, 2, 2), torch.nan))
    assert refused(Images(), torch.zeros(3)) == "r: image: got a tensor of shape (3,), want an image"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (5, "got 5, want a URL, a path, the bytes of a file, or a struct of bytes and path"),
        (None, "got nothing, want a URL, a path, the bytes of a file, or a struct of bytes and path"),
        (np.zeros(3), "got ndarray, want a URL, a path, the bytes of a file, or a struct of bytes and path"),
        ({}, "got neither bytes nor path, want one of them"),
        ({"bytes": "iVBO", "path": None}, "image.bytes: got 'iVBO', want bytes"),
        ({"bytes": b"", "path": "a"}, "image.bytes: got 0 bytes, want the bytes of a file"),
        ({"bytes": None, "path": 5}, "image.path: got 5, want text"),
    ],
)
def test_values_that_are_not_image_references_are_refused(reference: object, message: str) -> None:
    assert refused(Images(), reference).endswith(message)


def test_errors_about_large_values_stay_short() -> None:
    for reference in ("x" * 10**6, [["x" * 10**6] * 1000] * 1000, 10**5000, "data:image/png;base64," + "!" * 10**6):
        assert len(refused(Images(), reference)) < 800


def test_invalid_options_are_refused() -> None:
    for name, value in (("base", 5), ("resolver", {}), ("fetcher", "curl")):
        option: dict[str, Any] = {name: value}
        with pytest.raises(InvalidInputError, match=f"^{name}: got "):
            Images(**option)
    wrong: list[tuple[type, dict[str, Any]]] = [
        *((FORMATS[name], {"images": "folder"}) for name in FORMATS),
        *((FORMATS[name], {"template": "plain"}) for name in TALKS),
        (Chat, {"media": 5}),
        (ChatTemplate, {"user": ("a", "b")}),
        (Turn, {"before": 5, "after": ""}),
        (Turn, {"after": None, "before": ""}),
        (HFImages, {"text": 5}),
    ]
    for kind, options in wrong:
        with pytest.raises(InvalidInputError, match=rf"{next(iter(options))}: got .*, want "):
            kind(**options)


# Dropped images


@pytest.mark.parametrize(
    ("name", "record", "text"),
    [
        ("obelics", {"images": [None, "no.jpg", None], "texts": ["A", None, "B"]}, "A\n\nB"),
        ("llava", {"image": "no.jpg", "conversations": [{"from": "human", "value": "A<image>B"}]}, "User:\nAB\n\n"),
        ("pairs", {"jpg": b"", "txt": "AB"}, "AB"),
    ],
)
def test_unresolvable_references_are_dropped_like_broken_images(name: str, record: Any, text: str) -> None:
    format_ = plain(name, images=LOCAL)
    with pytest.raises(RecordError):
        format_(record, HERE)
    example = Preprocess(format_, BUILDER, on_image_error="drop")(record, HERE)
    assert bytes(example.sequence.input_ids.tolist()).decode() == text
    (error,) = example.dropped_images
    assert error.removeprefix("a (").startswith("shard-3.jsonl[17]")


# Keys


@pytest.mark.parametrize(
    ("ids", "key"),
    [
        ({}, "shard-3.jsonl[17]"),
        ({"id": "a7"}, "a7"),
        ({"id": 7}, "7"),
        ({"id": np.int64(7)}, "7"),
        ({"id": None, "__key__": "000017"}, "000017"),
        ({"id": "a7", "__key__": "000017"}, "a7"),
    ],
)
def test_the_key_is_the_id_of_the_record_or_else_its_location(ids: dict[str, object], key: str) -> None:
    assert HFImages()({"image": None, "text": "a", **ids}, HERE).key == key


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"id": [1]}, "id: got [1], want text or an integer of 64 bits"),
        ({"id": True}, "id: got True, want text or an integer of 64 bits"),
        ({"id": ""}, "id: got '', want a non-empty key"),
        ({"__key__": "\ud800"}, "__key__: got text with a lone surrogate"),
    ],
)
def test_invalid_keys_are_refused(ids: dict[str, object], message: str) -> None:
    assert refusal(HFImages(), {"image": None, "text": "a", **ids}).startswith(f"shard-3.jsonl[17]: {message}")


# Documents from each format


def test_obelics_merges_parallel_lists_of_images_and_texts() -> None:
    record = {
        "images": [None, PNG_URL, None, None, "coffee.jpg"],
        "texts": ["A dot:", None, "One paragraph.", "And one.", None],
        "metadata": '[null, {"src": "dot.png"}, null, null, null]',
        "general_metadata": "not used",
    }
    document = Obelics(LOCAL)(record, HERE)
    assert document.key == "shard-3.jsonl[17]"
    assert pieces(document) == ["A dot:", PNG, "One paragraph.\n\nAnd one.", PHOTOS / "coffee.jpg"]


MMC4_RECORD = {
    "text_list": ["First.", "Second.", "Third."],
    "image_info": [
        {"image_name": "coffee.jpg", "raw_url": "http://host/c", "matched_text_index": 2, "matched_sim": 0.3},
        {"image_name": "chelsea.jpg", "raw_url": "http://host/d", "matched_text_index": 2},
        {"image_name": "missing.jpg", "raw_url": "http://host/e", "matched_text_index": 0},
    ],
    "similarity_matrix": [[0.1, 0.1, 0.3]],
}


def test_mmc4_places_images_in_order_before_their_sentences() -> None:
    names = MMC4(Images(resolver=str.encode))
    assert pieces(names(MMC4_RECORD, HERE)) == [
        b"missing.jpg", "First. Second.", b"coffee.jpg", b"chelsea.jpg", "Third."
    ]  # fmt: skip


CHAT_RECORD = {
    "id": "c1",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is"},
                {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "auto"}},
                {"type": "text", "text": "this?", "image_url": None},
            ],
        },
        {"role": "assistant", "content": "A dot.", "tool_calls": [], "weight": 1, "loss": True},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": None},
    ],
}


def test_chat_trains_on_assistant_turns_and_their_ends() -> None:
    document = Chat()(CHAT_RECORD, HERE)
    assert document.key == "c1"
    assert pieces(document) == [
        ("System:\nBe brief.\n\nUser:\nWhat is",),
        (PNG,),
        ("this?\n\nAssistant:\n",),
        "A dot.\n\n",
        ("User:\nAnd?\n\nAssistant:\n",),
        "No.\n\n",
    ]


def test_chat_accepts_another_template() -> None:
    template = ChatTemplate(user=Turn("<u>", "</u>"), assistant=Turn("<a>", "</a>"), system=None)
    record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}
    assert pieces(Chat(template)(record, HERE)) == [("<u>Hi</u><a>",), "</a>"]
    wrong = {"messages": [{"role": "system", "content": "x"}]}
    want = "want one of developer, user, assistant, tool"
    assert refusal(Chat(template), wrong) == f"shard-3.jsonl[17]: messages[0].role: got 'system', {want}"


def test_chat_accepts_image_parts_as_in_transformers() -> None:
    pixels = np.zeros((2, 3, 3), np.uint8)
    blocks: list[dict[str, Any]] = [
        {"image": PNG_URL},
        {"url": PNG_URL},
        {"path": "coffee.jpg"},
        {"base64": PNG_BASE64},
        {"image": pixels},
    ]
    content: list[dict[str, Any]] = [{"type": "image", "url": None, **block} for block in blocks]
    content.append({"type": "image", "image": {"bytes": PNG, "path": None}})
    (_, *images, _) = Chat(images=LOCAL)(user_turn(*content), HERE).parts
    assert images[:4] == [PNG, PNG, PHOTOS / "coffee.jpg", PNG]
    assert images[4] is pixels
    assert images[5:] == [PNG]
    two = user_turn({"type": "image", "url": "a", "path": "b"})
    want = "got url and path, want one of image, url, path, base64"
    assert refusal(Chat(), two) == f"shard-3.jsonl[17]: messages[0].content[0]: {want}"


def user_turn(*parts: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def test_chat_accepts_videos_as_lists_of_frames() -> None:
    frames = [PNG_URL, {"bytes": PNG, "path": None}, "coffee.jpg"]
    record = user_turn({"type": "video", "video": frames, "fps": 29.97}, {"type": "text", "text": "Who?"})
    (_, video, text) = Chat(images=LOCAL)(record, HERE).parts
    assert isinstance(video, Video)
    assert video.frames == (PNG, PNG, PHOTOS / "coffee.jpg")
    assert video.times == (Fraction(0), Fraction(100, 2997), Fraction(200, 2997))
    assert text == "Who?\n\n"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"video": [PNG]}, "fps: got nothing, want a finite number"),
        ({"video": [PNG], "fps": 0}, "fps: got 0, want frames per second above 0"),
    ],
)
def test_an_invalid_frame_list_is_refused(part: dict[str, Any], message: str) -> None:
    assert refusal(Chat(), user_turn({"type": "video", **part})).startswith(
        f"shard-3.jsonl[17]: messages[0].content[0].{message}"
    )


def media(part: Any) -> object:
    """Read videos and audio as a user's callable would."""
    if part["type"] == "input_audio":
        return Audio(part["input_audio"]["tokens"])
    if part["type"] == "video_url":
        return Clip(1, 2, frames=2, audio=3)
    return {"video": Grid(1, 2, frames=2), "image": Grid(1, 2), "nothing": None}[part["video"]]


def test_chat_reads_videos_and_audio_with_media() -> None:
    record = user_turn(
        {"type": "input_audio", "input_audio": {"tokens": 7}},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "video", "video": "video"},
    )
    parts = Chat(media=media)(record, HERE).parts
    assert parts[1:-1] == [Audio(7), Clip(1, 2, frames=2, audio=3), Grid(1, 2, frames=2)]


@pytest.mark.parametrize("placeholder", ["<video>", "<image>"])
def test_llava_reads_its_video_at_either_placeholder(placeholder: str) -> None:
    turns = [{"from": "human", "value": f"{placeholder}\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    parts = LLaVA(media=media)({"video": "video", "conversations": turns}, HERE).parts
    assert parts[:2] == ["User:\n", Grid(1, 2, frames=2)]


@pytest.mark.parametrize(
    ("name", "got"),
    [("image", "Grid from media"), ("nothing", "nothing from media"), ("lost", "KeyError ('lost') from media")],
)
def test_the_return_value_of_media_is_checked(name: str, got: str) -> None:
    want = "want a Video, a Grid of several frames, a Clip or an Audio"
    assert refusal(Chat(media=media), user_turn({"type": "video", "video": name})) == (
        f"shard-3.jsonl[17]: messages[0].content[0]: got {got}, {want}"
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"video": [PNG, b"broken"], "fps": 1}, "parts[1].frames[1]: image: got a file"),
        ({"video": [PNG, "gone"], "fps": 1}, "messages[0].content[1].video[1]: got the path 'gone'"),
        ({"video": "lost"}, "messages[0].content[1]: got KeyError ('lost') from media"),
    ],
)
def test_an_unreadable_video_is_dropped_as_a_whole(part: dict[str, Any], message: str) -> None:
    chat = Chat(ChatTemplate(user=Turn("<", ">")), media=media)
    preprocess = Preprocess(chat, BUILDER, on_image_error="drop")
    text = {"type": "text", "text": "a"}
    example = preprocess(user_turn(text, {"type": "video", **part}, text), HERE)
    assert BUILDER.tokenizer.decode(example.sequence.input_ids.tolist()) == "<aa>"
    (error,) = example.dropped_images
    assert error.startswith(f"shard-3.jsonl[17]: {message}")


def test_chat_accepts_parts_as_in_the_responses_api() -> None:
    content = [{"type": "input_text", "text": "This:"}, {"type": "input_image", "image_url": PNG_URL}]
    answer = [{"type": "output_text", "text": "A dot."}]
    record = {"messages": [{"role": "developer", "content": content}, {"role": "assistant", "content": answer}]}
    assert pieces(Chat()(record, HERE)) == [("System:\nThis:",), (PNG,), ("\n\nAssistant:\n",), "A dot.\n\n"]


def test_llava_replaces_placeholders_with_images() -> None:
    record = {
        "id": 33471,
        "image": ["coffee.jpg", "chelsea.jpg", {"bytes": PNG, "path": None}],
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "<image>\nWhat is it?<image><image>"},
            {"from": "gpt", "value": "Coffee."},
        ],
    }
    document = LLaVA(images=LOCAL)(record, HERE)
    assert document.key == "33471"
    assert pieces(document) == [
        ("System:\nBe brief.\n\nUser:\n",),
        (PHOTOS / "coffee.jpg",),
        ("\nWhat is it?",),
        (PHOTOS / "chelsea.jpg",),
        (PNG,),
        ("\n\nAssistant:\n",),
        "Coffee.\n\n",
    ]


def struct(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


@pytest.mark.parametrize(
    ("image", "text", "want"),
    [
        (struct(PNG), "a dot", [PNG, "a dot"]),
        (struct(None, "coffee.jpg"), "coffee", [PHOTOS / "coffee.jpg", "coffee"]),
        (None, "text alone", ["text alone"]),
        (struct(PNG), None, [PNG]),
        ([struct(PNG), struct(CAT)], "both", [PNG, CAT, "both"]),
        (struct(PNG), ["one", "two"], [PNG, "one\ntwo"]),
        ([struct(PNG), None, struct(CAT)], ["a", "b", None], [PNG, "a\nb", CAT]),
        (np.array([struct(PNG)], object), np.array(["a"]), [PNG, "a"]),
    ],
)
def test_hugging_face_columns_hold_single_values_or_lists(image: object, text: object, want: list[object]) -> None:
    assert pieces(HFImages(images=LOCAL)({"image": image, "text": text}, HERE)) == want
    assert pieces(HFImages("photo", "caption", LOCAL)({"photo": image, "caption": text}, HERE)) == want


@pytest.mark.parametrize("extension", ["jpg", "jpeg", "png", "webp", "gif"])
def test_a_pair_is_an_image_and_its_caption(extension: str) -> None:
    members: list[dict[str, Any]] = [
        {"txt": "a dot ä".encode()},
        {"txt": "a dot ä", "json": b"{broken"},
        {"json": '{"caption": "a dot ä"}'.encode()},
        {"json": {"caption": "a dot ä", "width": 1}},
    ]
    for caption in members:
        document = Pairs()({"__key__": "000017", extension: PNG, **caption}, HERE)
        assert (document.key, pieces(document)) == ("000017", [PNG, "a dot ä"])


# Errors for invalid records

NO_REFERENCE = "want a URL, a path, the bytes of a file, or a struct of bytes and path"


def changed(record: Mapping[str, object], path: tuple[str | int, ...], value: object) -> Any:
    """Return a copy of a record with the value at a path replaced."""
    copy: Any = deepcopy(record)
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return copy


OBELICS_RECORD = {"images": [None, PNG_URL], "texts": ["a", None]}


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (Obelics(), [], "got [], want a mapping of names to values"),
        (Obelics(), {}, "images: got nothing, want a list"),
        (Obelics(), {"images": [], "texts": []}, "images, texts: got no image and no text, want at least one"),
        (Obelics(), {"images": [None], "texts": [""]}, "images, texts: got no image and no text, want at least one"),
        (Obelics(), {"images": [None], "texts": ["a", "b"]}, "images: got 1 items, want 2 as in texts"),
        (Obelics(), {"images": [None], "texts": [5]}, "texts[0]: got 5, want text"),
        (Obelics(), {"images": [None], "texts": [None]}, "images[0], texts[0]: got neither, want one of them"),
        (Obelics(), {"images": ["a"], "texts": ["b"]}, "images[0], texts[0]: got both, want one of them"),
        (HFImages(), {"text": "a", "label": 1}, "image: got columns ['text', 'label'], want a column with this name"),
        (HFImages(), {"image": None}, "text: got columns ['image'], want a column with this name"),
        (HFImages(), {"image": None, "text": None}, "image, text: got no image and no text, want at least one"),
        (HFImages(), {"image": [struct(PNG), 5], "text": "a"}, f"image[1]: got 5, {NO_REFERENCE}"),
        (HFImages(), {"image": [None], "text": ["a", "b"]}, "image: got 1 items, want 2 as in text"),
    ],
)
def test_format_errors_name_the_record_field_and_value(read: Format, record: object, message: str) -> None:
    assert refusal(read, record) == f"shard-3.jsonl[17]: {message}"


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "1" * 5000])
def test_invalid_json_is_refused(text: str) -> None:
    message = refusal(Pairs(), {"jpg": PNG, "json": text})
    assert message.startswith("shard-3.jsonl[17]: json: got '")
    assert "which is not JSON (" in message


def test_text_with_a_lone_surrogate_is_refused() -> None:
    message = refusal(Obelics(), {"images": [None], "texts": ["\ud800"]})
    assert message.startswith("shard-3.jsonl[17]: texts[0]: got text with a lone surrogate")


MATCHED, NAMED = ("image_info", 0, "matched_text_index"), "image_info[0].matched_text_index"
AN_INDEX = "want an index into the 3 items of text_list"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("image_info", 0, "image_name"), 5, f"image_info[0].image_name: got 5, {NO_REFERENCE}"),
        *((MATCHED, index, f"{NAMED}: got {index!r}, {AN_INDEX}") for index in (3, -1, 1.0, True, "0")),
        (MATCHED, None, f"{NAMED}: got nothing, {AN_INDEX}"),
    ],
)
def test_invalid_mmc4_records_are_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    error = refusal(MMC4(Images(resolver=str.encode)), changed(MMC4_RECORD, path, value))
    assert error.startswith(f"shard-3.jsonl[17]: {message}")


ROLES = "want one of system, developer, user, assistant, tool"
PARTS, TURN = ("messages", 1, "content"), ("messages", 2)
KINDS = (
    "want one of text, refusal, input_text, output_text, image, image_url, input_image, video, video_url, audio, "
    "audio_url, input_audio"
)
UNREAD = "want Chat(media=…), which reads video and audio, or a video as a list of frames"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("messages",), [], "messages: got none, want at least one turn"),
        (("messages", 0, "role"), "bot", f"messages[0].role: got 'bot', {ROLES}"),
        (("messages", 3, "content"), None, "messages[3].content: got nothing, want text or a list of parts"),
        ((*PARTS, 0, "text"), None, "messages[1].content[0].text: got nothing, want text"),
        ((*PARTS, 0, "type"), "file", f"messages[1].content[0].type: got 'file', {KINDS}"),
        ((*PARTS, 0, "type"), "input_audio", f"messages[1].content[0]: got input_audio, {UNREAD}"),
        ((*PARTS, 0), {"type": "video", "url": "a.mp4"}, f"messages[1].content[0]: got video, {UNREAD}"),
        ((*PARTS, 1, "image_url", "url"), 5, f"messages[1].content[1].image_url.url: got 5, {NO_REFERENCE}"),
        *(((*TURN, name), [1], f"messages[2].{name}: got [1], want none, since Chat does not read it")
          for name in ("tool_calls", "function_call", "reasoning_content", "thinking")),
        *(((name,), "a", f"{name}: got 'a', want none, since Chat does not read it")
          for name in ("tools", "functions", "system", "objects")),
        *(((*TURN, name), value,
           f"messages[2].{name}: got {value}, want 1 or none, since every assistant turn is trained on")
          for name, value in (("weight", 0), ("weight", 0.5), ("loss", False))),
        (("label",), False, "label: got False, want 1 or none, since every assistant turn is trained on"),
    ],
)  # fmt: skip
def test_invalid_chats_are_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    assert refusal(Chat(), changed(CHAT_RECORD, path, value)) == f"c1 (shard-3.jsonl[17]): {message}"


def test_a_chat_without_text_is_empty() -> None:
    silent = Chat(ChatTemplate(user=Turn("", "")))
    assert refusal(silent, user_turn()) == "shard-3.jsonl[17]: messages: got no image and no text, want at least one"


EACH = "one for each <image> and each image part without data"
LLAVA_RECORD = {
    "image": "coffee.jpg",
    "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Coffee."}],
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("conversations",), [], "conversations: got none, want at least one turn"),
        (("conversations", 0, "from"), "user", "conversations[0].from: got 'user', want one of human, gpt, system"),
        (("conversations", 1, "value"), "<image>", f"image: got 1 item, want 2, {EACH}"),
        (("image",), None, f"images: got 0 items, want 1, {EACH}"),
        (("image",), ["a", "b"], f"image: got 2 items, want 1, {EACH}"),
        (("images",), ["a"], "image: got 'coffee.jpg', want nothing beside images"),
    ],
)  # fmt: skip
def test_invalid_llava_records_are_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    assert refusal(LLaVA(images=LOCAL), changed(LLAVA_RECORD, path, value)) == f"shard-3.jsonl[17]: {message}"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"txt": "a"}, "image: got none, want one of jpg, jpeg, png, webp, gif"),
        ({"jpg": PNG, "png": PNG, "txt": "a"}, "image: got jpg, png, want one of jpg, jpeg, png, webp, gif"),
        ({"jpg": PNG}, "txt, json: got neither, want one of them"),
        ({"jpg": PNG, "txt": b""}, "txt: got 0 bytes, want a non-empty caption"),
        ({"jpg": PNG, "txt": b"\xff"}, "txt: got bytes that are not UTF-8 ("),
        ({"jpg": PNG, "json": b"{"}, "json: got '{', which is not JSON ("),
        ({"jpg": PNG, "json": {"caption": ""}}, "json.caption: got '', want a non-empty caption"),
    ],
)
def test_invalid_pairs_are_refused(members: dict[str, object], message: str) -> None:
    error = refusal(Pairs(), {"__key__": "000017", **members})
    assert error.startswith(f"000017 (shard-3.jsonl[17]): {message}")


RECORDS: dict[str, dict[str, Any]] = {
    "obelics": OBELICS_RECORD,
    "mmc4": changed(MMC4_RECORD, ("image_info", 2, "image_name"), "chelsea.jpg"),
    "chat": CHAT_RECORD,
    "llava": LLAVA_RECORD,
    "finevision": {"images": [struct(CAT)], "texts": [{"user": "What?", "assistant": "A cat."}]},
    "hf": {"image": struct(CAT), "text": "a cat"},
    "pairs": {"__key__": "17", "jpg": CAT, "txt": "a cat"},
    "tar-documents": {"json": {"images": ["a.jpg", None], "texts": [None, "a cat"]}, "a.jpg": CAT},
    "texts": {"text": "a cat"},
}

# Media beside the records


def talk(*turns: str, **columns: object) -> dict[str, Any]:
    """Return a record of a chat that begins with the user."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)], **columns}


def test_the_nth_placeholder_stands_for_the_nth_entry() -> None:
    chat = talk("A <image>B<image>\n", "C", "<video>D<audio><image>", images=["coffee.jpg", PNG, struct(CAT)])
    chat |= {"videos": "video", "audios": [{"tokens": 7}]}
    read = Chat(images=LOCAL, media=lambda part: Grid(1, 2, frames=2) if part["type"] == "video" else Audio(7))
    (coffee, video) = ((PHOTOS / "coffee.jpg",), (Grid(1, 2, frames=2),))
    assert pieces(read(chat, HERE)) == [
        ("User:\nA ",), coffee, ("B",), (PNG,), ("\n\n\nAssistant:\n",), "C\n\n",
        ("User:\n",), video, ("D",), (Audio(7),), (CAT,), ("\n\n",),
    ]  # fmt: skip


WHO = {"type": "text", "text": "Who?"}
TRL = [{"type": "image", "text": None, "index": i} for i in range(2)]


@pytest.mark.parametrize(
    ("read", "record", "want"),
    [
        (Chat(), talk("What?", images=[PNG]), [PNG, "What?"]),
        (Chat(), talk("What?", image=PNG, images=[], videos=None, audios=[None]), [PNG, "What?"]),
        (Chat(), user_turn(*TRL, WHO) | {"images": [PNG, struct(CAT)]}, [PNG, CAT, "Who?"]),
        (LLaVA(), {"conversations": [{"from": "human", "value": "What?"}], "images": [PNG]}, [PNG, "What?"]),
        (LLaVA(), {"conversations": [{"from": "human", "value": "A <image> B"}], "image": PNG}, ["A ", PNG, " B"]),
    ],
)  # fmt: skip
def test_an_image_beside_the_turns_is_placed(read: Format, record: Any, want: list[object]) -> None:
    parts = read(record, HERE).parts
    assert [part.removeprefix("User:\n").removesuffix("\n\n") if isinstance(part, str) else part for part in parts] == [
        *([""] if want[0] == PNG else []), *want
    ]  # fmt: skip


def test_finevision_places_images_before_the_first_turn_or_at_placeholders() -> None:
    turns = [{"user": "Who?", "assistant": "A cat.", "source": "TQA"}, {"user": "Sure?", "assistant": "Yes."}]
    rest = [("Who?\n\nAssistant:\n",), "A cat.\n\n", ("User:\nSure?\n\nAssistant:\n",), "Yes.\n\n"]
    record = {"images": [struct(CAT), struct(PNG)], "texts": turns, "source": "tqa", "relevance_ratings": [4]}
    assert pieces(FineVision()(record, HERE)) == [("User:\n",), (CAT,), (PNG,), *rest]
    assert pieces(FineVision()({**record, "images": []}, HERE))[1:] == rest[1:]
    there = [{"user": "A <image>", "assistant": "B"}]
    assert FineVision()({"images": [PNG], "texts": there}, HERE).parts[:2] == ["User:\nA ", PNG]


@pytest.mark.parametrize("names", [("a1.jpg", "b.PNG"), ("d/17.a1.jpg", "17.b.png")])
@pytest.mark.parametrize("written", [dict, lambda document: json.dumps(document).encode()])
def test_a_json_in_a_tar_names_the_images_of_its_sample(names: tuple[str, str], written: Any) -> None:
    document = {"texts": ["A", None, "B", "C", None], "images": [None, names[0], None, None, names[1]]}
    record = {"__key__": "d/17", "json": written(document | {"audios": [None] * 5}), "a1.jpg": CAT, "b.png": PNG}
    assert pieces(TarDocuments()(record, HERE)) == ["A", CAT, "B\n\nC", PNG]


MEDIA = ("image", "images", "video", "videos", "audio", "audios")
PLACED = {"obelics": ("images",), "hf": ("image",), **dict.fromkeys(TALKS, ("image", "images"))}
WITHOUT: dict[str, dict[str, Any]] = {
    "obelics": {"images": [None], "texts": ["a"]}, "mmc4": {"text_list": ["a"], "image_info": []},
    "chat": talk("a"), "llava": {"conversations": [{"from": "human", "value": "a"}]},
    "finevision": {"texts": [{"user": "a", "assistant": "b"}]}, "hf": {"image": None, "text": "a"},
    "pairs": RECORDS["pairs"], "tar-documents": RECORDS["tar-documents"],
    "texts": {"text": "a"},
}  # fmt: skip


@pytest.mark.parametrize("value", ["coffee.jpg", PNG, [PNG], [struct(PNG)], [None, "coffee.jpg"], np.ones((4, 4, 3))])
@pytest.mark.parametrize("column", MEDIA)
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_passes_over_a_column_of_media(name: str, column: str, value: object) -> None:
    read, record = plain(name, images=LOCAL), {**WITHOUT[name], column: value}
    if name != "obelics" and column in PLACED.get(name, ()) and not (isinstance(value, list) and value[0] is None):
        (placed,) = (part for part in read(record, HERE).parts if not isinstance(part, str))
        assert placed is value or placed in (PNG, PHOTOS / "coffee.jpg")
    else:
        assert re.match(
            rf"(17 \()?shard-3.jsonl\[17\]\)?: {column}(\[0\])?(, texts\[0\])?: got ", refusal(read, record)
        )


A_CAT = {"image": struct(CAT), "text": "a cat"}


@pytest.mark.parametrize(
    ("read", "record", "lost"),
    [
        (HFImages(), {**A_CAT, "mask": struct(PNG)}, "mask: got"),
        (HFImages(), {**A_CAT, "depth": [Image.new("L", (2, 2))]}, "depth: got"),
        (Pairs(), {**RECORDS["pairs"], "mp4": b"..."}, "mp4: got 3 bytes"),
        (Pairs(), {**RECORDS["pairs"], "seg.png": PNG}, f"seg.png: got {len(PNG)} bytes"),
        (MMC4(), changed(RECORDS["mmc4"], ("image_info", 0, "video"), "a.mp4"), "image_info[0].video: got 'a.mp4'"),
        (Chat(), changed(talk("a"), ("messages", 0, "images"), ["a.jpg"]), "messages[0].images: got ['a.jpg']"),
        (Chat(), user_turn({"type": "text", "text": "a", "image": "b"}), "messages[0].content[0].image: got 'b'"),
        (Chat(), talk("a", image_path="a.jpg"), "image_path: got 'a.jpg'"),
        (Chat(), talk("a", second_image_2="a.jpg"), "second_image_2: got 'a.jpg'"),
        (Chat(), talk("a", rejected_response="b"), "rejected_response: got 'b'"),
        *(
            (Chat(), user_turn({"type": "image", "image": PNG, name: 5}), f"messages[0].content[0].{name}: got 5")
            for name in ("min_pixels", "max_pixels", "resized_height", "resized_width")
        ),
        (
            Chat(),
            user_turn({"type": "video", "video": [PNG], "fps": 1, "nframes": 8}),
            "messages[0].content[0].nframes",
        ),
        (Chat(), talk("a", screenshot="shots/1.png"), "screenshot: got 'shots/1.png'"),
        (Chat(), talk("a", clip=[None, "https://host/a.MP4"]), "clip: got [None, 'https://host/a.MP4']"),
        (Texts(), {"text": "a", "cover": PNG_URL}, "cover: got 'data:image/png"),
        (HFImages(), {**A_CAT, "left": PNG}, f"left: got {len(PNG)} bytes"),
        (HFImages(), {**A_CAT, "speech": {"array": [0.0], "sampling_rate": 16_000}}, "speech: got"),
        (Pairs(), {**RECORDS["pairs"], "heic": b"..."}, "heic: got 3 bytes"),
        (TarDocuments(), {**RECORDS["tar-documents"], "b.jpg": CAT}, f"b.jpg: got {len(CAT)} bytes"),
        (
            TarDocuments(),
            changed(RECORDS["tar-documents"], ("json", "audios"), ["a.wav", None]),
            "json.audios: got ['a.wav', None]",
        ),
    ],
)
def test_media_in_other_places_are_refused_by_name(read: Any, record: Any, lost: str) -> None:
    message = refusal(replace(read, images=Images(resolver=str.encode)), record).removeprefix("17 (")
    assert message.startswith(f"shard-3.jsonl[17]{')' if read == Pairs() else ''}: {lost}")
    assert message.endswith(f", want none, since {type(read).__name__} does not read it")


def test_columns_about_media_that_carry_none_are_left_out() -> None:
    assert pieces(Texts()({"id": "a.png", "text": "see a.png", "url": "http://host/a"}, HERE)) == ["see a.png"]
    for more in (
        {"origin": "shots/1.png"},
        {"image_url": "http://host/cat.jpg"},
        {"image_id": 5},
        {"images": [], "video": False, "audio": None},
    ):
        assert pieces(HFImages()({**A_CAT, **more}, HERE)) == [CAT, "a cat"]


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (Chat(), user_turn({"type": "image_url", "image_url": {"url": PNG_URL, "detail": "low"}}),
         "messages[0].content[0].image_url.detail: got 'low', want auto or none, since the ImageProcessor determines "
         "the size of images"),
        (Chat(), talk("<image> and <image>", images=[PNG]), f"images: got 1 item, want 2, {EACH}"),
        (Chat(), talk("Who?", images=[PNG, PNG]), f"images: got 2 items, want 0, {EACH}"),
        (Chat(), user_turn({"type": "image", "image": PNG}) | {"images": [PNG]}, f"images: got 1 item, want 0, {EACH}"),
        (Chat(), user_turn(TRL[1]) | {"images": [PNG]}, "messages[0].content[0].index: got 1, want 0, the number of "
         "items of images before it"),
        (Chat(), talk("Who?", images=[None]), f"images[0]: got nothing, {NO_REFERENCE}"),
        (Chat(), talk("<video>"), f"videos: got 0 items, want 1, {EACH.replace('image', 'video')}"),
        (Chat(), talk("<video>", videos=["a.mp4"]), f"videos[0]: got video, {UNREAD}"),
        (LLaVA(), {"conversations": [{"from": "human", "value": "<audio>"}], "audio": "a.wav"},
         f"audio: got audio, {UNREAD.replace('Chat', 'LLaVA')}"),
        (Chat(), talk("<video>", videos=[[PNG, PNG]]), "videos[0].fps: got nothing, want a finite number"),
        (Chat(images=LOCAL), talk("<image>", images=["no.jpg"]),
         f"images[0]: got the path 'no.jpg', want a file that exists inside {PHOTOS}"),
        (FineVision(), {"images": [PNG], "texts": []}, "images, texts: got none, want at least one turn"),
        (FineVision(), {"images": [PNG], "texts": [{"user": "a"}]}, "texts[0].assistant: got nothing, want text"),
        (TarDocuments(), {"json": {"images": ["a.jpg"], "texts": [None]}},
         "json.images[0]: got 'a.jpg', want a member of the sample, one of ['json']"),
        (TarDocuments(), {"json": b"[1]"}, "json: got [1], want a mapping of names to values"),
    ],
)  # fmt: skip
def test_media_that_cannot_be_placed_are_refused(read: Format, record: Any, message: str) -> None:
    assert refusal(read, record) == f"shard-3.jsonl[17]: {message}"


# All formats


@pytest.mark.parametrize("name", FORMATS)
def test_formats_can_be_pickled(name: str) -> None:
    other = FORMATS[name](images=Images(PHOTOS, resolver=RECORDS.get))
    again = pickle.loads(pickle.dumps(FORMATS[name](images=LOCAL)))
    assert again == FORMATS[name](images=LOCAL) != other
    assert pieces(again(RECORDS[name], HERE)) == pieces(FORMATS[name](images=LOCAL)(RECORDS[name], HERE))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["", "text", "user", "coffee.jpg", "..", "http://host", "data:,"]),
    st.sampled_from(["<image>", "[]", "\ud800", 10**400]),
)  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(["id", "__key__", "text", "image", "type", "role", "url", "bytes", "path"]), st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all values in a record."""
    steps: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for step, inner in steps for place in ((*path, step), *places(inner, (*path, step)))]


@settings(max_examples=60)
@given(st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_json_is_either_read_or_refused_with_a_record_error(name: str, data: st.DataObject) -> None:
    record = deepcopy(RECORDS[name])
    for _ in range(data.draw(st.integers(1, 2))):
        record = changed(record, data.draw(st.sampled_from(places(record))), data.draw(VALUES))
    if data.draw(st.booleans()):
        record = data.draw(st.dictionaries(st.sampled_from([*RECORDS[name]]) | NAMES, VALUES))
    if data.draw(st.booleans()) and name in ("obelics", "mmc4", "chat", "llava"):
        record = json.loads(json.dumps(record))
    message, document = "", None
    try:
        document = FORMATS[name](images=LOCAL)(record, HERE)
    except RecordError as error:
        message = str(error)
    if document is None:
        assert message.startswith((str(HERE), *(f"{record.get(own)} ({HERE})" for own in ("id", "__key__"))))
        assert ": got " in message
        assert len(message) < 800
    else:
        assert document.key
        assert all(not isinstance(part, str) or part for part in document.parts)
