"""Documents and examples: a record becomes an ordered list of parts, then tokens, positions and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.segments.kinds import AUDIO, NO_FRAME, TEXT
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence, SequenceBuilder, is_ids
from mmpos.support.checks import IntArray, boolean, integer, naming, one_of

__all__ = [
    *("IGNORE_INDEX", "BrokenImage", "Builder", "Document", "Example", "Format", "ImageError", "Location"),
    *("MakeExample", "OnImageError", "Piece", "Preprocess", "Record", "RecordError", "join_texts", "make_example"),
]


class RecordError(InvalidInputError):
    """Error for an unusable record; names the record, the field, the value received and the value expected."""


OnImageError = Literal["drop", "skip-document", "raise"]


class ImageError(RecordError):
    """Error for a record with an unreadable image, whose ``on_error`` overrides the policy for records."""

    on_error: Literal["raise", "skip"] = "raise"


@dataclass(frozen=True, slots=True)
class Location:
    """Shard, by its path or name, and index of a record.

    >>> print(Location("shard-003.tar", 17))
    shard-003.tar[17]
    """

    source: str
    index: int

    def __str__(self) -> str:
        return f"{self.source}[{self.index}]"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Part of a document, with a flag for whether to train on it.

    Args:
        part: any part that SequenceBuilder accepts: text, token ids, image bytes, a path, a Grid, a Video, a Clip …
        train: whether its tokens are labels, including the timestamps of a Video; patches and audio never are.
    """

    part: Any
    train: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Text and images of one record, in order: the id of the record, and at least one piece."""

    key: str
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise RecordError(f"{self.key}: got no parts, want at least one")
        for i, piece in enumerate(self.pieces):
            if not isinstance(piece, Piece):
                raise InvalidInputError(f"{self.key}: pieces[{i}]: got {type(piece).__name__}, want a Piece")
            if not isinstance(piece.train, bool):
                raise InvalidInputError(f"{self.key}: pieces[{i}].train: got {piece.train!r}, want True or False")

    @property
    def parts(self) -> list[object]:
        """Parts of all pieces."""
        return [piece.part for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class BrokenImage:
    """Part that replaces an image, a video or audio (the kind) that cannot be resolved, with the error."""

    error: RecordError
    kind: str = "image"


def join_texts(pieces: Iterable[Piece], separator: str) -> list[Piece]:
    """Join adjacent texts with the same train flag, so that a tokenizer sees them as one text."""
    joined: list[Piece] = []
    for (is_text, train), group in groupby(pieces, lambda piece: (isinstance(piece.part, str), piece.train)):
        run = list(group)
        joined += [Piece(separator.join(piece.part for piece in run), train)] if is_text else run
    return joined


Record: TypeAlias = Mapping[str, Any]
"""Raw record: values by name, with undecoded images."""

IGNORE_INDEX = -100
"""Label of tokens that are not trained on: the default ignore_index of torch's cross_entropy."""

Format = Callable[[Record, Location], Document]
"""Function that converts a raw record and its location to a document."""


class Builder(Protocol):
    """Protocol of sequence builders: a SequenceBuilder, or a client of the service."""

    def build(self, parts: Sequence[object], /) -> InterleavedSequence:
        """Build the sequence of the parts."""


@dataclass(frozen=True, eq=False)
class Example:
    """Tokenized document with positions and labels, ready to be packed.

    Args:
        key: id of the record.
        sequence: tokens, positions and patches.
        labels: (tokens,) int64, IGNORE_INDEX on tokens that are not trained on.
        dropped_images: errors of the images that were left out.
        origin: four numbers by which a loader finds the record again, then the first token and the end of a slice.
    """

    key: str
    sequence: InterleavedSequence
    labels: IntArray
    dropped_images: tuple[str, ...] = field(default=(), kw_only=True)
    origin: tuple[int, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.labels.shape != self.sequence.input_ids.shape:
            got, want = self.labels.shape, self.sequence.input_ids.shape
            raise InvalidInputError(f"{self.key}: labels: got shape {got}, want {want}, the shape of input_ids")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including markers and patches."""
        return self.sequence.input_ids.size

    def slice(self, start: int, stop: int) -> Example:
        """Return the tokens from start to stop, with their original position ids.

        Args:
            start: first token.
            stop: one past the last token; greater than start.

        Raises:
            InvalidInputError: the range is empty or out of bounds, or cuts through an image or audio with its markers.
        """
        start = integer("start", start, minimum=0, maximum=self.num_tokens - 1)
        stop = integer("stop", stop, minimum=start + 1, maximum=self.num_tokens)
        original, spans, marked = self.sequence, self.sequence.image_spans, self.sequence.marked_spans
        for name, edge in (("start", start), ("stop", stop)):
            cut = (marked[:, 0] < edge) & (edge < marked[:, 1])
            if cut.any():
                part = original.span_name(int(cut.argmax()))
                raise InvalidInputError(f"{name}: got {edge} inside {part}, want it between parts")
        kept = (spans[:, 0] >= start) & (spans[:, 1] <= stop)
        sequence = replace(
            original,
            input_ids=original.input_ids[start:stop],
            token_type_ids=original.token_type_ids[start:stop],
            segments=_segments(original.segments, start, stop),
            positions=original.positions.slice(start, stop),
            patches=_patches(original, kept),
            grid_thw=original.grid_thw[kept],
            image_spans=spans[kept] - start,
            image_hashes=tuple(np.array(original.image_hashes, object)[kept]),
            part_offsets=np.unique(np.clip(original.part_offsets, start, stop) - start),
        )
        record, before = self.origin[:4], self.origin[4] if self.origin[4:] else 0
        origin = (*record, before + start, before + stop) if record else ()
        return Example(self.key, sequence, self.labels[start:stop], origin=origin)


MakeExample = Callable[[Record, Location], Example]
"""Function that converts a raw record and its location to an example: a Preprocess, ``get_example``, or your own."""


def make_example(preprocess: MakeExample, raw: Record | RecordError, here: Location) -> Example:
    """Convert a raw record to an example.

    Raises:
        RecordError: the record is unusable.
        InvalidInputError: the callable did not return an Example.
        Exception: any other error raised by the callable; a note on the error names the record.
    """
    if isinstance(raw, RecordError):
        raise raw
    try:
        example: object = preprocess(raw, here)
    except RecordError:
        raise
    except LimitExceededError as error:
        raise RecordError(str(error) if str(here) in str(error) else f"{here}: {error}") from error
    except Exception as error:
        if str(here) not in str(error):
            error.add_note(f"raised for the record {here}")
        raise
    if not isinstance(example, Example):
        raise InvalidInputError(f"preprocess: got {type(example).__name__} for {here}, want an Example")
    return example


@dataclass(frozen=True)
class Preprocess:
    """Picklable callable that converts a raw record to an Example, for the loader and all engines.

    Args:
        format: converts a record to a document: one of mmpos.data.formats, or your own. A conversation format without a
            template uses that of the builder's tokenizer, or, with a warning, plain text.
        builder: builds a sequence from the parts of the document.
        train_markers: whether to train on the [IMG], [/IMG] and row separators of images in trained pieces, and on
            audio markers in these pieces; patches and audio are never trained on.
        on_image_error: policy for an image or a video that cannot be read, regardless of the policy for other errors:
            "drop" removes it and its markers from the document and joins the texts around it; "skip-document" skips the
            record; "raise" raises. None treats such an error like any other error in the record. A document with
            nothing left is skipped.
    """

    format: Format
    builder: Builder
    train_markers: bool = False
    on_image_error: OnImageError | None = None

    def __post_init__(self) -> None:
        if not callable(self.format):
            raise InvalidInputError(
                f"format: got {type(self.format).__name__}, want a callable that takes a record and a location"
            )
        if not callable(getattr(self.builder, "build", None)):
            raise InvalidInputError(f"builder: got {type(self.builder).__name__}, want an object with a build method")
        if callable(for_tokenizer := getattr(self.format, "for_tokenizer", None)):
            object.__setattr__(self, "format", for_tokenizer(getattr(self.builder, "tokenizer", None)))
        boolean("train_markers", self.train_markers)
        one_of("on_image_error", self.on_image_error, (*get_args(OnImageError), None))
        reads_images = not isinstance(self.builder, SequenceBuilder) or self.builder.images is not None
        if self.on_image_error is not None and not reads_images:
            got = f"{self.on_image_error!r} with a builder that reads no images"
            raise InvalidInputError(f"on_image_error: got {got}, want None, or SequenceBuilder(images=…)")

    def __call__(self, record: Record, location: Location) -> Example:
        """Convert a record to an example.

        Raises:
            RecordError: the record is invalid; the error names the record and the field or part.
            UnsupportedError: the builder has no ImageProcessor or no Markers for a part. This is a configuration error,
                which no policy for records or images skips.
            ServiceError: the builder is a client whose server does not answer.
        """
        document: object = getattr(self.format, "read_document", self.format)(record, location)
        if not isinstance(document, Document):
            raise InvalidInputError(f"format: got {type(document).__name__} for {location}, want a Document")
        fault = next((piece.part.error for piece in document.pieces if isinstance(piece.part, BrokenImage)), None)
        if fault is None:
            try:
                return self._example(document, location)
            except RecordError as error:
                fault = error
        broken = {} if self.on_image_error is None else self._broken_images(document, location)
        if not broken:
            raise fault
        kept = [piece for i, piece in enumerate(document.pieces) if i not in broken]
        if self.on_image_error != "drop" or not kept:
            refusal = ImageError(str(fault))
            refusal.on_error = "raise" if self.on_image_error == "raise" else "skip"
            raise refusal from fault
        joined = join_texts(kept, getattr(self.format, "separator", ""))
        example = self._example(Document(document.key, tuple(joined)), location)
        return replace(example, dropped_images=tuple(broken.values()))

    def _broken_images(self, document: Document, location: Location) -> dict[int, str]:
        """Build each image separately, and return the errors of those that fail, keyed by part index."""
        broken: dict[int, str] = {}
        for i, part in enumerate(document.parts):
            if isinstance(part, BrokenImage):
                broken[i] = str(part.error)
            elif not isinstance(part, str) and not is_ids(part):
                try:
                    self.builder.build([part])
                except (InvalidInputError, LimitExceededError) as error:
                    broken[i] = f"{_where(document, location)}: parts[{i}]{str(error).removeprefix('parts[0]')}"
                except UnsupportedError:
                    continue  # not an error in the image; building the rest of the document raises it
        return broken

    def _example(self, document: Document, location: Location) -> Example:
        try:
            sequence = self.builder.build([piece.part for piece in document.pieces])
        except (InvalidInputError, UnsupportedError, LimitExceededError) as error:
            where = _where(document, location)
            if isinstance(error, UnsupportedError) and isinstance(self.builder, SequenceBuilder):
                with naming(where):
                    for i, part in enumerate(document.parts):
                        self.builder.check_components(f"parts[{i}]", part)
            raise RecordError(f"{where}: {error}") from error
        train = np.repeat([piece.train for piece in document.pieces], np.diff(sequence.part_offsets))
        train &= sequence.token_type_ids == 0
        if not self.train_markers:
            for start, stop in sequence.marked_spans.tolist():
                train[start:stop] = False
        return Example(document.key, sequence, np.where(train, sequence.input_ids, IGNORE_INDEX))


def _where(document: Document, location: Location) -> str:
    """Return the name of a document for error messages."""
    return str(location) if document.key == str(location) else f"{document.key} ({location})"


def _segments(table: SegmentTable, start: int, stop: int) -> SegmentTable:
    """Return the segments of a slice that cuts only text."""
    stops = table.lengths.cumsum()
    starts = stops - table.lengths
    kept = (table.kind != TEXT) & (starts >= start) & (stops <= stop)
    segments = SegmentTable.from_spans(
        [stop - start],
        starts[kept] - start,
        table.extents[:, kept].T,
        row_separator=table.row_separator is not None,
        kind=None if table.kind.max() < AUDIO else table.kind[kept],
        extra_tokens=None if table.extra_tokens is None else table.extra_tokens[kept],
    )
    seconds = first = None
    if table.seconds_per_frame is not None and table.seconds_per_frame[0, kept].any():
        seconds = np.array([[0], [1]]).repeat(segments.kind.size, axis=1)
        seconds[:, segments.kind != TEXT] = table.seconds_per_frame[:, kept]
    if table.first_frame is not None:
        first = np.full(segments.kind.size, NO_FRAME, np.int64)
        first[segments.kind != TEXT] = table.first_frame[kept]
    whole = seconds is first is None
    return segments if whole else replace(segments, seconds_per_frame=seconds, first_frame=first)


def _patches(sequence: InterleavedSequence, kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.generic] | None:
    """Return the patches of the kept images; every token has the same number of patches."""
    if sequence.patches is None or not kept.any():
        return None
    tokens = sequence.grid_thw.prod(axis=1)
    return sequence.patches[np.repeat(kept, tokens * (len(sequence.patches) // int(tokens.sum())))]
