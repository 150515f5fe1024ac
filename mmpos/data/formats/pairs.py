"""Formats of captioned images and of texts: tar files of pairs, and columns of Hugging Face datasets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat, describe, is_list
from mmpos.data.formats.images import Images

__all__ = ["HFImages", "Pairs", "Texts"]

_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif")


@dataclass(frozen=True)
class Pairs(RecordFormat):
    """Format of records with one image, identified by the extension of its member, followed by a caption.

    The caption is the member ``txt`` (text, or UTF-8 bytes), or, if that is missing, the field ``caption`` of ``json``
    (an object, or JSON as text or bytes). It must not be empty.

    Source: the WebDataset convention of ``key.extension`` members; captions as img2dataset writes them.

    Args:
        images: checks the image, which is given as bytes or decoded.
    """

    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        images = [record[name] for name in _EXTENSIONS if record.value.get(name) is not None]
        if len(images) != 1:
            got = " and ".join(image.name for image in images) or "no image"
            raise record.error(f"one of {', '.join(_EXTENSIONS)}", got=got)
        caption = record["txt"]
        if caption.value is None:
            if (metadata := record["json"]).value is None:
                raise record.error("txt, or json with a caption", got="neither txt nor json")
            caption = metadata.parsed()["caption"]
        if not (text := caption.utf8()):
            raise caption.error("a non-empty caption")
        return [Piece(self.images.read(images[0])), Piece(text)]


@dataclass(frozen=True)
class HFImages(RecordFormat):
    """Format of records with an image column and a text column, either of which may hold lists.

    An image is a ``struct{bytes, path}``, whose bytes take precedence, or decoded. All images come before all texts. If
    both columns are lists, they must have equal length and are interleaved as pairs of an image and its text; either
    item of a pair may be null. Both columns must exist; one of them may be null.

    Source: ``pa.struct({"bytes": pa.binary(), "path": pa.string()})`` of datasets.Image.

    >>> from mmpos.data import Location
    >>> record = {"image": {"bytes": b"GIF89a", "path": None}, "text": "a cat"}
    >>> HFImages()(record, Location("train.parquet", 0)).parts
    [b'GIF89a', 'a cat']

    Args:
        image: name of the image column.
        text: name of the text column.
        images: sources of images whose bytes are null.
    """

    separator: ClassVar[str] = "\n"
    image: str = "image"
    text: str = "text"
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        for name in (self.image, self.text):
            if name not in record.value:
                raise record[name].error("a column with this name", got=f"columns {describe(list(record.value))}")
        image, text = record[self.image], record[self.text]
        images, texts = image.several(), text.several()
        if not (is_list(image.value) and is_list(text.value)):
            return [*(Piece(self.images.read(item)) for item in images), *(Piece(item.text()) for item in texts)]
        if len(images) != len(texts):
            raise image.error(f"{len(texts)} as in {self.text}", got=f"{len(images)} items")
        pieces = []
        for image, text in zip(images, texts, strict=True):
            pieces += [] if image.value is None else [Piece(self.images.read(image))]
            pieces += [] if text.value is None else [Piece(text.text())]
        return pieces


@dataclass(frozen=True)
class Texts(RecordFormat):
    """Format of records with a text, all of which is trained on, as in C4 and FineWeb.

    Source: the field ``text`` in the dataset cards of allenai/c4 and HuggingFaceFW/fineweb.

    Args:
        text: name of the column.
        images: not used, since a record with an image is refused.
    """

    text: str = "text"
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        return [Piece(record[self.text].text())]
