"""The figures of a run as a picture: dots for how far each contestant is from the limit."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, Style, canvas, picture_path, quiet_axes
from mmpos.errors import InvalidInputError
from mmpos_bench.results import Measurement, SuiteReport, Timed, ratio_text, seconds_text
from mmpos_bench.suites import SUITES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture

_WIDTH, _LEFT, _AXES, _GREY = 8.6, 3.6, 3.2, "#555555"  # inches: of the page, left of the axes, and of the axes
_ROW, _ABOVE, _BELOW, _HEAD = 0.2, 0.4, 0.6, 1.6  # inches of a line, around a panel, on top
_ROLES = {"ours": ("mmpos", COLOURS[0]), "part": ("a part of it", COLOURS[5]), "peer": ("other projects", COLOURS[1])}

Group = tuple[Measurement, ...]


def plot_report(report: SuiteReport, path: str | PathLike[str] | None = None) -> Picture:
    """Draw every group of a report, one panel below the other: how many times as long as the limit each contestant
    takes, on a logarithmic scale.

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
    groups = [group for name in report.groups if _lines(group := report.group(name))]
    if not groups:
        raise InvalidInputError("report: got no ratio to a limit, want something to draw")
    heights = [_ROW * (len(_lines(group)) + 1) for group in groups]
    height = _HEAD + sum(heights) + len(groups) * (_ABOVE + _BELOW)
    with canvas(target, _WIDTH, height) as figure:
        _head(figure, report, height)
        top = height - _HEAD
        for group, tall in zip(groups, heights, strict=True):
            top -= _ABOVE + tall
            axes = figure.add_axes((_LEFT / _WIDTH, top / height, _AXES / _WIDTH, tall / height))
            figure.text(0.03, (top + tall + 0.12) / height, group[0].group, fontsize=11, fontweight="bold")
            _draw(axes, group)
            quiet_axes(axes)
            axes.tick_params(labelsize=8.5, which="both")
            top -= _BELOW
    return figure


def _lines(group: Group) -> list[tuple[str, tuple[Measurement, Timed] | None]]:
    """List contestants under the name of each case that has a limit; the name has no figures."""
    lines: list[tuple[str, tuple[Measurement, Timed] | None]] = []
    for measurement in group:
        shown = [(entry.name, (measurement, entry)) for entry in measurement.entries if entry.role != "limit"]
        lines += [(measurement.name, None), *shown] if shown and measurement.limit else []
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


def _draw(axes: Axes, group: Group) -> None:
    """Draw a line for each contestant: its name, a dot with the range behind it, its time and its ratio."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

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
    high, low = max(ratios), min(ratios)
    steps = (1, 2, 5) if high / low < 100 else (1, 3) if high / low < 1000 else (1,)
    axes.set(xscale="log", xlim=(low / 1.15, high * 1.15))
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}×"))
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    axes.set(ylim=(len(lines) - 0.2, -0.8), yticks=[])
    limits = dict.fromkeys(m.limit.name for m in group if m.limit)
    axes.set_xlabel(f"times as long as {', '.join(limits)}; left of 1×: faster than that call", fontsize=9, color=_GREY)
