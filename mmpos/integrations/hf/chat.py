"""Read the images and videos in a processor's arguments and chats: objects, bytes, paths and data URLs."""

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
    "flatten",
    "is_chat",
    "local_path",
    "process",
    "read_conversations",
    "read_image",
    "separate_images",
]


def flatten(kind: str, images: object, texts: int | None) -> tuple[list[tuple[str, Any]], IntArray | None]:
    """Return all images with their names, and the number of images per text if they are nested, else None.

    Args:
        kind: name of the argument, "images" or "videos".
        images: one image, a list of images for all texts, a list that contains a list of images for each text, or None.
        texts: number of texts; None if there is no text.
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
        raise InvalidInputError(
            f"{kind}[{i}]: got {type(images[i]).__name__}, want all {kind} in lists, or none in lists"
        )
    if texts is not None and len(images) != texts:
        raise InvalidInputError(f"{kind}: got {len(images)} lists, want {texts}, one per text")
    named = [(f"{kind}[{i}][{n}]", image) for i, each in enumerate(images) for n, image in enumerate(each)]
    return named, np.fromiter(map(len, images), np.int64, len(images))


def process(
    named: list[tuple[str, Any]], images: ImageProcessor, temporal_patch_size: int | None, read_files: bool
) -> list[ProcessedImage]:
    """Process each image; errors contain the image's name."""
    processed = []
    for name, image in named:
        source = read_image(name, image, read_files) if isinstance(image, str) else image
        with naming(name):
            processed.append(images.process(source, temporal_patch_size=temporal_patch_size))
    return processed


def read_image(name: str, text: str, read_files: bool) -> bytes | Path:
    """Decode a data: URL, or return the path of an image file; remote URLs are never fetched.

    Args:
        name: name of the image in error messages.
        text: a data: or file: URL, or a path.
        read_files: whether text may be the path of a file.
    """
    if text[:5].lower() == "data:":
        return read_data_url(name, text)
    return local_path(name, text, read_files, "bytes, a Pillow image, an array or a data: URL")


def local_path(name: str, text: str, read_files: bool, other: str) -> Path:
    """Return text as the path of an existing file; refuse remote URLs, and all paths if read_files is False."""
    got = f"{name}: got the text {text[:80]!r}"
    scheme, slashes, _ = text.partition("://")
    if slashes and scheme.lower() != "file":
        raise InvalidInputError(f"{got}, want the path of a file, {other}; URLs are never fetched")
    if not read_files:
        raise InvalidInputError(f"{got}, want {other}; read_files=False forbids paths")
    path = url2pathname(urlsplit(text).path) if slashes else text
    if not os.path.isfile(path):
        raise InvalidInputError(f"{got}, want the path of an existing file, {other}")
    return Path(path)


FRAMES = "a list of frames, or an array of (frames, height, width, 3)"
"""Description of videos that need no decoder, for error messages."""


class Frames:
    """Frames of one video; this class distinguishes frames from a list of videos.

    This is not a dataclass, because Transformers converts dataclasses in a chat to mappings.

    Args:
        images: the frames, each in a form that ImageProcessor accepts, or as text for ``read_image``.
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
    """Return whether text is a conversation (a list of messages) or a list of conversations."""
    first = text[0] if isinstance(text, list | tuple) and text else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Mapping)


def read_conversations(conversation: object, read_files: bool, *, videos: bool) -> Messages | list[Messages]:
    """Copy one or more conversations, and replace each text that refers to an image or video with bytes or a path.

    Args:
        conversation: in the format of Transformers or of the OpenAI API.
        read_files: whether text may be the path of a file.
        videos: whether videos are allowed.

    Raises:
        InvalidInputError: there are no messages, or the source of an image or video has an unknown format.
        UnsupportedError: a message contains audio, or contains a video although videos are not allowed.
    """
    refused = _AUDIO if videos else _AUDIO + _VIDEOS
    if not is_chat(conversation):
        got = _kind(conversation)
        raise InvalidInputError(f"conversation: got {got}, want a list of messages or a list of conversations")
    if isinstance(conversation[0], Mapping):
        return _read("conversation", conversation, read_files, refused)
    return [_read(f"conversation[{i}]", each, read_files, refused) for i, each in enumerate(conversation)]


def separate_images(conversation: Sequence[Any], images: object) -> list[object]:
    """Return a list of the images that were passed separately from a chat; for several chats, one such list per chat.

    Raises:
        InvalidInputError: the chats already contain images, or images does not contain one list per chat.
    """
    is_single = isinstance(conversation[0], Mapping)
    chats = [conversation] if is_single else conversation
    contents = [message.get("content") for messages in chats for message in messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    if any(block["type"] == "image" and "image" in block for block in blocks):
        raise InvalidInputError("images cannot be combined with chats that contain images")
    if is_single:
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
            raise InvalidInputError(f"{got}, want text, a list of blocks or None")
        if isinstance(content, list | tuple):
            named = ((f"{name}[{i}].content[{n}]", block) for n, block in enumerate(content))
            message = {**message, "content": [_block(*each, read_files, refused) for each in named]}
        copies.append(dict(message))
    return copies


def _block(name: str, block: object, read_files: bool, refused: tuple[str, ...]) -> Mapping[str, object]:
    """Read one content block; the result has the image under "image" or the video under "video"."""
    if not isinstance(block, Mapping) or (kind := block.get("type")) is None:
        raise InvalidInputError(f"{name}: got {_kind(block)}, want a block with a type")
    if kind in refused:
        want = "text or an image" if kind in _VIDEOS else "text, an image or a video"
        raise UnsupportedError(f"{name}.type: got {kind!r}, want {want}")
    for medium in ("image", "video"):
        if kind == f"{medium}_url":
            url = block.get(kind)
            block, kind = {"type": medium, "url": url.get("url") if isinstance(url, Mapping) else url}, medium
            if block["url"] is None:
                raise InvalidInputError(f"{name}.{medium}_url: got None, want the URL of the {medium}")
    if kind in ("image", "video"):
        sources = _IMAGE_SOURCES if kind == "image" else _VIDEO_SOURCES
        keys = [key for key in sources if block.get(key) is not None]
        if len(keys) > 1:
            raise InvalidInputError(f"{name}: got {' and '.join(keys)}, want one of them")
        rest = {key: block[key] for key in block if key not in sources}
        read = _image if kind == "image" else _video
        return {**rest, kind: read(name, keys[0], block[keys[0]], read_files)} if keys else rest
    # Templates skip blocks of unknown types, so the image would be silently lost.
    for key in ("image", "image_url", "video", "video_url"):
        if block.get(key) is not None:
            raise InvalidInputError(f"{name}.{key}: got this key in a block of type {kind!r}, want type {key[:5]!r}")
    return block


def _image(name: str, key: str, value: Any, read_files: bool) -> object:
    """Return the image of a block: text is converted to bytes or a path; other objects are returned unchanged."""
    if key == "base64":
        return read_data_url(name, f"data:;base64,{value}")
    if key == "path" and not isinstance(value, str | PathLike):
        raise InvalidInputError(f"{name}.path: got {type(value).__name__}, want text or a path")
    if key == "url" and not isinstance(value, str):
        raise InvalidInputError(f"{name}: got a URL of type {type(value).__name__}, want text")
    return read_image(name, value, read_files) if isinstance(value, str) else value


def _video(name: str, key: str, value: Any, read_files: bool) -> object:
    """Return the video in a block: text is converted to a path, and a list is interpreted as video frames."""
    if isinstance(value, str):
        return local_path(name, value, read_files, FRAMES)
    if key != "video" and not isinstance(value, PathLike):
        raise InvalidInputError(f"{name}.{key}: got {type(value).__name__}, want text or a path")
    return Frames(tuple(value)) if isinstance(value, list | tuple) else value


def _kind(value: object) -> str:
    return "none" if isinstance(value, list | tuple) and not value else type(value).__name__
