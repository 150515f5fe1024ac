"""Pairwise test designs, which the peer tests share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise_cases(factors: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return a few cases that together contain every pair of values of any two factors, as pytest.param with an id.

    Each case begins with a pair that no case contains yet, and uses for every other factor the value that adds the most
    new pairs. Such a design finds bugs that depend on one setting or on a combination of two. It is the same in every
    run.

    >>> [case.values for case in pairwise_cases({"a": "xy", "b": (1, 2), "c": (True, False)})]
    [('x', 1, True), ('x', 2, False), ('y', 1, False), ('y', 2, True)]

    Args:
        factors: maps the name of each parameter to its values.
    """
    values = list(factors.values())
    return [
        pytest.param(*(values[factor][i] for factor, i in enumerate(case)), id="-".join(map(str, case)))
        for case in _covering([len(choices) for choices in values])
    ]


def _covering(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield cases as value indices, one per factor."""
    left = {
        (a, i, b, j) for a, b in combinations(range(len(sizes)), 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    while left:
        a, i, b, j = min(left)
        case = {a: i, b: j}
        for factor in range(len(sizes)):
            if factor not in case:
                gains = [
                    sum(_pair(factor, value, *other) in left for other in case.items())
                    for value in range(sizes[factor])
                ]
                case[factor] = gains.index(max(gains))
        left -= {_pair(*first, *second) for first, second in combinations(sorted(case.items()), 2)}
        yield tuple(case[factor] for factor in range(len(sizes)))


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)
