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
    _get_lazy, __dir__ = lazy_names(
        "mmpos",
        {
            "SCHEMES": "schemes",
            "ByteTokenizer": "sequence",
            "Diagnosis": "analysis.diagnosis",
            "Grid": "segments",
            "ImageProcessor": "images",
            "ImageSize": "images",
            "InterleavedSequence": "sequence",
            "Markers": "sequence",
            "ModelSettings": "integrations.models",
            "Placeholders": "segments",
            "PositionTable": "positions",
            "Scheme": "schemes",
            "SegmentTable": "segments",
            "SequenceBuilder": "sequence",
            "Text": "segments",
            "TransformerSettings": "integrations.diffusers.settings",
            "Video": "sequence",
            "analysis": "analysis",
            "block_keys": "positions",
            "client": "client",
            "data": "data",
            "diagnose": "analysis.diagnosis",
            "encodings": "encodings",
            "fingerprint": "analysis.fingerprint",
            "from_diffusers": "integrations.diffusers.settings",
            "from_hf_config": "integrations.models",
            "info": "support.info",
            "integrations": "integrations",
            "place": "positions",
            "positions": "positions",
            "rotary": "rotary",
            "same_positions": "analysis.diagnosis",
            "schemes": "schemes",
            "segments": "segments",
        },
    )

    def __getattr__(name: str) -> object:
        if name != "__version__":
            return _get_lazy(name)
        from mmpos.support.info import version

        return version()
