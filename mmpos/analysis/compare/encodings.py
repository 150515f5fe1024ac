"""The properties of encodings, and the function that measures them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mmpos.analysis.compare.matrix import Matrix, Property, PropertyValue, measured
from mmpos.encodings import ENCODINGS, AdditiveTable, AttentionBias, Encoding, Rotation
from mmpos.errors import InvalidInputError
from mmpos.schemes.base import label
from mmpos.support.checks import IntArray, one_of

Float64Array = npt.NDArray[np.float64]
Known = AdditiveTable | AttentionBias | Rotation
"""The kinds of encodings."""


def vectors(encoding: Known, positions: npt.ArrayLike) -> Float64Array:
    """Give the vector of each position: rows of a table, a vector of ones that was turned (by all heads where they have
    axes of their own), or the biases of all heads for a query at the position and a key at 0.

    Args:
        encoding: of any kind.
        positions: (n,); (axes, n) for rotations with several axes.

    Returns:
        (n, channels).
    """
    if isinstance(encoding, AdditiveTable):
        return encoding.table(positions)
    if isinstance(encoding, Rotation):
        count = np.shape(positions)[-1]
        return encoding.rotate(np.ones((count, *encoding.shape)), positions).reshape(count, -1)
    return encoding.bias(positions, [0])[..., 0].T


def first_positions(encoding: Known) -> IntArray:
    """(n,) 0, 1, …, 255, or as many as the encoding has."""

    def refused(last: int) -> bool:
        try:
            vectors(encoding, np.array([last]))
        except InvalidInputError:
            return True
        return False

    return np.arange(bisect_left(range(_FIRST), True, key=refused))


_FIRST = 256
_TOLERANCE = 1e-9


def axes(encoding: Known) -> PropertyValue:
    """The numbers in a position: more than one where pictures and videos have a place of their own."""
    return PropertyValue(encoding.axes if isinstance(encoding, Rotation) else 1)


def unique(encoding: Known) -> PropertyValue:
    """No two of about 256 positions, the first ones on every axis, have the same vector, up to 1e-9 of the largest
    distance between two.

    Of a bias: a query tells any two of 256 keys apart, its own and those before it.
    """
    share, (p, q) = _nearest(encoding)
    if share > _TOLERANCE:
        return PropertyValue(True)
    what = "keys {} and {} before a query have the same bias" if isinstance(encoding, AttentionBias) else "{} is as {}"
    return PropertyValue(False, what.format(p, q))


def separation(encoding: Known) -> PropertyValue:
    """Distance of the two nearest of the same positions, as a share of the two farthest."""
    return PropertyValue(_nearest(encoding)[0])


def _nearest(encoding: Known) -> tuple[float, tuple[str, str]]:
    """The distance of the two nearest positions as a share of that of the two farthest, and which two they are."""
    count = encoding.axes if isinstance(encoding, Rotation) else 1
    places = first_positions(encoding)[None]
    if count > 1:
        places = np.indices((round(_FIRST ** (1 / count)),) * count).reshape(count, -1)
    rows = vectors(encoding, places if count > 1 else places[0])
    distances = np.zeros((len(rows), len(rows)))
    for channel in rows.T:
        np.maximum(distances, np.abs(channel[:, None] - channel), out=distances)
    largest = distances.max()
    np.fill_diagonal(distances, np.inf)
    p, q = (", ".join(map(str, places[:, i].tolist())) for i in divmod(int(distances.argmin()), len(rows)))
    return float(distances.min() / largest) if largest else 0.0, (p, q)


ENCODING_PROPERTIES = (
    Property("axes", "axes", axes),
    Property("unique", "unique", unique),
    Property("separation", "separation", separation),
)
"""The properties of every encoding, in the order of the table."""


def measure_encodings(encodings: Iterable[str | Encoding] | None = None) -> Matrix:
    """Every property of encodings, measured in float64.

    Args:
        encodings: names, which stand for the defaults, or objects such as your own; None is every one of mmpos.

    Raises:
        InvalidInputError: an unknown encoding, none, one twice, or one that is of no kind.
    """
    if encodings is not None and (isinstance(encodings, str) or not isinstance(encodings, Iterable)):
        raise InvalidInputError(f"encodings: got {encodings!r}, want a list of names or Encoding objects")
    chosen = [_encoding(each) for each in (ENCODINGS if encodings is None else encodings)]
    return measured("encoding", ((label(each), each) for each in chosen), ENCODING_PROPERTIES)


def _encoding(each: str | Encoding) -> Known:
    made = each if isinstance(each, Encoding) else ENCODINGS[one_of("encoding", each, ENCODINGS)]()
    if not isinstance(made, Known):
        raise InvalidInputError(f"encoding: got {made!r}, want an AdditiveTable, an AttentionBias or a Rotation")
    return made
