"""Formats of conversations as turns: LLaVA, and FineVision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.chat import IMAGE, Conversation, Placeholder, column_of, split
from mmpos.data.formats.fields import Field

__all__ = ["FineVision", "LLaVA"]

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class LLaVA(Conversation):
    r"""Format of records with ``image`` and ``conversations``, a list of turns.

    A turn consists of ``from`` (human, gpt or system) and ``value``. ``image`` (or ``images``) is a path, another
    reference, or a list of references. Placeholders stand for the media beside the turns as in Chat; in a record with a
    video and no image, ``<image>`` may stand for the video, as in LLaVA-Video. The text around
    ``<image>``, including line breaks, is kept. The gpt turns are trained on, including the text that ends them.

    Source: docs/Finetune_Custom_Data.md in the repository haotian-liu/LLaVA; lists of images as in LLaVA-NeXT.

    >>> from mmpos.data import Location
    >>> turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    >>> LLaVA()({"image": b"GIF89a", "conversations": turns}, Location("shard.jsonl", 0)).parts
    ['User:\n', b'GIF89a', '\nWhat is it?\n\nAssistant:\n', 'A cat.\n\n']

    Args:
        template: text around the turns, as for Chat, with human as user and gpt as assistant.
        images: sources of the images, which LLaVA references by path.
        media: reads the entries of ``videos`` and ``audios``, as for Chat.
    """

    names: ClassVar[str] = "conversations"

    def _pieces(self, record: Field) -> list[Piece]:
        turns = [(_role(turn["from"]), split(turn["value"])) for turn in record["conversations"].items()]
        images, video = (record["image"], record["images"]), Placeholder("video")
        only_video = all(column.is_empty for column in images) and not column_of(record, "video").is_empty
        if only_video and not any(video in texts for _, texts in turns):
            turns = [(role, [video if part == IMAGE else part for part in texts]) for role, texts in turns]
        return self._conversation(record, turns)


def _role(speaker: Field) -> Field:
    """Convert a LLaVA speaker to a template role."""
    return replace(speaker, value=_ROLES[speaker.choice(_ROLES)])


@dataclass(frozen=True)
class FineVision(Conversation):
    r"""Format of FineVision and The Cauldron: ``images`` and ``texts``, a list with ``user`` and ``assistant``.

    Images without placeholders come before the first user's text, in order; placeholders stand for them as in Chat. The
    assistant's texts are trained on, including the text that ends them. Ratings and sources are not used.

    Source: the dataset cards of HuggingFaceM4/FineVision and HuggingFaceM4/the_cauldron; the order of images and text
    as in data/datasets.py of the repository huggingface/nanoVLM.

    >>> from mmpos.data import Location
    >>> record = {"images": [b"GIF89a"], "texts": [{"user": "What is it?", "assistant": "A cat.", "source": "TQA"}]}
    >>> FineVision()(record, Location("train.parquet", 0)).parts
    ['User:\n', b'GIF89a', 'What is it?\n\nAssistant:\n', 'A cat.\n\n']

    Args:
        template: text around the turns, as for Chat.
        images: sources of images whose bytes are null.
        media: reads the entries of ``videos`` and ``audios``, as for Chat.
    """

    names: ClassVar[str] = "images, texts"
    all_first: ClassVar[bool] = True

    def _pieces(self, record: Field) -> list[Piece]:
        turns = [(turn, role) for turn in record["texts"].items() for role in ("user", "assistant")]
        return self._conversation(record, [(replace(turn, value=role), split(turn[role])) for turn, role in turns])
