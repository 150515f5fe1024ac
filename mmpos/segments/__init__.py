"""Layout of a packed batch, before any scheme: text, audio and grids, from documents, spans or input_ids."""

from mmpos.segments.kinds import (
    AUDIO,
    CLIP,
    GRID,
    PAD,
    TEXT,
    THUMBNAIL,
    TILE,
    Audio,
    Clip,
    Grid,
    Text,
    Thumbnail,
    Tile,
)
from mmpos.segments.placeholders import CropMarkers, Placeholders
from mmpos.segments.table import SegmentTable

__all__ = [
    "AUDIO",
    "CLIP",
    "GRID",
    "PAD",
    "TEXT",
    "THUMBNAIL",
    "TILE",
    "Audio",
    "Clip",
    "CropMarkers",
    "Grid",
    "Placeholders",
    "SegmentTable",
    "Text",
    "Thumbnail",
    "Tile",
]
