"""The layout of a packed batch, before any scheme: text and grids from documents, placeholder spans or input_ids."""

from mmpos.segments.kinds import GRID, PAD, TEXT, Grid, Text
from mmpos.segments.table import SegmentTable

__all__ = ["GRID", "PAD", "TEXT", "Grid", "SegmentTable", "Text"]
