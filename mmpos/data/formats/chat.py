"""Formats of conversations: messages of the OpenAI API and of Transformers, LLaVA, and FineVision."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from mmpos.data.examples import BrokenImage, Piece, Record, RecordError
from mmpos.data.formats.fields import Field, RecordFormat, called, describe, integer_of, is_empty, is_list
from mmpos.data.formats.images import Images
from mmpos.data.formats.templates import PLAIN, ChatTemplate, TokenizerTemplate, template_of
from mmpos.segments.kinds import Audio, Clip, Grid, fraction
from mmpos.sequence.video import Video
from mmpos.support.checks import counted

__all__ = ["Chat", "FineVision", "LLaVA"]

_PLACEHOLDER = re.compile("<(image|video|audio)>")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Place of the next image, video or audio of a column, with the number that the record gives it, if any."""

    kind: str
    index: Field | None = None


_Turns = list[tuple[Field, list[object]]]
"""Role of each turn, with its texts, placeholders, images, videos and audio."""

_REFUSED = """
    train_detail tool_calls function_call tools functions reasoning_content thinking system objects
    messages conversations texts chosen rejected rejected_messages rejected_response attachment attachments
    min_pixels max_pixels total_pixels resized_height resized_width
    sample_fps nframes min_frames max_frames video_start video_end
"""


_FLAGS = ("weight", "loss", "train", "training", "loss_mask")
"""Fields of a turn that say whether it is trained on; a list that says so for parts of it is refused as well."""


@dataclass(frozen=True)
class Conversation(RecordFormat):
    """Base class of conversation formats, with the options that Chat describes."""

    refused: ClassVar[frozenset[str]] = frozenset(_REFUSED.split())
    all_first: ClassVar[bool] = False
    """Whether several images without placeholders also come before the first user's text."""

    template: ChatTemplate | TokenizerTemplate | None = None
    images: Images = field(default_factory=Images)
    media: Callable[[Record], object] | None = None

    def for_tokenizer(self, tokenizer: object) -> Self:
        """Return the format with its own template, or with that of the tokenizer if it has none."""
        return self if self.template is not None else replace(self, template=template_of(tokenizer))

    @staticmethod
    def _turns(record: Field, column: str) -> list[Field]:
        """Return the turns of a column, of which all assistant turns must be trained on, and no others."""
        turns = record[column].items()
        flags = []
        for turn in turns:
            others = any(turn[name].value not in (None, "assistant", "gpt") for name in ("role", "from"))
            for flag in (turn[name] for name in _FLAGS):
                if not others:
                    flags.append(flag)
                elif flag.value not in (None, 0):  # False is 0
                    raise flag.error("0 or none, since only assistant turns are trained on")
        if isinstance(record["label"].value, bool):  # of KTO
            flags.append(record["label"])
        for flag in flags:
            if flag.value not in (None, 1):  # True is 1
                raise flag.error("1 or none, since every assistant turn is trained on")
        return turns

    def _conversation(self, record: Field, turns: _Turns) -> list[Piece]:
        """Replace placeholders by the media in the columns of the record, and add the text of the template."""
        if not turns:
            raise record.error("at least one turn", got="none")
        for kind in ("image", "video", "audio"):
            column = _column(record, kind)
            entries = column.several()
            if kind == "image" and all(isinstance(part, str) for _, parts in turns for part in parts):
                first = next((parts for role, parts in turns if role.value == "user"), [])
                first[:0] = [Placeholder(kind) for _ in entries if self.all_first or len(entries) == 1]
            places = [
                (parts, i, part.index)
                for _, parts in turns
                for i, part in enumerate(parts)
                if isinstance(part, Placeholder) and part.kind == kind
            ]
            if len(places) != len(entries):
                want = f"{len(places)}, one for each <{kind}> and each {kind} part without data"
                raise column.error(want, got=counted(len(entries), "item"))
            for number, ((parts, i, index), entry) in enumerate(zip(places, entries, strict=True)):
                if index is not None and index.value not in (None, number):
                    raise index.error(f"{number}, the number of items of {column.name} before it")
                if kind == "image":
                    parts[i] = self.images.read(entry)
                else:
                    parts[i] = self._video_or_audio(replace(entry, value={"type": kind, kind: entry.value}), kind)
        return (self.template or PLAIN).pieces(turns)

    def _video_or_audio(self, part: Field, kind: str) -> object:
        if kind == "video" and is_list((frames := part["video"]).value):
            return self._frames(frames, part["fps"])
        if self.media is None:
            want = f"{type(self).__name__}(media=…), which reads video and audio, or a video as a list of frames"
            raise part.error(want, got=kind)
        want = "a Video, a Grid of several frames, a Clip or an Audio"
        try:
            medium = called(f"{part.record}: {part.name}", "media", self.media, part.whole(), want)
            if not isinstance(medium, Video | Clip | Audio) and not (isinstance(medium, Grid) and medium.frames > 1):
                raise part.error(want, got=f"{describe(medium)} from media")
        except RecordError as error:
            return BrokenImage(error, _MEDIA[kind])
        return medium

    def _frames(self, frames: Field, fps: Field) -> object:
        images = [self.images.read(frame) for frame in frames.items()]
        if not images:
            raise frames.error("at least one frame")
        rate = fps.value if isinstance(fps.value, float) else integer_of(fps.value)
        if rate is None or not 1e-6 <= rate <= 1e6:
            raise fps.error("frames per second, at least 0.000001 and at most 1000000")
        broken = next((image for image in images if isinstance(image, BrokenImage)), None)
        return replace(broken, kind="video") if broken else Video(images, seconds_per_frame=1 / fraction("fps", rate))


def _column(record: Field, kind: str) -> Field:
    """Return the column with the images, videos or audio of a record; its value is None if it is empty."""
    plural, single = record[f"{kind}s"], record[kind]
    if is_empty(single.value):  # but an image that is missing from a list is an error
        empty = is_empty(plural.value) and not (kind == "image" and is_list(plural.value))
        return replace(plural, value=None) if empty else plural
    if not is_empty(plural.value):
        raise single.error(f"nothing beside {plural.name}")
    return single


def _split(text: Field, want: str = "text") -> list[object]:
    """Split a text at its placeholders."""
    return [Placeholder(part) if i % 2 else part for i, part in enumerate(_PLACEHOLDER.split(text.text(want))) if part]


_TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""Types of text parts, with the field that holds the text."""

_IMAGES = ("image", "url", "path", "base64")
"""Fields of a part of type image, one of which holds the image."""

_MEDIA = {"video": "video", "video_url": "video", "audio": "audio", "audio_url": "audio", "input_audio": "audio"}
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
    are refused, since otherwise a model would be trained as if they were missing, and so are turns with ``weight`` or
    ``loss_mask`` 0, ``loss``, ``train`` or ``training`` false, or ``train_detail``, and records with ``label`` false,
    since all assistant turns are trained on; other turns are not, and are refused if such a field says so.

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

    def _pieces(self, record: Field) -> list[Piece]:
        turns: _Turns = []
        for message in self._turns(record, "messages"):
            content = message["content"]
            if is_list(content.value):
                parts = [part for item in content.items() for part in self._part(item)]
            else:
                parts = _split(content, "text or a list of parts")
            turns.append((message["role"], parts))
        return self._conversation(record, turns)

    def _part(self, part: Field) -> list[object]:
        kind = part["type"].choice(_KINDS)
        if kind in _TEXTS:
            return _split(part[_TEXTS[kind]])
        if kind in ("image", "video", "audio") and all(
            is_empty(value) for name, value in part.value.items() if name not in ("type", "index")
        ):
            return [Placeholder(kind, part["index"])]
        if kind in _MEDIA:
            return [self._video_or_audio(part, kind)]
        holder = part["image_url"] if kind == "image_url" else part
        if (detail := holder["detail"]).value not in (None, "auto"):
            raise detail.error("auto or none, since the ImageProcessor determines the size of images")
        if kind != "image":
            return [self.images.read(holder["url" if kind == "image_url" else "image_url"])]
        named = [name for name in _IMAGES if part.value.get(name) is not None]
        if len(named) != 1:
            raise part.error(f"one of {', '.join(_IMAGES)}", got=" and ".join(named) or "none")
        image = part[named[0]]
        if named == ["base64"]:
            image = replace(image, value=f"data:;base64,{image.text()}")
        return [self.images.read(image)]


_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class LLaVA(Conversation):
    r"""Format of records with ``image`` and ``conversations``, a list of turns.

    A turn consists of ``from`` (human, gpt or system) and ``value``. ``image`` (or ``images``) is a path, another
    reference, or a list of references. Placeholders stand for the media beside the turns as in Chat, whose options the
    format has; in a record with a video and no image, ``<image>`` may stand for the video, as in LLaVA-Video. The text
    around ``<image>``, including line breaks, is kept. The gpt turns are trained on, including the text that ends them.

    Source: docs/Finetune_Custom_Data.md in the repository haotian-liu/LLaVA; lists of images as in LLaVA-NeXT.
    """

    def _pieces(self, record: Field) -> list[Piece]:
        turns: _Turns = []
        for turn in self._turns(record, "conversations"):
            role = turn["from"]
            turns.append((replace(role, value=_ROLES[role.choice(_ROLES)]), _split(turn["value"])))
        no_image = all(is_empty(record.value.get(name)) for name in ("image", "images"))
        image, video = Placeholder("image"), Placeholder("video")
        if no_image and _column(record, "video").value is not None and not any(video in parts for _, parts in turns):
            turns = [(role, [video if part == image else part for part in parts]) for role, parts in turns]
        return self._conversation(record, turns)


@dataclass(frozen=True)
class FineVision(Conversation):
    r"""Format of FineVision and The Cauldron: ``images`` and ``texts``, a list with ``user`` and ``assistant``.

    Images without placeholders come before the first user's text, in order; placeholders stand for them as in Chat,
    whose options the format has. The assistant's texts are trained on, including the text that ends them. Ratings and
    sources are not used.

    Source: the dataset cards of HuggingFaceM4/FineVision and HuggingFaceM4/the_cauldron; the order of images and text
    as in data/datasets.py of the repository huggingface/nanoVLM.
    """

    all_first: ClassVar[bool] = True

    def _pieces(self, record: Field) -> list[Piece]:
        turns = [(turn, role) for turn in self._turns(record, "texts") for role in ("user", "assistant")]
        return self._conversation(record, [(replace(turn, value=role), _split(turn[role])) for turn, role in turns])
