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
"""The kinds of encodings with measured properties."""


def vectors(encoding: Known, positions: npt.ArrayLike) -> Float64Array:
    """Return the vector for each position.

    The vectors of a table are its rows. The vector of a rotation is a rotated vector of ones (for every head, if heads
    have their own axes). The vector of a bias holds the biases of all heads for a query at the position and a key at 0.

    Args:
        encoding: an encoding of any of the three kinds.
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
    """Return the positions 0, 1, …, 255, or fewer if the encoding ends earlier."""

    def refused(last: int) -> bool:
        try:
            vectors(encoding, np.array([last]))
        except InvalidInputError:
            return True
        return False

    return np.arange(bisect_left(range(_MOST_POSITIONS), True, key=refused))


_MOST_POSITIONS = 256
_TOLERANCE = 1e-9


def axes(encoding: Known) -> PropertyValue:
    """Count the numbers in a position: more than one if images and videos have axes of their own."""
    return PropertyValue(encoding.axes if isinstance(encoding, Rotation) else 1)


def unique(encoding: Known) -> PropertyValue:
    """Check that no two of the first positions (about 256 over all axes) have the same vector.

    Vectors count as the same if they differ by at most 1e-9 of the largest distance between any two. For a bias: no two
    of 256 keys, the query's own and those before it, have the same bias.
    """
    share, (p, q) = _nearest(encoding)
    if share > _TOLERANCE:
        return PropertyValue(True)
    if isinstance(encoding, AttentionBias):
        return PropertyValue(False, f"keys {p} and {q} before a query have the same bias")
    return PropertyValue(False, f"positions {p} and {q} have the same vector")


def separation(encoding: Known) -> PropertyValue:
    """Compute the smallest distance between two of these vectors, as a fraction of the largest distance."""
    return PropertyValue(_nearest(encoding)[0])


def _nearest(encoding: Known) -> tuple[float, tuple[str, str]]:
    """Return the smallest distance between two positions' vectors as a fraction of the largest, and the positions."""
    count = encoding.axes if isinstance(encoding, Rotation) else 1
    places = first_positions(encoding)[None]
    if count > 1:
        places = np.indices((round(_MOST_POSITIONS ** (1 / count)),) * count).reshape(count, -1)
    rows = vectors(encoding, places if count > 1 else places[0])
    distances = np.zeros((len(rows), len(rows)))
    for channel in rows.T:
        np.maximum(distances, np.abs(channel[:, None] - channel), out=distances)
    largest = distances.max()
    np.fill_diagonal(distances, np.inf)
    pair = (places[:, i].tolist() for i in divmod(int(distances.argmin()), len(rows)))
    p, q = (str(tuple(position) if count > 1 else position[0]) for position in pair)
    return float(distances.min() / largest) if largest else 0.0, (p, q)


ENCODING_PROPERTIES = (
    Property("axes", "axes", axes),
    Property("unique", "unique", unique),
    Property("separation", "separation", separation),
)
"""The properties of every encoding, in the order of the table."""


def measure_encodings(encodings: Iterable[str | Encoding] | None = None) -> Matrix:
    """Measure every property of encodings, in float64.

    Args:
        encodings: names, for encodings with default parameters, or objects, including your own; None measures every
            encoding in mmpos.

    Raises:
        InvalidInputError: an encoding is unknown, repeated or of an unsupported kind; or the list is empty.
    """
    if encodings is not None and (isinstance(encodings, str) or not isinstance(encodings, Iterable)):
        raise InvalidInputError(f"encodings: got {encodings!r}, want a list of names or Encoding objects")
    chosen = [_encoding(name) for name in (ENCODINGS if encodings is None else encodings)]
    return measured("encoding", ((label(encoding), encoding) for encoding in chosen), ENCODING_PROPERTIES)


def _encoding(name: str | Encoding) -> Known:
    encoding = name if isinstance(name, Encoding) else ENCODINGS[one_of("encoding", name, ENCODINGS)]()
    if not isinstance(encoding, Known):
        raise InvalidInputError(f"encoding: got {encoding!r}, want an AdditiveTable, an AttentionBias or a Rotation")
    return encoding
