"""Images and videos of a processor's call and of its chats: objects, bytes, paths and data URLs, each with its name."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.images.decode import read_data_url
from mmpos.support.checks import IntArray, naming

__all__ = [
    "FRAMES",
    "Frames",
    "flat",
    "images_beside",
    "is_chat",
    "process",
    "read_conversations",
    "read_image",
    "without_url",
]


def flat(kind: str, images: object, texts: int | None) -> tuple[list[tuple[str, Any]], IntArray | None]:
    """Name the images, and count those of each text where they are nested.

    Args:
        kind: name of the argument, "images" or "videos".
        images: one image, a list of them for all texts, a list of such a list for each text, or None.
        texts: number of texts; None where there is no text.
    """
    if images is None:
        return [], None
    if not isinstance(images, list | tuple):
        return [(kind, images)], None
    nested = [isinstance(each, list | tuple) for each in images]
    if not any(nested):
        return [(f"{kind}[{i}]", image) for i, image in enumerate(images)], None
    if not all(nested):
        i = nested.index(not nested[0])
        raise InvalidInputError(f"{kind}[{i}]: got {type(images[i]).__name__}, want all {kind} in lists, or none")
    if texts is not None and len(images) != texts:
        raise InvalidInputError(f"{kind}: got {len(images)} lists, want {texts}, one for each text")
    named = [(f"{kind}[{i}][{n}]", image) for i, each in enumerate(images) for n, image in enumerate(each)]
    return named, np.fromiter(map(len, images), np.int64, len(images))


def process(
    named: list[tuple[str, Any]], images: ImageProcessor, temporal_patch_size: int | None, read_files: bool
) -> list[ProcessedImage]:
    """Process each image; an error names the image."""
    processed = []
    for name, image in named:
        read = read_image(name, image, read_files) if isinstance(image, str) else image
        with naming(name):
            processed.append(images.process(read, temporal_patch_size=temporal_patch_size))
    return processed


def read_image(name: str, text: str, read_files: bool) -> bytes | Path:
    """Read the text that stands for an image: decode a data: URL, or return the path of a file; nothing is fetched.

    Args:
        name: of the image, for errors.
        text: a data: or file: URL, or a path.
        read_files: whether text may name a file.
    """
    if text[:5].lower() == "data:":
        return read_data_url(name, text)
    return without_url(name, text, read_files, "bytes, a Pillow image, an array or a data: URL")


def without_url(name: str, text: str, read_files: bool, other: str) -> Path:
    """Return the path that a text is, and refuse a URL, the path of no file, and all paths if none are to be read."""
    got = f"{name}: got the text {text[:80]!r}"
    scheme, slashes, _ = text.partition("://")
    if slashes and scheme.lower() != "file":
        raise InvalidInputError(f"{got}, a URL, which is never fetched, want the path of a file, {other}")
    if not read_files:
        raise InvalidInputError(f"{got}, want {other}: with read_files=False no text names a file")
    path = url2pathname(urlsplit(text).path) if slashes else text
    if not os.path.isfile(path):
        raise InvalidInputError(f"{got}, want the path of a file that exists, {other}")
    return Path(path)


FRAMES = "a list of frames, or an array of (frames, height, width, 3)"
"""Videos that need no decoder, as errors describe them."""


class Frames:
    """Frames of one video, told from a list of videos; no dataclass, which Transformers makes a mapping of in a chat.

    Args:
        images: each as ImageProcessor takes it, or text that stands for one.
    """

    def __init__(self, images: tuple[Any, ...]) -> None:
        self.images = images


Messages: TypeAlias = list[dict[str, Any]]
"""Messages of one conversation."""

_IMAGE_SOURCES = ("image", "url", "path", "base64")
_VIDEO_SOURCES = ("video", "url", "path")
_VIDEOS = ("video", "video_url")
_AUDIO = ("audio", "input_audio")


def is_chat(text: object) -> TypeGuard[Sequence[Any]]:
    """Whether this is a conversation, a list of messages, or a list of conversations."""
    first = text[0] if isinstance(text, list | tuple) and text else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Mapping)


def read_conversations(conversation: object, read_files: bool, *, videos: bool) -> Messages | list[Messages]:
    """Copy a conversation, or a list of them, with every image as bytes, a path or an object, and videos likewise.

    Args:
        conversation: of Transformers or of the OpenAI API.
        read_files: whether text may name a file.
        videos: whether there may be videos.

    Raises:
        InvalidInputError: no messages, or an image or video that is named in no known way.
        UnsupportedError: audio, or a video that may not be there.
    """
    refused = _AUDIO if videos else _AUDIO + _VIDEOS
    if not is_chat(conversation):
        raise InvalidInputError(f"conversation: got {_kind(conversation)}, want a list of messages, or a list of those")
    if isinstance(conversation[0], Mapping):
        return _read("conversation", conversation, read_files, refused)
    return [_read(f"conversation[{i}]", each, read_files, refused) for i, each in enumerate(conversation)]


def images_beside(conversation: Sequence[Any], images: object) -> list[object]:
    """List the images that are given apart from their chat; of several chats, a list for each.

    Raises:
        InvalidInputError: the chats hold images themselves, or their number is another.
    """
    one = isinstance(conversation[0], Mapping)
    chats = [conversation] if one else conversation
    contents = [message.get("content") for messages in chats for message in messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    if any(block["type"] == "image" and "image" in block for block in blocks):
        raise InvalidInputError("images: got images beside chats that hold theirs, want them in one place")
    if one:
        return list(images) if isinstance(images, list | tuple) else [images]
    if not isinstance(images, list | tuple) or not all(isinstance(each, list | tuple) for each in images):
        raise InvalidInputError(f"images: got {_kind(images)}, want a list of images for each of {len(chats)} chats")
    return list(images)


def _read(name: str, messages: object, read_files: bool, refused: tuple[str, ...]) -> Messages:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInputError(f"{name}: got {_kind(messages)}, want a list of messages")
    copies = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidInputError(f"{name}[{i}]: got {type(message).__name__}, want a message with role and content")
        content = message.get("content")
        if not isinstance(content, list | tuple | str | None):
            got = f"{name}[{i}].content: got {type(content).__name__}"
            raise InvalidInputError(f"{got}, want text, a list of blocks, or None")
        if isinstance(content, list | tuple):
            named = ((f"{name}[{i}].content[{n}]", block) for n, block in enumerate(content))
            message = {**message, "content": [_block(*each, read_files, refused) for each in named]}
        copies.append(dict(message))
    return copies


def _block(name: str, block: object, read_files: bool, refused: tuple[str, ...]) -> Mapping[str, object]:
    """Read one block of content; that of an image gets its image under "image", that of a video under "video"."""
    if not isinstance(block, Mapping) or (kind := block.get("type")) is None:
        raise InvalidInputError(f"{name}: got {_kind(block)}, want a block with a type")
    if kind in refused:
        want = "text or an image" if kind in _VIDEOS else "text, an image or a video"
        raise UnsupportedError(f"{name}.type: got {kind!r}, want {want}")
    for media in ("image", "video"):
        if kind == f"{media}_url":
            url = block.get(kind)
            block, kind = {"type": media, "url": url.get("url") if isinstance(url, Mapping) else url}, media
            if block["url"] is None:
                raise InvalidInputError(f"{name}.{media}_url: got none, want the URL of the {media}")
    if kind in ("image", "video"):
        sources = _IMAGE_SOURCES if kind == "image" else _VIDEO_SOURCES
        named = [key for key in sources if block.get(key) is not None]
        if len(named) > 1:
            raise InvalidInputError(f"{name}: got {' and '.join(named)}, want one of them")
        rest = {other: block[other] for other in block if other not in sources}
        read = _image if kind == "image" else _video
        return {**rest, kind: read(name, named[0], block[named[0]], read_files)} if named else rest
    # Templates skip what they do not know: the image would be lost in silence.
    for key in ("image", "image_url", "video", "video_url"):
        if block.get(key) is not None:
            raise InvalidInputError(f"{name}.{key}: got one in a block of type {kind!r}, want type {key[:5]!r}")
    return block


def _image(name: str, key: str, value: Any, read_files: bool) -> object:
    """Read the image of a block: text becomes bytes or a path, all else stays."""
    if key == "base64":
        return read_data_url(name, f"data:;base64,{value}")
    if key == "path" and not isinstance(value, str | PathLike):
        raise InvalidInputError(f"{name}.path: got {type(value).__name__}, want text or a path")
    if key == "url" and not isinstance(value, str):
        raise InvalidInputError(f"{name}: got a URL of type {type(value).__name__}, want text")
    return read_image(name, value, read_files) if isinstance(value, str) else value


def _video(name: str, key: str, value: Any, read_files: bool) -> object:
    """Read the video of a block: text becomes a path, and a list is of its frames."""
    if isinstance(value, str):
        return without_url(name, value, read_files, FRAMES)
    if key != "video" and not isinstance(value, PathLike):
        raise InvalidInputError(f"{name}.{key}: got {type(value).__name__}, want text or a path")
    return Frames(tuple(value)) if isinstance(value, list | tuple) else value


def _kind(value: object) -> str:
    return "none" if isinstance(value, list | tuple) and not value else type(value).__name__
