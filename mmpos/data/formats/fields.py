"""Record fields (values with their names for error messages), and the base class of formats."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_type_hints

import numpy as np

from mmpos.data.examples import BrokenImage, Document, Location, Piece, Record, RecordError, join_texts
from mmpos.data.formats.images import REFERENCE, Images, describe
from mmpos.errors import InvalidInputError
from mmpos.images.decode import is_of
from mmpos.support import checks

__all__ = ["Field", "RecordFormat", "check_option"]

_MEDIA = re.compile(
    r"(.*_)?(image|img|picture|photo|video|audio)s?_?\d*(?P<origin>_(path|file|url)s?)?"
    r"|(.*\.)?(jpe?g|jfif|png|webp|gif|bmp|tiff?|avif|heic|jxl|jp2|mp4|m4v|mov|avi|mkv|webm|mpe?g|wmv|flv|3gp)"
    r"|(.*\.)?(wav|mp3|flac|ogg|opus|aac|m4a|wma)",
    re.IGNORECASE,
)
"""Names of columns and of members of a tar file that carry media; an origin may stand beside the image itself."""

_SIGNATURE = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n|GIF8|II\*\0|MM\0\*|\x1aE\xdf\xa3|OggS|fLaC|ID3|RIFF....(WEBP|WAVE|AVI )|....ftyp",
    re.DOTALL,
)
"""First bytes of images, videos and audio."""


_KEYS = ("id", "__key__", "__url__")

_FILE = re.compile(
    r"data:(image|video|audio)/|\S{1,2048}\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic|mp4|mov|mkv|webm|wav|mp3|flac|ogg)$",
    re.IGNORECASE,
)
"""Texts that name a file of media."""


@dataclass(frozen=True, slots=True)
class Field:
    """Value in a record. Null and missing values are equivalent, since Parquet has no missing values."""

    record: str  # name of the record in error messages
    name: str  # path of the value, such as messages[0].content; empty for the record itself
    value: Any
    read: dict[str, tuple[Mapping[str, Any], set[str]]] = field(default_factory=dict, repr=False, compare=False)
    """Each mapping of the record that was read, with the names that were read from it."""

    def __getitem__(self, name: str) -> Field:
        """Return a field of this mapping; its value is None if the name is missing."""
        if not isinstance(self.value, Mapping):
            raise self.error("a mapping of names to values")
        if (read := self.read.get(self.name)) is None:
            read = self.read[self.name] = (self.value, set())
        read[1].add(name)
        return Field(self.record, f"{self.name}.{name}" if self.name else name, self.value.get(name), self.read)

    def whole(self) -> Any:
        """Return the value, for a callable that may read every name in it."""
        self.read.setdefault(self.name, (self.value, set()))[1].update(self.value)
        return self.value

    def error(self, want: str, got: str | None = None) -> RecordError:
        """Return an error about this value."""
        return RecordError(f"{self.record}: {self.name}: got {got or describe(self.value)}, want {want}")

    @property
    def is_list(self) -> bool:
        """Whether the value is a list; arrays of numbers, such as pixels, are not."""
        return _is_list(self.value)

    @property
    def is_empty(self) -> bool:
        """Whether the value is null, empty, or a list or a mapping of such values."""
        return _is_empty(self.value)

    def items(self) -> list[Field]:
        """Return the items of this list."""
        if not (isinstance(self.value, list | tuple) or (isinstance(self.value, np.ndarray) and self.value.ndim)):
            raise self.error("a list")
        return [Field(self.record, f"{self.name}[{i}]", value, self.read) for i, value in enumerate(self.value)]

    def several(self) -> list[Field]:
        """Return the items of this list, the value itself as the only item, or an empty list for null."""
        if self.value is None:
            return []
        return self.items() if self.is_list else [self]

    def text(self, want: str = "text") -> str:
        """Return the value, which must be text."""
        if not isinstance(self.value, str):
            raise self.error(want)
        try:
            return checks.text(self.name, str(self.value))
        except InvalidInputError as error:
            raise RecordError(f"{self.record}: {error}") from error

    def choice(self, options: Collection[str]) -> str:
        """Return the value, which must be one of the options."""
        if not isinstance(self.value, str) or self.value not in options:
            raise self.error(f"one of {', '.join(options)}")
        return self.value

    def utf8(self, want: str = "text or its bytes in UTF-8") -> str:
        """Return the value as text; it must be text or UTF-8 bytes."""
        if not isinstance(self.value, bytes | bytearray | memoryview):
            return self.text(want)
        try:
            return bytes(self.value).decode()
        except UnicodeDecodeError as error:
            raise self.error("UTF-8", got=f"bytes that are not UTF-8 ({error})") from error

    def parsed(self, want: str) -> Field:
        """Return the value if it is a mapping, else parse it as JSON; it must then be text or UTF-8 bytes."""
        if isinstance(self.value, Mapping):
            return self
        text = self.utf8(want)
        try:
            return Field(self.record, self.name, json.loads(text), self.read)
        except (ValueError, RecursionError) as error:
            raise self.error(want, got=f"{describe(text)}, which is not JSON ({error})") from error

    def index(self, of: str, length: int) -> int:
        """Return the value, which must be an index into a list of this length."""
        value = _integer(self.value)
        if value is None or not 0 <= value < length:
            raise self.error(f"an index into the {length} items of {of}")
        return value

    def number(self) -> float:
        """Return the value, which must be a finite number."""
        value = float(self.value) if isinstance(self.value, float | np.floating) else _integer(self.value)
        if value is None or not abs(value) <= sys.float_info.max:
            raise self.error("a finite number")
        return float(value)

    def image(self, images: Images, want: str = REFERENCE) -> object:
        """Resolve the image that the value refers to; return a BrokenImage if that fails."""
        try:
            return images.resolve(f"{self.record}: {self.name}", self.value, want)
        except RecordError as error:
            return BrokenImage(error)


class RecordFormat(ABC):
    """Base class of formats: frozen dataclasses of options that return the pieces of a record in order."""

    separator: ClassVar[str] = ""
    """Text inserted between adjacent texts."""

    refused: ClassVar[Collection[str]] = ()
    """Names that are refused wherever they hold a value, since a document without it would mean something else."""

    @property
    @abstractmethod
    def names(self) -> str:
        """Names of the fields that hold the pieces, for error messages."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if isinstance(kind, type):
                check_option(name, getattr(self, name), kind)

    def __call__(self, record: Record, location: Location) -> Document:
        """Convert a record to a document.

        Adjacent texts with the same train flag are joined with the separator, so that a tokenizer sees them as one
        text; empty texts are left out.

        Raises:
            RecordError: the record is invalid; the error names the record and the field.
        """
        document = self.read(record, location)
        for part in document.parts:
            if isinstance(part, BrokenImage):
                raise part.error
        return document

    def read(self, record: Record, location: Location) -> Document:
        """Convert a record to a document, with a BrokenImage for each image reference that cannot be resolved.

        Raises:
            RecordError: the record is invalid in any other way, or carries media that the format does not read.
        """
        key, fields = _open_record(record, location)
        kept = [piece for piece in self._pieces(fields) if not isinstance(piece.part, str) or piece.part]
        placed = any(not isinstance(piece.part, str) for piece in kept)
        for name, (mapping, read) in fields.read.items():
            for unread in mapping:
                if unread not in read and (unread in self.refused or _is_media(unread, mapping[unread], placed)):
                    lost = Field(fields.record, name, mapping)[unread]
                    if not lost.is_empty:
                        raise lost.error(f"none, since {type(self).__name__} does not read it")
        if not kept:
            raise Field(fields.record, self.names, None).error("at least one", got="no image and no text")
        return Document(key, tuple(join_texts(kept, self.separator)))

    @abstractmethod
    def _pieces(self, record: Field) -> Iterable[Piece]:
        """Read the pieces of a record in order."""


def _open_record(record: Record, location: Location) -> tuple[str, Field]:
    """Return the key of a record, and the record as a field.

    The key is ``id`` or ``__key__`` (text or an integer) if the record has either, else the location.
    """
    here = str(location)
    if not isinstance(record, Mapping):
        raise RecordError(f"{here}: got {describe(record)}, want a mapping of names to values")
    for name in _KEYS[:2]:
        own = Field(here, name, record.get(name))
        if own.value is None:
            continue
        number = _integer(own.value)
        key = str(number) if number is not None and abs(number) < 2**64 else own.text("text or an integer of 64 bits")
        if not key:
            raise own.error("a non-empty key")
        return key, Field(f"{key} ({here})", "", record)
    return here, Field(here, "", record)


def check_option(name: str, value: object, kind: type) -> None:
    """Check the type of an option of a format."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}: got {describe(value)}, want {'text' if kind is str else kind.__name__}")


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "OSU"
    )


def _is_empty(value: Any, depth: int = 3) -> bool:
    if value is None or isinstance(value, str | bytes):
        return not value or value in ("[]", "{}")
    if isinstance(value, Mapping):
        value = list(value.values())
    return depth > 0 and _is_list(value) and all(_is_empty(item, depth - 1) for item in value)


def _is_media(name: object, value: Any, placed: bool) -> bool:
    """Return whether a column carries media: by its name, or since it holds images, their bytes, structs or files."""
    if match := _MEDIA.fullmatch(str(name)):
        return not isinstance(value, int | float) and not (placed and match["origin"])
    item = next((item for item in value if item is not None), None) if _is_list(value) else value
    if isinstance(item, str):  # beside placed media, a text may say where they come from
        return not placed and name not in _KEYS and _FILE.match(item) is not None
    if isinstance(item, Mapping):
        if item.keys() == {"bytes", "path"} or item.keys() >= {"array", "sampling_rate"}:
            return True
        item = item.get("bytes")
    return is_of("PIL.Image", "Image", item) or (isinstance(item, bytes) and _SIGNATURE.match(item) is not None)


def _integer(value: object) -> int | None:
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
