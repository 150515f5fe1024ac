"""Pictures of placed tables: the documents of one table below each other, or several tables side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import (
    COLOURS,
    FAINT,
    INK,
    Style,
    canvas,
    in_axes,
    picture_path,
    picture_title,
    quiet_axes,
)
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN, NEXT_POSITION
from mmpos.segments.kinds import AUDIO_TOKEN, CLIP, GRID, NOUNS, PATCH
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, counted, instance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from mmpos.analysis.plot.picture import Picture


_MAX_DOCUMENTS, _MAX_TOKENS = 8, 2**20
# Inches: a square for the ids with the legend to its right; 8 in all, 800 pixels where a page shows it.
_WIDTH, _SIDE, _LEFT, _BOTTOM, _TOP = 8.0, 4.7, 0.75, 0.6, 0.5


def plot_positions(
    positions: PositionTable | Sequence[PositionTable],
    path: str | PathLike[str] | None = None,
    title: str | None = None,
    *,
    segments: SegmentTable | None = None,
    pictures: Sequence[npt.NDArray[np.uint8]] = (),
    same_scale: bool = True,
) -> Picture:
    """Draw the ids of every document.

    Schemes of one axis: ids over token indexes. All others: row ids over column ids. The same tables give the
    same bytes.

    Args:
        positions: one table of up to 8 documents, drawn one below the other; or several, such as one batch
            under several schemes, whose documents are drawn side by side, 9 in all. Up to 1,048,576 tokens.
        path: where to write; ends in .png, .svg or .pdf. None writes nothing.
        title: above the first document, or above all panels; None names the scheme and counts the tokens.
        segments: the documents of every table, to tell audio from text and to draw a clip, a thumbnail, a tile and a
            video each as one; None draws audio as text, and every run of patches as an image.
        pictures: (height, width, 3) pixels to lay under the first images of one table, in order.
        same_scale: whether panels of one kind, side by side, show the same ids.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: no document, segments of others, pictures under several tables, or another suffix.
        LimitExceededError: more documents or tokens than fit a picture.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target, title = picture_path(path), picture_title(title)
    if isinstance(positions, PositionTable) or not isinstance(positions, Sequence):
        _check_table(positions, "positions")
        return _plot_one(positions, segments, target, title, pictures)
    for i, table in enumerate(positions):
        _check_table(table, f"positions[{i}]")
    panels = sum(table.num_documents for table in positions)
    if not panels:
        raise InvalidInputError("positions: got no table, want at least one to draw")
    if panels > MAX_PANELS:
        raise LimitExceededError(f"positions: got {counted(panels, 'document')} in all, want at most {MAX_PANELS}")
    if pictures:
        raise InvalidInputError(f"pictures: got {len(pictures)} beside several tables, want none")
    return draw_panels(positions, segments, target, title, same_scale)


def _plot_one(
    positions: PositionTable,
    segments: SegmentTable | None,
    target: Path | None,
    title: str | None,
    pictures: Sequence[npt.NDArray[np.uint8]],
) -> Picture:
    """Every document with a legend of its own to the right."""
    count, height = positions.num_documents, _TOP + _SIDE + _BOTTOM
    remaining = iter(pictures)
    with canvas(target, _WIDTH, height * count) as figure:
        for d in range(count):
            bottom = (count - 1 - d) * height + _BOTTOM
            box = (_LEFT / _WIDTH, bottom / (height * count), _SIDE / _WIDTH, _SIDE / (height * count))
            heading = f"{positions.scheme}: {counted(positions.lengths[d], 'token', ',')}"
            heading = f"document {d + 1}, {heading}" if count > 1 else heading
            axes, plane = figure.add_axes(box), read_plane(positions, d, segments)
            draw_plane(axes, plane, _SIDE, plane.bounds, remaining)
            axes.set_title(title if title and d == 0 else heading, loc="left", fontsize=12, pad=10)
            if positions.axes == 3:
                axes.plot([], [], " ", label="(frame ids are not drawn)")
            _legend(axes)
    return figure


def _legend(axes: Axes) -> None:
    place: Style = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
    axes.legend(**place, frameon=False, fontsize=9, labelspacing=0.9, handletextpad=0.6)


def _check_table(positions: PositionTable, name: str) -> None:
    instance(name, positions, PositionTable, "mmpos.place")
    if positions.num_documents == 0:
        raise InvalidInputError(f"{name}: got no document, want at least one to draw")
    if positions.num_documents > _MAX_DOCUMENTS:
        raise LimitExceededError(f"{name}: got {positions.num_documents} documents, want at most {_MAX_DOCUMENTS}")
    if positions.num_tokens > _MAX_TOKENS:
        raise LimitExceededError(f"{name}: got {counted(positions.num_tokens, 'token')}, want at most {_MAX_TOKENS}")


MAX_PANELS = 9
_PANEL_NAMED = 4
_LINE = 6  # entries of a legend that fit side by side
# Inches: of the page, around a panel, and below all.
_PANEL_LEFT, _RIGHT, _ABOVE, _BELOW, _LEGEND, _TITLE = 0.6, 0.2, 0.68, 0.5, 0.38, 0.4


def draw_panels(
    tables: Sequence[PositionTable],
    segments: SegmentTable | None,
    target: Path | None,
    title: str | None,
    same_scale: bool,
) -> Picture:
    """Draw every document of every table: those of one document stand together.

    Args:
        tables: 1 to 9 documents in all.
        segments: the documents of every table, or None.
        target: of ``picture_path``.
        title: above all panels.
        same_scale: whether panels with the same names of axes show the same ids.
    """
    most = max(table.num_documents for table in tables)
    chosen = [(table, d) for d in range(most) for table in tables if d < table.num_documents]
    planes = [read_plane(table, d, segments) for table, d in chosen]
    columns = min(len(planes), 2 if len(planes) in (2, 4) else 3)
    rows = -(-len(planes) // columns)
    width = _WIDTH / max(columns, 2)
    side = width - _PANEL_LEFT - _RIGHT
    row, top = _ABOVE + side + _BELOW, _TITLE if title else 0.0
    handles = _shared_handles(planes, frames=any(table.axes == 3 for table in tables))
    lines = -(-len(handles) // _LINE)
    height = top + rows * row + lines * _LEGEND
    with canvas(target, width * max(columns, 2), height) as figure:
        for i, ((table, d), plane) in enumerate(zip(chosen, planes, strict=True)):
            left, bottom = i % columns * width + _PANEL_LEFT, height - top - (i // columns + 1) * row + _BELOW
            axes = figure.add_axes((left / _WIDTH, bottom / height, side / _WIDTH, side / height))
            draw_plane(axes, plane, side, _shared(plane, planes) if same_scale else plane.bounds)
            name = f"document {d + 1}, {table.scheme}" if most > 1 else table.scheme
            _head(axes, name, plane)
        if title:
            figure.text(0.12 / _WIDTH, 1 - 0.3 / height, title, fontsize=13, color=INK)
        place: Style = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.03 / height), "borderaxespad": 0.4}
        spaced: Style = {"fontsize": 9, "columnspacing": 1.2, "handletextpad": 0.5, **place}
        figure.legend(handles=handles, ncols=-(-len(handles) // lines), frameon=False, **spaced)
    return figure


def _shared(plane: Plane, planes: Sequence[Plane]) -> Points:
    """(2, 2) bounds of all planes that have the same names of axes."""
    bounds = np.array([other.bounds for other in planes if other.names == plane.names])
    return np.stack([bounds[:, :, 0].min(axis=0), bounds[:, :, 1].max(axis=0)], axis=1)


def _head(axes: Axes, name: str, plane: Plane) -> None:
    """The name, and below it in small what the legend of a large picture tells: gaps and next position."""
    notes = [_gaps(plane), f"next position {plane.end[1, 0]:,.0f}" if plane.end.size else "no next position"]
    notes = [note for note in notes if note]
    place: Style = {"transform": axes.transAxes, "va": "top"}
    _, name_lift = in_axes(axes, 0.56)
    _, notes_lift = in_axes(axes, 0.36)
    axes.text(0, 1 + name_lift, name, fontsize=11, color=INK, **place)
    axes.text(0, 1 + notes_lift, "\n".join(notes), fontsize=8.5, color="#555555", **place)
    for axis, words in ((axes.xaxis, plane.names[0]), (axes.yaxis, plane.names[1])):
        axis.set_label_text(words.partition(" (")[0], fontsize=9)
        axis.labelpad = 2
    axes.tick_params(labelsize=8.5)


def _gaps(plane: Plane) -> str:
    """The gaps of all images in a few words."""
    images = [image for image in plane.images if image.gaps]
    if len(images) > 1:
        equal = all(before == after for before, after in (image.gaps for image in images))
        return f"gaps {'equal' if equal else 'not equal'} on both sides"
    return images[0].gaps_in_words if images else ""


def _shared_handles(planes: Sequence[Plane], *, frames: bool) -> list[Line2D]:
    """The entries of the legend of all panels, at the foot of the page."""
    from matplotlib.lines import Line2D

    most = max((plane.images for plane in planes), key=len)
    dot: Style = {"linestyle": "", "marker": "o", "markersize": 5.5, "markeredgewidth": 0}
    handles = [Line2D([], [], color=INK, label="text", **dot)]
    if any(plane.audio.size for plane in planes):
        handles.append(Line2D([], [], color=INK, label="audio", linestyle="", **_HOLLOW))
    for i, image in enumerate(most[:_PANEL_NAMED]):
        name = f"{image.noun} {i + 1}" if len(most) > 1 else image.noun
        handles.append(Line2D([], [], label=name, **{**dot, **_dots(image, COLOURS[i])}))
    if any(image.square for plane in planes for image in plane.images):
        label = "from the text before to the text after"
        handles.append(Line2D([], [], color=FAINT, linestyle="--", linewidth=1, label=label))
    style: Style = {
        "markerfacecolor": "white",
        "markeredgecolor": INK,
        "markeredgewidth": 1.3,
        "markersize": 6,
    }
    handles.append(Line2D([], [], linestyle="", marker="D", label="next position", **style))
    if frames:
        handles.append(Line2D([], [], linestyle="", label="(frame ids are not drawn)"))
    return handles


_MAX_NAMED = 7
_HOLLOW: Style = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "markeredgewidth": 0.8}
_MELTED = 1.8  # points of the page between patches, below which points are drawn unevenly


def draw_plane(
    axes: Axes, plane: Plane, side: float, bounds: Points, pictures: Iterator[npt.NDArray[np.uint8]] | None = None
) -> None:
    """Draw text, then audio, images and the next position, each with its entry in the legend.

    Args:
        axes: of matplotlib; a square.
        plane: what to draw.
        side: of the square, in inches.
        bounds: (2, 2) least and greatest x, least and greatest y.
        pictures: (height, width, 3) pixels to lay under the next images, in order; None for none.
    """
    scale = _frame(axes, plane, side, bounds)
    if plane.text.size:
        size = float(np.clip(0.4 * scale, 2.4, 4))
        axes.plot(*plane.text, "o", color=INK, markersize=size, markeredgewidth=0, zorder=3)
        axes.plot([], [], "o", color=INK, markersize=4, label=f"text: {counted(plane.text.shape[1], 'token', ',')}")
    if plane.audio.size:
        style = {**_HOLLOW, "markersize": float(np.clip(0.5 * scale, 2.4, 4)), "linestyle": "", "color": INK}
        axes.plot(*plane.audio, zorder=3, **style)
        label = f"audio: {counted(plane.audio.shape[1], 'token', ',')}"
        axes.plot([], [], **{**style, "markersize": 4}, label=label)
    for i, image in enumerate(plane.images):
        colour = COLOURS[i % len(COLOURS)]
        covered = plane.diagonal and _underlay(axes, image, colour, next(pictures, None) if pictures else None)
        gap = image.spacing * scale
        edge = 0.6 if covered else 0.0  # white: points stand out from any picture
        note = _patches(axes, image, colour, 0.7 * gap if covered else gap, thin=plane.diagonal, edge=edge)
        if i < _MAX_NAMED:
            label = f"{image.noun} {i + 1}: {image.label}{note}"
            axes.plot([], [], "o", markersize=6, label=label, **_dots(image, colour))
    if len(plane.images) > _MAX_NAMED:
        axes.plot([], [], " ", label=f"and {counted(len(plane.images) - _MAX_NAMED, 'more image')}")
    if any(image.square for image in plane.images):
        axes.plot([], [], "--", color=FAINT, linewidth=1, label="from the text before\nto the text after")
    if plane.end.size:
        style = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        axes.plot(*plane.end, "D", zorder=4, clip_on=False, label=f"next position: {plane.end[1, 0]:,.0f}", **style)


def _frame(axes: Axes, plane: Plane, side: float, bounds: Points) -> float:
    """Limits and names of the axes; gives the points of the page per unit of x."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    margin = np.maximum(0.05 * (bounds[:, 1] - bounds[:, 0]), 0.8)
    (left, right), (low, high) = (bounds + np.stack([-margin, margin], axis=1)).tolist()
    axes.set_xlim(left, right)
    axes.set_ylim(*((high, low) if plane.diagonal else (low, high)))
    axes.set_xlabel(plane.names[0])
    axes.set_ylabel(plane.names[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8 if side > 4 else 5, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    quiet_axes(axes)
    if plane.diagonal:
        axes.axline((left, left), slope=1, color="#dddddd", linewidth=0.8, zorder=0.9)
    return side * 72 / float(right - left)


def _underlay(axes: Axes, image: Image, colour: str, picture: npt.NDArray[np.uint8] | None) -> bool:
    """The square between the texts around an image, and its picture; gives whether there is one."""
    if image.square:
        low, high = image.square
        style: Style = {"color": colour, "alpha": 0.7, "linewidth": 1, "zorder": 1.5}
        axes.plot([low, high, high, low, low], [low, low, high, high, low], "--", **style)
    if picture is None or not image.upright:
        return False
    axes.imshow(picture, extent=_extent(image), aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
    return True


def _patches(axes: Axes, image: Image, colour: str, gap: float, *, thin: bool, edge: float) -> str:
    """The points of an image, fewer where they would melt together; gives a note on that for the legend."""
    every = max(1, int(np.ceil(2 / gap))) if thin else 1
    # An image that is small on the page stays whole: a few points would show another size.
    every = every if 16 * every <= min(image.sides[:2]) else 1
    if every == 1 and gap < _MELTED and image.upright and image.noun != "thumbnail":
        _block(axes, image, colour)
        return ""
    points = image.points if every == 1 else image.thinned(every)
    size = float(np.clip(0.5 * gap * every, 0.9 if thin else 2.4, 5.5))
    style: Style = {"markersize": size + edge, "markeredgewidth": edge, "markeredgecolor": "white", "zorder": 2}
    if image.noun == "thumbnail":
        style = {"markersize": 1.6 * size, "zorder": 2.5}
    axes.plot(*points, "o", **{**style, **_dots(image, colour)})
    return f"\n(1 in {every} rows and columns)" if points.shape < image.points.shape else ""


def _dots(image: Image, colour: str) -> Style:
    """The style of the points of an image: rings for a thumbnail, at whose ids are patches of its tiles."""
    if image.noun != "thumbnail":
        return {"color": colour}
    return {"color": colour, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1}


def _block(axes: Axes, image: Image, colour: str) -> None:
    """An image whose points would melt together unevenly, as the rectangle of its patches."""
    left, right, bottom, top = _extent(image)
    axes.fill_between([left, right], [top, top], [bottom, bottom], color=colour, alpha=0.8, linewidth=0, zorder=2)


def _extent(image: Image) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of the patches of an upright image, half a step around their points."""
    half_x, half_y = float(image.column[0]) / 2, float(image.row[1]) / 2
    (left, top), (right, bottom) = image.points.min(axis=1).tolist(), image.points.max(axis=1).tolist()
    return left - half_x, right + half_x, bottom + half_y, top - half_y


Points = npt.NDArray[np.float64]  # (2, tokens): x right, y down

_COLUMN_ROW = ("column id", "row id (downwards, as in an image)")
_NAMES = {1: ("token", "position id"), 2: _COLUMN_ROW, 3: _COLUMN_ROW}


@dataclass(frozen=True, eq=False)
class Image:
    """The patches of one grid, clip, thumbnail or tile.

    Args:
        points: x and y of each token.
        sides: height and width in tokens, and the frames that are there.
        column: (dx, dy) from one column to the next, on average where they are not evenly spaced.
        row: (dx, dy) from one row to the next, likewise.
        square: the id of the text right before and of the text right after, if both lie on the diagonal.
        gaps: the distance from the one to the first patch and from the last patch to the other, (row, column).
        noun: "image", or "clip" for one with its sound, "thumbnail" and "tile".
    """

    points: Points
    sides: tuple[int, int, int]
    column: Points
    row: Points
    square: tuple[float, float] | None
    gaps: tuple[tuple[Fraction, ...], ...]
    noun: str = "image"

    @property
    def gaps_in_words(self) -> str:
        """The gaps, once if they are equal; nothing if there are none."""
        if not self.gaps:
            return ""
        before, after = (f"({', '.join(map(str, gap))})" for gap in self.gaps)
        return f"gap {before} on both sides" if before == after else f"gaps {before} and {after}"

    @property
    def label(self) -> str:
        """Its sides and its gaps, for a legend."""
        height, width, frames = self.sides
        sides = f"{frames}×{height}×{width}" if frames > 1 else f"{height}×{width}"
        gaps = self.gaps_in_words
        # The legend is a narrow column.
        gaps = gaps if len(gaps) <= 28 else gaps.replace(") ", ")\n")
        return f"{sides}\n{gaps}" if gaps else sides

    @property
    def spacing(self) -> float:
        """Least distance between two neighbours, in ids."""
        height, width, _ = self.sides
        steps = [np.hypot(*step) for step, side in ((self.row, height), (self.column, width)) if side > 1]
        return float(min([step for step in steps if step > 0], default=1.0))

    @property
    def upright(self) -> bool:
        """True where columns go right and rows go down, so that a picture can lie under the points."""
        return bool(self.column[0] > 0 and self.row[1] > 0 and self.column[1] == 0 and self.row[0] == 0)

    def thinned(self, every: int) -> Points:
        """Every n-th row and column, for grids too fine to draw; all points of an image cut in pieces."""
        height, width, frames = self.sides
        if self.points.shape[1] != frames * height * width:
            return self.points
        return self.points.reshape(2, frames, height, width)[:, :, ::every, ::every].reshape(2, -1)


@dataclass(frozen=True, eq=False)
class Plane:
    """One document.

    Args:
        names: of x and y.
        text: its points, those of markers too.
        audio: its points, where segments tell it from text.
        images: in order; a grid that a scheme cuts into pieces gives several, but with segments those of its own rows
            are one.
        end: (2, 1) where generation goes on, or (2, 0) if the scheme has no next position.
        diagonal: whether x and y are ids of one kind, so that text lies on the diagonal.
    """

    names: tuple[str, str]
    text: Points
    audio: Points
    images: tuple[Image, ...]
    end: Points
    diagonal: bool

    @property
    def bounds(self) -> Points:
        """(2, 2) least and greatest x, least and greatest y; the same for both on a diagonal plane."""
        points = np.concatenate([self.text, self.audio, *(image.points for image in self.images), self.end], axis=1)
        if not points.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])
        low, high = points.min(axis=1), points.max(axis=1)
        if self.diagonal:
            low[:], high[:] = low.min(), high.max()
        return np.stack([low, high], axis=1)


def read_plane(positions: PositionTable, document: int, segments: SegmentTable | None = None) -> Plane:
    """Take the plane of one document from a table, and what is audio or lies in several pieces from its segments."""
    first, length = int(positions.documents[FIRST_TOKEN, document]), int(positions.lengths[document])
    points = _points(positions.slice(first, first + length))
    next_position = int(positions.documents[NEXT_POSITION, document])
    resumable = positions.resumable[document]
    end = [length if positions.axes == 1 else next_position, next_position] if resumable else []
    end_point = np.array(end, np.float64).reshape(-1, 2).T
    ours = (positions.offset >= first) & (positions.offset < first + length)
    columns = [int(s) for s in np.flatnonzero(ours & ~positions.is_padding)]
    grid, lengths = positions.is_grid, positions.segment_lengths
    whole, types = (values[first : first + length] for values in _kinds(positions, segments))
    images = []
    written = ~(grid | positions.is_padding).repeat(lengths)[first : first + length] & (whole < 0)
    for k, s in enumerate(columns):
        a = int(positions.offset[s]) - first
        b = a + int(lengths[s])
        if segments is not None and whole[a] >= 0:
            if a == 0 or whole[a - 1] != whole[a]:
                images.append(_whole(segments, whole[a], points[:, (whole == whole[a]) & (types == PATCH)]))
        elif grid[s]:
            before = points[:, a - 1] if k and not grid[columns[k - 1]] else None
            after = points[:, b] if k + 1 < len(columns) and not grid[columns[k + 1]] else None
            if k + 1 == len(columns) and end:
                after = end_point[:, 0]
            images.append(_image(positions, s, points[:, a:b], before, after))
    names = _NAMES.get(positions.axes, ("id on axis 1", "id on axis 0 (downwards)"))
    sound = types == AUDIO_TOKEN
    text = (written & ~sound) | ((whole >= 0) & (types == 0))
    return Plane(names, points[:, text], points[:, sound], tuple(images), end_point, positions.axes > 1)


def _kinds(positions: PositionTable, segments: SegmentTable | None) -> tuple[IntArray, npt.NDArray[np.uint8]]:
    """Tell (tokens,) in which segment each lies if that is drawn as a whole, else -1, and of which type each is.

    Clips, thumbnails and tiles are drawn so, and grids that lie in pieces whose rows are theirs. Without segments
    nothing is, and all types are 0.
    """
    if segments is None:
        return np.full(positions.num_tokens, -1), np.zeros(positions.num_tokens, np.uint8)
    types = positions.token_types(instance("segments", segments, SegmentTable, "SegmentTable.from_documents"))
    lengths = segments.lengths
    piece = positions.offset.searchsorted(lengths.cumsum() - lengths, side="right") - 1
    rows = positions.width[piece] == segments.extents[2] + (
        0 if segments.row_separator is None else segments.row_separator
    )
    cut = (segments.kind == GRID) & (positions.segment_lengths[piece] < lengths) & rows
    whole = np.where(cut | (segments.kind >= CLIP), np.arange(lengths.size), -1)
    return whole.repeat(lengths), types


def _whole(segments: SegmentTable, segment: int, patches: Points) -> Image:
    """The patches of a segment, in rows and columns of its own."""
    frames, height, width = segments.extents[:, segment].tolist()
    frame = patches[:, : height * width].reshape(2, height, width)
    column = (frame[:, 0, -1] - frame[:, 0, 0]) / (width - 1) if width > 1 else np.array([1.0, 0.0])
    row = (frame[:, -1, 0] - frame[:, 0, 0]) / (height - 1) if height > 1 else np.array([0.0, 1.0])
    kind = int(segments.kind[segment])
    noun = "image" if kind == GRID else NOUNS[kind]
    return Image(patches, (height, width, frames), column, row, None, (), noun)


def _points(view: PositionTable) -> Points:
    if view.axes == 1:
        return np.concatenate([np.arange(view.num_tokens, dtype=np.float64)[None], view.dense(dtype=np.float64)])
    points: Points = view.dense(dtype=np.float64, axes=_drawn(view.axes))
    return points


def _drawn(axes: int) -> tuple[int, int]:
    """The axes that x and y are: column and row, or the first two of those that have no names."""
    return (2, 1) if axes == 3 else (1, 0)


def _image(positions: PositionTable, s: int, points: Points, before: Points | None, after: Points | None) -> Image:
    denominator = int(positions.denominator[s])
    height, width = int(positions.height[s]), int(positions.width[s])

    def step(part: IntArray, tokens: int) -> Points:
        values = part[:, s] / denominator
        return np.array([tokens, values[0]] if positions.axes == 1 else values[list(_drawn(positions.axes))])

    square: tuple[float, float] | None = None
    gaps: tuple[tuple[Fraction, ...], ...] = ()
    # A square has its corners on the diagonal; schemes that put text elsewhere have none.
    if positions.axes > 1 and before is not None and after is not None and _equal(before) and _equal(after):
        square = float(before[0]), float(after[0])
        gaps = tuple(
            tuple(Fraction(float(gap)).limit_denominator(denominator) for gap in sides[::-1])
            for sides in (points.min(axis=1) - before, after - points.max(axis=1))
        )
    frames = -(-points.shape[1] // (height * width))
    column, row = step(positions.step_col, 1), step(positions.step_row, width)
    return Image(points, (height, width, frames), column, row, square, gaps)


def _equal(point: Points) -> bool:
    return bool(point[0] == point[1])
