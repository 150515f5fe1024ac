"""Chats as Transformers has them, their images read: content that names an image by text becomes bytes or a path."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.hf.processor_images import read_base64, read_text

__all__ = ["images_beside", "is_chat", "read_conversations"]

_SOURCES = ("image", "url", "path", "base64")
_NO_PLACE = ("video", "video_url", "audio", "input_audio")


def is_chat(text: Any) -> bool:
    """Whether this is a conversation, a list of messages, or a list of conversations."""
    first = text[0] if isinstance(text, list | tuple) and text else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, Mapping)


def read_conversations(conversation: Any) -> Any:
    """A new conversation, or list of them, in which every image that is there is bytes, a path or an object.

    Raises:
        InvalidInputError: no messages, or an image that is named in no known way.
        UnsupportedError: a video or audio.
    """
    if not is_chat(conversation):
        raise InvalidInputError(f"conversation: got {_kind(conversation)}, want a list of messages, or a list of those")
    if isinstance(conversation[0], Mapping):
        return _read("conversation", conversation)
    return [_read(f"conversation[{i}]", each) for i, each in enumerate(conversation)]


def images_beside(conversation: Any, images: Any) -> list[Any]:
    """Images that are given apart from their chat, in a list; of several chats, a list for each.

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


def _read(name: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInputError(f"{name}: got {_kind(messages)}, want a list of messages")
    found = []
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
        found.append(dict(message))
    return found


def _block(name: str, block: Any) -> Any:
    """One block of content; one that is an image with its image under "image"."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind is None:
        raise InvalidInputError(f"{name}: got {_kind(block)}, want a block with a type")
    if kind in _NO_PLACE:
        raise UnsupportedError(f"{name}.type: got {kind!r}, want text or an image")
    if kind == "image_url":
        url = block.get("image_url")
        return {"type": "image", "image": _text(name, url.get("url") if isinstance(url, Mapping) else url)}
    if kind != "image":
        # Templates pass over what they do not know: the image would be lost without a word.
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


def _text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise InvalidInputError(f"{name}: got a URL of type {type(value).__name__}, want text")
    return read_text(name, value)


def _kind(value: Any) -> str:
    return "none" if isinstance(value, list | tuple) and not value else type(value).__name__
