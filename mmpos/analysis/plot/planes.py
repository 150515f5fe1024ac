"""How one plane is drawn: text on its diagonal, images as grids of points, and the next position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, quiet_axes
from mmpos.analysis.plot.plane import Image, Plane, Points
from mmpos.support.checks import counted

_MAX_NAMED = 7
_MELTED = 1.8  # points of the page between patches, below which points are drawn unevenly


def draw_plane(
    axes: Any, plane: Plane, side: float, bounds: Points, pictures: Iterator[npt.NDArray[np.uint8]] | None = None
) -> None:
    """Text, then images, then the next position, each with its entry in the legend.

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
    for i, image in enumerate(plane.images):
        colour = COLOURS[i % len(COLOURS)]
        covered = plane.diagonal and _underlay(axes, image, colour, next(pictures, None) if pictures else None)
        gap = image.spacing * scale
        edge = 0.6 if covered else 0.0  # white: points stand out from any picture
        note = _patches(axes, image, colour, 0.7 * gap if covered else gap, thin=plane.diagonal, edge=edge)
        if i < _MAX_NAMED:
            axes.plot([], [], "o", color=colour, markersize=6, label=f"image {i + 1}: {image.label}{note}")
    if len(plane.images) > _MAX_NAMED:
        axes.plot([], [], " ", label=f"and {counted(len(plane.images) - _MAX_NAMED, 'more image')}")
    if any(image.square for image in plane.images):
        axes.plot([], [], "--", color=FAINT, linewidth=1, label="from the text before\nto the text after")
    if plane.end.size:
        style = {"markerfacecolor": "white", "markeredgecolor": INK, "markeredgewidth": 1.3, "markersize": 7}
        axes.plot(*plane.end, "D", zorder=4, clip_on=False, label=f"next position: {plane.end[1, 0]:,.0f}", **style)


def _frame(axes: Any, plane: Plane, side: float, bounds: Points) -> float:
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


def _underlay(axes: Any, image: Image, colour: str, picture: npt.NDArray[np.uint8] | None) -> bool:
    """The square between the texts around an image, and its picture; gives whether there is one."""
    if image.square:
        low, high = image.square
        style = {"color": colour, "alpha": 0.7, "linewidth": 1, "zorder": 1.5}
        axes.plot([low, high, high, low, low], [low, low, high, high, low], "--", **style)
    if picture is None or not image.upright:
        return False
    axes.imshow(picture, extent=_extent(image), aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
    return True


def _patches(axes: Any, image: Image, colour: str, gap: float, *, thin: bool, edge: float) -> str:
    """The points of an image, fewer where they would melt together; gives a note on that for the legend."""
    every = max(1, int(np.ceil(2 / gap))) if thin else 1
    # An image that is small on the page stays whole: a few points would show another size.
    every = every if 16 * every <= min(image.sides[:2]) else 1
    if every == 1 and gap < _MELTED and image.upright:
        _block(axes, image, colour)
        return ""
    points = image.points if every == 1 else image.thinned(every)
    size = float(np.clip(0.5 * gap * every, 0.9 if thin else 2.4, 5.5))
    style = {"markersize": size + edge, "markeredgewidth": edge, "markeredgecolor": "white"}
    axes.plot(*points, "o", color=colour, zorder=2, **style)
    return f"\n(1 in {every} rows and columns)" if points.shape < image.points.shape else ""


def _block(axes: Any, image: Image, colour: str) -> None:
    """An image whose points would melt together unevenly, as the rectangle of its patches."""
    left, right, bottom, top = _extent(image)
    axes.fill_between([left, right], [top, top], [bottom, bottom], color=colour, alpha=0.8, linewidth=0, zorder=2)


def _extent(image: Image) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of the patches of an upright image, half a step around their points."""
    half_x, half_y = float(image.column[0]) / 2, float(image.row[1]) / 2
    (left, top), (right, bottom) = image.points.min(axis=1).tolist(), image.points.max(axis=1).tolist()
    return left - half_x, right + half_x, bottom + half_y, top - half_y
