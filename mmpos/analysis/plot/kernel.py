"""The attention kernel of a patch: the mean cosine over pairs, from its phase to those of other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.support.checks import IntArray, counted, instance, integer

MAX_TOKENS = 2**16
"""Most tokens of a document whose kernel is computed."""

Cosines = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a patch sees by its position alone: the score of a query and a key whose content is the same in all pairs.

    Args:
        label: what it is drawn under.
        query: row and column of the patch, from 0.
        patches: (height, width) towards the patches of its own frame; 1 at the query.
        before: (tokens,) towards the run of text before the image, nearest first.
        after: (tokens,) towards the run of text after it, nearest first.
    """

    label: str
    query: tuple[int, int]
    patches: Cosines
    before: Cosines
    after: Cosines


def attention_kernel(
    positions: PositionTable, rotary: Rotary, token: int | None = None, label: str | None = None
) -> Kernel:
    """Σ_j cos((p_query − p_key)[axis of j] · inv_freq[j]) / pairs, from one patch to its image and the text around it.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> placed = place(SegmentTable.from_documents([[Text(2), Grid(3, 3), Text(2)]]))
    >>> found = attention_kernel(placed, Rotary(head_dim=64))
    >>> found.query, bool(np.allclose(found.before, found.after))
    ((1, 1), True)

    Args:
        positions: one document.
        rotary: frequencies and their axes; taken exactly, and without the attention factor.
        token: the patch, as an index into the document; None is the middle of the first image, in its middle frame
            (the later one of two middles).
        label: of the kernel; None is the scheme and, with several axes, the allocation.

    Raises:
        InvalidInputError: more than one document, other axes than rotary's, no image, one that is cut, or a token
            that is no patch.
        LimitExceededError: more than 65,536 tokens.
    """
    instance("positions", positions, PositionTable, "mmpos.place")
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {counted(positions.num_documents, 'document')}, want 1")
    if positions.num_tokens > MAX_TOKENS:
        raise LimitExceededError(f"positions: got {counted(positions.num_tokens, 'token')}, want at most {MAX_TOKENS}")
    if positions.axes != rotary.axes:
        raise InvalidInputError(f"positions: got {counted(positions.axes, 'axis')}, want {rotary.axes} as in rotary")
    token, segment = _query(positions, token)
    height, width = int(positions.height[segment]), int(positions.width[segment])
    frame, index = divmod(token - int(positions.offset[segment]), height * width)
    first = int(positions.offset[segment]) + frame * height * width
    cosines = _cosines(positions.dense(dtype=np.float64), rotary, token)
    before, after = _runs(positions, segment)
    return Kernel(
        _label(positions, rotary) if label is None else label,
        divmod(index, width),
        cosines[first : first + height * width].reshape(height, width),
        cosines[before][::-1],
        cosines[after],
    )


def _query(positions: PositionTable, token: int | None) -> tuple[int, int]:
    """The token and its segment."""
    is_grid = positions.is_grid
    if not is_grid.any():
        raise InvalidInputError("positions: got no image, want one to look from")
    segment = int(is_grid.argmax())
    if token is not None:
        token = integer("token", token, minimum=0, maximum=positions.num_tokens - 1)
        segment = int(np.searchsorted(positions.offset, token, side="right")) - 1
        if not is_grid[segment]:
            raise InvalidInputError(f"token: got {token}, which is text, want a patch of an image")
    first, height, width = (int(row[segment]) for row in (positions.offset, positions.height, positions.width))
    frames, cut = divmod(int(positions.segment_lengths[segment]), height * width)
    if positions.skip[segment] or cut:
        raise InvalidInputError(f"positions: got an image at token {first} that is cut, want a whole one")
    if token is None:
        token = first + (frames // 2 * height + height // 2) * width + width // 2
    return token, segment


def _cosines(ids: npt.NDArray[np.float64], rotary: Rotary, token: int) -> Cosines:
    """(tokens,) means over pairs, from (axes, tokens) ids."""
    difference = (ids[:, [token]] - ids)[rotary.pair_axis]
    means: Cosines = np.cos(difference * rotary.inv_freq_array[:, None]).mean(axis=0)
    return means


def _runs(positions: PositionTable, segment: int) -> tuple[slice, slice]:
    """The tokens of the text segments that touch an image, before and after it."""
    text = ~(positions.is_grid | positions.is_padding)
    first = last = segment
    while first and text[first - 1]:
        first -= 1
    while last + 1 < positions.num_segments and text[last + 1]:
        last += 1
    stops: IntArray = positions.offset + positions.segment_lengths
    here = int(positions.offset[segment]), int(stops[segment])
    return slice(int(positions.offset[first]), here[0]), slice(here[1], int(stops[last]))


def _label(positions: PositionTable, rotary: Rotary) -> str:
    if positions.axes == 1:
        return positions.scheme
    name = rotary.allocation if isinstance(rotary.allocation, str) else "own allocation"
    return f"{positions.scheme}, {name}"
