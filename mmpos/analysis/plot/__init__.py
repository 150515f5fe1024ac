"""Plots of ids, attention, precision and growth; matplotlib is imported only when a plot is drawn."""

from mmpos.analysis.plot.attention import Kernel, attention_kernel, plot_attention
from mmpos.analysis.plot.balance import plot_balance
from mmpos.analysis.plot.curves import id_growth, phase_errors, plot_growth, plot_phase_error
from mmpos.analysis.plot.positions import plot_positions

__all__ = [
    "Kernel",
    "attention_kernel",
    "id_growth",
    "phase_errors",
    "plot_attention",
    "plot_balance",
    "plot_growth",
    "plot_phase_error",
    "plot_positions",
]
