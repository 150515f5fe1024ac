"""Pictures on two logarithmic scales: errors of phases over ids, and ids consumed over the size of an image."""

from __future__ import annotations

from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.analysis.plot.canvas import COLOURS, INK, canvas, line_style, picture_path, picture_title, quiet_axes
from mmpos.analysis.plot.growth import Growth
from mmpos.analysis.plot.precision import PhaseErrors
from mmpos.rotary.frequencies import Float64Array
from mmpos.support.checks import IntArray, instance

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture

_WIDTH = 8.0


def plot_phase_error(errors: PhaseErrors, path: str | PathLike[str] | None = None, title: str | None = None) -> Picture:
    """Draw the largest errors of phases over ids.

    Args:
        errors: of ``phase_errors``.
        path: where to write; ends in .png or .svg. None writes nothing.
        title: above the picture; None says what is drawn.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    instance("errors", errors, PhaseErrors, "phase_errors")
    target, title = picture_path(path), picture_title(title)
    height = 4.4
    with canvas(target, _WIDTH, height) as figure:
        axes = figure.add_axes((0.85 / _WIDTH, 0.62 / height, 6.95 / _WIDTH, 3.35 / height))
        axes.set_title(title or "Largest error of a phase up to each id", loc="left", fontsize=13, pad=10)
        _log_log(axes)
        # What may coincide lies on top of each other and can still be told apart: wide and pale, narrow and dashed.
        curves = (
            (errors.hf, "hf: frequencies and angles in float32, as Transformers computes them", "#E69F00", "-", 5.0),
            (
                errors.float32,
                "float32 angles of frequencies that are right to the last bit",
                "#D55E00",
                (0, (4, 1.6)),
                1.8,
            ),
            (errors.exact, "exact: 32-bit turns of 64-bit frequencies", COLOURS[0], "-", 2.2),
        )
        for values, label, colour, dashes, width in curves:
            # An error of 0 has no logarithm.
            drawn = np.where(values > 0, values, np.nan)
            axes.plot(errors.ids, drawn, color=colour, linestyle=dashes, linewidth=width, label=label)
        axes.axhline(np.pi, color=INK, linewidth=1, linestyle=":")
        low = min(float(values[values > 0].min(initial=np.pi)) for values, *_ in curves)
        axes.set_ylim(low / 6, 30)
        axes.text(errors.ids[0], np.pi * 1.5, "half a turn: nothing is left of the phase", fontsize=9, color=INK)
        _note(axes, errors.ids, errors.hf, 10**6)
        _note(axes, errors.ids, errors.exact, int(errors.ids[-1]))
        axes.set_xlabel("position id")
        axes.set_ylabel("error in rad")
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.3), frameon=False, fontsize=9)
    return figure


def _note(axes: Any, ids: IntArray, values: Float64Array, at: int) -> None:
    """The value at one id in figures, where it is a point of the curve."""
    for i in np.flatnonzero(ids == at)[:1].tolist():
        axes.plot([at], [values[i]], "o", color=INK, markersize=4.5, zorder=5)
        words = {"textcoords": "offset points", "fontsize": 9, "color": INK, "xytext": (3, -14)}
        last = i == ids.size - 1
        words |= {"ha": "right", "xytext": (4, 8)} if last else {}
        value = f"{values[i]:.2g}".replace("e-0", "e-")
        axes.annotate(f"{value} rad at id {at:,}", (at, values[i]), **words)


def plot_growth(growth: Growth, path: str | PathLike[str] | None = None, title: str | None = None) -> Picture:
    """Draw the ids that images consume over their patches, squares to the left and strips to the right.

    Args:
        growth: of ``id_growth``.
        path: where to write; ends in .png or .svg. None writes nothing.
        title: above the picture; None says what is drawn.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    instance("growth", growth, Growth, "id_growth")
    target, title = picture_path(path), picture_title(title)
    labels = [fill(", ".join(growth.schemes[i] for i in group), 58, break_on_hyphens=False) for group in growth.alike]
    lines = [max(1, label.count("\n") + 1) for label in labels]
    half = -(-len(labels) // 2)
    key = 0.1 + 0.2 * max(sum(lines[:half]), sum(lines[half:]))
    side, top, foot = 3.25, 0.75, 0.55
    height = top + side + foot + key
    with canvas(target, _WIDTH, height) as figure:
        figure.text(0.12 / _WIDTH, 1 - 0.32 / height, title or "Ids that one image consumes", fontsize=13, color=INK)
        limits = 0.7, 1.6 * max(float(growth.squares.max()), float(growth.strips.max()))
        for i, (values, name) in enumerate(((growth.squares, "squares, n×n"), (growth.strips, "strips, 1×n²"))):
            box = ((0.75 + 3.7 * i) / _WIDTH, (foot + key) / height, 3.4 / _WIDTH, side / height)
            axes = figure.add_axes(box)
            axes.set_title(name, loc="left", fontsize=11, pad=6)
            _log_log(axes)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,.0f}")
            axes.set_ylim(*limits)
            for k, group in enumerate(growth.alike):
                # Curves that meet: the later, narrower one lies on the earlier, wider one.
                style = {**line_style(k), "linewidth": 3.4 - 0.35 * k, "markersize": 4.5, "markeredgewidth": 0}
                every = max(1, growth.sides.size // 7)
                axes.plot(growth.patches, values[group[0]], label=labels[k], markevery=(k % every, every), **style)
            axes.set_xlabel("patches of the image")
            if i:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel("ids consumed")
        handles, names = axes.get_legend_handles_labels()
        place: dict[str, Any] = {
            "loc": "lower left",
            "bbox_to_anchor": (0.2 / _WIDTH, 0.05 / height),
            "borderaxespad": 0,
        }
        figure.legend(handles, names, **place, ncols=2, frameon=False, fontsize=9, handlelength=3.4)
    return figure


def _log_log(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    quiet_axes(axes)
    axes.tick_params(labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=20))
        axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
