"""Phase errors against id, and ids consumed against image size: the numbers and their plots."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import COLOURS, INK, Style, canvas, draw_curves, picture_path, quiet_axes, scheme_styles
from mmpos.errors import InvalidInputError
from mmpos.positions.place import ids_consumed
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Exact, Float64Array, fixed_point_turns
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, instance, int_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture

DECADES = np.append(np.rint(10 ** (np.arange(94) / 10)).astype(np.int64), INT32_MAX)
"""Ten ids per decade, and the largest id."""

WINDOW = 512
"""Number of ids measured up to and including each point, where errors are largest; other ids are not measured."""

_MASK = 2**32 - 1
_TURN = 2 * np.pi


def phase_errors(rotary: Rotary, ids: npt.ArrayLike = DECADES, window: int = WINDOW) -> dict[str, Float64Array]:
    """Measure the largest phase error up to each point, over a window of ids that ends at the point.

    Args:
        rotary: the frequencies; axes and allocation do not matter.
        ids: (points,) ascending integers, 0 to 2³¹ − 1.
        window: number of ids measured up to and including each point.

    Returns:
        (points,) largest errors in rad over all pairs, modulo whole turns, for three ways to compute phases: "hf", as
        in Transformers, multiplies float32 ids by frequencies computed in float32; "float32" uses frequencies that are
        correct to the last bit of float32; "exact" uses the 32-bit turns of mmpos, from 64-bit frequencies.

    Raises:
        InvalidInputError: there are no ids, or they are outside the bounds or not ascending.
    """
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    points = int_array("ids", ids, (None,))
    first_bad("ids", points, minimum=0, maximum=INT32_MAX)
    if not points.size or (np.diff(points) < 0).any():
        raise InvalidInputError(f"ids: got {points.tolist()}, want ascending ids, at least one")
    with Exact().context():  # the remainder beyond 64 bits of a turn, in units of 2⁻⁹⁶ turn
        finer = fixed_point_turns([value * 2**32 for value in rotary.exact_inv_freq])
    rest = finer.astype(np.uint32).view(np.int32).astype(np.int64)
    turns = rotary.turns.ravel()
    hi, lo = (turns >> np.uint64(32)).astype(np.int64), (turns & np.uint64(_MASK)).astype(np.int64)
    frequencies = rotary.inv_freq_float32.ravel(), rotary.inv_freq_array.astype(np.float32).ravel()
    largest = np.empty((3, points.size))
    for i, top in enumerate(points.tolist()):
        near = np.arange(max(0, top - window + 1), top + 1)[:, None]
        truth = near.astype(np.uint64) * turns + ((near * rest) >> 32).astype(np.uint64)  # in units of 2⁻⁶⁴ turn
        for row, frequency in enumerate(frequencies):
            angle = near.astype(np.float32) * frequency
            off = angle.astype(np.float64) / _TURN - truth.astype(np.float64) * 2.0**-64
            largest[row, i] = np.abs(off - np.rint(off)).max() * _TURN
        exact = (near * hi + ((near * lo) >> 32)) & _MASK  # in units of 2⁻³² turn, as in mmpos.rotary.reference.turns
        units = ((exact.astype(np.uint64) << np.uint64(32)) - truth).view(np.int64)
        largest[2, i] = np.abs(units.astype(np.float64)).max() * (_TURN * 2.0**-64)
    return dict(zip(("hf", "float32", "exact"), np.maximum.accumulate(largest, axis=1), strict=True))


def plot_phase_error(rotary: Rotary, path: str | PathLike[str] | None = None) -> Picture:
    """Draw ``phase_errors`` against id.

    The path, the result and the errors are as for ``plot_positions``.

    Args:
        rotary: the frequencies.
        path: the file to write; None writes nothing.
    """
    target, errors = picture_path(path), phase_errors(rotary)
    # Coinciding curves remain distinguishable: the lower one is wide and pale, the upper one narrow and dashed.
    hf: Style = {"color": "#E69F00", "linewidth": 5.0}
    float32: Style = {"color": "#D55E00", "linestyle": (0, (4, 1.6)), "linewidth": 1.8}
    curves = [
        (errors["hf"], "hf: frequencies and angles in float32, as Transformers computes them", hf),
        (errors["float32"], "float32 angles from correctly rounded frequencies", float32),
        (errors["exact"], "exact: 32-bit turns of 64-bit frequencies", {"color": COLOURS[0], "linewidth": 2.2}),
    ]
    with canvas(target, 8.0, 4.4, "Largest error of a phase up to each id") as figure:
        axes = figure.subplots()
        _log_log(axes)
        draw_curves(axes, DECADES, curves)
        axes.axhline(np.pi, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel="position id", ylabel="error in rad", ylim=(errors["exact"].min() / 6, 30))
        axes.text(1, np.pi * 1.5, "half a turn: nothing is left of the phase", fontsize=9, color=INK)
        for name, at, place, side in (("hf", 60, (3, -14), "left"), ("exact", -1, (4, 8), "right")):
            point, value = int(DECADES[at]), float(errors[name][at])
            axes.plot([point], [value], "o", color=INK, markersize=4.5, zorder=5)
            label = f"{value:.2g} rad at id {point:,}".replace("e-0", "e-")
            axes.annotate(label, (point, value), place, textcoords="offset points", fontsize=9, ha=side)
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.3), frameon=False, fontsize=9)
    return figure


# Sides between the powers of two are both odd and even, since rope-tie-lcm depends on the divisors of a side.
SIDES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)


def id_growth(schemes: Sequence[str | Scheme] | None = None, sides: npt.ArrayLike = SIDES) -> dict[str, IntArray]:
    """Count the ids that one image consumes in each scheme: how far the image advances the ids of the text after it.

    >>> id_growth(["rope-tie", "mrope"], [2, 24])["rope-tie"].tolist()
    [[8, 624], [9, 1153]]

    Args:
        schemes: names or objects; None means every scheme that has a next position.
        sides: (sizes,) sides n of the squares, 1 to 1024.

    Returns:
        (2, sizes) ids of n×n squares and of 1×n² strips, by the scheme's name with its non-default parameters.

    Raises:
        InvalidInputError: a scheme is unknown, or a side is outside the bounds.
        UnsupportedError: a scheme has no next position.
    """
    lengths = int_array("sides", sides, (None,))
    first_bad("sides", lengths, minimum=1, maximum=1024)
    chosen = [get_scheme(scheme) for scheme in (SCHEMES if schemes is None else schemes)]
    if schemes is None:
        chosen = [scheme for scheme in chosen if scheme.resumable]
    images = [Grid(side, side) for side in lengths.tolist()] + [Grid(1, side * side) for side in lengths.tolist()]
    return {scheme.label: ids_consumed(scheme, images).reshape(2, -1) for scheme in chosen}


def plot_growth(schemes: Sequence[str | Scheme] | None = None, path: str | PathLike[str] | None = None) -> Picture:
    """Draw ``id_growth`` against the number of patches, for squares and strips; schemes with equal ids share a curve.

    The path, the result and the errors are as for ``plot_positions``.

    Args:
        schemes: as for ``id_growth``.
        path: the file to write; None writes nothing.
    """
    target, alike = picture_path(path), dict[bytes, list[str]]()
    growth = id_growth(schemes)
    for name, ids in growth.items():
        alike.setdefault(ids.tobytes(), []).append(name)
    labels = {names[0]: fill(", ".join(names), 56, break_on_hyphens=False) for names in alike.values()}
    # Later curves are narrower, so that earlier ones remain visible where curves meet.
    styles = [{**style, "linewidth": 3.4 - 0.35 * k} for k, style in enumerate(scheme_styles([*labels]))]
    height = 4.6 + 0.1 * "\n".join(labels.values()).count("\n")
    with canvas(target, 8.0, height, "Ids that one image consumes") as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for i, (axes, kind) in enumerate(zip(panels, ("squares, n×n", "strips, 1×n²"), strict=True)):
            axes.set_title(kind, loc="left", fontsize=11)
            _log_log(axes)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,.0f}")
            curves = [
                (growth[name][i], label, style) for (name, label), style in zip(labels.items(), styles, strict=True)
            ]
            draw_curves(axes, np.square(SIDES), curves)
            axes.set_xlabel("patches of the image")
        panels[0].set_ylabel("ids consumed")
        entries = panels[0].get_legend_handles_labels()
        figure.legend(*entries, loc="outside lower left", ncols=2, frameon=False, fontsize=9, handlelength=3.4)
    return figure


def _log_log(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log")
    quiet_axes(axes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=20))
    axes.minorticks_off()
