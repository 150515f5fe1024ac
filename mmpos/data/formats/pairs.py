"""Images with captions: pairs in WebDataset's tar files, and the image and text columns of Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images, describe

__all__ = ["HFImages", "Pairs"]

_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif")


@dataclass(frozen=True)
class Pairs(RecordFormat):
    """Format of records with one image, by the extension of its member, and a caption; the image comes first.

    The caption is the member ``txt`` (text or its bytes in UTF-8), or where that is missing a field of the member
    ``json`` (an object, or JSON as text or bytes). It must not be empty. Other members are not read.

    Source: the WebDataset convention of ``key.extension`` members; captions as img2dataset writes them.

    >>> from mmpos.data import Location
    >>> Pairs()({"__key__": "000017", "jpg": b"...", "txt": b"a cat"}, Location("00000.tar", 17)).parts
    [b'...', 'a cat']

    Args:
        caption: name of the field of ``json`` that holds the caption.
        images: checks the image, which is bytes or decoded.
    """

    names: ClassVar[str] = "image, txt, json"
    caption: str = "caption"
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        images = [record[name] for name in _EXTENSIONS if record[name].value is not None]
        if len(images) != 1:
            got = ", ".join(image.name for image in images) or "none"
            raise Field(record.record, "image", None).error(f"one of {', '.join(_EXTENSIONS)}", got=got)
        return [Piece(images[0].image(self.images)), Piece(self._caption(record))]

    def _caption(self, record: Field) -> str:
        caption = record["txt"]
        if caption.value is None:
            described = record["json"]
            if described.value is None:
                raise Field(record.record, "txt, json", None).error("one of them", got="neither")
            if not isinstance(described.value, Mapping):
                described = described.parsed("an object, or one as JSON")
            caption = described[self.caption]
        text = caption.utf8()
        if not text:
            raise caption.error("a caption that is not empty")
        return text


@dataclass(frozen=True)
class HFImages(RecordFormat):
    """Format of records with a column of images and one of text, either of which may hold lists.

    An image is a ``struct{bytes, path}``, of which the bytes win, or decoded. Images come first, then the texts; where
    both are lists they are of one length and go in pairs, an image and its text, of which either may be null. One
    column may be null, but not both; both must be there.

    Source: ``pa.struct({"bytes": pa.binary(), "path": pa.string()})`` of datasets.Image.

    >>> from mmpos.data import Location
    >>> record = {"image": {"bytes": b"GIF89a", "path": None}, "text": "a cat"}
    >>> HFImages()(record, Location("train.parquet", 0)).parts
    [b'GIF89a', 'a cat']

    Args:
        image: name of the column of images.
        text: name of the column of text.
        images: sources of images whose bytes are null.
        separator: stands between two texts with no image between them.
    """

    image: str = "image"
    text: str = "text"
    images: Images = field(default_factory=Images)
    separator: str = "\n"

    @property
    def names(self) -> str:
        """Both columns."""
        return f"{self.image}, {self.text}"

    def _pieces(self, record: Field) -> list[Piece]:
        for name in (self.image, self.text):
            if name not in record.value:
                raise record[name].error("a column of this name", got=f"columns {describe(list(record.value))}")
        image, text = record[self.image], record[self.text]
        images, texts = image.several(), text.several()
        if not (image.is_list and text.is_list):
            return [*(Piece(each.image(self.images)) for each in images), *(Piece(each.text()) for each in texts)]
        if len(images) != len(texts):
            raise image.error(f"{len(texts)}, as many as {self.text}", got=f"{len(images)} items")
        pieces = []
        for picture, words in zip(images, texts, strict=True):
            pieces += [] if picture.value is None else [Piece(picture.image(self.images))]
            pieces += [] if words.value is None else [Piece(words.text())]
        return pieces
