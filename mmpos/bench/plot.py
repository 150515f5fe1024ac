"""The figures of a run as a picture: curves over what grows, and dots for how far the rest is from the limit."""

from __future__ import annotations

from os import PathLike
from typing import Any

from mmpos.bench.results import Measurement, Report
from mmpos.errors import InvalidInputError
from mmpos.plot.canvas import COLOURS, FAINT, INK, canvas, picture_path

__all__ = ["plot_report"]

_TITLE, _COLUMN, _ABOVE, _BELOW = 0.8, 7.8, 0.4, 0.6  # inches: of the page, and around a panel
_LEFT, _PANEL, _CURVE, _ROW = 2.9, 2.8, 2.3, 0.2
_MARKERS = "osD^vP"

Group = tuple[Measurement, ...]


def plot_report(report: Report, path: str | PathLike[str]) -> None:
    """Draw every group of a report, one panel below the other; both scales are logarithmic.

    A group of cases on a curve shows nanoseconds per token (or another unit) over what grows; any other shows how
    many times as long as the limit each contestant takes.

    Args:
        report: of a run.
        path: where to write; ends in .png or .svg.

    Raises:
        InvalidInputError: nothing to draw, or another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    groups = [report.group(name) for name in report.groups]
    groups = [group for group in groups if _is_curve(group) or _rows(group)]
    if not groups:
        raise InvalidInputError("report: got no curve and no ratio to a limit, want something to draw")
    places, height = _layout(groups)
    width = _COLUMN * (1 + max(column for column, _ in places))
    with canvas(target, width, height) as figure:
        figure.text(0.2 / width, 1 - 0.35 / height, f"mmpos bench {report.suite}", fontsize=13, color=INK)
        figure.text(0.2 / width, 1 - 0.57 / height, str(report.machine), fontsize=7.5, color=FAINT)
        for group, (column, bottom) in zip(groups, places, strict=True):
            left = column * _COLUMN + _LEFT
            axes = figure.add_axes((left / width, bottom / height, _PANEL / width, _height(group) / height))
            (_draw_curve if _is_curve(group) else _draw_rows)(axes, group)
            figure.text(
                (left - _LEFT + 0.2) / width, (bottom + _height(group) + 0.1) / height, group[0].group, color=INK
            )
            _finish(axes)


def _height(group: Group) -> float:
    return _CURVE if _is_curve(group) else _ROW * (len(_rows(group)) + 1)


def _layout(groups: list[Group]) -> tuple[list[tuple[int, float]], float]:
    """The column of each panel and the inches below it, and the height of the page: two columns that end alike."""
    used, places = [_TITLE, _TITLE], []
    for group in groups:
        column = 0 if used[0] <= used[1] or len(groups) == 1 else 1
        used[column] += _ABOVE + _height(group) + _BELOW
        places.append((column, used[column] - _BELOW))
    return [(column, max(used) - below) for column, below in places], max(used)


def _is_curve(group: Group) -> bool:
    return all(m.point is not None for m in group)


def _rows(group: Group) -> list[tuple[Measurement, str]]:
    """The lines of a panel of dots: cases and contestants that have a limit."""
    return [(m, e.name) for m in group if m.limit is not None for e in m.entries if e.role != "limit"]


def _colours(group: Group) -> dict[str, tuple[str, str]]:
    """Colour and marker of every contestant but limits."""
    names = dict.fromkeys(e.name for m in group for e in m.entries if e.role != "limit")
    count = len(COLOURS)
    # Once all colours are used, they come again with other markers.
    return {n: (COLOURS[i % count], _MARKERS[(i + i // count) % len(_MARKERS)]) for i, n in enumerate(names)}


def _draw_curve(axes: Any, group: Group) -> None:
    """Time per unit of work over what grows, with the range of each point behind it."""
    colours, (size, unit) = _colours(group), _unit(group)
    for name in dict.fromkeys(e.name for m in group for e in m.entries):
        found = [(m.point[1], m.per_unit(e), e.timing) for m in group for e in m.entries if e.name == name and m.point]
        drawn = [(x, y / size, y / size * t.p20 / t.median, y / size * t.p80 / t.median) for x, y, t in found if y]
        if not drawn:
            continue
        x, y, low, high = zip(*drawn, strict=True)
        colour, marker = colours.get(name, (FAINT, ""))
        axes.plot(x, y, marker=marker, color=colour, linestyle="-" if marker else "--", markersize=4, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    counts = [m.point[1] for m in group if m.point]
    if max(counts) <= 10:
        axes.set_xticks(counts)
    elif min(counts) <= 0:
        axes.set_xscale("symlog", linthresh=1)
    else:
        axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 10), high)  # a decade at least: its ticks are the ones with numbers
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel(group[0].point[0] if group[0].point else "")
    axes.set_ylabel(f"{unit} per {group[0].unit.removesuffix('s')}")


def _unit(group: Group) -> tuple[float, str]:
    """The unit in which the shortest time of a curve is not much below 1."""
    times = [each for m in group for e in m.entries if e.role != "limit" and (each := m.per_unit(e))]
    return next(
        ((s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if min(times, default=0) > s), (1e-9, "ns")
    )


def _draw_rows(axes: Any, group: Group) -> None:
    colours, rows, seen = _colours(group), _rows(group), set()
    for i, (measurement, name) in enumerate(rows):
        entry, limit = measurement[name], measurement.limit
        assert limit is not None
        colour, marker = colours[name]
        low, high = entry.timing.p20 / limit.timing.median, entry.timing.p80 / limit.timing.median
        axes.plot([low, high], [i, i], color=colour, linewidth=1.5, alpha=0.5)
        ratio = measurement.of_limit(entry)
        label = None if name in seen else name
        axes.plot([ratio], [i], marker, color=colour, markersize=5, linestyle="", label=label)
        seen.add(name)
    # A case is named at its first line.
    named = [i for i, (m, _) in enumerate(rows) if i == 0 or rows[i - 1][0] is not m]
    axes.set_yticks(named, [rows[i][0].name for i in named], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 10))  # a decade at least, so that panels look alike
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    limits = dict.fromkeys(m.limit.name for m in group if m.limit)
    axes.set_xlabel(f"times as long as {', '.join(limits)}")


def _finish(axes: Any) -> None:
    axes.grid(visible=True, which="major", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(9)
    axes.yaxis.label.set_size(9)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=8)
