"""The properties of encodings, and the function that measures them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import Field, fields, is_dataclass

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


def first_positions(encoding: Known, most: int) -> IntArray:
    """(n,) 0, 1, …, as many as asked for, or as the encoding has."""

    def refused(last: int) -> bool:
        try:
            vectors(encoding, np.array([last]))
        except InvalidInputError:
            return True
        return False

    return np.arange(bisect_left(range(most), True, key=refused))


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


def scores(encoding: Known, positions: IntArray) -> Float64Array:
    """Give the score of each pair of positions: the products of rows of a table, the score of one query and one key
    that were turned, or the bias.

    Args:
        encoding: of any kind.
        positions: (n,).

    Returns:
        (heads, n, n), one head where the encoding knows of none.
    """
    if isinstance(encoding, AdditiveTable):
        rows = encoding.table(positions)
        return (rows @ rows.T)[None]
    if isinstance(encoding, Rotation):
        # One query and one key, which are nothing special.
        q, k = np.random.default_rng(0).standard_normal((2, 1, *encoding.shape)).repeat(len(positions), axis=1)
        q, k = (encoding.rotate(x, positions).reshape(len(positions), -1, x.shape[-1]) for x in (q, k))
        return np.einsum("qhd,khd->hqk", q, k)
    return encoding.bias(positions, positions)


_FIRST = 256
_FAR = [2**k for k in range(9, 21)]
_SHIFTS = (1, 7, 100)
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


def bounded(encoding: Known) -> PropertyValue:
    """No number of a far position, up to 2^20, is more than twice the largest of the first 64 positions."""
    limit = 2 * np.abs(vectors(encoding, first_positions(encoding, 64))).max()
    for p in _FAR:
        try:
            largest = np.abs(vectors(encoding, np.array([p]))).max()
        except InvalidInputError:
            break
        if largest > limit:
            return PropertyValue(False, f"{p} has {largest:.4g}, the first 64 positions at most {limit / 2:.4g}")
    return PropertyValue(True)


def length_independent(encoding: Known) -> PropertyValue:
    """A position is encoded alike in a sequence of 16 tokens and in one of 256."""
    positions = first_positions(encoding, _FIRST)
    short, long = vectors(encoding, positions[:16]), vectors(encoding, positions)[:16]
    differs = (np.abs(short - long) > _TOLERANCE * np.abs(long).max(initial=1)).any(axis=1)
    if not differs.any():
        return PropertyValue(True)
    p = int(differs.argmax())
    among = f"{short[p, 0]:.4g} among {len(short)} positions and {long[p, 0]:.4g} among {len(positions)}"
    return PropertyValue(False, f"{p} has {among}")


def linear_shift(encoding: Known) -> PropertyValue:
    """One matrix M_k and one vector b_k take every position to the one k further, PE(p + k) = M_k·PE(p) + b_k: by
    least squares over the first 256 positions, or more where there are more channels, to 1e-9 of the largest number.
    """
    if isinstance(encoding, AttentionBias):
        return PropertyValue(None, "a bias belongs to two positions: there is no vector to shift")
    channels = vectors(encoding, [0]).shape[1]
    rows = vectors(encoding, first_positions(encoding, max(_FIRST, 4 * channels)))
    shifts = [k for k in _SHIFTS if len(rows) - k >= 2 * (channels + 1)]
    if not shifts:
        return PropertyValue(
            None, f"{len(rows)} positions are too few to tell: a matrix of {channels} channels fits any"
        )
    kept = len(rows) - shifts[-1]
    known = np.column_stack([rows[:kept], np.ones(kept)])
    wanted = np.stack([rows[k : k + kept] for k in shifts], axis=1)
    fitted = known @ np.linalg.lstsq(known, wanted.reshape(kept, -1))[0]
    errors = np.abs(fitted.reshape(wanted.shape) - wanted).max(axis=(0, 2)) / np.abs(rows).max()
    for k, error in zip(shifts, errors.tolist(), strict=True):
        if error > _TOLERANCE:
            return PropertyValue(False, f"k = {k}: the best matrix is off by {error:.2g} of the largest number")
    return PropertyValue(True)


def relative(encoding: Known) -> PropertyValue:
    """The effect of two positions on attention stays, to 1e-9 of the most, when both are raised by the same k: the
    product of their rows of a table, the bias, or the score of a query and a key that were turned.
    """
    positions = first_positions(encoding, 32 + _SHIFTS[-1])
    for k in _SHIFTS:
        near, far = (scores(encoding, moved) for moved in (positions[:-k][:32], positions[k:][:32]))
        differs = (np.abs(near - far) > _TOLERANCE * np.abs(near).max()).any(axis=0)
        if differs.any():
            p, q = np.argwhere(differs)[0].tolist()
            moved = f"{p + k} and {q + k} give {far[0, p, q]:.4g}"
            return PropertyValue(False, f"{p} and {q} give {near[0, p, q]:.4g}, {moved}")
    return PropertyValue(True)


def extrapolates(encoding: Known) -> PropertyValue:
    """There is an encoding for positions up to 2^20. Whether a model is any good where it was not trained is another
    question.
    """
    for p in _FAR:
        try:
            vectors(encoding, np.array([p]))
        except InvalidInputError as error:
            return PropertyValue(False, str(error))
    return PropertyValue(True)


def deterministic(encoding: Known) -> PropertyValue:
    """All follows from a formula: there are no weights to learn."""
    known: tuple[Field[object], ...] = fields(encoding) if is_dataclass(encoding) else ()
    for field in known:
        value = getattr(encoding, field.name)
        if isinstance(value, np.ndarray):
            return PropertyValue(False, f"{field.name}: {'×'.join(map(str, value.shape))} numbers to learn")
    return PropertyValue(True)


def _nearest(encoding: Known) -> tuple[float, tuple[str, str]]:
    """The distance of the two nearest positions as a share of that of the two farthest, and which two they are."""
    count = encoding.axes if isinstance(encoding, Rotation) else 1
    places = np.indices((round(_FIRST ** (1 / count)),) * count).reshape(count, -1)
    if count == 1:
        places = places[:, : len(first_positions(encoding, _FIRST))]
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
    Property("bounded", "bounded", bounded),
    Property("length-independent", "length-independent", length_independent),
    Property("linear-shift", "linear shift", linear_shift),
    Property("relative", "relative", relative),
    Property("extrapolates", "extrapolates", extrapolates),
    Property("deterministic", "deterministic", deterministic),
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
