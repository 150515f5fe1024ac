"""Multimodal position ids: everything is derived from one small table of segments.

Shapes used throughout:

    input_ids      (tokens,) packed, or (batch, seq)
    position_ids   (axes, tokens) packed, or (axes, batch, seq); axes are (row, col) or (frame, row, col)
    grid_thw       (images, 3) frames, height, width in patches after spatial merging
    cu_seqlens     (documents + 1,) int32, leading 0
    table          (5 + 4·axes, segments) int64, see PositionTable
"""

from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, UnsupportedError
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos import analysis, client, data, encodings, integrations, rotary
    from mmpos.analysis.diagnosis import Diagnosis, diagnose, same_positions
    from mmpos.analysis.fingerprint import fingerprint
    from mmpos.images import ImageProcessor, ImageSize
    from mmpos.integrations.diffusers import TransformerSettings, from_diffusers
    from mmpos.integrations.models import ModelSettings, from_hf_config
    from mmpos.positions import PositionTable, block_keys, place
    from mmpos.schemes import SCHEMES, Scheme
    from mmpos.segments import Grid, Placeholders, SegmentTable, Text
    from mmpos.sequence import ByteTokenizer, InterleavedSequence, Markers, SequenceBuilder, Video
    from mmpos.support.info import info

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
    "Placeholders",
    "PositionTable",
    "Scheme",
    "SegmentTable",
    "SequenceBuilder",
    "Text",
    "TransformerSettings",
    "UnsupportedError",
    "Video",
    "analysis",
    "block_keys",
    "client",
    "data",
    "diagnose",
    "encodings",
    "fingerprint",
    "from_diffusers",
    "from_hf_config",
    "info",
    "integrations",
    "place",
    "rotary",
    "same_positions",
]

if not TYPE_CHECKING:  # nothing is imported before its first use, so that the programs can catch Ctrl-C
    _LAZY = {
        "analysis.diagnosis": ["Diagnosis", "diagnose", "same_positions"],
        "analysis.fingerprint": ["fingerprint"],
        "images": ["ImageProcessor", "ImageSize"],
        "integrations.diffusers.settings": ["TransformerSettings", "from_diffusers"],
        "integrations.models": ["ModelSettings", "from_hf_config"],
        "positions": ["PositionTable", "block_keys", "place"],
        "schemes": ["SCHEMES", "Scheme"],
        "segments": ["Grid", "Placeholders", "SegmentTable", "Text"],
        "sequence": ["ByteTokenizer", "InterleavedSequence", "Markers", "SequenceBuilder", "Video"],
        "support.info": ["info"],
    }
    _ROOMS = "analysis client data encodings integrations positions rotary schemes segments"
    _MODULES = {name: module for module, names in _LAZY.items() for name in names}
    _get_lazy, __dir__ = lazy_names("mmpos", _MODULES | {room: room for room in _ROOMS.split()})

    def __getattr__(name: str) -> object:
        if name != "__version__":
            return _get_lazy(name)
        from mmpos.support.info import version

        return version()
