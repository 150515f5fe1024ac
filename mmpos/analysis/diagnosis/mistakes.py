"""The known mistakes of pipelines: the ids that each gives in a case, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mmpos.errors import MmposError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN, axis_names
from mmpos.schemes import (
    SCHEMES,
    Grid2D,
    Grids,
    MRopeQwen25,
    MRopeTransformers,
    Placement,
    RopeTie,
    RopeTieFractional,
    RopeTieLcm,
    RopeTieV2,
    Scheme,
    TextRuns,
)
from mmpos.segments.kinds import CLIP, GRID, THUMBNAIL, TILE
from mmpos.segments.table import SegmentTable
from mmpos.support.cached import cached_property
from mmpos.support.checks import INT32_MAX, IntArray

Ids = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Guess:
    """A mistake and the ids that it gives.

    Args:
        cause: the mistake in words, which follow "Cause: ".
        ids: (axes, tokens), or (tokens,) the same on all axes.
        evidence: how many of the tokens that differ it was made to fit: the first at least, by which it was chosen.
    """

    cause: str
    ids: npt.NDArray[Any]
    evidence: int = 1


@dataclass(frozen=True, eq=False)
class Case:
    """Ids of tokens against a placed table, padding left out of both.

    Args:
        came: (axes, tokens) ids as they came; one row stands for all axes.
        positions: the table.
        start: (documents,) first id of every document.
        tolerance: how far an id may be from the exact one.
        segments: what was placed; None if only its table is known.
        scheme: how; None likewise.
        column: (tokens,) place in the padded row; None if the ids were packed.
        length: places of a padded row.
    """

    came: npt.NDArray[Any]
    positions: PositionTable
    start: IntArray
    tolerance: float = 0.0
    segments: SegmentTable | None = None
    scheme: Scheme | None = None
    column: IntArray | None = None
    length: int = 0

    @cached_property
    def got(self) -> Ids:
        """(axes, tokens) the ids that came, as floats."""
        return np.broadcast_to(self.came.astype(np.float64), self.want.shape)

    @cached_property
    def want(self) -> Ids:
        """(axes, tokens) the ids of the scheme."""
        return self.positions.dense(dtype=np.float64)

    @cached_property
    def wrong(self) -> Flags:
        """(tokens,) whether any id of a token differs."""
        return ~self.near(self.want, self.got)

    @cached_property
    def first(self) -> int:
        """The first token that differs."""
        return int(self.wrong.argmax())

    @cached_property
    def document(self) -> IntArray:
        """(tokens,) the document of every token."""
        return np.arange(self.positions.num_documents).repeat(self.positions.lengths)

    @cached_property
    def begin(self) -> IntArray:
        """(tokens,) the first token of every token's document."""
        return self.positions.documents[FIRST_TOKEN][self.document]

    @cached_property
    def index(self) -> IntArray:
        """(tokens,) tokens before every token in its document."""
        return np.arange(self.positions.num_tokens) - self.begin

    @cached_property
    def counted(self) -> IntArray:
        """(tokens,) the ids that text alone would have."""
        return self.start[self.document] + self.index

    @cached_property
    def late(self) -> Flags:
        """(tokens,) whether a token or one before it in its document differs."""
        since = np.full(self.positions.num_documents, self.positions.num_tokens)
        documents, where = np.unique(self.document[self.wrong], return_index=True)
        since[documents] = self.wrong.nonzero()[0][where]
        return np.arange(self.positions.num_tokens) >= since[self.document]

    @property
    def deltas(self) -> IntArray | None:
        """(documents,) deltas, where the scheme has them."""
        return self.positions.deltas if self.positions.resumable.all() else None

    @cached_property
    def offset(self) -> float | None:
        """The amount by which the first token that differs is too large, if the same on all axes."""
        offsets = self.got[:, self.first] - self.want[:, self.first]
        return float(offsets[0]) if np.isfinite(offsets[0]) and (offsets == offsets[0]).all() else None

    def held(self, ids: npt.NDArray[Any]) -> Ids:
        """The ids as the dtype in which they came would hold them."""
        if self.came.dtype.kind == "f":
            with np.errstate(over="ignore"):
                ids = ids.astype(self.came.dtype)
        return ids.astype(np.float64)

    def near(self, ids: Ids, got: Ids) -> Flags:
        """(tokens,) whether ids agree with those that came on every axis."""
        with np.errstate(invalid="ignore"):  # inf - inf
            return ((ids == got) | (np.abs(ids - got) <= self.tolerance)).all(axis=0)

    def placed(
        self, scheme: Scheme | None = None, segments: SegmentTable | None = None, start: npt.ArrayLike | None = None
    ) -> Ids | None:
        """(axes, tokens) ids of these documents placed otherwise; None where that cannot be."""
        scheme, segments = scheme or self.scheme, segments or self.segments
        if scheme is None or segments is None or scheme.axes != self.positions.axes:
            return None
        start = self.start if start is None else np.broadcast_to(np.asarray(start), self.start.shape)
        if (start == start[:1]).all() and start.size:
            start = start[0]  # what schemes that cannot be resumed take, too
        try:
            ids = place(segments, scheme, start, strict=False).dense(dtype=np.float64)
        except MmposError:
            return None
        return ids if ids.shape == self.want.shape else None


@dataclass(frozen=True)
class Mistaken(Scheme):
    """A scheme as it is, to be made wrong by subclasses.

    Args:
        right: the scheme without the mistake.
    """

    name: ClassVar[str] = "mistaken"
    right: Scheme

    def __post_init__(self) -> None:
        for name in ("axes", "fractional", "frames", "text", "row_separators", "kinds", "resumable"):
            object.__setattr__(self, name, getattr(self.right, name))

    def unit(self, grids: Grids) -> IntArray | None:
        return self.right.unit(grids)

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(grids)

    def in_units(self, grids: Grids, ids: IntArray) -> IntArray:
        """Give so many whole ids, (grids,), in the units of ``advance``."""
        unit = self.unit(grids)
        return ids if unit is None else ids * unit

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self.right.place(grids, cursor)

    def advance_text(self, runs: TextRuns) -> IntArray:
        return self.right.advance_text(runs)

    def place_text(self, runs: TextRuns, cursor: IntArray) -> Placement:
        return self.right.place_text(runs, cursor)


class AdvancesByTokens(Mistaken):
    """Grids take as many ids as tokens."""

    def advance(self, grids: Grids) -> IntArray:
        return self.in_units(grids, grids.tokens)


class AdvancesBySide(Mistaken):
    """Grids take as many ids as their longest side, as in M-RoPE."""

    def advance(self, grids: Grids) -> IntArray:
        return self.in_units(grids, grids.extents.max(axis=0))


class AdvancesByOne(Mistaken):
    """Grids take one id."""

    def advance(self, grids: Grids) -> IntArray:
        return self.in_units(grids, np.ones_like(grids.frames))


class AdvancesToMaximum(Mistaken):
    """Text goes on at the maximum of all ids plus one."""

    def advance(self, grids: Grids) -> IntArray:
        placement = self.right.place(grids, np.zeros_like(grids.frames))
        if placement.pieces is not None:
            return self.right.advance(grids)
        last = grids.extents - 1
        highest = np.stack([np.broadcast_to(origin, grids.frames.shape) for origin in placement.origin])
        for steps, moves in zip((placement.step_frame, placement.step_row, placement.step_col), last, strict=True):
            for axis, step in enumerate(steps or ()):
                highest[axis] += np.maximum(step, 0) * moves
        return self.in_units(grids, highest.max(axis=0) // placement.denominator + 1)


@dataclass(frozen=True)
class Unmerged(Mistaken):
    """Grids placed as if their patches had not been merged.

    Args:
        spatial_merge_size: side of the blocks that were merged.
        whole: whether strides are those of the unmerged grid, too, and not only the ids that it takes.
    """

    spatial_merge_size: int = 2
    whole: bool = False

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(self._before(grids))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        return self.right.place(self._before(grids) if self.whole else grids, cursor)

    def _before(self, grids: Grids) -> Grids:
        side = self.spatial_merge_size
        return replace(grids, extents=grids.extents * np.array([[1], [side], [side]]))


class ColumnMajor(Mistaken):
    """Patches column after column, for documents whose grids have height and width exchanged."""

    def advance(self, grids: Grids) -> IntArray:
        return self.right.advance(_with_sides_exchanged(grids))

    def place(self, grids: Grids, cursor: IntArray) -> Placement:
        placement = self.right.place(_with_sides_exchanged(grids), cursor)
        pieces = placement.pieces
        if pieces is not None:
            pieces = replace(pieces, height=pieces.width, width=pieces.height)
        return replace(placement, step_row=placement.step_col, step_col=placement.step_row, pieces=pieces)


def _with_sides_exchanged(grids: Grids) -> Grids:
    return replace(grids, extents=grids.extents[[0, 2, 1]])


def cut_fractions(case: Case) -> Iterator[Guess]:
    """Integers in place of fractions."""
    if not case.positions.fractional:
        return
    yield Guess("fractions are cut off, as .long() and .astype(int) do", np.trunc(case.want))
    yield Guess("fractions are rounded down, as floor and // do", np.floor(case.want))
    yield Guess("fractions are rounded to integers, halves to the even one, as round does", np.rint(case.want))
    yield Guess("fractions are rounded to integers, halves up", np.floor(case.want + 0.5))
    yield Guess("fractions are rounded up", np.ceil(case.want))
    yield Guess("ids are twice as large, as if to have no halves", 2 * case.want)


def low_precision(case: Case) -> Iterator[Guess]:
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


def narrow_integers(case: Case) -> Iterator[Guess]:
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


def token_index(case: Case) -> Iterator[Guess]:
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


def another_start(case: Case) -> Iterator[Guess]:
    """Documents that begin at another id."""
    if case.offset is None or not case.offset.is_integer() or abs(case.offset) > 2 * INT32_MAX:
        return  # no start is so far from another
    first = case.start + int(case.offset)
    ids = case.placed(start=first)
    if case.segments is None:
        ids = case.want + case.offset
    if ids is not None:
        document = case.document[case.first]
        yield Guess(f"documents start at {first[document]}, not at {case.start[document]}", ids)


def one_token_off(case: Case) -> Iterator[Guess]:
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


def constant(case: Case) -> Iterator[Guess]:
    """From the first difference to the end of the document, the same too much or too little."""
    if not case.offset:
        return
    amount, way = f"{abs(case.offset):g}", "large" if case.offset > 0 else "small"
    words = f"from the first difference to the end of the document, ids are {amount} too {way}"
    yield Guess(words, np.where(case.late, case.want + case.offset, case.want))


def multiplied(case: Case) -> Iterator[Guess]:
    """Ids times a whole number, or over one."""
    got, want = case.got[:, case.first], case.want[:, case.first]
    times = got[want != 0] / want[want != 0]
    if times.size and (times == times[0]).all() and times[0].is_integer() and times[0] > 1:
        yield Guess(f"ids are {times[0]:g} times as large as they should be", times[0] * case.want)
    for over in (2, 3, 4):
        yield Guess(f"ids are divided by {over}", case.want / over)
        yield Guess(f"ids are divided by {over}, and rounded down", np.floor(case.want / over))


def constant_in_runs(case: Case) -> Iterator[Guess]:
    """Runs of tokens, with right ones between, the same too much or too little, as drafts in the windows of steps."""
    begins = case.wrong & ~np.concatenate([[False], case.wrong[:-1]])
    runs = int(begins.sum())
    if not case.offset or runs < 2:
        return
    amount, way = f"{abs(case.offset):g}", "large" if case.offset > 0 else "small"
    words = f"{runs} runs of tokens have ids that are {amount} too {way}, and tokens between them are right"
    yield Guess(words, np.where(case.wrong, case.want + case.offset, case.want), evidence=2 * runs)


def index_among_right_ids(case: Case) -> Iterator[Guess]:
    """Indexes of tokens among ids that are right: a delta lost for some, or keys in the slots of their ids."""
    index = np.where(case.wrong, case.index, case.want)
    if (case.got[:, case.first] == case.index[case.first]).all():
        words = "tokens among others that are right have their index as id: their delta is forgotten"
        runs = int((case.wrong & ~np.concatenate([[False], case.wrong[:-1]])).sum())
        yield Guess(f"{words}, or keys lie in the slots of their ids", index, evidence=2 * runs)


def permuted(case: Case) -> Iterator[Guess]:
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


def axis_repeated(case: Case) -> Iterator[Guess]:
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


def sides_exchanged(case: Case) -> Iterator[Guess]:
    """Grids whose height was taken for their width."""
    exchanged = _exchanged(case)
    ids = None if exchanged is None else case.placed(segments=exchanged)
    if ids is not None:
        yield Guess("height and width of grids are exchanged", ids)


def column_major(case: Case) -> Iterator[Guess]:
    """Patches one column after the other."""
    exchanged = _exchanged(case)
    if exchanged is None or case.scheme is None:
        return
    ids = case.placed(ColumnMajor(case.scheme), exchanged)
    if ids is not None:
        yield Guess("patches are in column-major order: column after column, not row after row", ids)


def _exchanged(case: Case) -> SegmentTable | None:
    """The documents with height and width of their grids exchanged; none if rows end in separators."""
    segments = case.segments
    if segments is None or segments.row_separator is not None:
        return None
    extents = segments.extents.copy()
    grid = np.isin(segments.kind, (GRID, CLIP, THUMBNAIL, TILE))
    extents[1:, grid] = segments.extents[:0:-1, grid]
    return replace(segments, extents=extents)


_MERGES = (2, 3, 4)

_VARIANTS: tuple[Scheme, ...] = (
    *(scheme() for scheme in SCHEMES.values()),
    *(scheme(axes=3) for scheme in (RopeTie, RopeTieFractional, RopeTieV2, RopeTieLcm)),
    RopeTieV2(rounding="floor"),
    *(Grid2D(order="merged", spatial_merge_size=side) for side in _MERGES),
    *(MRopeTransformers(tokens_per_second=rate) for rate in (1, 2, 4, 25)),
    *(MRopeQwen25(tokens_per_second=rate) for rate in (1, 4, 25)),
)

_ADVANCES = {
    "text after a grid goes on at the token's index, one id per patch: the delta is forgotten": AdvancesByTokens,
    "text after a grid goes on at the maximum of all ids plus one": AdvancesToMaximum,
    "text after a grid goes on after its longest side, as in M-RoPE": AdvancesBySide,
    "text after a grid goes on as if the grid took one id": AdvancesByOne,
}


def other_scheme(case: Case) -> Iterator[Guess]:
    """The ids of another scheme, or of the same with other parameters."""
    for scheme in sorted(_VARIANTS, key=lambda scheme: type(scheme) is not type(case.scheme)):
        ids = None if scheme == case.scheme else case.placed(scheme)
        if ids is not None:
            yield Guess(f"these are the ids of {scheme.label}", ids)


def other_times(case: Case) -> Iterator[Guess]:
    """Frames of videos at other times than theirs."""
    seconds = None if case.segments is None else case.segments.seconds_per_frame
    if case.segments is None or seconds is None:
        return
    for words, times in _times(seconds):
        ids = case.placed(segments=replace(case.segments, seconds_per_frame=times))
        if ids is not None:
            yield Guess(words, ids)


def wrong_advance(case: Case) -> Iterator[Guess]:
    """Grids in their place, and what comes after them not."""
    for words, mistake in _ADVANCES.items():
        ids = None if case.scheme is None else case.placed(mistake(case.scheme))
        if ids is not None:
            yield Guess(words, ids)


def unmerged(case: Case) -> Iterator[Guess]:
    """Grids of patches before merging, while tokens are those after it."""
    for side, whole in product(_MERGES, (False, True)):
        ids = None if case.scheme is None else case.placed(Unmerged(case.scheme, side, whole))
        what = "strides and ids after a grid" if whole else "ids after a grid"
        if ids is not None:
            yield Guess(f"spatial merging is forgotten: {what} are those of {side}x{side} times the patches", ids)


def _times(seconds: IntArray) -> Iterator[tuple[str, IntArray | None]]:
    """Mistakes about (2, segments) seconds per frame, and what they make of them; where none is known, none is made."""
    known = seconds[0] > 0
    yield "seconds_per_frame is forgotten: frames are one second apart", None
    yield "frames per second are taken for seconds per frame", np.where(known, seconds[::-1], seconds)
    halves = seconds * np.where(known, [[1], [2]], 1)
    if (halves <= INT32_MAX).all():
        yield "times are half of what they should be: temporal_patch_size is forgotten", halves


def other_side(case: Case) -> Iterator[Guess]:
    """Ids padded on the other side than token ids are."""
    if case.column is None:
        return
    lengths = case.positions.lengths
    before = (case.column - case.index)[case.positions.documents[FIRST_TOKEN]]
    left = np.where(before > 0, 0, case.length - lengths)
    index = case.column - left[case.document]
    inside = (index >= 0) & (index < lengths[case.document])
    ids = case.want[:, np.where(inside, case.begin + index, 0)]
    for outside in (0, 1):  # what padding has in most batches
        yield Guess("ids are padded on the other side than the tokens", np.where(inside, ids, outside))


def padding_counted(case: Case) -> Iterator[Guess]:
    """Ids that began with the padding before the first token."""
    if case.column is None:
        return
    ids = case.placed(start=case.start + (case.column - case.index)[case.positions.documents[FIRST_TOKEN]])
    if ids is not None:
        yield Guess("left padding is counted: ids begin with it, not with the first real token", ids)


def not_reset(case: Case) -> Iterator[Guess]:
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


def reset_inside(case: Case) -> Iterator[Guess]:
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


def first_chunk_again(case: Case) -> Iterator[Guess]:
    """The ids of a document's beginning once more, for every chunk or for all that follows a chunk."""
    chunk = int(case.index[case.first])
    if chunk < 2:
        return  # one token is a shift
    words = f"from token {chunk} on ids are those of the document's beginning again"
    for index in (case.index % chunk, np.where(case.late, case.index - chunk, case.index)):
        yield Guess(words, case.want[:, case.begin + np.maximum(index, 0)])


def delta_forgotten(case: Case) -> Iterator[Guess]:
    """Token indexes from the first difference on, as when decoding goes on at the number of tokens."""
    delta = case.want[0, case.first] - case.counted[case.first]
    words = f"from the first difference on ids are the token's index: the delta {delta:g} is forgotten"
    yield Guess(words, np.where(case.late, case.counted, case.want))


def delta_of_another(case: Case) -> Iterator[Guess]:
    """Token index plus the delta of another document, from the first difference on."""
    if case.deltas is None:
        return
    used = case.got[0, case.first] - case.counted[case.first]
    own = int(case.document[case.first])
    for other in np.flatnonzero(case.deltas == used)[:1].tolist():
        words = f"the delta {used:g} of documents[{other}] is used for documents[{own}], from the first difference on"
        yield Guess(words, np.where(case.late, case.counted + used, case.want))


@dataclass(frozen=True)
class Suspect:
    """A kind of mistake.

    Args:
        guesses: the ids that it gives in a case, one guess for each of its forms.
        remedy: what to do about it, in words that follow "To do: ".
    """

    guesses: Callable[[Case], Iterator[Guess]]
    remedy: str


SUSPECTS = (
    Suspect(cut_fractions, "keep ids as float64, or as exact integers in the table; never .long() them"),
    Suspect(low_precision, "keep ids out of casts to low precision: in int32, in float64, or in the table"),
    Suspect(narrow_integers, "hold ids in int32 or int64"),
    Suspect(token_index, "give the model ids with all axes, as positions.dense() has them, in place of arange"),
    Suspect(permuted, "order the axes as the scheme does: (row, col) or (frame, row, col)"),
    Suspect(axis_repeated, "give each pair the axis that the config says, in the kernel as in the reference"),
    Suspect(sides_exchanged, "give grids as (frames, height, width), the rows of patches before the columns"),
    Suspect(column_major, "flatten patches row after row, the column fastest"),
    Suspect(another_start, "begin at the same id as the scheme, or tell it yours as start"),
    Suspect(
        other_times,
        "give what the model's processor has: second_per_grid_ts, frames of one patch over frames per second",
    ),
    Suspect(other_scheme, "compute ids by the scheme that the model was trained with"),
    Suspect(other_side, "pad ids on the side where the token ids are padded"),
    Suspect(padding_counted, "begin at the first real token: left padding takes no ids"),
    Suspect(not_reset, "begin every packed document at start, from cu_seqlens"),
    Suspect(reset_inside, "give one document as one, or the documents as several"),
    Suspect(first_chunk_again, "cut the ids of the whole prompt to the chunk, as positions.slice(start, stop) does"),
    Suspect(wrong_advance, "go on after a grid at the scheme's cursor: positions.next_positions has it"),
    Suspect(unmerged, "divide height and width by the merge size before ids are computed"),
    Suspect(delta_forgotten, "add the document's delta to the token index, or take ids from positions.decode"),
    Suspect(delta_of_another, "keep deltas with their documents, never on the model: positions.deltas"),
    Suspect(one_token_off, "shift labels and not position ids: id and token have the same index"),
    Suspect(constant, "look at what stands before the first difference: it takes another number of ids"),
    Suspect(multiplied, "count each token once, as the scheme does, and leave factors to the rotation"),
    Suspect(constant_in_runs, "place the tokens of a draft after the one before them, as positions.decode does"),
    Suspect(
        index_among_right_ids,
        "add the delta to the index of every token; take slots of a cache from the index, since ids are for rotations",
    ),
)
"""In the order in which they are tried; casts first, since few bits make the ids of all other mistakes alike."""
