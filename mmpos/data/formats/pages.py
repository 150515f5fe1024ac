"""Formats of interleaved documents: OBELICS and Multimodal C4 web pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images
from mmpos.support.checks import one_of

__all__ = ["MMC4", "Obelics"]


@dataclass(frozen=True)
class Obelics(RecordFormat):
    """Format of OBELICS and of corpora with the same fields.

    ``images`` and ``texts`` are lists of equal length; at each index one holds a value and the other is null. The
    optional ``metadata``, a list of that length, and ``general_metadata``, an object, both as JSON text, are checked
    but not used.

    Source: the data fields in the dataset card of HuggingFaceM4/OBELICS; Laurençon et al. 2023, arXiv:2306.16527.

    >>> from mmpos.data import Location
    >>> record = {"images": [None, b"GIF89a"], "texts": ["A cat:", None]}
    >>> Obelics()(record, Location("shard.jsonl", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: sources of the images, which OBELICS references by URL.
        separator: text between adjacent texts; the default is the paragraph separator of OBELICS.
    """

    names: ClassVar[str] = "images, texts"
    images: Images = field(default_factory=Images)
    separator: str = "\n\n"

    def _pieces(self, record: Field) -> list[Piece]:
        images, texts = record["images"].items(), record["texts"].items()
        if len(images) != len(texts):
            raise record["images"].error(f"{len(texts)} as in texts", got=f"{len(images)} items")
        _check_metadata(record, len(images))
        return [self._piece(image, text) for image, text in zip(images, texts, strict=True)]

    def _piece(self, image: Field, text: Field) -> Piece:
        if (image.value is None) == (text.value is None):
            got = "neither" if image.value is None else "both"
            raise Field(image.record, f"{image.name}, {text.name}", None).error("one of them", got=got)
        return Piece(image.image(self.images) if text.value is None else text.text())


def _check_metadata(record: Field, length: int) -> None:
    if record["metadata"].value is not None:
        metadata = record["metadata"].parsed("a list as JSON text").items()
        if len(metadata) != length:
            raise record["metadata"].error(f"{length} as in images", got=f"{len(metadata)} items")
    if record["general_metadata"].value is not None:
        general = record["general_metadata"].parsed("an object as JSON text")
        if not isinstance(general.value, dict):
            raise general.error("an object as JSON text")


@dataclass(frozen=True)
class MMC4(RecordFormat):
    """Format of MMC4; an image is placed before the sentence that it was matched to.

    ``text_list`` is a list of sentences and ``image_info`` a list of images, each with ``matched_text_index`` (index of
    its sentence), ``matched_sim`` (CLIP similarity to the sentence), ``image_name`` and ``raw_url``. Images of the same
    sentence keep the order of image_info. The shape of the optional ``similarity_matrix``, one row per image and one
    column per sentence, is checked. No similarity is used.

    Source: the README in the repository allenai/mmc4; Zhu et al. 2023, arXiv:2304.06939.

    >>> from mmpos.data import Location
    >>> record = {"text_list": ["One.", "Two."], "image_info": []}
    >>> MMC4()(record, Location("shard.jsonl", 0)).parts
    ['One. Two.']

    Args:
        images: sources of the images.
        reference: field with the image reference, "image_name" or "raw_url".
        separator: text between adjacent sentences.
    """

    names: ClassVar[str] = "text_list, image_info"
    images: Images = field(default_factory=Images)
    reference: str = "image_name"
    separator: str = " "

    def __post_init__(self) -> None:
        one_of("reference", self.reference, ("image_name", "raw_url"))
        super().__post_init__()

    def _pieces(self, record: Field) -> list[Piece]:
        sentences = [sentence.text() for sentence in record["text_list"].items()]
        infos = record["image_info"].items()
        _check_matrix(record["similarity_matrix"], len(infos), len(sentences))
        before: list[list[Piece]] = [[] for _ in sentences]
        for info in infos:
            index = info["matched_text_index"].index("text_list", len(sentences))
            if info["matched_sim"].value is not None:
                info["matched_sim"].number()
            before[index].append(Piece(info[self.reference].image(self.images)))
        return [piece for i, sentence in enumerate(sentences) for piece in (*before[i], Piece(sentence))]


def _check_matrix(matrix: Field, rows: int, columns: int) -> None:
    if matrix.value is None:
        return
    similarities = matrix.items()
    if len(similarities) != rows:
        raise matrix.error(f"{rows} as in image_info", got=f"{len(similarities)} rows")
    for row in similarities:
        if len(row.items()) != columns:
            raise row.error(f"{columns} as in text_list", got=f"{len(row.items())} values")
