"""How attention can know positions: encodings one idea per file, in the order in which one would find them.

Shapes used throughout:
    positions      (...,) integers or floats; (n,) queries and (m,) keys; (axes, n) for rotations
    table          (..., dim) float64, added to embeddings
    bias           (num_heads, n, m) float64, added to scores
    x              (n, head_dim) queries or keys of one head
"""

from collections.abc import Mapping
from types import MappingProxyType

from mmpos.encodings.base import AdditiveTable, AttentionBias, Encoding, Rotation
from mmpos.encodings.integer import Integer
from mmpos.encodings.rope import Rope1D, Rope1DAdjacent

__all__ = [
    "ENCODINGS",
    "AdditiveTable",
    "AttentionBias",
    "Encoding",
    "Integer",
    "Rope1D",
    "Rope1DAdjacent",
    "Rotation",
]

ENCODINGS: Mapping[str, type[Encoding]] = MappingProxyType(
    {encoding.name: encoding for encoding in (Integer, Rope1D, Rope1DAdjacent)}
)
"""Every encoding by its name; called without arguments, one for 48 channels in four heads."""
