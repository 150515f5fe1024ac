"""Placeholders in input ids: their token ids, and how their runs are matched with grids, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.segments.kinds import AUDIO, CLIP, CLIP_MARKERS, GRID, THUMBNAIL, TILE, rationals
from mmpos.segments.spans import span_tokens
from mmpos.support.cached import cached_property
from mmpos.support.checks import (
    INT32_MAX,
    INT32_MIN,
    Array,
    IntArray,
    boolean,
    counted,
    first_bad,
    host_array,
    int_array,
    integer,
    integers,
    shown,
)
from mmpos.support.ragged import ragged_arange, true_runs

BoolArray = npt.NDArray[np.bool_]

ABSENT = int(np.iinfo(np.int64).min)
"""Id that stands in for tokens that a model does not have."""


@dataclass(frozen=True)
class CropMarkers:
    """Ids of the tokens around thumbnails and tiles in input ids.

    Args:
        thumbnail_start: token before the patches of a thumbnail.
        thumbnail_end: token after the patches of a thumbnail.
        tile_start: token before the patches of a tile.
        tile_end: token after the patches of a tile.
        newline: token between two rows of tiles; newlines and markers directly after a picture belong to that picture.
    """

    thumbnail_start: int
    thumbnail_end: int
    tile_start: int
    tile_end: int
    newline: int

    def __post_init__(self) -> None:
        for field in fields(self):
            token = integer(f"CropMarkers.{field.name}", getattr(self, field.name), minimum=0, maximum=INT32_MAX)
            object.__setattr__(self, field.name, token)
        if self.thumbnail_start == self.tile_start:
            raise InvalidInputError(f"CropMarkers.tile_start must differ from thumbnail_start, got {self.tile_start}")


@dataclass(frozen=True)
class Placeholders:
    """Ids of the tokens that stand for patches and audio, end rows of patches, or surround crops.

    Qwen-VL uses ``Placeholders(151655, 151656)``; Pixtral uses ``Placeholders(10, rows=(12, 13))``.

    Args:
        image: token for each patch of an image, or None.
        video: token for each patch of a video, or None.
        audio: token for each audio token; None counts audio as text, which has the same positions. Audio and video
            tokens without text between them form a clip, with two markers before it and two after it.
        rows: token after every row of a grid but the last, and token after the last row: Pixtral's [IMG_BREAK] and
            [IMG_END]. Set both to the id of patches if every row ends in one more patch token (HunYuan-VL, Hy4). Then
            each image and each video needs its own run, which may have one more patch token before and one after its
            patches (both or neither); these tokens count as text. None if no token separates rows.
        crops: tokens around thumbnails and tiles (MiniCPM-V 4.7), or None. If set, every grid is a thumbnail or a tile
            of one frame, with its own run of placeholders between its markers.
    """

    image: int | None = None
    video: int | None = None
    audio: int | None = None
    rows: tuple[int, int] | None = None
    crops: CropMarkers | None = None

    def __post_init__(self) -> None:
        patches: dict[int, str] = {}
        for name in ("image", "video", "audio"):
            value = getattr(self, name)
            if value is not None:
                token = integer(f"Placeholders.{name}", value, minimum=INT32_MIN, maximum=INT32_MAX)
                if token in patches:
                    raise InvalidInputError(f"Placeholders.{name} must differ from {patches[token]}, got {token}")
                object.__setattr__(self, name, token)
                patches[token] = name
        if self.rows is not None:
            rows = integers("Placeholders.rows", self.rows, maximum=INT32_MAX)
            if len(rows) != 2:
                raise InvalidInputError(
                    f"Placeholders.rows: got {rows}, want the ids after a row and after the last row"
                )
            object.__setattr__(self, "rows", rows)
            if (rows[0] != rows[1] or self.audio is not None) and not patches.keys().isdisjoint(rows):
                raise InvalidInputError(
                    f"Placeholders.rows must differ from the other ids, or both be the id of patches, got {rows}"
                )
        if self.crops is not None:
            if not isinstance(self.crops, CropMarkers):
                raise InvalidInputError(
                    f"Placeholders.crops: got {type(self.crops).__name__}, want CropMarkers or None"
                )
            if self.rows is not None or self.audio is not None:
                raise InvalidInputError("Placeholders.crops cannot be combined with rows or audio")
            if not patches.keys().isdisjoint(astuple(self.crops)):
                raise InvalidInputError(f"Placeholders.crops must differ from the ids of patches, got {self.crops}")

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """All ids in the order of csrc/placeholders.c; ABSENT replaces None."""
        crops = (None,) * 5 if self.crops is None else astuple(self.crops)
        every = (self.image, self.video, self.audio, *(self.rows or (None, None)), *crops)
        return tuple(ABSENT if token is None else token for token in every)

    @property
    def framed(self) -> bool:
        """Whether every row of a grid ends in one more placeholder."""
        return self.rows is not None and self.rows[0] in (self.image, self.video)


class Merging(NamedTuple):
    """Settings for reading grids, in the order of csrc/placeholders.c.

    Args:
        frames: number of frames of a video that merge into one; 0 merges all frames, even those of images.
        sides: patches merged along each side.
        frames_apart: whether each frame of a video is a separate grid.
        lenient: whether merging rounds down and grids without tokens are skipped.
        types: whether the input has token types (0, 1 and 2) instead of token ids.
    """

    frames: int
    sides: int
    frames_apart: bool
    lenient: bool = False
    types: bool = False


class FoundSpans(NamedTuple):
    """Spans of placeholders in token order.

    Args:
        first: (spans,) first token in the batch, including markers that belong to the span.
        document: (spans,) index of the document.
        grid_thw: (spans, 3) frames, height, width after merging.
        video: (spans,) index of the video; -1 for images and audio.
        kind: (spans,) see SegmentTable.
        extra_tokens: (spans,) see SegmentTable.
    """

    first: IntArray
    document: IntArray
    grid_thw: IntArray
    video: IntArray
    kind: npt.NDArray[np.uint8]
    extra_tokens: IntArray


def times_of_videos(
    videos: IntArray | None, seconds_per_frame: Iterable[Fraction | float | None]
) -> list[Fraction | None]:
    """Assign to each entry the time of its video.

    Args:
        videos: (entries,) index of the video of each entry, -1 for none; None without videos.
        seconds_per_frame: one per video.
    """
    times = rationals("seconds_per_frame", seconds_per_frame)
    videos = np.zeros(0, np.int64) if videos is None else videos
    count = int(videos.max(initial=-1)) + 1
    if len(times) != count:
        raise InvalidInputError(f"seconds_per_frame: got {len(times)} values, want {count}, one per video")
    return [None if video < 0 else times[video] for video in videos]


def find_spans(
    batch: PackedIds,
    placeholders: Placeholders,
    image_grid_thw: object,
    video_grid_thw: object,
    *,
    spatial_merge_size: int,
    frames_apart: bool,
    audio_lengths: object,
) -> FoundSpans:
    """Match every run of placeholders of a batch with its grids; see SegmentTable.from_input_ids."""
    if not isinstance(placeholders, Placeholders):
        raise InvalidInputError(f"placeholders: got {type(placeholders).__name__}, want Placeholders")
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1, maximum=INT32_MAX)
    grids, tokens = {"image": image_grid_thw, "video": video_grid_thw}, {}
    for kind, grid_thw in grids.items():
        token = getattr(placeholders, kind)
        if token is not None:
            tokens[kind] = token
        elif grid_thw is not None:
            raise InvalidInputError(f"placeholders.{kind}: got None, want the placeholder id of {kind}_grid_thw")
    runs = {kind: batch.runs(token) for kind, token in tokens.items()}
    if placeholders.rows is not None and not placeholders.framed:
        runs = {kind: _with_row_ends(batch, own, placeholders.rows) for kind, own in runs.items()}
    sound = None
    if placeholders.audio is not None:
        sound = batch.runs(placeholders.audio)
        if "video" in runs:
            runs["video"], sound = _merged_runs(runs["video"], sound)
    spans = []
    for kind, own in runs.items():
        apart = kind == "video" and boolean("frames_apart", frames_apart)
        spans.append(_match(batch, kind, grids[kind], own, placeholders, merge, apart))
    if sound is not None:
        spans.append(_audio_spans(sound))
    joined = spans[0] if len(spans) == 1 else _joined(spans)
    if audio_lengths is not None:
        _check_audio_lengths(joined, audio_lengths, sound)
    return joined if placeholders.crops is None else _crops(batch, joined, placeholders.crops)


def _match(
    batch: PackedIds,
    kind: str,
    grid_thw: object,
    runs: PlaceholderRuns,
    placeholders: Placeholders,
    merge: int,
    frames_apart: bool,
) -> FoundSpans:
    """Match the runs of the image or video placeholder with their grids."""
    name = f"{kind}_grid_thw"
    raw = int_array(name, () if grid_thw is None else grid_thw, (None, 3))
    first_bad(name, raw, minimum=1, maximum=INT32_MAX)
    grids, owner = raw, np.arange(len(raw))
    if frames_apart:
        if raw[:, 0].sum() > runs.total:
            got = counted(int(raw[:, 0].sum()), "frame")
            raise InvalidInputError(f"{name}: got {got}, want at most {runs.total}, the number of placeholders")
        owner = owner.repeat(raw[:, 0])
        grids = raw[owner]
        grids[:, 0] = 1
    merged = grids // np.array([1, merge, merge])
    odd = grids[:, 1:] % merge > 0
    if odd.any():
        g = int(odd.any(axis=1).argmax())
        want = f"height and width divisible by spatial_merge_size={merge}"
        raise InvalidInputError(f"{name}[{owner[g]}]: got {tuple(grids[g].tolist())}, want {want}")
    separators = int(placeholders.rows is not None)
    tokens = span_tokens(name, merged, separators)
    if placeholders.framed:
        first, document = _match_framed(batch, runs, name, merged, tokens, owner)
    else:
        fits, first, document = runs.fit(tokens)
        if not fits.all() or tokens.sum() != runs.total:
            raise InvalidInputError(_misfit(batch, runs, name, grids, owner, merge, placeholders))
    zeros = 0 * owner
    video = owner if kind == "video" else zeros - 1
    spans = FoundSpans(first, document, merged, video, (zeros + GRID).astype(np.uint8), zeros)
    if runs.row_ends is not None and placeholders.rows is not None:
        _check_row_ends(batch, runs.row_ends, name, spans, owner, placeholders.rows)
    if runs.audio is None or not owner.size:
        return spans
    run = runs.stops.searchsorted(tokens.cumsum() - tokens, side="right")
    audio = runs.audio[run]
    first = _clip_starts(batch, name, tokens, owner, PlaceholderRuns(document, first, runs.tokens[run], audio))
    return spans._replace(first=first, kind=np.where(audio > 0, CLIP, GRID).astype(np.uint8), extra_tokens=audio)


def _match_framed(
    batch: PackedIds, runs: PlaceholderRuns, name: str, merged: IntArray, tokens: IntArray, owner: IntArray
) -> tuple[IntArray, IntArray]:
    """Match the grids of each owner, an image or a video, with one run; the rows of these grids end in a placeholder.

    A run may have one more token before and one after its grids, both or neither.
    """
    opening = np.flatnonzero(np.diff(owner, prepend=-1))
    total = np.add.reduceat(tokens, opening) if opening.size else tokens
    count = min(runs.tokens.size, total.size)
    around = runs.tokens[:count] - total[:count]
    fits = (around == 0) | (around == 2)
    if not fits.all():
        g = int(fits.argmin())
        got = f"a run of {counted(int(runs.tokens[g]), 'placeholder')} at {batch.name(runs.document[g], runs.first[g])}"
        sides = merged[opening[g]] * [total[g] // tokens[opening[g]], 1, 1]
        raise InvalidInputError(
            f"{name}[{g}]: got {got}, want {total[g]} or {total[g] + 2} for {_sides(sides)}, whose rows end in an "
            "extra placeholder"
        )
    if runs.tokens.size != total.size:
        want = f"{runs.tokens.size}, one for each run of placeholders"
        raise InvalidInputError(f"{name}: got {counted(total.size, 'grid')}, want {want}")
    before = tokens.cumsum() - tokens
    return (runs.first + around // 2)[owner] + before - before[opening][owner], runs.document[owner]


def _with_row_ends(batch: PackedIds, runs: PlaceholderRuns, ends: tuple[int, int]) -> PlaceholderRuns:
    """Join the runs of a grid's rows across the tokens that end the rows."""
    stop = runs.first + runs.tokens
    inside = stop < batch.stops[runs.document]
    ended = inside & np.isin(batch.ids[np.where(inside, stop, 0)], ends)
    tokens = runs.tokens + ended
    start = _starts(runs.document, runs.first, tokens)
    tokens = np.add.reduceat(tokens, start) if start.size else tokens
    return PlaceholderRuns(runs.document[start], runs.first[start], tokens, row_ends=stop[ended])


def _check_row_ends(
    batch: PackedIds, row_ends: IntArray, name: str, spans: FoundSpans, owner: IntArray, ends: tuple[int, int]
) -> None:
    """Raise an error for the first row of a grid whose end token is wrong or in the wrong place."""
    frames, height, width = spans.grid_thw.T
    grid, row = ragged_arange(frames * height)
    want = np.where(row == (frames * height)[grid] - 1, ends[1], ends[0])
    at = spans.first[grid] + (row + 1) * (width[grid] + 1) - 1
    got = np.append(row_ends, np.full(at.size, batch.ids.size))[: at.size]
    wrong = (got != at) | (batch.ids[at] != want)
    if wrong.any():
        r = int(wrong.argmax())
        g, token = grid[r], min(got[r], at[r])
        where = batch.name(spans.document[g], token)
        wanted = f"a placeholder of row {row[r]}" if token < at[r] else f"{want[r]}, the end of row {row[r]}"
        raise InvalidInputError(
            f"{name}[{owner[g]}]: got token {batch.ids[token]} at {where}, want {wanted} of {_sides(spans.grid_thw[g])}"
        )


def _misfit(
    batch: PackedIds,
    runs: PlaceholderRuns,
    name: str,
    grids: IntArray,
    owner: IntArray,
    merge: int,
    placeholders: Placeholders,
) -> str:
    """Return the error for the first grid that does not fit its run, or for placeholders without a grid."""
    separators = int(placeholders.rows is not None)
    merged = grids // np.array([1, merge, merge])
    tokens = span_tokens(name, merged, separators)
    fits, first, document = runs.fit(tokens)
    hint = _merge_hint(runs, grids, merge, separators)
    if fits.all():
        done = int(tokens.sum())
        run = int(runs.stops.searchsorted(done, side="right"))
        at = batch.name(runs.document[run], done + runs.shift[run])
        left = f"{counted(runs.total - done, 'placeholder')} from {at} on"
        hint = hint or _sampled(batch, int(runs.tokens[run]), placeholders)
        return f"{name}: got {counted(len(np.unique(owner)), 'grid')}, want more for {left}{hint}"
    g = int(fits.argmin())
    begin = int(tokens[:g].sum())
    want = f"want {tokens[g]} for {_sides(merged[g])}"
    if begin >= runs.total:
        return f"{name}[{owner[g]}]: got no placeholders left, {want}; a surplus grid?{hint}"
    run = int(runs.stops[runs.stops.searchsorted(begin, side="right")]) - begin
    if separators:
        want += ", ends of rows included"
    elif not hint and run == merged[g, 2] < tokens[g]:
        hint = "; where a token of its own ends each row, name it in placeholders.rows"
    elif not hint and runs.total > tokens.sum():
        hint = _sampled(batch, run, placeholders)
    at = batch.name(document[g], first[g])
    return f"{name}[{owner[g]}]: got a run of {counted(run, 'placeholder')} at {at}, {want}{hint}"


def _sampled(batch: PackedIds, run: int, placeholders: Placeholders) -> str:
    """Return what to do about a single placeholder among token ids, which a model may have sampled."""
    others = placeholders.rows, placeholders.audio, placeholders.crops  # types do not tell them apart
    if run != 1 or any(other is not None for other in others) or batch.ids.max() <= 2:
        return ""
    return "; if a model sampled it, pass mm_token_type_ids instead of input_ids, and Placeholders(image=1, video=2)"


def _merge_hint(runs: PlaceholderRuns, grids: IntArray, merge: int, separators: int) -> str:
    for other in (1, 2, 3, 4, 8):
        if other == merge or not len(grids) or (grids[:, 1:] % other).any():
            continue
        frames, height, width = (grids // np.array([1, other, other])).T.astype(np.float64)
        tokens = frames * height * (width + separators)
        if tokens.sum() == runs.total and runs.fit(tokens.astype(np.int64))[0].all():
            return f" (fits with spatial_merge_size={other})"
    return ""


def _sides(merged: IntArray) -> str:
    return f"{'x'.join(map(str, merged))} after merging"


def _merged_runs(video: PlaceholderRuns, sound: PlaceholderRuns) -> tuple[PlaceholderRuns, PlaceholderRuns]:
    """Join adjacent runs of video and audio; return the runs with video and the runs of audio alone."""
    order = np.concatenate([video.first, sound.first]).argsort()
    document, first, tokens = (
        np.concatenate([getattr(video, name), getattr(sound, name)])[order] for name in ("document", "first", "tokens")
    )
    heard = order >= video.first.size
    start = _starts(document, first, tokens)
    if start.size == 0:
        return video, sound
    seen, audio = (np.add.reduceat(tokens * own, start) for own in (~heard, heard))
    document, first, pictured = document[start], first[start], seen > 0
    return (
        PlaceholderRuns(document[pictured], first[pictured], seen[pictured], audio[pictured], video.row_ends),
        PlaceholderRuns(document[~pictured], first[~pictured], audio[~pictured]),
    )


def _starts(document: IntArray, first: IntArray, tokens: IntArray) -> IntArray:
    """Return the indices of the runs that do not begin where the previous run ends."""
    apart = (first[1:] != first[:-1] + tokens[:-1]) | (document[1:] != document[:-1])
    return np.append(True, apart)[: first.size].nonzero()[0]


def _clip_starts(batch: PackedIds, name: str, tokens: IntArray, owner: IntArray, runs: PlaceholderRuns) -> IntArray:
    """Move the start of each clip to the clip's first marker.

    Check that the run of each clip contains no other video and has room for the markers.
    """
    assert runs.audio is not None
    clip = runs.audio > 0
    first, length = runs.first - CLIP_MARKERS * clip, runs.tokens + runs.audio + 2 * CLIP_MARKERS
    shared = clip & (runs.tokens != tokens)
    outside = clip & ((first < batch.starts[runs.document]) | (first + length > batch.stops[runs.document]))
    if shared.any() or outside.any():
        g = int((shared if shared.any() else outside).argmax())
        at = batch.name(runs.document[g], runs.first[g])
        if shared.any():
            got = f"a run of {counted(int(runs.tokens[g]), 'placeholder')} and of audio at {at}"
            raise InvalidInputError(f"{name}[{owner[g]}]: got {got}, want {tokens[g]} placeholders for one video")
        raise InvalidInputError(f"{name}[{owner[g]}]: got a clip at {at}, want two markers before it and two after it")
    return first


def _audio_spans(sound: PlaceholderRuns) -> FoundSpans:
    one = np.ones_like(sound.first)
    extents = np.stack([one, one, sound.tokens], axis=1)
    return FoundSpans(sound.first, sound.document, extents, -one, (AUDIO * one).astype(np.uint8), 0 * one)


def _check_audio_lengths(spans: FoundSpans, audio_lengths: object, sound: PlaceholderRuns | None) -> None:
    """Compare the audio tokens, in clips and on their own, with the lengths that the caller expects."""
    if sound is None:
        raise InvalidInputError("placeholders.audio: got None, want the placeholder id of audio")
    wanted = int_array("audio_lengths", audio_lengths, (None,))
    lengths = np.where(spans.kind == AUDIO, spans.grid_thw[:, 2], spans.extra_tokens)
    lengths = lengths[lengths > 0]
    if wanted.size != lengths.size:
        raise InvalidInputError(
            f"audio_lengths: got {counted(wanted.size, 'length')}, want {lengths.size}, one per run of audio tokens"
        )
    if (wanted != lengths).any():
        i = int((wanted != lengths).argmax())
        raise InvalidInputError(
            f"audio_lengths[{i}]: got {wanted[i]}, want {lengths[i]}, the number of audio tokens in input_ids"
        )


def _joined(spans: Sequence[FoundSpans]) -> FoundSpans:
    """Merge the spans of all modalities into token order."""
    none = np.zeros(0, np.int64)
    every = [FoundSpans(none, none, none.reshape(0, 3), none, none.astype(np.uint8), none), *spans]
    columns: list[Any] = [np.concatenate(values) for values in zip(*every, strict=True)]
    order = columns[0].argsort(kind="stable")
    return FoundSpans(*(column[order] for column in columns))


def _crops(batch: PackedIds, spans: FoundSpans, markers: CropMarkers) -> FoundSpans:
    """Turn grids into thumbnails and tiles; the markers around and after each crop belong to its span."""
    document, begin = spans.document, spans.first - 1
    end = spans.first + spans.grid_thw.prod(axis=1)
    inside = (begin >= batch.starts[document]) & (end < batch.stops[document])
    before, after = batch.ids[np.where(inside, begin, 0)], batch.ids[np.where(inside, end, 0)]
    tile = before == markers.tile_start
    opened = inside & (tile | (before == markers.thumbnail_start))
    closed = inside & (after == np.where(tile, markers.tile_end, markers.thumbnail_end))
    if not (opened & closed).all():
        g = int((opened & closed).argmin())
        side, edge, token = ("after", "end", after[g]) if opened[g] else ("before", "start", before[g])
        got = f"token {token} {side}" if inside[g] else "no room for markers around"
        at = batch.name(document[g], spans.first[g])
        want = f"thumbnail_{edge} or tile_{edge}"
        raise InvalidInputError(f"placeholders.crops: got {got} the placeholders at {at}, want {want}")
    others = np.append(np.flatnonzero(~np.isin(batch.ids, astuple(markers))), batch.ids.size)
    stop = np.minimum(others[others.searchsorted(end)], batch.stops[document])
    # The last marker before the next crop is the start of that crop.
    stop[:-1] = np.minimum(stop[:-1], begin[1:])
    joined = stop <= end
    if joined.any():
        g = int(joined.argmax())
        at = batch.name(document[g], end[g])
        raise InvalidInputError(
            f"placeholders.crops: got one marker at {at}, want an end and a start between two crops"
        )
    kind = np.where(tile, TILE, THUMBNAIL).astype(np.uint8)
    return spans._replace(first=begin, kind=kind, extra_tokens=stop - end - 1)


class PlaceholderRuns:
    """Runs of a placeholder within documents; the rank of a token is its index among all placeholders.

    Args:
        document: (runs,) document of each run.
        first: (runs,) first token in the batch.
        tokens: (runs,) number of tokens.
        audio: (runs,) number of audio tokens in the run, or None.
        row_ends: ascending tokens that end rows, or None.
    """

    def __init__(
        self,
        document: IntArray,
        first: IntArray,
        tokens: IntArray,
        audio: IntArray | None = None,
        row_ends: IntArray | None = None,
    ) -> None:
        self.document, self.first, self.tokens, self.audio, self.row_ends = document, first, tokens, audio, row_ends
        self.stops = tokens.cumsum()  # one past the rank of each run's last token
        self.shift = first + tokens - self.stops  # from a rank to a token
        self.total = int(self.stops[-1]) if self.stops.size else 0

    def fit(self, tokens: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
        """Return whether each grid of ``tokens`` tokens lies in one run, and the grid's first token and document."""
        stops = tokens.cumsum()
        if not self.total:
            return np.zeros(tokens.shape, np.bool_), stops, stops
        run = np.minimum(self.stops.searchsorted(stops - tokens, side="right"), self.stops.size - 1)
        return stops <= self.stops[run], stops - tokens + self.shift[run], self.document[run]


@dataclass(frozen=True)
class PackedIds:
    """Input ids of a batch, as one row.

    Args:
        ids: (tokens,) of any integer type.
        starts: (documents,) first token of each document that is not padding.
        stops: (documents,) end of each document, one past its last token.
        padding: (documents,) padding tokens before and after each document; None without a mask.
    """

    ids: IntArray
    starts: IntArray
    stops: IntArray
    padding: tuple[IntArray, IntArray] | None = None

    @classmethod
    def of(cls, input_ids: object, cu_seqlens: object, attention_mask: object) -> PackedIds:
        """Read the documents of a batch, packed by cu_seqlens or padded by a mask, but not both."""
        ids = host_array("input_ids", input_ids)
        if ids.ndim not in (1, 2) or (ids.dtype.kind not in "iu" and ids.size):
            raise InvalidInputError(
                f"input_ids: got {ids.dtype} of shape {ids.shape}, want integers (tokens,) or (batch, seq)"
            )
        if attention_mask is not None and cu_seqlens is not None:
            raise InvalidInputError("cu_seqlens cannot be combined with attention_mask")
        if cu_seqlens is not None:
            cu = _cu_seqlens(cu_seqlens, ids)
            return cls(ids.ravel(), cu[:-1], cu[1:])
        rows = ids if ids.ndim == 2 else ids[None]
        starts = np.arange(len(rows)) * rows.shape[1]
        if len(rows) and rows.shape[1] == 0:
            raise InvalidInputError(f"input_ids: got shape {ids.shape}, want at least one token in each document")
        if attention_mask is None or not len(rows):
            return cls(ids.ravel(), starts, starts + rows.shape[1])
        real = _mask(host_array("attention_mask", attention_mask), ids).reshape(rows.shape)
        left = real.argmax(axis=1)
        right = rows.shape[1] - left - real.sum(axis=1)
        return cls(ids.ravel(), starts + left, starts + rows.shape[1] - right, (left, right))

    def runs(self, token: int) -> PlaceholderRuns:
        """Find the runs of a token."""
        first, stop = true_runs(self.ids == token, np.append(self.starts, self.stops)).T
        document = self.starts.searchsorted(first, side="right") - 1
        inside = (document >= 0) & (first < self.stops[document])  # and not under padding
        return PlaceholderRuns(document[inside], first[inside], (stop - first)[inside])

    def name(self, document: int, token: int) -> str:
        """Return the name of a token for error messages."""
        return f"document {document}, token {token - self.starts[document]}"


def _cu_seqlens(cu_seqlens: object, ids: Array) -> IntArray:
    cu = int_array("cu_seqlens", cu_seqlens, (None,))
    if cu.size == 0 or cu[0] != 0 or cu[-1] != ids.size:
        raise InvalidInputError(f"cu_seqlens: got {shown(cu)}, want 0 first and {ids.size} tokens last")
    if (np.diff(cu) < 1).any():
        d = int((np.diff(cu) < 1).argmax())
        raise InvalidInputError(f"cu_seqlens[{d + 1}]: got {cu[d + 1]} after {cu[d]}, want at least one token")
    return cu


def _mask(mask: Array, ids: Array) -> BoolArray:
    if mask.shape != ids.shape or mask.dtype.kind not in "biu":
        raise InvalidInputError(
            f"attention_mask: got {mask.dtype} of shape {mask.shape}, want zeros and ones of shape {ids.shape}"
        )
    if mask.size and (mask.min() < 0 or mask.max() > 1):
        raise InvalidInputError(f"attention_mask: got values {mask.min()} to {mask.max()}, want 0 and 1")
    real = np.atleast_2d(mask != 0)
    edges = (real[:, 1:] & ~real[:, :-1]).sum(axis=1) + real[:, 0]
    if (edges != 1).any():
        d = int((edges != 1).argmax())
        what = "no tokens" if edges[d] == 0 else "a hole"
        raise InvalidInputError(f"attention_mask[{d}]: got {what}, want ones in one run, padded left or right")
    return real
