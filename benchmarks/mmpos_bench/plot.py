"""The figures of a run as a picture: curves over what grows, and dots for how far the rest is from the limit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, Style, canvas, in_axes, line_style, picture_path, quiet_axes
from mmpos.errors import InvalidInputError
from mmpos_bench.results import Entry, Measurement, Report, ratio_text, seconds_text, unit_of
from mmpos_bench.suites import SUITES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from mmpos.analysis.plot.picture import Picture

Group = tuple[Measurement, ...]

# Inches: of the page; of a column, and where the axes of dots and of curves lie in it; around a panel.
_TITLE, _QUICK, _FOOT, _COLUMN, _MARGIN = 1.6, 0.32, 0.1, 7.4, 0.25
_DOTS, _DOTS_WIDTH, _ROW = 3.05, 2.75, 0.2
_CURVE, _CURVE_WIDTH, _CURVE_HEIGHT = 0.85, 4.0, 2.3
_ABOVE, _BELOW = 0.42, 0.62
_GREY = "#555555"

# Colours of curves: those of other projects are warm, as their dots are.
_SIDES = {"ours": (COLOURS[0], COLOURS[2], COLOURS[5], COLOURS[3], INK), "peer": (COLOURS[1], COLOURS[4])}

_ROLES = {
    "ours": ("mmpos", COLOURS[0], "o"),
    "part": ("a part of it", COLOURS[5], "o"),
    "peer": ("other projects", COLOURS[1], "s"),
}


def plot_report(report: Report, path: str | PathLike[str] | None = None) -> Picture:
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
    panels = [_panel(report.group(name)) for name in report.groups]
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        raise InvalidInputError("report: got no curve and no ratio to a limit, want something to draw")
    places, height = _layout(panels, _TITLE + (_QUICK if report.quick else 0.0))
    width = _COLUMN * (1 + max(column for column, _ in places))
    with canvas(target, width, height) as figure:
        _head(figure, report, any(not panel.curve for panel in panels))
        for panel, (column, bottom) in zip(panels, places, strict=True):
            left = column * _COLUMN
            start, wide = (_CURVE, _CURVE_WIDTH) if panel.curve else (_DOTS, _DOTS_WIDTH)
            axes = figure.add_axes(((left + start) / width, bottom / height, wide / width, panel.height / height))
            name: Style = {"fontsize": 11, "color": INK, "fontweight": "bold"}
            figure.text((left + _MARGIN) / width, (bottom + panel.height + 0.14) / height, panel.title, **name)
            (_draw_curve if panel.curve else _draw_dots)(axes, panel)
    return figure


@dataclass(frozen=True)
class _Panel:
    """One group: curves of time over what grows, or lines with the figures of a case and a contestant."""

    group: Group
    title: str
    curve: bool
    lines: tuple[tuple[str, tuple[Measurement, Entry] | None], ...]  # without figures, a line is a heading

    @property
    def height(self) -> float:
        """Inches of the axes."""
        return _CURVE_HEIGHT if self.curve else _ROW * (len(self.lines) + 0.6)


def _panel(group: Group) -> _Panel:
    """List contestants under the name of each case; where all cases have the same single one, the title names it."""
    curve = all(m.point is not None for m in group)
    shown = [(m, e) for m in group for e in m.entries if e.role != "limit" and (m.per_unit(e) if curve else m.limit)]
    title, names = group[0].group, {e.name for _, e in shown}
    if not curve and len(shown) == len(group) and len(names) == 1:
        (name,) = names
        alone = "" if name == "mmpos" or name in title else f": {name}"
        return _Panel(group, title + alone, curve, tuple((m.name, (m, e)) for m, e in shown))
    lines: list[tuple[str, tuple[Measurement, Entry] | None]] = []
    for m, cases in groupby(shown, key=lambda case: case[0]):
        lines += [(m.name, None), *((e.name, (m, e)) for _, e in cases)]
    return _Panel(group, title, curve, tuple(lines))


def _layout(panels: list[_Panel], top: float) -> tuple[list[tuple[int, float]], float]:
    """Find the column of each panel, the inches below it, and the height of the page: two columns that end alike."""
    used, places = [top, top], []
    for panel in panels:
        column = 0 if used[0] <= used[1] or len(panels) == 1 else 1
        used[column] += _ABOVE + panel.height + _BELOW
        places.append((column, used[column] - _BELOW))
    height = max(used) + _FOOT
    return [(column, height - below) for column, below in places], height


def _head(figure: Picture, report: Report, dots: bool) -> None:
    """Write the suite, the machine, a warning on quick runs, and how to read the dots."""
    from matplotlib.lines import Line2D

    width, height = figure.get_size_inches()

    def write(inches: float, text: str, **style: Any) -> None:
        grey: Style = {"fontsize": 9, "color": _GREY}
        figure.text(_MARGIN / width, 1 - inches / height, text, **(grey | style))

    write(0.38, f"mmpos bench {report.suite}", fontsize=15, color=INK, fontweight="bold")
    write(0.63, SUITES.get(report.suite, ""), fontsize=10.5, color=INK)
    write(0.86, str(report.machine))
    write(1.04, report.command)
    if report.quick:
        words = "quick: toy sizes, every path once; the figures mean nothing"
        box: Style = {"boxstyle": "square,pad=0.35", "facecolor": COLOURS[1], "edgecolor": "none"}
        write(1.33, f" {words} ", fontsize=10, color="white", fontweight="bold", bbox=box)
    if dots:
        roles = dict.fromkeys(e.role for m in report.measurements for e in m.entries if e.role in _ROLES)
        handles = [_dot(Line2D([], []), role) for role in _ROLES if role in roles]
        label = "1×: the limit, one plain call; left of it: faster than that call"
        handles.append(Line2D([], [], color=FAINT, linestyle="--", linewidth=1, label=label))
        place: Style = {
            "loc": "upper left",
            "bbox_to_anchor": ((_MARGIN - 0.08) / width, 1 - (1.14 + (_QUICK if report.quick else 0)) / height),
        }
        figure.legend(handles=handles, ncols=4, frameon=False, fontsize=9, borderaxespad=0, columnspacing=1.4, **place)


def _dot(line: Line2D, role: str) -> Line2D:
    """Make a line the mark of a role, with its label."""
    label, colour, marker = _ROLES[role]
    line.set(color=colour, marker=marker, markersize=6, markeredgewidth=0, linestyle="", label=label)
    return line


def _draw_dots(axes: Axes, panel: _Panel) -> None:
    """Draw a line for each contestant: its name, a dot with the range behind it, its time and its ratio."""
    ratios = [0.8, 2.5]  # at least so far: the axis of an even race is as easily read as its neighbours'
    indent = 0.15 if any(shown is None for _, shown in panel.lines) else 0.0
    inch, _ = in_axes(axes, 1)
    text: Style = {"va": "center", "fontsize": 9, "clip_on": False, "zorder": 4}
    text["transform"] = axes.get_yaxis_transform()
    for i, (name, shown) in enumerate(panel.lines):
        left = -inch * (_DOTS - _MARGIN)
        if shown is None:
            # A long one lies over the axes, and covers their lines.
            axes.text(left, i, name, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, **text)
            continue
        measurement, entry = shown
        assert measurement.limit is not None
        limit, timing = measurement.limit.timing.median, entry.timing
        low, middle, high = (seconds / limit for seconds in (timing.p20, timing.median, timing.p80))
        ratios += [low, high]
        axes.axhline(i, color="#eeeeee", linewidth=0.8, zorder=0.5)
        axes.plot([low, high], [i, i], color=_ROLES[entry.role][1], linewidth=2, alpha=0.45)
        _dot(axes.plot([middle], [i], zorder=3)[0], entry.role)
        axes.text(left + inch * indent, i, name, color=_GREY if indent else INK, **text)
        axes.text(1 + 0.72 * inch, i, seconds_text(timing.median), ha="right", color=_GREY, **text)
        axes.text(1 + 1.35 * inch, i, ratio_text(middle), ha="right", color=INK, **text)
    _log_axis(axes.xaxis, min(ratios) / 1.15, max(ratios) * 1.15, "×")
    limits = dict.fromkeys(m.limit.name for m in panel.group if m.limit)
    _finish(axes, f"times as long as {', '.join(limits)}")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    axes.set_ylim(len(panel.lines) - 0.2, -0.8)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)


def _draw_curve(axes: Axes, panel: _Panel) -> None:
    """Draw time per unit of work over what grows, with the range of each point behind it."""
    group = panel.group
    each = sorted(seconds for m in group for e in m.entries if (seconds := m.per_unit(e)))
    size, unit = unit_of(each[(len(each) - 1) // 2] if each else 1.0)  # of the middle one
    ends: dict[Line2D, float] = {}
    times: list[float] = []
    for name, look in _looks(group).items():
        timed = [(m, e) for m in group for e in m.entries if e.name == name and m.point and m.per_unit(e)]
        if not timed:
            continue
        x = [m.point.value for m, _ in timed if m.point]
        low, y, high = (
            [at / (m.work[m.unit] * size) for (m, _), at in zip(timed, column, strict=True)]
            for column in zip(*((e.timing.p20, e.timing.median, e.timing.p80) for _, e in timed), strict=True)
        )
        (line,) = axes.plot(x, y, label=name, markersize=4.5, markeredgewidth=0, linewidth=1.6, **look)
        ends[line] = y[-1]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        times += low + high
    counts = sorted({m.point.value for m in group if m.point})
    if min(counts) <= 0:
        axes.set_xscale("symlog", linthresh=1)
    elif max(counts) > 10:
        axes.set_xscale("log")
    axes.set_xticks(counts, [_short(count) for count in counts])
    axes.set_xticks([], minor=True)
    _log_axis(axes.yaxis, min(times) / 1.2, max(times) * 1.2, "")
    axes.set_ylabel(f"{unit} per {group[0].unit.removesuffix('s')}", fontsize=9)
    drawn = sorted(ends, key=lambda line: -ends[line])
    axes.legend(
        handles=drawn, loc="upper left", bbox_to_anchor=(1.03, 1.02), frameon=False, fontsize=9, borderaxespad=0
    )
    _finish(axes, group[0].point.axis if group[0].point else "")


def _looks(group: Group) -> dict[str, Style]:
    """Choose colour, dashes and marker of every contestant: no two have all three, and a limit is a faint line."""
    roles = {e.name: "ours" if e.role == "part" else e.role for m in group for e in m.entries}
    looks: dict[str, Style] = {}
    counts = {"peer": 0, "ours": 0}
    for name, side in roles.items():
        if side == "limit":
            looks[name] = {"color": FAINT, "linestyle": "--", "marker": ""}
        else:
            looks[name] = line_style(sum(counts.values())) | {"color": _SIDES[side][counts[side] % len(_SIDES[side])]}
            counts[side] += 1
    return looks


def _log_axis(axis: Any, low: float, high: float, suffix: str) -> None:
    """Make an axis logarithmic, with at least two numbers on it, and not too many."""
    from math import log10

    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = log10(high / low)
    steps = (1, 2, 3, 5) if decades < 1 else (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{suffix}"))


def _short(count: float) -> str:
    """Write a count in a few characters, powers of two as people call them.

    >>> [_short(count) for count in (0, 16, 1024, 65536, 2**17, 2**20, 10_000, 99_999, 786_432)]
    ['0', '16', '1k', '64k', '128k', '1M', '10k', '100k', '0.79M']
    """
    whole = int(count)
    if whole & (whole - 1) == 0 and whole >= 1024:
        return f"{whole >> 20}M" if whole >= 2**20 else f"{whole >> 10}k"
    size, unit = (1, "") if whole < 1000 else (1000, "k") if whole < 100_000 else (1_000_000, "M")
    return f"{float(f'{count / size:.2g}'):g}{unit}" if unit else f"{count:g}"


def _finish(axes: Axes, label: str) -> None:
    quiet_axes(axes)
    axes.tick_params(labelsize=8.5, which="both")
    axes.set_xlabel(label, fontsize=9, color=_GREY)
