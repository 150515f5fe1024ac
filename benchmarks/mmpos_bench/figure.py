"""Draw a run's figures for a paper, one column wide and in small type."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from mmpos.analysis.plot.canvas import INK, Style, canvas, line_style, picture_path, quiet_axes
from mmpos.errors import InvalidInputError
from mmpos_bench.results import Measurement, SuiteReport, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmpos.analysis.plot.picture import Picture

WIDTH = 3.35
"""Width in inches of one column of a two-column page."""

_TYPE = 6  # points
_ROW, _LINE, _FRAME = 0.3, 0.11, 0.55  # inches per case, per legend line, and for the title and axis
_LIMIT: Style = {"marker": "|", "markersize": 5, "markeredgewidth": 1, "color": INK}


def plot_report(report: SuiteReport, path: str | PathLike[str] | None = None) -> Picture:
    """Draw a panel per group: the time of each contestant in each case, from the 20th to the 80th percentile.

    Entries with the role "part" are not drawn, since the time of the whole call includes them.

    Args:
        report: the run.
        path: file to write, .png, .svg or .pdf; None writes nothing.

    Raises:
        InvalidInputError: the report contains no measurement, or the path has another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    if not report.measurements:
        raise InvalidInputError("report: got no measurements, want at least one")
    groups = {name: report.group(name) for name in report.groups}
    heights = [_FRAME + _ROW * len(group) + _LINE * ((len(_contestants(group)) + 1) // 2) for group in groups.values()]
    with canvas(target, WIDTH, sum(heights)) as figure:
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, group) in zip(panels, groups.items(), strict=True):
            axes.set_title(name, loc="left", fontsize=_TYPE + 1, color=INK)
            _draw_group(axes, group)
    return figure


def _contestants(group: Sequence[Measurement]) -> dict[str, str]:
    """Map each contestant that is drawn to its role."""
    return {e.name: e.role for m in group for e in m.entries if e.role != "part"}


def _draw_group(axes: Axes, group: Sequence[Measurement]) -> None:
    """Draw cases from top to bottom: the name of each case, then one line per contestant below the name."""
    from matplotlib.ticker import LogLocator
    from matplotlib.transforms import ScaledTranslation

    contestants = _contestants(group)
    competing = [name for name, role in contestants.items() if role != "limit"]
    axes.set_xscale("log")
    quiet_axes(axes)
    for k, (name, role) in enumerate(contestants.items()):
        cases = {i: entry.timing for i, m in enumerate(group) for entry in m.entries if entry.name == name}
        lines = [i + 0.34 * k / max(len(contestants) - 1, 1) for i in cases]
        medians = [timing.median for timing in cases.values()]
        spread = [[t.median - t.p20 for t in cases.values()], [t.p80 - t.median for t in cases.values()]]
        style = _LIMIT if role == "limit" else line_style(competing.index(name)) | {"markersize": 2.5}
        axes.errorbar(medians, lines, xerr=spread, label=name, elinewidth=0.6, **style | {"linestyle": ""})
    for i, measurement in enumerate(group):
        transform = axes.get_yaxis_transform()
        axes.text(0.012, i - 0.2, measurement.name, transform=transform, fontsize=_TYPE, color=INK)
    axes.set(yticks=[i - 0.5 for i in range(1, len(group))], yticklabels=[], ylim=(len(group) - 0.5, -0.5))
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit_of(seconds)[0]:.0f} {unit_of(seconds)[1]}")
    axes.xaxis.set_minor_formatter("")
    axes.tick_params(labelsize=_TYPE, which="both", pad=2)
    below = axes.transAxes + ScaledTranslation(0, -0.22, axes.figure.dpi_scale_trans)
    handles = {"borderpad": 0, "borderaxespad": 0, "handletextpad": 0.3, "columnspacing": 1.2, "labelspacing": 0.25}
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=2, fontsize=_TYPE, frameon=False, **handles
    )
