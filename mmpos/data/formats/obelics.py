"""OBELICS: web pages as two parallel lists of images and texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Document, Location, Piece
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images

__all__ = ["Obelics"]


@dataclass(frozen=True)
class Obelics:
    """Records of OBELICS, and of corpora in its form.

    ``images`` and ``texts`` are lists of one length; at each place one holds a value and the other is null. Where
    ``metadata`` is there it is a list of that length, and ``general_metadata`` is an object, both as JSON in text;
    they are checked and not used.

    Source: the data fields in the dataset card of HuggingFaceM4/OBELICS; Laurençon et al. 2023, arXiv:2306.16527.

    >>> record = {"images": [None, b"GIF89a"], "texts": ["A cat:", None]}
    >>> Obelics()(record, Location("shard.jsonl", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: where the images come from; OBELICS itself has URLs.
        separator: stands between two texts with no image between them; OBELICS separates paragraphs so.
    """

    images: Images = field(default_factory=Images)
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        check_option("images", self.images, Images)
        check_option("separator", self.separator, str)

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        images, texts = fields["images"].items(), fields["texts"].items()
        if len(images) != len(texts):
            raise fields["images"].error(f"{len(texts)}, as many as texts", got=f"{len(images)} items")
        _check_metadata(fields, len(images))
        pieces = [self._piece(image, text) for image, text in zip(images, texts, strict=True)]
        return assemble(key, fields, "images, texts", pieces, self.separator)

    def _piece(self, image: Field, text: Field) -> Piece:
        if (image.value is None) == (text.value is None):
            got = "neither" if image.value is None else "both"
            raise Field(image.record, f"{image.name}, {text.name}", None).error("one of them", got=got)
        return Piece(image.image(self.images) if text.value is None else text.text())


def _check_metadata(fields: Field, length: int) -> None:
    if fields["metadata"].value is not None:
        metadata = fields["metadata"].parsed("a list as JSON in text").items()
        if len(metadata) != length:
            raise fields["metadata"].error(f"{length}, as many as images", got=f"{len(metadata)} items")
    if fields["general_metadata"].value is not None:
        general = fields["general_metadata"].parsed("an object as JSON in text")
        if not isinstance(general.value, dict):
            raise general.error("an object as JSON in text")
