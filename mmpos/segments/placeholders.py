"""Find placeholder spans in input ids: runs of placeholder tokens are matched with the grids in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.segments.kinds import AUDIO, CLIP, CLIP_MARKERS, GRID, THUMBNAIL, TILE, CropMarkers, checked_markers
from mmpos.segments.spans import span_tokens
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, Array, IntArray, counted, first_bad, host_array, int_array, integer, shown


class Modality(NamedTuple):
    """One kind of placeholder: the argument's name, its grids before merging and its token id."""

    name: str
    grid_thw: object
    token_id: int | None
    frames_apart: bool = False


class RowEnds(NamedTuple):
    """The tokens that end the rows of grids: all rows but the last, and the last."""

    row: int
    last: int

    @classmethod
    def of(cls, row_token_id: int | None, last_row_token_id: int | None, placeholders: Sequence[int]) -> RowEnds | None:
        """Check the two ids, of which the last may be left out; None where rows follow each other."""
        if row_token_id is None:
            if last_row_token_id is not None:
                raise InvalidInputError(f"last_row_token_id: got {last_row_token_id}, want row_token_id, too")
            return None
        row = integer("row_token_id", row_token_id)
        ends = cls(row, row if last_row_token_id is None else integer("last_row_token_id", last_row_token_id))
        for name, token in zip(("row_token_id", "last_row_token_id"), ends, strict=True):
            if token in placeholders:
                raise InvalidInputError(f"{name}: got {token}, want another than that of patches")
        return ends


@dataclass(frozen=True)
class Placeholders:
    """Placeholder spans of a batch in token order, as SegmentTable.from_spans takes them.

    ``videos`` is the index of the video of each span, -1 for images and audio; ``padding`` the tokens left and
    right of each document, or None when the batch has no mask; ``kind`` and ``extra_tokens`` are None where all are
    grids.
    """

    lengths: IntArray
    offsets: IntArray
    grid_thw: IntArray
    documents: IntArray
    videos: IntArray
    num_videos: int
    padding: tuple[IntArray, IntArray] | None
    row_separator: bool
    kind: npt.NDArray[np.uint8] | None
    extra_tokens: IntArray | None

    def per_span(self, name: str, values: Sequence[Fraction | None]) -> list[Fraction | None]:
        """Give every span the value of its video; None for images."""
        if len(values) != self.num_videos:
            raise InvalidInputError(f"{name}: got {len(values)} values, want {self.num_videos}, one per video")
        return [None if video < 0 else values[video] for video in self.videos]


def find(
    input_ids: object,
    *modalities: Modality,
    spatial_merge_size: int,
    cu_seqlens: object,
    attention_mask: object,
    row_token_id: int | None,
    last_row_token_id: int | None,
    audio_token_id: int | None,
    audio_lengths: object,
    row_separator: bool,
    crop_markers: CropMarkers | None,
) -> Placeholders:
    """Match every run of placeholders of a batch with its grids; see SegmentTable.from_input_ids."""
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1, maximum=INT32_MAX)
    batch = read_batch(input_ids, cu_seqlens, attention_mask)
    wanted = [modality for modality in modalities if _wanted(modality)]
    token_ids = [_token_id(modality) for modality in wanted]
    if len(set(token_ids)) < len(wanted):
        raise InvalidInputError(f"video_token_id: got {wanted[-1].token_id}, want another than image_token_id")
    ends = RowEnds.of(row_token_id, last_row_token_id, token_ids)
    if row_separator and ends is not None:
        raise InvalidInputError(f"row_token_id: got {ends.row} beside row_separator=True, want one of them")
    runs = batch.runs(token_ids) if token_ids else []
    sound = _sound(batch, audio_token_id, token_ids)
    if sound is not None and wanted and wanted[-1].name == "video_grid_thw":
        runs[-1], sound = _merged_runs(runs[-1], sound)
    spans = [
        _match(batch, modality, own, merge, ends, row_separator) for modality, own in zip(wanted, runs, strict=True)
    ]
    videos = sum(s.num_grids for s in spans if s.name == "video_grid_thw")
    if sound is not None:
        spans.append(_audio_spans(sound))
        spans = [_joined(spans)]
    if audio_lengths is not None:
        _check_audio_lengths(spans[-1], audio_lengths, sound)
    both = spans[0] if len(spans) == 1 else _joined(spans)
    if crop_markers is not None:
        if ends is not None or row_separator or sound is not None:
            raise InvalidInputError("crop_markers: got them beside ends of rows or audio, want None")
        both = _crops(batch, both, _other_markers(crop_markers, token_ids))
    plain = bool((both.kind == GRID).all())
    return Placeholders(
        batch.stops - batch.starts,
        both.first - batch.starts[both.document],
        both.grid_thw,
        both.document,
        both.video,
        videos,
        batch.padding,
        ends is not None or row_separator,
        None if plain else both.kind,
        None if plain else both.extra,
    )


def _sound(batch: Batch, audio_token_id: int | None, placeholders: Sequence[int]) -> Runs | None:
    """Find the runs of audio tokens; None where there is no id of them."""
    if audio_token_id is None:
        return None
    token = integer("audio_token_id", audio_token_id)
    if token in placeholders:
        raise InvalidInputError(f"audio_token_id: got {token}, want another than that of patches")
    return batch.runs([token])[0]


def _merged_runs(video: Runs, sound: Runs) -> tuple[Runs, Runs]:
    """Join runs of video and audio that touch: runs of video, some with audio in them, and runs of audio alone."""
    order = np.concatenate([video.first, sound.first]).argsort()
    document, first, tokens = (
        np.concatenate([getattr(video, name), getattr(sound, name)])[order] for name in ("document", "first", "tokens")
    )
    heard = order >= video.first.size
    begins = np.ones(first.size, np.bool_)
    begins[1:] = (first[1:] != first[:-1] + tokens[:-1]) | (document[1:] != document[:-1])
    group, (start,) = begins.cumsum() - 1, begins.nonzero()
    seen, audio = np.zeros((2, start.size), np.int64)
    np.add.at(seen, group, np.where(heard, 0, tokens))
    np.add.at(audio, group, np.where(heard, tokens, 0))
    document, first, pictured = document[start], first[start], seen > 0
    alone = ~pictured
    return (
        Runs(document[pictured], first[pictured], seen[pictured], audio[pictured]),
        Runs(document[alone], first[alone], audio[alone]),
    )


def _audio_spans(sound: Runs) -> _Spans:
    one, none = np.ones_like(sound.first), np.zeros_like(sound.first)
    extents = np.stack([one, one, sound.tokens], axis=1)
    return _Spans(
        "audio_lengths", 0, sound.first, sound.document, extents, none - 1, (AUDIO * one).astype(np.uint8), none
    )


def _check_audio_lengths(spans: _Spans, audio_lengths: object, sound: Runs | None) -> None:
    """Compare the tokens of all audio, in clips and alone, with those that the caller counts on."""
    if sound is None:
        raise InvalidInputError("audio_token_id: got None, want the placeholder id of audio")
    wanted = int_array("audio_lengths", audio_lengths, (None,))
    lengths = np.where(spans.kind == AUDIO, spans.grid_thw[:, 2], spans.extra)
    lengths = lengths[lengths > 0]
    if wanted.size != lengths.size:
        raise InvalidInputError(
            f"audio_lengths: got {counted(wanted.size, 'length')}, want {lengths.size}, one per run of audio tokens"
        )
    if (wanted != lengths).any():
        i = int((wanted != lengths).argmax())
        raise InvalidInputError(
            f"audio_lengths[{i}]: got {wanted[i]}, want {lengths[i]}, the audio tokens in input_ids"
        )


def _joined(spans: Sequence[_Spans]) -> _Spans:
    """Merge the spans of all modalities into token order."""
    empty = np.zeros(0, np.int64)
    none = _Spans("grid_thw", 0, empty, empty, np.zeros((0, 3), np.int64), *_plain(0))
    joined = {
        name: np.concatenate([getattr(s, name) for s in (none, *spans)])
        for name in ("first", "document", "grid_thw", "video", "kind", "extra")
    }
    order = joined["first"].argsort(kind="stable")
    return _Spans("grid_thw", 0, **{name: column[order] for name, column in joined.items()})


def _plain(spans: int) -> tuple[IntArray, npt.NDArray[np.uint8], IntArray]:
    """Make the last columns of spans that are images: no video, grids, no extra tokens."""
    return np.full(spans, -1), np.full(spans, GRID, np.uint8), np.zeros(spans, np.int64)


class _Spans(NamedTuple):
    """Spans of one modality: num_grids those of grid_thw; video the index of each video, or -1; extra as the table."""

    name: str
    num_grids: int
    first: IntArray
    document: IntArray
    grid_thw: IntArray
    video: IntArray
    kind: npt.NDArray[np.uint8]
    extra: IntArray


def _other_markers(crop_markers: object, placeholders: Sequence[int]) -> CropMarkers:
    """Check that markers are CropMarkers, none of them a placeholder."""
    markers = checked_markers(crop_markers)
    for name, token in asdict(markers).items():
        if token in placeholders:
            raise InvalidInputError(f"crop_markers.{name}: got {token}, want another than the placeholders of patches")
    return markers


def _crops(batch: Batch, spans: _Spans, markers: CropMarkers) -> _Spans:
    """Make thumbnails and tiles of grids: the markers around each, and those that follow, belong to its span."""
    document, begin = spans.document, spans.first - 1
    end = spans.first + spans.grid_thw.prod(axis=1)
    inside = (begin >= batch.starts[document]) & (end < batch.stops[document])
    before, after = batch.ids[np.where(inside, begin, 0)], batch.ids[np.where(inside, end, 0)]
    tile = before == markers.tile_start
    opened = inside & (tile | (before == markers.thumbnail_start))
    closed = inside & (after == np.where(tile, markers.tile_end, markers.thumbnail_end))
    if not (opened & closed).all():
        g = int((opened & closed).argmin())
        at = batch.name(int(document[g]), int(spans.first[g]))
        side, edge, token = ("after", "end", after[g]) if opened[g] else ("before", "start", before[g])
        got = f"token {token} {side}" if inside[g] else "no room for markers around"
        raise InvalidInputError(
            f"crop_markers: got {got} the placeholders at {at}, want thumbnail_{edge} or tile_{edge}"
        )
    others = np.append(np.flatnonzero(~np.isin(batch.ids, astuple(markers))), batch.ids.size)
    stop = np.minimum(others[others.searchsorted(end)], batch.stops[document])
    # Of the markers up to the next crop, the last one opens that.
    stop[:-1] = np.minimum(stop[:-1], begin[1:])
    joined = stop <= end
    if joined.any():
        at = batch.name(*(int(where[joined.argmax()]) for where in (document, end)))
        raise InvalidInputError(f"crop_markers: got one marker at {at}, want an end and a start between two crops")
    kind = np.where(tile, TILE, THUMBNAIL).astype(np.uint8)
    return spans._replace(first=begin, kind=kind, extra=stop - end - 1)


def _wanted(modality: Modality) -> bool:
    if modality.token_id is None:
        if modality.grid_thw is not None:
            token = modality.name.replace("grid_thw", "token_id")
            raise InvalidInputError(f"{token}: got None, want the placeholder id of {modality.name}")
        return False
    return True


def _token_id(modality: Modality) -> int:
    return integer(modality.name.replace("grid_thw", "token_id"), modality.token_id)


def _match(
    batch: Batch, modality: Modality, runs: Runs, merge: int, ends: RowEnds | None, row_separator: bool
) -> _Spans:
    name = modality.name
    raw = int_array(name, () if modality.grid_thw is None else modality.grid_thw, (None, 3))
    first_bad(name, raw, minimum=1, maximum=INT32_MAX)
    grids, owner = raw, np.arange(len(raw))
    if modality.frames_apart:
        if raw[:, 0].sum() > runs.total:
            raise InvalidInputError(
                f"{name}: got {counted(int(raw[:, 0].sum()), 'frame')}, want at most {runs.total}, the placeholders"
            )
        owner = np.repeat(owner, raw[:, 0])
        grids = raw[owner]
        grids[:, 0] = 1
    merged = _merged(name, raw, grids, owner, merge)
    tokens = span_tokens(name, merged, int(row_separator))
    if row_separator:
        first, document = _match_framed(batch, runs, name, merged, tokens, owner)
    elif ends is None:
        fits, first, document = _fits(runs, tokens)
        if not fits.all() or tokens.sum() != runs.total:
            raise InvalidInputError(_misfit(batch, runs, name, grids, owner, merge))
    else:
        first, document = _match_rows(batch, runs, name, merged, owner, ends)
    video, kind, audio = _plain(len(merged))
    if name == "video_grid_thw":
        video = owner
    if runs.audio is not None and merged.size:
        run = runs.of(tokens.cumsum() - tokens)
        audio = runs.audio[run]
        first = _clip_starts(batch, name, tokens, owner, Runs(document, first, runs.tokens[run], audio))
        kind[audio > 0] = CLIP
    return _Spans(name, len(raw), first, document, merged, video, kind, audio)


def _clip_starts(batch: Batch, name: str, tokens: IntArray, owner: IntArray, runs: Runs) -> IntArray:
    """Move the first token of each clip to its markers, whose run must hold it alone, with room for them."""
    assert runs.audio is not None
    clip = runs.audio > 0
    shared = clip & (runs.tokens != tokens)
    if shared.any():
        g = int(shared.argmax())
        at = batch.name(int(runs.document[g]), int(runs.first[g]))
        got = f"a run of {counted(int(runs.tokens[g]), 'placeholder')} and of audio at {at}"
        raise InvalidInputError(f"{name}[{owner[g]}]: got {got}, want {tokens[g]} placeholders for one video")
    first, length = runs.first - CLIP_MARKERS * clip, runs.tokens + runs.audio + 2 * CLIP_MARKERS
    outside = clip & ((first < batch.starts[runs.document]) | (first + length > batch.stops[runs.document]))
    if outside.any():
        g = int(outside.argmax())
        at = batch.name(int(runs.document[g]), int(runs.first[g]))
        raise InvalidInputError(f"{name}[{owner[g]}]: got a clip at {at}, want two markers before it and two after it")
    return first


def _merged(name: str, raw: IntArray, grids: IntArray, owner: IntArray, merge: int) -> IntArray:
    if merge == 1:
        return grids
    merged, odd = np.divmod(grids, np.array([1, merge, merge]))
    if odd.any():
        g = int(owner[int(odd.any(axis=1).argmax())])
        raise InvalidInputError(
            f"{name}[{g}]: got {tuple(raw[g].tolist())}, want height and width divisible by spatial_merge_size={merge}"
        )
    return merged


def _fits(runs: Runs, tokens: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    """Tell whether each grid covers consecutive placeholders of one document, its first token, and its document."""
    stops = tokens.cumsum()
    if not runs.total:
        return np.zeros(tokens.shape, np.bool_), stops, stops
    run = runs.of(stops - tokens)
    return stops <= runs.stops[run], stops - tokens + runs.shift[run], runs.document[run]


def _match_framed(
    batch: Batch, runs: Runs, name: str, merged: IntArray, tokens: IntArray, owner: IntArray
) -> tuple[IntArray, IntArray]:
    """Match grids whose rows end in a placeholder with one run each, which one more may begin and end."""
    lengths = np.diff(runs.stops, prepend=0)
    count = min(lengths.size, tokens.size)
    frame = lengths[:count] - tokens[:count]
    fits = (frame == 0) | (frame == 2)
    if not fits.all():
        g = int(fits.argmin())
        at = batch.name(int(runs.document[g]), int(runs.first[g]))
        raise InvalidInputError(
            f"{name}[{owner[g]}]: got a run of {counted(int(lengths[g]), 'placeholder')} at {at}, want {tokens[g]} or "
            f"{tokens[g] + 2} for {'x'.join(map(str, merged[g]))} after merging, whose rows end in one more"
        )
    if lengths.size != tokens.size:
        raise InvalidInputError(
            f"{name}: got {counted(tokens.size, 'grid')}, want {lengths.size}, one for each run of placeholders"
        )
    return runs.first + frame // 2, runs.document


def _match_rows(
    batch: Batch, runs: Runs, name: str, merged: IntArray, owner: IntArray, ends: RowEnds
) -> tuple[IntArray, IntArray]:
    """Match grids whose rows are runs of their own: first token and document of each grid."""
    heights = merged[:, 0] * merged[:, 1]
    if heights.sum(dtype=np.float64) > runs.total:
        raise InvalidInputError(f"{name}: got {heights.sum()} rows, want at most {runs.total}, the placeholders")
    grid = np.arange(len(heights)).repeat(heights)
    width = merged[grid, 2]
    fits, first, document = _fits(runs, width)
    stop = first + width
    is_last = np.zeros(grid.size, np.bool_)
    is_last[heights.cumsum() - 1] = True
    end = np.where(is_last, ends.last, ends.row)
    follows = np.ones(grid.size, np.bool_)
    follows[1:] = is_last[:-1] | ((first[1:] == stop[:-1] + 1) & (document[1:] == document[:-1]))
    inside = fits & (stop < batch.stops[document])
    ended = inside & (batch.ids[np.where(inside, stop, 0)] == end)
    good = fits & follows & ended
    begin = heights.cumsum() - heights
    if good.all():
        if width.sum() != runs.total:
            raise InvalidInputError(_surplus(batch, runs, name, int(width.sum()), owner))
        return first[begin], document[begin]
    r = int(good.argmin())
    g = int(grid[r])
    row = f"row {r - int(begin[g])} of {'x'.join(map(str, merged[g]))} after merging"
    done = int(width[:r].sum())
    at = batch.name(int(document[r]), int(first[r]))
    if fits[r] and follows[r]:
        got = f"token {batch.ids[stop[r]]}" if inside[r] else "the end of the document"
        message = f"got {got} after the placeholders at {at}, want {end[r]}, the end of {row}"
    elif fits[r]:
        where = batch.name(int(document[r - 1]), int(stop[r - 1]))
        message = f"got placeholders at {at}, want those of {row} right after {where}"
    elif done >= runs.total:
        message = f"got no placeholders left, want {width[r]} for {row}; a surplus grid?"
    else:
        run = int(runs.stops[runs.of(np.asarray([done]))[0]]) - done
        message = f"got a run of {run} placeholders at {at}, want {width[r]} for {row}"
    raise InvalidInputError(f"{name}[{owner[g]}]: {message}")


def _surplus(batch: Batch, runs: Runs, name: str, done: int, owner: IntArray) -> str:
    """Word the error of placeholders that no grid is left for."""
    run = int(runs.of(np.asarray([done]))[0])
    at = batch.name(int(runs.document[run]), done + int(runs.shift[run]))
    left = f"{counted(runs.total - done, 'placeholder')} from {at} on"
    return f"{name}: got {counted(len(set(owner.tolist())), 'grid')}, want more for {left}"


def _misfit(batch: Batch, runs: Runs, name: str, grids: IntArray, owner: IntArray, merge: int) -> str:
    merged = grids // np.array([1, merge, merge])
    tokens = span_tokens(name, merged)
    fits, first, document = _fits(runs, tokens)
    hint = _merge_hint(runs, grids, merge)
    if fits.all():
        return _surplus(batch, runs, name, int(tokens.sum()), owner) + hint
    g = int(fits.argmin())
    want = f"want {tokens[g]} for {'x'.join(map(str, merged[g]))} after merging"
    begin = int(tokens[:g].sum())
    if begin >= runs.total:
        return f"{name}[{owner[g]}]: got no placeholders left, {want}; a surplus grid?{hint}"
    run = int(runs.stops[runs.of(np.asarray([begin]))[0]]) - begin
    at = batch.name(int(document[g]), int(first[g]))
    if not hint and run == merged[g, 2] < tokens[g]:
        hint = "; where a token of its own ends each row, pass row_token_id"
    return f"{name}[{owner[g]}]: got a run of {counted(run, 'placeholder')} at {at}, {want}{hint}"


def _merge_hint(runs: Runs, grids: IntArray, merge: int) -> str:
    for other in (1, 2, 3, 4, 8):
        if other == merge or not len(grids) or (grids[:, 1:] % other).any():
            continue
        tokens = (grids // np.array([1, other, other])).prod(axis=1, dtype=np.float64)
        if tokens.sum() == runs.total and _fits(runs, tokens.astype(np.int64))[0].all():
            return f" (fits with spatial_merge_size={other})"
    return ""


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """All tokens in one row, and the first token and one past the last of each document's own tokens."""

    ids: IntArray
    starts: IntArray
    stops: IntArray
    padding: tuple[IntArray, IntArray] | None

    def runs(self, token_ids: Sequence[int]) -> list[Runs]:
        """Find the runs of each of one or two placeholders."""
        if native.core is not None and min(token_ids) >= 0:  # the extension takes -1 for no second one
            quadruples = native.core.runs(self.ids, self.starts, self.stops, *token_ids, *[-1] * (2 - len(token_ids)))
            if quadruples is not None:
                document, first, tokens, kind = native.int64(quadruples).reshape(-1, 4).T
                if len(token_ids) == 1:
                    return [Runs(document, first, tokens)]
                return [Runs(document[kind == i], first[kind == i], tokens[kind == i]) for i in (0, 1)]
        return [self._runs(token_id) for token_id in token_ids]

    def _runs(self, token_id: int) -> Runs:
        at = np.flatnonzero(self.ids == token_id)
        document = np.searchsorted(self.starts, at, side="right") - 1
        inside = (document >= 0) & (at < self.stops[document])  # and not under padding
        at, document = at[inside], document[inside]
        begins = np.ones(at.size, np.bool_)
        begins[1:] = (np.diff(at) > 1) | (np.diff(document) > 0)
        first = np.flatnonzero(begins)
        return Runs(document[first], at[first], np.diff(np.append(first, at.size)))

    def name(self, document: int, token: int) -> str:
        """Name a token of the batch, for errors."""
        return f"document {document}, token {token - int(self.starts[document])}"


class Runs:
    """Runs of a placeholder, none of which passes the end of a document; its tokens are ranked in order.

    Args:
        document: (runs,) document of each run.
        first: (runs,) its first token in the batch.
        tokens: (runs,) how many there are.
        audio: (runs,) audio tokens between them; None where there are none.
    """

    def __init__(self, document: IntArray, first: IntArray, tokens: IntArray, audio: IntArray | None = None) -> None:
        self.document, self.first, self.tokens, self.audio = document, first, tokens, audio
        self.stops = tokens.cumsum()  # one past the rank of each run's last token
        self.shift = first + tokens - self.stops  # from a rank to a token
        self.total = int(self.stops[-1]) if self.stops.size else 0

    def of(self, rank: IntArray) -> IntArray:
        """Find the run of a placeholder of this rank; the last for ranks beyond all."""
        run = self.stops.searchsorted(rank, side="right")
        return np.minimum(run, self.stops.size - 1, out=run)


def read_batch(input_ids: object, cu_seqlens: object, attention_mask: object) -> Batch:
    """Read the documents of a batch, packed by cu_seqlens or padded by a mask, but not both."""
    ids = host_array("input_ids", input_ids)
    if ids.ndim not in (1, 2) or (ids.dtype.kind not in "iu" and ids.size):
        raise InvalidInputError(
            f"input_ids: got {ids.dtype} of shape {ids.shape}, want integers (tokens,) or (batch, seq)"
        )
    if attention_mask is not None and cu_seqlens is not None:
        raise InvalidInputError("cu_seqlens: got both cu_seqlens and attention_mask, want at most one")
    if cu_seqlens is not None:
        cu = _cu_seqlens(cu_seqlens, ids)
        return Batch(ids.ravel(), cu[:-1], cu[1:], None)
    rows = ids if ids.ndim == 2 else ids[None]
    starts = np.arange(len(rows)) * rows.shape[1]
    if len(rows) and rows.shape[1] == 0:
        raise InvalidInputError(f"input_ids: got shape {ids.shape}, want at least one token in each document")
    if attention_mask is None or not len(rows):
        return Batch(ids.ravel(), starts, starts + rows.shape[1], None)
    mask = host_array("attention_mask", attention_mask)
    left, right = np.empty((2, len(rows)), np.int64)
    core = native.core if mask.shape == ids.shape else None
    if core is None or not core.ones(np.atleast_2d(mask), left, right):
        real = _mask(mask, ids).reshape(rows.shape)
        left = real.argmax(axis=1)
        right = rows.shape[1] - left - real.sum(axis=1)
    return Batch(ids.ravel(), starts + left, starts + rows.shape[1] - right, (left, right))


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
            f"attention_mask: got {mask.dtype} of shape {mask.shape}, want 0 and 1 of shape {ids.shape}"
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
