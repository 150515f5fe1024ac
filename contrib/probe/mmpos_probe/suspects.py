"""Wrong rotations that engines are known to apply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Literal

import numpy as np

from mmpos.errors import MmposError
from mmpos.rotary import NTK, Llama3, Rotary, Scaling, YaRN
from mmpos_probe.words import IntArray

STILL = -1
"""Axis of pairs that are not rotated."""

ALLOCATIONS = ("axial", "interleaved", "mrope-interleaved", "pixtral", "sections", "split")

AXIS_NAMES = {1: ("id",), 2: ("row", "col"), 3: ("frame", "row", "col")}

THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 2e6, 5e6, 8e6, 1e7, 5e7, 1e8, 1e9)
"""Bases of deployed models."""

FACTORS = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 40.0, 64.0)
"""Factors of the scalings of deployed models."""

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Context lengths of deployed models before scaling."""


NO_SECTIONS: dict[str, Any] = {"mrope_section": None, "axes_dim": None}
"""Arguments of Rotary that an explicit allocation excludes."""

NO_THETA: dict[str, Any] = {"theta": 1e4, "scaling": None}
"""Arguments of Rotary that explicit frequencies exclude."""


@dataclass(frozen=True)
class Suspect:
    """A rotation that may have been applied to keys.

    Args:
        cause: how it differs from the intended rotation, in words.
        remedy: how to fix it.
        rotary: the rotation.
        kind: the cause without numbers that were fitted to keys; empty if the cause has none.
        sign: −1 if pairs rotate backwards.
        cast: a dtype and the values that are cast to it, such as "bfloat16 angles"; empty if none are.
    """

    cause: str
    remedy: str
    rotary: Rotary
    kind: str = ""
    sign: int = 1
    cast: str = ""


@lru_cache(maxsize=8)  # layers and heads share a rotation, and the suspects' exact frequencies are slow to compute
def suspects(meant: Rotary) -> tuple[Suspect, ...]:
    """Return the known wrong rotations."""
    return tuple(_suspects(meant))


def _suspects(meant: Rotary) -> Iterator[Suspect]:
    other: Literal["half", "adjacent"] = "adjacent" if meant.pairing == "half" else "half"
    remedy = f"pair channels as in {meant.pairing!r}"
    yield Suspect(f"pairs are {other!r}, not {meant.pairing!r}", remedy, replace(meant, pairing=other))
    yield from _dims(meant)
    yield from _allocations(meant)
    yield Suspect(
        "pairs rotate backwards", "rotate by the positive angle: x·cos − y·sin, y·cos + x·sin", meant, sign=-1
    )
    for cast in ("bfloat16", "float16"):
        remedy = "compute angles, cos and sin in float32 or by exact turns, and cast them last"
        yield Suspect(f"angles are computed in {cast}", remedy, meant, cast=f"{cast} angles")
        yield Suspect(f"angles are cast to {cast}", remedy, meant, cast=f"{cast} products")
        yield Suspect(f"ids are cast to {cast} before the multiplication", remedy, meant, cast=f"{cast} ids")
        yield Suspect(f"frequencies are stored in {cast}", remedy, meant, cast=f"{cast} frequencies")
    if meant.inv_freq is None and isinstance(meant.theta, float):
        for theta in THETAS:
            if theta != meant.theta:
                cause = f"theta is {theta:,.0f}, not {meant.theta:,.0f}"
                yield from if_valid(cause, "configure the engine with the theta of the config", meant, theta=theta)
                if meant.scaling is not None:
                    yield from if_valid(f"{cause}, and the scaling is missing", "", meant, theta=theta, scaling=None)
        yield from _scalings(meant)


def _scalings(meant: Rotary) -> Iterator[Suspect]:
    """Yield other frequency scalings."""
    mine: Any = meant.scaling
    remedy = "apply the scaling of the config to the frequencies"
    if mine is None:
        for factor in FACTORS:
            others = [NTK(factor), Llama3(factor, 1.0, 4.0, 8192), *(YaRN(factor, length) for length in LENGTHS)]
            for other in others:
                cause = f"the scaling {other.name!r} by {factor:g}{_from(other)} is applied, but none is intended"
                yield from if_valid(cause, "do not scale frequencies: the config has no scaling", meant, scaling=other)
        return
    if isinstance(mine, tuple):  # one for each axis
        return
    yield from if_valid(f"the scaling {mine.name!r} is missing", remedy, meant, scaling=None)
    for field, values in (("factor", FACTORS), ("original_max_position", LENGTHS)):
        own = getattr(mine, field, None)
        for value in values if isinstance(own, int | float) else ():
            if value != own:
                cause = f"{field} of the scaling {mine.name!r} is {value:,g}, not {own:,g}"
                yield from if_valid(cause, remedy, meant, scaling=replace(mine, **{field: value}))
    if isinstance(mine, YaRN):
        scaling = replace(mine, truncate=not mine.truncate)
        cause = f"YaRN's ramp begins and ends {'at' if scaling.truncate else 'between'} whole pairs"
        yield from if_valid(cause, "take YaRN's truncate from the config", meant, scaling=scaling)


def _from(scaling: Scaling) -> str:
    length = getattr(scaling, "original_max_position", None)
    return "" if length is None else f" from {length:,} positions"


def _dims(meant: Rotary) -> Iterator[Suspect]:
    """Yield other numbers of rotated channels, with sections scaled in proportion."""
    for size in sorted({meant.head_dim * quarters // 4 for quarters in range(1, 5)} - {meant.rotary_dim}):
        section = meant.mrope_section and [length * size // meant.rotary_dim for length in meant.mrope_section]
        cause = f"{size} channels of a head are rotated, not {meant.rotary_dim}"
        remedy = f"rotate only the first {meant.rotary_dim} channels of a head"
        yield from if_valid(cause, remedy, meant, rotary_dim=size, mrope_section=section)


_OTHER_AXES = "rotate each pair by the axis in the config, see Rotary.pair_axis"


def of_axes(cause: str, meant: Rotary, axis: IntArray, kind: str = "") -> Iterator[Suspect]:
    """Yield the rotation with the intended frequencies and these axes of pairs."""
    change = {"allocation": axis.tolist(), "inv_freq": meant.inv_freq_array.tolist()} | NO_SECTIONS | NO_THETA
    yield from if_valid(cause, _OTHER_AXES, meant, kind=kind, **change)


def if_valid(cause: str, remedy: str, meant: Rotary, *, kind: str = "", **change: Any) -> Iterator[Suspect]:
    """Yield the suspect with these changes to the intended rotary, if the result is a valid Rotary."""
    try:
        rotary = replace(meant, **change)
    except MmposError:
        return
    yield Suspect(cause, remedy or "configure the engine with the rope parameters of the config", rotary, kind)


def _allocations(meant: Rotary) -> Iterator[Suspect]:
    """Yield other allocations of axes to pairs: named ones, swapped axes, dropped axes."""
    mine = meant.allocation if isinstance(meant.allocation, str) else "a vector"
    section = meant.mrope_section or np.bincount(meant.pair_axis[meant.pair_axis >= 0], minlength=meant.axes).tolist()
    names = AXIS_NAMES.get(meant.axes) or tuple(f"axis {axis}" for axis in range(meant.axes))
    axis = meant.pair_axis
    for name in sorted(ALLOCATIONS, key=lambda name: meant.mrope_section is None or name != "sections"):
        if name != meant.allocation:
            own_section = section if name in ("sections", "mrope-interleaved") else None
            change = NO_SECTIONS | {"allocation": name, "mrope_section": own_section}
            yield from if_valid(f"pairs are allocated as {name!r}, not as {mine!r}", _OTHER_AXES, meant, **change)
    vectors: dict[str, IntArray] = {}
    for a, name in enumerate(names):
        vectors[f"all pairs rotate by axis {a} ({name}): other axes are dropped"] = np.where(axis < 0, axis, a)
        for b, instead in enumerate(names):
            if a != b and meant.axes > 2:
                vectors[f"pairs of axis {a} ({name}) rotate by axis {b} ({instead})"] = np.where(axis == a, b, axis)
    for order in permutations(range(meant.axes)) if meant.axes <= 4 else ():
        if list(order) != sorted(order):
            used = ", ".join(names[a] for a in order)
            swapped = np.array([*order, STILL])[axis]
            vectors[f"axes are swapped: pairs of ({', '.join(names)}) rotate by ({used})"] = swapped
    for a, name in enumerate(names):
        vectors[f"pairs of axis {a} ({name}) are not rotated"] = np.where(axis == a, STILL, axis)
    for cause, vector in vectors.items():
        yield from of_axes(cause, meant, vector)
