"""A picture of results from a GPU: the share of the bandwidth of a copy over tokens, a panel for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from mmpos.analysis.plot.canvas import FAINT, INK, canvas, line_style, picture_path, quiet_axes
from mmpos.errors import InvalidInputError
from mmpos_bench.gpu.journal import Row
from mmpos_bench.gpu.report import share_of_copy

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture

_WIDTH, _HEIGHT, _TITLE = 8.6, 2.9, 0.75  # inches: of a panel, and above the first
_LEFT, _PLOT, _ABOVE, _BELOW = 0.7, 4.6, 0.3, 0.55


def plot_shares(rows: Sequence[Row], path: str | PathLike[str] | None = None) -> Picture:
    """Draw the share of the bandwidth of a copy, of each way over tokens of one document.

    Args:
        rows: of `mmpos_bench.gpu.report.read_rows`.
        path: where to write; ends in .png, .svg or .pdf. None writes nothing.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: nothing was timed, or another suffix.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target = picture_path(path)
    shares = [(r, s) for r, s in share_of_copy(rows) if r["role"] in ("ours", "peer") and r["documents"] == 1]
    shapes = list(dict.fromkeys(row["shape"] for row, _ in shares))
    if not shapes:
        raise InvalidInputError("rows: got none that was timed, want those of part 2")
    styles = {way: line_style(i) for i, way in enumerate(dict.fromkeys(row["way"] for row, _ in shares))}
    height = _TITLE + _HEIGHT * len(shapes)
    machine = next((row for row in rows if row["kind"] == "machine"), {})
    with canvas(target, _WIDTH, height) as figure:
        name = f"{machine.get('gpu') or 'no GPU'}, commit {machine.get('commit')}" + ", dry" * machine.get("dry", False)
        figure.text(
            0.03, 1 - 0.3 / height, "Share of the bandwidth of a copy", fontsize=13, color=INK, fontweight="bold"
        )
        figure.text(0.03, 1 - 0.52 / height, name, fontsize=9, color=FAINT)
        for i, shape in enumerate(shapes):
            bottom = height - _TITLE - (i + 1) * _HEIGHT + _BELOW
            size = (_LEFT / _WIDTH, bottom / height, _PLOT / _WIDTH, (_HEIGHT - _ABOVE - _BELOW) / height)
            axes = figure.add_axes(size)
            axes.set_title(shape, loc="left", fontsize=10, color=INK)
            here = [(row, share) for row, share in shares if row["shape"] == shape]
            for way in dict.fromkeys(row["way"] for row, _ in here):
                points = sorted((row["tokens"], share) for row, share in here if row["way"] == way)
                axes.plot(*zip(*points, strict=True), label=way, markersize=4, linewidth=1.4, **styles[way])
            axes.axhline(1, color=FAINT, linestyle="--", linewidth=1)
            lengths = sorted({row["tokens"] for row, _ in here})
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths], fontsize=7, rotation=30)
            axes.set_ylim(bottom=0)
            quiet_axes(axes)
            axes.set_xlabel("tokens", fontsize=8)
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1.05), frameon=False, fontsize=7.5, borderaxespad=0)
    return figure
