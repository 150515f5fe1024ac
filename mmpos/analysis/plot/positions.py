"""Pictures of placed tables: a panel for every document under every scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, Style, canvas, picture_path, picture_title, quiet_axes
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN, NEXT_POSITION
from mmpos.segments.kinds import AUDIO_TOKEN, CLIP, GRID, NOUNS, PATCH
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, counted, instance

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture


_MAX_PANELS, _MAX_TOKENS = 9, 2**20
_WIDTH = 8.0  # inches of the page: 800 pixels where a page shows it

Points = npt.NDArray[np.float64]  # (2, tokens): x right, y down
Pictures = Iterator[npt.NDArray[np.uint8]]


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
        positions: one table, or several, such as one batch under several schemes: up to 9 documents in all and
            1,048,576 tokens in each table. A document alone fills the page; of several, those of one index stand
            together.
        path: where to write; ends in .png, .svg or .pdf. None writes nothing.
        title: above the picture; None names the scheme, and counts the tokens of a document alone.
        segments: the documents of every table, to tell audio from text and to draw a clip, a thumbnail, a tile and a
            video each as one; None draws audio as text, and every run of patches as an image.
        pictures: (height, width, 3) pixels to lay under the first images, in order.
        same_scale: whether panels of one kind show the same ids.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: no document, segments of others, or another suffix.
        LimitExceededError: more documents or tokens than fit a picture.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target, title = picture_path(path), picture_title(title)
    tables: Sequence[Any] = positions if isinstance(positions, Sequence) else [positions]
    for i, table in enumerate(tables):
        name = f"positions[{i}]" if tables is positions else "positions"
        instance(name, table, PositionTable, "mmpos.place")
        if table.num_tokens > _MAX_TOKENS:
            raise LimitExceededError(f"{name}: got {counted(table.num_tokens, 'token')}, want at most {_MAX_TOKENS}")
    most = max((table.num_documents for table in tables), default=0)
    chosen = [(table, d) for d in range(most) for table in tables if d < table.num_documents]
    if not chosen:
        raise InvalidInputError("positions: got no document, want at least one to draw")
    if len(chosen) > _MAX_PANELS:
        raise LimitExceededError(f"positions: got {counted(len(chosen), 'document')}, want at most {_MAX_PANELS}")
    planes = [read_plane(table, d, segments) for table, d in chosen]
    if len(planes) == 1:
        title = title or f"{tables[0].scheme}: {counted(planes[0].num_tokens, 'token', ',')}"
        return _draw_alone(planes[0], target, title, iter(pictures))
    names = [f"document {d + 1}, {table.scheme}" if most > 1 else table.scheme for table, d in chosen]
    return _draw_panels(planes, names, target, title, iter(pictures), same_scale=same_scale)


def _draw_alone(plane: Plane, target: Path | None, title: str, pictures: Pictures) -> Picture:
    """A document with its legend to the right."""
    with canvas(target, _WIDTH, 5.8) as figure:
        axes = figure.box(0.75, 0.5, 4.7, 4.7)
        draw_plane(axes, plane, plane.bounds, pictures, in_full=True)
        axes.set_title(title, loc="left", fontsize=12, pad=10)
        place: Style = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
        axes.legend(**place, frameon=False, fontsize=9, labelspacing=0.9, handletextpad=0.6)
    return figure


def _draw_panels(
    planes: Sequence[Plane],
    names: Sequence[str],
    target: Path | None,
    title: str | None,
    pictures: Pictures,
    *,
    same_scale: bool,
) -> Picture:
    """Documents side by side, under their names, gaps and next positions, with one legend for all."""
    columns = min(len(planes), 2 if len(planes) in (2, 4) else 3)
    width, top = _WIDTH / columns, 0.4 if title else 0.0
    side = width - 0.8
    row = side + 1.18
    with canvas(target, _WIDTH, top - (-len(planes) // columns) * row + 0.4) as figure:
        for i, (plane, name) in enumerate(zip(planes, names, strict=True)):
            left, above = i % columns * width + 0.6, top + i // columns * row + 0.68
            alike = [other.bounds for other in planes if other.names == plane.names] if same_scale else [plane.bounds]
            bounds = np.stack([np.min(alike, axis=0)[:, 0], np.max(alike, axis=0)[:, 1]], axis=1)
            draw_plane(figure.box(left, above, side, side), plane, bounds, pictures, in_full=False)
            figure.words(left, above - 0.56, name, fontsize=11, color=INK, va="top")
            figure.words(left, above - 0.36, "\n".join(plane.notes), fontsize=8.5, color="#555555", va="top")
        if title:
            figure.words(0.12, 0.3, title, fontsize=13, color=INK)
        panels = [axes.get_legend_handles_labels() for axes in figure.axes]
        panels.sort(key=lambda panel: -len(panel[1]))
        entries: dict[str, Artist] = {}
        for handles, labels in panels:
            for handle, label in zip(handles, labels, strict=True):
                if f"{label} 1" not in entries:  # "image" of a panel that has no other
                    entries.setdefault(label, handle)
        figure.legend(
            entries.values(),
            entries.keys(),
            ncols=min(len(entries), 6),
            loc="lower left",
            frameon=False,
            fontsize=9,
            columnspacing=1.2,
            handletextpad=0.5,
        )
    return figure


_HOLLOW: Style = {"marker": "o", "markerfacecolor": "white", "markeredgewidth": 0.8}
_MELTED = 1.8  # points of the page between patches, which are drawn as one block below it


def draw_plane(axes: Axes, plane: Plane, bounds: Points, pictures: Pictures, *, in_full: bool) -> None:
    """Draw text, then audio, images and the next position, each with its entry in the legend.

    Args:
        axes: of matplotlib; a square.
        plane: what to draw.
        bounds: (2, 2) least and greatest x, least and greatest y.
        pictures: (height, width, 3) pixels to lay under the next images, in order.
        in_full: whether the legend counts tokens, and names the sides and gaps of images.
    """
    scale = _frame(axes, plane, bounds, in_full=in_full)
    for points, noun, special in ((plane.text, "text", {"markeredgewidth": 0}), (plane.audio, "audio", _HOLLOW)):
        if points.size:
            style: Style = {"linestyle": "", "marker": "o", "color": INK, "zorder": 3, **special}
            axes.plot(*points, **style, markersize=float(np.clip(0.4 * scale, 2.4, 4)))
            label = f"{noun}: {counted(points.shape[1], 'token', ',')}" if in_full else noun
            axes.plot([], [], **style, markersize=4, label=label)
    named = 7 if in_full else 4
    for i, image in enumerate(plane.images):
        colour = COLOURS[i % len(COLOURS)]
        draw_image(axes, image, colour, scale, next(pictures, None) if plane.axes > 1 else None)
        if i < named:
            name = f"{image.noun} {i + 1}" if in_full or len(plane.images) > 1 else image.noun
            label = f"{name}: {image.label}" if in_full else name
            axes.plot([], [], "o", markersize=6, label=label, **_dots(image, colour))
    if in_full and len(plane.images) > named:
        axes.plot([], [], " ", label=f"and {counted(len(plane.images) - named, 'more image')}")
    if any(image.square for image in plane.images):
        label = "from the text before\nto the text after" if in_full else "from text to text"
        axes.plot([], [], "--", color=FAINT, linewidth=1, label=label)
    if plane.end.size:
        style = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        label = f"next position: {plane.end[1, 0]:,.0f}" if in_full else "next position"
        axes.plot(*plane.end, "D", zorder=4, clip_on=False, label=label, **style)
    if plane.axes == 3:
        axes.plot([], [], " ", label="(frame ids are not drawn)")


def _frame(axes: Axes, plane: Plane, bounds: Points, *, in_full: bool) -> float:
    """Set limits and names of the axes; returns the points of the page per unit of x."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    margin = np.maximum(0.05 * (bounds[:, 1] - bounds[:, 0]), 0.8)
    (left, right), (low, high) = (bounds + np.stack([-margin, margin], axis=1)).tolist()
    axes.set_xlim(left, right)
    axes.set_ylim(*((high, low) if plane.axes > 1 else (low, high)))
    quiet_axes(axes)
    for axis, name in zip((axes.xaxis, axes.yaxis), plane.names, strict=True):
        axis.set_major_locator(MaxNLocator(nbins=8 if in_full else 5, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_label_text(name if in_full else name.partition(" (")[0], fontsize=10 if in_full else 9)
        axis.labelpad = 4 if in_full else 2
    axes.tick_params(labelsize=10 if in_full else 8.5)
    if plane.axes > 1:
        axes.axline((left, left), slope=1, color="#dddddd", linewidth=0.8, zorder=0.9)
    return float(axes.bbox.width / axes.figure.dpi * 72 / (right - left))


def draw_image(axes: Axes, image: Image, colour: str, scale: float, picture: npt.NDArray[np.uint8] | None) -> None:
    """Draw the square between the texts around an image, its picture, and its patches.

    Args:
        axes: of matplotlib.
        image: what to draw.
        colour: of the square and of the patches.
        scale: points of the page per unit of x.
        picture: to lay under the patches, where columns go right and rows go down; or None.
    """
    if image.square:
        low, high = image.square
        style: Style = {"color": colour, "alpha": 0.7, "linewidth": 1, "zorder": 1.5}
        axes.plot([low, high, high, low, low], [low, low, high, high, low], "--", **style)
    half = np.array([image.column[0], image.row[1]]) / 2
    (left, top), (right, bottom) = image.points.min(axis=1) - half, image.points.max(axis=1) + half
    gap, edge = image.spacing * scale, 0.0
    if picture is not None and image.upright:
        extent = float(left), float(right), float(bottom), float(top)
        axes.imshow(picture, extent=extent, aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
        gap, edge = 0.7 * gap, 0.6  # white: points stand out from any picture
    if gap < _MELTED and image.upright and image.noun != "thumbnail":
        axes.fill_between([left, right], top, bottom, color=colour, alpha=0.8, linewidth=0, zorder=2)
        return
    size = float(np.clip(0.5 * gap, 0.9 if image.over_ids else 2.4, 5.5))
    style = {"markersize": size + edge, "markeredgewidth": edge, "markeredgecolor": "white", "zorder": 2}
    if image.noun == "thumbnail":
        style = {"markersize": 1.6 * size, "zorder": 2.5}
    axes.plot(*image.points, "o", **{**style, **_dots(image, colour)})


def _dots(image: Image, colour: str) -> Style:
    """The style of the points of an image: rings for a thumbnail, at whose ids are patches of its tiles."""
    if image.noun != "thumbnail":
        return {"color": colour}
    return {"color": colour, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1}


@dataclass(frozen=True, eq=False)
class Image:
    """The patches of one grid, clip, thumbnail or tile.

    Args:
        points: x and y of each token.
        sides: frames, height and width in tokens.
        noun: "image", or "clip" for one with its sound, "thumbnail" and "tile".
        over_ids: whether x and y are both ids.
        square: the id of the text right before and of the text right after, if both lie on the diagonal.
        gaps: the distance from the one to the first patch and from the last patch to the other, (row, column).
    """

    points: Points
    sides: tuple[int, int, int]
    noun: str = "image"
    over_ids: bool = True
    square: tuple[float, float] | None = None
    gaps: tuple[tuple[Fraction, ...], ...] = ()

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
        sides = "×".join(map(str, self.sides if self.sides[0] > 1 else self.sides[1:]))
        gaps = self.gaps_in_words
        # The legend is a narrow column.
        gaps = gaps if len(gaps) <= 28 else gaps.replace(") ", ")\n")
        return f"{sides}\n{gaps}" if gaps else sides

    @property
    def column(self) -> Points:
        """(2,) from one column to the next, on average where they are not evenly spaced."""
        return self._step(0, self.sides[2], (1.0, 0.0))

    @property
    def row(self) -> Points:
        """(2,) from one row to the next, likewise."""
        return self._step(1, self.sides[1], (0.0, 1.0))

    def _step(self, axis: int, side: int, otherwise: tuple[float, float]) -> Points:
        """The way from the first patch to the last along a side, over its steps; a cut image tells none."""
        if side == 1 or self.points.shape[1] != np.prod(self.sides):
            return np.array(otherwise)
        last = (side - 1) * (self.sides[2] if axis else 1)
        return (self.points[:, last] - self.points[:, 0]) / (side - 1)

    @property
    def spacing(self) -> float:
        """Least distance between two neighbours, in ids."""
        steps = (
            np.hypot(*step) for step, side in zip((self.row, self.column), self.sides[1:], strict=True) if side > 1
        )
        return float(min((step for step in steps if step > 0), default=1.0))

    @property
    def upright(self) -> bool:
        """True where columns go right and rows go down, so that a picture can lie under the points."""
        return bool(self.column[0] > 0 and self.row[1] > 0 and self.column[1] == 0 and self.row[0] == 0)


@dataclass(frozen=True, eq=False)
class Plane:
    """One document.

    Args:
        names: of x and y.
        num_tokens: of the document, padding included.
        axes: of its ids; with one, x counts tokens.
        text: its points, those of markers too.
        audio: its points, where segments tell it from text.
        images: in order; a grid that a scheme cuts into pieces gives several, but with segments those of its own rows
            are one.
        end: (2, 1) where generation goes on, or (2, 0) if the scheme has no next position.
    """

    names: tuple[str, str]
    num_tokens: int
    axes: int
    text: Points
    audio: Points
    images: tuple[Image, ...]
    end: Points

    @property
    def bounds(self) -> Points:
        """(2, 2) least and greatest x, least and greatest y; the same for both where both are ids."""
        points = np.concatenate([self.text, self.audio, *(image.points for image in self.images), self.end], axis=1)
        if not points.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])
        low, high = points.min(axis=1), points.max(axis=1)
        if self.axes > 1:
            low[:], high[:] = low.min(), high.max()
        return np.stack([low, high], axis=1)

    @property
    def notes(self) -> list[str]:
        """What a legend would tell in full: the gaps of all images, and the next position."""
        gaps = [image.gaps_in_words for image in self.images if image.gaps]
        if len(gaps) > 1:
            gaps = [f"gaps {'equal' if all(' on both ' in each for each in gaps) else 'not equal'} on both sides"]
        return [*gaps, f"next position {self.end[1, 0]:,.0f}" if self.end.size else "no next position"]


def read_plane(positions: PositionTable, document: int, segments: SegmentTable | None = None) -> Plane:
    """Take the plane of one document from a table, and what is audio or lies in several pieces from its segments."""
    first, length = int(positions.documents[FIRST_TOKEN, document]), int(positions.lengths[document])
    view, axes = positions.slice(first, first + length), positions.axes
    drawn = (2, 1) if axes == 3 else (1, 0)
    points = view.dense(dtype=np.float64, axes=(0, 0) if axes == 1 else drawn)
    if axes == 1:
        points[0] = np.arange(length)
    end = np.zeros((2, 0))
    if positions.resumable[document]:
        end = np.full((2, 1), float(positions.documents[NEXT_POSITION, document]))
        end[0] = length if axes == 1 else end[1]
    whole, types = (values[first : first + length] for values in _kinds(positions, segments))
    grid, text = view.is_grid, ~(view.is_grid | view.is_padding)
    images = []
    for s, (a, tokens) in enumerate(zip(view.offset.tolist(), view.segment_lengths.tolist(), strict=True)):
        b, height, width = a + tokens, int(view.height[s]), int(view.width[s])
        if segments is not None and whole[a] >= 0:
            if a == 0 or whole[a - 1] != whole[a]:
                sides, kind = segments.extents[:, whole[a]].tolist(), int(segments.kind[whole[a]])
                patches = points[:, (whole == whole[a]) & (types == PATCH)]
                images.append(Image(patches, tuple(sides), "image" if kind == GRID else NOUNS[kind], axes > 1))
        elif grid[s]:
            before = points[:, a - 1] if s and text[s - 1] else None
            after = points[:, b] if b < length and text[s + 1] else None
            if after is None and end.size and not (text | grid)[s + 1 :].any():
                after = end[:, 0]
            image = Image(points[:, a:b], (-(-tokens // (height * width)), height, width), over_ids=axes > 1)
            images.append(_between(image, before, after, int(view.denominator[s])))
    sound = types == AUDIO_TOKEN
    written = (text.repeat(view.segment_lengths) & (whole < 0) & ~sound) | ((whole >= 0) & (types == 0))
    names = ("id on axis 1", "id on axis 0 (downwards)")
    if axes <= 3:
        names = ("token", "position id") if axes == 1 else ("column id", "row id (downwards, as in an image)")
    return Plane(names, length, axes, points[:, written], points[:, sound], tuple(images), end)


def _between(image: Image, before: Points | None, after: Points | None, denominator: int) -> Image:
    """Add the square between the texts around an image: schemes that put text off the diagonal have none."""
    if not image.over_ids or before is None or after is None or before[0] != before[1] or after[0] != after[1]:
        return image
    gaps = tuple(
        tuple(Fraction(float(gap)).limit_denominator(denominator) for gap in sides[::-1])
        for sides in (image.points.min(axis=1) - before, after - image.points.max(axis=1))
    )
    return replace(image, square=(float(before[0]), float(after[0])), gaps=gaps)


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
