"""Allocate position axes and frequencies to channel pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, even, integer

MAX_HEAD_DIM = 2**16
"""Largest head dimension."""

MAX_HEADS = 256
"""Largest number of kv heads with their own axes."""

STILL = -1
"""Axis of a pair or head that is not rotated: its position id is always 0."""


@dataclass(frozen=True)
class PairLayout:
    """Axis and frequency of every pair.

    Args:
        axis: (pairs,) axis whose position multiplies the pair's frequency, or STILL; all zeros if axes are per head.
        rung: (pairs,) index into the frequency ladder of that axis: θ_rung = theta^(−rung/rungs[axis]).
        rungs: (axes,) number of frequencies in the full ladder of each axis.
    """

    axis: tuple[int, ...]
    rung: tuple[int, ...]
    rungs: tuple[int, ...]


def _shared(axis: Sequence[int], axes: int) -> PairLayout:
    """Share one ladder among all axes: pair j has θ_j on any axis, so text is rotated as in RoPE-1D."""
    return PairLayout(tuple(axis), tuple(range(len(axis))), (len(axis),) * axes)


def _interleaved(axes: int, pairs: int) -> PairLayout:
    """Assign pair j to axis j mod axes (HunyuanImage-3.0)."""
    return _shared([j % axes for j in range(pairs)], axes)


def _split(axes: int, pairs: int) -> PairLayout:
    """Split into contiguous blocks of nearly equal size: the first ``pairs % axes`` blocks have one extra pair."""
    return _shared([a for a in range(axes) for _ in range((pairs - a + axes - 1) // axes)], axes)


def _axial(axes: int, pairs: int) -> PairLayout:
    """Assign one block per axis, each with a full ladder of pairs/axes frequencies (vision encoders)."""
    if pairs % axes:
        raise InvalidInputError(f"allocation 'axial': got {pairs} pairs, want a multiple of axes={axes}, or axes_dim")
    return _ladders([pairs // axes] * axes, pairs)


def _ladders(sizes: Sequence[int], pairs: int) -> PairLayout:
    """Assign one block per axis, each with a full ladder of the given size (FLUX, Wan, HunyuanVideo)."""
    return replace(_sections(sizes, pairs), rung=tuple(j for size in sizes for j in range(size)), rungs=tuple(sizes))


def _pixtral(axes: int, pairs: int) -> PairLayout:
    """Assign the even-indexed θ of one ladder to rows, then the odd-indexed ones to columns, as in Pixtral.

    This reorders the pairs.
    """
    if axes != 2:
        raise InvalidInputError(f"axes: got {axes}, want 2 for allocation 'pixtral'")
    if pairs % 2:
        raise InvalidInputError(f"allocation 'pixtral': got {pairs} pairs, want an even number")
    axis = (0,) * (pairs // 2) + (1,) * (pairs // 2)
    return replace(_shared(axis, axes), rung=(*range(0, pairs, 2), *range(1, pairs, 2)))


def _sections(section: Sequence[int], pairs: int) -> PairLayout:
    """Split into contiguous blocks of the given sizes (Qwen2-VL)."""
    return _shared([a for a, count in enumerate(section) for _ in range(count)], len(section))


def _mrope_interleaved(section: Sequence[int], pairs: int) -> PairLayout:
    """Assign pairs 1, 4, … to rows and 2, 5, … to columns up to their sections, and all others to frames (Qwen3-VL)."""
    axis = [0] * pairs
    for a in (1, 2):
        axis[a : 3 * section[a] : 3] = [a] * len(range(a, min(3 * section[a], pairs), 3))
    counts = [axis.count(a) for a in range(3)]
    if counts != list(section):
        raise InvalidInputError(
            f"mrope_section: got {list(section)}, want sizes that interleave over {pairs} pairs, such as {counts}"
        )
    return _shared(axis, 3)


_BY_AXES: Mapping[str, Callable[[int, int], PairLayout]] = MappingProxyType(
    {"interleaved": _interleaved, "split": _split, "axial": _axial, "pixtral": _pixtral}
)
_BY_SECTION: Mapping[str, Callable[[Sequence[int], int], PairLayout]] = MappingProxyType(
    {"sections": _sections, "mrope-interleaved": _mrope_interleaved}
)
HEADS = "heads"
"""Name of the allocation that assigns all pairs of a head to one axis."""

ALLOCATIONS: tuple[str, ...] = (*_BY_AXES, *_BY_SECTION, HEADS)
"""Names of allocations; a sequence with the axis of each pair is also an allocation."""


def allocate(
    allocation: str | Sequence[int],
    axes: int,
    pairs: int,
    section: Sequence[int] | None,
    axes_dim: Sequence[int] | None = None,
    head_axes: Sequence[int] | None = None,
) -> PairLayout:
    """Return the axis and frequency of each pair under an allocation.

    Args:
        allocation: a name in ALLOCATIONS, or a (pairs,) vector with the axis of each pair or STILL.
        axes: number of position axes.
        pairs: number of channel pairs.
        section: (axes,) pairs per axis, only for "sections" and "mrope-interleaved".
        axes_dim: (axes,) channels per axis, only for "axial" and for a vector, whose STILL pairs belong to no axis.
        head_axes: (kv_heads,) axis of each kv head or STILL, only for "heads".

    Raises:
        InvalidInputError: the allocation does not match the pairs and axes.
    """
    if section is not None and (not isinstance(allocation, str) or allocation not in _BY_SECTION):
        raise InvalidInputError(f"mrope_section: got {list(section)}, want None for allocation {allocation!r}")
    if head_axes is not None and allocation != HEADS:
        raise InvalidInputError(f"head_axes: got {list(head_axes)}, want None for allocation {allocation!r}")
    if axes_dim is not None:
        return _axial_by_dim(allocation, axes, pairs, axes_dim)
    if allocation == HEADS:
        return _of_heads(axes, pairs, head_axes or ())
    if not isinstance(allocation, str):
        if len(allocation) != pairs:
            raise InvalidInputError(f"allocation: got {len(allocation)} axes, want one for each of {pairs} pairs")
        _check_axes("allocation", allocation, axes)
        return _shared(allocation, axes)
    if allocation in _BY_AXES:
        if pairs < axes:
            raise InvalidInputError(f"axes: got {axes}, want at most {pairs}, one per pair")
        return _BY_AXES[allocation](axes, pairs)
    if section is None:
        raise InvalidInputError(f"mrope_section: got None, want pairs per axis for allocation {allocation!r}")
    if len(section) != axes or (allocation == "mrope-interleaved" and axes != 3):
        want = 3 if allocation == "mrope-interleaved" else len(section)
        raise InvalidInputError(f"axes: got {axes}, want {want} for allocation {allocation!r}")
    if sum(section) != pairs:
        raise InvalidInputError(f"mrope_section: got {list(section)}, want sizes that sum to {pairs} pairs")
    return _BY_SECTION[allocation](section, pairs)


def _axial_by_dim(allocation: str | Sequence[int], axes: int, pairs: int, axes_dim: Sequence[int]) -> PairLayout:
    """Lay out one ladder of axes_dim channels per axis, in consecutive blocks or in the order that a vector gives."""
    got = list(axes_dim)
    if isinstance(allocation, str) and allocation != "axial":
        raise InvalidInputError(f"axes_dim: got {got}, want None for allocation {allocation!r}")
    if len(axes_dim) != axes:
        raise InvalidInputError(f"axes_dim: got {got}, want {axes} channel counts, one per axis")
    for axis, channels in enumerate(axes_dim):
        even(f"axes_dim[{axis}]", channels)
    rotated = pairs if isinstance(allocation, str) else sum(axis != STILL for axis in allocation)
    if sum(axes_dim) != 2 * rotated:
        raise InvalidInputError(f"axes_dim: got {got}, want channels that sum to the {2 * rotated} rotated channels")
    layout = _ladders([channels // 2 for channels in axes_dim], pairs)
    if isinstance(allocation, str):
        return layout
    if len(allocation) != pairs or sorted(axis for axis in allocation if axis != STILL) != list(layout.axis):
        raise InvalidInputError(
            f"allocation: got {list(allocation)}, want axes_dim[axis] / 2 pairs of each axis, with axes_dim {got}"
        )
    rungs = [iter(range(count)) for count in layout.rungs]
    return replace(
        layout, axis=tuple(allocation), rung=tuple(0 if axis == STILL else next(rungs[axis]) for axis in allocation)
    )


def _of_heads(axes: int, pairs: int, head_axes: Sequence[int]) -> PairLayout:
    """Assign one axis and the whole ladder to every head (MHRoPE)."""
    if not 1 <= len(head_axes) <= MAX_HEADS:
        got = counted(len(head_axes), "axis")
        raise InvalidInputError(f"head_axes: got {got}, want 1 to {MAX_HEADS}, one per kv head")
    _check_axes("head_axes", head_axes, axes)
    return _shared((0,) * pairs, axes)


def _check_axes(name: str, values: Sequence[int], axes: int) -> None:
    for i, axis in enumerate(values):
        integer(f"{name}[{i}]", axis, minimum=STILL, maximum=axes - 1)


def default_axes(
    allocation: str | Sequence[int],
    section: Sequence[int] | None,
    axes_dim: Sequence[int] | None = None,
    head_axes: Sequence[int] | None = None,
) -> int:
    """Return the number of axes that an allocation implies; 2 if it implies none."""
    per_axis = axes_dim if section is None else section
    if per_axis is not None:
        return len(per_axis)
    vector = allocation if head_axes is None else head_axes
    if isinstance(vector, str):
        return 2
    return max(vector, default=0) + 1
