"""How many ids an image consumes under each scheme, by placing images of growing size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import UnsupportedError
from mmpos.positions.place import ids_consumed
from mmpos.schemes import SCHEMES, Scheme, get_scheme
from mmpos.segments.kinds import Grid
from mmpos.support.checks import IntArray, first_bad, int_array

__all__ = ["Growth", "id_growth"]

# Between the powers of two lie odd and even sides, which rope-tie-lcm tells apart.
_SIDES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)


@dataclass(frozen=True, eq=False)
class Growth:
    """The ids that one image consumes: by how much text goes on from before it to after it.

    Args:
        schemes: their names, with the parameters that are not the defaults.
        sides: (sizes,) n, of squares n×n and strips 1×n² of as many patches.
        squares: (schemes, sizes) ids that n×n consumes.
        strips: (schemes, sizes) ids that 1×n² consumes.
    """

    schemes: tuple[str, ...]
    sides: IntArray
    squares: IntArray
    strips: IntArray

    @property
    def patches(self) -> IntArray:
        """(sizes,) patches of an image."""
        return self.sides**2

    @property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the schemes, those that consume the same for every image together."""
        groups: dict[bytes, list[int]] = {}
        for i in range(len(self.schemes)):
            groups.setdefault(self.squares[i].tobytes() + self.strips[i].tobytes(), []).append(i)
        return tuple(map(tuple, groups.values()))


def id_growth(schemes: Sequence[str | Scheme] | None = None, sides: npt.ArrayLike = _SIDES) -> Growth:
    """The ids that squares and strips consume under each scheme.

    >>> id_growth(["rope-tie", "mrope"], [2, 24]).squares.tolist()
    [[8, 624], [2, 24]]

    Args:
        schemes: names or objects; None is every scheme that has a next position.
        sides: (sizes,) sides of the squares, 1 to 1024.

    Raises:
        InvalidInputError: unknown scheme, or a side outside the bounds.
        UnsupportedError: a scheme without a next position.
    """
    lengths = int_array("sides", sides, (None,))
    first_bad("sides", lengths, minimum=1, maximum=1024)
    chosen = [get_scheme(scheme) for scheme in (SCHEMES if schemes is None else schemes)]
    squares = [Grid(side, side) for side in lengths.tolist()]
    strips = [Grid(1, side * side) for side in lengths.tolist()]
    found = []
    for scheme in chosen:
        try:
            found.append((scheme.label, *(ids_consumed(scheme, images) for images in (squares, strips))))
        except UnsupportedError:
            if schemes is not None:
                raise
    names, of_squares, of_strips = zip(*found, strict=True)
    return Growth(tuple(names), lengths, np.stack(of_squares), np.stack(of_strips))
