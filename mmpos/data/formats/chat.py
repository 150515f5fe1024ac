"""Chat messages as the OpenAI API has them, with the assistant's turns to be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Document, Location
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images
from mmpos.data.formats.template import ChatTemplate

__all__ = ["Chat"]

_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Kinds of parts that are text, and the field that holds it."""

_KINDS = (*_TEXTS, "image_url", "input_image")


@dataclass(frozen=True)
class Chat:
    r"""Records with ``messages``, each of a ``role`` and a ``content``, which is text or a list of parts.

    Parts are ``{"type": "text", "text": …}``, ``{"type": "image_url", "image_url": {"url": …}}`` and
    ``{"type": "refusal", "refusal": …}`` of chat completions, and ``input_text``, ``output_text`` and
    ``{"type": "input_image", "image_url": …}`` of responses. Other parts (audio, files) and calls of tools are refused,
    since a model would be trained as if they had not been said.

    Source: the OpenAI API reference, "Create chat completion" and "Create a model response".

    >>> record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    >>> [(piece.part, piece.train) for piece in Chat()(record, Location("shard.jsonl", 0)).pieces]
    [('User:\nHi\n\nAssistant:\n', False), ('Hello\n\n', True)]

    Args:
        template: what stands around the turns.
        images: where the images come from; ``data:`` URLs need nothing.
    """

    template: ChatTemplate = field(default_factory=ChatTemplate)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        check_option("template", self.template, ChatTemplate)
        check_option("images", self.images, Images)

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record; Piece.train is set for the assistant's turns, with the text that ends them.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        messages = fields["messages"].items()
        if not messages:
            raise fields["messages"].error("at least one message")
        pieces = [
            piece for message in messages for piece in self.template.pieces(message["role"], self._parts(message))
        ]
        return assemble(key, fields, "messages", pieces)

    def _parts(self, message: Field) -> list[Any]:
        for name in ("tool_calls", "function_call"):
            if message[name].several():
                raise message[name].error("none, but what was said in content")
        content = message["content"]
        if content.is_list:
            return [self._part(part) for part in content.items()]
        return [content.text("text or a list of parts")]

    def _part(self, part: Field) -> Any:
        kind = part["type"]
        if not isinstance(kind.value, str) or kind.value not in _KINDS:
            raise kind.error(f"one of {', '.join(_KINDS)}")
        if kind.value in _TEXTS:
            return part[_TEXTS[kind.value]].text()
        url = part["image_url"]["url"] if kind.value == "image_url" else part["image_url"]
        return url.image(self.images)
