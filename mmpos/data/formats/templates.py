"""Conversation templates: text around turns, in plain text or from the chat template of a tokenizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any

from mmpos.data.examples import BrokenImage, Piece, RecordError
from mmpos.data.formats.fields import Field, called, check_options
from mmpos.errors import InvalidInputError
from mmpos.segments.kinds import Audio, Clip, Grid
from mmpos.sequence.video import Video
from mmpos.support.cached import cached_property
from mmpos.support.checks import counted

__all__ = ["PLAIN", "ChatTemplate", "TokenizerTemplate", "Turn", "template_of"]

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
        check_options(self)


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
        check_options(self)

    @cached_property
    def _turns(self) -> Mapping[str, Turn]:
        return {role.name: turn for role in fields(self) if (turn := getattr(self, role.name)) is not None}

    def pieces(self, turns: Iterable[tuple[Field, list[object]]]) -> list[Piece]:
        """Convert a conversation to pieces.

        Raises:
            RecordError: the template does not define the role.
        """
        pieces: list[Piece] = []
        for role, parts in turns:
            turn, train = self._turns[role.choice(self._turns)], role.value == "assistant"
            pieces += [Piece(turn.before, train=False), *[Piece(part, train) for part in (*parts, turn.after)]]
        return pieces


PLAIN = ChatTemplate()


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
                does not write one placeholder for each image, video and audio; or no turn is the assistant's and a role
                is not one of those of a ChatTemplate.
        """
        turns = list(turns)
        first = turns[0][0]
        if all(role.value != "assistant" for role, _ in turns):
            for role, _ in turns:  # a template also writes "gpt" or "model", but nothing would be trained on
                role.choice([known.name for known in fields(ChatTemplate)])
        messages = [{"role": role.text(), "content": _content(parts)} for role, parts in turns]
        text = self._written(first, messages)
        edges = [0]  # an answer follows each odd edge
        for i, (role, _) in enumerate(turns):
            if role.value == "assistant":
                if i == 0:
                    raise role.error("a turn with another role before the assistant turn")
                for stop, prompt in ((i, True), (i + 1, False)):
                    start = self._written(role, messages[:stop], prompt) if stop < len(turns) or prompt else text
                    if not text.startswith(start):
                        raise role.error("a chat template that writes a turn independently of later ones")
                    edges.append(len(start))
        media = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        kinds = [_kind(part) for part in media]
        want = [self._placeholders[kind] for kind in kinds]
        if "" in want:
            singular, plural = _NOUNS[kinds[want.index("")]]
            message = (
                f"got a chat template that writes nothing for {singular}, want the template of a model with {plural}"
            )
            raise InvalidInputError(f"template: {message}, or a ChatTemplate")
        # The longest placeholder comes first, since one may be a prefix of another.
        either = "|".join(map(re.escape, sorted(set(want), key=len, reverse=True))) or "(?!)"
        runs = [re.split(f"({either})", text[start:stop]) for start, stop in pairwise([*edges, len(text)])]
        if (written := [placeholder for run in runs for placeholder in run[1::2]]) != want:
            nouns = " and ".join(dict.fromkeys(_NOUNS[kind][1] for kind in kinds))
            got = f"{counted(len(written), 'placeholder')} in the text of the chat template"
            raise first.error(f"{len(media)}, one for each of the {nouns}", got=got)
        parts = iter(media)
        return [
            Piece(next(parts) if i % 2 else part, train=bool(number % 2))
            for number, run in enumerate(runs)
            for i, part in enumerate(run)
        ]

    @cached_property
    def _placeholders(self) -> Mapping[str, str]:
        """Text that the template writes for an image, a video and audio between two other texts; empty if none."""
        placeholders = {}
        for kind in _NOUNS:
            blocks = [{"type": "text", "text": _BEFORE}, {"type": kind}, {"type": "text", "text": _AFTER}]
            try:
                text = self._written(Field("", "template", None), [{"role": "user", "content": blocks}])
            except RecordError:  # the template does not support blocks
                text = ""
            placeholder = text.partition(_BEFORE)[2].partition(_AFTER)[0]
            known = placeholder.strip() and repr(kind) not in placeholder  # the repr of the blocks
            placeholders[kind] = placeholder if known else ""
        return placeholders

    def _written(self, role: Field, messages: Sequence[Mapping[str, object]], prompt: bool = False) -> str:
        """Render messages as text, optionally with the generation prompt; errors of the template name the role."""
        options = {"chat_template": self.chat_template, "tokenize": False, "add_generation_prompt": prompt}
        write = partial(self.tokenizer.apply_chat_template, **options, **self.arguments)
        copies, want = [dict(message) for message in messages], "a conversation that the template supports"
        text: str = called(f"{role.record}: {role.name}", "the chat template", write, copies, want)
        return text


def template_of(tokenizer: object) -> ChatTemplate | TokenizerTemplate:
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
