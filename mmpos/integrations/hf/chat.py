"""Images of a processor's call and of its chats: objects, bytes, paths and data URLs, read into patches and grids."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote_to_bytes

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.images import ImageProcessor, ProcessedImage
from mmpos.support.checks import IntArray, naming

__all__ = [
    "flat",
    "images_beside",
    "is_chat",
    "patches_of",
    "process",
    "read_base64",
    "read_conversations",
    "read_text",
]


def flat(images: object, texts: int | None) -> tuple[list[tuple[str, object]], IntArray | None]:
    """Name the images, and count those of each text where they are nested.

    Args:
        images: one image, a list of them for all texts, a list of such a list for each text, or None.
        texts: number of texts; None where there is no text.
    """
    if images is None:
        return [], None
    if not isinstance(images, list | tuple):
        return [("images", images)], None
    nested = [isinstance(each, list | tuple) for each in images]
    if not any(nested):
        return [(f"images[{i}]", image) for i, image in enumerate(images)], None
    if not all(nested):
        i = nested.index(not nested[0])
        raise InvalidInputError(f"images[{i}]: got {type(images[i]).__name__}, want all images in lists, or none")
    if texts is not None and len(images) != texts:
        raise InvalidInputError(f"images: got {len(images)} lists, want {texts}, one for each text")
    named = [(f"images[{i}][{n}]", image) for i, each in enumerate(images) for n, image in enumerate(each)]
    return named, np.fromiter(map(len, images), np.int64, len(images))


def process(
    named: list[tuple[str, object]], images: ImageProcessor, temporal_patch_size: int | None
) -> list[ProcessedImage]:
    """Process each image; an error names the image."""
    processed = []
    for name, image in named:
        read = read_text(name, image) if isinstance(image, str) else image
        with naming(name):
            processed.append(images.process(read, temporal_patch_size=temporal_patch_size))
    return processed


def patches_of(processed: list[ProcessedImage]) -> npt.NDArray[np.generic] | None:
    """Concatenate the patches of all images; None where only their sizes are known."""
    pixels = [image.patches for image in processed if image.patches is not None]
    if pixels and len(pixels) < len(processed):
        raise InvalidInputError("images: got images with and without pixels, want all of one sort")
    if len(pixels) == 1:
        return pixels[0]
    return np.concatenate(pixels) if pixels else None


def read_text(name: str, text: str) -> bytes:
    """Decode a data: URL; no other text stands for an image, since nothing is fetched or opened."""
    head, comma, data = text.partition(",")
    if head[:5].lower() != "data:":
        raise InvalidInputError(
            f"{name}: got the text {text[:80]!r}, want bytes, pathlib.Path(...) for a file, or a data: URL"
        )
    if not comma or not data.isascii():
        raise InvalidInputError(f"{name}: got a broken data: URL, want data:image/...;base64,...")
    raw = unquote_to_bytes(data)
    return read_base64(name, raw) if head.lower().endswith(";base64") else raw


def read_base64(name: str, data: str | bytes) -> bytes:
    """Decode base64, or raise an error that names the image."""
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: got base64 that is broken ({error}), want base64") from error


Messages: TypeAlias = list[dict[str, Any]]
"""Messages of one conversation."""

_SOURCES = ("image", "url", "path", "base64")
_NO_PLACE = ("video", "video_url", "audio", "input_audio")


def is_chat(text: object) -> TypeGuard[Sequence[Any]]:
    """Whether this is a conversation, a list of messages, or a list of conversations."""
    first = text[0] if isinstance(text, list | tuple) and text else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Mapping)


def read_conversations(conversation: object) -> Messages | list[Messages]:
    """Copy a conversation, or a list of them, with every image as bytes, a path or an object.

    Raises:
        InvalidInputError: no messages, or an image that is named in no known way.
        UnsupportedError: a video or audio.
    """
    if not is_chat(conversation):
        raise InvalidInputError(f"conversation: got {_kind(conversation)}, want a list of messages, or a list of those")
    if isinstance(conversation[0], Mapping):
        return _read("conversation", conversation)
    return [_read(f"conversation[{i}]", each) for i, each in enumerate(conversation)]


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


def _read(name: str, messages: object) -> Messages:
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
            blocks = [_block(f"{name}[{i}].content[{n}]", block) for n, block in enumerate(content)]
            message = {**message, "content": blocks}
        copies.append(dict(message))
    return copies


def _block(name: str, block: object) -> Mapping[str, object]:
    """Read one block of content; that of an image gets its image under "image"."""
    if not isinstance(block, Mapping) or (kind := block.get("type")) is None:
        raise InvalidInputError(f"{name}: got {_kind(block)}, want a block with a type")
    if kind in _NO_PLACE:
        raise UnsupportedError(f"{name}.type: got {kind!r}, want text or an image")
    if kind == "image_url":
        url = block.get("image_url")
        return {"type": "image", "image": _text(name, url.get("url") if isinstance(url, Mapping) else url)}
    if kind != "image":
        # Templates skip what they do not know: the image would be lost in silence.
        for key in ("image", "image_url"):
            if block.get(key) is not None:
                raise InvalidInputError(f"{name}.{key}: got one in a block of type {kind!r}, want type 'image'")
        return block
    named = [key for key in _SOURCES if block.get(key) is not None]
    if len(named) > 1:
        raise InvalidInputError(f"{name}: got {' and '.join(named)}, want one of them")
    rest = {other: block[other] for other in block if other not in _SOURCES}
    if not named:
        return rest
    (key,) = named
    value = block[key]
    if key == "path":
        if not isinstance(value, str | PathLike):
            raise InvalidInputError(f"{name}.path: got {type(value).__name__}, want text or a path")
        value = Path(value)
    elif key == "base64":
        value = read_base64(name, value)
    elif key == "url" or isinstance(value, str):
        value = _text(name, value)
    return {**rest, "image": value}


def _text(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise InvalidInputError(f"{name}: got a URL of type {type(value).__name__}, want text")
    return read_text(name, value)


def _kind(value: object) -> str:
    return "none" if isinstance(value, list | tuple) and not value else type(value).__name__
