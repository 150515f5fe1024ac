"""Errors of phases over ids, and ids consumed over the size of an image: the numbers and their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import (
    COLOURS,
    INK,
    Style,
    canvas,
    draw_curves,
    picture_path,
    picture_title,
    quiet_axes,
    scheme_styles,
)
from mmpos.errors import InvalidInputError
from mmpos.positions.place import ids_consumed
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Exact, Float32Array, Float64Array, UInt64Array, fixed_point_turns
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, instance, int_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture


_WINDOW = 512
_MASK = 2**32 - 1
_TURN = 2 * np.pi


@dataclass(frozen=True, eq=False)
class PhaseErrors:
    """The largest errors up to each id, in rad, over all pairs; angles that are whole turns apart are the same.

    Args:
        ids: (points,) ascending.
        float32: (points,) of frequencies that are right to the last bit of float32, times ids in float32.
        hf: (points,) of the operations of Transformers: frequencies made in float32, times ids in float32.
        exact: (points,) of the turns that mmpos takes: 32 bits, from frequencies of 64 bits.
    """

    ids: IntArray
    float32: Float64Array
    hf: Float64Array
    exact: Float64Array


def phase_errors(rotary: Rotary, ids: npt.ArrayLike | None = None, window: int = _WINDOW) -> PhaseErrors:
    """Measure the largest errors of phases up to each id, by trying the ids right below it.

    Args:
        rotary: the frequencies; ids are integers, so axes and allocation play no part.
        ids: (points,) ascending, 0 to 2³¹ − 1; None is ten to a decade, and the last of them.
        window: how many ids below each are tried, where errors are largest; those between are not.

    Raises:
        InvalidInputError: no ids, or ids outside the bounds or not ascending.
    """
    decades = np.append(np.rint(10 ** (np.arange(94) / 10)).astype(np.int64), INT32_MAX)
    points = decades if ids is None else int_array("ids", ids, (None,))
    first_bad("ids", points, minimum=0, maximum=INT32_MAX)
    if not points.size or (np.diff(points) < 0).any():
        raise InvalidInputError(f"ids: got {points.tolist()}, want ascending ids, at least one")
    rounded, rest = rotary.inv_freq_array.astype(np.float32), turns_rest(rotary)
    largest = np.empty((3, points.size))
    for i, top in enumerate(points.tolist()):
        near = np.arange(max(0, top - window + 1), top + 1)
        truth = true_turns(near, rotary.turns, rest)
        angles = [float32_angles(near, frequencies) for frequencies in (rounded, rotary.inv_freq_float32)]
        off = [each.astype(np.float64) / _TURN - truth.astype(np.float64) * 2.0**-64 for each in angles]
        largest[:2, i] = [np.abs(turns - np.rint(turns)).max() * _TURN for turns in off]
        # The difference of turns is an integer.
        units = ((exact_turns(near, rotary.turns).astype(np.uint64) << np.uint64(32)) - truth).view(np.int64)
        largest[2, i] = np.abs(units.astype(np.float64)).max() * (_TURN * 2.0**-64)
    return PhaseErrors(points, *np.maximum.accumulate(largest, axis=1))


def turns_rest(rotary: Rotary) -> IntArray:
    """(pairs,) what rounding to the 64 bits of ``rotary.turns`` left, either sign, in units of 2⁻⁹⁶ turn."""
    with Exact().context():
        finer = fixed_point_turns([value * 2**32 for value in rotary.exact_inv_freq])
    return finer.astype(np.uint32).view(np.int32).astype(np.int64)


def true_turns(ids: IntArray, turns: UInt64Array, rest: IntArray) -> UInt64Array:
    """(ids, pairs) angles in units of 2⁻⁶⁴ turn, modulo one turn, within 1.25 units for ids within int32."""
    rows = ids[:, None]
    angles: UInt64Array = rows.astype(np.uint64) * turns + ((rows * rest) >> 32).astype(np.uint64)
    return angles


def exact_turns(ids: IntArray, turns: UInt64Array) -> IntArray:
    """(ids, pairs) angles in units of 2⁻³² turn: I·hi + ⌊I·lo/2³²⌋, as ``mmpos.rotary.reference.turns`` has them."""
    hi, lo = (turns >> np.uint64(32)).astype(np.int64), (turns & np.uint64(_MASK)).astype(np.int64)
    rows = ids[:, None]
    angles: IntArray = (rows * hi + ((rows * lo) >> 32)) & _MASK
    return angles


def float32_angles(ids: IntArray, inv_freq: Float32Array) -> Float32Array:
    """(ids, pairs) float32 products of ids and frequencies, as ``mmpos.rotary.reference.cos_sin_as_hf`` has them."""
    return ids.astype(np.float32)[:, None] * inv_freq


# Between the powers of two lie odd and even sides, which rope-tie-lcm tells apart.
_SIDES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)


@dataclass(frozen=True, eq=False)
class Growth:
    """The ids that one image consumes: by how much text goes on from before it to after it.

    Args:
        schemes: their names, with the parameters that are not the defaults.
        sides: (sizes,) n, of squares n×n and strips 1×n² of as many patches.
        squares: (schemes, sizes) ids that n×n consumes.
        strips: (schemes, sizes) ids that 1×n² consumes.
    """

    schemes: tuple[str, ...]
    sides: IntArray
    squares: IntArray
    strips: IntArray

    @property
    def patches(self) -> IntArray:
        """(sizes,) patches of an image."""
        return self.sides**2

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the schemes, those that consume the same for every image together."""
        groups: dict[bytes, list[int]] = {}
        for i in range(len(self.schemes)):
            groups.setdefault(self.squares[i].tobytes() + self.strips[i].tobytes(), []).append(i)
        return tuple(map(tuple, groups.values()))


def id_growth(schemes: Sequence[str | Scheme] | None = None, sides: npt.ArrayLike = _SIDES) -> Growth:
    """Count the ids that squares and strips consume under each scheme.

    >>> id_growth(["rope-tie", "mrope"], [2, 24]).squares.tolist()
    [[8, 624], [2, 24]]

    Args:
        schemes: names or objects; None is every scheme that has a next position.
        sides: (sizes,) sides of the squares, 1 to 1024.

    Raises:
        InvalidInputError: unknown scheme, or a side outside the bounds.
        UnsupportedError: a scheme without a next position.
    """
    lengths = int_array("sides", sides, (None,))
    first_bad("sides", lengths, minimum=1, maximum=1024)
    chosen = [get_scheme(scheme) for scheme in (SCHEMES if schemes is None else schemes)]
    if schemes is None:
        chosen = [scheme for scheme in chosen if scheme.resumable]
    images = [[Grid(side, side) for side in lengths.tolist()], [Grid(1, side * side) for side in lengths.tolist()]]
    squares, strips = (np.stack([ids_consumed(scheme, each) for scheme in chosen]) for each in images)
    return Growth(tuple(scheme.label for scheme in chosen), lengths, squares, strips)


def plot_phase_error(errors: PhaseErrors, path: str | PathLike[str] | None = None, title: str | None = None) -> Picture:
    """Draw the largest errors of phases over ids.

    Path, result and errors are as for ``plot_positions``.

    Args:
        errors: of ``phase_errors``.
        path: where to write.
        title: above the picture; None says what is drawn.
    """
    instance("errors", errors, PhaseErrors, "phase_errors")
    target, title = picture_path(path), picture_title(title)
    # What may coincide lies on top of each other and can still be told apart: wide and pale, narrow and dashed.
    hf: Style = {"color": "#E69F00", "linewidth": 5.0}
    float32: Style = {"color": "#D55E00", "linestyle": (0, (4, 1.6)), "linewidth": 1.8}
    curves = [
        (errors.hf, "hf: frequencies and angles in float32, as Transformers computes them", hf),
        (errors.float32, "float32 angles of frequencies that are right to the last bit", float32),
        (errors.exact, "exact: 32-bit turns of 64-bit frequencies", {"color": COLOURS[0], "linewidth": 2.2}),
    ]
    with canvas(target, 8.0, 4.4) as figure:
        axes = figure.box(0.85, 0.43, 6.95, 3.35)
        axes.set_title(title or "Largest error of a phase up to each id", loc="left", fontsize=13, pad=10)
        _log_log(axes)
        draw_curves(axes, errors.ids, curves)
        axes.axhline(np.pi, color=INK, linewidth=1, linestyle=":")
        low = min(float(values[values > 0].min(initial=np.pi)) for values, *_ in curves)
        axes.set_ylim(low / 6, 30)
        axes.text(errors.ids[0], np.pi * 1.5, "half a turn: nothing is left of the phase", fontsize=9, color=INK)
        _note(axes, errors.ids, errors.hf, 10**6, (3, -14))
        _note(axes, errors.ids, errors.exact, int(errors.ids[-1]), (4, 8), ha="right")
        axes.set_xlabel("position id")
        axes.set_ylabel("error in rad")
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.3), frameon=False, fontsize=9)
    return figure


def _note(axes: Axes, ids: IntArray, values: Float64Array, at: int, place: tuple[int, int], **options: Any) -> None:
    """The value at one id in figures, where it is a point of the curve."""
    for value in values[ids == at][:1].tolist():
        axes.plot([at], [value], "o", color=INK, markersize=4.5, zorder=5)
        words = f"{value:.2g} rad at id {at:,}".replace("e-0", "e-")
        axes.annotate(words, (at, value), place, textcoords="offset points", fontsize=9, color=INK, **options)


def plot_growth(growth: Growth, path: str | PathLike[str] | None = None, title: str | None = None) -> Picture:
    """Draw the ids that images consume over their patches, squares to the left and strips to the right.

    Path, result and errors are as for ``plot_positions``.

    Args:
        growth: of ``id_growth``.
        path: where to write.
        title: above the picture; None says what is drawn.
    """
    instance("growth", growth, Growth, "id_growth")
    target, title = picture_path(path), picture_title(title)
    labels = [fill(", ".join(growth.schemes[i] for i in group), 58, break_on_hyphens=False) for group in growth.alike]
    # Curves that meet: the later, narrower one lies on the earlier, wider one.
    styles = [{**style, "linewidth": 3.4 - 0.35 * k} for k, style in enumerate(scheme_styles(labels))]
    lines, half = [label.count("\n") + 1 for label in labels], -(-len(labels) // 2)
    key = 0.1 + 0.2 * max(sum(lines[:half]), sum(lines[half:]))
    with canvas(target, 8.0, 4.55 + key) as figure:
        figure.words(0.12, 0.32, title or "Ids that one image consumes", fontsize=13, color=INK)
        for i, (values, name) in enumerate(((growth.squares, "squares, n×n"), (growth.strips, "strips, 1×n²"))):
            axes = figure.box(0.75 + 3.7 * i, 0.75, 3.4, 3.25)
            axes.set_title(name, loc="left", fontsize=11, pad=6)
            _log_log(axes)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,.0f}")
            axes.set_ylim(0.7, 1.6 * max(growth.squares.max(), growth.strips.max()))
            alike = [values[group[0]] for group in growth.alike]
            draw_curves(axes, growth.patches, [*zip(alike, labels, styles, strict=True)])
            axes.set_xlabel("patches of the image")
            axes.set_ylabel("" if i else "ids consumed")
            axes.tick_params(labelleft=not i)
        place: Style = {"loc": "lower left", "bbox_to_anchor": figure.place(0.2, 4.5 + key), "borderaxespad": 0}
        entries = axes.get_legend_handles_labels()
        figure.legend(*entries, **place, ncols=2, frameon=False, fontsize=9, handlelength=3.4)
    return figure


def _log_log(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    quiet_axes(axes)
    axes.tick_params(labelsize=9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=20))
        axis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
