"""Record fields (values with their names for error messages), and the base class of formats."""

from __future__ import annotations

import json
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np

from mmpos.data.examples import BrokenImage, Document, Location, Piece, Record, RecordError, join_texts
from mmpos.errors import InvalidInputError, ServiceError
from mmpos.images.decode import is_of
from mmpos.support import checks

__all__ = ["Field", "RecordFormat", "called", "check_options", "describe", "integer_of", "is_empty", "is_list"]

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
        where = f"{self.record}: {self.name}" if self.name else self.record
        return RecordError(f"{where}: got {got or describe(self.value)}, want {want}")

    def items(self) -> list[Field]:
        """Return the items of this list."""
        if not (isinstance(self.value, list | tuple) or (isinstance(self.value, np.ndarray) and self.value.ndim)):
            raise self.error("a list")
        return [Field(self.record, f"{self.name}[{i}]", value, self.read) for i, value in enumerate(self.value)]

    def several(self) -> list[Field]:
        """Return the items of this list, the value itself as the only item, or an empty list for null."""
        if self.value is None:
            return []
        return self.items() if is_list(self.value) else [self]

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

    def parsed(self) -> Field:
        """Return the value if it is a mapping, else parse it as JSON; it must then be text or UTF-8 bytes."""
        if isinstance(self.value, Mapping):
            return self
        text = self.utf8("an object, or one as JSON")
        try:
            return Field(self.record, self.name, json.loads(text), self.read)
        except (ValueError, RecursionError) as error:
            raise self.error("JSON", got=f"{describe(text)}, which is not JSON ({error})") from error


class RecordFormat(ABC):
    """Base class of formats: frozen dataclasses of options that return the pieces of a record in order."""

    separator: ClassVar[str] = ""
    """Text inserted between adjacent texts."""

    refused: ClassVar[Collection[str]] = ()
    """Names that are refused wherever they hold a value, since a document without it would mean something else."""

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, record: Record, location: Location) -> Document:
        """Convert a record to a document.

        Adjacent texts with the same train flag are joined with the separator, so that a tokenizer sees them as one
        text; empty texts are left out.

        Raises:
            RecordError: the record is invalid; the error names the record and the field.
        """
        document = self.read_document(record, location)
        for part in document.parts:
            if isinstance(part, BrokenImage):
                raise part.error
        return document

    def read_document(self, record: Record, location: Location) -> Document:
        """Convert a record to a document, with a BrokenImage for each image reference that cannot be resolved.

        The key is ``id`` or ``__key__`` (text or an integer) if the record has either, else the location.

        Raises:
            RecordError: the record is invalid in any other way, or carries media that the format does not read.
        """
        where = key = str(location)
        if not isinstance(record, Mapping):
            raise RecordError(f"{where}: got {describe(record)}, want a mapping of names to values")
        own = next((name for name in ("id", "__key__") if record.get(name) is not None), None)
        if own is not None:
            name, number = Field(where, own, record[own]), integer_of(record[own])
            large = number is None or abs(number) >= 2**64
            if not (key := name.text("text or an integer of 64 bits") if large else str(number)):
                raise name.error("a non-empty key")
            where = f"{key} ({where})"
        fields = Field(where, "", record)
        kept = [piece for piece in self._pieces(fields) if not isinstance(piece.part, str) or piece.part]
        placed = any(not isinstance(piece.part, str) for piece in kept)
        for path, (mapping, read) in fields.read.items():
            for unread, value in mapping.items():
                lost = unread not in read and (unread in self.refused or _is_media(unread, value, placed))
                if lost and not is_empty(value):
                    want = f"none, since {type(self).__name__} does not read it"
                    raise Field(where, path, mapping)[unread].error(want)
        if not kept:
            raise fields.error("at least one", got="no image and no text")
        return Document(key, tuple(join_texts(kept, self.separator)))

    @abstractmethod
    def _pieces(self, record: Field) -> Iterable[Piece]:
        """Read the pieces of a record in order."""


_WORDS = {"str": "text", "PathLike": "a path", "Callable": "a callable", "NoneType": "None"}


def check_options(options: object) -> None:
    """Check the type of each option of a dataclass."""
    for name, hint in get_type_hints(type(options)).items():
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else [hint])]
        value = getattr(options, name)
        if ClassVar not in kinds and not isinstance(value, tuple(kinds)):
            want = " or ".join(_WORDS.get(kind.__name__, kind.__name__) for kind in kinds)
            raise InvalidInputError(f"{name}: got {describe(value)}, want {want}")


def called(name: str, origin: str, function: Callable[[Any], Any], argument: object, want: str) -> Any:
    """Call a function that is not ours; convert its exceptions, except those of a service, to record errors."""
    try:
        return function(argument)
    except ServiceError:
        raise
    except InvalidInputError as error:
        raise RecordError(f"{name}: {error}") from error
    except Exception as error:
        got = f"{type(error).__name__} ({str(error)[:200]}) from {origin}"
        raise RecordError(f"{name}: got {got}, want {want}") from error


def describe(value: object) -> str:
    """Describe a value for an error message, briefly even if it is large."""
    if value is None:
        return "nothing"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{memoryview(value).nbytes} bytes"
    if isinstance(value, str | int | float | list | tuple | dict):
        short = reprlib.Repr()
        short.maxstring, short.maxlevel = 80, 3
        try:
            shown = short.repr(value)
            return shown if len(shown) <= 120 else f"{shown[:119]}…"
        except ValueError:  # an integer with too many digits to convert
            pass
    return type(value).__name__


def is_list(value: object) -> bool:
    """Return whether a value is a list; arrays of numbers, such as pixels, are not."""
    return isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "OSU"
    )


def is_empty(value: Any, depth: int = 3) -> bool:
    """Return whether a value is null, empty, or a list or a mapping of such values."""
    if value is None or isinstance(value, str | bytes):
        return not value or value in ("[]", "{}")
    if isinstance(value, Mapping):
        value = list(value.values())
    return depth > 0 and is_list(value) and all(is_empty(item, depth - 1) for item in value)


def _is_media(name: object, value: Any, placed: bool) -> bool:
    """Return whether a column carries media: by its name, or since it holds images, files, bytes or such a struct."""
    if match := _MEDIA.fullmatch(str(name)):
        return not isinstance(value, int | float) and not (placed and match["origin"])
    item = next((item for item in value if item is not None), None) if is_list(value) else value
    if isinstance(item, str):  # beside placed media, a text may say where they come from
        return not placed and name not in ("id", "__key__", "__url__") and _FILE.match(item) is not None
    if isinstance(item, Mapping):
        if item.keys() == {"bytes", "path"} or item.keys() >= {"array", "sampling_rate"}:
            return True
        return any(not is_empty(inner) and _is_media(member, inner, placed) for member, inner in item.items())
    return is_of("PIL.Image", "Image", item) or (isinstance(item, bytes) and _SIGNATURE.match(item) is not None)


def integer_of(value: object) -> int | None:
    """Return an integer as an int, or None for any other value."""
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None
