"""Interleaved documents: the web pages of OBELICS and Multimodal C4, and the sequences of Megatron Energon."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.examples import Document, Location, Piece, Record
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.images import Images
from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of

__all__ = ["MMC4", "Energon", "Obelics"]


@dataclass(frozen=True)
class Obelics:
    """Format of OBELICS, and of corpora with its fields.

    ``images`` and ``texts`` are lists of one length; at each index one holds a value and the other is null. Where
    ``metadata`` is there it is a list of that length, and ``general_metadata`` is an object, both as JSON in text;
    they are checked and not used.

    Source: the data fields in the dataset card of HuggingFaceM4/OBELICS; Laurençon et al. 2023, arXiv:2306.16527.

    >>> record = {"images": [None, b"GIF89a"], "texts": ["A cat:", None]}
    >>> Obelics()(record, Location("shard.jsonl", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: sources of the images; OBELICS itself has URLs.
        separator: stands between two texts with no image between them; as OBELICS separates paragraphs.
    """

    images: Images = field(default_factory=Images)
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        check_option("images", self.images, Images)
        check_option("separator", self.separator, str)

    def __call__(self, record: Record, location: Location) -> Document:
        """Make the document of a record.

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


@dataclass(frozen=True)
class MMC4:
    """Format of MMC4, where an image stands before the sentence that it was matched to.

    ``text_list`` is a list of sentences and ``image_info`` a list of images, each with ``matched_text_index`` (its
    sentence), ``matched_sim`` (CLIP similarity to it), ``image_name`` and ``raw_url``. Images of one sentence stay in
    the order of image_info. ``similarity_matrix``, where it is there, has a row for each image and a column for each
    sentence; it is checked for that and not used.

    Source: the README of the repository allenai/mmc4; Zhu et al. 2023, arXiv:2304.06939.

    >>> record = {"text_list": ["One.", "Two."], "image_info": []}
    >>> MMC4()(record, Location("shard.jsonl", 0)).parts
    ['One. Two.']

    Args:
        images: sources of the images.
        reference: the field that images are looked up by, "image_name" or "raw_url".
        min_similarity: leave out images with a smaller matched_sim, unread; None to keep all.
        separator: stands between two sentences with no image between them.
    """

    images: Images = field(default_factory=Images)
    reference: str = "image_name"
    min_similarity: float | None = None
    separator: str = " "

    def __post_init__(self) -> None:
        check_option("images", self.images, Images)
        check_option("separator", self.separator, str)
        one_of("reference", self.reference, ("image_name", "raw_url"))
        least = self.min_similarity
        if least is not None and (isinstance(least, bool) or not isinstance(least, int | float) or least != least):
            raise InvalidInputError(f"min_similarity: got {least!r}, want a number or None")

    def __call__(self, record: Record, location: Location) -> Document:
        """Make the document of a record.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        sentences = [sentence.text() for sentence in fields["text_list"].items()]
        infos = fields["image_info"].items()
        _check_matrix(fields["similarity_matrix"], len(infos), len(sentences))
        before: list[list[Piece]] = [[] for _ in sentences]
        for info in infos:
            index = info["matched_text_index"].index("text_list", len(sentences))
            if self._similar(info["matched_sim"]):
                before[index].append(Piece(info[self.reference].image(self.images)))
        pieces = [piece for i, sentence in enumerate(sentences) for piece in (*before[i], Piece(sentence))]
        return assemble(key, fields, "text_list, image_info", pieces, self.separator)

    def _similar(self, similarity: Field) -> bool:
        if similarity.value is None and self.min_similarity is None:
            return True
        return similarity.number() >= (-math.inf if self.min_similarity is None else self.min_similarity)


def _check_matrix(matrix: Field, rows: int, columns: int) -> None:
    if matrix.value is None:
        return
    similarities = matrix.items()
    if len(similarities) != rows:
        raise matrix.error(f"{rows}, as many as image_info", got=f"{len(similarities)} rows")
    for row in similarities:
        if len(row.items()) != columns:
            raise row.error(f"{columns}, as many as text_list", got=f"{len(row.items())} values")


@dataclass(frozen=True)
class Energon:
    """Format of records with a ``sequence`` of text and images in order, as the fields of an InterleavedSample.

    An image is a tensor (3, h, w), of floats from 0 to 1 as Energon decodes by default, or of uint8; or what it is
    before decoding: the bytes of a file, or a struct of bytes and path. Text is always text, never a path or a URL.

    Source: megatron.energon.InterleavedSample, ``sequence: List[Union[torch.Tensor, str]]``.

    >>> Energon()({"sequence": ["A cat:", b"GIF89a"]}, Location("shard.tar", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: sources of images that are structs with only a path.
        separator: stands between two texts with no image between them.
    """

    images: Images = field(default_factory=Images)
    separator: str = ""

    def __post_init__(self) -> None:
        check_option("images", self.images, Images)
        check_option("separator", self.separator, str)

    def __call__(self, record: Record, location: Location) -> Document:
        """Make the document of a record.

        Raises:
            RecordError: naming record and field.
        """
        key, fields = open_record(record, location)
        items = fields["sequence"].items()
        return assemble(key, fields, "sequence", [Piece(self._part(item)) for item in items], self.separator)

    def _part(self, item: Field) -> Any:
        if isinstance(item.value, str):
            return item.text()
        return item.image(self.images, "text, a tensor, the bytes of a file, or a struct of bytes and path")
