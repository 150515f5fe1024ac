"""Common parts of all plots: files, colours and a style that does not depend on the user's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.schemes import SCHEMES
from mmpos.support.extras import needed_for
from mmpos.support.files import local_path, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from mmpos.analysis.plot.picture import Picture

Style = dict[str, Any]
"""Keyword arguments of matplotlib."""

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT = "#222222", "#8a8a8a"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.4, 1.2, 1.4)))
_MARKERS = "osD^vPX"


def picture_path(path: str | PathLike[str] | None, name: str = "path") -> Path | None:
    """Check the path of a plot; None writes no file.

    Args:
        path: the path.
        name: name of the argument, for errors.

    Raises:
        InvalidInputError: the path is a URL, or its suffix is not .png, .svg or .pdf.
    """
    if path is None:
        return None
    target = local_path(name, path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInputError(f"{name}: got {str(path)!r}, want a file ending in .png, .svg or .pdf")
    return target


def line_style(i: int) -> Style:
    """Return the colour, dashes and marker of the i-th curve; curves remain distinguishable without colour.

    >>> line_style(1)["color"], line_style(1)["marker"]
    ('#D55E00', 's')
    """
    return {
        "color": (*COLOURS, INK)[i % (len(COLOURS) + 1)],
        "linestyle": _DASHES[i % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
    }


def scheme_styles(labels: Sequence[str]) -> list[Style]:
    """Return the style of each curve, chosen by its scheme's place in SCHEMES, whatever the order of the curves.

    >>> [style["color"] for style in scheme_styles(["mrope", "rope-tie, split", "rope-tie, interleaved"])]
    ['#009E73', '#D55E00', '#0072B2']
    """
    names = [*SCHEMES, ""]
    first = [next((word for word in re.split(r"[,(\s]+", label) if word in SCHEMES), "") for label in labels]
    order = sorted(range(len(labels)), key=lambda i: (names.index(first[i]), labels[i]))
    return [line_style(order.index(i)) for i in range(len(labels))]


def quiet_axes(axes: Axes) -> None:
    """Apply the style of all panels: faint grid lines behind the data, and no ticks."""
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444", which="both", labelsize=9)
    axes.spines[:].set_color("#bbbbbb")


def draw_curves(axes: Axes, x: npt.ArrayLike, curves: Sequence[tuple[npt.ArrayLike, str, Style]]) -> None:
    """Draw curves over x, each with values, a label and changes to the common style.

    Markers of coinciding curves are staggered. Logarithmic axes omit values of 0 and below.
    """
    for i, (values, label, style) in enumerate(curves):
        drawn = np.asarray(values, np.float64)
        every = max(1, drawn.size // 7)
        common: Style = {"linewidth": 1.6, "markersize": 4.5, "markeredgewidth": 0, "markevery": (i % every, every)}
        drawn = np.where(drawn > 0, drawn, np.nan) if axes.get_yscale() == "log" else drawn
        axes.plot(np.asarray(x)[: drawn.size], drawn, label=label, **common | style)


def draw_map(
    axes: Axes, values: npt.NDArray[np.float64], cross: tuple[int, int], bounds: tuple[float, float]
) -> AxesImage:
    """Draw (rows, columns) values in colours between bounds, with a cross at one row and column."""
    low, high = bounds
    image = axes.imshow(values, cmap="cividis", vmin=low, vmax=high, interpolation="nearest")
    row, column = cross
    for colour, size, edge in (("white", 9, 3.2), (INK, 8, 1.5)):
        axes.plot([column], [row], "x", color=colour, markersize=size, markeredgewidth=edge)
    axes.locator_params(nbins=5, integer=True)
    axes.tick_params(length=0, colors="#444444", labelsize=8.5)
    axes.spines[:].set_visible(False)
    return image


def panel_columns(count: int) -> int:
    """Return the number of columns in which to arrange this number of panels."""
    return min(count, 2 if count in (2, 4) else 3)


@contextmanager
def canvas(target: Path | None, width: float, height: float, title: str = "") -> Iterator[Picture]:
    """Open a figure that lays out its panels, and write it if the block ends without an error.

    Args:
        target: result of ``picture_path``; None writes nothing.
        width: width in inches.
        height: height in inches.
        title: title above the panels; none if empty.

    Raises:
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    try:
        with needed_for("plots", extra="cli"):
            from mmpos.analysis.plot.picture import Picture, style
    except ValueError as error:  # matplotlib rejects a setting, such as MPLBACKEND
        raise ImportError(f"matplotlib cannot be imported: {error}") from error
    with style():
        figure = Picture(figsize=(width, height), facecolor="white", layout="constrained")
        if title:
            figure.suptitle(title, x=0.015, ha="left", fontsize=13, color=INK)
        yield figure
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # another layout would move panels slightly
        if target is not None:
            with whole_file(target) as file:
                figure.write(file, target.suffix.lower()[1:])
