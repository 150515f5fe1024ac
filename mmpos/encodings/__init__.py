"""Position encodings for study and comparison: one idea per entry of ENCODINGS, each of them tested in attention.

Shapes used throughout:

    positions      (...,) integers or floats; (n,) queries and (m,) keys; (axes, n) for rotations
    table          (..., dim) float64, added to embeddings
    bias           (num_heads, n, m) float64, added to scores
    x              (n, head_dim) queries or keys of one head; (n, heads, head_dim) if axes differ between heads
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from mmpos.encodings.base import HEAD_DIM, AdditiveTable, AttentionBias, Encoding, LearnedBias
from mmpos.encodings.biases import Alibi, ClippedRelative, NoPE, T5Buckets
from mmpos.encodings.rotation import Rotation
from mmpos.encodings.tables import Binary, Integer, LearnedAbsolute, Normalised, SingleSinusoid, Sinusoidal
from mmpos.rotary import PRoPE, Rotary
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
    "Integer",
    "LearnedAbsolute",
    "LearnedBias",
    "NoPE",
    "Normalised",
    "Rotation",
    "SelfAttention",
    "SingleSinusoid",
    "Sinusoidal",
    "T5Buckets",
]

ENCODINGS: Mapping[str, Callable[[], Encoding]] = MappingProxyType(
    {
        "integer": Integer,
        "normalised": Normalised,
        "binary": Binary,
        "single-sinusoid": SingleSinusoid,
        "sinusoidal": Sinusoidal,
        "learned-absolute": LearnedAbsolute,
        "clipped-relative": ClippedRelative,
        "t5-buckets": T5Buckets,
        "alibi": Alibi,
        "nope": NoPE,
        "rope-1d": lambda: Rotation(Rotary(HEAD_DIM, axes=1)),
        "rope-1d-adjacent": lambda: Rotation(Rotary(HEAD_DIM, axes=1, pairing="adjacent")),
        "rope-2d": lambda: Rotation(Rotary(HEAD_DIM, axes=2, allocation="axial", pairing="adjacent")),
        "rope-nd": lambda: Rotation(Rotary(HEAD_DIM, axes=3, allocation="axial", pairing="adjacent")),
        "p-rope": lambda: Rotation(Rotary(HEAD_DIM, axes=1, scaling=PRoPE(0.5))),
        "hope": lambda: Rotation(Rotary(HEAD_DIM, axes=3, allocation=[1, 2, 1, 2, -1, -1])),
        "mhrope": lambda: Rotation(Rotary(HEAD_DIM, allocation="heads", head_axes=(0, 0, 1, 2))),
    }
)
"""Functions that build each encoding, for 48 channels in four heads; rope-2d and rope-nd pair adjacent channels."""

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names("mmpos.encodings", {"SelfAttention": "attention"}, extra="all", what="attention")
