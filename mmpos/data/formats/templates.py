"""Templates of conversations: the text around turns, as plain text or as the chat template of a tokenizer writes it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from mmpos.data.examples import BrokenImage, Piece
from mmpos.data.formats.fields import Field, check_option
from mmpos.errors import InvalidInputError
from mmpos.segments.kinds import Audio, Clip, Grid
from mmpos.sequence.video import Video
from mmpos.support.checks import counted

__all__ = ["ChatTemplate", "Template", "TokenizerTemplate", "Turn", "check_template", "template_of"]

_BEFORE, _AFTER = "Ahead of it.", "Behind it."
"""Texts around the image of a conversation that shows what a template writes for an image."""

_SORTS = {"image": ("an image", "images"), "video": ("a video", "videos"), "audio": ("audio", "audio")}
"""Kinds of blocks that are no text: one and several in words."""


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

    A tokenizer that makes special tokens of their names makes them also of the names in a template, for instance
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
    the turn. What it writes for an image, a video or audio, placeholder and markers, gives way to it; its markers are
    the builder's. Special tokens that the text of a record spells become special tokens, as in Transformers, but for
    the placeholders of what is in it, with which a record is refused.

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
                other placeholders than there are images, videos and audio.
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
        media = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        kinds = [_kind(part) for part in media]
        placeholders = {kind: self._placeholder(kind) for kind in dict.fromkeys(kinds)}
        # The longest first: one may begin as another does.
        either = re.compile("|".join(map(re.escape, sorted(placeholders.values(), key=len, reverse=True))))
        texts = [either.split(text[a:b]) if media else [text[a:b]] for a, b in pairwise(edges)]
        written = [match for a, b in pairwise(edges) for match in either.findall(text[a:b])] if media else []
        if written != [placeholders[kind] for kind in kinds]:
            want = f"{len(media)}, as many as {' and '.join(_SORTS[kind][1] for kind in placeholders)}"
            raise first.error(want, got=f"{counted(len(written), 'placeholder')} in the text of the chat template")
        return list(_interleaved(texts, trained, iter(media)))

    def _placeholder(self, kind: str) -> str:
        """Find what the template writes for an image, a video or audio: all between two texts around one."""
        blocks = [{"type": "text", "text": _BEFORE}, {"type": kind}, {"type": "text", "text": _AFTER}]
        try:
            text = self._apply([{"role": "user", "content": blocks}], False)
        except Exception:  # of Jinja, or of the template itself, which takes no blocks
            text = ""
        placeholder = text.partition(_BEFORE)[2].partition(_AFTER)[0]
        if not placeholder.strip() or repr(kind) in placeholder:  # the blocks as Python prints them
            one, several = _SORTS[kind]
            raise InvalidInputError(
                f"template: got a chat template that writes nothing for {one}, want that of a model with {several}, "
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
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": _kind(part)} for part in parts]


def _kind(part: object) -> str:
    """Tell images, videos and audio apart."""
    if isinstance(part, BrokenImage):
        return part.kind
    if isinstance(part, Audio):
        return "audio"
    return "video" if isinstance(part, Video | Clip) or (isinstance(part, Grid) and part.frames > 1) else "image"


def _interleaved(texts: Iterable[Sequence[str]], trained: set[int], media: Iterator[object]) -> Iterator[Piece]:
    """Yield runs of texts with an image, a video or audio between each two of a run; runs of these are trained on."""
    for number, (text, *rest) in enumerate(texts, 1):
        train = number in trained
        yield Piece(text, train)
        for more in rest:
            yield Piece(next(media), train)
            yield Piece(more, train)
