"""Planes side by side: small squares on one scale, a line on each one's gaps, and one legend for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, canvas
from mmpos.analysis.plot.plane import Plane, Points, read_plane
from mmpos.analysis.plot.planes import draw_plane
from mmpos.positions.table import PositionTable

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture

MAX_PANELS = 9
_MAX_NAMED = 4
# Inches: of the page, around a panel, and below all.
_WIDTH, _LEFT, _RIGHT, _ABOVE, _BELOW, _LEGEND, _TITLE = 8.0, 0.6, 0.2, 0.68, 0.5, 0.38, 0.4


def draw_panels(tables: Sequence[PositionTable], target: Path | None, title: str | None, same_scale: bool) -> Picture:
    """Draw every document of every table: those of one document stand together.

    Args:
        tables: 1 to 9 documents in all.
        target: of ``picture_path``.
        title: above all panels.
        same_scale: whether panels with the same names of axes show the same ids.
    """
    most = max(table.num_documents for table in tables)
    chosen = [(table, d) for d in range(most) for table in tables if d < table.num_documents]
    planes = [read_plane(table, d) for table, d in chosen]
    columns = min(len(planes), 2 if len(planes) in (2, 4) else 3)
    rows = -(-len(planes) // columns)
    width = _WIDTH / max(columns, 2)
    side = width - _LEFT - _RIGHT
    row, top = _ABOVE + side + _BELOW, _TITLE if title else 0.0
    height = top + rows * row + _LEGEND
    with canvas(target, width * max(columns, 2), height) as figure:
        for i, ((table, d), plane) in enumerate(zip(chosen, planes, strict=True)):
            left, bottom = i % columns * width + _LEFT, height - top - (i // columns + 1) * row + _BELOW
            axes = figure.add_axes((left / _WIDTH, bottom / height, side / _WIDTH, side / height))
            draw_plane(axes, plane, side, _shared(plane, planes) if same_scale else plane.bounds)
            name = f"document {d + 1}, {table.scheme}" if most > 1 else table.scheme
            _head(axes, name, plane)
        if title:
            figure.text(0.12 / _WIDTH, 1 - 0.3 / height, title, fontsize=13, color=INK)
        _legend(figure, planes, height, frames=any(table.axes == 3 for table in tables))
    return figure


def _shared(plane: Plane, planes: Sequence[Plane]) -> Points:
    """(2, 2) bounds of all planes that have the same names of axes."""
    bounds = np.array([other.bounds for other in planes if other.names == plane.names])
    return np.stack([bounds[:, :, 0].min(axis=0), bounds[:, :, 1].max(axis=0)], axis=1)


def _head(axes: Any, name: str, plane: Plane) -> None:
    """The name, and below it in small what the legend of a large picture tells: gaps and next position."""
    notes = [_gaps(plane), f"next position {plane.end[1, 0]:,.0f}" if plane.end.size else "no next position"]
    notes = [note for note in notes if note]
    place = {"transform": axes.transAxes, "va": "top"}
    axes.text(0, 1 + _lift(axes, 0.56), name, fontsize=11, color=INK, **place)
    axes.text(0, 1 + _lift(axes, 0.36), "\n".join(notes), fontsize=8.5, color="#555555", **place)
    for axis, words in ((axes.xaxis, plane.names[0]), (axes.yaxis, plane.names[1])):
        axis.set_label_text(words.partition(" (")[0], fontsize=9)
        axis.labelpad = 2
    axes.tick_params(labelsize=8.5)


def _lift(axes: Any, inches: float) -> float:
    """Inches as a fraction of the height of the axes."""
    box, figure = axes.get_position(), axes.figure
    return float(inches / (box.height * figure.get_figheight()))


def _gaps(plane: Plane) -> str:
    """What the gaps of all images are, in a few words."""
    images = [image for image in plane.images if image.gaps]
    if len(images) > 1:
        equal = all(before == after for before, after in (image.gaps for image in images))
        return f"gaps {'equal' if equal else 'not equal'} on both sides"
    return images[0].gaps_in_words if images else ""


def _legend(figure: Any, planes: Sequence[Plane], height: float, *, frames: bool) -> None:
    """One line for all panels, at the foot of the page."""
    from matplotlib.lines import Line2D

    images = max(len(plane.images) for plane in planes)
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5.5, "markeredgewidth": 0}
    handles = [Line2D([], [], color=INK, label="text", **dot)]
    for i in range(min(images, _MAX_NAMED)):
        name = f"image {i + 1}" if images > 1 else "image"
        handles.append(Line2D([], [], color=COLOURS[i], label=name, **dot))
    if any(image.square for plane in planes for image in plane.images):
        label = "from the text before to the text after"
        handles.append(Line2D([], [], color=FAINT, linestyle="--", linewidth=1, label=label))
    style: dict[str, Any] = {
        "markerfacecolor": "white",
        "markeredgecolor": INK,
        "markeredgewidth": 1.3,
        "markersize": 6,
    }
    handles.append(Line2D([], [], linestyle="", marker="D", label="next position", **style))
    if frames:
        handles.append(Line2D([], [], linestyle="", label="(frame ids are not drawn)"))
    place = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.03 / height), "borderaxespad": 0.4}
    figure.legend(
        handles=handles, ncols=len(handles), frameon=False, fontsize=9, columnspacing=1.2, handletextpad=0.5, **place
    )
