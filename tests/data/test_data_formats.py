"""Formats: documents made from the records of each corpus, and errors for invalid records."""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Mapping
from copy import deepcopy
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
from results import assert_equal

from mmpos import Grid, ImageProcessor, ImageSize, InvalidInputError, SequenceBuilder, Video
from mmpos.data.examples import Format, Location, Preprocess, RecordError
from mmpos.data.formats import FORMATS
from mmpos.data.formats.chat import Chat, FineVision, LLaVA
from mmpos.data.formats.fields import describe
from mmpos.data.formats.images import Images
from mmpos.data.formats.pages import MMC4, Obelics, TarDocuments
from mmpos.data.formats.pairs import HFImages, Pairs, Texts
from mmpos.data.formats.templates import ChatTemplate, Turn
from mmpos.errors import ServiceUnavailableError
from mmpos.segments import Audio, Clip

HERE = Location("shard-3.jsonl", 17)
PHOTOS = Path(str(resources.files("mmpos"))) / "photos"
CAT, COFFEE = (PHOTOS / "chelsea.jpg").read_bytes(), PHOTOS / "coffee.jpg"
LOCAL, NAMES = Images(PHOTOS), Images(resolver=str.encode)
PNG_BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PNG, PNG_URL = base64.b64decode(PNG_BASE64), f"data:image/png;base64,{PNG_BASE64}"
BUILDER = SequenceBuilder(images=ImageProcessor("pillow", min_pixels=28 * 28, max_pixels=64 * 28 * 28))
REFERENCE = "want a URL, a path, the bytes of a file, or a struct of bytes and path"
PIXELS = np.zeros((2, 3, 3), np.uint8)
PHOTO, SIZE, LEVELS = Image.open(COFFEE), ImageSize(2, 3), torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)

# Sources of images


def resolve(images: Images, reference: object) -> Any:
    """Return the image, or the message of the error."""
    try:
        return images.resolve("r: image", reference)
    except RecordError as error:
        return str(error)


def unavailable(_: object) -> bytes:
    raise ServiceUnavailableError("no answer")


KNOWN = {"http://host/a": PNG, "b": COFFEE, "c": SIZE, "d": "text", "e": b""}
ASKED, STRICT = Images(PHOTOS, resolver=KNOWN.get), Images(resolver=KNOWN.__getitem__)
UNREAD = "want Images(base=…), Images(resolver=…) or --images-from; paths are not read by default"


@pytest.mark.parametrize(
    ("images", "reference", "want"),
    [
        *((Images(), data, PNG) for data in (PNG, bytearray(PNG), memoryview(PNG), {"bytes": PNG, "path": "no.png"})),
        *((Images(), image, image) for image in (PHOTO, PIXELS, SIZE, Grid(1, 2), LEVELS)),
        (Images(), LEVELS / 255, LEVELS),
        (STRICT, PNG_URL.replace("data:image/png;base64", "DATA:Image/PNG;Base64"), PNG),
        (STRICT, f"data:;base64,{PNG_BASE64}", PNG),
        (STRICT, f"data:image/png;name=dot.png;base64,{quote(PNG_BASE64, safe='')}", PNG),
        (STRICT, f"data:image/png,{quote(PNG, safe='')}", PNG),
        (Images(), "data:image/png", "image: got the data URL 'data:image/png', want a comma before the data"),
        (Images(), "data:text/plain,hi", "image: got the data URL 'data:text/plain,hi', want an image/… media type"),
        (Images(), "data:image/png,a%2", "image: got the data URL 'data:image/png,a%2', want ASCII, and two hex"),
        (Images(), "data:image/png,ä", "image: got the data URL 'data:image/png,ä', want ASCII, and two hex digits"),
        (Images(), "data:image/png;base64,iVBO!A==", "image: got the data URL 'data:image/png;base64,iVBO!A==', want "),
        (Images(), "data:image/png;base64,", "image: got 0 bytes, want the bytes of a file"),
        (Images(), "a.png", f"image: got the path 'a.png', {UNREAD}"),
        (Images(), {"bytes": None, "path": "a.png"}, f"image.path: got the path 'a.png', {UNREAD}"),
        (LOCAL, "https://host/a.png", "image: got the URL 'https://host/a.png', want Images(resolver=…); no URL is fe"),
        (ASKED, "http://host/a", PNG),
        (ASKED, {"bytes": None, "path": "b"}, COFFEE),
        (ASKED, "c", SIZE),
        (ASKED, "coffee.jpg", COFFEE),
        (ASKED, "d", "image: got 'text' from the resolver, want an image or None"),
        (ASKED, "e", "image: got 0 bytes, want the bytes of a file"),
        (STRICT, "f", "image: got KeyError ('f') from the resolver for 'f', want an image"),
        (Images(), 5, f"image: got 5, {REFERENCE}"),
        (Images(), None, f"image: got nothing, {REFERENCE}"),
        (Images(), np.zeros(3), f"image: got ndarray, {REFERENCE}"),
        (Images(), {}, "image: got neither bytes nor path, want one of them"),
        (Images(), {"bytes": "iVBO", "path": None}, "image.bytes: got 'iVBO', want the bytes of a file"),
        (Images(), {"bytes": b"", "path": "a"}, "image.bytes: got 0 bytes, want the bytes of a file"),
        (Images(), {"bytes": None, "path": 5}, "image.path: got 5, want text"),
        (Images(), LEVELS.float(), "image: got a float tensor from 0 to 255, want 0 to 1, or uint8"),
        (Images(), torch.full((1, 2, 2), torch.nan), "image: got a float tensor from nan to nan, want 0 to 1"),
        (Images(), torch.full((1, 2, 2), -0.5), "image: got a float tensor from -0.5 to -0.5, want 0 to 1, or uint8"),
        (Images(), torch.zeros(3), "image: got a tensor of shape (3,), want an image"),
        (Images(), torch.zeros(0, 2), "image: got a tensor of shape (0, 2), want an image"),
    ],
)  # fmt: skip
def test_references_are_resolved_or_refused(images: Images, reference: object, want: object) -> None:
    got = resolve(images, reference)
    if isinstance(want, str):
        assert got.startswith(f"r: {want}")
    else:
        assert_equal(got, want)


def test_a_path_must_lead_to_a_file_inside_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base" / "deep").mkdir(parents=True)
    inside = tmp_path / "base" / "deep" / "a.png"
    inside.write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "base" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "base" / "loop").symlink_to(tmp_path / "base" / "loop")
    monkeypatch.chdir(tmp_path)
    images, base = Images("base"), tmp_path / "base"
    monkeypatch.chdir("/")
    for name in ("deep/a.png", "deep/../deep/a.png", str(inside), Path("deep/a.png"), {"path": "deep/a.png"}):
        assert resolve(images, name) == inside
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "/etc/passwd", ".."):
        message = resolve(images, name)
        assert message.startswith(f"r: image: got the path {repr(name)[:38]}")
        assert message.endswith(f", want a path that stays inside {base}")
    for name in ("b.png", "deep", "."):
        assert resolve(images, name) == f"r: image: got the path {name!r}, want a file that exists inside {base}"
    for name in ("a\0b", "loop", "x" * 5000, "\ud800"):
        assert f"inside {base}" in resolve(images, name)


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


def test_errors_about_large_values_stay_short() -> None:
    for reference in ("x" * 10**6, [["x" * 10**6] * 1000] * 1000, 10**5000, "data:image/png;base64," + "!" * 10**6):
        assert len(resolve(Images(), reference)) < 800
    whole = ["a" * 54, "b" * 58]
    assert describe(whole) == f"['{'a' * 54}', '{'b' * 58}']"
    assert describe(["a" * 55, "b" * 58]) == f"['{'a' * 55}', '{'b' * 58}…"


@pytest.mark.parametrize(
    ("kind", "options", "want"),
    [
        (Images, {"base": 5}, "base: got 5, want text or a path or None"),
        (Images, {"resolver": {}}, "resolver: got {}, want a callable or None"),
        *((kind, {"images": "folder"}, "images: got 'folder', want Images") for kind in FORMATS.values()),
        *((kind, {"template": "plain"}, "template: got 'plain', want ChatTemplate or TokenizerTemplate or None")
          for kind in (Chat, LLaVA, FineVision)),
        (Chat, {"media": 5}, "media: got 5, want a callable or None"),
        (ChatTemplate, {"user": ("a", "b")}, "user: got ('a', 'b'), want Turn or None"),
        (Turn, {"before": 5, "after": ""}, "before: got 5, want text"),
        (Turn, {"before": "", "after": None}, "after: got nothing, want text"),
        (HFImages, {"text": 5}, "text: got 5, want text"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(kind: Any, options: dict[str, Any], want: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{re.escape(want)}$"):
        kind(**options)


# Records of each format, with the pieces or the error


def changed(record: Mapping[str, object], path: tuple[str | int, ...], value: object) -> Any:
    """Return a copy of a record with the value at a path replaced."""
    copy: Any = deepcopy(record)
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return copy


def struct(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def talk(*turns: Any, **columns: object) -> dict[str, Any]:
    """Return a record of a chat that begins with the user."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)], **columns}


def user(*parts: object, **columns: object) -> dict[str, Any]:
    return talk(list(parts), **columns)


def llava(text: str, **columns: object) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text}], **columns}


def asked(*between: Any) -> list[Any]:
    """Return the pieces of one user's turn."""
    first, last = isinstance(between[0], str), isinstance(between[-1], str) and len(between) > 1
    head = "User:\n" + (between[0] if first else "")
    middle = [(part,) for part in between[first : len(between) - last]]
    tail = (between[-1] if last else "") + "\n\n"
    return [(head,), *middle, (tail,)] if middle else [(head + tail,)]


def media(part: Any) -> object:
    """Read videos and audio as a user's callable would."""
    if part["type"] == "input_audio":
        return Audio(part["input_audio"]["tokens"])
    if part["type"] == "video_url":
        return Clip(1, 2, frames=2, audio=3)
    if part["type"] == "audio":
        return Audio(part["audio"]["tokens"])
    return {"film": FILM, "image": Grid(1, 2), "nothing": None}[part["video"]]


FILM, WHO, ANY = Grid(1, 2, frames=2), {"type": "text", "text": "Who?"}, Chat(media=media)
MMC4_RECORD = {
    "text_list": ["First.", "Second.", "Third."],
    "image_info": [
        {"image_name": "coffee.jpg", "raw_url": "http://host/c", "matched_text_index": 2, "matched_sim": 0.3},
        {"image_name": "chelsea.jpg", "raw_url": "http://host/d", "matched_text_index": 2},
        {"image_name": "first.jpg", "raw_url": "http://host/e", "matched_text_index": 0},
    ],
    "similarity_matrix": [[0.1, 0.1, 0.3]],
}
CHAT_RECORD = {
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
        {"role": "assistant", "content": "A dot.", "tool_calls": [], "weight": 1, "loss": True, "train": True},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": None},
    ],
}
LLAVA_RECORD = {
    "image": "coffee.jpg",
    "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "Coffee."}],
}
FINE_TURNS = [{"user": "Who?", "assistant": "A cat.", "source": "TQA"}, {"user": "Sure?", "assistant": "Yes."}]
PAGE = {"texts": ["A", None, "B", "C", None], "images": [None, "a1.jpg", None, None, "17.b.PNG"], "audios": [None] * 5}
TAR_RECORD = {"__key__": "d/17", "json": PAGE, "a1.jpg": CAT, "b.png": PNG}
A_PAIR, A_CAT = {"__key__": "17", "jpg": CAT, "txt": "a cat"}, {"image": struct(CAT), "text": "a cat"}
THREE = [{"bytes": CAT, "path": None}, None, PNG_URL]

MATCHED = ("image_info", 0, "matched_text_index")
PART, TURN = ("messages", 1, "content"), ("messages", 2)
ROLES = "want one of system, developer, user, assistant, tool"
KINDS = (
    "want one of text, refusal, input_text, output_text, image, image_url, input_image, video, video_url, audio, "
    "audio_url, input_audio"
)
NO_MEDIA = "want Chat(media=…), which reads video and audio, or a video as a list of frames"
EACH = "one for each <image> and each image part without data"
EXTENSIONS = "want one of jpg, jpeg, png, webp, gif"
TRAINED = "want 1 or none, since every assistant turn is trained on"
EMPTY = "got no image and no text, want at least one"
JUST_ONE = "want one of image, url, path, base64"
RATE = "want frames per second, at least 0.000001 and at most 1000000"
A_MEDIUM = "want a Video, a Grid of several frames, a Clip or an Audio"

CASES: list[tuple[Any, Any, Any]] = [
    # Interleaved pages
    (Obelics(LOCAL), {"images": [None, PNG_URL, None, None, "coffee.jpg"], "texts": ["A", None, "B", "C", None],
                      "metadata": '[null, {"src": "dot.png"}]', "general_metadata": "x"}, ["A", PNG, "B\n\nC", COFFEE]),
    (Obelics(), [], "got [], want a mapping of names to values"),
    (Obelics(), {}, "images: got nothing, want a list"),
    (Obelics(), {"images": [None], "texts": [""]}, EMPTY),
    (Obelics(), {"images": [None], "texts": ["a", "b"]}, "images: got 1 items, want 2 as in texts"),
    (Obelics(), {"images": [None], "texts": [5]}, "texts[0]: got 5, want text"),
    (Obelics(), {"images": [None], "texts": [None]}, "images[0]: got neither, want either it or texts[0]"),
    (Obelics(), {"images": ["a"], "texts": ["b"]}, "images[0]: got both, want either it or texts[0]"),
    (Obelics(), {"images": [None], "texts": ["\ud800"]}, "texts[0]: got text with a lone surrogate"),
    *((TarDocuments(), changed(TAR_RECORD, ("json",), page), ["A", CAT, "B\n\nC", PNG])
      for page in (PAGE, json.dumps(PAGE), json.dumps(PAGE).encode())),
    (TarDocuments(), changed(TAR_RECORD, ("json", "images", 1), "d/17.a1.jpg"), ["A", CAT, "B\n\nC", PNG]),
    (TarDocuments(), {"json": {"images": ["a.jpg"], "texts": [None]}},
     "json.images[0]: got 'a.jpg', want a member of the sample, one of ['json']"),
    (TarDocuments(), {"json": b"[1]"}, "json: got [1], want a mapping of names to values"),
    (TarDocuments(), {**TAR_RECORD, "c.jpg": CAT},
     f"c.jpg: got {len(CAT)} bytes, want none, since TarDocuments does not read it"),
    (TarDocuments(), changed(TAR_RECORD, ("json", "audios"), ["a.wav", None]),
     "json.audios: got ['a.wav', None], want none, since TarDocuments does not read it"),
    (MMC4(NAMES), changed(MMC4_RECORD, ("image_info", 2, "matched_text_index"), np.int64(0)),
     [b"first.jpg", "First. Second.", b"coffee.jpg", b"chelsea.jpg", "Third."]),
    *((MMC4(NAMES), changed(MMC4_RECORD, MATCHED, index), f"image_info[0].matched_text_index: got {got}, want an index "
       "into the 3 items of text_list") for index, got in
      ((3, 3), (-1, -1), (1.0, 1.0), (True, True), ("0", "'0'"), (None, "nothing"))),
    (MMC4(NAMES), changed(MMC4_RECORD, ("image_info", 0, "video"), "a.mp4"), "image_info[0].video: got 'a.mp4', want"),
    # Captions and texts
    *((Pairs(), {"__key__": "17", kind: PNG, **caption}, [PNG, "a dot ä"])
      for kind in ("jpg", "jpeg", "png", "webp", "gif")
      for caption in ({"txt": "a dot ä".encode()}, {"txt": "a dot ä", "json": b"{"},
                      {"json": '{"caption": "a dot ä"}'.encode()}, {"json": {"caption": "a dot ä", "width": 1}})),
    (Pairs(), {"txt": "a"}, f"got no image, {EXTENSIONS}"),
    (Pairs(), {"jpg": PNG, "png": PNG, "txt": "a"}, f"got jpg and png, {EXTENSIONS}"),
    (Pairs(), {"jpg": PNG}, "got neither txt nor json, want txt, or json with a caption"),
    (Pairs(), {"jpg": PNG, "txt": b""}, "txt: got 0 bytes, want a non-empty caption"),
    (Pairs(), {"jpg": PNG, "txt": b"\xff"}, "txt: got bytes that are not UTF-8 ('utf-8' codec can't decode byte 0xff"),
    (Pairs(), {"jpg": PNG, "txt": 5}, "txt: got 5, want text or its bytes in UTF-8"),
    (Pairs(), {"jpg": PNG, "json": {"caption": ""}}, "json.caption: got '', want a non-empty caption"),
    (Pairs(), {"jpg": PNG, "json": 5}, "json: got 5, want an object, or one as JSON"),
    *((Pairs(), {"jpg": PNG, "json": text}, rf"json: got {repr(text)[:9]}") for text in ("{", "[" * 10**5, "1" * 5000)),
    (Pairs(), {**A_PAIR, "mp4": b"..."}, "mp4: got 3 bytes, want none, since Pairs does not read it"),
    (Pairs(), {**A_PAIR, "seg.png": PNG}, f"seg.png: got {len(PNG)} bytes, want none"),
    *((FORMATS["hf"](*names, images=LOCAL), dict(zip(names or ("image", "text"), columns, strict=True)), want)
      for names in ((), ("photo", "caption"))
      for *columns, want in (
          (struct(PNG), "a dot", [PNG, "a dot"]),
          (struct(None, "coffee.jpg"), "coffee", [COFFEE, "coffee"]),
          (None, "text alone", ["text alone"]),
          (struct(PNG), None, [PNG]),
          ([struct(PNG), struct(CAT)], "both", [PNG, CAT, "both"]),
          (struct(PNG), ["one", "two"], [PNG, "one\ntwo"]),
          (THREE, ["a", "b", None], [CAT, "a\nb", PNG]),
          (np.array([struct(PNG)], object), np.array(["a"]), [PNG, "a"]))),
    (HFImages(), {"text": "a", "label": 1}, "image: got columns ['text', 'label'], want a column with this name"),
    (HFImages(), {"image": None}, "text: got columns ['image'], want a column with this name"),
    (HFImages(), {"image": [struct(PNG), 5], "text": "a"}, f"image[1]: got 5, {REFERENCE}"),
    *((HFImages(), {**A_CAT, **more}, [CAT, "a cat"]) for more in (
        {"origin": "shots/1.png"}, {"meta": {"image": None, "image_url": "a.png", "id": 5}},
        {"image_url": "http://host/cat.jpg"}, {"image_id": 5},
        {"images": [], "video": False, "audio": None, "photos": "[]", "clips": {"bytes": None, "path": ""}})),
    *((HFImages(), {**A_CAT, "extra": value}, "extra: got") for value in (
        struct(PNG), [Image.new("L", (2, 2))], PNG, {"bytes": b"....ftypmp42", "name": "a"},
        {"array": [0.0], "sampling_rate": 16_000})),
    (Texts(), {"id": "a.png", "text": "see a.png", "url": "http://host/a"}, ["see a.png"]),
    (Texts("body"), {"body": "A"}, ["A"]),
    (Texts(), {"text": "a", "cover": PNG_URL}, "cover: got 'data:image/png"),
    # Chats
    (Chat(), CHAT_RECORD, [("System:\nBe brief.\n\nUser:\nWhat is",), (PNG,), ("this?\n\nAssistant:\n",), "A dot.\n\n",
                           ("User:\nAnd?\n\nAssistant:\n",), "No.\n\n"]),
    (Chat(ChatTemplate(user=Turn("<u>", "</u>"), assistant=Turn("<a>", "</a>"))), talk("Hi", ""),
     [("<u>Hi</u><a>",), "</a>"]),
    (Chat(ChatTemplate(system=None)), CHAT_RECORD, "messages[0].role: got 'system', want one of developer, user, "),
    (Chat(), {"messages": [{"role": "developer", "content": [{"type": "input_text", "text": "This:"},
                                                             {"type": "input_image", "image_url": PNG_URL}]},
                           {"role": "assistant", "content": [{"type": "output_text", "text": "A dot."}]}]},
     [("System:\nThis:",), (PNG,), ("\n\nAssistant:\n",), "A dot.\n\n"]),
    *((Chat(images=LOCAL), user({"type": "image", "url": None, **block}), asked(want)) for block, want in (
        ({"image": PNG_URL}, PNG), ({"url": PNG_URL}, PNG), ({"path": "coffee.jpg"}, COFFEE),
        ({"base64": PNG_BASE64}, PNG), ({"image": SIZE}, SIZE), ({"image": struct(PNG)}, PNG))),
    (Chat(), user({"type": "image", "url": "a", "path": "b"}), f"messages[0].content[0]: got url and path, {JUST_ONE}"),
    (Chat(), user({"type": "image", "file": "a"}), f"messages[0].content[0]: got none, {JUST_ONE}"),
    (Chat(), {"messages": []}, "got none, want at least one turn"),
    (Chat(), changed(CHAT_RECORD, ("messages", 0, "role"), "bot"), f"messages[0].role: got 'bot', {ROLES}"),
    (Chat(), changed(CHAT_RECORD, ("messages", 3, "content"), None),
     "messages[3].content: got nothing, want text or a list of parts"),
    (Chat(), changed(CHAT_RECORD, (*PART, 0, "type"), "file"), f"messages[1].content[0].type: got 'file', {KINDS}"),
    (Chat(), changed(CHAT_RECORD, (*PART, 0, "type"), "input_audio"),
     f"messages[1].content[0]: got input_audio, {NO_MEDIA}"),
    (Chat(), changed(CHAT_RECORD, (*PART, 1, "image_url", "url"), 5), "messages[1].content[1].image_url.url: got 5"),
    *((Chat(), changed(CHAT_RECORD, (*TURN, name), [1]), f"messages[2].{name}: got [1], want none, since Chat does not")
      for name in ("tool_calls", "function_call", "reasoning_content", "thinking", "attachment", "attachments")),
    *((Chat(), {**CHAT_RECORD, name: "a"}, f"{name}: got 'a', want none, since Chat does not read it")
      for name in ("tools", "functions", "system", "objects", "chosen", "rejected", "rejected_messages",
                   "rejected_response", "second_image_2")),
    *((form, {**record, name: [{"user": "a"}]}, f"{name}: got [{{'user': 'a'}}], want none")
      for form, record, name in ((Chat(), CHAT_RECORD, "conversations"), (Chat(), CHAT_RECORD, "texts"),
                                 (LLaVA(images=LOCAL), LLAVA_RECORD, "messages"))),
    (Chat(), talk("a", conversations=[]), asked("a")),
    (Chat(), talk("a", image_path="a.jpg"), "image_path: got 'a.jpg', want none"),
    *((Chat(), changed(CHAT_RECORD, (*TURN, name), flag), f"messages[2].{name}: got {flag}, {TRAINED}")
      for name, flag in (("weight", 0), ("weight", 0.5), ("loss", False), ("train", False), ("training", False),
                         ("loss_mask", 0))),
    (Chat(), changed(talk("Hi", "Ho"), ("messages", 0, "train"), False), [("User:\nHi\n\nAssistant:\n",), "Ho\n\n"]),
    (Chat(), changed(talk("Hi", "Ho"), ("messages", 0, "train"), True), "messages[0].train: got True, want 0 or none"),
    (Chat(), changed(CHAT_RECORD, (*TURN, "train_detail"), [{"train": False}]), "messages[2].train_detail: got ["),
    (Chat(), {**CHAT_RECORD, "label": False}, f"label: got False, {TRAINED}"),
    (LLaVA(images=LOCAL), changed(LLAVA_RECORD, ("conversations", 1, "loss"), False),
     f"conversations[1].loss: got False, {TRAINED}"),
    (FineVision(), {"texts": [{**FINE_TURNS[0], "weight": 0}]}, f"texts[0].weight: got 0, {TRAINED}"),
    (Chat(ChatTemplate(user=Turn("", ""))), user(), EMPTY),
    (Chat(), user({"type": "image_url", "image_url": {"url": PNG_URL, "detail": "low"}}), "messages[0].content[0]"
     ".image_url.detail: got 'low', want auto or none, since the ImageProcessor determines the size of images"),
    *((Chat(), user({**part, "detail": "low"}), "messages[0].content[0].detail: got 'low', want auto or none")
      for part in ({"type": "input_image", "image_url": PNG_URL}, {"type": "image", "image": PNG})),
    *((Chat(), user({"type": "image", **part}), f"messages[0].content[0].{name}: got 5, want none")
      for name in ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
      for part in ({"image": PNG, name: 5}, {name: 5, "image": PNG})),
    *((Chat(), user({"type": "video", "video": [PNG], "fps": 1, name: 8}), f"messages[0].content[0].{name}: got 8")
      for name in ("nframes", "min_frames", "max_frames", "video_start", "video_end", "sample_fps")),
    (Chat(), changed(talk("a"), ("messages", 0, "images"), ["a.jpg"]), "messages[0].images: got ['a.jpg'], want none"),
    (Chat(), user({"type": "text", "text": "a", "image": "b"}), "messages[0].content[0].image: got 'b', want none"),
    (Chat(), talk("a", clip=[None, "https://host/a.MP4"]), "clip: got [None, 'https://host/a.MP4'], want none"),
    *((Chat(), talk("a", media=media), f"media: got {media}, want none")
      for media in ([{"image": "a"}], {"b": {"videos": ["a"]}})),
    # Media beside the turns
    (Chat(images=LOCAL, media=media),
     talk("A <image>B<image>\n", "C", "<video>D<audio><image>",
          images=["coffee.jpg", PNG, struct(CAT)], videos="film", audios=[{"tokens": 7}]),
     [("User:\nA ",), (COFFEE,), ("B",), (PNG,), ("\n\n\nAssistant:\n",), "C\n\n",
      ("User:\n",), (FILM,), ("D",), (Audio(7),), (CAT,), ("\n\n",)]),
    (Chat(), talk("What?", images=[PNG]), asked(PNG, "What?")),
    (Chat(), talk("What?", image=PNG, images=[], videos=None, audios=[None]), asked(PNG, "What?")),
    (Chat(), user(*({"type": "image", "text": None, "index": i} for i in range(2)), WHO, images=[PNG, struct(CAT)]),
     asked(PNG, CAT, "Who?")),
    (Chat(), {"messages": [{"role": "system", "content": "A"}, *talk("B")["messages"]], "images": [PNG]},
     [("System:\nA\n\nUser:\n",), (PNG,), ("B\n\n",)]),
    (Chat(), talk("<image> and <image>", images=[PNG]), f"images: got 1 item, want 2, {EACH}"),
    (Chat(), {"messages": [{"role": "tool", "content": "A"}], "images": [PNG]}, f"images: got 1 item, want 0, {EACH}"),
    (Chat(), user({"type": "image", "image": PNG}, images=[PNG]), f"images: got 1 item, want 0, {EACH}"),
    (Chat(), user({"type": "image", "index": 1}, images=[PNG]),
     "messages[0].content[0].index: got 1, want 0, the number of items of images before it"),
    (Chat(), talk("Who?", images=[None]), f"images[0]: got nothing, {REFERENCE}"),
    (Chat(), talk("<video>"), f"videos: got 0 items, want 1, {EACH.replace('image', 'video')}"),
    (Chat(), talk("<video>", videos=["a.mp4"]), f"videos[0]: got video, {NO_MEDIA}"),
    (Chat(), user({"type": "video", "url": "a.mp4"}), f"messages[0].content[0]: got video, {NO_MEDIA}"),
    (Chat(), talk("<video>", videos=[[PNG, PNG]]), f"videos[0].fps: got nothing, {RATE}"),
    *((Chat(), user({"type": "video", "video": [PNG], "fps": fps}), f"messages[0].content[0].fps: got {fps}, {RATE}")
      for fps in (0, -1, 1e-9, 1e7, float("nan"), True)),
    (Chat(), user({"type": "video", "video": [], "fps": 1}), "messages[0].content[0].video: got [], want at least one"),
    (Chat(images=LOCAL), talk("<image>", images=["no.jpg"]),
     f"images[0]: got the path 'no.jpg', want a file that exists inside {PHOTOS}"),
    (ANY, user({"type": "input_audio", "input_audio": {"tokens": 7}}, {"type": "video_url", "video_url": {"url": "a"}},
               {"type": "video", "video": "film", "nframes": 3}), asked(Audio(7), Clip(1, 2, frames=2, audio=3), FILM)),
    *((ANY, user({"type": "video", "video": name}), f"messages[0].content[0]: got {got} from media, {A_MEDIUM}")
      for name, got in (("image", "Grid"), ("nothing", "nothing"), ("lost", "KeyError ('lost')"))),
    (LLaVA(images=LOCAL), {"image": ["coffee.jpg", struct(PNG)], "conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "<image>\nWhat is it?<image>"},
        {"from": "gpt", "value": "Coffee."}]},
     [("System:\nBe brief.\n\nUser:\n",), (COFFEE,), ("\nWhat is it?",), (PNG,), ("\n\nAssistant:\n",), "Coffee.\n\n"]),
    (LLaVA(), llava("What?", images=[PNG]), asked(PNG, "What?")),
    (LLaVA(), llava("A <image> B", image=PNG), asked("A ", PNG, " B")),
    (LLaVA(media=media), llava("<video>\nWhat?", video="film"), asked(FILM, "\nWhat?")),
    (LLaVA(media=media), llava("<image>\nWhat?", video="film"), asked(FILM, "\nWhat?")),
    (LLaVA(media=media), llava("<image><video>", video="film"), f"images: got 0 items, want 1, {EACH}"),
    (LLaVA(), llava("<audio>", audio="a.wav"), f"audio: got audio, {NO_MEDIA.replace('Chat', 'LLaVA')}"),
    (LLaVA(images=LOCAL), changed(LLAVA_RECORD, ("conversations", 0, "from"), "user"),
     "conversations[0].from: got 'user', want one of human, gpt, system"),
    (LLaVA(images=LOCAL), changed(LLAVA_RECORD, ("conversations", 1, "value"), "<image>"),
     f"image: got 1 item, want 2, {EACH}"),
    (LLaVA(images=LOCAL), {**LLAVA_RECORD, "image": None}, f"images: got 0 items, want 1, {EACH}"),
    (LLaVA(images=LOCAL), {**LLAVA_RECORD, "images": ["a"]}, "image: got 'coffee.jpg', want nothing beside image"),
    (FineVision(), {"images": [struct(CAT), PNG], "texts": FINE_TURNS, "source": "tqa", "relevance_ratings": [4]},
     [("User:\n",), (CAT,), (PNG,), ("Who?\n\nAssistant:\n",), "A cat.\n\n",
      ("User:\nSure?\n\nAssistant:\n",), "Yes.\n\n"]),
    (FineVision(), {"images": [PNG], "texts": [{"user": "A <image>", "assistant": "B"}]},
     [("User:\nA ",), (PNG,), ("\n\nAssistant:\n",), "B\n\n"]),
    (FineVision(), {"images": [PNG], "texts": [{"user": "a"}]}, "texts[0].assistant: got nothing, want text"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{type(CASES[i][0]).__name__}-{i}")
def test_a_record_has_these_pieces_or_this_error(number: int) -> None:
    form, record, want = CASES[number]
    read = pickle.loads(pickle.dumps(form))
    assert read == form
    if isinstance(want, list):
        assert [piece.part if piece.train else (piece.part,) for piece in read(record, HERE).pieces] == want
        return
    with pytest.raises(RecordError) as refused:
        read(record, HERE)
    where = f"17 ({HERE})" if "__key__" in record else HERE
    assert str(refused.value).replace("d/17", "17").startswith(f"{where}: {want}")


def test_chat_accepts_videos_as_lists_of_frames() -> None:
    part = {"type": "video", "video": [PNG_URL, struct(PNG), "coffee.jpg"], "fps": 29.97}
    (_, video, text) = Chat(images=LOCAL)(user(part, WHO), HERE).parts
    assert isinstance(video, Video)
    assert (video.frames, text) == ((PNG, PNG, COFFEE), "Who?\n\n")
    assert video.times == (Fraction(0), Fraction(100, 2997), Fraction(200, 2997))


@pytest.mark.parametrize(
    ("name", "record", "text", "message"),
    [
        ("obelics", {"images": [None, "no.jpg", None], "texts": ["A", None, "B"]}, "A\n\nB", "images[1]: got the pat"),
        ("llava", llava("A<image>B", image="no.jpg"), "<AB>", "image: got the path 'no.jpg'"),
        ("pairs", {"jpg": b"", "txt": "AB"}, "AB", "jpg: got 0 bytes"),
        *(("chat", user(WHO, {"type": "video", **part}, WHO), "<Who?Who?>", message)
          for part, message in (
              ({"video": [PNG, b"broken"], "fps": 1}, "parts[1].frames[1]: image: got a file"),
              ({"video": [PNG, "gone"], "fps": 1}, "messages[0].content[1].video[1]: got the path 'gone'"),
              ({"video": "lost"}, "messages[0].content[1]: got KeyError ('lost') from media"))),
    ],
)  # fmt: skip
def test_media_that_cannot_be_read_are_dropped_as_a_whole(name: str, record: Any, text: str, message: str) -> None:
    talks = {"template": ChatTemplate(user=Turn("<", ">")), "media": media} if name in ("chat", "llava") else {}
    read = FORMATS[name](images=LOCAL, **talks)
    with pytest.raises(RecordError):
        Preprocess(read, BUILDER)(record, HERE)
    example = Preprocess(read, BUILDER, on_image_error="drop")(record, HERE)
    assert BUILDER.tokenizer.decode(example.sequence.input_ids.tolist()) == text
    (error,) = example.dropped_images
    assert error.startswith(f"shard-3.jsonl[17]: {message}")


@pytest.mark.parametrize(
    ("ids", "key"),
    [
        ({}, "shard-3.jsonl[17]"),
        ({"id": "a7", "__key__": "000017"}, "a7"),
        ({"id": 7}, "7"),
        ({"id": np.int64(7)}, "7"),
        ({"id": None, "__key__": "000017"}, "000017"),
        ({"id": [1]}, "shard-3.jsonl[17]: id: got [1], want text or an integer of 64 bits"),
        ({"id": True}, "shard-3.jsonl[17]: id: got True, want text or an integer of 64 bits"),
        ({"id": 2**64}, "shard-3.jsonl[17]: id: got 18446744073709551616, want text or an integer of 64 bits"),
        ({"id": ""}, "shard-3.jsonl[17]: id: got '', want a non-empty key"),
        ({"__key__": "\ud800"}, "shard-3.jsonl[17]: __key__: got text with a lone surrogate"),
    ],
)
def test_the_key_is_the_id_of_the_record_or_else_its_location(ids: dict[str, object], key: str) -> None:
    try:
        got = Texts()({"text": "a", **ids}, HERE).key
    except RecordError as error:
        got = str(error)[: len(key)]
    assert got == key


RECORDS: dict[str, dict[str, Any]] = {
    "obelics": {"images": [None, PNG_URL], "texts": ["a", None]},
    "mmc4": changed(MMC4_RECORD, ("image_info", 2, "image_name"), "chelsea.jpg"),
    "chat": CHAT_RECORD,
    "llava": LLAVA_RECORD,
    "finevision": {"images": [struct(CAT)], "texts": [{"user": "What?", "assistant": "A cat."}]},
    "hf": A_CAT,
    "pairs": A_PAIR,
    "tar-documents": {"json": {"images": ["a.jpg", None], "texts": [None, "a cat"]}, "a.jpg": CAT},
    "texts": {"text": "a cat"},
}
PLACED = {"hf": ("image",), **dict.fromkeys(("chat", "llava", "finevision"), ("image", "images"))}
WITHOUT: dict[str, dict[str, Any]] = {
    **RECORDS, "obelics": {"images": [None], "texts": ["a"]}, "mmc4": {"text_list": ["a"], "image_info": []},
    "chat": talk("a"), "llava": llava("a"), "finevision": {"texts": [{"user": "a", "assistant": "b"}]},
    "hf": {"image": None, "text": "a"},
}  # fmt: skip


@pytest.mark.parametrize("value", ["coffee.jpg", PNG, [PNG], [struct(PNG)], [None, "coffee.jpg"], np.ones((4, 4, 3))])
@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_format_passes_over_a_column_of_media(name: str, column: str, value: object) -> None:
    read, record = FORMATS[name](images=LOCAL), {**WITHOUT[name], column: value}
    if column in PLACED.get(name, ()) and not (isinstance(value, list) and value[0] is None):
        (placed,) = (part for part in read(record, HERE).parts if not isinstance(part, str))
        assert placed is value or placed in (PNG, COFFEE)
    else:
        with pytest.raises(RecordError, match=rf"^(17 \()?shard-3.jsonl\[17\]\)?: {column}(\[0\])?: got "):
            read(record, HERE)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["", "text", "user", "coffee.jpg", "..", "http://host", "data:,"]),
    st.sampled_from(["<image>", "[]", "\ud800", 10**400]),
)  # fmt: skip
WORDS = st.one_of(
    st.sampled_from(["id", "__key__", "text", "image", "type", "role", "url", "bytes", "path"]), st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
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
        record = data.draw(st.dictionaries(st.sampled_from([*RECORDS[name]]) | WORDS, VALUES))
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
