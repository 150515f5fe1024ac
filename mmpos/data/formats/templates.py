"""Templates of conversations: the text around turns, as plain text or as the chat template of a tokenizer writes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, check_option
from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted

__all__ = ["ChatTemplate", "Template", "TokenizerTemplate", "Turn", "check_template", "template_of"]

_BEFORE, _AFTER = "Ahead of it.", "Behind it."
"""Texts around the image of a conversation that shows what a template writes for an image."""


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

    def pieces(self, turns: Iterable[tuple[Field, list[object]]]) -> list[Piece]:
        """Make the pieces of a conversation.

        Args:
            turns: the role of the speaker, and the texts and images, of each turn.

        Raises:
            RecordError: the template has no such role.
        """
        known = {each.name: turn for each in fields(self) if (turn := getattr(self, each.name)) is not None}
        made: list[Piece] = []
        for role, parts in turns:
            turn, train = known[role.choice(known)], role.value == "assistant"
            made += [Piece(turn.before, train=False), *(Piece(part, train) for part in parts), Piece(turn.after, train)]
        return made


@dataclass(frozen=True)
class TokenizerTemplate:
    """Chat template of a tokenizer of Transformers, in Jinja, as the model is asked with.

    The assistant's turns are trained on: what the template writes for a turn, beyond the prompt for it, to the end of
    the turn. What it writes for an image, placeholder and markers, gives way to the image, whose markers are the
    builder's. Special tokens that the text of a record spells become special tokens, as in Transformers, but for the
    placeholder of images, with which a record is refused.

    Args:
        tokenizer: with ``apply_chat_template``.
        chat_template: in Jinja; None is the tokenizer's own.
        arguments: variables of the template, such as ``{"enable_thinking": False}``.

    Raises:
        InvalidInputError: a tokenizer without a chat template.
    """

    tokenizer: Any = field(repr=False)
    chat_template: str | None = field(default=None, repr=False)
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(getattr(self.tokenizer, "apply_chat_template", None)):
            got = type(self.tokenizer).__name__
            raise InvalidInputError(f"tokenizer: got {got}, want a tokenizer of Transformers with a chat template")
        if self.chat_template is None:
            try:
                own = self.tokenizer.get_chat_template()
            except ValueError as error:
                raise InvalidInputError(f"tokenizer: got {type(self.tokenizer).__name__}: {error}") from error
            object.__setattr__(self, "chat_template", own)

    def pieces(self, turns: Iterable[tuple[Field, list[object]]]) -> list[Piece]:
        """Make the pieces of a conversation.

        Args:
            turns: the role of the speaker, and the texts and images, of each turn.

        Raises:
            RecordError: the template refuses the conversation, writes a turn otherwise when others follow it, or writes
                other placeholders than there are images.
        """
        turns = list(turns)
        first = turns[0][0]
        messages = [{"role": role.text(), "content": _content(parts)} for role, parts in turns]
        text = self._write(first, messages)
        edges, trained = [0], set[int]()
        for i, (role, _) in enumerate(turns):
            if role.value == "assistant":
                if i == 0:
                    raise role.error("a turn of another before that of the assistant")
                trained.add(len(edges) + 1)
                for stop, prompt in ((i, True), (i + 1, False)):
                    start = self._write(role, messages[:stop], prompt) if stop < len(turns) or prompt else text
                    if not text.startswith(start):
                        raise role.error("a chat template that writes a turn alike, whatever follows it")
                    edges.append(len(start))
        edges.append(len(text))
        images = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        placeholder = self._placeholder if images else None
        texts = [text[a:b].split(placeholder) if placeholder else [text[a:b]] for a, b in pairwise(edges)]
        written = sum(map(len, texts)) - len(texts)
        if written != len(images):
            want = f"{len(images)}, as many as images"
            raise first.error(want, got=f"{counted(written, 'placeholder')} in the text of the chat template")
        return list(_interleaved(texts, trained, iter(images)))

    @cached_property
    def _placeholder(self) -> str:
        """Find what the template writes for an image: all between two texts around one."""
        blocks = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
        try:
            text = self._apply([{"role": "user", "content": blocks}], False)
        except Exception:  # of Jinja, or of the template itself, which takes no blocks
            text = ""
        placeholder = text.partition(_BEFORE)[2].partition(_AFTER)[0]
        if not placeholder.strip() or repr("image") in placeholder:  # the blocks as Python prints them
            raise InvalidInputError(
                "template: got a chat template that writes nothing for an image, want that of a model with images, "
                "or a ChatTemplate"
            )
        return placeholder

    def _write(self, role: Field, messages: Sequence[Mapping[str, object]], prompt: bool = False) -> str:
        """Write messages as text; with the prompt for an answer, if there is to be one."""
        try:
            return self._apply(messages, prompt)
        except Exception as error:  # what templates raise is Jinja's, or any error of their expressions
            got = f"{type(error).__name__} ({str(error)[:200]}) from the chat template"
            raise role.error("a conversation that the template takes", got=got) from error

    def _apply(self, messages: Sequence[Mapping[str, object]], prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.arguments,
        )
        return text


Template = ChatTemplate | TokenizerTemplate
"""Text around the turns of a conversation."""


def check_template(template: object) -> None:
    """Refuse a template of the wrong type."""
    if not isinstance(template, Template | None):
        got = type(template).__name__
        raise InvalidInputError(f"template: got {got}, want a ChatTemplate, a TokenizerTemplate or None")


def template_of(tokenizer: object) -> Template:
    """Return the chat template of a tokenizer; where it has none, plain text, with a warning.

    Args:
        tokenizer: as a SequenceBuilder holds it, or None.
    """
    own = getattr(tokenizer, "inner", tokenizer)
    if getattr(own, "chat_template", None) is not None and callable(getattr(own, "apply_chat_template", None)):
        return TokenizerTemplate(own)
    message = (
        "template: got None, and no tokenizer with a chat template: turns are written as plain text, User: and "
        "Assistant:; want template=ChatTemplate() if that is meant, or a TokenizerTemplate"
    )
    warnings.warn(message, UserWarning, stacklevel=5)  # the caller of Preprocess
    return ChatTemplate()


def _content(parts: Sequence[object]) -> str | list[dict[str, object]]:
    """Write the content of a message: text alone as templates of language models take it, else blocks."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def _interleaved(texts: Iterable[Sequence[str]], trained: set[int], images: Iterator[object]) -> Iterator[Piece]:
    """Yield runs of texts with an image between each two of a run; runs of these numbers are trained on."""
    for number, (text, *rest) in enumerate(texts, 1):
        train = number in trained
        yield Piece(text, train)
        for more in rest:
            yield Piece(next(images), train)
            yield Piece(more, train)
