"""The common ground of all pictures: files, colours, and a style that no reader's settings change."""

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
from mmpos.support.checks import text
from mmpos.support.extras import needed_for
from mmpos.support.files import local_path, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture

Style = dict[str, Any]
"""Keyword arguments of matplotlib."""

SUFFIXES = (".png", ".svg", ".pdf")
"""The suffixes that a picture's file may have."""

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT = "#222222", "#8a8a8a"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.4, 1.2, 1.4)))
_MARKERS = "osD^vPX"


def picture_path(path: str | PathLike[str] | None) -> Path | None:
    """Check the path of a picture; None is no file.

    Raises:
        InvalidInputError: a URL, or another suffix than .png, .svg or .pdf.
    """
    if path is None:
        return None
    target = local_path("path", path)
    if target.suffix.lower() not in SUFFIXES:
        raise InvalidInputError(f"path: got {str(path)!r}, want a file ending in .png, .svg or .pdf")
    return target


def picture_title(title: str | None) -> str | None:
    """Check a title, and escape it for matplotlib.

    Raises:
        InvalidInputError: no text, a lone surrogate, or a control character.
    """
    if title is None:
        return None
    if not isinstance(title, str):
        raise InvalidInputError(f"title: got {type(title).__name__}, want text")
    if any(ord(character) < 32 and character not in "\t\n\r" for character in text("title", title)):
        raise InvalidInputError(f"title: got {title!r}, want text without control characters")
    return title.replace("$", r"\$")  # or matplotlib reads what stands between two of them as a formula


def line_style(i: int) -> Style:
    """Choose colour, dashes and marker of the i-th curve; without colour, dashes and marker still tell it apart.

    >>> line_style(1)["color"], line_style(1)["marker"]
    ('#D55E00', 's')
    """
    return {
        "color": (*COLOURS, INK)[i % (len(COLOURS) + 1)],
        "linestyle": _DASHES[i % len(_DASHES)],
        "marker": _MARKERS[i % len(_MARKERS)],
    }


def scheme_styles(labels: Sequence[str]) -> list[Style]:
    """Choose the styles of curves by the places of schemes in SCHEMES, whatever the order of the curves.

    >>> [style["color"] for style in scheme_styles(["mrope", "rope-tie, split", "rope-tie, interleaved"])]
    ['#009E73', '#D55E00', '#0072B2']
    """
    names = [*SCHEMES, ""]
    first = [next((word for word in re.split(r"[,(\s]+", label) if word in SCHEMES), "") for label in labels]
    order = sorted(range(len(labels)), key=lambda i: (names.index(first[i]), labels[i]))
    return [line_style(order.index(i)) for i in range(len(labels))]


def quiet_axes(axes: Axes) -> None:
    """Draw faint lines behind the data, and no ticks, as all panels have them."""
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors="#444444", which="both")
    axes.spines[:].set_color("#bbbbbb")


def draw_curves(axes: Axes, x: npt.ArrayLike, curves: Sequence[tuple[npt.ArrayLike, str, Style]]) -> None:
    """Draw curves over x, each with its values, its label and what differs from a common style.

    Markers of curves that meet lie beside each other, and values of 0 and below, which have no logarithm, are left out
    of logarithmic axes.
    """
    for i, (values, label, style) in enumerate(curves):
        drawn = np.asarray(values, np.float64)
        every = max(1, drawn.size // 7)
        common: Style = {"linewidth": 1.6, "markersize": 4.5, "markeredgewidth": 0, "markevery": (i % every, every)}
        drawn = np.where(drawn > 0, drawn, np.nan) if axes.get_yscale() == "log" else drawn
        axes.plot(np.asarray(x)[: drawn.size], drawn, label=label, **common | style)


@contextmanager
def canvas(target: Path | None, width: float, height: float) -> Iterator[Picture]:
    """Open a figure to draw on, which is written when the block ends without an error.

    Args:
        target: of `picture_path`; None writes nothing.
        width: inches.
        height: inches.

    Raises:
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    try:
        with needed_for("plots", extra="cli"):
            from mmpos.analysis.plot.picture import Picture, style
    except ValueError as error:  # settings of its own that it refuses, as in MPLBACKEND
        raise ImportError(f"matplotlib cannot be imported: {error}") from error
    with style():
        figure = Picture(figsize=(width, height), facecolor="white")
        yield figure
        if target is not None:
            _save(figure, target)


def _save(figure: Picture, target: Path) -> None:
    from mmpos.analysis.plot.picture import DPI, METADATA

    kind = target.suffix.lower()[1:]
    with whole_file(target) as file:
        figure.savefig(file, format=kind, dpi=DPI, metadata=METADATA[kind])
