"""Multimodal position ids: one small table of segments is the truth, and everything else follows from it.

Shapes used throughout:
    input_ids      (tokens,) packed, or (batch, seq)
    position_ids   (axes, tokens) packed, or (axes, batch, seq); axes are (row, col) or (frame, row, col)
    grid_thw       (images, 3) frames, height, width in patches after spatial merging
    cu_seqlens     (documents + 1,) int32, leading 0
    table          (5 + 4·axes, segments) int64, see PositionTable
"""

from typing import TYPE_CHECKING

from mmpos.blocks import block_keys
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, UnsupportedError
from mmpos.placing import place
from mmpos.positions import PositionTable
from mmpos.schemes import SCHEMES, Scheme
from mmpos.segments import Grid, SegmentTable, Text
from mmpos.support.info import info, version

if TYPE_CHECKING:
    from mmpos import bench as bench
    from mmpos import client, compare, data, encodings, rotary
    from mmpos import hf as hf
    from mmpos import megatron as megatron
    from mmpos import plot as plot
    from mmpos import queries as queries
    from mmpos import sections as sections
    from mmpos import sglang as sglang
    from mmpos import tokenizers as tokenizers
    from mmpos import torchtitan as torchtitan
    from mmpos import vllm as vllm
    from mmpos.diagnosis import Diagnosis, diagnose
    from mmpos.images import ImageProcessor, ImageSize
    from mmpos.models import ModelSettings, from_hf_config
    from mmpos.sequence import InterleavedSequence, Markers, SequenceBuilder
    from mmpos.tokenizers import ByteTokenizer
    from mmpos.video import Video

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
    "block_keys",
    "client",
    "compare",
    "data",
    "diagnose",
    "encodings",
    "from_hf_config",
    "info",
    "place",
    "rotary",
]

_LAZY = {
    "ByteTokenizer": "mmpos.tokenizers",
    "Diagnosis": "mmpos.diagnosis",
    "ImageProcessor": "mmpos.images",
    "ImageSize": "mmpos.images",
    "InterleavedSequence": "mmpos.sequence",
    "Markers": "mmpos.sequence",
    "ModelSettings": "mmpos.models",
    "SequenceBuilder": "mmpos.sequence",
    "Video": "mmpos.video",
    "diagnose": "mmpos.diagnosis",
    "from_hf_config": "mmpos.models",
}

_MODULES = (
    "bench",
    "client",
    "compare",
    "data",
    "encodings",
    "hf",
    "megatron",
    "plot",
    "queries",
    "rotary",
    "sections",
    "sglang",
    "tokenizers",
    "torchtitan",
    "vllm",
)
"""Rooms that are imported when they are first asked for; those of engines are not among the names of ``*``."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return version()
        if name not in _LAZY and name not in _MODULES:
            raise AttributeError(f"module 'mmpos' has no attribute {name!r}")
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"mmpos.{name}")
        return getattr(import_module(_LAZY[name]), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *_LAZY, *_MODULES])
