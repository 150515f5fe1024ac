"""LLaVA conversations, in which <image> stands where an image does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mmpos.data.documents import Document, Location
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images
from mmpos.data.formats.template import ChatTemplate

__all__ = ["LLaVA"]

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class LLaVA:
    r"""Records with ``conversations``, each ``from`` human, gpt or system with a ``value``, and with ``image``.

    ``image`` is a path, another reference, or a list of them; there must be as many as the values have ``<image>``,
    which they replace in order. The text around them, line breaks too, stays.

    Source: docs/Finetune_Custom_Data.md of the repository haotian-liu/LLaVA; lists of images as in LLaVA-NeXT.

    >>> turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    >>> LLaVA()({"image": b"GIF89a", "conversations": turns}, Location("shard.jsonl", 0)).parts
    ['User:\n', b'GIF89a', '\nWhat is it?\n\nAssistant:\n', 'A cat.\n\n']

    Args:
        template: what stands around the turns; human is its user, gpt its assistant.
        images: where the images come from; LLaVA itself has paths.
    """

    template: ChatTemplate = field(default_factory=ChatTemplate)
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        check_option("template", self.template, ChatTemplate)
        check_option("images", self.images, Images)

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record; Piece.train is set for gpt's turns, with the text that ends them.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        turns = fields["conversations"].items()
        if not turns:
            raise fields["conversations"].error("at least one turn")
        said = [(_role(turn["from"]), turn["value"].text().split(_PLACEHOLDER)) for turn in turns]
        references = fields["image"].several()
        count = sum(len(texts) - 1 for _, texts in said)
        if count != len(references):
            want = f"{len(references)}, as many as there are in image"
            raise fields["conversations"].error(want, got=f"{count} of {_PLACEHOLDER}")
        images = (reference.image(self.images) for reference in references)
        pieces = []
        for role, (text, *texts) in said:
            parts = chain([text], *((next(images), text) for text in texts))
            pieces += self.template.pieces(role, parts)
        return assemble(key, fields, "conversations", pieces)


def _role(speaker: Field) -> Field:
    """The role, as the template calls it."""
    if not isinstance(speaker.value, str) or speaker.value not in _ROLES:
        raise speaker.error(f"one of {', '.join(_ROLES)}")
    return Field(speaker.record, speaker.name, _ROLES[speaker.value])
