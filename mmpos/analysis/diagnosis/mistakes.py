"""The known mistakes of pipelines, each with the wrong ids that it produces and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.deviation import Deviation, Ids
from mmpos.positions.table_rows import FIRST_TOKEN, axis_names
from mmpos.schemes import (
    SCHEMES,
    Grid2D,
    Grids,
    LatentScheme,
    MRopeQwen25,
    MRopeTransformers,
    Placement,
    RopeTie,
    RopeTieFractional,
    RopeTieLcm,
    RopeTieV2,
    Scheme,
)
from mmpos.segments.kinds import CLIP, GRID, TEXT, THUMBNAIL, TILE
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MAX, IntArray


@dataclass(frozen=True)
class Guess:
    """A mistake and the ids that it produces.

    Args:
        cause: the mistake in words that follow "Cause: ".
        ids: (axes, tokens), or (tokens,) if the same on all axes; None if the documents cannot be placed that way.
        evidence: number of differing tokens that the guess was fitted to, including at least the first.
    """

    cause: str
    ids: npt.NDArray[Any] | None
    evidence: int = 1


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Args:
        remedy: how to fix it, in words that follow "To do: ".
        guesses: yields the ids that the mistake produces, one guess for each of its forms.
    """

    remedy: str
    guesses: Callable[[Deviation], Iterator[Guess]]


_TRIED: list[Mistake] = []


def mistake(remedy: str) -> Callable[[Callable[[Deviation], Iterator[Guess]]], Mistake]:
    """Turn a function that guesses ids into a mistake with this remedy, which is tried after those defined above it."""

    def define(guesses: Callable[[Deviation], Iterator[Guess]]) -> Mistake:
        _TRIED.append(Mistake(remedy, guesses))
        return _TRIED[-1]

    return define


def mistaken(right: Scheme, **methods: Callable[..., Any]) -> Scheme:
    """Copy a scheme with some methods replaced."""
    wrong = copy(right)
    # Create a new class, so that the scheme equals no other and has no plan.
    object.__setattr__(wrong, "__class__", type(type(right).__name__, (type(right),), {}))
    for name in ("unit", "advance", "place", "cleared", "advance_text", "place_text", "next_after"):
        # Bind the methods to the right scheme, so that they do not call the replaced ones.
        object.__setattr__(wrong, name, methods.get(name, getattr(right, name)))
    return wrong


def other_advance(right: Scheme, ids: Callable[[Scheme, Grids], IntArray | None]) -> Scheme:
    """Change the number of ids that grids consume, which moves only the tokens after them; None keeps the number."""

    def advance(grids: Grids) -> IntArray:
        count, unit = ids(right, grids), right.unit(grids)
        if count is None:
            return right.advance(grids)
        return count if unit is None else count * unit

    return mistaken(right, advance=advance)


def _beyond_maximum(right: Scheme, grids: Grids) -> IntArray | None:
    placement = right.place(grids, np.zeros_like(grids.frames))
    if placement.pieces is not None:
        return None
    last = grids.extents - 1
    highest = np.stack([np.broadcast_to(origin, grids.frames.shape) for origin in placement.origin])
    for steps, moves in zip((placement.step_frame, placement.step_row, placement.step_col), last, strict=True):
        for axis, step in enumerate(steps or ()):
            highest[axis] += np.maximum(step, 0) * moves
    return highest.max(axis=0) // placement.denominator + 1


def unmerged_scheme(right: Scheme, side: int, strides: bool) -> Scheme:
    """Forget to merge side×side blocks, in the ids that grids consume and, with ``strides``, in their patches."""

    def before(grids: Grids) -> Grids:
        return replace(grids, extents=grids.extents * np.array([[1], [side], [side]]))

    methods: dict[str, Callable[..., Any]] = {"advance": lambda grids: right.advance(before(grids))}
    if strides:
        methods["place"] = lambda grids, cursor: right.place(before(grids), cursor)
    return mistaken(right, **methods)


def column_major_scheme(right: Scheme) -> Scheme:
    """Place patches column by column, in documents whose grids have height and width swapped."""

    def exchanged(grids: Grids) -> Grids:
        return replace(grids, extents=grids.extents[[0, 2, 1]])

    def place(grids: Grids, cursor: IntArray) -> Placement:
        placement = right.place(exchanged(grids), cursor)
        pieces = placement.pieces
        if pieces is not None:
            pieces = replace(pieces, height=pieces.width, width=pieces.height)
        return replace(placement, step_row=placement.step_col, step_col=placement.step_row, pieces=pieces)

    return mistaken(right, place=place, advance=lambda grids: right.advance(exchanged(grids)))


_MERGES = (2, 3, 4)

_GRIDS = (GRID, CLIP, THUMBNAIL, TILE)

_VARIANTS: tuple[Scheme, ...] = (
    *(scheme() for scheme in SCHEMES.values()),
    *(scheme(axes=3) for scheme in (RopeTie, RopeTieFractional, RopeTieV2, RopeTieLcm)),
    RopeTieV2(rounding="floor"),
    *(Grid2D(order="merged", spatial_merge_size=side) for side in _MERGES),
    *(MRopeTransformers(tokens_per_second=rate) for rate in (1, 2, 4, 25)),
    *(MRopeQwen25(tokens_per_second=rate) for rate in (1, 4, 25)),
)

_ADVANCES: dict[str, Callable[[Scheme, Grids], IntArray | None]] = {
    "text after a grid continues at the token's index, one id per patch: the delta is forgotten": (
        lambda right, grids: grids.tokens
    ),
    "text after a grid continues at the maximum of all ids plus one": _beyond_maximum,
    "a grid consumes the ids of its longest side, as in M-RoPE": (lambda right, grids: grids.extents.max(axis=0)),
    "text after a grid continues as if the grid consumed one id": (lambda right, grids: np.ones_like(grids.frames)),
}


@mistake("keep ids as float64, or as exact integers in the table; never call .long() on them")
def cut_fractions(case: Deviation) -> Iterator[Guess]:
    """Guess that fractions were converted to integers."""
    if not case.positions.fractional:
        return
    yield Guess("fractions are truncated, as by .long() or .astype(int)", np.trunc(case.want))
    yield Guess("fractions are rounded down, as by floor or //", np.floor(case.want))
    yield Guess("fractions are rounded to integers, halves to even, as by round", np.rint(case.want))
    yield Guess("fractions are rounded to integers, halves up", np.floor(case.want + 0.5))
    yield Guess("fractions are rounded up", np.ceil(case.want))
    yield Guess("ids are doubled, as if to avoid halves", 2 * case.want)


@mistake("never cast ids to low precision: keep them in int32, in float64 or in the table")
def low_precision(case: Deviation) -> Iterator[Guess]:
    """Guess that ids were cast to a float with too few bits."""
    with np.errstate(over="ignore"):
        forms: dict[str, Ids] = {
            "float16": case.want.astype(np.float16).astype(np.float64),
            "bfloat16": bfloat16(case.want),
            "float32": case.want.astype(np.float32).astype(np.float64),
        }
    for name, ids in forms.items():
        error = np.abs(ids - case.want).max(initial=0)
        yield Guess(f"ids are rounded to {name}, by up to {error:.3g}", ids)


def bfloat16(ids: Ids) -> Ids:
    """Round ids to bfloat16, which is float32 without its last 16 bits; halves round to even."""
    bits = ids.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@mistake("keep ids in int32 or int64")
def narrow_integers(case: Deviation) -> Iterator[Guess]:
    """Guess that integers wrapped around: ids, or the numerators that they were computed from."""
    integers = case.want.astype(np.int64)
    for kind in (np.int16, np.uint16, np.int8, np.uint8):
        name = np.dtype(kind).name
        yield Guess(f"ids wrap around in {name}", integers.astype(kind))
    if case.positions.fractional:
        numerators, denominators = case.positions.rationals()
        yield Guess("numerators wrap around in int32", numerators.astype(np.int32) / denominators)


@mistake("pass the model ids for all axes, such as positions.dense(), instead of arange")
def token_index(case: Deviation) -> Iterator[Guess]:
    """Guess that ids are 1-D: they count the tokens of the document, of the whole batch, or of the padded row."""
    words = "ids are the token's index in {}, as if there were no images"
    counts = {"its document": case.index, "the whole batch, not reset at each document": np.arange(case.index.size)}
    if case.column is not None:
        counts["its padded row"] = case.column
    only_start_differs = bool((case.want == case.counted).all())  # another_start reports that mistake
    for where, count in counts.items():
        if only_start_differs and (count == case.index).all():
            continue
        for first in sorted({0, 1, *case.start[:1].tolist()}):
            yield Guess(words.format(where), count + first)


@mistake("order the axes as the scheme does: (row, col) or (frame, row, col)")
def permuted(case: Deviation) -> Iterator[Guess]:
    """Guess that axes were permuted: match each received row with the most similar axis that is not yet taken."""
    names = axis_names(case.positions.axes)
    want, order = case.rounded(case.want), list[int]()
    for row in case.got:
        matches = np.stack([case.near(axis[None], row[None]) for axis in want])
        # An axis must reproduce the first difference, however many other ids it reproduces.
        score = np.where(matches[:, case.first], 1 + matches.sum(axis=1), 0)
        score[order] = -1
        order.append(int(score.argmax()))
    if order != sorted(order):
        received = ", ".join(names[axis] for axis in order)
        words = f"axes are swapped: got the order ({received}), want ({', '.join(names)})"
        yield Guess(words, case.want[order])


@mistake("rotate each pair by the axis in the config, in the kernel as in the reference")
def axis_repeated(case: Deviation) -> Iterator[Guess]:
    """Guess that one axis was used in place of others, as in a kernel that drops height and width."""
    names = axis_names(case.positions.axes)
    for axis, name in enumerate(names):
        others = [other for other in range(len(names)) if other != axis]
        if others:
            words = f"axis {axis} ({name}) is used in place of {{}}"
            every = words.format("every other axis") if len(others) > 1 else words.format(f"axis {others[0]}")
            yield Guess(every, case.want[axis])
        for other in others if len(others) > 1 else ():
            ids = case.want.copy()
            ids[other] = ids[axis]
            yield Guess(words.format(f"axis {other} ({names[other]})"), ids)


@mistake("pass grids as (frames, height, width): rows of patches before columns")
def sides_swapped(case: Deviation) -> Iterator[Guess]:
    """Guess that the height and width of grids were swapped."""
    swapped = _swapped(case)
    if swapped is not None:
        yield Guess("height and width of grids are swapped", case.placed(segments=swapped))


@mistake("flatten patches in row-major order: the column index is the fastest")
def column_major(case: Deviation) -> Iterator[Guess]:
    """Guess that patches were flattened in column-major order."""
    swapped = _swapped(case)
    if swapped is not None and case.scheme is not None:
        ids = case.placed(column_major_scheme(case.scheme), swapped)
        yield Guess("patches are in column-major order: column after column, not row after row", ids)


def _swapped(case: Deviation) -> SegmentTable | None:
    """Return the documents with the height and width of their grids swapped; None if rows end in separators."""
    segments = case.segments
    if segments is None or segments.row_separator is not None:
        return None
    extents = segments.extents.copy()
    grid = np.isin(segments.kind, _GRIDS)
    extents[1:, grid] = segments.extents[:0:-1, grid]
    return replace(segments, extents=extents)


@mistake("rotate each image by the ids of its own size: one table holds images of any sizes")
def first_for_all(case: Deviation) -> Iterator[Guess]:
    """Guess that all documents got the ids of the first, as in models that generate a batch of images of equal size."""
    if not isinstance(case.scheme, LatentScheme) or case.segments is None or case.positions.num_documents < 2:
        return
    words = "all documents have the ids of the first one, which has other sizes"
    yield Guess(words, case.want[:, np.minimum(case.index, case.positions.lengths[0] - 1)])
    # Also guess segment by segment, in case only the ids of images are repeated.
    lengths, offsets = case.segments.lengths, case.segments.segment_offsets
    of_first = np.minimum(case.segment - offsets[case.document], offsets[1] - 1)
    begins = lengths.cumsum() - lengths
    index = np.arange(case.index.size) - begins[case.segment]
    yield Guess(words, case.want[:, begins[of_first] + np.minimum(index, lengths[of_first] - 1)])


@mistake("count the text tokens that the transformer receives, including padding that it attends to")
def text_of_another_length(case: Deviation) -> Iterator[Guess]:
    """Guess that ids were computed for one text token too many or too few, in models that generate images."""
    segments = case.segments
    if not isinstance(case.scheme, LatentScheme) or segments is None:
        return
    (text,) = (segments.kind == TEXT).nonzero()
    owner, first = np.unique(segments.segment_offsets.searchsorted(text, side="right") - 1, return_index=True)
    changed = np.full(case.start.size, segments.kind.size)  # the first text of each document
    changed[owner] = text[first]
    own, after = case.segment == changed[case.document], case.segment > changed[case.document]
    for more, words in ((1, "more"), (-1, "fewer")):
        extents, grown = segments.extents.copy(), np.zeros_like(case.start)
        extents[2, text[first]] += more
        grown[owner] = more
        ids = (
            None if extents[2].min() < 1 else case.placed(segments=replace(segments, extents=extents), any_length=True)
        )
        if ids is None:
            continue
        begin, lengths = case.begin + (grown.cumsum() - grown)[case.document], case.positions.lengths + grown
        for index in (case.index, case.index + more * after):
            there = ids[:, begin + np.minimum(index, lengths[case.document] - 1)]
            yield Guess(f"ids are computed for one text token {words}", np.where(own, case.want, there))


@mistake("pass the images of a document in the order of the scheme, which numbers them: the generated one, references")
def shifted_references(case: Deviation) -> Iterator[Guess]:
    """Guess that reference images have another number or offset, in models that generate images."""
    if not isinstance(case.scheme, LatentScheme) or case.segments is None:
        return
    is_grid = case.segments.kind == GRID
    before = is_grid.cumsum() - is_grid
    number = (before[case.segment] - before[case.segment[case.begin]]) * is_grid[case.segment]
    if number[case.first] == 0:
        return
    moved = (case.got - case.want)[:, case.first, None]
    written = ", ".join(f"{ids:g}" for ids in moved[:, 0])
    yield Guess(f"references are shifted by ({written})", case.want + moved * (number > 0))
    per_number = moved / number[case.first]
    yield Guess(f"references are shifted by their number times ({written})", case.want + per_number * number)


@mistake("begin at the scheme's first id, or pass your first id as start")
def another_start(case: Deviation) -> Iterator[Guess]:
    """Guess that documents start at another id."""
    if case.offset is None or not case.offset.is_integer() or abs(case.offset) > 2 * INT32_MAX:
        return  # no two starts within int32 are that far apart
    first = case.start + int(case.offset)
    ids = case.want + case.offset if case.segments is None else case.placed(start=first)
    document, begin = case.document[case.first], case.begin[case.first]
    if ids is None or not case.near(case.rounded(ids[:, begin, None]), case.got[:, begin, None]):
        return
    yield Guess(f"documents start at {first[document]}, not at {case.start[document]}", ids)


@mistake("pass second_per_grid_ts as the model's processor computes it: temporal_patch_size / frames per second")
def other_times(case: Deviation) -> Iterator[Guess]:
    """Guess that the frames of videos have other times."""
    seconds = None if case.segments is None else case.segments.seconds_per_frame
    if case.segments is None or seconds is None:
        return
    known = seconds[0] > 0
    times = {
        "seconds_per_frame is forgotten: frames are one second apart": np.where(known, 1, seconds),
        "frames per second are mistaken for seconds per frame": np.where(known, seconds[::-1], seconds),
    }
    halves = seconds * np.where(known, [[1], [2]], 1)
    if (halves <= INT32_MAX).all():
        times["times are half as large as they should be: temporal_patch_size is forgotten"] = halves
    for words, mistaken in times.items():
        yield Guess(words, case.placed(segments=replace(case.segments, seconds_per_frame=mistaken)))


@mistake("compute ids with the scheme that the model was trained with")
def other_scheme(case: Deviation) -> Iterator[Guess]:
    """Guess the ids of another scheme, or of the same scheme with other parameters."""
    for scheme in sorted(_VARIANTS, key=lambda scheme: type(scheme) is not type(case.scheme)):
        if scheme != case.scheme:
            yield Guess(f"these are the ids of {scheme.label}", case.placed(scheme))


@mistake("pad position ids on the same side as token ids")
def other_side(case: Deviation) -> Iterator[Guess]:
    """Guess that position ids were padded on the wrong side."""
    if case.column is None or case.mask is None:
        return
    lengths = case.positions.lengths
    before = (case.column - case.index)[case.positions.documents[FIRST_TOKEN]]
    left = np.where(before > 0, 0, case.mask.shape[1] - lengths)
    index = case.column - left[case.document]
    inside = (index >= 0) & (index < lengths[case.document])
    ids = case.want[:, np.where(inside, case.begin + index, 0)]
    for outside in (0, 1):  # the usual padding ids
        yield Guess("position ids and token ids are padded on opposite sides", np.where(inside, ids, outside))


@mistake("begin at the first real token: left padding consumes no ids")
def padding_counted(case: Deviation) -> Iterator[Guess]:
    """Guess that ids begin at the padding before the first token."""
    if case.column is None:
        return
    ids = case.placed(start=case.start + (case.column - case.index)[case.positions.documents[FIRST_TOKEN]])
    yield Guess("left padding is counted: ids begin at the padding, not at the first real token", ids)


@mistake("restart ids at start in every packed document, at the offsets in cu_seqlens")
def not_reset(case: Deviation) -> Iterator[Guess]:
    """Guess that packed documents continue the previous one."""
    if case.positions.num_documents < 2:
        return
    words = "ids are not reset: each document continues {} of the previous one"
    grown: list[tuple[str, IntArray]] = [("at the number of tokens", case.positions.lengths)]
    if case.deltas is not None:
        grown.insert(0, ("at the next position", case.positions.lengths + case.deltas))
    if case.positions.lengths.all():
        highest = np.maximum.reduceat(case.want.max(axis=0), case.positions.documents[FIRST_TOKEN])
        grown.append(("at the maximum plus one", np.floor(highest).astype(np.int64) + 1 - case.start))
    for where, ids in grown:
        before = np.cumsum(ids) - ids
        placed = case.placed(start=case.start + before)
        continued = case.want + before[case.document] if placed is None else placed
        yield Guess(words.format(where), continued)


@mistake("describe the documents as they are: one document, or several packed ones")
def reset_inside(case: Deviation) -> Iterator[Guess]:
    """Guess that ids restart inside a document."""
    start = case.start[case.document]
    restarts = (case.got == start).all(axis=0) & (case.index > 0) & case.wrong
    if not restarts[case.first]:
        return
    token = np.arange(restarts.size)
    since = np.maximum.accumulate(np.where(restarts | (case.index == 0), token, 0))
    shift = np.where(restarts[since], start - case.want[:, since], 0)
    words = "ids are reset inside a document: they restart at this token"
    yield Guess(words, case.want + shift, evidence=int(restarts.sum()))


@mistake("slice the ids of the whole prompt for each chunk, as positions.slice(start, stop) does")
def first_chunk_again(case: Deviation) -> Iterator[Guess]:
    """Guess that every chunk, or everything after the first chunk, repeats the ids of the document's beginning."""
    chunk = int(case.index[case.first])
    if chunk < 2:
        return  # one_token_off covers a chunk of one token
    words = f"from token {chunk} on, ids repeat those of the document's beginning"
    for index in (case.index % chunk, np.where(case.late, case.index - chunk, case.index)):
        yield Guess(words, case.want[:, case.begin + np.maximum(index, 0)])


@mistake("continue after a grid where the scheme continues, as positions.explain(TOKEN) shows")
def wrong_advance(case: Deviation) -> Iterator[Guess]:
    """Guess that grids are right but the segments after them are not."""
    if case.scheme is not None:
        for words, ids in _ADVANCES.items():
            yield Guess(words, case.placed(other_advance(case.scheme, ids)))


@mistake("divide height and width by the merge size before computing ids")
def unmerged(case: Deviation) -> Iterator[Guess]:
    """Guess that grids were measured before merging, although tokens are merged patches."""
    if case.scheme is None:
        return
    for side, strides in product(_MERGES, (False, True)):
        affected = "strides and ids after a grid" if strides else "ids after a grid"
        words = f"spatial merging is forgotten: {affected} are for {side}x{side} times the patches"
        yield Guess(words, case.placed(unmerged_scheme(case.scheme, side, strides)))


@mistake("add the document's delta to the token index, or take ids from positions.decode")
def delta_forgotten(case: Deviation) -> Iterator[Guess]:
    """Guess that ids are token indices from the first difference on, as in decoding without the delta."""
    delta = case.want[0, case.first] - case.counted[case.first]
    words = f"from the first difference on, ids are the token's index: the delta {delta:g} is forgotten"
    yield Guess(words, np.where(case.late, case.counted, case.want))


@mistake("store deltas with their documents, never on the model: positions.deltas")
def delta_of_another(case: Deviation) -> Iterator[Guess]:
    """Guess that the delta of another document is used from the first difference on."""
    if case.deltas is None:
        return
    used = case.got[0, case.first] - case.counted[case.first]
    own = int(case.document[case.first])
    for other in np.flatnonzero(case.deltas == used)[:1].tolist():
        words = f"the delta {used:g} of documents[{other}] is used for documents[{own}], from the first difference on"
        yield Guess(words, np.where(case.late, case.counted + used, case.want))


@mistake("shift labels, not position ids: token i has ids[:, i]")
def one_token_off(case: Deviation) -> Iterator[Guess]:
    """Guess that ids were shifted by one token, like labels."""
    token = np.arange(case.index.size)
    for step, neighbour in ((1, "after"), (-1, "before")):
        words = f"every token has the ids of the token {neighbour} it"
        moved = case.index + step
        inside = (moved >= 0) & (moved < case.positions.lengths[case.document])
        shifted = case.want[:, np.where(inside, token + step, token)]
        yield Guess(words, np.where(inside, shifted, 0))
        yield Guess(words, np.roll(case.want, -step, axis=1))
        if step > 0 and case.deltas is not None:
            following = case.positions.next_positions[case.document]
            yield Guess(words, np.where(inside, shifted, following))


@mistake("check the segment before the first difference: it consumes another number of ids")
def constant(case: Deviation) -> Iterator[Guess]:
    """Guess that ids are off by a constant from the first difference to the end of the document."""
    if not case.offset or (case.late & ~case.wrong).any():
        return
    words = f"from the first difference to the end of the document, ids are {case.offset_in_words}"
    yield Guess(words, np.where(case.late, case.want + case.offset, case.want))


@mistake("check the offset that is added to the ids of each image")
def shifted_grids(case: Deviation) -> Iterator[Guess]:
    """Guess that whole grids are shifted, each by a constant, and that all other tokens are right."""
    lengths, is_grid = case.positions.segment_lengths, case.positions.is_grid
    if case.segments is not None:
        lengths, is_grid = case.segments.lengths, np.isin(case.segments.kind, _GRIDS)
    begins = lengths.cumsum() - lengths
    shift = case.got[0, begins] - case.want[0, begins]
    ids = case.want + shift.repeat(lengths)
    agrees = np.logical_and.reduceat(case.near(case.rounded(ids), case.got), begins)
    moved = is_grid & agrees & np.isfinite(shift) & (shift != 0)
    (shifted,) = moved.nonzero()
    if not shifted.size or (case.wrong & ~moved.repeat(lengths)).any():
        return
    lowest, highest = shift[shifted].min(), shift[shifted].max()
    change = case.offset_in_words if lowest == highest else f"shifted by {lowest:g} to {highest:g}"
    noun = "image" if case.segments is not None and (case.segments.extents[0, shifted] == 1).all() else "grid"
    grids = f"one {noun} (segment {shifted[0]})"
    if shifted.size > 1:
        more = f" and {shifted.size - 3} more" if shifted.size > 3 else ""
        grids = f"{shifted.size} {noun}s (segments {', '.join(map(str, shifted[:3]))}{more})"
    yield Guess(f"the ids of {grids} are {change}; all other tokens are right", ids, evidence=shifted.size)


@mistake("count each token once, as the scheme does, and leave scale factors to the rotation")
def multiplied(case: Deviation) -> Iterator[Guess]:
    """Guess that ids were multiplied or divided by an integer."""
    got, want = case.got[:, case.first], case.want[:, case.first]
    times = got[want != 0] / want[want != 0]
    if times.size and (times == times[0]).all() and times[0].is_integer() and times[0] > 1:
        yield Guess(f"ids are {times[0]:g} times as large as they should be", times[0] * case.want)
    for over in (2, 3, 4):
        yield Guess(f"ids are divided by {over}", case.want / over)
        yield Guess(f"ids are divided by {over}, and rounded down", np.floor(case.want / over))


@mistake("add the delta to the index of every token; take cache slots from the index, since ids are for rotations only")
def index_among_right_ids(case: Deviation) -> Iterator[Guess]:
    """Guess that the ids of some tokens are their indices: the delta was lost, or ids were used as cache slots."""
    index = np.where(case.wrong, case.index, case.want)
    if (case.got[:, case.first] == case.index[case.first]).all():
        words = "some tokens between right ones have their index as id: their delta is forgotten"
        yield Guess(f"{words}, or keys are in the cache slots of their ids", index, evidence=2 * case.runs)


@mistake(
    "check the offset that is added to the ids of these tokens; place draft tokens after the token before them, as "
    "positions.decode does"
)
def constant_in_runs(case: Deviation) -> Iterator[Guess]:
    """Guess that runs of tokens are off by the same constant, such as the draft tokens in each decoding step."""
    if not case.offset:
        return
    ids = np.where(case.wrong, case.want + case.offset, case.want)
    if not case.near(case.rounded(ids), case.got).all():
        return
    words = f"{case.runs} runs of tokens have ids that are {case.offset_in_words}; the tokens between them are right"
    if case.runs == 1:
        words = (
            f"a run of {case.wrong.sum()} tokens has ids that are {case.offset_in_words}; all other tokens are right"
        )
    yield Guess(words, ids, evidence=2 * case.runs)


MISTAKES = tuple(_TRIED)
"""The mistakes in the order in which they are tried: casts first, since rounded ids may match other mistakes too."""
