"""Where text and grids stand in a packed batch, before any scheme: from parts, spans or input_ids."""

from mmpos.segments.kinds import GRID, PAD, TEXT, Grid, Text
from mmpos.segments.table import SegmentTable

__all__ = ["GRID", "PAD", "TEXT", "Grid", "SegmentTable", "Text"]
