"""Format of interleaved documents in WebDataset tar files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmpos.data.examples import BrokenImage, Piece
from mmpos.data.formats.fields import Field
from mmpos.data.formats.images import describe
from mmpos.data.formats.pages import Obelics

__all__ = ["TarDocuments"]


@dataclass(frozen=True)
class TarDocuments(Obelics):
    """Format of interleaved documents in tar files: the member ``json`` names the images of its sample, in order.

    ``images`` and ``texts`` in ``json`` (an object, or JSON as text or bytes) are lists as in Obelics. An image is the
    name of a member, with or without the key of the sample: ``a1.jpg`` or ``000017.a1.jpg``.

    Source: "Interleaved Data and Arbitrary Image Count" in the documentation of Megatron-Energon.

    >>> from mmpos.data import Location
    >>> document = {"images": [None, "a1.jpg"], "texts": ["A cat:", None]}
    >>> TarDocuments()({"__key__": "17", "json": document, "a1.jpg": b"GIF89a"}, Location("00000.tar", 17)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: checks the images, which are given as bytes or decoded.
    """

    names: ClassVar[str] = "json"

    def _pieces(self, record: Field) -> list[Piece]:
        return self._interleaved(record, record["json"].parsed("an object, or one as JSON"))

    def _image(self, record: Field, image: Field) -> object:
        key = str(record.value.get("__key__"))
        name = image.text("the name of a member")
        for sample in (key, key.rpartition("/")[2]):
            name = name.removeprefix(f"{sample}.")
        member = record[name.lower()]
        if member.value is None:
            return BrokenImage(image.error(f"a member of the sample, one of {describe(list(record.value))}"))
        return member.image(self.images)
