"""The layout of a packed batch, before any scheme: text, audio and grids of documents, spans or input_ids."""

from mmpos.segments.kinds import AUDIO, CANVAS, CLIP, GRID, PAD, TEXT, Audio, Canvas, Clip, Grid, Text
from mmpos.segments.table import SegmentTable

__all__ = [
    "AUDIO",
    "CANVAS",
    "CLIP",
    "GRID",
    "PAD",
    "TEXT",
    "Audio",
    "Canvas",
    "Clip",
    "Grid",
    "SegmentTable",
    "Text",
]
