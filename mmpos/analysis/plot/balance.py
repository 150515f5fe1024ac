"""Plot of a training plan's balance: the slowest rank, the fastest rank and the labels of each step."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import COLOURS, INK, canvas, picture_path, quiet_axes
from mmpos.errors import InvalidInputError

if TYPE_CHECKING:
    from mmpos.analysis.plot.picture import Picture


def plot_balance(
    rank_costs: npt.ArrayLike, labels_per_step: npt.ArrayLike, path: str | PathLike[str] | None = None
) -> Picture:
    """Draw each step's slowest and fastest ranks relative to the step's mean, and its label count relative to the mean.

    The path, the result and the errors are as for ``plot_positions``.

    Args:
        rank_costs: (steps, ranks) cost of each rank in each step, such as ``TrainingPlan.rank_costs``.
        labels_per_step: (steps,) number of label tokens.
        path: the file to write; None writes nothing.
    """
    costs, labels = np.asarray(rank_costs, np.float64), np.asarray(labels_per_step, np.float64)
    if costs.ndim != 2 or not costs.size or labels.shape != costs.shape[:1]:
        got = f"{costs.shape} with labels {labels.shape}"
        raise InvalidInputError(f"rank_costs: got shape {got}, want (steps, ranks) with labels (steps,)")
    target, steps = picture_path(path), np.arange(len(costs))
    mean = costs.mean(axis=1)
    slowest, fastest = costs.max(axis=1) / mean, costs.min(axis=1) / mean
    straggling = costs.max(axis=1).sum() / mean.sum()
    title = f"Steps of the plan: {straggling:.3f} times as long as with even ranks"
    with canvas(target, 8.0, 4.8, title) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, panel_title in (
            (upper, "cost of ranks / mean of the step"),
            (lower, "label tokens / mean of all steps"),
        ):
            quiet_axes(axes)
            axes.set_title(panel_title, loc="left", fontsize=11)
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        dots = {"linestyle": "", "markersize": 2 + 30 / (10 + len(costs))}
        upper.plot(steps, slowest, marker="^", color=COLOURS[1], label="slowest rank", **dots)
        upper.plot(steps, fastest, marker="v", color=COLOURS[0], label="fastest rank", **dots)
        upper.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, borderpad=0)
        lower.plot(steps, labels / max(labels.mean(), 1), marker="o", color=COLOURS[0], **dots)
        lower.set_xlabel("step")
        lower.set_ylim(0, 1.1 * labels.max() / max(labels.mean(), 1) or 1)
        lower.set_xlim(-0.5, len(costs) - 0.5)
        lower.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure
