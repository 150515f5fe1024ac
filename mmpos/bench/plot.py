"""The figures of a run as a picture: curves over what grows, and dots for how far the rest is from the limit."""

from __future__ import annotations

from os import PathLike
from typing import Any

from mmpos.bench.results import Measurement, Report
from mmpos.errors import InvalidInputError
from mmpos.plot.canvas import COLOURS, FAINT, INK, canvas, picture_path

__all__ = ["plot_report"]

_WIDTH, _TITLE, _ABOVE, _BELOW = 9.0, 0.7, 0.4, 0.65  # inches
_LEFT, _PANEL, _CURVE, _ROW = 3.2, 3.6, 2.6, 0.24
_MARKERS = "osD^vP"


def plot_report(report: Report, path: str | PathLike[str]) -> None:
    """Draw every group of a report, one panel below the other; both scales are logarithmic.

    A group of cases on a curve shows nanoseconds per token (or another unit) over what grows; any other shows how
    many times as long as the limit each contestant takes.

    Args:
        report: of a run.
        path: where to write; ends in .png or .svg.

    Raises:
        InvalidInputError: nothing to draw, another suffix, or a path that cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    groups = [report.group(name) for name in report.groups]
    groups = [group for group in groups if _is_curve(group) or _rows(group)]
    if not groups:
        raise InvalidInputError("report: got no curve and no ratio to a limit, want something to draw")
    heights = [_CURVE if _is_curve(group) else _ROW * (len(_rows(group)) + 1) for group in groups]
    height = _TITLE + sum(heights) + len(groups) * (_ABOVE + _BELOW)
    with canvas(target, _WIDTH, height) as figure:
        figure.text(0.2 / _WIDTH, 1 - 0.3 / height, f"mmpos bench {report.suite}", fontsize=13, color=INK)
        figure.text(0.2 / _WIDTH, 1 - 0.52 / height, str(report.machine), fontsize=7, color=FAINT)
        top = height - _TITLE
        for group, inner in zip(groups, heights, strict=True):
            top -= _ABOVE + inner
            box = (_LEFT / _WIDTH, top / height, _PANEL / _WIDTH, inner / height)
            axes = figure.add_axes(box)
            top -= _BELOW
            (_draw_curve if _is_curve(group) else _draw_rows)(axes, group)
            axes.set_title(group[0].group, loc="left", fontsize=10, color=INK, x=0 if _is_curve(group) else -0.8)
            _finish(axes)


def _is_curve(group: tuple[Measurement, ...]) -> bool:
    return all(m.point is not None for m in group)


def _rows(group: tuple[Measurement, ...]) -> list[tuple[Measurement, str]]:
    """The lines of a panel of dots: cases and contestants that have a limit."""
    return [(m, e.name) for m in group if m.limit is not None for e in m.entries if e.role != "limit"]


def _colours(group: tuple[Measurement, ...]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every contestant but limits."""
    names = dict.fromkeys(e.name for m in group for e in m.entries if e.role != "limit")
    return {n: (COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)]) for i, n in enumerate(names)}


def _draw_curve(axes: Any, group: tuple[Measurement, ...]) -> None:
    colours = _colours(group)
    for name in dict.fromkeys(e.name for m in group for e in m.entries):
        found = [(m.point[1], m.per_unit(e), e.timing) for m in group for e in m.entries if e.name == name and m.point]
        drawn = [(x, y * 1e9, y * 1e9 * t.p20 / t.median, y * 1e9 * t.p80 / t.median) for x, y, t in found if y]
        if not drawn:
            continue
        x, y, low, high = zip(*drawn, strict=True)
        colour, marker = colours.get(name, (FAINT, ""))
        axes.plot(x, y, marker=marker, color=colour, linestyle="-" if marker else "--", markersize=4, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    counts = [m.point[1] for m in group if m.point]
    if min(counts) > 0:
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(group[0].point[0] if group[0].point else "")
    axes.set_ylabel(f"ns per {group[0].unit.removesuffix('s')}")


def _draw_rows(axes: Any, group: tuple[Measurement, ...]) -> None:
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
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.xaxis.set_minor_formatter(
        lambda value, _: f"{value:g}×" if axes.get_xlim()[1] < 10 * axes.get_xlim()[0] else ""
    )
    axes.axvline(1, color=FAINT, linestyle="--", linewidth=1)
    limits = dict.fromkeys(m.limit.name for m in group if m.limit)
    axes.set_xlabel(f"times as long as {', '.join(limits)}")


def _finish(axes: Any) -> None:
    axes.grid(visible=True, which="major", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.02), frameon=False, fontsize=8)
