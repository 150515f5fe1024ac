"""Conversations: messages of the OpenAI API, LLaVA's turns, and the template that writes both as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat, check_option
from mmpos.data.formats.images import Images
from mmpos.errors import InvalidInputError

__all__ = ["Chat", "ChatTemplate", "LLaVA", "Turn"]


@dataclass(frozen=True)
class Turn:
    """Text before and after a turn of a conversation.

    Args:
        before: text before its content; never trained on.
        after: text after it, which ends the turn; of the assistant's turns it is trained on.
    """

    before: str
    after: str

    def __post_init__(self) -> None:
        check_option("Turn.before", self.before, str)
        check_option("Turn.after", self.after, str)


@dataclass(frozen=True)
class ChatTemplate:
    r"""Text around the turns of each role; by default plain text, which every tokenizer can encode.

    A tokenizer that makes special tokens of their names makes them of the names in a template, too, for instance
    ``ChatTemplate(user=Turn("<|im_start|>user\n", "<|im_end|>\n"), …)``; and of those in the text of a record.

    Args:
        system: instructions in front; None refuses the role, here and below.
        developer: instructions of a developer, as newer models call them.
        user: turns of a person.
        assistant: turns of the model; only these are trained on.
        tool: answers of tools.
    """

    system: Turn | None = Turn("System:\n", "\n\n")
    developer: Turn | None = Turn("System:\n", "\n\n")
    user: Turn | None = Turn("User:\n", "\n\n")
    assistant: Turn | None = Turn("Assistant:\n", "\n\n")
    tool: Turn | None = Turn("Tool:\n", "\n\n")

    def __post_init__(self) -> None:
        for role in fields(self):
            turn = getattr(self, role.name)
            if not isinstance(turn, Turn | None):
                raise InvalidInputError(f"{role.name}: got {type(turn).__name__}, want a Turn or None")

    def pieces(self, role: Field, parts: Iterable[object]) -> list[Piece]:
        """Make the pieces of a turn.

        Args:
            role: role of the speaker.
            parts: texts and images of the turn.

        Raises:
            RecordError: the template has no such role.
        """
        turns = {each.name: turn for each in fields(self) if (turn := getattr(self, each.name)) is not None}
        turn, train = turns[role.choice(turns)], role.value == "assistant"
        return [Piece(turn.before, train=False), *(Piece(part, train) for part in parts), Piece(turn.after, train)]


_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Kinds of parts that are text, and the field that holds it."""

_KINDS = (*_TEXTS, "image_url", "input_image")


@dataclass(frozen=True)
class Chat(RecordFormat):
    r"""Format of records with ``messages``, each of a ``role`` and a ``content``, which is text or a list of parts.

    The assistant's turns are trained on, with the text that ends them.
    Parts are ``{"type": "text", "text": …}``, ``{"type": "image_url", "image_url": {"url": …}}`` and
    ``{"type": "refusal", "refusal": …}`` of chat completions, and ``input_text``, ``output_text`` and
    ``{"type": "input_image", "image_url": …}`` of responses. Other parts (audio, files) and calls of tools are refused,
    since a model would be trained as if they were missing.

    Source: the OpenAI API reference, "Create chat completion" and "Create a model response".

    >>> from mmpos.data import Location
    >>> record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    >>> [(piece.part, piece.train) for piece in Chat()(record, Location("shard.jsonl", 0)).pieces]
    [('User:\nHi\n\nAssistant:\n', False), ('Hello\n\n', True)]

    Args:
        template: text around the turns.
        images: sources of the images; ``data:`` URLs need none.
    """

    names: ClassVar[str] = "messages"
    template: ChatTemplate = field(default_factory=ChatTemplate)
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        messages = record["messages"].items()
        if not messages:
            raise record["messages"].error("at least one message")
        return [piece for message in messages for piece in self.template.pieces(message["role"], self._parts(message))]

    def _parts(self, message: Field) -> list[object]:
        for name in ("tool_calls", "function_call"):
            if message[name].several():
                raise message[name].error("none, but what was said in content")
        content = message["content"]
        if content.is_list:
            return [self._part(part) for part in content.items()]
        return [content.text("text or a list of parts")]

    def _part(self, part: Field) -> object:
        kind = part["type"].choice(_KINDS)
        if kind in _TEXTS:
            return part[_TEXTS[kind]].text()
        url = part["image_url"]["url"] if kind == "image_url" else part["image_url"]
        return url.image(self.images)


_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class LLaVA(RecordFormat):
    r"""Format of records with ``conversations`` of ``from`` (human, gpt or system) and ``value``, and ``image``.

    ``image`` is a path, another reference, or a list of them; there must be as many as the values have ``<image>``,
    which they replace in order. The text around them, line breaks too, stays.
    gpt's turns are trained on, with the text that ends them.

    Source: docs/Finetune_Custom_Data.md of the repository haotian-liu/LLaVA; lists of images as in LLaVA-NeXT.

    >>> from mmpos.data import Location
    >>> turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    >>> LLaVA()({"image": b"GIF89a", "conversations": turns}, Location("shard.jsonl", 0)).parts
    ['User:\n', b'GIF89a', '\nWhat is it?\n\nAssistant:\n', 'A cat.\n\n']

    Args:
        template: text around the turns; human is its user, gpt its assistant.
        images: sources of the images; LLaVA itself has paths.
    """

    names: ClassVar[str] = "conversations"
    template: ChatTemplate = field(default_factory=ChatTemplate)
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        turns = record["conversations"].items()
        if not turns:
            raise record["conversations"].error("at least one turn")
        contents = [(_role(turn["from"]), turn["value"].text().split(_PLACEHOLDER)) for turn in turns]
        references = record["image"].several()
        count = sum(len(texts) - 1 for _, texts in contents)
        if count != len(references):
            want = f"{len(references)}, as many as there are in image"
            raise record["conversations"].error(want, got=f"{count} of {_PLACEHOLDER}")
        images = (reference.image(self.images) for reference in references)
        pieces: list[Piece] = []
        for role, (text, *texts) in contents:
            parts = chain([text], *((next(images), text) for text in texts))
            pieces += self.template.pieces(role, parts)
        return pieces


def _role(speaker: Field) -> Field:
    """Translate a speaker of LLaVA to a role of the template."""
    return replace(speaker, value=_ROLES[speaker.choice(_ROLES)])
