"""WebDataset pairs: an image and its caption, members of a tar that share a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Document, Location, Piece
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images

__all__ = ["Pairs"]

_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif")


@dataclass(frozen=True)
class Pairs:
    """Records with one image, by the extension of its member, and a caption; the image comes first.

    The caption is the member ``txt`` (text or its bytes in UTF-8), or where that is missing a field of the member
    ``json`` (an object, or JSON as text or bytes). It must not be empty. Other members are not read.

    Source: the WebDataset convention of ``key.extension`` members; captions as img2dataset writes them.

    >>> Pairs()({"__key__": "000017", "jpg": b"...", "txt": b"a cat"}, Location("00000.tar", 17)).parts
    [b'...', 'a cat']

    Args:
        caption: name of the field of ``json`` that holds the caption.
        images: checks the image, which is bytes or decoded.
    """

    caption: str = "caption"
    images: Images = field(default_factory=Images)

    def __post_init__(self) -> None:
        check_option("caption", self.caption, str)
        check_option("images", self.images, Images)

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        found = [fields[name] for name in _EXTENSIONS if fields[name].value is not None]
        if len(found) != 1:
            got = ", ".join(image.name for image in found) or "none"
            raise Field(fields.record, "image", None).error(f"one of {', '.join(_EXTENSIONS)}", got=got)
        pieces = [Piece(found[0].image(self.images)), Piece(self._caption(fields))]
        return assemble(key, fields, f"{found[0].name}, txt, json", pieces)

    def _caption(self, fields: Field) -> str:
        caption = fields["txt"]
        if caption.value is None:
            described = fields["json"]
            if described.value is None:
                raise Field(fields.record, "txt, json", None).error("one of them", got="neither")
            if not isinstance(described.value, Mapping):
                described = described.parsed("an object, or one as JSON")
            caption = described[self.caption]
        text = caption.utf8()
        if not text:
            raise caption.error("a caption that is not empty")
        return text
