"""Mistakes of number formats: fractions cut off, floats with too few bits, integers with too few."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess, Ids


def cut_fractions(case: Case) -> Iterator[Guess]:
    """Integers in place of fractions."""
    if not case.positions.fractional:
        return
    yield Guess("fractions are cut off, as .long() and .astype(int) do", np.trunc(case.want))
    yield Guess("fractions are rounded down, as floor and // do", np.floor(case.want))
    yield Guess("fractions are rounded to integers, halves to the even one, as round does", np.rint(case.want))
    yield Guess("fractions are rounded to integers, halves up", np.floor(case.want + 0.5))
    yield Guess("fractions are rounded up", np.ceil(case.want))
    yield Guess("ids are twice as large, as if to have no halves", 2 * case.want)


def low_precision(case: Case) -> Iterator[Guess]:
    """Ids that went through a float with too few bits."""
    with np.errstate(over="ignore"):
        forms: dict[str, Ids] = {
            "float16": case.want.astype(np.float16).astype(np.float64),
            "bfloat16": bfloat16(case.want),
            "float32": case.want.astype(np.float32).astype(np.float64),
        }
    for name, ids in forms.items():
        error = np.abs(ids - case.want).max(initial=0)
        yield Guess(f"ids are rounded to {name}, by up to {error:.3g}", ids)


def narrow_integers(case: Case) -> Iterator[Guess]:
    """Integers that wrapped around, ids or the numerators they were computed from."""
    whole = case.want.astype(np.int64)
    for kind in (np.int16, np.uint16, np.int8, np.uint8):
        name = np.dtype(kind).name
        yield Guess(f"ids wrap around in {name}", whole.astype(kind))
    if case.positions.fractional:
        numerators, denominators = case.positions.rationals()
        yield Guess("numerators wrap around in int32", numerators.astype(np.int32) / denominators)


def bfloat16(ids: Ids) -> Ids:
    """Ids rounded to bfloat16, halves to the even one: float32 with its last 16 bits rounded away."""
    bits = ids.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
