"""The figures of a run as a picture: curves over what grows, and dots for how far the rest is from the limit."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, Style, canvas, line_style, picture_path, quiet_axes
from mmpos.errors import InvalidInputError
from mmpos_bench.results import Measurement, SuiteReport, Timed, ratio_text, seconds_text, unit_of
from mmpos_bench.suites import SUITES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture

_WIDTH, _LEFT, _AXES, _GREY = 8.6, 3.6, 3.2, "#555555"  # inches: of the page, left of the axes, and of the axes
_ROW, _CURVE, _ABOVE, _BELOW, _HEAD = 0.2, 2.3, 0.4, 0.6, 1.6  # inches of a line of dots, of curves, around, on top
_ROLES = {"ours": ("mmpos", COLOURS[0]), "part": ("a part of it", COLOURS[5]), "peer": ("other projects", COLOURS[1])}

Group = tuple[Measurement, ...]


def plot_report(report: SuiteReport, path: str | PathLike[str] | None = None) -> Picture:
    """Draw every group of a report, one panel below the other; both scales are logarithmic.

    A group of cases on a curve shows the time per token (or another unit) over what grows; any other shows how many
    times as long as the limit each contestant takes.

    Args:
        report: of a run.
        path: where to write; ends in .png, .svg or .pdf. None writes nothing.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: nothing to draw, or another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    groups = [group for name in report.groups if _shown(group := report.group(name))]
    if not groups:
        raise InvalidInputError("report: got no curve and no ratio to a limit, want something to draw")
    heights = [_CURVE if _on_curve(group) else _ROW * (len(_lines(group)) + 1) for group in groups]
    height = _HEAD + sum(heights) + len(groups) * (_ABOVE + _BELOW)
    with canvas(target, _WIDTH, height) as figure:
        _head(figure, report, height)
        top = height - _HEAD
        for group, tall in zip(groups, heights, strict=True):
            top -= _ABOVE + tall
            axes = figure.add_axes((_LEFT / _WIDTH, top / height, _AXES / _WIDTH, tall / height))
            figure.text(0.03, (top + tall + 0.12) / height, group[0].group, fontsize=11, fontweight="bold")
            (_draw_curve if _on_curve(group) else _draw_dots)(axes, group)
            quiet_axes(axes)
            axes.tick_params(labelsize=8.5, which="both")
            top -= _BELOW
    return figure


def _on_curve(group: Group) -> bool:
    return all(m.point is not None for m in group)


def _shown(group: Group) -> list[tuple[Measurement, Timed]]:
    """List what a panel shows: contestants that have a time per unit, or a ratio to the limit."""
    curve = _on_curve(group)
    return [(m, e) for m in group for e in m.entries if (m.per_unit(e) if curve else m.limit and e.role != "limit")]


def _lines(group: Group) -> list[tuple[str, tuple[Measurement, Timed] | None]]:
    """List contestants under the name of each case, which has no figures."""
    lines: list[tuple[str, tuple[Measurement, Timed] | None]] = []
    for measurement in group:
        shown = [(entry.name, (m, entry)) for m, entry in _shown(group) if m is measurement]
        lines += [(measurement.name, None), *shown] if shown else []
    return lines


def _head(figure: Picture, report: SuiteReport, height: float) -> None:
    """Write the suite, the machine, a warning on quick runs, and what the dots are."""
    what = SUITES.get(report.suite, "")
    words = [(what, INK), (str(report.machine), _GREY), (report.command, _GREY)]
    words += [("quick: toy sizes, every path once; the figures mean nothing", COLOURS[1])] * report.quick
    figure.text(0.03, 1 - 0.35 / height, f"mmpos bench {report.suite}", fontsize=15, fontweight="bold")
    for i, (text, colour) in enumerate(words):
        figure.text(0.03, 1 - (0.6 + 0.2 * i) / height, text, fontsize=9, color=colour, wrap=True)
    for i, (label, colour) in enumerate(_ROLES.values()):
        figure.text(0.03 + 0.15 * i, 1 - 1.45 / height, f"● {label}", fontsize=9, color=colour)


def _draw_dots(axes: Axes, group: Group) -> None:
    """Draw a line for each contestant: its name, a dot with the range behind it, its time and its ratio."""
    lines = _lines(group)
    outside: Style = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9, "clip_on": False}
    ratios = [0.8, 2.5]  # at least so far: the axis of an even race is as easily read as its neighbours'
    for i, (name, shown) in enumerate(lines):
        axes.text(-1.02 if shown is None else -0.98, i, name, color=INK if shown is None else _GREY, **outside)
        if shown is None:
            continue
        measurement, entry = shown
        assert measurement.limit is not None
        timing, colour = entry.timing, _ROLES[entry.role][1]
        low, middle, high = (x / measurement.limit.timing.median for x in (timing.p20, timing.median, timing.p80))
        ratios += [low, high]
        axes.plot([low, high], [i, i], color=colour, linewidth=2, alpha=0.45)
        axes.plot([middle], [i], color=colour, marker="s" if entry.role == "peer" else "o", markersize=6)
        axes.text(1.22, i, seconds_text(timing.median), ha="right", color=_GREY, **outside)
        axes.text(1.42, i, ratio_text(middle), ha="right", color=INK, **outside)
    _log(axes.xaxis, min(ratios) / 1.15, max(ratios) * 1.15, "×")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    axes.set(ylim=(len(lines) - 0.2, -0.8), yticks=[])
    limits = dict.fromkeys(m.limit.name for m in group if m.limit)
    axes.set_xlabel(f"times as long as {', '.join(limits)}; left of 1×: faster than that call", fontsize=9, color=_GREY)


def _draw_curve(axes: Axes, group: Group) -> None:
    """Draw time per unit of work over what grows, with the range of each point behind it."""
    shown = _shown(group)
    size, unit = unit_of(sorted(m.per_unit(e) or 0.0 for m, e in shown)[len(shown) // 2])
    names = dict.fromkeys(e.name for _, e in shown)
    times: list[float] = []
    for i, name in enumerate(names):
        points = [(m.point.value, m.work[m.unit] * size, e) for m, e in shown if e.name == name and m.point]
        x = [value for value, _, _ in points]
        low, y, high = (
            [at / work for at, (_, work, _) in zip(column, points, strict=True)]
            for column in zip(*((e.timing.p20, e.timing.median, e.timing.p80) for _, _, e in points), strict=True)
        )
        faint: Style = {"color": FAINT, "linestyle": "--", "marker": ""} if points[0][2].role == "limit" else {}
        (line,) = axes.plot(x, y, label=name, markersize=4.5, linewidth=1.6, **line_style(i) | faint)
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        times += low + high
    counts = sorted({m.point.value for m in group if m.point})
    axes.set_xscale("symlog", linthresh=1) if min(counts) <= 0 else axes.set_xscale("log")
    axes.set_xticks(counts, [_short(count) for count in counts])
    axes.set_xticks([], minor=True)
    _log(axes.yaxis, min(times) / 1.2, max(times) * 1.2, "")
    axes.set_ylabel(f"{unit} per {group[0].unit.removesuffix('s')}", fontsize=9)
    axes.set_xlabel(group[0].point.axis if group[0].point else "", fontsize=9, color=_GREY)
    axes.legend(loc="upper right", bbox_to_anchor=(-0.2, 1.02), frameon=False, fontsize=9, borderaxespad=0)


def _log(axis: Any, low: float, high: float, suffix: str) -> None:
    """Make an axis logarithmic, with at least two numbers on it, and not too many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    steps = (1, 2, 5) if high / low < 100 else (1, 3) if high / low < 1000 else (1,)
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{suffix}"))


def _short(count: float) -> str:
    """Write a count in a few characters, powers of two as people call them.

    >>> [_short(count) for count in (0, 16, 1024, 65536, 2**20, 10_000, 786_432)]
    ['0', '16', '1k', '64k', '1M', '10k', '768k']
    """
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if count >= size and count % size == 0:
            return f"{int(count) // size}{unit}"
    return f"{count / 1e6:.2g}M" if count >= 1e5 else f"{count / 1e3:.3g}k" if count >= 1e3 else f"{count:g}"
