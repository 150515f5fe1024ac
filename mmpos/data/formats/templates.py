"""Conversation templates: text around turns, in plain text or from the chat template of a tokenizer."""

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
"""Texts around an image in a sample conversation, to find the text that a template writes for the image."""

_NOUNS = {"image": ("an image", "images"), "video": ("a video", "videos"), "audio": ("audio", "audio")}
"""Singular and plural noun of each kind of block other than text."""


@dataclass(frozen=True)
class Turn:
    """Text before and after a turn of a conversation.

    Args:
        before: text before the content; never trained on.
        after: text after the content, which ends the turn; trained on in assistant turns.
    """

    before: str
    after: str

    def __post_init__(self) -> None:
        check_option("Turn.before", self.before, str)
        check_option("Turn.after", self.after, str)


@dataclass(frozen=True)
class ChatTemplate:
    r"""Text around the turns of each role; by default plain text, which every tokenizer can encode.

    A tokenizer that parses special tokens in text also does so in a template, such as
    ``ChatTemplate(user=Turn("<|im_start|>user\n", "<|im_end|>\n"), …)``, and in the text of records.

    Args:
        system: system prompt; None, here and below, refuses the role.
        developer: developer message, the system prompt of newer models.
        user: user turns.
        assistant: assistant turns; only these are trained on.
        tool: tool results.
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
        """Convert a conversation to pieces.

        Raises:
            RecordError: the template does not define the role.
        """
        known = {role.name: turn for role in fields(self) if (turn := getattr(self, role.name)) is not None}
        pieces: list[Piece] = []
        for role, parts in turns:
            turn, train = known[role.choice(known)], role.value == "assistant"
            content = (Piece(part, train) for part in parts)
            pieces += [Piece(turn.before, train=False), *content, Piece(turn.after, train)]
        return pieces


@dataclass(frozen=True)
class TokenizerTemplate:
    """Jinja chat template of a Transformers tokenizer, as used for inference with the model.

    In an assistant turn, the text from the end of the generation prompt to the end of the turn is trained on. The
    placeholder and markers that the template writes for an image, a video or audio are replaced by the part itself; the
    builder adds its own markers. Special tokens spelled out in the text of a record become special tokens, as in
    Transformers. Placeholders of the media in a record are the exception: a record that spells them out is refused.

    Args:
        tokenizer: a tokenizer with ``apply_chat_template``.
        arguments: template variables, such as ``{"enable_thinking": False}``.

    Raises:
        InvalidInputError: the tokenizer has no chat template.
    """

    tokenizer: Any = field(repr=False)
    arguments: Mapping[str, object] = field(default_factory=dict)
    chat_template: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(getattr(self.tokenizer, "apply_chat_template", None)):
            got = type(self.tokenizer).__name__
            raise InvalidInputError(f"tokenizer: got {got}, want a Transformers tokenizer with a chat template")
        try:
            object.__setattr__(self, "chat_template", self.tokenizer.get_chat_template())
        except ValueError as error:
            raise InvalidInputError(f"tokenizer: got {type(self.tokenizer).__name__}: {error}") from error

    def pieces(self, turns: Iterable[tuple[Field, list[object]]]) -> list[Piece]:
        """Convert a conversation to pieces.

        Raises:
            RecordError: the template rejects the conversation, writes a turn differently if other turns follow it, or
                does not write one placeholder for each image, video and audio.
        """
        turns = list(turns)
        first = turns[0][0]
        messages = [{"role": role.text(), "content": _content(parts)} for role, parts in turns]
        text = self._write(first, messages)
        edges, trained = [0], set[int]()
        for i, (role, _) in enumerate(turns):
            if role.value == "assistant":
                if i == 0:
                    raise role.error("a turn with another role before the assistant turn")
                trained.add(len(edges) + 1)
                for stop, prompt in ((i, True), (i + 1, False)):
                    start = self._write(role, messages[:stop], prompt) if stop < len(turns) or prompt else text
                    if not text.startswith(start):
                        raise role.error("a chat template that writes a turn independently of later ones")
                    edges.append(len(start))
        edges.append(len(text))
        media = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        kinds = [_kind(part) for part in media]
        placeholders = {kind: self._placeholder(kind) for kind in dict.fromkeys(kinds)}
        # The longest placeholder comes first, since one may be a prefix of another.
        either = re.compile("|".join(map(re.escape, sorted(placeholders.values(), key=len, reverse=True))))
        texts = [either.split(text[a:b]) if media else [text[a:b]] for a, b in pairwise(edges)]
        written = [match for a, b in pairwise(edges) for match in either.findall(text[a:b])] if media else []
        if written != [placeholders[kind] for kind in kinds]:
            want = f"{len(media)}, one for each of the {' and '.join(_NOUNS[kind][1] for kind in placeholders)}"
            raise first.error(want, got=f"{counted(len(written), 'placeholder')} in the text of the chat template")
        return list(_interleaved(texts, trained, iter(media)))

    def _placeholder(self, kind: str) -> str:
        """Return the text that the template writes for an image, a video or audio between two other texts."""
        blocks = [{"type": "text", "text": _BEFORE}, {"type": kind}, {"type": "text", "text": _AFTER}]
        try:
            text = self._apply([{"role": "user", "content": blocks}], False)
        except Exception:  # raised by Jinja, or by a template that does not support blocks
            text = ""
        placeholder = text.partition(_BEFORE)[2].partition(_AFTER)[0]
        if not placeholder.strip() or repr(kind) in placeholder:  # the repr of the blocks
            singular, plural = _NOUNS[kind]
            raise InvalidInputError(
                f"template: got a chat template that writes nothing for {singular}, want the template of a model with "
                f"{plural}, or a ChatTemplate"
            )
        return placeholder

    def _write(self, role: Field, messages: Sequence[Mapping[str, object]], prompt: bool = False) -> str:
        """Render messages as text, optionally with the generation prompt."""
        try:
            return self._apply(messages, prompt)
        except Exception as error:  # raised by Jinja, or by an expression in the template
            got = f"{type(error).__name__} ({str(error)[:200]}) from the chat template"
            raise role.error("a conversation that the template supports", got=got) from error

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
    """Check the type of a template."""
    if not isinstance(template, Template | None):
        got = type(template).__name__
        raise InvalidInputError(f"template: got {got}, want a ChatTemplate, a TokenizerTemplate or None")


def template_of(tokenizer: object) -> Template:
    """Return the chat template of a tokenizer, or, with a warning, plain text if the tokenizer has none."""
    own = getattr(tokenizer, "inner", tokenizer)
    if getattr(own, "chat_template", None) is not None and callable(getattr(own, "apply_chat_template", None)):
        return TokenizerTemplate(own)
    message = (
        "template: got None and a tokenizer without a chat template, so turns are written as plain text with User: "
        "and Assistant:; want template=ChatTemplate() if that is intended, or a TokenizerTemplate"
    )
    warnings.warn(message, UserWarning, stacklevel=5)  # the caller of Preprocess
    return ChatTemplate()


def _content(parts: Sequence[object]) -> str | list[dict[str, object]]:
    """Return a message's content: a string if all parts are text, for templates of text-only models, else blocks."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": _kind(part)} for part in parts]


def _kind(part: object) -> str:
    """Return whether a part is an "image", a "video" or "audio"."""
    if isinstance(part, BrokenImage):
        return part.kind
    if isinstance(part, Audio):
        return "audio"
    return "video" if isinstance(part, Video | Clip) or (isinstance(part, Grid) and part.frames > 1) else "image"


def _interleaved(texts: Iterable[Sequence[str]], trained: set[int], media: Iterator[object]) -> Iterator[Piece]:
    """Yield the pieces of runs of texts, inserting the next medium between adjacent texts of a run."""
    for number, (first, *rest) in enumerate(texts, 1):
        train = number in trained
        yield Piece(first, train)
        for text in rest:
            yield Piece(next(media), train)
            yield Piece(text, train)
