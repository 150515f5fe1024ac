"""SegmentTable: the text, audio and grids of patches of a packed batch, before any scheme places them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.segments import placeholders, spans
from mmpos.segments.kinds import (
    AUDIO,
    AUDIO_TOKEN,
    CANVAS,
    CLIP,
    GRID,
    PAD,
    PATCH,
    TEXT,
    Audio,
    Canvas,
    Clip,
    Grid,
    Segment,
    Text,
    rationals,
)
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, IntArray, boolean, counted, first_bad, host_array, int_array, shown
from mmpos.support.ragged import insert_padding, ragged_arange

__all__ = ["GRID", "PAD", "TEXT", "Grid", "SegmentTable", "Text", "patch_spans", "separator_tokens", "token_types"]


_DTYPES = {
    "kind": np.dtype(np.uint8),
    "extents": np.dtype(np.int64),
    "segment_offsets": np.dtype(np.int64),
    "seconds_per_frame": np.dtype(np.int64),
    "row_separator": np.dtype(np.bool_),
    "details": np.dtype(np.int64),
}

_CLASSES = (Text, Audio, Grid, Clip, Canvas)
_NAMES = ", ".join(part.__name__ for part in _CLASSES)

# Fields that csrc/segments.c reads of Text, Audio and Grid, in its order.
_FIELDS = ("length", "frames", "height", "width", "row_separator", "seconds_per_frame")


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """The segments of a packed batch of documents, one column each, without positions.

    Args:
        kind: (segments,) uint8: TEXT, GRID, PAD, AUDIO, CLIP or CANVAS.
        extents: (3, segments) int64: frames, height, width, of a clip those of its video, of a canvas those of its
            thumbnail; text, audio and padding: 1, 1, length.
        segment_offsets: (documents + 1,) int64: the first segment of each document, then the total.
        seconds_per_frame: (2, segments) int64 numerators and denominators, (0, 1) where none is given; or None.
        row_separator: (segments,) bool: the rows of this grid end in one more token; or None.
        details: (4, segments) int64: a clip's audio tokens, 0, 0, 0; a canvas's rows and columns of slices, height and
            width of a slice, all 0 for a thumbnail alone; 0 elsewhere; or None.
    """

    kind: npt.NDArray[np.uint8]
    extents: IntArray
    segment_offsets: IntArray
    seconds_per_frame: IntArray | None = None
    row_separator: npt.NDArray[np.bool_] | None = None
    details: IntArray | None = None

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array is not None:
                if not isinstance(array, np.ndarray) or array.dtype != dtype:
                    got = getattr(array, "dtype", type(array).__name__)
                    raise InvalidInputError(f"{name}: got {got}, want an array of {dtype}; from_arrays converts")
                if array.flags.writeable:
                    array = array.view()
                    array.flags.writeable = False
                    object.__setattr__(self, name, array)
        _check_segments(self)

    @classmethod
    def from_documents(cls, documents: Sequence[Sequence[Segment]]) -> SegmentTable:
        """Make the table of documents that are lists of Text, Audio, Grid, Clip and Canvas.

        >>> SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]]).lengths.tolist()
        [3, 6, 2]
        """
        arrays = None if native.core is None else native.core.documents(documents, Text, Audio, Grid, _FIELDS)
        if arrays is not None:
            kinds, sides, firsts = arrays
            return cls(np.frombuffer(kinds, np.uint8), native.int64(sides).reshape(3, -1), native.int64(firsts))
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
        seconds = separator = details = None
        if any(time for _, time in times):
            seconds = spans.seconds_columns(len(items), times)
        if separated:
            separator = np.zeros(len(items), np.bool_)
            separator[separated] = True
        if any(any(item.details) for item in items):
            details = np.array([item.details for item in items], np.int64).T
        return cls(kind, extents.reshape(-1, 3).T, offsets, seconds, separator, details)

    @classmethod
    def from_arrays(
        cls,
        kind: npt.ArrayLike,
        extents: npt.ArrayLike,
        segment_offsets: npt.ArrayLike,
        *,
        seconds_per_frame: npt.ArrayLike | None = None,
        row_separator: npt.ArrayLike | None = None,
        details: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Make the table from arrays as its fields describe them; copies, so that they may change."""
        separator = None if row_separator is None else host_array("row_separator", row_separator)
        if separator is not None and separator.dtype != np.bool_:
            raise InvalidInputError(f"row_separator: got dtype {separator.dtype}, want bool")
        kind = int_array("kind", kind, (None,))
        first_bad("kind", kind, minimum=TEXT, maximum=CANVAS)
        return cls(
            kind.astype(np.uint8),
            int_array("extents", extents, (3, None)).copy(),
            int_array("segment_offsets", segment_offsets, (None,)).copy(),
            None if seconds_per_frame is None else int_array("seconds_per_frame", seconds_per_frame, (2, None)).copy(),
            None if separator is None else separator.copy(),
            None if details is None else int_array("details", details, (4, None)).copy(),
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
        details: npt.ArrayLike | None = None,
    ) -> SegmentTable:
        """Make the table from placeholder spans, as inference engines hold them: no token is read.

        Args:
            lengths: (documents,) tokens of each document.
            offsets: (spans,) first token of each span, counted from its document's first token,
                ascending within a document.
            grid_thw: (spans, 3) frames, height, width after spatial merging.
            documents: (spans,) ascending document of each span; may be left out for one document.
            seconds_per_frame: one per span, or None.
            row_separator: whether the rows of all these grids end in one more token.
            kind: (spans,) GRID, AUDIO, CLIP or CANVAS, the last two with their markers; None: all are grids.
            details: (4, spans) as the table has them; None: all 0.

        Raises:
            InvalidInputError: a span overlaps the one before it or does not fit its document.
        """
        separators = int(boolean("row_separator", row_separator))
        kinds, numbers = _span_kinds(kind, details)
        layout = spans.layout(lengths, offsets, grid_thw, documents, separators=separators, kind=kinds, details=numbers)
        times = rationals("seconds_per_frame", seconds_per_frame)
        if seconds_per_frame is not None and len(times) != len(layout.span_segments):
            raise InvalidInputError(
                f"seconds_per_frame: got {len(times)} values, want {len(layout.span_segments)}, one per span"
            )
        seconds = separator = None
        if any(times):
            pairs = zip(layout.span_segments.tolist(), times, strict=True)
            seconds = spans.seconds_columns(layout.kind.size, pairs)
        if row_separator:
            separator = layout.kind == GRID
        columns = None
        if numbers is not None and numbers.any():
            columns = np.zeros((4, layout.kind.size), np.int64)
            columns[:, layout.span_segments] = numbers
        return cls(layout.kind, layout.extents, layout.segment_offsets, seconds, separator, columns)

    @classmethod
    def from_input_ids(
        cls,
        input_ids: npt.ArrayLike,
        image_grid_thw: npt.ArrayLike | None = None,
        video_grid_thw: npt.ArrayLike | None = None,
        *,
        image_token_id: int | None,
        video_token_id: int | None = None,
        spatial_merge_size: int = 1,
        cu_seqlens: npt.ArrayLike | None = None,
        attention_mask: npt.ArrayLike | None = None,
        seconds_per_frame: Sequence[Fraction | float | None] | None = None,
        frames_apart: bool = False,
        row_token_id: int | None = None,
        last_row_token_id: int | None = None,
        audio_token_id: int | None = None,
        audio_lengths: npt.ArrayLike | None = None,
        row_separator: bool = False,
    ) -> SegmentTable:
        """Make the table of a tokenised batch by matching runs of placeholders with the grids in order.

        Args:
            input_ids: (tokens,) one document, or packed documents with cu_seqlens; or (batch, seq).
            image_grid_thw: (images, 3) frames, height, width **before** spatial merging, as in Transformers.
            video_grid_thw: (videos, 3) likewise.
            image_token_id: the placeholder of image patches; None if there are none.
            video_token_id: the placeholder of video patches; likewise.
            spatial_merge_size: patches merged along each side; divides heights and widths.
            cu_seqlens: (documents + 1,) first token of each packed document, then the total.
            attention_mask: (batch, seq) of 0 and 1, padded left or right; becomes PAD segments,
                and a placeholder id under a 0 is padding.
            seconds_per_frame: one per video (Transformers' second_per_grid_ts), or None.
            frames_apart: every frame of a video is a grid of its own, with text between (Qwen3-VL).
            row_token_id: the token after every row of a grid (Pixtral's [IMG_BREAK]), which becomes a row separator;
                None where rows follow each other.
            last_row_token_id: the token after the last row of a grid instead ([IMG_END]); None is the same.
            audio_token_id: the placeholder of audio; None counts audio as text, which has the same ids. Where audio and
                video tokens follow each other without text, they are a clip, with two markers before and two after.
            audio_lengths: (audios,) tokens of each audio after the encoder, those of clips included, to be compared
                with the runs of placeholders; or None.
            row_separator: every row of a grid ends in one more placeholder, and one more may stand before the grid and
                one after it, which become text (HunYuan-VL); every grid then has a run of placeholders of its own.

        Raises:
            InvalidInputError: the first grid that does not fit its run of placeholders, with both
                counts; missing or surplus grids; a mask with holes.
        """
        matched = placeholders.find(
            input_ids,
            placeholders.Modality("image_grid_thw", image_grid_thw, image_token_id),
            placeholders.Modality(
                "video_grid_thw", video_grid_thw, video_token_id, boolean("frames_apart", frames_apart)
            ),
            spatial_merge_size=spatial_merge_size,
            cu_seqlens=cu_seqlens,
            attention_mask=attention_mask,
            row_token_id=row_token_id,
            last_row_token_id=last_row_token_id,
            audio_token_id=audio_token_id,
            audio_lengths=audio_lengths,
            row_separator=boolean("row_separator", row_separator),
        )
        times = rationals("seconds_per_frame", seconds_per_frame)
        per_span = None if seconds_per_frame is None else matched.per_span("seconds_per_frame", times)
        table = cls.from_spans(
            matched.lengths,
            matched.offsets,
            matched.grid_thw,
            matched.documents,
            seconds_per_frame=per_span,
            row_separator=matched.row_separator,
            kind=matched.kind,
            details=matched.details,
        )
        return table if matched.padding is None else table._with_padding(*matched.padding)

    def _with_padding(self, left: IntArray, right: IntArray) -> SegmentTable:
        optional = ((self.seconds_per_frame, [0, 1]), (self.row_separator, [0]), (self.details, [0] * 4))
        rows: list[npt.NDArray[Any]] = [self.kind[None], self.extents]
        pad, cuts = [PAD, 1, 1, 0], [1, 4]
        for values, padding in optional:
            if values is not None:
                rows.append(np.atleast_2d(values))
                pad += padding
            cuts.append(len(pad))
        columns, offsets = insert_padding(
            np.vstack(rows).astype(np.int64), self.segment_offsets, left, right, np.array(pad), length_rows=(3,)
        )
        kind, extents, seconds, separator, details, _ = np.split(columns, cuts)
        return SegmentTable(
            kind[0].astype(np.uint8),
            extents,
            offsets,
            seconds if seconds.size else None,
            separator[0].astype(np.bool_) if separator.size else None,
            details if details.size else None,
        )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.segment_offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """(segments,) tokens of each segment, row separators and the markers of clips and canvases included."""
        return spans.segment_tokens(self.kind, self.extents, self.row_separator, self.details)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch, padding included."""
        return int(self.lengths.sum())

    def __repr__(self) -> str:
        counts = np.bincount(self.kind, minlength=CANVAS + 1)
        named = [counted(int(counts[GRID]), "grid")]
        named += [counted(int(counts[kind]), word) for kind, word in _WORDS.items() if counts[kind]]
        segments = f"{counted(self.kind.size, 'segment')} ({', '.join(named)})"
        documents, tokens = counted(self.num_documents, "document"), counted(self.num_tokens, "token")
        return f"SegmentTable({documents}, {segments}, {tokens})"


_WORDS = {AUDIO: "audio run", CLIP: "clip", CANVAS: "canvas"}


def _not_documents(documents: Sequence[Sequence[Segment]]) -> InvalidInputError:
    """Make the error for the first thing that is not a list of segments."""
    for d, document in enumerate(documents if isinstance(documents, Sequence) else ()):
        if isinstance(document, (*_CLASSES, str)) or not isinstance(document, Sequence):
            return InvalidInputError(f"documents[{d}]: got {type(document).__name__}, want a list of {_NAMES}")
        for i, item in enumerate(document):
            if type(item) not in _CLASSES:
                return InvalidInputError(f"documents[{d}][{i}]: got {type(item).__name__}, want one of {_NAMES}")
    return InvalidInputError(f"documents: got {type(documents).__name__}, want a list of documents")


def _span_kinds(
    kind: npt.ArrayLike | None, details: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.uint8] | None, IntArray | None]:
    """Check kinds and details of spans; no kinds where there are no details either."""
    if kind is None:
        if details is not None:
            raise InvalidInputError("kind: got None, want the kind of each span, which has details")
        return None, None
    kinds = int_array("kind", kind, (None,))
    for pad in (TEXT, PAD):
        if (kinds == pad).any():
            raise InvalidInputError(
                f"kind[{int((kinds == pad).argmax())}]: got {pad}, want a grid, audio, clip or canvas"
            )
    first_bad("kind", kinds, minimum=GRID, maximum=CANVAS)
    numbers = None if details is None else int_array("details", details, (4, kinds.size))
    if numbers is not None:
        first_bad("details", numbers, minimum=0, maximum=INT32_MAX)
    return kinds.astype(np.uint8), numbers


def _check_segments(table: SegmentTable) -> None:
    """Raise for the first thing that makes these arrays no segment table; see SegmentTable for what they are."""
    kind, extents, offsets = table.kind, table.extents, table.segment_offsets
    seconds, separator, details = table.seconds_per_frame, table.row_separator, table.details
    if (
        seconds is None
        and details is None
        and native.core is not None
        and native.core.sound(kind, extents, offsets, separator)
    ):
        return
    if kind.ndim != 1 or extents.shape != (3, kind.size):
        raise InvalidInputError(f"extents: got shape {extents.shape}, want (3, {kind.size}) for {kind.size} segments")
    if offsets.ndim != 1 or offsets.size == 0 or offsets[0] != 0 or offsets[-1] != kind.size:
        raise InvalidInputError(f"segment_offsets: got {shown(offsets)}, want 0 first and {kind.size} last")
    empty = offsets[1:] <= offsets[:-1]
    if empty.any():
        raise InvalidInputError(f"documents[{int(empty.argmax())}]: got an empty document, want at least one segment")
    if kind.max(initial=0) > CANVAS:
        raise InvalidInputError(f"kind[{int(kind.argmax())}]: got {kind.max()}, want {TEXT} to {CANVAS}")
    for name, array, shape in (
        ("row_separator", separator, kind.shape),
        ("seconds_per_frame", seconds, (2, kind.size)),
        ("details", details, (4, kind.size)),
    ):
        if array is not None and array.shape != shape:
            raise InvalidInputError(f"{name}: got shape {array.shape}, want {shape}")
    if seconds is not None:
        first_bad("seconds_per_frame", seconds, minimum=0, maximum=INT32_MAX)
        first_bad("seconds_per_frame[1]", seconds[1], minimum=1)
    if separator is not None and (separator & (kind != GRID)).any():
        segment = int((separator & (kind != GRID)).argmax())
        raise InvalidInputError(f"row_separator[{segment}]: got True, want False outside grids")
    if kind.size:
        _check_details(kind, np.zeros((4, kind.size), np.int64) if details is None else details)
        _check_extents(table)


def _check_details(kind: npt.NDArray[np.uint8], details: IntArray) -> None:
    """Raise for details of a segment that has none, and for a clip without audio or a canvas with half of a slice."""
    first_bad("details", details, minimum=0, maximum=INT32_MAX)
    clip, canvas = kind == CLIP, kind == CANVAS
    used = details > 0
    allowed = np.array([clip | canvas, canvas, canvas, canvas])
    wanted = np.array([clip | (canvas & used.any(axis=0)), *[canvas & used.any(axis=0)] * 3])
    for wrong, want in ((used & ~allowed, "0 outside clips and canvases"), (wanted & ~used, ">= 1")):
        if wrong.any():
            row, segment = divmod(int(wrong.argmax()), kind.size)
            raise InvalidInputError(f"details[{row}, {segment}]: got {details[row, segment]}, want {want}")


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
    moving = (kind == CANVAS) & (extents[0] > 1)
    if moving.any():
        segment = int(moving.argmax())
        raise InvalidInputError(f"extents[0, {segment}]: got {extents[0, segment]}, want 1 in a canvas")
    tokens = spans.segment_tokens(kind, extents.astype(np.float64), table.row_separator, table.details)
    if tokens.max() > INT32_MAX:
        segment = int(tokens.argmax())
        raise LimitExceededError(
            f"segment {segment}: got {tokens[segment]:.0f} tokens, want at most 2**31 - 1 in one segment"
        )


def separator_tokens(segments: SegmentTable) -> IntArray:
    """Find the tokens that end rows of grids: (separators,) counted over the table, ascending.

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


def canvas_spans(segments: SegmentTable) -> IntArray:
    """Find the patches of canvases: (2, spans) first patch and one past the last of thumbnails and slices.

    >>> from mmpos.segments.kinds import Canvas, Text
    >>> table = SegmentTable.from_documents([[Text(2), Canvas(1, 2, 2, 1, 1, 3)]])
    >>> canvas_spans(table).tolist()
    [[3, 7, 13], [5, 10, 16]]
    """
    (canvas,) = (segments.kind == CANVAS).nonzero()
    lengths = segments.lengths
    first = (lengths.cumsum() - lengths)[canvas] + 1
    thumbnail = segments.extents[1:, canvas].prod(axis=0)
    rows, columns, *sides = (
        np.zeros((4, canvas.size), np.int64) if segments.details is None else segments.details[:, canvas]
    )
    patches = sides[0] * sides[1]
    owner, k = ragged_arange(rows * columns)
    slices = (first + thumbnail + 2)[owner] + k * (patches + 2)[owner] + k // np.maximum(columns, 1)[owner]
    starts, counts = np.concatenate([first, slices]), np.concatenate([thumbnail, patches[owner]])
    order = starts.argsort()
    return np.array([starts, starts + counts])[:, order]


def token_types(segments: SegmentTable) -> npt.NDArray[np.uint8]:
    """Give the type of every token: (tokens,) PATCH, AUDIO_TOKEN, or 0 for text, markers, row separators and padding.

    Raises:
        UnsupportedError: there is a clip, whose scheme alone knows how patches and audio take turns.
    """
    if (segments.kind == CLIP).any():
        segment = int((segments.kind == CLIP).argmax())
        raise UnsupportedError(f"segments: got a clip in segment {segment}, want none: its order is that of a scheme")
    of_kind = np.zeros(CANVAS + 1, np.uint8)
    of_kind[[GRID, AUDIO]] = PATCH, AUDIO_TOKEN
    types = of_kind[segments.kind].repeat(segments.lengths)
    types[separator_tokens(segments)] = 0
    if (segments.kind == CANVAS).any():
        starts, stops = canvas_spans(segments)
        types[ragged_arange(stops - starts, starts)[1]] = PATCH
    return types


def patch_spans(image_spans: IntArray, grid_thw: IntArray) -> IntArray:
    """Split spans of images at row separators: one span per image, or one per row where rows end in separators.

    Args:
        image_spans: (images, 2) first token of each image's patches and one past its last token, separators included.
        grid_thw: (images, 3) frames, height, width.

    Returns:
        (spans, 2) first patch and one past the last, in order.
    """
    patches = grid_thw.prod(axis=1)
    separated = image_spans[:, 1] - image_spans[:, 0] > patches
    if not separated.any():
        return image_spans
    lengths = np.where(separated, grid_thw[:, 2], patches)
    owner, row = ragged_arange(np.where(separated, grid_thw[:, 0] * grid_thw[:, 1], 1))
    first = image_spans[owner, 0] + row * (lengths + 1)[owner]
    return np.stack([first, first + lengths[owner]], axis=1)
