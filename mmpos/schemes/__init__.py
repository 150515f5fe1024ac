"""Placement schemes, which assign position ids to text and grids: one file per family, each a few lines of formulas."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.schemes.affine import check
from mmpos.schemes.base import RATIONAL_PARAMETERS, Grids, Pieces, Placement, Scheme, TextRuns
from mmpos.schemes.canvas import MRopeCanvas
from mmpos.schemes.flat import V2PE, Flatten
from mmpos.schemes.generation import (
    NOT_AFFINE,
    Bagel,
    Flux,
    Flux2,
    Flux3,
    HunyuanImage,
    Ideogram4,
    JoyImage,
    LatentScheme,
    LongCatImage,
    Lumina2,
    OmniGen2,
    OvisImage,
    QwenImage,
    QwenImage21,
)
from mmpos.schemes.generation_video import (
    Allegro,
    AnyFlowFar,
    CogVideoX,
    Cosmos,
    Cosmos3,
    HunyuanVideo,
    Kandinsky,
    Ltx,
    Ltx2,
    MiniMaxH3,
    Wan,
)
from mmpos.schemes.mrope import MRope, MRopeInterleaveReset, MRopeQwen3, MRopeQwen25, MRopeTransformers
from mmpos.schemes.omni import TMRope, TMRopeQwen3
from mmpos.schemes.planar import Grid2D, Naive2D, PageRows
from mmpos.schemes.tie import RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2
from mmpos.schemes.video import VideoRope, VRope
from mmpos.schemes.xdrope import XDRope
from mmpos.support.checks import did_you_mean

__all__ = [
    "NOT_AFFINE",
    "RATIONAL_PARAMETERS",
    "SCHEMES",
    "V2PE",
    "Allegro",
    "AnyFlowFar",
    "Bagel",
    "CogVideoX",
    "Cosmos",
    "Cosmos3",
    "Flatten",
    "Flux",
    "Flux2",
    "Flux3",
    "Grid2D",
    "Grids",
    "HunyuanImage",
    "HunyuanVideo",
    "Ideogram4",
    "JoyImage",
    "Kandinsky",
    "LatentScheme",
    "LongCatImage",
    "Ltx",
    "Ltx2",
    "Lumina2",
    "MRope",
    "MRopeCanvas",
    "MRopeInterleaveReset",
    "MRopeQwen3",
    "MRopeQwen25",
    "MRopeTransformers",
    "MiniMaxH3",
    "Naive2D",
    "OmniGen2",
    "OvisImage",
    "PageRows",
    "Pieces",
    "Placement",
    "QwenImage",
    "QwenImage21",
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
    "Wan",
    "XDRope",
    "check",
    "get_scheme",
]

_FAMILIES: tuple[tuple[type[Scheme], ...], ...] = (
    (RopeTie, RopeTieFractional, RopeTieV2, RopeTieLcm),
    (Flatten, PageRows, Naive2D, Grid2D),
    (MRope, MRopeTransformers, MRopeQwen25, MRopeQwen3, MRopeInterleaveReset, MRopeCanvas, TMRope, TMRopeQwen3),
    (V2PE, VideoRope, VRope, XDRope),
    (Flux, Flux2, Flux3, QwenImage, QwenImage21, Lumina2, LongCatImage, OvisImage, Ideogram4),
    (Wan, AnyFlowFar, HunyuanVideo, HunyuanImage, CogVideoX, Allegro, Ltx, Ltx2, Cosmos, Cosmos3, Kandinsky),
    (JoyImage, Bagel, OmniGen2),
)

SCHEMES: Mapping[str, type[Scheme]] = MappingProxyType({kind.name: kind for family in _FAMILIES for kind in family})
"""All schemes by name; each accepts grids of any height and width."""


def get_scheme(scheme: str | Scheme, schemes: Mapping[str, type[Scheme]] = SCHEMES) -> Scheme:
    """Return the scheme of this name among ``schemes``, with default parameters; return a Scheme object unchanged."""
    if isinstance(scheme, str) and scheme in schemes:
        return _default(schemes[scheme])
    if isinstance(scheme, str) and scheme in NOT_AFFINE:
        raise UnsupportedError(f"scheme: got {scheme!r}, which is not supported: {NOT_AFFINE[scheme]}")
    if not isinstance(scheme, Scheme):
        hint = did_you_mean(scheme, schemes) if isinstance(scheme, str) else ""
        raise InvalidInputError(f"scheme: got {scheme!r}{hint}, want a Scheme or one of {', '.join(schemes)}")
    return scheme


@cache
def _default(scheme: type[Scheme]) -> Scheme:
    return scheme()
