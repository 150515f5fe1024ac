"""SegmentTable: the text, audio and grids of patches of a packed batch, before any scheme places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.segments import spans
from mmpos.segments.kinds import (
    AUDIO,
    AUDIO_TOKEN,
    CLIP,
    CLIP_MARKERS,
    GRID,
    NO_FRAME,
    NOUNS,
    PAD,
    PATCH,
    TEXT,
    THUMBNAIL,
    TILE,
    Audio,
    Clip,
    Grid,
    Segment,
    Text,
    Thumbnail,
    Tile,
    rationals,
)
from mmpos.segments.placeholders import Merging, PackedIds, Placeholders, find_spans, times_of_videos
from mmpos.support import native
from mmpos.support.checks import (
    INT32_MAX,
    Array,
    IntArray,
    boolean,
    counted,
    first_bad,
    host_array,
    int_array,
    read_only,
    shown,
)
from mmpos.support.ragged import ragged_arange

__all__ = ["GRID", "PAD", "TEXT", "Grid", "SegmentTable", "Text", "separator_tokens", "token_types"]


_UINT8 = np.dtype(np.uint8)

_DTYPES = {
    "kind": np.dtype(np.uint8),
    "extents": np.dtype(np.int64),
    "segment_offsets": np.dtype(np.int64),
    "seconds_per_frame": np.dtype(np.int64),
    "row_separator": np.dtype(np.bool_),
    "extra_tokens": np.dtype(np.int64),
    "first_frame": np.dtype(np.int64),
}

_CLASSES = (Text, Audio, Grid, Clip, Thumbnail, Tile)
_NAMES = ", ".join(part.__name__ for part in _CLASSES)

# Fields of Text, Audio and Grid that csrc/segments.c reads, in the same order.
_FIELDS = ("length", "frames", "height", "width", "row_separator", "seconds_per_frame", "first_frame")


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """The segments of a packed batch of documents, one column per segment, without positions.

    A table is immutable and its arrays are read-only. Two tables are equal if they hold the same documents.

    Args:
        kind: (segments,) uint8 TEXT, GRID, PAD, AUDIO, CLIP, THUMBNAIL or TILE; a TILE follows a THUMBNAIL or a TILE.
        extents: (3, segments) int64 frames, height, width; for a clip, those of its video; for text, audio and padding,
            1, 1, length.
        segment_offsets: (documents + 1,) int64 first segment of each document, then the total.
        seconds_per_frame: (2, segments) int64 numerators and denominators, (0, 1) for segments without a time; or None.
        row_separator: (segments,) bool, whether the rows of the grid end in one more token; or None.
        extra_tokens: (segments,) int64 tokens other than patches and markers: audio of a clip, or tokens of the picture
            after a thumbnail or a tile; 0 for other kinds; or None.
        first_frame: (segments,) int64 frame at which each grid begins, NO_FRAME for segments that name none; or None.
    """

    kind: npt.NDArray[np.uint8]
    extents: IntArray
    segment_offsets: IntArray
    seconds_per_frame: IntArray | None = None
    row_separator: npt.NDArray[np.bool_] | None = None
    extra_tokens: IntArray | None = None
    first_frame: IntArray | None = None

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array is not None:
                if not isinstance(array, np.ndarray) or array.dtype != dtype:
                    got = getattr(array, "dtype", type(array).__name__)
                    raise InvalidInputError(
                        f"{name}: got {got}, want an array of {dtype}; from_arrays converts other arrays"
                    )
                if array.flags.writeable:
                    array = array.view()
                    array.flags.writeable = False
                    object.__setattr__(self, name, array)
        core = native.core if self.seconds_per_frame is self.extra_tokens is self.first_frame is None else None
        if core is None or not core.sound(self.kind, self.extents, self.segment_offsets, self.row_separator):
            _check_segments(self)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, SegmentTable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[bytes | None, ...]:
        """All fields as bytes; None for optional fields that hold no time, separator, extra token or frame."""
        seconds, options = self.seconds_per_frame, (self.row_separator, self.extra_tokens)
        first = self.first_frame
        return (
            self.kind.tobytes(),
            self.extents.tobytes(),
            self.segment_offsets.tobytes(),
            None if seconds is None or not seconds[0].any() else seconds.tobytes(),
            *(None if array is None or not array.any() else array.tobytes() for array in options),
            None if first is None or (first == NO_FRAME).all() else first.tobytes(),
        )

    @classmethod
    def from_documents(cls, documents: Sequence[Sequence[Segment]]) -> SegmentTable:
        """Build the table from documents, which are lists of Text, Audio, Grid, Clip, Thumbnail and Tile.

        >>> SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]).lengths.tolist()
        [3, 6, 2]
        """
        arrays = None if native.core is None else native.core.documents(documents, Text, Audio, Grid, _FIELDS)
        if arrays is not None:
            return cls._of_bytes(*arrays)
        try:
            items = list(chain.from_iterable(documents))
            offsets = np.fromiter(accumulate(map(len, documents), initial=0), np.int64, len(documents) + 1)
            foreign = not set(_CLASSES).issuperset(map(type, items))
        except TypeError:
            foreign = True
        if foreign:
            raise _not_documents(documents)
        extents = np.fromiter(chain.from_iterable([item.extents for item in items]), np.int64, 3 * len(items))
        kind = np.fromiter([item.kind for item in items], np.uint8, len(items))
        times = [(i, item.seconds_per_frame) for i, item in enumerate(items) if isinstance(item, Grid | Clip)]
        separated = [i for i, item in enumerate(items) if isinstance(item, Grid) and item.row_separator]
        seconds = separator = extra = None
        if any(time for _, time in times):
            seconds = spans.seconds_columns(len(items), times)
        if separated:
            separator = np.zeros(len(items), np.bool_)
            separator[separated] = True
        if any(item.extra_tokens for item in items):
            extra = np.array([item.extra_tokens for item in items], np.int64)
        named = [item.first_frame if isinstance(item, Grid) else None for item in items]
        first = np.array([NO_FRAME if frame is None else frame for frame in named], np.int64)
        first_frame = None if (first == NO_FRAME).all() else first
        return cls(kind, extents.reshape(-1, 3).T, offsets, seconds, separator, extra, first_frame)

    @classmethod
    def from_arrays(
        cls,
        kind: npt.ArrayLike,
        extents: npt.ArrayLike,
        segment_offsets: npt.ArrayLike,
        *,
        seconds_per_frame: npt.ArrayLike | None = None,
        row_separator: npt.ArrayLike | None = None,
        extra_tokens: npt.ArrayLike | None = None,
        first_frame: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Build the table from copies of arrays; see the fields of the class."""
        separator = None if row_separator is None else host_array("row_separator", row_separator)
        if separator is not None and separator.dtype != np.bool_:
            raise InvalidInputError(f"row_separator: got dtype {separator.dtype}, want bool")
        kind = int_array("kind", kind, (None,))
        first_bad("kind", kind, minimum=TEXT, maximum=TILE)
        return cls(
            kind.astype(np.uint8),
            int_array("extents", extents, (3, None)).copy(),
            int_array("segment_offsets", segment_offsets, (None,)).copy(),
            None if seconds_per_frame is None else int_array("seconds_per_frame", seconds_per_frame, (2, None)).copy(),
            None if separator is None else separator.copy(),
            None if extra_tokens is None else int_array("extra_tokens", extra_tokens, (None,)).copy(),
            None if first_frame is None else int_array("first_frame", first_frame, (None,)).copy(),
        )

    @classmethod
    def from_spans(
        cls,
        lengths: npt.ArrayLike,
        offsets: npt.ArrayLike,
        grid_thw: npt.ArrayLike,
        documents: npt.ArrayLike | None = None,
        *,
        seconds_per_frame: Sequence[Fraction | float | None] | None = None,
        row_separator: bool = False,
        kind: npt.ArrayLike | None = None,
        extra_tokens: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Build the table from placeholder spans of an inference engine, without reading tokens.

        Args:
            lengths: (documents,) number of tokens in each document.
            offsets: (spans,) first token of each span, counted from its document's first token,
                ascending within a document.
            grid_thw: (spans, 3) frames, height, width after spatial merging.
            documents: (spans,) index of each span's document, ascending; optional for one document.
            seconds_per_frame: one per span, or None.
            row_separator: whether the rows of all grids end in one more token.
            kind: (spans,) GRID, AUDIO, CLIP, THUMBNAIL or TILE; spans of the last three kinds include their markers
                and extra tokens. None if all are grids.
            extra_tokens: (spans,) extra tokens, as in the table; None if all are 0.

        Raises:
            InvalidInputError: a span overlaps the one before it or does not fit its document.
        """
        offsets = int_array("offsets", offsets, (None,))
        times = None if seconds_per_frame is None else rationals("seconds_per_frame", seconds_per_frame)
        if times is not None and len(times) != offsets.size:
            raise InvalidInputError(f"seconds_per_frame: got {len(times)} values, want {offsets.size}, one per span")
        return cls._of_spans(
            int_array("lengths", lengths, (None,)),
            offsets,
            int_array("grid_thw", grid_thw, (offsets.size, 3)),
            None if documents is None else int_array("documents", documents, (offsets.size,)),
            times,
            boolean("row_separator", row_separator),
            *_span_kinds(kind, extra_tokens),
        )

    @classmethod
    def _of_spans(
        cls,
        lengths: IntArray,
        offsets: IntArray,
        grid_thw: IntArray,
        documents: IntArray | None,
        times: Sequence[Fraction | None] | None,
        row_separator: bool,
        kind: npt.NDArray[np.uint8] | None,
        extra_tokens: IntArray | None,
    ) -> SegmentTable:
        layout = spans.layout(
            lengths, offsets, grid_thw, documents, separators=int(row_separator), kind=kind, extra_tokens=extra_tokens
        )
        seconds = separator = extra = None
        if times is not None and any(times):
            pairs = zip(layout.span_segments.tolist(), times, strict=True)
            seconds = spans.seconds_columns(layout.kind.size, pairs)
        if row_separator and GRID in layout.kind:
            separator = layout.kind == GRID
        if extra_tokens is not None and extra_tokens.any():
            extra = np.zeros(layout.kind.size, np.int64)
            extra[layout.span_segments] = extra_tokens
        return cls(layout.kind, layout.extents, layout.segment_offsets, seconds, separator, extra)

    @classmethod
    def from_input_ids(
        cls,
        input_ids: npt.ArrayLike,
        placeholders: Placeholders,
        image_grid_thw: npt.ArrayLike | None = None,
        video_grid_thw: npt.ArrayLike | None = None,
        *,
        spatial_merge_size: int = 1,
        cu_seqlens: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        seconds_per_frame: Sequence[Fraction | float | None] | None = None,
        frames_apart: bool = False,
        audio_lengths: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Build the table of a tokenised batch by matching runs of placeholders with grids in order.

        >>> SegmentTable.from_input_ids([5, 9, 9, 6], Placeholders(image=9), [[1, 2, 4]], spatial_merge_size=2)
        SegmentTable(1 document, 3 segments (1 grid), 4 tokens)

        Args:
            input_ids: (tokens,) one document, or packed documents with cu_seqlens; or (batch, seq).
            placeholders: token ids that stand for patches and audio.
            image_grid_thw: (images, 3) frames, height, width **before** spatial merging, as in Transformers.
            video_grid_thw: (videos, 3) frames, height, width, also before merging.
            spatial_merge_size: patches merged along each side; must divide heights and widths.
            cu_seqlens: (documents + 1,) first token of each packed document, then the total.
            attention_mask: (batch, seq) of 0 and 1, padded left or right; tokens whose mask is 0 become PAD segments,
                even if they have the id of a placeholder.
            seconds_per_frame: one per video (Transformers' second_per_grid_ts), or None.
            frames_apart: whether each frame of a video is a separate grid, with text between frames (Qwen3-VL).
            audio_lengths: (audios,) number of tokens of each audio input after the encoder, including audio in clips,
                to compare with the runs of placeholders; or None.

        Raises:
            InvalidInputError: a grid does not fit its run of placeholders (the message gives both counts), grids are
                missing or left over, or the mask has holes.
        """
        arguments = _Tokenised(
            input_ids, placeholders, image_grid_thw, video_grid_thw, spatial_merge_size, cu_seqlens, attention_mask,
            frames_apart, audio_lengths,
        )  # fmt: skip
        scanned = arguments.scanned()
        if scanned is None:
            return cls._matched(arguments, seconds_per_frame)
        table, videos = scanned
        if seconds_per_frame is None or not any(times := times_of_videos(videos, seconds_per_frame)):
            return table
        return replace(table, seconds_per_frame=spans.seconds_columns(table.kind.size, enumerate(times)))

    @classmethod
    def _matched(
        cls, tokenised: _Tokenised, seconds_per_frame: Sequence[Fraction | float | None] | None
    ) -> SegmentTable:
        """Build the table by matching runs with grids, kind by kind; the reference for the C pass and its errors."""
        batch = PackedIds.of(tokenised.input_ids, tokenised.cu_seqlens, tokenised.attention_mask)
        matched = find_spans(
            batch,
            tokenised.placeholders,
            tokenised.image_grid_thw,
            tokenised.video_grid_thw,
            spatial_merge_size=tokenised.spatial_merge_size,
            frames_apart=tokenised.frames_apart,
            audio_lengths=tokenised.audio_lengths,
        )
        times = None if seconds_per_frame is None else times_of_videos(matched.video, seconds_per_frame)
        offsets = matched.first - batch.starts[matched.document]
        kinds = (None, None) if (matched.kind == GRID).all() else (matched.kind, matched.extra_tokens)
        lengths, rows = batch.stops - batch.starts, tokenised.placeholders.rows is not None
        table = cls._of_spans(lengths, offsets, matched.grid_thw, matched.document, times, rows, *kinds)
        return table if batch.padding is None else table._with_padding(*batch.padding)

    @classmethod
    def _of_bytes(
        cls, kind: bytes, extents: bytes, offsets: bytes, separator: bytes | None = None, extra: bytes | None = None
    ) -> SegmentTable:
        """Build the table from the output of C, which needs no check."""
        table = object.__new__(cls)
        fields = vars(table)
        fields["kind"] = np.frombuffer(kind, _UINT8)
        fields["extents"] = np.ndarray((3, len(kind)), native.INT64, extents)
        fields["segment_offsets"] = np.frombuffer(offsets, native.INT64)
        fields["seconds_per_frame"] = None
        fields["row_separator"] = None if separator is None else np.frombuffer(separator, np.bool_)
        fields["extra_tokens"] = None if extra is None else native.int64(extra)
        fields["first_frame"] = None
        return table

    def _with_padding(self, left: IntArray, right: IntArray) -> SegmentTable:
        # Right padding of a document comes before left padding of the next: interleave in document order.
        tokens = np.stack([left, right], axis=1)
        used = tokens > 0
        at = np.stack([self.segment_offsets[:-1], self.segment_offsets[1:]], axis=1)[used]
        pad = np.ones((3, at.size), np.int64)
        pad[2] = tokens[used]
        seconds, separator, extra = self.seconds_per_frame, self.row_separator, self.extra_tokens
        return SegmentTable(
            np.insert(self.kind, at, PAD),
            np.insert(self.extents, at, pad, axis=1),
            self.segment_offsets + np.append(0, used.sum(axis=1).cumsum()),
            None if seconds is None else np.insert(seconds, at, [[0], [1]], axis=1),
            None if separator is None else np.insert(separator, at, False),
            None if extra is None else np.insert(extra, at, 0),
        )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.segment_offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """(segments,) number of tokens in each segment, including row separators, markers and extra tokens."""
        return read_only(spans.segment_tokens(self.kind, self.extents, self.row_separator, self.extra_tokens))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the batch, including padding."""
        return int(self.lengths.sum())

    def __repr__(self) -> str:
        counts = np.bincount(self.kind, minlength=TILE + 1)
        named = [counted(int(counts[kind]), word) for kind, word in NOUNS.items() if kind == GRID or counts[kind]]
        segments = f"{counted(self.kind.size, 'segment')} ({', '.join(named)})"
        documents, tokens = counted(self.num_documents, "document"), counted(self.num_tokens, "token")
        return f"SegmentTable({documents}, {segments}, {tokens})"


def scan(
    input_ids: Array,
    tokens: tuple[int, ...],
    merging: Merging,
    image_grid_thw: IntArray | None,
    video_grid_thw: IntArray | None = None,
    *,
    cu_seqlens: IntArray | None = None,
    attention_mask: Array | None = None,
    audio_lengths: IntArray | None = None,
) -> tuple[SegmentTable, IntArray | None] | None:
    """Build the table of a tokenised batch in one pass in C; return None if Python must build it or raise the error.

    Args:
        input_ids: (tokens,) or (batch, seq), contiguous.
        tokens: see ``Placeholders.tokens``.
        merging: settings for reading grids.
        image_grid_thw: (images, 3) before merging.
        video_grid_thw: (videos, 3) before merging.
        cu_seqlens: (documents + 1,) first token of each packed document, then the total.
        attention_mask: (batch, seq) of 0 and 1.
        audio_lengths: (audios,) number of tokens of each audio input.

    Returns:
        The table, and (segments,) index of the video of each segment, -1 for other segments; None without videos.
    """
    core = native.core
    arrays = None
    if core is not None:
        arrays = core.scan(
            input_ids, cu_seqlens, attention_mask, tokens, merging, image_grid_thw, video_grid_thw, audio_lengths
        )
    if arrays is None:
        return None
    *of_table, video = arrays
    return SegmentTable._of_bytes(*of_table), None if video is None else native.int64(video)


class _Tokenised(NamedTuple):
    """Unchecked arguments of ``from_input_ids``."""

    input_ids: npt.ArrayLike
    placeholders: Placeholders
    image_grid_thw: npt.ArrayLike | None
    video_grid_thw: npt.ArrayLike | None
    spatial_merge_size: int
    cu_seqlens: npt.ArrayLike | None
    attention_mask: npt.ArrayLike | None
    frames_apart: bool
    audio_lengths: npt.ArrayLike | None

    def scanned(self) -> tuple[SegmentTable, IntArray | None] | None:
        """Scan the tokens; return None if Python must build the table or raise the error."""
        exact = type(self.spatial_merge_size) is int and type(self.frames_apart) is bool
        if native.core is None or not exact or not isinstance(self.placeholders, Placeholders):
            return None
        mask = self.attention_mask
        try:
            ids = host_array("input_ids", self.input_ids)
            return scan(
                ids if ids.flags.c_contiguous else np.ascontiguousarray(ids),
                self.placeholders.tokens,
                Merging(1, self.spatial_merge_size, self.frames_apart),
                _integers("image_grid_thw", self.image_grid_thw),
                _integers("video_grid_thw", self.video_grid_thw),
                cu_seqlens=_integers("cu_seqlens", self.cu_seqlens),
                attention_mask=None if mask is None else host_array("attention_mask", mask),
                audio_lengths=_integers("audio_lengths", self.audio_lengths),
            )
        except InvalidInputError:  # the Python path raises errors in the right order
            return None


def _integers(name: str, values: object) -> IntArray | None:
    """Read int64 numbers of any shape."""
    if values is None or (type(values) is np.ndarray and values.dtype == np.int64):
        return values
    array = host_array(name, values)
    return int_array(name, array, array.shape)


def _not_documents(documents: Sequence[Sequence[Segment]]) -> InvalidInputError:
    """Return the error for the first value that is not a list of segments."""
    for d, document in enumerate(documents if isinstance(documents, Sequence) else ()):
        if isinstance(document, (*_CLASSES, str)) or not isinstance(document, Sequence):
            return InvalidInputError(f"documents[{d}]: got {type(document).__name__}, want a list of {_NAMES}")
        for i, item in enumerate(document):
            if type(item) not in _CLASSES:
                return InvalidInputError(f"documents[{d}][{i}]: got {type(item).__name__}, want one of {_NAMES}")
    return InvalidInputError(f"documents: got {type(documents).__name__}, want a list of documents")


def _span_kinds(
    kind: npt.ArrayLike | None, extra_tokens: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.uint8] | None, IntArray | None]:
    """Check kinds and extra tokens of spans; kinds are optional only if there are no extra tokens."""
    if kind is None:
        if extra_tokens is not None:
            raise InvalidInputError("extra_tokens requires kind")
        return None, None
    kinds = int_array("kind", kind, (None,))
    for pad in (TEXT, PAD):
        if (kinds == pad).any():
            raise InvalidInputError(
                f"kind[{int((kinds == pad).argmax())}]: got {pad}, want a grid, audio, clip, thumbnail or tile"
            )
    first_bad("kind", kinds, minimum=GRID, maximum=TILE)
    numbers = None if extra_tokens is None else int_array("extra_tokens", extra_tokens, (kinds.size,))
    if numbers is not None:
        first_bad("extra_tokens", numbers, minimum=0, maximum=INT32_MAX)
    return kinds.astype(np.uint8), numbers


def _check_segments(table: SegmentTable) -> None:
    """Raise an error for the first array that does not fit the description of SegmentTable."""
    kind, extents, offsets = table.kind, table.extents, table.segment_offsets
    seconds, separator, extra = table.seconds_per_frame, table.row_separator, table.extra_tokens
    if kind.ndim != 1 or extents.shape != (3, kind.size):
        raise InvalidInputError(f"extents: got shape {extents.shape}, want (3, {kind.size}) for {kind.size} segments")
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != kind.size:
        raise InvalidInputError(f"segment_offsets: got {shown(offsets)}, want 0 first and {kind.size} last")
    empty = offsets[1:] <= offsets[:-1]
    if empty.any():
        raise InvalidInputError(f"documents[{int(empty.argmax())}]: got an empty document, want at least one segment")
    if kind.max(initial=0) > TILE:
        raise InvalidInputError(f"kind[{int(kind.argmax())}]: got {kind.max()}, want {TEXT} to {TILE}")
    for name, array, shape in (
        ("row_separator", separator, kind.shape),
        ("seconds_per_frame", seconds, (2, kind.size)),
        ("extra_tokens", extra, kind.shape),
        ("first_frame", table.first_frame, kind.shape),
    ):
        if array is not None and array.shape != shape:
            raise InvalidInputError(f"{name}: got shape {array.shape}, want {shape}")
    if seconds is not None:
        first_bad("seconds_per_frame", seconds, minimum=0, maximum=INT32_MAX)
        first_bad("seconds_per_frame[1]", seconds[1], minimum=1)
    if separator is not None and (separator & (kind != GRID)).any():
        segment = int((separator & (kind != GRID)).argmax())
        raise InvalidInputError(f"row_separator[{segment}]: got True, want False outside grids")
    if table.first_frame is not None:
        first_bad("first_frame", table.first_frame, minimum=NO_FRAME, maximum=INT32_MAX)
        misplaced = (table.first_frame != NO_FRAME) & (kind != GRID)
        if misplaced.any():
            raise InvalidInputError(f"first_frame[{misplaced.argmax()}]: got one, want none outside grids")
    if kind.size:
        _check_extra_tokens(kind, np.zeros(kind.size, np.int64) if extra is None else extra)
        _check_tiles(kind, offsets)
        _check_extents(table)


def _check_extra_tokens(kind: npt.NDArray[np.uint8], extra: IntArray) -> None:
    """Raise an error for extra tokens outside clips, thumbnails and tiles, and for a clip without audio."""
    first_bad("extra_tokens", extra, minimum=0, maximum=INT32_MAX)
    surplus, silent = (kind < CLIP) & (extra > 0), (kind == CLIP) & (extra == 0)
    for wrong, want in ((surplus, "0 outside clips, thumbnails and tiles"), (silent, ">= 1, the audio of a clip")):
        if wrong.any():
            segment = int(wrong.argmax())
            raise InvalidInputError(f"extra_tokens[{segment}]: got {extra[segment]}, want {want}")


def _check_tiles(kind: npt.NDArray[np.uint8], offsets: IntArray) -> None:
    """Raise an error for the first tile without a thumbnail or a tile directly before it in its document."""
    alone = kind == TILE
    if alone.any():
        follows = np.append(False, kind[:-1] >= THUMBNAIL)
        follows[offsets[:-1]] = False
        alone &= ~follows
        if alone.any():
            segment = int(alone.argmax())
            raise InvalidInputError(f"segment {segment}: got a tile, want a thumbnail or another tile right before it")


def _check_extents(table: SegmentTable) -> None:
    kind, extents = table.kind, table.extents
    lowest = extents.min()
    if lowest < 1:
        axis, segment = divmod(int(extents.argmin()), kind.size)
        raise InvalidInputError(f"extents[{axis}, {segment}]: got {lowest}, want >= 1")
    tall = extents[0].astype(np.float64) * extents[1]
    flat = np.isin(kind, (TEXT, PAD, AUDIO)) & (tall != 1)
    if flat.any():
        segment = int(flat.argmax())
        got = extents[:, segment].tolist()
        raise InvalidInputError(f"extents[:, {segment}]: got {got}, want [1, 1, length] outside grids")
    moving = (kind >= THUMBNAIL) & (extents[0] > 1)
    if moving.any():
        segment = int(moving.argmax())
        raise InvalidInputError(f"extents[0, {segment}]: got {extents[0, segment]}, want 1 in a thumbnail or a tile")
    tokens = spans.segment_tokens(kind, extents.astype(np.float64), table.row_separator, table.extra_tokens)
    if tokens.max() > INT32_MAX:
        segment = int(tokens.argmax())
        raise LimitExceededError(
            f"segment {segment}: got {tokens[segment]:.0f} tokens, want at most 2**31 - 1 in one segment"
        )


def separator_tokens(segments: SegmentTable) -> IntArray:
    """Return the tokens that end rows of grids, as (separators,) ascending indices in the batch.

    >>> from mmpos.segments.kinds import Grid, Text
    >>> table = SegmentTable.from_documents([[Text(3), Grid(2, 3, row_separator=True)]])
    >>> separator_tokens(table).tolist()
    [6, 10]
    """
    if segments.row_separator is None:
        return np.empty(0, np.int64)
    (grid,) = segments.row_separator.nonzero()
    lengths = segments.lengths
    frames, height, width = segments.extents[:, grid]
    rows = frames * height
    owner, row = ragged_arange(rows)
    first = (lengths.cumsum() - lengths)[grid]
    return (first + width)[owner] + row * (width + 1)[owner]


_TYPES = np.zeros(TILE + 1, np.uint8)
_TYPES[[GRID, AUDIO, THUMBNAIL, TILE]] = PATCH, AUDIO_TOKEN, PATCH, PATCH


def token_types(segments: SegmentTable, patches: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.uint8]:
    """Return the (tokens,) type of each token: PATCH, AUDIO_TOKEN, or 0 for text, markers, row separators and padding.

    Args:
        segments: segments of the documents.
        patches: (tokens,) whether each token inside a clip is a patch; see ``PositionTable.token_types``.

    Raises:
        UnsupportedError: there is a clip but no ``patches``: only a scheme determines how patches and audio alternate.
        InvalidInputError: the number of patches or audio tokens of a clip is wrong.
    """
    lengths = segments.lengths
    types = _TYPES[segments.kind].repeat(lengths)
    types[separator_tokens(segments)] = 0
    most = segments.kind.max(initial=TEXT)
    if most < CLIP:
        return types
    if (segments.kind == CLIP).any():
        _type_clips(types, segments, patches)
    (crop,) = (segments.kind >= THUMBNAIL).nonzero()
    stop, rest = lengths.cumsum()[crop], lengths[crop] - 1 - segments.extents[:, crop].prod(axis=0)
    types[stop - lengths[crop]] = 0
    types[ragged_arange(rest, stop - rest)[1]] = 0
    return types


def _type_clips(types: npt.NDArray[np.uint8], segments: SegmentTable, patches: npt.NDArray[np.bool_] | None) -> None:
    """Write the token types of clips; between its markers, a clip contains only patches and audio tokens."""
    (clip,) = (segments.kind == CLIP).nonzero()
    if patches is None:
        raise UnsupportedError(f"segments: token types of the clip in segment {clip[0]} require a scheme")
    stops = segments.lengths.cumsum()[clip] - CLIP_MARKERS
    starts = stops - segments.lengths[clip] + 2 * CLIP_MARKERS
    owner, token = ragged_arange(stops - starts, starts)
    types[token] = np.where(patches[token], PATCH, AUDIO_TOKEN)
    got, want = np.bincount(owner[patches[token]], minlength=clip.size), segments.extents[:, clip].prod(axis=0)
    if (got != want).any():
        i = int((got != want).argmax())
        raise InvalidInputError(f"patches: got {got[i]} in the clip of segment {clip[i]}, want {want[i]}")
