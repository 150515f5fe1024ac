"""Format of plain text."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmpos.data.examples import Piece
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images

__all__ = ["Texts"]


@dataclass(frozen=True)
class Texts(RecordFormat):
    """Format of records with a text, all of which is trained on, as in C4 and FineWeb.

    Source: the field ``text`` in the dataset cards of allenai/c4 and HuggingFaceFW/fineweb.

    >>> from mmpos.data import Location
    >>> Texts()({"text": "A cat sleeps.", "url": "https://host/cat"}, Location("train.parquet", 0)).parts
    ['A cat sleeps.']

    Args:
        text: name of the column.
        images: not used, since a record with an image is refused.
    """

    text: str = "text"
    images: Images = field(default_factory=Images)

    @property
    def names(self) -> str:
        """Name of the column."""
        return self.text

    def _pieces(self, record: Field) -> list[Piece]:
        return [Piece(record[self.text].text())]
