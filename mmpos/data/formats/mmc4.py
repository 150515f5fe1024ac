"""Multimodal C4: sentences of web pages, and images that each belong to a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Document, Location, Piece
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images
from mmpos.errors import InvalidInputError
from mmpos.support.checks import one_of

__all__ = ["MMC4"]


@dataclass(frozen=True)
class MMC4:
    """Records of MMC4: an image stands before the sentence that it was matched to.

    ``text_list`` is a list of sentences and ``image_info`` a list of images, each with ``matched_text_index`` (its
    sentence), ``matched_sim`` (CLIP similarity to it), ``image_name`` and ``raw_url``. Images of one sentence stay in
    the order of image_info. ``similarity_matrix``, where it is there, has a row for each image and a column for each
    sentence; it is checked for that and not used.

    Source: the README of the repository allenai/mmc4; Zhu et al. 2023, arXiv:2304.06939.

    >>> record = {"text_list": ["One.", "Two."], "image_info": []}
    >>> MMC4()(record, Location("shard.jsonl", 0)).parts
    ['One. Two.']

    Args:
        images: where the images come from.
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

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record.

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
    found = matrix.items()
    if len(found) != rows:
        raise matrix.error(f"{rows}, as many as image_info", got=f"{len(found)} rows")
    for row in found:
        if len(row.items()) != columns:
            raise row.error(f"{columns}, as many as text_list", got=f"{len(row.items())} values")
