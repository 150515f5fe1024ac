"""Multimodal position ids: one small table of segments is the truth, and everything else follows from it.

Shapes used throughout:
    input_ids      (tokens,) packed, or (batch, seq)
    position_ids   (axes, tokens) packed, or (axes, batch, seq); axes are (row, col) or (frame, row, col)
    grid_thw       (images, 3) frames, height, width in patches after spatial merging
    cu_seqlens     (documents + 1,) int32, leading 0
    table          (5 + 4·axes, segments) int64, see PositionTable
"""

from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, UnsupportedError
from mmpos.positions import PositionTable, block_keys, place
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments import Grid, SegmentTable, Text
from mmpos.support.info import info, version

if TYPE_CHECKING:
    from mmpos import analysis, client, data, encodings, integrations, rotary
    from mmpos.analysis.diagnosis import Diagnosis, diagnose
    from mmpos.images import ImageProcessor, ImageSize
    from mmpos.integrations.models import ModelSettings, from_hf_config
    from mmpos.sequence.builder import InterleavedSequence, Markers, SequenceBuilder
    from mmpos.sequence.tokenizers import ByteTokenizer
    from mmpos.sequence.video import Video

    __version__: str

__all__ = [
    "SCHEMES",
    "ByteTokenizer",
    "Diagnosis",
    "Grid",
    "ImageProcessor",
    "ImageSize",
    "InterleavedSequence",
    "InvalidInputError",
    "LimitExceededError",
    "Markers",
    "MmposError",
    "ModelSettings",
    "PositionTable",
    "Scheme",
    "SegmentTable",
    "SequenceBuilder",
    "Text",
    "UnsupportedError",
    "Video",
    "analysis",
    "block_keys",
    "client",
    "data",
    "diagnose",
    "encodings",
    "from_hf_config",
    "info",
    "integrations",
    "place",
    "rotary",
]

_LAZY = {
    "ByteTokenizer": "mmpos.sequence.tokenizers",
    "Diagnosis": "mmpos.analysis.diagnosis",
    "ImageProcessor": "mmpos.images",
    "ImageSize": "mmpos.images",
    "InterleavedSequence": "mmpos.sequence",
    "Markers": "mmpos.sequence",
    "ModelSettings": "mmpos.integrations.models",
    "SequenceBuilder": "mmpos.sequence",
    "Video": "mmpos.sequence.video",
    "diagnose": "mmpos.analysis.diagnosis",
    "from_hf_config": "mmpos.integrations.models",
}

_ROOMS = ("analysis", "client", "data", "encodings", "integrations", "rotary")
"""Imported when they are first asked for."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return version()
        if name not in _LAZY and name not in _ROOMS:
            raise AttributeError(f"module 'mmpos' has no attribute {name!r}")
        from importlib import import_module

        if name in _ROOMS:
            return import_module(f"mmpos.{name}")
        return getattr(import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_LAZY, *_ROOMS])
