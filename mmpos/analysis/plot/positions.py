"""Plots of placed tables: one panel for each document and scheme."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import COLOURS, INK, Style, canvas, panel_columns, picture_path, quiet_axes
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN, NEXT_POSITION
from mmpos.segments.kinds import AUDIO_TOKEN, GRID, NOUNS, PATCH
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import IntArray, counted, instance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.legend import Legend

    from mmpos.analysis.plot.picture import Picture


_MAX_PANELS, _MAX_TOKENS = 9, 2**20
_WIDTH = 8.0  # width of the figure in inches
_NAMED = 4  # number of images with an entry in the legend

Points = npt.NDArray[np.float64]  # (2, tokens); x points right, y points down
Flags = npt.NDArray[np.bool_]
Pictures = Iterator[npt.NDArray[np.uint8]]


def plot_positions(
    positions: PositionTable | Sequence[PositionTable],
    path: str | PathLike[str] | None = None,
    *,
    segments: SegmentTable | None = None,
    pictures: Sequence[npt.NDArray[np.uint8]] = (),
    same_scale: bool = True,
) -> Picture:
    """Draw the ids of every document.

    A scheme with one axis is drawn as ids against token index, and any other as row ids against column ids. Equal
    tables produce equal bytes.

    Args:
        positions: one table, or several, such as one batch placed with several schemes: up to 9 documents in total and
            1,048,576 tokens in each table. Documents with the same index are drawn next to each other.
        path: the file to write, ending in .png, .svg or .pdf; None writes nothing.
        segments: the documents of every table, to distinguish audio from text and to draw each clip, thumbnail, tile or
            video as a whole; None draws audio as text, and every run of patches as an image.
        pictures: (height, width, 3) pixels to draw behind the first images, in order.
        same_scale: whether panels of the same kind show the same range of ids.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: there is no document, segments belong to other documents, or the suffix is unknown.
        LimitExceededError: there are too many documents or tokens.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    chosen = _documents(positions)
    planes = [read_plane(table, d, segments) for table, d in chosen]
    names = [f"document {d + 1}, {table.scheme}" if chosen[-1][1] else table.scheme for table, d in chosen]
    laid, columns = iter(pictures), panel_columns(len(planes))
    rows = -(-len(planes) // columns)
    side = min(_WIDTH / columns - 0.8, 5.2)
    entries: dict[str, Any] = {}
    with canvas(target, _WIDTH if len(planes) > 1 else side + 1.4, rows * (side + 1.1) + 0.5) as figure:
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes, plane, name in zip(panels.flat, planes, names, strict=False):
            shared = [other.bounds for other in planes if other.names == plane.names] if same_scale else [plane.bounds]
            bounds = np.stack([np.min(shared, axis=0)[:, 0], np.max(shared, axis=0)[:, 1]], axis=1)
            draw_plane(axes, plane, bounds, laid, inches=side)
            axes.set_title("\n".join([name, *plane.notes]), loc="left", fontsize=9.5, color=INK)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        for axes in panels.flat[len(planes) :]:
            axes.remove()
        for handle in _legend(figure, entries).get_lines():
            handle.set_markersize(5)
    return figure


def _legend(figure: Picture, entries: Mapping[str, Any]) -> Legend:
    """Draw a legend below the panels, in up to 5 columns that fit into the width of the figure."""
    place: Style = {"loc": "outside lower left", "frameon": False, "fontsize": 9}
    for columns in range(min(len(entries), 5), 1, -1):
        legend = figure.legend(entries.values(), entries, ncols=columns, **place)
        if legend.get_window_extent().width <= figure.bbox.width:
            return legend
        legend.remove()
    return figure.legend(entries.values(), entries, **place)


def _documents(positions: PositionTable | Sequence[PositionTable]) -> list[tuple[PositionTable, int]]:
    """Check tables, and list their documents ordered by index."""
    tables: Sequence[Any] = positions if isinstance(positions, Sequence) else [positions]
    for i, table in enumerate(tables):
        name = f"positions[{i}]" if tables is positions else "positions"
        instance(name, table, PositionTable, "mmpos.place")
        if table.num_tokens > _MAX_TOKENS:
            raise LimitExceededError(f"{name}: got {counted(table.num_tokens, 'token')}, want at most {_MAX_TOKENS}")
    most = max((table.num_documents for table in tables), default=0)
    chosen = [(table, d) for d in range(most) for table in tables if d < table.num_documents]
    if not chosen:
        raise InvalidInputError("positions: got no document, want at least one")
    if len(chosen) > _MAX_PANELS:
        raise LimitExceededError(f"positions: got {counted(len(chosen), 'document')}, want at most {_MAX_PANELS}")
    return chosen


def draw_plane(axes: Axes, plane: Plane, bounds: Points, pictures: Pictures, *, inches: float) -> None:
    """Draw text, audio, images and the next position, with entries in the legend.

    Args:
        axes: matplotlib axes, which are made square.
        plane: the document to draw.
        bounds: (2, 2) smallest and largest x, smallest and largest y.
        pictures: (height, width, 3) pixels to draw behind the next images, in order.
        inches: approximate side of the square in inches.
    """
    margin = np.maximum(0.05 * (bounds[:, 1] - bounds[:, 0]), 0.8)
    (left, right), (low, high) = (bounds + np.stack([-margin, margin], axis=1)).tolist()
    scale = 72 * inches / (right - left)  # points on the page per id
    axes.set(xlim=(left, right), ylim=(high, low) if plane.axes > 1 else (low, high), box_aspect=1)
    quiet_axes(axes)
    axes.locator_params(nbins=5, integer=True)
    for axis, name in zip((axes.xaxis, axes.yaxis), plane.names, strict=True):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_label_text(name, fontsize=9)
    if plane.axes > 1:
        axes.axline((left, left), slope=1, color="#dddddd", linewidth=0.8, zorder=0.9)
    size = float(np.clip(0.4 * scale, 2.4, 4))
    for points, noun, face in ((plane.text, "text", INK), (plane.audio, "audio", "white")):
        if points.size:
            axes.plot(*points, "o", color=INK, markersize=size, markerfacecolor=face, zorder=3, label=noun)
    for i, image in enumerate(plane.images):
        colour = COLOURS[i % len(COLOURS)]
        picture = next(pictures, None) if plane.axes > 1 else None
        label = f"{image.noun} {i + 1}" if len(plane.images) > 1 else image.noun
        draw_image(axes, image, colour, scale, picture, label if i < _NAMED else "")
    if plane.end.size:
        style: Style = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        axes.plot(*plane.end, "D", zorder=4, clip_on=False, label="next position", **style)
    if plane.axes == 3:
        axes.plot([], [], " ", label="(frame ids are not drawn)")


def draw_image(
    axes: Axes, image: Image, colour: str, scale: float, picture: npt.NDArray[np.uint8] | None, label: str
) -> None:
    """Draw an image: the square between the texts around it, its picture, and its patches (rings for a thumbnail).

    Args:
        axes: matplotlib axes.
        image: the image to draw.
        colour: colour of the square and of the patches.
        scale: points on the page per id.
        picture: pixels to draw behind an upright image; None draws none.
        label: label in the legend; empty for none.
    """
    if image.square:
        low, high = image.square
        style: Style = {"color": colour, "alpha": 0.7, "linewidth": 1, "zorder": 1.5, "label": "from text to text"}
        axes.plot([low, high, high, low, low], [low, low, high, high, low], "--", **style)
    size, edge = float(np.clip(0.5 * image.spacing.min() * scale, 1.5, 5.5)), 0.0
    if picture is not None and image.upright:
        left, top = image.points.min(axis=1) - image.spacing / 2
        right, bottom = image.points.max(axis=1) + image.spacing / 2
        extent = float(left), float(right), float(bottom), float(top)
        axes.imshow(picture, extent=extent, aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
        size, edge = size + 0.6, 0.6  # a white edge is visible on any picture
    style = {"color": colour, "markersize": size, "markeredgewidth": edge, "markeredgecolor": "white", "zorder": 2}
    if image.noun == "thumbnail":  # the patches of its tiles have the same ids
        ring = {"markersize": 1.6 * size, "markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 1}
        style |= {**ring, "zorder": 2.5}
    axes.plot(*image.points, "o", **style, label=label or None)


@dataclass(frozen=True, eq=False)
class Image:
    """The patches of one grid, clip, thumbnail or tile.

    Args:
        points: x and y of each token.
        sides: height and width in tokens.
        noun: "image", "clip" (a video with audio), "thumbnail" or "tile".
        square: the ids of the text tokens right before and right after the image, if both are on the diagonal.
        gaps: the (row, column) distances from the text before to the first patch, and from the last patch to the text
            after.
    """

    points: Points
    sides: tuple[int, int]
    noun: str = "image"
    square: tuple[float, float] | None = None
    gaps: tuple[tuple[Fraction, ...], ...] = ()

    @property
    def gaps_in_words(self) -> str:
        """The gaps in words."""
        before, after = (f"({', '.join(map(str, gap))})" for gap in self.gaps)
        return f"gap {before} on both sides" if before == after else f"gaps {before} and {after}"

    @property
    def spacing(self) -> Points:
        """(2,) smallest distance between distinct x and between distinct y; if one is constant, that of the other."""
        steps = np.array([np.diff(np.unique(values)).min(initial=np.inf) for values in self.points])
        return np.where(np.isfinite(steps), steps, steps.min() if np.isfinite(steps).any() else 1.0)

    @property
    def upright(self) -> bool:
        """Whether columns increase to the right and rows downwards, so that a picture fits behind the points."""
        x, y = self.points
        height, width = self.sides
        return (len(np.unique(x)), len(np.unique(y))) == (width, height) and x[0] == x.min() and y[0] == y.min()


@dataclass(frozen=True, eq=False)
class Plane:
    """The points of one document in two dimensions.

    Args:
        names: names of x and y.
        axes: number of axes of the ids; with one, x counts tokens.
        text: points of text and markers.
        audio: points of audio, if segments are known.
        images: images in order; without segments, a grid that a scheme divides into pieces counts as several images.
        end: (2, 1) next position, or (2, 0) if the scheme has none.
    """

    names: tuple[str, str]
    axes: int
    text: Points
    audio: Points
    images: tuple[Image, ...]
    end: Points

    @property
    def bounds(self) -> Points:
        """(2, 2) smallest and largest x, smallest and largest y; the same for x and y if both are ids."""
        points = np.concatenate([self.text, self.audio, *(image.points for image in self.images), self.end], axis=1)
        if not points.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])
        low, high = points.min(axis=1), points.max(axis=1)
        if self.axes > 1:
            low[:], high[:] = low.min(), high.max()
        return np.stack([low, high], axis=1)

    @property
    def notes(self) -> list[str]:
        """The gaps of all images, and the next position."""
        gaps = [image.gaps_in_words for image in self.images if image.gaps]
        if len(gaps) > 1:
            equal = all(" on both " in gap for gap in gaps)
            gaps = [f"gaps {'equal' if equal else 'not equal'} on both sides"]
        return [*gaps, f"next position {self.end[1, 0]:,.0f}" if self.end.size else "no next position"]


def read_plane(positions: PositionTable, document: int, segments: SegmentTable | None = None) -> Plane:
    """Compute the points of one document from a table; segments show what is audio, and which pieces form an image."""
    first, length = int(positions.documents[FIRST_TOKEN, document]), int(positions.lengths[document])
    axes, drawn = positions.axes, (2, 1) if positions.axes == 3 else (1, 0)
    view = positions.slice(first, first + length)
    points, denominators = view.dense(dtype=np.float64, axes=(0, 0) if axes == 1 else drawn), view.rationals()[1]
    end = np.zeros((2, 0))
    if positions.resumable[document]:
        end = np.full((2, 1), float(positions.documents[NEXT_POSITION, document]))
    if axes == 1:
        points[0], end[:1] = np.arange(length), length
    owner, patch, audio, padding = (row[first : first + length] for row in _kinds(positions, segments))
    text = ~(patch | audio | padding)
    images = []
    for part in np.unique(owner[patch]).tolist():
        begin, stop = owner.searchsorted([part, part + 1])
        tokens = begin + np.flatnonzero(patch[begin:stop])
        if segments is None:
            noun, sides = "image", (int(positions.height[part]), int(positions.width[part]))
        else:
            kind, (_, *both) = int(segments.kind[part]), segments.extents[:, part].tolist()
            noun, sides = "image" if kind == GRID else NOUNS[kind], (both[0], both[1])
        image = Image(points[:, tokens], sides, noun)
        a, b = int(tokens[0]), int(tokens[-1]) + 1
        before = points[:, a - 1] if a and text[a - 1] and owner[a - 1] != part else None
        after = points[:, b] if b < length and text[b] else None
        if after is None and end.size and padding[b:].all():
            after = end[:, 0]
        images.append(_between(image, before, after, int(denominators[tokens].max())) if axes > 1 else image)
    names = ("id on axis 1", "id on axis 0")
    if axes <= 3:
        names = ("token", "position id") if axes == 1 else ("column id", "row id")
    return Plane(names, axes, points[:, text], points[:, audio], tuple(images), end)


def _between(image: Image, before: Points | None, after: Points | None, denominator: int) -> Image:
    """Add the square between the texts around an image, unless a scheme places text off the diagonal."""
    if before is None or after is None or before[0] != before[1] or after[0] != after[1]:
        return image
    gaps = tuple(
        tuple(Fraction(float(gap)).limit_denominator(denominator) for gap in sides[::-1])
        for sides in (image.points.min(axis=1) - before, after - image.points.max(axis=1))
    )
    return replace(image, square=(float(before[0]), float(after[0])), gaps=gaps)


def _kinds(positions: PositionTable, segments: SegmentTable | None) -> tuple[IntArray, Flags, Flags, Flags]:
    """Return the (tokens,) segment of each token, and whether it is a patch, audio or padding.

    Without segments, those of the table are used, and audio counts as text.
    """
    pieces = positions.segment_lengths
    padding = positions.is_padding.repeat(pieces)
    if segments is None:
        return np.arange(pieces.size).repeat(pieces), positions.is_grid.repeat(pieces), padding & False, padding
    types = positions.token_types(instance("segments", segments, SegmentTable, "SegmentTable.from_documents"))
    return np.arange(segments.kind.size).repeat(segments.lengths), types == PATCH, types == AUDIO_TOKEN, padding
