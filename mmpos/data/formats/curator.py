"""Format of NeMo Curator samples: documents whose texts and images are rows of a table, sorted by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from mmpos.data.examples import BrokenImage, Piece, RecordError
from mmpos.data.formats.fields import Field, RecordFormat
from mmpos.data.formats.images import Images, describe

__all__ = ["Curator"]

_MODALITIES = ("text", "image", "metadata")
_METADATA = -1  # position of metadata rows


@dataclass(frozen=True)
class Curator(RecordFormat):
    """Format of NeMo Curator samples with ``id`` and ``rows``, as returned by ``SampleReader`` and ``join_samples``.

    A row has a ``modality``, "text", "image" or "metadata", and a ``position``. Pieces are sorted by position, from 0;
    gaps are allowed, since Curator may drop rows. Metadata rows, at position -1, are not used. Text is in
    ``text_content``. An image is in ``binary_content``, or in the place that ``source_ref`` names as JSON: the whole
    file ``path``, or ``byte_size`` bytes of it at ``byte_offset``. A row with a ``materialize_error`` counts as a
    broken image. A row with a false ``train``, a column that ``write_samples`` adds, is not trained on. Other columns
    are ignored; other modalities are refused. An invalid row makes the whole sample invalid.

    Source: INTERLEAVED_SCHEMA in nemo_curator.tasks.interleaved, NeMo Curator 1.4.

    >>> from mmpos.data import Location
    >>> cat = {"position": 1, "modality": "image", "binary_content": b"GIF89a"}
    >>> words = {"position": 0, "modality": "text", "text_content": "A cat:"}
    >>> Curator()({"id": "a", "rows": [cat, words]}, Location("samples.parquet", 0)).parts
    ['A cat:', b'GIF89a']

    Args:
        images: sources of images that are not in the table.
        separator: text between adjacent texts.
    """

    names: ClassVar[str] = "rows"
    images: Images = field(default_factory=Images)
    separator: str = "\n\n"

    def _pieces(self, record: Field) -> list[Piece]:
        if record["id"].value is None:
            raise record["id"].error("the sample_id of its rows")
        placed: dict[int, Field] = {}
        for row in record["rows"].items():
            position = _position(row)
            if position in placed:
                raise row["position"].error(f"a position other than that of {placed[position].name}")
            if position is not None:
                placed[position] = row
        return [self._piece(placed[position]) for position in sorted(placed)]

    def _piece(self, row: Field) -> Piece:
        train = row["train"].value
        if not isinstance(train, bool | None):
            raise row["train"].error("true, false or null")
        part = row["text_content"].text() if row["modality"].value == "text" else self._image(row)
        return Piece(part, train is not False)

    def _image(self, row: Field) -> object:
        if (fault := row["materialize_error"]).value is not None:
            return BrokenImage(fault.error("none"))
        if row["binary_content"].value is not None or row["source_ref"].value is None:
            return row["binary_content"].image(self.images, "the bytes of a file, or a source_ref")
        try:
            return self._referred(row["source_ref"].parsed("a JSON object"))
        except RecordError as error:
            return BrokenImage(error)

    def _referred(self, reference: Field) -> object:
        """Return the image that a source_ref refers to."""
        path, size = reference["path"], reference["byte_size"]
        if reference["frame_index"].value is not None:
            raise reference["frame_index"].error("null, since frames of TIFF files are not supported")
        if size.value is None and reference["member"].value is not None:
            raise size.error("a number of bytes, since archives are not searched for members")
        file = self.images.resolve(f"{path.record}: {path.name}", path.text())
        if size.value is None:
            return file
        start = _count(reference["byte_offset"])
        stop = start + _count(size)
        if not isinstance(file, Path | bytes):
            raise path.error("a file or its bytes", got=f"{describe(file)} from the resolver")
        file_size = file.stat().st_size if isinstance(file, Path) else len(file)
        if stop > file_size:
            raise size.error(f"an end within the {file_size} bytes of the file", got=f"bytes {start} to {stop}")
        if isinstance(file, bytes):
            return file[start:stop]
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(stop - start)


def _position(row: Field) -> int | None:
    """Return the position of a row, or None for metadata."""
    metadata = row["modality"].choice(_MODALITIES) == "metadata"
    position = row["position"]
    if metadata:
        if position.value != _METADATA:
            raise position.error(f"{_METADATA} for metadata")
        return None
    return _count(position)


def _count(value: Field) -> int:
    number = value.number()
    if number < 0 or number != int(number):
        raise value.error("an integer >= 0")
    return int(number)
