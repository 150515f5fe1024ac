"""Pictures of placed tables; needs matplotlib only when one is drawn."""

from mmpos.plot.drawing import plot_positions

__all__ = ["plot_positions"]
