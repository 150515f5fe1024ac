"""The oracle of positions: plain loops over tokens with exact fractions, written from the formulas, not from mmpos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from math import ceil, floor, lcm, prod
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from mmpos import Grid, PositionTable, Scheme, SegmentTable, Text, place
from mmpos.schemes import (
    V2PE,
    Grid2D,
    MRopeQwen25,
    MRopeTransformers,
    RopeTie,
    RopeTieFractional,
    RopeTieLcm,
    RopeTieV2,
    TMRope,
    TMRopeQwen3,
    VideoRope,
    XDRope,
)
from mmpos.segments.kinds import Segment

Document = list[Text | Grid]
Id = tuple[Fraction | int, ...]

settled = settings(derandomize=True, deadline=None, max_examples=20)
"""Settings that draw the same examples in every run."""


class Placed(NamedTuple):
    """One position per token, and the next position if the scheme has one."""

    ids: list[Id]
    next_position: int | None


def place_document(document: Sequence[Text | Grid], scheme: str, start: int = 0, **params: Any) -> Placed:
    """Place one document token by token."""
    if scheme == "rows":
        return Placed(_rows(document, start), None)
    ids: list[Id] = []
    cursor = start
    axes = params.get("axes", _AXES[scheme])
    for i, part in enumerate(document):
        if isinstance(part, Text):
            ids += [_id(*[cursor + k] * axes) for k in range(part.length)]
            cursor += part.length if scheme != "grid-2d" else 0
        else:
            image = {"image": sum(isinstance(earlier, Grid) for earlier in document[:i])} if scheme == "xd-rope" else {}
            placed, cursor = _GRIDS[scheme](part, cursor, **params, **image)
            ids += placed
    if scheme == "grid-2d":
        return Placed(ids, None)
    if scheme == "mrope-transformers":
        return Placed(ids, int(max(max(position) for position in ids)) + 1)
    return Placed(ids, cursor)


def exact(positions: PositionTable) -> list[Id]:
    """Return the ids of a table, one tuple of fractions per token."""
    numerators, denominators = positions.rationals()
    return [
        tuple(Fraction(n, d) for n in column)
        for column, d in zip(numerators.T.tolist(), denominators.tolist(), strict=True)
    ]


def placed(document: Sequence[Segment], scheme: str | Scheme, start: int = 0, **options: Any) -> PositionTable:
    """Place one document with mmpos."""
    return place(SegmentTable.from_documents([document]), scheme, start, **options)


def fields(segments: SegmentTable) -> dict[str, Any]:
    """Return the contents of a segment table in a form that == compares."""
    names = ["kind", "extents", "segment_offsets", "seconds_per_frame", "row_separator", "extra_tokens"]
    names += ["first_frame"] * (segments.first_frame is not None)
    arrays = {name: getattr(segments, name) for name in names}
    return {name: None if array is None else array.tolist() for name, array in arrays.items()}


# Grids, scheme by scheme: the ids of all tokens and the next cursor.

Grown = tuple[list[Id], int]


def _id(*values: Fraction | int) -> Id:
    return tuple(map(Fraction, values))


def _raster(grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Yield the zero-based frame, row and column of every token; a row separator counts as one more column."""
    for t in range(grid.frames):
        for i in range(grid.height):
            for j in range(grid.width + int(grid.row_separator)):
                yield t, i, j


_CONSUMED: dict[str, Callable[[Sequence[int]], int]] = {
    "rope-tie": lambda n: prod(m + 1 for m in n) - 1,
    "rope-tie-fractional": prod,
    "rope-tie-v2": prod,
    "rope-tie-lcm": lambda n: lcm(*(m + 1 for m in n)) - 1,
}
_STRIDE: dict[str, Callable[[Sequence[int], int], Fraction | int]] = {
    "rope-tie": lambda n, a: prod(m + 1 for b, m in enumerate(n) if b != a),
    "rope-tie-fractional": lambda n, a: Fraction(prod(n) + 1, n[a] + 1),
    "rope-tie-v2": lambda n, a: 1,
    "rope-tie-lcm": lambda n, a: lcm(*(m + 1 for m in n)) // (n[a] + 1),
}


def _tie(name: str) -> Callable[..., Grown]:
    def place_grid(grid: Grid, cursor: int, axes: int = 2, rounding: str | None = None) -> Grown:
        sides = [grid.frames, grid.height, grid.width][3 - axes :]
        last = cursor - 1
        following = last + _CONSUMED[name](sides) + 1
        ids = []
        for raster in _raster(grid):
            position = [
                Fraction(last + following, 2) + _STRIDE[name](sides, a) * (i + 1 - Fraction(sides[a] + 1, 2))
                for a, i in enumerate(raster[3 - axes :])
            ]
            ids.append(_id(*(map(floor, position) if rounding == "floor" else position)))
        return ids, following

    return place_grid


def _flatten(grid: Grid, cursor: int) -> Grown:
    ids = [_id(cursor + k) for k, _ in enumerate(_raster(grid))]
    return ids, cursor + len(ids)


def _v2pe(grid: Grid, cursor: int, stride: int = 64) -> Grown:
    position = Fraction(cursor - 1)
    ids = []
    for _ in _raster(grid):
        position += Fraction(stride, 256)
        ids.append(_id(position))
    return ids, ceil(position) + 1


def _naive_2d(grid: Grid, cursor: int) -> Grown:
    last = cursor - 1
    ids = [_id(last + i + 1, last + j + 1) for _, i, j in _raster(grid)]
    return ids, last + max(grid.height, grid.width) + 1


def _grid_2d(
    grid: Grid, cursor: int, order: str = "raster", spatial_merge_size: int = 1, axes: int = 2, first: int = 0
) -> Grown:
    side = spatial_merge_size if order == "merged" else 1
    ids = []
    for frame in range(grid.frames):
        for top in range(0, grid.height, side if order == "merged" else 1):
            for left in range(0, grid.width, side):
                for i in range(top, top + side):
                    for j in range(left, left + side):
                        ids.append(_id(*[cursor + first + index for index in (frame, i, j)][-axes:]))
    return ids, cursor


def _mrope(grid: Grid, cursor: int) -> Grown:
    ids = [_id(cursor + t, cursor + i, cursor + j) for t, i, j in _raster(grid)]
    return ids, cursor + max(grid.frames, grid.height, grid.width + int(grid.row_separator))


def _mrope_canvas(grid: Grid, cursor: int) -> Grown:
    ids, following = _mrope(grid, cursor)
    return ids, following + 1


def _mrope_transformers(grid: Grid, cursor: int, tokens_per_second: int | None = None) -> Grown:
    step = Fraction(1)
    if tokens_per_second is not None:
        step = tokens_per_second * Fraction(grid.seconds_per_frame or 0)
    ids = [_id(cursor + floor(t * step), cursor + i, cursor + j) for t, i, j in _raster(grid)]
    return ids, cursor + max(grid.height, grid.width)


def _mrope_qwen25(grid: Grid, cursor: int, tokens_per_second: int | Fraction = 2) -> Grown:
    step = tokens_per_second * Fraction(grid.seconds_per_frame or 0)
    ids = [_id(cursor + floor(t * step), cursor + i, cursor + j) for t, i, j in _raster(grid)]
    return ids, int(max(max(position) for position in ids)) + 1


def _tmrope(grid: Grid, cursor: int, tokens_per_second: int | Fraction = 25, engine: str = "serving") -> Grown:
    return _mrope_qwen25(grid, cursor, tokens_per_second)


def _mrope_interleave_reset(grid: Grid, cursor: int) -> Grown:
    ids = [_id(cursor + t, i, j) for t, i, j in _raster(grid)]
    return ids, cursor + 1 + max(grid.frames - 1, grid.height - 1, grid.width - 1)


def _videorope(grid: Grid, cursor: int, delta: int = 2) -> Grown:
    up, left = (grid.height - 1) // 2, (grid.width - 1) // 2
    ids = [
        _id(cursor + delta * t, cursor + delta * t + i - up, cursor + delta * t + j - left) for t, i, j in _raster(grid)
    ]
    return ids, int(ids[-1][0]) + 1


def _vrope(grid: Grid, cursor: int) -> Grown:
    bottom, right = grid.height - 1, grid.width - 1
    span = grid.height + grid.width - 1
    ids = []
    for t, i, j in _raster(grid):
        corners = (i + j, i + right - j, bottom - i + j, bottom - i + right - j)
        ids.append(_id(*(cursor + t * span + corner for corner in corners)))
    return ids, cursor + grid.frames * span


def _xd_rope(grid: Grid, cursor: int, image: int, axes: int = 4, first_image: int = 0) -> Grown:
    places = range(cursor, cursor + grid.height * (grid.width + int(grid.row_separator)))
    numbers = [(j, i, first_image + image) for _, i, j in _raster(grid)]
    return [_id(*[place] * (axes - 3), *last) for place, last in zip(places, numbers, strict=True)], places.stop


def _rows(document: Sequence[Text | Grid], start: int) -> list[Id]:
    ids = []
    line, column = start, start
    for part in document:
        if isinstance(part, Text):
            for _ in range(part.length):
                ids.append(_id(line, column))
                column += 1
            continue
        if column > start:
            line, column = line + 1, start
        ids += [_id(line + i, start + j) for _, i, j in _raster(part)]
        line += part.height
    return ids


_GRIDS: dict[str, Callable[..., Grown]] = {
    **{name: _tie(name) for name in _CONSUMED},
    "flatten": _flatten,
    "v2pe": _v2pe,
    "naive-2d": _naive_2d,
    "grid-2d": _grid_2d,
    "mrope": _mrope,
    "mrope-qwen3": _mrope,
    "mrope-transformers": _mrope_transformers,
    "mrope-qwen2.5": _mrope_qwen25,
    "mrope-interleave-reset": _mrope_interleave_reset,
    "mrope-canvas": _mrope_canvas,
    "tmrope": _tmrope,
    "tmrope-qwen3": _tmrope,
    "videorope": _videorope,
    "vrope": _vrope,
    "xd-rope": _xd_rope,
}
_AXES = {
    **dict.fromkeys(_GRIDS, 3),
    **dict.fromkeys((*_CONSUMED, "naive-2d", "grid-2d"), 2),
    "flatten": 1,
    "v2pe": 1,
    "vrope": 4,
    "xd-rope": 4,
}


# Every scheme with its parameters, and random documents that it can place.


class Case(NamedTuple):
    """A scheme as the caller writes it, its name and parameters in the oracle, and what its documents may contain."""

    scheme: str | Scheme
    name: str
    params: dict[str, Any]
    frames: bool = True
    separators: bool = False
    text: bool = True
    adjacent: bool = True
    resumable: bool = True
    side: int = 1

    @property
    def label(self) -> str:
        """The id of the test."""
        return "-".join([self.name, *(f"{key}={value}".replace("/", "_") for key, value in self.params.items())])


def _tie_case(scheme: str | Scheme, name: str, **params: Any) -> Case:
    return Case(scheme, name, params, frames=params.get("axes") == 3, separators=True, adjacent=False)


_MERGED: dict[str, Any] = {"order": "merged", "spatial_merge_size": 2}
CASES = (
    _tie_case("rope-tie", "rope-tie"),
    _tie_case(RopeTie(axes=3), "rope-tie", axes=3),
    _tie_case("rope-tie-fractional", "rope-tie-fractional"),
    _tie_case(RopeTieFractional(axes=3), "rope-tie-fractional", axes=3),
    _tie_case("rope-tie-lcm", "rope-tie-lcm"),
    _tie_case(RopeTieLcm(axes=3), "rope-tie-lcm", axes=3),
    _tie_case("rope-tie-v2", "rope-tie-v2"),
    _tie_case(RopeTieV2(axes=3), "rope-tie-v2", axes=3),
    _tie_case(RopeTieV2(rounding="floor"), "rope-tie-v2", rounding="floor"),
    _tie_case(RopeTieV2(axes=3, rounding="floor"), "rope-tie-v2", axes=3, rounding="floor"),
    Case("flatten", "flatten", {}, separators=True),
    Case("v2pe", "v2pe", {}),
    Case(V2PE(stride=48), "v2pe", {"stride": 48}),
    Case(V2PE(stride=256), "v2pe", {"stride": 256}),
    Case("rows", "rows", {}, frames=False, resumable=False),
    Case("naive-2d", "naive-2d", {}, frames=False, separators=True),
    Case("grid-2d", "grid-2d", {}, text=False, resumable=False),
    Case(Grid2D(**_MERGED), "grid-2d", _MERGED, text=False, resumable=False, side=2),
    Case(Grid2D(axes=3, **_MERGED), "grid-2d", {**_MERGED, "axes": 3}, text=False, resumable=False, side=2),
    Case(Grid2D(axes=3, first=1), "grid-2d", {"axes": 3, "first": 1}, text=False, resumable=False),
    Case("mrope", "mrope", {}),
    Case("mrope-qwen3", "mrope-qwen3", {}, frames=False, separators=True),
    Case("mrope-transformers", "mrope-transformers", {}),
    Case(MRopeTransformers(tokens_per_second=3), "mrope-transformers", {"tokens_per_second": 3}),
    Case("mrope-qwen2.5", "mrope-qwen2.5", {}),
    Case(MRopeQwen25(tokens_per_second=Fraction(7, 3)), "mrope-qwen2.5", {"tokens_per_second": Fraction(7, 3)}),
    Case("mrope-interleave-reset", "mrope-interleave-reset", {}),
    Case("mrope-canvas", "mrope-canvas", {}, frames=False),
    Case("tmrope", "tmrope", {}),
    Case(TMRope(tokens_per_second=Fraction(7, 3)), "tmrope", {"tokens_per_second": Fraction(7, 3)}),
    Case(TMRopeQwen3(engine="serving"), "tmrope-qwen3", {"tokens_per_second": 13, "engine": "serving"}),
    Case("videorope", "videorope", {}),
    Case(VideoRope(delta=1), "videorope", {"delta": 1}),
    Case("vrope", "vrope", {}),
    Case(XDRope(), "xd-rope", {}, frames=False, separators=True),
    Case(XDRope(axes=3, first_image=2), "xd-rope", {"axes": 3, "first_image": 2}, frames=False, separators=True),
)
RESUMABLE = tuple(case for case in CASES if case.resumable)


SECONDS: tuple[Fraction | None, ...] = (None, *(Fraction(n, 12) for n in (3, 4, 6, 10, 12, 14, 20, 32, 48)))


@cache
def _every_grid(frames: int, separators: bool, side: int, timed: bool) -> st.SearchStrategy[Grid]:
    """Draw a grid in a single draw, since these tests spend most of their time on draws."""
    sides = range(side, 4 * side + 1, side)
    choices = product(sides, sides, range(1, frames + 1), (False, True)[: 1 + separators], SECONDS)
    grids = [Grid(h, w, frames=t, row_separator=rows, seconds_per_frame=seconds) for h, w, t, rows, seconds in choices]
    return st.sampled_from([grid for grid in grids if grid.seconds_per_frame or grid.frames == 1 or not timed])


def grids(case: Case) -> st.SearchStrategy[Grid]:
    """Draw grids that the scheme can place."""
    timed = "tokens_per_second" in case.params or case.name in ("mrope-qwen2.5", "tmrope")
    return _every_grid(3 if case.frames else 1, case.separators, case.side, timed)


def documents(case: Case) -> st.SearchStrategy[Document]:
    """Draw documents of text and grids, with a text token between grids where the scheme requires one."""
    parts = grids(case) | st.sampled_from([Text(1), Text(2), Text(3), Text(4)]) if case.text else grids(case)
    drawn = st.lists(parts, min_size=1, max_size=5)
    return drawn if case.adjacent else drawn.map(separated)


def separated(parts: Document) -> Document:
    """Insert a text token between adjacent grids."""
    apart = parts[:1]
    for before, part in pairwise(parts):
        apart += [Text(1), part] if isinstance(before, Grid) and isinstance(part, Grid) else [part]
    return apart


def batches(case: Case, min_size: int = 0) -> st.SearchStrategy[list[Document]]:
    """Draw a few documents."""
    return st.lists(documents(case), min_size=min_size, max_size=3)
