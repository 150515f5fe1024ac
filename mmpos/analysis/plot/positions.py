"""Pictures of placed tables: the documents of one table below each other, or several tables side by side."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import canvas, picture_path, picture_title
from mmpos.analysis.plot.panels import MAX_PANELS, draw_panels
from mmpos.analysis.plot.plane import read_plane
from mmpos.analysis.plot.planes import draw_plane
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.support.checks import counted, instance

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture

_MAX_DOCUMENTS, _MAX_TOKENS = 8, 2**20
# Inches: a square for the ids with the legend to its right; 8 in all, 800 pixels where a page shows it.
_WIDTH, _SIDE, _LEFT, _BOTTOM, _TOP = 8.0, 4.7, 0.75, 0.6, 0.5


def plot_positions(
    positions: PositionTable | Sequence[PositionTable],
    path: str | PathLike[str] | None = None,
    title: str | None = None,
    *,
    pictures: Sequence[npt.NDArray[np.uint8]] = (),
    same_scale: bool = True,
) -> Picture:
    """Draw the ids of every document.

    Schemes of one axis: ids over token indexes. All others: row ids over column ids. The same tables give the
    same bytes.

    Args:
        positions: one table of up to 8 documents, drawn one below the other; or several, such as one batch
            under several schemes, whose documents are drawn side by side, 9 in all. Up to 1,048,576 tokens.
        path: where to write; ends in .png or .svg. None writes nothing.
        title: above the first document, or above all panels; None names the scheme and counts the tokens.
        pictures: (height, width, 3) pixels to lay under the first images of one table, in order.
        same_scale: whether panels of one kind, side by side, show the same ids.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: no document, pictures under several tables, or another suffix.
        LimitExceededError: more documents or tokens than fit a picture.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target, title = picture_path(path), picture_title(title)
    if isinstance(positions, PositionTable) or not isinstance(positions, Sequence):
        _check_table(positions, "positions")
        return _plot_one(positions, target, title, pictures)
    for i, table in enumerate(positions):
        _check_table(table, f"positions[{i}]")
    panels = sum(table.num_documents for table in positions)
    if not panels:
        raise InvalidInputError("positions: got no table, want at least one to draw")
    if panels > MAX_PANELS:
        raise LimitExceededError(f"positions: got {counted(panels, 'document')} in all, want at most {MAX_PANELS}")
    if pictures:
        raise InvalidInputError(f"pictures: got {len(pictures)} beside several tables, want none")
    return draw_panels(positions, target, title, same_scale)


def _plot_one(
    positions: PositionTable, target: Path | None, title: str | None, pictures: Sequence[npt.NDArray[np.uint8]]
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
            axes, plane = figure.add_axes(box), read_plane(positions, d)
            draw_plane(axes, plane, _SIDE, plane.bounds, remaining)
            axes.set_title(title if title and d == 0 else heading, loc="left", fontsize=12, pad=10)
            if positions.axes == 3:
                axes.plot([], [], " ", label="(frame ids are not drawn)")
            _legend(axes)
    return figure


def _legend(axes: Any) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (1.02, 1.0), "borderaxespad": 0}
    axes.legend(**place, frameon=False, fontsize=9, labelspacing=0.9, handletextpad=0.6)


def _check_table(positions: PositionTable, name: str) -> None:
    instance(name, positions, PositionTable, "mmpos.place")
    if positions.num_documents == 0:
        raise InvalidInputError(f"{name}: got no document, want at least one to draw")
    if positions.num_documents > _MAX_DOCUMENTS:
        raise LimitExceededError(f"{name}: got {positions.num_documents} documents, want at most {_MAX_DOCUMENTS}")
    if positions.num_tokens > _MAX_TOKENS:
        raise LimitExceededError(f"{name}: got {counted(positions.num_tokens, 'token')}, want at most {_MAX_TOKENS}")
