"""Formats of interleaved documents: OBELICS, its counterpart in tar files, and Multimodal C4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmpos.data.examples import BrokenImage, Piece
from mmpos.data.formats.fields import Field, RecordFormat, describe, integer_of
from mmpos.data.formats.images import Images

__all__ = ["MMC4", "Obelics", "TarDocuments"]


@dataclass(frozen=True)
class Obelics(RecordFormat):
    """Format of OBELICS and of corpora with the same fields.

    ``images`` and ``texts`` are lists of equal length; at each index one holds a value and the other is null. The
    ``metadata`` and ``general_metadata`` are not used.

    Source: the data fields in the dataset card of HuggingFaceM4/OBELICS; Laurençon et al. 2023, arXiv:2306.16527.

    >>> from mmpos.data import Location
    >>> record = {"images": [None, b"GIF89a"], "texts": ["A cat:", None]}
    >>> Obelics()(record, Location("shard.jsonl", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: sources of the images, which OBELICS references by URL.
    """

    separator: ClassVar[str] = "\n\n"  # the paragraph separator of OBELICS
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        document = self._document(record)
        images, texts = document["images"].items(), document["texts"].items()
        if len(images) != len(texts):
            raise document["images"].error(f"{len(texts)} as in texts", got=f"{len(images)} items")
        pieces = []
        for image, text in zip(images, texts, strict=True):
            if (image.value is None) == (text.value is None):
                raise image.error(f"either it or {text.name}", got="neither" if image.value is None else "both")
            pieces.append(Piece(self._image(record, image) if text.value is None else text.text()))
        return pieces

    def _document(self, record: Field) -> Field:
        return record

    def _image(self, record: Field, image: Field) -> object:
        return self.images.read(image)


@dataclass(frozen=True)
class TarDocuments(Obelics):
    """Format of interleaved documents in tar files: the member ``json`` names the images of its sample, in order.

    ``images`` and ``texts`` in ``json`` (an object, or JSON as text or bytes) are lists as in Obelics. An image is the
    name of a member, with or without the key of the sample: ``a1.jpg`` or ``000017.a1.jpg``.

    Source: "Interleaved Data and Arbitrary Image Count" in the documentation of Megatron-Energon.

    Args:
        images: checks the images, which are given as bytes or decoded.
    """

    def _document(self, record: Field) -> Field:
        return record["json"].parsed()

    def _image(self, record: Field, image: Field) -> object:
        key = str(record.value.get("__key__"))
        name = image.text("the name of a member")
        for sample in (key, key.rpartition("/")[2]):
            name = name.removeprefix(f"{sample}.")
        member = record[name.lower()]
        if member.value is None:
            return BrokenImage(image.error(f"a member of the sample, one of {describe(list(record.value))}"))
        return self.images.read(member)


@dataclass(frozen=True)
class MMC4(RecordFormat):
    """Format of MMC4; an image is placed before the sentence that it was matched to.

    ``text_list`` is a list of sentences and ``image_info`` a list of images, each with ``matched_text_index`` (index of
    its sentence) and ``image_name``. Images of a sentence keep the order of image_info. Similarities are not used.

    Source: the README in the repository allenai/mmc4; Zhu et al. 2023, arXiv:2304.06939.

    Args:
        images: sources of the images.
    """

    separator: ClassVar[str] = " "
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        runs = [[Piece(sentence.text())] for sentence in record["text_list"].items()]
        for info in record["image_info"].items():
            index = integer_of((matched := info["matched_text_index"]).value)
            if index is None or not 0 <= index < len(runs):
                raise matched.error(f"an index into the {len(runs)} items of text_list")
            runs[index].insert(-1, Piece(self.images.read(info["image_name"])))
        return [piece for run in runs for piece in run]
