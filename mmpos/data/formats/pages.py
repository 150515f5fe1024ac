"""Formats of interleaved documents: OBELICS and Multimodal C4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images

__all__ = ["MMC4", "Obelics"]


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

    names: ClassVar[str] = "images, texts"
    separator: ClassVar[str] = "\n\n"  # the paragraph separator of OBELICS
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        return self._interleaved(record, record)

    def _interleaved(self, record: Field, document: Field) -> list[Piece]:
        images, texts = document["images"].items(), document["texts"].items()
        if len(images) != len(texts):
            raise document["images"].error(f"{len(texts)} as in texts", got=f"{len(images)} items")
        pieces = []
        for image, text in zip(images, texts, strict=True):
            if (image.value is None) == (text.value is None):
                got = "neither" if image.value is None else "both"
                raise Field(image.record, f"{image.name}, {text.name}", None).error("one of them", got=got)
            pieces.append(Piece(self._image(record, image) if text.value is None else text.text()))
        return pieces

    def _image(self, record: Field, image: Field) -> object:
        return image.image(self.images)


@dataclass(frozen=True)
class MMC4(RecordFormat):
    """Format of MMC4; an image is placed before the sentence that it was matched to.

    ``text_list`` is a list of sentences and ``image_info`` a list of images, each with ``matched_text_index`` (index of
    its sentence) and ``image_name``. Images of a sentence keep the order of image_info. Similarities are not used.

    Source: the README in the repository allenai/mmc4; Zhu et al. 2023, arXiv:2304.06939.

    >>> from mmpos.data import Location
    >>> record = {"text_list": ["One.", "Two."], "image_info": []}
    >>> MMC4()(record, Location("shard.jsonl", 0)).parts
    ['One. Two.']

    Args:
        images: sources of the images.
    """

    names: ClassVar[str] = "text_list, image_info"
    separator: ClassVar[str] = " "
    images: Images = field(default_factory=Images)

    def _pieces(self, record: Field) -> list[Piece]:
        sentences = [sentence.text() for sentence in record["text_list"].items()]
        before: list[list[Piece]] = [[] for _ in sentences]
        for info in record["image_info"].items():
            index = info["matched_text_index"].index("text_list", len(sentences))
            before[index].append(Piece(info["image_name"].image(self.images)))
        return [piece for i, sentence in enumerate(sentences) for piece in (*before[i], Piece(sentence))]
