"""The picture of a placed table: the plane of row and column ids, text on its diagonal, images as grids of points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.plot.canvas import COLOURS, FAINT, INK, canvas, picture_path
from mmpos.plot.plane import Image, Plane, read_plane
from mmpos.positions import PositionTable

_MAX_DOCUMENTS, _MAX_TOKENS, _MAX_NAMED = 8, 2**20, 7
# Inches: a square for the ids with the legend to its right; 8 in all, 800 pixels where a page shows it.
_WIDTH, _SIDE, _LEFT, _BOTTOM, _TOP = 8.0, 4.7, 0.75, 0.6, 0.5


def plot_positions(
    positions: PositionTable,
    path: str | PathLike[str],
    title: str | None = None,
    *,
    pictures: Sequence[npt.NDArray[np.uint8]] = (),
) -> None:
    """Draw the ids of every document, one square below the other, into a file.

    Schemes of one axis: ids over token indexes. All others: row ids over column ids. The same table gives the
    same bytes.

    Args:
        positions: up to 8 documents and 1,048,576 tokens.
        path: where to write; ends in .png or .svg.
        title: above the first document; None names the scheme and counts the tokens.
        pictures: (height, width, 3) pixels to lay under the first images, in order.

    Raises:
        InvalidInputError: no document, another suffix, or a path that cannot be written.
        LimitExceededError: more documents or tokens than fit a picture.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    _check_size(positions)
    count, height = positions.num_documents, _TOP + _SIDE + _BOTTOM
    remaining = iter(pictures)
    with canvas(target, _WIDTH, height * count) as figure:
        for d in range(count):
            bottom = (count - 1 - d) * height + _BOTTOM
            box = (_LEFT / _WIDTH, bottom / (height * count), _SIDE / _WIDTH, _SIDE / (height * count))
            heading = f"{positions.scheme}: {positions.lengths[d]:,} tokens"
            heading = f"document {d + 1}, {heading}" if count > 1 else heading
            axes = figure.add_axes(box)
            _draw(axes, read_plane(positions, d), remaining)
            axes.set_title(title if title and d == 0 else heading, loc="left", fontsize=12, pad=10)
            if positions.axes == 3:
                axes.plot([], [], " ", label="(frame ids are not drawn)")
            _legend(axes)


def _check_size(positions: PositionTable) -> None:
    if positions.num_documents == 0:
        raise InvalidInputError("positions: got no document, want at least one to draw")
    if positions.num_documents > _MAX_DOCUMENTS:
        raise LimitExceededError(f"positions: got {positions.num_documents} documents, want at most {_MAX_DOCUMENTS}")
    if positions.num_tokens > _MAX_TOKENS:
        raise LimitExceededError(f"positions: got {positions.num_tokens} tokens, want at most {_MAX_TOKENS}")


def _draw(axes: Any, plane: Plane, pictures: Iterator[npt.NDArray[np.uint8]]) -> None:
    """Text, then images, then the next position, each with its entry in the legend."""
    scale = _frame(axes, plane)
    if plane.text.size:
        size = float(np.clip(0.4 * scale, 2.4, 4))
        axes.plot(*plane.text, "o", color=INK, markersize=size, markeredgewidth=0, zorder=3)
        axes.plot([], [], "o", color=INK, markersize=4, label=f"text: {plane.text.shape[1]:,} tokens")
    for i, image in enumerate(plane.images):
        colour = COLOURS[i % len(COLOURS)]
        covered = plane.diagonal and _underlay(axes, image, colour, next(pictures, None))
        gap = image.spacing * scale
        note = _patches(axes, image, colour, 0.7 * gap if covered else gap, thin=plane.diagonal)
        if i < _MAX_NAMED:
            axes.plot([], [], "o", color=colour, markersize=6, label=f"image {i + 1}: {image.label}{note}")
    if len(plane.images) > _MAX_NAMED:
        axes.plot([], [], " ", label=f"and {len(plane.images) - _MAX_NAMED} more images")
    if any(image.square for image in plane.images):
        axes.plot([], [], "--", color=FAINT, linewidth=1, label="from the text before\nto the text after")
    if plane.end.size:
        style = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        axes.plot(*plane.end, "D", zorder=4, label=f"next position: {plane.end[1, 0]:,.0f}", **style)


def _frame(axes: Any, plane: Plane) -> float:
    """Limits and names of the axes; gives the points of the page per unit of x."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bounds = plane.bounds
    margin = np.maximum(0.04 * (bounds[:, 1] - bounds[:, 0]), 0.8)
    (left, right), (low, high) = (bounds + np.stack([-margin, margin], axis=1)).tolist()
    axes.set_xlim(left, right)
    axes.set_ylim(*((high, low) if plane.diagonal else (low, high)))
    axes.set_xlabel(plane.names[0])
    axes.set_ylabel(plane.names[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444")
    axes.spines[:].set_color("#bbbbbb")
    if plane.diagonal:
        axes.axline((left, left), slope=1, color="#dddddd", linewidth=0.8, zorder=0.9)
    return _SIDE * 72 / float(right - left)


def _underlay(axes: Any, image: Image, colour: str, picture: npt.NDArray[np.uint8] | None) -> bool:
    """The square between the texts around an image, and its picture; gives whether there is one."""
    if image.square:
        low, high = image.square
        style = {"color": colour, "alpha": 0.7, "linewidth": 1, "zorder": 1.5}
        axes.plot([low, high, high, low, low], [low, low, high, high, low], "--", **style)
    if picture is None or not image.upright:
        return False
    half_x, half_y = image.column[0] / 2, image.row[1] / 2
    (left, top), (right, bottom) = image.points.min(axis=1), image.points.max(axis=1)
    extent = (left - half_x, right + half_x, bottom + half_y, top - half_y)
    axes.imshow(picture, extent=extent, aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
    return True


def _patches(axes: Any, image: Image, colour: str, gap: float, *, thin: bool) -> str:
    """The points of an image, fewer where they would melt together; gives a note on that for the legend."""
    every = max(1, int(np.ceil(2 / gap))) if thin else 1
    # An image that is small on the page stays whole: a few points would show another size.
    every = every if 16 * every <= min(image.sides[:2]) else 1
    points = image.points if every == 1 else image.thinned(every)
    size = float(np.clip(0.5 * gap * every, 0.9 if thin else 2.4, 5.5))
    axes.plot(*points, "o", color=colour, markersize=size, markeredgewidth=0, zorder=2)
    return f"\n(1 in {every} rows and columns)" if points.shape < image.points.shape else ""


def _legend(axes: Any) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
    axes.legend(**place, frameon=False, fontsize=9, labelspacing=0.9, handletextpad=0.6)
