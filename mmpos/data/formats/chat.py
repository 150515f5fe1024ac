"""Format of messages of the OpenAI API and of Transformers, and the base class of conversation formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from mmpos.data.examples import BrokenImage, Piece, Record, RecordError
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images, describe
from mmpos.data.formats.templates import ChatTemplate, Template, check_template, template_of
from mmpos.errors import InvalidInputError, ServiceError
from mmpos.segments.kinds import Audio, Clip, Grid, fraction
from mmpos.sequence.video import Video
from mmpos.support.checks import counted

__all__ = ["Chat"]

_PLACEHOLDER = re.compile("<(image|video|audio)>")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Place of the next image, video or audio of a column, with the number that the record gives it, if any."""

    kind: str
    index: Field | None = None


IMAGE = Placeholder("image")

_Turns = list[tuple[Field, list[object]]]
"""Role of each turn, with its texts, placeholders, images, videos and audio."""


@dataclass(frozen=True)
class Conversation(RecordFormat):
    """Base class of conversation formats, with the options that Chat describes."""

    refused: ClassVar[frozenset[str]] = frozenset(
        (
            *(
                "tool_calls",
                "function_call",
                "tools",
                "functions",
                "reasoning_content",
                "thinking",
                "system",
                "objects",
            ),
            *("chosen", "rejected", "rejected_messages", "rejected_response", "attachment", "attachments"),
            *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "sample_fps"),
            *("nframes", "min_frames", "max_frames", "video_start", "video_end"),
        )
    )
    all_first: ClassVar[bool] = False
    """Whether several images without placeholders also come before the first user's text."""

    template: Template | None = None
    images: Images = field(default_factory=Images)
    media: Callable[[Record], object] | None = None

    def __post_init__(self) -> None:
        check_template(self.template)
        if not (self.media is None or callable(self.media)):
            raise InvalidInputError(f"media: got {describe(self.media)}, want a callable or None")
        super().__post_init__()

    def for_tokenizer(self, tokenizer: object) -> Self:
        """Return the format with its own template, or with that of the tokenizer if it has none."""
        return self if self.template is not None else replace(self, template=template_of(tokenizer))

    def _conversation(self, record: Field, turns: _Turns) -> list[Piece]:
        """Replace placeholders by the media in the columns of the record, and add the text of the template."""
        if not turns:
            raise Field(record.record, self.names, None).error("at least one turn", got="none")
        first = next((parts for role, parts in turns if role.value == "user"), None)
        beside = {}
        for kind in ("image", "video", "audio"):
            column = column_of(record, kind)
            entries = column.several()
            parts = [part for _, parts in turns for part in parts if not isinstance(part, str)]
            if kind == "image" and not parts and first is not None and (self.all_first or len(entries) == 1):
                first[:0] = parts = [Placeholder("image") for _ in entries]
            places = [part for part in parts if isinstance(part, Placeholder) and part.kind == kind]
            if len(places) != len(entries):
                want = f"{len(places)}, one for each <{kind}> and each {kind} part without data"
                raise column.error(want, got=counted(len(entries), "item"))
            for i, place in enumerate(places):
                if place.index is not None and place.index.value not in (None, i):
                    raise place.index.error(f"{i}, the number of items of {column.name} before it")
            beside[kind] = iter(entries)
        filled = [(role, [self._resolved(part, beside) for part in parts]) for role, parts in turns]
        return (self.template or ChatTemplate()).pieces(filled)

    def _resolved(self, part: object, beside: Mapping[str, Iterator[Field]]) -> object:
        if not isinstance(part, Placeholder):
            return part
        entry = next(beside[part.kind])
        if part.kind == "image":
            return entry.image(self.images)
        return self._video_or_audio(replace(entry, value={"type": part.kind, part.kind: entry.value}), part.kind)

    def _video_or_audio(self, part: Field, kind: str) -> object:
        if kind == "video" and part["video"].is_list:
            return self._frames(part["video"], part["fps"])
        if self.media is None:
            want = f"{type(self).__name__}(media=…), which reads video and audio, or a video as a list of frames"
            raise part.error(want, got=kind)
        try:
            return _read(self.media, part)
        except RecordError as error:
            return BrokenImage(error, _MEDIA.get(kind, kind))

    def _frames(self, frames: Field, fps: Field) -> object:
        images = [frame.image(self.images) for frame in frames.items()]
        if not images:
            raise frames.error("at least one frame")
        if (rate := fps.number()) <= 0:
            raise fps.error("frames per second above 0")
        broken = next((image for image in images if isinstance(image, BrokenImage)), None)
        return replace(broken, kind="video") if broken else Video(images, seconds_per_frame=1 / fraction("fps", rate))


def column_of(record: Field, kind: str) -> Field:
    """Return the column with the images, videos or audio of a record; its value is None if it is empty."""
    plural, single = record[f"{kind}s"], record[kind]
    if single.is_empty:  # but an image that is missing from a list is an error
        empty = plural.is_empty and not (kind == "image" and plural.is_list)
        return replace(plural, value=None if empty else plural.value)
    if not plural.is_empty:
        raise single.error(f"nothing beside {plural.name}")
    return single


def split(text: Field, want: str = "text") -> list[object]:
    """Split a text at its placeholders."""
    return [Placeholder(part) if i % 2 else part for i, part in enumerate(_PLACEHOLDER.split(text.text(want))) if part]


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
class Chat(Conversation):
    r"""Format of records with ``messages``, each with a ``role`` and a ``content``, which is text or a list of parts.

    Assistant turns are trained on, including the text that ends them. Accepted parts are ``{"type": "text", "text":
    …}``, ``{"type": "image_url", "image_url": {"url": …}}`` and ``{"type": "refusal", "refusal": …}`` from chat
    completions; ``input_text``, ``output_text`` and ``{"type": "input_image", "image_url": …}`` from responses;
    ``{"type": "image", "image": …}`` from Transformers, or with ``url``, ``path`` or ``base64`` instead of ``image``;
    ``{"type": "video", "video": [frame, …], "fps": …}`` with references to images as frames; and any part of type
    ``video``, ``video_url``, ``audio``, ``audio_url`` or ``input_audio`` that ``media`` reads. Other parts (files),
    tool calls, and the sizes of a single image or video (``min_pixels``, ``resized_height``, ``nframes``, ``detail`` …)
    are refused, since otherwise a model would be trained as if they were missing, and so are turns with ``weight`` 0
    or ``loss`` false and records with ``label`` false, since all assistant turns are trained on.

    Media may also stand beside the messages, as in ms-swift, LLaMA-Factory and TRL: in the columns ``images`` (or
    ``image``), ``videos`` and ``audios``. The n-th ``<image>`` in the texts, or the n-th ``{"type": "image"}`` without
    data, stands for the n-th image, the n-th ``<video>`` for the n-th video; numbers that differ are refused. One image
    without a placeholder comes before the first user's text.

    Source: the OpenAI API reference, "Create chat completion" and "Create a model response"; the Transformers
    documentation, "Multimodal chat templates".

    >>> from mmpos.data import Location
    >>> record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    >>> [(piece.part, piece.train) for piece in Chat()(record, Location("shard.jsonl", 0)).pieces]
    [('User:\nHi\n\nAssistant:\n', False), ('Hello\n\n', True)]

    Args:
        template: text around the turns; None means plain text or, in a Preprocess, the tokenizer's chat template.
        images: sources of images, including video frames; ``data:`` URLs need none.
        media: called with a video or audio part, the mapping in the record, or with ``{"type": "video", "video": …}``
            for an entry of ``videos``; returns a Video, a Grid with several frames, a Clip or an Audio, since each
            model has its own rules for sampling frames and for the number of audio tokens. None refuses such parts
            except lists of frames.
    """

    names: ClassVar[str] = "messages"

    def _pieces(self, record: Field) -> list[Piece]:
        messages = record["messages"].items()
        flags = [message[name] for message in messages for name in ("weight", "loss")]
        if isinstance(record["label"].value, bool):  # of KTO
            flags.append(record["label"])
        for flag in flags:
            if flag.value not in (None, 1):  # True is 1
                raise flag.error("1 or none, since every assistant turn is trained on")
        return self._conversation(record, [(message["role"], self._parts(message["content"])) for message in messages])

    def _parts(self, content: Field) -> list[object]:
        if content.is_list:
            return [piece for part in content.items() for piece in self._part(part)]
        return split(content, "text or a list of parts")

    def _part(self, part: Field) -> list[object]:
        kind = part["type"].choice(_KINDS)
        if kind in _TEXTS:
            return split(part[_TEXTS[kind]])
        if kind in ("image", "video", "audio") and all(
            part[name].is_empty for name in part.value if name not in ("type", "index")
        ):
            return [Placeholder(kind, part["index"])]
        if kind == "image":
            return [self._image(part)]
        if kind in _MEDIA:
            return [self._video_or_audio(part, kind)]
        url, detail = part["image_url"], part["detail"]
        if kind == "image_url":
            url, detail = url["url"], url["detail"]
        if detail.value not in (None, "auto"):
            raise detail.error("auto or none, since the ImageProcessor determines the size of images")
        return [url.image(self.images)]

    def _image(self, part: Field) -> object:
        named = [name for name in _IMAGES if part[name].value is not None]
        if len(named) != 1:
            raise part.error(f"one of {', '.join(_IMAGES)}", got=" and ".join(named) or "none")
        image = part[named[0]]
        if named == ["base64"]:
            image = replace(image, value=f"data:;base64,{image.text()}")
        return image.image(self.images)


def _read(media: Callable[[Record], object], part: Field) -> object:
    """Call the user's function with a part; convert its exceptions to record errors."""
    want = "a Video, a Grid of several frames, a Clip or an Audio"
    try:
        answer = media(part.whole())
    except ServiceError:
        raise
    except Exception as error:
        raise part.error(want, got=f"{type(error).__name__} ({str(error)[:200]}) from media") from error
    if not isinstance(answer, Video | Clip | Audio) and not (isinstance(answer, Grid) and answer.frames > 1):
        raise part.error(want, got=f"{describe(answer)} from media")
    return answer
