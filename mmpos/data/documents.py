"""What every record becomes: one ordered list of parts, each of which is trained on or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmpos.errors import InvalidInputError
from mmpos.support.checks import boolean

__all__ = ["Document", "Location", "Piece", "RecordError"]


class RecordError(InvalidInputError):
    """A record is wrong; the message names the record, the field, what came and what was wanted."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record lies.

    >>> print(Location("shard-003.tar", 17))
    shard-003.tar[17]

    Args:
        source: path or name of the shard.
        index: number of the record in it, from 0.
    """

    source: str
    index: int

    def __str__(self) -> str:
        return f"{self.source}[{self.index}]"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a document.

    Args:
        part: whatever SequenceBuilder takes: text, token ids, the bytes of an image, a path, a Grid, a Video …
        train: whether its tokens are labels, those of a Video's timestamps too; patches never are.
    """

    part: Any
    train: bool = True

    def __post_init__(self) -> None:
        boolean("Piece.train", self.train)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Text and images in order.

    Args:
        key: id of the record.
        pieces: its parts; at least one.
    """

    key: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise RecordError(f"{self.key}: got no parts, want at least one")

    @property
    def parts(self) -> list[Any]:
        """What a builder takes."""
        return [piece.part for piece in self.pieces]
