"""Pictures of ids, attention, precision and growth; matplotlib is needed only when one is drawn."""

from mmpos.analysis.plot.attention import plot_attention
from mmpos.analysis.plot.curves import plot_growth, plot_phase_error
from mmpos.analysis.plot.growth import Growth, id_growth
from mmpos.analysis.plot.kernel import Kernel, attention_kernel
from mmpos.analysis.plot.positions import plot_positions
from mmpos.analysis.plot.precision import PhaseErrors, phase_errors

__all__ = [
    "Growth",
    "Kernel",
    "PhaseErrors",
    "attention_kernel",
    "id_growth",
    "phase_errors",
    "plot_attention",
    "plot_growth",
    "plot_phase_error",
    "plot_positions",
]
