"""Conversation formats: messages of the OpenAI API and of Transformers, and LLaVA turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar, Self

from mmpos.data.examples import BrokenImage, Piece, Record, RecordError
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images, describe
from mmpos.data.formats.templates import ChatTemplate, Template, check_template, template_of
from mmpos.errors import InvalidInputError, ServiceError
from mmpos.segments.kinds import Audio, Clip, Grid, fraction
from mmpos.sequence.video import Video

__all__ = ["Chat", "LLaVA"]


@dataclass(frozen=True)
class _Conversation(RecordFormat):
    """Base class of conversation formats.

    Args:
        template: text around the turns; None means plain text or, in a Preprocess, the tokenizer's chat template.
        images: sources of the images.
    """

    template: Template | None = None
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        check_template(self.template)
        super().__post_init__()

    def for_tokenizer(self, tokenizer: object) -> Self:
        """Return the format with its own template, or with that of the tokenizer if it has none."""
        return self if self.template is not None else replace(self, template=template_of(tokenizer))

    def _conversation(self, turns: list[tuple[Field, list[object]]]) -> list[Piece]:
        return (self.template or ChatTemplate()).pieces(turns)


_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Types of text parts, with the field that holds the text."""

_IMAGES = ("image", "url", "path", "base64")
"""Fields of a part of type image, one of which holds the image."""

_MEDIA = {
    **dict.fromkeys(("video", "video_url"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}
"""Types of video and audio parts, with the medium."""

_KINDS = (*_TEXTS, "image", "image_url", "input_image", *_MEDIA)


@dataclass(frozen=True)
class Chat(_Conversation):
    r"""Format of records with ``messages``, each with a ``role`` and a ``content``, which is text or a list of parts.

    Assistant turns are trained on, including the text that ends them. Accepted parts are ``{"type": "text", "text":
    …}``, ``{"type": "image_url", "image_url": {"url": …}}`` and ``{"type": "refusal", "refusal": …}`` from chat
    completions; ``input_text``, ``output_text`` and ``{"type": "input_image", "image_url": …}`` from responses;
    ``{"type": "image", "image": …}`` from Transformers, or with ``url``, ``path`` or ``base64`` instead of ``image``;
    ``{"type": "video", "video": [frame, …], "fps": …}`` with references to images as frames; and any part of type
    ``video``, ``video_url``, ``audio``, ``audio_url`` or ``input_audio`` that ``media`` reads. Other parts (files) and
    tool calls are refused, since otherwise a model would be trained as if they were missing.

    Source: the OpenAI API reference, "Create chat completion" and "Create a model response"; the Transformers
    documentation, "Multimodal chat templates".

    >>> from mmpos.data import Location
    >>> record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    >>> [(piece.part, piece.train) for piece in Chat()(record, Location("shard.jsonl", 0)).pieces]
    [('User:\nHi\n\nAssistant:\n', False), ('Hello\n\n', True)]

    Args:
        template: text around the turns; None means plain text or, in a Preprocess, the tokenizer's chat template.
        images: sources of images, including video frames; ``data:`` URLs need none.
        media: called with a video or audio part, the mapping in the record; returns a Video, a Grid with several
            frames, a Clip or an Audio, since each model has its own rules for sampling frames and for the number of
            audio tokens. None refuses such parts except lists of frames.
    """

    names: ClassVar[str] = "messages"
    media: Callable[[Record], object] | None = None

    def __post_init__(self) -> None:
        if not (self.media is None or callable(self.media)):
            raise InvalidInputError(f"media: got {describe(self.media)}, want a callable or None")
        super().__post_init__()

    def _pieces(self, record: Field) -> list[Piece]:
        messages = record["messages"].items()
        if not messages:
            raise record["messages"].error("at least one message")
        return self._conversation([(message["role"], self._parts(message)) for message in messages])

    def _parts(self, message: Field) -> list[object]:
        for name in ("tool_calls", "function_call"):
            if message[name].several():
                raise message[name].error("no tool calls, only content")
        content = message["content"]
        if content.is_list:
            return [self._part(part) for part in content.items()]
        return [content.text("text or a list of parts")]

    def _part(self, part: Field) -> object:
        kind = part["type"].choice(_KINDS)
        if kind in _TEXTS:
            return part[_TEXTS[kind]].text()
        if kind == "image":
            return self._image(part)
        if kind in _MEDIA:
            return self._video_or_audio(part, kind)
        url = part["image_url"]["url"] if kind == "image_url" else part["image_url"]
        return url.image(self.images)

    def _image(self, part: Field) -> object:
        named = [name for name in _IMAGES if part[name].value is not None]
        if len(named) != 1:
            raise part.error(f"one of {', '.join(_IMAGES)}", got=" and ".join(named) or "none")
        image = part[named[0]]
        if named == ["base64"]:
            image = replace(image, value=f"data:;base64,{image.text()}")
        return image.image(self.images)

    def _video_or_audio(self, part: Field, kind: str) -> object:
        if kind == "video" and part["video"].is_list:
            return self._frames(part["video"], part["fps"])
        if self.media is None:
            raise part["type"].error("Chat(media=…), which reads such parts, or a video as a list of frames")
        try:
            return _read(self.media, part)
        except RecordError as error:
            return BrokenImage(error, _MEDIA[kind])

    def _frames(self, frames: Field, fps: Field) -> object:
        images = [frame.image(self.images) for frame in frames.items()]
        if not images:
            raise frames.error("at least one frame")
        if (rate := fps.number()) <= 0:
            raise fps.error("frames per second above 0")
        broken = next((image for image in images if isinstance(image, BrokenImage)), None)
        return replace(broken, kind="video") if broken else Video(images, seconds_per_frame=1 / fraction("fps", rate))


def _read(media: Callable[[Record], object], part: Field) -> object:
    """Call the user's function with a part; convert its exceptions to record errors."""
    want = "a Video, a Grid of several frames, a Clip or an Audio"
    try:
        answer = media(part.value)
    except ServiceError:
        raise
    except Exception as error:
        raise part.error(want, got=f"{type(error).__name__} ({str(error)[:200]}) from media") from error
    if not isinstance(answer, Video | Clip | Audio) and not (isinstance(answer, Grid) and answer.frames > 1):
        raise part.error(want, got=f"{describe(answer)} from media")
    return answer


_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class LLaVA(_Conversation):
    r"""Format of records with ``image`` and ``conversations``, a list of turns.

    A turn consists of ``from`` (human, gpt or system) and ``value``. ``image`` is a path, another reference, or a list
    of references. The references replace the ``<image>`` placeholders in the values, in order; there must be as many
    references as placeholders. The text around ``<image>``, including line breaks, is kept. The gpt turns are trained
    on, including the text that ends them.

    Source: docs/Finetune_Custom_Data.md in the repository haotian-liu/LLaVA; lists of images as in LLaVA-NeXT.

    >>> from mmpos.data import Location
    >>> turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    >>> LLaVA()({"image": b"GIF89a", "conversations": turns}, Location("shard.jsonl", 0)).parts
    ['User:\n', b'GIF89a', '\nWhat is it?\n\nAssistant:\n', 'A cat.\n\n']

    Args:
        template: text around the turns, as for Chat, with human as user and gpt as assistant.
        images: sources of the images, which LLaVA references by path.
    """

    names: ClassVar[str] = "conversations"

    def _pieces(self, record: Field) -> list[Piece]:
        turns = record["conversations"].items()
        if not turns:
            raise record["conversations"].error("at least one turn")
        contents = [(_role(turn["from"]), turn["value"].text().split(_PLACEHOLDER)) for turn in turns]
        references = record["image"].several()
        count = sum(len(texts) - 1 for _, texts in contents)
        if count != len(references):
            want = f"{len(references)}, the number of references in image"
            raise record["conversations"].error(want, got=f"{count} of {_PLACEHOLDER}")
        images = (reference.image(self.images) for reference in references)
        return self._conversation(
            [(role, [text, *chain(*((next(images), text) for text in texts))]) for role, (text, *texts) in contents]
        )


def _role(speaker: Field) -> Field:
    """Convert a LLaVA speaker to a template role."""
    return replace(speaker, value=_ROLES[speaker.choice(_ROLES)])
