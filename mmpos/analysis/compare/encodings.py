"""The properties of encodings, and the door to measuring them."""

from __future__ import annotations

from collections.abc import Iterable

from mmpos.analysis.compare import encoded
from mmpos.analysis.compare.finding import Property
from mmpos.analysis.compare.matrix import Matrix, measured
from mmpos.analysis.compare.vectors import Known
from mmpos.encodings import ENCODINGS, Encoding
from mmpos.errors import InvalidInputError
from mmpos.schemes.base import label
from mmpos.support.checks import one_of

__all__ = ["ENCODING_PROPERTIES", "measure_encodings"]

ENCODING_PROPERTIES = (
    Property("axes", "axes", encoded.axes),
    Property("unique", "unique", encoded.unique),
    Property("separation", "separation", encoded.separation),
    Property("bounded", "bounded", encoded.bounded),
    Property("length-independent", "length-independent", encoded.length_independent),
    Property("linear-shift", "linear shift", encoded.linear_shift),
    Property("relative", "relative", encoded.relative),
    Property("extrapolates", "extrapolates", encoded.extrapolates),
    Property("deterministic", "deterministic", encoded.deterministic),
)
"""What is measured of every encoding, in the order of the table."""


def measure_encodings(encodings: Iterable[str | Encoding] | None = None) -> Matrix:
    """Every property of encodings, measured in float64.

    Args:
        encodings: names, which stand for the defaults, or objects such as your own; None is every one of mmpos.

    Raises:
        InvalidInputError: an unknown encoding, none, one twice, or one that is of no kind.
    """
    if encodings is not None and (isinstance(encodings, str) or not isinstance(encodings, Iterable)):
        raise InvalidInputError(f"encodings: got {encodings!r}, want a list of names or Encoding objects")
    found = [_encoding(each) for each in (ENCODINGS if encodings is None else encodings)]
    return measured("encoding", ((label(each), each) for each in found), ENCODING_PROPERTIES)


def _encoding(each: str | Encoding) -> Known:
    made = each if isinstance(each, Encoding) else ENCODINGS[one_of("encoding", each, ENCODINGS)]()
    if not isinstance(made, Known):
        raise InvalidInputError(f"encoding: got {made!r}, want an AdditiveTable, an AttentionBias or a Rotation")
    return made
