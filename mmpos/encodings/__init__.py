"""Position encodings for study and comparison: one idea per class, each of them tested in attention.

Shapes used throughout:

    positions      (...,) integers or floats; (n,) queries and (m,) keys; (axes, n) for rotations
    table          (..., dim) float64, added to embeddings
    bias           (num_heads, n, m) float64, added to scores
    x              (n, head_dim) queries or keys of one head; (n, heads, head_dim) if axes differ between heads
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from mmpos.encodings.base import AdditiveTable, AttentionBias, Encoding, LearnedBias, LearnedTable, Rotation
from mmpos.encodings.biases import Alibi, ClippedRelative, NoPE, T5Buckets, expected_square
from mmpos.encodings.rope import HoPE, MHRope, PRope, Rope1D, Rope1DAdjacent, Rope2D, RopeND
from mmpos.encodings.tables import Binary, Integer, LearnedAbsolute, Normalised, SingleSinusoid, Sinusoidal
from mmpos.support.extras import lazy_names

if TYPE_CHECKING:
    from mmpos.encodings.attention import SelfAttention

__all__ = [
    "ENCODINGS",
    "AdditiveTable",
    "Alibi",
    "AttentionBias",
    "Binary",
    "ClippedRelative",
    "Encoding",
    "HoPE",
    "Integer",
    "LearnedAbsolute",
    "LearnedBias",
    "LearnedTable",
    "MHRope",
    "NoPE",
    "Normalised",
    "PRope",
    "Rope1D",
    "Rope1DAdjacent",
    "Rope2D",
    "RopeND",
    "Rotation",
    "SelfAttention",
    "SingleSinusoid",
    "Sinusoidal",
    "T5Buckets",
    "expected_square",
]

ENCODINGS: Mapping[str, type[Encoding]] = MappingProxyType(
    {
        encoding.name: encoding
        for encoding in (
            Integer,
            Normalised,
            Binary,
            SingleSinusoid,
            Sinusoidal,
            LearnedAbsolute,
            ClippedRelative,
            T5Buckets,
            Alibi,
            NoPE,
            Rope1D,
            Rope1DAdjacent,
            Rope2D,
            RopeND,
            PRope,
            HoPE,
            MHRope,
        )
    }
)
"""All encoding classes by name. Without arguments, each of them builds an encoding for 48 channels in four heads."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names("mmpos.encodings", {"SelfAttention": "attention"}, extra="all", what="attention")
