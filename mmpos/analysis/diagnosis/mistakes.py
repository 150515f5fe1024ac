"""The known mistakes of pipelines: the ids that each gives for some documents, and what to do about it."""

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
    """A mistake and the ids that it gives.

    Args:
        cause: the mistake in words, which follow "Cause: ".
        ids: (axes, tokens), or (tokens,) the same on all axes; None where these documents cannot be placed so.
        evidence: how many of the tokens that differ it was made to fit: the first at least, by which it was chosen.
    """

    cause: str
    ids: npt.NDArray[Any] | None
    evidence: int = 1


@dataclass(frozen=True)
class Mistake:
    """A known mistake.

    Args:
        remedy: what to do about it, in words that follow "To do: ".
        guesses: the ids that it gives in a comparison, one guess for each of its forms.
    """

    remedy: str
    guesses: Callable[[Deviation], Iterator[Guess]]


def mistake(remedy: str) -> Callable[[Callable[[Deviation], Iterator[Guess]]], Mistake]:
    """Make a mistake of the function that guesses its ids."""
    return lambda guesses: Mistake(remedy, guesses)


def mistaken(right: Scheme, **methods: Callable[..., Any]) -> Scheme:
    """Make a scheme that does what this one does, but for these methods."""
    wrong = copy(right)
    # Of a class of its own, so that it equals no other and has no plan.
    object.__setattr__(wrong, "__class__", type(type(right).__name__, (type(right),), {}))
    for name in ("unit", "advance", "place", "cleared", "advance_text", "place_text", "next_after"):
        # Methods of the right scheme: where they need each other, they find no mistake.
        object.__setattr__(wrong, name, methods.get(name, getattr(right, name)))
    return wrong


def other_advance(right: Scheme, ids: Callable[[Scheme, Grids], IntArray | None]) -> Scheme:
    """Grids in their place, and what comes after them not: they take so many ids, or None where the scheme is right."""

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


def unmerged_scheme(right: Scheme, side: int, whole: bool) -> Scheme:
    """Patches that were not merged in blocks of this side: in the ids that grids take, or in their strides, too."""

    def before(grids: Grids) -> Grids:
        return replace(grids, extents=grids.extents * np.array([[1], [side], [side]]))

    methods: dict[str, Callable[..., Any]] = {"advance": lambda grids: right.advance(before(grids))}
    if whole:
        methods["place"] = lambda grids, cursor: right.place(before(grids), cursor)
    return mistaken(right, **methods)


def column_major_scheme(right: Scheme) -> Scheme:
    """Patches column after column, for documents whose grids have height and width exchanged."""

    def exchanged(grids: Grids) -> Grids:
        return replace(grids, extents=grids.extents[[0, 2, 1]])

    def place(grids: Grids, cursor: IntArray) -> Placement:
        placement = right.place(exchanged(grids), cursor)
        pieces = placement.pieces
        if pieces is not None:
            pieces = replace(pieces, height=pieces.width, width=pieces.height)
        return replace(placement, step_row=placement.step_col, step_col=placement.step_row, pieces=pieces)

    return mistaken(right, place=place, advance=lambda grids: right.advance(exchanged(grids)))


@mistake("keep ids as float64, or as exact integers in the table; never .long() them")
def cut_fractions(case: Deviation) -> Iterator[Guess]:
    """Integers in place of fractions."""
    if not case.positions.fractional:
        return
    yield Guess("fractions are cut off, as .long() and .astype(int) do", np.trunc(case.want))
    yield Guess("fractions are rounded down, as floor and // do", np.floor(case.want))
    yield Guess("fractions are rounded to integers, halves to the even one, as round does", np.rint(case.want))
    yield Guess("fractions are rounded to integers, halves up", np.floor(case.want + 0.5))
    yield Guess("fractions are rounded up", np.ceil(case.want))
    yield Guess("ids are twice as large, as if to have no halves", 2 * case.want)


@mistake("keep ids out of casts to low precision: in int32, in float64, or in the table")
def low_precision(case: Deviation) -> Iterator[Guess]:
    """Ids that went through a float with too few bits."""
    with np.errstate(over="ignore"):
        forms: dict[str, Ids] = {
            "float16": case.want.astype(np.float16).astype(np.float64),
            "bfloat16": bfloat16(case.want),
            "float32": case.want.astype(np.float32).astype(np.float64),
        }
    for name, ids in forms.items():
        error = np.abs(ids - case.want).max(initial=0)
        yield Guess(f"ids are rounded to {name}, by up to {error:.3g}", ids)


@mistake("hold ids in int32 or int64")
def narrow_integers(case: Deviation) -> Iterator[Guess]:
    """Integers that wrapped around, ids or the numerators they were computed from."""
    whole = case.want.astype(np.int64)
    for kind in (np.int16, np.uint16, np.int8, np.uint8):
        name = np.dtype(kind).name
        yield Guess(f"ids wrap around in {name}", whole.astype(kind))
    if case.positions.fractional:
        numerators, denominators = case.positions.rationals()
        yield Guess("numerators wrap around in int32", numerators.astype(np.int32) / denominators)


def bfloat16(ids: Ids) -> Ids:
    """Ids rounded to bfloat16, halves to the even one: float32 with its last 16 bits rounded away."""
    bits = ids.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@mistake("give the model ids with all axes, as positions.dense() has them, in place of arange")
def token_index(case: Deviation) -> Iterator[Guess]:
    """1-D ids, of the document, of the whole batch, or of the padded row."""
    words = "ids are the token's index{}: 1-D ids, which know no images"
    counts = {
        " in its document": case.index,
        " in the whole batch, not restarted at a document": np.arange(case.index.size),
    }
    if case.column is not None:
        counts[" in its padded row"] = case.column
    meant = bool((case.want == case.counted).all())  # then the index is right, and its start is not
    for where, count in counts.items():
        if meant and (count == case.index).all():
            continue
        for first in sorted({0, 1, *case.start[:1].tolist()}):
            yield Guess(words.format(where), count + first)


@mistake("begin at the same id as the scheme, or tell it yours as start")
def another_start(case: Deviation) -> Iterator[Guess]:
    """Documents that begin at another id."""
    if case.offset is None or not case.offset.is_integer() or abs(case.offset) > 2 * INT32_MAX:
        return  # no start is so far from another
    first = case.start + int(case.offset)
    ids = case.want + case.offset if case.segments is None else case.placed(start=first)
    document = case.document[case.first]
    yield Guess(f"documents start at {first[document]}, not at {case.start[document]}", ids)


@mistake("shift labels and not position ids: id and token have the same index")
def one_token_off(case: Deviation) -> Iterator[Guess]:
    """Every token has the ids of its neighbour, as if ids had been shifted like labels."""
    token = np.arange(case.index.size)
    for step, neighbour in ((1, "after"), (-1, "before")):
        words = f"every token has the ids of the one {neighbour} it"
        moved = case.index + step
        inside = (moved >= 0) & (moved < case.positions.lengths[case.document])
        shifted = case.want[:, np.where(inside, token + step, token)]
        yield Guess(words, np.where(inside, shifted, 0))
        yield Guess(words, np.roll(case.want, -step, axis=1))
        if step > 0 and case.deltas is not None:
            following = case.positions.next_positions[case.document]
            yield Guess(words, np.where(inside, shifted, following))


@mistake("look at what stands before the first difference: it takes another number of ids")
def constant(case: Deviation) -> Iterator[Guess]:
    """From the first difference to the end of the document, the same too much or too little."""
    if not case.offset:
        return
    words = f"from the first difference to the end of the document, ids are {case.too_much}"
    yield Guess(words, np.where(case.late, case.want + case.offset, case.want))


@mistake("count each token once, as the scheme does, and leave factors to the rotation")
def multiplied(case: Deviation) -> Iterator[Guess]:
    """Ids times a whole number, or over one."""
    got, want = case.got[:, case.first], case.want[:, case.first]
    times = got[want != 0] / want[want != 0]
    if times.size and (times == times[0]).all() and times[0].is_integer() and times[0] > 1:
        yield Guess(f"ids are {times[0]:g} times as large as they should be", times[0] * case.want)
    for over in (2, 3, 4):
        yield Guess(f"ids are divided by {over}", case.want / over)
        yield Guess(f"ids are divided by {over}, and rounded down", np.floor(case.want / over))


@mistake("place the tokens of a draft after the one before them, as positions.decode does")
def constant_in_runs(case: Deviation) -> Iterator[Guess]:
    """Runs of tokens, with right ones between, the same too much or too little, as drafts in the windows of steps."""
    if not case.offset or case.runs < 2:
        return
    words = f"{case.runs} runs of tokens have ids that are {case.too_much}, and tokens between them are right"
    yield Guess(words, np.where(case.wrong, case.want + case.offset, case.want), evidence=2 * case.runs)


@mistake("add the delta to the index of every token; take slots of a cache from the index, since ids are for rotations")
def index_among_right_ids(case: Deviation) -> Iterator[Guess]:
    """Indexes of tokens among ids that are right: a delta lost for some, or keys in the slots of their ids."""
    index = np.where(case.wrong, case.index, case.want)
    if (case.got[:, case.first] == case.index[case.first]).all():
        words = "tokens among others that are right have their index as id: their delta is forgotten"
        yield Guess(f"{words}, or keys lie in the slots of their ids", index, evidence=2 * case.runs)


@mistake("order the axes as the scheme does: (row, col) or (frame, row, col)")
def permuted(case: Deviation) -> Iterator[Guess]:
    """The same rows of ids in another order: each row that came is the axis, not yet taken, that it resembles most."""
    names = axis_names(case.positions.axes)
    want, order = case.held(case.want), list[int]()
    for row in case.got:
        alike = np.stack([case.near(axis[None], row[None]) for axis in want])
        # An order that does not give the first difference is none, however much else it gives.
        score = np.where(alike[:, case.first], 1 + alike.sum(axis=1), 0)
        score[order] = -1
        order.append(int(score.argmax()))
    if order != sorted(order):
        came = ", ".join(names[axis] for axis in order)
        words = f"axes are swapped: they stand in the order ({came}) and should be ({', '.join(names)})"
        yield Guess(words, case.want[order])


@mistake("give each pair the axis that the config says, in the kernel as in the reference")
def axis_repeated(case: Deviation) -> Iterator[Guess]:
    """One axis in place of others, as by a kernel that drops height and width."""
    names = axis_names(case.positions.axes)
    for axis, name in enumerate(names):
        others = [other for other in range(len(names)) if other != axis]
        if others:
            words = f"axis {axis} ({name}) stands in place of {{}}, which is dropped"
            every = words.format("every other axis") if len(others) > 1 else words.format(f"axis {others[0]}")
            yield Guess(every, case.want[axis])
        for other in others if len(others) > 1 else ():
            ids = case.want.copy()
            ids[other] = ids[axis]
            yield Guess(words.format(f"axis {other} ({names[other]})"), ids)


@mistake("give grids as (frames, height, width), the rows of patches before the columns")
def sides_exchanged(case: Deviation) -> Iterator[Guess]:
    """Grids whose height was taken for their width."""
    exchanged = _exchanged(case)
    if exchanged is not None:
        yield Guess("height and width of grids are exchanged", case.placed(segments=exchanged))


@mistake("flatten patches row after row, the column fastest")
def column_major(case: Deviation) -> Iterator[Guess]:
    """Patches one column after the other."""
    exchanged = _exchanged(case)
    if exchanged is not None and case.scheme is not None:
        ids = case.placed(column_major_scheme(case.scheme), exchanged)
        yield Guess("patches are in column-major order: column after column, not row after row", ids)


def _exchanged(case: Deviation) -> SegmentTable | None:
    """The documents with height and width of their grids exchanged; none if rows end in separators."""
    segments = case.segments
    if segments is None or segments.row_separator is not None:
        return None
    extents = segments.extents.copy()
    grid = np.isin(segments.kind, (GRID, CLIP, THUMBNAIL, TILE))
    extents[1:, grid] = segments.extents[:0:-1, grid]
    return replace(segments, extents=extents)


@mistake("give each image the rotation of its own size: one table holds a batch of any sizes")
def first_for_all(case: Deviation) -> Iterator[Guess]:
    """The ids of the first document for all, as of models that generate batches of one size."""
    if not isinstance(case.scheme, LatentScheme) or case.segments is None or case.positions.num_documents < 2:
        return
    words = "all documents have the ids of the first one, whose sizes are not theirs"
    yield Guess(words, case.want[:, np.minimum(case.index, case.positions.lengths[0] - 1)])
    # Segment by segment, where only images are alike.
    lengths, offsets = case.segments.lengths, case.segments.segment_offsets
    of_first = np.minimum(case.segment - offsets[case.document], offsets[1] - 1)
    begins = lengths.cumsum() - lengths
    index = np.arange(case.index.size) - begins[case.segment]
    yield Guess(words, case.want[:, begins[of_first] + np.minimum(index, lengths[of_first] - 1)])


@mistake("count the tokens of text that the transformer gets, padding that it attends to among them")
def text_of_another_length(case: Deviation) -> Iterator[Guess]:
    """The ids of documents whose text has a token more or less, in models that generate."""
    segments = case.segments
    if not isinstance(case.scheme, LatentScheme) or segments is None:
        return
    (text,) = (segments.kind == TEXT).nonzero()
    owner, first = np.unique(segments.segment_offsets.searchsorted(text, side="right") - 1, return_index=True)
    changed = np.full(case.start.size, segments.kind.size)  # the first text of each document
    changed[owner] = text[first]
    own, after = case.segment == changed[case.document], case.segment > changed[case.document]
    for more, words in ((1, "more"), (-1, "less")):
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
            yield Guess(f"ids are made for one token of text {words}", np.where(own, case.want, there))


@mistake(
    "give the images of a document in the scheme's order, which numbers them: the one that is generated, references"
)
def shifted_references(case: Deviation) -> Iterator[Guess]:
    """References at another number or place than theirs, in models that generate."""
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
    each = moved / number[case.first]
    yield Guess(f"references are shifted by their number times ({written})", case.want + each * number)


_MERGES = (2, 3, 4)

_VARIANTS: tuple[Scheme, ...] = (
    *(scheme() for scheme in SCHEMES.values()),
    *(scheme(axes=3) for scheme in (RopeTie, RopeTieFractional, RopeTieV2, RopeTieLcm)),
    RopeTieV2(rounding="floor"),
    *(Grid2D(order="merged", spatial_merge_size=side) for side in _MERGES),
    *(MRopeTransformers(tokens_per_second=rate) for rate in (1, 2, 4, 25)),
    *(MRopeQwen25(tokens_per_second=rate) for rate in (1, 4, 25)),
)

_ADVANCES: dict[str, Callable[[Scheme, Grids], IntArray | None]] = {
    "text after a grid goes on at the token's index, one id per patch: the delta is forgotten": (
        lambda right, grids: grids.tokens
    ),
    "text after a grid goes on at the maximum of all ids plus one": _beyond_maximum,
    "text after a grid goes on after its longest side, as in M-RoPE": (lambda right, grids: grids.extents.max(axis=0)),
    "text after a grid goes on as if the grid took one id": (lambda right, grids: np.ones_like(grids.frames)),
}


@mistake("compute ids by the scheme that the model was trained with")
def other_scheme(case: Deviation) -> Iterator[Guess]:
    """The ids of another scheme, or of the same with other parameters."""
    for scheme in sorted(_VARIANTS, key=lambda scheme: type(scheme) is not type(case.scheme)):
        if scheme != case.scheme:
            yield Guess(f"these are the ids of {scheme.label}", case.placed(scheme))


@mistake("give what the model's processor has: second_per_grid_ts, frames of one patch over frames per second")
def other_times(case: Deviation) -> Iterator[Guess]:
    """Frames of videos at other times than theirs."""
    seconds = None if case.segments is None else case.segments.seconds_per_frame
    if case.segments is None or seconds is None:
        return
    known = seconds[0] > 0  # where no time is known, none is mistaken
    times = {
        "seconds_per_frame is forgotten: frames are one second apart": None,
        "frames per second are taken for seconds per frame": np.where(known, seconds[::-1], seconds),
    }
    halves = seconds * np.where(known, [[1], [2]], 1)
    if (halves <= INT32_MAX).all():
        times["times are half of what they should be: temporal_patch_size is forgotten"] = halves
    for words, mistaken in times.items():
        yield Guess(words, case.placed(segments=replace(case.segments, seconds_per_frame=mistaken)))


@mistake("go on after a grid at the scheme's cursor: positions.next_positions has it")
def wrong_advance(case: Deviation) -> Iterator[Guess]:
    """Grids in their place, and what comes after them not."""
    if case.scheme is not None:
        for words, ids in _ADVANCES.items():
            yield Guess(words, case.placed(other_advance(case.scheme, ids)))


@mistake("divide height and width by the merge size before ids are computed")
def unmerged(case: Deviation) -> Iterator[Guess]:
    """Grids of patches before merging, while tokens are those after it."""
    if case.scheme is None:
        return
    for side, whole in product(_MERGES, (False, True)):
        what = "strides and ids after a grid" if whole else "ids after a grid"
        words = f"spatial merging is forgotten: {what} are those of {side}x{side} times the patches"
        yield Guess(words, case.placed(unmerged_scheme(case.scheme, side, whole)))


@mistake("pad ids on the side where the token ids are padded")
def other_side(case: Deviation) -> Iterator[Guess]:
    """Ids padded on the other side than token ids are."""
    if case.column is None or case.mask is None:
        return
    lengths = case.positions.lengths
    before = (case.column - case.index)[case.positions.documents[FIRST_TOKEN]]
    left = np.where(before > 0, 0, case.mask.shape[1] - lengths)
    index = case.column - left[case.document]
    inside = (index >= 0) & (index < lengths[case.document])
    ids = case.want[:, np.where(inside, case.begin + index, 0)]
    for outside in (0, 1):  # what padding has in most batches
        yield Guess("ids are padded on the other side than the tokens", np.where(inside, ids, outside))


@mistake("begin at the first real token: left padding takes no ids")
def padding_counted(case: Deviation) -> Iterator[Guess]:
    """Ids that began with the padding before the first token."""
    if case.column is None:
        return
    ids = case.placed(start=case.start + (case.column - case.index)[case.positions.documents[FIRST_TOKEN]])
    yield Guess("left padding is counted: ids begin with it, not with the first real token", ids)


@mistake("begin every packed document at start, from cu_seqlens")
def not_reset(case: Deviation) -> Iterator[Guess]:
    """Packed documents that go on from the one before."""
    if case.positions.num_documents < 2:
        return
    words = "ids are not reset: documents go on {} of the one before"
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


@mistake("give one document as one, or the documents as several")
def reset_inside(case: Deviation) -> Iterator[Guess]:
    """Ids that begin anew inside a document."""
    start = case.start[case.document]
    again = (case.got == start).all(axis=0) & (case.index > 0) & case.wrong
    if not again[case.first]:
        return
    token = np.arange(again.size)
    since = np.maximum.accumulate(np.where(again | (case.index == 0), token, 0))
    shift = np.where(again[since], start - case.want[:, since], 0)
    words = "ids are reset inside a document: they begin anew at this token"
    yield Guess(words, case.want + shift, evidence=int(again.sum()))


@mistake("cut the ids of the whole prompt to the chunk, as positions.slice(start, stop) does")
def first_chunk_again(case: Deviation) -> Iterator[Guess]:
    """The ids of a document's beginning once more, for every chunk or for all that follows a chunk."""
    chunk = int(case.index[case.first])
    if chunk < 2:
        return  # one token is a shift
    words = f"from token {chunk} on ids are those of the document's beginning again"
    for index in (case.index % chunk, np.where(case.late, case.index - chunk, case.index)):
        yield Guess(words, case.want[:, case.begin + np.maximum(index, 0)])


@mistake("add the document's delta to the token index, or take ids from positions.decode")
def delta_forgotten(case: Deviation) -> Iterator[Guess]:
    """Token indexes from the first difference on, as when decoding goes on at the number of tokens."""
    delta = case.want[0, case.first] - case.counted[case.first]
    words = f"from the first difference on ids are the token's index: the delta {delta:g} is forgotten"
    yield Guess(words, np.where(case.late, case.counted, case.want))


@mistake("keep deltas with their documents, never on the model: positions.deltas")
def delta_of_another(case: Deviation) -> Iterator[Guess]:
    """Token index plus the delta of another document, from the first difference on."""
    if case.deltas is None:
        return
    used = case.got[0, case.first] - case.counted[case.first]
    own = int(case.document[case.first])
    for other in np.flatnonzero(case.deltas == used)[:1].tolist():
        words = f"the delta {used:g} of documents[{other}] is used for documents[{own}], from the first difference on"
        yield Guess(words, np.where(case.late, case.counted + used, case.want))


MISTAKES = (
    cut_fractions,
    low_precision,
    narrow_integers,
    token_index,
    permuted,
    axis_repeated,
    sides_exchanged,
    column_major,
    first_for_all,
    text_of_another_length,
    shifted_references,
    another_start,
    other_times,
    other_scheme,
    other_side,
    padding_counted,
    not_reset,
    reset_inside,
    first_chunk_again,
    wrong_advance,
    unmerged,
    delta_forgotten,
    delta_of_another,
    one_token_off,
    constant,
    multiplied,
    constant_in_runs,
    index_among_right_ids,
)
"""In the order in which they are tried; casts first, since few bits make the ids of all other mistakes alike."""
