"""Megatron Energon: samples that are one sequence of texts and images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmpos.data.documents import Document, Location, Piece
from mmpos.data.formats.fields import Field, assemble, check_option, open_record
from mmpos.data.formats.resolve import Images

__all__ = ["Energon"]


@dataclass(frozen=True)
class Energon:
    """Records with a ``sequence`` of text and images in order, as the fields of an InterleavedSample.

    An image is a tensor (3, h, w), of floats from 0 to 1 as Energon decodes by default, or of uint8; or what it is
    before decoding: the bytes of a file, or a struct of bytes and path. Text is always text, never a path or a URL.

    Source: megatron.energon.InterleavedSample, ``sequence: List[Union[torch.Tensor, str]]``.

    >>> Energon()({"sequence": ["A cat:", b"GIF89a"]}, Location("shard.tar", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: where the images come from that are structs with only a path.
        separator: stands between two texts with no image between them.
    """

    images: Images = field(default_factory=Images)
    separator: str = ""

    def __post_init__(self) -> None:
        check_option("images", self.images, Images)
        check_option("separator", self.separator, str)

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        """The document of a record.

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
