"""Schemes, which place text and grids: one file per family, each scheme a few lines of formula."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from mmpos.errors import InvalidInputError
from mmpos.schemes.base import Grids, Pieces, Placement, Scheme, TextRuns
from mmpos.schemes.canvas import MRopeCanvas
from mmpos.schemes.flat import V2PE, Flatten
from mmpos.schemes.mrope import MRope, MRopeInterleaveReset, MRopeQwen3, MRopeQwen25, MRopeTransformers
from mmpos.schemes.omni import TMRope, TMRopeQwen3
from mmpos.schemes.planar import Grid2D, Naive2D, PageRows
from mmpos.schemes.tie import RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2
from mmpos.schemes.video import VideoRope, VRope
from mmpos.schemes.xdrope import XDRope

__all__ = [
    "SCHEMES",
    "V2PE",
    "Flatten",
    "Grid2D",
    "Grids",
    "MRope",
    "MRopeCanvas",
    "MRopeInterleaveReset",
    "MRopeQwen3",
    "MRopeQwen25",
    "MRopeTransformers",
    "Naive2D",
    "PageRows",
    "Pieces",
    "Placement",
    "RopeTie",
    "RopeTieFractional",
    "RopeTieLcm",
    "RopeTieV2",
    "Scheme",
    "TMRope",
    "TMRopeQwen3",
    "TextRuns",
    "VRope",
    "VideoRope",
    "XDRope",
    "get_scheme",
]

SCHEMES: Mapping[str, type[Scheme]] = MappingProxyType(
    {
        scheme.name: scheme
        for scheme in (
            RopeTie,
            RopeTieFractional,
            RopeTieV2,
            RopeTieLcm,
            Flatten,
            PageRows,
            Naive2D,
            Grid2D,
            MRope,
            MRopeTransformers,
            MRopeQwen25,
            MRopeQwen3,
            MRopeInterleaveReset,
            MRopeCanvas,
            TMRope,
            TMRopeQwen3,
            V2PE,
            VideoRope,
            VRope,
            XDRope,
        )
    }
)
"""Every scheme by its name."""


def get_scheme(scheme: str | Scheme) -> Scheme:
    """Get the scheme of this name with its default parameters, or the scheme itself."""
    if isinstance(scheme, str) and scheme in SCHEMES:
        return _default(scheme)
    if not isinstance(scheme, Scheme):
        raise InvalidInputError(f"scheme: got {scheme!r}, want a Scheme or one of {', '.join(SCHEMES)}")
    return scheme


@cache
def _default(name: str) -> Scheme:
    return SCHEMES[name]()
